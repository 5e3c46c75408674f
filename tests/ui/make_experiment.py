"""A clearly synthetic experiment in the real formats, for tests of the report.

Nothing was trained: a small simulated "policy" adds numbers, at once or with its working written out, with
chances that change from step to step. Files are written with the project's own writers.

    python tests/ui/make_experiment.py FOLDER [--seed N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perilune.bundle.machine import describe_machine
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.data.records import make_record, write_records
from perilune.files import append_json_line, write_json
from perilune.learn.advantages import is_dead, standardised
from perilune.metrics.objective import objective_curve
from perilune.models.tokenizer import Tokenizer
from perilune.tasks.evaluation import evaluation_summary, strategies
from perilune.ui.view import ExperimentView, StageView

BEGAN = 1_795_000_000.0
TOKENIZER = Tokenizer.characters()
ENVIRONMENT = {"id": "reasoning_gym", "task": "basic_arithmetic", "config": {"min_digits": 3}, "prompt": "compact"}
MODEL = {"preset": "tiny", "path": None, "chat_template": None}


@dataclass(frozen=True)
class Skill:
    """The simulated policy: how often it thinks, and how often each way is right."""

    thinks: float
    thinking: float
    direct: float
    sure: float = 0.6  # mean probability of a token

    def towards(self, other: Skill, share: float) -> Skill:
        mix = {name: (1 - share) * getattr(self, name) + share * getattr(other, name) for name in ("thinks", "thinking", "direct", "sure")}
        return Skill(**mix)


UNTRAINED = Skill(0.0, 0.0, 0.0, 0.05)
AFTER_SFT = Skill(0.42, 0.66, 0.01, 0.72)
AFTER_RL = Skill(0.99, 0.83, 0.01, 0.93)


def make_experiment(home: Path, *, seed: int = 0, steps: int = 40, prompts: int = 16, tasks: int = 96) -> ExperimentView:
    """Write six stages under `home`/runs and return the view on them."""
    rng = random.Random(seed)
    stages = [
        _collect(home, rng),
        _evaluate(home, rng, "base", "model", UNTRAINED, tasks, 1),
        _sft(home, rng),
        _evaluate(home, rng, "after_sft", "sft", AFTER_SFT, tasks, 2),
        _rl(home, rng, steps, prompts),
        _evaluate(home, rng, "after_rl", "rl", AFTER_RL, tasks, 4),
    ]
    recipe = "name: synthetic\nseed: 0\nmodel:\n  preset: tiny\nenvironment:\n  id: reasoning_gym\n  task: basic_arithmetic\nstages:\n" + "".join(f"  - {{name: {one.name}, task: {one.task}}}\n" for one in stages)
    return ExperimentView("synthetic", seed, recipe, tuple(stages))


# ------------------------------------------------------------------------------------------- episodes
def _answer(rng: random.Random, skill: Skill, a: int, b: int) -> tuple[str, str | None, bool]:
    if skill.sure < 0.1:  # noise, as an untrained model writes
        return "".join(rng.choice("0123456789;,=+ abcXYZ{}()/") for _ in range(rng.randint(4, 40))), None, False
    is_right = rng.random() < (skill.thinking if (thinks := rng.random() < skill.thinks) else skill.direct)
    total = a + b if is_right else a + b + rng.choice([-100, -10, -1, 1, 10, 100])
    if not thinks:
        return f";{total}", "direct", is_right
    carry, work = 0, []
    for x, y in zip(reversed(f"{a:03d}"), reversed(f"{b:03d}"), strict=True):
        work.append(f"{x}{y}{carry}{int(x) + int(y) + carry:02d}")
        carry = (int(x) + int(y) + carry) // 10
    return f"{','.join(work)};{total}", "scratchpad", is_right


def _group(rng: random.Random, skill: Skill, group_id: str, samples: int, version: int, *, greedy: bool = False) -> list[Episode]:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    carries = sum((a // 10**i % 10) + (b // 10**i % 10) > 9 for i in range(3))
    hardness = rng.gauss(0, 0.12) - 0.1 * (carries - 1.5)
    mine = replace(skill, thinking=min(1.0, max(0.0, skill.thinking + hardness)))
    if greedy:
        mine = replace(mine, thinks=round(mine.thinks), thinking=min(1.0, mine.thinking + 0.15))
    episodes = []
    for sample in range(samples):
        text, strategy, is_right = _answer(rng, mine, a, b)
        ids = TOKENIZER.encode_completion(text)
        is_cut = len(ids) > 40 or skill.sure < 0.1 and rng.random() < 0.8
        ids = ids[:-1][:40] if is_cut else ids
        text = TOKENIZER.decode(ids)
        reward = float(is_right and not is_cut)
        failed = rng.random() < 0.002
        prompt = f"{a}+{b}="
        metrics = {"difficulty": float(carries)}
        if strategy and not failed:
            metrics[f"strategy/{strategy}"] = 1.0
        chances = [min(1.0, max(1e-4, rng.betavariate(8 * skill.sure + 0.3, 8 * (1 - skill.sure) + 0.05))) for _ in ids]
        episodes.append(
            Episode(
                episode_id=f"{group_id}/{sample}",
                group_id=group_id,
                task_id=f"{a:03d}{b:03d}".rjust(12, "a"),
                environment="reasoning_gym/basic_arithmetic",
                seed=0,
                messages=({"role": "user", "content": prompt}, {"role": "assistant", "content": text}),
                prompt_ids=np.array(TOKENIZER.encode(prompt), np.int32),
                token_ids=np.array(ids, np.int32),
                loss_mask=np.ones(len(ids), np.bool_),
                logprobs=np.log(np.array(chances, np.float32)),
                policy_version=np.full(len(ids), version, np.int32),
                finish_reason="length" if is_cut else "stop",
                reward=None if failed else reward,
                reward_terms={} if failed else {"correct": reward},
                failure="verifier: took longer than 2 s" if failed else "",
                metrics=metrics,
            )
        )
    return episodes


# --------------------------------------------------------------------------------------------- stages
def _collect(home: Path, rng: random.Random) -> StageView:
    root = _begin(home, "traces", "collect", {"teacher": "arithmetic", "traces": 2000, "strategies": {"scratchpad": 0.4, "direct": 0.6}})
    records = []
    for index in range(2000):
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        text, strategy, _ = _answer(rng, Skill(0.4, 1.0, 1.0), a, b)
        messages = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": text}]
        records.append(make_record(messages, environment="reasoning_gym/basic_arithmetic", task_id=f"t{index}", score=1.0, source=f"arithmetic/{strategy}", seed=0))
    write_records(root / "artifacts" / "traces" / "records.jsonl", records)
    append_json_line(root / "artifacts" / "metrics.jsonl", {"step": 0, "rows": 2000, "rejected": 0})
    return _end(root, "traces", "collect", {"kind": "dataset", "rows": 2000, "rejected": 0, "reasons": {}, "environment": "reasoning_gym", "seconds": 3.1}, 3.6)


def _evaluate(home: Path, rng: random.Random, name: str, checkpoint: str, skill: Skill, tasks: int, version: int) -> StageView:
    root = _begin(home, name, "evaluate", {"checkpoint": checkpoint, "tasks": tasks, "samples": 8, "max_tokens": 40, "temperature": 1.0})
    same_tasks = random.Random(99)  # the held-out tasks are the same in every evaluation
    seeds = [same_tasks.random() for _ in range(tasks)]
    groups = [_group(_mixed(seed, version), skill, f"0/{index}", 8, version) for index, seed in enumerate(seeds)]
    greedy = [_group(_mixed(seed, version), skill, f"0/{index}", 1, version, greedy=True)[0] for index, seed in enumerate(seeds)]
    folder = root / "artifacts" / "episodes"
    write_episodes(folder / "step-000000.parquet", [one for group in groups for one in group])
    write_episodes(folder / "greedy.parquet", greedy)
    summary = json.loads(json.dumps(evaluation_summary("reasoning_gym/basic_arithmetic", groups, greedy, 0)))
    seconds = {"sampling": 2.2 + rng.random(), "scoring": 0.31, "learning": 0.0, "other": 1.1}
    rate = 9 * tasks * summary["length"]["mean"] / seconds["sampling"]
    append_json_line(root / "artifacts" / "timings.jsonl", {"step": 0, **seconds, "tokens_per_second": rate})
    return _end(root, name, "evaluate", summary | {"tokens_per_second": rate, "seconds": sum(seconds.values())}, sum(seconds.values()) + 1.4)


class _mixed(random.Random):  # noqa: N801
    """Draws the task (two numbers and its hardness) from one seed and the answers from another."""

    def __new__(cls, task: float, answers: int) -> random.Random:
        rng = random.Random(task)
        state = random.Random(hash((task, answers)))
        rng_draws = iter((rng.randint(100, 999), rng.randint(100, 999)))

        class Both(random.Random):
            def randint(self, low: int, high: int) -> int:
                return next(rng_draws, None) or super().randint(low, high)

        both = Both()
        both.setstate(state.getstate())
        return both


def _sft(home: Path, rng: random.Random) -> StageView:
    root = _begin(home, "sft", "sft", {"checkpoint": "model", "data": "traces", "steps": 300, "batch_size": 64, "lr": 3e-3})
    for step in range(1, 301):
        loss = 0.12 + 3.1 * math.exp(-step / 18) + 0.6 * math.exp(-step / 90) + abs(rng.gauss(0, 0.02))
        lr = 3e-3 * min(1, step / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / 300)))
        tokens = 64 * 19 + rng.randint(-60, 60)
        append_json_line(root / "artifacts" / "metrics.jsonl", {"step": step, "loss": loss, "entropy": loss * 0.9, "grad_norm": 0.2 + 4 * math.exp(-step / 25) * rng.uniform(0.7, 1.4), "lr": lr, "tokens": tokens})
        append_json_line(root / "artifacts" / "timings.jsonl", {"step": step, "sampling": 0.0, "scoring": 0.0, "learning": 0.062 + rng.random() * 0.01, "other": 0.003, "tokens_per_second": 0.0, "tokens": tokens})
    _checkpoint(root)
    return _end(root, "sft", "sft", {"kind": "training", "algorithm": "sft", "steps": 300, "parameters": 305_184, "traces": 2000, "seconds": 20.4}, 22.3)


def _rl(home: Path, rng: random.Random, steps: int, prompts: int) -> StageView:
    root = _begin(home, "rl", "rl", {"checkpoint": "sft", "steps": steps, "prompts": prompts, "samples": 8, "algorithm": "grpo", "max_tokens": 40, "lr": 2e-4, "kl": 0.0})
    for step in range(1, steps + 1):
        skill = AFTER_SFT.towards(AFTER_RL, 1 - math.exp(-step / (steps / 5)))
        write_rl_step(root, rng, step, skill, prompts, steps)
    _checkpoint(root)
    summary = {"kind": "training", "algorithm": "grpo", "steps": steps, "parameters": 305_184, "logprob_gap_max": 9.5e-7, "implicit_objective": [list(point) for point in objective_curve("grpo", 8)], "seconds": 17.4}
    return _end(root, "rl", "rl", summary, 19.6)


def write_rl_step(root: Path, rng: random.Random, step: int, skill: Skill, prompts: int, steps: int) -> None:
    """One step's episodes, figures and times."""
    episodes: list[Episode] = []
    dead = 0
    for index in range(prompts):
        group = _group(rng, skill, f"{step}/{index}", 8, step - 1)
        rewards = np.array([np.nan if one.reward is None else one.reward for one in group])
        dead += is_dead(rewards)
        for one, advantage in zip(group, standardised(rewards), strict=True):
            known = {} if math.isnan(advantage) else {"advantage": float(advantage)}
            episodes.append(replace(one, metrics={**one.metrics, **known}))
    write_episodes(root / "artifacts" / "episodes" / f"step-{step:06d}.parquet", episodes)
    judged = [one.reward for one in episodes if one.reward is not None]
    line: dict[str, float] = {
        "step": step,
        "reward": float(np.mean(judged)),
        "pass_rate": float(np.mean([reward >= 1 for reward in judged])),
        "reward_std": float(np.std(judged)),
        "groups": prompts,
        "dead_groups": dead / prompts,
        "failures": sum(bool(one.failure) for one in episodes),
        "length": float(np.mean([len(one.token_ids) for one in episodes])),
        "truncated": float(np.mean([one.truncated for one in episodes])),
        "loss": rng.gauss(0, 0.01),
        "entropy": 0.06 + 0.28 * math.exp(-step / 9) + rng.random() * 0.02,
        "kl_behaviour": rng.gauss(0, 2e-8),
        "kl_behaviour_k3": abs(rng.gauss(0, 1e-9)),
        "clip_fraction": 0.0,
        "staleness": 0.0,
        "logprob_gap_max": abs(rng.gauss(6e-7, 1.5e-7)),
        "logprob_gap_mean": abs(rng.gauss(4e-8, 1e-8)),
        "grad_norm": 0.5 + rng.random(),
        "lr": 2e-4 * min(1.0, step / 10),
        "tokens": sum(len(one.token_ids) for one in episodes),
    }
    for name, found in strategies(episodes).items():
        line[f"strategy/{name}"], line[f"accuracy/{name}"] = found["share"], found["accuracy"]
    append_json_line(root / "artifacts" / "metrics.jsonl", line)
    sampling = 0.11 + 0.004 * line["length"] + rng.random() * 0.02
    append_json_line(root / "artifacts" / "timings.jsonl", {"step": step, "sampling": sampling, "scoring": 0.006 + rng.random() * 0.004, "learning": 0.22 + rng.random() * 0.05, "other": 0.011, "tokens_per_second": line["tokens"] / sampling})
    write_json(root / "runtime" / "progress.json", {"done": step, "total": steps, "unit": "steps", "figures": {"reward": line["reward"]}, "time": BEGAN + step})


