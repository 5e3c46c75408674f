"""Fits a codec: an encoder, codebooks and the streaming decoder, with spectral losses.

The encoder and the codebooks are computed from the utterances (`CodecEncoder.fit`, `fit_codebooks`), and the
decoder is trained on their codes. It predicts spectra (`SpectralVocoder`). A loss on the predicted magnitudes
makes speech intelligible early. Losses on the spectra of the samples train consistent phases.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from perilune.bundle.workspace import Workspace
from perilune.files import read_json, write_json
from perilune.learn.checkpoints import copy_into
from perilune.models.checkpoints.folder import WEIGHTS, CheckpointFolder
from perilune.models.checkpoints.tensors import read_tensor_headers, read_tensors
from perilune.rollout.timing import Stopwatch
from perilune.speech.codec import CodecDecoder
from perilune.speech.codec_encoder import FLOOR, CodecEncoder, log_mel, magnitudes
from perilune.speech.config import CodecConfig
from perilune.speech.quantizer import quantize
from perilune.speech.recognizer import SAMPLE_RATE
from perilune.speech.spectral import OVERLAP, SpectralVocoder
from perilune.speech.streaming import CodecState
from perilune.tasks.speech.codebooks import fit_codebooks
from perilune.tasks.speech.fitting import Fit
from perilune.tasks.speech.stages import CodecSpec
from perilune.tasks.speech.utterances import SpokenText, read_utterances
from perilune.tasks.stage.policy import prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, write_final_checkpoint

_HOP = 160  # samples between spectra, 10 ms
_HALVINGS = (2, 2, 2)  # 100 spectra a second to 12.5 frames, as Qwen3-TTS has
_RESIDUAL = 0.1  # initial factor of residual branches; the decoder's default of 1e-6 suits long training
_WINDOWS = ((256, 64), (1024, 160))  # window and hop of the spectra that are compared
_SHIFTS = 4  # offsets of the frames in the utterances from which encoder and codebooks are computed
_FRAMES = 40_000  # most frames for the encoder and the codebooks
_MEL, _PREDICTED = 2.0, 1.0  # weights of the losses beside the spectra's 1


def codec_config(spec: CodecSpec) -> CodecConfig:
    """Return the shape of the decoder: frames of 80 ms at 16 kHz."""
    return CodecConfig(
        codebooks=spec.codebooks,
        codebook_size=spec.codebook_size,
        codebook_dim=2 * spec.components,
        latent_dim=spec.width,
        hidden_size=spec.width,
        intermediate_size=2 * spec.width,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=spec.width // 2,
        window=16,
        upsampling_ratios=_HALVINGS,
        upsample_rates=(_HOP,),
        vocoder_dim=2,  # of the convolutions, which a spectral vocoder does not have
        vocoder="spectrum",
        sample_rate=SAMPLE_RATE,
    )


class Codec(nn.Module):
    """The encoder and the decoder of a codec."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.encoder, self.decoder = CodecEncoder(config), CodecDecoder(config)
        for name, parameter in self.decoder.named_parameters():
            if name.endswith((".gamma", "_layer_scale.scale")):
                nn.init.constant_(parameter, _RESIDUAL)
        self.decoder.quantizer.requires_grad_(False)

    @property
    def vocoder(self) -> SpectralVocoder:
        """The last part of the decoder."""
        last = self.decoder.decoder[-1]
        assert isinstance(last, SpectralVocoder)
        return last

    @torch.no_grad()
    def fit_encoder(self, audio: Tensor, random: torch.Generator) -> None:
        """Compute encoder, codebooks, and the vocoder's mean spectrum from float[N] samples."""
        frame = self.decoder.config.frame
        usable = len(audio) // frame - 1
        shifted = [audio[i * frame // _SHIFTS :][: usable * frame] for i in range(_SHIFTS)]
        samples = torch.cat(shifted)[: _FRAMES * frame]
        self.encoder.fit(samples)
        fit_codebooks(self.decoder.quantizer, self.encoder(samples[None])[0], random)
        mean = _log(_target_spectra(audio[None])).mean((0, 1))
        self.vocoder.out.bias[: len(mean)] = mean


def run(workspace: Workspace, spec: CodecSpec) -> dict[str, Any]:
    """Fit the codec and return the stage's summary."""
    prepare_device(workspace)
    config, seed = codec_config(spec), workspace.job.seed
    audio = _concatenate(read_utterances(workspace.input("data"), "train"), config.frame)
    codec = Codec(config)
    fit = Fit(codec, spec.learning, spec.steps, seed)
    loop = TrainingLoop(workspace, fit, spec)
    if loop.completed_steps == 0:
        codec.fit_encoder(audio, fit.generator(spec.steps))

    def step(done: int, watch: Stopwatch) -> StepReport:
        with watch.measure("learning"):
            losses = codec_losses(codec, _crops(audio, spec, config.frame, fit.generator(done)))
            norm = fit.update(torch.stack([*losses.values()]).sum(), done)
        figures = {name: float(loss.detach()) for name, loss in losses.items()}
        return StepReport({**figures, "grad_norm": norm}, {"mel": figures["mel"]})

    loop.run(step)
    write_final_checkpoint(workspace, fit, spec.steps, lambda directory: save_codec(directory, codec))
    lines = workspace.metrics()
    return {
        "kind": "codec",
        "steps": spec.steps,
        "parameters": sum(parameter.numel() for parameter in codec.parameters()),
        "decoder_parameters": sum(parameter.numel() for parameter in codec.decoder.parameters()),
        "frames_per_second": 1 / config.frame_seconds,
        "bits_per_second": spec.codebooks * float(np.log2(spec.codebook_size)) / config.frame_seconds,
        "mel": lines[-1]["mel"],
        "used_codes": _used_codes(codec, audio),
    }


def codec_losses(codec: Codec, samples: Tensor) -> dict[str, Tensor]:
    """Return the weighted losses of the reconstruction of float[B, N] samples."""
    decoder, vocoder = codec.decoder, codec.vocoder
    with torch.no_grad():
        latents = decoder.quantizer(quantize(decoder.quantizer, codec.encoder(samples)))
    state = CodecState.start(len(samples))
    predicted, phases = vocoder.spectrum(decoder.features(latents, state))
    heard = vocoder.overlap_add(predicted, phases, state)[..., 0]
    mel = [log_mel(audio, _HOP, SAMPLE_RATE) for audio in (heard, samples)]
    return {
        "mel": _MEL * (mel[0] - mel[1]).abs().mean(),
        "spectra": torch.stack([_distance(heard, samples, *window) for window in _WINDOWS]).sum(),
        "magnitudes": _PREDICTED * (_log(predicted.exp()) - _log(_target_spectra(samples))).abs().mean(),
    }


def _distance(heard: Tensor, samples: Tensor, window: int, hop: int) -> Tensor:
    """Return the mean of log distance and spectral convergence (Yamamoto et al., arXiv 1910.11480)."""
    ours, target = magnitudes(heard, window, hop), magnitudes(samples, window, hop)
    convergence = (ours - target).norm() / target.norm().clamp(min=FLOOR)
    return ((_log(ours) - _log(target)).abs().mean() + convergence) / 2  # type: ignore[no-any-return]


def _target_spectra(samples: Tensor) -> Tensor:
    """Return the magnitudes of the samples in the windows of the spectral vocoder's steps."""
    window = OVERLAP * _HOP
    spectra = torch.stft(
        F.pad(samples, (0, window - _HOP)),
        window,
        _HOP,
        window=torch.hann_window(window),
        center=False,
        return_complex=True,
    )
    return spectra.abs().transpose(1, 2)


def _log(magnitude: Tensor) -> Tensor:
    return (magnitude + FLOOR).log()


def _concatenate(utterances: list[SpokenText], frame: int) -> Tensor:
    """Return float[N], the utterances end to end, each padded to whole frames."""
    spoken = (torch.from_numpy(utterance.samples) for utterance in utterances)
    return torch.cat([F.pad(clip, (0, -len(clip) % frame)) for clip in spoken])


def _crops(audio: Tensor, spec: CodecSpec, frame: int, random: torch.Generator) -> Tensor:
    """Return float[batch, frames * frame] from random positions, shorter if the audio is shorter."""
    length = min(spec.frames * frame, len(audio) // frame * frame)
    starts = torch.randint(len(audio) - length + 1, (spec.learning.batch,), generator=random)
    return torch.stack([audio[start : start + length] for start in starts.tolist()])


def _used_codes(codec: Codec, audio: Tensor) -> list[float]:
    """Return the perplexity of each codebook's codes, at most its size."""
    with torch.no_grad():
        codes = quantize(codec.decoder.quantizer, codec.encoder(audio[None])[0])
    shares = [torch.bincount(column).double() / len(column) for column in codes.T]
    return [float(torch.special.entr(share).sum().exp()) for share in shares]


def save_codec(folder: Path, codec: Codec) -> None:
    """Write config.json and model.safetensors, as in the folder speech_tokenizer of a speech model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in codec.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", codec.decoder.config.to_hf())


def load_codec(folder: Path) -> Codec:
    """Read what `save_codec` wrote.

    Raises:
        RequestError: when a file or a tensor is missing, malformed or of another shape.
    """
    files = CheckpointFolder(folder)
    file = files.file("config.json")
    codec = Codec(CodecConfig.from_hf(read_json(file), where=str(file)))
    loaded = dict(read_tensors([*read_tensor_headers(files).values()]))
    copy_into(codec.state_dict(), loaded, folder)
    return codec.requires_grad_(False)
