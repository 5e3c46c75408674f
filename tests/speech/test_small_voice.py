"""A small voice: the spectral vocoder, the fitted codec, the espeak teacher, and the recognizer."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from speech_cases import CODES, small_model

from perilune.errors import RequestError
from perilune.metrics.bootstrap import bootstrap_ratio
from perilune.speech import espeak
from perilune.speech.codec import CodecDecoder
from perilune.speech.codec_encoder import MELS, CodecEncoder, encode, log_mel
from perilune.speech.config import CodecConfig
from perilune.speech.quantizer import quantize
from perilune.speech.recognizer import Recognizer, count_word_errors
from perilune.speech.spectral import OVERLAP, SpectralVocoder
from perilune.speech.streaming import CodecState
from perilune.tasks.speech.codebooks import fit_codebooks
from perilune.tasks.speech.codec import Codec, codec_config, codec_losses
from perilune.tasks.speech.stages import CodecSpec
from perilune.tasks.speech.texts import draw_texts, kind_of, words_of

HOP = 20


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.1


def spectral_config() -> CodecConfig:
    small = small_model().config.codec.to_hf()
    small["decoder_config"] |= {"upsample_rates": [HOP], "vocoder": "spectrum"}
    return CodecConfig.from_hf(small | {"decode_upsample_rate": 2 * HOP, "output_sample_rate": 2000})


def test_overlap_add_reconstructs_the_signal() -> None:
    vocoder, window, signal = SpectralVocoder(8, HOP), OVERLAP * HOP, noise(2, 40 * HOP)
    frames = signal.unfold(1, window, HOP) * torch.hann_window(window)
    spectra = torch.fft.rfft(frames)
    heard = vocoder.overlap_add(spectra.abs().log(), spectra.angle(), CodecState.start(2))[..., 0]
    inside = slice(window - HOP, 37 * HOP)
    assert torch.allclose(heard[:, inside], signal[:, inside], atol=1e-5)


@pytest.mark.parametrize("chunks", [[9], [1, 2, 6], [8, 1]])
def test_spectral_codec_streams_bit_for_bit(chunks: list[int]) -> None:
    torch.manual_seed(0)
    codec = CodecDecoder(spectral_config())
    for book in codec.quantizer.codebooks:
        torch.nn.init.normal_(book.embedding_sum)
    codec = codec.frozen()
    codes = torch.randint(0, CODES, (2, 9, 4), generator=torch.Generator().manual_seed(1))
    state, whole = CodecState.start(2), codec(codes)
    assert whole.shape == (2, 9 * 2 * HOP) and whole.std() > 0.01
    parts = [codec(part, state) for part in codes.split(chunks, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_spectral_vocoder_config_round_trips_and_is_validated() -> None:
    config = spectral_config()
    assert CodecConfig.from_hf(config.to_hf()) == config
    for wrong in ({"vocoder": "magic"}, {"upsample_rates": [5, 4]}):
        raw = config.to_hf()
        raw["decoder_config"] |= wrong
        with pytest.raises(RequestError, match="vocoder"):
            CodecConfig.from_hf(raw)


def test_latents_are_principal_components_of_log_mel_frames() -> None:
    config = codec_config(CodecSpec(data="x", width=16, components=8))
    encoder, samples = CodecEncoder(config), noise(60 * config.frame)
    encoder.fit(samples)
    latents = encoder(samples[None])[0].double()
    frames = log_mel(samples[None], 160, 16000)[0][:-1].reshape(60, 8 * MELS).double()
    centred = frames - frames.mean(0)
    _, deviations, _ = torch.linalg.svd(centred, full_matrices=False)
    variances = deviations[:16].square()
    expected = variances / variances.mean()
    measured = latents.square().sum(0) / len(latents)
    assert torch.allclose(measured, expected, rtol=1e-2)
    covariance = latents.T @ latents / len(latents)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-2


def test_each_codebook_encodes_the_residual_of_earlier_codebooks() -> None:
    config = codec_config(CodecSpec(data="x", width=16, components=4, codebook_size=8, codebooks=3))
    decoder, latents = CodecDecoder(config).requires_grad_(False), noise(300, 8) * 10
    fit_codebooks(decoder.quantizer, latents, torch.Generator().manual_seed(0))
    codes = quantize(decoder.quantizer, latents)
    tables = [book.table() for book in decoder.quantizer.codebooks]
    left, errors = latents[:, :4], [float(latents[:, :4].square().mean())]
    for column, table in zip(codes.T, tables, strict=True):
        distances = (left[:, None] - table[None]).square().sum(-1)
        assert torch.equal(column, distances.argmin(1))
        left = left - table[column]
        errors.append(float(left.square().mean()))
    assert errors[1] < 0.7 * errors[0] and errors[3] < errors[2] < errors[1]
    rebuilt = decoder.quantizer(codes[None])[0]
    assert torch.allclose(rebuilt[:, :4], latents[:, :4] - left, atol=1e-5) and not rebuilt[:, 4:].any()


def test_codec_learns_a_tone() -> None:
    torch.manual_seed(0)
    codec = Codec(codec_config(CodecSpec(data="x", width=16, components=4, codebook_size=4)))
    frame = codec.decoder.config.frame
    pitch = torch.arange(12 * frame) / 16000 * 2 * torch.pi * 220
    tone = pitch.sin() * 0.3
    codec.fit_encoder(tone, torch.Generator().manual_seed(0))
    trained = [parameter for parameter in codec.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, 1e-2), []
    for _ in range(6):
        optimizer.zero_grad()
        parts = codec_losses(codec, tone[None, : 3 * frame])
        total = torch.stack([*parts.values()]).sum()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.9 * losses[0]
    assert encode(codec.encoder, codec.decoder, tone[: 2 * frame + 1]).shape == (3, 4)


def test_word_errors_count_edits() -> None:
    def errors(said: str, heard: str) -> int:
        return count_word_errors(said.split(), heard.split())

    assert errors("one two three", "one two three") == 0
    assert errors("one two three", "one three") == 1
    assert errors("one two", "one nine two two") == 2
    assert errors("one two three", "") == 3
    assert errors("a b c d", "b c d a") == 2


def test_bootstrap_ratio_weights_utterances_by_words() -> None:
    rate = bootstrap_ratio([0, 5, 0, 1], [1, 10, 4, 5], seed=1)
    assert rate.mean == pytest.approx(6 / 20) and 0 <= rate.low < rate.mean < rate.high <= 0.5
    assert bootstrap_ratio([2, 4], [4, 8]) == (0.5, 0.5, 0.5)
    with pytest.raises(RequestError, match="positive"):
        bootstrap_ratio([1], [0])


def test_draw_texts_splits_are_disjoint_and_seeded() -> None:
    kinds = ("digits", "numbers", "sentences")
    train, held_out = draw_texts(kinds, "train", 90, 0), draw_texts(kinds, "heldout", 30, 0)
    assert len({*train, *held_out}) == 120
    assert draw_texts(kinds, "train", 90, 0) == train != draw_texts(kinds, "train", 90, 1)
    assert [kind_of(text) for text in train[:3]] == [*kinds]
    assert {word for text in train for word in text.split()} <= set(words_of(kinds))
    with pytest.raises(RequestError, match="only"):
        draw_texts(("numbers",), "heldout", 200, 0)


@pytest.mark.parametrize("text", ["", "a; rm", "[[h@l'oU]]", "<speak>", "x\n", "é", "a" * 501])
def test_espeak_refuses_markup_and_control_characters(text: str) -> None:
    with pytest.raises(RequestError, match="cannot say"):
        espeak.synthesize_text(text, voice="en-us", speed=150, sample_rate=16000)


def test_espeak_runs_the_program_and_names_missing_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match="not installed"):
        espeak.synthesize_text("one", voice="en-us", speed=150, sample_rate=16000)
    tones(tmp_path)
    heard = espeak.synthesize_text("one two", voice="en-us", speed=150, sample_rate=16000)
    assert len(heard) == 16000 and heard.dtype == np.float32
    pitch = np.abs(np.fft.rfft(heard[:8000])).argmax() * 2  # bins of half a second
    assert pitch == 300  # the tone for "one", resampled
    with pytest.raises(RequestError, match="name of a voice"):
        espeak.synthesize_text("one", voice="../x", speed=150, sample_rate=16000)
    with pytest.raises(RequestError, match="no such voice"):
        espeak.synthesize_text("one", voice="xx", speed=150, sample_rate=16000)


PROGRAM = """#!{python} -IS
import array, math, sys, wave
arguments, words = sys.argv[1:], sys.stdin.read().split()
if arguments[arguments.index("-v") + 1] == "xx":
    sys.exit("no such voice")
samples = array.array("h")
for word in words:
    pitch = 100 * len(word)
    samples.extend(int(9000 * math.sin(2 * math.pi * pitch * i / 22050)) for i in range(11025))
with wave.open(sys.stdout.buffer, "wb") as file:
    file.setparams((1, 2, 22050, 0, "NONE", ""))
    file.writeframes(samples.tobytes())
"""


def tones(folder: Path) -> None:
    """Install a fake espeak: half a second of tone per word, higher for longer words."""
    program = folder / espeak.PROGRAM
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)


def test_recognizer_outputs_its_words_and_refuses_unknown_words() -> None:
    listener = Recognizer(["one", "two"])
    assert set(listener.hear(noise(8000).numpy()).split()) <= {"one", "two"}
    assert listener.hear(np.zeros(0, np.float32)) == listener.hear(np.zeros(0, np.float32))
    with pytest.raises(RequestError, match="qwertz"):
        Recognizer(["one", "qwertz"])
