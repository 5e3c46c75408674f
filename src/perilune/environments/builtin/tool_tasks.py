"""Generates tasks for a policy with tools: small files, a question and the expected result.

A task follows from a random state alone. The expected result is an answer, a file, or the results of a
function on hidden test cases. Nothing of it enters the sandbox, except the inputs of the test cases when the
function finally runs on them.
"""

import csv
import io
import itertools
import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_DONE_SENTENCE = ", then answer <answer>done</answer>."


@dataclass(frozen=True, slots=True)
class ToolTask:
    """One task.

    Attributes:
        question: the question in English.
        files: the initial files of the scratch folder.
        solution: Python that prints the answer or does what is asked.
        answer: the right answer, or "done".
        compact: the question in a few characters; empty if the family has no such form.
        outputs: expected files at the end, each as rows of a table or as JSON.
        function: name of the function in solution.py to test; empty if there is none.
        cases: hidden test cases, each a list of arguments.
    """

    question: str
    files: Mapping[str, str]
    solution: str
    answer: str = "done"
    compact: str = ""
    outputs: Mapping[str, Any] = field(default_factory=dict)
    function: str = ""
    cases: Sequence[Sequence[Any]] = field(default_factory=list)
    expected: Sequence[Any] = field(default_factory=list)


_FIGURES: Mapping[str, tuple[str, Callable[[list[int]], int]]] = {  # Python function: in English, and itself
    "sum": ("the sum of the numbers", sum),
    "max": ("the largest number", max),
    "min": ("the smallest number", min),
    "len": ("how many numbers there are", len),
}


def figure(draw: random.Random) -> ToolTask:
    """Return a figure of the numbers in a file."""
    numbers = [draw.randint(10, 99) for _ in range(draw.randint(3, 8))]
    file = "".join(draw.choices(string.ascii_lowercase, k=2))
    name = draw.choice(list(_FIGURES))
    words, function = _FIGURES[name]
    return ToolTask(
        question=f"The file {file} holds numbers, one a line. Answer with {words}.",
        compact=f"{name} {file}>",
        files={file: "".join(f"{number}\n" for number in numbers)},
        solution=f"print({name}([*map(int,open('{file}'))]))",
        answer=str(function(numbers)),
    )


_SALES = "sales.csv has the columns region, item, amount; some amounts are missing"
_REGIONS = ("north", "south", "east", "west", "centre")


def column(draw: random.Random) -> ToolTask:
    """Return the total of some rows of a table with missing cells."""
    rows = _draw_sales(draw)
    region = draw.choice(sorted({row[0] for row in rows}))
    total = sum(int(amount) for name, _, amount in rows if name == region and amount)
    return ToolTask(
        question=f"{_SALES} and count for nothing. Answer with the total amount of the region {region}.",
        files=_sales_file(rows),
        solution="import csv\n"
        "rows = csv.DictReader(open('sales.csv'))\n"
        f"print(sum(int(row['amount'] or 0) for row in rows if row['region'] == {region!r}))",
        answer=str(total),
    )


def best(draw: random.Random) -> ToolTask:
    """Return the region with the largest total."""
    while True:
        rows = _draw_sales(draw)
        totals = {name: 0 for name, _, _ in rows}
        for name, _, amount in rows:
            totals[name] += int(amount or 0)
        ranked = sorted(totals.values(), reverse=True)
        if len(ranked) > 1 and ranked[0] > ranked[1]:
            break
    return ToolTask(
        question=f"{_SALES} and count for nothing. Answer with the region whose total amount is largest.",
        files=_sales_file(rows),
        solution="import csv, collections\n"
        "totals = collections.Counter()\n"
        "for row in csv.DictReader(open('sales.csv')):\n"
        "    totals[row['region']] += int(row['amount'] or 0)\n"
        "print(totals.most_common(1)[0][0])",
        answer=max(totals, key=lambda name: totals[name]),
    )


def clean(draw: random.Random) -> ToolTask:
    """Return a table to be filtered and sorted."""
    rows = _draw_sales(draw)
    minimum = draw.randint(10, 60)
    selected = sorted(
        (row for row in rows if row[2] and int(row[2]) >= minimum), key=lambda row: (-int(row[2]), row[1])
    )
    expected = [["item", "amount"], *([item, amount] for _, item, amount in selected)]
    return ToolTask(
        question=f"{_SALES}. Write out.csv with the columns item, amount (a header first): the rows with an"
        f" amount of at least {minimum}, the largest amount first, equal ones by item{_DONE_SENTENCE}",
        files=_sales_file(rows),
        solution="import csv\n"
        "rows = [row for row in csv.DictReader(open('sales.csv')) if row['amount']]\n"
        f"rows = [row for row in rows if int(row['amount']) >= {minimum}]\n"
        "rows.sort(key=lambda row: (-int(row['amount']), row['item']))\n"
        "with open('out.csv', 'w', newline='') as stream:\n"
        "    writer = csv.writer(stream)\n"
        "    writer.writerow(['item', 'amount'])\n"
        "    writer.writerows([row['item'], row['amount']] for row in rows)",
        outputs={"out.csv": expected},
    )


