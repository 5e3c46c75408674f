"""Answer twenty questions about a home of real runs through `perilune mcp` over stdio.

    python benchmarks/mcp_questions.py

A script answers first: for each question, it defines the tools to call and the figure to take from their
results. It shows that the tools suffice and that their figures are right. An agent answers next, to whom
nobody names a tool. The first command makes a home and questions.txt, and must keep running. The second is
the agent's: it prints the tools, or the result of a call. The third grades the list of 20 texts in the
agent's FOLDER/answers.json:

    python benchmarks/mcp_questions.py --prepare FOLDER
    python benchmarks/mcp_questions.py --call FOLDER [TOOL ARGUMENTS]
    python benchmarks/mcp_questions.py --grade FOLDER

The expected figures come from the files of the bundles and from what
`perilune run --json` printed. They lie beside FOLDER, in FOLDER.key.json.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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
HEADER = {
    "title": "Questions about runs, answered through MCP",
    "about": "A script answered first. It fixes the tools that answer each question, so its answers show "
    "that the tools suffice and give the right numbers. The agent is a large language model that "
    "had only the questions, a command that lists the tools, and a command that calls one. Nobody"
    " named a tool to it. Its prompt also set the form of the answers, and forbade the tools "
    "`run` and `cancel`. Of the eight experiments, one had failed and one had been killed with "
    "SIGKILL. Costs are those of a fake cloud. A number is right if it agrees with the files of "
    "the bundles to three digits, and a reason if it contains the recorded one.\n\nThe agent is "
    "the second one. The first gave 17 right answers: the plan did not tell it why a finished run"
    " would not be reused (the code had changed), and two questions left open whether greedy "
    "answers and retries count. Both were then made clear.",
    "command": "python benchmarks/mcp_questions.py",
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


def find(message: str, document: Any) -> str:
    """The message, if the document contains it."""
    return message if message in json.dumps(document, ensure_ascii=False) else "not found"


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
        ("How many experiments does the home have?", computed("runs", lambda d: len(d["experiments"])), 8),
        (
            "How many stages failed, over all experiments?",
            computed(
                "runs", lambda d: sum(s["state"] == "failed" for e in d["experiments"] for s in e["stages"])
            ),
            2,
        ),
        (
            "Which stage of the experiment `broken` failed?",
            computed(
                "runs",
                lambda d: next(s["stage"] for s in d["experiments"][0]["stages"] if s["state"] == "failed"),
                experiment="broken",
            ),
            "traces",
        ),
        (
            "Why did the experiment `broken` fail?",
            computed("explain", lambda d: find(message, d), target="broken"),
            message,
        ),
        (
            "What ended the experiment `killed`?",
            computed("explain", lambda d: find(killed, d), target="killed"),
            killed,
        ),
        (
            "Which number of SFT steps has the best mean pass@1 in the experiments `sums`?",
            compare(lambda d: d["arms"][d["best"] - 1]["settings"]["sft.steps"]),
            100 if fmean(rate["long"]) > fmean(rate["short"]) else 10,
        ),
        (
            "What is the mean pass@1 of `sums` with 10 SFT steps?",
            compare(lambda d: arm(d, 10)["figure"]["mean"]),
            fmean(rate["short"]),
        ),
        (
            "What is the mean pass@1 of `sums` with 100 SFT steps?",
            compare(lambda d: arm(d, 100)["figure"]["mean"]),
            fmean(rate["long"]),
        ),
        (
            "How large is the difference between these two means?",
            compare(lambda d: abs(next(a["difference"]["mean"] for a in d["arms"] if a["difference"]))),
            abs(fmean(differences)),
        ),
        (
            "What can one conclude from this difference: higher, lower, or no difference shown?",
            compare(lambda d: next(a["difference"]["conclusion"] for a in d["arms"] if a["difference"])),
            conclusion(differences),
        ),
        (
            "How many seeds support this comparison?",
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
            "What is pass@1 of `sums` with 100 SFT steps and seed 0?",
            path("show", "summary", "pass@1", "mean", run=eval0),
            rate["long"][0],
        ),
        (
            "How wide is the 95% interval of this pass@1?",
            computed(
                "show", lambda d: d["summary"]["pass@1"]["high"] - d["summary"]["pass@1"]["low"], run=eval0
            ),
            summary(long[0]["after"])["pass@1"]["high"] - summary(long[0]["after"])["pass@1"]["low"],
        ),
        (
            "How many training steps did the SFT stage of this experiment take?",
            path("curves", "steps", run=sft0),
            len(losses),
        ),
        (
            "What was the last loss of this SFT stage?",
            path("curves", "metrics", "loss", "last", run=sft0),
            losses[-1],
        ),
        (
            "What was the lowest loss of this SFT stage?",
            path("curves", "metrics", "loss", "lowest", "value", run=sft0),
            min(losses),
        ),
        (
            "How many sampled answers of this evaluation were cut off by the token limit?",
            path("episodes", "fitting", where="truncated", **sets),
            sum(answer["finish_reason"] == "length" for answer in answers),
        ),
        (
            "How many sampled answers of this evaluation were right?",
            path("episodes", "fitting", where="reward >= 1", **sets),
            sum(answer["reward"] == 1 for answer in answers),
        ),
        (
            "Which stages would be reused if one ran sums.yaml with 150 SFT steps and seed 0?",
            computed(
                "plan",
                lambda d: [s["name"] for s in d["forecast"]["stages"] if s["action"] == "reuse"],
                recipe="sums.yaml",
                overrides=["seed=0", "sft.steps=150"],
            ),
            ["traces"],
        ),
        (
            "What would sums.yaml with seed 7 cost at most on the template `rented`, without retries?",
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


@asynccontextmanager
async def connect(folder: Path) -> AsyncIterator[ClientSession]:
    """A session with the server of a folder's home."""
    environment = os.environ | {"PERILUNE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    server = StdioServerParameters(command=SCRIPT, args=["mcp", "--actions"], env=environment, cwd=folder)
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        yield session


async def answer_by_script(home: Home) -> list[dict[str, Any]]:
    """Ask all questions of one server."""
    rows = []
    async with connect(home.folder) as session:
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
            counts = {"calls": len(sizes), "bytes of results": sum(sizes)}
            rows.append(grade(question, answer, expected) | counts)
            print(rows[-1], flush=True)
    return rows


def grade(question: str, answer: Any, expected: Any) -> dict[str, Any]:
    """A row of the result. A number must agree to three digits, a list in its words, and a word exactly.

    The answer to a question for a reason must contain the recorded message.
    """
    text = str(answer).strip()
    if isinstance(expected, float | int):
        is_number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text) is not None
        right = is_number and abs(float(text) - expected) <= 1e-3 * abs(expected)
    elif isinstance(expected, list):
        right = sorted(re.findall(r"\w+", text)) == sorted(expected)
    elif question.startswith(("Why", "What ended")):
        right = expected in text
    else:
        right = text == expected
    return {"question": question, "answer": text, "expected": str(expected), "right": right}


