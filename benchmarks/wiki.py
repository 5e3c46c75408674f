"""Test the wiki of a home with 1,000 runs: build time, identical bytes on a rebuild, and faults found.

    python benchmarks/wiki.py [--runs 1000] [--each 10]

One run is real. The others are copies with another seed, setting and figure, each with its own bundle,
manifest and signatures. Writes results/wiki.json.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perilune.control.queries.lookup import find_run
from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control
from perilune.wiki.build import Wiki, compile_wiki
from perilune.wiki.lint import lint_wiki
from recipe_runs import document, options, run_recipe, write
from wiki_faults import BEFORE_A_BUILD, Planter, add_arms, question, spare_runs
from wiki_home import SUMMARY, another_run, figure, tampered

SPARE = 3  # kinds of faults that use one run each
TIMES = 3  # builds per median


def main() -> None:
    parser = options(__doc__, "wiki")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--each", type=int, default=10, help="faults of each kind")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        home = Path(folder) / "home"
        recipe = Path(folder) / "wiki.yaml"
        recipe.write_text(RECIPE)
        run_recipe(recipe, 0, home=home)
        control = Control(Home.open(home))
        filled_home(control, arguments.runs, arguments.each)
        measured = {"builds": [builds(control)], "one figure changed": [one_change(control)]}
        lint, rows = faults(control, arguments.each)
        control.store.close()
    about = {"title": "Wiki: time of a build, and planted faults", "about": ABOUT}
    write(
        arguments.out,
        about
        | measured
        | {"planted faults": rows, "lint": [lint]}
        | document("wiki.py", sys.argv[1:], began),
    )


ABOUT = """\
One run of the home directory is real. The others are copies with another seed, setting and result. Each copy
has its own bundle, manifest and signatures, and `perilune verify` accepts them.

* *From nothing* has no cache: every signature is checked. *Without a change* reads the cache. *Of the
  command* includes the start of the process. *Same bytes* says whether two builds give the same files.
* *One figure changed* alters the summary of a run without updating its signature. A build then names the
  numbers and pages that change, and the findings of lint should name the run.
* Each fault is planted in a separate question page, or in a run that only this page cites. A finding is
  *unexplained* if it is not in such a page and does not name such a run.

The author of the rules also chose the faults. So the result shows that the rules work, but not that they find
every fault that people make."""
RECIPE = """\
name: base
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic, prompt: compact}
resources: {threads: 1}
stages:
  - {name: test, task: evaluate, checkpoint: model, tasks: 16, samples: 2, max_tokens: 16}
