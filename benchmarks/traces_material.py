"""Cassettes of episodes with scripted turns, for environments that a tiny model cannot play.

The scripts know nothing of the planted bugs. They act as policies do: they solve, solve slowly, guess, answer
in another case, repeat an answer, print too much, exceed limits, write nonsense, move at random.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from perilune.environments.core.protocol import Observation, Task
from perilune.environments.core.registry import make_environment
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.worker import session_seed
from perilune.traces.cassette import Cassette, Sampling, Source, TaskRecord, Track, Turn, Verdict
from perilune.traces.replay import Replayer, apply_replay

Policy = Callable[[Task, random.Random], Iterator[str]]
"""Yields the intended actions of a script, in order."""

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REWARD = """
def digits(completions, answer, **columns):
    return [float(int(one.lstrip(";")) == int(right)) for one, right in zip(completions, answer)]
"""
TOOLS = {
    "id": "tools",
    "task": "all",
    "turns": 5,
    "sandbox": {"seconds": 1.0, "memory_mb": 96, "output": 600},
    "episodes": {"seconds": 20},
}
BOXED = {
    "id": "reasoning_gym",
    "task": "chain_sum",
    "prompting": {"format": "boxed", "stop": ["\n\n"], "system": "You solve sums."},
}
REWARDED = {
    "id": "reasoning_gym",
    "task": "chain_sum",
    "prompt": "compact",
    "rewards": {"digits": {"function": "own.py:digits", "source": REWARD, "format": "text"}, "verifier": 0.5},
}
KUHN = {"id": "open_spiel", "game": "kuhn_poker"}
SECTIONS: dict[str, dict[str, Any]] = {
    "calculator": {"id": "calculator"},
    "tools": TOOLS,
    "boxed": BOXED,
    "rewarded": REWARDED,
    "kuhn": KUHN,
}
SLOW = "```python\nwhile True: pass\n```"
LARGE = "```python\nprint('x' * (48 << 20) == '')\n```"
LONG = "```python\nfor i in range(150): print(i, i * i)\n```"
WRITE = '<tool_call>{"name": "write_file", "arguments": {"path": "note.txt", "text": "a b c"}}</tool_call>'
READ = '<tool_call>{"name": "read_file", "arguments": {"path": "note.txt"}}</tool_call>'


def _gold(section: dict[str, Any], task: Task) -> list[str]:
    environment = make_environment(section)
    gold = environment.gold(task)  # type: ignore[attr-defined]
    return [*gold.actions]


def inner(answer: str) -> str:
    """The text between the tags of the answer."""
    return answer.removeprefix("<answer>").removesuffix("</answer>")


def scripts(name: str, task: Task) -> list[list[str]]:
    """Scripts of one task, as lists of actions. Actions after the end of the episode are ignored."""
    if name == "kuhn":
        return [[]]
    *calls, answer = _gold(SECTIONS[name], task)
    match name:
        case "calculator":
            return [
                [*calls, answer],
                [answer],
                [*calls, f"{answer}0"],
                ["9*9", "x", *calls, ";0" + answer[1:]],
                [*calls] * 4,
            ]
        case "tools":
            return [
                [*calls, answer],
                [*calls, f"<answer>{inner(answer).swapcase()}</answer>"],
                [*calls, f"It is {answer} or <answer>none</answer>"],
                [SLOW, *calls, answer],
                [LARGE, *calls, answer],
                [LONG, "no call", *calls, answer],
                [WRITE, READ, *calls, answer],
                [*calls[:-1], answer, answer],
                ["```python\n1/0\n```"] * 5,
            ]
        case "boxed":
            other, unmarked = f"First {answer}, or \\boxed{{7}}", answer.replace("boxed", "box")
            return [[answer], [other], [unmarked], [f"{answer} {answer}"]]
    return [[answer], ["many"], [answer + "0"], [f" {answer}"]]


def scripted(per_section: int) -> tuple[list[Cassette], dict[str, Tokenizer]]:
    """Cassettes of `per_section` episodes per section, played by the harness, and their tokenizers."""
    tokenizers = {"plain": Tokenizer.byte_level()}
    tokenizers["chat"] = tokenizers["plain"].with_chat_template(CHATML, where="benchmark")
    cassettes: list[Cassette] = []
    with Replayer(lambda name: tokenizers[name]) as replayer:
        for name, section in SECTIONS.items():
            tokenizer = "chat" if name in ("tools", "boxed") else "plain"
            drafts = list(islice(_drafts(name, section, tokenizer, tokenizers[tokenizer]), per_section))
            for draft, replay in zip(drafts, replayer.harness(drafts), strict=True):
                if replay.error:
                    raise RuntimeError(f"{name}: {replay.error}")
                cassettes.append(apply_replay(draft, replay))
    return cassettes, tokenizers


def _drafts(name: str, section: dict[str, Any], named: str, tokenizer: Tokenizer) -> Iterator[Cassette]:
    environment = make_environment(section)
    players = getattr(environment, "players", 1)
    index = 0
    for task in environment.tasks("train", 0):
        for script in scripts(name, task):
            sampling = Sampling(
                key=(0, 1, index), sample=0, max_tokens=1000, temperature=1.0, stop_token_ids=(1,)
            )
            turns = _played(environment, task, sampling, script) if players > 1 else {0: script}
            yield Cassette(
                source=Source(run="scripted", stage=name, file="", episode_id=f"1/{index}/0"),
                environment=section,
                tokenizer=named,
                checkpoint=None,
                task=TaskRecord.of(task),
                sampling=sampling,
                order=(),
                tracks=tuple(_track(player, own, tokenizer) for player, own in sorted(turns.items())),
            )
            index += 1


def _played(environment: Any, task: Task, sampling: Sampling, script: list[str]) -> dict[int, list[str]]:
    """Random legal moves of all players; one game in six has an illegal one."""
    draw = random.Random(f"{task.task_id}/{sampling.key}")
    session = environment.reset(task, session_seed(sampling.key))
    turns: dict[int, list[str]] = {}
    while not session.observation.done:
        observation: Observation = session.observation
        action = draw.choice(list(observation.legal or ("?",))) if draw.random() > 0.08 else "?"
        turns.setdefault(observation.player, []).append(action)
        session.step(action)
    session.close()
    return turns


def _track(player: int, actions: list[str], tokenizer: Tokenizer) -> Track:
    turns = [Turn(tokens=tuple(tokenizer.encode_completion(act)), text=act, finished=True) for act in actions]
    verdict = Verdict(reward=None, terms={}, metrics={}, finish_reason="stop", failure="")
    return Track(player=player, opening=(), prompt=(), turns=tuple(turns), verdict=verdict)
