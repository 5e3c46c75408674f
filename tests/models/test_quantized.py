"""Loading MXFP4 and FP8 checkpoints, against the dequantization of transformers.

Importing that takes two seconds, so collecting these tests must not do it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from perilune.errors import RequestError
from perilune.models.checkpoints.loading import load_decoder, save_checkpoint
from perilune.models.checkpoints.quantized import from_fp8, from_mxfp4
from perilune.models.checkpoints.stored import open_decoder
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.transformers_model import load_for_inference
from perilune.weights.checkpoint import load_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 98, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False, "eos_token_id": 1,
    "initializer_range": 0.1,
}  # fmt: skip
GPT_OSS = SIZES | {
    "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3", "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 12,
    "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM = SIZES | {
    "model_type": "glm4_moe", "head_dim": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN_3 = SIZES | {"model_type": "qwen3", "head_dim": 16}
QWEN_NEXT = SIZES | {
    "model_type": "qwen3_next", "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}  # fmt: skip
MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16],
}  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
QUERIES = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, Tensor]


def as_mxfp4(plain: Tensors) -> tuple[Tensors, Tensors]:
    """The state with random MXFP4 experts, and the expected dequantized state."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, values = dict(plain), dict(plain)
    for name in [key for key in plain if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return stored, values


def as_fp8(plain: Tensors, dtype: torch.dtype = torch.float32) -> tuple[Tensors, Tensors]:
    """The state with linear maps in FP8 blocks of 16 x 16, and the expected dequantized state."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    stored, values = dict(plain), dict(plain)
    for name, tensor in plain.items():
        if tensor.dim() == 2 and ".layers." in name and not name.endswith(".gate.weight"):
            stored[name] = (100 * tensor).to(torch.float8_e4m3fn)
            grid = [-(-size // 16) for size in tensor.shape]
            stored[f"{name}_scale_inv"] = scales = (0.01 + 0.01 * torch.rand(grid)).to(dtype)
            values[name] = _dequantize_fp8_weight(stored[name], scales, [16, 16], torch.float32)
    return stored, values


def write(folder: Path, raw: dict[str, Any], tensors: Tensors) -> Path:
    """Write a checkpoint of two shards, where no tensor is in the same file as its scales."""
    decoder = Decoder(DecoderConfig.from_hf(raw))
    save_checkpoint(folder, decoder, Tokenizer.characters())
    (folder / "model.safetensors").unlink()
    where = {
        name: f"model-0000{1 + name.endswith(('_scales', '_inv'))}-of-00002.safetensors" for name in tensors
    }
    for file in set(where.values()):
        save_file({n: t.contiguous() for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def new_state(raw: dict[str, Any]) -> Tensors:
    decoder = Decoder(DecoderConfig.from_hf(raw))
    decoder.initialize(seed=1)
    torch.manual_seed(0)
    return {name: tensor.detach() for name, tensor in decoder.state_dict().items()}


def check_loads_as(folder: Path, expected: Tensors, dtype: torch.dtype) -> None:
    """Assert that each tensor, loaded or opened lazily, is the expected one rounded to `dtype` once."""
    loaded, opened = load_decoder(Decoder, folder, dtype=dtype), open_decoder(folder, dtype=dtype)
    with opened.in_memory():
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
            assert torch.equal(opened.state_dict()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mxfp4_value_and_scale_is_decoded(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16)  # 255 means NaN
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(from_mxfp4(blocks, scales).to(dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fp8_value_is_decoded(dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16).repeat(4, 2)
    scales = torch.rand(8, 8).to(dtype)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
    assert torch.equal(from_fp8(values, scales, (8, 4)).to(dtype).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_of_gpt_oss_load_and_save(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, expected = as_mxfp4(new_state(GPT_OSS))
    folder = write(tmp_path / "published", GPT_OSS | {"quantization_config": MXFP4}, stored)
    check_loads_as(folder, expected, dtype)
    save_checkpoint(tmp_path / "saved", load_decoder(Decoder, folder), Tokenizer.characters())
    check_loads_as(tmp_path / "saved", expected, dtype)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    wanted = {EXPERTS: {"dtype": "float32", "shape": list(expected[EXPERTS].shape)}}
    assert torch.equal(
        load_tensors(folder, wanted)[EXPERTS], expected[EXPERTS]
    )  # the path for weights sent to a server


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("raw", [QWEN_3, DEEPSEEK], ids=["qwen3", "deepseek_v3"])
def test_fp8_with_blocks_that_do_not_divide_the_shape_loads(
    tmp_path: Path, raw: dict[str, Any], dtype: torch.dtype
) -> None:
    stored, expected = as_fp8(new_state(raw), torch.bfloat16 if raw is QWEN_3 else torch.float32)
    check_loads_as(write(tmp_path, raw | {"quantization_config": FP8}, stored), expected, dtype)


def test_fp8_with_one_scale_per_matrix_loads(tmp_path: Path) -> None:
    stored, expected = as_fp8(new_state(QWEN_3))
    stored[QUERIES + "_scale_inv"] = torch.tensor(0.5)
    expected[QUERIES] = stored[QUERIES].float() * 0.5
    for name in [key for key in stored if key.endswith("_inv") and key != QUERIES + "_scale_inv"]:
        del stored[name]
        stored[name.removesuffix("_scale_inv")] = expected[name.removesuffix("_scale_inv")]
    check_loads_as(
        write(tmp_path, QWEN_3 | {"quantization_config": FP8 | {"weight_block_size": None}}, stored),
        expected,
        torch.float32,
    )


@pytest.mark.parametrize("raw", [DEEPSEEK, GLM, QWEN_NEXT], ids=lambda raw: raw["model_type"])
def test_multi_token_prediction_layers_are_skipped_with_a_notice(
    tmp_path: Path, raw: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state = new_state(raw)
    prefix = "mtp." if raw is QWEN_NEXT else "model.layers.2."
    extra = {
        f"{prefix}eh_proj.weight": torch.zeros(64, 128).to(torch.float8_e4m3fn),
        f"{prefix}eh_proj.weight_scale_inv": torch.ones(4, 8),
        f"{prefix}enorm.weight": torch.ones(64),
    }
    fp8 = raw | {"quantization_config": FP8}
    check_loads_as(write(tmp_path, fp8, state | extra), state, torch.float32)
    message = f"{tmp_path}/config.json: skipping 2 tensors for multi-token prediction"
    assert capsys.readouterr().err.count(message) == 2
    if raw is not QWEN_NEXT:
        write(tmp_path, fp8 | {"num_nextn_predict_layers": 0}, state | extra)
        with pytest.raises(RequestError, match=r"layers\.2\.\w+\.weight is not part of this architecture"):
            load_decoder(Decoder, tmp_path)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensor})


WRONG: dict[str, tuple[dict[str, Any], Callable[[Tensors], Any], str]] = {
    "no scales": (GPT_OSS, drop(f"{EXPERTS}_scales"), f"{EXPERTS}_scales, for {EXPERTS}_blocks, is missing"),
    "no blocks": (GPT_OSS, drop(f"{EXPERTS}_blocks"), f"tensor {EXPERTS} is missing"),
    "shape of scales": (
        GPT_OSS,
        put(f"{EXPERTS}_scales", torch.zeros(3, 64, 1, dtype=torch.uint8)),
        f"{EXPERTS}_scales is U8 of shape [3, 64, 1], not U8 of shape [3, 64, 2]",
    ),
    "shape of blocks": (
        GPT_OSS,
        put(f"{EXPERTS}_blocks", torch.zeros(3, 64, 32, dtype=torch.uint8)),
        f"{EXPERTS}_blocks is U8 of shape [3, 64, 32], not U8 of shape [experts, outputs, blocks, 16]",
    ),
    "too few experts": (
        GPT_OSS,
        lambda t: t.update({key: t[key][:2] for key in (f"{EXPERTS}_blocks", f"{EXPERTS}_scales")}),
        f"{EXPERTS} has shape [2, 64, 64], but config.json requires [3, 64, 64]",
    ),
    "no scale": (QWEN_3, drop(f"{QUERIES}_scale_inv"), f"{QUERIES}_scale_inv, for {QUERIES}, is missing"),
    "grid of scales": (
        QWEN_3,
        put(f"{QUERIES}_scale_inv", torch.ones(4, 3)),
        f"{QUERIES}_scale_inv is F32 of shape [4, 3], not F32 or BF16 or F16 of shape [4, 4]",
    ),
    "dtype of scales": (
        QWEN_3,
        put(f"{QUERIES}_scale_inv", torch.ones(4, 4, dtype=torch.uint8)),
        f"{QUERIES}_scale_inv is U8 of shape [4, 4]",
    ),
    "a norm": (
        QWEN_3,
        put("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn)),
        "model.norm.weight_scale_inv, for model.norm.weight, is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_quantized_tensors_are_rejected_by_name(tmp_path: Path, case: str) -> None:
    raw, change, message = WRONG[case]
    stored, _ = (as_mxfp4 if raw is GPT_OSS else as_fp8)(new_state(raw))
    change(stored)
    write(tmp_path, raw | {"quantization_config": MXFP4 if raw is GPT_OSS else FP8}, stored)
    with pytest.raises(RequestError) as caught:
        load_decoder(Decoder, tmp_path)
    assert message in caught.value.what
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", None])
@pytest.mark.parametrize("model_type", ["qwen3", "gpt_neox"])
def test_unsupported_quantization_methods_are_rejected(
    tmp_path: Path, method: str | None, model_type: str
) -> None:
    raw = QWEN_3 | {"quantization_config": {"quant_method": method}, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        RequestError, match=f"quant_method {method!r}, which Perilune does not read"
    ) as caught:
        load_for_inference(tmp_path)
    assert caught.value.where == f"{tmp_path}/config.json:quantization_config"
    assert "use the unquantized checkpoint" in caught.value.remedy


@pytest.mark.parametrize("change", [{"fmt": "e5m2"}, {"weight_block_size": [16]}, {"weight_block_size": 1.5}])
def test_malformed_fp8_settings_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(change))):
        DecoderConfig.from_hf(QWEN_3 | {"quantization_config": FP8 | change})


def test_quantized_config_equals_unquantized_config() -> None:
    assert DecoderConfig.from_hf(QWEN_3 | {"quantization_config": FP8}) == DecoderConfig.from_hf(QWEN_3)
