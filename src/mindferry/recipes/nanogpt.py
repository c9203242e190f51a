"""nanoGPT's configuration: a Python file of assignments, read as literals and never executed."""

from __future__ import annotations

import ast
import operator
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError, nearest
from mindferry.recipes.stated import Settings, Stated
from mindferry.spec import LossScale, OptimizerSpec, Precision

# train.py's own values, where the configuration does not say otherwise.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 6e-4,
    "max_iters": 600000,
    "weight_decay": 1e-1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600000,
    "min_lr": 6e-5,
    "batch_size": 12,
    "block_size": 1024,
    "gradient_accumulation_steps": 40,
    "dtype": "bfloat16",
}
SEED = 1337
# train.py's other settings; a configuration may also have names of its own.
_OTHERS = (
    *(
        "out_dir",
        "eval_interval",
        "log_interval",
        "eval_iters",
        "eval_only",
        "always_save_checkpoint",
        "init_from",
    ),
    *(
        "wandb_log",
        "wandb_project",
        "wandb_run_name",
        "dataset",
        "n_layer",
        "n_head",
        "n_embd",
        "dropout",
        "bias",
    ),
    *("backend", "device", "compile"),
)

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """A literal, a name assigned before, or + - * / // of numbers.

    Raises:
        ValueError: anything else.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, names)
        if isinstance(inner, (int, float)):
            return -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names), _value(node.right, names)
        if all(isinstance(v, (int, float)) and abs(v) < 1e15 for v in (left, right)):
            return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not a literal")


def assignments(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Names and values of the file's assignments, and what was passed over.

    Raises:
        UsageError: no Python, or a training setting that is not a literal.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise UsageError(f"{path}: not a nanoGPT configuration: {err}", id="recipe.syntax") from None
    values: dict[str, Any] = {}
    skipped: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            try:
                values[name] = _value(node.value, values)
            except (ValueError, ZeroDivisionError, RecursionError):
                if name in DEFAULTS:
                    raise UsageError(
                        f"{path} line {node.lineno}: {name} is computed, expected a literal",
                        remedy="write the value out; the file is read, never run",
                        id="recipe.computed",
                    ) from None
                skipped.append(name)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped.append(f"line {node.lineno}")
    return values, skipped


def _check_names(path: Path, values: dict[str, Any]) -> None:
    """
    Raises:
        UsageError: a name that is a training setting but for a letter or two; train.py would pass over it.
    """
    for name in values:
        if name in DEFAULTS or name in _OTHERS:
            continue
        close = nearest(name, DEFAULTS, n=1, cutoff=0.85)
        if close and close[0] not in values:
            raise UsageError(
                f"{path}: {name}: no setting of nanoGPT - did you mean {close[0]!r}?",
                remedy="correct or remove it",
                id="recipe.unknown-key",
            )


def read(path: Path) -> Stated:
    """The recipe of a nanoGPT configuration.

    Its loop runs updates 0 to max_iters, one more than max_iters. gradient_accumulation_steps counts the
    micro-batches of all processes together.
    """
    values, skipped = assignments(path)
    _check_names(path, values)
    known = Settings({**DEFAULTS, **values}, path)
    steps = known.whole("max_iters") + 1
    half = known.get("dtype")
    if half not in ("float32", "bfloat16", "float16"):
        raise known.wrong("dtype", half, "float32, bfloat16 or float16")
    decay = known.flag("decay_lr")
    schedule: dict[str, Any] = {"kind": "constant", "learning_rate": known.number("learning_rate")}
    warnings = []
    if decay:
        schedule.update(
            kind="cosine",
            min_learning_rate=known.number("min_lr"),
            warmup_steps=known.whole("warmup_iters"),
            warmup_rule="(t+1)/(w+1)",
            decay_steps=known.whole("lr_decay_iters"),
        )
        if schedule["warmup_steps"]:
            warnings.append(
                "warm-up as nanoGPT has it since December 2024, (t+1)/(w+1); for an older train.py give "
                "--warmup-rule t/w (its first update has rate 0)"
            )
    if "dtype" not in values:
        warnings.append(
            "dtype is not stated; train.py takes bfloat16 where the GPU has it, float16 otherwise"
        )
    clip = known.number("grad_clip")
    return Stated(
        origin=path,
        kind="nanoGPT",
        optimizer=OptimizerSpec(
            betas=(known.number("beta1"), known.number("beta2")), weight_decay=known.number("weight_decay")
        ),
        schedule=schedule,
        steps=steps,
        batch_size=known.whole("batch_size"),
        gradient_accumulation_steps=known.whole("gradient_accumulation_steps"),
        seq_length=known.whole("block_size"),
        max_grad_norm=clip if clip > 0 else None,
        loss_scale=LossScale(dynamic=True, value=65536.0, window=2000) if half == "float16" else LossScale(),
        precision=Precision(compute=half),
        seed=SEED,
        values=values,
        ignored=[*(name for name in values if name not in DEFAULTS), *skipped],
        warnings=warnings,
    )
