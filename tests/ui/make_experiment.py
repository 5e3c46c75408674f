"""A synthetic experiment in the real file formats, for report tests. Nothing is trained.

A simulated policy adds numbers, directly or with a scratchpad, with probabilities that change from step
to step. The project's own writers write episodes, summaries and traces.

    python tests/ui/make_experiment.py FOLDER [--seed N]      then: perilune report FOLDER --out report.html
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from perilune.bundle.machine import describe_machine
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.data.records import TraceRecord, write_records
from perilune.files import append_json_line, write_json
from perilune.learn.advantages import is_dead, standardized
from perilune.learn.objective import objective_curve
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.stage.outcomes import evaluation_summary, strategy_figures
from perilune.ui.view import ExperimentView, StageView

BEGAN = 1_795_000_000.0
MAX_TOKENS = 40
TOKENIZER = Tokenizer.characters()
ENVIRONMENT = {"id": "reasoning_gym", "task": "basic_arithmetic", "prompt": "compact"}
ENVIRONMENT_ID = "reasoning_gym/basic_arithmetic"
MODEL = {"preset": "tiny", "path": None, "chat_template": None}
PACKAGES = {"torch": "2.13.0+cpu", "numpy": "2.4.0", "pyarrow": "22.0.0", "tokenizers": "0.22.1"}


@dataclass(frozen=True)
class Skill:
    """The simulated policy: rate of thinking, accuracy of each strategy, and token confidence."""

    thinks: float
    thinking: float
    direct: float
    sure: float

    def towards(self, other: Skill, share: float) -> Skill:
        """Interpolate towards `other`."""

        def mixed(name: str) -> float:
            return (1 - share) * float(getattr(self, name)) + share * float(getattr(other, name))

        return Skill(mixed("thinks"), mixed("thinking"), mixed("direct"), mixed("sure"))


UNTRAINED = Skill(0.0, 0.0, 0.0, 0.05)
AFTER_SFT = Skill(0.42, 0.66, 0.01, 0.72)
AFTER_RL = Skill(0.99, 0.83, 0.01, 0.93)


@dataclass(frozen=True)
class Problem:
    """The problem a + b, with difficulty beyond the number of carries."""

    a: int
    b: int
    hardness: float

    @property
    def carries(self) -> int:
        """Difficulty of the problem."""
        return sum((self.a // 10**i % 10) + (self.b // 10**i % 10) > 9 for i in range(3))


def problem(rng: random.Random) -> Problem:
    """A problem with three-digit numbers."""
    return Problem(rng.randint(100, 999), rng.randint(100, 999), rng.gauss(0, 0.12))


# ------------------------------------------------------------------------------------------- episodes
def write_answer(rng: random.Random, skill: Skill, asked: Problem) -> tuple[str, str, bool]:
    """Returns (text, strategy, correct)."""
    if skill.sure < 0.1:  # an untrained model writes noise
        return (
            "".join(rng.choice("0123456789;,=+ abcXYZ{}()/") for _ in range(rng.randint(4, 60))),
            "none",
            False,
        )
    thinks = rng.random() < skill.thinks
    chance = skill.thinking + asked.hardness - 0.1 * (asked.carries - 1.5) if thinks else skill.direct
    is_right = rng.random() < chance
    total = asked.a + asked.b + (0 if is_right else rng.choice([-100, -10, -1, 1, 10, 100]))
    if not thinks:
        return f";{total}", "direct", is_right
    carry, work = 0, []
    for x, y in zip(reversed(f"{asked.a}"), reversed(f"{asked.b}"), strict=True):
        added = int(x) + int(y) + carry
        work.append(f"{x}{y}{carry}{added:02d}")
        carry = added // 10
    return f"{','.join(work)};{total}", "scratchpad", is_right


def make_episode(
    rng: random.Random, asked: Problem, skill: Skill, episode_id: str, version: int, failing: float = 0.0
) -> Episode:
    """One sampled answer."""
    text, strategy, is_right = write_answer(rng, skill, asked)
    ids = TOKENIZER.encode_completion(text)
    is_cut = len(ids) > MAX_TOKENS
    ids = ids[:MAX_TOKENS]
    failed = rng.random() < failing
    prompt = f"{asked.a}+{asked.b}="
    chances = [max(1e-4, rng.betavariate(8 * skill.sure + 0.3, 8 * (1 - skill.sure) + 0.05)) for _ in ids]
    text = TOKENIZER.decode(ids)
    logprobs = np.log(np.array(chances, np.float32))
    return Episode(
        episode_id=episode_id,
        group_id=episode_id.rpartition("/")[0],
        task_id=f"{asked.a}{asked.b}",
        environment=ENVIRONMENT_ID,
        seed=0,
        messages=({"role": "user", "content": prompt}, {"role": "assistant", "content": text}),
        prompt_ids=np.array(TOKENIZER.encode(prompt), np.int32),
        token_ids=np.array(ids, np.int32),
        loss_mask=np.ones(len(ids), np.bool_),
        logprobs=logprobs,
        policy_version=np.full(len(ids), version, np.int32),
        finish_reason="length" if is_cut else "stop",
        expected=f"{asked.a + asked.b}",
        reward=None if failed else float(is_right and not is_cut),
        reward_terms={} if failed else {"correct": float(is_right and not is_cut)},
        failure="verifier: took longer than 2 s" if failed else "",
        metrics={"difficulty": float(asked.carries)} | ({} if failed else {f"strategy/{strategy}": 1.0}),
        top_ids=np.array([[token, OTHER] for token in ids], np.int32).reshape(-1, 2),
        top_logprobs=np.log(np.array([[p, 0.125 * p] for p in chances], np.float32)).reshape(-1, 2),
        reference_logprobs=logprobs - np.where(np.arange(len(ids)) % 2, 0.5, -0.5).astype(np.float32),
    )


OTHER = TOKENIZER.encode("7")[0]  # the second most likely token at every position


# ---------------------------------------------------------------------------------------- experiment
class SyntheticExperiment:
    """Writes stages below `home`/runs. Each stage has one finished attempt by default."""

    def __init__(self, home: Path, seed: int = 0) -> None:
        self.home = home
        self.rng = random.Random(seed)
        self.now = BEGAN
        self.stages: list[StageView] = []

    def view(self) -> ExperimentView:
        """The control plane's view of the stages written so far."""
        lines = [f"  - {{name: {stage.name}, task: {stage.task}}}" for stage in self.stages]
        recipe = "name: synthetic\nseed: 0\nmodel:\n  preset: tiny\nstages:\n" + "\n".join(lines) + "\n"
        return ExperimentView("synthetic", 0, recipe, tuple(self.stages))

    def collect(self, traces: int = 1200, task: str = "collect") -> None:
        """Write a stage of verified traces."""
        root = self.begin("traces", task, {"teacher": "arithmetic", "traces": traces})
        records = []
        for index in range(traces):
            asked = problem(self.rng)
            text, strategy, _ = write_answer(self.rng, Skill(0.4, 9.0, 1.0, 1.0), asked)
            messages = [
                {"role": "user", "content": f"{asked.a}+{asked.b}="},
                {"role": "assistant", "content": text},
            ]
            source = f"arithmetic/{strategy}"
            records.append(
                TraceRecord(
                    messages,
                    environment=ENVIRONMENT_ID,
                    task_id=f"t{index}",
                    score=1.0,
                    source=source,
                    seed=0,
                )
            )
        write_records(root / "artifacts" / "traces" / "records.jsonl", records)
        self.finish(root, {"kind": "dataset", "rows": traces, "rejected": 0, "seconds": 3.1}, 3.6)

    def evaluate(self, name: str, checkpoint: str, skill: Skill, tasks: int, samples: int = 8) -> Path:
        """Write an evaluation stage. Every call uses the same held-out problems."""
        spec = {"checkpoint": checkpoint, "tasks": tasks, "samples": samples, "max_tokens": MAX_TOKENS}
        root = self.begin(name, "evaluate", spec)
        held_out = random.Random(99)
        problems = [problem(held_out) for _ in range(tasks)]
        version = len(self.stages)
        groups = [
            [
                make_episode(self.rng, asked, skill, f"0/{index}/{sample}", version)
                for sample in range(samples)
            ]
            for index, asked in enumerate(problems)
        ]
        likeliest = replace(skill, thinks=round(skill.thinks), thinking=skill.thinking + 0.12)
        greedy = [
            make_episode(self.rng, asked, likeliest, f"0/{index}/0", version)
            for index, asked in enumerate(problems)
        ]
        folder = root / "artifacts" / "episodes"
        write_episodes(folder / "step-000000.parquet", [episode for group in groups for episode in group])
        write_episodes(folder / "greedy.parquet", greedy)
        summary = json.loads(json.dumps(evaluation_summary(ENVIRONMENT_ID, groups, greedy, 0)))
        seconds = {"sampling": 2.2 + self.rng.random(), "scoring": 0.31, "learning": 0.0, "other": 1.1}
        rate = (samples + 1) * tasks * summary["length"]["mean"] / seconds["sampling"]
        append_json_line(
            root / "artifacts" / "timings.jsonl", {"step": 0, **seconds, "tokens_per_second": rate}
        )
        total = math.fsum(seconds.values())
        self.finish(root, summary | {"tokens_per_second": rate, "seconds": total}, total + 1.4)
        return root

    def sft(self, steps: int = 300) -> None:
        """Write an SFT stage."""
        root = self.begin("sft", "sft", {"checkpoint": "model", "data": "traces", "steps": steps})
        for step in range(1, steps + 1):
            loss = 0.12 + 3.1 * math.exp(-step / 18) + 0.6 * math.exp(-step / 90) + self.rng.random() * 0.03
            line = {
                "loss": loss,
                "entropy": loss * 0.9,
                "grad_norm": 0.2 + 4 * math.exp(-step / 25) * self.rng.uniform(0.7, 1.4),
                "lr": 3e-3 * min(1, step / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))),
                "tokens": float(64 * 19 + self.rng.randint(-60, 60)),
            }
            append_json_line(root / "artifacts" / "metrics.jsonl", {"step": step, **line})
            seconds = {
                "sampling": 0.0,
                "scoring": 0.0,
                "learning": 0.06 + self.rng.random() / 50,
                "other": 0.003,
            }
            rates = {"tokens_per_second": 0.0, "tokens": line["tokens"]}
            append_json_line(root / "artifacts" / "timings.jsonl", {"step": step, **seconds, **rates})
        save_model(root)
        self.finish(root, {"kind": "training", "algorithm": "sft", "steps": steps, "seconds": 20.4}, 22.3)

    def rl(self, steps: int = 40, prompts: int = 16, until: int | None = None, name: str = "rl") -> Path:
        """Write an RL stage. With `until`, the stage stays active after that many steps."""
        spec = {"checkpoint": "sft", "algorithm": "grpo", "steps": steps, "prompts": prompts, "samples": 8}
        root = self.begin(name, "rl", spec)
        for step in range(1, (until or steps) + 1):
            skill = AFTER_SFT.towards(AFTER_RL, 1 - math.exp(-5 * step / steps))
            episodes = self._step(root, step, skill, prompts)
            tokens = sum(len(episode.token_ids) for episode in episodes)
            self._figures(root, step, steps, episodes, tokens)
        if until is not None:
            return root
        save_model(root)
        curve = [list(point) for point in objective_curve("grpo", 8)]
        summary = {"kind": "training", "algorithm": "grpo", "steps": steps, "implicit_objective": curve}
        self.finish(root, summary | {"seconds": 17.4}, 19.6)
        return root

    def _step(self, root: Path, step: int, skill: Skill, prompts: int) -> list[Episode]:
        episodes: list[Episode] = []
        for index in range(prompts):
            asked = problem(self.rng)
            group = [
                make_episode(self.rng, asked, skill, f"{step}/{index}/{sample}", step - 1, failing=0.003)
                for sample in range(8)
            ]
            rewards = np.array([math.nan if episode.reward is None else episode.reward for episode in group])
            for episode, advantage in zip(group, standardized(rewards), strict=True):
                known = {} if math.isnan(advantage) else {"advantage": float(advantage)}
                episodes.append(replace(episode, metrics={**episode.metrics, **known}))
        write_episodes(root / "artifacts" / "episodes" / f"step-{step:06d}.parquet", episodes)
        return episodes

    def _figures(self, root: Path, step: int, steps: int, episodes: Sequence[Episode], tokens: int) -> None:
        rng = self.rng
        judged = [episode.reward for episode in episodes if episode.reward is not None]
        groups = [episodes[start : start + 8] for start in range(0, len(episodes), 8)]
        rewards = [np.array([math.nan if e.reward is None else e.reward for e in group]) for group in groups]
        line: dict[str, float] = {
            "reward": float(np.mean(judged)),
            "pass_rate": float(np.mean([reward >= 1 for reward in judged])),
            "reward_std": float(np.std(judged)),
            "groups": len(groups),
            "dead_groups": sum(map(is_dead, rewards)) / len(groups),
            "failures": sum(bool(episode.failure) for episode in episodes),
            "length": tokens / len(episodes),
            "truncated": sum(episode.truncated for episode in episodes) / len(episodes),
            "loss": rng.gauss(0, 0.01),
            "entropy": 0.06 + 0.28 * math.exp(-step / 9) + rng.random() * 0.02,
            "kl_behaviour": rng.gauss(0, 2e-8),
            "clip_fraction": 0.0,
            "staleness": 0.0,
            "logprob_gap_max": abs(rng.gauss(6e-7, 1.5e-7)),
            "logprob_gap_mean": abs(rng.gauss(4e-8, 1e-8)),
            "grad_norm": 0.5 + rng.random(),
            "lr": 2e-4 * min(1.0, step / 10),
            "tokens": tokens,
        }
        line["term/correct"] = float(np.mean(judged))
        for name, figures in strategy_figures(episodes).items():
            line |= {f"strategy/{name}": figures["share"], f"accuracy/{name}": figures["accuracy"]}
        append_json_line(root / "artifacts" / "metrics.jsonl", {"step": step, **line})
        seconds = {
            "sampling": 0.11 + 0.004 * line["length"] + rng.random() * 0.02,
            "scoring": 0.006 + rng.random() * 0.004,
            "learning": 0.22 + rng.random() * 0.05,
            "other": 0.011,
        }
        rate = {"tokens_per_second": tokens / seconds["sampling"]}
        append_json_line(root / "artifacts" / "timings.jsonl", {"step": step, **seconds, **rate})
        progress = {"done": step, "total": steps, "unit": "steps", "figures": {}, "time": self.now + step}
        write_json(root / "runtime" / "progress.json", progress)

    # -------------------------------------------------------------------------------------- files
    def begin(self, stage: str, task: str, spec: Mapping[str, Any]) -> Path:
        """Write a claimed attempt. It is active until `finish` or `fail`."""
        root = self.home / "runs" / f"01SYNTHETIC{stage.upper()}" / "attempts" / "1"
        (root / "artifacts" / "episodes").mkdir(parents=True)
        (root / "runtime").mkdir()
        inputs = []
        if spec.get("checkpoint", "model") != "model":
            inputs = [{"name": "checkpoint", "path": "inputs/c", "digest": "5e" * 32, "kind": "checkpoint"}]
        job = {"schema_version": 1, "task": task, "stage": stage, "spec": spec, "model": MODEL}
        write_json(root / "job.json", job | {"environment": ENVIRONMENT, "seed": 0, "inputs": inputs})
        write_json(root / "bundle.json", {"schema_version": 1, "digest": (stage.encode().hex() * 22)[:64]})
        write_json(root / "runtime" / "claim.json", {"epoch": 1})
        os.utime(root / "runtime" / "claim.json", (self.now, self.now))
        write_json(root / "artifacts" / "precheck.json", observed())
        self.stages.append(StageView(stage, task, root.parent.parent.name, "active", root))
        return root

    def finish(self, root: Path, summary: Mapping[str, Any], seconds: float) -> None:
        """Mark the attempt as succeeded."""
        write_json(root / "artifacts" / "summary.json", summary)
        self._end(root, seconds, "succeeded", {"exit_code": 0, "cause": "", "message": ""})

    def fail(self, root: Path, message: str, seconds: float) -> None:
        """Mark the attempt as failed."""
        self._end(root, seconds, "failed", {"exit_code": 1, "cause": "work_failed", "message": message})

    def _end(self, root: Path, seconds: float, state: str, verdict: Mapping[str, Any]) -> None:
        stage = self.stages[-1]
        log = "".join(f"12:00:{line:02d} {stage.name} says line {line}\n" for line in range(8))
        for path in ("artifacts/task.log", "runtime/runtime.log"):
            (root / path).write_text(log)
        for second in range(max(2, int(seconds))):
            busy = [self.rng.uniform(80, 99), self.rng.uniform(5, 40)]
            tree = {"processes": 2, "rss": 6.4e8 + 4e6 * min(second, 10), "cpu_percent": busy[0]}
            sample = {"cpu_percent": sum(busy) / 2, "cpu_per_core": busy, "memory_used": 3.1e9 + 1e7 * second}
            append_json_line(
                root / "artifacts" / "hardware.jsonl", {"time": self.now + second, "tree": tree, **sample}
            )
        self.now += seconds
        document = {"epoch": 1, "signal": None, "manifest_digest": "ab" * 32, "seconds": seconds, **verdict}
        write_json(root / "runtime" / "result.json", document)
        self.stages[-1] = replace(stage, state=state, cause=str(verdict["cause"]))