def prepare(folder: Path) -> None:
    """Make the home and the questions for an agent, and keep the cloud running."""
    folder.mkdir(parents=True)
    with cloud(folder):
        asked = [(question, expected) for question, _, expected in questions(Home(folder))]
        folder.with_suffix(".key.json").write_text(json.dumps(asked))
        lines = [f"{number}. {question}\n" for number, (question, _) in enumerate(asked, 1)]
        (folder / "questions.txt").write_text("".join(lines))
        print(f"{folder} is ready; press Ctrl-C when the agent has answered", flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(24 * 3600)


async def call(folder: Path, tool: str | None, arguments: dict[str, Any]) -> None:
    """Print what an agent sees: all tools, or the result of one call. Calls are recorded."""
    async with connect(folder) as session:
        if tool is None:
            for described in (await session.list_tools()).tools:
                print(described.model_dump_json(exclude_none=True))
            return
        result = await session.call_tool(tool, arguments)
    text = "".join(part.text for part in result.content)
    print(text)
    record = {"tool": tool, "arguments": arguments, "bytes": len(text.encode()), "error": result.isError}
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def grade_agent(folder: Path) -> dict[str, Any]:
    """Compare an agent's answers with the files of the bundles, and count its calls."""
    key = json.loads(folder.with_suffix(".key.json").read_text())
    answers = json.loads((folder / "answers.json").read_text())
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return {
        "answers of an agent": [
            grade(question, answer, expected)
            for (question, expected), answer in zip(key, answers, strict=True)
        ],
        "calls of the agent": [call | {"arguments": json.dumps(call["arguments"])} for call in calls],
    }


def main() -> None:
    """Run the script, or a step of the agent's test."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--prepare", type=Path, metavar="FOLDER")
    modes.add_argument("--call", nargs="+", metavar=("FOLDER", "TOOL"))
    modes.add_argument("--grade", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare.resolve())
    elif arguments.call:
        folder, tool, words = (*arguments.call, None, None)[:3]
        asyncio.run(call(Path(folder).resolve(), tool, json.loads(words or "{}")))
    else:
        write_result(arguments.grade)


def write_result(agent: Path | None) -> None:
    """Replace the answers of the script, or those of the agent in a folder."""
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if agent:
        document |= grade_agent(agent.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder, cloud(Path(folder)):
            document["questions"] = asyncio.run(answer_by_script(Home(Path(folder))))
    RESULT.write_text(json.dumps(HEADER | document | HEADER, indent=2) + "\n")


if __name__ == "__main__":
    main()
