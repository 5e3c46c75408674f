"""Prefix values from one packed forward pass against a forward pass per prefix."""

import numpy as np
import pytest
from learning_cases import VOCABULARY, episode, plain_logprobs, small_decoder

from perilune.learn import prefix_values as module
from perilune.learn.prefix_values import Probe, prefix_values

LEAD, ANSWER = [7, 8], [9, 10, 11]


def probe(seed: int, prefixes: list[int], endings=(LEAD + ANSWER,), answers=(3,)) -> Probe:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, 12)
    made = episode(1.0, prompt=rng.integers(0, VOCABULARY, 3 + seed % 3), tokens=tokens, name=f"0/{seed}/0")
    return Probe(made, prefixes, endings, answers)


def plain_values(decoder, one: Probe, prefix: int) -> list[float]:
    """Summed log-probs of the answer tokens of each form, from a forward pass over its whole sequence."""
    totals = []
    for ending, answer in zip(one.endings, one.answers, strict=True):
        sequence = episode(
            prompt=one.episode.prompt_ids, tokens=[*one.episode.token_ids[:prefix], *ending], name="x/0/0"
        )
        totals.append(float(plain_logprobs(decoder, sequence)[-answer:].detach().double().sum()))
    return totals


@pytest.mark.parametrize("token_budget", [1, 60, 10_000])
def test_packed_prefix_values_equal_those_of_each_prefix_alone(token_budget: int) -> None:
    decoder = small_decoder()
    probes = [probe(0, [0, 4, 9]), probe(1, [0]), probe(2, [0, 1, 11])]
    found = prefix_values(decoder, probes, token_budget=token_budget)
    for item, values in zip(probes, found, strict=True):
        expected = [plain_values(decoder, item, prefix)[0] / len(ANSWER) for prefix in item.prefixes]
        np.testing.assert_allclose(values, expected, rtol=0, atol=2e-6)


def test_prefix_values_score_answer_tokens_with_or_without_lead() -> None:
    decoder = small_decoder()
    led, bare = (
        prefix_values(decoder, [probe(0, [3], (ending,))], token_budget=999)[0][0]
        for ending in (LEAD + ANSWER, ANSWER)
    )
    assert led == pytest.approx(plain_values(decoder, probe(0, [3]), 3)[0] / 3, abs=2e-6)
    assert bare == pytest.approx(plain_values(decoder, probe(0, [3], (ANSWER,)), 3)[0] / 3, abs=2e-6)
    single = prefix_values(decoder, [probe(0, [3], ([5],), (1,))], token_budget=999)[0][0]
    assert single == pytest.approx(plain_values(decoder, probe(0, [3], ([5],), (1,)), 3)[0], abs=2e-6)


def test_prefix_values_sum_probabilities_of_all_answer_forms() -> None:
    decoder = small_decoder()
    forms = probe(0, [0, 5], (LEAD + ANSWER, [*LEAD, 9, 12]), (3, 2))
    found = prefix_values(decoder, [forms], token_budget=999)[0]
    for value, prefix in zip(found, forms.prefixes, strict=True):
        probability = np.exp(plain_values(decoder, forms, prefix)).sum()
        assert value == pytest.approx(np.log(probability) / 3, abs=2e-6)
    first = prefix_values(decoder, [probe(0, [0, 5])], token_budget=999)[0]
    assert (found > first).all()


def test_prefix_value_of_overlapping_answer_forms_is_at_most_certainty() -> None:
    decoder = small_decoder()
    many = probe(0, [2], tuple([[token] for token in range(VOCABULARY)] * 2), (1,) * 2 * VOCABULARY)
    assert prefix_values(decoder, [many], token_budget=9999)[0][0] == 0.0


def test_repeated_probes_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder()
    asked = []
    pack = module._pack
    monkeypatch.setattr(module, "_pack", lambda probes, t: asked.extend(probes) or pack(probes, t))
    same, other = probe(0, [0, 4, 9]), probe(0, [0, 4, 10])
    found = prefix_values(decoder, [same, same, other], token_budget=999)
    assert [list(item.prefixes) for item in asked] == [[0, 4, 9], [10]]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0][:2], found[2][:2])


def test_prefix_values_use_the_sampling_temperature() -> None:
    decoder = small_decoder()
    cold, plain, hot = (
        prefix_values(decoder, [probe(0, [3])], token_budget=999, temperature=t)[0][0]
        for t in (0.5, 1.0, 1e6)
    )
    assert hot == pytest.approx(-np.log(VOCABULARY), abs=1e-4)
    assert len({cold, plain, hot}) == 3


def test_prefix_values_of_no_probes_are_empty() -> None:
    assert prefix_values(small_decoder(), [], token_budget=99) == []
