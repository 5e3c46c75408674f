"""Measure the cost of the always-on checks of an rl stage, and their false alarms.

    python benchmarks/checks.py [--pairs 5] [--steps 8]

Cost: the tiny model runs with 256 answers of up to 64 tokens per step on one thread, alternately with and
without the checks of every step (without: their functions do nothing). The benchmark compares CPU seconds per
step, which are independent of other load on the machine, and times the preflight separately. False alarms:
twenty runs of four steps with different algorithms, options and seeds. The checks must stop none of them.
Writes results/checks.json.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from perilune.bundle.freeze import job_document
from perilune.bundle.job import Job, Resources
from perilune.bundle.plugin import load_plugin
from perilune.bundle.workspace import Workspace
from perilune.files import read_json_lines
from perilune.models.config.decoder_config import PRESETS
from perilune.tasks.checks.advantages import check_advantages
from perilune.tasks.checks.gradient import check_gradient
from perilune.tasks.checks.twin import Twin
from perilune.tasks.rl.spec import RLSpec
from recipe_runs import document, write

HERE = Path(__file__).resolve().parent
SUMS: Mapping[str, Any] = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "config": {
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 3, "operators": ["+"],
        "allow_parentheses": False, "allow_negation": False,
    },
    "prompt": "compact",
}  # fmt: skip
SKIPPED = (
    "perilune.rollout.worker.check_group",
    "perilune.rollout.worker.check_scored_text",
    "perilune.tasks.rl.update.check_packed",
    "perilune.tasks.rl.update.check_weights",
    "perilune.tasks.checks.epochs.EpochChecker.check",
    "perilune.tasks.checks.logprobs.LogprobChecker.check_sampler",
    "perilune.tasks.checks.logprobs.LogprobChecker.check_learner",
    "perilune.tasks.checks.logprobs.LogprobChecker.check_reference",
    "perilune.tasks.checks.preflight.run_preflight",
    "perilune.tasks.stage.publishing.Publisher.publish",
    "perilune.tasks.stage.publishing.Publisher.check_versions",
)
LORA = {"rank": 4}
CLEAN: tuple[Mapping[str, Any], ...] = (
    {},
    {"algorithm": "dr_grpo", "updates_per_batch": 2},
    {"algorithm": {"name": "rloo", "ratio": "sequence-product"}, "updates_per_batch": 2},
    {"algorithm": "reinforce_pp", "kl": 0.1},
    {"algorithm": "reinforce_pp_baseline", "temperature": 0.7},
    {"algorithm": "dapo", "samples": 6},
    {"algorithm": "gspo", "lora": LORA, "kl": 0.05},
    {"algorithm": "cispo", "precision": "bfloat16"},
    {"algorithm": "maxrl", "weight_decay": 0.1},
    {"algorithm": {"name": "ppo", "critic_lr": 0.01, "bootstrap_truncated": True}, "epochs_per_batch": 2},
    {"algorithm": "dgpo", "kl": 0.1, "kl_estimator": "k3_corrected"},
    {"algorithm": "pkpo", "samples": 8},
    {"algorithm": "pass_at_k_training", "samples": 8},
    {"algorithm": "toggle", "temperature": 1.3},
    {"algorithm": {"name": "grpo", "dual_clip": 3.0, "entropy_bonus": 0.01}, "grad_clip": 0.01},
    {"kl": 1.0, "kl_estimator": "k2", "lr": 0.01, "updates_per_batch": 4},
    {"kl": 0.1, "kl_estimator": "k1_reward", "algorithm": "ppo"},
    {
        "lora": {"rank": 8, "base": "int8", "targets": ["q_proj", "down_proj"]},
        "activation_checkpointing": True,
    },
    {"off_policy": {"proximal": "learner", "weight": "truncate"}, "token_budget": 32, "epochs_per_batch": 2},
    {"beta2": 0.9, "warmup": 0, "schedule": "linear", "final_lr": 0.1, "kl": 0.1, "lora": LORA},
)


def run(root: Path, *, seed: int = 1, **options: Any) -> list[dict[str, float]]:
    """Run an rl stage of the tiny preset in a bundle at `root`, and return its timings."""
    settings = {
        "checkpoint": "model", "steps": 4, "prompts": 4, "samples": 4, "max_tokens": 8, "lr": 1e-3,
        "warmup": 2, "save_every": 1000, **options,
    }  # fmt: skip
    plugin = load_plugin("rl")
    job = Job(
        task="rl", stage="rl", spec=plugin.spec.model_validate(settings).model_dump(mode="json"),
        model={"preset": "tiny"}, environment=dict(SUMS), seed=seed,
        resources=Resources(device="cpu", threads=1), inputs=(),
    )  # fmt: skip
    root.mkdir(parents=True)
    (root / "job.json").write_bytes(job_document(job))
    with contextlib.redirect_stdout(io.StringIO()):
        plugin.run(Workspace(root))
    return list(read_json_lines(root / "artifacts" / "timings.jsonl"))


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Replace the checks by functions that do nothing. Weights still go to the engine."""
    with contextlib.ExitStack() as stack:
        for name in SKIPPED:
            stub = {"Publisher.publish": _publish, "Publisher.check_versions": lambda _, groups: groups}.get(
                name.partition("publishing.")[2], lambda *_, **__: None
            )
            stack.enter_context(mock.patch(name, stub))
        stack.enter_context(
            mock.patch(
                "perilune.tasks.checks.optimizer.OptimizerChecker.check_update",
                lambda *_: contextlib.nullcontext(),
            )
        )
        yield


