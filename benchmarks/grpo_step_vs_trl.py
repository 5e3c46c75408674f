"""Compare a GRPO step of Perilune with TRL's GRPOTrainer: same tiny model, prompts and reward, one core.

    python benchmarks/grpo_step_vs_trl.py

A tiny decoder first learns three-digit addition, with written working, so that answers have a realistic
length. Then the two take turns, each in a fresh process pinned to one core, and train on 256 completions per
step (32 prompts x 8) with a learning rate too small to change the policy. TRL has its own virtual environment
(--trl-python uses an existing one). Writes results/grpo_step_vs_trl.json.

Inclusive timers enclose the same parts of both: sampling (generation, until the token ids are available),
forward_backward (log-probs of the learner, loss, gradients, packing), other (reward, advantages, optimizer,
book-keeping), and the time from process start to the end of the first optimizer step. They record wall and
CPU seconds, which agree on a quiet core. On a busy machine only CPU seconds are meaningful.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPTS, SAMPLES, MAX_TOKENS, LR = 32, 8, 40, 1e-5
VERSIONS = ("torch==2.13.0", "trl", "transformers", "accelerate", "datasets")
HERE = Path(__file__).resolve().parent


def problem(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(100, 1000), rng.randrange(100, 1000)


def worked(a: int, b: int) -> str:
    """The working of a sum: from the right, both digits, carry and two-digit sum; then the answer."""
    parts, carry = [], 0
    for power in (1, 10, 100):
        x, y = a // power % 10, b // power % 10
        parts.append(f"{x}{y}{carry}{x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return f"{','.join(parts)};{a + b}"


def prompts_of(steps: int) -> list[str]:
    rng = random.Random(7)
    return [f"{a}+{b}=" for a, b in (problem(rng) for _ in range(PROMPTS * steps))]


def reward(prompt: str, text: str, finished: bool) -> float:
    """1 if the answer ended by itself and the text after its last ';' is the sum."""
    a, b = prompt[:-1].split("+")
    return float(finished and text.rpartition(";")[2] == str(int(a) + int(b)))


class Stopwatch:
    """Wall and CPU seconds by name, of the current step."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self.step_began = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def timed(self, name: str, call):
        """Wrap `call` so that its time counts under `name`."""

        def wrapper(*args, **kwargs):
            began = self.now()
            try:
                return call(*args, **kwargs)
            finally:
                totals = self.spent.setdefault(name, [0.0, 0.0])
                for i, (end, start) in enumerate(zip(self.now(), began, strict=True)):
                    totals[i] += end - start

        return wrapper

    def end_step(self) -> dict[str, dict[str, float]]:
        """{"seconds": {name: ..}, "processor_seconds": {name: ..}} of the step that ends now."""
        ends, rows = self.now(), {}
        for i, kind in enumerate(("seconds", "processor_seconds")):
            total = ends[i] - self.step_began[i]
            parts = {name: totals[i] for name, totals in self.spent.items()}
            rows[kind] = {**parts, "other": total - sum(parts.values()), "total": total}
        self.spent, self.step_began = {}, ends
        return rows


# ---------------------------------------------------------------- the model both start from


def make_model(path: Path, steps: int = 150) -> None:
    """Teach a tiny decoder to add, and save it in Hugging Face format."""
    import numpy as np

    from perilune.data.episode import Episode
    from perilune.learn.algorithms import algorithm
    from perilune.learn.batch import pack
    from perilune.learn.schedules import learning_rate
    from perilune.learn.trainer import Learner
    from perilune.learn.training_settings import OptimizerSettings
    from perilune.models.checkpoints.loading import new_model, save_checkpoint
    from perilune.models.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.characters()
    decoder = new_model("tiny", tokenizer, seed=0)
    settings = OptimizerSettings(lr=3e-3, warmup=20, final_lr=0.1)
    learner, rng = Learner(decoder, settings), random.Random(1)
    for step in range(steps):
        batch = []
        for _ in range(64):
            a, b = problem(rng)
            tokens = np.array(tokenizer.encode_completion(worked(a, b)), np.int32)
            zeros = np.zeros(len(tokens))
            batch.append(
                Episode(
                    "", "", "", "addition", 0, (), np.array(tokenizer.encode(f"{a}+{b}="), np.int32), tokens,
                    zeros == 0, zeros.astype(np.float32), zeros.astype(np.int32), "stop", reward=1.0,
                )
            )  # fmt: skip
        learner.forward_backward(pack([algorithm("sft")(batch, max_tokens=MAX_TOKENS)], 4096))
        learner.optim_step(learning_rate(settings, step, steps))
    save_checkpoint(path, decoder, tokenizer)


