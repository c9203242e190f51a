"""What a run asks of the machine, read from its run.yaml and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Weights, gradients and AdamW's two moments, each as large as the weights in float32; activations come on top.
COPIES_IN_MEMORY = 4
COPIES_IN_CHECKPOINT = 3  # weights and two moments


@dataclass(frozen=True)
class Needs:
    """Lower bounds of a run (bytes) and the switches that need something installed.

    Attributes:
        parallel: more than one process (msrun).
        fused: mindferry's own kernels.
    """

    device: str = "CPU"
    graph_kernel: bool = False
    parallel: bool = False
    fused: bool = False
    memory_bytes: int = 0
    disk_bytes: int = 0
    workers: int = 1


def needs_of(root: Path | None) -> Needs | None:
    """The needs of the run at `root`; None without a run.

    Raises:
        UsageError: there is no run.yaml, or it cannot be used.
    """
    if root is None:
        return None
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory

    run = RunDirectory.open(root)
    content = run_yaml.read(run.yaml)
    weights = sum(path.stat().st_size for path in run.model.glob("*.safetensors") if path.is_file())
    kept = next(
        (c.get("keep_checkpoint_max", 2) for c in content["callbacks"] if "Checkpoint" in c["type"]), 0
    )
    return Needs(
        device=content["context"]["device_target"],
        graph_kernel=bool(content["context"]["enable_graph_kernel"]),
        parallel=bool(content["use_parallel"]),
        fused=content["model"]["model_config"].get("layer_spec") == "fused",
        memory_bytes=COPIES_IN_MEMORY * weights,
        disk_bytes=(kept + 1) * COPIES_IN_CHECKPOINT * weights,  # one more exists while it is written
        workers=content["train_dataset"]["num_parallel_workers"],
    )
