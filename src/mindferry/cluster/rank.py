"""What each rank of launch files runs: the training by mindformers' own Trainer, or a rehearsal of its beginning."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory


def main(folder: Path) -> None:
    """Entry of rank.py in `folder`: train, or with an argument (a job's folder, see launching.rank) rehearse."""
    if len(sys.argv) > 1:
        from mindferry.launching.rank import main as one_rank

        one_rank(rehearse)
    elif os.environ.get("MS_ROLE") == "MS_SCHED":
        from mindferry.launching.rank import schedule

        schedule()
    else:
        train(folder)


def content_of(run: RunDirectory, name: str) -> dict[str, Any]:
    """The training YAML `name` of `run`, its paths absolute.

    Raises:
        UsageError: it cannot be read.
    """
    from mindferry.training import data_source

    content = run_yaml.read(run.root / name)
    data_source.make_absolute(content, run.root)
    for key in ("load_checkpoint", "output_dir"):
        if content.get(key):
            content[key] = str((run.root / content[key]).resolve())
    return content


def train(folder: Path) -> None:
    """Train this rank's part. Checkpoints and logs are mindformers' own, in output_dir. Unverified on hardware.

    Raises:
        UsageError: the YAML is for a CPU, where `train --workers` is the way.
    """
    from mindferry.cluster.job import read_job

    job = read_job(folder)
    run = RunDirectory.open(folder.parent)
    content = content_of(run, job.yaml)
    if content["context"]["device_target"] == "CPU":
        raise UsageError(
            f"{run.root / job.yaml}: context.device_target: found CPU, expected Ascend",
            remedy="mindferry train RUN --workers N",
            id="launch.device",
        )
    from mindferry.training.engine import set_up

    config = set_up(content, run, int(os.environ.get("RANK_ID", "0")))
    config.callbacks = content["callbacks"]
    from mindformers import Trainer

    Trainer(args=config).train()


def rehearse(folder: Path, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """All of a rank's beginning that needs no NPU: its number, its groups, its YAML, its weights, its data.

    Args:
        request: "run", "yaml", "grid", and "workers", the processes of this rehearsal.

    Raises:
        MindferryError: what would stop the cluster, too.
    """
    import mindspore as ms
    from mindspore.communication import get_group_size, get_rank, init

    from mindferry.partition.layout import Grid
    from mindferry.training import compat

    run = RunDirectory.open(Path(request["run"]))
    compat.quiet(folder)
    ms.set_device("CPU")
    init()
    if (get_rank(), get_group_size()) != (rank, request["workers"]):
        raise UsageError(
            f"this process is rank {get_rank()} of {get_group_size()}, expected {rank} of {request['workers']}",
            remedy="the same MindSpore on every host, nothing of an older job in the environment (RANK_ID, MS_*)",
            id="launch.rank",
        )
    grid = Grid(**request["grid"])
    content = content_of(run, request["yaml"])
    return {
        "groups": _groups(grid, rank),
        "configuration": _configuration(content, RunDirectory(folder / f"start-{rank}"), rank),
        "weights": _weights(content, rank, request["real_workers"]),
        "rows": _rows(content, grid, rank),
    }


def _groups(grid: Any, rank: int) -> dict[str, list[int]]:
    """Make the groups that this rank is in, and see in each who answers."""
    import mindspore as ms
    import numpy as np
    from mindspore import ops
    from mindspore.communication import create_group

    answered = {}
    kinds = {"model": grid.tensor_groups(), "data": grid.data_groups(), "pipeline": grid.pipeline_groups()}
    for kind, groups in kinds.items():
        group = next(group for group in groups if rank in group)
        answered[kind] = group
        if len(group) == 1:
            continue
        name = f"{kind}-{'-'.join(map(str, group))}"
        create_group(name, group)
        mine = np.zeros(grid.ranks, np.float32)
        mine[rank] = 1
        seen = ops.AllReduce(group=name)(ms.Tensor(mine)).asnumpy()
        if np.flatnonzero(seen).tolist() != sorted(group):
            raise UsageError(
                f"{kind} group of rank {rank}: {np.flatnonzero(seen).tolist()} answered, expected {group}",
                id="launch.groups",
            )
    return answered


def _configuration(content: dict[str, Any], scratch: RunDirectory, rank: int) -> str:
    """Have mindformers read the YAML and build the model's configuration; returns its class.

    What only Ascend knows is replaced: device, layers, automatic parallelism.
    """
    from mindformers.models.build_config import build_model_config

    from mindferry.training.engine import set_up

    content = copy.deepcopy(content)
    content["use_parallel"] = False
    content["parallel"]["parallel_mode"] = 0
    content["context"]["device_target"] = "CPU"
    content["model"]["model_config"]["layer_spec"] = "portable"
    config = set_up(content, scratch, rank)
    return type(build_model_config(config.model.model_config)).__name__


def _weights(content: dict[str, Any], rank: int, workers: int) -> int:
    """Number of tensors of this rank's weights, their headers read."""
    if not content.get("load_checkpoint"):
        return 0
    from mindferry.weights.header import read_header

    root = Path(content["load_checkpoint"])
    mine = root / f"rank_{rank}"
    folder = mine if mine.is_dir() else root
    cut = any(path.name.startswith("rank_") for path in root.iterdir()) if root.is_dir() else False
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files or (cut and folder is root):
        raise UsageError(
            f"{content['load_checkpoint']}: no weights for rank {rank} of {workers}",
            remedy="cut them: mindferry reshard RUN --to dp=,mp=,pp= --out model-cut",
            id="launch.weights",
        )
    return sum(len(read_header(path).entries) for path in files)


def _rows(content: dict[str, Any], grid: Any, rank: int) -> int:
    """Sequences that this rank reads in an epoch."""
    from mindferry.training import data_source

    if data_source.is_megatron(content):
        return data_source.rows(content) // grid.data_parallel
    from mindspore.dataset import MindDataset

    files = [str(path) for path in run_yaml.data_files(content)]
    shards, shard = grid.data_parallel, grid.place(rank).data
    return int(MindDataset(files, num_shards=shards, shard_id=shard).get_dataset_size())
