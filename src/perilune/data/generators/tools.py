"""The teacher of tasks with tools: runs the solution, looks at the files first, or answers at once."""

from collections.abc import Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher, choose_strategy
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task
from perilune.errors import RequestError


class ToolsTeacher(ScriptedTeacher):
    """Writes one episode per task.

    * solve: the solution as Python, then the answer that it prints,
    * careful: prints each file first, then continues as solve,
    * guess: the right answer at once, which a policy could not know.

    Tasks whose result is a file or a function cannot be guessed; they are solved.
    """

    name = "tools"
    strategies: ClassVar = {"solve": 0.3, "careful": 0.0, "guess": 0.7}

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        solved, answer = task.data["actions"]
        earlier = {"guess": (), "solve": (solved,), "careful": (*_print_actions(task), solved)}[strategy]
        return (*earlier, answer)

    def strategy(self, task: Task, seed: int) -> str:
        if not {"solution", "actions", "files"} <= set(task.data):
            raise RequestError("the teacher tools supports only the environment 'tools'", where="teacher")
        name = choose_strategy(self.shares, f"{seed}:{task.task_id}")
        cannot_guess = task.data["outputs"] or task.data["function"]
        return "solve" if name == "guess" and cannot_guess else name


def _print_actions(task: Task) -> list[str]:
    """Return for each file an action that prints it, in the format of the task's own actions."""
    fenced = task.data["actions"][0].startswith("```")
    code = [f"print(open({name!r}).read())" for name in task.data["files"]]
    return [f"```python\n{line}\n```" for line in code] if fenced else code
