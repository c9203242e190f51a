"""The picture of a migration before anything is written: which module becomes which, and from what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mindferry.errors import MindferryError
from mindferry.sources.source import Source
from mindferry.spec import ModelSpec, RopeScaling
from mindferry.weights.rules import Step, make_plan


@dataclass(frozen=True)
class Kind:
    """One kind of module of mindformers' GPTModel.

    Attributes:
        place: its place in the parameter names; `{}` is the layer number.
        called: the name this module goes by in descriptions of MindSpore Transformers.
        settings: spec fields that shape it.
    """

    place: str
    cls: str
    settings: tuple[str, ...]
    called: str = ""


NORM = ("normalization", "hidden_size", "layernorm_epsilon")
KINDS: tuple[Kind, ...] = (
    Kind(
        "embedding.word_embeddings",
        "VocabParallelEmbedding",
        ("vocab_size", "hidden_size", "embedding_dropout", "init_method_std"),
    ),
    Kind(
        "embedding.position_embeddings",
        "Embedding",
        ("position_embedding", "max_position_embeddings", "hidden_size"),
    ),
    Kind("decoder.layers.{}.input_layernorm", "Norm", NORM),
    Kind(
        "decoder.layers.{}.self_attention",
        "SelfAttention",
        (
            "num_attention_heads", "num_query_groups", "kv_channels", "hidden_size", "position_embedding",
            "rotary_base", "rotary_percent", "rope_scaling", "sliding_window", "qk_layernorm", "add_qkv_bias",
            "add_bias_linear", "attention_dropout", "hidden_dropout", "parallel_residual",
        ),
        called="ParallelAttention",
    ),
    Kind("decoder.layers.{}.pre_mlp_layernorm", "Norm", NORM),
    Kind(
        "decoder.layers.{}.mlp",
        "MLP",
        ("hidden_size", "ffn_hidden_size", "activation", "gated_linear_unit", "add_bias_linear", "hidden_dropout"),
        called="ParallelMLP",
    ),
    Kind("decoder.final_layernorm", "Norm", NORM),
    Kind("output_layer", "ColumnParallelLinear", ("vocab_size", "hidden_size", "tie_word_embeddings")),
)  # fmt: skip

# Fields that say nothing about a model without rotary positions.
_ROTARY = ("rotary_base", "rotary_percent", "rope_scaling")


@dataclass
class Module:
    """One module of the target and what it is made from.

    Attributes:
        source: the module(s) of the source, as the common part of their tensor names.
        settings: everything that shapes it: spec field -> value.
        parameters: one row for each parameter: sources, target, transform, shapes, dtype.
    """

    source: str
    target: str
    cls: str
    called: str
    settings: dict[str, Any]
    parameters: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Mapping:
    """The whole picture.

    Attributes:
        attention: what a person should know before migrating.
        problem: why the tensors do not fit the configuration; None when they do.
    """

    source: Source
    modules: list[Module]
    ignored: dict[str, str]
    attention: list[str]
    problem: MindferryError | None


def draw(source: Source) -> Mapping:
    """The mapping of `source`; misfits between tensors and configuration become `problem`."""
    problem: MindferryError | None = None
    ignored: dict[str, str] = {}
    created: set[str] = set()
    try:
        plan = make_plan(source.rules, source.tensors, source.key_of)
        ignored = {source.original(name): reason for name, reason in plan.ignored.items()}
        created = {step.target for step in plan.created}
    except MindferryError as err:
        problem = err
    present = set(source.tensors.names())
    modules: dict[str, Module] = {}
    for step in source.rules.steps:
        kind, place = _kind_of(step.target)
        module = modules.get(place)
        if module is None:
            module = Module("", place, kind.cls, kind.called, _settings(kind, source.spec))
            modules[place] = module
        module.parameters.append(_row(step, source, present, step.target in created))
    for module in modules.values():
        module.source = _common([name for row in module.parameters for name in row["source"]])
    return Mapping(source, list(modules.values()), ignored, attention(source), problem)


def _kind_of(target: str) -> tuple[Kind, str]:
    for kind in KINDS:
        found = re.match(re.escape(kind.place).replace(r"\{\}", "[0-9]+") + r"(?=\.)", target)
        if found:
            return kind, found.group(0)
    raise AssertionError(f"no kind of module for {target}")


def _settings(kind: Kind, spec: ModelSpec) -> dict[str, Any]:
    result = {}
    for name in kind.settings:
        value = getattr(spec, name)
        if name in _ROTARY and (spec.position_embedding != "rope" or value is None):
            continue
        if name in ("sliding_window", "parallel_residual", "qk_layernorm") and not value:
            continue
        result[name] = value.model_dump(exclude_none=True) if isinstance(value, RopeScaling) else value
    return result


def _row(step: Step, source: Source, present: set[str], created: bool) -> dict[str, Any]:
    names = () if created else step.sources
    there = [name for name in names if name in present]
    return {
        "source": [source.original(name) for name in names],
        "target": step.target,
        "transform": f"filled with {step.rule.if_absent}" if created else step.transform,
        "source_shapes": [
            list(source.tensors.shape(name) if name in present else shape)
            for name, shape in zip(names, step.source_shapes, strict=False)
        ],
        "target_shape": list(step.target_shape),
        "dtype": source.tensors.dtype(there[0]).name if there else "",
    }


def _common(names: list[str]) -> str:
    """The module path that all `names` share, e.g. `h.0.attn` of its weights and biases."""
    paths = [name.split(".")[:-1] for name in names]
    if not paths:
        return ""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def attention(source: Source) -> list[str]:
    """What changes numbers easily and unseen in this migration."""
    spec, notes = source.spec, list(source.warnings)
    if spec.activation == "gelu_erf":
        notes.append("activation gelu_erf is the exact GELU; mindformers' own `gelu` is the tanh form")
    if spec.rope_scaling is not None:
        notes.append(
            f"rope_scaling {spec.rope_scaling.type}: mindformers 1.9.0's GPTModel does not apply it; a layer "
            "that does is needed"
        )
    if spec.parallel_residual:
        notes.append(
            "attention and MLP read the same input (parallel_residual); mindformers' layer is serial"
        )
    if spec.sliding_window is not None:
        notes.append(f"sliding_window {spec.sliding_window}: without effect on sequences up to that length")
    if spec.gated_linear_unit or spec.num_query_groups:
        layout = source.rules.geometry.layout.config()
        notes.append(
            "packing of fused matrices, which names and shapes do not show: "
            + ", ".join(f"{key} {str(value).lower()}" for key, value in layout.items())
        )
    return notes
