"""What `--recompute` and the sources' own settings mean by recompute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindferry.errors import UsageError, did_you_mean
from mindferry.spec import Recompute, spec_from

PARTS = ("layers", "core_attention", "attention", "mlp")
# Megatron-LM's --recompute-modules -> ours; the others have no counterpart in mindformers.
_MODULES = {"core_attn": "core_attention", "mlp": "mlp"}


def parse(text: str) -> Recompute:
    """`off`, or parts with a comma between them, each with `=N` for the first N layers: `attention,mlp=4`.

    Raises:
        UsageError: an unknown part, a bad number, or parts that contain each other.
    """
    if text == "off":
        return Recompute()
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, sign, count = item.strip().partition("=")
        if name not in PARTS:
            raise UsageError(
                f"--recompute: found {name!r}, expected off, or some of {', '.join(PARTS)}",
                remedy=did_you_mean(name, PARTS) or "an example: --recompute attention,mlp=4",
                id="option.value",
            )
        if sign and not (count.isdecimal() and int(count) > 0):
            raise UsageError(
                f"--recompute: {name}: found {count!r}, expected a number of layers", id="option.value"
            )
        if name in values:
            raise UsageError(f"--recompute: {name} is named twice", id="option.value")
        values[name] = int(count) if sign else True
    recompute: Recompute = spec_from(Recompute, values, "--recompute")
    return recompute


def of_megatron(values: Mapping[str, Any], origin: str) -> tuple[Recompute, list[str]]:
    """Megatron-LM's arguments as a Recompute, and warnings.

    full/uniform recomputes every layer (its num_layers only says how many share one kept input), full/block the
    first num_layers of each stage, selective the named modules (core_attn where none is named).

    Raises:
        UsageError: an unknown granularity or method.
    """
    granularity, method = values.get("recompute_granularity"), values.get("recompute_method")
    if values.get("recompute_activations") and not granularity:
        granularity = "selective"
    warnings = []
    if values.get("distribute_saved_activations"):
        warnings.append(
            "--distribute-saved-activations: mindformers' GPTModel refuses its twin (recompute_slice_activation); "
            "use_seq_parallel splits what is kept instead"
        )
    if granularity is None:
        return Recompute(), warnings
    if granularity == "full":
        if method not in ("uniform", "block"):
            raise UsageError(
                f"{origin}: recompute_method: found {method!r}, expected uniform or block", id="recipe.value"
            )
        count = int(values.get("recompute_num_layers") or 1)
        return Recompute(layers=True if method == "uniform" else count), warnings
    if granularity != "selective":
        raise UsageError(
            f"{origin}: recompute_granularity: found {granularity!r}, expected full or selective",
            id="recipe.value",
        )
    modules = values.get("recompute_modules") or ["core_attn"]
    left = [name for name in modules if name not in _MODULES]
    if left:
        warnings.append(
            f"--recompute-modules {' '.join(left)}: mindformers has no counterpart; not recomputed"
        )
    made: Recompute = spec_from(
        Recompute, {_MODULES[name]: True for name in modules if name in _MODULES}, origin
    )
    return made, warnings
