"""The environment `recursive`: the context is a variable, which the policy explores with code.

The policy sees the length and the first lines of the context, and the question. Its code may ask the model
itself about parts of the context, each in a context of its own. Source: Zhang, Kraska and Khattab, Recursive
Language Models, arXiv 2512.24601.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from perilune.environments.builtin.tools import SandboxSpec
from perilune.environments.core import registry
from perilune.environments.core.agents import sample
from perilune.environments.core.borrowed_tasks import BorrowedTasks
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.long_context import LongContexts, make_glimpse
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import Message, Observation, Split, Task
from perilune.environments.core.tasks_section import TasksSection
from perilune.environments.interpreter.exploration import Agent, Exploration, ExplorationSettings
from perilune.environments.interpreter.interpreter import CodeRunner
from perilune.errors import RequestError


class RecursiveSpec(ExplorationSettings):
    """The environment section of a recipe, for `id: recursive`."""

    id: Literal["recursive"] = Field("recursive", description="id of the environment")
    tasks: TasksSection = Field(
        description="section of a single-turn environment with long contexts, such as oolong; it scores"
        " answers"
    )
    ask_price: float = Field(0.0, ge=0, description="reward that each ask costs")
    sandbox: SandboxSpec = Field(default_factory=SandboxSpec, description="limits of the policy's code")


class RecursiveEnvironment(MultiTurn):
    """The score of the final answer, minus the price of the asks.

    Raises:
        RequestError: when the tasks have no long contexts.
    """

    Spec = RecursiveSpec
    confined = False  # it starts a sandbox, which confines the policy's code

    def __init__(self, spec: RecursiveSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self.spec = spec
        self._borrowed = BorrowedTasks(sections[registry.TASKS])
        source: Any = self._borrowed.environment
        if not hasattr(source, "context") or not hasattr(source, "question"):
            raise RequestError(
                f"{source.id} has no long contexts",
                where="environment.tasks.id",
                remedy="use oolong, or an environment with the methods context(task) and question(task)",
            )
        self._source: LongContexts = source
        self.id = f"recursive/{source.id}"
        self.max_turns = spec.turns
        self.check_files, self.characters = self._borrowed.check_files, self._borrowed.characters
        self.expected_answer = self._borrowed.expected_answer
        self._code = CodeRunner(spec.sandbox.limits(), spec.sandbox.allow_missing)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        glimpse = getattr(self._source, "glimpse", lambda task: make_glimpse(self._source.context(task)))
        for task in self._borrowed.bare_source_tasks(split, seed):
            text = self.spec.render_opening(glimpse(task), self._source.question(task), self.spec.depth)
            prompt: Message = {"role": "user", "content": text}
            yield Task(task.task_id, (prompt,), {"task": dict(task.data)}, task.difficulty)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        source_task = self._borrowed.source_task(task)
        exploration = Exploration(self._code, self.spec, self.spec.sandbox.output)
        root = Agent("", self._source.context(source_task), self.spec.depth)
        answer = yield from sample(exploration.explore(root, ()))
        score = self._borrowed.score_reply(source_task, answer or "")
        price = self.spec.ask_price * exploration.counts["asks"]
        yield Observation(
            rewards=(score.reward - price,),
            terms={**score.terms, "right": score.reward, "price": -price},
            metrics={**score.metrics, **exploration.counts, f"strategy/{exploration.strategy}": 1.0},
            done=True,
            truncated=answer is None,
        )

    def close(self) -> None:
        self._code.close()
        self._borrowed.close()
