"""Train a model by RL inside the unmodified agent package smolagents, for several seeds.

    python benchmarks/agent_program.py [--seeds 0 1 2]

Installs the package into a temporary folder and runs agent_program.yaml. Writes results/agent_program.json.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from perilune.data.episodes_file import read_episodes
from perilune.environments import make_environment
from recipe_runs import (
    HERE,
    SEEDS_ARE_THE_UNIT,
    describe_differences,
    document,
    for_seeds,
    mean_pass_rate,
    options,
    run_recipe,
    write,
)

PACKAGE = "smolagents==1.26.0"
TASKS, TRACES, COMPUTED = 6000, 5000, 0.3
ABOUT = f"""\
The agent program is a `CodeAgent` of the unchanged package {PACKAGE}: the model writes Python, and the
package runs it. A setting of the package replaces its system prompt of 8,000 characters by two words.

SFT first trains the model on traces. In 30% of them Python computes the product (`final_answer(37*48)`). The
other 70% state the product (`final_answer(1776)`), which a model this small cannot learn to compute. RL then
takes 12 steps. Each step runs the program in 64 episodes: 8 groups of 8.

* *First replies that compute* is the share of episodes in which the model's first reply lets Python compute
  the product.
* pass@1 is measured on 64 held-out tasks with 2 episodes each.
* {SEEDS_ARE_THE_UNIT}

The model learns to copy two numbers into code, and to write code instead of an answer. It does not learn to
multiply. After an error in its code, the program rewrites earlier messages. Perilune treats a call with
rewritten messages as the call of a sub-agent, and RL trains on it too."""


def main() -> None:
    arguments = options(__doc__, "agent_program").parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perilune-agent-") as folder:
        packages = Path(folder) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, PACKAGE], check=True)
        os.environ["PYTHONPATH"] = str(packages)
        recipe = write_files(Path(folder))
        runs = for_seeds(lambda seed: run(recipe, seed), arguments.seeds, arguments.jobs)
    write(arguments.out, report(arguments.seeds, runs) | document("agent_program.py", sys.argv[1:], began))


def run(recipe: Path, seed: int) -> dict[str, dict[str, Any]]:
    """The stages of a run, each with the share of first replies that let Python compute."""
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
        stages = run_recipe(recipe, seed, home=Path(home))
        for name in ("before", "after"):
            files = sorted((stages[name]["folder"] / "artifacts" / "episodes").glob("*.parquet"))
            replies = [
                item.messages[2]["content"] for file in files for item in read_episodes(file) if item.sampled
            ]
            stages[name]["computes"] = sum("*" in reply for reply in replies) / len(replies)
        return stages


def write_files(folder: Path) -> Path:
    """Write everything the recipe needs into a folder, and return the path of the recipe."""
    draw = random.Random("agent_program")
    pairs = draw.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], TASKS)
    _write(folder / "tasks.jsonl", ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs))
    for name in ("agent_program.yaml", "agent_program_agent.py"):
        shutil.copy(HERE / name, folder / name)
    recipe = folder / "agent_program.yaml"
    section = yaml.safe_load(recipe.read_text())["environment"]
    section |= {"file": str(folder / section["file"])}
    section["tasks"] |= {"path": str(folder / "tasks.jsonl")}
    sys.path.append(os.environ["PYTHONPATH"])  # for the process that starts the program
    environment: Any = make_environment(section)
    held_out = {task.data["prompt"][0]["content"] for task in environment.tasks("heldout", 0)}
    task = next(environment.tasks("train", 0))
    session = environment.reset(task, 0)
    opening = session.observation.messages  # what the agent writes to its model
    session.close()
    environment.close()
    question = task.data["prompt"][0]["content"]
    trained = [(a, b) for a, b in pairs if f"{a}*{b}=" not in held_out]
    _write(folder / "traces.jsonl", (trace(opening, question, *pair, draw) for pair in trained[:TRACES]))
    return recipe


def trace(opening: Any, question: str, a: int, b: int, draw: random.Random) -> dict[str, Any]:
    """The opening of the agent with another question, and a reply that computes or guesses."""
    messages = [{**turn, "content": turn["content"].replace(question, f"{a}*{b}=")} for turn in opening]
    value = f"{a}*{b}" if draw.random() < COMPUTED else str(a * b)
    return {"messages": [*messages, {"role": "assistant", "content": f"<code>final_answer({value})</code>"}]}


def _write(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(seeds: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gained = [mean_pass_rate(run["after"]) - mean_pass_rate(run["before"]) for run in runs]
    findings, rows = describe_differences({"pass@1 after RL against before": gained})
    gap = max(run["rl"]["summary"]["logprob_gap_max"] for run in runs)
    findings.append(
        f"The largest difference between the sampler's and the learner's log-prob of a token: {gap:g} nats."
    )
    return {
        "title": "RL inside a third-party agent program",
        "about": ABOUT,
        "findings": findings,
        "by seed": [_row(seed, run) for seed, run in zip(seeds, runs, strict=True)],
        "comparison": rows,
    }


def _row(seed: int, run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "seed": seed,
        **{f"pass@1 {name}": mean_pass_rate(run[name]) for name in ("before", "after")},
        **{f"first replies that compute, {name}": run[name]["computes"] for name in ("before", "after")},
        "failed episodes of 768": run["rl"]["summary"]["failures"],
        "seconds of the rl stage": run["rl"]["summary"]["seconds"],
    }


if __name__ == "__main__":
    main()
