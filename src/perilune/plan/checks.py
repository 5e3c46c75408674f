"""Checks that find impossible or doubtful recipes before any work starts.

Every run counts its held-out tasks. The other checks ask teachers and score answers, which takes seconds, so
only `perilune run --plan` does them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.bundle.plugin import load_plugin
from perilune.bundle.remote.runner import OPTIMIZER
from perilune.environments.core.prompting import PROMPTING_KEY
from perilune.environments.core.protocol import Failure, Observation, Transcript
from perilune.environments.core.registry import REWARDS, make_environment, part_sections, scoring_sections
from perilune.environments.core.rewards import VERIFIER_TERM
from perilune.errors import RequestError
from perilune.extensions import is_file_reference
from perilune.files import canonical_json
from perilune.recipe.schema import MODEL, add_rewards

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.environments.core.protocol import Split, Task
    from perilune.recipe.schema import Recipe, Stage

MAX_COUNTED_TASKS = 4096  # tasks that are made to count those of an environment, which may have no end
TEXT_TASKS = 32  # training tasks whose characters are checked
COMPARED_TASKS = 256  # training tasks whose ids and lengths are compared
PLAYED_TURNS = 1000  # turns after which an episode of empty answers is given up
TEACHER_TASKS = 8  # training tasks that a teacher is tried on


def distinct_environments(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the distinct environment sections of a recipe's jobs; parts of a mixture are sections too."""
    sections: list[dict[str, Any]] = []
    for stage in recipe.stages:
        if environment := stage.environment or recipe.environment:
            for section in scoring_sections(add_rewards(environment, recipe.rewards)):
                sections += [] if section in sections else [dict(section)]
    return sections


def check_texts(recipe: Recipe) -> None:
    """Refuse an environment with a text that the model's tokenizer cannot encode.

    For a new model, the recipe was loaded with a tokenizer for fewer tasks, which cost less.

    Raises:
        RequestError: naming the character, and the task or the row.
    """
    if recipe.model is None or recipe.model.tokenizer in ("bytes", "bpe"):
        return
    from perilune.data.texts import find_missing_character, read_environment_texts
    from perilune.models.text.template_facts import recipe_tokenizer

    lacks = recipe_tokenizer(recipe.model.model_dump()).lacks
    for section in distinct_environments(recipe):
        _require_tokens(find_missing_character(read_environment_texts(section, TEXT_TASKS), lacks))


def _require_tokens(lacking: str | None) -> None:
    from perilune.models.text.tokenizer import ANY_TEXT

    if lacking is not None:
        raise RequestError(f"the model's tokenizer has {lacking}", where="model", remedy=ANY_TEXT)


@cache
def check_weights(path: str) -> None:
    """Compare a pretrained model's tokenizer and the headers of its weight files with its config.json.

    Raises:
        RequestError: naming the file that is missing or broken, or the tensor that does not fit. A model that
            transformers computes is checked when it is loaded.
    """
    from perilune.models.checkpoints.loading import check_headers, load_tokenizer
    from perilune.models.config.reader import UnsupportedModelError
    from perilune.models.decoder import Decoder

    with suppress(UnsupportedModelError):
        check_headers(Decoder, Path(path))
        load_tokenizer(Path(path))


def check_optimizer(recipe: Recipe, stage: Stage) -> None:
    """Refuse `restore_optimizer` if the stage that makes the checkpoint keeps no optimizer state that fits.

    Raises:
        RequestError: as the stage itself would, after the earlier stages have run.
    """
    from perilune.tasks.stage.retention import missing_optimizer_error

    source = stage.consumes.get("checkpoint", MODEL)
    if not stage.spec.get("restore_optimizer"):
        return
    if source == MODEL:
        path = recipe.model.path if recipe.model else None
        if path is None or not (Path(path) / OPTIMIZER).is_dir():
            raise missing_optimizer_error()
        return
    earlier = recipe.stage(source).spec
    if not (earlier.get("keep") or {}).get("optimizer"):
        raise missing_optimizer_error()
    if (earlier.get("lora") is None) != (stage.spec.get("lora") is None):
        raise RequestError(
            "the optimizer state has other parameters: one of the two stages trains an adapter",
            where="restore_optimizer",
            remedy="set lora in both or in neither, or drop restore_optimizer",
        )


def check_heldout(job: Job) -> None:
    """Refuse a stage whose environment has fewer held-out tasks than the stage needs.

    Raises:
        RequestError: naming the key to lower.
    """
    for key, section, count in () if _is_standalone(job) else _heldout_needs(job):
        _require_tasks(key, section, "heldout", count, job.seed)


def _is_standalone(job: Job) -> bool:
    return not job.environment or getattr(load_plugin(job.task), "standalone", False)


