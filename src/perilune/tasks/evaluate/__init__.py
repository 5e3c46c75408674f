"""evaluate: the quality of a checkpoint on held-out tasks."""
