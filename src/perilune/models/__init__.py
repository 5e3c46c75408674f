"""The decoder, tokenizers, and loading and saving of checkpoints in Hugging Face format."""
