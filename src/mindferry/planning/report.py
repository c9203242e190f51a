"""A plan as JSON fields and as text for a person."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindferry.planning.estimate import MEMORY_PARTS, Estimate, Estimator, Job
from mindferry.planning.formulas import FORMULAS, show
from mindferry.planning.search import ties

GIB = 2**30
# Fujii et al. 2024 (arXiv 2411.06465): of 454 runs none that was estimated below 80 % of the memory ran out of it.
GREEN, AMBER = 0.80, 0.95


def stage_list(values: Any, stages: int) -> list[float]:
    """Per-stage values as plain numbers; a scalar counts for every stage."""
    return [float(x) for x in np.broadcast_to(np.asarray(values, float), (stages,))]


def light(estimate: Estimate, job: Job) -> str:
    """green, amber or red: how sure the memory is to be enough."""
    share = float(estimate.total_bytes.max()) / job.device.memory_bytes
    return "green" if share < GREEN else ("amber" if share < AMBER and estimate.fits else "red")


def as_json(estimate: Estimate, job: Job) -> dict[str, Any]:
    """One entry of `strategies`."""
    st = estimate.strategy
    stages = st.pipeline_stage
    return {
        "data_parallel": st.data_parallel,
        "model_parallel": st.model_parallel,
        "pipeline_stage": stages,
        "micro_batch_num": st.micro_batch_num,
        "optimizer_shard_level": st.optimizer_shard_level,
        "recompute": st.recompute_name,
        "layers_per_stage": list(st.layers_per_stage),
        "memory_per_stage_bytes": [int(x) for x in stage_list(estimate.total_bytes, stages)],
        "bubble_fraction": estimate.bubble_fraction,
        "step_seconds": estimate.step_seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "context_parallel": st.context_parallel,
        "pp_interleave_num": st.pp_interleave_num,
        "batch_size": st.batch_size,
        "global_batch_size": st.global_batch,
        "optimizer_weight_shard_size": st.optimizer_weight_shard_size or -1,
        "use_seq_parallel": st.use_seq_parallel,
        "recompute_layers": list(st.recompute),
        "select_recompute": st.select,
        "offset": st.offset(job.model.num_layers),
        "vocab_size": st.vocab_size or job.model.vocab_size,
        "usable_memory_bytes": estimate.usable_bytes,
        "margin_per_stage_bytes": [
            int(estimate.usable_bytes - x) for x in stage_list(estimate.total_bytes, stages)
        ],
        "memory_parts_per_stage_bytes": {
            name: [int(x) for x in stage_list(estimate.memory[name], stages)] for name in MEMORY_PARTS
        },
        "heaviest_stage": estimate.heaviest_stage,
        "memory_light": light(estimate, job),
        "time_parts_seconds": estimate.parts,
        "communication_bytes_per_step": estimate.communication_bytes,
        "bubble_of_ideal": float(
            FORMULAS["pipeline.bubble_of_ideal"](
                {"p": stages, "v": st.pp_interleave_num, "m": st.micro_batch_num}
            )
        ),
        "label": st.label(),
    }


def table(best: list[Estimate], job: Job) -> str:
    """The ranking as text."""
    lines = [
        f"{'':4}{'strategy':58} {'step':>9} {'tokens/s':>10} {'MFU':>6} {'bubble':>7}  memory of the heaviest stage"
    ]
    for group in ties(best):
        for i in group:
            item = best[i]
            mark = f"{group[0] + 1}{'=' if len(group) > 1 else ' '}"
            heavy = float(item.total_bytes.max())
            lines.append(
                f"{mark:>3} {item.strategy.label():58} {show(item.step_seconds, 's'):>9} "
                f"{item.tokens_per_second:>10,.0f} {100 * item.mfu:>5.1f}% {100 * item.bubble_fraction:>6.1f}%  "
                f"{heavy / GIB:.1f} of {item.usable_bytes / GIB:.1f} GiB, {light(item, job)}"
            )
    return "\n".join(lines)


def stage_table(estimate: Estimate) -> str:
    """Memory of each stage by part, in GiB; of many stages the first, the heaviest and the last."""
    stages = estimate.strategy.pipeline_stage
    rows = range(stages) if stages <= 8 else sorted({0, 1, estimate.heaviest_stage, stages - 2, stages - 1})
    names = [name for name in MEMORY_PARTS if np.max(estimate.memory[name]) > 0]
    head = f"{'stage':>5} {'layers':>6} " + " ".join(f"{_SHORT[name]:>11}" for name in names)
    lines = [head + f" {'total':>8} {'margin':>8}   (GiB)"]
    for i in rows:
        parts = " ".join(f"{stage_list(estimate.memory[name], stages)[i] / GIB:>11.2f}" for name in names)
        total = stage_list(estimate.total_bytes, stages)[i]
        margin = (estimate.usable_bytes - total) / GIB
        lines.append(
            f"{i:>5} {estimate.strategy.layers_per_stage[i]:>6} {parts} {total / GIB:>8.2f} {margin:>8.2f}"
        )
    return "\n".join(lines)


def breakdown(estimate: Estimate) -> str:
    """Where the step's time goes, and what a device sends in a step."""
    step = estimate.step_seconds
    shares = [
        f"{name.replace('_', ' ')} {100 * s / step:.1f} %"
        for name, s in estimate.parts.items()
        if s >= 0.0005 * step
    ]
    sent = [
        f"{name.replace('_', ' ')} {size / 1e9:.3g} GB"
        for name, size in estimate.communication_bytes.items()
        if size
    ]
    return f"time of the first: {', '.join(shares)}\nsent a device and step: {', '.join(sent) or 'nothing'}"


