"""Exact move probabilities of a language model in every decision of a game."""

import math

import pytest

from perilune.engine.engine import Engine
from perilune.environments import make_environment
from perilune.games.exact_games import ExactGame
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_conversations
from perilune.tasks.selfplay import exact_play
from perilune.tasks.selfplay.exact_play import exact_figures, move_probabilities, tokens_so_far

KUHN = ExactGame.from_environment(make_environment({"id": "open_spiel", "game": "kuhn_poker"}))
TOKENIZER = Tokenizer.characters()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    decoder = Decoder(PRESETS["tiny"].replace(eos_token_ids=(TOKENIZER.eos_token_id,)))
    decoder.initialize(3)
    return decoder


def test_decision_contexts_equal_those_of_episodes() -> None:
    assert KUHN is not None
    for decision in KUHN.decisions:
        move = {"role": "assistant", "content": decision.moves[0]}
        opening = len(decision.messages) if len(decision.messages) < 4 else len(decision.messages) - 2
        turns = (decision.messages[:opening], [*decision.messages[opening:], move], {})
        ((prompt, after, _),) = encode_conversations(TOKENIZER, [turns])
        answer = TOKENIZER.encode_completion(decision.moves[0])
        assert tokens_so_far(TOKENIZER, decision) + answer == prompt + after
    assert any(len(decision.messages) == 4 for decision in KUHN.decisions)


def test_move_probabilities_equal_engine_scores(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KUHN is not None
    monkeypatch.setattr(exact_play, "DECISION_BATCH", 5)  # several batches
    policy = move_probabilities(KUHN.decisions, decoder, TOKENIZER, 0.7)
    engine = Engine(decoder, slots=4)
    for decision, chances in zip(KUHN.decisions, policy, strict=True):
        context = tokens_so_far(TOKENIZER, decision)
        answers = TOKENIZER.encode_completions(decision.moves)
        scores = engine.score([context] * len(answers), answers, 0.7)
        assert chances == pytest.approx([math.exp(score.sum()) for score in scores], rel=1e-4)


def test_exact_figures_of_an_untrained_policy(decoder: Decoder) -> None:
    assert KUHN is not None
    exact = exact_figures(KUHN, decoder, TOKENIZER, 1.0)
    assert exact["illegal_mass"] > 0.99 and 0 < exact["exploitability"] < 1.5
    even = move_probabilities(KUHN.decisions, decoder, TOKENIZER, 1e6)  # Pass has one character more than Bet
    assert all(chances[1] / chances[0] == pytest.approx(98, rel=0.01) for chances in even)
