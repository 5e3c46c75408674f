"""Every decoder family against transformers on random models, and samplers against the learner."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_cases import of_each_expert
from safetensors import safe_open
from torch import Tensor

from perilune.engine.native_runner import NativeRunner
from perilune.engine.runner import Runner, TorchRunner
from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_decoder, save_checkpoint
from perilune.models.checkpoints.stored import open_decoder
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer

LENGTH, VOCABULARY, SIZE = 40, 98, 32


def small(draw: random.Random) -> dict[str, Any]:
    """Sizes common to all families."""
    heads, kv_heads = draw.choice([(2, 1), (2, 2), (4, 2), (6, 2)])
    return {
        "vocab_size": VOCABULARY, "hidden_size": SIZE * heads, "intermediate_size": draw.choice([24, 48]),
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None, "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip


def experts(draw: random.Random) -> dict[str, Any]:
    return {
        "num_experts": 6, "num_experts_per_tok": draw.choice([1, 2]), "moe_intermediate_size": 16,
        "norm_topk_prob": draw.random() < 0.5,
    }  # fmt: skip


def routed(draw: random.Random) -> dict[str, Any]:
    """A mixture like that of DeepSeek-V3."""
    return {
        "n_routed_experts": 8, "num_experts_per_tok": draw.choice([1, 3]), "moe_intermediate_size": 16,
        "n_shared_experts": draw.choice([1, 2]), "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": draw.choice([2, 3]), "routed_scaling_factor": 1.7,
        "norm_topk_prob": draw.random() < 0.7, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def glm4_moe(draw: random.Random) -> dict[str, Any]:
    return routed(draw) | {"use_qk_norm": draw.random() < 0.5, "attention_bias": draw.random() < 0.5}


def qwen2_moe(draw: random.Random) -> dict[str, Any]:
    return experts(draw) | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}


def mixtral(draw: random.Random) -> dict[str, Any]:
    return {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": draw.choice([None, 12]),
    }  # fmt: skip


def latent(draw: random.Random) -> dict[str, Any]:
    """Latent attention, with DeepSeek's factors on rotary embeddings."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": draw.choice([0.7, 1.0]),
    }  # fmt: skip
    return {
        "num_key_value_heads": None, "head_dim": 8, "kv_lora_rank": 24,
        "q_lora_rank": draw.choice([None, 20]), "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "attention_bias": draw.random() < 0.5,
        "rope_parameters": draw.choice([None, rope]),
    }  # fmt: skip


def deepseek_v2(draw: random.Random) -> dict[str, Any]:
    return latent(draw) | routed(draw) | {"norm_topk_prob": False, "topk_method": "greedy"}


def deepseek_v3(draw: random.Random) -> dict[str, Any]:
    return latent(draw) | routed(draw) | {"rope_interleave": draw.random() < 0.7}


def gpt_oss(draw: random.Random) -> dict[str, Any]:
    return {
        "num_local_experts": 4, "num_experts_per_tok": draw.choice([1, 2]), "head_dim": SIZE,
        "intermediate_size": 24, "sliding_window": 12, "attention_bias": draw.random() < 0.5,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 32, "rope_theta": 150000.0,
        },
    }  # fmt: skip


def smollm3(draw: random.Random) -> dict[str, Any]:
    windows = draw.random() < 0.5
    return {
        "no_rope_layers": [1, 0, 1], "attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5,
        "use_sliding_window": windows, "sliding_window": 12 if windows else None,
    }  # fmt: skip


def olmo3(draw: random.Random) -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0,
        "attention_factor": draw.choice([None, 1.2]),
    }  # fmt: skip
    sliding = {"rope_type": "default", "rope_theta": 1000.0}
    return {
        "sliding_window": 12, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": yarn, "sliding_attention": sliding},
    }  # fmt: skip


def phi3(draw: random.Random) -> dict[str, Any]:
    return {
        "sliding_window": draw.choice([None, 12]), "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.5, 1.0]),
        },
    }  # fmt: skip


def granite(draw: random.Random) -> dict[str, Any]:
    return {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
        "logits_scaling": 2.0, "mlp_bias": draw.random() < 0.5,
    }  # fmt: skip


