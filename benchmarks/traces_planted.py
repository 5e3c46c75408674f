"""Plausible bugs of a harness, as changes of the source that a review could miss."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """One bug, which replaces the only `old` in a file below src/perilune by `new`."""

    name: str
    file: str
    old: str
    new: str


PLANTED = (
    Planted(
        "parser off by one: the answer loses its first character",
        "environments/builtin/tool_calls.py",
        "return Answer(answers[-1].strip())",
        "return Answer(answers[-1].strip()[1:])",
    ),
    Planted(
        "parser takes the first of several answers",
        "environments/builtin/tool_calls.py",
        "return Answer(answers[-1].strip())",
        "return Answer(answers[0].strip())",
    ),
    Planted(
        "tool timeout as success",
        "environments/builtin/tools.py",
        'if run.cause not in ("", "error"):',
        'if run.cause not in ("", "error", "timeout"):',
    ),
    Planted(
        "reward swallows an exception: a failure becomes a 0",
        "environments/core/rewards.py",
        'return Failure(VERIFIER_TERM, f"reward function {name!r} raised {type(error).__name__}: {error}")',
        "return 0.0",
    ),
    Planted(
        "template change: messages lose the white space at their end",
        "models/text/tokenizer.py",
        "hidden = [self._spelled_tokens.hide(item) for item in inputs]",
        'hidden = [self._spelled_tokens.hide({**item, "messages": [{**m, "content": m["content"].rstrip()} '
        'for m in item["messages"]]}) for item in inputs]',
    ),
    Planted(
        "stop text dropped",
        "rollout/worker.py",
        "return replace(params, stop=(*params.stop, *stop)) if stop else params",
        "return params",
    ),
    Planted(
        "tool output truncated",
        "environments/builtin/tool_calls.py",
        'return output or "(no output)"',
        'return output[:300] or "(no output)"',
    ),
    Planted(
        "wrong player credited",
        "environments/core/episode_totals.py",
        "return Score(self.rewards[player], dict",
        "return Score(self.rewards[-1 - player], dict",
    ),
    Planted(
        "sandbox with twice the memory",
        "environments/builtin/tools.py",
        "memory_bytes=self.memory_mb << 20,",
        "memory_bytes=self.memory_mb << 21,",
    ),
    Planted(
        "answers compared without their case",
        "environments/builtin/tools.py",
        'if answer != data["answer"]:',
        'if answer.lower() != data["answer"].lower():',
    ),
    Planted(
        "seed of sessions loses a byte",
        "rollout/worker.py",
        '.digest()[:6], "big")',
        '.digest()[:5], "big")',
    ),
    Planted(
        "files of a call are lost",
        "environments/builtin/tools.py",
        "output, files = self._execute_action(action, files, counts)",
        "output, _ = self._execute_action(action, files, counts)",
    ),
    Planted(
        "an ambiguous text has an answer",
        "environments/core/answer_format.py",
        "or None if len(answers) == 1 else None",
        "or None if len(answers) >= 1 else None",
    ),
    Planted(
        "last turn not played",
        "environments/core/multi_turn.py",
        "if self._turns_left or observation.done:",
        "if self._turns_left > 1 or observation.done:",
    ),
    Planted(
        "tool output shown as a user's message",
        "environments/builtin/calculator.py",
        'action = yield ask(f"={calculate(action)}\\n", role="tool")',
        'action = yield ask(f"={calculate(action)}\\n")',
    ),
    Planted(
        "reward terms overwritten instead of summed",
        "environments/core/episode_totals.py",
        "self.terms[name] = self.terms.get(name, 0.0) + value",
        "self.terms[name] = value",
    ),
)


def misplaced_bugs(source: Path) -> list[str]:
    """Return a line for each bug whose place in the source is gone or not the only one."""
    found = [(bug, (source / "perilune" / bug.file).read_text(encoding="utf-8")) for bug in PLANTED]
    return [f"{bug.name}: {n} places in {bug.file}" for bug, text in found if (n := text.count(bug.old)) != 1]
