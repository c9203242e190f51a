"""The state of a torch AdamW, carried over so that training goes on without a jump.

torch numbers its states by the place of the parameter in the optimizer's groups, not by name. The order inside a
group is that of `model.named_parameters()`; nanoGPT and transformers' Trainer make two groups, the decayed
tensors first. Sizes and counts are checked against the weights, so a wrong order does not pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.recipes import megatron_state
from mindferry.sources.source import Source
from mindferry.spec import LossScale, OptimizerSpec


@dataclass
class AdamState:
    """AdamW's moments under the target's parameter names, float32.

    Attributes:
        step: updates made so far.
        warnings: settings of the state that the recipe does not have.
        masters: float32 weights to go on with, where the source computed with rounded copies.
        scale, growth: dynamic loss scale reached, and good steps since it last changed.
    """

    step: int
    exp_avg: dict[str, np.ndarray]
    exp_avg_sq: dict[str, np.ndarray]
    warnings: list[str]
    masters: dict[str, np.ndarray] = field(default_factory=dict)
    scale: float | None = None
    growth: int = 0

    def parameters(self, scale: LossScale) -> dict[str, np.ndarray]:
        """What mindformers' AdamW and step wrapper keep, by parameter name."""
        made = {f"adam_m.{name}": value for name, value in self.exp_avg.items()}
        made.update({f"adam_v.{name}": value for name, value in self.exp_avg_sq.items()})
        made["global_step"] = np.array([self.step], np.int32)
        reached = self.scale if scale.dynamic and self.scale is not None else scale.value
        made["scale_sense"] = np.array(reached, np.float32)
        if scale.dynamic:
            # mindformers raises the scale once current - last overflow is the window, counting from 1.
            made["current_iterator_step"] = np.array(1 + self.growth, np.int32)
            made["last_overflow_iterator_step"] = np.array(0, np.int32)
        return made


def _damaged(path: Path, what: str) -> MindferryError:
    return MindferryError(
        f"{path}: {what}",
        remedy="give the optimizer state that was saved together with these weights",
        id="optimizer.unfit",
    )


def _state_dict(path: Path) -> Mapping[str, Any]:
    """The optimizer's state dict in optimizer.pt or nanoGPT's ckpt.pt, read through the weights-only unpickler."""
    from mindferry.sources.pickled import load_pickled

    tree = load_pickled(path)
    if isinstance(tree, Mapping) and isinstance(tree.get("optimizer"), Mapping):
        tree = tree["optimizer"]
    if not isinstance(tree, Mapping) or not {"state", "param_groups"} <= set(tree):
        raise UsageError(
            f"{path}: no state of a torch optimizer in it",
            remedy="give transformers' optimizer.pt, nanoGPT's ckpt.pt or a Megatron-LM checkpoint",
            id="optimizer.kind",
        )
    return tree


def _order(source: Source) -> list[str]:
    """Parameter names, as the weight rules have them, in the order of named_parameters()."""
    known = {name for step in source.rules.steps for name in step.sources}
    if source.format == "nanogpt":
        return [name for name in source.tensors.names() if name in known]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(source.path), local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    names = []
    for full, _ in model.named_parameters():
        parts = full.split(".")
        found = next((n for i in range(len(parts)) if (n := ".".join(parts[i:])) in known), None)
        if found is None:
            raise UsageError(f"{source.path}: parameter {full} has no weight rule", id="optimizer.unknown")
        names.append(found)
    return names


