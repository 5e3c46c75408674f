"""Compilation of the Triton kernel for mixtures of experts, without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from test_triton_attention import POINTER, compiled

from perilune.models import triton_experts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("architecture", "dtype", "weights", "rows"),
    [(80, "bfloat16", "bfloat16", 16), (90, "bfloat16", "bfloat16", 64), (90, "bfloat16", "int8", 16),
     (80, "float32", "float32", 16), (90, "float32", "float32", 64)],
)  # fmt: skip
def test_experts_kernel_compiles_with_asynchronous_16_byte_copies(
    architecture: int, dtype: str, weights: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {
        "x_ptr": POINTER[dtype], "values_ptr": POINTER[weights], "scales_ptr": "*fp32",
        "order_ptr": "*i64", "ends_ptr": "*i32", "out_ptr": POINTER[dtype],
    }  # fmt: skip
    constants = {
        "PER_ROW": 8, "INPUTS": 2048, "OUTPUTS": 1536, "ROWS": rows, "COLUMNS": 64,
        "DEPTH": 64 if dtype == "bfloat16" else 32, "IS_INT8": weights == "int8", "WIDENED": False,
    }  # fmt: skip
    code = compiled(triton_experts._grouped_product, architecture, pointers, constants)
    assert "cp.async.cg.shared.global" in code.asm["ptx"]
    assert ("mma" in code.asm["ptx"]) == (dtype == "bfloat16")
    assert code.metadata.shared <= 48 << 10
