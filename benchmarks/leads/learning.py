"""Leads of the pages on what models learn: algorithms, data, teachers and rewards."""

from statistics import median

from perilune.metrics.across_seeds import compare_over_seeds

from .text import Document, Lead, Leads, count, listed, mean_share, span


def quickstart(document: Document) -> Lead:
    runs = document["runs"]
    rates: dict[str, list[float]] = {}
    for run in runs:
        for row in run["evaluations"]:
            rates.setdefault(row["stage"], []).append(row["pass@1"]["mean"])
    return (
        "The quickstart teaches a model of 0.3 million parameters to add three-digit numbers, over "
        f"{count(len(runs), 'seed')}.",
        f"pass@1 on held-out tasks goes from {mean_share(rates['base'])} to {mean_share(rates['after_sft'])} "
        f"with SFT and to {mean_share(rates['after_rl'])} with RL (means over seeds), "
        f"and a run takes {span((run['seconds'] for run in runs), '.0f')} s.",
    )


def asynchronous(document: Document) -> Lead:
    rows = document["by seed"]
    by_arm: dict[tuple[str, int], dict[int, Document]] = {}
    for row in rows:
        by_arm.setdefault((row["environment"], row["staleness"]), {})[row["seed"]] = row
    ratios: dict[str, list[float]] = {"waits": [], "computes": []}
    differences: dict[str, list[float]] = {}
    for (environment, staleness), arm in by_arm.items():
        base = by_arm[environment, 0]
        if staleness:
            ratios[environment] += [
                arm[seed]["seconds per step"] / base[seed]["seconds per step"] for seed in arm
            ]
            differences[f"{environment} {staleness}"] = [
                arm[seed]["pass@1 after"] - base[seed]["pass@1 after"] for seed in arm
            ]
    tests = compare_over_seeds(differences).values()
    claimed = sum(test.conclusion in ("higher", "lower") for test in tests)
    return (
        "GRPO with staleness 1 and 2 is compared with synchronous GRPO, on sums in an environment that waits "
        "for tools and in one that answers at once.",
        f"An asynchronous step takes {span(ratios['waits'])} times as long as a synchronous step where the "
        f"environment waits, and {span(ratios['computes'])} times as long where it answers at once; "
        f"{claimed} of {len(tests)} comparisons show a difference of pass@1.",
    )


def pacing(document: Document) -> Lead:
    drop, pace = (
        [row["mean duration, trained / sampled"] for row in document["by rule"] if row["rule"] == rule]
        for rule in ("drop", "pace")
    )
    return (
        "A queue model compares two ways to limit [staleness](../reference/glossary.md) in asynchronous "
        "training: starting fewer episodes (pacing), and dropping old ones.",
        "With dropping, training prefers short episodes: the mean duration of trained episodes is "
        f"{span(drop)} times that of all sampled episodes; with pacing, it is {span(pace)} times that of all "
        "sampled episodes.",
    )


def curriculum(document: Document) -> Lead:
    figures = ("live groups", "pass@1 after")
    values = {
        figure: [
            [row[figure] for row in document["by seed"] if row["tasks"] == arm]
            for arm in ("drawn", "uniform")
        ]
        for figure in figures
    }
    tests = compare_over_seeds(
        {figure: [ours - other for ours, other in zip(*arms, strict=True)] for figure, arms in values.items()}
    )
    live, passed = (tests[figure] for figure in figures)
    return (
        "RL on sums of two to six terms samples tasks either uniformly or by the pass rate of their "
        "difficulty (a curriculum).",
        "The curriculum changes the share of groups whose answers have different rewards by "
        f"{100 * live.mean:+.1f} points (95% interval {100 * live.low:+.1f} to {100 * live.high:+.1f}; "
        f"{live.conclusion}), and pass@1 by {100 * passed.mean:+.1f} points ({100 * passed.low:+.1f} to "
        f"{100 * passed.high:+.1f}; {passed.conclusion}).",
    )


