"""The `eval` section of a training stage: held-out evaluation while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import Field, field_validator, model_validator

from perilune.bundle.job import Job
from perilune.bundle.plugin import ChangesEnvironment
from perilune.environments.core.protocol import Environment
from perilune.environments.core.registry import REWARDS, make_environment
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.models.config.decoder_config import DecoderConfig
from perilune.plural import plural
from perilune.tasks.stage.bounds import MAX_SAMPLES, MAX_TASKS
from perilune.tasks.stage.memory_plan import planned_episode_tokens
from perilune.tasks.stage.retention import TrainingSpec
from perilune.tasks.stage.sampling import SamplingSpec

HELDOUT_SET = "heldout"  # the set of the recipe's own environment
DATA_SET = "data"  # the examples that a stage on data holds out
EVAL_PREFIX = "eval/"  # prefix of the metrics

SetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]


class EvaluationSettings(Frozen):
    """Held-out evaluation during training, and the use of its results."""

    every: int = Field(
        10,
        ge=1,
        description="steps between evaluations. The first evaluation is before the first step, and the"
        " last one after the last step",
    )
    tasks: int = Field(
        64,
        ge=0,
        le=MAX_TASKS,
        description="held-out tasks of each set; 0: evaluate only on the data that `validation` holds out",
    )
    samples: int = Field(4, ge=1, le=MAX_SAMPLES, description="answers per task")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens of an answer; default: max_tokens of the stage, or in sft and"
        " preference the default of an evaluate stage",
    )
    sets: Annotated[dict[SetName, dict[str, Any]], ChangesEnvironment()] = Field(
        {},
        description="further sets by name, besides the set `heldout` of the recipe's environment; each"
        " has the keys of the environment that differ",
    )
    best: str | None = Field(
        None,
        pattern=r"^[A-Za-z][\w-]*/(pass@1|reward|loss|accuracy)$",
        description="metric of the best checkpoint: SET/pass@1, SET/reward, data/loss or data/accuracy."
        " Default: pass@1 of the first set, which is `heldout` if the recipe has an"
        " environment; without tasks, data/loss",
    )
    output: Literal["last", "best"] = Field(
        "last",
        description="checkpoint that the stage outputs: that of the last step, or that of the best"
        " evaluation",
    )
    stop_after: int | None = Field(
        None, ge=1, description="stop after this many evaluations in a row without a new best one"
    )

    @field_validator("sets")
    @classmethod
    def _check_set_names(cls, sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if taken := {DATA_SET, "training"} & sets.keys():
            raise ValueError(f"a set cannot be called '{min(taken)}', the name of another curve. Rename it")
        return sets

    def sections(self, environment: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the environment section of each set, with the rewards of the recipe's `environment`."""
        if not self.tasks:
            return {}
        rewards = {REWARDS: environment[REWARDS]} if REWARDS in environment else {}
        sections = {HELDOUT_SET: dict(environment)} if environment else {}
        for name, keys in self.sets.items():
            sections[name] = {**({} if "id" in keys else environment), **rewards, **keys}
        return sections

    def figure(self, environment: Mapping[str, Any]) -> str:
        """Return the metric of the best checkpoint."""
        first = next(iter(self.sections(environment)), None)
        return EVAL_PREFIX + (self.best or (f"{first}/pass@1" if first else f"{DATA_SET}/loss"))

    def steps(self, steps: int) -> list[int]:
        """Return the steps after which a run of `steps` steps is evaluated; 0 is before the first."""
        return [*range(0, steps, self.every), steps]


class EvaluationMemory(TypedDict, total=False):
    """Arguments of `plan_stage_memory` for evaluations: answers, and tokens of the longest episode."""

    samples: int
    max_tokens: int


