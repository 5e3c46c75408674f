"""Causal convolutions that decode a stream in chunks of any length, and the state between two chunks.

In float32 on a CPU, decoding in chunks gives the same bits as decoding at once, because every product is a
`linear` over rows whose bits do not depend on the number of rows.

B streams, T frames or samples, C channels, K taps. Tensors are [B, T, C].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.models.kernels import is_tracing
from perilune.models.layers import Projection


class CodecState:
    """The decoder's state for B streams.

    Attributes:
        tails: by module, the last inputs float[B, P, C] that it needs before new inputs; absent at the start.
        frames: int64[B], number of frames decoded so far.
    """

    def __init__(self, frames: Tensor, tails: dict[str, Tensor] | None = None) -> None:
        self.frames, self.tails = frames, tails or {}

    @classmethod
    def start(cls, streams: int, device: torch.device | str = "cpu") -> CodecState:
        """Return the state before the first frame."""
        return cls(torch.zeros(streams, dtype=torch.long, device=device))

    @classmethod
    def join(cls, states: Sequence[CodecState]) -> CodecState:
        """Return the joint state of the streams of `states`. Either all of them have started, or none."""
        frames = torch.cat([state.frames for state in states])
        return cls(frames, {key: torch.cat([item.tails[key] for item in states]) for key in states[0].tails})

    def split(self) -> list[CodecState]:
        """Return the state of each stream."""
        return [
            CodecState(self.frames[i : i + 1], {key: tail[i : i + 1] for key, tail in self.tails.items()})
            for i in range(len(self.frames))
        ]

    def extend(self, key: str, x: Tensor, length: int) -> Tensor:
        """Return `x` after the last `length` inputs of the module `key`: float[B, length + T, C]."""
        before = self.tails.get(key)
        if before is None:
            before = x.new_zeros(x.shape[0], length, x.shape[2])
        inputs = torch.cat([before, x], dim=1)
        self.tails[key] = inputs[:, x.shape[1] :].detach().clone()
        return inputs


class Streamed(nn.Module):
    """A module with a state. `key` is the module's name in the decoder."""

    key = ""


class Taps(Projection):
    """A convolution as one matrix product over the concatenated taps of each output."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        self._conv = conv

    def stack_parts(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight float[O, K I]; of a transposed convolution with stride S, float[S O, K / S I]."""
        weight, bias = self._conv.weight, self._conv.bias
        if isinstance(self._conv, nn.Conv1d):
            return weight.transpose(1, 2).flatten(1), bias
        stride = self._conv.stride[0]
        taps = weight.permute(2, 1, 0).reshape(-1, stride, weight.shape[1], weight.shape[0]).flip(0)
        # [K / S, S, O, I], oldest tap first.
        bias = None if bias is None else bias.repeat(stride)
        return taps.permute(1, 2, 0, 3).flatten(2).flatten(0, 1), bias


def project(projection: Projection, x: Tensor) -> Tensor:
    """float[B, T, O], the projection of each row of float[B, T, I]."""
    return projection(x.flatten(0, 1)).view(*x.shape[:2], -1)


class CausalConv(Streamed):
    """A convolution over the current and earlier inputs."""

    def __init__(self, inputs: int, outputs: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation)
        self.taps = Taps(self.conv)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        kernel, dilation = self.conv.kernel_size[0], self.conv.dilation[0]
        if kernel > 1:
            x = state.extend(self.key, x, (kernel - 1) * dilation)
        if is_tracing():  # the kernels of an exported graph need not be exact
            return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        if kernel > 1:
            x = x.unfold(1, (kernel - 1) * dilation + 1, 1)[..., ::dilation].transpose(2, 3).flatten(2)
        return project(self.taps, x)


class DepthwiseConv(Streamed):
    """A depthwise convolution over the current and earlier inputs."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel, groups=channels)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        kernel, length = self.conv.kernel_size[0], x.shape[1]
        x = state.extend(self.key, x, kernel - 1)
        assert self.conv.bias is not None
        out = self.conv.bias.expand(x.shape[0], length, -1)
        for tap in range(kernel):
            out = out + x[:, tap : tap + length] * self.conv.weight[:, 0, tap]
        return out


class CausalUpsample(Streamed):
    """A transposed convolution whose outputs depend on the current and earlier inputs: T to T * stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.taps = Taps(self.conv)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        batch, length, _ = x.shape
        more = kernel // stride - 1
        if more:
            x = state.extend(self.key, x, more)
        rows = torch.cat([x[:, tap : tap + length] for tap in range(more + 1)], dim=2) if more else x
        return self.taps(rows.flatten(0, 1)).view(batch, length * stride, -1)
