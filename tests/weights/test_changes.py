"""Reversing the optimizer's update finds changed values without a copy of the old weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from perilune.learn.optimizer import AdamW
from perilune.weights.delta import BoundsComparison, CopyComparison, WeightReader, WeightWriter


@pytest.mark.parametrize("lr", [1e-6, 1e-4, 0.1])
def test_reversed_update_finds_every_changed_value(tmp_path: Path, lr: float) -> None:
    """A million values, a quarter of them at rounding ties, which expose the smallest error."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, 1000, generator=generator) * 0.02
    start[:250] = (start[:250].bfloat16().view(torch.int16).int() * 65536 + 32768).view(torch.float32)
    parameters = {"matrix": nn.Parameter(start), "norm": nn.Parameter(torch.ones(1000))}
    optimizer = AdamW(parameters, beta2=0.99, weight_decay=0.1, grad_clip=1e9, lr_factors={"norm": 3.0})
    kept, reversed_, writer, reader = (
        CopyComparison(),
        BoundsComparison(optimizer.bounds_before_update),
        WeightWriter(),
        WeightReader(),
    )
    weights = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in parameters.items()}
    for step in range(4):
        if step:
            for p in parameters.values():
                p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** -(step * 3)
            parameters["matrix"].grad = parameters["matrix"].grad if step < 3 else None  # type: ignore[assignment]
            optimizer.update(lr)
        rounded = {name: p.detach().bfloat16() for name, p in parameters.items()}
        for name, tensor in rounded.items():
            differ = kept(name, tensor.reshape(-1))
            if step and differ is not None:
                found = reversed_(name, tensor.reshape(-1))
                assert np.isin(differ, found).all()
                assert len(found) <= 1.01 * len(differ) + 0.001 * tensor.numel() + 250_000 * (step == 1)
        update = writer.write(tmp_path / "update", rounded, step, reversed_ if step else None)
        weights |= reader.read(update.path, weights)
        reader.commit()
        assert all(weights[name].equal(tensor) for name, tensor in rounded.items())
