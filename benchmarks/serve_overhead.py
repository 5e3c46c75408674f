"""Measure the overhead of `perilune serve` per token over direct engine calls, at 64 concurrent answers.

    python benchmarks/serve_overhead.py

The tiny model is used, so that the engine takes as little time as possible. The three cases run in turns: the
engine in this process until all 64 requests are done, the same requests to a server with whole answers, and
with streams. CPU seconds are those of the process that generates, not of the client. On a busy machine only
CPU seconds are comparable. A stream sends at most a hundred chunks per second. On a busy machine tokens come
more slowly, so a chunk has fewer tokens. Writes results/serve_overhead.json.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from perilune.bundle.machine import describe_machine
from perilune.engine.engine import Engine
from perilune.engine.request import Request, SamplingParams
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.text.tokenizer import Tokenizer

STREAMS, TOKENS, PROMPT = 64, 200, "12+34="
RESULT = Path(__file__).parent / "results" / "serve_overhead.json"


def direct(folder: Path) -> Callable[[], None]:
    """Return a function that calls the engine as the server does."""
    decoder, tokenizer = load_checkpoint(folder)
    engine = Engine(decoder, slots=STREAMS, tokenizer=tokenizer)
    prompt, params = tokenizer.encode(PROMPT), SamplingParams(max_tokens=TOKENS)

    def once() -> None:
        for seed in range(STREAMS):
            engine.add(Request(prompt, params, (seed, 0, 0)))
        while engine.unfinished:
            engine.step()

    return once


async def ask(port: int, seed: int, stream: bool) -> bytes:
    """Send one request over a new connection, and return the raw response."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
    content = json.dumps(body | {"stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    return answer


async def ask_all(port: int, stream: bool) -> list[bytes]:
    return list(await asyncio.gather(*(ask(port, seed, stream) for seed in range(STREAMS))))


def measured(work: Callable[[], Any], process: psutil.Process) -> tuple[float, float, Any]:
    """Wall and CPU microseconds of `process` per token, and the result of `work`."""
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    result = work()
    wall, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - before
    return 1e6 * wall / (STREAMS * TOKENS), 1e6 * cpu / (STREAMS * TOKENS), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    kinds: dict[str, dict[str, list[float]]] = {
        kind: {"elapsed": [], "CPU": []}
        for kind in ("engine alone", "server, whole answers", "server, streamed answers")
    }
    pieces = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny"
        tokenizer = Tokenizer.characters()
        save_checkpoint(folder, new_model("tiny", tokenizer, seed=0), tokenizer)
        command = [sys.executable, "-m", "perilune.cli.main", "serve", str(folder), "--port", "0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stderr is not None
            match = re.search(r":(\d+)/v1", server.stderr.readline())
            assert match
            port, server_process, own_process = int(match[1]), psutil.Process(server.pid), psutil.Process()
            alone = direct(folder)
            for repeat in range(-1, repeats):  # the first repeat warms up
                for kind, work, process in (
                    ("engine alone", alone, own_process),
                    ("server, whole answers", lambda: asyncio.run(ask_all(port, False)), server_process),
                    ("server, streamed answers", lambda: asyncio.run(ask_all(port, True)), server_process),
                ):
                    wall, cpu, answers = measured(work, process)
                    if repeat >= 0:
                        kinds[kind]["elapsed"].append(round(wall, 2))
                        kinds[kind]["CPU"].append(round(cpu, 2))
                        if kind == "server, streamed answers":
                            pieces.append(sum(body.count(b"data: {") for body in answers) / STREAMS / TOKENS)
            server.terminate()
    write(kinds, pieces)


def write(kinds: dict[str, dict[str, list[float]]], pieces: list[float]) -> None:
    middle = {kind: statistics.median(figures["CPU"]) for kind, figures in kinds.items()}
    processor = describe_machine()["processor"]
    document = {
        "title": "Overhead of perilune serve",
        "about": f"{STREAMS} requests for answers of {TOKENS} tokens arrive at the same time. In the row "
        "*engine alone*, the engine samples the same answers without a server. The CPU time is that of the "
        "engine or of the server, without the clients. The ranges show the noise: other programs used the "
        "machine.",
        "command": "python benchmarks/serve_overhead.py",
        "machine": {
            "processor": processor["model"],
            "cores": processor["usable_cores"],
            "load": [round(load, 1) for load in os.getloadavg()],
        },
        "microseconds per token": kinds,
        "CPU time added by the server, microseconds per token": {
            kind: round(middle[kind] - middle["engine alone"], 2) for kind in list(kinds)[1:]
        },
        "stream chunks per token": round(statistics.median(pieces), 3),
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