# ---------------------------------------------------------------- ours


def run_perilune(model: Path, steps: int, token_budget: int) -> dict[str, object]:
    import numpy as np
    import torch

    from perilune.data.episode import Episode
    from perilune.engine.engine import Engine
    from perilune.engine.request import Prompt, SamplingParams
    from perilune.learn.algorithms import algorithm
    from perilune.learn.batch import pack
    from perilune.learn.trainer import Learner
    from perilune.models.checkpoints.loading import load_checkpoint

    decoder, tokenizer = load_checkpoint(model)
    engine, learner, grpo = Engine(decoder), Learner(decoder), algorithm("grpo")
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
    texts, rows, gap, done, watch = prompts_of(steps), [], 0.0, 0.0, Stopwatch()
    sample = watch.timed("sampling", engine.sample)
    learn = watch.timed(
        "forward_backward", lambda weighted: learner.forward_backward(pack(weighted, token_budget))
    )
    for step in range(steps):
        engine.update_weights(None, learner.version)
        batch = texts[step * PROMPTS : (step + 1) * PROMPTS]
        prompts = [Prompt(tokenizer.encode(text), (0, step, i)) for i, text in enumerate(batch)]
        groups = []
        for text, prompt, answers in zip(batch, prompts, sample(prompts, SAMPLES, params), strict=True):
            prompt_ids = np.array(prompt.token_ids, np.int32)
            groups.append([
                Episode(
                    f"{step}/{text}/{j}", f"{step}/{text}", text, "addition", 0, (), prompt_ids,
                    answer.token_ids, np.ones(len(answer.token_ids), np.bool_), answer.logprobs,
                    answer.policy_version, answer.finish_reason, reward=reward(
                        text, tokenizer.decode(answer.token_ids.tolist()), answer.finish_reason == "stop"),
                )
                for j, answer in enumerate(answers)
            ])  # fmt: skip
        weighted = [grpo(group, max_tokens=MAX_TOKENS) for group in groups]
        figures = learn(weighted)
        learner.optim_step(LR)
        done = done or time.time()
        gap = max(gap, figures.get("logprob_gap_max", 0.0))
        episodes = [item for group in groups for item in group]
        rows.append(watch.end_step() | {
            "tokens": sum(len(item.token_ids) for item in episodes), "learned_tokens": figures["tokens"],
            "reward": statistics.fmean(item.reward or 0.0 for item in episodes),
            "dead_groups": statistics.fmean(float(group.dead) for group in weighted),
        })  # fmt: skip
    return {
        "first_step_done": done,
        "steps": rows,
        "logprob_gap_max": gap,
        "versions": {"torch": torch.__version__},
    }


# ---------------------------------------------------------------- theirs


