"""A policy's exact move probabilities, and its exploitability."""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from perilune.data.episode import Episode, unsampled_tokens
from perilune.games.exact_games import Decision, ExactGame
from perilune.learn.signals import SignalModels, compute_signals
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_continuation

TOKEN_BUDGET = 4096  # tokens of a forward pass
DECISION_BATCH = 512  # decisions whose moves are packed together


def exact_figures(
    game: ExactGame, decoder: Decoder, tokenizer: Tokenizer, temperature: float
) -> dict[str, float]:
    """Return the `exploitability` of a policy, in the game's returns, and `illegal_mass`.

    `illegal_mass` is the mean probability, over decisions, of answers that are not a legal move. Before the
    best response is computed, move probabilities are divided by the probability of all legal moves.
    """
    moves = move_probabilities(game.decisions, decoder, tokenizer, temperature)
    legal = [math.fsum(chances) for chances in moves]
    policy = {
        decision.name: [chance / total if total else 1 / len(chances) for chance in chances]
        for decision, chances, total in zip(game.decisions, moves, legal, strict=True)
    }
    illegal = 1 - fmean(legal)
    return {"exploitability": game.exploitability(policy), "illegal_mass": max(illegal, 0.0)}


def move_probabilities(
    decisions: Sequence[Decision], decoder: Decoder, tokenizer: Tokenizer, temperature: float
) -> list[list[float]]:
    """Return for each decision the probability of each move, including the token that ends the turn."""
    probabilities: list[list[float]] = []
    for start in range(0, len(decisions), DECISION_BATCH):
        part = decisions[start : start + DECISION_BATCH]
        groups = [_move_episodes(index, decision, tokenizer) for index, decision in enumerate(part)]
        models = SignalModels(decoder)
        signals = compute_signals(
            {"logprobs"}, groups, models, token_budget=TOKEN_BUDGET, temperature=temperature
        )["logprobs"]
        for group in groups:
            sums = [float(signals[episode.episode_id].astype(np.float64).sum()) for episode in group]
            probabilities.append([math.exp(logprob) for logprob in sums])
    return probabilities


def tokens_so_far(tokenizer: Tokenizer, decision: Decision) -> list[int]:
    """Return the tokens before a decision, appended turn by turn as in an episode."""
    opening, rest = decision.messages[: decision.opening], decision.messages[decision.opening :]
    tokens = tokenizer.encode_prompt(opening)
    for answer, observation in zip(rest[::2], rest[1::2], strict=True):
        tokens += tokenizer.encode_completion(answer["content"])
        tokens += encode_continuation(tokenizer, opening, [observation], tokens[-1])
    return tokens


def _move_episodes(index: int, decision: Decision, tokenizer: Tokenizer) -> list[Episode]:
    """Return one episode for each move; they share one prompt, which is computed once."""
    context = np.asarray(tokens_so_far(tokenizer, decision), np.int32)
    return [
        Episode(
            episode_id=f"{index}/{number}",
            group_id=str(index),
            task_id=decision.name,
            environment="",
            seed=0,
            messages=decision.messages,
            prompt_ids=context,
            reward=0.0,
            **unsampled_tokens(tokens),
        )
        for number, tokens in enumerate(tokenizer.encode_completions(decision.moves))
    ]
