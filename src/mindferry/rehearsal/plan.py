"""What is rehearsed: a run.yaml, a strategy, and sizes small enough for this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.partition.layout import Grid
from mindferry.spec import ModelSpec, RopeScaling, spec_from
from mindferry.targets import run_yaml
from mindferry.targets.model_keys import DEFAULTS
from mindferry.targets.run_directory import RunDirectory
from mindferry.weights.target import target_names
from mindferry.weights.transforms import TargetLayout

SCALES = ("tiny", "full")
# Narrower than 32, normalisation is ill-conditioned and float32 misses 1e-5.
TINY_HEAD, TINY_WIDTH, TINY_LENGTH, TINY_VOCAB, TINY_BATCH = 4, 32, 16, 96, 2
MAX_PROCESSES = 64


@dataclass(frozen=True)
class Options:
    """What the command line may say; None leaves it to run.yaml.

    Attributes:
        yaml: a training YAML of the run other than run.yaml.
        grid: degrees of parallelism.
        micro_batches: of a step; at least as many as stages.
        sequence: sequence parallel.
        offset: model_config.offset.
        steps: optimizer steps to rehearse.
    """

    yaml: Path | None = None
    grid: Grid | None = None
    micro_batches: int | None = None
    sequence: bool | None = None
    offset: Any = None
    scale: str = "tiny"
    steps: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A rehearsal that can be set up.

    Attributes:
        yaml: the training YAML whose strategy it is.
        full: the run's model; `spec` the one that is rehearsed.
        micro_batches, batch_size: of a step and replica as rehearsed; sequences.
        per_token: the loss is averaged over the tokens of a step instead of micro-batch by micro-batch.
        clip: largest norm of the gradient.
        frozen: parameters without a gradient.
        notes: what differs from the run.
    """

    run: RunDirectory
    yaml: Path
    full: ModelSpec
    spec: ModelSpec
    layout: TargetLayout
    grid: Grid
    offset: Any
    full_micro_batches: int
    micro_batches: int
    batch_size: int
    seq_length: int
    sequence: bool
    per_token: bool
    clip: float
    scale: str
    steps: int
    seed: int
    overridden: bool
    frozen: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def make(run: RunDirectory, options: Options) -> Plan:
    """The rehearsal that `options` ask for.

    Raises:
        UsageError: run.yaml is damaged, or asks for what is not rehearsed.
    """
    yaml = options.yaml or run.yaml
    content = run_yaml.read(yaml)
    settings = {**DEFAULTS, **content["model"]["model_config"]}
    parallel = content["parallel_config"]
    _refuse(yaml, settings, parallel, options)
    grid = options.grid or Grid(
        parallel["data_parallel"], parallel["model_parallel"], parallel["pipeline_stage"]
    )
    if grid.ranks > MAX_PROCESSES:
        raise UsageError(
            f"{grid}: {grid.ranks} processes, expected at most {MAX_PROCESSES} on one machine",
            remedy="rehearse a smaller dp: replicas are alike",
            id="rehearse.too-many",
        )
    full = spec_of(settings, str(yaml))
    tiny = options.scale == "tiny"
    spec = shrunk(full, grid.model_parallel) if tiny else full
    betas = frozenset(name for name in target_names(spec) if name.endswith(".beta"))
    micro = _micro_batches(content, grid, options)
    seq_length = settings["seq_length"]
    offset = settings["offset"] if options.offset is None else options.offset
    batch = content["runner_config"]["batch_size"]
    return Plan(
        run=run,
        yaml=yaml,
        full=full,
        spec=spec,
        layout=packing_of(settings),
        grid=grid,
        offset=offset,
        full_micro_batches=micro,
        micro_batches=min(micro, 2 * grid.pipeline_stage) if tiny else micro,
        batch_size=min(batch, TINY_BATCH) if tiny else batch,
        seq_length=alike(seq_length, TINY_LENGTH, grid.model_parallel) if tiny else seq_length,
        sequence=parallel["use_seq_parallel"] if options.sequence is None else options.sequence,
        per_token=content["runner_wrapper"].get("calculate_per_token_loss", False),
        clip=content["runner_wrapper"]["max_grad_norm"],
        scale=options.scale,
        steps=options.steps,
        seed=options.seed,
        overridden=options.grid is not None,
        frozen=frozenset() if settings["trainable_norm_bias"] else betas,
        notes=_notes(settings),
    )


def _refuse(yaml: Path, settings: dict[str, Any], parallel: dict[str, Any], options: Options) -> None:
    """What mindferry cannot rehearse is said, not passed over."""
    virtual = settings["pp_interleave_num"]
    if virtual > 1:
        raise UsageError(
            f"{yaml}: model.model_config.pp_interleave_num: found {virtual}, expected 1",
            cause="stages in several pieces are not rehearsed",
            remedy="rehearse the same strategy with pp_interleave_num: 1",
            id="rehearse.interleaved",
        )
    if parallel["context_parallel"] > 1 and options.grid is None:
        raise UsageError(
            f"{yaml}: parallel_config.context_parallel: found {parallel['context_parallel']}, expected 1",
            cause="context parallel is not rehearsed",
            remedy="give --strategy dp=,mp=,pp= to rehearse the rest",
            id="rehearse.context-parallel",
        )


