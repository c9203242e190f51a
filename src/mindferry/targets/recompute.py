"""run.yaml's recompute_config: what the backward pass computes again, written, checked and explained.

mindformers 1.9.0 (`LayerSetting`) reads a list as counts: `[n]` is the first n layers of the stage, `[n, m]` of two
stages, `[[..], [..]]` one row for each virtual stage. Strings are patterns over the attributes of a layer, cut at
`\\.`; each part must match a whole attribute name. What matches nothing is passed over without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mindferry.errors import UsageError
from mindferry.spec import Recompute

# Parts of a layer -> the pattern that names them in mindformers' layers, in ours and in the fused one.
PATTERNS = {
    "core_attention": r"self_attention\.core_attention",
    "attention": "self_attention",
    "mlp": "mlp",
}
_COUNTED = ("recompute",)
_SELECTED = (
    *("select_recompute", "select_comm_recompute"),
    *("select_recompute_exclude", "select_comm_recompute_exclude"),
)
# Two names with a bare dot between them: LayerSetting cuts patterns at an escaped one only.
BARE_DOT = re.compile(r"(?<![\\\w])\w{2,}\.\w{2,}")


def block(recompute: Recompute) -> dict[str, Any]:
    """run.yaml's recompute_config for `recompute`, on one pipeline stage."""

    def layers(value: bool | int) -> bool | list[int]:
        return value if isinstance(value, bool) else [value]

    parts = {
        PATTERNS[name]: layers(getattr(recompute, name)) for name in PATTERNS if getattr(recompute, name)
    }
    every = all(value is True for value in parts.values())
    return {
        "recompute": layers(recompute.layers),
        "select_recompute": (list(parts) if every else parts) if parts else False,
        "parallel_optimizer_comm_recompute": recompute.parallel_optimizer_comm,
        "mp_comm_recompute": recompute.mp_comm,
        "recompute_slice_activation": False,
    }


def stage_layers(model: Mapping[str, Any], parallel: Mapping[str, Any]) -> list[list[int]]:
    """Layers of each stage, one row for each virtual stage: num_layers // parts + offset."""
    stages = int(parallel.get("pipeline_stage") or 1)
    rows = int(model.get("pp_interleave_num") or 1) if stages > 1 else 1
    offset = model.get("offset") or 0
    if isinstance(offset, int):
        offset = [offset] * stages
    if not offset or not isinstance(offset[0], list):
        offset = [offset] * rows
    base = int(model["num_layers"]) // (stages * rows)
    try:
        return [[base + (int(offset[i][j]) if stages > 1 else 0) for j in range(stages)] for i in range(rows)]
    except (IndexError, TypeError, ValueError):
        return [[int(model["num_layers"])] * stages] * rows  # a wrong offset has rules of its own


def _is_count(item: Any) -> bool:
    return isinstance(item, bool) or (isinstance(item, int) and item >= 0)


def _counts(key: str, value: Any, layers: list[list[int]]) -> Iterator[str]:
    """What is wrong with a list of counts."""
    stages = len(layers[0])
    if all(_is_count(item) for item in value):
        if len(value) > stages:
            yield (
                f"{key}: found {value}, {len(value)} numbers, expected at most {stages}, one a pipeline stage "
                "(it counts the first layers of each stage, it does not list layers)"
            )
            return
        totals = [sum(column) for column in zip(*layers, strict=True)]
        for stage, (item, total) in enumerate(zip(value, totals, strict=False)):
            if item is not True and item > total:
                yield f"{key}: found {item} layers of stage {stage}, which has {total}"
        return
    if not all(isinstance(row, (list, bool)) for row in value):
        odd = next(item for item in value if not isinstance(item, (list, bool)) and not _is_count(item))
        yield f"{key}: found {odd!r} in the list, expected numbers of layers (0 or more) or true and false"
        return
    if len(value) > len(layers):
        yield f"{key}: found {len(value)} rows, expected {len(layers)}, one a virtual stage (pp_interleave_num)"
        return
    for row, counts in zip(value, layers, strict=False):
        if isinstance(row, bool):
            continue
        if len(row) != stages or not all(_is_count(item) for item in row):
            yield f"{key}: found the row {row}, expected {stages} numbers of layers, one a pipeline stage"
            continue
        for stage, (item, total) in enumerate(zip(row, counts, strict=True)):
            if item is not True and item > total:
                yield f"{key}: found {item} layers of a part of stage {stage}, which has {total}"


