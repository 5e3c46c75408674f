"""reasoning-gym: about a hundred families of generated puzzles, each with its own scorer.

https://github.com/open-thought/reasoning-gym (Apache-2.0).
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from perilune.environments.adapters import compact
from perilune.environments.adapters.answer_form import is_well_formed
from perilune.environments.adapters.global_random import GlobalRandom
from perilune.environments.adapters.independent_checks import UNRELIABLE_FAMILIES, is_right
from perilune.environments.adapters.reasoning_gym_import import family_names, load_family
from perilune.environments.core.protocol import Failure, Outcome, Score, Split, Task, Transcript
from perilune.environments.core.reference_answer import ReferenceAnswer
from perilune.environments.core.single_turn import SingleTurn
from perilune.environments.core.splits import assign_split
from perilune.errors import RequestError, did_you_mean
from perilune.frozen import Frozen

CHUNK_ITEMS = 1000  # items drawn from one seed of the generator

# Families that iterate over sets, so their tasks depend on the interpreter's hash seed.
HASH_SEEDED_FAMILIES = frozenset(
    {
        "intermediate_integration",
        "codeio",  # moreover, one item in several hundred names a temporary file, which no seed fixes
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
# Families that also draw from Python's global random state.
GLOBALLY_SEEDED_FAMILIES = frozenset({"codeio", "list_functions"})


_EXCLUDED_FAMILIES = frozenset({"composite"})  # mixes families, so the form of an answer would be unknown


class ReasoningGymSpec(Frozen):
    """The environment section of a recipe, for `id: reasoning_gym`."""

    id: Literal["reasoning_gym"] = Field("reasoning_gym", description="id of the environment")
    task: str = Field(
        description="the task family, such as basic_arithmetic; `perilune environments list"
        " reasoning_gym` lists all"
    )
    config: dict[str, Any] = Field(default_factory=dict, description="the family's own settings")
    prompt: Literal["original", "compact"] = Field(
        "original", description="original: the family's wording; compact: a few characters, answer after ';'"
    )
    threshold: float | None = Field(
        1.0,
        gt=0,
        le=1,
        description="lowest raw score that gives reward 1; lower scores give 0. null: the reward is the"
        " raw score",
    )
    strict: bool = Field(
        True,
        description="true: truncated answers and texts without the form of an answer have reward 0, as"
        " have answers that a second check rejects in families whose scorer is known to accept"
        " wrong ones",
    )


class ReasoningGymEnvironment(SingleTurn):
    """One family of reasoning-gym tasks.

    Raises:
        RequestError: if the family or a setting is unknown or invalid, or the family has no compact prompt.
    """

    Spec = ReasoningGymSpec

    def __init__(self, spec: ReasoningGymSpec) -> None:
        self.spec = spec
        self.id = f"reasoning_gym/{spec.task}"
        self.own_format = "after ';'" if spec.prompt == "compact" else ""
        self._dataset = _create_dataset(spec, seed=0)
        if spec.prompt == "compact" and spec.task not in compact.PROMPTS:
            raise RequestError(
                f"'{spec.task}' has no compact prompt",
                where="environment.prompt",
                remedy=f"prompt: original, or one of: {', '.join(sorted(compact.PROMPTS))}",
            )

    @staticmethod
    def families() -> tuple[str, ...]:
        return tuple(sorted(family_names() - _EXCLUDED_FAMILIES))

    def settings(self) -> dict[str, Any]:
        """Return the family's settings and their values in this environment."""
        config = self._dataset.config
        return {name: value for name, value in vars(config).items() if name in _setting_names(type(config))}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct tasks of a split in an order that `seed` determines, while there are new ones.

        Raises:
            RequestError: if the family's generator depends on the interpreter's hash seed and that is random,
                so another process would generate other tasks from the same seed.
        """
        self._require_stable_hashes()
        task_ids: set[str] = set()
        for chunk in range(sys.maxsize):
            before = len(task_ids)
            for entry in self._generate_entries(seed, chunk):
                task = self._make_task(entry)
                if task.task_id in task_ids:
                    continue
                task_ids.add(task.task_id)
                if self._choose_split(entry) == split:
                    yield task
            if len(task_ids) == before:
                return

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Score the final answer with the family's own scorer.

        Terms: "raw", the scorer's value, and "well_formed". A scorer that raises or returns no finite number
        is a Failure of the verifier. If `strict` is on and the family's scorer is known to reward wrong
        answers, an answer that the second opinion rejects has reward 0.
        """
        gold = task.data["answer"]
        answer = self._extract_answer(transcript.text)
        metrics: dict[str, float] = {}
        if self.spec.prompt == "compact" and self.spec.task in compact.ARITHMETIC_FAMILIES:
            metrics = compact.arithmetic_metrics(task.data["compact"], transcript.text)
        formed = answer is not None and is_well_formed(self.spec.task, answer, gold)
        if answer is None or (self.spec.strict and not (formed and transcript.finished)):
            return Score(0.0, {"raw": 0.0, "well_formed": float(formed)}, metrics)
        entry = {
            "question": task.data["question"],
            "answer": gold,
            "metadata": from_json(task.data["metadata"]),
        }
        try:
            raw = float(self._dataset.score_answer(answer, entry))
        except Exception as error:  # a scorer may raise anything on text that a model wrote
            return Failure(
                "verifier", f"{self.spec.task} scorer raised {type(error).__name__}: {error}"[:300]
            )
        if not math.isfinite(raw):
            return Failure("verifier", f"{self.spec.task} scorer returned {raw}")
        if (
            self.spec.strict
            and self.spec.task in UNRELIABLE_FAMILIES
            and self.is_right(task, transcript) is False
        ):
            raw = 0.0
        threshold = self.spec.threshold
        reward = raw if threshold is None else float(raw >= threshold)
        return Score(reward, {"raw": raw, "well_formed": float(formed)}, metrics)

    def gold(self, task: Task) -> Transcript | None:
        """Return the output of a policy that knows the answer; None if the family states no answer."""
        answer = task.data["answer"]
        if answer is None:
            return None
        return Transcript(compact.ANSWER_MARK + answer if self.spec.prompt == "compact" else answer)

    def is_right(self, task: Task, transcript: Transcript) -> bool | None:
        """Return a second opinion for audits, without the family's scorer; None if undecidable."""
        answer = self._extract_answer(transcript.text)
        facts = {"answer": task.data["answer"], "metadata": from_json(task.data["metadata"])}
        return answer is not None and is_right(self.spec.task, answer, facts)

    def reference_answer(self, task: Task) -> ReferenceAnswer | None:
        """Return the answer that the family states; None if it states none."""
        answer = task.data["answer"]
        if answer is None:
            return None
        if self.spec.prompt == "compact":
            return ReferenceAnswer(compact.ANSWER_MARK, (answer,), (compact.ANSWER_MARK,))
        return ReferenceAnswer("\n<answer>", (answer,), ("<answer>", "</think>"))

    def _extract_answer(self, text: str) -> str | None:
        if self.spec.prompt == "compact":
            return compact.read_answer(text)
        return extract_final_answer(text)

    def _generate_entries(self, seed: int, chunk: int) -> Iterator[Mapping[str, Any]]:
        mixed = hashlib.sha256(f"{self.id}/{seed}/{chunk}".encode()).digest()
        chunk_seed = int.from_bytes(mixed[:4], "big") >> 1
        dataset = _create_dataset(self.spec, chunk_seed)
        for index in range(CHUNK_ITEMS):
            with contextlib.redirect_stdout(io.StringIO()):  # a few generators print
                try:
                    if self.spec.task in GLOBALLY_SEEDED_FAMILIES:
                        with GlobalRandom(chunk_seed + index).install():
                            entry = dataset[index]
                    else:
                        entry = dataset[index]
                except IndexError:  # the family has a fixed number of items
                    return
                except Exception as error:  # a generator may raise anything on settings that it accepts
                    what = f"the generator of '{self.spec.task}' raised {type(error).__name__}: {error}"
                    remedy = "change the settings"
                    raise RequestError(what, where="environment.config", remedy=remedy) from error
            if "Integral(" not in (entry["answer"] or ""):  # sympy failed and returned the question
                yield entry

    def _make_task(self, entry: Mapping[str, Any]) -> Task:
        family = self.spec.task
        compact_prompt = compact.PROMPTS[family](entry) if family in compact.PROMPTS else None
        question = entry["question"]
        content = compact_prompt if self.spec.prompt == "compact" and compact_prompt is not None else question
        data = {
            "question": question,
            "answer": entry["answer"],
            "metadata": to_json(entry["metadata"]),
        }
        if compact_prompt is not None:
            data["compact"] = compact_prompt
        return Task(
            task_id=_digest(compact_prompt or question)[:32],
            prompt=({"role": "user", "content": content},),
            data=data,
            difficulty=self._compute_difficulty(entry, compact_prompt),
        )

    def _choose_split(self, entry: Mapping[str, Any]) -> Split:
        family = self.spec.task
        question = compact.PROMPTS[family](entry) if family in compact.PROMPTS else entry["question"]
        return assign_split(_digest("split:" + compact.canonical_question(question)))

    def _compute_difficulty(self, entry: Mapping[str, Any], compact_prompt: str | None) -> float | None:
        if self.spec.task in compact.ARITHMETIC_FAMILIES and compact_prompt is not None:
            difficulty = compact.arithmetic_difficulty(compact_prompt)
            if difficulty is not None:
                return difficulty
        metadata = entry["metadata"]
        ranges = metadata.get("difficulty")
        for name in ranges if isinstance(ranges, Mapping) else ():
            value = metadata.get(name)
            if isinstance(value, (list, tuple, str)):
                return float(len(value))
            if isinstance(value, (int, float)):
                return float(value)
        return None

    def _require_stable_hashes(self) -> None:
        if self.spec.task in HASH_SEEDED_FAMILIES and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise RequestError(
                f"the tasks of '{self.spec.task}' depend on Python's hash seed, which is random here",
                where="environment.task",
                remedy="set the environment variable PYTHONHASHSEED=0",
            )


