"""An environment for verifiers v0: one turn, a rubric with a weighted and an unweighted function."""

from datasets import Dataset

import verifiers as vf


def load_environment(count=40, broken=False, judge=False, together=False, tools=False):
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n), "info": {"n": n}} for n in range(count)]

    async def right(completion, answer, info):
        if broken:
            raise KeyError("no key for the judge")
        return float(completion[-1]["content"].strip() == answer and info["n"] * 2 == int(answer))

    def short(completion):
        return float(len(completion[-1]["content"]) < 5)

    def best(completions) -> list[float]:
        return [0.0 for _ in completions]

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    rubric = vf.JudgeRubric() if judge else vf.Rubric(funcs=[right, short], weights=[1.0, 0.0])
    if together:
        rubric.add_reward_func(best)
    kind, more = (vf.ToolEnv, {"tools": [add]}) if tools else (vf.SingleTurnEnv, {})
    return kind(dataset=Dataset.from_list(rows), system_prompt="Add.", rubric=rubric, **more)
