"""Result page on self-play: tables before and after training, and curves over the steps as SVG.

Curves are means over seeds, with a band from the minimum to the maximum. Shares of won and drawn games have
Wilson's 95% intervals over the games of a match.
"""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from leads.text import count, listed
from perilune.metrics.across_seeds import SeedComparison, compare_over_seeds
from perilune.metrics.proportion import wilson_interval

WIDTH, HEIGHT = 250, 160  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 22, 24
INK, LINE = "#808080", "#3f7fdf"
TITLES = {"tic_tac_toe": "Tic-tac-toe", "kuhn_poker": "Kuhn poker", "leduc_poker": "Leduc poker"}
PANELS = {
    "tic_tac_toe": ("against/random", "against/minimax", "against/step 0", "elo", "entropy", "illegal"),
    **dict.fromkeys(
        ("kuhn_poker", "leduc_poker"),
        ("exploitability", "against/random", "against/cfr", "elo", "entropy", "illegal"),
    ),
}
MAIN = {  # the main figure of each game
    "tic_tac_toe": "against/minimax",
    **dict.fromkeys(("kuhn_poker", "leduc_poker"), "exploitability"),
}
MAIN_NAMES = {
    "tic_tac_toe": "the return against perfect play",
    **dict.fromkeys(("kuhn_poker", "leduc_poker"), "exploitability"),
}
NAMES = {
    "against/cfr": "return against CFR",
    "against/minimax": "return against perfect play",
    "against/random": "return against random play",
    "elo": "Elo",
}
ABOUT = """\
The games differ in the teacher and in the opponents of self-play:

* Tic-tac-toe: the model imitates a perfect teacher. In half of the tasks of self-play its opponent is a
  frozen earlier version of the model, and in the other half the current version.
* Kuhn and Leduc poker: the model imitates a teacher that plays the equilibrium, but chooses half of its moves
  at random. Then the model plays only against itself, with a KL penalty towards the policy after imitation
  (the [magnet](../reference/glossary.md)). In Leduc poker a player sees only the current state, which
  includes the bets so far.

The settings for Kuhn poker were chosen from 16 trials on seeds 0 and 1. Leduc poker has the same settings
with smaller batches, which were tried on seed 0 only.

*Start* is the policy after imitation, *champion* the published policy, and *last* the policy at the end of
training. In poker the champion is the least exploitable member of the league. Returns are means per game. A
win is worth 1 at tic-tac-toe, 1 or 2 chips at Kuhn poker, and up to 13 chips at Leduc poker. Elo is computed
from all matches of a run, with the random player at 0. *Illegal mass* is the probability of illegal moves.
*Collapse alarms* names the metrics that raised an alarm, with the step of the first alarm. Only Leduc poker
ran on the processor below; the other games ran on an AMD EPYC. Differences are tested [over paired
seeds](index.md#differences-over-seeds).

Exploitability is the mean return, over both seats, of the best response to the policy's move probabilities.
It is computed exactly, and is 0 in an equilibrium. Random moves have an exploitability of 0.458 in Kuhn poker
and 2.374 in Leduc poker. Betting on every card has an exploitability of 0.333 in Kuhn poker.

For tic-tac-toe a search of the game tree gives bounds on the return of the best response. The search leaves
out lines of play that the policy enters with a probability below 5%. The best response gets 0 against perfect
play, and 1 against a policy that it always beats."""