def _publish(self: Any) -> None:
    self._engine.update_weights(None, self._learner.version)


def cost(folder: Path, pairs: int, steps: int) -> dict[str, Any]:
    """CPU seconds of a step with and without checks, in turns. The first two steps are warm-up."""
    options = {"steps": steps, "prompts": 32, "samples": 8, "max_tokens": 64, "kl": 0.01}
    rows: list[dict[str, float]] = []
    for pair in range(pairs):
        seconds = {}
        for name, manner in (("with checks", contextlib.nullcontext), ("without checks", without_checks)):
            with manner():
                lines = run(folder / f"{name}-{pair}", seed=pair + 1, **options)
            seconds[name] = statistics.median(line["processor"] for line in lines[2:])
        rows.append(seconds)
        print(f"pair {pair}: {seconds}", flush=True)
    shares = sorted(1 - row["without checks"] / row["with checks"] for row in rows)
    return {
        "settings": options,
        "seconds per step of each pair of runs": rows,
        "cost as a share of the step": {
            "median": statistics.median(shares),
            "lowest": shares[0],
            "highest": shares[-1],
        },
        "seconds_per_step": {
            name: statistics.median(row[name] for row in rows) for name in ("with checks", "without checks")
        },
        "preflight_seconds": {"tiny": _preflight(3), "28 layers": _preflight(28)},
    }


def _preflight(layers: int) -> float:
    spec = RLSpec.model_validate({"checkpoint": "model", "kl": 0.01})
    seconds = []
    for _ in range(5):
        began = time.process_time()
        twin = Twin(spec, PRESETS["tiny"].replace(num_layers=layers), torch.device("cpu"))
        check_gradient(twin)
        check_advantages(twin)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def clean(folder: Path) -> list[dict[str, Any]]:
    """Results of the runs that no check may stop."""
    rows = []
    for seed, options in enumerate(CLEAN, 1):
        try:
            run(folder / str(seed), seed=seed, **options)
            message = ""
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        rows.append({"seed": seed, "options": json.dumps(options), "stopped_by": message or "nothing"})
        print(f"clean run {seed}: {message or 'ok'}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "checks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = clean(Path(folder) / "clean")
        measured = cost(Path(folder) / "cost", arguments.pairs, arguments.steps)
    options = ["--pairs", str(arguments.pairs), "--steps", str(arguments.steps)]
    alarms = sum(run["stopped_by"] != "nothing" for run in runs)
    report = {
        "title": "Cost and false alarms of the always-on checks",
        "about": "*Cost* compares pairs of runs with and without the checks of every step, in CPU seconds "
        "per step of the tiny model on one thread. *Preflight* is the check of the gradient before the "
        "first step, in CPU seconds. The *correct runs* take four steps each, with other algorithms, "
        "options and seeds. A check that stops one of them is a false alarm.",
        "cost": measured,
        "correct_runs": runs,
        "false_alarms": alarms,
    }
    write(arguments.out, report | document("checks.py", options, began))


if __name__ == "__main__":
    main()
