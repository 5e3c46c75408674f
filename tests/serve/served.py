"""A small checkpoint, and `perilune serve` in a separate process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

CONTEXT = 256
TEMPLATE = (
    # A checkpoint's template may loop forever. This one does for the message "hang".
    "{% if messages[0].content == 'hang' %}"
    + "{% for a in range(99999) %}" * 4
    + "{% endfor %}" * 4
    + "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if shout is defined %}LOUD {% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_checkpoint(folder: Path) -> Path:
    """Save a random model whose answers vary: no token is certain."""
    tokenizer = Tokenizer.characters().with_chat_template(TEMPLATE, where="test")
    shape = PRESETS["tiny"].replace(initializer_range=0.15, max_position_embeddings=CONTEXT)
    save_checkpoint(folder, new_model(shape, tokenizer, seed=0), tokenizer)
    return folder


@dataclass
class Direct:
    """The same checkpoint in this process, for the expected answers."""

    decoder: Decoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Direct:
        return cls(*load_checkpoint(folder))

    def sample(self, text: str, seed: int, n: int = 1, **params: Any) -> list[Completion]:
        return self.sample_all([(text, seed)], n, **params)[0]

    def sample_all(
        self, asked: Sequence[tuple[str, int]], n: int = 1, **params: Any
    ) -> list[list[Completion]]:
        engine = Engine(self.decoder, slots=64, tokenizer=self.tokenizer)
        prompts = [Prompt(self.tokenizer.encode(text), (seed, 0, 0)) for text, seed in asked]
        ends = (self.tokenizer.eos_token_id,)
        return engine.sample(prompts, n, SamplingParams(**({"stop_token_ids": ends} | params)))

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids)


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    name: str
    token: str = ""
    said: list[str] = field(default_factory=list)

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.url, api_key=self.token or "none", max_retries=0, timeout=60, **options
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key=self.token or "none", max_retries=0, timeout=120)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx.Client(base_url=self.root, headers=headers, timeout=60, verify=False)

    def metrics(self) -> dict[str, float]:
        with self.http() as http:
            page = http.get("/metrics").text
        samples = re.findall(r"^(perilune_\S+) ([\d.e+-]+)$", page, re.MULTILINE)
        return {name.removeprefix("perilune_"): float(value) for name, value in samples}

    def at_rest(self, seconds: float = 60) -> dict[str, float]:
        """Wait until the server is idle and return its metrics; fail if a resource is never released."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            counts = {
                name: metrics[name]
                for name in (
                    "samples_open",
                    "samples_running",
                    "requests_waiting",
                    "requests_answering",
                    "cache_use",
                )
            }
            if not any(counts.values()):
                return metrics
            assert time.monotonic() < deadline, counts
            time.sleep(0.05)


@contextmanager
def served(checkpoint: Path, *options: str, token: str = "", **environment: str) -> Iterator[Served]:
    """Run `perilune serve CHECKPOINT OPTIONS` on a free port; stop it on exit and check it for tracebacks."""
    command = [sys.executable, "-m", "perilune.cli.main", "serve", str(checkpoint), "--port", "0", *options]
    variables = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    with (
        ThreadPoolExecutor(1) as threads,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process,
    ):
        assert process.stderr is not None
        written = None
        try:
            lines, match = [], None
            while match is None:
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
                match = re.search(r"(\S+) answers at (http://\S+)", lines[-1])
            written = threads.submit(process.stderr.read)  # a full pipe would stop the server
            yield Served(process, match[2], match[1], token, lines)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            rest = process.stderr.read() if written is None else written.result()
            assert "Traceback" not in rest, rest
