"""Rules about the pipeline, recompute, batches, data and the optimizer; see constraints.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mindferry.planning.layout import BEFORE, BUILD, COMPILE, SILENT, Layout, Rule, registrar
from mindferry.planning.strategy import divisors, place_layers

RULES: list[Rule] = []
_rule = registrar(RULES)


# ---- the pipeline ------------------------------------------------------------------------------------------


@_rule("pipeline.layers", BUILD, "mindformers models/modeling_utils.py")
def _layers(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    p, v, n = x.pipeline_stage, x.virtual, x.num_layers
    if not x.semi_auto or p == 1:
        return
    if n < p:
        yield (
            "num_layers of model should be greater than or equal to pipeline_stage, but get num_layers "
            f"({n}) < pp({p})",
            f"pipeline_stage at most {n}",
        )
    elif v * p > n:
        yield (
            "num_layers should be greater than `pp * pp_interleave_num`, but got num_layers : "
            f"{n} and pp * pp_interleave_num = {p * v}.",
            f"pp_interleave_num at most {n // p}",
        )


@_rule("pipeline.offset", BUILD, "mindformers parallel_core/training_graph/transformer/utils.py LayerSetting")
def _offset(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    p, v, n = x.pipeline_stage, x.virtual, x.num_layers
    if not x.semi_auto or p * v <= 1 or n < p * v:
        return
    try:
        offset = np.array(x.offset, np.int64)
    except (ValueError, TypeError, OverflowError):
        yield f"offset {x.offset!r} is no number, list or list of lists", f"a list of {p} whole numbers"
        return
    base, left = divmod(n, p * v)
    row = [int(i < left) for i in range(p)]
    way = (
        f"for example offset: {row}"
        if v == 1 and left < p
        else f"numbers that sum to {left}, [{v}][{p}] of them"
    )
    if offset.ndim >= 1 and offset.shape[-1] != p:
        yield (
            f"offset.shape[-1] should equal to `pp` ({p}), but got ({offset.shape[-1]}). `offset`: {offset}",
            way,
        )
    elif offset.ndim >= 2 and offset.shape[-2] != v:
        yield (
            f"offset.shape[-2] should equal to `pp_interleave_num` ({v}), but got ({offset.shape[-2]}). "
            f"`offset`: {offset}",
            way,
        )
    elif offset.ndim > 2:
        yield f"offset has {offset.ndim} dimensions, expected at most 2", way
    elif offset.sum() != left:
        yield (
            f"The sum of `offset` ({offset.sum()}) should equal to remainder of `num_layers` ({n}) % (pp "
            f"({p}) * pp_interleave_num ({v})) = {left}",
            way,
        )
    else:
        yield from _offset_counts(np.broadcast_to(offset, (v, p)) + base, base, way, p * v)


def _offset_counts(counts: Any, base: int, way: str, chunks: int) -> Iterator[tuple[str, str]]:
    flat = counts.reshape(-1)
    if flat[0] < 0:
        yield f"Head stage has negative layers. Offset must be ≥ {-base}.", way
    if flat[-1] < 0:
        yield f"Tail stage has negative layers. Offset must be ≥ {-base}.", way
    if chunks > 2 and (flat[1:-1] < 1).any():
        yield f"Some middle stage has fewer than 1 layer. Offset must be ≥ {1 - base}.", way


@_rule("pipeline.offset-broadcast", SILENT, "planner")
def _broadcast(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    p, v, n = x.pipeline_stage, x.virtual, x.num_layers
    if not x.semi_auto or p * v <= 1 or n < p * v or next(_offset(x), None):
        return
    promised = np.broadcast_to(np.array(x.offset, np.int64), (v, p)) + n // (p * v)
    if promised.sum() != n:
        placed = place_layers(n, p, v, x.offset)
        yield (
            f"offset {x.offset} passes LayerSetting's check (the sum is taken before the broadcast) but "
            f"promises {promised.tolist()} = {promised.sum()} layers; the {n} layers end up as {placed}",
            f"write offset out as [{v}][{p}] numbers" if v > 1 else f"write offset out as {p} numbers",
        )


@_rule("pipeline.offset-legacy", SILENT, "planner")
def _offset_legacy(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    if (
        x.use_legacy
        and x.family == "gpt2"
        and x.semi_auto
        and x.pipeline_stage > 1
        and x.num_layers % x.pipeline_stage
    ):
        yield (
            f"the legacy GPT-2 ignores offset: {x.num_layers} layers on {x.pipeline_stage} stages come out "
            "uneven without being asked for",
            f"pipeline_stage one of {[i for i in divisors(x.num_layers) if x.devices % i == 0]}",
        )


@_rule("pipeline.micro_batches", COMPILE, "MindSpore C++ pipeline transformer")
def _micro_batches(x: Layout) -> Iterator[tuple[str, str]]:
    p, m = x.pipeline_stage, x.micro_batch_num
    if x.semi_auto and p > 1 and m * max(1, x.seq_split_num) < p:
        yield (
            "The size of micro_batch must be greater than or equal to stage_num. But got the size of "
            f"micro_batch is {m} and the stage_num is {p}",
            f"micro_batch_num at least {p}; {2 * p} to {4 * p} keeps the bubble small",
        )


@_rule("pipeline.ignored-virtual", SILENT, "planner", "warning")
def _ignored_virtual(x: Layout) -> Iterator[tuple[str, str]]:
    if x.pp_interleave_num > 1 and x.virtual == 1:
        yield (
            f"pp_interleave_num {x.pp_interleave_num} takes no effect without "
            "pipeline_config.pipeline_interleave: True and a pipeline",
            "set both or neither",
        )


@_rule(
    "pipeline.scheduler",
    BEFORE,
    "mindformers tools/check_rules.py, trainer/base_trainer.py, transformer_config.py",
)
def _scheduler(x: Layout) -> Iterator[tuple[str, str]]:
    p, m = x.pipeline_stage, x.micro_batch_num
    if x.pipeline_scheduler == "seqvpp" and x.seq_split_num == 1:
        yield (
            "It is not supported that pipeline_scheduler is seqvpp when seq_split_num is 1, please set "
            "pipeline_scheduler to seqpipe.",
            "pipeline_scheduler: seqpipe",
        )
    if x.pipeline_scheduler in ("seqpipe", "seqvpp") and x.seq_split_num > 1 and x.recompute is True:
        yield "When using seq pipe, cannot apply full recompute.", "recompute: False, or a list per stage"
    if x.pipeline_scheduler != "zero_bubble_v":
        return
    if x.pp_interleave_num != 2:
        yield (
            "When zero_bubble_v is enabled, pp_interleave_num must be set to 2. "
            f"But get {x.pp_interleave_num}.",
            "pp_interleave_num: 2",
        )
    if p < 2:
        yield (
            f"When zero_bubble_v is enabled, pp must be greater than or equal to 2. But get {p}.",
            "pipeline_stage at least 2",
        )
    if m < 2 * p:
        yield (
            f"When zero_bubble_v is enabled, micro_batch_num({m}) >= 2 * stage_num({p}) must be met.",
            f"micro_batch_num at least {2 * p}",
        )
    flat = x.recompute
    if isinstance(flat, (list, tuple)) and (all(isinstance(i, (int, bool)) for i in flat) or len(flat) < 2):
        yield (
            "When zero_bubble_v is enabled, 'recompute' must provide explicit 2D configuration for each "
            "interleave, such as [[stage0_recompute, stage1_recompute], [stage0_recompute, "
            "stage1_recompute]].",
            "recompute as [2][pipeline_stage]",
        )


@_rule("pipeline.auto", BEFORE, "mindformers core/context/parallel.py")
def _auto_pipeline(x: Layout) -> Iterator[tuple[str, str]]:
    if x.auto_pipeline:
        yield (
            "Automatic pipeline stage is unavailable for now, please set auto_pipeline to False in the yaml.",
            "state pipeline_stage",
        )


# ---- recompute ---------------------------------------------------------------------------------------------


@_rule("recompute.length", BEFORE, "mindformers tools/check_rules.py")
def _recompute(x: Layout) -> Iterator[tuple[str, str]]:
    if x.swap:
        return
    for key in ("recompute", "select_recompute", "select_comm_recompute"):
        value, p = getattr(x, key), x.pipeline_stage
        if isinstance(value, list) and len(value) > p and all(isinstance(n, int) for n in value):
            yield (
                f"length of {key} should be equal or less than pipeline_stage number, but get length of "
                f"{key} ({value}) > pp({p})",
                f"one number a stage, {p} of them",
            )


@_rule("recompute.short", SILENT, "planner", "warning")
def _recompute_short(x: Layout) -> Iterator[tuple[str, str]]:
    value = x.recompute
    if (
        isinstance(value, list)
        and value
        and all(isinstance(n, int) for n in value)
        and len(value) < x.pipeline_stage
    ):
        yield (
            f"recompute {value} names {len(value)} of {x.pipeline_stage} stages; the others keep every "
            "activation",
            f"{x.pipeline_stage} numbers",
        )


@_rule("recompute.slice", BUILD, "mindformers parallel_core/transformer_config.py")
def _slice(x: Layout) -> Iterator[tuple[str, str]]:
    if x.recompute_slice_activation and not x.use_legacy:
        yield (
            "For recompute, `recompute_slice_activation` is not supported in Mcore.",
            "recompute_slice_activation: False; use_seq_parallel splits the kept inputs instead",
        )


@_rule("recompute.select-nothing", SILENT, "planner", "warning")
def _select_nothing(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    if x.select_recompute is True and not x.gated_linear_unit and not x.use_legacy:
        yield (
            "select_recompute: True means the patterns mlp.mul and mlp.activation_func.silu, and a model "
            "without a gate has neither: nothing is recomputed",
            r"select_recompute: ['mlp\.activation_func\.gelu', 'self_attention\.core_attention']",
        )


# ---- batch and data ----------------------------------------------------------------------------------------


@_rule("batch.global", SILENT, "mindformers trainer/base_trainer.py")
def _global_batch(x: Layout) -> Iterator[tuple[str, str]]:
    if x.global_batch is not None and x.effective_batch != x.global_batch:
        unit = x.batch_size * x.data_parallel * x.micro_batch_interleave_num
        wanted, rest = divmod(x.global_batch, unit)
        key = "micro_batch_num" if x.pipeline_stage > 1 else "gradient_accumulation_steps"
        low = x.pipeline_stage if x.pipeline_stage > 1 else 1
        if rest or wanted < low:
            way = f"a global batch that {unit} divides, at least {unit * low}"
        else:
            way = f"{key}: {wanted}"
        yield (
            f"the global batch comes out as {x.effective_batch} = batch_size {x.batch_size} x data_parallel "
            f"{x.data_parallel} x micro-batches {x.micro_batches} x micro_batch_interleave_num "
            f"{x.micro_batch_interleave_num}, not {x.global_batch}",
            way,
        )


@_rule("batch.ignored", SILENT, "mindformers trainer/base_trainer.py", "warning")
def _ignored_batches(x: Layout) -> Iterator[tuple[str, str]]:
    if x.semi_auto and x.pipeline_stage == 1 and x.micro_batch_num > 1:
        yield (
            "When pipeline parallel is not enabled, config.parallel_config.micro_batch_num does not take "
            "effect. Reset it to 1.",
            f"runner_config.gradient_accumulation_steps: {x.micro_batch_num}",
        )
    if x.semi_auto and x.pipeline_stage > 1 and x.gradient_accumulation_steps > 1:
        yield (
            "gradient_accumulation_steps will not take effect when using pipeline parallel, reset the "
            f"gradient_accumulation_steps from {x.gradient_accumulation_steps} to 1.",
            "raise parallel_config.micro_batch_num instead",
        )
    if not x.semi_auto and x.gradient_accumulation_steps > 1:
        mode = "data_parallel" if x.use_parallel else "stand_alone"
        yield (
            "gradient_accumulation_steps currently need to be used in semi_auto_parallel mode, but got "
            f"{mode} mode, please check your runner config and parallel config. Reset the "
            f"gradient_accumulation_steps from {x.gradient_accumulation_steps} to 1. ",
            "parallel_mode: 1, or a larger batch_size",
        )


@_rule("parallel.mode", SILENT, "mindformers trainer/base_trainer.py")
def _mode(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.semi_auto and x.product // max(1, x.data_parallel) > 1:
        yield (
            "model_parallel, context_parallel and pipeline_stage are reset to 1 outside semi_auto_parallel",
            "use_parallel: True and parallel.parallel_mode: 1",
        )


@_rule("parallel.off", SILENT, "mindformers core/context/build_context.py")
def _parallel_off(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.use_parallel and x.devices > 1:
        yield (
            f"use_parallel is not True: each of the {x.devices} processes would train alone, on the same data",
            "use_parallel: True",
        )


@_rule("data.strategy", BEFORE, "mindformers trainer/base_trainer.py")
def _dataset(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.semi_auto or x.full_batch:
        return
    value = x.dataset_strategy
    d = x.data_parallel
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(i, (list, tuple)) and i for i in value)
    ):
        yield (
            "If set full_batch=False, dataset_strategy must be set as 'tuple', such as ((dp, 1), ).",
            f"one [{d}, 1] a column of the data set",
        )
        return
    if value[0][0] != d:
        yield (
            f"data_parallel {d} should be equal to dataset_strategy[0][0] {value[0][0]}.",
            f"dataset_strategy entries that start with {d}",
        )
    if x.input_columns and len(value) != len(x.input_columns):
        yield (
            f"dataset_strategy has {len(value)} entries for the {len(x.input_columns)} columns "
            f"{list(x.input_columns)}",
            "one entry a column, in the same order",
        )


# ---- optimizer parallel ------------------------------------------------------------------------------------


@_rule("optimizer.config", BEFORE, "MindSpore parallel/_auto_parallel_context.py")
def _optimizer(x: Layout) -> Iterator[tuple[str, str]]:
    config = x.parallel_optimizer_config
    known = {"gradient_accumulation_shard", "parallel_optimizer_threshold", "optimizer_weight_shard_size",
    "optimizer_level"}  # fmt: skip
    for key in config:
        if key not in known:
            yield f"Unknown config: ['{key}']", f"known keys: {', '.join(sorted(known))}"
    level = config.get("optimizer_level")
    if level is not None and level not in ("level1", "level2", "level3"):
        yield (
            f"Optimizer level should in ['level1', 'level2', 'level3'], but got {level}",
            "level1, level2 or level3",
        )
    elif level not in (None, "level2") and config.get("gradient_accumulation_shard"):
        yield (
            f"The optimizer_level is set as {level}, thus cannot set grad_accumulation_shard as True.",
            "leave gradient_accumulation_shard out, or optimizer_level: level2",
        )


@_rule("optimizer.shard_size", BUILD, "MindSpore")
def _shard_size(x: Layout) -> Iterator[tuple[str, str]]:
    size = x.parallel_optimizer_config.get("optimizer_weight_shard_size", -1)
    if (
        x.enable_parallel_optimizer
        and size != -1
        and (not isinstance(size, int) or isinstance(size, bool) or size < 1)
    ):
        yield f"optimizer_weight_shard_size must be a positive integer or -1, but got {size!r}", "-1"


@_rule("optimizer.shard_ranks", SILENT, "planner", "warning")
def _shard_ranks(x: Layout) -> Iterator[tuple[str, str]]:
    size, d = x.parallel_optimizer_config.get("optimizer_weight_shard_size", -1), x.data_parallel
    if not x.enable_parallel_optimizer or not isinstance(size, int) or size < 1:
        return
    if size > d:
        yield f"optimizer_weight_shard_size {size} is a maximum: {d} ranks share the dense weights", "-1"
    elif d % size:
        yield (
            f"optimizer_weight_shard_size {size} does not divide data_parallel {d}",
            f"one of {divisors(d)}, or -1",
        )


@_rule("optimizer.alone", SILENT, "planner", "warning")
def _optimizer_alone(x: Layout) -> Iterator[tuple[str, str]]:
    if x.enable_parallel_optimizer and x.data_parallel == 1:
        yield (
            "enable_parallel_optimizer has nothing to share with data_parallel 1",
            "enable_parallel_optimizer: False",
        )


@_rule("optimizer.rows", SILENT, "mindformers tools/check_rules.py", "warning")
def _rows(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    if not (x.semi_auto and x.enable_parallel_optimizer):
        return
    for name in ("vocab_size", "hidden_size"):
        value = getattr(x, name)
        if value % x.devices:
            yield (
                f"{name}({value}) % device_num({x.devices}) = {value % x.devices} != 0, which may cause the "
                "optimizer parallel of the relevant parameters to fail",
                "those parameters stay whole on every rank; the plan's memory counts them so",
            )


@_rule("interleave.fine", BEFORE, "mindformers tools/check_rules.py")
def _fine(x: Layout) -> Iterator[tuple[str, str]]:
    if x.fine_grain_interleave > 1 and not x.use_seq_parallel and x.context_parallel <= 1:
        yield (
            "When use fine_grain_interleave without context_parallel, use_seq_parallel must be set to "
            "'True'.",
            "use_seq_parallel: True",
        )
    if not x.use_legacy and x.micro_batch_interleave_num > 1:
        yield (
            "micro_batch_interleave_num > 1, is not supported when use_legacy=False.",
            "micro_batch_interleave_num: 1",
        )
    if not x.use_legacy and x.seq_split_num > 1:
        yield "seq_split_num > 1, is not supported when use_legacy=False.", "seq_split_num: 1"
