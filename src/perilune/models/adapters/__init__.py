"""LoRA adapters: training them and their files."""
