"""distill: on-policy distillation."""
