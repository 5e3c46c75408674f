"""Compilation of the elementwise Triton kernels, without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from test_triton_attention import compiled

from perilune.models import triton_elementwise as kernels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", [80, 90])
def test_elementwise_kernels_compile_with_16_byte_loads(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = {"HEADS": 1, "SIZE": 2048, "WIDTH": 2048, "ROWS": 1}
    norm = {"x_ptr": "*fp32", "weight_ptr": "*fp32", "out_ptr": "*fp32", "scale_ptr": "*fp32"}
    forward = compiled(kernels._rms_norm, architecture, norm, {**row, "PER_HEAD": False})
    assert "ld.global.v4" in forward.asm["ptx"]
    gradients = {"grad_ptr": "*bf16", "grad_x_ptr": "*bf16", "partial_ptr": "*fp32"}
    compiled(kernels._rms_norm_backward, architecture, norm | gradients, {**row, "GROUPS": 1})
    turned = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16"}
    heads = {"HEADS": 24, "SIZE": 128, "HALF": 64, "WIDTH": 64, "AT_ONCE": 32}
    assert "ld.global.v4" in compiled(kernels._rotate, architecture, turned, heads).asm["ptx"]
    gates = dict.fromkeys(("grad_ptr", "gate_ptr", "up_ptr", "out_ptr", "of_gate_ptr", "of_up_ptr"), "*bf16")
    for kind in range(3):
        shape = {"SIZE": 6144, "KIND": kind, "TILE": 1024}
        assert "ld.global.v4" in compiled(kernels._gated, architecture, gates, shape).asm["ptx"]
        compiled(kernels._gated_backward, architecture, gates, shape)
