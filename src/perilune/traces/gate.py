"""Runs a suite: plays its cases, asks the oracle, and compares recorded with replayed rewards."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from perilune.errors import RequestError
from perilune.metrics.bootstrap import Interval, paired_difference
from perilune.metrics.proportion import pass_rate_interval
from perilune.traces.oracle import Difference, Expectation
from perilune.traces.replay import Replay, Replayer
from perilune.traces.suite import Case, Part, Suite

Mode = Literal["harness", "rescore"]


@dataclass(frozen=True)
class CaseResult:
    """A case, its replay, and the differences from the expectations."""

    case: Case
    episode_id: str
    replay: Replay
    differences: Sequence[Difference]

    def document(self) -> dict[str, Any]:
        return {
            "digest": self.case.digest,
            "episode_id": self.episode_id,
            "cause": self.case.cause,
            "held_out": self.case.held_out,
            "passed": not self.differences,
            "differences": list(map(asdict, self.differences)),
        }


@dataclass(frozen=True)
class GateReport:
    """The results of a run of a suite.

    Attributes:
        recorded, replayed: mean reward with its interval; None if no case has both.
        change: mean of replayed - recorded, paired by case.
    """

    mode: str
    results: Sequence[CaseResult]
    recorded: Interval | None
    replayed: Interval | None
    change: Interval | None

    @property
    def failed(self) -> list[CaseResult]:
        return [result for result in self.results if result.differences]

    def document(self) -> dict[str, Any]:
        intervals = {name: getattr(self, name) for name in ("recorded", "replayed", "change")}
        return {
            "mode": self.mode,
            "cases": len(self.results),
            "failed": len(self.failed),
            "reward": {name: interval and interval._asdict() for name, interval in intervals.items()},
            "results": [result.document() for result in self.results],
        }


def run_suite(suite: Suite, mode: Mode = "harness", part: Part = "all") -> GateReport:
    """Play the cases of a part.

    Raises:
        RequestError: when the suite is damaged, or the part has no cases.
    """
    cases = suite.cases(part)
    if not cases:
        raise RequestError(f"the suite has no cases in the part {part}", where=str(suite.root))
    cassettes = [suite.cassettes[case.digest] for case in cases]
    with Replayer(suite.tokenizer) as replayer:
        replays = replayer.rescore(cassettes) if mode == "rescore" else replayer.harness(cassettes)
    results = [
        CaseResult(case, cassette.source.episode_id, replay, replay.differences(suite.expected(case)))
        for case, cassette, replay in zip(cases, cassettes, replays, strict=True)
    ]
    return GateReport(mode, results, *_reward_intervals(suite, results))


def _reward_intervals(
    suite: Suite, results: Sequence[CaseResult]
) -> tuple[Interval | None, Interval | None, Interval | None]:
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for result in results:
        recorded = _rewards_by_player(suite.expected(result.case))
        for player, reward in _rewards_by_player(result.replay.expectations()).items():
            if reward is not None and (old := recorded.get(player)) is not None:
                key = f"{result.case.digest}/{player}"
                before[key], after[key] = old, reward
    if not before:
        return None, None, None
    ends = [pass_rate_interval(list(part.values())) for part in (before, after)]
    return ends[0], ends[1], paired_difference(before, after)


def _rewards_by_player(expectations: Sequence[Expectation]) -> dict[int, float | None]:
    return {item.player: item.verdict.reward for item in expectations if not item.agent}
