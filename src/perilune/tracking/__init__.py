"""A run's figures in TensorBoard, Weights & Biases or MLflow: copies of metrics.jsonl, which is the truth."""

from perilune.tracking.sinks import SINKS, Sink, TrackedRun, open_sink
from perilune.tracking.trail import Figures, Trail

__all__ = ["SINKS", "Figures", "Sink", "TrackedRun", "Trail", "open_sink"]
