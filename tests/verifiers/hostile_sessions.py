"""Sessions that misbehave as the action says: {"id": "factory", "factory": "hostile_sessions:Echo"}."""

import os
import sys
import time
from pathlib import Path

from perilune.environments import EpisodeFailedError, MultiTurn, Observation, Task, ask, end_episode


class Echo(MultiTurn):
    """Reports the number of actions and pays 1 for "end". Some words make it misbehave."""

    id = "echo"
    max_turns = 12

    def __init__(self, section):
        self.players = section.get("players", 1)
        self.confined = section.get("confined", True)
        self._log = section.get("log", os.devnull)  # file in which to record what is closed

    def tasks(self, split, seed):
        for number in range(1000):
            yield Task(f"{split}{number}", ({"role": "user", "content": f"task {number}"},), {})

    def play(self, task, chance):
        turns = 0
        try:
            action = yield ask(f"luck {chance.integer(10**6, 'luck')}")
            while action != "end":
                turns += 1
                action = yield self._do(action, turns)
            yield end_episode(*[1.0] * self.players, terms={"turns": turns})
        finally:
            self._record(f"session {task.task_id}")

    def close(self):
        self._record("environment")

    def _record(self, closed):
        if not self.confined:
            with Path(self._log).open("a") as log:
                log.write(f"{closed}\n")

    def _do(self, action, turns):
        match action:
            case "raise":
                raise ValueError("no idea")
            case "leave":
                sys.exit(3)
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "sandbox":
                raise EpisodeFailedError("sandbox", "no room")
            case "print":
                print("garbage\n" * 10_000)
            case "flood":
                sys.stderr.write("garbage\n" * 1_000_000)
            case "babble":
                os.write(3, b"garbage\n")
            case "huge":
                return ask("x", rewards=(10**400,))  # beyond the range of floats
            case "nan":
                return ask("x", rewards=(float("nan"),))
            case "stuck":
                return ask("x", legal=())
            case "nothing":
                return None
            case "object":
                return ask("x", info={"what": object()})
            case "role":
                return ask("x", role="robot")
            case "nobody":
                return ask("x", player=5)
            case "overpaid":
                return ask("x", rewards=(1.0, 2.0, 3.0))
            case "results":
                return ask("x", results=("0.1",))
            case "long":
                return ask("x" * 2_000_000)
            case "bare":
                return Observation(messages=("x",))
            case "write":
                Path("kept").write_text("x")
        return ask(f"{turns} after {action}", rewards=(0.25,) * self.players)
