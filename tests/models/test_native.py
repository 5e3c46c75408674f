"""The C kernels: a row's bits are its own, the cache's kinds cost what they should, and building."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.models.native import attention, build, ops

pytestmark = pytest.mark.skipif(not ops.available(), reason="needs a C compiler: install gcc or clang")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 3e-6), ("bfloat16", 6e-3), ("int8", 1.2e-2)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 33), (13, 100, 256), (200, 1030, 98)])
def test_a_product_is_right_and_each_row_its_own(
    kind: ops.WeightKind, tolerance: float, rows: int, inputs: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator)
    packed = ops.pack_weight(weight, bias, kind)
    out = ops.linear(x, packed)
    exact = x.double() @ weight.double().T + bias
    assert ((out - exact).abs().max() / exact.abs().max()) < tolerance
    for some in (slice(0, 1), slice(rows // 2, rows), slice(0, rows - rows // 3)):
        assert torch.equal(ops.linear(x[some], packed), out[some])
    strided = torch.randn(rows, inputs + 7)
    strided[:, :inputs] = x
    assert torch.equal(ops.linear(strided[:, :inputs], packed), out)


@given(st.lists(st.floats(-90, 90, width=32), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_softmax_pieces_against_float64(values: list[float]) -> None:
    logits = torch.tensor([values])
    tokens = torch.tensor([len(values) - 1])
    logprob, normalizers, entropy = ops.token_logprobs(logits, tokens, 1.0)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprob.double(), exact[:, -1], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        normalizers.sum(1).double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(entropy.double(), -(exact * exact.exp()).sum(-1), rtol=1e-5, atol=2e-5)


def test_what_is_not_a_number_comes_out_as_that() -> None:
    logits = torch.zeros(3, 20)
    logits[0, 3], logits[1, 19] = torch.nan, torch.inf
    logprobs, _ = ops.draw(logits, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))[1], None
    assert not logprobs[0].isfinite()
    assert not logprobs[1].isfinite()
    assert logprobs[2].isfinite()


def test_draws_follow_the_distribution_and_never_the_impossible() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 700, generator=generator) * 2
    logits[0, ::7] = -torch.inf
    count = 100_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = ops.draw(
        logits, torch.full((count,), 1 / 0.7), uniform, torch.zeros(count, dtype=torch.int64)
    )
    exact = (logits[0].double() / 0.7).log_softmax(-1)
    share = torch.bincount(tokens, minlength=700) / count
    # Evenly spread uniform numbers give every token its share to within one draw at each end.
    assert (share - exact.exp()).abs().max() <= 2.1 / count
    assert not (tokens % 7 == 0).any()
    torch.testing.assert_close(logprobs.double(), exact[tokens], rtol=1e-5, atol=1e-5)
    greedy, its = ops.draw(logits, torch.zeros(1), torch.zeros(1, dtype=torch.float64))
    assert greedy.item() == logits.argmax()
    torch.testing.assert_close(its, logits.log_softmax(-1)[0, greedy])


def paged(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[attention.Cache, list[Tensor]]:
    """An empty cache of enough blocks."""
    blocks, heads, size = len(k) // 16 + 3, k.shape[1], k.shape[2]
    held = [torch.zeros(blocks, heads, *shape, dtype=dtype) for shape in ((size, 16), (16, size))]
    scales = [torch.zeros(blocks, heads, 16) for _ in range(2)]
    pointers = [x.data_ptr() for x in (*held, *scales)]
    return attention.Cache(*pointers, ops.KINDS[dtype], 0), [*held, *scales]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "size"), [((4, 1), 32), ((6, 2), 64), ((5, 5), 128), ((12, 2), 48)])
def test_attention_over_the_cache_is_attention_in_the_sequence(
    heads: tuple[int, int], size: int, window: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    length = 75
    q, k, v = (torch.randn(length, n, size, generator=generator) for n in (heads[0], heads[1], heads[1]))
    spans = attention.Spans(torch.tensor([0]), torch.tensor([length]), torch.tensor([-1]))
    whole, _ = attention.attend_packed(q, k, v, spans, scale=size**-0.5, window=window)
    for dtype, tolerance in ((torch.float32, 0.0), (torch.bfloat16, 2e-2), (torch.int8, 4e-2)):
        cache, held = paged(k, v, dtype)
        table = np.array([[3, 1, 5, 2, 4]], dtype=np.int32)
        parts = []
        for start, stop in ((0, 30), (30, 31), (31, 74), (74, 75)):  # in chunks, as prompts are fed
            positions = np.arange(start, stop)
            sequence = np.zeros(stop - start, dtype=np.int64)
            step = attention.Step(
                rows=stop - start,
                tables_stride=5,
                positions=positions.ctypes.data,
                sequence=sequence.ctypes.data,
                tables=table.ctypes.data,
            )
            some = slice(start, stop)
            parts.append(
                attention.attend_paged(
                    q[some], k[some], v[some], (cache, step), scale=size**-0.5, window=window
                )
            )
        assert (torch.cat(parts) - whole).abs().max() <= tolerance
        del held


def test_an_int8_cache_is_off_by_half_a_step_of_its_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(16, 2, 32, generator=generator) * 3 for _ in range(2))
    cache, (keys, values, key_scales, value_scales) = paged(k, v, torch.int8)
    positions, sequence = np.arange(16), np.zeros(16, dtype=np.int64)
    table = np.array([[1]], dtype=np.int32)
    step = attention.Step(
        16, 1, 1, 0, None, positions.ctypes.data, None, sequence.ctypes.data, table.ctypes.data, None
    )
    attention.attend_paged(torch.randn(16, 2, 32), k, v, (cache, step), scale=1.0, window=0)
    assert torch.allclose(key_scales[1].T, k.abs().amax(-1) / 127)
    read_k = (keys[1] * key_scales[1][:, None]).permute(2, 0, 1)
    read_v = (values[1] * value_scales[1][..., None]).transpose(0, 1)
    assert ((read_k - k).abs() <= k.abs().amax(-1, keepdim=True) / 127 * 0.501).all()
    assert ((read_v - v).abs() <= v.abs().amax(-1, keepdim=True) / 127 * 0.501).all()


def _product_in_child(queue: Queue) -> None:
    torch.set_num_threads(2)
    x = torch.ones(256, 64)
    queue.put(float(ops.linear(x, ops.pack_weight(torch.ones(64, 64))).sum()))


def test_threads_work_again_after_a_fork() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ops.linear(torch.ones(256, 64), ops.pack_weight(torch.ones(64, 64)))
        context = multiprocessing.get_context("fork")
        queue: Queue = context.Queue()
        child = context.Process(target=_product_in_child, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == 256 * 64 * 64
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for environment, reason in (
        ({"PERILUNE_NATIVE": "0"}, "switched off"),
        ({"CC": "/nowhere/cc"}, "could not build"),
        ({"CC": "false"}, "could not build"),
        ({"PATH": str(tmp_path)}, "no C compiler"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("CC", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            found = build.compiled.__wrapped__(build._KERNELS)
            assert found.library is None
            assert reason in found.reason


def test_the_library_is_built_once_and_again_when_it_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = build._compiler()
    assert compiler is not None
    unit = tmp_path / "seven.c"  # the kernels themselves take 20 seconds
    unit.write_text("int seven(void) { return 7; }")
    folder = tmp_path / "perilune" / "kernels"
    broken = folder / f"{build._digest(compiler, unit)}.so"
    folder.mkdir(parents=True, mode=0o700)
    broken.write_bytes(b"not a library")
    first = build.compiled.__wrapped__(unit)
    assert isinstance(first.library, ctypes.CDLL)
    assert first.library.seven() == 7
    (made,) = folder.iterdir()
    changed = made.stat().st_mtime_ns
    assert build.compiled.__wrapped__(unit).reason == str(made)
    assert made.stat().st_mtime_ns == changed


BITS = Path(__file__).with_name("kernel_bits.c")
COMPILERS = [
    name for name in ("gcc-9", "gcc-10", "gcc-11", "gcc-13", "gcc-14", "clang") if shutil.which(name)
]


ARM = "aarch64-linux-gnu-gcc"
QUICK = ("-O1", "-fexpensive-optimizations")  # fuses products and sums as -O3 does, in half the time


def bits(compiler: str, folder: Path, *flags: str) -> str:
    """A hash of the results of each kernel, as this compiler builds it."""
    program = folder / "bits"
    settings = [flag for flag in build._FLAGS if flag not in ("-fPIC", "-shared")]
    if compiler == ARM:
        settings.append("-static")
    else:
        settings += build._THIS_PROCESSOR
    command = [
        compiler,
        *settings,
        *flags,
        f"-I{build._KERNELS.parent}",
        str(BITS),
        "-o",
        str(program),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True)
    run = ["qemu-aarch64", str(program)] if compiler == ARM else [str(program)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def own_bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = build._compiler()
    assert compiler is not None
    return bits(compiler[0], tmp_path_factory.mktemp("bits"))


@pytest.mark.thorough
def test_the_width_of_a_register_changes_no_bit(own_bits: str, tmp_path: Path) -> None:
    compiler = build._compiler()
    assert compiler is not None
    assert bits(compiler[0], tmp_path, *QUICK, "-DLANES=4") == own_bits


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which("qemu-aarch64")), reason="no emulator of ARM")
def test_an_arm_processor_computes_the_same_bits(own_bits: str, tmp_path: Path) -> None:
    assert bits(ARM, tmp_path, *QUICK) == own_bits


@pytest.mark.thorough
@pytest.mark.parametrize("compiler", COMPILERS)
def test_other_compilers_build_kernels_that_agree(compiler: str, own_bits: str, tmp_path: Path) -> None:
    """Vector extensions differ between compilers; GCC before 12 has no `__builtin_shufflevector`."""
    assert bits(compiler, tmp_path) == own_bits


def test_integration_machines_have_an_old_gcc_and_clang() -> None:
    if os.environ.get("CI"):
        assert {"gcc-11", "clang"} <= set(COMPILERS)
        assert shutil.which(ARM) and shutil.which("qemu-aarch64")


SIZES = [(64, 70, 37), (96, 64, 64), (576, 96, 128), (1088, 40, 96), (640, 1000, 33), (30, 70, 20)]


@pytest.mark.parametrize(("inputs", "outputs", "rows"), SIZES)
@pytest.mark.usefixtures("threads")
def test_products_in_bfloat16_round_their_factors_alone(inputs: int, outputs: int, rows: int) -> None:
    """Sums are float32, and a row has the same bits alone, wherever the processor computes them."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator)
    packed = ops.pack_weight(weight, bias, "bfloat16")
    out = ops.linear(x, packed)
    exact = x.bfloat16().double() @ weight.bfloat16().double().t() + bias
    # A sum of 1,088 products passes values near 100, where float32 rounds by 4e-6 at a time.
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=5e-5)
    for count in (1, 2, 15, 16, 17, 31, 32):
        some = x[rows - count : rows] if count <= rows else x
        assert torch.equal(ops.linear(some, packed), out[-len(some) :])
    wide = torch.randn(rows, inputs + 16, generator=generator)  # rows apart in memory
    assert torch.equal(ops.linear(wide[:, :inputs], packed), ops.linear(wide[:, :inputs].clone(), packed))


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(70, 64, 32), (576, 96, 128), (33, 1088, 1056)])
def test_gradients_in_tiles_round_their_factors_alone(inputs: int, outputs: int, rows: int) -> None:
    """On a processor without tiles (Intel AMX) other instructions compute the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in shapes)
    of_x, of_weight = ops.gradients_of_linear(grad, x, weight)
    wide = grad.bfloat16().double()
    torch.testing.assert_close(of_x.double(), wide @ weight.bfloat16().double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(of_weight.double(), wide.t() @ x.bfloat16().double(), rtol=1e-5, atol=1e-4)
    assert ops.gradients_of_linear(grad, None, weight)[1] is None
    assert ops.gradients_of_linear(grad, x, None)[0] is None
