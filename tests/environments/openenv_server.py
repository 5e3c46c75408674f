"""An OpenEnv server that runs the package's server code: find a number. Some words make it misbehave.

python openenv_server.py PORT
"""

import os
import random
import sys
import time

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Found(Observation):
    text: str
    tries: int


class HotCold(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="0", step_count=0)

    def reset(self, seed=None, episode_id=None, upto=9, **more):
        self.secret = random.Random(seed).randint(0, upto)
        self._state.step_count = 0
        return Found(text=f"a number from 0 to {upto}?", tries=0, done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        guess, tries = action.guess, self._state.step_count
        if guess == "sleep":
            time.sleep(3)
        if guess == "raise":
            raise RuntimeError("no such luck")
        if guess == "die":
            os._exit(1)
        if guess == "flood":
            return Found(text="x" * (2 << 20), tries=tries, done=False, reward=0.0)
        if guess == "nan":
            return Found(text="", tries=tries, done=False, reward=float("nan"))
        if guess == str(self.secret):
            return Found(text="yes", tries=tries, done=True, reward=1.0 / tries)
        hint = "higher" if guess.isdigit() and int(guess) < self.secret else "lower"
        return Found(text=hint, tries=tries, done=False, reward=-0.01)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = FastAPI()
    HTTPEnvServer(HotCold, Guess, Found, max_concurrent_envs=32).register_routes(app)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws="auto")
