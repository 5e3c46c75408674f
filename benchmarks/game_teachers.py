"""Measure the strength of the game teachers: exploitability where it can be computed, otherwise matches.

nice python benchmarks/game_teachers.py [--pairs 40] [--only exploitability matches]
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspiel

from perilune.environments import KeyedRandom
from perilune.games.open_spiel_match import Match
from perilune.games.teachers import BEST_TEACHERS, GameTeacher, choose_move, make_game_teacher
from perilune.games.teachers.regret import ITERATIONS, RegretSolver, open_spiel_version
from perilune.metrics.bootstrap import bootstrap_problems
from perilune.metrics.proportion import wilson_interval
from recipe_runs import HERE, document, write

ABOUT = """\
* *Exploitability* is NashConv / 2: the mean return, over the two seats, of a best response to the teacher's
  average policy. It is 0 in an equilibrium. *Known exploitability* comes from other measurements of
  OpenSpiel's solvers.
* `cfr` (CFR+) and `mccfr` (CFR with sampled games) minimize counterfactual regret. `mcts` is tree search with
  the given number of simulations per move, `minimax` is perfect play, and `rules` follows heuristic rules.
* A match consists of pairs of games with the same random numbers and swapped seats. A draw is half a point.
  Shares of points have Wilson's 95% intervals, and mean returns have 95% bootstrap intervals over pairs.