class EvaluatedSpec(TrainingSpec):
    """Fields of every stage that can be evaluated while it trains."""

    eval: EvaluationSettings | None = Field(
        None, description="evaluate on held-out tasks during training; {} uses the defaults"
    )
    data_figures: ClassVar[tuple[str, ...]] = ()  # names of the metrics of held-out data, such as "loss"

    @model_validator(mode="after")
    def _check_best(self) -> EvaluatedSpec:
        if self.eval is not None and self.keep.best is not None:
            raise ValueError("eval keeps the best checkpoint by eval.best. Remove keep.best")
        return self

    def evaluation_tokens(self, job: Job) -> int:
        """Return the most tokens of a turn in evaluations."""
        assert self.eval is not None
        if self.eval.max_tokens is not None:
            return self.eval.max_tokens
        max_tokens: int | None = getattr(self, "max_tokens", None)
        defaults = SamplingSpec.defaults(job.task, {}, job.model, job.resources.device)
        return max_tokens or int(defaults["max_tokens"].value)

    def evaluation_memory(self, job: Job, config: DecoderConfig) -> EvaluationMemory:
        """Return the memory arguments for evaluations; empty without tasks."""
        sections = {} if self.eval is None else self.eval.sections(job.environment)
        if self.eval is None or not sections:
            return {}
        turn = self.evaluation_tokens(job)
        longest = max(planned_episode_tokens(section, turn, config) for section in sections.values())
        return EvaluationMemory(samples=self.eval.tasks * self.eval.samples, max_tokens=longest)

    def check_evaluation(self, job: Job) -> None:
        """Check that the sets can be evaluated, and that the figure of the best checkpoint is measured.

        Raises:
            RequestError: when a set has several players, or the figure is not measured.
        """
        if self.eval is None:
            return
        figure = self.eval.figure(job.environment).removeprefix(EVAL_PREFIX)
        sections = self.eval.sections(job.environment)
        for section in sections.values():
            make_evaluated_environment(section)
        measured = [f"{name}/{task_figure}" for name in sections for task_figure in ("pass@1", "reward")]
        if getattr(self, "validation", 0):
            measured += [f"{DATA_SET}/{data_figure}" for data_figure in self.data_figures]
        if figure not in measured:
            known = ", ".join(measured)
            needed = "eval.tasks, or validation for held-out data" if self.data_figures else "eval.tasks"
            raise RequestError(
                f"the best checkpoint is chosen by {figure}, but "
                + (f"the evaluations measure {known}" if known else "nothing is held out"),
                where=f"stages.{job.stage}.eval",
                remedy="set eval.best to one of these" if known else f"set {needed}",
            )

    def describe_evaluation(self, job: Job) -> dict[str, str]:
        if self.eval is None:
            return {}
        self.check_evaluation(job)
        settings, sections = self.eval, self.eval.sections(job.environment)
        rounds = len(settings.steps(self.steps))
        parts = [f"every {plural(settings.every, 'step')}, {plural(rounds, 'time')}"]
        if sections:
            answers = rounds * len(sections) * settings.tasks * settings.samples
            parts.append(
                f"{plural(settings.tasks, 'task')} x {settings.samples} of {', '.join(sections)}:"
                f" {plural(answers, 'answer')}"
            )
        figure = settings.figure(job.environment).removeprefix(EVAL_PREFIX)
        parts.append(f"best by {figure}; output: the {settings.output} checkpoint")
        if settings.stop_after:
            parts.append(f"stops after {settings.stop_after} evaluations without a new best")
        return {"evaluation": "; ".join(parts)}


def make_evaluated_environment(section: Mapping[str, Any]) -> Environment:
    """Return the environment of an evaluation set.

    Raises:
        RequestError: when it has several players.
    """
    environment = make_environment(section)
    if getattr(environment, "players", 1) > 1:
        raise RequestError(
            f"{environment.id} has several players, but a pass rate is the result of one player",
            where="eval",
            remedy="set its `opponent`, or evaluate by matches in a selfplay stage",
        )
    return environment
