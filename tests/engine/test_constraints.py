"""Constrained output: samples match the constraint; log-probs are normalized over the allowed tokens."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance")

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.engine.constraints import Constraint, Constraints, mask_logits, mask_words
from perilune.engine.engine import Engine
from perilune.engine.request import Delta, Prompt, Request, SamplingParams
from perilune.errors import RequestError, WorkFailedError
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.logprobs import log_distribution
from perilune.models.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.characters()
VOCABULARY = 110  # more rows than tokens, as in published models
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": False}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def constraints() -> Constraints:
    return Constraints(TOKENIZER, VOCABULARY)


@cache
def decoder() -> Decoder:
    made = Decoder(PRESETS["tiny"].replace(vocab_size=VOCABULARY, initializer_range=0.15))
    made.initialize(0)
    return made


def request(constraint: Constraint | None, *, seed: int = 0, n: int = 1, **params: Any) -> Request:
    chosen = SamplingParams(**{"max_tokens": 150, "stop_token_ids": (1,), **params})
    return Request(TOKENIZER.encode("say it: "), chosen, key=(seed, 0, 0), n=n, constraint=constraint)


def run_requests(engine: Engine, requests: Sequence[Request]) -> dict[tuple[int, int], Delta]:
    """Every sample of every request, keyed by request index and sample index."""
    numbers = {engine.add(request, stream=False): number for number, request in enumerate(requests)}
    samples = {}
    while engine.unfinished:
        samples.update({(numbers[delta.request_id], delta.sample): delta for delta in engine.step()})
    return samples


def test_every_sample_of_a_random_model_matches_the_schema() -> None:
    constraint = constraints().json_schema(PERSON)
    samples = run_requests(
        Engine(decoder()), [request(constraint, n=48), request(constraint, n=16, temperature=2.0)]
    )
    assert len(samples) == 64
    texts = set()
    for delta in samples.values():
        assert delta.finish_reason == "stop"
        assert delta.token_ids[-1] == TOKENIZER.eos_token_id
        text = TOKENIZER.decode(delta.token_ids)
        jsonschema.validate(json.loads(text), PERSON)
        texts.add(text)
    assert len(texts) > 60


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_renormalized_over_allowed_tokens(temperature: float) -> None:
    constraint = constraints().regex(r"[a-f]{2,9}(-\d)?")
    samples = run_requests(Engine(decoder()), [request(constraint, n=8, temperature=temperature)])
    prompt = TOKENIZER.encode("say it: ")
    for delta in samples.values():
        ids = torch.tensor(prompt + delta.token_ids)
        with torch.inference_mode():
            hidden = decoder()(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([0, len(ids)])))
            logits = decoder().logits(hidden[len(prompt) - 1 : -1])
        for position, token in enumerate(delta.token_ids):
            state = constraint.start(delta.token_ids[:position])
            mask = np.zeros((1, mask_words(VOCABULARY)), dtype=np.int32)
            state.fill_mask(mask[0])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            left = log_distribution(logits[position, allowed][None], temperature)[0]
            assert delta.logprobs[position] == pytest.approx(
                float(left[list(allowed).index(token)]), abs=1e-5
            )


def test_complete_choice_samples_eos_with_probability_1() -> None:
    constraint = constraints().choice(["yes", "no", "don't know"])
    samples = run_requests(Engine(decoder()), [request(constraint, n=32, temperature=1.5)])
    texts = {TOKENIZER.decode(delta.token_ids) for delta in samples.values()}
    assert texts == {"yes", "no", "don't know"}
    assert all(delta.token_ids[-1] == 1 and delta.logprobs[-1] == 0 for delta in samples.values())


def test_greedy_decoding_follows_the_constraint() -> None:
    constraint = constraints().regex("[01]{12}")
    samples = run_requests(
        Engine(decoder()), [request(constraint, seed=seed, temperature=0) for seed in (1, 2)]
    )
    first, second = (samples[index, 0].token_ids for index in (0, 1))
    assert first == second
    assert re.fullmatch("[01]{12}", TOKENIZER.decode(first))


def test_constrained_samples_do_not_depend_on_batch_or_preemption() -> None:
    """A request gives the same samples alone, in a mixed batch, and with preemption in a small cache."""
    made = [constraints().json_schema(PERSON), constraints().regex("[a-z]{40,60}"), None]
    requests = [request(constraint, seed=seed, max_tokens=70) for seed in range(4) for constraint in made]
    together = run_requests(Engine(decoder()), requests)
    crowded = Engine(decoder(), cache_tokens=256)
    preempted = run_requests(crowded, requests)
    assert crowded.counters.preemptions > 0
    for index, asked in enumerate(requests):
        alone = run_requests(Engine(decoder()), [asked])[0, 0]
        for other in (together[index, 0], preempted[index, 0]):
            assert other.token_ids == alone.token_ids
            assert other.finish_reason == alone.finish_reason
            np.testing.assert_allclose(other.logprobs, alone.logprobs, atol=1e-5)
    assert all(re.fullmatch("[a-z]{40,60}", TOKENIZER.decode(preempted[i, 0].token_ids)) for i in (1, 4, 7))


def test_constraint_applies_to_all_samples_of_all_groups() -> None:
    prompts = [Prompt(TOKENIZER.encode(text), (0, 0, index)) for index, text in enumerate(("a: ", "b: "))]
    constraint = constraints().regex("[0-9]{3}")
    groups = Engine(decoder()).sample(prompts, 8, SamplingParams(max_tokens=9), constraint=constraint)
    assert [len(group) for group in groups] == [8, 8]
    for completion in (completion for group in groups for completion in group):
        assert completion.finish_reason == "stop"
        assert re.fullmatch("[0-9]{3}", TOKENIZER.decode(completion.token_ids))


def test_constrained_sample_resumes_from_its_tokens() -> None:
    constraint = constraints().json_schema(PERSON)
    full = request(constraint, seed=5)
    first = run_requests(Engine(decoder()), [full])[0, 0].token_ids
    rest = Request(full.token_ids + first[:9], full.params, key=full.key, position=9, constraint=constraint)
    assert run_requests(Engine(decoder()), [rest])[0, 0].token_ids == first[9:]


def test_constraint_dead_end_aborts_only_its_own_request() -> None:
    """The vocabulary lacks the characters after "a", which shows only after "a" has been sampled."""
    dead_end, fine = constraints().regex("aé|aö"), constraints().regex("ab")
    samples = run_requests(Engine(decoder()), [request(dead_end, n=2), request(fine, n=2)])
    assert [samples[0, i].finish_reason for i in (0, 1)] == ["aborted"] * 2
    assert [TOKENIZER.decode(samples[1, i].token_ids) for i in (0, 1)] == ["ab"] * 2
    assert [samples[1, i].finish_reason for i in (0, 1)] == ["stop"] * 2
    engine = Engine(decoder())
    assert [delta.finish_reason for delta in engine.stream(request(dead_end))][-1] == "aborted"


WORDS = st.lists(st.text('ab"\\ \n{}', min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


@settings(max_examples=40, deadline=None)
@given(options=WORDS, choice=st.integers(0, 4))
def test_choice_mask_allows_exactly_the_possible_continuations(options: list[str], choice: int) -> None:
    """The mask has the next characters of all matching options, and end-of-sequence where an option ends."""
    option = options[choice % len(options)]
    state = constraints().choice(options).start()
    for position in range(len(option) + 1):
        mask = np.zeros((1, mask_words(VOCABULARY)), dtype=np.int32)
        state.fill_mask(mask[0])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        going_on = [other for other in options if other.startswith(option[:position])]
        ends = [1] if option[:position] in options else []
        letters = {TOKENIZER.encode(other[position])[0] for other in going_on if len(other) > position}
        assert allowed == sorted(ends) + sorted(letters)
        if position < len(option):
            state.advance(TOKENIZER.encode(option[position])[0])
    state.advance(1)


def test_constraint_states_are_independent() -> None:
    constraint = constraints().regex("ab|ac")
    a, b = TOKENIZER.encode("ab")
    first, second = constraint.start(), constraint.start([a])
    first.advance(a)
    first.advance(b)
    first.advance(1)
    with pytest.raises(WorkFailedError, match="is not allowed here"):
        second.advance(a)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constraints().json_schema({"type": "strin"}), "json_schema: Invalid type: strin"),
        (lambda: constraints().json_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (lambda: constraints().json_schema('{"type": '), "json_schema: not JSON"),
        (lambda: constraints().json_schema("[1]"), "a schema is an object, not [1]"),
        (lambda: constraints().json_schema({"enum": []}), "Unsatisfiable schema"),
        (lambda: constraints().json_schema({"const": object()}), "json_schema: not JSON"),
        (lambda: constraints().json_schema({"$ref": "https://example.com/x"}), "json_schema"),
        (lambda: constraints().json_schema("[" * 100_000), "json_schema: not JSON"),
        (lambda: constraints().regex("a("), "unclosed group"),
        (lambda: constraints().regex("(?=a)b"), "look-around"),
        (lambda: constraints().regex("é"), "the vocabulary cannot express"),
        (lambda: constraints().regex("a\ud800"), "half of a surrogate pair"),
        (lambda: constraints().regex(""), "'' is not a non-empty text"),
        (lambda: constraints().choice([]), "[] is not a list of at least one text"),
        (lambda: constraints().choice("yes"), "'yes' is not a list of at least one text"),
        (lambda: constraints().choice(["a", 3]), "choice 1: 3 is not a non-empty text"),
        (lambda: constraints().choice(["é"]), "choice: the vocabulary cannot express"),
    ],
)
def test_invalid_constraints_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        make()
    assert message in str(refused.value)
    assert len(str(refused.value)) < 400


def test_forbid_sets_disallowed_logits_to_minus_infinity() -> None:
    logits = torch.zeros(2, 70)
    masks = np.zeros((2, mask_words(70)), dtype=np.int32)
    masks[0, 0], masks[1, 2] = -(2**31) + 1, 0b100000  # bits 0 and 31; bit 69
    mask_logits(logits, masks)
    assert [row.isfinite().nonzero().ravel().tolist() for row in logits] == [[0, 31], [69]]


def test_too_complex_schema_is_rejected_or_fails_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(600)}}
    constraints().json_schema(fields)  # 2,407 alternatives
    monkeypatch.setattr("perilune.engine.constraints._MAX_GRAMMAR_ITEMS", 1000)
    with pytest.raises(RequestError, match=r"too complex.*items; max is 1000"):
        constraints().json_schema(fields)
    nested = constraints().json_schema({"type": "array", "minItems": 2, "items": fields})
    engine = Engine(decoder(), slots=4)
    neighbor, bad = request(None, n=2, max_tokens=20), request(nested, n=2)
    expected = run_requests(Engine(decoder()), [neighbor])
    numbers = {engine.add(neighbor, stream=False): 0, engine.add(bad, stream=False): 1}
    deltas = [(numbers[delta.request_id], delta) for _ in range(40) for delta in engine.step()]
    assert isinstance(next(delta.failure for number, delta in deltas if number == 1), RequestError)
    for index in range(2):
        ids = [delta.token_ids for number, delta in deltas if (number, delta.sample) == (0, index)]
        assert ids == [expected[0, index].token_ids]
