"""`perilune model card`: the model's figures as text, JSON and SVG."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from perilune.cli.inspect.cache_curve import curve_svg
from perilune.models.card.document import curve_tokens
from perilune.models.card.from_config import model_card
from perilune.models.memory import plan_memory
from perilune.units import format_count, format_flops, format_size

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
WINDOWS = QWEN3_0_6B | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 14}


@pytest.fixture
def config(tmp_path: Path):
    def write(raw: dict[str, Any]) -> Path:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(raw))
        return file

    return write


def test_model_card_text(perilune, config) -> None:
    done = perilune("model", "card", str(config(QWEN3_0_6B)), "--context", "1024", "--batch", "4")
    assert done.stdout.splitlines() == [
        "qwen3: 596.0 million parameters, 596.0 million active for each token, "
        "155.6 million in the embedding and the head",
        "",
        "layers",
        "    28 x GQA 16/8 heads of 128; feed-forward 3,072",
        "",
        "KV cache and compute per token in bfloat16, by sequence length",
        "        tokens   cache/token         cache        generate           learn",
        "            64     112.0 KiB       7.0 MiB       1.2 GFLOP       3.6 GFLOP",
        "           128     112.0 KiB      14.0 MiB       1.2 GFLOP       3.6 GFLOP",
        "           256     112.0 KiB      28.0 MiB       1.3 GFLOP       3.7 GFLOP",
        "           512     112.0 KiB      56.0 MiB       1.3 GFLOP       3.8 GFLOP",
        "         1,024     112.0 KiB     112.0 MiB       1.4 GFLOP       3.9 GFLOP",
        "",
        "memory for 4 x 1,024 tokens",
        "  sampling  3.4 GiB: process 430.0 MiB, weights 1.1 GiB, engine 1.4 GiB, cache 449.8 MiB; "
        "temporarily sampling 13.9 MiB",
        "  training  15.0 GiB: process 430.0 MiB, weights 1.1 GiB, moments 4.4 GiB; "
        "temporarily learning 9.1 GiB or update 1.7 GiB",
    ]


def test_model_card_json_matches_the_card(here, config) -> None:
    folder = config(WINDOWS).parent
    done = here("model", "card", str(folder), "--context=200", "--batch=2", "--dtype=float32", "--json")
    document, card = json.loads(done.stdout), model_card(WINDOWS)
    assert document["parameters"] == card.parameters
    assert document["dtype"] == "float32"
    assert [row["kind"].split(";")[0] for row in document["layers"]] == [
        "GQA 16/8 heads of 128", "GQA 16/8 heads of 128, window 64",
    ]  # fmt: skip
    assert [point["tokens"] for point in document["curve"]] == [64, 128, 200]
    for point in document["curve"]:
        assert point["cache_bytes"] == card.cache_bytes(point["tokens"], 4)
        assert point["generation_flops"] == card.decode_flops(point["tokens"])
    plan = plan_memory(card, sampling=(2, 200))
    assert document["memory"]["sampling"]["total"] == plan.total
    assert document["notes"] == [
        "the memory includes tokens outside windows that the engine's cache still holds"
    ]


def test_model_card_plots_cache_curve_as_svg(here, config, tmp_path: Path) -> None:
    drawing = tmp_path / "curve.svg"
    done = here("model", "card", str(config(WINDOWS)), "--context", "4096", "--svg", str(drawing))
    assert f"wrote {drawing}" in done.stderr
    root = ET.fromstring(drawing.read_text())
    line = next(part for part in root if part.tag.endswith("polyline")).attrib["points"].split()
    heights = [float(pair.split(",")[1]) for pair in line]
    assert heights == sorted(heights)  # y grows downwards: longer sequences need fewer bytes per token
    assert len(heights) == len(curve_tokens(4096))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{config}", "--dtype", "int3"), "--dtype: unknown dtype 'int3'"),
        (("{config}", "--context", "-1"), "'--context'"),
        (("nowhere/to-be-found",), "no model nowhere/to-be-found is fetched or in the Hugging Face cache"),
    ],
)
def test_model_card_refuses_invalid_arguments(here, config, arguments: tuple[str, ...], message: str) -> None:
    file = str(config(QWEN3_0_6B))
    done = here("model", "card", *(part.format(config=file) for part in arguments))
    assert done.returncode == 2
    assert message in done.stderr


def test_model_card_refuses_invalid_config(here, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "\\u001b[31mred", "hidden_size": 4}')
    done = here("model", "card", str(file))
    assert done.returncode == 2
    assert f"{file}:num_attention_heads" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_count_flops_and_size_format_units() -> None:
    assert [format_count(value) for value in (12, 596_049_920, 30.5e9, 1.04e12)] == [
        "12", "596.0 million", "30.5 billion", "1.0 trillion",
    ]  # fmt: skip
    assert [format_flops(value) for value in (12, 3.6e9, 2e15)] == ["12 FLOP", "3.6 GFLOP", "2.0 PFLOP"]
    assert [format_size(value) for value in (1023, 1024, 3 << 40)] == ["1023 B", "1.0 KiB", "3.0 TiB"]


def test_curve_of_one_point_and_flat_curve_are_drawn() -> None:
    flat = [{"tokens": tokens, "cache_bytes_per_token": 1024.0} for tokens in (64, 128)]
    for curve in (flat, flat[:1]):
        ET.fromstring(curve_svg(curve, "a < b"))
    assert curve_tokens(1) == [1]
    assert curve_tokens(64) == [64]
    assert curve_tokens(65) == [64, 65]