_SHORT = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "states",
    "accumulated_gradients": "accumulated",
    "gathered_weights": "gathered",
    "activations": "activations",
    "attention_mask": "mask",
    "logits": "logits",
}


def explain(estimate: Estimate, job: Job, stage: int | None = None) -> list[str]:
    """Every formula behind an estimate, with the numbers put in, for `stage` (the heaviest unless given)."""
    est = Estimator(job)
    st = estimate.strategy
    stage = estimate.heaviest_stage if stage is None else stage
    sym = est.symbols(st)
    cost = est.layer_symbols(sym)
    lines = [f"stage {stage} of {st.pipeline_stage}, {st.label()}"]
    values = {**sym, "layer_split": sym["layer_split"], "layer_whole": sym["layer_whole"]}
    for name in ("params.layer_split", "params.layer_whole", "params.total", "params.stage"):
        lines.append(FORMULAS[name].explain(values, stage))
    for part, name, symbols in est.memory_terms(st, sym):
        if float(np.max(FORMULAS[name](symbols))) > 0:
            lines.append(f"{part}: {FORMULAS[name].explain(symbols, stage)}")
    kept = ["activations.layer_whole", "activations.layer_split"]
    kept.append("activations.layer_flash" if job.flash_attention else "activations.layer_core")
    if st.select:
        kept.append("activations.layer_mlp_recomputed")
    lines += [FORMULAS[name].explain(sym, stage) for name in kept]
    alive = "pipeline.alive_interleaved" if st.pp_interleave_num > 1 else "pipeline.alive"
    lines.append(FORMULAS[alive].explain({**sym, "stage": np.arange(st.pipeline_stage)}, stage))
    for name in ("flops.layer_linear", "flops.layer_core", "flops.head"):
        lines.append(FORMULAS[name].explain(cost, stage))
    for name in ("time.layer_forward", "time.layer_backward", "pipeline.bubble", "pipeline.bubble_of_ideal"):
        lines.append(FORMULAS[name].explain(cost, stage))
    if st.model_parallel > 1:
        lines.append(FORMULAS["comm.layer_forward"].explain(sym, stage))
    if st.pipeline_stage > 1:
        lines.append(FORMULAS["comm.pipeline"].explain(sym, stage))
    totals = {
        "model_step": estimate.model_flops,
        "hardware_step": estimate.hardware_flops,
        "step": estimate.step_seconds,
        "n": st.devices,
        "peak": sym["peak"],
    }
    lines += [FORMULAS["mfu"].explain(totals), FORMULAS["hfu"].explain(totals)]
    cal = job.calibration
    if cal.source:
        lines.append(
            f"calibrated by {cal.source}: activations x {cal.activations:.3f}, + {cal.constant_bytes / GIB:.2f} GiB, "
            f"computing time x {cal.time:.3f}"
        )
    dev = job.device
    if dev.confidence == "measured":
        lines.append(
            f"{dev.name}: measured factors on model states {dev.static_factor:.3f}, activations "
            f"{dev.activation_factor:.3f}, scores {dev.attention_factor:.3f}, logits {dev.logit_factor:.3f}; the "
            f"process itself {dev.resident_bytes / GIB:.2f} GiB"
        )
    lines += [f"{name}: {seconds:.6g} s" for name, seconds in estimate.parts.items() if seconds]
    return lines
