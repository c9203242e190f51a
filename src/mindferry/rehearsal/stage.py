"""One rank's part of the model: the layers of its stage, the embedding in the first, head and loss in the last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindferry.rehearsal.cells import (
    ACTIVATIONS,
    Array,
    ColumnLinear,
    CoreAttention,
    Norm,
    Rotary,
    RowLinear,
    Saved,
    Share,
    VocabLoss,
    VocabTable,
    rows,
)
from mindferry.rehearsal.wire import Wire
from mindferry.spec import ModelSpec
from mindferry.weights.transforms import TargetLayout

WORDS = "embedding.word_embeddings.weight"
LOGITS = "output_layer"
POSITIONS = "embedding.position_embeddings.weight"


@dataclass(frozen=True)
class Cutting:
    """What the parts must know besides their weights.

    Attributes:
        sequence: sequence parallel.
        seq_length: tokens of a sequence, before any cut.
    """

    spec: ModelSpec
    layout: TargetLayout
    sequence: bool
    seq_length: int


@dataclass
class Probe:
    """Fingerprints of what the parts of the model put out: sums of |x| and of x^2, in float64.

    Attributes:
        seen: part -> its two sums, while `open`.
    """

    open: bool = False
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    def see(self, name: str, x: Array) -> None:
        if self.open:
            exact = x.astype(np.float64)
            self.seen[name] = (float(np.abs(exact).sum()), float(np.square(exact).sum()))


class Attention:
    """Column linear for q, k, v; this rank's heads; row linear."""

    def __init__(
        self, share: Share, prefix: str, wire: Wire, cutting: Cutting, rotary: Rotary | None
    ) -> None:
        spec, ranks = cutting.spec, wire.size("tensor")
        self.heads, self.groups = spec.num_attention_heads // ranks, spec.num_query_groups // ranks
        self.dim, self.flat = spec.kv_channels, cutting.layout.qkv == "flat"
        self.qkv = ColumnLinear(share, f"{prefix}.linear_qkv", wire, cutting.sequence)
        self.proj = RowLinear(share, f"{prefix}.linear_proj", wire, cutting.sequence)
        self.core, self.rotary = CoreAttention(), rotary
        self.norms = None
        if spec.qk_layernorm:
            self.norms = tuple(
                Norm(share, f"{prefix}.{name}_layernorm", spec.layernorm_epsilon) for name in "qk"
            )
            for norm in self.norms:
                norm.sums_over_tensor_group()

    def forward(self, x: Array) -> tuple[Array, Saved]:
        packed, saved_qkv = self.qkv.forward(x)
        q, k, v = self._unpack(packed)
        saved_norms = None
        if self.norms:
            (q, saved_q), (k, saved_k) = self.norms[0].forward(q), self.norms[1].forward(k)
            saved_norms = (saved_q, saved_k)
        if self.rotary:
            q, k = self.rotary.forward(q), self.rotary.forward(k)
        context, saved_core = self.core.forward(q, k, v)
        y, saved_proj = self.proj.forward(context)
        return y, (saved_qkv, saved_norms, saved_core, saved_proj)

    def backward(self, dy: Array, saved: Saved) -> Array:
        saved_qkv, saved_norms, saved_core, saved_proj = saved
        dq, dk, dv = self.core.backward(self.proj.backward(dy, saved_proj), saved_core)
        if self.rotary:
            dq, dk = self.rotary.backward(dq), self.rotary.backward(dk)
        if self.norms:
            dq = self.norms[0].backward(dq, saved_norms[0])
            dk = self.norms[1].backward(dk, saved_norms[1])
        return self.qkv.backward(self._pack(dq, dk, dv), saved_qkv)

    def _unpack(self, packed: Array) -> tuple[Array, Array, Array]:
        """[S, B, (N + 2 G) D] -> q [S, B, N, D], k and v [S, B, G, D]."""
        length, batch, _ = packed.shape
        if self.flat:
            q, k, v = np.split(
                packed, (self.heads * self.dim, (self.heads + self.groups) * self.dim), axis=-1
            )
        else:
            query = self.heads // self.groups * self.dim
            grouped = packed.reshape(length, batch, self.groups, query + 2 * self.dim)
            q, k, v = np.split(grouped, (query, query + self.dim), axis=-1)
        return (
            q.reshape(length, batch, self.heads, self.dim),
            k.reshape(length, batch, self.groups, self.dim),
            v.reshape(length, batch, self.groups, self.dim),
        )

    def _pack(self, q: Array, k: Array, v: Array) -> Array:
        length, batch = q.shape[:2]
        if self.flat:
            return np.concatenate([x.reshape(length, batch, -1) for x in (q, k, v)], -1)
        parts = [x.reshape(length, batch, self.groups, -1) for x in (q, k, v)]
        return np.concatenate(parts, -1).reshape(length, batch, -1)


