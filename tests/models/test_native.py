"""The C kernels: accuracy, independence of rows, cache dtypes, and the build."""

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

pytestmark = pytest.mark.skipif(not ops.is_available(), reason="needs a C compiler: install gcc or clang")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 3e-6), ("bfloat16", 6e-3), ("int8", 1.2e-2)])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 96, 33), (13, 100, 256), (200, 1030, 98)])
def test_products_are_accurate_and_independent_of_other_rows(
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
    assert torch.equal(ops.linear(x[:1].expand(5, -1), packed), out[:1].expand(5, -1))


def test_has_bfloat16_agrees_with_the_flags_of_the_processor() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    assert ops.has_bfloat16() == ("avx512_bf16" in flags or {"amx_tile", "amx_bf16"} <= flags)


@given(st.lists(st.floats(-90, 90, width=32), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_token_logprobs_agree_with_float64(values: list[float]) -> None:
    logits = torch.tensor([values])
    tokens = torch.tensor([len(values) - 1])
    logprob, normalizers, entropy = ops.token_logprobs(logits, tokens, 1.0)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprob.double(), exact[:, -1], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        normalizers.sum(1).double(), logits.double().logsumexp(-1), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(entropy.double(), -(exact * exact.exp()).sum(-1), rtol=1e-5, atol=2e-5)


def test_draw_returns_non_finite_logprobs_for_non_finite_logits() -> None:
    logits = torch.zeros(3, 20)
    logits[0, 3], logits[1, 19] = torch.nan, torch.inf
    logprobs, _ = ops.draw(logits, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))[1], None
    assert not logprobs[0].isfinite()
    assert not logprobs[1].isfinite()
    assert logprobs[2].isfinite()


def test_draw_follows_the_distribution_and_skips_zero_probability() -> None:
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
    """An empty cache with enough blocks for `k`."""
    blocks, heads, size = len(k) // 16 + 3, k.shape[1], k.shape[2]
    memory = [torch.zeros(blocks, heads, *shape, dtype=dtype) for shape in ((size, 16), (16, size))]
    scales = [torch.zeros(blocks, heads, 16) for _ in range(2)]
    pointers = [x.data_ptr() for x in (*memory, *scales)]
    return attention.Cache(*pointers, ops.KINDS[dtype], 0), [*memory, *scales]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("heads", "size"), [((4, 1), 32), ((6, 2), 64), ((5, 5), 128), ((12, 2), 48)])
def test_paged_attention_equals_packed_attention(heads: tuple[int, int], size: int, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    length = 75
    q, k, v = (torch.randn(length, n, size, generator=generator) for n in (heads[0], heads[1], heads[1]))
    spans = attention.Spans(torch.tensor([0]), torch.tensor([length]), torch.tensor([-1]))
    whole, _ = attention.attend_packed(q, k, v, spans, scale=size**-0.5, window=window)
    for dtype, tolerance in ((torch.float32, 0.0), (torch.bfloat16, 2e-2), (torch.int8, 4e-2)):
        cache, memory = paged(k, v, dtype)
        table = np.array([[3, 1, 5, 2, 4]], dtype=np.int32)
        parts = []
        for start, stop in ((0, 30), (30, 31), (31, 74), (74, 75)):  # in chunks, as in chunked prefill
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
        del memory


def test_int8_cache_rounding_error_is_at_most_half_a_step() -> None:
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


def test_kernel_threads_work_after_a_fork() -> None:
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


def test_missing_kernels_report_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
            loaded = build.load_library.__wrapped__(build._KERNELS)
            assert loaded.library is None
            assert reason in loaded.reason


def test_kernel_library_is_built_once_and_rebuilt_when_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = build._compiler()
    assert compiler is not None
    unit = tmp_path / "seven.c"  # the kernels take 20 seconds to build
    unit.write_text("int seven(void) { return 7; }")
    folder = tmp_path / "perilune" / "kernels"
    broken = folder / f"{build._digest(compiler, unit)}.so"
    folder.mkdir(parents=True, mode=0o700)
    broken.write_bytes(b"not a library")
    first = build.load_library.__wrapped__(unit)
    assert isinstance(first.library, ctypes.CDLL)
    assert first.library.seven() == 7
    (made,) = folder.iterdir()
    changed = made.stat().st_mtime_ns
    assert build.load_library.__wrapped__(unit).reason == str(made)
    assert made.stat().st_mtime_ns == changed


BITS = Path(__file__).with_name("kernel_bits.c")
COMPILERS = [
    name for name in ("gcc-9", "gcc-10", "gcc-11", "gcc-13", "gcc-14", "clang") if shutil.which(name)
]


ARM = "aarch64-linux-gnu-gcc"
QUICK = ("-O1", "-fexpensive-optimizations")  # contracts multiply-adds like -O3, in half the build time


def bits(compiler: str, folder: Path, *flags: str) -> str:
    """A hash of the results of each kernel built with this compiler."""
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
def test_register_width_does_not_change_results(own_bits: str, tmp_path: Path) -> None:
    compiler = build._compiler()
    assert compiler is not None
    assert bits(compiler[0], tmp_path, *QUICK, "-DLANES=4") == own_bits


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which("qemu-aarch64")), reason="no emulator of ARM")
def test_arm_results_are_bitwise_equal(own_bits: str, tmp_path: Path) -> None:
    assert bits(ARM, tmp_path, *QUICK) == own_bits


