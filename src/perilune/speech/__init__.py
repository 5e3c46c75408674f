"""Text to speech as Qwen3-TTS does it: a talker, a code predictor and a codec decoder, served in stages."""
