"""Compare a GRPO step of a real model in Perilune (float32, bfloat16) with TRL's GRPOTrainer and the floor.

    perilune model fetch smollm2-135m
    python benchmarks/real_model.py --model smollm2-135m

`--model` is a model in PERILUNE_HOME or a Hugging Face folder. Perilune runs a recipe with `perilune run`,
so its steps include everything that a run does: checks, metrics, episodes. TRL gets the prompts of those
episodes as text, in the same order, and has its own virtual environment. Both sample 8 answers of at most
32 tokens (`--max-tokens`) to each of 16 questions (chain_sum of reasoning-gym). The reward prefers short
answers, so every group has a gradient. With `--alive 2`, only the first 2 groups of a step do: all answers
to the other questions have the reward 0. Such a run adds a table to the result. The arms take turns, each
in a fresh process. Medians leave out the first step of each process.

The floor of learning counts only the matrix products, and each prompt once: 6 FLOP per weight of the layers
and input token, and 6 per weight of the head and learned token, at the rate of one large product on this
machine. The floor of sampling counts only the products of the prompts. Writes results/real_model.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_step_vs_trl import Stopwatch, trl_python

PROMPTS, SAMPLES, LR = 16, 8, 1e-9  # such a small rate does not change the lengths
HERE = Path(__file__).resolve().parent
PRECISIONS = ("float32", "bfloat16")
REWARD = """ALIVE = {alive!r}  # the questions whose answers have different rewards; None: all

def shorter(prompts, completions, **columns):
    questions = [prompt[-1]["content"] for prompt in prompts]
    scores = [max(0.0, 1 - len(one[0]["content"]) / 200) for one in completions]
    return [score * (ALIVE is None or asked in ALIVE) for asked, score in zip(questions, scores)]
"""
RECIPE = """\
name: real_model
seed: 0
model: {{path: {model}}}
environment:
  id: reasoning_gym
  task: chain_sum
  config: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}
rewards:
  shorter: {{function: "shorter.py:shorter", weight: 1.0}}
resources: {{device: cpu, threads: {threads}}}
stages:
  - name: rl
    task: rl
    checkpoint: model
    algorithm: grpo
    steps: {steps}
    prompts: {prompts}
    samples: {samples}
    max_tokens: {max_tokens}
    lr: {lr}
    precision: {precision}
    token_budget: 4096
