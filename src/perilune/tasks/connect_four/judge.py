"""The work of connect_four_judge: a player against the exact solver, and matches against others."""

from __future__ import annotations

from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.games.connect_four.evaluation import exam, grade, match, openings_against
from perilune.games.connect_four.network import load_player
from perilune.games.connect_four.players import opponent, playing
from perilune.games.connect_four.solver import Solver
from perilune.tasks.connect_four.specs import ConnectFourJudgeSpec
from perilune.tasks.stage.policy import prepare_device


def run(workspace: Workspace, spec: ConnectFourJudgeSpec) -> dict[str, Any]:
    """Judge the player with each number of simulations; return the summary."""
    seed = workspace.job.seed
    prepare_device(workspace)
    network = load_player(workspace.input("player"))
    solver = Solver()
    questions = exam(solver, spec.positions, spec.first_ply, seed)
    workspace.log(f"{len(questions.boards)} positions solved, {solver.nodes:,} nodes")
    judged: dict[str, Any] = {}
    total = len(spec.simulations) * (len(spec.opponents) + 1)
    for simulations in spec.simulations:
        player = playing(network, simulations)
        found: dict[str, Any] = {"moves": grade(questions, player, seed)}
        for name in spec.opponents:
            openings = openings_against(name, solver, -(-spec.games // 2), spec.first_ply, seed)
            found[name] = match(player, opponent(name, solver, seed), openings, seed).figures()
            workspace.progress(len(judged) * (len(spec.opponents) + 1) + len(found), total, "judgements")
        judged[str(simulations)] = found
        workspace.metric(len(judged), simulations=simulations, **found)
    return {"kind": "connect_four", "simulations": judged}
