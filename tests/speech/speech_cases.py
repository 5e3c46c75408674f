"""A small speech model for tests."""

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech.config import CodecConfig, ControlTokens, SpeechConfig
from perilune.speech.folder import SpeechModel, new_speech_model

CODES = 32


def small_config(tokenizer: Tokenizer) -> SpeechConfig:
    """4 codebooks of 32 codes, frames of 40 samples, 2000 samples a second, so 50 frames a second."""
    codec = CodecConfig(
        codebooks=4,
        codebook_size=CODES,
        codebook_dim=16,
        latent_dim=16,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        window=6,
        upsampling_ratios=(2,),
        upsample_rates=(5, 4),
        vocoder_dim=32,
        sample_rate=2000,
    )
    talker = DecoderConfig(
        architecture="qwen3",
        vocab_size=CODES + 16,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    words = tokenizer.vocab_size
    return SpeechConfig(
        talker=talker,
        predictor=talker.replace(vocab_size=CODES, hidden_size=24),
        codec=codec,
        text_vocab_size=words + 5,
        text_hidden_size=16,
        marks=ControlTokens.after(CODES, words),
        languages={"english": CODES + 7, "welsh": CODES + 8},
        speakers={"ada": CODES + 9, "owen": CODES + 10},
        dialects={"owen": "welsh"},
    )


def small_model(seed: int = 0) -> SpeechModel:
    """A random model of `small_config`."""
    tokenizer = Tokenizer.characters()
    return new_speech_model(small_config(tokenizer), tokenizer, seed)