* Times are CPU seconds on one core."""
CURVES = {
    "kuhn_poker": ({}, {"cfr": (10, 100, 200, 1000), "mccfr": (1000, 10_000, 200_000)}),
    "leduc_poker": ({}, {"cfr": (10, 100, 200), "mccfr": (10_000, 200_000, 1_000_000)}),
    "goofspiel": ({"num_cards": 4}, {"cfr": (10, 100, 200), "mccfr": (10_000, 200_000)}),
    "liars_dice": ({}, {"cfr": (10, 50, 100), "mccfr": (10_000, 100_000, 200_000)}),
}
KNOWN = {
    ("kuhn_poker()", "cfr", 100): 0.0012,
    ("leduc_poker()", "cfr", 100): 0.0134,
    ("leduc_poker()", "mccfr", 10_000): 0.298,
}


@dataclass(frozen=True)
class Contest:
    """A teacher, its opponent, and the number of their games."""

    game: str
    teacher: tuple[str, int]  # name, simulations
    opponent: tuple[str, int]
    config: Mapping[str, Any]
    pairs: float = 1.0  # multiple of the requested pairs


PARTS = ("exploitability", "matches")
CHANCE = ("random", 2)
HEX, CLOBBER = {"board_size": 7}, {"rows": 5, "columns": 5}
CONTESTS = (
    Contest("tic_tac_toe", ("minimax", 2), CHANCE, {}, 5),
    Contest("tic_tac_toe", ("minimax", 2), ("mcts", 50), {}, 5),
    Contest("connect_four", ("mcts", 1000), CHANCE, {}),
    Contest("connect_four", ("mcts", 1000), ("mcts", 100), {}),
    Contest("othello", ("mcts", 200), CHANCE, {}, 0.5),
    Contest("othello", ("mcts", 200), ("mcts", 20), {}, 0.5),
    Contest("hex", ("mcts", 1000), CHANCE, HEX),
    Contest("hex", ("mcts", 1000), ("mcts", 100), HEX),
    Contest("clobber", ("mcts", 1000), CHANCE, CLOBBER),
    Contest("clobber", ("mcts", 1000), ("mcts", 100), CLOBBER),
    Contest("kuhn_poker", ("cfr", 2), CHANCE, {}, 50),
    Contest("leduc_poker", ("cfr", 2), CHANCE, {}, 50),
    Contest("leduc_poker", ("cfr", 2), ("mccfr", 2), {}, 50),
    Contest("goofspiel", ("cfr", 2), CHANCE, {"num_cards": 4}, 25),
    Contest("liars_dice", ("cfr", 2), CHANCE, {}, 25),
    Contest("liars_dice", ("cfr", 2), ("mccfr", 2), {}, 50),
    Contest("gin_rummy", ("rules", 2), CHANCE, {}, 1.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="the other part stays as it was"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "game_teachers.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    previous: dict[str, Any] = {}
    if arguments.out.exists():
        previous = json.loads(arguments.out.read_text(encoding="utf-8"))
        began -= 60 * previous["minutes"]

    def keep(part: str, value: Any) -> None:
        header = {"title": "Teachers for games: exploitability and strength", "about": ABOUT}
        parts = {name: previous[name] for name in PARTS if name in previous} | {part: value}
        previous.update(parts)
        own = {"best teacher of each game": dict(BEST_TEACHERS), "iterations of a solution": dict(ITERATIONS)}
        own["OpenSpiel"] = open_spiel_version()
        options = ["--pairs", str(arguments.pairs)]
        write(arguments.out, header | parts | own | document("game_teachers.py", options, began))

    curves: list[dict[str, Any]] = []
    for game, (config, algorithms) in CURVES.items() if "exploitability" in arguments.only else ():
        loaded = pyspiel.load_game(game, config)
        for algorithm, iterations in algorithms.items():
            curves += curve(loaded, algorithm, iterations)
            keep("exploitability", curves)
    matches: list[dict[str, Any]] = []
    for contest in CONTESTS if "matches" in arguments.only else ():
        matches.append(match(contest, max(2, round(contest.pairs * arguments.pairs))))
        keep("matches", matches)


def curve(game: Any, algorithm: str, iterations: tuple[int, ...]) -> list[dict[str, Any]]:
    """Exploitability and seconds after each number of iterations."""
    began = time.process_time()
    solver = RegretSolver(game, algorithm, seed=0)
    rows, done, seconds = [], 0, time.process_time() - began
    for target in iterations:
        began = time.process_time()
        solver.run(target - done)
        seconds += time.process_time() - began
        done = target
        row = {
            "game": str(game),
            "algorithm": algorithm,
            "iterations": target,
            "exploitability": round(solver.exploitability(), 5),
            "known exploitability": KNOWN.get((str(game), algorithm, target)),
            "seconds": round(seconds, 2),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def match(contest: Contest, pairs: int) -> dict[str, Any]:
    """Play pairs of games with swapped seats. The row has the points and the mean return."""
    game = pyspiel.load_game(contest.game, dict(contest.config))
    began = time.process_time()
    teacher, opponent = (
        make_game_teacher(name, game, simulations=simulations)
        for name, simulations in (contest.teacher, contest.opponent)
    )
    solving, began = time.process_time() - began, time.process_time()
    returns = [[played(game, teacher, opponent, seat, number) for seat in (0, 1)] for number in range(pairs)]
    flat = [value for pair in returns for value in pair]
    points = sum(1.0 if value > 0 else 0.5 if value == 0 else 0.0 for value in flat)
    share, mean = wilson_interval(points, len(flat)), bootstrap_problems([sum(pair) / 2 for pair in returns])
    row = {
        "game": str(game),
        "teacher": named(*contest.teacher),
        "against": named(*contest.opponent),
        "games": len(flat),
        "won": sum(value > 0 for value in flat),
        "drawn": sum(value == 0 for value in flat),
        "share of points": f"{share.mean:.1%} ({share.low:.1%} to {share.high:.1%})",
        "mean return": f"{mean.mean:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})",
        "seconds per game": round((time.process_time() - began) / len(flat), 3),
        "seconds of solving": round(solving, 2),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def played(game: Any, teacher: GameTeacher, opponent: GameTeacher, seat: int, number: int) -> float:
    """Play one game, and return the return of the teacher in `seat`."""
    match = Match(game, KeyedRandom(number, "deal"))
    while not match.is_over:
        mover = teacher if match.player == seat else opponent
        match.take(choose_move(mover, match, KeyedRandom(number, f"{mover is teacher}")).action)
    return match.returns[seat]


def named(name: str, simulations: int) -> str:
    return f"{name} {simulations}" if name == "mcts" else name


if __name__ == "__main__":
    main()
