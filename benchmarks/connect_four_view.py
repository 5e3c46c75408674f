"""View of benchmarks/results/connect_four.json for docs/results/connect_four.md."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comparison.chart import Curve, panels
from leads.text import count, listed, span

COMMANDS = """\
for seed in 0 1 2; do
>   python benchmarks/connect_four.py train FOLDER --seconds 60 --simulations 0 --seed $seed
> done
$ python benchmarks/connect_four.py train FOLDER --seconds 1800
$ python benchmarks/connect_four.py solve FOLDER
$ python benchmarks/connect_four.py judge FOLDER"""
ABOUT = """\
In the arm *PPO*, the network plays against itself without search and learns with PPO. In the arm *Searched*,
a tree search of {simulations} simulations chooses every move, and the network learns from the results of the
searches and of the games. Seconds are CPU seconds of the process. Moves per second are moves per CPU second,
including the time of learning.

An exact solver scores the moves of the player in test positions. A move is *best* if no other column leads
to an earlier win or a later loss. A move is a *blunder* if it turns a win into a draw or loss, or a draw
into a loss. Test positions have at least {first} stones. Half of them come from random games, and half
from games without a missed win or block. Positions in which all columns have the same score are left out.

In matches a draw is half a point. A match plays all openings of two moves from both sides. Matches against
perfect play start from drawn positions with {perfect} stones, so the best possible result is half of the
points. *Foresight 4* is an opponent that searches four moves ahead, and *mcts 100* is OpenSpiel's tree search
with 100 simulations. Intervals are Wilson's 95% intervals. *The first move* gives the solver's score of each
column: positive if the first player wins, and larger for an earlier win."""


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The page and its charts."""
    runs = document["runs"]
    longest = next(run for run in runs if run["name"] == document["final"]["run"])
    return {
        "title": "Connect Four on one core",
        "lead": lead(document, longest),
        "findings": "\n".join(
            [
                *(*(f"* {finding}" for finding in findings(document)), ""),
                *(strongest(document, longest), "", *pictures()),
            ]
        ),
        "about": ABOUT.format(simulations=longest["settings"]["simulations"], first=8, perfect=12),
        "command": COMMANDS,
        "speed": [speed(run) for run in runs],
        "multiply-adds by layer": document["layers"],
        "strength during training": [row(run, line) for run in runs for line in run["marks"]],
        "final player, by stones on the board": by_ply(document["final"]["judged"]),
        "matches of the final player": matches(document["final"]["judged"]),
        **solver(document["solver"]),
        "versions": document["versions"],
        "processor": document["processor"],
        "charts": charts(longest),
    }


def lead(document: Mapping[str, Any], longest: Mapping[str, Any]) -> tuple[str, str]:
    """What was trained, and the strength of the player that trained longest."""
    judged = document["final"]["judged"]
    most = max(judged, key=int)
    best = {ahead: judged[ahead]["moves"]["optimal"]["mean"] for ahead in ("0", most)}
    parameters = sum(layer["parameters"] for layer in document["layers"])
    return (
        f"A network of {parameters:,} parameters learns Connect Four by self-play on one CPU core, with PPO "
        "or with tree search.",
        f"After {longest['marks'][-1]['cpu_seconds']:,.0f} CPU seconds of training with search, the network "
        f"alone chooses a best move in {best['0']:.1%} of the test positions, and a search of {int(most):,} "
        f"simulations per move in {best[most]:.1%}.",
    )


def findings(document: Mapping[str, Any]) -> list[str]:
    """Speed, and strength after a minute."""
    rates: dict[str, list[float]] = {}
    for run in document["runs"]:
        rates.setdefault(kind(run), []).append(run["marks"][-1]["moves_per_second"])
    sentences = [
        f"*{name}* makes {span(values, ',.0f')} moves per second ({count(len(values), 'seed')})."
        for name, values in rates.items()
    ]
    minute: dict[str, list[str]] = {}
    for run in document["runs"]:
        for line in run["marks"]:
            if line["mark"] == 60:
                minute.setdefault(kind(run), []).append(points(line["judged"]["0"], "one_ply"))
    shares = [f"{listed(values)} (*{name}*, {count(len(values), 'seed')})" for name, values in minute.items()]
    sentences.append(
        "After 60 CPU seconds of training, the network plays without search and gets "
        f"{', and '.join(shares)} of the points against one-ply search."
    )
    return sentences