"""


# ---------------------------------------------------------------- ours


def run_perilune(options: argparse.Namespace, precision: str, home: Path) -> dict[str, Any]:
    """Run the recipe, and read its records."""
    home.mkdir(parents=True)
    alive = alive_questions(options.steps, options.alive)
    (home / "shorter.py").write_text(REWARD.format(alive=alive))
    recipe = home / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(
            model=options.model.resolve(), threads=options.threads, steps=options.steps, prompts=PROMPTS,
            samples=SAMPLES, max_tokens=options.max_tokens, lr=LR, precision=precision,
        )
    )  # fmt: skip
    command = [Path(sys.executable).with_name("perilune"), "run", recipe]
    began = time.perf_counter()
    subprocess.run(
        command, check=True, env=os.environ | {"PERILUNE_HOME": str(home / "home")}, stdout=sys.stderr
    )
    seconds = time.perf_counter() - began
    (timings,) = (home / "home").rglob("timings.jsonl")
    (metrics,) = (home / "home").rglob("metrics.jsonl")
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in (timings, metrics)]
    (summary,) = (home / "home").rglob("summary.json")
    memory = json.loads(summary.read_text())["memory"]
    episodes = sorted((home / "home").rglob("step-*.parquet"))
    return {
        "steps": [step_row(*row) for row in zip(*lines, episodes, strict=True)],
        "start_to_end_seconds": seconds,
        "peak_bytes": memory["peak_bytes"],
        "planned_bytes": memory["planned_bytes"],
        "prompts": [ids for path in episodes for ids in prompts_of(path)],
    }


def alive_questions(steps: int, alive: int) -> list[str] | None:
    """The first `alive` questions of each step, in the order of training; None for all."""
    if alive == PROMPTS:
        return None
    import yaml

    from perilune.environments.core.registry import make_environment

    recipe = yaml.safe_load(RECIPE.split("rewards:", maxsplit=1)[0].format(model="model"))
    tasks = islice(make_environment(recipe["environment"]).tasks("train", recipe["seed"]), steps * PROMPTS)
    return [task.prompt[-1]["content"] for number, task in enumerate(tasks) if number % PROMPTS < alive]


def step_row(timing: dict[str, Any], metric: dict[str, Any], episodes: Path) -> dict[str, Any]:
    """Seconds and tokens of one step. Learning computes (feeds) the prompt of each live group once."""
    from perilune.data.episodes_file import read_episodes

    played = list(read_episodes(episodes))
    prompts = {episode.group_id: len(episode.prompt_ids) for episode in played}
    rewards: dict[str, set[float | None]] = {}
    for episode in played:
        rewards.setdefault(episode.group_id, set()).add(episode.reward)
    learned = [episode for episode in played if len(rewards[episode.group_id]) > 1]
    fed = {group: tokens for group, tokens in prompts.items() if len(rewards[group]) > 1}
    parts = {name: timing[name] for name in ("sampling", "learning", "scoring", "other")}
    return {
        "seconds": parts | {"total": sum(parts.values())},
        "processor_seconds": {"total": timing["processor"]},
        "tokens": metric["tokens"],
        "prompt_tokens": sum(prompts.values()),
        "fed_tokens": sum(fed.values()) + sum(len(episode.token_ids) - 1 for episode in learned),
        "unshared_tokens": sum(len(episode.prompt_ids) + len(episode.token_ids) - 1 for episode in learned),
        "dead_groups": metric["dead_groups"],
        "logprob_gap_max": metric["logprob_gap_max"],
    }


def prompts_of(episodes: Path) -> list[list[int]]:
    """The prompt of each group of a step, in order."""
    from perilune.data.episodes_file import read_episodes

    return list({item.group_id: item.prompt_ids.tolist() for item in read_episodes(episodes)}.values())


# ---------------------------------------------------------------- theirs


def run_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Train with GRPOTrainer on `options.prompts`. Runs in TRL's environment, which has no Perilune."""
    import accelerate
    import datasets
    import torch
    import transformers
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    ids = json.loads(options.prompts.read_text())
    texts = [tokenizer.decode(tokens) for tokens in ids]
    assert all(tokenizer(text)["input_ids"] == tokens for text, tokens in zip(texts, ids, strict=True))
    rewarded = {text for number, text in enumerate(texts) if number % PROMPTS < options.alive}
    watch, rows, sampled = Stopwatch(), [], {"tokens": 0}

    def shorter(prompts, completions, completion_ids, **_):
        sampled["tokens"] = sum(map(len, completion_ids))
        scores = [max(0.0, 1 - len(text) / 200) for text in completions]
        return [score * (asked in rewarded) for asked, score in zip(prompts, scores, strict=True)]

    class Timed(GRPOTrainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self._generate = watch.timed("sampling", self._generate)
            self.compute_loss = watch.timed("learning", self.compute_loss)
            self.accelerator.backward = watch.timed("learning", self.accelerator.backward)

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            watch.end_step()

        def on_step_end(self, *args, **kwargs) -> None:
            rows.append(watch.end_step() | sampled)
            print(f"trl step {len(rows)}: {rows[-1]}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, max_steps=options.steps, learning_rate=LR, seed=0,
            lr_scheduler_type="constant",
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=PROMPTS * SAMPLES // options.micro_batch,
            num_generations=SAMPLES, max_completion_length=options.max_tokens, temperature=1.0, beta=0.0,
            epsilon=0.2, epsilon_high=0.28, max_grad_norm=1.0, adam_beta2=0.99,
            gradient_checkpointing=False, shuffle_dataset=False, use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Timed(
            model=policy, reward_funcs=shorter, args=config, processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}), callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    packages = (torch, trl, transformers, accelerate, datasets)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {
        "steps": rows,
        "peak_bytes": int(peak.split()[1]) * 1024,
        "versions": {package.__name__: package.__version__ for package in packages},
    }


# ---------------------------------------------------------------- the floor


def measure_rates(threads: int) -> dict[str, float]:
    """The highest GFLOP/s of a large product of torch, by precision."""
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for name in PRECISIONS:
        x, weight = (torch.randn(n, 2048).to(getattr(torch, name)) for n in (4096, 2048))
        best = float("inf")
        for _ in range(8):
            began = time.perf_counter()
            x @ weight.t()
            best = min(best, time.perf_counter() - began)
        rates[name] = 2 * 4096 * 2048 * 2048 / best / 1e9
    return rates


def floor_seconds(model: Path, steps: list[dict[str, Any]], rate: float) -> dict[str, float]:
    """Median seconds of the products of a step at `rate`: of prompts in sampling, and of learning."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[key] * size for key in ("num_attention_heads", "num_key_value_heads"))
    of_layers = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner)
    head = hidden * config["vocab_size"]
    flops = {
        "sampling": [2 * of_layers * step["prompt_tokens"] for step in steps],
        "learning": [6 * (of_layers * step["fed_tokens"] + head * step["tokens"]) for step in steps],
        "learning_without_sharing": [
            6 * (of_layers * step["unshared_tokens"] + head * step["tokens"]) for step in steps
        ],
    }
    return {
        f"{name}_floor_seconds": round(statistics.median(of) / rate / 1e9, 2) for name, of in flops.items()
    }


# ---------------------------------------------------------------- the comparison


def worker(python: str, arguments: list[str], threads: int) -> Any:
    """Run this file in a new process, and return the result from its last line."""
    environment = os.environ | {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, __file__, *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of all runs but the first of each."""
    steps = [step for run in runs for step in run["steps"][1:] or run["steps"]]
    figures: dict[str, Any] = {
        f"{part}_seconds": round(statistics.median(step["seconds"].get(part, 0.0) for step in steps), 2)
        for part in ("total", "sampling", "learning", "other")
    }
    totals = [step["seconds"]["total"] for step in steps]
    figures |= {"fastest_step_seconds": round(min(totals), 2), "slowest_step_seconds": round(max(totals), 2)}
    processor = [step["processor_seconds"]["total"] for step in steps]
    figures["processor_seconds"] = round(statistics.median(processor), 2)
    figures["tokens"] = statistics.median(step["tokens"] for step in steps)
    figures["peak_gib"] = round(max(run["peak_bytes"] for run in runs) / (1 << 30), 2)
    for key in ("logprob_gap_max", "dead_groups"):
        if key in steps[0]:
            figures[key] = max(step[key] for step in steps)
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms in turns and return the report."""
    runs: dict[str, list[dict[str, Any]]] = {}
    interpreter = None if options.no_trl else trl_python(options.trl_python)
    with tempfile.TemporaryDirectory(prefix="real-model-") as scratch:
        for number in range(options.rounds):
            for precision in options.precisions:
                home = Path(scratch) / f"{precision}-{number}"
                done = run_perilune(options, precision, home)
                runs.setdefault(precision, []).append(done)
            if interpreter is not None:
                prompts = Path(scratch) / "prompts.json"
                prompts.write_text(json.dumps(runs[options.precisions[0]][-1]["prompts"]))
                arguments = ["--worker", "trl", "--model", str(options.model), "--prompts", str(prompts)]
                arguments += ["--steps", str(options.steps), "--micro-batch", str(options.micro_batch)]
                arguments += ["--alive", str(options.alive), "--max-tokens", str(options.max_tokens)]
                runs.setdefault("trl", []).append(worker(interpreter, arguments, options.threads))
            for name, done in runs.items():
                print(number, name, summarize(done[-1:]), file=sys.stderr, flush=True)
    rates = worker(sys.executable, ["--worker", "rates", "--threads", str(options.threads)], options.threads)
    return report(options, runs, rates)


def report(
    options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], rates: dict[str, float]
) -> dict[str, Any]:
    """The document of results/real_model.json."""
    import torch

    from perilune.bundle.machine import describe_machine

    arms = {name: summarize(done) for name, done in runs.items()}
    for precision in options.precisions:
        steps = [step for run in runs[precision] for step in run["steps"][1:] or run["steps"]]
        arms[precision] |= floor_seconds(options.model, steps, rates[precision])
    ratios = {
        name: round(arms["trl"]["total_seconds"] / arm["total_seconds"], 1)
        for name, arm in arms.items()
        if "trl" in arms and name != "trl"
    }
    return {
        "title": "GRPO step of a 135M model: Perilune against TRL",
        "about": "Perilune runs with all checks of a run, and TRL in float32. Both have the same prompts "
        "and answer lengths. The table shows medians over all steps except the first of each process.\n\n* "
        "*Log-prob gap* is the largest difference between the sampler's and the learner's log-prob of a "
        "token, in nats.\n* The answers of a *dead group* all have the same reward.\n* *Learning floor* is "
        "the time that the matrix products of learning alone would take, at the measured rate of a large "
        "product. Learning computes each prompt once per group, and leaves out dead groups. *Without "
        "sharing* is the floor with each prompt counted once per answer. *Sampling floor* is the same for "
        "the prompts alone.",
        "command": f"python benchmarks/real_model.py --model {options.model.name} --rounds {options.rounds}"
        f" --steps {options.steps}",
        "median step": arms,
        "time of TRL / time of Perilune": ratios,
        "gflops_of_a_large_product": {name: round(rate) for name, rate in rates.items()},
        "threads": options.threads,
        "load_average_at_end": [round(load, 2) for load in os.getloadavg()],
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__} | (runs["trl"][0]["versions"] if "trl" in runs else {}),
    }


def add_table(
    document: dict[str, Any], result: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Add the median step of a run with dead groups to the document of `report`."""
    name = (
        f"median step with {options.alive} of {PROMPTS} groups alive, {options.max_tokens} tokens per answer"
    )
    command = f"{result['command']} --alive {options.alive} --max-tokens {options.max_tokens}"
    rates = result["gflops_of_a_large_product"]
    arms = {
        arm: figures | ({"gflops_of_a_large_product": rates[arm]} if arm in rates else {})
        for arm, figures in result["median step"].items()
    }
    return document | {name: arms, f"command for {name}": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="model in PERILUNE_HOME, or a Hugging Face folder")
    parser.add_argument("--trl-python", help="interpreter that has TRL (default: an environment is made)")
    parser.add_argument("--no-trl", action="store_true", help="measure Perilune alone")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--alive", type=int, default=PROMPTS, choices=range(PROMPTS + 1), metavar="GROUPS",
        help=f"groups of a step with a gradient, of {PROMPTS}; if fewer, add a table to the result",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer (default: 32)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--micro-batch", type=int, default=32, help="of TRL; 128 takes 12 GB of memory")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "real_model.json")
    parser.add_argument("--worker", choices=("trl", "rates"), help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "rates":
        print(json.dumps(measure_rates(options.threads)))
        return
    if options.model is None:
        parser.error("--model is required")
    if options.worker == "trl":
        print(json.dumps(run_trl(options)))
        return
    from perilune.cli.arguments import find_checkpoint  # TRL's interpreter lacks perilune

    options.model = find_checkpoint(str(options.model))
    result = measure(options)
    if options.alive < PROMPTS:
        result = add_table(json.loads(options.out.read_text()), result, options)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
