"""Runs with one fault planted in each, and healthy ones; a fault belongs to one step of the triage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.diagnosis.tiny import SPEC, Tiny, make_run, rows, tokens, weights
from mindferry.spec import Precision

HALF = Precision(compute="float16")
O3 = Precision(compute="float16", params="float16", layernorm="float16", softmax="float16")


@dataclass
class Plan:
    """What a run is made of; a fault changes one of these."""

    tiny: Tiny
    columns: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    changes: dict[str, Any]
    recipe: dict[str, Any]


def healthy_plan(seed: int) -> Plan:
    """A healthy run; size, rate, schedule and precision vary with the seed."""
    rng = np.random.default_rng(1000 + seed)
    spec = SPEC.model_copy(update={"num_layers": int(rng.integers(2, 4))})
    tiny = Tiny(
        spec=spec,
        seed=seed,
        batch_size=int(rng.choice([4, 8])),
        learning_rate=float(rng.choice([1e-3, 3e-3])),
        kind=str(rng.choice(["cosine", "linear", "constant"])),
        warmup_steps=int(rng.choice([3, 4, 6])),
        precision=HALF if seed % 4 == 3 else Precision(),
    )
    recipe = {
        "learning_rate": tiny.learning_rate,
        "warmup_steps": tiny.warmup_steps,
        "total_steps": tiny.steps,
        "batch_size": tiny.batch_size,
        "lr_schedule": tiny.kind,
    }
    return Plan(tiny, rows(tokens(tiny)), weights(tiny), {}, recipe)


Fault = Callable[[Plan, np.random.Generator], Plan]


# -- data -------------------------------------------------------------------------------------------------------
def shifted_labels(plan: Plan, rng: np.random.Generator) -> Plan:
    ids = tokens(replace(plan.tiny, seq_length=plan.tiny.seq_length + 1))
    shift = int(rng.choice([0, 2]))
    plan.columns = rows(ids[:, :-1])
    plan.columns["labels"] = ids[:, shift : shift + plan.tiny.seq_length]
    return plan


def ids_out_of_range(plan: Plan, rng: np.random.Generator) -> Plan:
    ids = tokens(plan.tiny)
    ids[rng.random(ids.shape) < 0.02] = plan.tiny.spec.vocab_size + int(rng.integers(0, 9))
    plan.columns = rows(ids)
    return plan


def constant_batch(plan: Plan, rng: np.random.Generator) -> Plan:
    ids = tokens(plan.tiny)
    kept = ids[: plan.tiny.batch_size]
    plan.columns = rows(np.tile(kept, (len(ids) // len(kept), 1)))
    return plan


def sorted_data(plan: Plan, rng: np.random.Generator) -> Plan:
    """Four topics, each with a quarter of the vocabulary, one after another, and shuffle off."""
    ids = tokens(plan.tiny)
    quarter = plan.tiny.spec.vocab_size // 4
    topic = np.arange(len(ids)) * 4 // len(ids)
    plan.columns = rows((ids % quarter + topic[:, None] * quarter).astype(np.int32))
    plan.changes["train_dataset.data_loader.shuffle"] = False
    return plan


# -- precision --------------------------------------------------------------------------------------------------
def layernorm_overflow(plan: Plan, rng: np.random.Generator) -> Plan:
    """Outlier channels as large models have them: their square leaves float16's range."""
    return _outliers(plan, rng, Precision(layernorm="float16"))


def everything_half(plan: Plan, rng: np.random.Generator) -> Plan:
    """O3: nothing stays in float32, on a model with outlier channels."""
    return _outliers(plan, rng, O3)


def _outliers(plan: Plan, rng: np.random.Generator, precision: Precision) -> Plan:
    spec = plan.tiny.spec.model_copy(update={"tie_word_embeddings": False})
    plan.tiny = replace(plan.tiny, spec=spec, precision=precision)
    plan.params = weights(plan.tiny)
    plan.params["embedding.word_embeddings.weight"] *= 1000.0
    channel = int(rng.integers(0, spec.hidden_size))
    plan.params["embedding.position_embeddings.weight"][:, channel] = 3000.0
    return plan