def strongest(document: Mapping[str, Any], longest: Mapping[str, Any]) -> str:
    """A table of the player that trained longest, by the simulations of its search."""
    seconds = longest["marks"][-1]["cpu_seconds"]
    lines = [
        f"The table shows *Searched* after {seconds:,.0f} CPU seconds:\n",
        "| simulations per move | best moves | blunders | points against one-ply search | points against"
        " OpenSpiel's tree search of 1,000 simulations | games drawn against perfect play |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for ahead, judged in document["final"]["judged"].items():
        moves, perfect = judged["moves"], judged["perfect"]
        cells = (
            *("none" if ahead == "0" else ahead, f"{moves['optimal']['mean']:.1%}"),
            *(f"{moves['blunders']['mean']:.1%}", points(judged, "one_ply"), points(judged, "mcts_1000")),
            f"{perfect['drawn']} of {perfect['games']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def points(judged: Mapping[str, Any], name: str) -> str:
    return f"{judged[name]['points']['mean']:.1%}"


def pictures() -> list[str]:
    return [
        "![Share of best moves over CPU minutes](connect_four_moves.svg)",
        "",
        "![Points over CPU minutes](connect_four_points.svg)",
    ]


def kind(run: Mapping[str, Any]) -> str:
    return "Searched" if run["settings"]["simulations"] else "PPO"


def speed(run: Mapping[str, Any]) -> dict[str, Any]:
    last = run["marks"][-1]
    return {
        "run": run["name"],
        "CPU seconds": last["cpu_seconds"],
        "moves": last["moves"],
        "games": last["games"],
        "moves per second": last["moves_per_second"],
        "share of time in learning": last["learn_seconds"] / last["cpu_seconds"],
    }


def row(run: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {"run": run["name"], "CPU seconds": line["mark"], "moves": line["moves"]}
    for ahead, judged in line["judged"].items():
        cells |= {
            f"best moves, {ahead} simulations": judged["moves"]["optimal"],
            f"blunders, {ahead} simulations": judged["moves"]["blunders"],
            f"points against one-ply search, {ahead} simulations": judged["one_ply"]["points"],
            f"points against search of four moves, {ahead} simulations": judged["foresight_4"]["points"],
        }
    return cells


def by_ply(judged: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"simulations": ahead, "stones": line["plies"], "positions": line["positions"]}
        | {"best moves": line["optimal"], "blunders": line["blunders"]}
        for ahead, figures in judged.items()
        for line in figures["moves"]["by_ply"]
    ]


def matches(judged: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"simulations": ahead, "against": name.replace("_", " ")}
        | {
            f"share of {key}" if key.startswith("points") else key: value
            for key, value in figures[name].items()
        }
        for ahead, figures in judged.items()
        for name in figures
        if name != "moves"
    ]


def solver(found: Mapping[str, Any] | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {"the exact solver": found["speed"], "the first move": found.get("first move", "not solved")}


def charts(run: Mapping[str, Any]) -> dict[str, str]:
    """Strength over CPU minutes, with and without search."""
    lines = run["marks"]
    minutes = np.array([line["cpu_seconds"] for line in lines]) / 60

    def curve(ahead: str, *keys: str) -> Curve:
        figures: Sequence[Any] = [line["judged"][ahead] for line in lines]
        for key in keys:
            figures = [item[key] for item in figures]
        return (minutes, *(np.array([item[part] for item in figures]) for part in ("mean", "low", "high")))

    def drawn(y: str, *keys: str) -> str:
        both = {"without search": curve("0", *keys), "100 simulations": curve("100", *keys)}
        return panels(both, "CPU minutes", y, "band: 95% interval")

    return {
        "connect_four_moves.svg": drawn("best moves", "moves", "optimal"),
        "connect_four_points.svg": drawn("points against search of four moves", "foresight_4", "points"),
    }