def observed() -> dict[str, Any]:
    """Contents of precheck.json."""
    packages = {
        name: {"file": f"/site/{name}", "distribution": name, "version": version, "editable": False}
        for name, version in PACKAGES.items()
    }
    git = {
        "checkout": "/x",
        "commit": "f6f5111e6f" * 4,
        "dirty": True,
        "changed": 3,
        "untracked": ["notes.md"],
    }
    return {
        "python": {"version": "3.11.7", "implementation": "CPython", "compiler": "GCC 12"},
        "packages": packages,
        "torch": {"version": "2.13.0+cpu", "cuda": None, "threads": 1, "cpu_capability": "AVX512"},
        "machine": describe_machine(),
        "git": git,
        "environment": ["HOME", "PATH"],
    }


def save_model(root: Path) -> None:
    """Write the checkpoint files that the report reads: tokenizer, config, and a header without tensors."""
    folder = root / "artifacts" / "checkpoints" / "final"
    TOKENIZER.save(folder)
    write_json(folder / "config.json", {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 96})
    tensors = {"a": np.zeros((98, 96), np.float16), "b": np.zeros(295_776, np.float16)}
    save_file(tensors, folder / "model.safetensors")


def make_experiment(
    home: Path, *, seed: int = 0, steps: int = 40, prompts: int = 16, tasks: int = 96
) -> ExperimentView:
    """Write a complete experiment of six stages."""
    made = SyntheticExperiment(home, seed)
    made.collect()
    made.evaluate("base", "model", UNTRAINED, tasks)
    made.sft()
    made.evaluate("after_sft", "sft", AFTER_SFT, tasks)
    made.rl(steps, prompts)
    made.evaluate("after_rl", "rl", AFTER_RL, tasks)
    return made.view()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_experiment(arguments.folder, seed=arguments.seed)
