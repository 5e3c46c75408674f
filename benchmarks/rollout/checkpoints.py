"""Random checkpoints of the compared shapes, as Hugging Face folders."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .shapes import SHAPES, Shape

LAST = "config.json"  # written last, so a folder with it is complete
DEVIATION = 0.02


def checkpoint(folder: Path, model: str, dtype: str) -> Path:
    """The checkpoint of a shape and dtype under `folder`, which is made if missing.

    The bfloat16 weights are the float32 ones, rounded.
    """
    shape, path = SHAPES[model], folder / f"{model}-{dtype}"
    if (path / LAST).exists() and json.loads((path / "shape.json").read_text()) == asdict(shape):
        return path

    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    (path / LAST).unlink(missing_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU needs minutes for billions of numbers
    random, tensors = torch.Generator(device).manual_seed(0), {}
    for name, size in _tensors(shape):
        drawn = torch.ones(size)
        if len(size) > 1:
            drawn = torch.randn(size, generator=random, device=device) * DEVIATION
        tensors[name] = drawn.to(getattr(torch, dtype)).cpu()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    # Some engines do not start without a tokenizer, although they are given token ids.
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"}
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    (path / "shape.json").write_text(json.dumps(asdict(shape)))
    (path / LAST).write_text(json.dumps(shape_config(shape, dtype)))
    return path


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of Qwen3's parameters; those with one axis are norms."""
    hidden, inner, size = shape.hidden, shape.inner, shape.head_dim
    queries, keys = shape.heads * size, shape.kv_heads * size
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        before = f"model.layers.{layer}"
        yield f"{before}.input_layernorm.weight", (hidden,)
        yield f"{before}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{before}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{before}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{before}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{before}.self_attn.q_norm.weight", (size,)
        yield f"{before}.self_attn.k_norm.weight", (size,)
        yield f"{before}.post_attention_layernorm.weight", (hidden,)
        yield f"{before}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{before}.mlp.up_proj.weight", (inner, hidden)
        yield f"{before}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def shape_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The configuration of this model, readable by transformers 4 and 5."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "max_position_embeddings": shape.positions,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
