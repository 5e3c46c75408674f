"""Text to speech with the architecture of Qwen3-TTS: a talker, a code predictor and a codec decoder."""
