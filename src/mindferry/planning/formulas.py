"""The planner's formulas: each is one text that is both evaluated and, with `--explain`, printed with its
numbers.

Symbols stand for the same thing everywhere (see `SYMBOLS`); sizes are elements, memory is bytes on one rank,
time is seconds. Per-stage symbols (`li`, `first`, `last`, `alive`) may be arrays with one item a stage, then
so is the result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

SYMBOLS: dict[str, str] = {
    "l": "num_layers",
    "h": "hidden_size",
    "a": "num_attention_heads",
    "k": "num_query_groups",
    "dh": "kv_channels, the size of one head",
    "f": "ffn_hidden_size",
    "G": "branches of the first MLP matrix: 2 when gated, else 1",
    "V": "vocab_size",
    "P": "rows of the position table, 0 without one",
    "s": "seq_length",
    "b": "batch_size: sequences a micro-batch on one data-parallel rank",
    "B": "global batch, sequences",
    "m": "micro-batches a step on one data-parallel rank",
    "d": "data_parallel",
    "t": "model_parallel",
    "c": "context_parallel",
    "p": "pipeline_stage",
    "v": "pp_interleave_num",
    "n": "devices",
    "r": "ranks that share the optimizer's states (1 without optimizer parallel)",
    "tq": "t with sequence parallel, else 1",
    "lb": "1 with biases on the linears, else 0",
    "qb": "1 with a bias on query, key and value, else 0",
    "nw": "vectors of a norm: 2 for LayerNorm, 1 for RMSNorm",
    "qkn": "1 with norms on query and key, else 0",
    "li": "layers on the stage",
    "ri": "layers of the stage that are recomputed in full",
    "first": "1 on the first stage, else 0",
    "last": "1 on the last stage, else 0",
    "table": "1 where the stage keeps a head matrix of its own, else 0",
    "alive": "micro-batches whose activations the stage holds at once",
}


@dataclass(frozen=True)
class Formula:
    """One formula.

    Attributes:
        id: the name that results carry.
        text: the expression, in the symbols of SYMBOLS and the names the caller defines.
        unit: what comes out ("parameters", "FLOP", "bytes", "s", "share").
        source: where it is from.
    """

    id: str
    text: str
    unit: str
    source: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Symbols the expression uses, in order of appearance."""
        found = [n.id for n in ast.walk(ast.parse(self.text, mode="eval")) if isinstance(n, ast.Name)]
        return tuple(dict.fromkeys(name for name in found if name not in _FUNCTIONS))

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        # The texts are the literals of this package; nothing a person writes gets here.
        code = f"lambda {', '.join(self.names)}: {self.text}"
        return eval(code, {"__builtins__": {}, **_FUNCTIONS})  # noqa: S307

    def __call__(self, symbols: Mapping[str, Any]) -> Any:
        return self._compiled(*[symbols[name] for name in self.names])

    def explain(self, symbols: Mapping[str, Any], stage: int = 0) -> str:
        """One line: the formula, the same with numbers, the result. Per-stage symbols are taken at
        `stage`."""
        at = {name: _at(symbols[name], stage) for name in self.names}
        pattern = re.compile(r"\b(" + "|".join(map(re.escape, self.names)) + r")\b") if self.names else None
        filled = pattern.sub(lambda m: _number(at[m[1]]), self.text) if pattern else self.text
        return f"{self.id} = {self.text} = {filled} = {show(float(self(at)), self.unit)}"


def _at(value: Any, stage: int) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        return value[min(stage, value.shape[-1] - 1)].item()
    return value.item() if isinstance(value, np.generic) else value


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.4g}"


_SCALES = {
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "FLOP": ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1, "FLOP")),
    "parameters": ((1e12, "T parameters"), (1e9, "B parameters"), (1e6, "M parameters"), (1, "parameters")),
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "us")),
}


def show(value: float, unit: str) -> str:
    """`value` with a unit a person reads: GiB (2^30), TFLOP, ms, %."""
    if unit == "share":
        return f"{100 * value:.2f} %"
    for scale, name in _SCALES.get(unit, ((1, unit),)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:.4g} {unit}"


_FUNCTIONS: dict[str, Any] = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "min": min,
    "max": max,
    "where": np.where,
    "sum": np.sum,
    "ceil": np.ceil,
}

_KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198)"
_NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473)"
_ZERO = "Rajbhandari et al. 2020 (arXiv 1910.02054)"
_MF = "read in mindformers 1.9.0, not measured on Ascend"

