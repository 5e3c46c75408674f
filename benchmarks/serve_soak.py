"""Test `perilune serve` with 200 clients for ten minutes, an engine failure and a killed server.

    python benchmarks/serve_soak.py                    ten minutes, then results/serve_soak.json
    python benchmarks/serve_soak.py --seconds 60 --out soak.json

The clients send chats, completions, responses and embeddings to `perilune serve` with the tiny model, with
and without streaming, and close some streams early. After a third of the time, a step of the engine raises an
error, so the engine restarts. After two thirds, the server gets SIGKILL, and a supervisor starts it again on
the same port. Every request must end within a minute: in a complete answer, or in an explicit error, which is
an HTTP status, an error event or a broken connection. Equal requests must get equal answers. The benchmark
always writes its result. It exits with 1 if a request hung, an outcome was unclear, two answers to the same
request differed, or memory grew.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from perilune.bundle.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "serve_soak.json"
HANGS = 60.0  # a request counts as hung after so many seconds without a byte
WARM = 60.0  # first seconds of a server process, without a check of its memory
GROWTH = 0.05  # largest growth of flat memory
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
BAD = ("hung", "unclear")  # forbidden outcomes
ERRORS = (httpx.RemoteProtocolError, httpx.ConnectError, httpx.ReadError, httpx.WriteError)


@dataclass
class Tally:
    """Outcomes of the requests.

    Attributes:
        outcomes: by endpoint and outcome.
        seconds: of complete answers, by endpoint.
        expected: the first answer to each distinct request.
        defects: descriptions of hung requests, unclear outcomes and differing answers.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)


def request_of(draw: random.Random) -> tuple[str, str, dict[str, Any]]:
    """A random request: the name of its endpoint, its path and its body."""
    seed, prompt = draw.randrange(20), f"{draw.randrange(90) + 10}+{draw.randrange(3)}="
    common = {"model": "tiny", "temperature": 1.0, "seed": seed, "stream": draw.random() < 0.5}
    message = [{"role": "user", "content": prompt}]
    kind = draw.choice(["chat", "chat", "completion", "completion", "response", "embedding"])
    if kind == "embedding":
        return kind, "/v1/embeddings", {"model": "tiny", "input": [prompt * draw.randrange(1, 20)]}
    if kind == "response":
        return kind, "/v1/responses", common | {"input": message, "max_output_tokens": 48, "store": seed < 10}
    if kind == "chat":
        tools = {"tools": TOOLS} if draw.random() < 0.3 else {}
        return kind, "/v1/chat/completions", common | tools | {"messages": message, "max_tokens": 48}
    return kind, "/v1/completions", common | {"prompt": prompt, "max_tokens": draw.choice([8, 48, 160])}


async def client(number: int, url: str, until: float, tally: Tally) -> None:
    """Send requests until the time `until`."""
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=HANGS, verify=False) as http:  # loads no certificates
        while time.monotonic() < until:
            kind, path, body = request_of(draw)
            leaves = body.get("stream", False) and draw.random() < 0.05
            began = time.monotonic()
            try:
                async with asyncio.timeout(2 * HANGS):
                    outcome, text = await exchange(http, path, body, leaves)
            except ERRORS as error:
                outcome, text = f"connection: {type(error).__name__}", None
            except (TimeoutError, httpx.TimeoutException) as error:
                outcome, text = "hung", None
                tally.defects.append(f"{path}: {type(error).__name__} after {time.monotonic() - began:.0f} s")
            except Exception as error:
                outcome, text = "unclear", None
                tally.defects.append(f"{path}: {type(error).__name__}: {error}"[:300])
            tally.outcomes[kind, outcome] += 1
            if outcome == "complete":
                tally.seconds.setdefault(kind, []).append(time.monotonic() - began)
                key = json.dumps(body | {"stream": None})
                if tally.expected.setdefault(key, text or "") != text:
                    tally.defects.append(f"{path}: another answer to {key}"[:300])
            await asyncio.sleep(draw.uniform(0.5, 1.5))


