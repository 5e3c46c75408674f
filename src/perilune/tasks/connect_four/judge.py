"""connect_four_judge: a player's moves against the exact solver, and matches against others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.bundle.plugin import Consumes

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace

Opponent = Literal[
    "random", "one_ply", "foresight_2", "foresight_4", "foresight_6", "mcts_100", "mcts_1000", "perfect"
]


class ConnectFourJudgeSpec(Frozen):
    """Fields of a connect_four_judge stage."""

    player: Annotated[str, Consumes("player")] = Field(description="stage whose player is judged")
    simulations: tuple[int, ...] = Field(
        (0, 100), min_length=1, description="how far it looks ahead, one judgement each; 0 is not at all"
    )
    positions: int = Field(10, ge=2, description="positions of each ply whose columns the solver compares")
    first_ply: int = Field(
        12, ge=8, le=40, description="stones on the first of them, and on boards that perfect play is met on"
    )
    games: int = Field(100, ge=2, description="games against each opponent, every opening from both sides")
    opponents: tuple[Opponent, ...] = Field(
        ("random", "one_ply", "foresight_2", "foresight_4", "perfect"), description="who is played against"
    )


class ConnectFourJudge:
    """Share of best moves, share of blunders, and results with intervals."""

    name = "connect_four_judge"
    spec = ConnectFourJudgeSpec
    produces = "evaluation"
    output = "artifacts/summary.json"
    standalone = True

    def plan(self, job: Job) -> Mapping[str, object]:
        """What is compared and played."""
        spec = ConnectFourJudgeSpec.model_validate(job.spec)
        return {
            "moves": f"{41 - spec.first_ply} plies x {spec.positions} positions, each column solved",
            "games": f"{spec.games} against each of {', '.join(spec.opponents)}",
            "looking ahead": ", ".join(str(count) for count in spec.simulations),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Judge with each number of simulations."""
        from perilune.games.connect_four.evaluation import exam, grade, match, openings_against
        from perilune.games.connect_four.network import load_player
        from perilune.games.connect_four.players import opponent, playing
        from perilune.games.connect_four.solver import Solver
        from perilune.tasks.stage.policy import prepare_device

        spec = ConnectFourJudgeSpec.model_validate(workspace.job.spec)
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


plugin = ConnectFourJudge()
