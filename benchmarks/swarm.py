"""Compare swarms with all and with some of PARL's rewards: collapses and cures, for several seeds.

    python benchmarks/swarm.py [--seeds 0 1 2]

Runs recipes/swarm.yaml with the rewards of each arm. The arms of a seed share the model after SFT, which
all sub-agents use as well. Writes results/swarm.json.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes
from perilune.metrics.across_seeds import SeedComparison, compare_over_seeds
from recipe_runs import HERE, SEEDS_ARE_THE_UNIT, document, for_seeds, options, run_recipe, write

RECIPE = HERE.parent / "recipes" / "swarm.yaml"
NO_BUDGET, NO_TERMS = "rl.environment.critical_budget=null", "rl.auxiliary_rewards=null"
ONE_AGENT, PARALLEL, PARL = "performance", "performance, parallel", "performance, parallel, finish, budget"
ARMS: Mapping[str, Sequence[str]] = {
    ONE_AGENT: (NO_TERMS, NO_BUDGET),
    PARALLEL: ("rl.auxiliary_rewards.weights={parallel: 2.0}", NO_BUDGET),
    PARL: (),
}
EQUAL_TOKENS = "performance, at equal tokens (bound)"
KEYS, STEPS = 8, 80
PAID = range(31, 41)  # the last ten steps with weights above 0
MARGIN = 0.03  # tolerated loss of accuracy
ABOUT = f"""\
A task asks for the values of {KEYS} keys, each in a separate shard. The model is trained from scratch. As the
*orchestrator*, it reads the shards one after another (9 [critical steps](../reference/glossary.md)), or
starts sub-agents that read one shard each (4 critical steps). SFT uses traces of which 90% read one shard
after another. After SFT, RL trains only the orchestrator; all sub-agents keep the weights after SFT.

Each arm trains for {STEPS} steps of 16 groups with 8 episodes. The arms differ in their reward terms:

* `performance` is 1 if all values are right. With a `budget`, the episode must also end within 6 critical
  steps.
* `parallel` rewards starting sub-agents, with weight 2. `finish` rewards sub-agents that finish, with weight
  1. Both weights fall to 0 in the first half of training.

The columns:

* Accuracy is measured on 192 held-out tasks with 2 episodes each, without a budget.
* *Sub-agents per episode* counts all sub-agents that the orchestrator starts; at most 8 of them run. A
  sub-agent *finishes* if it ends with a value. The share that finishes counts as 0% if no sub-agent was
  started.
* *While paid* covers steps 31 to 40, the last ten steps in which the weights are above 0.
* *Total tokens* are the tokens of all agents in prompts, results and answers. A prefix that several
  sub-agents share counts once for each of them.
* {SEEDS_ARE_THE_UNIT}

The swarm uses more total tokens than the agent trained with `performance`. This agent could spend the
difference on further attempts, with a vote or a perfect check of the answers, or on repeated reads. The
*bound* is an upper limit for all of these and was not run: with as many total tokens as the swarm, every
answer is right, and the further work takes no critical steps. A comparison with the bound favours the single
agent. The equal tokens are those of the evaluation. In training, all arms have equally many steps and
episodes, and the swarm uses more tokens.

In RL, the orchestrator learns when to start sub-agents and which keys to hand over. The model has learned in
SFT how to look up one value. No arm tests whether a larger model finds the swarm without demonstrations. The
result depends on the learning rate: with 400 steps of SFT and a learning rate of 8e-4, the training with all
terms diverged for one of two seeds. It also depends on the sub-agents, all of which must be right: with 500
steps of SFT at a constant learning rate, they were not reliable with one of three seeds, and only 85% of
the episodes were right after training with all terms."""


def main() -> None:
    arguments = options(__doc__, "swarm").parse_args()
    began = time.monotonic()
    runs = for_seeds(run, arguments.seeds, arguments.jobs)
    write(arguments.out, report(arguments.seeds, runs) | document("swarm.py", sys.argv[1:], began))


def run(seed: int) -> dict[str, dict[str, float]]:
    """The figures after SFT and of each arm."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
        for arm, overrides in ARMS.items():
            stages = run_recipe(RECIPE, seed, overrides, Path(home))
            paid = figures(episodes(stages["rl"], [f"step-{step:06d}" for step in PAID]))
            results["after SFT"] = figures(episodes(stages["after_sft"]))
            results[arm] = figures(episodes(stages["after_rl"])) | {
                f"{name} while paid": paid[name]
                for name in ("sub-agents per episode", "share of sub-agents that finish")
            }
            print(json.dumps({"seed": seed, arm: results[arm]}), flush=True)
    return results


def episodes(stage: Mapping[str, Any], names: Sequence[str] = ()) -> list[Episode]:
    """The sampled episodes of a stage, or of its files with these names."""
    files = sorted((stage["folder"] / "artifacts" / "episodes").glob("*.parquet"))
    wanted = [file for file in files if (file.stem in names if names else file.stem != "greedy")]
    return [episode for file in wanted for episode in read_episodes(file)]