_TABLE: tuple[tuple[str, str, str, str], ...] = (
    # ---- parameters ----------------------------------------------------------------------------------------
    (
        "params.layer_split",
        "(a+2*k)*dh*(h+qb) + a*dh*h + G*f*(h+lb) + f*h",
        "parameters",
        "sizes of the matrices",
    ),
    (
        "params.layer_whole",
        "2*lb*h + 2*nw*h + 2*qkn*dh",
        "parameters",
        "norms and the biases after a row split",
    ),
    (
        "params.total",
        "l*(layer_split + layer_whole) + V*h*(2-tied) + P*h + nw*h",
        "parameters",
        "sum of the above",
    ),
    (
        "params.stage",
        "li*(layer_split/t + layer_whole) + first*(V+P)*h/t + table*V*h/t + last*nw*h",
        "parameters",
        "as mindformers splits them; a tied table is kept on both end stages",
    ),
    (
        "params.closed_form",
        "V*h + P*h + l*(12*h*h + 13*h) + 2*h",
        "parameters",
        "GPT-2/3: f = 4 h, biases, tied",
    ),
    (
        "params.narayanan",
        "12*l*h*h*(1 + 13/(12*h) + (V+s)/(12*l*h))",
        "parameters",
        f"{_NARAYANAN} equation 2",
    ),
    # ---- arithmetic ----------------------------------------------------------------------------------------
    ("flops.layer_linear", "2*b*s*((a+2*k)*dh*h + a*dh*h + (G+1)*h*f)", "FLOP", "2 a multiply-add"),
    ("flops.layer_core", "4*b*s*s*a*dh*causal", "FLOP", "scores and their product with V; causal 1, or 1/2"),
    ("flops.head", "2*b*s*h*V", "FLOP", "logits"),
    (
        "flops.model_step",
        "3*(l*(layer_linear + layer_core) + head)*B/b",
        "FLOP",
        "forward and twice that backward",
    ),
    ("flops.hardware_step", "model_step + B/b*recomputed", "FLOP", "with the forward work done again"),
    (
        "flops.paper_model",
        "72*B*s*l*h*h*(1 + s/(6*h) + V/(12*l*h))",
        "FLOP",
        f"{_KORTHIKANTI} appendix A",
    ),
    ("flops.paper_full", "96*B*s*l*h*h*(1 + s/(6*h) + V/(16*l*h))", "FLOP", f"{_NARAYANAN} section 5.1"),
    (
        "flops.paper_selective",
        "72*B*s*l*h*h*(1 + s/(3*h) + V/(12*l*h))",
        "FLOP",
        f"{_KORTHIKANTI} appendix A",
    ),
    # ---- model states, bytes on a rank ---------------------------------------------------------------------
    ("memory.parameters", "param_bytes*(whole + split/r_param)", "bytes", f"{_ZERO}; {_MF}"),
    ("memory.optimizer_states", "state_bytes*(whole + split/r)", "bytes", f"{_ZERO}; {_MF}"),
    ("memory.gradients", "grad_bytes*(whole + split/r_grad)", "bytes", f"{_ZERO}; {_MF}"),
    (
        "memory.accumulated_gradients",
        "grad_bytes*(whole + split/r_grad)",
        "bytes",
        f"{_MF}: a clone of the weights",
    ),
    (
        "memory.transient_gradients",
        "grad_bytes*largest",
        "bytes",
        "the largest single gradient before it is added",
    ),
    (
        "memory.gathered_weights",
        "copy_bytes*copied",
        "bytes",
        f"{_MF}: weights in the compute type, forward to backward",
    ),
    # ---- activations, bytes a layer and micro-batch on a rank ----------------------------------------------
    (
        "activations.layer_whole",
        "s*b*h/c*(2*norm_bytes + 2*element + 2*mask)/tq",
        "bytes",
        f"{_KORTHIKANTI} section 4: what tensor parallel leaves whole",
    ),
    (
        "activations.layer_split",
        "s*b/(c*t)*element*((2*a+2*k)*dh + kept_mlp*f)",
        "bytes",
        f"{_KORTHIKANTI} section 4: what tensor parallel splits",
    ),
    (
        "activations.layer_core",
        "core_bytes*a*s*s*b/(c*t)",
        "bytes",
        f"{_KORTHIKANTI} section 4: scores and softmax",
    ),
    ("activations.layer_flash", "flash_bytes*a*s*b/(c*t)", "bytes", "what a fused attention keeps instead"),
    (
        "activations.layer_mlp_recomputed",
        "s*b/(c*t)*element*dropped_mlp*f",
        "bytes",
        f"{_MF}: activation of the MLP",
    ),
    ("activations.layer_full", "element*s*b*h/(c*tq_full)", "bytes", "the layer's input alone"),
    (
        "memory.activations",
        "alive*((li-ri)*layer_kept + ri*layer_full + first*embedding) + where(ri > 0, layer_kept, 0)",
        "bytes",
        f"{_KORTHIKANTI} section 4.2; the working set of one recomputed layer on top",
    ),
    (
        "memory.interleave_penalty",
        "1 + (p-1)/(p*v)",
        "share",
        f"{_KORTHIKANTI} section 4.2.3: the first stage with interleaving",
    ),
    (
        "memory.logits",
        "last*(logit_bytes*s*b*V/(c*t) + (norm_bytes+element)*s*b*h/(c*tq))",
        "bytes",
        f"{_KORTHIKANTI} section 4.3: once, on the stage of the head, with the inputs of the last norm and "
        "the head",
    ),
    ("memory.attention_mask", "mask_map*b*s*s/c", "bytes", "(b, 1, s, s) in one byte unless compressed"),
    # ---- pipeline ------------------------------------------------------------------------------------------
    ("pipeline.alive", "minimum(m, p - stage)", "micro-batches", "1F1B"),
    (
        "pipeline.alive_interleaved",
        "minimum(m*v, 2*(p-stage-1) + (v-1)*p + 1)/v",
        "micro-batches",
        f"{_NARAYANAN} section 2.2",
    ),
    (
        "pipeline.bubble",
        "(p-1)/(v*m + p-1)",
        "share",
        "idle share of the whole step, as mindformers' guide states it",
    ),
    (
        "pipeline.bubble_of_ideal",
        "(p-1)/(v*m)",
        "share",
        f"{_NARAYANAN} section 2.2: relative to the busy time",
    ),
    (
        "pipeline.step",
        "m*slowest + (whole_pass - slowest)/v",
        "s",
        "ramp and steady state; Alpa's form at v = 1",
    ),
    # ---- communication -------------------------------------------------------------------------------------
    (
        "comm.layer_forward",
        "2*(t-1)/t*2*b*s*h/c*element",
        "bytes",
        f"{_NARAYANAN} section 3.2: two all-reduces",
    ),
    (
        "comm.context",
        "2*b*s*k*dh/t*element",
        "bytes",
        "keys and values gathered over the context-parallel ranks",
    ),
    ("comm.pipeline", "b*s*h/(c*tq)*element*v", "bytes", "one boundary and direction a micro-batch"),
    ("comm.all_reduce", "2*(g-1)*latency + 2*(g-1)/g*size/bandwidth", "s", "ring"),
    ("comm.all_gather", "(g-1)*latency + (g-1)/g*size/bandwidth", "s", "ring; reduce-scatter alike"),
    ("comm.tied_table", "2*V*h/t*grad_bytes", "bytes", "gradient of the shared table between the end stages"),
    # ---- time ----------------------------------------------------------------------------------------------
    ("time.layer_forward", "(layer_linear + layer_core)/(c*t*peak*efficiency_f)", "s", "GEMM-bound"),
    ("time.layer_backward", "2*(layer_linear + layer_core)/(c*t*peak*efficiency_b)", "s", "GEMM-bound"),
    (
        "time.element_wise",
        "passes*(layer_whole + layer_split + layer_core)/memory_bandwidth",
        "s",
        "bandwidth-bound",
    ),
    (
        "time.optimizer",
        "(param_bytes + grad_bytes + state_bytes + param_bytes + state_bytes)*owned/memory_bandwidth",
        "s",
        "reads p, g, m, v and writes p, m, v",
    ),
    ("time.simple_days", "8*T*N/(n*X)/86400", "days", f"{_NARAYANAN} equation 4"),
    ("mfu", "model_step/(step*n*peak)", "share", "Chowdhery et al. 2022 (arXiv 2204.02311) appendix B"),
    ("hfu", "hardware_step/(step*n*peak)", "share", f"{_KORTHIKANTI} section 6.3"),
)

FORMULAS: dict[str, Formula] = {id_: Formula(id_, text, unit, source) for id_, text, unit, source in _TABLE}
