"""Measure the learning speed and the strength of a Connect Four player on one core.

    python benchmarks/connect_four.py train FOLDER [--seconds 1800] [--seed 0] [--simulations 16]
    python benchmarks/connect_four.py solve FOLDER
    python benchmarks/connect_four.py judge FOLDER [--positions 20] [--games 200]

`train` learns with one thread for the given CPU seconds of its own process, so the machine may be busy, and
saves the player at each mark to its own folder in FOLDER. `solve` lets the exact solver judge the columns of
the empty board, and times it. `judge` compares all players in FOLDER with the solver and with other players,
and writes results/connect_four.json.
"""

import argparse
import json
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perilune.bundle.machine import describe_machine
from perilune.games.connect_four.board import Boards, empty_boards, play
from perilune.games.connect_four.evaluation import (
    Exam,
    grade_player,
    make_exam,
    make_openings_against,
    play_match,
    sample_positions,
)
from perilune.games.connect_four.learning import Trainer
from perilune.games.connect_four.learning_settings import LearningSettings
from perilune.games.connect_four.network import load_player, save_player
from perilune.games.connect_four.players import make_network_player, make_opponent, one_ply
from perilune.games.connect_four.solver import Solver

HERE = Path(__file__).resolve().parent
MARKS = (15, 30, 60, 120, 180, 300, 450, 600, 900, 1200, 1500, 1800)
FALLING = 0.4  # last share of the time, with falling learning rate and entropy
SEARCHED: dict[str, Any] = {"games": 512, "moves": 16, "minibatch": 2048, "trace": 0.7}
FIRST_PLY = 8  # fewest stones on the judged boards
PERFECT_FROM = 12  # stones on the first boards of matches with perfect play
AHEAD = (0, 100)  # simulations per move for every mark
FURTHER = (400, 1600)  # and also for the last mark
AT_MARKS = ("one_ply", "foresight_4")
AT_THE_END = (
    "random", "one_ply", "foresight_2", "foresight_4", "foresight_6", "mcts_100", "mcts_1000", "perfect"
)  # fmt: skip
SLOW = ("mcts_1000", "perfect")  # opponents with half as many games


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "solve", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulations", type=int, default=16, help="0 is PPO")
    parser.add_argument("--positions", type=int, default=20, help="of each ply")
    parser.add_argument("--games", type=int, default=200, help="against each opponent")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "connect_four.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "train":
        train(arguments.folder, arguments.seconds, arguments.seed, arguments.simulations)
    elif arguments.command == "solve":
        solve(arguments.folder / "solver.json")
    else:
        figures = judge(arguments.folder, arguments.positions, arguments.games)
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


