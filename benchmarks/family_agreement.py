"""Compare the log-probs of every model family with transformers, and of our sampling with our learning.

    python benchmarks/family_agreement.py

transformers writes a random checkpoint of each family (4 layers, hidden size 256, windows of 64 tokens if the
family has them), and both read it. Two texts of 300 tokens are computed in one piece, as in learning, and in
chunks and single tokens over the paged cache, as in sampling. All use float32, and both are also compared
with transformers in float64. Writes results/family_agreement.json. `--families` measures only the given
families and keeps the results of the others.
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from perilune.engine.select_runner import fastest_runner
from perilune.engine.step import StepBatch
from perilune.models.attention import PackedAttention
from perilune.models.checkpoints.loading import load_decoder
from perilune.models.decoder import Decoder
from recipe_runs import HERE, document, write

LENGTH, TEXTS = 300, 2
ABOUT = (
    "The table shows the largest absolute difference between two computations of the same log-probs, in "
    "nats. Perilune scores whole sequences in one pass, as in learning, and token by token with the KV "
    "cache, as in sampling. Transformers computes the same log-probs in float32 and, for reference, in "
    "float64, where norms and the recurrence of linear attention remain in float32. Linear attention "
    "(Qwen3-Next, Qwen3.5) normalizes the output of each head, which magnifies the rounding of small outputs."
)
SHAPE: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "initializer_range": 0.06, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
ROUTED = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
OLMO3 = {
    "sliding_window": 64,
    "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156,
    "logits_scaling": 8.0,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MIXTURE = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 192,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 192}),
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "phi3": ("Phi3", {"head_dim": 32, "sliding_window": 64}),
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", GRANITE | {"head_dim": 32}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", OLMO3 | {"head_dim": 32}),
    "olmoe": ("Olmoe", {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 64}),
    "gemma3_text": ("Gemma3Text", {"sliding_window": 64, "sliding_window_pattern": 2}),
    "glm4_moe": ("Glm4Moe", ROUTED | {"use_qk_norm": True}),
    "gpt_oss": ("GptOss", {"sliding_window": 64, "num_local_experts": 8, "rope_parameters": YARN}),
    "deepseek_v2": ("DeepseekV2", LATENT | ROUTED | {"head_dim": 16, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT | ROUTED | {"head_dim": 16}),
    "qwen3_next": ("Qwen3Next", LINEAR | MIXTURE | {"norm_topk_prob": True}),
    "qwen3_5_text": ("Qwen3_5Text", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", LINEAR | MIXTURE),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "family_agreement.json")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="measure these, and keep the others")
    arguments = parser.parse_args()
    began, known = time.monotonic(), {}
    if arguments.families:
        known = json.loads(arguments.out.read_text(encoding="utf-8"))["largest difference, nats"]
    measured = {name: measure(*FAMILIES[name]) for name in arguments.families or FAMILIES}
    families = {name: (known | measured)[name] for name in FAMILIES if name in known | measured}
    result = document("family_agreement.py", [], began)
    if arguments.families:
        del result["minutes"]  # of a part
    result["versions"]["transformers"] = transformers.__version__
    about = {"title": "Log-probs of Perilune's decoder against transformers", "about": ABOUT}
    write(arguments.out, about | result | {"largest difference, nats": families})
    for name, figures in measured.items():
        print(name, *(f"{key} {value:.1e}" for key, value in figures.items()))


@torch.no_grad()
def measure(kind: str, changes: dict[str, Any]) -> dict[str, float]:
    """Largest absolute differences of log-probs of one family, in nats."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in reference.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # instead of the neutral initial values
            parameter.add_(torch.randn_like(parameter) * 0.2)
        if name.endswith(("mlp.gate.weight", "router.weight")):
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        if name.endswith("sinks"):
            parameter.copy_(torch.randn_like(parameter))
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        ours = load_decoder(Decoder, Path(folder))
    texts = torch.randint(0, SHAPE["vocab_size"], (TEXTS, LENGTH))
    expected = reference(texts, use_cache=False).logits.double().log_softmax(-1)
    config._experts_implementation = "eager"  # the others have no float64
    exact = reference.double()(texts, use_cache=False).logits.log_softmax(-1)
    packed, cached = in_one_piece(ours, texts), in_steps(ours, texts)
    steps = torch.tensor([stop - 1 for stop in bounds()[1:]])
    return {
        "one pass, against transformers": float((packed.double().log_softmax(-1) - expected).abs().max()),
        "KV cache, against transformers": float(
            (cached.double().log_softmax(-1) - expected[:, steps]).abs().max()
        ),
        "Perilune, against float64": float((packed.double().log_softmax(-1) - exact).abs().max()),
        "transformers, against float64": float((expected - exact).abs().max()),
        "KV cache, against one pass": float((cached - packed[:, steps]).abs().max()),
    }


def in_one_piece(decoder: Decoder, texts: Tensor) -> Tensor:
    """Logits [S, T, V]."""
    attention = PackedAttention(torch.arange(TEXTS + 1) * LENGTH)
    hidden = decoder(texts.flatten(), torch.arange(LENGTH).repeat(TEXTS), attention)
    return decoder.logits(hidden).view(TEXTS, LENGTH, -1)


def in_steps(decoder: Decoder, texts: Tensor) -> Tensor:
    """Logits [S, steps, V] of the last token of each step."""
    blocks = -(-LENGTH // 16)
    windows = len(decoder.config.distinct_windows)
    runner = fastest_runner(decoder, [1 + TEXTS * blocks] * windows)
    tables = np.arange(1, 1 + TEXTS * blocks, dtype=np.int32).reshape(1, TEXTS, blocks).repeat(windows, 0)
    logits = []
    for start, stop in pairwise(bounds()):
        count = stop - start
        batch = StepBatch(
            token_ids=texts[:, start:stop].flatten().numpy(),
            positions=np.tile(np.arange(start, stop), TEXTS),
            cu_seqlens=np.arange(TEXTS + 1) * count,
            decodes=TEXTS if count == 1 else 0,
            block_tables=tables,
            logit_rows=np.arange(1, TEXTS + 1) * count - 1,
        )
        logits.append(runner.run(batch).clone())
    return torch.stack(logits, dim=1)


def bounds() -> list[int]:
    """Bounds of the steps: a prompt in two chunks, then single tokens."""
    return [0, 100, 117, *range(118, LENGTH + 1)]


if __name__ == "__main__":
    main()
