"""run.yaml: written for mindformers 1.9.0, read back with YAML 1.2 rules and a closed schema."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError, did_you_mean
from mindferry.spec import ModelSpec, Recipe, Schedule
from mindferry.targets.model_keys import canonical, model_config_from

MAX_YAML_BYTES = 1 << 20

COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")

# A global-norm limit that never acts: mindformers measures the norm only when it clips.
NO_CLIPPING = 1e30

# Model family -> (configuration class, network class) as registered in mindferry.training.models.
ARCHITECTURES = {"gpt2": ("GPT2Config", "GPT2ForTraining")}

_HEADER = """\
# Training run for MindSpore Transformers (mindformers 1.9.0), written by mindferry.
# Paths are relative to this file. Train with: mindferry train <this directory>
# What was decided on the way here, and why: migration.json
"""

_NOTES = {
    "use_legacy": "today's mcore GPTModel",
    "load_checkpoint": "the source's weights, under GPTModel's parameter names",
    "sink_mode": "data sinking is for Ascend; a CPU has no device queue to sink into",
    "max_grad_norm": None,
    "lr_schedule": "total_steps counts optimizer steps; the run stops there",
    "layer_spec": "portable: any device; reference: mindformers' own modules (Ascend)",
    "activation": "the exact function: gelu_tanh (HF gelu_new) or gelu_erf (HF gelu)",
    "optimizer": "AdamW with bias correction; 1-D tensors and biases are not decayed",
    "mode": "0: graph (compiled), 1: PyNative (eager, for debugging)",
    "gradient_accumulation_steps": "mindformers honours it in semi_auto_parallel only",
}


def lr_schedule_block(schedule: Schedule) -> dict[str, Any]:
    """mindformers' lr_schedule for `schedule`: the same rate at every step s = 0, 1, ..."""
    common = {
        "learning_rate": schedule.learning_rate,
        "warmup_steps": schedule.warmup_steps,
        "warmup_lr_init": schedule.warmup_init,
        "total_steps": schedule.total_steps,
    }
    if schedule.kind == "constant":
        return {"type": "ConstantWarmUpLR", **common}
    if schedule.kind == "cosine":
        return {"type": "CosineWithWarmUpLR", **common, "lr_end": schedule.min_learning_rate}
    if schedule.min_learning_rate == 0.0:
        return {"type": "LinearWithWarmUpLR", **common}
    return {"type": "PolynomialWithWarmUpLR", **common, "lr_end": schedule.min_learning_rate, "power": 1.0}


def build(
    spec: ModelSpec,
    recipe: Recipe,
    *,
    steps_per_epoch: int,
    layer_spec: str = "portable",
    device: str = "CPU",
) -> dict[str, Any]:
    """The content of run.yaml as plain data, in the order of the file."""
    config_class, network_class = ARCHITECTURES[spec.family]
    epochs = -(-recipe.schedule.total_steps // max(steps_per_epoch, 1))
    clip = recipe.max_grad_norm if recipe.max_grad_norm is not None else NO_CLIPPING
    model_config = {
        "type": config_class,
        "model_type": spec.family,
        "architectures": [network_class],
        **model_config_from(spec, recipe.seq_length, recipe.precision, layer_spec),
    }
    return {
        "seed": recipe.seed,
        "run_mode": "train",
        "output_dir": "./output",
        "use_legacy": False,
        "use_parallel": False,
        "load_checkpoint": "./model",
        "load_ckpt_format": "safetensors",
        "auto_trans_ckpt": False,
        "resume_training": False,
        "print_separate_loss": False,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": spec.family},
        "runner_config": {
            "epochs": epochs,
            "batch_size": recipe.batch_size,
            "sink_mode": False,
            "sink_size": 1,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        },
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "use_clip_grad": True,
            "max_grad_norm": clip,
            "scale_sense": recipe.loss_scale,
        },
        "optimizer": {
            "type": recipe.optimizer.kind,
            "betas": list(recipe.optimizer.betas),
            "eps": recipe.optimizer.eps,
            "weight_decay": recipe.optimizer.weight_decay,
        },
        "lr_schedule": lr_schedule_block(recipe.schedule),
        "train_dataset": {
            "data_loader": {
                "type": "MindDataset",
                "dataset_files": ["./data/train.mindrecord"],
                "shuffle": True,
            },
            "input_columns": list(COLUMNS),
            "construct_args_key": list(COLUMNS),
            "num_parallel_workers": 1,
            "python_multiprocessing": False,
            "drop_remainder": True,
            "repeat": 1,
            "prefetch_size": 2,
            "seed": recipe.seed,
        },
        "train_dataset_task": {"type": "CausalLanguageModelDataset"},
        "context": {
            "mode": 0,
            "device_target": device,
            "max_call_depth": 10000,
            "enable_graph_kernel": False,
        },
        "parallel": {
            "parallel_mode": 0,
            "gradients_mean": True,
            "full_batch": False,
            "enable_parallel_optimizer": False,
        },
        "parallel_config": {
            "data_parallel": 1,
            "model_parallel": 1,
            "pipeline_stage": 1,
            "micro_batch_num": 1,
            "use_seq_parallel": False,
            "vocab_emb_dp": False,
        },
        "recompute_config": {
            "recompute": False,
            "select_recompute": False,
            "parallel_optimizer_comm_recompute": False,
            "mp_comm_recompute": True,
            "recompute_slice_activation": False,
        },
        "callbacks": [
            {"type": "MFLossMonitor", "per_print_times": 1},
            {
                "type": "CheckpointMonitor",
                "directory": "./checkpoints",
                "save_checkpoint_steps": max(1, min(1000, recipe.schedule.total_steps)),
                "keep_checkpoint_max": 2,
                "checkpoint_format": "safetensors",
            },
        ],
        "model": {"model_config": model_config, "arch": {"type": network_class}},
    }


