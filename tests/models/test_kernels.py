"""Each kernel against its definition in float64, forward and backward, and independence of rows."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.models import kernels, products

Function = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("arithmetic")


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def angles() -> tuple[Tensor, Tensor]:
    angle = torch.randn(7, 1, 16)
    return angle.cos(), angle.sin()


CASES: dict[str, tuple[Function, Function, Callable[[], list[Tensor]]]] = {
    "linear": (products.linear, F.linear, lambda: [torch.randn(7, 24), torch.randn(40, 24)]),
    "linear, wide to narrow": (products.linear, F.linear, lambda: [torch.randn(7, 40), torch.randn(24, 40)]),
    "linear, one row": (products.linear, F.linear, lambda: [torch.randn(1, 24), torch.randn(40, 24)]),
    "linear with bias": (
        products.linear,
        F.linear,
        lambda: [torch.randn(7, 24), torch.randn(40, 24), torch.randn(40)],
    ),
    "rms_norm": (
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        plain_rms_norm,
        lambda: [torch.randn(7, 24), torch.randn(24)],
    ),
    "rms_norm per head": (
        lambda x, w: kernels.rms_norm(x, w, 1e-6),
        plain_rms_norm,
        lambda: [torch.randn(7, 3, 32), torch.randn(3, 32)],
    ),
    "rotate": (
        lambda x: kernels.rotate(x, *kernels.full_rotary_tables(*ANGLES)),
        lambda x: plain_rotate(x, *(a.to(x.dtype) for a in ANGLES)),
        lambda: [torch.randn(7, 3, 32)],
    ),
    "swiglu": (
        kernels.swiglu,
        lambda g, u: F.silu(g) * u,
        lambda: [torch.randn(7, 24), torch.randn(7, 24)],
    ),
    "geglu": (
        kernels.geglu,
        lambda g, u: F.gelu(g, approximate="tanh") * u,
        lambda: [torch.randn(7, 24), torch.randn(7, 24)],
    ),
}
ANGLES = angles()


@pytest.mark.parametrize("case", CASES)
def test_kernel_values_and_gradients_equal_the_definition(case: str) -> None:
    torch.manual_seed(0)
    kernel, definition, make = CASES[case]
    inputs = [x.requires_grad_() for x in make()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = kernel(*inputs), definition(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for got, wanted in zip(inputs, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_training_and_inference_are_bitwise_equal(case: str) -> None:
    kernel, _, make = CASES[case]
    inputs = make()
    with torch.no_grad():
        without = kernel(*inputs)
    assert torch.equal(kernel(*[x.requires_grad_() for x in inputs]), without)


def test_linear_computes_only_required_gradients() -> None:
    x, weight = torch.randn(5, 8), torch.randn(6, 8, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    y, frozen = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8)
    products.linear(y, frozen).sum().backward()
    torch.testing.assert_close(y.grad, frozen.sum(0).expand(5, -1))


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(384, 512), (512, 384)])
def test_gradients_of_large_products_equal_float64_reference(
    inner: int, outer: int, mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor decides which library computes the gradients."""
    monkeypatch.setattr(products, "_has_intel_mkl", lambda: mkl)
    torch.manual_seed(0)
    x, weight = torch.randn(400, inner, requires_grad=True), torch.randn(outer, inner, requires_grad=True)
    assert products.is_mkl_faster(x, weight) == mkl
    assert not products.is_mkl_faster(x[:100], weight)
    grad = torch.randn(400, outer)
    products.linear(x, weight).backward(grad)
    wide = grad.double()
    torch.testing.assert_close(x.grad.double(), wide @ weight.detach().double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), wide.t() @ x.detach().double(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inner", "outer"), [(96, 288), (256, 96), (96, 98), (768, 1280), (2304, 768)])
def test_product_rows_do_not_depend_on_other_rows(inner: int, outer: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        x, weight = torch.randn(4096, inner), torch.randn(outer, inner)
        packed = products.pack_weight(weight)[0]
        whole = products.linear(x, weight)
        for rows in (1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 257, 1024):
            for start in (0, 1000):
                some = x[start : start + rows]
                assert torch.equal(products.linear(some, weight), whole[start : start + rows])
                assert torch.equal(products.linear(some, packed), whole[start : start + rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not kernels.is_exact(torch.zeros(1)), reason="needs a torch built with oneDNN")
@pytest.mark.parametrize("width", [256, 112, 90])
def test_rows_of_elementwise_kernels_do_not_depend_on_other_rows(width: int) -> None:
    torch.manual_seed(0)
    x, weight, up = torch.randn(300, 5, 32), torch.randn(5, 32), torch.randn(300, width)
    angle = torch.randn(300, 1, 16)
    whole = [
        kernels.rms_norm(x, weight, 1e-6),
        kernels.rotate(x, *kernels.full_rotary_tables(angle.cos(), angle.sin())),
        kernels.swiglu(up, up),
        kernels.geglu(up, up),
    ]
    for rows in (1, 2, 3, 17, 33, 55, 100):
        part = [
            kernels.rms_norm(x[:rows], weight, 1e-6),
            kernels.rotate(x[:rows], *kernels.full_rotary_tables(angle[:rows].cos(), angle[:rows].sin())),
            kernels.swiglu(up[:rows], up[:rows]),
            kernels.geglu(up[:rows], up[:rows]),
        ]
        assert all(torch.equal(a[:rows], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_torch_kernels(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    assert torch.equal(products.linear(x, *products.pack_weight(weight)), F.linear(x, weight))
    norm = kernels.rms_norm(x, weight[0], 1e-6)
    torch.testing.assert_close(norm, F.rms_norm(x, (8,), weight[0], 1e-6))
