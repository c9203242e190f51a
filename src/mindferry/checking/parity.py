"""Training parity: the same steps of AdamW, on the same batches, through mindformers' Trainer and PyTorch."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import sides
from mindferry.checking.convergence import Threshold, thresholds
from mindferry.checking.curves import Curve
from mindferry.checking.sides import Batch
from mindferry.errors import UsageError
from mindferry.recipes.schedule import rate
from mindferry.targets.run_directory import RunDirectory
from mindferry.targets.run_yaml import DECAY_ALL, STOCK_SCHEDULES, TABLED, schedule_from

STEP_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Parity:
    """Losses of both sides, step by step, and the greatest differences (loss; learning rate, relative).

    `standard` is mindformers' migration standard on the same losses and gradient norms, beside our own limit.
    """

    source_losses: list[float]
    target_losses: list[float]
    max_loss_diff: float
    max_lr_diff: float
    first_bad_step: int | None
    standard: list[Threshold] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.first_bad_step is None


def learning_rate(schedule: Mapping[str, Any], step: int) -> float:
    """The rate of update number `step` (0, 1, ...) as the source's framework defines run.yaml's lr_schedule.

    Raises:
        UsageError: a schedule class whose formula is not known here.
    """
    meant = schedule_from(schedule)
    if meant is None:
        raise UsageError(
            f"run.yaml: lr_schedule.type: {schedule['type']!r} cannot be compared",
            remedy=f"use one of {', '.join((*STOCK_SCHEDULES, TABLED))}",
            id="verify.schedule",
        )
    return rate(meant, step)


def decay_groups(model: Any, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """AdamW groups: matrices decay, vectors and biases do not (mindformers' rule), or all do (AdamWDecayAll)."""
    decayed: list[Any] = []
    plain: list[Any] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        one_dimension = parameter.ndim == 1 or name.endswith(".bias")
        (plain if one_dimension and not decay_all else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _backward(model: Any, batch: Batch, micro_batches: int, per_token: bool) -> float:
    """Loss of one optimizer step, its gradients added up over the micro-batches.

    The mean of the micro-batches' means, or with `per_token` the mean over all unmasked tokens of the step.
    """
    import torch

    rows = batch.input_ids.shape[0] // micro_batches
    all_tokens = float(batch.loss_mask.sum())
    total = 0.0
    for number in range(micro_batches):
        part = Batch(*(value[number * rows : (number + 1) * rows] for value in vars(batch).values()))
        share = float(part.loss_mask.sum()) / all_tokens if per_token else 1.0 / micro_batches
        ids = torch.from_numpy(part.input_ids.astype(np.int64))
        loss = sides.torch_loss(model(input_ids=ids, use_cache=False).logits, part) * share
        loss.backward()
        total += float(loss)
    return total


def train_torch(
    model: Any,
    content: Mapping[str, Any],
    batches: list[Batch],
    on_step: Callable[[], None] = lambda: None,
    norms: list[float] | None = None,
) -> list[float]:
    """Losses of `model` trained on `batches`, one an optimizer step, with the run's recipe, dropout off.

    Args:
        norms: gets the gradient norm of each step, before clipping.
    """
    import torch

    optimizer = content["optimizer"]
    adamw = torch.optim.AdamW(
        decay_groups(model, optimizer["weight_decay"], optimizer["type"] == DECAY_ALL),
        lr=0.0,
        betas=tuple(optimizer["betas"]),
        eps=optimizer["eps"],
    )
    wrapper = content["runner_wrapper"]
    micro_batches = content["runner_config"]["gradient_accumulation_steps"]
    per_token = wrapper.get("calculate_per_token_loss", False)
    losses = []
    for step, batch in enumerate(batches):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(content["lr_schedule"], step)
        adamw.zero_grad(set_to_none=True)
        losses.append(_backward(model, batch, micro_batches, per_token))
        limit = wrapper["max_grad_norm"] if wrapper["use_clip_grad"] else math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if norms is not None:
            norms.append(float(norm))
        adamw.step()
        on_step()
    return losses


def train_both(
    run: RunDirectory,
    source_path: Path,
    steps: int,
    on_step: Callable[[], None] = lambda: None,
    opened: sides.Opened | None = None,
) -> Parity:
    """Train `steps` steps on both sides from the migrated weights; the run itself is not touched.

    Args:
        opened: the source at `source_path`, where it has been opened before.
    """
    from mindferry.targets import run_yaml
    from mindferry.training import engine

    original = run_yaml.read(run.yaml)
    total = max(original["lr_schedule"]["total_steps"], steps)
    overrides = {
        **sides.no_dropout(),
        "lr_schedule.total_steps": total,
        "callbacks": [c for c in original["callbacks"] if c["type"] != "CheckpointMonitor"],
    }
    batches: list[Batch] = []
    rates: list[float] = []
    norms: tuple[list[float], list[float]] = ([], [])

    def keep_batch(step: int, values: tuple[Any, ...]) -> None:
        batches.append(Batch(*(np.array(value.asnumpy()) for value in values)))

    def keep_rate(record: dict[str, Any]) -> None:
        rates.append(record["lr"])
        norms[1].append(record["grad_norm"])
        on_step()

    with tempfile.TemporaryDirectory(prefix="mindferry-parity-") as scratch:
        root = Path(scratch)
        for name in ("run.yaml", "model", "data"):
            (root / name).symlink_to(run.root / name)
        options = engine.Options(steps=steps, overrides=overrides, on_step=keep_rate, on_batch=keep_batch)
        outcome = engine.train(RunDirectory(root), options)
        content = engine.prepare(RunDirectory(root), options)
    target = [outcome.losses[step] for step in sorted(outcome.losses)]
    with sides.opened(run, source_path, opened) as pair:
        source = train_torch(sides.load_torch_model(pair.runnable), content, batches, on_step, norms[0])
    expected = [learning_rate(content["lr_schedule"], step) for step in range(len(target))]
    return _judge(source, target, expected, rates, norms)


def _curve(losses: list[float], norms: list[float]) -> Curve:
    columns = {"loss": np.array(losses, float), "grad_norm": np.array(norms, float)}
    return Curve("", "verify", np.arange(1, len(losses) + 1), columns)


def _judge(
    source: list[float],
    target: list[float],
    expected: list[float],
    rates: list[float],
    norms: tuple[list[float], list[float]],
) -> Parity:
    diffs = [abs(a - b) for a, b in zip(source, target, strict=True)]
    bad = next((i + 1 for i, diff in enumerate(diffs) if not diff <= STEP_TOLERANCE), None)
    lr_diff = max(
        (abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, rates, strict=True)), default=0.0
    )
    standard = thresholds(_curve(source, norms[0]), _curve(target, norms[1]))
    return Parity(source, target, max(diffs), lr_diff, bad, standard)
