"""A simulated serving fleet: latencies, shared prefixes, disaggregated prefill, autoscaling and cost."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from perilune.cli.main import app
from perilune.errors import RequestError
from perilune.models.config.decoder_config import PRESETS
from perilune.models.memory import get_model_card
from perilune.simulate.autoscaling import Autoscaling, assign_replicas
from perilune.simulate.hardware import ComputedSteps, parse_machines, transfer_seconds
from perilune.simulate.serving import (
    Arrival,
    Replica,
    Served,
    poisson_requests,
    read_requests,
    serve,
    summarize_fleet,
)
from perilune.simulate.step_cost import StepWork

MODEL = get_model_card(PRESETS["large"])
ONE = parse_machines("1xL4")


def by_number(served: Sequence[Served]) -> dict[int, Served]:
    return {request.arrival.number: request for request in served}


def test_single_request_takes_the_sum_of_its_steps() -> None:
    fleet = serve(Replica(ONE, MODEL), [Arrival(0, 2.0, 100, 3)])
    (request,) = fleet.served
    steps = ComputedSteps(ONE, MODEL)
    prefill = steps.step_seconds(StepWork(0, 0.0, 0.0, 1, 100, 100 * 101 / 2))
    decode = sum(steps.step_seconds(StepWork(1, float(keys))) for keys in (101, 102))
    assert request.ttft == pytest.approx(prefill)
    assert request.end - request.first == pytest.approx(decode)
    assert fleet.busy == pytest.approx(prefill + decode)
    assert fleet.counts["steps"] == 3


def test_requests_with_common_prefix_share_blocks() -> None:
    shared = [Arrival(number, 10.0 * number, 1100, 2, (7, 8)) for number in range(3)]
    apart = [replace(arrival, hashes=(2 * arrival.number, 2 * arrival.number + 1)) for arrival in shared]
    assert serve(Replica(ONE, MODEL), apart).counts["cached"] == 0
    assert (
        serve(Replica(ONE, MODEL), shared).counts["cached"] == 2 * 1024
    )  # two blocks of 512 tokens, computed once


def test_disaggregated_prefill_includes_the_transfer() -> None:
    arrivals = poisson_requests(20, 3, 300, 40, seed=0)
    together = by_number(serve(Replica(parse_machines("2xL4"), MODEL), arrivals).served)
    apart = by_number(serve(Replica(parse_machines("2xL4"), MODEL), arrivals, prefill=1).served)
    assert apart.keys() == together.keys() == {arrival.number for arrival in arrivals}
    assert all(request.first > request.arrival.time for request in apart.values())
    for request in apart.values():
        if request.arrival.output > 1:
            assert request.end > request.first + transfer_seconds(MODEL, request.arrival.prompt)
    with pytest.raises(RequestError, match="leave no replica to decode"):
        serve(Replica(ONE, MODEL), arrivals, prefill=1)


def test_autoscaler_follows_the_request_rate_and_saves_cost() -> None:
    settings = Autoscaling.parse("1:1:5")
    quiet, busy = [10.0 * n for n in range(12)], [120 + n / 4 for n in range(480)]
    scaled = assign_replicas(settings, [*quiet, *busy, 400.0, 410.0], max_replicas=8)
    assert set(scaled.replica_of[: len(quiet)]) == {0}
    assert (scaled.peak, scaled.last) == (4, 1)  # four requests a second, then few
    third = scaled.replica_of.index(2)  # due to more than 2 requests per second over a minute
    assert 120 + 28 <= (quiet + busy)[third] - settings.startup <= 120 + 30
    again = assign_replicas(settings, [*busy, *[1000 + time for time in busy]], max_replicas=8)
    assert again.replica_of[-1] > 4  # a new one

    arrivals = poisson_requests(2, 30, 100, 20, seed=1)
    machines = parse_machines("4xL4@3.6")
    always, scaling = (
        serve(Replica(machines, MODEL), arrivals, autoscaling=option) for option in (None, settings)
    )
    limits = {"ttft": 1.0, "tpot": 1.0}
    paid, saved = (summarize_fleet(fleet, machines, **limits) for fleet in (always, scaling))
    assert saved["requests"] == paid["requests"] and saved["cost"] < 0.8 * paid["cost"]
    assert saved["replicas_mean"] < 4 and saved["latency_mean"] >= paid["latency_mean"]
    for text in ("0:1:5", "1:inf:5", "1:1:inf", "1:1"):
        with pytest.raises(RequestError, match="does not describe an autoscaler"):
            Autoscaling.parse(text)
    assert assign_replicas(Autoscaling.parse("1:1e-320:5"), [0.0], max_replicas=8).last == 8
    with pytest.raises(RequestError, match="the machines hold 4"):
        serve(Replica(machines, MODEL), arrivals, autoscaling=Autoscaling.parse("5:1:5"))
    with pytest.raises(RequestError, match="cannot divide replicas"):
        serve(Replica(machines, MODEL), arrivals, prefill=1, autoscaling=settings)


def test_autoscaler_releases_replicas_during_a_gap_in_arrivals() -> None:
    """The rate asks for four replicas until the 120 arrivals leave the window, and for one a window later."""
    settings = Autoscaling.parse("1:1:5")
    busy = [n / 4 for n in range(480)]
    scaled = assign_replicas(settings, [*busy, 10_000.0], max_replicas=8)
    before = assign_replicas(settings, busy, max_replicas=8)
    assert before.last == 4
    gap = scaled.seconds - before.seconds
    # After the last arrival at 119.75 s, a replica more than the first is held for 60 s plus 15, 30 or 45 s.
    assert gap == pytest.approx(10_000 - 119.75 + 3 * 60 + 15 + 30 + 45, abs=1)


def test_hits_of_disaggregated_prefill_count_each_prompt_once() -> None:
    arrivals = [Arrival(number, 10.0 * number, 1100, 4, (7, 8)) for number in range(3)]
    counts = [serve(Replica(parse_machines("2xL4"), MODEL), arrivals, prefill=1).counts]
    counts.append(serve(Replica(ONE, MODEL), arrivals).counts)
    assert counts[0]["cached"] == counts[1]["cached"] == 2 * 1024
    assert counts[0]["computed"] == counts[1]["computed"] == 3 * 1100 - 2 * 1024


def test_figures_report_latency_goodput_and_cost() -> None:
    served = [Served(Arrival(0, 0.0, 5, 11), 1.0, 2.0), Served(Arrival(1, 1.0, 5, 1), 4.0, 4.0)]
    machines = parse_machines("2xL4@3.6")
    fleet = replace_served(serve(Replica(machines, MODEL), [Arrival(0, 0.0, 5, 1)]), served)
    figures = summarize_fleet(fleet, machines, ttft=2.0, tpot=0.2)
    assert (figures["ttft_mean"], figures["tpot_mean"], figures["latency_mean"]) == (2.0, 0.1, 2.5)
    assert (figures["goodput"], figures["good_share"]) == (0.25, 0.5)  # the second request waited for 3 s
    assert figures["tokens_per_second"] == 3.0
    assert figures["cost"] == pytest.approx(2 * 3.6 * 4 / 3600)


def replace_served(fleet, served):  # type: ignore[no-untyped-def]
    fleet.served = served
    return fleet


BAD_TIMES = ("NaN", "Infinity", "1e300", "-1", "null", "true", '"1"')
BAD_LENGTHS = ("0", "1e999", "5.7", "true", '"5"', "[]")
BAD_HASHES = ("[-1]", "null", '"12"', '{"1": 2}', "[1.5]", "[[]]")


def test_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": {1764e9 + late}, "input_length": 4, "output_length": 2}}' for late in (250, 0)]
    path.write_text("\n\n".join(lines) + "\n\n")  # with empty lines
    assert [(arrival.number, arrival.time) for arrival in read_requests(path)] == [(3, 0.0), (1, 0.25)]


def test_invalid_trace_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 500, "input_length": 4, "output_length": 2, "hash_ids": [1]}\n'
    path.write_text(good)
    assert read_requests(path) == [Arrival(1, 0.0, 4, 2, (1,))]
    bad_lines = [
        *("[]", "{", "[" * 100_000, '{"timestamp": 1}'),
        *(f'{{"timestamp": {time}, "input_length": 4, "output_length": 2}}' for time in BAD_TIMES),
        *(f'{{"timestamp": 1, "input_length": {length}, "output_length": 2}}' for length in BAD_LENGTHS),
        *(
            f'{{"timestamp": 1, "input_length": 4, "output_length": 2, "hash_ids": {hashes}}}'
            for hashes in BAD_HASHES
        ),
    ]
    for bad in bad_lines:
        path.write_text(good + bad + "\n")
        with pytest.raises(RequestError, match="not a request") as refused:
            read_requests(path)
        assert refused.value.where == f"{path}:2"


BAD_ARRIVALS = ("9", "inf:1:9:9", "nan:1:9:9", "1:1:nan:9", "1:1:9:1e30", "1e9:1e9:9:9", "1e-300:1:9:9")


def test_simulate_serving_is_reproducible_and_refuses_too_long_requests(tmp_path: Path) -> None:
    config = PRESETS["large"].to_hf() | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["simulate-serving", str(tmp_path), "--machines", "3xL4@1"]
    poisson = [*words, "--requests", "poisson:30:1:50:10", "--json"]
    first, second = (json.loads(CliRunner().invoke(app, poisson).stdout) for _ in range(2))
    assert first.pop("simulated_in") > 0 and second.pop("simulated_in") > 0
    assert first == second and first["requests"] == 30 and "not measured" in first["basis"]
    refusals = [
        ("poisson:9:1:9000:10", "at most 512 fit"),
        *((f"poisson:{numbers}", "does not describe") for numbers in BAD_ARRIVALS),
    ]
    for requests, problem in refusals:
        refused = CliRunner().invoke(app, [*words, "--requests", requests])
        assert isinstance(refused.exception, RequestError) and problem in str(refused.exception)


def test_processes_end_with_a_killed_simulation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["large"].to_hf()))
    words = ["simulate-serving", str(tmp_path), "--machines", "64xL4", "--jobs", "2"]
    program = [sys.executable, "-m", "perilune.cli.main", *words, "--requests", "poisson:640:600:50:10"]
    parent = psutil.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(children := parent.children()) < 3:  # two for replicas, and multiprocessing's resource tracker
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(gone) == 3 and not alive
