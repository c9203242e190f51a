"""Weights: rules as data, one engine that runs them both ways, streaming readers and writers."""

from mindferry.weights.conversion import MAX_SHARD_BYTES, UsedTensor, WeightsReport, convert
from mindferry.weights.target import target_names
from mindferry.weights.tensor_store import MemoryStore, SafetensorsStore, TensorStore
from mindferry.weights.transforms import TargetLayout

__all__ = [
    "MAX_SHARD_BYTES",
    "MemoryStore",
    "SafetensorsStore",
    "TargetLayout",
    "TensorStore",
    "UsedTensor",
    "WeightsReport",
    "convert",
    "target_names",
]