def check_job(job: Job) -> list[str]:
    """Return the warnings about the job of a stage.

    Raises:
        RequestError: when an environment has fewer training tasks than the stage needs, the teacher has no
            answer to any of the first tasks, or the environment lacks a reward term.
    """
    if _is_standalone(job):
        return []
    if job.task == "collect":
        _require_tasks("traces", job.environment, "train", job.spec["traces"], job.seed)
    _require_terms(job)
    warnings = _teacher_warnings(job) if job.task == "collect" else _verifier_warnings(job)
    return [*_task_warnings(job), *_format_warnings(job), *warnings, *_auxiliary_warnings(job)]


def _heldout_needs(job: Job) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield the held-out tasks that a stage needs: the key of their number, the environment, the number."""
    from perilune.tasks.stage.evaluation_settings import EvaluationSettings

    spec = job.spec
    key = {"evaluate": "tasks", "calibrate": "tasks", "flywheel": "heldout"}.get(job.task)
    if key is not None:
        yield key, job.environment, spec[key]
    if job.task == "selfplay":
        yield "league.games", job.environment, spec["league"]["games"]
    if spec.get("eval"):
        settings = EvaluationSettings.model_validate(spec["eval"])
        for name, section in settings.sections(job.environment).items():
            yield f"eval.tasks (set {name})", section, settings.tasks


def _require_tasks(key: str, section: Mapping[str, Any], split: Split, count: int, seed: int) -> None:
    """Refuse a stage that needs more tasks than there are, if there are fewer than `MAX_COUNTED_TASKS`."""
    available = _count_tasks(canonical_json(section), split, seed, min(count, MAX_COUNTED_TASKS))
    if available < min(count, MAX_COUNTED_TASKS):
        kind = "held-out" if split == "heldout" else "training"
        raise RequestError(
            f"{make_environment(section).id} has {available} {kind} tasks, and the stage needs {count}",
            where=key,
            remedy=f"set it to {available} at most, or widen the environment's config"
            if available
            else "widen the environment's config",
        )


@cache
def _count_tasks(section: bytes, split: Split, seed: int, most: int) -> int:
    """Count the tasks of an environment, up to `most`. Cached, because stages often share them."""
    return sum(1 for _ in islice(make_environment(json.loads(section)).tasks(split, seed), most))


def _require_terms(job: Job) -> None:
    """Score an empty answer: the verifier then names its terms if it lacks one of `rewards`."""
    rewards = job.environment.get(REWARDS, {})
    if all(name == VERIFIER_TERM or isinstance(term, Mapping) for name, term in rewards.items()):
        return
    reason = find_scoring_failure(canonical_json(job.environment), job.seed, "")
    if reason.startswith("no reward term"):
        raise RequestError(reason, where=REWARDS, remedy="correct the name, or write a function")


def _auxiliary_warnings(job: Job) -> Iterator[str]:
    """Play empty answers: the run stops at its first step if no episode has a term of auxiliary_rewards."""
    from perilune.tasks.rl.auxiliary_rewards import AuxiliaryRewards
    from perilune.verifiers import Scorer
    from perilune.verifiers.sessions import Sessions

    section = job.spec.get("auxiliary_rewards")
    if section is None or job.spec.get("reward_model") or part_sections(job.environment):
        return  # the scores of a reward model are terms, too
    environment, terms = make_environment(job.environment), set[str]()
    with Scorer(job.environment) as scorer:
        sessions = Sessions(scorer.processes, environment)
        (session,) = sessions.open([(next(environment.tasks("train", job.seed)), job.seed)])
        for _ in range(PLAYED_TURNS):
            if not isinstance(result := session.result, Observation) or result.done:
                break
            sessions.step([(session, [""] * len(result.due), True)])
            terms |= getattr(session.result, "terms", {}).keys()
    if isinstance(result, Observation) and result.done and not result.truncated:
        try:
            AuxiliaryRewards.model_validate(section).require_terms(terms)
        except RequestError as error:
            yield f"{error.where}: {error.what}; {error.remedy}"


def _task_warnings(job: Job) -> Iterator[str]:
    """Look for training tasks with the same id, and for a prompt that leaves no room for an answer."""
    environment = make_environment(job.environment)
    tasks = list(islice(environment.tasks("train", job.seed), COMPARED_TASKS))
    repeated = [(count, key) for key, count in Counter(task.task_id for task in tasks).items() if count > 1]
    if repeated:
        count, key = max(repeated)
        yield (
            f"{count} of the first {len(tasks)} training tasks of {environment.id} have the id {key!r}:"
            " give each task an id of its own"
        )
    if tasks and job.model and job.model.get("tokenizer") != "bpe":  # bpe is made from the tasks
        longest = max(tasks, key=lambda task: sum(len(message["content"]) for message in task.prompt))
        yield from _length_warnings(job, longest)


def _length_warnings(job: Job, task: Task) -> Iterator[str]:
    from perilune.models.text.template_facts import recipe_tokenizer
    from perilune.tasks.stage.memory_plan import model_config

    positions = model_config(job).max_position_embeddings
    length = len(recipe_tokenizer(job.model).encode_prompt(task.prompt)) if task.prompt else 0
    if length >= positions:
        yield (
            f"the prompt of task {task.task_id!r} has {length:,} tokens, and the model has {positions:,}"
            " positions for prompt and answer: shorten the prompt"
        )


def _format_warnings(job: Job) -> Iterator[str]:
    """Score right answers in the format of `prompting`, because not every environment can read each one."""
    for section in part_sections(job.environment).values() or (job.environment,):
        if answer_format := (section.get(PROMPTING_KEY) or {}).get("format"):
            count, best = _score_right_answers(canonical_json(section), job.seed)
            if count and best <= 0:
                yield (
                    f"{section['id']} gives no reward to its own right answers to the first {count} tasks in"
                    f" the format {answer_format}: set another environment.{PROMPTING_KEY}.format"
                )


@cache
def _score_right_answers(section: bytes, seed: int) -> tuple[int, float]:
    """Return how many of the first training tasks state a right answer, and the best score of these."""
    from perilune.verifiers import Scorer

    whole = json.loads(section)
    environment = make_environment(whole)
    gold = getattr(environment, "gold", lambda task: None)
    stated = [(task, gold(task)) for task in islice(environment.tasks("train", seed), TEACHER_TASKS)]
    answers = [(task, answer) for task, answer in stated if answer is not None]
    with Scorer(whole) as scorer:
        outcomes = scorer.score(answers)
    rewards = (0.0 if isinstance(outcome, Failure) else outcome.reward for outcome in outcomes)
    return len(answers), max(rewards, default=0.0)


def _verifier_warnings(job: Job) -> Iterator[str]:
    """Score one answer where the user's own code scores: it may raise, or return what is no reward."""
    for section in part_sections(job.environment).values() or (job.environment,):
        functions = any(isinstance(term, Mapping) for term in section.get(REWARDS, {}).values())
        if (functions or is_file_reference(section["id"])) and (
            reason := find_scoring_failure(canonical_json(section), job.seed, "0")
        ):
            yield f"{section['id']} fails to score the answer '0' to its first task: {reason}"


