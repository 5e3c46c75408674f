"""Health of a run: no alarm on healthy runs, and each fault named within two steps of its onset."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from perilune.metrics.health.evidence import Evidence
from perilune.metrics.health.rules import find_dead_groups
from perilune.metrics.health.series import Series, find_shifts
from perilune.metrics.health.verdict import Health, assess_health
from perilune.metrics.overoptimisation import OveroptimisationWatch
from perilune.metrics.rounding import ROUNDING
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings, default_corrections
from perilune.ui.health import _max_staleness

Row = dict[str, Any]

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
RUNS = json.loads((HERE / "healthy_runs.json").read_text())["runs"]
WITHIN = 2  # steps from the onset to the verdict
ONSETS = (15, 31)


def rows_of(columns: Mapping[str, list[Any]]) -> list[Row]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def evidence(run: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    return rows_of(run["metrics"]), rows_of(run["timings"])


def verdicts(metrics: list[Row], timings: list[Row], steps: Iterable[int]) -> Iterator[tuple[int, Health]]:
    """The health after each of these steps, as a live view of the run shows it."""
    for step in steps:
        yield step, assess_health(Evidence(Series(metrics[:step]), Series(timings[:step]), samples=8))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['algorithm']}-{run['seed']}")
def test_healthy_runs_raise_no_alarm_at_any_step(run: Mapping[str, Any]) -> None:
    metrics, timings = evidence(run)
    assert len(RUNS) == 20
    # An alarm lasts two steps beyond its cause, so checking every second step finds each alarm.
    for step, verdict in verdicts(metrics, timings, range(2, len(metrics) + 1, 2)):
        assert verdict.status == "healthy", (step, verdict.line)


def dead(row: Row, time: Row) -> None:
    row |= {"dead_groups": 0.9375, "reward": 0.05, "pass_rate": 0.05, "reward_std": 0.2, "length": 9.0}


def truncated(row: Row, time: Row) -> None:
    row["truncated"] = 0.3


def gap(row: Row, time: Row) -> None:
    row["logprob_gap_max"] = 0.02


def hack(row: Row, time: Row) -> None:
    row |= {"reward": row["reward"] + 1.5, "pass_rate": 0.02, "length": 4.0, "entropy": 0.5}


def slow(row: Row, time: Row) -> None:
    time["learning"] = 3.0


def starving(row: Row, time: Row) -> None:
    time |= {"sampling": 0.9, "learning": 0.05, "scoring": 0.0, "other": 0.0, "groups_ready": 0.0}


def stale(row: Row, time: Row) -> None:
    row |= {"staleness": 6.0, "staleness_max": 9.0}


def zeroed(row: Row, time: Row) -> None:
    row |= {"reward": 0.0, "pass_rate": 0.0, "reward_std": 0.0, "dead_groups": 1.0}


def halved(row: Row, time: Row) -> None:
    row |= {"reward": row["reward"] * 0.2, "pass_rate": row["pass_rate"] * 0.2}


def failing(row: Row, time: Row) -> None:
    row["failures"] = 16


def collapsed(row: Row, time: Row) -> None:
    halved(row, time)
    row |= {"collapse_alarm": 1.0, "dead_groups": 0.9}


def narrowed(row: Row, time: Row) -> None:
    row |= {"entropy": 0.002, "dead_groups": 0.9}


def undefined(row: Row, time: Row) -> None:
    row["loss"] = math.nan


PLANTED: dict[str, tuple[str, str, Callable[[Row, Row], None]]] = {
    "dead groups": ("dead groups", "watch", dead),
    "truncation": ("truncation", "watch", truncated),
    "log-prob gap": ("log-prob gap", "broken", gap),
    "hack": ("reward hack", "broken", hack),
    "slow steps": ("stall", "watch", slow),
    "starvation": ("starvation", "watch", starving),
    "stale data": ("stale data", "watch", stale),
    "reward always 0": ("reward error", "broken", zeroed),
    "reward 0 for most": ("reward error", "broken", halved),
    "verifier fails": ("reward error", "broken", failing),
    "collapse of the reward": ("collapse", "broken", collapsed),
    "collapse of the entropy": ("entropy collapse", "watch", narrowed),
    "loss is NaN": ("undefined loss", "broken", undefined),
}


@pytest.mark.parametrize("onset", ONSETS)
@pytest.mark.parametrize("planted", PLANTED)
def test_injected_faults_are_named_within_two_steps(planted: str, onset: int) -> None:
    name, status, spoil = PLANTED[planted]
    for run in RUNS[::4]:
        metrics, timings = evidence(run)
        for row, time in zip(metrics[onset - 1 :], timings[onset - 1 :], strict=True):
            spoil(row, time)
        steps = range(onset, onset + 6)
        named = [(step, one) for step, one in verdicts(metrics, timings, steps) if one.status != "healthy"]
        step, first = named[0]
        assert first.findings[0].name == name, (run["seed"], first.line)
        assert first.findings[0].since == onset
        assert first.status == status
        assert step - onset < WITHIN
        assert [number for number, _ in named] == [*range(step, onset + 6)]  # it stays named while it lasts


def test_recorded_run_with_low_token_limit_is_named_at_step_two() -> None:
    metrics, timings = evidence(json.loads((HERE / "sick_run.json").read_text()))
    health = dict(verdicts(metrics, timings, (1, 2, 20, 57)))
    assert health[1].status == "healthy"
    assert {item.name: item.since for item in health[2].findings} == {"truncation": 1, "dead groups": 1}
    assert [item.name for item in health[20].findings] == [
        "dead groups"
    ]  # the policy has learned to answer briefly
    assert "almost no answer is right" in health[57].line


def sft_rows(losses: Iterable[float]) -> list[Row]:
    return [{"step": step, "loss": loss, "entropy": 0.5} for step, loss in enumerate(losses, 1)]


def names(metrics: list[Row]) -> list[str]:
    return [finding.name for finding in assess_health(Evidence(Series(metrics), samples=8)).findings]


def test_run_with_collapsed_reward_is_named_by_its_own_alarm_while_it_lasts() -> None:
    metrics = rows_of(json.loads((HERE / "collapsed_run.json").read_text())["metrics"])
    health = dict(verdicts(metrics, [], range(1, 61)))
    assert health[25].line.startswith("broken: reward error since step 13")  # the run has no alarm yet
    for step in range(26, 49):
        (finding,) = health[step].findings
        assert (finding.name, finding.status, finding.since) == ("collapse", "broken", 26)
    assert "0.31 over the last 10 steps, 0.54 at its best" in health[26].line
    assert finding.remedy == "lower lr, set kl, or continue from an earlier checkpoint"
    assert "so also run the verifier" in health[26].findings[0].remedy
    assert {health[step].status for step in range(49, 61)} == {"healthy"}


@pytest.mark.parametrize(("length", "first"), [(None, "reward error"), (2.0, "collapse")])
def test_equal_rewards_are_a_collapse_only_if_the_answers_changed(length: float | None, first: str) -> None:
    metrics, _ = evidence(RUNS[0])
    for row in metrics[30:]:
        zeroed(row, {})
        row["length"] = row["length"] if length is None else length
    for row in metrics[40:]:
        row["collapse_alarm"] = 1.0
    assert set(names(metrics)) == {"collapse"} | {first}
    assert names(metrics[:40]) == ["reward error"]


def test_alarm_ends_when_it_is_off_but_not_at_a_step_without_a_value() -> None:
    alarm: list[Row] = [{"x": 0.0}, {"x": 1.0}, {"x": 1.0}, {}, {"x": 1.0}, {"x": 0.0}]
    rows = [{"step": step, **row} for step, row in enumerate(alarm, 1)]
    since = [Series(rows[:count]).alarm_since("x") for count in range(7)]
    assert since == [None, None, 2, 2, 2, 2, None]


def test_solved_tasks_and_self_play_may_lose_their_entropy() -> None:
    metrics, _ = evidence(RUNS[0])
    for row in metrics[30:]:
        narrowed(row, {})
        row["dead_groups"] = 0.4
    assert names(metrics) == ["entropy collapse"]
    assert names([{**row, "openings": 3.0} for row in metrics]) == []
    assert names([{**row, "pass_rate": 0.9, "reward": 0.9} for row in metrics]) == []
    assert names([{**row, "entropy": 0.002} for row in metrics]) == []  # it did not fall


def test_rising_loss_of_fine_tuning_is_named_but_not_bad_batches_or_noise() -> None:
    draw = Random(0)
    healthy = [2 + 3 * math.exp(-step / 20) + draw.gauss(0, 0.1) for step in range(120)]
    assert names(sft_rows(healthy)) == []
    assert names(sft_rows([*healthy, 11.0, 11.0, *healthy[60:]])) == []  # two bad batches
    diverging = [*healthy, *[2 + 9 * min(step / 4, 1) for step in range(1, 20)]]
    first = next(step for step in range(120, 140) if names(sft_rows(diverging[:step])))
    health = assess_health(Evidence(Series(sft_rows(diverging))))
    assert first == 123
    assert (
        health.line == "broken: diverging loss since step 121: the loss rose from 1.93 to 11 nats per token"
    )
    assert names([{**row, "reward": 0.5} for row in sft_rows(diverging)]) == []  # a loss of rl has no scale
    assert names(sft_rows([*diverging, *healthy[100:]])) == []  # it ends with its cause


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_undefined_loss_is_named_at_once_until_it_is_defined(loss: float) -> None:
    rows = sft_rows([2.0, 1.9, loss])
    health = assess_health(Evidence(Series(rows)))
    assert health.line == "broken: undefined loss since step 3: the loss is NaN or infinite"
    assert names([*rows, {"step": 4, "loss": 1.8}]) == []


def test_chosen_answers_that_collapse_in_preference_training_are_named_after_five_steps() -> None:
    rows: list[Row] = [
        {"step": step, "loss": 0.5, "accuracy": 0.9, "chosen_shift": -0.1, "collapse": float(step > 3)}
        for step in range(1, 10)
    ]
    assert [names(rows[:count]) for count in (7, 8, 9)] == [[], ["chosen collapse"], ["chosen collapse"]]
    assert names([*rows, {"step": 10, "loss": 0.5, "accuracy": 0.9, "collapse": 0.0}]) == []


def watched(curve: Mapping[str, list[float]]) -> list[Row]:
    """The metrics of a run with a gold score, as its own watch of the score writes them."""
    watch, columns = OveroptimisationWatch(), (curve["reward"], curve["gold"], curve["kl_start"])
    return [
        {"step": step, "reward": reward, "gold": gold, "pass_rate": gold, **watch.observe(step, kl, gold)}
        for step, (reward, gold, kl) in enumerate(zip(*columns, strict=True), 1)
    ]


def test_overoptimisation_alarm_is_named_if_the_reward_goes_on_rising() -> None:
    curves = json.loads((RESULTS / "overoptimisation.json").read_text())["curves"]
    rows = watched(curves["hacked reward"][0])
    first = next(step for step in range(1, 100) if names(rows[:step]))
    assert names(rows[:first]) == ["over-optimization"] and names(rows) == ["reward hack"]
    (finding,) = assess_health(Evidence(Series(rows[:first]))).findings
    assert (finding.status, finding.since) == ("watch", 29)
    rise = [min(0.02 * step, 0.6) for step in range(80)]
    gold = {"gold": rise, "kl_start": [0.1 * step for step in range(80)]}
    assert watched({"reward": rise, **gold})[-1]["overoptimisation_alarm"]
    assert names(watched({"reward": rise, **gold})) == []  # the reward has stopped rising, too
    ever = [0.02 * step + 0.01 * (step % 2) for step in range(80)]
    assert names(watched({"reward": ever, **gold})) == ["over-optimization"]
    assert names([{**row, "pass_rate": 0.9} for row in watched({"reward": ever, **gold})]) == []


def test_status_recovers_two_steps_after_the_fault_ends() -> None:
    metrics, timings = evidence(RUNS[0])
    for row in metrics[20:30]:
        truncated(row, {})
    health = dict(verdicts(metrics, timings, (30, 31, 32)))
    assert health[30].line.startswith("watch: truncation since step 21: the token limit cuts off 30%")
    assert health[31].status == "watch"  # a single good step may be chance
    assert health[32].status == "healthy"


@pytest.mark.parametrize(
    ("rate", "cause"),
    [
        (0.05, "almost no answer is right"),
        (0.6, "60% of the answers are right, but most"),
    ],
)
def test_dead_groups_finding_explains_the_cause_by_pass_rate(rate: float, cause: str) -> None:
    rows = [{"step": step, "groups": 16, "dead_groups": 0.9, "pass_rate": rate} for step in range(1, 9)]
    (finding,) = find_dead_groups(Evidence(Series(rows)))
    assert cause in finding.why


def test_solved_tasks_do_not_count_as_dead_groups() -> None:
    rows = [{"step": step, "groups": 16, "dead_groups": 0.9, "pass_rate": 0.97} for step in range(1, 9)]
    assert assess_health(Evidence(Series(rows))).status == "healthy"
    assert Series([{"step": 1, "reward": 10**400}]).column("reward") == [None]


def test_reward_hack_is_named_before_most_of_the_overoptimized_run_has_passed() -> None:
    curves = json.loads((RESULTS / "overoptimisation.json").read_text())["curves"]
    assert sorted(map(len, curves.values())) == [3, 3]
    for curve in (run for runs in curves.values() for run in runs):
        gold, rows = curve["gold"], []
        for step, (reward, score) in enumerate(zip(curve["reward"], gold, strict=True), 1):
            rows.append({"step": step, "reward": reward, "gold": score})
            health = assess_health(Evidence(Series(rows)))
            if health.status != "healthy":
                break
        assert health.findings[0].name == "reward hack"
        assert step > gold.index(max(gold[:step]))
        assert step < len(gold) * 0.6


def test_stalls_and_lost_heartbeats_of_a_live_run_are_named() -> None:
    metrics, timings = evidence(RUNS[0])
    running = Evidence(Series(metrics), Series(timings), samples=8, open_seconds=1.0, silent_seconds=0.4)
    assert assess_health(running).status == "healthy"
    stalled = assess_health(replace(running, open_seconds=30.0))
    assert stalled.line.startswith("broken: stall since step 61: no step for 30 s; the median step takes 0.1")
    lost = assess_health(replace(running, open_seconds=30.0, silent_seconds=40.0))
    assert lost.line == "broken: no heartbeat: the worker has been silent for 40 s"


@pytest.mark.parametrize(("mean", "status"), [(0.019, "healthy"), (0.08, "broken")])
def test_bfloat16_on_a_gpu_is_judged_by_the_mean_log_prob_gap(mean: float, status: str) -> None:
    """As in the run's own check: the largest of a million differences says nothing there."""
    metrics, timings = evidence(RUNS[0])
    for row in metrics[30:]:
        row |= {"logprob_gap_max": 1.4, "logprob_gap_mean": mean, "logprob_gap_kl": 0.001}
    run = Evidence(Series(metrics), Series(timings), samples=8, rounding=ROUNDING["bfloat16", "cuda"])
    assert assess_health(run).status == status


