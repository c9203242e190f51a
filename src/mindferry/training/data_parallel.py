"""A run.yaml shared out among the processes of data parallelism; the global batch stays what it says."""

from __future__ import annotations

from typing import Any

from mindferry.errors import UsageError

AUTOMATIC = (1, 2, "semi_auto_parallel", "auto_parallel")
_CUT_MODEL = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
# MindSpore's AdamW -> the one whose moments are shared out, and its arguments.
SHARDED = {
    "AdamW": {"type": "ShardedAdamW"},
    "AdamWDecayAll": {"type": "ShardedAdamW", "decay_all": True},
}


def share_out(content: dict[str, Any], workers: int) -> None:
    """Share the batch of `content` among `workers` processes; changes `content`.

    The sequences of a micro-batch are shared out, or else the micro-batches, so that every process has the
    same work.

    Raises:
        UsageError: neither divides, or run.yaml cuts the model, too.
    """
    runner, parallel = content["runner_config"], content.get("parallel_config") or {}
    for key in _CUT_MODEL:
        if parallel.get(key, 1) != 1:
            raise UsageError(
                f"run.yaml: parallel_config.{key}: found {parallel[key]}, expected 1 with --workers",
                remedy="--workers trains in data parallel; try a strategy that cuts the model with "
                "`mindferry rehearse`",
                id="workers.strategy",
            )
    for key in ("batch_size", "gradient_accumulation_steps"):
        if runner[key] % workers == 0:
            runner[key] //= workers
            break
    else:
        raise UsageError(
            f"run.yaml: runner_config: batch_size {runner['batch_size']} and gradient_accumulation_steps "
            f"{runner['gradient_accumulation_steps']}: neither divides by {workers} workers",
            remedy=f"choose --workers among {_divisors(runner)}",
            id="workers.batch",
        )
    content["use_parallel"] = True
    content["parallel"].update(parallel_mode=0, gradients_mean=True, full_batch=False)
    content["parallel"].pop("dataset_strategy", None)
    content["parallel_config"] = {**parallel, "data_parallel": workers}
    if content["parallel"].get("enable_parallel_optimizer"):
        _share_optimizer(content)


def _divisors(runner: dict[str, Any]) -> list[int]:
    sizes = (runner["batch_size"], runner["gradient_accumulation_steps"])
    return [n for n in range(1, max(sizes) + 1) if any(size % n == 0 for size in sizes)]


def _share_optimizer(content: dict[str, Any]) -> None:
    """Take the optimizer whose moments are shared out; MindSpore's own switch saves nothing in this mode."""
    found = content["optimizer"]["type"]
    if found not in SHARDED:
        raise UsageError(
            f"run.yaml: optimizer.type: found {found!r}, expected one of {sorted(SHARDED)} with "
            "parallel.enable_parallel_optimizer and --workers",
            remedy="set parallel.enable_parallel_optimizer to False",
            id="workers.optimizer",
        )
    content["optimizer"].update(SHARDED[found])
    content["optimizer"].pop("use_fused", None)
    content["parallel"]["enable_parallel_optimizer"] = False
    content["parallel"].pop("parallel_optimizer_config", None)


def engine_settings(content: dict[str, Any]) -> None:
    """Hand what run.yaml says about the exchange of gradients to the step wrapper; changes `content`.

    The weights are loaded by us (see weights_check.load_weights).
    """
    wrapper, own = content["runner_wrapper"], {}
    for key in ("gradient_wire_dtype", "reduce_every_micro_batch"):
        if key in wrapper:
            own[key] = wrapper.pop(key)
    if content["parallel"]["parallel_mode"] in AUTOMATIC or not content["use_parallel"]:
        return
    fusion = ((content["parallel"].pop("comm_fusion", None) or {}).get("allreduce")) or {}
    if fusion.get("mode") == "size" and fusion.get("config"):
        own["bucket_mib"] = fusion["config"]
    wrapper.update(own)
    content["load_checkpoint"] = ""


def even_shards(content: dict[str, Any], rows: int, workers: int) -> None:
    """Have each process read as many sequences as it trains on in an epoch; changes `content`.

    MindSpore fills up the shards of a number of rows that does not divide by repeating some; one process drops
    them. num_samples cuts the same permutation off, and mindformers divides it by the number of processes.
    """
    runner = content["runner_config"]
    batch = runner["batch_size"] * runner["gradient_accumulation_steps"] * workers
    if content["train_dataset"]["data_loader"]["type"] == "MindDataset" and rows >= batch:
        content["train_dataset"]["data_loader"]["num_samples"] = rows // batch * batch
