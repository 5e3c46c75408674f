"""Multi-turn environments and their random numbers."""

from collections import Counter

import pytest

from perilune.environments import (
    EpisodeFailedError,
    Failure,
    KeyedRandom,
    MultiTurn,
    Observation,
    Score,
    SingleTurn,
    Task,
    Transcript,
    ask,
    end_episode,
)

TASK = Task("t", ({"role": "user", "content": "guess"},), {})


class Game(MultiTurn):
    def tasks(self, split, seed):
        yield TASK


class Guess(Game):
    """Find a digit. Every wrong guess costs 0.1."""

    id = "guess"
    max_turns = 4

    def __init__(self):
        self.closed = 0

    def play(self, task, rng):
        secret = str(rng.integer(10, "secret"))
        try:
            guess = yield ask()
            while guess != secret:
                if guess == "fail":
                    raise EpisodeFailedError("sandbox", "it burns")
                guess = yield ask(
                    "higher" if guess < secret else "lower", rewards=(-0.1,), terms={"misses": 1}
                )
            yield end_episode(1.0, metrics={"strategy/lucky": 1.0})
        finally:
            self.closed += 1


class Shells(Game):
    """Two players choose a number each. The larger number wins."""

    id = "shells"
    players = 2
    max_turns = 2

    def play(self, task, rng):
        first = yield ask("hide", player=0, legal=("1", "2"))
        second = yield ask("hide", player=1, legal=("1", "2"))
        yield end_episode(float(first > second), float(second > first))


def secret(seed):
    return str(KeyedRandom(seed, TASK.task_id).integer(10, "secret"))


def test_episode_depends_on_seed_and_score_sums_steps():
    environment = Guess()
    wrong = "0" if secret(3) != "0" else "1"
    session = environment.reset(TASK, 3)
    assert session.observation == Observation()
    hint = session.step(wrong)
    assert hint.messages == ({"role": "user", "content": "higher" if wrong < secret(3) else "lower"},)
    assert not hint.done
    assert session.step(secret(3)).done and environment.closed == 1
    session.close()
    assert environment.closed == 1
    score = environment.score(TASK, Transcript(secret(3), earlier=(wrong,), seed=3))
    assert score == Score(0.9, {"misses": 1}, {"strategy/lucky": 1.0})


def test_episode_ends_at_max_turns_and_on_truncated_action():
    environment = Guess()
    wrong = "0" if secret(3) != "0" else "1"
    session = environment.reset(TASK, 3)
    *going, last = [session.step(wrong) for _ in range(4)]
    assert not any(step.done for step in going)
    assert last.done and last.truncated and last.rewards == (-0.1,) and not last.messages
    with pytest.raises(ValueError, match="is done"):
        session.step(wrong)
    session = environment.reset(TASK, 3)
    assert session.step(secret(3), finished=False) == Observation(done=True, truncated=True)
    assert environment.closed == 2
    assert environment.score(TASK, Transcript(secret(3), finished=False, seed=3)).reward == 0.0


def test_score_returns_failure_of_episode_and_of_impossible_transcript():
    environment = Guess()
    assert environment.score(TASK, Transcript("fail", seed=3)) == Failure("sandbox", "it burns")
    too_long = Transcript("x", earlier=(secret(3),), seed=3)
    assert environment.score(TASK, too_long) == Failure("verifier", "the episode was done before action 2")
    assert environment.closed == 2


def test_play_without_end_episode_raises_runtime_error():
    class Short(Guess):
        def play(self, task, rng):
            yield ask()

    with pytest.raises(RuntimeError, match="returned without"):
        Short().reset(TASK, 0).step("x")

    class Shorter(Guess):
        def play(self, task, rng):
            yield from ()

    with pytest.raises(RuntimeError, match="returned without"):
        Shorter().reset(TASK, 0)


def test_each_player_gets_own_reward():
    environment = Shells()
    session = environment.reset(TASK, 0)
    assert session.observation.player == 0 and session.step("2").player == 1
    assert session.step("1").rewards == (1.0, 0.0)
    for player, reward in ((0, 1.0), (1, 0.0)):
        assert environment.score(TASK, Transcript("1", earlier=("2",), player=player)).reward == reward


def test_single_turn_session_raises_failure_of_score():
    class Unsure(SingleTurn):
        id = "unsure"

        def tasks(self, split, seed):
            yield TASK

        def score(self, task, transcript):
            return Failure("verifier", "who knows")

    with pytest.raises(EpisodeFailedError) as caught:
        Unsure().reset(TASK, 0).step("x")
    assert caught.value.failure == Failure("verifier", "who knows")


def test_keyed_random_depends_on_seed_task_and_key():
    rng = KeyedRandom(7, "t")
    assert rng.uniform("die", 3) == KeyedRandom(7, "t").uniform("die", 3)
    draws = [
        rng.uniform("die", 4),
        KeyedRandom(8, "t").uniform("die", 3),
        KeyedRandom(7, "u").uniform("die", 3),
    ]
    assert rng.uniform("die", 3) not in draws
    counts = Counter(rng.integer(6, "roll", i) for i in range(6000))
    assert set(counts) == set(range(6)) and max(counts.values()) - min(counts.values()) < 200
    first = Counter(rng.shuffled("abc", i)[0] for i in range(3000))
    assert min(first.values()) > 900 and sorted(rng.shuffled(range(9), "x")) == list(range(9))
