"""Simulated RL stages: time and cost, asynchronous rollouts, recorded episodes, and the command."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perilune.cli.main import app
from perilune.cli.train.simulate import chrome_trace
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.errors import RequestError
from perilune.metrics.training import STEP_PARTS
from perilune.simulate.asynchronous import simulate_run
from perilune.simulate.calibrate import fit_training
from perilune.simulate.engine import SimulatedEngine, SimulatedModel
from perilune.simulate.episodes import AssumedLengths, GroupShape, RecordedLengths
from perilune.simulate.hardware import CARDS, ComputedSteps, parse_machines
from perilune.simulate.run import EnvironmentTimes, RunPlan, Scenario
from perilune.simulate.step_cost import FEATURE_NAMES, StepCost, StepWork
from perilune.simulate.times import Calibrated, MeasuredTimes, load_coefficients, save_coefficients
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings

STEP = StepCost({name: 1e-2 if name == "step" else 1e-6 for name in FEATURE_NAMES})
TIMES = MeasuredTimes(
    STEP,
    update=(0.05, 1e-5, 0.0, 2e-8),
    recording=(0.01, 2e-7, 2e-5, 3e-5),
    scoring=(7e-3, 8e-5, 4e-5),
    publish=0.01,
    start=1.0,
    checks=0.5,
    trial=(0.0, 0.0),
)
MEANS = {"prompt": 10.0, "sampled": 24.0, "longest": 60.0, "turns": 2.0, "observed": 5.0}
PLAN = RunPlan(steps=6, prompts=4, samples=3)


def scenario(plan: RunPlan = PLAN, *, wait: float = 0.0, seed: int = 0) -> Scenario:
    model = SimulatedModel(1001, 4096, {None: 1.0})
    make_engine = partial(SimulatedEngine, model, STEP, slots=64, cache_tokens=4096)
    lengths = AssumedLengths(MEANS, seed, "assumed")
    return Scenario(plan, TIMES, EnvironmentTimes(wait=wait, spread=1.0), lengths, make_engine, seed)


def ahead(staleness: int, workers: int = 1) -> RunPlan:
    settings = AsynchronousSettings(staleness=staleness, workers=workers, environments=64)
    return replace(PLAN, asynchronous=settings)


@pytest.mark.parametrize("plan", [PLAN, ahead(2), ahead(1, workers=2)])
def test_equal_inputs_give_equal_results(plan: RunPlan) -> None:
    first, again = (simulate_run(scenario(plan, wait=0.1)) for _ in range(2))
    assert first == again
    assert simulate_run(scenario(plan, wait=0.1, seed=1)).seconds != first.seconds


def test_synchronous_run_time_is_the_sum_of_its_parts() -> None:
    result = simulate_run(scenario(replace(PLAN, evaluations=(0, 6), evaluated=(4, 2))))
    parts = sum(sum(step.values()) - step["step"] for step in result.steps)
    before = result.seconds - TIMES.start - parts  # the evaluation before the first step
    assert before == pytest.approx(result.busy["learner"] - sum_of(result.steps), abs=1e-9) and before > 0
    assert result.ages == {0: result.tokens}
    assert result.engine_steps > 8 * 20 and result.peak_blocks[0] > 0


def test_forward_passes_take_a_third_of_an_update() -> None:
    plain, more = (
        simulate_run(scenario(replace(PLAN, forward=forward, watched=watched)))
        for forward, watched in ((0, False), (2, True))
    )
    for before, after in zip(plain.steps, more.steps, strict=True):
        once = after["other"] - before["other"]
        assert after["learning"] - before["learning"] == pytest.approx(2 * once)
        assert 3 * once == pytest.approx(before["learning"] - TIMES.update[0])
        for part in ("sampling", "scoring"):
            assert after[part] == pytest.approx(before[part])


def test_scoring_and_recording_count_turns_and_episodes() -> None:
    episodes, turns = PLAN.prompts * PLAN.samples, int(MEANS["turns"])
    groups = scenario().lengths.groups(1, PLAN.prompts, PLAN.samples)
    tokens = sum(group.fed + (PLAN.samples - 1) * len(group.prompt) for group in groups)
    step = simulate_run(scenario()).steps[0]
    assert step["scoring"] == pytest.approx(7e-3 + episodes * (8e-5 * turns + 4e-5))
    assert step["other"] == pytest.approx(0.01 + 2e-7 * tokens + episodes * (2e-5 * turns + 3e-5))


def test_long_runs_begin_after_their_checks() -> None:
    for plan in (PLAN, ahead(1)):
        plain, checked = (simulate_run(scenario(replace(plan, checked=checked))) for checked in (False, True))
        assert checked.start - plain.start == pytest.approx(TIMES.checks)
        assert checked.seconds - plain.seconds == pytest.approx(TIMES.checks)


def test_training_times_are_fitted_to_recorded_stages(tmp_path: Path) -> None:
    """Stages whose times are known functions of their counts."""
    folders, seconds = [], []
    for number, (groups, turns) in enumerate([(1, 1), (16, 1), (8, 2), (16, 3), (2, 4)]):
        folder = tmp_path / str(number)
        (folder / "episodes").mkdir(parents=True)
        lines = []
        steps = 20 if number == 1 else 5  # the second stage has the checks of a long run
        seconds.append(TIMES.start + TIMES.checks * (number == 1))
        for step in range(1, steps + 1):
            episodes = [recorded(step, task, turns) for task in range(2 * groups)]
            write_episodes(folder / "episodes" / f"step-{step:06d}.parquet", episodes)
            lengths = [len(item.token_ids) for item in episodes]
            count, fed = len(episodes), sum(lengths) + 2 * groups
            pairs = groups * (1 + 2) + sum(sum(range(3, 3 + length)) for length in lengths)
            line = {
                "step": step,
                "sampling": 0.5,
                "scoring": TIMES.batch + count * (TIMES.answer * turns + TIMES.episode),
                "learning": TIMES.learn(fed, count, pairs),
                "other": TIMES.record(fed + 2 * groups, count * turns, count),
            }
            seconds[-1] += sum(line[part] for part in STEP_PARTS if part in line)
            lines.append(json.dumps(line) + "\n")
        (folder / "timings.jsonl").write_text("".join(lines))
        folders.append(folder)
    fitted = fit_training(folders, seconds)
    for part in ("update", "recording", "scoring"):
        assert fitted[part] == pytest.approx(getattr(TIMES, part), rel=1e-3, abs=1e-9)
    assert fitted["start"] == pytest.approx(TIMES.start, rel=0.02)
    assert fitted["checks"] == pytest.approx(TIMES.checks, rel=0.02)


def sum_of(steps: list[dict[str, float]]) -> float:
    return sum(step["learning"] + step["other"] + step["evaluation"] for step in steps)


def test_rollouts_run_ahead_at_most_by_the_staleness() -> None:
    results = {count: simulate_run(scenario(ahead(count), wait=0.2)) for count in (0, 1, 2)}
    means = [sum(age * count for age, count in run.ages.items()) / run.tokens for run in results.values()]
    assert means[0] == 0 < means[1] < means[2] <= 2
    assert results[0].seconds > results[1].seconds > results[2].seconds
    tokens = {result.tokens for result in results.values()}
    assert tokens == {simulate_run(scenario()).tokens}  # the same episodes


def test_processes_on_one_core_are_slower() -> None:
    alone = simulate_run(scenario(ahead(2, workers=2)))
    shared = simulate_run(scenario(replace(ahead(2, workers=2), cores=1)))
    assert shared.seconds - 2 > 1.5 * (alone.seconds - 2)  # without startup times


def test_rollouts_begin_after_the_environment_processes_have_started() -> None:
    at_once = scenario(replace(ahead(0), cores=2))
    environment = replace(at_once.environment, start=0.5)
    delayed = simulate_run(replace(at_once, environment=environment))
    later = delayed.steps[0]["sampling"] - simulate_run(at_once).steps[0]["sampling"]
    assert later == pytest.approx(0.5 * 63 / 2)  # of 64 processes, the first is part of the stage's start


def test_recorded_groups_are_reused_or_drawn_from_nearby_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_episodes(tmp_path / f"step-{step:06d}.parquet", [recorded(step, task) for task in range(4)])
    lengths = RecordedLengths.from_folder(tmp_path, 0, "recorded")
    assert lengths is not None
    (first, *_), drawn = lengths.groups(2, 2, 2), lengths.groups(9, 5, 3)
    assert [[len(turn.sampled) for turn in turns] for turns in first.episodes] == [[2, 1], [2, 1]]
    assert [len(turn.observed) for turn in first.episodes[0]] == [0, 3]
    assert (first.sampled, first.fed, first.live) == (6, 2 + 2 * 6, True)
    assert len(drawn) == 5 and all(len(group.episodes) == 3 for group in drawn)
    assert {len(group.episodes[0][0].sampled) for group in drawn} <= {1, 2, 3}
    assert RecordedLengths.from_folder(tmp_path / "empty", 0, "none") is None


def test_steps_without_episodes_borrow_those_of_other_steps(tmp_path: Path) -> None:
    write_episodes(tmp_path / "step-000001.parquet", [])
    assert RecordedLengths.from_folder(tmp_path, 0, "nothing sampled") is None
    for step in range(2, 7):
        write_episodes(tmp_path / f"step-{step:06d}.parquet", [])
    write_episodes(tmp_path / "step-000007.parquet", [recorded(7, task) for task in range(4)])
    lengths = RecordedLengths.from_folder(tmp_path, 0, "recorded")
    assert lengths is not None and len(lengths.groups(1, 3, 2)) == 3


def test_recorded_waits_are_reproduced(tmp_path: Path) -> None:
    for step in range(1, 7):
        write_episodes(tmp_path / f"step-{step:06d}.parquet", [recorded(step, task) for task in range(4)])
    results = {}
    for metric in ("", "wait"):
        lengths = RecordedLengths.from_folder(tmp_path, 0, "recorded", metric)
        assert lengths is not None
        plan = replace(PLAN, prompts=2, samples=2)
        results[metric] = simulate_run(replace(scenario(plan), lengths=lengths)).seconds
    assert results["wait"] - results[""] == pytest.approx(6 * 4 * 0.5)  # sequential waits
    odd = [
        replace(recorded(1, task), metrics={"wait": seconds})
        for task, seconds in enumerate((2.0, float("nan"), float("inf"), -1.0))
    ]
    waits = [GroupShape.from_episodes(odd[begin : begin + 2], "wait").waits for begin in (0, 2)]
    assert waits == [(2.0, 0.0), (0.0, 0.0)]
    with pytest.raises(RequestError, match="metric 'waits' is 0 or missing"):
        RecordedLengths.from_folder(tmp_path, 0, "recorded", "waits")


def recorded(step: int, task: int, turns: int = 2) -> Episode:
    """`step` sampled tokens, and for each later turn three tokens of the environment and a sampled one."""
    mask = np.array([True] * step + ([False] * 3 + [True]) * (turns - 1))
    count = len(mask)
    return Episode(
        f"{step}/{task // 2}/{task % 2}", f"{step}/{task // 2}", "t", "e", 0, (),
        np.arange(2, dtype=np.int32), np.arange(count, dtype=np.int32), mask,
        np.zeros(count, np.float32), np.zeros(count, np.int32), "stop",
        reward=float(task % 2), metrics={"wait": 0.5},
    )  # fmt: skip


def test_chrome_trace_has_every_span() -> None:
    result = simulate_run(scenario(ahead(1)))
    events = chrome_trace([("rl", result)])["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(result.spans) > 10
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rl", "learner", "worker"}
    assert max(event["ts"] + event["dur"] for event in complete) <= 1e6 * result.seconds + 1


def test_machine_descriptions_are_parsed_or_refused() -> None:
    machines = parse_machines("8xh100/4@2.5")
    assert (machines.name, machines.replicas, machines.cards_per_model, machines.cost(3600)) == (
        "H100",
        2,
        4,
        20.0,
    )
    malformed = ("H100", "0xH100", "1xH100/0", "1xH100@-1", f"{'9' * 5000}xH100", f"1xH100@{'9' * 400}", "")
    refusals = [(text, "does not describe") for text in malformed]
    for text, problem in (*refusals, ("2xH900", "H900"), ("3xH100/2", "divided"), ("1xH100/2", "divided")):
        with pytest.raises(RequestError, match=problem):
            parse_machines(text)


def test_computed_step_takes_the_maximum_of_memory_and_compute_time() -> None:
    from perilune.models.config.decoder_config import PRESETS
    from perilune.models.memory import get_model_card

    model, card = get_model_card(PRESETS["large"]), CARDS["H100"]
    steps = ComputedSteps(parse_machines("1xH100"), model)
    weights = 2 * model.parameters / (0.7 * card.bandwidth)
    assert steps.step_seconds(StepWork(1, 1.0)) == pytest.approx(1e-3 + weights, rel=1e-2)
    many = 2 * model.parameters * 1e6 / (0.5 * card.flops)
    assert steps.step_seconds(StepWork(0, 0.0, 0.0, 1, 1_000_000)) == pytest.approx(1e-3 + many, rel=1e-2)
    shared = ComputedSteps(parse_machines("4xH100/4"), model)
    layers = len(model.layers)
    # In a ring, each card sends 2 * 3/4 of the states, twice for each layer, at half of NVLink's 900 GB/s.
    sent = 2 * layers * 1.5 * 2 * model.hidden_size / 450e9
    exchanged = 2 * layers * 1e-5 + 1e6 * sent
    assert shared.step_seconds(StepWork(0, 0.0, 0.0, 1, 1_000_000)) == pytest.approx(
        1e-3 + many / 4 + exchanged, rel=1e-2
    )


def test_stale_calibration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.simulate.times import engine_digest

    save_coefficients(tmp_path, Calibrated(TIMES, "model", "here", engine_digest(), 0.0, 0.1))
    assert load_coefficients(tmp_path, "here", "model").times == TIMES
    for machine, model in (("there", "model"), ("here", "other")):
        with pytest.raises(RequestError, match="has not been calibrated"):
            load_coefficients(tmp_path, machine, model)
    before = engine_digest()
    engine_digest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("perilune.simulate.times.version", lambda name: f"9.9 of {name}")
        assert engine_digest() != before
    engine_digest.cache_clear()
    monkeypatch.setattr("perilune.simulate.times.engine_digest", lambda: "changed")
    with pytest.raises(RequestError, match="another version of the engine"):
        load_coefficients(tmp_path, "here", "model")


RECIPE = """name: sums
model: {preset: tiny}
environment: {id: jsonl, path: sums.jsonl, match: number}
resources: {device: cpu, threads: 1}
stages:
  - {name: traces, task: collect, teacher: gold, traces: 8}
  - {name: sft, task: sft, data: traces, steps: 2, batch_size: 4}
  - {name: rl, task: rl, checkpoint: sft, steps: 4, prompts: 4, samples: 4, max_tokens: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    rows = (f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(60))
    (tmp_path / "sums.jsonl").write_text("".join(rows))
    (tmp_path / "sums.yaml").write_text(RECIPE)
    return str(tmp_path / "sums.yaml")


def test_simulate_needs_a_calibration_of_this_machine(recipe: str) -> None:
    from perilune.control.record.home import Home
    from perilune.plan.simulation_calibration import describe_device
    from perilune.recipe.load import load_recipe
    from perilune.simulate.times import engine_digest, model_digest

    refused = CliRunner().invoke(app, ["simulate", recipe])
    assert isinstance(refused.exception, RequestError)
    assert "perilune calibrate" in str(refused.exception)

    model = load_recipe(recipe, []).model
    assert model is not None
    digest = model_digest(model.model_dump())
    save_coefficients(
        Home.open().root, Calibrated(TIMES, digest, describe_device("1"), engine_digest(), 0.0, 0.1)
    )
    ran = CliRunner().invoke(app, ["simulate", recipe])
    assert ran.exit_code == 0, ran.output
    assert "synchronous" in ran.output and "assumed lognormal" in ran.output


def test_simulate_compares_settings_on_other_machines(recipe: str, tmp_path: Path) -> None:
    words = ["simulate", recipe, "--machines", "2xH100@3", "--staleness", "sync,1", "--json"]
    ran = CliRunner().invoke(app, [*words, "--trace", str(tmp_path / "trace.json")])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    first, second = document["stages"]
    assert (first["setting"], second["setting"]) == ("synchronous", "staleness 1")
    assert first["cost"] == pytest.approx(first["seconds"] * 2 * 3 / 3600)
    assert "not measured" in document["machines"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    refused = CliRunner().invoke(app, [*words, "--set", "rl.steps=10000000"])
    assert isinstance(refused.exception, RequestError) and "too many" in str(refused.exception)
    refused = CliRunner().invoke(app, [*words[:3], "1xH100", "--staleness", "1"])
    assert "need 2 copies of the model" in str(refused.exception)