def half_states(plan: Plan, rng: np.random.Generator) -> Plan:
    """The weights that Adam updates are kept in half precision: its updates are smaller than their last digit.

    bfloat16 where the device has it; MindSpore's CPU backend trains float16 parameters only.
    """
    kept = str(rng.choice(["float16", "bfloat16"]))
    plan.tiny = replace(
        plan.tiny,
        precision=Precision(params=kept),  # type: ignore[arg-type]
        learning_rate=1e-4,
        kind="constant",
        warmup_steps=0,
    )
    plan.recipe.update(learning_rate=1e-4, warmup_steps=0, lr_schedule="constant")
    plan.params = {
        name: value * (20.0 if value.ndim == 2 else 1.0) for name, value in weights(plan.tiny).items()
    }
    return plan


# -- learning rate ----------------------------------------------------------------------------------------------
def no_warmup(plan: Plan, rng: np.random.Generator) -> Plan:
    plan.changes["lr_schedule.warmup_steps"] = 0
    return plan


def rate_times_ten(plan: Plan, rng: np.random.Generator) -> Plan:
    plan.changes["lr_schedule.learning_rate"] = plan.tiny.learning_rate * 10
    return plan


def cosine_too_short(plan: Plan, rng: np.random.Generator) -> Plan:
    plan.tiny = replace(plan.tiny, kind="cosine")
    plan.recipe["lr_schedule"] = "cosine"
    if rng.random() < 0.5:
        plan.changes["lr_schedule.total_steps"] = 12
    else:
        plan.changes["lr_schedule.decay_steps"] = 12
    return plan


# -- gradients --------------------------------------------------------------------------------------------------
def exploding(plan: Plan, rng: np.random.Generator) -> Plan:
    factor = float(rng.uniform(50, 80))
    for name, value in plan.params.items():
        if "layers" in name and value.ndim == 2:
            value *= factor
    plan.params["decoder.final_layernorm.gamma"] *= 40.0
    plan.changes["runner_wrapper.max_grad_norm"] = 1e30
    return plan


def vanishing(plan: Plan, rng: np.random.Generator) -> Plan:
    plan.params["decoder.final_layernorm.gamma"] *= 10.0 ** -float(rng.uniform(6, 8))
    return plan


def dead_layer(plan: Plan, rng: np.random.Generator) -> Plan:
    layer = int(rng.integers(0, plan.tiny.spec.num_layers))
    for name in ("linear_fc1.weight", "linear_fc2.weight"):
        plan.params[f"decoder.layers.{layer}.mlp.{name}"][:] = 0.0
    return plan


def loss_scale_stuck(plan: Plan, rng: np.random.Generator) -> Plan:
    plan.tiny = replace(plan.tiny, precision=HALF)
    plan.changes["runner_wrapper.scale_sense"] = float(2 ** int(rng.integers(26, 30)))
    return plan


FAULTS: dict[str, tuple[str, Fault]] = {
    **{f.__name__: ("data", f) for f in (shifted_labels, ids_out_of_range, constant_batch, sorted_data)},
    **{f.__name__: ("precision", f) for f in (layernorm_overflow, everything_half, half_states)},
    **{f.__name__: ("learning-rate", f) for f in (no_warmup, rate_times_ten, cosine_too_short)},
    **{f.__name__: ("gradients", f) for f in (exploding, vanishing, dead_layer, loss_scale_stuck)},
}


def make(root: Path, seed: int, fault: Fault | None = None, train: bool = True) -> Path:
    """Write the run of `seed` with `fault` and train it, as a person would have before asking."""
    plan = healthy_plan(seed)
    if fault is not None:
        plan.tiny = replace(plan.tiny, precision=Precision())
        plan = fault(plan, np.random.default_rng(seed))
    make_run(root, plan.tiny, columns=plan.columns, params=plan.params, changes=plan.changes)
    report = {"recipe": [{"key": key, "value": value} for key, value in plan.recipe.items()]}
    (root / "migration.json").write_text(json.dumps(report))
    if not train:
        return root
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    with contextlib.suppress(Exception):  # a fault may end the training; that is the case to look into
        engine.train(RunDirectory.open(root), engine.Options())
    return root
