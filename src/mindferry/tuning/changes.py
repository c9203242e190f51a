"""The changes that `tune` tries, in order: the article's list, execution mode and layers first."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Dotted keys of run.yaml, and WORKERS.
Overrides = dict[str, Any]
# Not a key of run.yaml: processes that share the batch, `mindferry train --workers`.
WORKERS = "train --workers"
# What a change would set, or why it makes no sense for this run.
Proposal = Overrides | str


@dataclass(frozen=True)
class Change:
    """One step of the tuning.

    Attributes:
        propose: given the current run.yaml content, dotted keys to set, or the reason not to try.
        saves: "time", or "memory" for a change that is worth time only where memory is short.
    """

    name: str
    propose: Callable[[dict[str, Any]], Proposal]
    saves: str = "time"


def _cpu(content: dict[str, Any]) -> bool:
    return bool(content["context"]["device_target"] == "CPU")


def _graph(content: dict[str, Any]) -> Proposal:
    return {"context.mode": 0} if content["context"]["mode"] == 1 else "graphs are compiled already"


def _layers(content: dict[str, Any]) -> Proposal:
    wanted = "fused" if _cpu(content) else "reference"
    if content["model"]["model_config"]["layer_spec"] == wanted:
        return f"layer_spec is {wanted} already"
    return {"model.model_config.layer_spec": wanted}


def _graph_kernel(content: dict[str, Any]) -> Proposal:
    if content["context"]["mode"] == 1:
        return "fusion needs compiled graphs"
    return (
        "on already"
        if content["context"].get("enable_graph_kernel")
        else {"context.enable_graph_kernel": True}
    )


def _half(content: dict[str, Any]) -> Proposal:
    config = content["model"]["model_config"]
    if config["compute_dtype"] != "float32":
        return f"compute_dtype is {config['compute_dtype']} already"
    if _cpu(content) and config["layer_spec"] == "portable":
        return "MindSpore's CPU operators have no bfloat16"
    base = "model.model_config."
    # amp_level O2: products in half precision, norms and softmax in float32.
    return {
        f"{base}compute_dtype": "bfloat16",
        f"{base}layernorm_compute_type": "float32",
        f"{base}softmax_compute_type": "float32",
    }


def _prefetch(content: dict[str, Any]) -> Proposal:
    now = content["train_dataset"]["prefetch_size"]
    return {"train_dataset.prefetch_size": 4} if now < 4 else f"prefetch_size is {now} already"


def _workers(content: dict[str, Any]) -> Proposal:
    now, cores = content["train_dataset"]["num_parallel_workers"], os.cpu_count() or 1
    return {"train_dataset.num_parallel_workers": cores} if now < cores else f"{now} workers already"


def _accumulation(content: dict[str, Any]) -> Proposal:
    """The same sequences a step in fewer, larger micro-batches: the curve stays, the overhead shrinks."""
    runner = content["runner_config"]
    steps = runner["gradient_accumulation_steps"]
    if steps == 1:
        return "nothing is accumulated"
    factor = next(f for f in range(2, steps + 1) if steps % f == 0)
    return {
        "runner_config.batch_size": runner["batch_size"] * factor,
        "runner_config.gradient_accumulation_steps": steps // factor,
    }


def _processes(content: dict[str, Any]) -> Proposal:
    """As many processes as there are cores, or fewer where the batch does not divide; the same global batch."""
    if not _cpu(content):
        return "a process needs a device of its own here; `mindferry plan` searches strategies for several"
    if content.get(WORKERS, 1) > 1:
        return f"{content[WORKERS]} processes already"
    cores = len(os.sched_getaffinity(0))
    runner = content["runner_config"]
    sizes = (runner["batch_size"], runner["gradient_accumulation_steps"])
    parallel = content.get("parallel_config") or {}
    if any(parallel.get(key, 1) != 1 for key in ("model_parallel", "pipeline_stage", "context_parallel")):
        return "run.yaml cuts the model; try that with `mindferry rehearse`"
    counts = [n for n in range(2, cores + 1) if any(size % n == 0 for size in sizes)]
    if not counts:
        return f"{cores} cores, and a batch of {sizes[0]} x {sizes[1]}: nothing to share among processes"
    return {WORKERS: counts[-1]}


def _sharded(content: dict[str, Any]) -> Proposal:
    if content["parallel"].get("enable_parallel_optimizer"):
        return "on already"
    if content.get(WORKERS, 1) == 1:
        return "one process keeps all of the optimizer's states; there is nobody to share them with"
    return {"parallel.enable_parallel_optimizer": True}


def _learning_rate(content: dict[str, Any]) -> Proposal:
    return "no change altered the sequences a step, so the rate stays the source's"


def _attention(content: dict[str, Any]) -> Proposal:
    now = content["recompute_config"]
    if now["recompute"] or now["select_recompute"]:
        return "recompute is on already"
    return {"recompute_config.select_recompute": [r"self_attention\.core_attention"]}


def _layers_again(content: dict[str, Any]) -> Proposal:
    if content["recompute_config"]["recompute"]:
        return "recompute is on already"
    return {"recompute_config.recompute": True, "recompute_config.select_recompute": False}


CHANGES = (
    Change("compiled graphs", _graph),
    Change("layer spec", _layers),
    Change("graph kernel", _graph_kernel),
    Change("amp O2", _half),
    Change("accumulation into larger batches", _accumulation),
    Change("data workers", _workers),
    Change("prefetch", _prefetch),
    Change("parallel strategy", _processes),
    Change("optimizer-state sharding", _sharded),
    Change("learning-rate scaling", _learning_rate),
    Change("recompute attention", _attention, "memory"),
    Change("recompute attention and FFN", _layers_again, "memory"),
)


def smallest(content: dict[str, Any]) -> Overrides:
    """The configuration to start from: eager, stock operators, float32, one process, nothing recomputed."""
    base = "model.model_config."
    start: Overrides = {
        "context.mode": 1,
        "context.enable_graph_kernel": False,
        "recompute_config.recompute": False,
        "recompute_config.select_recompute": False,
        f"{base}compute_dtype": "float32",
        f"{base}layernorm_compute_type": "float32",
        f"{base}softmax_compute_type": "float32",
    }
    if _cpu(content):
        start[f"{base}layer_spec"] = "portable"
    return start
