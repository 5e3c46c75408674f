"""Small GGUF models, and how transformers reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS = 512, 256, 1, 4, 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = (
    "Hello, world! It's 12:30 and we've 1,024 apples.",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))",
    "naïve café — 你好, мир 🙂",
    "  leading, trailing and   inner   blanks  ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
)


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a byte-level BPE with three control tokens and a user-defined one."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "Ġ a", "i n", "Ġ w", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "0 2", "Ċ Ċ", "' s", "p p"]
    tokens = special + alphabet + [merge.replace(" ", "") for merge in merges]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - len(special))
    return tokens, merges, kinds


def tensors(architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a small model under their GGUF names."""
    draw = np.random.default_rng(seed)
    kv, vocab = HIDDEN // HEADS * KV_HEADS, len(vocabulary()[0])
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (HIDDEN, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, HIDDEN),
            "ffn_gate.weight": (WIDE, HIDDEN),
            "ffn_up.weight": (WIDE, HIDDEN),
            "ffn_down.weight": (HIDDEN, WIDE),
        }
        if architecture == "olmo2":
            of_layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
            of_layer |= {"attn_q_norm.weight": (HIDDEN,), "attn_k_norm.weight": (kv,)}
        else:
            of_layer |= {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
        if architecture == "qwen3":
            of_layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        if architecture == "qwen2":
            of_layer |= {"attn_q.bias": (HIDDEN,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def metadata(architecture: str) -> dict[str, Any]:
    """Metadata of the small model, without the tokenizer."""
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": WIDE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 50000.0,
        f"{architecture}.rope.dimension_count": HIDDEN // HEADS,
        f"{architecture}.attention.key_length": HIDDEN // HEADS,
    }


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "F32",
    changes: Mapping[str, Any] | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a small model whose matrices are stored as `kind`.

    Args:
        changes: metadata to add or replace; None removes a key.
    """
    writer = GGUFWriter(path, architecture)
    tokens, merges, kinds = vocabulary()
    fields: dict[str, Any] = metadata(architecture) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (fields | dict(changes or {})).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        if value is not None:
            add.get(type(value), writer.add_uint32)(key, value)
    for name, tensor in (weights or tensors(architecture)).items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            quantized = GGMLQuantizationType[kind]
            writer.add_tensor(name, stored(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(tensor: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The tensor in a type of GGUF; random blocks where the `gguf` package cannot quantize."""
    try:
        return quantize(tensor, kind)
    except NotImplementedError:
        size, block = GGML_QUANT_SIZES[kind]
        draw = np.random.default_rng(tensor.size)
        data = draw.integers(0, 256, (*tensor.shape[:-1], tensor.shape[-1] // size * block), dtype=np.uint8)
        blocks = data.reshape(-1, block)
        # Offsets of the half-precision scales, which random bytes could make infinite.
        places = {
            "Q6_K": (208,),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
            "Q2_K": (80, 82),
            "Q3_K": (108,),
            "IQ4_NL": (0,),
            "IQ4_XS": (0,),
        }[kind.name]
        for start in places:
            scales = draw.uniform(0.001, 0.01, len(blocks)).astype("<f2")
            blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
        return data


def transformers_weights(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """The weights and the configuration that transformers reads from a GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return dict(model.state_dict()), model.config


def transformers_tokenizer(path: Path) -> Any:
    """The tokenizer that transformers reads from a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
