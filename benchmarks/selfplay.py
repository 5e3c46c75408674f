"""Train a tiny language model by self-play in tic-tac-toe, Kuhn and Leduc poker, for several seeds.

    python benchmarks/selfplay.py [--seeds 0 1 2] [--only kuhn_poker]

Runs recipes/selfplay.yaml, benchmarks/kuhn_poker.yaml and benchmarks/leduc_poker.yaml. Writes
results/selfplay.json and keeps the games there that are not run again.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from best_response import best_response
from perilune.environments import make_environment
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.recipe.load import bundled_recipe
from perilune.tasks.selfplay.exact_play import move_probabilities
from recipe_runs import HERE, document, options, run_recipe, write

RECIPES = {
    "tic_tac_toe": bundled_recipe("selfplay"),
    "kuhn_poker": HERE / "kuhn_poker.yaml",
    "leduc_poker": HERE / "leduc_poker.yaml",
}
CURVES = ("entropy", "openings", "illegal", "drawn", "turns", "seat/0/reward", "seat/0/won", "seat/1/won")
LEAST = 0.05  # the best reply ignores lines of the policy with a lower probability
EVERY = 4  # curves keep one of this many steps


def main() -> None:
    parser = options(__doc__, "selfplay")
    parser.add_argument("--only", choices=RECIPES, help="one game")
    arguments = parser.parse_args()
    began = time.monotonic()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": {}}
    runs = dict(known["runs"])
    for game in [arguments.only] if arguments.only else RECIPES:
        runs[game] = []
        for seed in arguments.seeds:
            runs[game].append(run(game, seed))
            words = [] if len(runs) == len(RECIPES) else ["--only", *runs]
            write(arguments.out, {"runs": runs} | document("selfplay.py", words, began))


def run(game: str, seed: int) -> dict[str, Any]:
    """Run a recipe, and return the figures of its self-play."""
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as home:
        stages = run_recipe(RECIPES[game], seed, home=Path(home))
        seconds = {stage: processor_seconds(result["folder"]) for stage, result in stages.items()}
        replies = best_replies(stages) if game == "tic_tac_toe" else None
    played = stages["selfplay"]
    lines = [line for line in played["metrics"] if line["step"] % EVERY == 0 or line["step"] == 1]
    return {
        "seed": seed,
        "parameters": played["summary"]["parameters"],
        "processor_seconds": {"sft": seconds["sft"], "selfplay": seconds["selfplay"]},
        "league": played["summary"]["league"],
        **({"best_reply": replies} if replies else {}),
        "curves": {"step": [line["step"] for line in lines]}
        | {name: [line.get(name) for line in lines] for name in CURVES},
    }


def best_replies(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Bounds on the best reply's return per game against start and champion, by seat."""
    environment: Any = make_environment({"id": "open_spiel", "game": "tic_tac_toe", "list_moves": False})
    torch.set_num_threads(1)
    replies = {}
    for name, stage in (("start", "sft"), ("champion", "selfplay")):
        final = stages[stage]["folder"] / "artifacts" / "checkpoints" / "final"
        decoder, tokenizer = load_checkpoint(final, torch.device("cpu"))
        chances = partial(move_probabilities, decoder=decoder, tokenizer=tokenizer, temperature=1.0)
        bounds = [best_response(environment, seat, chances, min_reach=LEAST) for seat in (0, 1)]
        replies[name] = [row._asdict() for row in bounds]
    return replies


def processor_seconds(bundle: Path) -> float:
    """CPU seconds of the stage's process, over all its steps."""
    path = bundle / "artifacts" / "timings.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return round(sum(json.loads(line).get("processor", 0.0) for line in lines), 1)


if __name__ == "__main__":
    sys.exit(main())
