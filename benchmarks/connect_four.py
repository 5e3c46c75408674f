"""Connect Four on one core: how fast a player learns, and how strong it gets.

    python benchmarks/connect_four.py train FOLDER [--seconds 1800] [--seed 0] [--simulations 16]
    python benchmarks/connect_four.py judge FOLDER ... [--out FILE]

`train` learns for so many CPU seconds of its own process (the machine may be busy with other things), one
thread, and keeps the player at each mark; `judge` compares all that were kept with the exact solver and with
other players, and writes results/connect_four.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from perilune.connect_four.network import save_player
from perilune.connect_four.ppo import Trainer
from perilune.connect_four.settings import PPOSettings

HERE = Path(__file__).resolve().parent
FALLING = 0.4  # last share of the time, in which learning rate and entropy fall
MARKS = (15, 30, 60, 120, 180, 300, 450, 600, 900, 1200, 1500, 1800)
PPO = PPOSettings()
SEARCHED = {"entropy": 0.0, "games": 512, "moves": 16, "minibatch": 2048}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--seconds", type=float, default=1800)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--simulations", type=int, default=16, help="0 is PPO")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.folder, arguments.seconds, arguments.seed, arguments.simulations)


def train(folder: Path, seconds: float, seed: int, simulations: int) -> None:
    """Learn for so many CPU seconds; a player at each mark, and what it took in marks.jsonl."""
    settings = PPOSettings(simulations=simulations, **SEARCHED) if simulations else PPO
    folder.mkdir(parents=True)
    about = {"settings": settings.model_dump(), "seed": seed, "seconds": seconds}
    (folder / "run.json").write_text(json.dumps(about, indent=1) + "\n")
    began = time.process_time()
    trainer = Trainer(settings, seed)
    used = moves = games = 0.0
    marks = [mark for mark in MARKS if mark < seconds]
    shares: dict[str, float] = {"play_seconds": 0.0, "learn_seconds": 0.0}
    while used < seconds:
        figures = trainer.advance(max(0.0, 1 - (seconds - used) / (seconds * FALLING)))
        used = time.process_time() - began
        moves, games = moves + figures["moves"], games + figures["games"]
        shares = {name: total + figures[name] for name, total in shares.items()}
        if used >= min(seconds, *marks, seconds):
            mark = max(m for m in (*marks, seconds) if m <= used)
            marks = [m for m in marks if m > used]
            seconds = json.loads((folder / "run.json").read_text())["seconds"]  # may be cut short by hand
            save_player(folder / f"player-{mark:04.0f}", trainer.network)
            line: dict[str, Any] = {"mark": mark, "cpu_seconds": used, "moves": moves, "games": games}
            line |= {"moves_per_second": moves / used, **shares, "entropy": figures["entropy"]}
            with (folder / "marks.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