def extract_final_answer(text: str) -> str:
    """Return the last <answer> tag of a text, else the text after </think>, else the whole text."""
    _, opened, rest = text.rpartition("<answer>")
    if opened:
        return rest.partition("</answer>")[0].strip()
    return text.rpartition("</think>")[2].strip()


def to_json(value: Any) -> Any:
    """Make metadata JSON-serializable without loss: tag tuples, and mappings whose keys are not strings."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"__pairs__": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "__pairs__" in value:
            return {from_json(key): from_json(item) for key, item in value["__pairs__"]}
        if "__tuple__" in value:
            return tuple(from_json(item) for item in value["__tuple__"])
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _load_classes(family: str) -> tuple[type, type]:
    classes = None if family in _EXCLUDED_FAMILIES else load_family(family)
    if classes is None:
        raise RequestError(
            f"reasoning-gym has no task called '{family}'",
            where="environment.task",
            remedy=did_you_mean(family, ReasoningGymEnvironment.families()),
        )
    return classes


def _setting_names(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)} - {"seed", "size"}


def _create_dataset(spec: ReasoningGymSpec, seed: int) -> Any:
    dataset_class, config_class = _load_classes(spec.task)
    valid = _setting_names(config_class)
    for key in spec.config:
        if key not in valid:
            what = f"'{spec.task}' has no setting '{key}'"
            raise RequestError(what, where=f"environment.config.{key}", remedy=did_you_mean(key, valid))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = config_class(**spec.config, seed=seed, size=CHUNK_ITEMS)
            if hasattr(config, "validate"):
                config.validate()
            return dataset_class(config=config)
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, TypeError):
            _require_types_of_defaults(config_class, spec.config)
        raise RequestError(
            f"invalid settings for '{spec.task}': {error}", where="environment.config"
        ) from None


def _require_types_of_defaults(config_class: type, config: Mapping[str, Any]) -> None:
    """Raise the error of the first setting whose default has another type."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    for name, given in config.items():
        default = defaults[name]
        if isinstance(default, int | float) and not isinstance(given, int | float):
            what = f"'{name}' is {given!r} but should be a number, as its default {default!r} is"
            raise RequestError(what, where=f"environment.config.{name}") from None
