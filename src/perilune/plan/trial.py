"""Lengths of episodes and times of environments, tried out while a recipe is planned.

A teacher writes a few traces, which the scorer verifies. Their tokens are the lengths to expect of a policy
that imitates them. Rows of the user's own files are read the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from perilune.data.generators.registry import make_teacher
from perilune.data.generators.teacher import prepare_teacher, verify_candidates
from perilune.data.records import TraceRecord
from perilune.data.sources import Row
from perilune.environments.core.protocol import Transcript
from perilune.environments.core.registry import make_environment
from perilune.environments.core.replay import replay_agent_conversations
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import Sessions

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.environments.core.protocol import Environment, Task
    from perilune.models.text.tokenizer import Tokenizer
    from perilune.tasks.supervised.tokens import Tokens
    from perilune.verifiers import Scorer

TRIAL_SECONDS = 1.0  # seconds of each measurement
MAX_ITEMS = 512  # most items of a measurement
MAX_ROWS = 2000  # rows of a user's file
BATCH_ROWS = 32  # rows in which prompts are compared
WARMUP = 4  # items before the clock starts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of an episode or a row.

    Attributes:
        fed: mean tokens after the prompt.
        sampled: mean tokens that the policy writes, of those.
        longest: most tokens that it writes in any of the episodes.
        turns: mean number of its turns.
        distinct: share of the prompts of a batch that differ; a batch computes equal ones once.
        reading: seconds to read a row as tokens.
    """

    prompt: float
    fed: float
    sampled: float
    longest: float
    turns: float = 1.0
    distinct: float = 1.0
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """An environment, tried out.

    Attributes:
        lengths: of the teacher's traces; None without a teacher.
        prompt: mean tokens of a task's prompt.
        trace: seconds in which a teacher writes a trace and the scorer verifies it.
        task: seconds in which the environment makes a task.
        episode: seconds to play and score an episode.
        start: seconds in which the scorer's process starts.
    """

    lengths: Lengths | None
    prompt: float
    trace: float
    task: float
    episode: float
    start: float


def try_environment(
    section: Mapping[str, Any],
    seed: int,
    tokenizer: Tokenizer,
    collect: Job | None,
    actions: Sequence[str] = ("0",),
) -> Trial:
    """Try an environment with the teacher of a collect stage, if there is one, or else with these actions."""
    environment = make_environment(section)
    # Time in the processes that an environment starts, and on the network, is not that of our processors.
    clock = processor_seconds if getattr(environment, "confined", True) else time.perf_counter
    coming = environment.tasks("train", seed)
    tasks, task_seconds = _time_items(lambda count: list(islice(coming, count)), clock)
    prompts = [len(tokenizer.encode_prompt(task.prompt)) for task in tasks if task.prompt]
    lengths, trace = None, 0.0
    games = [Game(task, 0, actions) for task in tasks]
    before = child_processor_seconds()
    with Scorer(section) as scorer:
        scorer.score([(task, Transcript("0")) for task in tasks[:1]])
        start = child_processor_seconds() - before
        if collect is not None:
            lengths, trace, games = _measure_traces(collect, environment, scorer, tokenizer, clock)
        sessions, waiting = Sessions(scorer.processes, environment), cycle(games)
        episode = 0.0
        if games:
            _, episode = _time_items(lambda count: _play_games(sessions, list(islice(waiting, count))), clock)
    return Trial(lengths, fmean(prompts) if prompts else 0.0, trace, task_seconds, episode, start)


class Game(NamedTuple):
    """A task with the actions of an episode."""

    task: Task
    seed: int
    actions: Sequence[str]


