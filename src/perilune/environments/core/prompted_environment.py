"""Wraps an environment to prompt a pretrained model as in the `prompting` section.

A system prompt and examples come before a task's own messages, one sentence asks for the answer format, and
the environment scores only the answer that was found in that format.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from perilune.environments.core.answer_format import FORMATS
from perilune.environments.core.multi_turn import score_by_replay
from perilune.environments.core.prompting import PROMPTING_KEY, Example, PromptBuilder, PromptingSettings
from perilune.environments.core.protocol import (
    Environment,
    Failure,
    Message,
    Observation,
    Outcome,
    Score,
    Session,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.reference_answer import ReferenceAnswer, expected_answer
from perilune.environments.core.replay import replay_conversation
from perilune.environments.core.single_turn import SingleTurnSession
from perilune.environments.core.wrapping import EnvironmentWrapper
from perilune.errors import RequestError

FORMAT_TERM = "format"  # the reward term: the share of an episode's answers that have the format


class PromptedEnvironment(EnvironmentWrapper):
    """An environment with the prompts of `settings`, which scores the answers that it finds.

    A text without the format, or with an ambiguous answer, never earns a positive reward. The term `format`
    is 1 for an answer in the format; the recipe's `rewards` may weigh it.

    Attributes:
        form: the text before and after an answer; None without a format.

    Raises:
        RequestError: if the settings contradict each other or the environment.
    """

    def __init__(self, environment: Environment, settings: PromptingSettings) -> None:
        super().__init__(environment)
        self.players = getattr(environment, "players", 1)
        self.max_turns = getattr(environment, "max_turns", 1)
        self.prompting = settings
        self.stop_texts = settings.stop
        self._format = None if settings.format is None else FORMATS[settings.format]
        default = self._format.instruction if self._format else ""
        instruction = default if settings.instruction is None else settings.instruction
        self._prompt_builder = PromptBuilder(settings, instruction)
        self._instruction_answers = (
            self._format.distinct_answers(instruction) if self._format else frozenset[str]()
        )
        self.form = None if self._format is None else (self._format.before, self._format.after)
        self._examples = lru_cache(maxsize=4)(self._draw_examples)
        self._check()

    def __getattr__(self, name: str) -> Any:
        """Return further attributes of the environment. Gold answers and opinions have the format."""
        value = super().__getattr__(name)
        return {
            "gold": self._gold,
            "is_right": self._is_right,
            "reference_answer": self._reference_answer,
        }.get(name, value)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield the environment's tasks with their whole prompts, without those that serve as examples."""
        example_ids, messages = self._examples(seed)
        for task in self._environment.tasks(split, seed):
            if task.task_id not in example_ids:
                yield replace(task, prompt=self._prompt_builder.build_prompt(task.prompt, messages))

    def reset(self, task: Task, seed: int) -> Session:
        if self.max_turns == 1:
            return SingleTurnSession(self, task, seed)  # type: ignore[arg-type]  # needs nothing but `score`
        session = self._environment.reset(task, seed)
        return session if self._format is None else _ParsedSession(session, self)

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Score the answers that the transcript marks."""
        judges = getattr(self._environment, "judges", True)
        if self._format is None:
            return self._environment.score(task, transcript) if judges else Score(0.0)
        if self.max_turns > 1:
            return score_by_replay(self, task, transcript)
        answer = self.parse(transcript.text)
        outcome = (
            self._environment.score(task, replace(transcript, text=answer or "")) if judges else Score(0.0)
        )
        if answer is None:
            outcome = _remove_gain(outcome)
        if isinstance(outcome, Failure):
            return outcome
        formed = float(answer is not None and transcript.finished)
        return replace(outcome, terms={**outcome.terms, FORMAT_TERM: formed})

    def expected_answer(self, task: Task) -> str:
        """Return the environment's right answer, without the format."""
        return expected_answer(self._environment, task)

    def parse(self, text: str) -> str | None:
        """Return the answer that a text marks; the text itself without a format."""
        return text if self._format is None else self._format.parse(text, self._instruction_answers)

    def write(self, answer: str) -> str:
        return answer if self._format is None else self._format.write(answer)

    def _gold(self, task: Task) -> Transcript | None:
        gold: Transcript | None = self._environment.gold(task)  # type: ignore[attr-defined]
        if gold is None:
            return None
        *earlier, last = self._map_actions(task, gold, self.write)
        return replace(gold, text=last, earlier=tuple(earlier))

    def _is_right(self, task: Task, transcript: Transcript) -> bool | None:
        if self.parse(transcript.text) is None:  # the last action is always the player's
            return False
        *earlier, last = self._map_actions(
            task, transcript, lambda action: self.parse(action) or "", sends_changed=True
        )
        right: bool | None = self._environment.is_right(  # type: ignore[attr-defined]
            task, replace(transcript, text=last, earlier=tuple(earlier))
        )
        return right

    def _map_actions(
        self, task: Task, transcript: Transcript, change: Callable[[str], str], *, sends_changed: bool = False
    ) -> list[str]:
        """Return the actions, with `change` applied to those of the player. Sub-agents have no format.

        Args:
            sends_changed: whether the environment takes the changed actions, and not the original ones.
        """
        if not transcript.earlier or self._format is None:
            return [change(action) for action in transcript.actions]
        session, actions = self._environment.reset(task, transcript.seed), list[str]()
        try:
            for index, action in enumerate(transcript.earlier):
                due = session.observation.due
                actions.append(action if due and due[0].agent else change(action))
                if due:
                    session.step(actions[-1] if sends_changed else action, transcript.is_finished(index))
        finally:
            session.close()
        return [*actions, change(transcript.text)]

    def _reference_answer(self, task: Task) -> ReferenceAnswer | None:
        answer: ReferenceAnswer | None = self._environment.reference_answer(task)  # type: ignore[attr-defined]
        if answer is None or self._format is None:
            return answer
        before = self._format.before or "The final answer is "
        return replace(answer, lead=f"\n{before}", opens=(before,))

    def _draw_examples(self, seed: int) -> tuple[frozenset[str], tuple[Message, ...]]:
        """Return the ids of the training tasks that serve as examples, and the messages of all examples."""
        shots = self.prompting.few_shot
        if not isinstance(shots, int):
            return frozenset(), tuple(message for shot in shots for message in self._render_example(shot))
        tasks = list(islice(self._environment.tasks("train", seed), shots))
        if len(tasks) < shots:
            raise _refusal(f"{self.id} has {len(tasks)} training tasks", "few_shot", "lower few_shot")
        messages: list[Message] = []
        for task in tasks:
            gold = self._gold(task)
            if gold is None:
                what = f"{self.id} states no right answer to show"
                raise _refusal(what, "few_shot", "write the examples: a list of question and answer")
            try:
                replayed = replay_conversation(self, task, gold)
            except ValueError as error:
                what = f"{self.id} cannot show the right answer to task {task.task_id!r}: {error}"
                raise _refusal(what, "few_shot", "allow more turns, or write the examples") from None
            messages += [*self._prompt_builder.build_question(task.prompt), *replayed[len(task.prompt) :]]
        return frozenset(task.task_id for task in tasks), tuple(messages)

    def _render_example(self, example: Example) -> list[Message]:
        question = self._prompt_builder.build_question([{"role": "user", "content": example.question}])
        return [*question, {"role": "assistant", "content": example.answer}]

    def _check(self) -> None:
        settings = self.prompting
        if self._format is None and settings.instruction:
            raise _refusal(
                "there is no format to ask for", "instruction", "set format, or write it in system"
            )
        if settings.format and (own_format := getattr(self._environment, "own_format", "")):
            what = f"{self.id} has a format of its own here ({own_format}), which a second one would hide"
            raise _refusal(what, "format", "remove format, or choose the environment's original prompts")
        if any(not stop for stop in settings.stop):
            raise _refusal("holds an empty text, which would end every answer", "stop", "remove it")
        if isinstance(settings.few_shot, int):
            if settings.few_shot < 0:
                raise _refusal("must not be negative", "few_shot", "write 0 for none")
            if settings.few_shot and not hasattr(self._environment, "gold"):
                what = f"{self.id} states no right answers to show"
                raise _refusal(what, "few_shot", "write the examples: a list of question and answer")
            return
        for number, shot in enumerate(settings.few_shot):
            if self.parse(shot.answer) is None:
                what = f"this answer does not have the format {settings.format}"
                raise _refusal(what, f"few_shot.{number}.answer", f"end it with {self.write('…')}")


