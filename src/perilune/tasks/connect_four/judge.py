"""The work of connect_four_judge: compare a player with the exact solver, and play matches."""

from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.games.connect_four.evaluation import exam, grade, match, openings_against
from perilune.games.connect_four.network import load_player
from perilune.games.connect_four.players import opponent, playing
from perilune.games.connect_four.solver import Solver
from perilune.tasks.connect_four.specs import ConnectFourJudgeSpec
from perilune.tasks.stage.policy import prepare_device


def run(workspace: Workspace, spec: ConnectFourJudgeSpec) -> dict[str, Any]:
    """Evaluate the player with each number of simulations; return the summary."""
    seed = workspace.job.seed
    prepare_device(workspace)
    network = load_player(workspace.input("player"))
    solver = Solver()
    questions = exam(solver, spec.positions, spec.first_ply, seed)
    workspace.log(f"{len(questions.boards)} positions solved, {solver.nodes:,} nodes")
    results: dict[str, Any] = {}
    total = len(spec.simulations) * (len(spec.opponents) + 1)
    for simulations in spec.simulations:
        player = playing(network, simulations)
        figures: dict[str, Any] = {"moves": grade(questions, player, seed)}
        for name in spec.opponents:
            openings = openings_against(name, solver, -(-spec.games // 2), spec.first_ply, seed)
            figures[name] = match(player, opponent(name, solver, seed), openings, seed).figures()
            done = len(results) * (len(spec.opponents) + 1) + len(figures)
            workspace.progress(done, total, "judgements")
        results[str(simulations)] = figures
        workspace.metric(len(results), simulations=simulations, **figures)
    return {"kind": "connect_four", "simulations": results}
