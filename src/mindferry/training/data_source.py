"""What the engine asks of the data that run.yaml names: MindRecord, or Megatron files in Megatron's order."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.targets.run_yaml import data_files
from mindferry.targets.schema import MEGATRON_LOADER


def is_megatron(content: dict[str, Any]) -> bool:
    return bool(content["train_dataset"]["data_loader"]["type"] == MEGATRON_LOADER)


def make_absolute(content: dict[str, Any], root: Path) -> None:
    """Have the paths of train_dataset start at `root`; changes `content`.

    Raises:
        UsageError: Megatron prefixes without their weights.
    """
    loader = content["train_dataset"]["data_loader"]
    if is_megatron(content):
        from mindferry.data.blend import Blend

        config, parts = loader["config"], Blend.of(loader, root).parts
        names = [str(prefix.resolve()) for _, prefix in parts]
        shares = [f"{share:.12g}" for share, _ in parts]
        pairs = [word for pair in zip(shares, names, strict=True) for word in pair]
        config["data_path"] = names if len(names) == 1 else pairs
        config["path_to_cache"] = str((root / config.get("path_to_cache", "data/index-cache")).resolve())
        return
    for key in ("dataset_dir", "dataset_files"):
        if isinstance(loader.get(key), str):
            loader[key] = str((root / loader[key]).resolve())
        elif loader.get(key):
            loader[key] = [str((root / item).resolve()) for item in loader[key]]


def rows(content: dict[str, Any]) -> int:
    """Sequences of an epoch; with Megatron files, those of the whole run."""
    if is_megatron(content):
        return int(content["train_dataset"]["data_loader"]["sizes"][0])
    from mindspore.dataset import MindDataset

    return int(MindDataset([str(path) for path in data_files(content)]).get_dataset_size())


def sequences_per_step(content: dict[str, Any]) -> int:
    """Of all processes together, for a run.yaml that is not shared out yet."""
    runner = content["runner_config"]
    return int(runner["batch_size"] * runner["gradient_accumulation_steps"])


def identity(content: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps so that a resumed run can tell whether the order of its samples is the old one."""
    if not is_megatron(content):
        return {}
    from mindferry.data.blend import Blend

    return {"megatron_order": Blend.of(content["train_dataset"]["data_loader"]).identity()}


def check_megatron(content: dict[str, Any], batch: int, checkpoint: Any = None) -> None:
    """Whether run.yaml's Megatron files serve its schedule, `batch` sequences a step; nothing for MindRecord.

    Raises:
        UsageError: too few samples asked for, another seq_length than the model's, missing files, or another
            order of samples than the checkpoint's.
        MindferryError: a damaged index.
    """
    if not is_megatron(content):
        return
    from mindferry.data.blend import Blend

    blend = Blend.of(content["train_dataset"]["data_loader"])
    where = "run.yaml: train_dataset.data_loader"
    blend.check()
    expected = content["model"]["model_config"].get("seq_length", blend.seq_length)
    if blend.seq_length != expected:
        raise UsageError(
            f"{where}.config.seq_length: found {blend.seq_length}, expected the model's {expected}",
            id="megatron.seq-length",
        )
    needed = max(content["lr_schedule"]["total_steps"], 1) * batch
    if blend.samples < needed:
        raise UsageError(
            f"{where}.sizes: found {blend.samples} samples, expected at least {needed}: "
            f"{content['lr_schedule']['total_steps']} steps of {batch} sequences",
            cause="the order of the samples follows from their number; a second pass would not be Megatron's",
            remedy=f"set the first of sizes to {needed}",
            id="megatron.sizes",
        )
    before = checkpoint.state.get("megatron_order") if checkpoint else None
    if before is not None and before != identity(content)["megatron_order"]:
        raise UsageError(
            f"{checkpoint.path.name}: {where}: data, weights, sizes, seed or split changed since: the next batch "
            "would not be the one that follows",
            remedy="set them back, or start over with --restart",
            id="resume.order",
        )


def portable(content: dict[str, Any]) -> None:
    """Take the loader that several processes can use on a CPU (see megatron_loader); changes `content`."""
    if is_megatron(content) and _several_on_a_cpu(content):
        content["train_dataset"]["data_loader"]["type"] = "OrderedMegatronLoader"


def _several_on_a_cpu(content: dict[str, Any]) -> bool:
    return bool(content["use_parallel"]) and content["context"]["device_target"] == "CPU"


def engine_settings(config: Any) -> None:
    """What mindformers' Trainer must be told for Megatron files; changes `config`, its configuration.

    For them it switches on broadcasting of the data among devices, which it then refuses without data sinking: the
    second training of a process would not start. A CPU sinks no data.
    """
    if config.train_dataset.data_loader.type == MEGATRON_LOADER and not config.runner_config.sink_mode:
        config.context.dataset_broadcast_opt_level = 0


@contextmanager
def helper_for(content: dict[str, Any], scratch: Path | None = None) -> Iterator[None]:
    """While mindformers may ask for its compiled helper: have it there, for the Python that runs.

    Its Makefile asks whatever `python3` and `python3-config` stand first on the PATH for the file's name, and a
    failure ends the process; MAKEFLAGS tells `make` the name, and there is nothing left to do. Temporary files go
    to `scratch`: the Trainer leaves one for every training that sets the broadcasting, and it is removed.

    Raises:
        MindferryError: it cannot be compiled.
    """
    if not is_megatron(content) or _several_on_a_cpu(content):
        yield
        return
    from mindferry.data.blend import compile_megatron_helper

    compile_megatron_helper()
    before = os.environ.get("MAKEFLAGS")
    os.environ["MAKEFLAGS"] = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    usual = tempfile.tempdir
    if scratch is not None:
        tempfile.tempdir = str(scratch)
    try:
        yield
    finally:
        tempfile.tempdir = usual
        for left in scratch.glob("parallel_speed_up_*.json") if scratch is not None else ():
            left.unlink(missing_ok=True)
        if before is None:
            del os.environ["MAKEFLAGS"]
        else:
            os.environ["MAKEFLAGS"] = before
