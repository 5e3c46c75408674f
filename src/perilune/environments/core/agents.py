"""Sub-agents of an environment, written as generators that can be combined.

A program yields the turns that it needs next, receives their actions in the same order, and returns a result:

    def count(name, lines):
        (text,) = yield [AgentTurn(name, ({"role": "user", "content": lines},))]
        return int(text)

    class Count(MultiTurn):
        def play(self, task, rng):
            names = [str(number) for number in range(len(task.data["parts"]))]
            parts = [count(name, lines) for name, lines in zip(names, task.data["parts"])]
            total = sum((yield from sample(gather(parts))))
            answer = yield ask(f"the parts have {total}", results=names)
"""

from collections.abc import Generator, Sequence
from itertools import chain
from typing import Generic, TypeVar, overload

from perilune.environments.core.protocol import AgentTurn, Observation

T = TypeVar("T")
AgentProgram = Generator[Sequence[AgentTurn], list[str], T]
"""The turns of one or several agents: yields turns to sample at the same time, and returns a result."""


class Programs(Generic[T]):
    """Programs that run at the same time. More may be started at any time.

    A program's next turns are due as soon as its own last ones are taken; it waits for no other program.

    Attributes:
        results: the return values of finished programs, by number in the order of their starts.
    """

    def __init__(self) -> None:
        self.results: dict[int, T] = {}
        self._running: dict[int, AgentProgram[T]] = {}
        self._due: dict[int, Sequence[AgentTurn]] = {}

    @property
    def turns(self) -> list[AgentTurn]:
        """The turns that are due; none if all programs have finished."""
        return [*chain.from_iterable(self._due.values())]

    def start(self, program: AgentProgram[T]) -> None:
        """Run a program to its first turns."""
        number = len(self.results) + len(self._running)
        self._running[number] = program
        self._advance(number, None)

    def take(self, actions: Sequence[str]) -> None:
        """Take the actions of all turns that are due, in their order."""
        remaining = iter(actions)
        for number, turns in list(self._due.items()):
            self._advance(number, [next(remaining) for _ in turns])

    def close(self) -> None:
        """Close the programs that have not finished."""
        for program in self._running.values():
            program.close()

    def _advance(self, number: int, actions: list[str] | None) -> None:
        program = self._running[number]
        try:
            self._due[number] = next(program) if actions is None else program.send(actions)
        except StopIteration as end:
            self.results[number] = end.value
            del self._running[number]
            self._due.pop(number, None)


def gather(programs: Sequence[AgentProgram[T]]) -> AgentProgram[list[T]]:
    """Run programs at the same time; return their results in the order of `programs`."""
    running = Programs[T]()
    try:
        for program in programs:
            running.start(program)
        while turns := running.turns:
            running.take((yield turns))
    finally:
        running.close()
    return [running.results[number] for number in range(len(programs))]


class RemainingTurns(Sequence[AgentTurn]):
    """The turns from `start` on, as a view: thousands of turns are taken in linear time."""

    def __init__(self, turns: Sequence[AgentTurn], start: int) -> None:
        self._turns, self._start = turns, start

    def __len__(self) -> int:
        return len(self._turns) - self._start

    @overload
    def __getitem__(self, index: int) -> AgentTurn: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AgentTurn]: ...
    def __getitem__(self, index: int | slice) -> AgentTurn | Sequence[AgentTurn]:
        if isinstance(index, slice):
            return self._turns[self._start :][index]
        return self._turns[range(self._start, len(self._turns))[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __hash__(self) -> int:
        return hash(tuple(self))


def sample(program: AgentProgram[T], player: int = 0) -> Generator[Observation, str, T]:
    """Run a program in the generator of a `MultiTurn` environment: `yield from sample(program)`.

    Args:
        player: the player whose sub-agents these are.
    """
    try:
        turns = next(program)
        while True:
            actions = []
            for start in range(len(turns)):
                actions.append((yield observe_turns(RemainingTurns(turns, start), player)))
            turns = program.send(actions)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        program.close()


def observe_turns(turns: Sequence[AgentTurn], player: int = 0) -> Observation:
    """Return the observation of these turns, of which the player's own is the first."""
    first = turns[0]
    if len(turns) > 1 or first.agent or first.max_tokens is not None or first.results:
        return Observation(player=player, turns=turns)
    return Observation(first.messages, player)