class _ParsedSession:
    """A session of an environment with several turns, which takes the answers that actions mark.

    Attributes:
        observation: the session's observation; when done, with the term `format`.
    """

    def __init__(self, session: Session, environment: PromptedEnvironment) -> None:
        self._session, self._environment = session, environment
        self._formed: list[bool] = []
        self.observation = session.observation

    def step(self, action: str, finished: bool = True) -> Observation:
        """Parse the player's action and apply it; one without the format is empty. Sub-agents have none."""
        (turn, *_) = self.observation.due
        answer = action if turn.agent else self._environment.parse(action)
        if not turn.agent:
            self._formed.append(answer is not None)
        observation = self._session.step(answer or "", finished)
        formed = {FORMAT_TERM: sum(self._formed) / len(self._formed)} if observation.done else {}
        self.observation = replace(observation, terms={**observation.terms, **formed})
        return self.observation

    def close(self) -> None:
        self._session.close()


def _remove_gain(outcome: Outcome) -> Score:
    """Return the outcome of a text without an answer: no positive reward or term, and never a failure."""
    if isinstance(outcome, Failure):
        return Score(0.0)
    terms = {name: min(0.0, value) for name, value in outcome.terms.items()}
    return replace(outcome, reward=min(0.0, outcome.reward), terms=terms)


def _refusal(what: str, key: str, remedy: str) -> RequestError:
    return RequestError(f"{key}: {what}", where=f"environment.{PROMPTING_KEY}.{key}", remedy=remedy)
