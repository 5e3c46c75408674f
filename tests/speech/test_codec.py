"""The codec decoder: chunked decoding, saving and loading, and hostile configurations."""

from pathlib import Path

import pytest
import torch
from speech_cases import CODES, small_model

from perilune.errors import RequestError
from perilune.files import read_json, write_json
from perilune.speech.config import SpeechConfig
from perilune.speech.folder import is_speech_folder, load_speech_model, save_speech_model
from perilune.speech.streaming import CodecState


def codes_of(streams: int, frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randint(0, CODES, (streams, frames, 4), generator=generator)


@pytest.mark.parametrize("chunks", [[20], [1, 2, 3, 14], [8, 12], [19, 1]])
def test_chunked_decode_equals_whole_decode_bit_for_bit(chunks: list[int]) -> None:
    codec = small_model().codec.frozen()
    codes = codes_of(2, 20)
    whole = codec(codes)
    assert whole.shape == (2, 20 * codec.config.frame)
    assert whole.abs().max() > 0.01
    state = CodecState.start(2)
    parts = [codec(part, state) for part in codes.split(chunks, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_codec_streams_can_join_and_split_between_chunks() -> None:
    codec = small_model().codec.frozen()
    long, short = codes_of(1, 24), codes_of(1, 12)
    states = [CodecState.start(1), CodecState.start(1)]
    heads = codec(long[:, :12], states[0])
    codec(short[:, :6], states[1])
    joint = CodecState.join(states)  # at different positions
    pair = codec(torch.cat([long[:, 12:18], short[:, 6:]]), joint)
    tail = codec(long[:, 18:], joint.split()[0])
    assert torch.equal(torch.cat([heads, pair[:1], tail], dim=1), codec(long))
    assert torch.equal(pair[1:], codec(short)[:, 6 * codec.config.frame :])


def test_capitalized_speaker_keeps_the_dialect() -> None:
    config = small_model().config
    document = config.to_hf()
    for key in ("spk_id", "spk_is_dialect"):
        document["talker_config"][key] = {
            name.title(): value for name, value in document["talker_config"][key].items()
        }
    assert SpeechConfig.from_hf(document, config.codec) == config


def test_speech_model_round_trips_through_a_folder(tmp_path: Path) -> None:
    model = small_model()
    save_speech_model(tmp_path, model, {"conv.weight": torch.zeros(3)})
    assert is_speech_folder(tmp_path)
    loaded = load_speech_model(tmp_path)
    assert loaded.config == model.config
    assert loaded.sampling == model.sampling
    for ours, theirs in ((model.talker, loaded.talker), (model.codec, loaded.codec)):
        other = theirs.state_dict()
        for name, tensor in ours.state_dict().items():
            if "predictor.decoder.model.embed_tokens" not in name:
                assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    ("file", "section", "key", "value"),
    [
        ("config.json", "talker_config", "num_hidden_layers", 10**9),
        ("config.json", "talker_config", "codec_bos_id", 3),
        ("config.json", "talker_config", "num_code_groups", 7),
        ("speech_tokenizer/config.json", "decoder_config", "sliding_window", -1),
        ("speech_tokenizer/config.json", "decoder_config", "decoder_dim", 30),
        ("speech_tokenizer/config.json", "decoder_config", "num_quantizers", 2**30),
        ("speech_tokenizer/config.json", "decoder_config", "upsample_rates", [5, 0]),
    ],
)
def test_hostile_configurations_are_refused(
    tmp_path: Path, file: str, section: str, key: str, value: object
) -> None:
    save_speech_model(tmp_path, small_model())
    raw = read_json(tmp_path / file)
    raw[section][key] = value
    write_json(tmp_path / file, raw)
    with pytest.raises(RequestError):
        load_speech_model(tmp_path)


def test_qwen_tokenizer_loads_without_tokenizer_json(tmp_path: Path) -> None:
    save_speech_model(tmp_path, small_model())
    (tmp_path / "tokenizer.json").unlink()
    pieces = ["a", "b", "ab", "1", "2", "12", "Ġ", "Ġa", "Ċ"]
    write_json(tmp_path / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n1 2\nĠ a\n", encoding="utf-8")
    special = {"content": "<|im_end|>", "special": True}
    write_json(
        tmp_path / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {str(len(pieces)): special}},
    )
    tokenizer = load_speech_model(tmp_path).tokenizer
    assert tokenizer.encode("ab 12 a\n") == [2, 6, 3, 4, 7, 8]  # digits stay apart
    assert tokenizer.eos_token_id == len(pieces)
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": [special]})
    with pytest.raises(RequestError, match="added_tokens_decoder"):
        load_speech_model(tmp_path)
