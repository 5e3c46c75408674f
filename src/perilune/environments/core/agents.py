"""Sub-agents of an environment, written as generators that can be combined.

A program yields the turns that it needs next, receives their actions in the same order, and returns a result:

    def count(name, lines):
        (text,) = yield [AgentTurn(name, ({"role": "user", "content": lines},))]
        return int(text)

    class Count(MultiTurn):
        def play(self, task, rng):
            parts = [count(str(number), lines) for number, lines in enumerate(task.data["parts"])]
            total = sum((yield from sample(together(parts))))
            answer = yield ask(f"the parts have {total}")
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain
from typing import TypeVar

from perilune.environments.core.protocol import AgentTurn, Observation

T = TypeVar("T")
AgentProgram = Generator[Sequence[AgentTurn], list[str], T]
"""The turns of one or several agents: yields turns to sample at the same time, and returns a result."""


def together(programs: Sequence[AgentProgram[T]]) -> AgentProgram[list[T]]:
    """Run programs at the same time; return their results in the order of `programs`.

    A program's next turns are due as soon as its own last ones are taken; it waits for no other program.
    """
    results: dict[int, T] = {}
    due: dict[int, Sequence[AgentTurn]] = {}
    actions: dict[int, list[str]] = {}
    try:
        while len(results) < len(programs):
            for number, program in enumerate(programs):
                if number in results:
                    continue
                try:
                    due[number] = program.send(actions[number]) if number in actions else next(program)
                except StopIteration as end:
                    results[number] = end.value
                    due.pop(number, None)
            if due:
                taken = iter((yield [*chain.from_iterable(due.values())]))
                actions = {number: [next(taken) for _ in turns] for number, turns in due.items()}
    finally:
        for program in programs:
            program.close()
    return [results[number] for number in range(len(programs))]


def sample(program: AgentProgram[T], player: int = 0) -> Generator[Observation, str, T]:
    """The result of a program, in the generator of a `MultiTurn` environment: `yield from sample(program)`.

    Args:
        player: the player whose sub-agents these are.
    """
    try:
        turns = next(program)
        while True:
            actions = []
            for place in range(len(turns)):
                actions.append((yield observe_turns(turns[place:], player)))
            turns = program.send(actions)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        program.close()


def observe_turns(turns: Sequence[AgentTurn], player: int = 0) -> Observation:
    """The observation of these turns, of which the player's own is the first."""
    (first, *more) = turns
    if more or first.agent or first.max_tokens is not None:
        return Observation(player=player, turns=tuple(turns))
    return Observation(first.messages, player)
