"""The work of connect_four_judge: compare a player with the exact solver, and play matches."""

from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.games.connect_four.evaluation import grade_player, make_exam, make_openings_against, play_match
from perilune.games.connect_four.network import load_player
from perilune.games.connect_four.players import make_network_player, make_opponent
from perilune.games.connect_four.solver import Solver
from perilune.tasks.connect_four.stages import ConnectFourJudgeSpec
from perilune.tasks.stage.policy import prepare_device


def run(workspace: Workspace, spec: ConnectFourJudgeSpec) -> dict[str, Any]:
    """Evaluate the player with each number of simulations; return the summary."""
    seed = workspace.job.seed
    prepare_device(workspace)
    network = load_player(workspace.input("player"))
    solver = Solver()
    questions = make_exam(solver, spec.positions, spec.first_ply, seed)
    workspace.log(f"{len(questions.boards)} positions solved, {solver.nodes:,} nodes")
    results: dict[str, Any] = {}
    total = len(spec.simulations) * (len(spec.opponents) + 1)
    for simulations in spec.simulations:
        player = make_network_player(network, simulations)
        figures: dict[str, Any] = {"moves": grade_player(questions, player, seed)}
        for name in spec.opponents:
            openings = make_openings_against(name, solver, -(-spec.games // 2), spec.first_ply, seed)
            figures[name] = play_match(player, make_opponent(name, solver, seed), openings, seed).figures()
            done = len(results) * (len(spec.opponents) + 1) + len(figures)
            workspace.progress(done, total, "judgements")
        results[str(simulations)] = figures
        workspace.metric(len(results), simulations=simulations, **figures)
    return {"kind": "connect_four", "simulations": results}
