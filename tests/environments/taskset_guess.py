"""A taskset for verifiers v1 with its own multi-turn environment and an infinite number of tasks."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    below: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def replies(self, trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt=f"Game {number}: a digit?", below=10), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        secret = random.randrange(task.data.below)
        found = 0.0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and not found:
                if segment.last_reply == str(secret):
                    found = 1.0
                    break
                segment = await talk.turn("no")
        talk.trace.record_reward("found", found)