Run = Mapping[str, Any]


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with tables, findings and charts."""
    page: dict[str, Any] = {
        "title": "Self-play of a language model in three games",
        "command": document["command"],
    }
    text, charts = [tests(document["runs"])], {}
    for game, runs in document["runs"].items():
        picture = f"selfplay_{game}.svg"
        charts[picture] = chart(runs, PANELS[game])
        text += [
            f"**{TITLES[game]}**",
            changes(runs),
            f"![Curves of {TITLES[game]} over the steps, three seeds]({picture})",
        ]
        page[TITLES[game]] = {
            "before and after": [row for run in runs for row in rows(run)],
            "matches": [row for run in runs for row in matches(run)],
        }
        if replies := [row for run in runs for row in best_replies(run)]:
            page[TITLES[game]]["mean return of the best response, by the seat of the policy"] = replies
    rest = {key: value for key, value in document.items() if key not in (*page, "runs")}
    page |= {"lead": lead(document["runs"]), "findings": "\n\n".join(text), "about": ABOUT}
    return {**page, "charts": charts, **rest}


def lead(runs: Mapping[str, Sequence[Run]]) -> tuple[str, str]:
    """The games, and the change of the main figure of each, from imitation to the published policy."""
    changes = []
    compared = compare(runs)
    for game, played in runs.items():
        start, champion = (
            fmean(judged(run)[policy][MAIN[game]] for run in played) for policy in ("start", "champion")
        )
        conclusion = compared[game].conclusion
        doubt = "" if conclusion in ("higher", "lower") else f"; {conclusion}"
        changes.append(f"{MAIN_NAMES[game]} in {TITLES[game]} is {champion:.2f} ({start:.2f} before{doubt})")
    return (
        "A language model of 0.3 million parameters first imitates games, and then trains for 256 steps of "
        f"self-play in {listed([TITLES[game] for game in runs])}.",
        f"After self-play, {listed(changes)}; these are means over "
        f"{count(len(next(iter(runs.values()))), 'seed')}.",
    )


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, SeedComparison]:
    """Test the main figure of each game over seeds: the champion against the policy after imitation."""
    return compare_over_seeds(
        {
            game: [judged(run)["champion"][MAIN[game]] - judged(run)["start"][MAIN[game]] for run in played]
            for game, played in runs.items()
        }
    )


def tests(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence for each test."""
    return "\n".join(
        f"* {TITLES[game]}, {MAIN_NAMES[game]}, champion against start: {test.describe(is_share=False)}."
        for game, test in compare(runs).items()
    )


def judged(run: Run) -> dict[str, Mapping[str, float]]:
    """The evaluations of the policy at the start, of the champion, and at the end."""
    league = run["league"]
    of_step = {judgement["step"]: judgement for judgement in league["judgements"]}
    last = league["judgements"][-1]["step"]
    return {"start": of_step[0], "champion": of_step[league["champion"]], "last": of_step[last]}


def changes(runs: Sequence[Run]) -> str:
    """A table with a row for each seed: the metrics from the start to the champion, alarms and CPU time."""
    rows = [change(run) for run in runs]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def change(run: Run) -> dict[str, str]:
    """The row of one seed."""
    policies, league, seconds = judged(run), run["league"], run["processor_seconds"]
    cells = {"seed": str(run["seed"])}
    for name, what, form in (
        ("exploitability", "exploitability", ".3f"),
        ("against/minimax", "return against perfect play", "+.2f"),
        ("against/random", "return against random play", "+.2f"),
        ("elo", "Elo", "+.0f"),
    ):
        if name in policies["start"]:
            values = (policies[policy][name] for policy in ("start", "champion"))
            cells[f"{what}: start → champion"] = " → ".join(f"{value:{form}}" for value in values)
    first = {alarm["name"]: alarm for alarm in reversed(league["alarms"])}
    alarms = ", ".join(f"{name} from step {alarm['step']}" for name, alarm in first.items())
    cells["collapse alarms"] = f"{alarms or 'none'}{' (collapsed)' if league['collapsed'] else ''}"
    cells["CPU seconds: imitation + self-play"] = f"{seconds['sft']:.0f} + {seconds['selfplay']:.0f}"
    return cells


def rows(run: Run) -> list[dict[str, Any]]:
    """Table rows of one seed: start, champion and last policy."""
    return [
        {"seed": run["seed"], "policy": name, "step": row["step"]}
        | {
            NAMES.get(key, key): figure(row, key)
            for key in row
            if key != "step" and key.count("/") < 2 and is_shown(key)
        }
        for name, row in judged(run).items()
    ]


