"""Measure the accuracy that bfloat16 and int8 weights cost a trained model, on its own samples.

    python benchmarks/weight_precision.py [--seeds 0 1 2]

Each seed trains the cold start of the quickstart (0.3 million parameters, additions of three digits). Then
the benchmark compares the model with narrower weights and in float32, on answers sampled in float32:
KL(float32 || narrow) over the vocabulary, and the difference of the sampled tokens' log-probs, which enters
the importance ratios of reinforcement learning. Last, both sample the same tasks with the same random
numbers, and their pass rates are compared task by task. Writes results/weight_precision.json.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from perilune.engine.engine import Engine
from perilune.engine.native_runner import NativeRunner
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.protocol import Environment, Score, Task, Transcript
from perilune.environments.core.registry import make_environment
from perilune.metrics.proportion import pass_rate_change
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from recipe_runs import HERE, document, run_recipe, write

RECIPE = HERE / "cold_start.yaml"
TASKS, SAMPLES, MAX_TOKENS = 256, 16, 64
KINDS = ("bfloat16", "int8")
ABOUT = """\
The weights of the trained model are converted to bfloat16 or int8. On answers that the float32 model sampled,
the table shows KL(float32 ‖ converted) and the error of the sampled token's log-prob, both in nats per token.
pass@1 is measured on the same tasks with both kinds of weights. The interval of the difference is over
tasks."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], help="override of the recipe")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "weight_precision.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = [row for seed in arguments.seeds for row in measure(seed, arguments.set)]
    about = {"title": "bfloat16 and int8 weights against float32", "about": ABOUT}
    result = about | document("weight_precision.py", sys.argv[1:], began)
    write(arguments.out, result | {"tasks": TASKS, "samples": SAMPLES, "against float32": rows})
    for row in rows:
        print(
            f"seed {row['seed']}, {row['weights']}: KL {row['KL, mean, nats']:.2e} nats a token, pass@1"
            f" {row['pass@1']:.3f} against {row['pass@1 of float32']:.3f}"
        )


def measure(seed: int, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Train a model, and return the figures of each kind of weights."""
    with tempfile.TemporaryDirectory(prefix="perilune-precision-") as home:
        stages = run_recipe(RECIPE, seed, overrides, Path(home))
        folder = stages["sft"]["folder"] / "artifacts" / "checkpoints" / "final"
        decoder, tokenizer = load_checkpoint(folder)
    environment = make_environment(yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["environment"])
    tasks = list(islice(environment.tasks("heldout", seed), TASKS))
    prompts = [
        Prompt(ids, (seed, 0, index))
        for index, ids in enumerate(tokenizer.encode_prompts([task.prompt for task in tasks]))
    ]
    groups = {kind: sample(decoder, prompts, kind) for kind in ("float32", *KINDS)}
    rates = {kind: pass_rates(environment, tasks, group, tokenizer) for kind, group in groups.items()}
    exact = distributions(decoder.frozen_copy(), prompts, groups["float32"])
    rows = []
    for kind in KINDS:
        narrow = distributions(decoder.frozen_copy(kind), prompts, groups["float32"])
        passed = {"pass@1": mean(rates[kind]), "pass@1 of float32": mean(rates["float32"])}
        difference = pass_rate_change(rates["float32"], rates[kind], seed=seed)._asdict()
        rows.append(
            {
                "seed": seed,
                "weights": kind,
                **compare(exact, narrow),
                **passed,
                "difference of pass@1": difference,
            }
        )
    return rows


def sample(decoder: Decoder, prompts: Sequence[Prompt], kind: str) -> list[list[Completion]]:
    """Answers of an engine with one kind of weights and a float32 cache."""
    engine = Engine(decoder, runner=partial(NativeRunner, weights=kind, cache="float32"))
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=decoder.config.eos_token_ids)
    return engine.sample(prompts, SAMPLES, params)


def pass_rates(
    environment: Environment,
    tasks: Sequence[Task],
    groups: Sequence[Sequence[Completion]],
    tokenizer: Tokenizer,
) -> dict[str, float]:
    """Share of right answers by task id."""
    rates = {}
    for task, group in zip(tasks, groups, strict=True):
        outcomes = [
            environment.score(
                task, Transcript(tokenizer.decode(answer.token_ids), finished=answer.finish_reason == "stop")
            )
            for answer in group
        ]
        right = [isinstance(outcome, Score) and outcome.reward >= 1 for outcome in outcomes]
        rates[task.task_id] = sum(right) / len(right)
    return rates


@torch.no_grad()
def distributions(
    decoder: Decoder, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> tuple[Tensor, Tensor]:
    """Log-probs [N, V] before every sampled token, in float64, and the tokens [N]."""
    logprobs, chosen = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        texts = [torch.tensor([*prompt.token_ids, *answer.token_ids.tolist()]) for answer in group]
        lengths = torch.tensor([len(text) for text in texts])
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        logits = decoder.logits(decoder(torch.cat(texts), positions, PackedAttention(bounds)))
        tokens = torch.cat(texts).roll(-1)
        wanted = (positions >= len(prompt.token_ids) - 1) & (
            positions < lengths.repeat_interleave(lengths) - 1
        )
        logprobs.append(logits[wanted].double().log_softmax(-1))
        chosen.append(tokens[wanted])
    return torch.cat(logprobs), torch.cat(chosen)


def compare(exact: tuple[Tensor, Tensor], narrow: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Distances of the narrow model's distributions from the exact ones, in nats per token."""
    p, tokens = exact
    q, _ = narrow
    kl = (p.exp() * (p - q)).sum(-1)
    difference = (p - q).gather(1, tokens[:, None])[:, 0].abs()
    return {
        "tokens": len(tokens),
        "KL, mean, nats": float(kl.mean()),
        "KL, maximum, nats": float(kl.max()),
        "log-prob error, mean, nats": float(difference.mean()),
        "log-prob error, 99th percentile, nats": float(difference.quantile(0.99)),
        "log-prob error, maximum, nats": float(difference.max()),
        "share of positions with the same most likely token": float(
            (p.argmax(-1) == q.argmax(-1)).double().mean()
        ),
    }


def mean(rates: dict[str, float]) -> float:
    return sum(rates.values()) / len(rates)


if __name__ == "__main__":
    main()
