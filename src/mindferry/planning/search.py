"""Enumerates strategies, drops those that break a rule or do not fit, and ranks the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindferry.planning.constraints import problems
from mindferry.planning.estimate import Estimate, Estimator, Job
from mindferry.planning.layout import layout_of
from mindferry.planning.rules_model import padded_vocab
from mindferry.planning.strategy import Strategy, balanced_layers, divisors, even_layers

MAX_DEVICES = 1 << 20
# Sequences from which context parallel is worth its communication (mindformers' performance guide).
CONTEXT_PARALLEL_FROM = 32768
TIE = 0.02
# What every virtual stage must earn in step time to be preferred: more messages, more to go wrong.
VIRTUAL_PRICE = 0.004
# What the last tenth of the usable memory must earn: a plan that fits to the last byte runs out of it at a trifle.
TIGHT_FROM, TIGHT_PRICE = 0.9, 0.01


@dataclass(frozen=True)
class Fixed:
    """Degrees the person has decided; None leaves them to the search."""

    data_parallel: int | None = None
    model_parallel: int | None = None
    pipeline_stage: int | None = None
    context_parallel: int | None = None
    pp_interleave_num: int | None = None
    micro_batch_num: int | None = None
    batch_size: int | None = None
    optimizer_shard_level: int | None = None

    def allows(self, name: str, value: int) -> bool:
        want = getattr(self, name)
        return want is None or want == value


@dataclass
class Found:
    """Result of a search.

    Attributes:
        best: the k best that fit, best first.
        examined: strategies whose memory was worked out; `skipped` could not have been among the best.
        fitting: cuts (degrees, batch, level) for which some recompute setting fits.
        reasons: how many cuts each rule turned away, with one example message each.
        closest: the cut that misses the memory by least, when nothing fits.
    """

    best: list[Estimate] = field(default_factory=list)
    examined: int = 0
    skipped: int = 0
    fitting: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Strategy, str]] = field(default_factory=dict)
    closest: Estimate | None = None


@dataclass(frozen=True)
class Cut:
    """Everything of a strategy but layers, recompute and optimizer sharding."""

    data_parallel: int
    model_parallel: int
    context_parallel: int
    pipeline_stage: int
    pp_interleave_num: int
    batch_size: int
    micro_batch_num: int
    vocab_size: int

    def base(self) -> dict[str, Any]:
        return {**vars(self), "use_seq_parallel": self.model_parallel > 1}


def cuts(job: Job, devices: int, fixed: Fixed | None = None, found: Found | None = None) -> Iterator[Cut]:
    """Every cut of `job` over `devices` that the counts allow; what they turn away is counted in `found`."""
    fixed, found = fixed or Fixed(), found if found is not None else Found()
    m = job.model
    for t in divisors(devices):
        if not fixed.allows("model_parallel", t):
            continue
        if fixed.model_parallel is None and t > job.device.devices_per_host:
            break
        if m.num_attention_heads % t or m.num_query_groups % t or m.hidden_size % t or m.ffn_hidden_size % t:
            _reject(
                found,
                "heads.model_parallel",
                f"model_parallel {t} does not divide the heads or widths",
                model_parallel=t,
            )
            continue
        if m.position_embedding == "learned_absolute" and m.max_position_embeddings % t:
            _reject(
                found,
                "vocab.model_parallel",
                f"model_parallel {t} does not divide the positions",
                model_parallel=t,
            )
            continue
        vocab = padded_vocab(m.vocab_size, t)
        for c in divisors(devices // t):
            if not fixed.allows("context_parallel", c) or (
                fixed.context_parallel is None and c > 1 and job.seq_length < CONTEXT_PARALLEL_FROM
            ):
                continue
            if job.seq_length % (c * t) or (c > 1 and not job.flash_attention):
                _reject(
                    found,
                    "sequence.parallel",
                    f"{c * t} ranks cannot split {job.seq_length} positions evenly",
                    model_parallel=t,
                    context_parallel=c,
                )
                continue
            yield from _pipeline_cuts(job, devices, t, c, vocab, fixed, found)


def _pipeline_cuts(
    job: Job, devices: int, t: int, c: int, vocab: int, fixed: Fixed, found: Found
) -> Iterator[Cut]:
    layers = job.model.num_layers
    for p in divisors(devices // (t * c)):
        d = devices // (t * c * p)
        if not fixed.allows("pipeline_stage", p) or not fixed.allows("data_parallel", d):
            continue
        here = {"data_parallel": d, "model_parallel": t, "context_parallel": c, "pipeline_stage": p}
        if p > layers:
            _reject(found, "pipeline.layers", f"{p} stages for {layers} layers", **here)
            continue
        if job.global_batch % d:
            _reject(
                found,
                "batch.global",
                f"data_parallel {d} does not divide the global batch {job.global_batch}",
                **here,
            )
            continue
        share = job.global_batch // d
        for b in (1, 2, 4, 8, 16, 32, 64) if fixed.batch_size is None else (fixed.batch_size,):
            m = share // b
            if share % b or not fixed.allows("micro_batch_num", m):
                continue
            if p > 1 and m < p:
                _reject(
                    found,
                    "pipeline.micro_batches",
                    f"{m} micro-batches for {p} stages",
                    batch_size=b,
                    micro_batch_num=m,
                    **here,
                )
                continue
            for v in _virtual(layers, p, m):
                if fixed.allows("pp_interleave_num", v):
                    yield Cut(d, t, c, p, v, b, m, vocab)


def _virtual(layers: int, p: int, m: int) -> list[int]:
    # Megatron asks m % p == 0 for interleaving; MindSpore states no such rule, but its schedule is the same.
    if p == 1 or m % p:
        return [1]
    return [v for v in (1, 2, 3, 4, 5, 6, 8) if p * v <= layers]


def _reject(found: Found, rule: str, message: str, **degrees: Any) -> None:
    found.reasons[rule] += 1
    found.examples.setdefault(rule, (Strategy(**degrees), message))


def search(
    job: Job, devices: int, top: int = 5, fixed: Fixed | None = None, estimator: Estimator | None = None
) -> Found:
    """The `top` fastest strategies of `job` on `devices` that keep every rule and fit, one for each set of
    degrees.

    Cuts are examined in the order of a lower bound on their step time and the search ends when the bound
    passes the k-th best, so nothing that could be among the best is left out.
    """
    est = estimator or Estimator(job)
    found = Found()
    bounded = sorted(((_bound(est, cut), i, cut) for i, cut in enumerate(cuts(job, devices, fixed, found))))
    kept: dict[tuple[int, ...], Estimate] = {}
    for position, (bound, _, cut) in enumerate(bounded):
        if len(kept) >= top and bound > sorted(map(_price, kept.values()))[top - 1]:
            found.skipped = len(bounded) - position
            break
        degrees = (cut.data_parallel, cut.model_parallel, cut.context_parallel, cut.pipeline_stage)
        for level in _levels(est, cut, fixed):
            best = _best_of(est, cut, level, found)
            if best is None:
                continue
            found.fitting += 1
            if degrees not in kept or _price(best) < _price(kept[degrees]):
                kept[degrees] = best
    found.best = sorted(kept.values(), key=lambda item: item.step_seconds)[:top]
    return found


def _price(item: Estimate) -> float:
    """Step seconds as strategies of the same degrees are compared: plain and roomy ones win near-ties."""
    use = float(item.total_bytes.max()) / item.usable_bytes
    tight = TIGHT_PRICE * max(0.0, use - TIGHT_FROM) / (1 - TIGHT_FROM)
    return item.step_seconds * (1 + VIRTUAL_PRICE * (item.strategy.pp_interleave_num - 1) + tight)


def _bound(est: Estimator, cut: Cut) -> float:
    """Seconds that no strategy of the cut can beat: all work spread perfectly, plus the pipeline's ramp."""
    st = Strategy(
        **cut.base(), layers=even_layers(est.job.model.num_layers, cut.pipeline_stage, cut.pp_interleave_num)
    )
    layer = est.layer(st)
    work = est.job.model.num_layers * (layer.forward + layer.backward + 2 * layer.communication)
    work += layer.head_forward + layer.head_backward
    p, v, m = cut.pipeline_stage, cut.pp_interleave_num, cut.micro_batch_num
    return work / p * (m + (p - 1) / v)


