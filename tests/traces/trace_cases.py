"""Cassettes of scripted episodes, played by the real rollout worker with turns from the test."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perilune.environments.core.protocol import Task
from perilune.environments.core.registry import make_environment
from perilune.models.text.tokenizer import Tokenizer
from perilune.traces.cassette import Cassette, Sampling, Source, TaskRecord, Track, Turn, Verdict
from perilune.traces.causes import describe_cause
from perilune.traces.replay import Replay, Replayer, apply_replay
from perilune.traces.suite import Case, Suite, tokenizer_digest, write_suite

TOKENIZER = Tokenizer.byte_level()
with TemporaryDirectory() as _folder:
    TOKENIZER.save(_folder)
    NAME = tokenizer_digest(Path(_folder))
CALCULATOR = {"id": "calculator"}
EMPTY = Verdict(reward=None, terms={}, metrics={}, finish_reason="stop", failure="")


def tokenizer_of(_: str) -> Tokenizer:
    return TOKENIZER


def tasks(section: dict[str, Any], count: int) -> list[Task]:
    return list(islice(make_environment(section).tasks("train", 0), count))


def draft(section: dict[str, Any], task: Task, index: int, actions: Sequence[str]) -> Cassette:
    """A cassette of these actions that has not been played yet."""
    turns = [Turn(tokens=TOKENIZER.encode_completion(text), text=text, finished=True) for text in actions]
    return Cassette(
        source=Source(run="r", stage="s", file="f", episode_id=f"1/{index}/0"),
        environment=section,
        tokenizer=NAME,
        checkpoint=None,
        task=TaskRecord.of(task),
        sampling=Sampling(key=(0, 1, index), sample=0, max_tokens=400, temperature=1.0, stop_token_ids=(1,)),
        order=(),
        tracks=(Track(player=0, opening=(), prompt=(), turns=tuple(turns), verdict=EMPTY),),
    )


def replay(cassettes: Sequence[Cassette]) -> list[Replay]:
    """Play the recorded turns of the model."""
    with Replayer(tokenizer_of) as replayer:
        return replayer.harness(cassettes)


def played(drafts: Sequence[Cassette]) -> list[Cassette]:
    """The cassettes as played by the current harness."""
    replays = replay(drafts)
    assert not any(replay.error for replay in replays), replays
    return [apply_replay(cassette, replay) for cassette, replay in zip(drafts, replays, strict=True)]


def calculations(count: int = 4) -> list[Cassette]:
    """Calculator episodes, in turn correct, wrong, malformed and guessed."""
    drafts = []
    for index, task in enumerate(tasks(CALCULATOR, count)):
        *calls, answer = task.data["actions"]
        actions = [[*calls, answer], [*calls, ";7"], [*calls, "what?", ";07"], [answer]][index % 4]
        drafts.append(draft(CALCULATOR, task, index, actions))
    return played(drafts)


def suite_of(cassettes: Sequence[Cassette], folder: Path) -> Suite:
    """A suite on disk of these cassettes."""
    pairs = [(Case(digest=tape.digest, cause=describe_cause(tape)), tape) for tape in cassettes]
    return write_suite(folder / "suite", pairs, {NAME: TOKENIZER}, "")