"""


def filled_home(control: Control, runs: int, each: int) -> None:
    """Fill the home with recipes of 40 runs each: eight settings of five seeds."""
    base, draw = find_run(control, "base/test"), random.Random(0)
    add_arms(control, "base/test")
    spare_runs(control, "base/test", SPARE * each)
    remaining = runs - 1 - 7 - SPARE * each
    for number in range(remaining):
        arm, seed = divmod(number % 40, 5)
        rate = draw.betavariate(4, 4)
        another_run(control, base, seed, figure(rate), [f"rl.lr={arm}"], f"recipe{number // 40}")


def builds(control: Control) -> dict[str, Any]:
    """Seconds of builds, and a comparison of the bytes of two complete builds."""
    first, second = Wiki.of(control), Wiki(control.home.root / "again")
    for wiki in (first, second):
        for number in range(20):
            run = find_run(control, f"recipe{number}/test").id
            wiki.write(f"questions/q-{number}.md", question("test", run))
    whole, same = [], []
    for _ in range(TIMES):
        shutil.rmtree(second.root / ".perilune", ignore_errors=True)
        for path in second.root.glob("[!q]*/"):
            shutil.rmtree(path)
        whole.append(timed(second))
    built = compile_wiki(first, first.facts(control))
    for _ in range(TIMES):
        same.append(timed(first))
    command = []
    for _ in range(TIMES):
        began = time.perf_counter()
        program = str(Path(sys.executable).with_name("perilune"))
        home = {**os.environ, "PERILUNE_HOME": str(control.home.root)}
        subprocess.run([program, "wiki", "build"], env=home, check=True, capture_output=True)
        command.append(time.perf_counter() - began)
    base = find_run(control, "base/test")
    another_run(control, base, 99, figure(0.5), ["rl.lr=0"], "recipe0")
    more = timed(first)
    compile_wiki(second, second.facts(control))
    files = sorted(
        path.relative_to(first.root) for path in first.root.rglob("*.*") if ".perilune" not in path.parts
    )
    equal = all(
        (first.root / file).read_bytes() == (second.root / file).read_bytes()
        for file in files
        if (first.root / file).is_file()
    )
    shutil.rmtree(second.root)
    return {
        "runs": built.runs,
        "pages": built.pages,
        "seconds from nothing": sorted(whole)[TIMES // 2],
        "seconds without a change": sorted(same)[TIMES // 2],
        "seconds with one more run": more,
        "seconds of the command, without a change": sorted(command)[TIMES // 2],
        "same bytes": equal,
    }


def timed(wiki: Wiki) -> float:
    """Seconds of one build, including opening the home as the command does."""
    began = time.perf_counter()
    root = wiki.root.parent
    control = Control(Home.open(root))
    compile_wiki(wiki, wiki.facts(control))
    control.store.close()
    return time.perf_counter() - began


def one_change(control: Control) -> dict[str, Any]:
    """Change one figure of a cited run, count what build and lint report, and restore the figure."""
    wiki = Wiki.of(control)
    run = find_run(control, "recipe3/test")
    path = control.home.attempt(run.id, 1) / SUMMARY
    data = path.read_bytes()
    tampered(control, run.id, 0.999)
    built = compile_wiki(wiki, wiki.facts(control))
    findings = lint_wiki(wiki.pages(), wiki.facts(control, verify=True))
    path.unlink()
    path.write_bytes(data)
    compile_wiki(wiki, wiki.facts(control))
    return {
        "pages written": built.written,
        "numbers named": len(built.changed),
        "pages named": len({change.page for change in built.changed}),
        "findings of lint": len(findings),
        "findings that name the run": sum(run.id in finding.message for finding in findings),
    }


def faults(control: Control, each: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Findings before and after planting faults, and recall for each kind."""
    wiki = Wiki.of(control)
    spare = [find_run(control, f"spare{number}/test").id for number in range(SPARE * each)]
    planter = Planter(control, wiki, "test", spare)
    kinds = planter.kinds
    pages = {(kind, number): f"questions/{kind}-{number}" for kind in kinds for number in range(each)}
    run = find_run(control, "recipe5/test").id
    for page in pages.values():
        wiki.write(f"{page}.md", question("test", run))
    compile_wiki(wiki, wiki.facts(control))
    began = time.perf_counter()
    clean = lint_wiki(wiki.pages(), wiki.facts(control, verify=True))
    seconds = time.perf_counter() - began
    known = {(finding.page, finding.code) for finding in clean}
    for (kind, _), page in pages.items():
        if kind in BEFORE_A_BUILD:
            kinds[kind](page)
    compile_wiki(wiki, wiki.facts(control))
    for (kind, _), page in pages.items():
        if kind not in BEFORE_A_BUILD:
            kinds[kind](page)
    after = lint_wiki(wiki.pages(), wiki.facts(control, verify=True))
    located = {(finding.page, finding.code) for finding in after}
    recall = dict.fromkeys(kinds, 0)
    for (kind, number), page in pages.items():
        recall[kind] += (page if kind != "orphan" else f"runs/01GONE{number}", kind) in located
    damaged = set(spare)
    unexplained = [
        item for item in after
        if (item.page, item.code) not in known
        and not (item.page.startswith(f"questions/{item.code}-") or item.page.startswith("runs/01GONE"))
        and not any(run in f"{item.message} {item.page}" for run in damaged)
    ]  # fmt: skip
    figures = {
        "planted": each * len(kinds),
        "found": sum(recall.values()),
        "findings on the untouched wiki": len(clean),
        "findings": len(after),
        "unexplained findings": len(unexplained),
        "seconds of lint": seconds,
    }
    return figures, [{"kind": kind, "planted": each, "found": count} for kind, count in recall.items()]


if __name__ == "__main__":
    sys.exit(main())
