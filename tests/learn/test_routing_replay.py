"""Routing replay: the learner uses the experts that the sampler chose, with its own router weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from perilune.data.episode import Episode
from perilune.data.routes import missing_mark, missing_rows, routes_from_json, routes_to_json
from perilune.engine.engine import Engine
from perilune.engine.request import Prompt, SamplingParams
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import PackedBatch, pack
from perilune.learn.trainer import Learner, add_reference_logprobs, predicting_states, token_logprobs
from perilune.models.checkpoints.loading import new_model
from perilune.models.config.decoder_config import PRESETS
from perilune.models.config.layer_kinds import Experts
from perilune.models.decoder import Decoder
from perilune.models.feed_forward import MixtureOfExperts
from perilune.models.kernels import route
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.rollout import Trajectory

TOKENIZER = Tokenizer.characters()
MIXTURE = PRESETS["tiny"].replace(architecture="qwen3_moe", experts=Experts(8, 3, 48, dense_layers=(1,)))
ROUTERS = tuple(f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2))


def make_decoder(seed: int = 3) -> Decoder:
    return new_model(MIXTURE, TOKENIZER, seed=seed)


def recording_engine(decoder: Decoder) -> Engine:
    engine = Engine(decoder, slots=8)
    engine.record_routes()
    return engine


def sampled(decoder: Decoder, texts: Sequence[str] = ("12+7=", "what is 1?")) -> list[list[Episode]]:
    engine = recording_engine(decoder)
    prompts = [Prompt(TOKENIZER.encode(text), (0, 1, i)) for i, text in enumerate(texts)]
    answers = engine.sample(prompts, 4, SamplingParams(20, 0.8, stop_token_ids=tuple(range(5))))
    return [
        [
            Episode(
                f"1/{i}/{j}", f"1/{i}", f"t{i}", "test", 0, (), np.array(prompt.token_ids, np.int32),
                out.token_ids, np.ones(len(out.token_ids), np.bool_), out.logprobs, out.policy_version,
                out.finish_reason, reward=float(j % 2), routed_experts=out.routed_experts,
            )
            for j, out in enumerate(group)
        ]
        for i, (prompt, group) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip


def packed(groups: list[list[Episode]], token_budget: int = 100_000) -> list[PackedBatch]:
    weighted = [algorithm("grpo")(group, max_tokens=20) for group in groups]
    return pack(weighted, token_budget, temperature=0.8)


def without_routes(groups: list[list[Episode]]) -> list[list[Episode]]:
    return [[replace(answer, routed_experts=None) for answer in group] for group in groups]


def disturb_routers(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name in ROUTERS:
            parameters[name].add_(torch.randn(parameters[name].shape, generator=generator) * 0.2)


def shift_routes(episode: Episode, shift: int) -> Episode:
    """The episode with every recorded expert shifted to another."""
    assert episode.routed_experts is not None
    return replace(episode, routed_experts=(episode.routed_experts + shift) % 8)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("token_budget", [100_000, 60])
def test_replay_on_equal_weights_is_bitwise_identical(token_budget: int) -> None:
    decoder = make_decoder()
    groups = sampled(decoder)
    learner = Learner(decoder)
    figures = learner.forward_backward(packed(groups, token_budget))
    assert figures["logprob_gap_max"] == 0
    assert figures["routing/missing"] == 0
    assert figures["routing/flipped"] == 0
    assert 1 < figures["routing/load_max"] < 8 / 3 + 1e-6
    assert 0 < figures["routing/load_entropy"] <= 1
    gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    plain = learner.forward_backward(packed(without_routes(groups), token_budget))
    assert not any(name.startswith("routing/") for name in plain)
    assert plain == {name: value for name, value in figures.items() if not name.startswith("routing/")}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, gradients[name])


def test_corrected_router_flips_no_route_on_equal_weights() -> None:
    """GLM-4.5 adds a correction to the scores by which it chooses, which changes most choices."""
    mixture = Experts(8, 3, 48, dense_layers=(0,), shared_size=48)
    decoder = new_model(MIXTURE.replace(architecture="glm4_moe", experts=mixture), TOKENIZER, seed=3)
    generator = torch.Generator().manual_seed(0)
    for module in decoder.modules():
        if isinstance(module, MixtureOfExperts):
            module.correction.normal_(std=0.3, generator=generator)
    figures = Learner(decoder).forward_backward(packed(sampled(decoder)))
    assert figures["routing/missing"] == figures["routing/flipped"] == 0


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("normalized", [False, True])
def test_route_computes_router_weights_for_given_experts(normalized: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 20, generator=generator, requires_grad=True)
    given = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in range(9)])
    given[3] = -1
    weights, chosen = route(logits, 4, normalized, given)
    exact = logits.detach().double().requires_grad_()
    used = torch.where(given < 0, exact.topk(4, dim=-1).indices, given)
    expected = exact.softmax(-1).gather(1, used)
    if normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(chosen, used)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    factors = torch.randn(9, 4, generator=generator)
    (weights * factors).sum().backward()
    (expected * factors).sum().backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_after_router_change_narrows_logprob_gap_and_trains_router(recompute: bool) -> None:
    decoder = make_decoder()
    groups = sampled(decoder)
    disturb_routers(decoder)
    learner = Learner(decoder)
    decoder.recompute = recompute
    live = learner.forward_backward(packed(without_routes(groups)))
    decoder.zero_grad()
    replayed = learner.forward_backward(packed(groups))
    assert 0.3 < replayed["routing/flipped"] < 1
    assert 0 < replayed["logprob_gap_mean"] < live["logprob_gap_mean"]
    parameters = dict(decoder.named_parameters())
    for name in ROUTERS:
        gradient = parameters[name].grad
        assert gradient is not None and gradient.abs().sum() > 0


def test_activation_checkpointing_replays_the_same_routes() -> None:
    decoder = make_decoder()
    batches = packed([[shift_routes(answer, 3) for answer in group] for group in sampled(decoder)])
    gradients = []
    for recompute in (False, True):
        decoder.recompute = recompute
        decoder.zero_grad()
        Learner(decoder).forward_backward(batches)
        gradients.append([p.grad.clone() for p in decoder.parameters() if p.grad is not None])
    assert all(torch.equal(gradient, other) for gradient, other in zip(*gradients, strict=True))


def test_missing_routes_fall_back_to_the_router_and_are_counted() -> None:
    decoder = make_decoder()
    groups = sampled(decoder, ["12+7="])
    fed = sum(len(answer.token_ids) - 1 for answer in groups[0]) + len(groups[0][0].prompt_ids)
    wrong = [[shift_routes(answer, 3) for answer in group] for group in groups]
    mark, lost = missing_mark(np.dtype(np.uint8)), 0
    for answer in wrong[0]:
        assert answer.routed_experts is not None
        answer.routed_experts[len(answer.prompt_ids) + 2 :] = mark
        lost += int(missing_rows(answer.routed_experts).sum())
    figures = Learner(decoder).forward_backward(packed(wrong))
    assert figures["routing/missing"] == pytest.approx(lost / fed)
    assert figures["logprob_gap_max"] > 0
    for answer in wrong[0]:
        assert answer.routed_experts is not None
        answer.routed_experts[:] = mark
    decoder.zero_grad()
    figures = Learner(decoder).forward_backward(packed(wrong))
    assert figures["routing/missing"] == 1 and "routing/flipped" not in figures
    assert figures["logprob_gap_max"] == 0


def test_shared_prompt_routes_are_replayed_only_when_episodes_agree() -> None:
    decoder = make_decoder()
    groups = sampled(decoder, ["12+7="])
    groups[0][1] = shift_routes(groups[0][1], 1)
    (batch,) = packed(groups)
    assert batch.routes is not None
    length = len(groups[0][0].prompt_ids)
    assert (batch.routes[:length] == -1).all() and (batch.routes[length:] >= 0).all()


def test_reference_logprobs_ignore_recorded_routes() -> None:
    reference = make_decoder(4)
    wrong = [[shift_routes(answer, 3) for answer in group] for group in sampled(make_decoder())]
    (batch,) = packed(wrong)
    batch = replace(batch, reference_kl=torch.ones(len(batch.targets)))
    (with_logprobs,) = add_reference_logprobs([batch], reference)
    assert with_logprobs.reference_logprobs is not None
    expected = token_logprobs(reference, replace(batch, routes=None))
    assert torch.equal(with_logprobs.reference_logprobs, expected)
    assert not torch.equal(token_logprobs(reference, batch), expected)


def test_routes_to_nonexistent_experts_are_rejected() -> None:
    decoder = make_decoder()
    (batch,) = packed([[shift_routes(answer, 0) for answer in group] for group in sampled(decoder)])
    assert batch.routes is not None
    with pytest.raises((ValueError, RuntimeError), match=r"8 experts|size 8"), torch.no_grad():
        predicting_states(decoder, replace(batch, routes=batch.routes + 8))


def test_routes_of_three_turns_equal_those_of_one_forward_pass() -> None:
    """Each turn continues all earlier tokens; the next turn computes the last token of a turn."""
    decoder = make_decoder()
    engine = recording_engine(decoder)
    trajectory = Trajectory()
    trajectory.begin([], TOKENIZER.encode("12+7="))
    for turn in range(3):
        context = trajectory.context()
        ((completion,),) = engine.sample([Prompt(context, (0, turn, 0))], 1, SamplingParams(18))
        trajectory.add_completion(context, completion, "")
        trajectory.token_ids += TOKENIZER.encode("no: ")
    assert engine.counters.cached_tokens
    tokens, routes = trajectory.context(), trajectory.routes()
    cold = engine.sample([Prompt(tokens, (1, 0, 0))], 1, SamplingParams(1))[0][0].routed_experts
    assert routes is not None and cold is not None
    computed = len(tokens) - 5  # without the last observation and the token before it
    np.testing.assert_array_equal(routes[:computed], cold[:computed])
    assert missing_rows(routes)[computed:].all()


def test_routes_of_tokens_sampled_by_older_weights_are_missing() -> None:
    decoder = make_decoder()
    engine = recording_engine(decoder)
    trajectory = Trajectory()
    prompt = TOKENIZER.encode("12+7=")
    trajectory.begin([], prompt)
    ((completion,),) = engine.sample([Prompt(prompt, (0, 0, 0))], 1, SamplingParams(9))
    versions = np.array([0] * 4 + [1] * 5, np.int32)
    trajectory.add_completion(prompt, replace(completion, policy_version=versions), "")
    routes = trajectory.routes()
    assert routes is not None
    expected = [False] * (len(prompt) - 1) + [True] * 4 + [False] * 5
    assert missing_rows(routes).tolist() == expected


def test_routes_round_trip_through_json() -> None:
    (episode, *_), *_ = sampled(make_decoder())
    assert episode.routed_experts is not None
    again = routes_from_json(routes_to_json(episode.routed_experts))
    assert again.dtype == np.uint8
    np.testing.assert_array_equal(again, episode.routed_experts)