def _levels(est: Estimator, cut: Cut, fixed: Fixed | None) -> list[int]:
    if fixed is not None and fixed.optimizer_shard_level is not None:
        return [fixed.optimizer_shard_level]
    if cut.data_parallel == 1 or shard_size(est, cut) == 1:
        return [0]
    # Level 2 differs from 1 only where gradients are accumulated.
    return [0, 1, 2, 3] if cut.micro_batch_num > 1 else [0, 1, 3]


def _best_of(est: Estimator, cut: Cut, level: int, found: Found) -> Estimate | None:
    """The fastest recompute setting and layer split of a cut and level that fits, or None."""
    best: Estimate | None = None
    for st in _placements(est, cut, level):
        found.examined += 1
        for candidate in recompute_ladder(est, st):
            memory = est.memory(candidate)
            if est.total(memory).max() > est.job.device.usable_bytes:
                closest = found.closest
                if (
                    closest is None
                    or est.total(memory).max() - est.job.device.usable_bytes < closest.overflow_bytes
                ):
                    found.closest = est.estimate(candidate, memory)
                continue
            broken = problems(layout_of(candidate, est.job))
            if broken:
                found.reasons[broken[0].rule] += 1
                found.examples.setdefault(broken[0].rule, (candidate, broken[0].message))
                break
            result = est.estimate(candidate, memory)
            if best is None or _price(result) < _price(best):
                best = result
            break
    if best is None:
        found.reasons["memory"] += 1
        if found.closest is not None:
            closest = found.closest
            found.examples["memory"] = (
                closest.strategy,
                f"{closest.overflow_bytes / 2**30:.2f} GiB too much",
            )
    return best


