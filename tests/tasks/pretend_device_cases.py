"""GPU code on the simulated device of `pretend_device.py`. `test_pretend_device.py` runs these tests."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, Device
from task_cases import DIGITS, metrics, run_task

from perilune.engine.decode_step import GatheredAttention
from perilune.engine.engine import Engine
from perilune.engine.graph_runner import GraphRunner
from perilune.engine.request import Prompt, Request, SamplingParams
from perilune.models.adapters.files import Adapter
from perilune.models.attention import AttentionLayer, PackedAttention
from perilune.models.config.decoder_config import PRESETS
from perilune.models.decoder import Decoder
from perilune.models.native import ops
from perilune.tasks.stage import policy as session

CONFIG = PRESETS["tiny"].replace(
    architecture="gemma3_text", windows=(20, None), num_layers=2, initializer_range=0.15
)
EVERYTHING = SamplingParams(
    12, 0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=3,
    stop_token_ids=(4,), raw_logprobs=True, top_logprobs=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(decoder: Any, num_blocks: Any) -> GraphRunner:
        return GraphRunner(decoder, num_blocks, attention=GatheredAttention)

    monkeypatch.setattr(ops, "is_available", lambda: False)
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "runner", runner)
    monkeypatch.setattr(session, "prepare_device", lambda workspace: DEVICE)


@pytest.fixture
def device() -> Iterator[None]:
    with Device():
        yield


def test_pretend_device_rejects_mixed_tensors(device: None) -> None:
    there, here = torch.arange(6.0, device=DEVICE).view(2, 3), torch.ones(3)
    assert there.device.type == "pretend" and (there + 1).tolist() == [[1, 2, 3], [4, 5, 6]]
    for wrong in (lambda: there + here, lambda: here[there[0].long()], there.numpy, lambda: np.array(there)):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (there + here.to(DEVICE)).cpu().tolist() == (there.cpu() + here).tolist()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    (there @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 5, 7]


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_engine_results_equal_those_on_the_cpu(cache: Any) -> None:
    name = "model.layers.0.self_attn.q_proj"
    shape = Decoder(CONFIG).get_submodule(name).weight.shape
    generator = torch.Generator().manual_seed(0)
    adapter = Adapter(
        {
            name: (
                torch.randn(2, shape[1], generator=generator),
                torch.randn(shape[0], 2, generator=generator),
            )
        },
        0.5,
    )

    def runner(decoder: Any, num_blocks: Any) -> GraphRunner:
        return GraphRunner(decoder, num_blocks, cache=cache, attention=GatheredAttention)

    def play(decoder: Decoder) -> tuple[list[tuple[list[int], list[float]]], str]:
        engine = Engine(decoder, slots=8, cache_tokens=512, token_budget=24, runner=runner)
        text = [int(token) for token in np.random.default_rng(0).integers(98, size=40)]
        groups = engine.sample([Prompt(text, (0, 0, 0)), Prompt(text[:7], (0, 0, 1))], 2, EVERYTHING)
        engine.add_adapter("own", adapter)
        engine.add(Request(text, SamplingParams(9), (1, 0, 0), 2, adapter="own"))
        engine.add(Request(text, SamplingParams(9), (1, 0, 0), 2))
        rows = [(answer.token_ids.tolist(), answer.logprobs.tolist()) for group in groups for answer in group]
        while engine.unfinished:
            rows += [(delta.token_ids, delta.logprobs) for delta in engine.step()]
        engine.update_weights(None, 1)
        rows += [([], row.tolist()) for row in engine.score([text], [text[:9]], adapter="own")]
        return rows, engine.checksum

    decoder = Decoder(CONFIG)
    decoder.initialize(0)
    here, its_checksum = play(decoder)
    with Device():
        there, checksum = play(copy.deepcopy(decoder).to(DEVICE))
    assert checksum == its_checksum
    tolerance = 1e-4 if cache == "float32" else 1e-3  # rounding can move a value by 1 of 256 levels
    for (tokens, logprobs), (expected, its_logprobs) in zip(there, here, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, its_logprobs, atol=tolerance)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("longest", [40, 600])
def test_packed_attention_equals_that_on_the_cpu(longest: int, window: int | None, device: None) -> None:
    """Short sequences in padded blocks and long sequences one by one, with and without a shared prefix."""
    lengths = torch.tensor([30, 5, longest, 0, 9])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    of, cut = torch.tensor([-1, 0, 0, -1, -1]), torch.tensor([0, 30, 17, 0, 0])
    generator = torch.Generator().manual_seed(0)
    here = [torch.randn(int(ends[-1]), heads, 16, generator=generator) for heads in (4, 2, 2)]
    there = [tensor.to(DEVICE).requires_grad_() for tensor in here]
    for tensor in here:
        tensor.requires_grad_()
    layer = AttentionLayer(0, window)
    out = PackedAttention(ends, of, cut)(*here, layer)
    its = PackedAttention(ends.to(DEVICE), of.to(DEVICE), cut.to(DEVICE))(*there, layer)
    torch.testing.assert_close(its.cpu(), out, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    its.sum().backward()
    for tensor, other in zip(here, there, strict=True):
        assert tensor.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad.cpu(), tensor.grad, rtol=1e-3, atol=1e-4)


SMALL = {"steps": 1, "prompts": 2, "samples": 2, "max_tokens": 4, "warmup": 0, "save_every": 1}
LEARNERS: dict[str, dict[str, Any]] = {
    "whole": {"algorithm": "ppo"},
    "adapter": {"lora": {}, "precision": "bfloat16", "activation_checkpointing": True, "kl": 0.1},
}


@pytest.mark.parametrize("learner", LEARNERS)
def test_rl_runs_on_the_device(learner: str, tmp_path: Path, device: None) -> None:
    """Includes the preflight, the checks of every step, and checkpoints."""
    bundle = run_task(tmp_path / "rl", "rl", environment=DIGITS, **{**SMALL, **LEARNERS[learner]})
    (line,) = metrics(bundle)
    assert line["logprob_gap_max"] < (1e-4 if learner == "whole" else 1e-1)
    assert line["off_policy/weight_mean"] == pytest.approx(1, abs=1e-2)  # truncated by default
    assert (bundle / "artifacts/checkpoints").is_dir()


def test_distill_runs_on_the_device(tmp_path: Path, device: None) -> None:
    assert metrics(run_task(tmp_path / "distill", "distill", **SMALL))
