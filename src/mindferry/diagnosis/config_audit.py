"""The article's list of eight, and what goes with it, as an audit of a run.yaml: reads, changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

State = Literal["on", "off", "right", "wrong"]
HALF = ("float16", "bfloat16")
# select_recompute: true means patterns that only gated MLPs have; attention must be named.
ATTENTION_ONLY = [r"self_attention\.core_attention"]


@dataclass(frozen=True)
class Item:
    """One line of the audit.

    Attributes:
        state: "right" and "on" need nothing; "off" is room for more; "wrong" does not fit this hardware or model.
        key: dotted key of run.yaml.
        line: its line in the file, 0 where the key is not written there.
        found, wanted: its value, and the one to set ("" where it may stay).
    """

    name: str
    state: State
    key: str
    line: int
    found: Any
    wanted: Any
    why: str


@dataclass(frozen=True)
class Facts:
    """What the audit looks at.

    Attributes:
        content: the validated run.yaml.
        recipe: key -> value as migrate decided them, {} when unknown.
        curve: the run's metrics.
        cores: processor cores of this machine.
    """

    content: dict[str, Any]
    recipe: dict[str, Any]
    curve: Any
    cores: int

    def __getitem__(self, dotted: str) -> Any:
        node: Any = self.content
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @property
    def cpu(self) -> bool:
        return bool(self["context.device_target"] == "CPU")


# What an item function yields: state, key, wanted value, reason.
Judgement = tuple[State, str, Any, str]


def graph_kernel(f: Facts) -> Iterator[Judgement]:
    key = "context.enable_graph_kernel"
    if f[key] and f["context.mode"] == 1:
        yield "wrong", key, False, "fusion works on compiled graphs, and context.mode 1 compiles none"
    elif f[key]:
        yield "on", key, "", "switch it off while comparing numbers with the source: fusion changes rounding"
    elif f.cpu:
        yield "right", key, "", "off; on a CPU it pays rarely: `mindferry tune` measures it"
    else:
        yield "off", key, True, "fuses small operators into one; it is off unless asked for"


def mixed_precision(f: Facts) -> Iterator[Judgement]:
    base, dtype = "model.model_config.", f["model.model_config.compute_dtype"]
    key = f"{base}compute_dtype"
    if dtype not in HALF:
        if f.cpu:
            yield "right", key, "", "float32: a CPU computes half precision no faster with portable layers"
        else:
            yield (
                "off",
                key,
                "bfloat16",
                "matrix products in half precision are several times faster on this device",
            )
        return
    for part in ("layernorm_compute_type", "softmax_compute_type"):
        if f[base + part] in HALF:
            yield (
                "wrong",
                base + part,
                "float32",
                "norms and softmax lose accuracy in half precision (O2 keeps them)",
            )
    if dtype == "float16" and not isinstance(f["runner_wrapper.scale_sense"], dict):
        yield (
            "wrong", "runner_wrapper.scale_sense", "type: DynamicLossScaleUpdateCell",
            "float16 gradients underflow without a loss scale that adapts",
        )  # fmt: skip
    if dtype == "bfloat16" and f.cpu and f[f"{base}layer_spec"] == "portable":
        yield (
            "wrong",
            key,
            "float32",
            "MindSpore's CPU operators have no bfloat16; portable layers run float32 anyway",
        )
    else:
        yield "on", key, "", f"matrix products in {dtype}"


def recompute(f: Facts) -> Iterator[Judgement]:
    from mindferry.targets.recompute import BARE_DOT, patterns

    key, partly = "recompute_config.recompute", "recompute_config.select_recompute"
    bare = [pattern for pattern in patterns(f[partly]) if BARE_DOT.search(pattern)]
    dropout = [f[f"model.model_config.{n}_dropout"] or 0 for n in ("hidden", "attention")]
    if f[key] is True and f[partly]:
        yield "wrong", partly, False, "recompute of whole layers contains the selective one"
    elif (f[key] or f[partly]) and any(dropout) and f["model.model_config.layer_spec"] == "reference":
        yield "wrong", key, False, "mindformers' guide: recompute cannot be used with dropout in graph mode"
    elif f[partly] is True and not f["model.model_config.gated_linear_unit"]:
        yield "wrong", partly, ATTENTION_ONLY, "true means parts of a gated MLP, which this model has not"
    elif bare:
        yield "wrong", partly, [p.replace(".", r"\.") for p in bare], f"{bare[0]} matches nothing: write \\."
    elif (f[key] or f[partly]) and f.cpu and f["model.model_config.layer_spec"] != "fused":
        why = "MindSpore's recompute takes time and does not lower the peak on a CPU; layer_spec fused does"
        yield "wrong", key if f[key] else partly, False, why
    elif f[key]:
        yield (
            "off",
            partly,
            ATTENTION_ONLY,
            "whole layers are computed twice, about a third more work; attention alone is cheaper",
        )
    elif f[partly]:
        yield "on", partly, "", "selected parts only"
    else:
        yield (
            "right",
            key,
            "",
            "off: the fastest while memory suffices; try select_recompute first when it does not",
        )


def data_pipeline(f: Facts) -> Iterator[Judgement]:
    workers, prefetch = "train_dataset.num_parallel_workers", "train_dataset.prefetch_size"
    data, compute = (f.curve[name][3:] for name in ("data_time", "compute_time"))
    both = np.isfinite(data) & np.isfinite(compute)
    share = float(np.median(data[both] / compute[both])) if both.sum() >= 5 else None
    measured = f"data_time is {share:.0%} of compute_time" if share is not None else "not measured yet"
    if share is not None and share > 0.2:
        more = min(2 * max(int(f[workers] or 1), 1), 2 * f.cores)
        yield "wrong", workers, more, f"{measured}: the device waits for data"
    elif f.cpu or share is not None:
        yield "right", workers, "", f"{measured}; on a CPU, more workers take cores from the computation"
    elif (f[workers] or 1) < f.cores:
        yield "off", workers, f.cores, "1 to 2 times the cores feed a device"
    else:
        yield "on", workers, "", measured
    if not 2 <= int(f[prefetch] or 0) <= 4:
        yield "wrong", prefetch, 2, "2 to 4 batches hide a hiccup; fewer stall, more only take memory"


def accumulation(f: Facts) -> Iterator[Judgement]:
    key = "parallel_config.micro_batch_num"
    stages, micro = f["parallel_config.pipeline_stage"] or 1, f[key] or 1
    if stages > 1 and micro < stages:
        yield "wrong", key, 2 * stages, f"fewer micro-batches than the {stages} stages leave stages idle"
    elif stages > 1 and micro < 2 * stages:
        yield "off", key, 2 * stages, f"the bubble is {(stages - 1) / (micro + stages - 1):.0%} of a step"
    steps = f["runner_config.gradient_accumulation_steps"] or 1
    batch = f["runner_config.batch_size"]
    why = f"{batch} x {steps} sequences a step"
    yield ("on" if steps > 1 else "right"), "runner_config.gradient_accumulation_steps", "", why


def parallel(f: Facts) -> Iterator[Judgement]:
    ways = [
        int(f[f"parallel_config.{n}"] or 1) for n in ("data_parallel", "model_parallel", "pipeline_stage")
    ]
    product = int(np.prod(ways))
    text = f"data {ways[0]} x model {ways[1]} x pipeline {ways[2]} = {product} devices"
    if product > 1 and not f["use_parallel"]:
        yield "wrong", "use_parallel", True, f"{text}, but parallel training is off"
    elif ways[1] > 8:
        yield (
            "wrong",
            "parallel_config.model_parallel",
            8,
            f"{text}; beyond one node its traffic leaves the fast links",
        )
    elif product == 1 and f["use_parallel"]:
        yield "off", "parallel_config.data_parallel", "", f"{text}: start with data parallelism alone"
    else:
        yield ("on" if product > 1 else "right"), "parallel_config.data_parallel", "", text


def learning_rate(f: Facts) -> Iterator[Judgement]:
    key = "lr_schedule.learning_rate"
    batch = f["runner_config.batch_size"] * (f["runner_config.gradient_accumulation_steps"] or 1)
    before = (
        f.recipe.get("batch_size"),
        f.recipe.get("gradient_accumulation_steps"),
        f.recipe.get("learning_rate"),
    )
    if not all(isinstance(v, (int, float)) for v in before):
        yield "right", key, "", "what the source used is not in migration.json"
        return
    source_batch, source_rate = float(before[0]) * float(before[1]), float(before[2])  # type: ignore[arg-type]
    ratio = batch * int(f["parallel_config.data_parallel"] or 1) / source_batch
    if ratio != 1 and f[key] == source_rate:
        yield (
            "wrong", key, float(f"{source_rate * ratio:.6g}"),
            f"{ratio:g} times the sequences a step at the old rate; linear scaling gives this (the root: "
            f"{source_rate * ratio**0.5:.3g})",
        )  # fmt: skip
    else:
        yield "right", key, "", f"{f[key]:g} for {ratio:g} times the sequences of migrate's decision"


def optimizer_shards(f: Facts) -> Iterator[Judgement]:
    key, ways = "parallel.enable_parallel_optimizer", int(f["parallel_config.data_parallel"] or 1)
    if f[key]:
        yield (
            ("on", key, "", "")
            if ways > 1
            else ("wrong", key, False, "with data_parallel 1 nothing can be sharded")
        )
    elif ways > 1:
        yield "off", key, True, f"saves {1 - 1 / ways:.0%} of the optimizer's memory on each of {ways} ranks"
    else:
        yield "right", key, "", "one replica: nothing to shard"


def execution(f: Facts) -> Iterator[Judgement]:
    if f["context.mode"] == 1:
        yield (
            "wrong",
            "context.mode",
            0,
            "PyNative is for debugging; compiled graphs train several times faster",
        )
    else:
        yield "on", "context.mode", "", "compiled graphs"
    spec = "model.model_config.layer_spec"
    if f.cpu and f[spec] == "portable":
        yield (
            "off",
            spec,
            "fused",
            "mindferry's CPU kernels for the whole layer; `mindferry bench` shows what they give",
        )
    elif not f.cpu and f[spec] == "portable":
        yield "off", spec, "reference", "mindformers' own modules use the device's attention kernel"
    else:
        yield "on", spec, "", str(f[spec])


# In the article's order; the last is what the list takes for granted.
AUDIT: tuple[tuple[str, Callable[[Facts], Iterator[Judgement]]], ...] = (
    ("graph kernel fusion", graph_kernel),
    ("mixed precision", mixed_precision),
    ("recompute", recompute),
    ("data workers and prefetch", data_pipeline),
    ("accumulation and batch", accumulation),
    ("parallel strategy", parallel),
    ("learning-rate scaling", learning_rate),
    ("optimizer-state sharding", optimizer_shards),
    ("mode and layers", execution),
)


def _recipe(run: Path) -> dict[str, Any]:
    try:
        rows = json.loads((run / "migration.json").read_text(encoding="utf-8"))["recipe"]
        return {row["key"]: row["value"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _lines(path: Path) -> dict[str, int]:
    """Dotted key -> line number, from 1."""
    from ruamel.yaml import YAML

    found: dict[str, int] = {}

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            place = node.lc.key(key)[0] + 1
            found[f"{prefix}{key}"] = place
            if hasattr(node[key], "lc") and hasattr(node[key], "items"):
                walk(node[key], f"{prefix}{key}.")

    walk(YAML().load(path.read_text(encoding="utf-8")), "")
    return found


def audit(path: Path) -> list[Item]:
    """The items for a run.yaml, or for the one in a run directory.

    Raises:
        UsageError: the file is missing or no valid run.yaml.
    """
    from mindferry.checking.curves import Curve, read_curve
    from mindferry.targets import run_yaml

    path = path / "run.yaml" if path.is_dir() else path
    content = run_yaml.read(path)
    trained = (path.parent / "metrics.jsonl").is_file()
    curve = read_curve(path.parent) if trained else Curve("run", "none")
    facts = Facts(content, _recipe(path.parent), curve, os.cpu_count() or 1)
    lines = _lines(path)
    return [
        Item(name, state, key, lines.get(key, 0), facts[key], wanted, why)
        for name, judge in AUDIT
        for state, key, wanted, why in judge(facts)
    ]