def _placements(est: Estimator, cut: Cut, level: int) -> Iterator[Strategy]:
    """Even layers and layers balanced against the head, as strategies without recompute."""
    layers, p, v = est.job.model.num_layers, cut.pipeline_stage, cut.pp_interleave_num
    even = Strategy(
        **cut.base(), layers=even_layers(layers, p, v), recompute=(0,) * p, optimizer_shard_level=level,
        optimizer_weight_shard_size=shard_size(est, cut) if level else 0,
    )  # fmt: skip
    yield even
    if p > 1:
        balanced = balanced_layers(layers, p, v, 0.0, round(est.head_in_layers(even), 2))
        if balanced != even.layers:
            yield even.with_(layers=balanced)


def shard_size(est: Estimator, cut: Cut) -> int:
    """optimizer_weight_shard_size that lets every large matrix be spread, or 0 where data_parallel does
    already.

    MindSpore spreads a parameter only if its rows divide by the group; with odd device counts that would
    leave whole matrices on every rank.
    """
    m, t, d = est.job.model, cut.model_parallel, cut.data_parallel
    if not est.job.convention.accumulates:
        return 0
    rows = math.gcd(
        (m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels // t,
        m.hidden_size,
        m.ffn_hidden_size * (2 if m.gated_linear_unit else 1) // t,
    )
    size = math.gcd(rows, d)
    return 0 if size == d else max(1, size)


def recompute_ladder(est: Estimator, st: Strategy) -> Iterator[Strategy]:
    """`st` with ever more recompute: none, select, just enough full layers on each stage that needs them,
    all."""
    yield st
    select = st.with_(select=True)
    layer = est.layer(st)
    if layer.kept_select < layer.kept:
        yield select
    for base in (select, st) if layer.kept_select < layer.kept else (st,):
        partial = _enough(est, base)
        if partial is not None:
            yield partial
    yield st.with_(recompute=st.layers_per_stage)


def _enough(est: Estimator, st: Strategy) -> Strategy | None:
    """`st` with the fewest fully recomputed layers a stage that fit; None where that is all of them or not
    enough."""
    total = est.total(est.memory(st))
    sym = est.symbols(st)
    layer = est.layer(st)
    kept = layer.kept_select if st.select else layer.kept
    saved = sym["alive"] * (kept - layer.full)
    over = total - est.job.device.usable_bytes
    if (saved <= 0).any():
        return None
    counts = np.where(over > 0, np.ceil((over + kept) / saved), 0).astype(int)
    if (counts > sym["li"]).any() or not counts.any() or (counts == sym["li"]).all():
        return None
    return st.with_(recompute=tuple(int(n) for n in counts))


def sensitivity(job: Job, found: list[Estimate]) -> list[dict[str, float]]:
    """Step seconds of each estimate when the device is better or worse than assumed.

    GEMM efficiency by 10 % and link bandwidth by 30 %, the uncertainty of data sheet figures.
    """
    dev = job.device

    def scaled(efficiency: float, links: float) -> Estimator:
        changes: dict[str, float | None] = {
            name: min(1.0, getattr(dev, name) * efficiency)
            for name in ("gemm_efficiency_forward", "gemm_efficiency_backward")
        }
        for name in ("intra_host_bandwidth", "inter_host_bandwidth"):
            value = getattr(dev, name)
            changes[name] = value and value * links
        return Estimator(replace(job, device=dev.model_copy(update=changes)))

    cases = {
        "efficiency -10 %": scaled(0.9, 1.0),
        "efficiency +10 %": scaled(1.1, 1.0),
        "bandwidth -30 %": scaled(1.0, 0.7),
        "bandwidth +30 %": scaled(1.0, 1.3),
    }
    return [
        {name: est.estimate(item.strategy, item.memory).step_seconds for name, est in cases.items()}
        for item in found
    ]


def ties(best: list[Estimate]) -> list[list[int]]:
    """Positions of `best` that are as good as equal: within 2 % of the first of their group."""
    groups: list[list[int]] = []
    for i, item in enumerate(best):
        if groups and item.step_seconds <= best[groups[-1][0]].step_seconds * (1 + TIE):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def distance(a: Strategy, b: Strategy) -> float:
    """How much of a plan changes between two strategies: factors of two in each degree, model_parallel
    dearest."""
    weights = {
        "model_parallel": 3.0, "pipeline_stage": 2.0, "context_parallel": 2.0, "pp_interleave_num": 1.0,
        "data_parallel": 1.0, "batch_size": 0.5, "micro_batch_num": 0.5,
    }  # fmt: skip
    total = sum(w * abs(math.log2(getattr(a, k) / getattr(b, k))) for k, w in weights.items())
    total += 0.3 * abs(a.optimizer_shard_level - b.optimizer_shard_level)
    return total + 0.2 * (a.recompute_name != b.recompute_name) + 0.1 * (a.layers != b.layers)


def nearest(job: Job, devices: int, wanted: Strategy, estimator: Estimator | None = None) -> Estimate | None:
    """The strategy closest to `wanted` that keeps every rule and fits, or None when none does."""
    est = estimator or Estimator(job)
    found = Found()
    candidates = sorted(
        (
            (distance(Strategy(**cut.base()), wanted), i, cut)
            for i, cut in enumerate(cuts(job, devices, None, found))
        )
    )
    best: tuple[float, float, Estimate] | None = None
    for far, _, cut in candidates:
        # distance() of a cut counts level and recompute of an empty strategy: at most 1.2 more than the real
        # one
        if best is not None and far - 1.2 > best[0]:
            break
        for level in _levels(est, cut, None):
            result = _best_of(est, cut, level, found)
            if result is None:
                continue
            item = (distance(result.strategy, wanted), result.step_seconds, result)
            if best is None or item[:2] < best[:2]:
                best = item
    return best[2] if best else None


def devices_that_fit(job: Job, devices: int, limit: int = 64) -> int | None:
    """The smallest multiple of `devices` by a power of two (up to `limit` times) on which something fits."""
    for factor in (2, 4, 8, 16, 32, 64):
        if factor > limit or devices * factor > MAX_DEVICES:
            return None
        bigger = job_with_batch(job, max(job.global_batch, devices * factor))
        if search(bigger, devices * factor, top=1, fixed=Fixed(batch_size=1)).best:
            return devices * factor
    return None


def job_with_batch(job: Job, batch: int) -> Job:
    return replace(job, global_batch=batch)


def default_global_batch(num_parameters: int, seq_length: int, devices: int) -> int:
    """Sequences a step where the person gave none: GPT-3's tokens a batch by size, rounded to whole devices.

    Brown et al. 2020 table 2.1: 0.5 M tokens up to 1 B parameters, 1 M to 6.7 B, 2 M to 13 B, 3.2 M beyond.
    """
    tokens = 500_000
    for bound, value in ((1e9, 1_000_000), (6.5e9, 2_000_000), (1.6e10, 3_200_000)):
        if num_parameters > bound:
            tokens = value
    # A power of two a device leaves room for every micro-batch size.
    return int(devices * 2 ** max(0, round(math.log2(tokens / (seq_length * devices)))))
