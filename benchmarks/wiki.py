"""Test the wiki of a home with 1,000 runs: build time, same bytes on a rebuild, faults found, false findings.

    python benchmarks/wiki.py [--runs 1000]

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
from perilune.wiki.lint import RULES, lint_wiki
from recipe_runs import document, options, run_recipe, write
from wiki_faults import (
    BEFORE_A_BUILD,
    FORMS,
    Planter,
    add_arms,
    fill_queries,
    question,
    spare_runs,
)
from wiki_home import SUMMARY, another_run, figure, tampered
from wiki_sentences import SOUND

EACH = 10  # faults of each kind
SPARE = 3  # kinds of faults that use one run each
SOUND_PER_PAGE = 7  # sentences without fault in a page
TIMES = 3  # builds per median


def main() -> None:
    parser = options(__doc__, "wiki")
    parser.add_argument("--runs", type=int, default=1000)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        home = Path(folder) / "home"
        recipe = Path(folder) / "wiki.yaml"
        recipe.write_text(RECIPE)
        run_recipe(recipe, 0, home=home)
        control = Control(Home.open(home))
        filled_home(control, arguments.runs)
        measured = {"builds": [builds(control)], "one figure changed": [one_change(control)]}
        lint, rows = faults(control)
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
has its own bundle, manifest and signatures, and `perilune verify` accepts them. Times are CPU time, because
other programs used the machine too.

* *From nothing* has no cache: every signature is checked. *Without a change* reads the cache. *Of the
  command* includes the start of the process. *Same bytes* says whether two builds give the same files.
* *One figure changed* alters the summary of a run without updating its signature. A build then names the
  numbers and pages that change, and the findings of lint should name the run.
* The ten faults of a kind differ: in their sentence, in its form (paragraph, list, quote, table), or in what
  was changed. Half of the faults in sentences are in pages of questions, half in pages of runs.
* Further pages have only sentences without a fault. Some look like one: they have numbers of sections, words
  such as "better" that compare nothing, plans or doubts. *False findings* are all findings in these pages,
  and those of a kind that was not planted in their page, unless they name a run that was damaged or are in an
  edited page. Precision is the share of found faults among found faults and false findings.

The author of the rules also wrote the sentences, before running the rules on them. The rules were then
changed, so these figures are higher than they would be for other people's sentences. Sentences that the
rules still get wrong were kept."""
RECIPE = """\
name: base
model: {preset: tiny}
environment: {id: reasoning_gym, task: basic_arithmetic, prompt: compact}
resources: {threads: 1}
stages:
  - {name: test, task: evaluate, checkpoint: model, tasks: 16, samples: 2, max_tokens: 16}
"""


def filled_home(control: Control, runs: int) -> None:
    """Fill the home with recipes of 40 runs each: eight settings of five seeds."""
    base, draw = find_run(control, "base/test"), random.Random(0)
    add_arms(control, "base/test")
    spare_runs(control, "base/test", SPARE * EACH)
    remaining = runs - 1 - 7 - SPARE * EACH
    for number in range(remaining):
        arm, seed = divmod(number % 40, 5)
        rate = draw.betavariate(4, 4)
        another_run(control, base, seed, figure(rate), [f"rl.lr={arm}"], f"recipe{number // 40}")


def builds(control: Control) -> dict[str, Any]:
    """CPU seconds of builds, and a comparison of the bytes of two complete builds."""
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
        began = children_seconds()
        program = str(Path(sys.executable).with_name("perilune"))
        home = {**os.environ, "PERILUNE_HOME": str(control.home.root)}
        subprocess.run([program, "wiki", "build"], env=home, check=True, capture_output=True)
        command.append(children_seconds() - began)
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
        "CPU seconds from nothing": sorted(whole)[TIMES // 2],
        "CPU seconds without a change": sorted(same)[TIMES // 2],
        "CPU seconds with one more run": more,
        "CPU seconds of the command, without a change": sorted(command)[TIMES // 2],
        "same bytes": equal,
    }


def timed(wiki: Wiki) -> float:
    """CPU seconds of one build, including opening the home as the command does."""
    began = time.process_time()
    root = wiki.root.parent
    control = Control(Home.open(root))
    compile_wiki(wiki, wiki.facts(control))
    control.store.close()
    return time.process_time() - began


def children_seconds() -> float:
    """CPU seconds of all programs that this one started and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


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


def faults(control: Control) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Plant faults and sentences without fault; return all figures, and recall and precision by kind."""
    wiki = Wiki.of(control)
    spare = [find_run(control, f"spare{number}/test").id for number in range(SPARE * EACH)]
    pages = {(kind, number): f"questions/{kind}-{number}" for kind in RULES for number in range(EACH)}
    run = find_run(control, "recipe5/test").id
    for page in pages.values():
        wiki.write(f"{page}.md", question("test", run))
    compile_wiki(wiki, wiki.facts(control))
    began = time.process_time()
    clean = lint_wiki(wiki.pages(), wiki.facts(control, verify=True))
    seconds = time.process_time() - began
    others = [f"runs/{one.id}" for one in wiki.facts(control).runs if one.recipe.startswith("recipe")]
    random.Random(0).shuffle(others)
    planter = Planter(control, wiki, "test", spare, others)
    sound = write_sound_pages(planter)
    faulty: dict[str, set[str]] = {kind: set() for kind in RULES}
    for early in (True, False):
        for (kind, number), page in pages.items():
            if (kind in BEFORE_A_BUILD) == early:
                faulty[kind].add(planter.plant(kind, number, page))
        if early:
            compile_wiki(wiki, wiki.facts(control))
    findings = lint_wiki(wiki.pages(), wiki.facts(control, verify=True))
    known = {(finding.page, finding.code) for finding in clean}
    false = [
        item for item in findings
        if (item.page, item.code) not in known
        and item.page not in faulty[item.code] | faulty["edited"]  # an edited number is stale, too
        and not any(run in f"{item.message} {item.page}" for run in spare)
    ]  # fmt: skip
    rows = []
    for kind, places in faulty.items():
        found = len(places & {item.page for item in findings if item.code == kind})
        rows.append({
            "kind": kind, "planted": len(places), "found": found,
            "false findings": sum(item.code == kind for item in false),
        })  # fmt: skip
    found = sum(row["found"] for row in rows)
    figures = {
        "planted": sum(row["planted"] for row in rows),
        "found": found,
        "findings on the untouched wiki": len(clean),
        "sentences without fault": len(SOUND),
        "of them reported": len({(item.page, item.line) for item in false if item.page in sound}),
        "false findings": len(false),
        "precision": found / (found + len(false)),
        "CPU seconds of lint": seconds,
    }
    return figures, rows


def write_sound_pages(planter: Planter) -> set[str]:
    """Write the sentences without fault into new pages of questions and return the pages."""
    pages = set()
    for begin in range(0, len(SOUND), SOUND_PER_PAGE):
        page = f"questions/sound-{begin}"
        text = "\n\n".join(
            FORMS[number % len(FORMS)].format(fill_queries(sentence, "test"))
            for number, sentence in enumerate(SOUND[begin : begin + SOUND_PER_PAGE])
        )
        planter.wiki.write(f"{page}.md", f"# Notes\n\n{text}\n")
        pages.add(page)
    return pages


if __name__ == "__main__":
    sys.exit(main())
