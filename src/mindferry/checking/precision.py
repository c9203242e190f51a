"""Where half precision leaves float32: the target against itself, operator by operator, on one batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import UsageError

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
FACTOR = 4.0
RULE = (
    "Rounding errors add up like a random walk: after n operators a relative error (2-norm) of about u x sqrt(n) is "
    f"expected, u the type's unit roundoff. A place departs where it exceeds {FACTOR:g} x u x sqrt(n), or holds what "
    "is no number."
)
# Inside a layer, in forward order; a layer that computes several at once has only itself to show.
INSIDE = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class Row:
    """One place: the half-precision value against the float32 one.

    Attributes:
        relative_error: |half - full| / |full|, 2-norm; inf where half holds what is no number.
        cosine: of the two as vectors; NaN where not defined.
        limit: the relative error from which on it has departed.
    """

    name: str
    relative_error: float
    cosine: float
    limit: float

    @property
    def good(self) -> bool:
        return self.relative_error <= self.limit


@dataclass(frozen=True)
class Precision:
    """The whole forward pass.

    Attributes:
        first_departure: the first place out of its limit, or None.
        largest_step: the place where the relative error grows most, in the type's roundoff.
        notes: what the device computed otherwise than asked.
    """

    dtype: str
    rows: list[Row]
    notes: list[str]

    @property
    def first_departure(self) -> str | None:
        return next((row.name for row in self.rows if not row.good), None)

    @property
    def largest_step(self) -> str | None:
        best, most, before = None, 0.0, 0.0
        for row in self.rows:
            if math.isfinite(row.relative_error) and row.relative_error - before > most:
                best, most = row.name, row.relative_error - before
            before = row.relative_error if math.isfinite(row.relative_error) else before
        return best

    def to_json(self) -> dict[str, Any]:
        """The fields of `verify --json`."""
        rows = [
            {"name": r.name, "relative_error": r.relative_error, "cosine": r.cosine, "limit": r.limit}
            for r in self.rows
        ]
        return {"dtype": self.dtype, "rows": rows, "first_departure": self.first_departure,
                "largest_step": self.largest_step, "rule": RULE}  # fmt: skip

    def table(self) -> str:
        """For a terminal."""
        lines = [f"{self.dtype} against float32: {'relative error':>24} {'cosine':>10}"]
        lines += [
            f"{row.name:48} {row.relative_error:.2e} {row.cosine:10.6f}{'' if row.good else '  <- departs'}"
            for row in self.rows
        ]
        return "\n".join(lines)


def stated(run: Any) -> str | None:
    """The half-precision compute_dtype of run.yaml, or None when it computes in float32."""
    from mindferry.targets import run_yaml

    dtype = run_yaml.read(run.yaml)["model"]["model_config"].get("compute_dtype")
    return dtype if dtype in ROUNDOFF else None


def compare(full: dict[str, np.ndarray], half: dict[str, np.ndarray], dtype: str) -> list[Row]:
    """Rows of two traces (name -> array, forward order), by RULE."""
    rows = []
    for number, (name, value) in enumerate(full.items(), start=1):
        if name not in half:
            continue
        limit = FACTOR * ROUNDOFF[dtype] * math.sqrt(number)
        a, b = value.astype(np.float64).ravel(), half[name].astype(np.float64).ravel()
        if a.shape != b.shape or not np.isfinite(b).all():
            rows.append(Row(name, math.inf, math.nan, limit))
            continue
        size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        relative = float(np.linalg.norm(a - b)) / max(size_a, 1e-30)
        cosine = float(a @ b) / (size_a * size_b) if size_a and size_b else math.nan
        rows.append(Row(name, relative, cosine, limit))
    return rows


def _trace(network: Any, batch: Any) -> dict[str, np.ndarray]:
    """Outputs of every hooked cell in the order in which they are computed, and the logits."""
    import mindspore as ms

    found: dict[str, np.ndarray] = {}
    model = network.get_gpt_model()
    points = {"embedding": model.embedding}
    for number, layer in enumerate(model.decoder.layers):
        inside = dict(layer.cells_and_names())
        points.update({f"decoder.layers.{number}.{n}": inside[n] for n in INSIDE if n in inside})
        points[f"decoder.layers.{number}"] = layer
    points["decoder.final_layernorm"] = model.decoder.final_layernorm
    hooks = []
    for name, cell in points.items():

        def keep(_cell: Any, _inputs: Any, output: Any, name: str = name) -> None:
            value = output[0] if isinstance(output, tuple) else output
            found[name] = value.astype(ms.float32).asnumpy()

        hooks.append(cell.register_forward_hook(keep))
    network.set_train(False)
    logits = network(input_ids=ms.Tensor(batch.input_ids), position_ids=ms.Tensor(batch.position_ids))
    for hook in hooks:
        hook.remove()
    found["logits"] = logits.astype(ms.float32).asnumpy()
    return found


def view(run: Any, dtype: str, batch_size: int = 2) -> Precision:
    """Run the target in float32 and with compute_dtype `dtype` on the first rows of its data, and compare.

    Norms and softmax keep the types that run.yaml gives them.

    Raises:
        UsageError: a type without a rule here.
    """
    from mindferry.checking import sides
    from mindferry.targets import run_yaml
    from mindferry.training import engine

    if dtype not in ROUNDOFF:
        raise UsageError(
            f"--precision: found {dtype!r}, expected one of {', '.join(ROUNDOFF)}", id="option.value"
        )
    original = run_yaml.read(run.yaml)["model"]["model_config"]
    base = "model.model_config."
    full = {**sides.no_dropout(), "context.mode": 1, "context.enable_graph_kernel": False}
    half = {**full, f"{base}compute_dtype": dtype}
    for key in ("layernorm_compute_type", "softmax_compute_type"):
        half[base + key] = original.get(key) or "float32"
    traces, notes = [], []
    for overrides in (full, half):
        content = engine.prepare(run, engine.Options(overrides=overrides))
        config = engine.set_up(content, run)
        notes = engine.precision_notes(content)
        network = sides.build_network(content, config)
        sides.load_weights(network, Path(content["load_checkpoint"]))
        traces.append(_trace(network, sides.first_batch(content, batch_size)))
    return Precision(dtype, compare(traces[0], traces[1], dtype), notes)
