"""Environments of several turns, and chance in them."""

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
    """Find a digit; every wrong guess costs a tenth."""

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
    """Both hide a number at once; the larger wins."""

    id = "shells"
    players = 2
    max_turns = 2

    def play(self, task, rng):
        first = yield ask("hide", player=0, legal=("1", "2"))
        second = yield ask("hide", player=1, legal=("1", "2"))
        yield end_episode(float(first > second), float(second > first))


def secret(seed):
    return str(KeyedRandom(seed, TASK.task_id).integer(10, "secret"))


def test_an_episode_follows_its_seed_and_adds_up():
    environment = Guess()
    wrong = "0" if secret(3) != "0" else "1"
    session = environment.reset(TASK, 3)
    assert session.observation == Observation()
    said = session.step(wrong)
    assert said.messages == ({"role": "user", "content": "higher" if wrong < secret(3) else "lower"},)
    assert not said.done
    assert session.step(secret(3)).done and environment.closed == 1
    session.close()
    assert environment.closed == 1
    score = environment.score(TASK, Transcript(secret(3), earlier=(wrong,), seed=3))
    assert score == Score(0.9, {"misses": 1}, {"strategy/lucky": 1.0})


def test_it_ends_after_its_turns_and_when_an_action_was_cut_off():
    environment = Guess()
    wrong = "0" if secret(3) != "0" else "1"
    session = environment.reset(TASK, 3)
    *going, last = [session.step(wrong) for _ in range(4)]
    assert not any(one.done for one in going)
    assert last.done and last.truncated and last.rewards == (-0.1,) and not last.messages
    with pytest.raises(ValueError, match="is done"):
        session.step(wrong)
    session = environment.reset(TASK, 3)
    assert session.step(secret(3), finished=False) == Observation(done=True, truncated=True)
    assert environment.closed == 2
    assert environment.score(TASK, Transcript(secret(3), finished=False, seed=3)).reward == 0.0


def test_a_failure_names_its_boundary_and_an_impossible_transcript_is_one():
    environment = Guess()
    assert environment.score(TASK, Transcript("fail", seed=3)) == Failure("sandbox", "it burns")
    too_long = Transcript("x", earlier=(secret(3),), seed=3)
    assert environment.score(TASK, too_long) == Failure("verifier", "the episode was done before action 2")
    assert environment.closed == 2


def test_a_play_that_just_ends_is_a_mistake_of_the_environment():
    class Short(Guess):
        def play(self, task, rng):
            yield ask()

    with pytest.raises(RuntimeError, match="returned without"):
        Short().reset(TASK, 0).step("x")


def test_players_are_paid_apart():
    environment = Shells()
    session = environment.reset(TASK, 0)
    assert session.observation.player == 0 and session.step("2").player == 1
    assert session.step("1").rewards == (1.0, 0.0)
    for player, reward in ((0, 1.0), (1, 0.0)):
        assert environment.score(TASK, Transcript("1", earlier=("2",), player=player)).reward == reward


def test_a_failed_verdict_of_one_turn_is_its_own_failure():
    class Unsure(SingleTurn):
        id = "unsure"

        def tasks(self, split, seed):
            yield TASK

        def score(self, task, transcript):
            return Failure("verifier", "who knows")

    with pytest.raises(EpisodeFailedError) as caught:
        Unsure().reset(TASK, 0).step("x")
    assert caught.value.failure == Failure("verifier", "who knows")


def test_chance_is_a_function_of_its_name():
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