def run_trl(model: Path, steps: int, micro_batch: int) -> dict[str, object]:
    import accelerate
    import datasets
    import torch
    import transformers
    import trl
    from transformers import AutoTokenizer, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    watch, rows = Stopwatch(), []
    state = {"tokens": 0, "reward": 0.0, "done": 0.0}

    def judge(prompts, completions, completion_ids, **_):
        rewards = [
            reward(prompt, text, ids[-1] == tokenizer.eos_token_id)
            for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True)
        ]
        state["tokens"], state["reward"] = sum(map(len, completion_ids)), statistics.fmean(rewards)
        return rewards

    class Timed(GRPOTrainer):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self._generate = watch.timed("sampling", self._generate)
            self.compute_loss = watch.timed("forward_backward", self.compute_loss)
            self.accelerator.backward = watch.timed("forward_backward", self.accelerator.backward)

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs) -> None:
            watch.end_step()

        def on_step_end(self, *args, **kwargs) -> None:
            state["done"] = state["done"] or time.time()
            rows.append(watch.end_step() | {"tokens": state["tokens"], "reward": state["reward"]})

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, max_steps=steps, learning_rate=LR, lr_scheduler_type="constant", seed=0,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=PROMPTS * SAMPLES // micro_batch,
            num_generations=SAMPLES, max_completion_length=MAX_TOKENS, temperature=1.0, beta=0.0,
            epsilon=0.2, epsilon_high=0.28, max_grad_norm=1.0, adam_beta2=0.99,
            gradient_checkpointing=False, shuffle_dataset=False, use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        data = datasets.Dataset.from_dict({"prompt": prompts_of(steps)})
        trainer = Timed(
            model=policy, reward_funcs=judge, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    packages = (torch, trl, transformers, accelerate, datasets)
    return {
        "first_step_done": state["done"],
        "steps": rows,
        "versions": {package.__name__: package.__version__ for package in packages},
    }


# ---------------------------------------------------------------- the comparison


def trl_python(given: str | None) -> str:
    """The interpreter of a virtual environment with TRL, which is made if none is given."""
    if given:
        return given
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perilune-benchmarks" / "trl"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *VERSIONS], check=True)
        (home / "complete").touch()
    return str(python)


def spawn(python: str, arguments: list[str], core: int) -> dict[str, object]:
    """Run a worker on one core, and return its result from its last line."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    began = time.time()
    output = subprocess.run(
        [python, __file__, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    ).stdout
    result: dict[str, object] = json.loads(output.splitlines()[-1])
    result["start_to_first_step"] = float(result.pop("first_step_done")) - began  # type: ignore[arg-type]
    return result


def summary(runs: list[dict], warm_up: int) -> dict[str, object]:
    """Medians over the steps of all runs, without their warm-up."""
    steps = [step for run in runs for step in run["steps"][warm_up:]]
    figures: dict[str, object] = {}
    for kind in ("seconds", "processor_seconds"):
        parts = {part: [step[kind][part] for step in steps] for part in steps[0][kind]}
        figures[kind] = {part: round(statistics.median(values), 4) for part, values in parts.items()}
        quartiles = statistics.quantiles((step[kind]["total"] for step in steps), n=4)
        figures[f"quartiles_of_total_{kind}"] = [round(quartile, 4) for quartile in quartiles]
    for name in ("tokens", "learned_tokens", "reward", "dead_groups"):
        if name in steps[0]:
            figures[f"{name}_mean"] = round(statistics.fmean(step[name] for step in steps), 4)
    if "logprob_gap_max" in runs[0]:
        figures["logprob_gap_max"] = max(run["logprob_gap_max"] for run in runs)
    figures["start_to_first_step_seconds"] = [round(run["start_to_first_step"], 2) for run in runs]
    figures["versions"] = runs[0]["versions"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl-python", help="interpreter that has TRL (default: an environment is made)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run left out of the medians")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=PROMPTS * SAMPLES, help="of TRL")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "grpo_step_vs_trl.json")
    parser.add_argument("--worker", choices=("perilune", "trl", "model"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="checkpoint to start from (default: one is trained)")
    options = parser.parse_args()

    if options.worker == "model":
        make_model(options.model)
        return
    if options.worker == "perilune":
        print(json.dumps(run_perilune(options.model, options.steps, options.token_budget)))
        return
    if options.worker == "trl":
        print(json.dumps(run_trl(options.model, options.steps, options.micro_batch)))
        return

    interpreter = trl_python(options.trl_python)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if not options.model:
            subprocess.run([sys.executable, __file__, "--worker", "model", "--model", model], check=True)
        common = ["--model", str(model), "--steps", str(options.steps)]
        runs: dict[str, list[dict]] = {"perilune": [], "trl": []}
        for number in range(options.rounds):
            ours = ["--worker", "perilune", *common, "--token-budget", str(options.token_budget)]
            others = ["--worker", "trl", *common, "--micro-batch", str(options.micro_batch)]
            runs["perilune"].append(spawn(sys.executable, ours, options.core))
            runs["trl"].append(spawn(interpreter, others, options.core))
            for name, done in runs.items():
                last = summary(done[-1:], options.warm_up)
                print(number, name, last["seconds"], last["processor_seconds"], file=sys.stderr)
    figures = {name: summary(done, options.warm_up) for name, done in runs.items()}
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    report = {
        "command": f"python benchmarks/grpo_step_vs_trl.py --rounds {options.rounds} --steps {options.steps}",
        "processor": next((line.split(":")[1].strip() for line in cpuinfo if "model name" in line), ""),
        "threads": 1,
        "load_average_at_end": [round(load, 2) for load in os.getloadavg()],
        "completions_per_step": PROMPTS * SAMPLES,
        "trl_over_perilune": {
            kind: {part: round(figures["trl"][kind][part] / ours, 2) for part, ours in of_ours.items()}
            for kind, of_ours in figures["perilune"].items()
            if kind in ("seconds", "processor_seconds")
        },
        **figures,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