# ---------------------------------------------------------------------------------------------- files
_clock = {"now": BEGAN}


def _begin(home: Path, stage: str, task: str, spec: dict[str, object]) -> Path:
    root = home / "runs" / f"01SYNTHETIC{stage.upper().replace('_', ''):>0}" / "attempts" / "1"
    for folder in ("artifacts", "runtime", "inputs", "scripts"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "artifacts" / "episodes").mkdir(exist_ok=True)
    inputs = [{"name": "checkpoint", "path": "inputs/checkpoint", "digest": "5e" * 32, "kind": "checkpoint"}] if spec.get("checkpoint", "model") != "model" else []
    write_json(root / "job.json", {"schema_version": 1, "task": task, "stage": stage, "spec": spec, "model": MODEL, "environment": ENVIRONMENT, "seed": 0, "resources": {"device": "auto", "threads": 1}, "inputs": inputs, "entrypoint": ["perilune", "worker"], "secrets": []})
    write_json(root / "bundle.json", {"schema_version": 1, "digest": (stage.encode().hex() * 12)[:64], "files": []})
    write_json(root / "runtime" / "claim.json", {"epoch": 1, "host": "synthetic", "boot_id": "b", "pid": 1, "starttime": 1, "nonce": "n"})
    _date(root / "runtime" / "claim.json")
    write_json(root / "artifacts" / "precheck.json", {
        "python": {"version": "3.11.7", "implementation": "CPython", "compiler": "GCC 12", "build": "main"},
        "packages": {name: {"file": f"/x/{name}", "distribution": name, "version": version, "editable": False} for name, version in {"torch": "2.13.0+cpu", "numpy": "2.4.0", "pyarrow": "22.0.0", "pydantic": "2.12.0", "tokenizers": "0.22.1", "safetensors": "0.6.2", "perilune": "0.1.0", "reasoning-gym": "0.1.25"}.items()},
        "torch": {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "cpu_capability": "AVX512"},
        "machine": describe_machine(),
        "git": {"checkout": "/x", "commit": "f6f5111e6f" * 4, "dirty": True, "changed": 3, "untracked": ["notes.md"]},
        "environment": ["HOME", "PATH"],
    })
    return root


