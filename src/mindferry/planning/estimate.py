"""Memory and time of one strategy, stage by stage, from the formulas of `formulas.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindferry.planning.communication import collective_seconds, hop_seconds
from mindferry.planning.formulas import FORMULAS
from mindferry.planning.settings import Convention, Device
from mindferry.planning.strategy import Strategy
from mindferry.spec import DType, ModelSpec

MEMORY_PARTS = (
    "parameters", "gradients", "optimizer_states", "accumulated_gradients", "gathered_weights", "activations",
    "attention_mask", "logits",
)  # fmt: skip
# Parameters smaller than this are not spread by optimizer parallel (parallel_optimizer_threshold, KB).
SHARD_THRESHOLD_BYTES = 64 << 10


@dataclass(frozen=True)
class Calibration:
    """Measured corrections, 1 and 0 before anything was measured.

    Attributes:
        activations: factor on activation memory.
        constant_bytes: memory that no formula holds (runtime, communicators).
        time: factor on computing time.
        source: what was measured, for the report.
    """

    activations: float = 1.0
    constant_bytes: float = 0.0
    time: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class Job:
    """What is to be trained, on what, counted how.

    Attributes:
        causal_flops: count half of the attention scores, as mindformers' own throughput line does.
        flash_attention: a fused attention keeps no scores.
    """

    model: ModelSpec
    seq_length: int
    global_batch: int
    device: Device
    convention: Convention
    compute_dtype: DType = "bfloat16"
    flash_attention: bool = True
    causal_flops: bool = False
    calibration: Calibration = field(default_factory=Calibration)


@dataclass(frozen=True)
class Estimate:
    """What a strategy costs. Arrays have one item a stage; bytes are on one rank of the stage."""

    strategy: Strategy
    memory: dict[str, np.ndarray]
    total_bytes: np.ndarray
    usable_bytes: int
    step_seconds: float
    parts: dict[str, float]
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    tokens_per_second: float
    bubble_fraction: float
    communication_bytes: dict[str, float]

    @property
    def fits(self) -> bool:
        return bool(self.total_bytes.max() <= self.usable_bytes)

    @property
    def heaviest_stage(self) -> int:
        return int(self.total_bytes.argmax())

    @property
    def overflow_bytes(self) -> float:
        return float(self.total_bytes.max() - self.usable_bytes)


@dataclass(frozen=True)
class _Layer:
    """Costs of one layer and micro-batch for a cut (t, c, b, sequence parallel)."""

    kept: float  # bytes without recompute
    kept_select: float
    full: float
    embedding: float
    forward: float  # seconds of computation
    backward: float
    recompute_full: float
    recompute_select: float
    communication: float  # seconds forward; backward costs the same
    flops: float
    core_flops: float
    head_forward: float
    head_backward: float


class Estimator:
    """Evaluates strategies for one job, keeping what strategies share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._base = self._base_symbols()
        self._layers: dict[tuple[Any, ...], _Layer] = {}
        self._owned: dict[tuple[Any, ...], tuple[float, ...]] = {}

    # ---- symbols -------------------------------------------------------------------------------------------

    def _base_symbols(self) -> dict[str, Any]:
        job, m, conv = self.job, self.job.model, self.job.convention
        norm = 2 if m.normalization == "LayerNorm" else 1
        gates = 2 if m.gated_linear_unit else 1
        hidden_mask = conv.mask_bytes if conv.always_masks or m.hidden_dropout > 0 else 0
        scores_mask = conv.mask_bytes if m.attention_dropout > 0 and not conv.always_masks else 0
        symbols: dict[str, Any] = {
            "l": m.num_layers, "h": m.hidden_size, "a": m.num_attention_heads, "k": m.num_query_groups,
            "dh": m.kv_channels, "f": m.ffn_hidden_size, "G": gates, "s": job.seq_length, "B":
            job.global_batch, "P": m.max_position_embeddings if m.position_embedding == "learned_absolute"
            else 0, "tied": int(m.tie_word_embeddings), "lb": int(m.add_bias_linear),
            "qb": int(m.add_bias_linear or m.add_qkv_bias), "nw": norm, "qkn": int(m.qk_layernorm) / norm *
            norm, "causal": 0.5 if job.causal_flops else 1.0,
            "element": conv.element, "norm_bytes": conv.layernorm_input, "mask": hidden_mask,
            "core_bytes": conv.attention_core + scores_mask, "flash_bytes": conv.flash_statistics,
            "kept_mlp": 4 if m.gated_linear_unit else 2, "dropped_mlp": 2 if m.gated_linear_unit else 1,
            "mask_map": conv.attention_mask, "logit_bytes": conv.logit, "param_bytes": conv.parameter,
            "grad_bytes": conv.gradient, "state_bytes": conv.state, "copy_bytes": conv.compute_copy,
            "peak": job.device.peak(job.compute_dtype), "efficiency_f": job.device.gemm_efficiency_forward,
            "efficiency_b": job.device.gemm_efficiency_backward, "passes": job.device.element_wise_passes,
            "memory_bandwidth": job.device.memory_bandwidth,
        }  # fmt: skip
        for name in ("layer_split", "layer_whole"):
            symbols[name] = FORMULAS[f"params.{name}"](symbols)
        return symbols

    def symbols(self, st: Strategy) -> dict[str, Any]:
        """Every symbol the formulas use for `st`; per-stage ones as arrays."""
        p = st.pipeline_stage
        stage = np.arange(p)
        first, last = (stage == 0).astype(int), (stage == p - 1).astype(int)
        own_table = last if p > 1 or not self.job.model.tie_word_embeddings else np.zeros(p, int)
        out = dict(self._base)
        out.update(
            V=st.vocab_size or self.job.model.vocab_size, b=st.batch_size, m=st.micro_batch_num,
            d=st.data_parallel, t=st.model_parallel, c=st.context_parallel, p=p, v=st.pp_interleave_num,
            n=st.devices, r=st.shard_ranks, tq=st.model_parallel if st.use_seq_parallel else 1,
            li=np.array(st.layers_per_stage), ri=np.array(st.recompute or (0,) * p), stage=stage,
            first=first, last=last, table=own_table,
        )  # fmt: skip
        out["tq_full"] = out["tq"] if self.job.convention.accumulates else 1
        name = "pipeline.alive_interleaved" if st.pp_interleave_num > 1 else "pipeline.alive"
        out["alive"] = FORMULAS[name](out)
        return out

    # ---- one layer -----------------------------------------------------------------------------------------

    def layer(self, st: Strategy, sym: dict[str, Any] | None = None) -> _Layer:
        """Costs of one layer and of the head for the cut of `st`."""
        vocab = st.vocab_size or self.job.model.vocab_size
        key = (st.model_parallel, st.context_parallel, st.batch_size, st.use_seq_parallel, vocab)
        if key not in self._layers:
            self._layers[key] = self._layer_costs(st, self.symbols(st) if sym is None else sym)
        return self._layers[key]

    def layer_symbols(self, sym: dict[str, Any]) -> dict[str, Any]:
        """`sym` with the costs of one layer added under the names the formulas use."""
        conv, scale = self.job.convention, self.job.calibration.activations
        names = (
            "layer_whole",
            "layer_split",
            "layer_core",
            "layer_flash",
            "layer_mlp_recomputed",
            "layer_full",
        )
        acts = {name: FORMULAS[f"activations.{name}"](sym) * scale for name in names}
        dev = self.job.device
        for name in acts:
            acts[name] *= (
                dev.attention_factor if name in ("layer_core", "layer_flash") else dev.activation_factor
            )
        core = acts["layer_flash"] if self.job.flash_attention else acts["layer_core"]
        select_core = "core_attention" in conv.select and not self.job.flash_attention
        dropped = core if select_core else 0.0
        if "mlp_activation" in conv.select:
            dropped += acts["layer_mlp_recomputed"]
        out = dict(sym)
        kept = acts["layer_whole"] + acts["layer_split"] + core
        out.update(
            layer_kept=kept, layer_kept_select=kept - dropped, layer_full=acts["layer_full"],
            layer_core_bytes=core, select_core=int(select_core),
            embedding=sym["mask"] * sym["s"] * sym["b"] * sym["h"] / (sym["c"] * sym["tq"]) * scale,
            layer_linear=FORMULAS["flops.layer_linear"](sym), layer_core=FORMULAS["flops.layer_core"](sym),
            head=FORMULAS["flops.head"](sym),
        )  # fmt: skip
        return out

    def _layer_costs(self, st: Strategy, sym: dict[str, Any]) -> _Layer:
        dev, cal = self.job.device, self.job.calibration
        sym = self.layer_symbols(sym)
        split = sym["t"] * sym["c"]
        forward = FORMULAS["time.layer_forward"](sym)
        backward = FORMULAS["time.layer_backward"](sym)
        element_wise = self._element_wise_seconds(sym)
        forward = (forward * dev.gemm_passes + element_wise / 3) * cal.time + dev.layer_overhead
        backward = (backward * dev.gemm_passes + element_wise * 2 / 3) * cal.time + 2 * dev.layer_overhead
        core = sym["layer_core"] / (split * sym["peak"] * sym["efficiency_f"]) * cal.time * dev.gemm_passes
        again = 0.0
        if "mlp_activation" in self.job.convention.select and dev.element_wise_passes:
            # reads what the activation needs and writes what it makes, once more
            again = 2 * FORMULAS["activations.layer_mlp_recomputed"](sym) / dev.memory_bandwidth * cal.time
        size = sym["b"] * sym["s"] * sym["h"] / sym["c"] * sym["element"]
        reduce = 2 * collective_seconds("all_reduce", size, st.model_parallel, 1, dev) * (1 - dev.overlap)
        ring = 0.0
        if st.context_parallel > 1:
            gathered = FORMULAS["comm.context"](sym)
            # one gather forward; one gather and one reduce-scatter backward: 1.5 times the forward on average
            ring = 1.5 * collective_seconds(
                "all_gather", gathered, st.context_parallel, st.model_parallel, dev
            )
        head = sym["head"] / (split * sym["peak"]) * dev.gemm_passes
        logits = (
            sym["logit_bytes"]
            * sym["s"]
            * sym["b"]
            * sym["V"]
            / split
            / sym["memory_bandwidth"]
            * dev.head_passes
        )
        return _Layer(
            kept=sym["layer_kept"], kept_select=sym["layer_kept_select"], full=sym["layer_full"],
            embedding=sym["embedding"], forward=forward, backward=backward, recompute_full=forward,
            recompute_select=core * sym["select_core"] + again, communication=reduce + ring,
            flops=sym["layer_linear"] + sym["layer_core"], core_flops=sym["layer_core"],
            head_forward=(head / sym["efficiency_f"] + logits / 3) * cal.time,
            head_backward=(2 * head / sym["efficiency_b"] + 2 * logits / 3) * cal.time,
        )  # fmt: skip

    def _element_wise_seconds(self, sym: dict[str, Any]) -> float:
        """Forward and backward seconds of a layer's element-wise work: what it saves, moved through memory."""
        dev = self.job.device
        raw = {
            name: FORMULAS[f"activations.{name}"](sym)
            for name in ("layer_whole", "layer_split", "layer_core")
        }
        scores = FORMULAS["activations.layer_flash"](sym) if self.job.flash_attention else raw["layer_core"]
        values = {
            **raw,
            "layer_core": 0.0,
            "passes": dev.element_wise_passes,
            "memory_bandwidth": dev.memory_bandwidth,
        }
        passes = dev.element_wise_passes if dev.attention_passes is None else dev.attention_passes
        return float(FORMULAS["time.element_wise"](values)) + passes * scores / dev.memory_bandwidth

    def head_in_layers(self, st: Strategy) -> float:
        """Work of the head as a number of layers, for balancing stages."""
        layer = self.layer(st)
        one = layer.forward + layer.backward + 2 * layer.communication
        return (layer.head_forward + layer.head_backward) / one

    # ---- parameters ----------------------------------------------------------------------------------------

    def owned(self, st: Strategy, sym: dict[str, Any]) -> tuple[float, ...]:
        """(layer split over r, layer whole, first split, first whole, table split, table whole, norm split,
        norm whole, largest matrix): counts of parameters on one rank; "split" is what optimizer parallel
        spreads over r ranks.
        """
        key = (st.model_parallel, st.shard_ranks, sym["V"])
        if key not in self._owned:
            self._owned[key] = self._owned_parameters(sym, st.model_parallel, st.shard_ranks)
        return self._owned[key]

    def _owned_parameters(self, sym: dict[str, Any], t: int, r: int) -> tuple[float, ...]:
        qkv_rows = (sym["a"] + 2 * sym["k"]) * sym["dh"]
        matrices = (  # (rows and parameters on the rank): column splits cut rows, row splits cut columns
            (qkv_rows / t, qkv_rows * sym["h"] / t),
            (sym["h"], sym["a"] * sym["dh"] * sym["h"] / t),
            (sym["G"] * sym["f"] / t, sym["G"] * sym["f"] * sym["h"] / t),
            (sym["h"], sym["f"] * sym["h"] / t),
        )
        anything = not self.job.convention.accumulates  # the papers spread all parameters alike

        def spread(rows: float, size: float) -> bool:
            big = size * sym["param_bytes"] >= SHARD_THRESHOLD_BYTES
            return anything or (rows % r == 0 and big)

        layer_split = sum(size for rows, size in matrices if spread(rows, size))
        total = sym["layer_split"] / t + sym["layer_whole"]
        if anything:
            layer_split = total
        norm = sym["nw"] * sym["h"]
        table, positions = sym["V"] * sym["h"] / t, sym["P"] * sym["h"] / t
        table_split = table if spread(sym["V"] / t, table) else 0.0
        position_split = positions if spread(sym["P"] / t, positions) else 0.0
        largest = max(*(size for _, size in matrices), table)
        return (
            layer_split, total - layer_split,
            table_split + position_split, table + positions - table_split - position_split,
            table_split, table - table_split, norm * anything, norm * (not anything),
            largest,
        )  # fmt: skip

    def stage_parameters(self, st: Strategy, sym: dict[str, Any]) -> tuple[Any, Any]:
        """Parameters a rank of each stage holds, before sharding: (what r ranks can share, what they
        cannot)."""
        ls, lw, fs, fw, ts, tw, ns, nw, _ = self.owned(st, sym)
        li, first, table, last = sym["li"], sym["first"], sym["table"], sym["last"]
        return li * ls + first * fs + table * ts + last * ns, li * lw + first * fw + table * tw + last * nw

    # ---- memory --------------------------------------------------------------------------------------------

    def memory(self, st: Strategy, sym: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
        """Bytes on one rank of each stage, by part (`MEMORY_PARTS`): arrays of one item a stage."""
        sym = self.symbols(st) if sym is None else sym
        return {
            name: np.broadcast_to(np.asarray(FORMULAS[formula](values), float), (st.pipeline_stage,))
            * self._factor(name)
            for name, formula, values in self.memory_terms(st, sym)
        }

    def _factor(self, part: str) -> float:
        """The measured factor on a memory part; activations carry theirs already."""
        dev = self.job.device
        special = {"activations": 1.0, "attention_mask": dev.activation_factor, "logits": dev.logit_factor}
        return special.get(part, dev.static_factor)

    def memory_terms(self, st: Strategy, sym: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
        """(part, formula id, symbols) of every memory part, for adding up and for explaining."""
        conv, level, zero = self.job.convention, st.optimizer_shard_level, np.zeros(st.pipeline_stage)
        layer = self.layer(st, sym)
        ls, lw, *_, largest = self.owned(st, sym)
        values = dict(sym)
        values["split"], values["whole"] = self.stage_parameters(st, sym)
        values["r_param"] = sym["r"] if level >= conv.shards_parameters_from else 1
        values["r_grad"] = sym["r"] if level >= conv.shards_gradients_from else 1
        values["largest"] = largest + zero
        # Gradients go straight into the accumulation buffer when there is one.
        accumulates = conv.accumulates and st.micro_batch_num > 1
        if not accumulates and conv.accumulates and level:
            values["r_grad"] = sym[
                "r"
            ]  # a single micro-batch: reduce-scattered before the optimizer sees them
        # Level 3 gathers again in backward, so only about one layer's copy is alive.
        values["copied"] = np.asarray(
            (ls + lw) + zero if level >= 3 else values["split"] + values["whole"], float
        )
        values["layer_kept"] = layer.kept_select if st.select else layer.kept
        values["layer_full"], values["embedding"] = layer.full, layer.embedding
        values["mask_map"] = 0 if st.use_seq_parallel and self.job.flash_attention else sym["mask_map"]
        none = {**values, "grad_bytes": 0, "largest": zero}
        return [
            ("parameters", "memory.parameters", values),
            ("gradients", "memory.transient_gradients" if accumulates else "memory.gradients", values),
            ("optimizer_states", "memory.optimizer_states", values),
            ("accumulated_gradients", "memory.accumulated_gradients", values if accumulates else none),
            ("gathered_weights", "memory.gathered_weights", values),
            ("activations", "memory.activations", values),
            ("attention_mask", "memory.attention_mask", values),
            ("logits", "memory.logits", values),
        ]  # fmt: skip

    def total(self, memory: dict[str, np.ndarray]) -> np.ndarray:
        """Bytes a stage, with what was measured to come on top."""
        return (
            np.asarray(sum(memory.values()))
            + self.job.calibration.constant_bytes
            + self.job.device.resident_bytes
        )

    # ---- time ----------------------------------------------------------------------------------------------

    def estimate(self, st: Strategy, memory: dict[str, np.ndarray] | None = None) -> Estimate:
        """Memory and time of `st`."""
        job, dev, sym = self.job, self.job.device, self.symbols(st)
        memory = self.memory(st, sym) if memory is None else memory
        layer = self.layer(st, sym)
        busy, comm_stage = self._stage_seconds(st, sym, layer)
        p2p_bytes = FORMULAS["comm.pipeline"](sym) if st.pipeline_stage > 1 else 0.0
        hop = hop_seconds(st, p2p_bytes, dev)
        stage = busy + comm_stage + 2 * hop
        slowest, whole_pass = float(stage.max()), float(stage.sum())
        pipe = FORMULAS["pipeline.step"]({**sym, "slowest": slowest, "whole_pass": whole_pass})
        gradient, gradient_bytes = self._gradient_seconds(st, sym)
        optimizer = self._optimizer_seconds(st, sym)
        step = float(pipe) + gradient + optimizer + dev.step_overhead
        micro_steps = st.micro_batch_num * st.data_parallel
        selects_core = st.select and "core_attention" in job.convention.select and not job.flash_attention
        again = layer.core_flops * job.convention.select_core_passes if selects_core else 0.0
        recomputed = float(sum(sym["ri"])) * layer.flops + float(sum(sym["li"] - sym["ri"])) * again
        model_flops = 3 * (float(sum(sym["li"])) * layer.flops + FORMULAS["flops.head"](sym)) * micro_steps
        hardware = model_flops + recomputed * micro_steps
        work = step * st.devices * sym["peak"]
        ideal = float(pipe) if slowest else 1.0
        return Estimate(
            strategy=st, memory=memory, total_bytes=self.total(memory), usable_bytes=dev.usable_bytes,
            step_seconds=step,
            parts={"compute": float(busy.max()) * st.micro_batch_num,
                   "model_parallel_communication": float(comm_stage.max()) * st.micro_batch_num,
                   "pipeline_transfer": 2 * hop * st.micro_batch_num,
                   "bubble_and_imbalance": ideal - slowest * st.micro_batch_num,
                   "gradient_communication": gradient, "optimizer": optimizer},
            model_flops=model_flops, hardware_flops=hardware, mfu=model_flops / work, hfu=hardware / work,
            tokens_per_second=st.global_batch * job.seq_length / step,
            bubble_fraction=float(FORMULAS["pipeline.bubble"](sym)),
            communication_bytes=self._communication_bytes(st, sym, p2p_bytes, gradient_bytes),
        )  # fmt: skip

    def _stage_seconds(self, st: Strategy, sym: dict[str, Any], layer: _Layer) -> tuple[Any, Any]:
        """Seconds of computing and of tensor/context-parallel communication of each stage and micro-batch."""
        li, ri = sym["li"], sym["ri"]
        busy = li * (layer.forward + layer.backward) + ri * layer.recompute_full
        if st.select:
            busy = busy + (li - ri) * layer.recompute_select
        busy = busy + sym["last"] * (layer.head_forward + layer.head_backward)
        return busy, (2 * li + ri) * layer.communication

    def _gradient_seconds(self, st: Strategy, sym: dict[str, Any]) -> tuple[float, float]:
        """Exposed seconds and bytes a rank of gradient (and weight) exchange over data parallel, a step."""
        d = st.data_parallel * st.context_parallel
        split, whole = self.stage_parameters(st, sym)
        dev, stride = self.job.device, st.model_parallel
        grad_bytes, copy_bytes = (
            self.job.convention.gradient,
            self.job.convention.compute_copy or sym["param_bytes"],
        )
        i = int((split + whole).argmax())
        split_i, whole_i = float(split[i]), float(whole[i])
        seconds = size = 0.0
        if d > 1:
            level, r, m = st.optimizer_shard_level, min(st.shard_ranks, d), st.micro_batch_num
            if not level:
                whole_i, split_i = whole_i + split_i, 0.0
            seconds += collective_seconds("all_reduce", whole_i * grad_bytes, d, stride, dev)
            size += 2 * (d - 1) / d * whole_i * grad_bytes
            if split_i and r > 1:
                gathers = 2 * m if level == 3 else 1
                scatters = m if level >= 2 else 1
                seconds += gathers * collective_seconds("all_gather", split_i * copy_bytes, r, stride, dev)
                seconds += scatters * collective_seconds("all_gather", split_i * grad_bytes, r, stride, dev)
                size += (r - 1) / r * split_i * (gathers * copy_bytes + scatters * grad_bytes)
                if d > r:
                    seconds += collective_seconds(
                        "all_reduce", split_i / r * grad_bytes, d // r, stride * r, dev
                    )
                    size += 2 * (1 - r / d) * split_i / r * grad_bytes
            elif split_i:
                seconds += collective_seconds("all_reduce", split_i * grad_bytes, d, stride, dev)
                size += 2 * (d - 1) / d * split_i * grad_bytes
        # One fusion group a stage with a pipeline, gradient_aggregation_group 4 without: all but one group
        # overlap.
        exposed = 1.0 if st.pipeline_stage > 1 else 0.25
        tied = 0.0
        if st.pipeline_stage > 1 and self.job.model.tie_word_embeddings:
            tied_bytes = FORMULAS["comm.tied_table"](sym)
            far = st.devices > dev.devices_per_host
            tied = tied_bytes / dev.bandwidth(not far)
            size += tied_bytes
        return seconds * exposed + tied, size

    def _optimizer_seconds(self, st: Strategy, sym: dict[str, Any]) -> float:
        split, whole = self.stage_parameters(st, sym)
        owned = float((whole + split / sym["r"]).max())
        factor = self.job.device.optimizer_passes * self.job.calibration.time
        return float(FORMULAS["time.optimizer"]({**sym, "owned": owned})) * factor

    def _communication_bytes(
        self, st: Strategy, sym: dict[str, Any], p2p: float, gradient: float
    ) -> dict[str, float]:
        layers = float(sym["li"].max())
        passes = 2 + float(sym["ri"].max()) / layers if layers else 2.0
        tp = FORMULAS["comm.layer_forward"](sym) if st.model_parallel > 1 else 0.0
        return {
            "model_parallel": tp * passes * layers * st.micro_batch_num,
            "pipeline": 2 * p2p * st.micro_batch_num,
            "data_parallel": gradient,
        }
