"""Answer twenty questions about a home of real runs with a scripted client of `perilune mcp` over stdio.

No language model takes part: for each question, the script defines the tools to call and the figure to take
from their results. It shows that the tools suffice and that their figures are right, but not that a model
would find them.
The expected figures come from the files of the bundles and from what `perilune run --json` printed.

    python benchmarks/mcp_questions.py
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil
import pyarrow.parquet as parquet
import yaml
from mcp import ClientSession, StdioServerParameters, stdio_client

SCRIPT = str(Path(sys.executable).with_name("perilune"))
RESULT = Path(__file__).parent / "results" / "mcp_questions.json"
SEEDS = (0, 1, 2)
RECIPE = {
    "name": "sums",
    "model": {"preset": "tiny"},
    "environment": {
        "id": "reasoning_gym",
        "task": "basic_arithmetic",
        "prompt": "compact",
        "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"]}
        | {"allow_parentheses": False, "allow_negation": False},
    },
    "resources": {"device": "cpu", "threads": 1},
    "stages": [
        {"name": "traces", "task": "collect", "teacher": "arithmetic", "traces": 400},
        {
            "name": "sft",
            "task": "sft",
            "checkpoint": "model",
            "data": "traces",
            "steps": 10,
            "batch_size": 16,
        },
        {
            "name": "after",
            "task": "evaluate",
            "checkpoint": "sft",
            "tasks": 16,
            "samples": 4,
            "max_tokens": 24,
        },
    ],
}
PRICE, LIFETIME = 0.4, 7200  # of the machine "small" of the fake cloud, per hour; seconds of its lease
TEMPLATE = {
    "description": "a rented machine",
    "placement": {"name": "rented", "provider": "fake", "kind": "small"}
    | {"lease": {"max_lifetime": LIFETIME, "max_cost": 1.0, "idle": 600}, "site": {"python": "python3"}},
    "limits": {"on_box_stop_after": 1200},
}
T_TWO = 4.303  # two-sided 5% of Student's t with two degrees of freedom
Question = tuple[str, Callable[..., Any], Any]


class Home:
    """A home with two arms of three seeds, a run that fails, and a run whose task is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PERILUNE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        (folder / "sums.yaml").write_text(yaml.safe_dump(RECIPE))
        self.short = [self.run("sft.steps=10", f"seed={seed}") for seed in SEEDS]
        self.long = [self.run("sft.steps=100", f"seed={seed}") for seed in SEEDS]
        # There are fewer sums of one digit than traces.
        self.failed = self.run("environment.config.max_digits=1", "after.tasks=4", "name=broken", fails=True)
        self.killed = self.kill("sft.steps=100000", "name=killed")

    def run(self, *overrides: str, fails: bool = False) -> dict[str, Path]:
        """Run the recipe."""
        words = [part for override in overrides for part in ("--set", override)]
        command = [SCRIPT, "run", "sums.yaml", *words, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode != 0) is fails, done.stderr
        return self._attempts(json.loads(done.stdout.splitlines()[-1]))

    def kill(self, *overrides: str) -> dict[str, Path]:
        """Run the recipe, and send SIGKILL to each task of its stage sft until the run has failed."""
        words = [part for override in overrides for part in ("--set", override)]
        command = subprocess.Popen(
            [SCRIPT, "run", "sums.yaml", *words, "--json"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while command.poll() is None:
            for path in self.folder.glob("home/runs/*/attempts/*/runtime/claim.json"):
                begun = (path.parents[1] / "artifacts" / "metrics.jsonl").exists()
                long = json.loads((path.parents[1] / "job.json").read_text())["spec"].get("steps") == 100000
                if long and begun:
                    with suppress(psutil.NoSuchProcess):  # the attempt has ended
                        for task in psutil.Process(json.loads(path.read_text())["pid"]).children():
                            task.kill()
            time.sleep(0.2)
        assert command.stdout is not None
        return self._attempts(json.loads(command.stdout.read().splitlines()[-1]))

    def _attempts(self, document: Any) -> dict[str, Path]:
        """The newest attempts by stage, and the experiment's folder as "id"."""
        paths = {"id": Path(document["experiment_id"])}
        for stage in document["stages"]:
            if stage["run"]:
                attempts = self.folder / "home" / "runs" / stage["run"] / "attempts"
                paths[stage.get("stage") or stage["name"]] = max(
                    attempts.iterdir(), key=lambda path: int(path.name)
                )
        return paths


def file(attempt: Path, name: str) -> Any:
    """Read a JSON file of an attempt."""
    return json.loads((attempt / name).read_text())


def summary(attempt: Path) -> Any:
    return file(attempt, "artifacts/summary.json")


def metrics(attempt: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (attempt / "artifacts" / "metrics.jsonl").read_text().splitlines()]


def rows(attempt: Path, name: str = "step-*") -> list[dict[str, Any]]:
    """Read the episodes of an attempt."""
    (path,) = (attempt / "artifacts" / "episodes").glob(f"{name}.parquet")
    return parquet.read_table(path).to_pylist()


def conclusion(differences: list[float]) -> str:
    """The conclusion of a paired t test over three seeds."""
    mean, error = fmean(differences), stdev(differences) / len(differences) ** 0.5
    if abs(mean) < T_TWO * error or mean == 0:
        return "no difference shown"
    return "higher" if mean > 0 else "lower"


@contextmanager
def cloud(folder: Path) -> Iterator[None]:
    """Run a fake cloud whose machines the home may rent."""
    home, files = folder / "home", folder / "cloud"
    (home / "templates").mkdir(parents=True)
    (home / "templates" / "rented.yaml").write_text(yaml.safe_dump(TEMPLATE))
    providers = {"daily_cap": 20, "providers": {"fake": {"type": "fake", "folder": str(files)}}}
    (home / "providers.yaml").write_text(yaml.safe_dump(providers))
    server = subprocess.Popen([sys.executable, "-m", "perilune.execution.providers.fake.server", str(files)])
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def run_id(attempt: Path) -> str:
    return attempt.parents[1].name


def questions(home: Home) -> list[Question]:
    """The questions, each with its policy (an asynchronous function of `ask`) and expected figure."""
    short, long, failed = home.short, home.long, home.failed
    eval0, sft0 = run_id(long[0]["after"]), run_id(long[0]["sft"])
    everything = [str(run["id"]) for run in (*short, *long)]
    rate = {
        name: [summary(run["after"])["pass@1"]["mean"] for run in arm]
        for name, arm in (("short", short), ("long", long))
    }
    differences = [b - a for a, b in zip(rate["short"], rate["long"], strict=True)]
    losses = [line["loss"] for line in metrics(long[0]["sft"])]
    answers = rows(long[0]["after"])

    def path(tool: str, *keys: Any, **arguments: Any) -> Callable[..., Any]:
        async def policy(ask: Any) -> Any:
            value = await ask(tool, **arguments)
            for key in keys:
                value = value[key]
            return value

        return policy

    def computed(tool: str, compute: Callable[[Any], Any], **arguments: Any) -> Callable[..., Any]:
        async def policy(ask: Any) -> Any:
            return compute(await ask(tool, **arguments))

        return policy

    def arm(document: Any, steps: int) -> Any:
        return next(entry for entry in document["arms"] if entry["settings"]["sft.steps"] == steps)

    def compare(compute: Callable[[Any], Any]) -> Callable[..., Any]:
        return computed("compare", compute, targets=everything)

    sets = {"run": eval0, "set_name": "step-000000"}
    message = file(failed["traces"], "runtime/result.json")["message"].partition("\n")[0]
    killed = file(home.killed["sft"], "runtime/result.json")["message"].partition("\n")[0]
    assert "9" in killed or "KILL" in killed, killed
    return [
        ("How many experiments are there?", computed("runs", lambda d: len(d["experiments"])), 8),
        (
            "How many stages failed?",
            computed(
                "runs", lambda d: sum(s["state"] == "failed" for e in d["experiments"] for s in e["stages"])
            ),
            2,
        ),
        (
            "Which stage of the broken one failed?",
            computed(
                "runs",
                lambda d: next(s["stage"] for s in d["experiments"][0]["stages"] if s["state"] == "failed"),
                experiment="broken",
            ),
            "traces",
        ),
        (
            "Why did it fail?",
            computed("explain", lambda d: message in json.dumps(d, ensure_ascii=False), target="broken"),
            True,
        ),
        (
            "Which signal ended the other one?",
            computed("explain", lambda d: killed in json.dumps(d), target="killed"),
            True,
        ),
        (
            "Which arm is best: how many SFT steps?",
            compare(lambda d: d["arms"][d["best"] - 1]["settings"]["sft.steps"]),
            100 if fmean(rate["long"]) > fmean(rate["short"]) else 10,
        ),
        (
            "What is pass@1 of 10 steps?",
            compare(lambda d: arm(d, 10)["figure"]["mean"]),
            fmean(rate["short"]),
        ),
        (
            "What is pass@1 of 100 steps?",
            compare(lambda d: arm(d, 100)["figure"]["mean"]),
            fmean(rate["long"]),
        ),
        (
            "How large is the difference?",
            compare(lambda d: abs(next(a["difference"]["mean"] for a in d["arms"] if a["difference"]))),
            abs(fmean(differences)),
        ),
        (
            "Is it more than noise?",
            compare(lambda d: next(a["difference"]["conclusion"] for a in d["arms"] if a["difference"])),
            conclusion(differences),
        ),
        (
            "How many seeds support it?",
            compare(
                lambda d: next(
                    a["difference"]["seeds"]
                    if isinstance(a["difference"].get("seeds"), int)
                    else len(a["seeds"])
                    for a in d["arms"]
                    if a["difference"]
                )
            ),
            3,
        ),
        (
            "What is pass@1 of seed 0 after 100 steps?",
            path("show", "summary", "pass@1", "mean", run=eval0),
            rate["long"][0],
        ),
        (
            "How wide is its interval?",
            computed(
                "show", lambda d: d["summary"]["pass@1"]["high"] - d["summary"]["pass@1"]["low"], run=eval0
            ),
            summary(long[0]["after"])["pass@1"]["high"] - summary(long[0]["after"])["pass@1"]["low"],
        ),
        ("How many steps did its training take?", path("curves", "steps", run=sft0), len(losses)),
        ("What was its last loss?", path("curves", "metrics", "loss", "last", run=sft0), losses[-1]),
        (
            "What was its lowest loss?",
            path("curves", "metrics", "loss", "lowest", "value", run=sft0),
            min(losses),
        ),
        (
            "How many were cut off?",
            path("episodes", "fitting", where="truncated", **sets),
            sum(answer["finish_reason"] == "length" for answer in answers),
        ),
        (
            "How many were right?",
            path("episodes", "fitting", where="reward >= 1", **sets),
            sum(answer["reward"] == 1 for answer in answers),
        ),
        (
            "What would 150 steps with seed 0 reuse?",
            computed(
                "plan",
                lambda d: [s["name"] for s in d["forecast"]["stages"] if s["action"] == "reuse"],
                recipe="sums.yaml",
                overrides=["seed=0", "sft.steps=150"],
            ),
            ["traces"],
        ),
        (
            "What would it cost at most on a rented machine?",
            path(
                "plan",
                "forecast",
                "cost",
                "stages",
                recipe="sums.yaml",
                overrides=["seed=7"],
                template="rented",
            ),
            PRICE * LIFETIME / 3600 * len(RECIPE["stages"]),
        ),
    ]


async def answered(home: Home) -> list[dict[str, Any]]:
    """Ask all questions of one server."""
    server = StdioServerParameters(
        command=SCRIPT, args=["mcp", "--actions"], env=home.environment, cwd=home.folder
    )
    rows = []
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        for question, policy, expected in questions(home):
            sizes: list[int] = []

            async def ask(tool: str, sizes: list[int] = sizes, **arguments: Any) -> Any:
                result = await session.call_tool(tool, arguments)
                sizes.append(len(result.content[0].text.encode()))
                assert not result.isError, result.content[0].text
                return json.loads(result.content[0].text)

            try:
                answer = await policy(ask)
            except (AssertionError, KeyError, StopIteration, TypeError, RuntimeError) as error:
                answer = f"{type(error).__name__}: {error}"[:200]
            right = (
                abs(answer - expected) < 1e-6
                if isinstance(expected, float) and isinstance(answer, float)
                else answer == expected
            )
            rows.append(
                {
                    "question": question,
                    "answer": answer,
                    "expected": expected,
                    "right": right,
                    "calls": len(sizes),
                    "bytes of results": sum(sizes),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Make the home, ask, and write the result."""
    with tempfile.TemporaryDirectory() as folder, cloud(Path(folder)):
        rows = asyncio.run(answered(Home(Path(folder))))
    document = {
        "title": "Questions about runs, answered through MCP",
        "about": "The client is a script, which fixes the tools that answer each question. So the result "
        "shows that the tools suffice and give the right numbers. It does not show that a language model "
        "would choose these tools. Of the eight experiments, one had failed and one had been killed with "
        "SIGKILL. Costs are those of a fake cloud. An answer is right if it agrees with the files of the "
        "bundles. The answer `True` means that the tool gave the recorded reason or signal.",
        "command": "python benchmarks/mcp_questions.py",
        "questions": [
            {**row, "answer": str(row["answer"]), "expected": str(row["expected"])} for row in rows
        ],
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
