"""`perilune simulate-serving`: predict how a fleet serves a trace of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, check_output_file
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError
from perilune.simulate.autoscaling import Autoscaling

if TYPE_CHECKING:
    from perilune.engine.offload import OffloadSettings
    from perilune.simulate.serving import Arrival

POISSON_PREFIX = "poisson:"


def simulate_serving(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json, its folder, or a fetched model.")
    ],
    *,
    requests: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON lines in the format of Mooncake's traces: timestamp (ms), input_length, "
            "output_length, optionally hash_ids. Or poisson:RATE:SECONDS:INPUT:OUTPUT.",
        ),
    ],
    machines: Annotated[
        str,
        typer.Option(
            metavar="SPEC", help="COUNTxCARD, optionally /CARDS PER MODEL and @PRICE, such as 8xH100/2@2.50."
        ),
    ],
    prefill: Annotated[
        int,
        typer.Option(min=0, help="Number of replicas that only prefill. 0: all replicas prefill and decode."),
    ] = 0,
    autoscale: Annotated[
        str,
        typer.Option(
            metavar="LEAST:RATE:STARTUP",
            help="Start and release replicas: at least LEAST, and one for each RATE requests per second. A "
            "new replica serves after STARTUP seconds. --machines is the maximum.",
        ),
    ] = "",
    slots: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum requests in flight per replica.")
    ] = 256,
    offload_memory: Annotated[
        float,
        typer.Option(min=0, max=1e6, metavar="GIB", help="Host memory per replica for evicted cache blocks."),
    ] = 0.0,
    offload_disk: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e6,
            metavar="GIB",
            help="Disk per replica for cache blocks that are evicted from host memory.",
        ),
    ] = 0.0,
    ttft: Annotated[float, typer.Option(min=0, help="Limit for goodput: seconds to the first token.")] = 1.0,
    tpot: Annotated[float, typer.Option(min=0, help="Limit for goodput: seconds per further token.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the poisson requests.")] = 0,
    jobs: Annotated[
        int, typer.Option(min=0, help="Number of processes that simulate replicas. 0: one for each CPU core.")
    ] = 0,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_output_file, help="Also write a page with the figures and charts."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict time to first token, time per token and goodput of a fleet that serves a trace of requests.

    The simulation runs the real scheduler and prefix cache. Times are computed from the published bandwidth
    and FLOPs of the GPU. Requests go to the replicas round robin.

    \b
    perilune simulate-serving my-model --requests trace.jsonl --machines 8xH100/2@2.50
    perilune simulate-serving my-model --requests poisson:40:60:1000:200 --machines 4xL4 --prefill 1
    perilune simulate-serving my-model --requests trace.jsonl --machines 16xL4@0.80 --autoscale 2:4:120
    perilune simulate-serving my-model --requests trace.jsonl --machines 4xL4 --offload-memory 64
    """
    from rich.console import Console

    from perilune.bundle.machine import usable_threads
    from perilune.cli.inspect.model_card import config_file
    from perilune.cli.train.simulation_page import render_simulation, serving_figures
    from perilune.files import read_json, write_atomic
    from perilune.models.card.from_config import model_card
    from perilune.simulate.hardware import ASSUMPTIONS, parse_machines
    from perilune.simulate.serving import Replica, serve, summarize_fleet

    file = config_file(model)
    card, fleet = model_card(read_json(file), where=str(file)), parse_machines(machines)
    began = time.monotonic()
    arrivals = _arrivals(requests, seed)
    scaling = Autoscaling.parse(autoscale) if autoscale else None
    replica = Replica(fleet, card, slots, _offload(offload_memory, offload_disk))
    with Console(stderr=True).status("Simulating") as status:
        served = serve(
            replica,
            arrivals,
            prefill=prefill,
            autoscaling=scaling,
            jobs=jobs or usable_threads(),
            report=lambda done, count: status.update(f"Simulated {done:,} of {count:,} replicas"),
        )
    summary = summarize_fleet(served, fleet, ttft=ttft, tpot=tpot)
    document = {"machines": machines, "prefill_replicas": prefill, "basis": ASSUMPTIONS, **summary}
    lead, figures = _describe_fleet(document, fleet.replicas), list(_figures(document, (ttft, tpot)))
    if page is not None:
        title, columns = f"{model}, simulated", ("figure", "value")
        charts = serving_figures(served.served)
        write_atomic(page, render_simulation(title, lead, columns=columns, rows=figures, figures=charts))
        echo(f"wrote {page}: open it in a browser", err=True)
    if as_json:
        print_json(document | {"simulated_in": time.monotonic() - began})
        return
    echo(lead)
    for name, value in figures:
        echo(f"  {name:<24}{value}")
    echo(f"simulated in {time.monotonic() - began:.1f} s", err=True)


