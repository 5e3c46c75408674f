"""Models in GGUF files: reading one as a Hugging Face folder, and writing one."""
