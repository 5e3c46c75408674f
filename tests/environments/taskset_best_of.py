"""A taskset for verifiers v1 whose environment compares several answers to a task."""

import asyncio

import verifiers.v1 as vf
from taskset_reverse import ReverseTaskset

__all__ = ["BestOfEnv", "ReverseTaskset"]


class BestOfConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class BestOfEnv(vf.Env[BestOfConfig]):
    async def run(self, task, agents):
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(agents.agent.run(task))