def _pattern(key: str, pattern: Any) -> Iterator[str]:
    if not isinstance(pattern, str):
        yield f"{key}: found the pattern {pattern!r}, expected a text such as {PATTERNS['core_attention']!r}"
        return
    try:
        for part in pattern.split(r"\."):
            re.compile(part)
    except re.error as err:
        yield f"{key}: found {pattern!r}, not a regular expression: {err}"


def _selected(key: str, value: Any, layers: list[list[int]]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for pattern, counts in value.items():
            yield from _pattern(key, pattern)
            if isinstance(counts, list):
                yield from _counts(f"{key}.{pattern}", counts, layers)
            elif not isinstance(counts, bool):
                yield f"{key}.{pattern}: found {counts!r}, expected true, false or a list of numbers of layers"
    elif isinstance(value, list):
        texts = [item for item in value if isinstance(item, str)]
        if texts and len(texts) != len(value):
            yield f"{key}: found {value}, patterns and numbers in one list; write pattern: [numbers]"
        elif texts:
            for pattern in texts:
                yield from _pattern(key, pattern)
        else:
            yield from _counts(key, value, layers)


def problems(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the recompute_config of a run.yaml whose types the schema has checked."""
    section, model = content["recompute_config"], content["model"]["model_config"]
    if type(model.get("num_layers")) is not int or type(model.get("pp_interleave_num", 1)) is not int:
        return []
    if (content.get("swap_config") or {}).get("swap"):
        return []  # with swapping the lists are layer numbers; mindformers checks those
    layers = stage_layers(model, content.get("parallel_config") or {})
    found: list[str] = []
    for key in _COUNTED:
        if isinstance(section.get(key), list):
            found += _counts(key, section[key], layers)
    for key in _SELECTED:
        found += _selected(key, section.get(key), layers)
    if section.get("recompute_slice_activation") and not content.get("use_legacy"):
        found.append(
            "recompute_slice_activation: found true, which today's GPTModel refuses; use_seq_parallel splits what is "
            "kept instead"
        )
    return found


def check(content: Mapping[str, Any], origin: str) -> None:
    """
    Raises:
        UsageError: all that `problems` finds.
    """
    found = problems(content)
    if found:
        raise UsageError(
            f"{origin}: recompute_config." + "; recompute_config.".join(found),
            remedy="correct the named values; `recompute: true` recomputes every layer, `[2]` the first two",
            id="config.recompute",
        )


def patterns(value: Any) -> list[str]:
    """The patterns of a select_recompute that are switched on."""
    if isinstance(value, Mapping):
        return [name for name, layers in value.items() if layers is not False]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def notes(content: Mapping[str, Any]) -> list[str]:
    """What a person should know about the recompute that `content` asks for; nothing when it asks for none."""
    section, model = content["recompute_config"], content["model"]["model_config"]
    whole, select = section.get("recompute"), section.get("select_recompute")
    said = []
    if whole is True and select:
        said.append("select_recompute has no effect: whole layers are recomputed already")
    stock = select is True or (isinstance(select, list) and select and not patterns(select))
    if stock and not model.get("gated_linear_unit"):
        said.append(
            f"select_recompute: {select} means mindformers' own patterns mlp.mul and mlp.activation_func.silu, and "
            "this model has no gate: nothing is recomputed; name the part, such as "
            f"[{PATTERNS['core_attention']!r}]"
        )
    said += [
        f"select_recompute: {pattern!r} matches nothing: write the dot as \\. "
        f"({pattern.replace('.', chr(92) + '.')!r})"
        for pattern in patterns(select)
        if BARE_DOT.search(pattern)
    ]
    if not (whole or select):
        return said
    if content.get("context", {}).get("device_target", "CPU") == "CPU":
        said.append(
            "MindSpore's recompute does not lower the peak on a CPU (measured: 12 layers of 512, 6.5 GB without, "
            "8.0 GB with attention, 7.6 GB with whole layers) and costs time; layer_spec fused recomputes "
            "inside its own backward and does lower it"
            if model.get("layer_spec", "portable") != "fused"
            else "the fused layer recomputes inside its own backward: less memory, about an eighth more time"
        )
    return said
