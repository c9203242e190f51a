"""transformers' TrainingArguments: JSON, YAML, or training_args.bin through an unpickler that runs nothing."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError, did_you_mean
from mindferry.recipes.stated import Settings, Stated
from mindferry.spec import LossScale, OptimizerSpec, Precision, Recompute

MAX_BYTES = 4 << 20

# What transformers 4.57 does where the file is silent.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": {},
    "warmup_ratio": 0.0,
    "warmup_steps": 0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "fp16": False,
    "bf16": False,
    "seed": 42,
    "optim": "adamw_torch_fused",
    "label_smoothing_factor": 0.0,
    "gradient_checkpointing": False,
}

# Optimizers that are torch's AdamW by another kernel.
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla")

# Modules whose classes may be named in training_args.bin. None of them is imported.
_MODULES = ("transformers.", "accelerate.", "trl.", "torch", "pathlib", "collections", "datetime")


class _Kept:
    """Stands in for any class the pickle names: keeps its arguments and state, runs nothing of it."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith(_MODULES):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return type(name, (_Kept,), {})

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a tensor")


def _pickle_stream(path: Path) -> Any:
    """The pickle inside training_args.bin: an archive of torch.save, or (before torch 1.6) the pickle itself."""
    if not zipfile.is_zipfile(path):
        return open(path, "rb")
    archive = zipfile.ZipFile(path)
    entries = [e for e in archive.infolist() if e.filename.endswith("/data.pkl") or e.filename == "data.pkl"]
    if (
        len(entries) != 1
        or entries[0].file_size > MAX_BYTES
        or entries[0].compress_type != zipfile.ZIP_STORED
    ):
        raise MindferryError(f"{path}: not an archive of torch.save", id="recipe.damaged")
    return archive.open(entries[0])


def unpickle_arguments(path: Path) -> dict[str, Any]:
    """The fields of training_args.bin as plain values.

    Raises:
        MindferryError: damaged, or holding anything beyond settings.
    """
    try:
        with _pickle_stream(path) as stream:
            if not zipfile.is_zipfile(path) and stream.peek(1)[:1] != b"\x80":
                raise pickle.UnpicklingError("no pickle")
            found = _Reader(stream).load()
    except pickle.UnpicklingError as err:
        raise MindferryError(
            f"{path}: the pickle holds {str(err)[:120]}, which is no training argument",
            cause="loading it would run code that came with the file; it was not loaded",
            remedy="give the arguments as JSON: json.dump(training_args.to_dict(), ...)",
            id="recipe.unsafe-pickle",
            evidence=str(err)[:200],
        ) from None
    except MindferryError:
        raise
    except Exception as err:  # a damaged pickle can raise anything
        raise MindferryError(
            f"{path}: cannot be read: {type(err).__name__}: {err}", id="recipe.damaged"
        ) from None
    if not isinstance(found, _Kept):
        raise MindferryError(
            f"{path}: holds a {type(found).__name__}, expected transformers.TrainingArguments",
            id="recipe.damaged",
        )
    return {key: _plain(value) for key, value in vars(found).items() if not key.startswith("_")}


