"""Leads of the pages on agents, long contexts, environments and games."""

from collections.abc import Sequence
from statistics import median

from perilune.metrics.across_seeds import SIGNIFICANCE

from .text import Document, Lead, Leads, change, count, mean_share, span


def agent_program(document: Document) -> Lead:
    rows = document["by seed"]
    before, after = ([row[f"pass@1 {when}"] for row in rows] for when in ("before", "after"))
    return (
        "RL trains a tiny model inside the unchanged agent program smolagents, on products of two-digit "
        f"numbers, over {count(len(rows), 'seed')}.",
        f"Mean pass@1 on held-out tasks goes from {mean_share(before)} to {mean_share(after)}, a change of "
        f"{change(document['comparison'][0])}.",
    )


def contexts(document: Document) -> Lead:
    rates = {row["context"]: median(row["pass@1 by seed"]) for row in document["accuracy and tokens"]}
    return (
        "A tiny model plays long episodes under several rules for what its context keeps.",
        f"Median pass@1 is {rates['policy']:.1%} with `policy` (the model decides when to replace old turns "
        f"by its notes), {rates['drop_output']:.1%} with `drop_output` (old tool outputs are dropped), "
        f"{rates['fold']:.1%} with `fold` (old turns are dropped), and "
        f"{rates['whole conversation']:.1%} with the whole conversation.",
    )


def search_as_code(document: Document) -> Lead:
    tokens: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for row in document["over seeds"]:
        tokens.setdefault(row["mode"], []).append(median(row["tokens of the whole context"]))
        rates.setdefault(row["mode"], []).append(median(row["pass@1"]))
    return (
        "A tiny model answers questions about documents either with code that calls search functions or with "
        "single function calls.",
        f"With code, an answer needs a context of {span(tokens['code'], '.0f')} tokens and reaches a median "
        f"pass@1 of {span(rates['code'], '.1%')}; with single calls, it needs {span(tokens['calls'], '.0f')} "
        f"tokens and reaches {span(rates['calls'], '.1%')}.",
    )


def swarm(document: Document) -> Lead:
    rows = {row["rewards"]: row for row in document["mean over seeds"]}
    every, alone = rows["performance, parallel, finish, budget"], rows["performance"]
    shown = document["accuracy of performance, parallel, finish, budget"][0]["corrected p"] < SIGNIFICANCE
    return (
        "RL trains an agent that may start sub-agents to look up eight values, with all reward terms of PARL "
        "(parallel-agent RL) and with the reward for right answers alone.",
        f"With all reward terms and a budget of steps, an episode takes {every['critical steps']:.1f} "
        f"sequential steps and {every['total tokens']:.0f} tokens of all agents, and {every['accuracy']:.1%} "
        f"of the episodes are right; with the reward for right answers alone, an episode takes "
        f"{alone['critical steps']:.1f} steps and {alone['total tokens']:.0f} tokens, and "
        f"{alone['accuracy']:.1%} are right (means over seeds"
        f"{'' if shown else '; no difference of accuracy shown'}).",
    )


def environments(document: Document) -> Lead:
    times = [row["separate process, µs per step"] for row in document["environments"].values()]
    ratios = [row["time of separate process / time of adapter"] for row in document["environments"].values()]
    return (
        f"The same moves are played in {count(len(times), 'environment')} directly, through Perilune's "
        "adapter, and in a separate process, as in runs.",
        f"In a separate process, a step takes {span(times, ',.0f')} µs of CPU time, {span(ratios, '.1f')} "
        "times as long as in the same process.",
    )


def game_teachers(document: Document) -> Lead:
    matches = [row for row in document["matches"] if row["against"] == "random"]
    won = sum(_is_positive(row["mean return"]) for row in matches)
    games: dict[str, float] = {}
    for row in document["exploitability"]:
        games[row["game"]] = min(row["exploitability"], games.get(row["game"], row["exploitability"]))
    return (
        f"Teachers for {count(len(document['best teacher of each game']), 'game')} play against random "
        "moves and against other teachers, and their exploitability is measured in "
        f"{count(len(games), 'game')}.",
        f"The teacher beats random play in {won} of {len(matches)} games (95% interval of its mean return "
        "above 0), and the least exploitable teacher of a game has an exploitability of "
        f"{span(games.values(), '.2g')}.",
    )


def _is_positive(interval: str) -> bool:
    """True if an interval as text, such as "+0.8 (+0.7 to +0.9)", begins above 0."""
    return interval.partition("(")[2].startswith("+")


def accuracy(records: Sequence[Document], lines: str) -> dict[str, float]:
    """Median greedy accuracy over seeds of each arm of the recursion benchmark, at one length."""
    rates: dict[str, list[float]] = {}
    for record in records:
        if "greedy" in record["at"].get(lines, {}):
            rates.setdefault(record["arm"], []).append(record["at"][lines]["greedy"])
    return {arm: median(values) for arm, values in rates.items()}


def recursion(document: Document) -> Lead:
    short, long = (accuracy(document["records"], lines) for lines in ("32", "2000"))
    return (
        "A tiny model answers questions about long contexts of [`oolong`](../how-to/oolong.md) by writing "
        "code that asks the model itself about each line, or without such code.",
        f"With code that counts the answers (`counting`), median greedy accuracy is {short['counting']:.1%} "
        f"on 32 lines and {long['counting']:.1%} on 2,000; with all lines in the prompt (`direct`), it is "
        f"{short['direct']:.1%} on 32 lines, and 2,000 lines do not fit into the model's context.",
    )


LEADS: Leads = {
    "agent_program": agent_program,
    "contexts": contexts,
    "environments": environments,
    "game_teachers": game_teachers,
    "recursion": recursion,
    "search_as_code": search_as_code,
    "swarm": swarm,
}