class MLP:
    """Column linear, activation (gated or not), row linear."""

    def __init__(self, share: Share, prefix: str, wire: Wire, cutting: Cutting) -> None:
        self.fc1 = ColumnLinear(share, f"{prefix}.linear_fc1", wire, cutting.sequence)
        self.fc2 = RowLinear(share, f"{prefix}.linear_fc2", wire, cutting.sequence)
        self.gated = cutting.spec.gated_linear_unit
        self.interleaved = cutting.layout.gate_up == "interleaved"
        self.activation = ACTIVATIONS[cutting.spec.activation]

    def forward(self, x: Array) -> tuple[Array, Saved]:
        inner, saved_fc1 = self.fc1.forward(x)
        up = None
        if self.gated:
            inner, up = self._halves(inner)
        value, slope = self.activation(inner)
        y, saved_fc2 = self.fc2.forward(value if up is None else value * up)
        return y, (saved_fc1, saved_fc2, value, slope, up)

    def backward(self, dy: Array, saved: Saved) -> Array:
        saved_fc1, saved_fc2, value, slope, up = saved
        inner = self.fc2.backward(dy, saved_fc2)
        gradient = inner * slope if up is None else self._together(inner * up * slope, inner * value)
        return self.fc1.backward(gradient, saved_fc1)

    def _halves(self, x: Array) -> tuple[Array, Array]:
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]

    def _together(self, gate: Array, up: Array) -> Array:
        if self.interleaved:
            return np.stack((gate, up), -1).reshape(*gate.shape[:-1], -1)
        return np.concatenate((gate, up), -1)


class Layer:
    """x + attention(norm(x)), then + mlp(norm(.)); side by side with parallel_residual."""

    def __init__(
        self, share: Share, number: int, wire: Wire, cutting: Cutting, rotary: Rotary | None
    ) -> None:
        prefix, spec = f"decoder.layers.{number}", cutting.spec
        self.prefix = prefix
        self.norm1 = Norm(share, f"{prefix}.input_layernorm", spec.layernorm_epsilon)
        self.norm2 = Norm(share, f"{prefix}.pre_mlp_layernorm", spec.layernorm_epsilon)
        self.attention = Attention(share, f"{prefix}.self_attention", wire, cutting, rotary)
        self.mlp = MLP(share, f"{prefix}.mlp", wire, cutting)
        self.side_by_side = spec.parallel_residual
        if cutting.sequence:
            self.norm1.sums_over_tensor_group()
            self.norm2.sums_over_tensor_group()

    def forward(self, x: Array, probe: Probe) -> tuple[Array, Saved]:
        normal, saved1 = self.norm1.forward(x)
        attended, saved_attention = self.attention.forward(normal)
        probe.see(f"{self.prefix}.self_attention", attended)
        middle = x + attended
        normal, saved2 = self.norm2.forward(x if self.side_by_side else middle)
        transformed, saved_mlp = self.mlp.forward(normal)
        probe.see(f"{self.prefix}.mlp", transformed)
        return middle + transformed, (saved1, saved_attention, saved2, saved_mlp)

    def backward(self, dy: Array, saved: Saved) -> Array:
        saved1, saved_attention, saved2, saved_mlp = saved
        through_mlp = self.norm2.backward(self.mlp.backward(dy, saved_mlp), saved2)
        middle = dy if self.side_by_side else dy + through_mlp
        dx = middle + self.norm1.backward(self.attention.backward(middle, saved_attention), saved1)
        return dx + through_mlp if self.side_by_side else dx


@dataclass(frozen=True)
class MicroBatch:
    """This replica's rows of a micro-batch: ids and labels [B, S], and what each token weighs in the loss [B, S]."""

    input_ids: Array
    labels: Array
    weights: Array