def test_findings_are_listed_by_severity() -> None:
    metrics, timings = evidence(RUNS[0])
    for row, time in zip(metrics[30:], timings[30:], strict=True):
        truncated(row, time)
        gap(row, time)
    document = assess_health(Evidence(Series(metrics), Series(timings), samples=8)).document()
    assert [finding["name"] for finding in document["findings"]] == ["log-prob gap", "truncation"]
    assert document["status"] == "broken"
    assert document["line"].startswith("broken: log-prob gap since step 31")
    assert all(finding["remedy"] for finding in document["findings"])


def test_shifted_flags_jumps_and_follows_drift() -> None:
    drift = [0.1 + 0.01 * step for step in range(40)]
    assert not any(find_shifts(drift, sigmas=4.0, least=0.1, sticky=1))
    jump = [0.5, 0.52, 0.48, 0.5, 0.51, 0.5, 0.9, None, *[0.9] * 5, 0.5, 0.1]
    assert find_shifts(jump, sigmas=4.0, least=0.1, sticky=1) == [0] * 6 + [1, 0, *[1] * 5, 0, -1]
    assert find_shifts(jump, sigmas=4.0, least=0.1, sticky=0)[6:13] == [
        1,
        0,
        *[0] * 5,
    ]  # part of the baseline by then


def test_malformed_metric_values_are_ignored() -> None:
    rows: list[Mapping[str, object]] = [
        {"step": step, "reward": "high", "truncated": True, "dead_groups": float("nan")} for step in range(9)
    ]
    assert assess_health(Evidence(Series([*rows, {"step": "x"}, {}]))).status == "healthy"


def test_bound_of_stale_data_counts_every_update_of_a_step() -> None:
    spec = {"asynchronous": {"staleness": 1}, "updates_per_batch": 3, "epochs_per_batch": 2}
    default = default_corrections(AsynchronousSettings(staleness=1), updates=6)
    assert _max_staleness(spec) == default.max_staleness