async def exchange(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], leaves: bool
) -> tuple[str, str | None]:
    """Send a request, and return its outcome and the text of a complete answer."""
    if not body.get("stream"):
        answer = await http.post(path, json=body)
        document = answer.json()
        if answer.status_code != 200:
            return f"status {answer.status_code}", str(document["error"]["message"])
        return "complete", text_of(document)
    async with http.stream("POST", path, json=body) as stream:
        if stream.status_code != 200:
            document = json.loads(await stream.aread())
            return f"status {stream.status_code}", str(document["error"]["message"])
        text, done = "", False
        async for line in stream.aiter_lines():
            data = line.removeprefix("data: ") if line.startswith("data: ") else ""
            if not data:
                continue
            if leaves:
                return "client left", None
            if data == "[DONE]":
                done = True
                continue
            document = json.loads(data)
            if "error" in document:
                return f"error event: {document['error']['message']}", None
            if document.get("type") == "response.failed":
                return f"error event: {document['response']['error']['message']}", None
            done = done or document.get("type") in ("response.completed", "response.incomplete")
            text += piece_of(document)
        if not done:
            raise RuntimeError("the stream ended without a final event")
        return "complete", text


def text_of(document: Mapping[str, Any]) -> str:
    """The text of a whole answer, or the numbers of an embedding."""
    if document["object"] == "list":
        return json.dumps([round(value, 4) for value in document["data"][0]["embedding"]])
    if document["object"] == "response":
        return "".join(part["text"] for item in document["output"] for part in item["content"])
    (choice,) = document["choices"]
    return str(choice["message"]["content"] or "" if "message" in choice else choice["text"])


def piece_of(document: Mapping[str, Any]) -> str:
    """The text of one event."""
    if document.get("type") == "response.output_text.delta":
        return str(document["delta"])
    pieces = [
        row["delta"].get("content") if "delta" in row else row["text"] for row in document.get("choices", ())
    ]
    return "".join(piece or "" for piece in pieces)


