"""Environments that break one rule each: {"id": "factory", "factory": "broken_environments:Name"}."""

import itertools
import time

from perilune.environments import MultiTurn, Task, Transcript, ask, end_episode


class Sound(MultiTurn):
    """Rewards repeating the shown side of a coin, "left" or "right", twice. Breaks no rule."""

    id = "sound"
    max_turns = 2

    def __init__(self, section):
        pass

    def tasks(self, split, seed):
        for number in range(seed, seed + 500):
            yield Task(f"{split}{number}", ({"role": "user", "content": f"coin {number}?"},), {"n": number})

    def play(self, task, chance):
        coin = chance.choice(("left", "right"), "coin")
        first = yield ask(coin, legal=("left", "right"))
        second = yield ask("again", legal=("left", "right"), rewards=(0.5 * (first == coin),))
        yield end_episode(0.5 * (second == coin), terms={"last": float(second == coin)})

    def gold(self, task):
        coin = self.reset(task, 5).observation.messages[0]["content"]
        return Transcript(coin, earlier=(coin,), seed=5)


class TwoPlayers(Sound):
    id, players = "two", 2

    def play(self, task, chance):
        first = yield ask("hide", player=0)
        second = yield ask("hide", player=1)
        yield end_episode(float(first > second), float(second > first))

    gold = None


class Unseeded(Sound):
    """The coin does not depend on the seed."""

    def play(self, task, chance):
        coin = str(time.perf_counter_ns())
        yield ask(coin)
        yield end_episode(0.0)

    gold = None


class OtherTasks(Sound):
    calls = itertools.count()

    def tasks(self, split, seed):
        return super().tasks(split, seed + 1000 * next(self.calls))


class SameTask(Sound):
    def tasks(self, split, seed):
        yield from [next(super().tasks(split, seed))] * 9


class Leaky(Sound):
    def tasks(self, split, seed):
        return super().tasks("train", seed)


class NoTasks(Sound):
    def tasks(self, split, seed):
        return iter(())


class Tuples(Sound):
    def tasks(self, split, seed):
        for task in super().tasks(split, seed):
            yield Task(task.task_id, task.prompt, {"pair": (1, 2)})


class Sets(Sound):
    def tasks(self, split, seed):
        for task in super().tasks(split, seed):
            yield Task(task.task_id, task.prompt, {"both": {1, 2}})


class NoGenerator(Sound):
    def play(self, task, chance):
        return ask()

    gold = None


class Costly(Sound):
    """Legal moves cost reward, and other texts end the episode without a cost."""

    def play(self, task, chance):
        action, moves = (yield ask(legal=("left", "right"))), 0
        while action in ("left", "right") and (moves := moves + 1) < 2:
            action = yield ask(legal=("left", "right"), rewards=(-1.0,))
        yield end_episode(-float(action in ("left", "right")))

    gold = None


class WrongGold(Sound):
    def gold(self, task):
        return Transcript("left", earlier=("up",), seed=5)


class Generous(Sound):
    def play(self, task, chance):
        print("a line that is no part of a report")
        yield ask()
        yield end_episode(1.0)

    gold = None


class Miserly(Sound):
    """`score` returns half the sum of the step rewards."""

    def score(self, task, transcript):
        score = super().score(task, transcript)
        return type(score)(score.reward / 2, score.terms, score.metrics)


class Endless(Sound):
    def reset(self, task, seed):
        session = super().reset(task, seed)
        session._turns_left = 10**6
        return session

    def play(self, task, chance):
        while True:
            yield ask("on")

    def score(self, task, transcript):
        return super().score(task, transcript)

    gold = None


class Raising(Sound):
    def play(self, task, chance):
        action = yield ask()
        yield end_episode(float(int(action)))

    gold = None


class NoSecondClose(Sound):
    closed = False

    def close(self):
        assert not self.closed
        self.closed = True