def gemma2(draw: random.Random) -> dict[str, Any]:
    return {
        "head_dim": SIZE, "sliding_window": 12, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": draw.choice([None, 2.0]),
    }  # fmt: skip


def gemma(draw: random.Random) -> dict[str, Any]:
    return {"head_dim": SIZE}


def qwen3_5_text(draw: random.Random) -> dict[str, Any]:
    """Gated DeltaNet in two of three layers."""
    return {
        "linear_num_key_heads": 2, "linear_num_value_heads": draw.choice([2, 6]), "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "linear_conv_kernel_dim": draw.choice([2, 4]), "head_dim": 16,
        "layer_types": draw.sample(["linear_attention"] * 2 + ["full_attention"], 3),
        "attention_bias": draw.random() < 0.5, "partial_rotary_factor": draw.choice([0.25, 0.5]),
    }  # fmt: skip


def qwen3_5_moe_text(draw: random.Random) -> dict[str, Any]:
    return (
        qwen3_5_text(draw) | experts(draw) | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True}
    )


def qwen3_next(draw: random.Random) -> dict[str, Any]:
    return qwen3_5_moe_text(draw) | {"norm_topk_prob": draw.random() < 0.5, "mlp_only_layers": [1]}


FAMILIES = {
    "glm4_moe": glm4_moe, "qwen2_moe": qwen2_moe, "mixtral": mixtral, "olmoe": experts, "gpt_oss": gpt_oss,
    "smollm3": smollm3, "olmo3": olmo3, "phi3": phi3, "granite": granite, "gemma2": gemma2, "gemma": gemma,
    "deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next, "qwen3_5_text": qwen3_5_text, "qwen3_5_moe_text": qwen3_5_moe_text,
}  # fmt: skip
LEFT_TO_TORCH = {
    "glm4_moe", "qwen2_moe", "phi3", "granite", "gemma2", "deepseek_v2", "deepseek_v3",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
}  # fmt: skip
MIXTURES = [kind for kind in FAMILIES if "moe" in kind or kind in {"mixtral", "deepseek_v3", "qwen3_next"}]
CASES = [(kind, seed) for kind in FAMILIES for seed in range(2)]