def is_shown(key: str) -> bool:
    """True if all policies have this metric."""
    return not key.startswith("against/step") and not key.endswith(("/low", "/high"))


def figure(one: Mapping[str, float], key: str) -> Any:
    """A metric, with its interval if it has one."""
    if f"{key}/low" not in one:
        return one[key]
    return {"mean": one[key], "low": one[f"{key}/low"], "high": one[f"{key}/high"]}


def best_replies(run: Run) -> list[dict[str, Any]]:
    """Bounds on the mean return of the best response to start and champion, by the policy's seat."""
    return [
        {"seed": run["seed"], "policy": name}
        | {f"policy moves {seat}": f"{bound['low']:.2f} to {bound['high']:.2f}"
           for seat, bound in zip(("first", "second"), bounds, strict=True)}
        for name, bounds in run.get("best_reply", {}).items()
    ]  # fmt: skip


def matches(run: Run) -> list[dict[str, Any]]:
    """Shares of games won, drawn and lost by start and champion against the environment's players."""
    wanted = {f"step {row['step']}": name for name, row in judged(run).items() if name != "last"}
    rows = []
    for item in run["league"]["matches"]:
        if item["first"] in wanted and not item["second"].startswith("step"):
            games = item["won"] + item["drawn"] + item["lost"]
            shares = {name: wilson_interval(item[name], games)._asdict() for name in ("won", "drawn", "lost")}
            rows.append(
                {
                    "seed": run["seed"],
                    "policy": wanted[item["first"]],
                    "against": item["second"],
                    "games": games,
                }
                | shares
            )
    return sorted(rows, key=lambda row: (row["against"], row["policy"] != "start"))


def chart(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Panels of curves over the steps, three per row."""
    width, height = 3 * WIDTH, -(-len(names) // 3) * HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="10" fill="{INK}">'
    ]
    for number, name in enumerate(names):
        offset = (number % 3) * WIDTH, (number // 3) * HEIGHT
        parts += [f'<g transform="translate({offset[0]} {offset[1]})">', *panel(name, runs), "</g>"]
    label = "steps; line: mean over the seeds, band: range"
    parts.append(f'<text x="{width / 2:g}" y="{height - 6}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def panel(name: str, runs: Sequence[Run]) -> list[str]:
    """The panel of one figure."""
    curves = [curve(run, name) for run in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    low, high = bounds([value for column in values for value in column])

    def point(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f} {y:.1f}"

    band = [point(s, max(v)) for s, v in zip(steps, values, strict=True)]
    band += [point(s, min(v)) for s, v in reversed(list(zip(steps, values, strict=True)))]
    line = [point(s, fmean(v)) for s, v in zip(steps, values, strict=True)]
    title = name.replace("step 0", "the start")
    lines = [f'<text x="{LEFT}" y="14" font-size="12" font-weight="600" fill="{LINE}">{escape(title)}</text>']
    for level in (low, (low + high) / 2, high):
        x, y = point(0, level).split()
        lines.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity=".3"/>')
        lines.append(f'<text x="{LEFT - 5}" y="{float(y) + 3:.1f}" text-anchor="end">{level:.3g}</text>')
    for step in (0, steps[-1] / 2, steps[-1]):
        x = point(step, low).split()[0]
        lines.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{step:g}</text>')
    return [
        *lines,
        f'<path d="M{"L".join(band)}Z" fill="{LINE}" fill-opacity=".2"/>',
        f'<path d="M{"L".join(line)}" fill="none" stroke="{LINE}" stroke-width="1.5"/>',
    ]


def curve(run: Run, name: str) -> dict[int, float]:
    """A figure by step, from the judgements or from the games of the steps."""
    if name in run["curves"]:
        pairs = zip(run["curves"]["step"], run["curves"][name], strict=True)
        return {step: value for step, value in pairs if value is not None}
    return {row["step"]: row[name] for row in run["league"]["judgements"] if name in row}


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis that includes all values and 0."""
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high > low else (low, low + 1)
