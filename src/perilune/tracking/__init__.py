"""Copies a run's figures to TensorBoard, Weights & Biases or MLflow. metrics.jsonl remains authoritative."""

from perilune.tracking.sinks import SINKS, Sink, TrackedRun, open_sink
from perilune.tracking.trail import FigureReader, Figures

__all__ = ["SINKS", "FigureReader", "Figures", "Sink", "TrackedRun", "open_sink"]
