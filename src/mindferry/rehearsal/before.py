"""What can be said about a strategy before a process starts: sizes, stages, groups, and the shape of every share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindferry.errors import UsageError
from mindferry.findings import Finding
from mindferry.partition.layout import Stages, stages_of
from mindferry.partition.rules import cut_of
from mindferry.rehearsal.judge import kind_of
from mindferry.rehearsal.plan import Plan, layout_of
from mindferry.rehearsal.topology import Topology, disagreements
from mindferry.spec import ModelSpec
from mindferry.weights.target import Shape, target_names

# Parameter names -> the axis that the layer computing with it shares, and that layer. A second statement, on purpose:
# partition.rules says how checkpoints are cut, this what mindferry.rehearsal.cells computes with.
_COLUMN = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "output_layer.weight",
)
_ROW = ("linear_proj.weight", "linear_fc2.weight")
_TABLE = ("word_embeddings.weight", "position_embeddings.weight")


# Rules of the planner about sizes that do not divide, whose messages (mindformers' own) name no key.
_DIVISION = ("heads.model_parallel", "hidden.model_parallel", "vocab.model_parallel")


def settings(plan: Plan) -> list[Finding]:
    """The planner's rules on the run's real sizes: what mindformers or MindSpore would say, and when."""
    from mindferry.planning.constraints import check

    violations = check(layout_of(plan))
    odd = indivisible(plan)
    said = "; ".join(violation.message for violation in violations if violation.rule in _DIVISION)
    return [replace(finding, evidence=said) for finding in odd] + [
        Finding(
            f"rehearse.{violation.rule}",
            violation.severity,
            violation.message,
            cause=f"the cluster says so {violation.when}"
            + (f" ({violation.where})" if violation.where != "planner" else ""),
            remedy=violation.remedy,
        )
        for violation in violations
        if not (odd and violation.rule in _DIVISION)
    ]


def indivisible(plan: Plan) -> list[Finding]:
    """Sizes of the run that model_parallel does not divide."""
    from mindferry.planning.strategy import divisors

    keys = ["num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size", "vocab_size"]
    if plan.full.position_embedding == "learned_absolute":
        keys.append("max_position_embeddings")
    ranks = plan.grid.model_parallel
    return [
        Finding(
            "rehearse.indivisible",
            "problem",
            f"model_config.{key} {size} is no multiple of model_parallel {ranks}",
            cause="each rank of a tensor group takes an equal share; mindformers refuses when the network is built",
            remedy=f"model_parallel one of {divisors(size)}"
            + ("; or pad the vocabulary" if key == "vocab_size" else ""),
        )
        for key in keys
        if (size := getattr(plan.full, key)) % ranks
    ]


def axis_of(name: str) -> tuple[int | None, str]:
    """The axis along which tensor-parallel ranks share a parameter, and the layer that needs it so."""
    if name.endswith(_COLUMN):
        return 0, "column-parallel linear"
    if name.endswith(_ROW):
        return 1, "row-parallel linear"
    if name.endswith(_TABLE):
        return 0, "vocabulary-parallel table"
    return None, "layer, which has it whole on every rank,"


def needed_shape(name: str, whole: Shape, ranks: int) -> Shape:
    """Shape of one rank's share of a parameter."""
    axis, _ = axis_of(name)
    return tuple(size // ranks if at == axis else size for at, size in enumerate(whole))


def shares(plan: Plan) -> list[Finding]:
    """Parameters that partition.rules cuts otherwise than the layers compute with them."""
    found: dict[str, Finding] = {}
    ranks = plan.grid.model_parallel
    for name, whole in target_names(plan.spec).items():
        cut = cut_of(name, whole, ranks, plan.spec, plan.layout)
        needed = needed_shape(name, whole, ranks)
        if cut.local_shape != needed:
            axis, layer = axis_of(name)
            along = "kept whole" if cut.dim is None else f"cut along dimension {cut.dim}"
            wanted = "not cut" if axis is None else f"cut along dimension {axis}"
            found.setdefault(
                kind_of(name),
                Finding(
                    "rehearse.dimension",
                    "problem",
                    f"{kind_of(name)}: {along}, {list(cut.local_shape)} of {list(whole)} a rank; the {layer} needs "
                    f"{list(needed)}, {wanted}",
                    remedy="correct its line in partition/rules.py",
                ),
            )
    return list(found.values())


def groups(plan: Plan, topology: Topology) -> list[Finding]:
    """Ranks whose checkpoint and communication groups put them in different places."""
    wrong = disagreements(topology, plan.grid)
    if not wrong:
        return []
    return [
        Finding(
            "rehearse.groups",
            "problem",
            f"rank layout of {plan.grid}: {wrong[0]} ({len(wrong)} of {topology.ranks} ranks are misplaced)",
            cause="MindSpore puts consecutive ranks into a stage, mindformers consecutive ranks of it into a tensor "
            "group: stage outermost, then dp, mp innermost",
            remedy="number the ranks, their checkpoints and the host list in that order",
        )
    ]


def stage_layers(plan: Plan) -> tuple[Stages | None, list[Finding]]:
    """The layers of each stage as the checkpoint is cut; None where they cannot be placed."""
    try:
        stages = stages_of(plan.spec, plan.grid.pipeline_stage, plan.offset)
    except UsageError as err:
        return None, [
            Finding(
                "rehearse.layers", "problem", f"model_config.offset: {err.message}", err.cause, err.remedy
            )
        ]
    return stages, list(_held_once(stages, plan.spec))


def _held_once(stages: Stages, spec: ModelSpec) -> Iterator[Finding]:
    held = [layer for layers in stages.layers for layer in layers]
    if sorted(held) != list(range(spec.num_layers)):
        missing = sorted(set(range(spec.num_layers)) - set(held))
        twice = sorted({layer for layer in held if held.count(layer) > 1})
        yield Finding(
            "rehearse.layers",
            "problem",
            f"layers of the stages {list(map(list, stages.layers))}: of num_layers {spec.num_layers}, {missing} are on "
            f"no stage and {twice} on several",
        )


def against_layer_setting(stages: Stages, placed: list[list[int]] | None, offset: object) -> list[Finding]:
    """The stages of the checkpoint against those of mindformers' own LayerSetting."""
    ours = [list(layers) for layers in stages.layers]
    if placed == ours:
        return []
    theirs = (
        "refuses it" if placed is None else f"gives the stages {[len(layers) for layers in placed]} layers"
    )
    return [
        Finding(
            "rehearse.layers",
            "problem",
            f"model_config.offset {offset}: mindformers' LayerSetting {theirs}, the checkpoint is cut for "
            f"{stages.counts()}",
            cause="a stage would look for layers that another stage's checkpoint has",
        )
    ]