def _end(root: Path, stage: str, task: str, summary: dict[str, object], seconds: float) -> StageView:
    write_json(root / "artifacts" / "summary.json", summary)
    lines = [f"12:00:{index:02d} {stage} says line {index}" for index in range(8)]
    (root / "artifacts" / "task.log").write_text("\n".join(lines) + "\n")
    _hardware(root, seconds)
    _clock["now"] += seconds
    write_json(root / "runtime" / "result.json", {"epoch": 1, "exit_code": 0, "signal": None, "cause": "", "message": "", "manifest_digest": "ab" * 32, "seconds": seconds})
    _date(root / "runtime" / "result.json")
    return StageView(stage, task, root.parent.parent.name, "succeeded", root)


def _date(path: Path) -> None:
    os.utime(path, (_clock["now"], _clock["now"]))


def _hardware(root: Path, seconds: float) -> None:
    rng = random.Random(int(seconds * 10))
    for second in range(max(2, int(seconds))):
        busy = [rng.uniform(80, 99), rng.uniform(5, 40)]
        append_json_line(root / "artifacts" / "hardware.jsonl", {
            "time": _clock["now"] + second, "cpu_percent": sum(busy) / 2, "cpu_per_core": busy, "memory_used": 3.1e9 + 1e7 * second, "memory_total": 8e9,
            "tree": {"processes": 2, "rss": 6.4e8 + 4e6 * min(second, 10), "cpu_percent": busy[0], "rss_by_pid": {}}, "load": [1.0, 0.5, 0.2],
        })


def _checkpoint(root: Path) -> None:
    folder = root / "artifacts" / "checkpoints" / "final"
    TOKENIZER.save(folder)
    write_json(folder / "config.json", {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 96, "vocab_size": 98})
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [98, 96], "data_offsets": [0, 37632]}, "model.layers.0.w": {"dtype": "F32", "shape": [295776], "data_offsets": [37632, 1220736]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text file."""
    yield from path.read_text().splitlines()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_experiment(arguments.folder, seed=arguments.seed)