def _micro_batches(content: dict[str, Any], grid: Grid, options: Options) -> int:
    """Micro-batches a step as mindformers counts them; a strategy of the command line gets at least one a stage."""
    if options.micro_batches is not None:
        return options.micro_batches
    if grid.pipeline_stage == 1:
        return int(content["runner_config"]["gradient_accumulation_steps"])
    stated = content["parallel_config"]["micro_batch_num"]
    return max(stated, grid.pipeline_stage) if options.grid else int(stated)


def _notes(settings: dict[str, Any]) -> tuple[str, ...]:
    changed = []
    if any(settings[f"{name}_dropout"] for name in ("embedding", "hidden", "attention")):
        changed.append("dropout is off: its masks could not be the same in two processes")
    if any(settings[key] != "float32" for key in ("compute_dtype", "param_init_type")):
        changed.append("everything is float32")
    return tuple(changed)


def spec_of(settings: dict[str, Any], origin: str) -> ModelSpec:
    """The ModelSpec that complete canonical model_config settings describe.

    Raises:
        UsageError: values that make no model.
    """
    families = {names[2]: family for family, names in run_yaml.ARCHITECTURES.items()}
    heads = settings["num_heads"]
    scaling = settings["rope_scaling"]
    known = {name: settings[name] for name in ModelSpec.model_fields if settings.get(name) is not None}
    values = {
        **known,
        "family": families.get(str(settings.get("model_type")), "gpt2"),
        "num_attention_heads": heads,
        "num_query_groups": settings["num_query_groups"] or heads,
        "kv_channels": settings["kv_channels"] or settings["hidden_size"] // heads,
        "ffn_hidden_size": settings["ffn_hidden_size"] or 4 * settings["hidden_size"],
        "max_position_embeddings": settings["max_position_embeddings"] or settings["seq_length"],
        "position_embedding": settings["position_embedding_type"],
        "rope_scaling": RopeScaling(**scaling) if scaling else None,
    }
    spec: ModelSpec = spec_from(ModelSpec, values, f"{origin}: model.model_config")
    return spec


def packing_of(settings: dict[str, Any]) -> TargetLayout:
    """The packings of the fused matrices that complete settings state."""
    return TargetLayout(
        "flat" if settings["use_contiguous_weight_layout_attention"] else "per_group",
        "interleaved" if settings["use_interleaved_weight_layout_mlp"] else "concatenated",
    )


def alike(size: int, small: int, divisor: int) -> int:
    """A size of at least `small` that leaves the remainder of `size` when divided by `divisor`.

    A size that is small already stays as it is.
    """
    if size <= small:
        return size
    return small + (size - small) % divisor


def shrunk(spec: ModelSpec, ranks: int) -> ModelSpec:
    """`spec` with small sizes: as many layers, heads and key/value heads; what `ranks` divides stays divisible."""
    head, heads = TINY_HEAD * (4 if spec.qk_layernorm else 1), spec.num_attention_heads
    while int(head * spec.rotary_percent) % 2 or head * spec.rotary_percent < 2 or head * heads < TINY_WIDTH:
        head *= 2
    head = min(head, spec.kv_channels)
    width = heads * head
    if spec.hidden_size != heads * spec.kv_channels:
        width *= 2
    hidden = min(width, spec.hidden_size)
    return spec.model_copy(
        update={
            "kv_channels": head,
            "hidden_size": hidden,
            "ffn_hidden_size": alike(spec.ffn_hidden_size, 2 * hidden, ranks),
            "vocab_size": alike(spec.vocab_size, TINY_VOCAB, ranks),
            "max_position_embeddings": alike(spec.max_position_embeddings, 2 * TINY_LENGTH, ranks),
        }
    )


def layout_of(plan: Plan) -> Any:
    """planning.layout.Layout: what run.yaml would say to the cluster under this strategy, with the run's sizes."""
    from mindferry.planning import runfile

    layout = runfile.read(plan.yaml).layout
    pipeline = plan.grid.pipeline_stage > 1
    changes: dict[str, Any] = {
        "devices": plan.grid.ranks,
        "data_parallel": plan.grid.data_parallel,
        "model_parallel": plan.grid.model_parallel,
        "pipeline_stage": plan.grid.pipeline_stage,
        "use_seq_parallel": plan.sequence,
        "offset": plan.offset,
    }
    if plan.overridden:
        changes |= {
            "context_parallel": 1,
            "use_parallel": True,
            "parallel_mode": 1,
            "full_batch": False,
            "dataset_strategy": [[plan.grid.data_parallel, 1]] * len(layout.input_columns),
            "micro_batch_num": plan.full_micro_batches if pipeline else 1,
            "gradient_accumulation_steps": 1 if pipeline else plan.full_micro_batches,
        }
    return dataclasses.replace(layout, **changes)