def micro_batches(
    ids: Array, mask: Array, per_token: bool, replica: int = 0, replicas: int = 1
) -> list[MicroBatch]:
    """The rows of one replica, weighted so that the sum over replicas and micro-batches is the loss of the step.

    Args:
        ids: [micro-batches, sequences, seq_length + 1]; mask [micro-batches, sequences, seq_length].
        per_token: a mean over the tokens of the step; else the mean of the micro-batches' means.
    """
    share = ids.shape[1] // replicas
    own = slice(replica * share, (replica + 1) * share)
    counts = mask.sum((1, 2), dtype=np.float64)
    each = np.full(len(ids), counts.sum()) if per_token else counts * len(ids)
    return [
        MicroBatch(ids[m, own, :-1], ids[m, own, 1:], (mask[m, own] / each[m]).astype(np.float32))
        for m in range(len(ids))
    ]


class Stage:
    """What one rank computes.

    Args:
        share: its parameters.
        layers: numbers of the layers of its stage.
        first, last: whether the embedding and the head are here.
    """

    def __init__(
        self, share: Share, wire: Wire, cutting: Cutting, layers: list[int], first: bool, last: bool
    ) -> None:
        spec = cutting.spec
        self.share, self.wire, self.cutting = share, wire, cutting
        self.last = last
        self.probe = Probe()
        rotary = _rotary(cutting)
        self.layers = [Layer(share, number, wire, cutting, rotary) for number in layers]
        self.tables: list[VocabTable] = []
        if first:
            names = [WORDS, POSITIONS] if spec.position_embedding == "learned_absolute" else [WORDS]
            self.tables = [VocabTable(share, name, wire, cutting.sequence) for name in names]
        if last:
            self.norm = Norm(share, "decoder.final_layernorm", spec.layernorm_epsilon)
            if cutting.sequence:
                self.norm.sums_over_tensor_group()
            weight = WORDS if spec.tie_word_embeddings else "output_layer.weight"
            self.head = ColumnLinear(share, "output_layer", wire, cutting.sequence, weight)
            self.loss = VocabLoss(wire)

    def forward(self, x: Array | None, batch: MicroBatch) -> tuple[Array, Saved]:
        """Activations of the next stage [S or S / ranks, B, H], or this micro-batch's part of the loss []."""
        saved_tables: list[Saved] = []
        if x is None:
            x, saved_tables = self._embed(batch.input_ids)
            self.probe.see("embedding", x)
        saved_layers = []
        for layer in self.layers:
            x, saved = layer.forward(x, self.probe)
            saved_layers.append(saved)
        if not self.last:
            return x, (saved_tables, saved_layers, None)
        x, saved_norm = self.norm.forward(x)
        logits, saved_head = self.head.forward(x)
        self.probe.see(LOGITS, logits)
        losses, saved_loss = self.loss.forward(rows(logits), batch.labels.T.reshape(-1))
        weights = batch.weights.T.reshape(-1)
        total = np.asarray((losses.astype(np.float64) * weights).sum())
        return total, (
            saved_tables,
            saved_layers,
            (saved_norm, saved_head, saved_loss, weights, logits.shape),
        )

    def _embed(self, ids: Array) -> tuple[Array, list[Saved]]:
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        x, saved = self.tables[0].forward(ids)
        if len(self.tables) == 1:
            return x, [saved]
        added, saved_positions = self.tables[1].forward(positions)
        return x + added, [saved, saved_positions]

    def backward(self, dy: Array | None, saved: Saved) -> Array:
        """Gradient for the stage before. `dy` comes from the next stage; the last begins with its loss."""
        saved_tables, saved_layers, saved_last = saved
        if dy is None:
            saved_norm, saved_head, saved_loss, weights, shape = saved_last
            dlogits = self.loss.backward(weights, saved_loss).reshape(shape)
            dy = self.norm.backward(self.head.backward(dlogits, saved_head), saved_norm)
        for layer, saved_layer in zip(reversed(self.layers), reversed(saved_layers), strict=True):
            dy = layer.backward(dy, saved_layer)
        for table, saved_table in zip(self.tables, saved_tables, strict=True):
            table.backward(dy, saved_table)
        return dy


def _rotary(cutting: Cutting) -> Rotary | None:
    spec = cutting.spec
    if spec.position_embedding != "rope":
        return None
    from mindferry.layers.rotary import rotary_tables

    tables: Any = rotary_tables(
        seq_length=cutting.seq_length,
        dim=int(spec.kv_channels * spec.rotary_percent),
        base=spec.rotary_base,
        scaling=spec.rope_scaling.model_dump(exclude_none=True) if spec.rope_scaling else None,
        max_position_embeddings=spec.max_position_embeddings,
    )
    return Rotary(*tables)
