"""The plain-Python reference decoder against finite differences, torch and transformers."""

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import Llama3Scaling, Rope
from reference_decoder import (
    ReferenceDecoder,
    log_sum_exp,
    parameter_shapes,
    random_parameters,
    rope_frequencies,
    rotate,
    softmax,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = range(6)


def random_case(seed: int) -> tuple[DecoderConfig, dict, list[int], list[float]]:
    """A small random model; the seeds cover both families and all options."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2, 3])
    architecture = ("qwen3", "llama")[seed % 2]
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=draw.randint(5, 11),
        hidden_size=heads * draw.randint(1, 3),  # transformers refuses other Llamas
        intermediate_size=draw.randint(3, 9),
        num_layers=draw.randint(1, 3),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw.choice([2, 4, 6]),
        rope=Rope(draw.choice([10.0, 1e4]), Llama3Scaling(4.0, 1.0, 4.0, 32) if seed % 4 == 1 else None),
        rms_norm_eps=draw.choice([1e-6, 1e-2]),
        tie_word_embeddings=seed % 3 != 0,
        attention_bias=seed % 4 >= 2,
        mlp_bias=architecture == "llama" and seed % 3 == 0,
        initializer_range=0.6,
    )
    parameters = random_parameters(config, seed)
    for value in parameters.values():
        if isinstance(value[0], float):
            value[:] = [number + draw.gauss(0, 0.3) for number in value]
    tokens = [draw.randrange(config.vocab_size) for _ in range(draw.randint(3, 7))]
    weights = [draw.gauss(0, 1) for _ in tokens[1:]]
    return config, parameters, tokens, weights


def at(parameters: dict, name: str, index: tuple[int, ...]) -> tuple[list[float], int]:
    """The innermost list that contains a number, and the index of the number in it."""
    row = parameters[name]
    for i in index[:-1]:
        row = row[i]
    return row, index[-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_gradients_equal_finite_differences(seed):
    """Central differences at two entries of every parameter, without another implementation."""
    config, parameters, tokens, weights = random_case(seed)
    model = ReferenceDecoder(config, parameters)
    _, gradients = model.loss_and_gradients(tokens, weights)
    draw = random.Random(seed)
    step = 1e-5
    for name, shape in parameter_shapes(config).items():
        for _ in range(2):
            row, i = at(parameters, name, tuple(draw.randrange(size) for size in shape))
            gradient_row, j = at(gradients, name, find(parameters, name, row, i))
            value = row[i]
            losses = []
            for moved in (value + step, value - step):
                row[i] = moved
                losses.append(model.loss_and_gradients(tokens, weights)[0])
            row[i] = value
            slope = (losses[0] - losses[1]) / (2 * step)
            assert gradient_row[j] == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def find(parameters: dict, name: str, row: list[float], i: int) -> tuple[int, ...]:
    table = parameters[name]
    return (i,) if table is row else (next(n for n, other in enumerate(table) if other is row), i)


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_decoder_agrees_with_reference(seed):
    torch = pytest.importorskip("torch")
    from perilune.models.attention import PackedAttention
    from perilune.models.decoder import Decoder

    config, parameters, tokens, weights = random_case(seed)
    decoder = Decoder(config).double()
    state = {name: exact(value) for name, value in parameters.items()}
    decoder.load_state_dict(state)
    assert {name: tuple(p.shape) for name, p in decoder.named_parameters()} == parameter_shapes(config)
    # The decoder's angles are float32, as in Hugging Face; float64 angles allow a comparison to 1e-10.
    rounded = decoder.rotary
    decoder.rotary = lambda positions, _: exact_rotary(config, positions, rounded(positions))

    # Packing two sequences detects attention across sequence boundaries.
    lengths = [len(tokens) - 1, len(tokens) - 2]
    packed = [*tokens[:-1], *tokens[1:-1]]
    positions = torch.tensor([*range(lengths[0]), *range(lengths[1])])
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)])
    hidden = decoder(torch.tensor(packed), positions, PackedAttention(cu_seqlens))
    logits = decoder.logits(hidden)
    targets = torch.tensor([*tokens[1:], *tokens[2:]])
    all_weights = exact([*weights, *weights[1:]])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    loss = (all_weights * losses).sum()
    loss.backward()

    model = ReferenceDecoder(config, parameters)
    expected_logits = [*model.logits(tokens[:-1]), *model.logits(tokens[1:-1])]
    first_loss, first = model.loss_and_gradients(tokens, weights)
    second_loss, second = model.loss_and_gradients(tokens[1:], weights[1:])
    close(logits, exact(expected_logits))
    close(loss, exact(first_loss + second_loss))
    for name, parameter in decoder.named_parameters():
        close(parameter.grad, exact(first[name]) + exact(second[name]), name)


def exact(values):
    import torch

    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected, name: str = "") -> None:
    import torch

    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{name}: {text}")


def exact_rotary(config: DecoderConfig, positions, rounded):
    """Cosines and sines in float64, after checking that `rounded` agrees with them in float32."""
    import torch

    angles = positions[:, None, None].double() * exact(rope_frequencies(config))
    angles = angles.repeat(1, 1, rounded[0].shape[-1] // angles.shape[-1])
    precise = angles.cos(), angles.sin()
    torch.testing.assert_close(tuple(rounded), precise, rtol=0, atol=1e-6)
    return precise


@pytest.mark.parametrize("seed", SEEDS)
def test_transformers_agrees_with_reference(seed):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, parameters, tokens, _ = random_case(seed)
    names = {"qwen3": ("Qwen3Config", "Qwen3ForCausalLM"), "llama": ("LlamaConfig", "LlamaForCausalLM")}
    config_class, model_class = (getattr(transformers, name) for name in names[config.architecture])
    theirs = model_class(config_class(**config.to_hf(), attn_implementation="eager")).double()
    state = {name: exact(value) for name, value in parameters.items()}
    missing, extra = theirs.load_state_dict(state, strict=False)
    assert not extra
    assert missing in ([], ["lm_head.weight"])
    theirs.tie_weights()
    output = theirs(input_ids=torch.tensor([tokens]), labels=torch.tensor([tokens]))
    output.loss.backward()

    model = ReferenceDecoder(config, parameters)
    loss, gradients = model.loss_and_gradients(tokens)
    logits = exact(model.logits(tokens))
    torch.testing.assert_close(output.logits[0].double(), logits, rtol=1e-5, atol=1e-5)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    for name, parameter in theirs.named_parameters():
        expected = exact(gradients[name])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


def test_gradient_descent_learns_one_sentence():
    """Plain gradient descent without a library brings the loss of one sentence below 0.1."""
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=6,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        initializer_range=0.3,
    )
    model = ReferenceDecoder(config, random_parameters(config))
    sentence = [0, 3, 1, 3, 2, 5]  # 3 is followed by 1 or 2: only earlier tokens decide
    for _ in range(60):
        loss, gradients = model.loss_and_gradients(sentence)
        descend(model.parameters, gradients, rate=0.5)
    assert loss < 0.1
    predicted = [row.index(max(row)) for row in model.logits(sentence[:-1])]
    assert predicted == sentence[1:]


def descend(parameters: dict, gradients: dict, rate: float) -> None:
    for name, value in parameters.items():
        is_vector = isinstance(value[0], float)
        rows, slopes = ([value], [gradients[name]]) if is_vector else (value, gradients[name])
        for row, slope in zip(rows, slopes, strict=True):
            row[:] = [x - rate * g for x, g in zip(row, slope, strict=True)]


def test_later_tokens_do_not_change_earlier_logits():
    config, parameters, tokens, _ = random_case(0)
    model = ReferenceDecoder(config, parameters)
    changed = [*tokens[:-1], (tokens[-1] + 1) % config.vocab_size]
    assert model.logits(tokens)[:-1] == model.logits(changed)[:-1]
    assert model.logits(tokens)[-1] != model.logits(changed)[-1]


def test_rotary_scores_depend_only_on_distance():
    config, *_ = random_case(1)
    frequencies = rope_frequencies(config)
    draw = random.Random(0)
    a, b = ([draw.gauss(0, 1) for _ in range(config.head_dim)] for _ in "ab")

    def agreement(t: int, u: int) -> float:
        turned = zip(rotate(a, t, frequencies), rotate(b, u, frequencies), strict=True)
        return math.fsum(x * y for x, y in turned)

    assert agreement(7, 3) == pytest.approx(agreement(104, 100))
    assert agreement(7, 3) != pytest.approx(agreement(7, 4))


def test_softmax_and_log_sum_exp_do_not_overflow():
    assert softmax([1e4, 1e4]) == pytest.approx([0.5, 0.5])
    assert log_sum_exp([-1e4, -1e4]) == pytest.approx(-1e4 + math.log(2))


def test_reference_decoder_imports_only_the_standard_library():
    code = (
        "import sys; import reference_decoder; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=False).returncode == 0
