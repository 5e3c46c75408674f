"""LoRA adapters: training and files."""