def figures(played: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes."""
    metrics = [episode.metrics for episode in played]
    spawned = [row.get("spawned", row.get("sub_agents", 0.0)) for row in metrics]
    tokens = [len(episode.prompt_ids) + len(episode.token_ids) for episode in played]
    return {
        "accuracy": fmean(row.get("right", 0.0) for row in metrics),
        "share of episodes with sub-agents": fmean(count > 0 for count in spawned),
        "sub-agents per episode": fmean(spawned),
        "share of sub-agents that finish": sum(row.get("finished", 0.0) for row in metrics)
        / max(sum(spawned), 1),
        "critical steps": fmean(row.get("critical_steps", row["turns"]) for row in metrics),
        "total tokens": fmean(
            own + row.get("sub_agent_tokens", 0) for own, row in zip(tokens, metrics, strict=True)
        ),
        "tokens of the orchestrator": fmean(tokens),
    }


def with_bound(run: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    """Add what one agent can reach at best with the total tokens of the swarm."""
    bound = {
        "accuracy": 1.0,
        "critical steps": run[ONE_AGENT]["critical steps"],
        "total tokens": run[PARL]["total tokens"],
    }
    return {**run, EQUAL_TOKENS: bound}


def report(seeds: Sequence[int], measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    runs = [with_bound(run) for run in measured]

    def of(arm: str, name: str) -> list[float]:
        return [run[arm][name] for run in runs]

    def gain(arm: str) -> list[float]:
        return [a - b for a, b in zip(of(PARL, "accuracy"), of(arm, "accuracy"), strict=True)]

    def change(name: str, arm: str) -> list[float]:
        return [value / base - 1 for value, base in zip(of(arm, name), of(ONE_AGENT, name), strict=True)]

    differences = {
        "critical steps": change("critical steps", PARL),
        "total tokens": change("total tokens", PARL),
        "tokens of the orchestrator": change("tokens of the orchestrator", PARL),
        "accuracy": gain(ONE_AGENT),
        "accuracy at equal tokens": gain(EQUAL_TOKENS),
    }
    compared = compare_over_seeds(differences)
    return {
        "title": "A swarm with PARL: failure modes and remedies",
        "about": ABOUT,
        "findings": findings(of, compared),
        "mean over seeds": [
            {"rewards": arm, **{name: fmean(of(arm, name)) for name in runs[0][arm]}}
            for arm in ("after SFT", *ARMS)
        ],
        "at equal total tokens": [
            {"rewards": arm, **{name: fmean(of(arm, name)) for name in runs[0][EQUAL_TOKENS]}}
            for arm in (ONE_AGENT, EQUAL_TOKENS, PARL)
        ],
        f"{PARL}, against {ONE_AGENT}": [
            {"figure": name} | compared_row("relative change", comparison)
            for name, comparison in compared.items()
            if not name.startswith("accuracy")
        ],
        f"accuracy of {PARL}": [
            {"against": arm} | compared_row("difference of accuracy", compared[name])
            for arm, name in ((ONE_AGENT, "accuracy"), (EQUAL_TOKENS, "accuracy at equal tokens"))
        ],
        "by seed": [
            {"seed": seed, "rewards": arm, **run[arm]}
            for seed, run in zip(seeds, measured, strict=True)
            for arm in run
        ],
    }


def compared_row(name: str, comparison: SeedComparison) -> dict[str, Any]:
    """A row of a table of differences."""
    interval = {"mean": comparison.mean, "low": comparison.low, "high": comparison.high}
    return {name: interval, "by seed": list(comparison.differences), "corrected p": comparison.p_corrected}


def findings(of: Any, compared: Mapping[str, SeedComparison]) -> list[str]:
    """The predictions about the rewards, each with its outcome."""
    share, spawned = (
        of(ONE_AGENT, "share of episodes with sub-agents"),
        of(PARALLEL, "sub-agents per episode while paid"),
    )
    rate, cured = (of(arm, "share of sub-agents that finish while paid") for arm in (PARALLEL, PARL))
    steps, accuracy, bound, tokens = (
        compared[name] for name in ("critical steps", "accuracy", "accuracy at equal tokens", "total tokens")
    )
    return [
        f"Serial collapse: with `performance` alone, at most {max(share):.0%} of the episodes start "
        f"sub-agents (expected: below 10% in every seed; {_said(max(share) < 0.1)}).",
        "Spurious parallelism: with `parallel` and without `finish`, an episode started"
        f" {fmean(spawned):.1f} sub-agents in steps {PAID[0]} to {PAID[-1]}, and {fmean(rate):.0%} of them"
        f" finished. With `finish`, {fmean(cured):.0%} finished (expected: more than {2 * KEYS} sub-agents,"
        f" and a lower share, in every one of {len(rate)} seeds;"
        f" {_said(min(spawned) > 2 * KEYS and max(rate) < min(cured))}).",
        f"Critical steps with all terms and the budget, against `performance`: {steps.mean:+.0%} (95% "
        f"interval {steps.low:+.0%} to {steps.high:+.0%}; {steps.conclusion}; expected: at least 40% fewer; "
        f"{_said(steps.high <= -0.4)}).",
        *(
            f"Accuracy with all terms and the budget, against {other}: {100 * difference.mean:+.1f} points "
            f"(95% interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}; "
            f"{difference.conclusion}; expected: at most {100 * MARGIN:.0f} points lower; "
            f"{_said(difference.low >= -MARGIN)})."
            for other, difference in (
                ("`performance`", accuracy),
                ("the most that one agent with the same total tokens can reach", bound),
            )
        ),
        f"Total tokens with all terms and the budget, against `performance`: {tokens.mean:+.0%} (95% interval"
        f" {tokens.low:+.0%} to {tokens.high:+.0%}; {tokens.conclusion}).",
    ]


def _said(holds: bool) -> str:
    return "confirmed" if holds else "not confirmed"


if __name__ == "__main__":
    main()