def _numbered(
    path: Path, groups: Any, names: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[int, str]:
    """Parameter number -> name.

    Raises:
        MindferryError: the groups are not those of nanoGPT, of the Trainer, or a single one.
    """
    sizes = [len(group["params"]) for group in groups]
    decayed = [n for n in names if len(shapes[n]) >= 2]
    plain = [n for n in names if len(shapes[n]) < 2]
    order = {(len(names),): names, (len(decayed), len(plain)): decayed + plain}.get(tuple(sizes))
    if order is None:
        raise _damaged(
            path,
            f"groups of {sizes} parameters, expected [{len(names)}] or [{len(decayed)}, {len(plain)}]",
        )
    numbers = [number for group in groups for number in group["params"]]
    return dict(zip(numbers, order, strict=True))


def read_state(path: Path, source: Source, recipe: OptimizerSpec) -> AdamState:
    """The AdamW state in `path`, moved to the target's names and layouts by the weight rules.

    Raises:
        UsageError: no optimizer state in the file, or no weight rules for the source's order.
        MindferryError: it belongs to other weights, or is damaged.
    """
    if megatron_state.is_megatron(path):
        return _of_megatron(path, source, recipe)
    tree = _state_dict(path)
    groups, states = tree["param_groups"], tree["state"]
    shapes = {name: tuple(source.tensors.shape(name)) for name in source.tensors.names()}
    names = [name for name in _order(source) if name in shapes]
    moments: dict[str, dict[str, np.ndarray]] = {"exp_avg": {}, "exp_avg_sq": {}}
    steps = set()
    for number, name in _numbered(path, groups, names, shapes).items():
        entry = states.get(number)
        if not isinstance(entry, Mapping) or not {"step", "exp_avg", "exp_avg_sq"} <= set(entry):
            raise _damaged(path, f"parameter {number} ({name}) has no AdamW state")
        steps.add(int(entry["step"]))
        for kind, values in moments.items():
            if tuple(entry[kind].shape) != shapes[name]:
                raise _damaged(
                    path, f"{kind} of {name}: found shape {tuple(entry[kind].shape)}, expected {shapes[name]}"
                )
            values[name] = entry[kind].float().numpy()
    if len(steps) != 1:
        raise _damaged(path, f"parameters have made different numbers of steps: {sorted(steps)[:5]}")
    return AdamState(
        steps.pop(),
        _moved(source, moments["exp_avg"]),
        _moved(source, moments["exp_avg_sq"]),
        [*_differences(groups[0], recipe), *_grouping(groups, names, shapes, recipe)],
    )


def _of_megatron(path: Path, source: Source, recipe: OptimizerSpec) -> AdamState:
    found = megatron_state.read(path, source, _damaged)
    moved = {kind: _moved(source, values) for kind, values in found.tensors.items()}
    warnings = [*found.warnings, *_differences(found.group, recipe)]
    masters = moved.get(megatron_state.MASTER, {})
    if masters:
        warnings.append("the checkpoint has the optimizer's float32 masters; model/ has the rounded weights")
    return AdamState(
        found.step, moved["exp_avg"], moved["exp_avg_sq"], warnings, masters, found.scale, found.growth
    )


def _moved(source: Source, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Moments go where their weights go: transposes and row orders, nothing that adds or scales."""
    moved = {}
    for step in source.rules.steps:
        if step.sources and all(name in values for name in step.sources):
            parts = step.chain.forward([values[name] for name in step.sources])
            moved[step.target] = np.ascontiguousarray(parts[0], dtype=np.float32)
    return moved


def _grouping(
    groups: Any, names: list[str], shapes: Mapping[str, tuple[int, ...]], recipe: OptimizerSpec
) -> list[str]:
    """A source that decays norms and biases, too, and a recipe that does not."""
    one_for_all = len(groups) == 1 and any(len(shapes[name]) < 2 for name in names)
    if not (one_for_all and groups[0].get("weight_decay") and recipe.decay == "matrices"):
        return []
    return [
        "the optimizer state has one group, so the source decays norms and biases, too; for the same, set "
        "optimizer.type to AdamWDecayAll in run.yaml"
    ]


def _differences(group: Mapping[str, Any], recipe: OptimizerSpec) -> list[str]:
    found = {
        "betas": (tuple(group.get("betas", ())), tuple(recipe.betas)),
        "eps": (group.get("eps"), recipe.eps),
        "weight_decay": (group.get("weight_decay"), recipe.weight_decay),
    }
    return [
        f"the optimizer state was made with {key} {theirs}, the recipe has {ours}"
        for key, (theirs, ours) in found.items()
        if theirs != ours
    ]
