"""The encoder of a small codec: samples to frames of Q codes.

The encoder needs no gradients: it projects log-mel spectrograms onto their principal components, and k-means
computes the codebooks, in seconds. For comparison, a convolutional encoder that was trained with its
codebooks for 45 s on one core used 9 of 128 codes of the first codebook, and a recognizer understood no word.
"""

from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.speech.codec import CodecDecoder
from perilune.speech.config import CodecConfig
from perilune.speech.quantizer import quantize
from perilune.speech.spectral import OVERLAP

MELS = 80
FLOOR = 1e-3  # a magnitude that counts as silence, so that logarithms and ratios stay finite


def magnitudes(samples: Tensor, window: int, hop: int) -> Tensor:
    """Magnitudes float[B, N / hop + 1, window / 2 + 1] of Hann-windowed spectra of float[B, N] samples."""
    hann = torch.hann_window(window, device=samples.device)
    spectra = torch.stft(samples, window, hop, window=hann, return_complex=True)
    return spectra.abs().transpose(1, 2)


@cache
def mel_filters(window: int, sample_rate: int) -> Tensor:
    """float[window / 2 + 1, MELS], triangular filters spaced evenly in mel, 2595 log10(1 + f / 700)."""
    top = 2595 * torch.log10(torch.tensor(1 + sample_rate / 1400))
    edges = 700 * (10 ** (torch.linspace(0, float(top), MELS + 2) / 2595) - 1)
    bins = torch.linspace(0, sample_rate / 2, window // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def log_mel(samples: Tensor, hop: int, sample_rate: int) -> Tensor:
    """Log-mel spectrogram float[B, N / hop + 1, MELS] of float[B, N] samples, with windows of 4 hops."""
    spectra = magnitudes(samples, OVERLAP * hop, hop)
    return (spectra @ mel_filters(OVERLAP * hop, sample_rate) + FLOOR).log()


class CodecEncoder(nn.Module):
    """Samples float[B, T * frame] to latents float[B, T, codebook_dim].

    A latent is a linear map of the log-mel spectrogram of its frame; `fit` computes the map.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.steps = prod(config.upsampling_ratios)  # spectra of a frame
        self.map = nn.Linear(self.steps * MELS, config.codebook_dim).requires_grad_(False)

    def forward(self, samples: Tensor) -> Tensor:
        return self.map(self._patches(samples))  # type: ignore[no-any-return]

    def _patches(self, samples: Tensor) -> Tensor:
        """float[B, T, steps * MELS], the spectrogram of each frame."""
        spectrogram = log_mel(samples, self.config.frame // self.steps, self.config.sample_rate)[:, :-1]
        return spectrogram.reshape(len(samples), -1, self.steps * MELS)

    @torch.no_grad()
    def fit(self, samples: Tensor) -> None:
        """Set the map to the principal components of the frames of float[N] samples, of mean variance 1.

        Distances between latents are then proportional to distances between log-mel spectrograms.
        """
        patches = self._patches(samples[None])[0]
        mean = patches.mean(0)
        _, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean))
        components = vectors.flip(1)[:, : self.config.codebook_dim].T
        latents = (patches - mean) @ components.T
        scale = latents.square().mean().rsqrt()
        self.map.weight.copy_(components * scale)
        self.map.bias.copy_(-(components @ mean) * scale)


@torch.no_grad()
def encode(encoder: CodecEncoder, decoder: CodecDecoder, samples: Tensor) -> Tensor:
    """Return codes int64[T, Q] of float[N] samples; the last frame is padded with silence."""
    padded = F.pad(samples, (0, -len(samples) % encoder.config.frame))
    return quantize(decoder.quantizer, encoder(padded[None]))[0]
