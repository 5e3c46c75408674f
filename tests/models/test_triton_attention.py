"""Triton kernels without a GPU: results of all kernels in the interpreter, compilation of attention."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from perilune.models import triton_attention
from perilune.models.triton_attention import PART, tile

pytestmark = pytest.mark.slow

CASES = [f"triton_{kernels}_cases.py" for kernels in ("attention", "elementwise", "experts")]
ROW_STRIDES = {"q_stride", "x_stride", "gate_stride", "up_stride", "angle_stride"}
POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "int8": "*i8"}


def run_cases(**environment: str) -> None:
    """Run the files of cases; TRITON_INTERPRET=1 selects the interpreter."""
    cases = [str(Path(__file__).parent / file) for file in CASES]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases],
        env=inherited | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr


def test_triton_kernels_are_correct_in_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_kernels_are_correct_on_a_gpu() -> None:
    run_cases(TRITON_INTERPRET="0")


def compiled(kernel: Any, architecture: int, pointers: dict[str, str], constants: dict[str, Any]) -> Any:
    """A kernel compiled for an NVIDIA GPU; arguments other than pointers are 32-bit."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name == "scale" else "i32")
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if (name in pointers and name not in {"tables_ptr", "positions_ptr"}) or name in ROW_STRIDES
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    stages = 2 if constants.get("IS_INT8") else 3
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "num_stages": stages})


@pytest.mark.parametrize(
    ("architecture", "dtype", "cache", "size", "window"),
    [(80, "bfloat16", "bfloat16", 128, 0), (90, "bfloat16", "bfloat16", 128, 4096),
     (90, "bfloat16", "int8", 256, 512), (80, "float32", "float32", 64, 0),
     (90, "float32", "bfloat16", 128, 0)],
)  # fmt: skip
def test_attention_kernel_compiles_with_16_byte_loads(
    architecture: int, dtype: str, cache: str, size: int, window: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {
        "q_ptr": POINTER[dtype], "keys_ptr": POINTER[cache], "values_ptr": POINTER[cache],
        "key_scales_ptr": "*fp32", "value_scales_ptr": "*fp32", "tables_ptr": "*i32",
        "positions_ptr": "*i32", "partial_ptr": "*fp32", "totals_ptr": "*fp32",
    }  # fmt: skip
    narrow = "bfloat16" in {dtype, cache}
    constants = {
        "HEADS": 16, "KV_HEADS": 8, "SIZE": size, "WIDTH": size, "ROWS": 16, "PART": PART,
        "TILE": tile(size, 2 if narrow else 4), "BLOCK": 16, "WINDOW": window,
        "IS_INT8": cache == "int8", "ROUNDED": cache == "bfloat16", "WIDENED": False,
    }  # fmt: skip
    code = compiled(triton_attention._attend_to_part, architecture, pointers, constants)
    instructions = code.asm["ptx"]
    assert "ld.global.v4" in instructions if cache == "int8" else "cp.async.cg.shared.global" in instructions
    assert "ld.global.b16" not in instructions  # a load of a single element
    assert ("mma.sync" in instructions) == narrow
    assert code.metadata.shared <= 48 << 10  # the default limit of every GPU


def test_store_and_merge_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kept = {"k_ptr": "*bf16", "v_ptr": "*bf16", "keys_ptr": "*i8", "values_ptr": "*i8"}
    scales = {"key_scales_ptr": "*fp32", "value_scales_ptr": "*fp32"}
    where = {"tables_ptr": "*i32", "positions_ptr": "*i32"}
    constants = {"HEADS": 8, "SIZE": 128, "WIDTH": 128, "BLOCK": 16, "IS_INT8": True}
    compiled(triton_attention._store, 90, kept | scales | where, constants)
    joined = {"partial_ptr": "*fp32", "totals_ptr": "*fp32", "positions_ptr": "*i32", "out_ptr": "*bf16"}
    shape = {"HEADS": 16, "SIZE": 128, "WIDTH": 128, "PART": PART, "WINDOW": 0, "JOINED": 16}
    compiled(triton_attention._merge, 90, joined, shape)