_RULES: Mapping[str, tuple[str, Callable[[list[int]], Any]]] = {  # Python source: in English, as a function
    "list(itertools.accumulate(n))": ("its running totals", lambda n: list(itertools.accumulate(n))),
    "list(dict.fromkeys(n))": (
        "its distinct numbers in the order they first come",
        lambda n: list(dict.fromkeys(n)),
    ),
    "[[k, len(list(g))] for k, g in itertools.groupby(n)]": (
        "its runs: a list of pairs of a number and how often it stands there in a row",
        lambda n: [[k, len(list(g))] for k, g in itertools.groupby(n)],
    ),
    "[b - a for a, b in zip(n, n[1:])]": (
        "the differences between each number and the one before it",
        lambda n: [b - a for a, b in itertools.pairwise(n)],
    ),
}


def transform(draw: random.Random) -> ToolTask:
    """Return a list computed from another list."""
    numbers = [draw.randint(1, 5) for _ in range(draw.randint(8, 20))]
    expression, (words, function) = draw.choice(list(_RULES.items()))
    return ToolTask(
        question=f"data.json holds a list of numbers. Write result.json: {words}{_DONE_SENTENCE}",
        files={"data.json": json.dumps(numbers)},
        solution="import itertools, json\n"
        "n = json.load(open('data.json'))\n"
        f"json.dump({expression}, open('result.json', 'w'))",
        outputs={"result.json": function(numbers)},
    )


@dataclass(frozen=True, slots=True)
class _Function:
    """A function with a bug to plant; `K` is replaced by a random number."""

    name: str
    description: str
    source: str
    bug: tuple[str, str]  # a fragment of the source, and its replacement
    arguments: Callable[[random.Random], list[Any]]


def _draw_numbers(draw: random.Random) -> list[Any]:
    return [[draw.randint(-20, 20) for _ in range(draw.randint(0, 12))]]


_FUNCTIONS = (
    _Function(
        "clamp_all",
        "returns the numbers, each moved into the range from -K to K",
        "def clamp_all(numbers):\n    return [max(-K, min(K, x)) for x in numbers]\n",
        ("max(-K, min(K, x))", "min(-K, max(K, x))"),
        _draw_numbers,
    ),
    _Function(
        "windows",
        "returns the sums of all K neighbours in a row, from left to right",
        "def windows(numbers):\n"
        "    return [sum(numbers[i : i + K]) for i in range(max(len(numbers) - K + 1, 0))]\n",
        ("len(numbers) - K + 1", "len(numbers) - K"),
        _draw_numbers,
    ),
    _Function(
        "every",
        "returns every K-th number, beginning with the first",
        "def every(numbers):\n    return numbers[::K]\n",
        ("[::K]", "[K::K]"),
        _draw_numbers,
    ),
    _Function(
        "digit_power_sum",
        "returns the sum of the K-th powers of the digits of a number",
        "def digit_power_sum(number):\n    return sum(int(digit) ** K for digit in str(number))\n",
        ("** K", "* K"),
        lambda draw: [draw.randint(0, 99999)],
    ),
)


def repair(draw: random.Random) -> ToolTask:
    """Return a function with a bug that changes the result of at least one case."""
    chosen = draw.choice(_FUNCTIONS)
    k = str(draw.randint(2, 9))
    source = chosen.source.replace("K", k)
    right, wrong = (text.replace("K", k) for text in chosen.bug)
    broken = source.replace(right, wrong)
    expected = actual = None
    while actual == expected:
        cases = [chosen.arguments(draw) for _ in range(12)]
        expected, actual = (
            _run_cases(source, chosen.name, cases),
            _run_cases(broken, chosen.name, cases),
        )
    return ToolTask(
        question=f"solution.py has a function {chosen.name}, which should do this: it"
        f" {chosen.description.replace('K', k)}. It does not. Mend it in solution.py{_DONE_SENTENCE}",
        files={"solution.py": broken},
        solution="source = open('solution.py').read()\n"
        f"open('solution.py', 'w').write(source.replace({wrong!r}, {right!r}))",
        function=chosen.name,
        cases=cases,
        expected=expected or [],
    )


def _run_cases(source: str, name: str, cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of one of the functions above."""
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102  # only sources of this module
    return [scope[name](*case) for case in cases]


FAMILIES: Mapping[str, Callable[[random.Random], ToolTask]] = {
    family.__name__: family for family in (figure, column, best, clean, transform, repair)
}


def matches_expected(expected: Any, name: str, content: bytes) -> bool:
    """Return whether an untrusted file contains the expected table (.csv) or JSON.

    True, 1 and 1.0 are different. Empty lines of a table don't count.
    """
    try:
        text = content.decode()
        actual = [*filter(None, csv.reader(io.StringIO(text)))] if name.endswith(".csv") else json.loads(text)
        return json.dumps(actual, sort_keys=True) == json.dumps(expected, sort_keys=True)
    except (ValueError, csv.Error, RecursionError):
        return False


def _draw_sales(draw: random.Random) -> list[tuple[str, str, str]]:
    items = draw.sample(range(100), draw.randint(6, 12))
    return [
        (draw.choice(_REGIONS), f"item{item:02}", "" if draw.random() < 0.15 else str(draw.randint(1, 99)))
        for item in items
    ]


def _sales_file(rows: Sequence[Sequence[str]]) -> dict[str, str]:
    return {"sales.csv": "".join(",".join(row) + "\n" for row in [("region", "item", "amount"), *rows])}
