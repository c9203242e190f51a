"""Where each layer stands against the roofline: arithmetic and traffic from formulas, time and machine measured.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model", CACM 52(4), 2009: no code runs above
min(peak FLOP/s, traffic's intensity in FLOP a byte x bandwidth). Arithmetic is that of the matrix products (2 a
multiply-add; backward is twice forward). Traffic is what the products must move when none of their operands stays in a
cache: both operands read and the result written, once each. The rest of a layer (norms, activation, softmax, residuals,
masks) is in the measured time and not in the formulas, so it shows as distance from the roof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.checking import speed
from mindferry.spec import ModelSpec

if TYPE_CHECKING:
    from mindferry.checking.bench import Side

SOURCE = "Williams et al. 2009 (CACM 52(4)); products only, 2 FLOP a multiply-add, every operand through memory once"
# The series of the whole pass, beside those of its parts.
WHOLE = "whole"
ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """Of one forward pass over a micro-batch: FLOP, and bytes through memory. Backward is twice that."""

    flops: float
    bytes: float


def _products(shapes: list[tuple[int, int, int, int]], element: int) -> Work:
    """Products of (how many, m, k, n): [m, k] x [k, n]."""
    flops = sum(2 * count * m * k * n for count, m, k, n in shapes)
    moved = sum(count * (m * k + k * n + m * n) for count, m, k, n in shapes)
    return Work(float(flops), float(moved * element))


def layer_work(spec: ModelSpec, batch: int, seq: int, element: int, fused_attention: bool) -> Work:
    """A transformer layer: QKV, scores, values, projection, both MLP products.

    Args:
        batch, seq: sequences of a micro-batch and their length.
        element: bytes of a number in a product.
        fused_attention: scores never reach memory; then only q, k, v and the result do.
    """
    tokens, hidden, head = batch * seq, spec.hidden_size, spec.kv_channels
    heads, groups = spec.num_attention_heads, spec.num_query_groups
    first = spec.ffn_hidden_size * (2 if spec.gated_linear_unit else 1)
    linear = _products(
        [
            (1, tokens, hidden, (heads + 2 * groups) * head),
            (1, tokens, heads * head, hidden),
            (1, tokens, hidden, first),
            (1, tokens, spec.ffn_hidden_size, hidden),
        ],
        element,
    )
    core = _products([(batch * heads, seq, head, seq), (batch * heads, seq, seq, head)], element)
    moved = core.bytes
    if fused_attention:
        moved = float(element * tokens * head * (2 * heads + 2 * groups))
    return Work(linear.flops + core.flops, linear.bytes + moved)


def head_work(spec: ModelSpec, batch: int, seq: int, element: int) -> Work:
    """Logits of every token."""
    return _products([(1, batch * seq, spec.hidden_size, spec.vocab_size)], element)


def place(work: Work, forward: float, both: float, peak: float, bandwidth: float) -> dict[str, Any]:
    """A measured part on the roofline of a machine.

    Args:
        forward, both: seconds of a forward pass, and of forward and backward together.
        peak: measured FLOP/s; bandwidth: measured bytes/s.

    Returns:
        flops and bytes of forward and backward together; intensity in FLOP/byte; bound "compute" or "memory";
        achieved and roof in FLOP/s; share of the roof that is reached, of both passes and of forward alone.
    """
    intensity = work.flops / work.bytes
    roof = min(peak, intensity * bandwidth)
    return {
        "flops": 3 * work.flops,
        "bytes": 3 * work.bytes,
        "intensity": intensity,
        "bound": "compute" if intensity * bandwidth >= peak else "memory",
        "roof_flops_per_second": roof,
        "achieved_flops_per_second": 3 * work.flops / both,
        "share_of_roof": 3 * work.flops / both / roof,
        "forward_share_of_roof": work.flops / forward / roof,
    }


def layer_rows(
    side: Side,
    spec: ModelSpec | None,
    content: dict[str, Any],
    rates: tuple[float, float] | None,
) -> list[dict[str, Any]]:
    """A row a part of the model, in forward order: seconds of a micro-batch, and its place on the roofline.

    Args:
        content: the run.yaml as it runs (types and layers that a CPU replaces already replaced).
        rates: measured FLOP/s and bytes/s of the machine.
    """
    names = [key.removesuffix("/forward") for key in side.series if key.endswith("/forward")]
    names = [name for name in names if name != WHOLE]
    config = content["model"]["model_config"]
    batch, seq = content["runner_config"]["batch_size"], config["seq_length"]
    element = ELEMENT.get(config["compute_dtype"], 4)
    fused = config.get("layer_spec") != "portable"
    rows = []
    for name in names:
        forward, both = side.times(f"{name}/forward"), side.times(f"{name}/both")
        row: dict[str, Any] = {
            "name": name,
            "forward_seconds": float(np.median(forward)),
            "forward_spread": speed.spread(forward),
            "both_seconds": float(np.median(both)),
            "both_spread": speed.spread(both),
        }
        row["backward_seconds"] = max(row["both_seconds"] - row["forward_seconds"], 0.0)
        work = None
        if spec is not None and name.startswith("decoder.layers."):
            work = layer_work(spec, batch, seq, element, fused)
        elif spec is not None and name == "head":
            work = head_work(spec, batch, seq, element)
        if work is not None and rates is not None:
            row["roofline"] = place(work, row["forward_seconds"], row["both_seconds"], *rates)
        rows.append(row)
    return rows


def check_sum(side: Side, rows: list[dict[str, Any]], layers: int) -> dict[str, float]:
    """The parts' sum over the whole pass measured in the same rounds: the median ratio, of forward and of both passes.

    Args:
        layers: of the model; those that were not measured count like the mean of the measured ones.
    """
    names = [row["name"] for row in rows]
    inside = [name for name in names if name.startswith("decoder.layers.")]
    found = {}
    for key in ("forward", "both"):
        parts = {name: side.times(f"{name}/{key}") for name in names}
        total = sum((parts[name] for name in names if name not in inside), np.zeros(1))
        if inside:
            total = total + layers * np.mean([parts[name] for name in inside], axis=0)
        found[key] = float(np.median(total / side.times(f"{WHOLE}/{key}")))
    return found
