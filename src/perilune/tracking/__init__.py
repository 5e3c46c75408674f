"""Copy a run's figures to TensorBoard, Weights & Biases or MLflow. metrics.jsonl remains authoritative."""

from perilune.tracking.sinks import SINKS, Sink, TrackedRun, open_sink
from perilune.tracking.trail import Figures, Trail

__all__ = ["SINKS", "Figures", "Sink", "TrackedRun", "Trail", "open_sink"]
