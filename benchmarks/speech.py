"""Measure streaming speech: first audio, real-time factor and underruns at 1, 2, 4 and 8 streams.

    python benchmarks/speech.py            a model with random weights, of the size below
    python benchmarks/speech.py FOLDER     a speech model of yours
    python benchmarks/speech.py --backend openvino

All streams of a round start together, which is the worst case for the first audio. The real-time factor is
the time from the request to the last sample, divided by the duration of the speech. An underrun is a moment
at which a listener, who starts with the first samples, has to wait for the next ones. The first round warms
up and is not counted.

The benchmark measures the pipeline alone, in CPU time, which excludes other programs, and behind
`perilune serve`, as a client sees it, in elapsed time, which depends on the load of the machine. Both read
the whole text before they speak, or one token of it with each frame. Writes results/speech.json.

With `--backend openvino`, OpenVINO and Perilune's kernels take turns on the pipeline alone, and both read the
whole text first. Writes results/speech_openvino.json.
"""

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from perilune.bundle.machine import describe_machine
from perilune.engine.openvino_runner import OpenVino
from perilune.metrics.across_seeds import t_interval
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech.config import CodecConfig, ControlTokens, SpeechConfig
from perilune.speech.folder import load_speech_model, new_speech_model, save_speech_model
from perilune.speech.prompt import Utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.stream import SpeechTimes
from perilune.speech.synthesis import Speaker

STREAMS = (1, 2, 4, 8)
FRAMES = 100  # of each utterance of the random model, 8 seconds
TEXT = "seven three nine one zero four"
RESULTS = Path(__file__).parent / "results"


def random_config(tokenizer: Tokenizer) -> SpeechConfig:
    """A model with 12.5 frames of 4 codes per second, at 16 kHz."""
    codes, words = 256, tokenizer.vocab_size
    codec = CodecConfig(
        codebooks=4,
        codebook_size=codes,
        codebook_dim=64,
        latent_dim=64,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        window=36,
        upsampling_ratios=(2, 2),
        upsample_rates=(8, 8, 5),
        vocoder_dim=32,
        sample_rate=16000,
    )
    talker = DecoderConfig(
        architecture="qwen3",
        vocab_size=codes + 16,
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
    )
    return SpeechConfig(
        talker=talker,
        predictor=talker.replace(vocab_size=codes, hidden_size=128, intermediate_size=256, num_layers=2),
        codec=codec,
        text_vocab_size=words + 5,
        text_hidden_size=128,
        marks=ControlTokens.after(codes, words),
    )


def save_random_model(folder: Path) -> None:
    """Save a model that speaks until `max_frames`: the logit of its end token is 0, outside the top 50."""
    tokenizer = Tokenizer.characters()
    model = new_speech_model(random_config(tokenizer), tokenizer, seed=0)
    model.sampling = SpeechSampling(max_frames=FRAMES)
    with torch.no_grad():
        model.talker.decoder.lm_head.weight[model.config.marks.eos] = 0
    save_speech_model(folder, model)


def speak_together(speaker: Speaker, utterance: Utterance, seeds: range) -> list[SpeechTimes]:
    """The times of utterances that start together."""
    requests = [speaker.request(utterance, seed) for seed in seeds]
    for request in requests:
        speaker.pipeline.add(request)
    times = []
    while speaker.pipeline.unfinished:
        times += [delta.times for delta in speaker.pipeline.step() if delta.times is not None]
    return times


