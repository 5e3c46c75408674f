"""An environment for verifiers v0 of several turns: find what chance drew; some tasks are for evaluation."""

import random

from datasets import Dataset

import verifiers as vf


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["secret"] = random.randrange(state["info"]["below"])  # the interpreter's own random numbers
        return state

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and self.said(state) == str(state["secret"])

    def said(self, state):
        return state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages, state, **more):
        said = self.said(state)
        if said == "crash":
            raise vf.InfraError("the box burns")
        higher = said.isdigit() and int(said) < state["secret"]
        return [{"role": "user", "content": "higher" if higher else "lower"}]


def load_environment(below=10):
    def rows(name, count):
        return Dataset.from_list(
            [
                {"question": f"{name} {n}: below {below}?", "answer": "", "info": {"below": below}}
                for n in range(count)
            ]
        )

    async def found(state):
        return 1.0 / len(state["trajectory"]) if state["stop_condition"] == "found" else 0.0

    rubric = vf.Rubric(funcs=[found])
    return Guess(dataset=rows("game", 30), eval_dataset=rows("match", 5), rubric=rubric, max_turns=6)
