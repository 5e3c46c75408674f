"""The elementwise Triton kernels: in Triton's interpreter if TRITON_INTERPRET=1, otherwise on a GPU.

`test_triton_attention.py` runs this file in a separate process, because Triton reads the variable on import.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton_samples import DEVICE

from perilune.models import kernels, triton_elementwise
from perilune.models.native.ops import Activation

triton_elementwise._PROGRAMS = 12  # each program sums the gradient of several tiles, but not of all
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
dtypes = pytest.mark.parametrize("dtype", LIMITS)


def drawn(*shape: int, dtype: torch.dtype, room: int = 0) -> Tensor:
    """Random numbers, with a gap of `room` elements in memory between tokens."""
    generator = torch.Generator().manual_seed(sum(shape))
    flat = torch.randn(shape[0], torch.Size(shape[1:]).numel() + room, generator=generator)
    own = flat.to(DEVICE, dtype)[:, : flat.shape[1] - room]
    return own.unflatten(1, shape[1:]) if len(shape) > 2 else own


def check(call: Any, reference: Any, inputs: list[Tensor]) -> None:
    """Compare the result and all gradients of `call` in Triton with `reference` in float64."""
    ours = [tensor.detach().requires_grad_() for tensor in inputs]
    theirs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with mock.patch.object(kernels, "uses_triton", lambda _: True):
        out = call(*ours)
        expected = reference(*theirs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        gradients = torch.autograd.grad(out, ours, grad)
        with torch.no_grad():
            assert torch.equal(call(*inputs), out)
            assert torch.equal(call(inputs[0][-1:], *alone(inputs[1:], len(inputs[0]))), out[-1:])
    assert out.dtype == inputs[0].dtype
    for tensor, of, like in zip(
        (out, *gradients),
        (expected, *torch.autograd.grad(expected, theirs, grad.double())),
        (inputs[0], *inputs),
        strict=True,
    ):
        assert tensor.dtype == like.dtype and tensor.shape == of.shape
        assert (tensor.double() - of).norm() <= LIMITS[inputs[0].dtype] * of.norm()


def alone(inputs: list[Tensor], rows: int) -> list[Tensor]:
    """The last row of each input that has `rows` rows; other inputs unchanged."""
    return [tensor[-1:] if len(tensor) == rows else tensor for tensor in inputs]


@dtypes
@pytest.mark.parametrize(
    ("shape", "of_weight"),
    [((37, 96), (96,)), ((3, 3000), (3000,)), ((20, 6, 128), (6, 128)), ((9, 3, 80), (80,)),
     ((1, 16), (16,))],
)  # fmt: skip
def test_rms_norm_equals_the_definition(
    shape: tuple[int, ...], of_weight: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = drawn(*shape, dtype=dtype, room=16 if len(shape) > 2 else 0)
    weight = 1 + drawn(1, *of_weight, dtype=torch.float32)[0] / 4

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.rms_norm(x, weight, 1e-5)

    check(norm, reference, [x, weight])


@dtypes
@pytest.mark.parametrize("shape", [(3, 24, 128), (2, 5, 96), (1, 1, 16)])
def test_rotate_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    angles = drawn(shape[0], shape[-1] // 2, dtype=torch.float32)[:, None]
    cos, sin = kernels.full_rotary_tables(angles.cos(), angles.sin())

    def reference(x: Tensor) -> Tensor:
        return x * cos.double() + x.roll(shape[-1] // 2, -1) * sin.double()

    x = drawn(*shape, dtype=dtype, room=32)
    ours = x.detach().requires_grad_()
    with mock.patch.object(kernels, "uses_triton", lambda _: True):
        out = kernels.rotate(ours, cos, sin)
        (gradient,) = torch.autograd.grad(out, ours, out.detach())
    assert out.dtype == dtype
    assert (out.double() - reference(x.double())).norm() <= LIMITS[dtype] * x.double().norm()
    assert (gradient.double() - x.double()).norm() <= 2 * LIMITS[dtype] * x.double().norm()


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped"])
@pytest.mark.parametrize("shape", [(4, 96), (2, 3000), (1, 16)])
def test_gated_activations_equal_the_definition(
    shape: tuple[int, int], activation: Activation, dtype: torch.dtype
) -> None:
    both = 6 * drawn(shape[0], 2 * shape[1], dtype=torch.float32).to(dtype)

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        if activation == "silu":
            return gate * gate.sigmoid() * up
        if activation == "gelu_pytorch_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * (1.702 * gate).sigmoid() * (up + 1)

    def own(gate: Tensor, up: Tensor) -> Tensor:
        return kernels._gated(gate, up, activation)

    check(own, reference, list(both.chunk(2, dim=1)))


@pytest.mark.parametrize("place", [0, 1])
def test_gated_activations_propagate_nan(place: int) -> None:
    inputs = [torch.ones(1, 16, device=DEVICE) for _ in range(2)]
    inputs[place][0, 3] = torch.nan
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with mock.patch.object(kernels, "uses_triton", lambda _: True):
        out = kernels._gated(*inputs, "clamped")
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.isnan().nonzero().tolist() == [[0, 3]]
    assert any(tensor[0, 3].isnan() for tensor in gradients)