@cache
def find_scoring_failure(section: bytes, seed: int, answer: str) -> str:
    """Return the reason that an answer to the first training task cannot be scored; "" if it can."""
    from perilune.verifiers import Scorer

    whole = json.loads(section)
    with Scorer(whole) as scorer:
        tasks = islice(make_environment(whole).tasks("train", seed), 1)
        outcomes = scorer.score([(task, Transcript(answer)) for task in tasks])
    return "".join(outcome.reason for outcome in outcomes if isinstance(outcome, Failure))


def _teacher_warnings(job: Job) -> Iterator[str]:
    from perilune.data.generators.registry import make_teacher
    from perilune.data.generators.teacher import prepare_teacher
    from perilune.tasks.datasets.stages import CollectSpec

    spec = CollectSpec.model_validate(job.spec)
    teacher = make_teacher(spec.teacher, spec.strategies, spec.options)
    environment = make_environment(job.environment)
    prepare_teacher(teacher, environment)
    tasks = list(islice(environment.tasks("train", job.seed), TEACHER_TASKS))
    candidates = list(teacher.candidates(tasks, job.seed))
    if not candidates:
        raise RequestError(
            f"the teacher '{teacher.name}' has no answer to the first {len(tasks)} tasks of {environment.id}",
            where="teacher",
            remedy="choose another teacher; perilune environments show says which answers it knows",
        )
    from perilune.data.texts import Text, find_missing_character
    from perilune.models.text.template_facts import recipe_tokenizer
    from perilune.verifiers import Scorer

    answers = (Text("the teacher's answers", text) for item in candidates for text in item.transcript.actions)
    _require_tokens(find_missing_character(answers, recipe_tokenizer(job.model).lacks))
    with Scorer(job.environment) as scorer:
        outcomes = scorer.score([(candidate.task, candidate.transcript) for candidate in candidates])
    failed = [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)]
    if len(failed) == len(outcomes):
        yield f"the verifier fails on all of the teacher's first {len(outcomes)} answers: {failed[0]}"
    elif not any(not isinstance(outcome, Failure) and outcome.reward >= 1 for outcome in outcomes):
        yield (
            f"the verifier rejects the teacher's answers to all of the first {len(candidates)} tasks:"
            f" '{teacher.name}' may not fit {environment.id}"
        )
