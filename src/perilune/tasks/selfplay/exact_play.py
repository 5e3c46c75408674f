"""The probability with which a policy makes each of its legal moves, and what can be computed from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from perilune.data.episode import Episode
from perilune.games.best_response import Bounds, best_response
from perilune.games.exact_games import Decision, ExactGame
from perilune.games.open_spiel import OpenSpielEnvironment
from perilune.learn.signals import SignalModels, compute_signals
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import continuation

TOKEN_BUDGET = 4096  # of a forward pass
AT_ONCE = 512  # decisions whose moves are packed together


def exact_figures(
    game: ExactGame, decoder: Decoder, tokenizer: Tokenizer, temperature: float
) -> dict[str, float]:
    """`exploitability` of a policy that has all seats, in the game's returns, and `illegal_mass`.

    What the policy leaves for what is no legal move, `illegal_mass` on average over decisions, is shared out
    in proportion before the policy is answered.
    """
    found = move_probabilities(game.decisions, decoder, tokenizer, temperature)
    legal = [math.fsum(chances) for chances in found]
    policy = {
        one.name: [chance / total if total else 1 / len(chances) for chance in chances]
        for one, chances, total in zip(game.decisions, found, legal, strict=True)
    }
    illegal = 1 - math.fsum(legal) / len(legal)
    return {"exploitability": game.exploitability(policy), "illegal_mass": max(illegal, 0.0)}


def reply_bounds(
    environment: OpenSpielEnvironment,
    decoder: Decoder,
    tokenizer: Tokenizer,
    temperature: float = 1.0,
    *,
    least: float = 0.01,
) -> list[Bounds]:
    """Of each seat, bounds of what the best reply earns from the policy, whose illegal moves lose.

    Raises:
        RequestError: as `best_reply`.
    """
    chances = partial(move_probabilities, decoder=decoder, tokenizer=tokenizer, temperature=temperature)
    return [best_response(environment, seat, chances, least=least) for seat in (0, 1)]


def move_probabilities(
    decisions: Sequence[Decision], decoder: Decoder, tokenizer: Tokenizer, temperature: float
) -> list[list[float]]:
    """Of each decision's moves, the probability of saying just that: its tokens, and the end of the turn."""
    found: list[list[float]] = []
    for start in range(0, len(decisions), AT_ONCE):
        part = decisions[start : start + AT_ONCE]
        groups = [_moves(place, one, tokenizer) for place, one in enumerate(part)]
        models = SignalModels(decoder)
        signals = compute_signals(
            {"logprobs"}, groups, models, token_budget=TOKEN_BUDGET, temperature=temperature
        )["logprobs"]
        for group in groups:
            found.append([math.exp(float(signals[one.episode_id].astype(np.float64).sum())) for one in group])
    return found


def tokens_so_far(tokenizer: Tokenizer, decision: Decision) -> list[int]:
    """The tokens that a policy has before it when it comes to a decision, as an episode would have grown."""
    messages = decision.messages
    first = next((n for n, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    opening = messages[:first]
    tokens = tokenizer.encode_prompt(opening)
    for said, heard in zip(messages[first::2], messages[first + 1 :: 2], strict=True):
        tokens += tokenizer.encode_completion(said["content"])
        tokens += continuation(tokenizer, opening, [heard], tokens[-1])
    return tokens


def _moves(place: int, decision: Decision, tokenizer: Tokenizer) -> list[Episode]:
    """One episode a move, after one prompt, which is then computed once for all."""
    context = np.asarray(tokens_so_far(tokenizer, decision), np.int32)
    episodes = []
    for number, tokens in enumerate(tokenizer.encode_completions(decision.moves)):
        episodes.append(
            Episode(
                episode_id=f"{place}/{number}", group_id=str(place), task_id=decision.name, environment="",
                seed=0, messages=decision.messages, prompt_ids=context,
                token_ids=np.asarray(tokens, np.int32), loss_mask=np.ones(len(tokens), np.bool_),
                logprobs=np.zeros(len(tokens), np.float32),
                policy_version=np.full(len(tokens), -1, np.int32), finish_reason="stop", reward=0.0,
            )
        )  # fmt: skip
    return episodes
