"""Megatron-LM's training arguments: from a checkpoint's `args`, or from the flags of a launch script."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError, nearest
from mindferry.recipes import recompute
from mindferry.recipes.stated import Settings, Stated
from mindferry.spec import LossScale, OptimizerSpec, Precision, Schedule, spec_from

# megatron/training/arguments.py, where the flags are silent.
DEFAULTS: dict[str, Any] = {
    "lr": None,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_warmup_fraction": None,
    "lr_warmup_init": 0.0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "train_iters": None,
    "train_samples": None,
    "micro_batch_size": None,
    "global_batch_size": None,
    "rampup_batch_size": None,
    "seq_length": None,
    "optimizer": "adam",
    "weight_decay": 0.01,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": None,
    "end_weight_decay": None,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "fp16": False,
    "bf16": False,
    "loss_scale": None,
    "initial_loss_scale": 2.0**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000.0,
    "hysteresis": 2,
    "attention_softmax_in_fp32": False,
    "calculate_per_token_loss": False,
    "seed": 1234,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "recompute_activations": False,
    "distribute_saved_activations": False,
}
_SWITCHES = {key for key, value in DEFAULTS.items() if value is False}
_LISTS = {"recompute_modules"}
_MODULE = re.compile(r"[a-z_]+")

_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_SHAPES = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "minus_sqrt": "1-sqrt"}

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*)?$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
MAX_SCRIPT_BYTES = 1 << 20


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with $NAME and ${NAME} of plain assignments put in; others stay as they are."""
    return _VARIABLE.sub(lambda m: variables.get(m.group(1) or m.group(2), m.group(0)), text)


def _words(path: Path) -> list[str]:
    """Words of a shell script in order, with plain variables put in. Nothing is executed.

    Raises:
        UsageError: too large, or quotes that do not close.
    """
    if path.stat().st_size > MAX_SCRIPT_BYTES:
        raise UsageError(f"{path}: larger than {MAX_SCRIPT_BYTES} bytes", id="recipe.size")
    text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    variables: dict[str, str] = {}
    try:
        for word in lexer:
            found = _ASSIGNMENT.match(word)
            if found and not word.startswith("-"):
                variables[found.group(1)] = _expand(found.group(2) or "", variables)
                # ARGS="--lr 1e-4 ..." carries flags of its own
                words.extend(variables[found.group(1)].split() if "--" in variables[found.group(1)] else [])
            else:
                words.extend(_expand(word, variables).split() or [word])
    except ValueError as err:
        raise UsageError(f"{path}: cannot be read as a shell script: {err}", id="recipe.syntax") from None
    return words


