"""The environment `search`: questions about a corpus that the policy searches.

In the mode `code` the policy writes Python that calls the search stack, and sees its output. In the mode
`calls` it calls the same functions one at a time, and sees every result.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from perilune.environments.builtin.tool_calls import Answer
from perilune.environments.builtin.tools import SandboxSpec
from perilune.environments.core import registry
from perilune.environments.core.borrowed_tasks import BorrowedTasks
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask
from perilune.environments.core.protocol import Message, Observation, Split, Task
from perilune.environments.core.tasks_section import TasksSection
from perilune.environments.interpreter.interpreter import CodeRunner
from perilune.environments.search import prompts
from perilune.environments.search.agents import CallAgent, CodeAgent
from perilune.environments.search.corpus import Corpus, read_corpus
from perilune.environments.search.embeddings import Embeddings, EmbeddingsSpec
from perilune.environments.search.index import get_index
from perilune.environments.search.stack import SearchStack
from perilune.errors import RequestError
from perilune.frozen import Frozen


class SearchSpec(Frozen):
    """The environment section of a recipe, for `id: search`."""

    id: Literal["search"] = Field("search", description="id of the environment")
    tasks: TasksSection = Field(
        description="section of a single-turn environment with the questions, such as facts or jsonl; it"
        " scores answers"
    )
    corpus: str | None = Field(
        None,
        description="JSON Lines file of documents, relative to the recipe; each row has `text`, and"
        " optionally `id` and `title`. null: the documents of the environment in `tasks`",
    )
    embeddings: EmbeddingsSpec | None = Field(
        None, description="server of embeddings that `rerank` uses; null: `rerank` uses BM25"
    )
    mode: prompts.Mode = Field(
        "code",
        description="code: the policy writes Python, which calls the search functions in the sandbox;"
        " calls: the policy makes one function call per turn, and the result enters its"
        " context",
    )
    prompt: prompts.Style = Field(
        "natural",
        description="compact: a few characters, for tiny models; an answer begins with ';', and any other"
        " text is code or a call",
    )
    turns: int = Field(8, ge=1, le=64, description="maximum turns of an episode")
    searches: int = Field(64, ge=1, le=100_000, description="maximum queries of an episode")
    results: int = Field(20, ge=1, le=1000, description="maximum documents that a query returns")
    calls_per_block: int = Field(
        8,
        ge=1,
        le=1000,
        description="in mode code, maximum calls of search, fan_out and rerank in a block of code",
    )
    sandbox: SandboxSpec = Field(
        default_factory=SandboxSpec,
        description="limits of the policy's code; `output` limits results of calls, too",
    )


class SearchEnvironment(MultiTurn):
    """The score of the final answer. The metric `observed` is the number of characters of all results.

    Raises:
        RequestError: when there are no documents, or both the tasks and the section have them.
    """

    Spec = SearchSpec
    confined = False  # it starts a sandbox, which confines the policy's code
    files: ClassVar = ("corpus",)

    def __init__(self, spec: SearchSpec, sections: Mapping[str, Mapping[str, Any]]) -> None:
        self.spec = spec
        self._borrowed = BorrowedTasks(sections[registry.TASKS])
        self._source: Any = self._borrowed.environment
        if (spec.corpus is None) != hasattr(self._source, "corpus"):
            have = "have no documents" if spec.corpus is None else "have documents of their own"
            raise RequestError(
                f"the tasks of {self._source.id} {have}",
                where="environment.corpus",
                remedy="name a file, or use tasks: {id: facts} without a file",
            )
        self.id = f"search/{self._source.id}"
        self.max_turns = spec.turns
        self.characters = self._borrowed.characters
        self.expected_answer = self._borrowed.expected_answer
        self._embeddings = None if spec.embeddings is None else Embeddings(spec.embeddings)
        self._code = CodeRunner(spec.sandbox.limits(), spec.sandbox.allow_missing)

    def check_files(self) -> None:
        self._borrowed.check_files()
        if self.spec.corpus is not None:
            read_corpus(self.spec.corpus)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield the other environment's tasks, with a description of the search stack as prompt."""
        for task in self._borrowed.environment.tasks(split, seed):
            *earlier, last = task.prompt
            count = len(self._corpus(task).documents)
            text = prompts.render_opening(self.spec.prompt, self.spec.mode, count, last["content"])
            prompt: tuple[Message, ...] = (*earlier, {"role": "user", "content": text})
            yield Task(task.task_id, prompt, {"task": dict(task.data)}, task.difficulty)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        source_task = self._borrowed.source_task(task)
        index = get_index(self._corpus(source_task))
        stack = SearchStack(index, self.spec.results, self.spec.searches, self._embeddings)
        agent = self._make_agent(stack)
        observed, answer = 0, None
        outcome = agent.take((yield ask()))
        for _ in range(self.spec.turns - 1):
            if isinstance(outcome, Answer):
                break
            observed += len(outcome)
            outcome = agent.take((yield ask(outcome, role="tool")))
        if isinstance(outcome, Answer):
            answer = outcome.text
        score = self._borrowed.score_reply(source_task, answer or "")
        strategy = self.spec.mode if stack.searches else "guess"
        counts = {"observed": float(observed), "searches": float(stack.searches), **agent.counts}
        yield Observation(
            rewards=(score.reward,),
            terms=score.terms,
            metrics={**score.metrics, **counts, f"strategy/{strategy}": 1.0},
            done=True,
            truncated=answer is None,
        )

    def close(self) -> None:
        self._code.close()
        self._borrowed.close()

    def _make_agent(self, stack: SearchStack) -> CodeAgent | CallAgent:
        style, max_output_chars = self.spec.prompt, self.spec.sandbox.output
        if self.spec.mode == "calls":
            return CallAgent(stack, style, max_output_chars)
        return CodeAgent(self._code, stack, style, self.spec.calls_per_block, max_output_chars)

    def _corpus(self, task: Task) -> Corpus:
        if self.spec.corpus is not None:
            return read_corpus(self.spec.corpus)
        corpus: Corpus = self._source.corpus(task)
        return corpus
