"""File of results: records of many runs, each with its date, machine and versions."""

import json
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .shapes import SHAPES, WORK, WORKLOADS

KEY = ("workload", "cores", "model", "weights", "engine")
ABOUT = """\
All engines have the same random weights, sample at temperature 1 and return the log-prob of every token. Each
engine runs in its own process, and the engines take turns.

* T, S and M are models of three sizes, described under *Setting*.
* *Group* has several samples per prompt. *Ragged* has requests of different lengths, all submitted at the
  start. *Single* has one sample after a long prompt.
* The *floor* is the time that the matrix products and the reads of weights and KV cache would take at the
  best rates of these cores, which are measured between the turns. The reads are at the rate of main memory,
  and the KV cache has the type of the weights. So an engine can be faster than the floor if the processor's
  caches hold its data, or if its KV cache is smaller.
* `transformers-static` is `generate` with a KV cache of a fixed size. `perilune-int8` is Perilune's engine
  with a KV cache in int8.
* *Greedy tokens equal to transformers* is the share of tokens before the first difference, in greedy answers.
  *Log-prob difference* is the largest difference among these tokens, in nats.
  *Mean log-prob* is the mean over all sampled tokens. Engines that sample from the same distribution
  differ in it only by chance."""


class Store:
    """Records by their case and engine. Each new record writes the whole file."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self._path = path
        records = json.loads(path.read_text(encoding="utf-8"))["records"] if path.exists() else []
        self._records = {_key(record): record for record in records}
        self._command = shlex.join(["python", "-m", "benchmarks.rollout", *command])

    def keep(self, record: Mapping[str, Any]) -> None:
        """Store a record in place of an older record of the same case and engine."""
        self._records[_key(record)] = {**record, "command": self._command}
        document = {
            "title": "Rollouts on CPU cores",
            "about": ABOUT,
            "command": "python -m benchmarks.rollout",
            "models": {name: _described(name) for name in WORK},
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
            "records": sorted(self._records.values(), key=_order),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)


def line(record: Mapping[str, Any]) -> str:
    """A record in a line for the terminal."""
    if "failed" in record:
        return f"{record['engine']:20} failed: {record['failed']}"
    seconds = statistics.median(record["seconds"])
    least = sum(record["floor"].values())
    text = (
        f"{record['engine']:20} {record['tokens'] / seconds:9,.0f} tokens/s, {least / seconds:4.0%} of floor"
    )
    text += f", peak {record['peak_mb']:,.0f} MB"
    if split := record["split_ms"]:
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in split.items() if part != "steps")
        text += f"; ms a step: {parts}"
    return text + (f"; WRONG: {', '.join(record['faults'])}" if record["faults"] else "")


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in KEY)


def _order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    workload, cores, model, weights, engine = _key(record)
    return WORKLOADS.index(workload), cores, [*SHAPES].index(model), weights != "float32", engine


def _described(name: str) -> str:
    shape, work = SHAPES[name], WORK[name]
    return (
        f"{shape.parameters / 1e6:.3g} M parameters, {shape.layers} layers of {shape.hidden}, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, feed-forward {shape.inner}, "
        f"vocabulary {shape.vocab}; prompts of {work.prompt}; "
        f"group {work.groups} x {work.samples}, {work.new} new; "
        f"ragged {work.requests} requests, {work.shortest} to {work.longest} new; "
        f"single {work.context} + {work.answer}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