def _plain(value: Any, depth: int = 0) -> Any:
    """Enumerations become their values, other objects None."""
    if isinstance(value, _Kept):
        inner = value.args[0] if len(value.args) == 1 else None
        return inner if isinstance(inner, (str, int, float)) else None
    if isinstance(value, dict) and depth < 4:
        return {str(k): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and depth < 4:
        return [_plain(v, depth + 1) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else None


def _known_names() -> set[str]:
    """Fields of TrainingArguments, without importing transformers unless it is needed to judge a name."""
    from dataclasses import fields

    from transformers import TrainingArguments

    return {f.name for f in fields(TrainingArguments)}


def load(path: Path) -> dict[str, Any]:
    """The settings in `path`, by TrainingArguments' names.

    Raises:
        UsageError: unreadable, or a name that TrainingArguments does not have.
        MindferryError: an unsafe or damaged training_args.bin.
    """
    if path.suffix == ".bin":
        return unpickle_arguments(path)
    if path.suffix in (".yaml", ".yml"):
        from mindferry.targets.run_yaml import load_yaml

        values = load_yaml(path)
    else:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as err:
            raise UsageError(f"{path}: not JSON: {err}", id="recipe.syntax") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: found {type(values).__name__}, expected a table of settings")
    unknown = [key for key in values if key not in DEFAULTS]
    if unknown:
        names = _known_names()
        wrong = [key for key in unknown if key not in names]
        if wrong:
            hint = did_you_mean(wrong[0], names)
            raise UsageError(
                f"{path}: {', '.join(wrong[:5])}: no setting of transformers.TrainingArguments"
                + (f" - {hint}" if hint else ""),
                remedy="correct or remove it",
                id="recipe.unknown-key",
            )
    return values


def read(path: Path) -> Stated:
    """The recipe of TrainingArguments; one process is assumed, as the file does not say how many there were."""
    values = load(path)
    known = Settings({**DEFAULTS, **{k: v for k, v in values.items() if v is not None}}, path)
    optim = str(known.get("optim"))
    if optim not in ADAMW:
        raise known.refuse("optim", f"AdamW is what can be carried over ({', '.join(ADAMW)})")
    if known.number("label_smoothing_factor"):
        raise known.refuse("label_smoothing_factor", "mindformers' loss has no label smoothing")
    steps = known.whole("max_steps")
    clip = known.number("max_grad_norm")
    fp16, bf16 = known.flag("fp16"), known.flag("bf16")
    if fp16 and bf16:
        raise known.refuse("fp16", "together with bf16; choose one")
    warmup = known.number("warmup_steps")
    ratio = known.number("warmup_ratio")
    if 0 < warmup < 1:  # transformers 5 takes a fraction here
        warmup, ratio = 0.0, warmup
    if known.get("lr_scheduler_type") == "constant":  # has no warm-up, whatever the settings say
        warmup = ratio = 0.0
    return Stated(
        origin=path,
        kind="transformers.TrainingArguments",
        optimizer=OptimizerSpec(
            betas=(known.number("adam_beta1"), known.number("adam_beta2")),
            eps=known.number("adam_epsilon"),
            weight_decay=known.number("weight_decay"),
        ),
        schedule={**_schedule(known), "warmup_steps": int(warmup)},
        warmup_ratio=ratio or None,
        steps=steps if steps > 0 else None,
        epochs=known.number("num_train_epochs"),
        batch_size=known.whole("per_device_train_batch_size"),
        gradient_accumulation_steps=known.whole("gradient_accumulation_steps"),
        max_grad_norm=clip if clip > 0 else None,
        per_token_loss=known.whole("gradient_accumulation_steps") > 1,
        loss_scale=LossScale(dynamic=True, value=65536.0, window=2000) if fp16 else LossScale(),
        precision=Precision(compute="float16" if fp16 else "bfloat16" if bf16 else "float32"),
        recompute=Recompute(layers=known.flag("gradient_checkpointing")),
        seed=known.whole("seed"),
        values=values,
        ignored=sorted(set(values) - set(DEFAULTS)),
        warnings=["TrainingArguments do not say how many devices there were; one is assumed"],
    )


def _schedule(known: Settings) -> dict[str, Any]:
    """Schedule fields of lr_scheduler_type and its kwargs, as transformers.get_scheduler reads them."""
    name, peak = str(known.get("lr_scheduler_type")), known.number("learning_rate")
    extra = known.get("lr_scheduler_kwargs")
    if not isinstance(extra, dict):
        raise known.wrong("lr_scheduler_kwargs", extra, "a table")
    inner = Settings(dict(extra), known.origin)
    low = inner.number("min_lr", 0.0) or inner.number("min_lr_rate", 0.0) * peak
    made: dict[str, dict[str, Any]] = {
        "linear": {"kind": "linear"},
        "constant": {"kind": "constant"},
        "constant_with_warmup": {"kind": "constant"},
        "cosine": {"kind": "cosine", "num_cycles": inner.number("num_cycles", 0.5)},
        "cosine_with_min_lr": {
            "kind": "cosine",
            "num_cycles": inner.number("num_cycles", 0.5),
            "min_learning_rate": low,
        },
        "cosine_with_restarts": {"kind": "cosine_with_restarts", "num_cycles": inner.number("num_cycles", 1)},
        "polynomial": {
            "kind": "polynomial",
            "min_learning_rate": inner.number("lr_end", 1e-7),
            "power": inner.number("power", 1.0),
        },
        "inverse_sqrt": {"kind": "inverse_sqrt"},
        "warmup_stable_decay": {"kind": "wsd"},
    }
    if name not in made:
        raise known.refuse("lr_scheduler_type", f"known are {', '.join(made)}")
    fields = {**made[name], "learning_rate": peak}
    if name == "inverse_sqrt":
        # transformers measures from step 0 with a time scale of 10000 when there is no warm-up.
        warmup = known.whole("warmup_steps") if known.number("warmup_steps") >= 1 else 0
        if not warmup:
            if known.number("warmup_ratio"):
                raise known.refuse("warmup_ratio", "inverse_sqrt needs warmup_steps here")
            fields.update(timescale=10_000, shift=10_000)
    if name == "warmup_stable_decay":
        ratio = inner.number("min_lr_ratio", 0.0)
        fields.update(
            wsd_decay_steps=inner.whole("num_decay_steps"),
            wsd_shape=inner.get("decay_type", "cosine"),
            warmup_shape=inner.get("warmup_type", "linear"),
            min_learning_rate=ratio * peak,
            warmup_init=ratio * peak,
        )
        if inner.get("num_stable_steps") is not None or inner.number("num_cycles", 0.5) != 0.5:
            raise known.refuse(
                "lr_scheduler_kwargs", "num_stable_steps and num_cycles cannot be carried over"
            )
    left = set(extra) - inner.used
    if left:
        raise known.refuse("lr_scheduler_kwargs", f"{', '.join(sorted(left))} cannot be carried over")
    return fields
