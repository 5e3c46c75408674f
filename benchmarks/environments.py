"""Measure the overhead of environment adapters: episodes per second, and the time beside the bare package.

    python benchmarks/environments.py

For each environment, the same scripted moves are made with the package alone, through our adapter in the same
process, and through our adapter in a separate process, as in runs (32 sessions at a time). The three
alternate for some rounds, so all of them have the same machine. A step is a move, or an answer that is
judged. The time to open an episode is spread over its steps. Times are CPU seconds of all participating
processes, so that a busy machine changes little, and medians of the rounds.
Writes results/environments.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

from perilune.bundle.machine import describe_machine
from perilune.environments import Observation, make_environment
from perilune.verifiers.scorer import Scorer
from perilune.verifiers.sessions import Sessions

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent / "tests" / "environments"  # has packages for verifiers, and a server of OpenEnv
AT_ONCE = 32
Bare = Callable[[], int]  # plays an episode, and returns the number of its steps


def chain_sum() -> Bare:
    import reasoning_gym

    data = reasoning_gym.create_dataset("chain_sum", seed=0, size=256)
    entries = cycle([data[n] for n in range(256)])

    def episode() -> int:
        data.score_answer("12", next(entries))
        return 1

    return episode


def tic_tac_toe() -> Bare:
    import pyspiel

    game = pyspiel.load_game("tic_tac_toe")

    def episode() -> int:
        state, steps = game.new_initial_state(), 0
        while not state.is_terminal():
            state.observation_string(state.current_player())
            state.apply_action(state.legal_actions()[0])
            steps += 1
        state.returns()
        return steps

    return episode


def frozen_lake() -> Bare:
    import gymnasium

    def episode() -> int:
        game = gymnasium.make(
            "FrozenLake-v1", render_mode="ansi", is_slippery=False, disable_env_checker=True
        )
        game.reset(seed=0)
        for move in (1, 1, 2, 2, 1, 2):
            game.render()
            game.step(move)
        game.close()
        return 6

    return episode


def three_in_a_row() -> Bare:
    import textarena

    def episode() -> int:
        game = textarena.make("TicTacToe-v0-raw")
        game.reset(num_players=2, seed=0)
        for move in NINE:
            game.get_observation()
            game.step(move)
        game.close()
        return len(NINE)

    return episode


def server_guesses(url: str) -> Bare:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient

    class Guessing(EnvClient):
        def _step_payload(self, action: Any) -> dict[str, Any]:
            return {"guess": action}

        def _parse_result(self, payload: dict[str, Any]) -> Any:
            return StepResult(payload["observation"], payload.get("reward"), payload["done"])

        def _parse_state(self, payload: dict[str, Any]) -> Any:
            return payload

    def episode() -> int:
        with Guessing(base_url=url) as client:
            client.reset(seed=0, upto=10**6)
            for _ in range(6):
                client.step("0")
        return 6

    return episode


DOWN_AND_RIGHT = ("down", "down", "right", "right", "down", "right")
NINE = ("[0]", "[1]", "[2]", "[4]", "[3]", "[5]", "[7]", "[6]", "[8]")  # a draw


def first_legal(seen: Observation, turn: int) -> str:
    assert seen.legal is not None
    return seen.legal[0]


def scripted(*moves: str) -> Callable[[Observation, int], str]:
    return lambda seen, turn: moves[min(turn, len(moves) - 1)]


def cases(folder: Path, url: str) -> dict[str, tuple[dict[str, Any], Any, Callable[[], Bare] | None]]:
    """Section, moves and bare package of each environment. Our own environments have no package."""
    questions = folder / "questions.jsonl"
    rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": 2 * n}) for n in range(2000)]
    questions.write_text("\n".join(rows) + "\n")
    lake = {"game": "FrozenLake-v1", "config": {"is_slippery": False}, "turns": 20}
    return {
        "reasoning_gym/chain_sum": (
            {"id": "reasoning_gym", "task": "chain_sum", "strict": False}, scripted("12"), chain_sum,
        ),
        "jsonl": ({"id": "jsonl", "path": str(questions), "match": "number"}, scripted("12"), None),
        "calculator": ({"id": "calculator"}, scripted("1+1", "2+2", "3*3", "4+4", "5*5", ";6"), None),
        "open_spiel/tic_tac_toe": ({"id": "open_spiel", "game": "tic_tac_toe"}, first_legal, tic_tac_toe),
        "gymnasium/FrozenLake-v1": (
            {"id": "gymnasium", **lake}, scripted(*DOWN_AND_RIGHT), frozen_lake,
        ),
        "textarena/TicTacToe-v0": (
            {"id": "textarena", "game": "TicTacToe-v0"}, scripted(*NINE), three_in_a_row,
        ),
        "verifiers": ({"id": "verifiers", "package": "taskset_guess", "turns": 6}, scripted("x"), None),
        "openenv": (
            {"id": "openenv", "url": url, "prompt": "?", "config": {"upto": 10**6}, "turns": 6},
            scripted("0"),
            lambda: server_guesses(url),
        ),
    }  # fmt: skip


def through_adapter(environment: Any, tasks: list[Any], moves: Any) -> Bare:
    """Return a player of one episode in this process."""
    endless = cycle(tasks)

    def episode() -> int:
        session, steps = environment.reset(next(endless), 0), 0
        while not session.observation.done:
            session.step(moves(session.observation, steps))
            steps += 1
        session.close()
        return steps

    return episode


def in_own_process(sessions: Sessions, tasks: list[Any], moves: Any) -> Bare:
    """Return a player of a batch of episodes in the process of the scorer."""
    endless = cycle(tasks)

    def episodes() -> int:
        live = sessions.open([(next(endless), 0) for _ in range(AT_ONCE)])
        going, steps = list(live), 0
        while going:
            for item in going:
                assert isinstance(item.result, Observation), item.result
            sessions.step([(item, [moves(item.result, len(item.actions))], True) for item in going])
            steps += len(going)
            going = [item for item in going if not getattr(item.result, "done", True)]
        sessions.close(live)
        return steps

    return episodes


def processor_seconds() -> float:
    """CPU seconds of this process and of all processes that it started, including ended ones."""
    others = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(process.cpu_times()[:4]) for process in others)


def timed(play: Bare, seconds: float) -> tuple[float, float]:
    """CPU seconds per call and per step, from calls for about this many seconds."""
    calls = steps = 0
    begun, until = processor_seconds(), time.process_time() + seconds
    while time.process_time() < until or not calls:
        steps += play()
        calls += 1
    spent = processor_seconds() - begun
    return spent / calls, spent / steps


def measured(
    section: dict[str, Any], moves: Any, bare: Callable[[], Bare] | None, rounds: int, seconds: float
) -> dict[str, Any]:
    environment = make_environment(section)
    tasks = list(islice(environment.tasks("train", 0), 256))
    with Scorer(section) as scorer:
        arms = {"adapter": through_adapter(environment, tasks, moves)}
        arms["own process"] = in_own_process(Sessions(scorer, environment), tasks, moves)
        if bare is not None:
            arms["package"] = bare()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, play in arms.items():
                pair = timed(play, seconds)
                if number:  # the first round warms up
                    times[name].append(pair)
    step = {name: statistics.median(value for _, value in pairs) for name, pairs in times.items()}
    episode = {name: statistics.median(value for value, _ in pairs) for name, pairs in times.items()}
    ratios = [a / b for (_, a), (_, b) in zip(times["adapter"], times.get("package", []), strict=False)]
    apart = [a / b for (_, a), (_, b) in zip(times["own process"], times["adapter"], strict=True)]
    row = {
        "steps per episode": round(episode["adapter"] / step["adapter"], 1),
        "episodes/s, adapter": round(1 / episode["adapter"]),
        "episodes/s, separate process": round(AT_ONCE / episode["own process"]),
        "package alone, µs per step": round(step["package"] * 1e6, 1)
        if "package" in step
        else "not measured",
        "adapter, µs per step": round(step["adapter"] * 1e6, 1),
        "time of adapter / time of package alone": round(statistics.median(ratios), 2) if ratios else "",
        "separate process, µs per step": round(step["own process"] * 1e6, 1),
        "time of separate process / time of adapter": round(statistics.median(apart), 2),
    }
    print(f"{environment.id:28} {row}", flush=True)
    environment.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each arm in each round")
    parser.add_argument("--only", default="", help="environments whose name has this")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "environments.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PACKAGES))
    import test_openenv

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-benchmark-")))
        process, url = test_openenv.started()
        stack.callback(process.kill)
        table = {
            name: measured(*case, arguments.rounds, arguments.seconds)
            for name, case in cases(folder, url).items()
            if arguments.only in name
        }
    result = {
        "title": "Time per environment step",
        "about": "The CPU time of an environment step is measured in three ways, with the same moves:\n\n"
        "* with the package alone;\n"
        "* through Perilune's adapter in the same process;\n"
        f"* through the adapter in a separate process, as in runs, with {AT_ONCE} sessions at a time.\n\n"
        "Times are the sum over all processes and include their communication. The time to open an episode"
        " is spread over its steps. *Episodes/s* follows from this time: it is what one core could do without"
        " other work."
        f" Values are medians of {arguments.rounds}"
        " rounds. For OpenSpiel and reasoning-gym, the package alone does less: it writes no prompts and"
        " parses no moves.",
        "command": f"python benchmarks/environments.py --rounds {arguments.rounds}"
        f" --seconds {arguments.seconds}",
        "processor": describe_machine()["processor"]["model"],
        "environments": table,
    }
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