def _arrivals(text: str, seed: int) -> list[Arrival]:
    from perilune.simulate.serving import poisson_requests, read_requests

    if not text.startswith(POISSON_PREFIX):
        return read_requests(Path(text).expanduser())
    try:
        rate, seconds, prompt, output = map(float, text.removeprefix(POISSON_PREFIX).split(":"))
        return poisson_requests(rate, seconds, prompt, output, seed)
    except ValueError as error:
        raise RequestError(
            f"{text!r} does not describe arrivals: {error}",
            where="--requests",
            remedy="give poisson:RATE:SECONDS:INPUT:OUTPUT, such as poisson:40:60:1000:200",
        ) from None


def _offload(memory: float, disk: float) -> OffloadSettings | None:
    from perilune.engine.offload import OffloadSettings

    return OffloadSettings(round(memory * 2**30), round(disk * 2**30)) if memory or disk else None


def _describe_fleet(found: Mapping[str, Any], replicas: int) -> str:
    apart = found["prefill_replicas"]
    split = (
        f"{apart} for prefill and {replicas - apart} for decoding"
        if apart
        else "each for prefill and decoding"
    )
    number = f"{replicas} {'replica' if replicas == 1 else 'replicas'}, {split}"
    if "replicas_mean" in found:
        number = f"{found['replicas_mean']:.1f} replicas on average, {found['replicas_peak']} at most"
    return f"{found['machines']}: {number}; {found['basis']}"


def _figures(found: Mapping[str, Any], slo: tuple[float, float]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the predicted figures."""
    yield "requests", f"{found['requests']:,} in {found['seconds']:,.1f} s"
    for name, label, scale, unit in (
        ("ttft", "time to first token", 1, "s"),
        ("tpot", "time per further token", 1000, "ms"),
        ("latency", "latency", 1, "s"),
    ):
        parts = (scale * found[f"{name}_{part}"] for part in ("mean", "p50", "p99"))
        yield label, "mean {:.3g} {u}, P50 {:.3g} {u}, P99 {:.3g} {u}".format(*parts, u=unit)
    yield "tokens", f"{found['tokens_per_second']:,.0f} per second"
    limits = f"first token within {slo[0]:g} s, further ones within {1000 * slo[1]:g} ms"
    yield "goodput", f"{found['goodput']:.3g} requests per second, {found['good_share']:.1%}: {limits}"
    yield (
        "replicas",
        f"{found['busy']:.0%} busy, {found['prefix_hits']:.0%} of prompt tokens cached,"
        f" {found['preemptions']:,} preemptions",
    )
    memory, disk, refused = (
        found[f"blocks_{name}"] for name in ("loaded_from_memory", "loaded_from_disk", "refused")
    )
    if memory or disk or refused:
        yield (
            "offloaded blocks",
            f"{memory:,} loaded from memory and {disk:,} from disk; {refused:,} computed, which was faster",
        )
    if "cost" in found:
        per_token = f"{found['cost_per_million_tokens']:.2f} per million output tokens"
        yield "cost", f"{found['cost']:.2f}, {per_token}"