def _float_text(value: float) -> str:
    """Text that YAML 1.1 and 1.2 readers both take for a float (PyYAML reads `1e-05` as a string)."""
    text = repr(value)
    mantissa, sep, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if sep and "." not in mantissa else text


def dump(content: dict[str, Any]) -> str:
    """YAML text of `content`, with a comment at the keys that people ask about."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.representer.add_representer(
        float,
        lambda representer, value: representer.represent_scalar(
            "tag:yaml.org,2002:float", _float_text(value)
        ),
    )
    stream = io.StringIO()
    yaml.dump(content, stream)
    lines = []
    for line in stream.getvalue().splitlines():
        match = re.match(r"^\s*(\w+):", line)
        note = _NOTES.get(match.group(1)) if match else None
        lines.append(f"{line}  # {note}" if note else line)
    return _HEADER + "\n".join(lines) + "\n"


def load_yaml(path: Path) -> dict[str, Any]:
    """Parse one YAML 1.2 mapping. No tags, no aliases, bounded size; duplicate keys are errors.

    Raises:
        UsageError: unreadable, too large, not a mapping, or not plain YAML.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        size = path.stat().st_size
        if size > MAX_YAML_BYTES:
            raise UsageError(
                f"{path}: found {size} bytes, expected at most {MAX_YAML_BYTES}", id="config.size"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", remedy="give a run directory made by `migrate`") from None
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{path}: cannot be read: {err}", id="config.unreadable") from None
    yaml = YAML(typ="safe", pure=True)
    try:
        events = list(yaml.parse(text))
        if any(type(event).__name__ == "AliasEvent" for event in events):
            raise UsageError(f"{path}: aliases (*name) are not accepted here", remedy="write the value out")
        content = YAML(typ="safe", pure=True).load(text)
    except YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(
            f"{path}:{where}: {getattr(err, 'problem', None) or err}",
            remedy="correct the YAML",
            id="config.yaml",
        ) from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: found {type(content).__name__}, expected a mapping of sections")
    return content


def _explain(path: Path, err: Any, raw: dict[str, Any], model: Any) -> UsageError:
    """All schema violations in one error, unknown keys with the nearest known one."""
    problems = []
    for item in err.errors():
        loc = [str(part) for part in item["loc"]]
        # A union reports each branch; its class names are no keys of the file.
        key = ".".join(part for part in loc if not part[:1].isupper() and "[" not in part)
        if item["type"] == "extra_forbidden":
            hint = did_you_mean(loc[-1], _known(model, loc[:-1]))
            problems.append(f"unknown key {key!r}" + (f" - {hint}" if hint else ""))
        elif item["type"] == "missing":
            problems.append(f"missing key {key!r}")
        else:
            problems.append(f"{key}: found {item['input']!r}, {item['msg'].lower()}")
    return UsageError(
        f"{path}: " + "; ".join(dict.fromkeys(problems)), remedy="correct the named keys", id="config.invalid"
    )


def _known(model: Any, loc: list[str]) -> list[str]:
    """Field names of the section at `loc`."""
    for part in loc:
        field = model.model_fields.get(part) or model.model_fields.get(f"{part}_")
        annotation = getattr(field, "annotation", None)
        if hasattr(annotation, "model_fields"):
            model = annotation
        else:
            break
    return [field.alias or name for name, field in model.model_fields.items()]


def read(path: Path) -> dict[str, Any]:
    """Read and check a run.yaml; returns plain data with defaults filled in.

    `model.model_config` comes back with canonical key names (mindferry.targets.model_keys).

    Raises:
        UsageError: every violation found, each with the nearest known key.
    """
    from pydantic import ValidationError

    from mindferry.targets.schema import CALLBACKS, RunYaml

    raw = load_yaml(path)
    try:
        checked = RunYaml.model_validate(raw)
        for item in checked.callbacks:
            schema = CALLBACKS.get(str(item.get("type")))
            if schema is not None:
                item.update(schema.model_validate(item).model_dump(exclude_none=True))
            elif "type" not in item:
                raise UsageError(
                    f"{path}: callbacks: an entry without 'type'", remedy="name the callback class"
                )
    except ValidationError as err:
        raise _explain(path, err, raw, RunYaml) from None
    content = checked.model_dump(by_alias=True, exclude_none=True)
    ours, base = canonical(checked.model.model_config_, f"{path}: model.model_config")
    content["model"]["model_config"] = {**base, **ours}
    return content
