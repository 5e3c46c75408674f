"""Writes tests/speech/official: configurations and outputs of the official package, qwen-tts 0.1.1.

    pip install qwen-tts==0.1.1        in a separate environment
    python tests/speech/make_official.py

The weights are not stored: `official_weights.drawn` derives them from the tensor names.
"""

from contextlib import suppress
from pathlib import Path

import torch
from official_weights import drawn
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "official"
CODES, GROUPS, FRAMES = 64, 4, 12
SPEAKERS = {"ryan": CODES + 20, "eric": CODES + 21}
LANGUAGES = {"chinese": CODES + 30, "english": CODES + 31, "sichuan_dialect": CODES + 32}
CASES = {
    "whole": (True, "ryan", "english"),
    "streamed": (False, None, "auto"),
    "dialect": (True, "eric", "auto"),
}
TEXT = [110, 5, 6, 20, 21, 22, 23, 24, 25, 111, 6, 110, 5, 6]  # role, "abcdef", end

ROPE = {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default", "type": "default"}
SMALL = {"num_code_groups": GROUPS, "rope_theta": 1e6, "max_position_embeddings": 512}
PREDICTOR = SMALL | {
    "vocab_size": CODES,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
TALKER = SMALL | {
    "vocab_size": CODES + 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_scaling": ROPE,
    "text_hidden_size": 40,
    "text_vocab_size": 120,
    "codec_eos_token_id": CODES + 1,
    "codec_think_id": CODES + 2,
    "codec_nothink_id": CODES + 3,
    "codec_think_bos_id": CODES + 4,
    "codec_think_eos_id": CODES + 5,
    "codec_pad_id": CODES + 6,
    "codec_bos_id": CODES + 7,
    "spk_id": SPEAKERS,
    "spk_is_dialect": {"ryan": False, "eric": "sichuan_dialect"},
    "codec_language_id": LANGUAGES,
    "pad_token_id": None,
    "code_predictor_config": PREDICTOR,
}
CODEC = {
    "codebook_size": CODES,
    "hidden_size": 32,
    "latent_dim": 24,
    "codebook_dim": 16,
    "max_position_embeddings": 800,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_quantizers": GROUPS,
    "upsample_rates": (5, 4),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 32,
}


def fill(module: torch.nn.Module, prefix: str = "") -> None:
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.copy_(torch.from_numpy(drawn(prefix + name, tuple(tensor.shape))))


def prompt(model: Qwen3TTSForConditionalGeneration, whole: bool, speaker: str | None, language: str) -> dict:
    """The embeddings that `generate` passes to the talker."""
    seen, generate = {}, model.talker.generate

    def instead(**given: object) -> None:
        seen.update(given)
        raise InterruptedError

    model.talker.generate = instead
    with suppress(InterruptedError):
        model.generate(
            [torch.tensor([TEXT])], languages=[language], speakers=[speaker], non_streaming_mode=whole
        )
    model.talker.generate = generate
    return seen


@torch.no_grad()
def outputs(model: Qwen3TTSForConditionalGeneration, codec: Qwen3TTSTokenizerV2Decoder) -> dict:
    tensors = {}
    codes = torch.randint(0, CODES, (2, GROUPS, FRAMES))
    tensors |= {"codes": codes.transpose(1, 2), "samples": codec(codes)[:, 0]}
    for name, (whole, speaker, language) in CASES.items():
        seen = prompt(model, whole, speaker, language)
        tensors[f"{name}.inputs"] = seen["inputs_embeds"][0]
        tensors[f"{name}.trailing"] = seen["trailing_text_hidden"][0]
        spoken, _ = model.generate(
            [torch.tensor([TEXT])],
            languages=[language],
            speakers=[speaker],
            non_streaming_mode=whole,
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=FRAMES + 1,
        )
        tensors[f"{name}.codes"] = spoken[0]
    hidden, frames = torch.randn(5, 32), torch.randint(0, CODES, (5, GROUPS))
    tensors |= {"hidden": hidden, "frames": frames}
    tensors["predictor_logits"] = model.talker.forward_sub_talker_finetune(frames, hidden)[0]
    inputs = torch.randn(1, 20, 32)
    last = model.talker.model(inputs_embeds=inputs).last_hidden_state
    return tensors | {"inputs": inputs[0], "talker_logits": model.talker.codec_head(last)[0, -2:]}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3TTSConfig(
        talker_config=TALKER,
        speaker_encoder_config={},
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_type="custom_voice",
        tts_model_size="0b6",
        im_start_token_id=110,
        im_end_token_id=111,
        tts_pad_token_id=112,
        tts_bos_token_id=113,
        tts_eos_token_id=114,
    )
    model = Qwen3TTSForConditionalGeneration(config).float().eval()
    whole = Qwen3TTSTokenizerV2Config(
        decoder_config=CODEC,
        encode_downsample_rate=80,
        decode_upsample_rate=80,
        encoder_valid_num_quantizers=GROUPS,
    )
    whole.decoder_config._attn_implementation = "eager"
    codec = Qwen3TTSTokenizerV2Decoder(whole.decoder_config).float().eval()
    fill(model)
    fill(codec, "decoder.")
    FOLDER.mkdir(exist_ok=True)
    config.save_pretrained(FOLDER)
    whole.save_pretrained(FOLDER / "speech_tokenizer")
    arrays = outputs(model, codec)
    save_file({name: tensor.contiguous() for name, tensor in arrays.items()}, FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