def _measure_traces(
    job: Job, environment: Environment, scorer: Scorer, tokenizer: Tokenizer, clock: Callable[[], float]
) -> tuple[Lengths | None, float, list[Game]]:
    """Return the lengths of a teacher's traces, the seconds of each, and the games that they record."""
    from perilune.tasks.datasets.collect import add_strategy_messages

    teacher = make_teacher(job.spec["teacher"], job.spec["strategies"], job.spec["options"])
    prepare_teacher(teacher, environment)
    converse = partial(replay_agent_conversations, environment)
    coming = add_strategy_messages(
        teacher.candidates(environment.tasks("train", job.seed), job.seed), job.spec["system"]
    )
    games: list[Game] = []

    def write(count: int) -> list[TraceRecord]:
        chunk = list(islice(coming, count))
        games.extend(Game(item.task, item.seed, item.transcript.actions) for item in chunk)
        verified = verify_candidates(
            chunk, scorer.score, environment=environment.id, seed=job.seed, converse=converse
        )
        return [trace for trace in verified if isinstance(trace, TraceRecord)]

    traces, seconds = _time_items(write, clock)
    rows = [
        Row(str(index), {"messages": [dict(message) for message in trace.messages]})
        for index, trace in enumerate(traces)
    ]
    return lengths_of_rows(rows, tokenizer), seconds, games


def _play_games(sessions: Sessions, games: Sequence[Game]) -> Sequence[Game]:
    opened = sessions.open([(game.task, game.seed) for game in games])
    for turn in range(max(len(game.actions) for game in games)):
        moves = [
            (session, [game.actions[turn]], True)
            for session, game in zip(opened, games, strict=True)
            if turn < len(game.actions) and not getattr(session.result, "done", True)
        ]
        sessions.step(moves)
    sessions.close(opened)
    return games


def lengths_of_rows(rows: Iterable[Any], tokenizer: Tokenizer, *, pairs: bool = False) -> Lengths | None:
    """Return the lengths of rows of training data, of the user's own or of a stage's; None without a row."""
    from perilune.tasks.supervised.tokens import RowReader

    reader, coming = RowReader(tokenizer, positions=1 << 30), iter(rows)
    read: Callable[[Iterable[Any]], Iterable[Any]] = reader.comparisons if pairs else reader.demonstrations
    few = list(islice(coming, WARMUP))
    warm = len(list(read(few)))  # imports modules
    began = time.process_time()
    parsed = list(read(chain(few, coming)))
    reading = (time.process_time() - began) / max(1, reader.rows - warm)
    sides: list[Tokens] = [side for row in parsed for side in row[-2 if pairs else -1 :]]
    if not sides:
        return None
    answers = [sum(side.loss_mask) for side in sides]
    prompts = [tuple(side.prompt_ids) for side in sides[:: 2 if pairs else 1][:BATCH_ROWS]]
    return Lengths(
        prompt=fmean(len(side.prompt_ids) for side in sides),
        fed=fmean(len(side.token_ids) for side in sides),
        sampled=fmean(answers),
        longest=max(answers),
        turns=fmean(map(_count_turns, sides)),
        distinct=len(set(prompts)) / len(prompts),
        reading=reading,
    )


def _count_turns(tokens: Tokens) -> int:
    """Count the turns of the policy, which are runs of learned tokens."""
    mask = tokens.loss_mask
    return sum(now and not before for before, now in zip([False, *mask], mask, strict=False))


def _time_items(work: Callable[[int], Sequence[T]], clock: Callable[[], float]) -> tuple[list[T], float]:
    """Return the results of `work(count)`, and the seconds of `clock` for each of them.

    The first calls import modules and start processes, and then show how many items fit into `TRIAL_SECONDS`.
    """
    results = list(work(WARMUP))
    began = clock()
    results += work(WARMUP)
    each = (clock() - began) / WARMUP
    began = clock()
    measured = work(min(MAX_ITEMS, max(WARMUP, int(TRIAL_SECONDS / max(each, TRIAL_SECONDS / MAX_ITEMS)))))
    spent = max(0.0, clock() - began)
    return [*results, *measured], spent / max(1, len(measured))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all processes that it started."""
    return time.process_time() + child_processor_seconds()


def child_processor_seconds() -> float:
    """Return the processor seconds of the processes that this one started."""
    import psutil

    spent = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):  # it has just ended
            user, system, *of_ended = process.cpu_times()[:4]
            spent += sum(of_ended) + (_scheduled_seconds(process.pid) or user + system)
    return spent


def _scheduled_seconds(pid: int) -> float:
    """Return the processor seconds of a process's threads; 0 where the kernel does not record them.

    The kernel records nanoseconds here, and hundredths of a second for `cpu_times`.
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9
