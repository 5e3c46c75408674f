"""Engine llama.cpp through the C functions of llama-cpp-python, whose own classes have no batches."""

import ctypes
import json
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ..outcome import Outcome
from ..shapes import Request

FILE = "model.gguf"
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def prepare(checkpoint: Path) -> None:
    """Write the checkpoint as GGUF. Matrices keep their dtype, and norms become float32."""
    import gguf

    if (checkpoint / FILE).exists():
        return
    config = json.loads((checkpoint / "config.json").read_text())
    temporary = checkpoint / f".{FILE}.tmp"
    writer = gguf.GGUFWriter(temporary, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, dtype, values in _stored(checkpoint / "model.safetensors"):
        if values.ndim == 1:  # norms
            wide = values if dtype == "F32" else (values.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(_name(name), wide)
        elif dtype == "F32":
            writer.add_tensor(_name(name), values)
        else:
            writer.add_tensor(_name(name), values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(checkpoint / FILE)


def _stored(path: Path) -> list[tuple[str, str, NDArray[Any]]]:
    """Name, dtype and values of every tensor; numpy has no bfloat16, so these come as uint16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    arrays = []
    for name, stored in header.items():
        if name == "__metadata__":
            continue
        begin, end = stored["data_offsets"]
        dtype = {"F32": np.float32, "BF16": np.uint16}[stored["dtype"]]
        arrays.append((name, stored["dtype"], np.array(data[begin:end]).view(dtype).reshape(stored["shape"])))
    return arrays


def _name(name: str) -> str:
    """The GGUF name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in TENSORS:
        return f"{TENSORS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{TENSORS[part]}.weight"


class Adapter:
    """Holds one sequence per sample, and decodes the next token of all running ones per step."""

    kv_cache = "float16"
    log_probs = "every token, from its logits"

    def __init__(self, checkpoint: Path, dtype: str, threads: int, requests: Sequence[Request]) -> None:
        llama_cpp.llama_backend_init()
        load = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(checkpoint / FILE).encode(), load)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        samples = max(4, sum(request.n for request in requests))
        length = max(64, *(len(request.prompt) + request.new_tokens for request in requests))
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = samples
        params.n_ctx = samples * length
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False  # otherwise every token attends to the cells of all sequences
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._most = params.n_batch

    def versions(self) -> dict[str, str]:
        """Versions of the packages."""
        return {"llama-cpp-python": version("llama-cpp-python"), "python": platform.python_version()}

    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Outcome:
        """Compute each prompt once, in the sequence of its first sample, and copy it to the others.

        Sequences are numbered by falling length, because the running ones must be adjacent in a batch.
        """
        order = sorted(range(len(requests)), key=lambda index: -requests[index].new_tokens)
        outcome = self._sample([requests[index] for index in order], temperature, seed)
        assert outcome.logprobs is not None
        ends = np.cumsum([requests[index].n for index in order])
        begins = {index: end - requests[index].n for index, end in zip(order, ends.tolist(), strict=True)}
        places = [begins[index] + copy for index, r in enumerate(requests) for copy in range(r.n)]
        return Outcome(
            [outcome.tokens[index] for index in places],
            [outcome.logprobs[index] for index in places],
            outcome.first_token,
        )

    def _sample(self, requests: Sequence[Request], temperature: float, seed: int) -> Outcome:
        random = np.random.default_rng(seed)
        llama_cpp.llama_memory_clear(self._memory, False)
        rows: list[NDArray[np.float32]] = []
        sequence = 0
        for request in requests:
            logits = self._prefill(request.prompt, sequence)
            for copy in range(sequence + 1, sequence + request.n):
                llama_cpp.llama_memory_seq_cp(self._memory, sequence, copy, -1, -1)
            rows += [logits] * request.n
            sequence += request.n
        limits = np.array([request.new_tokens for request in requests for _ in range(request.n)])
        positions = np.array([len(request.prompt) for request in requests for _ in range(request.n)])
        tokens = np.zeros((sequence, limits.max()), dtype=np.int32)
        logprobs = np.zeros((sequence, limits.max()), dtype=np.float32)

        running, scores = np.arange(sequence), np.stack(rows)
        first = None
        for step in range(int(limits.max())):
            picked, picked_logprobs = _draw(scores, temperature, random)
            first = first or time.perf_counter()
            tokens[running, step], logprobs[running, step] = picked, picked_logprobs
            running = running[limits[running] > step + 1]
            if len(running):
                scores = self._decode(tokens[running, step], positions[running] + step, running)
        return Outcome(
            [row[:limit] for row, limit in zip(tokens, limits, strict=True)],
            [row[:limit] for row, limit in zip(logprobs, limits, strict=True)],
            first,
        )

    def _prefill(self, prompt: Sequence[int], sequence: int) -> NDArray[np.float32]:
        """float32[V]: the logits after the prompt."""
        for begin in range(0, len(prompt), self._most):
            part = np.array(prompt[begin : begin + self._most], dtype=np.int32)
            last = begin + len(part) == len(prompt)
            wanted = np.zeros(len(part), dtype=np.int8)
            wanted[-1] = last
            self._run(part, begin + np.arange(len(part)), np.full(len(part), sequence), wanted)
        return self._logits(1)[0].copy()

    def _decode(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int64], sequences: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """float32[B, V]: the logits after one more token in each of these sequences."""
        self._run(tokens, positions, sequences, np.ones(len(tokens), dtype=np.int8))
        return self._logits(len(tokens))

    def _run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int64],
        sequences: NDArray[np.int64],
        wanted: NDArray[np.int8],
    ) -> None:
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for target, values in ((batch.token, tokens), (batch.pos, positions)):
            np.ctypeslib.as_array(target, (count,))[:] = values
        np.ctypeslib.as_array(ctypes.cast(batch.logits, ctypes.POINTER(ctypes.c_int8)), (count,))[:] = wanted
        for index, sequence in enumerate(sequences.tolist()):
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code} for {count} tokens")

    def _logits(self, rows: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (rows, self._vocab))


def _draw(
    logits: NDArray[np.float32], temperature: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens and their log-probs, by inverting the cumulative distribution."""
    highest = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - highest)
    cumulative = weights.cumsum(axis=1)
    if temperature:
        threshold = random.random((len(logits), 1), dtype=np.float32) * cumulative[:, -1:]
        picked = (cumulative > threshold).argmax(axis=1)
    else:
        picked = logits.argmax(axis=1)
    rows = np.arange(len(logits))
    return picked, logits[rows, picked] - highest[:, 0] - np.log(cumulative[:, -1])