def random_model(kind: str, seed: int) -> Any:
    """A random model of transformers with random norms and biases."""
    import transformers

    draw = random.Random(f"{kind} {seed}")
    config = transformers.AutoConfig.for_model(kind, **small(draw) | FAMILIES[kind](draw))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("norm.weight", "bias")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
            if "conv1d" in name:
                tensor.mul_(3)
            if name.endswith("A_log"):  # slow decay: norms of small states would magnify rounding
                tensor.sub_(4)
            if name.endswith(("gate.weight", "router.weight", "sinks")):
                tensor.normal_(std=tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0)
    return model


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_logits_gradients_and_checkpoints_of_family_match_transformers(
    kind: str, seed: int, tmp_path: Path
) -> None:
    theirs, rounding = random_model(kind, seed), rounding_of(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(Decoder, tmp_path / "theirs")
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    expected, actual = theirs(tokens, use_cache=False).logits, learner_logits(ours, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=rounding)
    factors = torch.randn_like(expected)
    for logits in (expected, actual):
        (logits * factors).sum().backward()
    gradients = gradients_of(theirs, ours)
    assert len(gradients) == len(list(ours.parameters()))
    whole = norm(list(gradients.values()))
    for name, parameter in ours.named_parameters():
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = norm([got - gradients[name]])
        assert difference <= 2e-4 * norm([gradients[name]]) + 1e-6 * whole, name

    saved = tmp_path / "ours"
    save_checkpoint(saved, ours, Tokenizer.characters())
    read = type(theirs).from_pretrained(saved)
    state = theirs.state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(read(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=rounding)


MIXTRAL = {
    "mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip


def gradients_of(theirs: Any, ours: Decoder) -> dict[str, Tensor]:
    """Gradients of transformers by the names of our parameters."""
    known, gradients = set(ours.state_dict()), {}
    for name, parameter in theirs.named_parameters():
        if ".experts." in name and name not in known:
            gradients.update(of_each_expert(name, parameter.grad))
        else:
            gradients[name] = parameter.grad
    if theirs.config.model_type == "mixtral":
        gradients = {mixtral_name(name): gradient for name, gradient in gradients.items()}
    return gradients


def mixtral_name(name: str) -> str:
    if ".mlp." not in name:
        return name
    for old, new in MIXTRAL.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("kind", MIXTURES)
def test_packed_experts_load_as_separate_ones(kind: str, tmp_path: Path) -> None:
    theirs = random_model(kind, 0)
    for name, separate in (("packed", False), ("separate", True)):
        theirs.save_pretrained(tmp_path / name, save_original_format=separate)
    with safe_open(tmp_path / "packed" / "model.safetensors", framework="pt") as file:
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    packed = load_decoder(Decoder, tmp_path / "packed")
    state = packed.state_dict()
    assert all(
        torch.equal(tensor, state[name])
        for name, tensor in load_decoder(Decoder, tmp_path / "separate").state_dict().items()
    )
    if kind == "qwen3_5_moe_text":
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        expected = theirs(tokens, use_cache=False).logits.log_softmax(-1)
        actual = learner_logits(packed, tokens).log_softmax(-1)
        torch.testing.assert_close(actual, expected, rtol=0, atol=rounding_of(kind))


def rounding_of(kind: str) -> float:
    """The difference in nats that rounding may make; sums of linear attention have another order."""
    return 1e-4 if kind.startswith(("qwen3_next", "qwen3_5")) else 3e-5


def norm(gradients: Sequence[Tensor | None]) -> float:
    return float(sum(grad.square().sum() for grad in gradients if grad is not None)) ** 0.5


def learner_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits [S, T, V] of whole sequences."""
    bounds = torch.arange(len(tokens) + 1) * LENGTH
    hidden = decoder(tokens.flatten(), torch.arange(LENGTH).repeat(len(tokens)), PackedAttention(bounds))
    return decoder.logits(hidden).view(*tokens.shape, -1)


WITH_C = [(kind, "native") for kind in FAMILIES]


@pytest.mark.parametrize(
    ("kind", "arithmetic"), [*WITH_C, ("gpt_oss", "torch"), ("mixtral", "torch")], indirect=["arithmetic"]
)
@torch.no_grad()
def test_runner_logits_are_bitwise_equal_to_learner(kind: str, arithmetic: str, tmp_path: Path) -> None:
    random_model(kind, 0).save_pretrained(tmp_path)
    decoder = load_decoder(Decoder, tmp_path)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = learner_logits(decoder, tokens)
    blocks = [1 + 2 * 3] * len(decoder.config.distinct_windows)
    fastest = fastest_runner(open_decoder(tmp_path), blocks)
    assert isinstance(fastest, NativeRunner) == (arithmetic == "native" and kind not in LEFT_TO_TORCH)
    for runner in (TorchRunner(decoder, blocks), fastest):
        stops, logits = runner_logits(runner, tokens, len(blocks))
        assert torch.equal(logits, expected[:, stops])


def runner_logits(runner: Runner, tokens: Tensor, windows: int) -> tuple[list[int], Tensor]:
    """Positions and their logits [S, positions, V]; the prompt is fed in two chunks, then single tokens."""
    tables = np.arange(1, 7, dtype=np.int32).reshape(1, 2, 3).repeat(windows, 0)
    bounds, logits = [0, 17, 20, *range(21, LENGTH + 1)], []
    for start, stop in pairwise(bounds):
        count = stop - start
        batch = StepBatch(
            token_ids=tokens[:, start:stop].flatten().numpy(),
            positions=np.tile(np.arange(start, stop), 2),
            cu_seqlens=np.arange(3) * count,
            decodes=2 if count == 1 else 0,
            block_tables=tables,
            logit_rows=np.arange(1, 3) * count - 1,
        )
        logits.append(runner.run(batch).clone())
    return [stop - 1 for stop in bounds[1:]], torch.stack(logits, dim=1)
