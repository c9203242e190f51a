"""Rotary scaling as Hugging Face states it; values are kept as they are, none is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mindferry.spec import RopeScaling

# type -> keys it needs, keys it may have. From transformers' modeling_rope_utils; longrope has a factor for
# each channel, which RopeScaling does not hold.
_NEEDS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "llama3": (
        {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        set(),
    ),
}
_WHOLE = {"original_max_position_embeddings"}


def read_rope_scaling(name: str, value: object) -> tuple[RopeScaling | None, list[str]]:
    """(scaling or None, problems) for the value of `rope_scaling`.

    "type" is the older spelling of "rope_type"; "default" means no scaling.
    """
    if not isinstance(value, Mapping):
        return None, [f"{name}: found {value!r}, expected a table with rope_type and factor"]
    table = {key: item for key, item in value.items() if item is not None}
    kinds = {table.pop(key) for key in ("rope_type", "type") if isinstance(table.get(key), str)}
    if len(kinds) != 1:
        return None, [f"{name}: rope_type is {' and '.join(sorted(map(repr, kinds))) or 'missing'}"]
    kind = kinds.pop()
    if kind == "default":
        return None, []
    if kind not in _NEEDS:
        return None, [f"{name}: rope_type {kind!r} is not supported; known: default, {', '.join(_NEEDS)}"]
    needed, optional = _NEEDS[kind]
    problems = []
    missing, unknown = needed - set(table), set(table) - needed - optional
    if missing:
        problems.append(f"{name}: {kind} needs {', '.join(sorted(missing))}")
    if unknown:
        problems.append(f"{name}: {kind} has no {', '.join(sorted(unknown))}")
    for key, item in table.items():
        wanted = bool if key == "truncate" else int if key in _WHOLE else (int, float)
        if not isinstance(item, wanted) or (isinstance(item, bool) and wanted is not bool):
            problems.append(
                f"{name}.{key}: found {item!r}, expected a {'bool' if wanted is bool else 'number'}"
            )
        elif wanted is not bool and not key.startswith("mscale") and item <= 0:
            problems.append(f"{name}.{key}: found {item!r}, expected a positive number")
    if problems:
        return None, problems
    return RopeScaling(**{"type": kind, **table}), []


def flatten_rope_parameters(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(config with rope_theta and rope_scaling at the top, problems).

    transformers 5 keeps both, and partial_rotary_factor, in one table `rope_parameters`.
    """
    flat = dict(tree)
    table = flat.pop("rope_parameters", None)
    if table is None:
        return flat, []
    if not isinstance(table, Mapping) or any(isinstance(item, Mapping) for item in table.values()):
        return flat, [
            "rope_parameters: expected one table of numbers (one for each kind of layer is not supported)"
        ]
    scaling = dict(table)
    problems = []
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            inner = scaling.pop(key)
            if flat.get(key, inner) != inner:
                problems.append(f"{key} = {flat[key]!r} and rope_parameters.{key} = {inner!r} differ")
            flat[key] = inner
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        if flat.get("rope_scaling") not in (None, scaling):
            problems.append("rope_scaling and rope_parameters differ")
        flat["rope_scaling"] = scaling
    return flat, problems


def rope_scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The way back: the table as config.json holds it, with exactly the keys the source had."""
    if scaling is None:
        return None
    table = scaling.model_dump(exclude_none=True)
    return {"rope_type": table.pop("type"), **table}
