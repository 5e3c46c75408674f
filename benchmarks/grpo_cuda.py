"""Measure GRPO steps on a GPU: seconds, memory against the plan, and the share of the GPU's rate in learning.

    python benchmarks/grpo_cuda.py                    0.6B and 1.7B, and LoRA on 8B
    python benchmarks/grpo_cuda.py --cases 1.7B
    python benchmarks/grpo_cuda.py --smoke --out smoke.json    a tiny shape on the CPU

Each case is a recipe with random weights that `perilune run` executes, so its steps include everything that a
run does: checks, metrics, episodes. Answers of random weights have the full length, and rewards are a digest
of the text, so every group has a gradient. Medians leave out the first step, which captures graphs. Without a
GPU it exits with 2.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from real_model import step_row
from recipe_runs import write
from rollout.checkpoints import checkpoint
from rollout.environments import CACHE
from rollout.shapes import SHAPES
from rollout_cuda import lacks_gpu, machine, measure_limits, release

OUT = Path("benchmarks/results/grpo_cuda.json")
ABOUT = """\
Each case is a recipe with random weights, which `perilune run` executes with bfloat16 products and all checks
of a run. Rewards are a digest of the text, so every group has a gradient. Medians leave out the first step,
which captures CUDA graphs.

* *MFU of learning* (model FLOPs utilization) is the FLOPs of learning without recomputation, divided by its
  time and by the measured rate of one large matrix product.
* *Peak GiB* is the memory that PyTorch allocated. *Planned GiB* is the estimate of `--plan`."""
REWARD = """import zlib

def digest(completions, **kwargs):
    return [zlib.crc32(one[0]["content"].encode()) / 2**32 for one in completions]
"""
RECIPE = """\
name: grpo_cuda
seed: 0
model: {{path: {model}}}
environment: {{id: jsonl, path: questions.jsonl, match: null}}
rewards:
  digest: {{function: "reward.py:digest", weight: 1.0}}
resources: {{device: {device}}}
stages:
  - name: rl
    task: rl
    checkpoint: model
    algorithm: grpo
    steps: {steps}
    save_every: {steps}
    prompts: {prompts}
    samples: {samples}
    max_tokens: {max_tokens}
    token_budget: {token_budget}
    lr: 1.0e-9
    precision: {precision}
    activation_checkpointing: {checkpointing}
    forgetting: false
"""
LORA = "    lora: {rank: 16, base: bfloat16}\n"


@dataclass(frozen=True, slots=True)
class Case:
    """Model, training settings and tokens per step of one recipe."""

    model: str
    prompts: int
    samples: int
    max_tokens: int
    token_budget: int
    checkpointing: bool = True
    lora: bool = False
    steps: int = 3


CASES = {
    "0.6B": Case("M", 32, 8, 512, 16384, checkpointing=False),
    "1.7B": Case("L", 8, 8, 2048, 16384),
    "8B LoRA": Case("XL", 2, 4, 7936, 8192, lora=True, steps=2),
}
SMOKE = {"smoke": Case("smoke", 2, 4, 16, 256), "smoke LoRA": Case("smoke", 2, 4, 16, 256, lora=True)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, help="steps of each case, the first included")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape in float32 on the CPU")
    chosen = parser.parse_args()
    if not chosen.smoke and lacks_gpu():
        return 2
    device, precision = ("cpu", "float32") if chosen.smoke else ("cuda", "bfloat16")
    limits = measure_limits(device, precision)
    release(device)
    rows: dict[str, Any] = {}
    for name, case in SMOKE.items() if chosen.smoke else ((name, CASES[name]) for name in chosen.cases):
        rows[name] = measure(case, chosen.steps or case.steps, device, precision, limits.product[precision])
        print(name, json.dumps(rows[name]), flush=True)
        document = {
            "title": "GRPO steps on a GPU",
            "about": ABOUT,
            "command": shlex.join(["python", "benchmarks/grpo_cuda.py", *sys.argv[1:]]),
            "cases": rows,
            "work": {name: asdict((SMOKE if chosen.smoke else CASES)[name]) for name in rows},
            "machine": machine(device, limits, precision),
        }
        write(chosen.out, document)
    return 0


def measure(case: Case, steps: int, device: str, precision: str, rate: float) -> dict[str, Any]:
    """The row of a case; `rate` in FLOP/s."""
    model = checkpoint(CACHE / "checkpoints", case.model, "bfloat16")
    with tempfile.TemporaryDirectory(prefix="grpo-cuda-") as folder:
        run(case, steps, device, precision, model, Path(folder))
        (timings,) = Path(folder).rglob("timings.jsonl")
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        (summary,) = Path(folder).rglob("summary.json")
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in (timings, metrics)]
        episodes = sorted(Path(folder).rglob("step-*.parquet"))
        rows = [step_row(*row) for row in zip(*lines, episodes, strict=True)]
        memory = json.loads(summary.read_text())["memory"]
    flops = [learning_flops(case, path) for path in rows]
    counted = rows[1:]
    parts = {
        f"{part}_seconds": round(statistics.median(row["seconds"][part] for row in counted), 3)
        for part in ("total", "sampling", "learning", "scoring", "other")
    }
    return {
        **parts,
        "first_step_seconds": round(rows[0]["seconds"]["total"], 3),
        "tokens_per_step": counted[-1]["tokens"],
        "sampled_tokens_per_second": round(counted[-1]["tokens"] / parts["sampling_seconds"]),
        "mfu_of_learning": round(
            statistics.median(
                flops[1 + index] / row["seconds"]["learning"] for index, row in enumerate(counted)
            )
            / rate,
            3,
        ),
        "peak_gib": round(memory["peak_bytes"] / 2**30, 2),
        "planned_gib": round(memory["planned_bytes"] / 2**30, 2),
        "logprob_gap_max": max(row["logprob_gap_max"] for row in rows),
    }


def run(case: Case, steps: int, device: str, precision: str, model: Path, folder: Path) -> None:
    """Run the recipe of a case under `folder`."""
    (folder / "reward.py").write_text(REWARD)
    questions = ({"prompt": f"t{number} t1 t2 t3 t4 t5 t6 t7 t8"} for number in range(10, 110))
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(
            model=model.resolve(), device=device, steps=steps, prompts=case.prompts, samples=case.samples,
            max_tokens=case.max_tokens, token_budget=case.token_budget, precision=precision,
            checkpointing=str(case.checkpointing).lower(),
        )
        + (LORA if case.lora else "")
    )  # fmt: skip
    command: Sequence[str] = [str(Path(sys.executable).with_name("perilune")), "run", str(recipe)]
    home = {"PERILUNE_HOME": str(folder / "home")}
    subprocess.run(command, check=True, env=os.environ | home, stdout=sys.stderr)


def learning_flops(case: Case, row: dict[str, Any]) -> float:
    """FLOPs of the matrix products in a step's forward and backward passes, with shared prompts.

    A frozen matrix has no products for its gradient. Attention is causal.
    """
    shape, products = SHAPES[case.model], 4 if case.lora else 6
    matrices = products * (shape.layer_parameters * row["fed_tokens"] + shape.head_parameters * row["tokens"])
    per_sample = row["fed_tokens"] / (case.prompts * case.samples)
    attended = row["fed_tokens"] * per_sample / 2
    return matrices + 12 * shape.layers * shape.heads * shape.head_dim * attended


if __name__ == "__main__":
    sys.exit(main())