@pytest.mark.thorough
@pytest.mark.parametrize("compiler", COMPILERS)
def test_other_compilers_give_bitwise_equal_results(compiler: str, own_bits: str, tmp_path: Path) -> None:
    """Vector extensions differ between compilers; GCC before 12 has no `__builtin_shufflevector`."""
    assert bits(compiler, tmp_path) == own_bits


def test_ci_machines_have_old_gcc_clang_and_arm_emulator() -> None:
    if os.environ.get("CI"):
        assert {"gcc-11", "clang"} <= set(COMPILERS)
        assert shutil.which(ARM) and shutil.which("qemu-aarch64")


SIZES = [(64, 70, 37), (96, 64, 64), (576, 96, 128), (1088, 40, 96), (640, 1000, 33), (30, 70, 20)]


@pytest.mark.parametrize(("inputs", "outputs", "rows"), SIZES)
@pytest.mark.usefixtures("threads")
def test_bfloat16_products_round_only_their_factors(inputs: int, outputs: int, rows: int) -> None:
    """Sums are float32, and rows are independent, on processors with and without matrix units."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator)
    packed = ops.pack_weight(weight, bias, "bfloat16")
    out = ops.linear(x, packed)
    exact = x.bfloat16().double() @ weight.bfloat16().double().t() + bias
    # Partial sums of 1,088 products come near 100, where one float32 rounding is 4e-6.
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=5e-5)
    for count in (1, 2, 15, 16, 17, 31, 32):
        some = x[rows - count : rows] if count <= rows else x
        assert torch.equal(ops.linear(some, packed), out[-len(some) :])
    wide = torch.randn(rows, inputs + 16, generator=generator)  # strided rows
    assert torch.equal(ops.linear(wide[:, :inputs], packed), ops.linear(wide[:, :inputs].clone(), packed))


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(70, 64, 32), (576, 96, 128), (33, 1088, 1056)])
def test_bfloat16_gradients_round_only_their_factors(inputs: int, outputs: int, rows: int) -> None:
    """Processors with Intel AMX compute in tiles; others use different instructions with equal results."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in shapes)
    of_x, of_weight = ops.gradients_of_linear(grad, x, weight)
    wide = grad.bfloat16().double()
    torch.testing.assert_close(of_x.double(), wide @ weight.bfloat16().double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(of_weight.double(), wide.t() @ x.bfloat16().double(), rtol=1e-5, atol=1e-4)
    assert ops.gradients_of_linear(grad, None, weight)[1] is None
    assert ops.gradients_of_linear(grad, x, None)[0] is None
