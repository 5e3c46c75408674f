"""A taskset for verifiers v1: one answer, a reward and a metric."""

import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]


class ReverseData(vf.TaskData):
    answer: str


class ReverseConfig(vf.TaskConfig):
    broken: bool = False


class ReverseTask(vf.Task[ReverseData, vf.State, ReverseConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        if self.config.broken:
            raise KeyError("no key for the judge")
        return 2.0 * (trace.last_reply == self.data.answer)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class SettingsConfig(vf.TasksetConfig):
    words: int = 40
    task: ReverseConfig = ReverseConfig()


class ReverseTaskset(vf.Taskset[ReverseTask, SettingsConfig]):
    def load(self):
        for number in range(self.config.words):
            word = f"word{number}"
            data = ReverseData(prompt=word, system_prompt="Reverse it.", answer=word[::-1])
            yield ReverseTask(data, self.config.task)