def measure_alone(folder: Path, utterance: Utterance, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the pipeline in this process, in CPU time."""
    speaker = Speaker(load_speech_model(folder), clock=time.process_time)
    times: dict[int, list[SpeechTimes]] = {streams: [] for streams in STREAMS}
    for turn in range(-1, rounds):
        for streams in STREAMS:
            spoken = speak_together(speaker, utterance, range(100 * turn + 100, 100 * turn + 100 + streams))
            times[streams] += spoken if turn >= 0 else []
    return {
        f"{streams} stream{'s' * (streams > 1)}": summary(
            [Heard(item.first_audio, item.seconds, item.audio, item.underruns) for item in times[streams]],
            [item.first_code for item in times[streams]],
        )
        for streams in STREAMS
    }


def compare(folder: Path, utterance: Utterance, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the pipeline with OpenVINO and with Perilune's kernels in alternation, in CPU time."""
    model, clock = load_speech_model(folder), time.process_time
    speakers = {
        "Perilune": Speaker(model, clock=clock),
        "OpenVINO": Speaker(model, clock=clock, openvino=OpenVino()),
    }
    return {
        f"{streams} stream{'s' * (streams > 1)}": compare_streams(speakers, utterance, streams, rounds)
        for streams in STREAMS
    }


def compare_streams(
    speakers: Mapping[str, Speaker], utterance: Utterance, streams: int, rounds: int
) -> dict[str, Any]:
    """Medians by speaker, and the ratio of both over rounds with its 95% interval."""
    kinds = {
        "real-time factor": lambda item: item.real_time_factor,
        "first audio, ms": lambda item: 1000 * item.first_audio,
    }
    measured: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in speakers} for kind in kinds}
    for turn in range(-1, rounds):
        for name, speaker in speakers.items():
            seeds = range(100 * turn + 100, 100 * turn + 100 + streams)
            times = speak_together(speaker, utterance, seeds)
            if turn >= 0:
                for kind, figure in kinds.items():
                    measured[kind][name].append(statistics.median(map(figure, times)))
    row: dict[str, Any] = {}
    for kind, figures in measured.items():
        for name, values in figures.items():
            row[f"{kind}, {name}"] = float(f"{statistics.median(values):.3g}")
        pairs = zip(figures["OpenVINO"], figures["Perilune"], strict=True)
        interval = t_interval([math.log(ours / theirs) for ours, theirs in pairs])
        for bound in ("mean", "low", "high"):
            row[f"{kind}, OpenVINO / Perilune, {bound}"] = round(math.exp(interval[bound]), 2)
    return row | {"rounds": rounds}


@dataclass
class Heard:
    """Times in seconds of one utterance, and its number of underruns, as its client measured them."""

    first: float
    seconds: float
    audio: float
    underruns: int