def flags(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Training flags of a launch script, by argument name, and the names of the other flags.

    Raises:
        UsageError: a training flag whose value the script computes, or two values for one flag.
    """
    words = _words(path)
    values: dict[str, Any] = {}
    others: list[str] = []
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        if key not in DEFAULTS:
            close = nearest(key, DEFAULTS, n=1, cutoff=0.93)
            if close:
                right = close[0].replace("_", "-")
                raise UsageError(
                    f"{path}: --{name}: no flag of Megatron-LM that is known here - did you mean --{right}?",
                    remedy="correct or remove it",
                    id="recipe.unknown-key",
                )
            others.append(name)
            continue
        if key in _SWITCHES:
            values[key] = True
            continue
        if key in _LISTS:
            values[key] = list(itertools.takewhile(_MODULE.fullmatch, words[number + 1 :]))
            continue
        value = text if equals else words[number + 1] if number + 1 < len(words) else ""
        if not value or value.startswith("--") or "$" in value or "`" in value:
            raise UsageError(
                f"{path}: --{name} {value or '(nothing)'}: the value is computed or missing",
                remedy="write the value out; the script is read, never run",
                id="recipe.computed",
            )
        if values.get(key, value) != value:
            raise UsageError(
                f"{path}: --{name} is given twice, {values[key]} and {value}",
                remedy="leave one of them",
                id="recipe.twice",
            )
        values[key] = value
    if "lr" not in values:
        raise UsageError(
            f"{path}: no --lr in it",
            remedy="give the script that holds the training flags",
            id="recipe.no-lr",
        )
    return values, sorted(set(others))


def checkpoint_arguments(path: Path) -> dict[str, Any]:
    """`args` of a Megatron-LM checkpoint file, through the weights-only unpickler.

    Raises:
        UsageError: there are none.
        MindferryError: damaged or unsafe.
    """
    from mindferry.sources.pickled import load_pickled

    tree = load_pickled(path)
    args = tree.get("args") if isinstance(tree, Mapping) else None
    if args is None:
        raise UsageError(f"{path}: holds no training arguments ('args')", id="recipe.no-args")
    values = dict(args) if isinstance(args, Mapping) else dict(vars(args))
    return {key: value for key, value in values.items() if key in DEFAULTS}


def _iterations(known: Settings, iters: str, samples: str, batch: int) -> int | None:
    """A length that may be given in iterations or in samples."""
    if known.get(iters) is not None and known.number(iters):
        return known.whole(iters)
    if known.get(samples) is not None and known.number(samples):
        count = known.whole(samples)
        if count % batch:
            raise known.refuse(samples, f"not a multiple of the global batch of {batch}")
        return count // batch
    return None


def _fields(known: Settings, batch: int) -> tuple[dict[str, Any], list[str]]:
    """Schedule fields and warnings."""
    total = _iterations(known, "train_iters", "train_samples", batch)
    if total is None:
        raise UsageError(f"{known.origin}: neither --train-iters nor --train-samples", id="recipe.length")
    decay = _iterations(known, "lr_decay_iters", "lr_decay_samples", batch) or total
    warmup = _iterations(known, "lr_warmup_iters", "lr_warmup_samples", batch) or 0
    warnings = []
    if known.get("lr_warmup_fraction") is not None:
        exact = known.number("lr_warmup_fraction") * decay
        warmup = round(exact)
        if warmup != exact:
            warnings.append(
                f"--lr-warmup-fraction gives {exact:g} iterations of warm-up, rounded to {warmup}"
            )
    style = str(known.get("lr_decay_style"))
    low = known.number("min_lr")
    fields: dict[str, Any] = {
        "learning_rate": known.number("lr"),
        "min_learning_rate": low,
        "warmup_steps": warmup,
        "warmup_init": known.number("lr_warmup_init"),
        "total_steps": total,
        "decay_steps": decay if decay != total else None,
    }
    if style == "inverse-square-root":
        if decay < total:
            # from lr_decay_iters on Megatron-LM keeps min_lr, whatever the root says
            raise known.refuse("lr_decay_iters", "ends an inverse-square-root decay early")
        fields.update(kind="inverse_sqrt", timescale=max(warmup, 1))
    elif style in _STYLES:
        fields["kind"] = _STYLES[style]
    else:
        raise known.refuse("lr_decay_style", f"known are {', '.join((*_STYLES, 'inverse-square-root'))}")
    if style == "WSD":
        shape = str(known.get("lr_wsd_decay_style"))
        if shape not in _SHAPES:
            raise known.refuse("lr_wsd_decay_style", f"known are {', '.join(_SHAPES)}")
        length = _iterations(known, "lr_wsd_decay_iters", "lr_wsd_decay_samples", batch)
        fields.update(wsd_decay_steps=length or 0, wsd_shape=_SHAPES[shape])
    return fields, warnings


def schedule_of(arguments: Mapping[str, Any], origin: str, batch: int = 1) -> Schedule:
    """The Schedule that Megatron-LM's arguments mean; `batch` is the global batch, for lengths in samples."""
    fields, _ = _fields(Settings({**DEFAULTS, **arguments}, Path(origin)), batch)
    schedule: Schedule = spec_from(Schedule, fields, origin)
    return schedule


def _loss_scale(known: Settings) -> LossScale:
    if not known.flag("fp16"):
        return LossScale()
    if known.get("loss_scale") is not None:
        return LossScale(value=known.number("loss_scale"))
    return LossScale(
        dynamic=True,
        value=known.number("initial_loss_scale"),
        window=known.whole("loss_scale_window"),
        floor=known.number("min_loss_scale"),
    )


def _check(known: Settings) -> None:
    """Refuse what changes the numbers and cannot be carried over."""
    if known.get("optimizer") != "adam":
        raise known.refuse("optimizer", "AdamW ('adam') is what can be carried over")
    if known.get("rampup_batch_size") is not None:
        raise known.refuse("rampup_batch_size", "a batch size that grows cannot be carried over")
    if known.get("weight_decay_incr_style") != "constant":
        raise known.refuse("weight_decay_incr_style", "a decay that grows cannot be carried over")
    if known.flag("fp16") and known.flag("bf16"):
        raise known.refuse("fp16", "together with bf16; choose one")
    if known.get("micro_batch_size") is None:
        raise UsageError(f"{known.origin}: no --micro-batch-size", id="recipe.batch")


def read(path: Path, arguments: Mapping[str, Any] | None = None) -> Stated:
    """The recipe of a launch script, or of `arguments` read from a checkpoint at `path`.

    Warm-up, decay and WSD follow OptimizerParamScheduler; the schedule advances only with updates that were
    made, as mindformers' does.
    """
    values, others = (dict(arguments), []) if arguments is not None else flags(path)
    known = Settings({**DEFAULTS, **{k: v for k, v in values.items() if v is not None}}, path)
    _check(known)
    micro = known.whole("micro_batch_size")
    batch = known.whole("global_batch_size") if known.get("global_batch_size") is not None else micro
    if batch % micro:
        raise known.refuse("global_batch_size", f"not a multiple of micro_batch_size {micro}")
    fields, warnings = _fields(known, batch)
    if known.flag("fp16") and known.get("loss_scale") is None and known.whole("hysteresis") != 1:
        warnings.append(
            f"hysteresis {known.whole('hysteresis')}: Megatron-LM's scale falls at the second overflow in a row, "
            "mindformers' at the first; updates skipped are the same"
        )
    if known.get("global_batch_size") is None:
        warnings.append("no --global-batch-size; it is micro-batch x data parallel, one process is assumed")
    again, notes = recompute.of_megatron(known.values, str(path))
    warnings += notes
    clip = known.number("clip_grad")
    steps = fields.pop("total_steps")
    half = known.flag("fp16") or known.flag("bf16")
    if half and not known.flag("attention_softmax_in_fp32"):
        warnings.append(
            "softmax is kept in float32, the source did not ask for it (--attention-softmax-in-fp32)"
        )
    return Stated(
        origin=path,
        kind="Megatron-LM",
        optimizer=OptimizerSpec(
            betas=(known.number("adam_beta1"), known.number("adam_beta2")),
            eps=known.number("adam_eps"),
            weight_decay=known.number("weight_decay"),
        ),
        schedule=fields,
        steps=steps,
        batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        sequences_per_step=batch,
        seq_length=known.whole("seq_length") if known.get("seq_length") is not None else None,
        max_grad_norm=clip if clip > 0 else None,
        per_token_loss=known.flag("calculate_per_token_loss"),
        loss_scale=_loss_scale(known),
        precision=Precision(
            compute="float16" if known.flag("fp16") else "bfloat16" if known.flag("bf16") else "float32",
            softmax="float32",
        ),
        recompute=again,
        seed=known.whole("seed"),
        values=values,
        ignored=others,
        warnings=warnings,
    )
