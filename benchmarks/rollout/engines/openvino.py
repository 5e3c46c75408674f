"""OpenVINO GenAI with continuous batching."""

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from ..outcome import Outcome
from ..shapes import Request

FOLDER = "openvino"


def prepare(checkpoint: Path) -> None:
    """Export the checkpoint with optimum-intel, in its own dtype, and the tokenizer with it."""
    folder = checkpoint / FOLDER
    if (folder / "exported").exists():
        return
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
    model.save_pretrained(folder)
    tokenizer, detokenizer = convert_tokenizer(
        AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True
    )
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")
    (folder / "exported").touch()


class Adapter:
    """Adds all requests to a `ContinuousBatchingPipeline`, and steps it until all end."""

    log_probs = "every token"

    def __init__(
        self, checkpoint: Path, dtype: str, threads: int, requests: Sequence[Request], kv_cache: str
    ) -> None:
        self.kv_cache = kv_cache
        config = genai.SchedulerConfig()
        config.max_num_seqs = max(256, sum(request.n for request in requests))
        config.max_num_batched_tokens = 2048
        config.enable_prefix_caching = False
        config.cache_size = 2  # GB
        properties = {
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
            "KV_CACHE_PRECISION": kv_cache,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = genai.ContinuousBatchingPipeline(str(checkpoint / FOLDER), config, "CPU", properties)
        self._count = 0

    def versions(self) -> dict[str, str]:
        """Versions of the packages."""
        packages = ("openvino", "openvino-genai", "optimum-intel")
        return {**{name: version(name) for name in packages}, "python": platform.python_version()}

    def sample(self, requests: Sequence[Request], *, temperature: float, seed: int) -> Outcome:
        """Sample from prompts as tensors of ids. The samples of a request share its prompt."""
        handles = []
        for index, request in enumerate(requests):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.new_tokens
            config.set_eos_token_id(0)  # it requires one
            config.ignore_eos = True
            config.logprobs = 1
            config.do_sample = temperature > 0
            if config.do_sample:
                config.temperature = temperature
                config.num_return_sequences = request.n
                config.rng_seed = seed * len(requests) + index
            self._count += 1
            prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._count, prompt, config))
        first = None
        if len(requests) > 1:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            samples = [item for handle in handles for item in handle.read_all()]
            return Outcome(
                [item.generated_ids for item in samples], [item.generated_log_probs for item in samples]
            )
        tokens: list[int] = []
        logprobs: list[float] = []
        while self._pipeline.has_non_finished_requests() or handles[0].can_read():
            self._pipeline.step()
            while handles[0].can_read():
                first = first or time.perf_counter()
                for output in handles[0].read().values():
                    tokens += output.generated_ids
                    logprobs += output.generated_log_probs
        return Outcome([tokens], [logprobs], first)