async def listen(client: httpx.AsyncClient, body: dict[str, Any], seed: int, rate: int) -> Heard:
    began, first, until, received, underruns = time.perf_counter(), 0.0, 0.0, 0, 0
    async with client.stream("POST", "/v1/audio/speech", json=body | {"seed": seed}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_raw():
            now = time.perf_counter()
            if not first:
                first = until = now
            elif now > until:
                underruns, until = underruns + 1, now
            received += len(piece)
            until += len(piece) / 2 / rate
    return Heard(first - began, time.perf_counter() - began, received / 2 / rate, underruns)


def first_codes(client: httpx.Client) -> tuple[float, float]:
    """Sum and count of the seconds to the first code, over all loads."""
    page = client.get("/metrics").text
    return tuple(  # type: ignore[return-value]
        sum(map(float, re.findall(rf"^perilune_speech_first_code_seconds_{kind}\{{.*\}} (\S+)$", page, re.M)))
        for kind in ("sum", "count")
    )


async def round_of(url: str, body: dict[str, Any], seeds: range, rate: int) -> list[Heard]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return list(await asyncio.gather(*(listen(client, body, seed, rate) for seed in seeds)))


def measure_served(url: str, utterance: Utterance, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure `perilune serve` as its clients see it, in elapsed time."""
    with httpx.Client(base_url=url, timeout=60) as client:
        voices = client.get("/v1/audio/voices").json()
        body = {"model": voices["model"], "input": utterance.text, "response_format": "pcm"}
        body["non_streaming_mode"] = not utterance.streamed_text
        heard: dict[int, list[Heard]] = {streams: [] for streams in STREAMS}
        codes: dict[int, list[float]] = {streams: [] for streams in STREAMS}
        for turn in range(-1, rounds):
            for streams in STREAMS:
                before = first_codes(client)
                seeds = range(100 * turn + 100, 100 * turn + 100 + streams)
                results = asyncio.run(round_of(url, body, seeds, voices["sample_rate"]))
                after = first_codes(client)
                if turn >= 0:
                    heard[streams] += results
                    codes[streams].append((after[0] - before[0]) / (after[1] - before[1]))
    return {
        f"{streams} stream{'s' * (streams > 1)}": summary(heard[streams], codes[streams])
        for streams in STREAMS
    }


def summary(heard: list[Heard], codes: list[float]) -> dict[str, Any]:
    factors = sorted(utterance.seconds / utterance.audio for utterance in heard)
    firsts = sorted(1000 * utterance.first for utterance in heard)
    return {
        "real-time factor, p50": round(statistics.median(factors), 3),
        "real-time factor, worst": round(factors[-1], 3),
        "first code, ms": round(1000 * statistics.mean(codes)),
        "first audio, ms, p50": round(statistics.median(firsts)),
        "first audio, ms, worst": round(firsts[-1]),
        "underruns": sum(utterance.underruns for utterance in heard),
        "utterances": len(heard),
    }


@contextmanager
def server(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "perilune.cli.main", "serve", str(folder), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        match = re.search(r"(http://\S+)/v1", process.stderr.readline())
        assert match
        yield match[1]
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served-rounds", type=int, default=5)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--backend", choices=("native", "openvino"), default="native")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "speech"
        if arguments.folder is None:
            save_random_model(folder)
        texts = {
            "text read first": Utterance(arguments.text),
            "text read with the frames": Utterance(arguments.text, streamed_text=True),
        }
        if arguments.backend == "openvino":
            text = texts["text read first"]
            compared = compare(folder, text, arguments.rounds)
            write_comparison(compared, folder, random=arguments.folder is None)
            return
        alone = {name: measure_alone(folder, text, arguments.rounds) for name, text in texts.items()}
        with server(folder) as url:
            served = {
                name: measure_served(url, text, arguments.served_rounds) for name, text in texts.items()
            }
        write(alone, served, folder, random=arguments.folder is None)


Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Measurements by way of reading the text, number of streams, and name."""


def write(alone: Tables, served: Tables, folder: Path, *, random: bool) -> None:
    first = "first audio, ms, p50"
    ratios = {
        name: round(table["8 streams"][first] / table["1 stream"][first], 2) for name, table in alone.items()
    }
    document = {
        "title": "Streaming speech: latency by number of streams",
        "about": "All utterances of a row start at the same time.\n\n* The *real-time factor* is the time "
        "from the request to the last sample, divided by the duration of the speech. Below 1, speech is "
        "generated faster than it plays.\n* *Text read first*: the model reads the whole text before it "
        "speaks. *Text read with the frames*: it reads one token of the text with each frame "
        "(`non_streaming_mode: false`), so its prompt is shorter.\n* *First code* and *first audio* are the "
        "times from the request.\n* An *underrun* is a moment at which the listener waits for samples.\n"
        "* *The pipeline alone* gives CPU time, which excludes other programs on the machine. *Perilune "
        "serve* gives elapsed time, at the load of the machine given in *Setting*.",
        "command": "python benchmarks/speech.py",
        **describe_setting(folder, random=random),
        **{f"the pipeline alone, in CPU time, {name}": table for name, table in alone.items()},
        **{f"perilune serve, in elapsed time, {name}": table for name, table in served.items()},
        "first audio with 8 streams / with 1, in CPU time": ratios,
    }
    save("speech", document)


def write_comparison(compared: Mapping[str, Any], folder: Path, *, random: bool) -> None:
    document = {
        "title": "Streaming speech with OpenVINO: latency by number of streams",
        "about": "OpenVINO and Perilune's kernels take turns on the same thread, in CPU time, which excludes "
        "other programs on the machine. All utterances of a row start at the same time, and the model reads "
        "the whole text before it speaks. Ratios are geometric means over rounds, with 95% t intervals. "
        "The [page on Perilune's kernels](speech.md) defines the terms.",
        "command": "python benchmarks/speech.py --backend openvino",
        **describe_setting(folder, random=random),
        "the pipeline alone, in CPU time": compared,
    }
    save("speech_openvino", document)


def describe_setting(folder: Path, *, random: bool) -> dict[str, Any]:
    model = load_speech_model(folder)
    codec, processor = model.config.codec, describe_machine()["processor"]
    return {
        "machine": {
            "processor": processor["model"],
            "cores": processor["usable_cores"],
            "load": [round(load, 1) for load in os.getloadavg()],
        },
        "model": {
            "weights": "random" if random else folder.name,
            "talker, million parameters": millions(model.talker.decoder),
            "code predictor, million parameters": millions(model.talker.predictor),
            "codec decoder, million parameters": millions(model.codec),
            "frames per second": round(1 / codec.frame_seconds, 2),
            "codes per frame": codec.codebooks,
        },
    }


def save(name: str, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def millions(module: torch.nn.Module) -> float:
    return round(sum(parameter.numel() for parameter in module.parameters()) / 1e6, 2)


if __name__ == "__main__":
    main()
