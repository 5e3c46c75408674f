"""Packed attention against a plain definition in float64, and bitwise equality of single queries."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perilune.models import attention, kernels
from perilune.models.attention import AttentionLayer, PackedAttention, ScoreOptions, attend, round_up_columns
from perilune.models.native import ops

pytestmark = pytest.mark.usefixtures("arithmetic")
exact = pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")


PLAIN = ScoreOptions()


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: int = 0,
    window: int | None = None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Causal attention of the last queries of one sequence, one head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            stop = prefix + row + 1
            visible = slice(0 if window is None else max(0, stop - window), stop)
            scores = k[visible, head // group] @ q[row, head] / q.shape[-1] ** 0.5
            if options.cap is not None:
                scores = options.cap * (scores / options.cap).tanh()
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head : head + 1]])
            weights = scores.softmax(0)[: stop - visible.start]
            out[row, head] = weights @ v[visible, head // group]
    return out


def random_qkv(tokens: int, heads: int, kv_heads: int, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return tuple(torch.randn(tokens, h, size) for h in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def check(
    lengths: list[int],
    prefix_of: list[int] | None,
    heads: tuple[int, int],
    window: int | None = None,
    prefix_lengths: list[int] | None = None,
    attend_all: Callable[..., Tensor] | None = None,
    options: ScoreOptions | None = None,
) -> None:
    cu = bounds(lengths)
    inputs = random_qkv(int(cu[-1]), *heads)
    ours = [x.clone().requires_grad_() for x in inputs]
    of = None if prefix_of is None else torch.tensor(prefix_of)
    cut = None if prefix_lengths is None else torch.tensor(prefix_lengths)
    packed = PackedAttention(cu, of, cut)
    if attend_all is None:
        out = packed(*ours, AttentionLayer(0, window, options))
    else:
        out = attend_all(*ours, packed._long_spans, window)
    theirs = [x.double().requires_grad_() for x in inputs]
    same = PLAIN
    if options is not None:
        same = ScoreOptions(None, options.cap)
        if options.sinks is not None:
            theirs.append(options.sinks.detach().double().requires_grad_())
            ours.append(options.sinks)
            same = ScoreOptions(theirs[3], options.cap)
    parts = []
    for index, length in enumerate(lengths):
        tokens = torch.arange(int(cu[index]), int(cu[index]) + length)
        before = prefix_of[index] if prefix_of is not None else -1
        past = torch.arange(int(cu[before]), int(cu[before + 1])) if before >= 0 else tokens[:0]
        past = past if prefix_lengths is None else past[: prefix_lengths[index]]
        keys = torch.cat([past, tokens])
        parts.append(plain(theirs[0][tokens], theirs[1][keys], theirs[2][keys], len(past), window, same))
    expected = torch.cat(parts)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_sequences_can_share_part_of_a_prefix(heads: tuple[int, int], window: int | None) -> None:
    check([20, 3, 5, 7, 1], [-1, 0, 0, -1, 3], heads, window, prefix_lengths=[0, 17, 1, 0, 6])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("has_sinks", "cap"), [(True, None), (False, 1.5), (True, 1.5)])
def test_attention_with_sinks_and_score_caps_equals_the_definition(
    has_sinks: bool, cap: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]).requires_grad_() if has_sinks else None
    cut, options = [0, 17, 1, 0, 6], ScoreOptions(sinks, cap)
    check([20, 3, 5, 7, 1], [-1, 0, 0, -1, 3], (4, 2), window, cut, options=options)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    heads=st.sampled_from([(3, 1), (4, 2), (2, 2), (8, 1)]),
)
def test_packed_sequences_do_not_attend_to_each_other(lengths: list[int], heads: tuple[int, int]) -> None:
    check(lengths, None, heads)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), heads=st.sampled_from([(3, 1), (4, 2), (2, 2)]))
def test_completions_attend_to_their_shared_prompt(data: st.DataObject, heads: tuple[int, int]) -> None:
    prompts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    completions = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    of = data.draw(
        st.lists(st.integers(0, len(prompts) - 1), min_size=len(completions), max_size=len(completions))
    )
    check([*prompts, *completions], [-1] * len(prompts) + of, heads)


@pytest.mark.parametrize("prefix_of", [None, [-1, 0, 0]])
def test_attention_in_query_blocks_equals_the_definition(
    prefix_of: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)
    check([35, 50, 7], prefix_of, (4, 2))


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("lengths", [[35, 50, 7], [20, 3, 33, 0, 1]])
def test_per_sequence_attention_for_gpus_equals_the_definition(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)
    check(lengths, None, (4, 2), window, attend_all=attention._attend_each_sequence)
    of = [-1, 0, 0, -1, 3][: len(lengths)]
    cut = [0, 17, 5, 0, 0][: len(lengths)]
    check(lengths, of, (4, 2), window, cut, attend_all=attention._attend_each_sequence)


def packed_reference(q, k, v, starts_q, starts_k, *longest, window_size):
    """Torch's `varlen_attn`: queries align with the last keys; queries and keys have equally many heads."""
    outs = []
    left, right = window_size
    assert right == 0 and longest == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    spans = zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    for first_q, last_q, first_k, last_k in spans:
        prefix = int((last_k - first_k) - (last_q - first_q))
        own = (
            x[first:last]
            for x, first, last in ((q, first_q, last_q), (k, first_k, last_k), (v, first_k, last_k))
        )
        outs.append(plain(*own, prefix, None if left < 0 else left + 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("lengths", [[35, 50, 7], [20, 3, 33, 0, 1]])
def test_flash_attention_with_varlen_kernel_equals_the_definition(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers prefixes and windows; a reference replaces the kernel, which needs a GPU."""
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)
    monkeypatch.setattr(attention, "find_varlen_attn", lambda: packed_reference)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)

    def flash(q: Tensor, k: Tensor, v: Tensor, spans: list[list[int]], window: int | None) -> Tensor:
        return attention.FlashAttention(torch.tensor(spans), q.device)(q, k, v, window)

    check(lengths, None, (4, 2), window, attend_all=flash)
    of = [-1, 0, 0, -1, 3][: len(lengths)]
    check(lengths, of, (4, 2), window, [0, 17, 5, 0, 0][: len(lengths)], attend_all=flash)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 100])
def test_flash_attention_on_a_gpu_is_close_to_float32(window: int | None) -> None:
    spans = torch.tensor([[0, 300, 0, 0], [300, 70, 0, 300], [370, 1, 0, 200], [371, 700, 0, 0]])
    wide = [x.cuda().bfloat16().float().requires_grad_() for x in random_qkv(1071, 4, 2, 64)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    grad = torch.randn(1071, 4, 64, device="cuda")
    out = attention._attend_each_sequence(*wide, spans.tolist(), window)
    expected = out, *torch.autograd.grad(out, wide, grad)
    out = attention.FlashAttention(spans, torch.device("cuda"))(*narrow, window)
    found = out, *torch.autograd.grad(out, narrow, grad.bfloat16())
    for tensor, of in zip(found, expected, strict=True):
        assert tensor.dtype == torch.bfloat16
        assert (tensor.float() - of).norm() < 0.01 * of.norm()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor created."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return out


@pytest.mark.parametrize("window", [None, 300])
def test_attention_over_long_sequence_needs_no_quadratic_memory(window: int | None) -> None:
    length = 4000
    q, k, v = (x.requires_grad_() for x in random_qkv(length, 4, 2))
    with Largest() as largest:
        attention._attend_each_sequence(q, k, v, [(0, length, 0, 0)], window).sum().backward()
    assert largest.elements <= max(4 * length * 16, 4 * 512 * (512 + 300))
    assert largest.elements < length**2 / 10


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    completions=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    window=st.integers(1, 40),
)
def test_sliding_window_hides_earlier_tokens(prompts: list[int], completions: list[int], window: int) -> None:
    of = [index % len(prompts) for index in range(len(completions))]
    check([*prompts, *completions], [-1] * len(prompts) + of, (4, 2), window)


def test_windowed_query_blocks_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 64)
    check([400, 20, 300], [-1, 0, 0], (2, 1), 50)


def test_attention_over_more_keys_than_one_block_equals_the_definition() -> None:
    check([450], None, (2, 1))


@pytest.mark.parametrize("window", [None, 25])
def test_fused_kernel_of_torch_equals_the_definition(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs use this kernel."""
    monkeypatch.setattr(attention, "is_native", lambda *_: False)
    monkeypatch.setattr(attention, "attend", lambda *tensors: attention.attend_fused(*tensors[:4]))
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 16)
    check([35, 50, 7, 20, 1], [-1, -1, 0, 1, -1], (4, 2), window)


@exact
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", [(3, 1), (8, 2), (4, 4)])
@pytest.mark.parametrize(("size", "window"), [(16, None), (32, None), (64, None), (128, None), (32, 90)])
def test_decoded_query_is_bitwise_equal_to_packed_attention(
    heads: tuple[int, int], size: int, window: int | None, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lengths = [1, 3, 17, 64, 100, 191, 230, 600]
        cu = bounds(lengths)
        q, k, v = random_qkv(int(cu[-1]), *heads, size)
        with mock.patch.object(ops, "is_available", lambda: False):  # test_native.py tests the C kernels
            packed = PackedAttention(cu)(q, k, v, AttentionLayer(0, window))
        columns = round_up_columns(max(lengths)) + 64
        # The layout of a cache: a key is a column; masked positions contain data of other sequences.
        keys = torch.randn(len(lengths), heads[1], size, columns)
        values = torch.randn(len(lengths), heads[1], columns, size)
        for row, length in enumerate(lengths):
            tokens = slice(int(cu[row]), int(cu[row]) + length)
            keys[row, ..., :length] = k[tokens].permute(1, 2, 0)
            values[row, :, :length] = v[tokens].transpose(0, 1)
        for seen in (columns, round_up_columns(max(lengths))):
            behind = torch.tensor(lengths)[:, None] - torch.arange(seen)
            unseen = (behind <= 0) | (behind > (window or seen))
            mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
            mask = mask.repeat_interleave(heads[1], dim=0)[:, None]
            of_k, of_v = keys[..., :seen].transpose(-1, -2).flatten(0, 1), values[:, :, :seen].flatten(0, 1)
            grouped = q[cu[1:] - 1].reshape(len(of_k), -1, size)
            assert torch.equal(
                attend(grouped, of_k, of_v, mask).reshape(-1, heads[0], size), packed[cu[1:] - 1]
            )
    finally:
        torch.set_num_threads(before)


@exact
def test_shared_prefix_attention_is_bitwise_equal_to_whole_sequence() -> None:
    q, k, v = random_qkv(70, 4, 2, 32)
    whole = PackedAttention(bounds([70]))(q, k, v, AttentionLayer(0))
    again = torch.cat([torch.arange(30), torch.arange(30, 70), torch.arange(30, 70)])
    shared = PackedAttention(bounds([30, 40, 40]), torch.tensor([-1, 0, 0]))
    out = shared(q[again], k[again], v[again], AttentionLayer(0))
    assert torch.equal(out[:70], whole)
    assert torch.equal(out[70:], whole[30:])
