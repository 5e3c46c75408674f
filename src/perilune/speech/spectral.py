"""A vocoder that predicts short-time spectra, for small models: Vocos (Siuzdak, arXiv 2306.00814).

The network runs at the rate of spectra instead of samples, so it costs a fraction of a convolutional vocoder.
The inverse transform is a product with fixed sinusoids and an overlap-add, so it streams like a convolution.
"""

import torch
from torch import Tensor, nn

from perilune.models.layers import Projection
from perilune.speech.streaming import CodecState, Streamed, project

OVERLAP = 4  # spectra that contribute to a sample
_MAX_LOG_MAGNITUDE = 6.0
_POWER = 1.5  # sum of the squared Hann windows at an overlap of 4


class InverseTransform(Projection):
    """The windowed inverse transform of real and imaginary parts, on the device of `like`."""

    def __init__(self, window: int, like: nn.Linear) -> None:
        super().__init__()
        self._window, self._like = window, like
        self._basis: Tensor | None = None

    def stack_parts(self) -> tuple[Tensor, None]:
        """float[window, window + 2]."""
        device = self._like.weight.device
        if self._basis is None or self._basis.device != device:
            unit = torch.eye(self._window // 2 + 1, device="cpu")
            parts = torch.cat([torch.complex(unit, 0 * unit), torch.complex(0 * unit, unit)])
            hann = torch.hann_window(self._window, device="cpu")
            waves = torch.fft.irfft(parts, self._window) * hann / _POWER
            self._basis = waves.T.contiguous().to(device)
        return self._basis, None


class SpectralVocoder(Streamed):
    """Features float[B, T, C] to samples float[B, T * hop, 1], with windows of 4 hops.

    The spectrum of step t covers the samples of hops t to t + 3.
    """

    def __init__(self, channels: int, hop: int) -> None:
        super().__init__()
        self.hop, self.window = hop, OVERLAP * hop
        self.out = nn.Linear(channels, 2 * (self.window // 2 + 1))
        self.project = Projection(self.out)
        self.inverse = InverseTransform(self.window, self.out)

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        return self.overlap_add(*self.spectrum(x), state)

    def spectrum(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log magnitudes and phases in radians, float[B, T, window / 2 + 1] each."""
        magnitudes, phases = project(self.project, x).chunk(2, dim=2)
        return magnitudes.clamp(max=_MAX_LOG_MAGNITUDE), phases

    def overlap_add(self, magnitudes: Tensor, phases: Tensor, state: CodecState) -> Tensor:
        """Return the samples float[B, T * hop, 1] of spectra."""
        size = magnitudes.exp()
        parts = torch.cat([size * phases.cos(), size * phases.sin()], dim=2)
        batch, length, _ = parts.shape
        parts = state.extend(self.key, parts, OVERLAP - 1)
        frames = self.inverse(parts.flatten(0, 1)).view(batch, -1, OVERLAP, self.hop)
        last = OVERLAP - 1
        hops = [frames[:, last - age : last - age + length, age] for age in range(OVERLAP)]
        return torch.stack(hops).sum(0).view(batch, length * self.hop, 1)