class Supervisor:
    """Starts the server, kills it, and measures its memory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0
        self.lives: list[list[tuple[float, float, int]]] = []  # of each process: seconds, MiB, descriptors
        self.start()

    def start(self) -> None:
        """Start the server on its previous port."""
        command = [sys.executable, __file__, "--serve", str(self._folder), "--port", str(self._port)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert self.process.stderr is not None
        while "answers at" not in (line := self.process.stderr.readline()):
            if not line:
                raise RuntimeError("the server did not start")
        self.url = line.split("answers at ")[1].strip().removesuffix("/v1")
        self._port, self._began = int(self.url.rsplit(":", 1)[1]), time.monotonic()
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.lives.append([])

    def measure(self) -> None:
        """Record the memory and descriptors of the process."""
        process = psutil.Process(self.process.pid)
        mebibytes = process.memory_info().rss / 2**20
        self.lives[-1].append((time.monotonic() - self._began, round(mebibytes, 1), process.num_fds()))


async def soak(clients: int, seconds: float, folder: Path) -> tuple[Tally, Supervisor, dict[str, float]]:
    """Run the clients and the faults."""
    supervisor, tally = Supervisor(folder), Tally()
    began = time.monotonic()
    until = began + seconds
    working = [asyncio.create_task(client(number, supervisor.url, until, tally)) for number in range(clients)]
    faults = [(began + seconds / 3, signal.SIGUSR1), (began + 2 * seconds / 3, signal.SIGKILL)]
    while time.monotonic() < until:
        await asyncio.sleep(2)
        supervisor.measure()
        if faults and time.monotonic() > faults[0][0]:
            supervisor.process.send_signal(faults.pop(0)[1])
            if len(faults) == 0:
                await asyncio.to_thread(supervisor.process.wait)
                await asyncio.sleep(1)
                await asyncio.to_thread(supervisor.start)
    await asyncio.wait_for(asyncio.gather(*working), 3 * HANGS)
    async with httpx.AsyncClient(base_url=supervisor.url, timeout=HANGS) as http:
        for _ in range(100):
            page = (await http.get("/metrics")).text
            lines = [line.split() for line in page.splitlines() if not line.startswith("#")]
            metrics = {name: float(value) for name, value in lines}
            counts = [
                metrics[f"perilune_{name}"] for name in ("samples_open", "requests_answering", "cache_use")
            ]
            if not any(counts):
                break
            await asyncio.sleep(0.1)
        else:
            tally.defects.append(f"the server still holds requests or cache blocks: {counts}")
    supervisor.measure()
    supervisor.process.terminate()
    await asyncio.to_thread(supervisor.process.wait)
    return tally, supervisor, metrics


def serve(folder: str, port: int) -> None:
    """Run `perilune serve` with an engine whose next step fails after SIGUSR1."""
    from perilune.cli.main import main
    from perilune.engine.engine import Engine

    step, fails = Engine.step, []

    def failing(engine: Engine) -> Any:
        if fails:
            fails.clear()
            raise RuntimeError("a fault for the soak")
        return step(engine)

    Engine.step = failing  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: fails.append(True))
    options = "--slots 64 --max-queue 64 --embeddings mean --stall 30"
    # A small cache, so that the server has touched all of it soon.
    sys.argv = ["perilune", "serve", folder, "--name", "tiny", "--port", str(port), *options.split()]
    sys.argv += ["--cache-tokens", "16384"]
    main()


def figures(given: argparse.Namespace, tally: Tally, supervisor: Supervisor, spent: float) -> dict[str, Any]:
    """The result."""
    endpoints = sorted({endpoint for endpoint, _ in tally.outcomes})
    outcomes = sorted({outcome for _, outcome in tally.outcomes})
    memory, flat = [], True
    for life in supervisor.lives:
        warm = [size for second, size, _ in life if second >= min(WARM, life[-1][0] / 3)]
        third = -(-len(warm) // 3)
        before, after = statistics.median(warm[:third]), statistics.median(warm[-third:])
        flat = flat and after <= before * (1 + GROWTH)
        memory.append(
            {
                "seconds": round(life[-1][0]),
                "MiB, first third": before,
                "MiB, last third": after,
                "descriptors at the end": life[-1][2],
            }
        )
    hung, unclear = (sum(n for (_, outcome), n in tally.outcomes.items() if outcome == kind) for kind in BAD)
    return {
        "title": "Soak test of perilune serve: an engine failure and a killed server",
        "about": f"{given.clients} clients send requests for {given.seconds:.0f} seconds. After a third of "
        "the time, a step of the engine raises an error. After two thirds, the server gets SIGKILL and is "
        "started again. Connections fail while the server is down, and requests get status 429 while its "
        "queue is full. In the row *verdict*, *defects* counts requests that hung, failures without a clear "
        "error, and different answers to equal requests. *Memory is flat* if it grew by at most "
        f"{GROWTH:.0%}.",
        "command": f"python benchmarks/serve_soak.py --seconds {given.seconds:.0f} --clients {given.clients}",
        "verdict": {
            "requests": sum(tally.outcomes.values()),
            "hung": hung,
            "unclear outcomes": unclear,
            "defects": len(tally.defects),
            "distinct requests with compared answers": len(tally.expected),
            "memory is flat": flat,
        },
        "requests by outcome": [
            {"outcome": outcome} | {name: tally.outcomes[name, outcome] for name in endpoints}
            for outcome in outcomes
        ],
        "seconds of complete answers": {
            name: {
                "p50": round(statistics.median(taken), 3),
                "p95": round(statistics.quantiles(taken, n=20)[-1], 3),
                "longest": round(max(taken), 3),
            }
            for name, taken in sorted(tally.seconds.items())
        },
        "memory of the two processes": memory,
        "first defects": tally.defects[:20],
        "client CPU seconds": round(spent),
        "load": [round(load, 1) for load in os.getloadavg()],
        "machine": describe_machine(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.port)
        return 0
    from perilune.models.checkpoints.loading import new_model, save_checkpoint
    from perilune.models.text.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny"
        tokenizer = Tokenizer.characters()
        save_checkpoint(folder, new_model("tiny", tokenizer, seed=0), tokenizer)
        tally, supervisor, _ = asyncio.run(soak(arguments.clients, arguments.seconds, folder))
    document = figures(arguments, tally, supervisor, time.process_time())
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["verdict"], indent=1))
    return 1 if tally.defects or not document["verdict"]["memory is flat"] else 0


if __name__ == "__main__":
    sys.exit(main())