def preference_learning(document: Document) -> Lead:
    table = document["evaluation_by_method"]
    rates = {name: f"{median(row['pass@1']):.1%}" for name, row in table.items()}
    return (
        "DPO and IPO train a tiny model on pairs of a right and a wrong answer to three-digit sums, over "
        f"{count(len(table['sft']['pass@1']), 'seed')}.",
        f"Median pass@1 is {rates['sft']} after SFT, {rates['dpo']} after DPO, {rates['ipo']} after IPO, "
        f"{rates['dpo_nll']} after DPO with a negative log-likelihood (NLL) term, and {rates['imitation']} "
        "after SFT on right answers alone.",
    )


def distillation(document: Document) -> Lead:
    table, rows = document["evaluation_by_method"], document["differences"]
    claimed = sum(row["conclusion"] in ("higher", "lower") for row in rows)
    rates = {name: median(row["pass@1"]) for name, row in table.items()}
    methods = [
        f"{rates[key]:.1%} with {name}"
        for key, name in (
            ("reverse_kl", "reverse KL"),
            ("forward_topk", "forward top-k"),
            ("gkd", "GKD"),
            ("imitation", "more SFT on the traces"),
        )
    ]
    return (
        "A student of 0.3 million parameters learns three-digit sums from a teacher of 0.7 million.",
        f"The student's median pass@1 over {count(len(table['start']['pass@1']), 'seed')} is "
        f"{rates['start']:.1%} at the start, {listed(methods)}; {claimed} of {len(rows)} "
        "comparisons show a difference.",
    )


def system_prompt(document: Document) -> Lead:
    rates = {name: median(row["pass@1"]) for name, row in document["accuracy"].items()}
    return (
        "Distillation trains a tiny model to behave without a system prompt as it does with the prompt, on "
        "three-digit sums.",
        f"Without the prompt, the median pass@1 goes from {rates['untold, before']:.1%} to "
        f"{rates['untold, on-policy']:.1%} with on-policy distillation and to "
        f"{rates['untold, off-policy']:.1%} with off-policy distillation; with the prompt, it was "
        f"{rates['told, before']:.1%} before training.",
    )


def flywheel(document: Document) -> Lead:
    ends: dict[int, list[float]] = {}
    for row in document["rounds"]:
        ends.setdefault(row["seed"], []).append(row["yield"]["mean"])
    rounds = max(row["round"] for row in document["rounds"])
    changes = [f"from {rates[0]:.1%} to {rates[-1]:.1%}" for rates in ends.values()]
    return (
        f"A tiny model trains on its own right answers to three-digit sums, in {count(rounds, 'round')}.",
        f"The share of right answers on held-out tasks goes {listed(changes)} ({count(len(ends), 'seed')}).",
    )


def process_rewards(document: Document) -> Lead:
    values: dict[bool, list[float]] = {}
    for row in document["agreement_with_Monte_Carlo_values"]:
        coarse = row["answers"].endswith("one boundary after the working")
        values.setdefault(coarse, []).append(row["correlation of differences"])
    return (
        "Process rewards computed with one forward pass are compared with Monte Carlo estimates, on the "
        "quickstart's three-digit sums.",
        f"The rank correlation of process rewards from one forward pass with Monte Carlo estimates is "
        f"{span(values[True])} if an answer has one segment boundary, between calculation and sum, and "
        f"{span(values[False])} with more boundaries.",
    )


def overoptimisation(document: Document) -> Lead:
    runs = [*document["hacked_reward"], *document["reward_model"]]
    fallen = sum(run["last gold score"] < 0.8 * run["best gold score"] for run in runs)
    stopped = [run for run in runs if run["recommended_stop"] is not None]
    timely = sum(run["gold score at that step"] >= 0.8 * run["best gold score"] for run in stopped)
    return (
        "GRPO trains on a reward that can be hacked or on a reward model, and the verifier's score, which "
        "training does not use, measures the quality of the answers.",
        f"The verifier's score ended below 80% of its best in {fallen} of {len(runs)} runs; the "
        f"over-optimization watch recommended stopping in {len(stopped)} runs, and in {timely} of them while "
        "the score was still at least 80% of its best.",
    )


LEADS: Leads = {
    "asynchronous": asynchronous,
    "curriculum": curriculum,
    "distillation": distillation,
    "flywheel": flywheel,
    "overoptimisation": overoptimisation,
    "pacing": pacing,
    "preference_learning": preference_learning,
    "process_rewards": process_rewards,
    "quickstart": quickstart,
    "system_prompt": system_prompt,
}