def train(folder: Path, seconds: float, seed: int, simulations: int) -> None:
    """Learn for the CPU seconds; save a player at each mark, and its cost in marks.jsonl."""
    settings = LearningSettings(simulations=simulations, **(SEARCHED if simulations else {}))
    folder = folder / f"{'search' if simulations else 'ppo'}-{seconds:.0f}-seed-{seed}"
    folder.mkdir(parents=True)
    about = {"settings": settings.model_dump(), "seed": seed, "seconds": seconds}
    (folder / "run.json").write_text(json.dumps(about, indent=1) + "\n")
    began = time.process_time()
    trainer = Trainer(settings, seed)
    totals = dict.fromkeys(("moves", "games", "play_seconds", "learn_seconds"), 0.0)
    used = 0.0
    marks = [mark for mark in MARKS if mark < seconds]
    while used < seconds:
        figures = trainer.advance(max(0.0, 1 - (seconds - used) / (seconds * FALLING)))
        used = time.process_time() - began
        totals = {name: total + figures[name] for name, total in totals.items()}
        if used < min([*marks, seconds]):
            continue
        mark = max(limit for limit in (*marks, seconds) if limit <= used)
        marks = [limit for limit in marks if limit > used]
        save_player(folder / f"player-{mark:04.0f}", trainer.network)
        line = {"mark": mark, "cpu_seconds": used, **totals, "moves_per_second": totals["moves"] / used}
        with (folder / "marks.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def solve(path: Path) -> None:
    """Time the solver by ply, and then score all first moves, which takes long."""
    rows = []
    for ply, count in ((8, 10), (10, 20), (12, 50), (16, 200), (20, 500), (24, 1000), (28, 1000)):
        solver, boards = Solver(24), sample_positions(one_ply, ply, count, 0)
        began = time.process_time()
        solver.scores(boards)
        seconds = time.process_time() - began
        rows.append(
            {
                "stones": ply,
                "positions per second": count / seconds,
                "million nodes per second": solver.nodes / seconds / 1e6,
            }
        )
        print(rows[-1], flush=True)
    path.write_text(json.dumps({"speed": rows}, indent=1) + "\n")
    solver = Solver(25)
    began = time.process_time()
    left = [-int(solver.scores(play(empty_boards(1), np.array([c])))[0]) for c in reversed(range(4))][::-1]
    first = {
        "columns": [*left, *left[-2::-1]],
        "CPU seconds": time.process_time() - began,
        "nodes": solver.nodes,
    }
    path.write_text(json.dumps({"speed": rows, "first move": first}, indent=1) + "\n")


def judge(folder: Path, per_ply: int, games: int) -> dict[str, Any]:
    """Judge every player in the folder, except for the judgements that are already stored."""
    solver = Solver(24)
    questions = solved(folder / f"exam-{per_ply}.npz", solver, per_ply)
    runs = []
    for path in sorted(folder.glob("*-seed-*")):
        lines = [json.loads(line) for line in (path / "marks.jsonl").read_text().splitlines()]
        runs.append(json.loads((path / "run.json").read_text()) | {"name": path.name, "marks": lines})
        for line in lines:
            player = path / f"player-{line['mark']:04.0f}"
            line["judged"] = {
                str(ahead): judged(player, ahead, AT_MARKS, questions, solver, games) for ahead in AHEAD
            }
    longest = max(runs, key=lambda run: run["marks"][-1]["cpu_seconds"])
    last = folder / longest["name"] / f"player-{longest['marks'][-1]['mark']:04.0f}"
    final = {
        str(ahead): judged(last, ahead, AT_THE_END, questions, solver, games) for ahead in (*AHEAD, *FURTHER)
    }
    solver_file = folder / "solver.json"
    return {
        "command": "python benchmarks/connect_four.py judge FOLDER",
        "versions": {name: version(name) for name in ("perilune", "torch", "open-spiel")},
        "processor": describe_machine()["processor"]["model"],
        "positions": len(questions.boards),
        "layers": layers(LearningSettings(**longest["settings"])),
        "runs": runs,
        "final": {"run": longest["name"], "mark": longest["marks"][-1]["mark"], "judged": final},
        "solver": json.loads(solver_file.read_text()) if solver_file.exists() else None,
    }


def solved(path: Path, solver: Solver, per_ply: int) -> Exam:
    """Load the positions with the score of every column, or make them and write the file."""
    if not path.exists():
        exam = make_exam(solver, per_ply, FIRST_PLY, seed=0)
        np.savez(path, own=exam.boards.own, stones=exam.boards.stones, scores=exam.scores)
    arrays = np.load(path)
    return Exam(Boards(arrays["own"], arrays["stones"]), arrays["scores"])


def judged(
    player: Path, ahead: int, opponents: tuple[str, ...], questions: Exam, solver: Solver, games: int
) -> Mapping[str, Any]:
    """Judge moves and matches of one player, and store the figures beside it."""
    file = player.parent / f"{player.name}-judged-{ahead}.json"
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    network_player = make_network_player(load_player(player), ahead)
    if "moves" not in figures:
        figures["moves"] = grade_player(questions, network_player)
    for name in (opponent for opponent in opponents if opponent not in figures):
        count = games // 4 if name in SLOW else games // 2  # openings, each played twice
        start = make_openings_against(name, solver, count, PERFECT_FROM, seed=0)
        began = time.process_time()
        figures[name] = play_match(network_player, make_opponent(name, solver, seed=0), start).figures()
        print(
            f"{player.parent.name} {player.name} {ahead} {name} {time.process_time() - began:.1f} s",
            flush=True,
        )
    file.write_text(json.dumps(figures) + "\n")
    return {name: figures[name] for name in ("moves", *opponents)}


def layers(settings: LearningSettings) -> list[dict[str, Any]]:
    """Parameters of each layer, and its multiply-adds per position."""
    from perilune.games.connect_four.board import COLUMNS, PLANES
    from perilune.games.connect_four.network import WINDOW, WINDOW_COUNT

    channels, hidden = settings.channels, settings.hidden
    shapes = {
        "convolution, 4 x 4": (PLANES * WINDOW * WINDOW, channels, WINDOW_COUNT),
        "first matrix": (WINDOW_COUNT * channels, hidden, 1),
        "second matrix": (hidden, hidden, 1),
        "policy and value": (hidden, COLUMNS + 1, 1),
    }
    return [
        {"layer": name, "parameters": (i + 1) * o, "multiply-adds": i * o * places}
        for name, (i, o, places) in shapes.items()
    ]


if __name__ == "__main__":
    main()
