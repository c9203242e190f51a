"""run.yaml: written for mindformers 1.9.0, read back with YAML 1.2 rules and a closed schema."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from mindferry.errors import UsageError, did_you_mean
from mindferry.spec import LossScale, ModelSpec, Recipe, Schedule, spec_from
from mindferry.targets import recompute
from mindferry.targets.model_keys import canonical, model_config_from

MAX_YAML_BYTES = 1 << 20

COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")

# A global-norm limit that never acts: mindformers measures the norm only when it clips.
NO_CLIPPING = 1e30

# Model family -> (configuration class, network class, model_type) as mindferry.training.models registers them. The
# prefix keeps mindformers' own classes of these families reachable.
ARCHITECTURES = {
    "gpt2": ("GPT2Config", "GPT2ForTraining", "gpt2"),
    **{
        family: (f"{title}Config", f"{title}ForTraining", f"mindferry_{family}")
        for family, title in {
            "gpt_neox": "GPTNeoX",
            "llama": "Llama",
            "mistral": "Mistral",
            "opt": "OPT",
            "qwen2": "Qwen2",
            "qwen3": "Qwen3",
        }.items()
    },
}

_HEADER = """\
# Training run for MindSpore Transformers (mindformers 1.9.0), written by mindferry.
# Paths are relative to this file. Train with: mindferry train <this directory>
# What was decided on the way here, and why: migration.json
"""

_NOTES = {
    "use_legacy": "today's mcore GPTModel",
    "load_checkpoint": "the source's weights, under GPTModel's parameter names",
    "sink_mode": "data sinking needs a device queue: on for Ascend; a CPU has none",
    "sink_size": "steps handed to the device at once; 1 reports each step's loss",
    "max_grad_norm": None,
    "lr_schedule": "total_steps counts optimizer steps; the run stops there",
    "layer_spec": "portable: any device; reference: mindformers' own modules (Ascend)",
    "activation": "the exact function: gelu_tanh (HF gelu_new) or gelu_erf (HF gelu)",
    "optimizer": "AdamW with bias correction; 1-D tensors and biases are not decayed",
    "recompute": "true: every layer; [n]: the first n; select_recompute names parts of the other layers",
    "mode": "0: graph (compiled), 1: PyNative (eager, for debugging)",
    "gradient_accumulation_steps": "micro-batches of batch_size per optimizer step (`mindferry train` does them)",
}


def lr_schedule_block(schedule: Schedule) -> dict[str, Any]:
    """run.yaml's lr_schedule for `schedule`: mindformers' own class where its formula is the source's, else
    ours, TabledLR. `train` computes either in float64 (mindferry.training.schedule)."""
    common = {
        "learning_rate": schedule.learning_rate,
        "warmup_steps": schedule.warmup_steps,
        "warmup_lr_init": schedule.warmup_init,
        "total_steps": schedule.total_steps,
    }
    low = schedule.min_learning_rate
    stock = {
        "constant": {"type": "ConstantWarmUpLR", **common},
        "cosine": {"type": "CosineWithWarmUpLR", **common, "lr_end": low},
        "linear": {"type": "LinearWithWarmUpLR", **common},
    }
    if low:
        stock["linear"] = {"type": "PolynomialWithWarmUpLR", **common, "lr_end": low, "power": 1.0}
    block = stock.get(schedule.kind)
    if block is not None and schedule_from(block) == schedule:
        return block
    return tabled_block(schedule)


def tabled_block(schedule: Schedule) -> dict[str, Any]:
    """lr_schedule of `schedule` for TabledLR; what is not said is Schedule's default."""
    block: dict[str, Any] = {
        "type": TABLED,
        "kind": schedule.kind,
        "learning_rate": schedule.learning_rate,
        "lr_end": schedule.min_learning_rate,
        "warmup_steps": schedule.warmup_steps,
        "warmup_lr_init": schedule.warmup_init,
        "total_steps": schedule.total_steps,
    }
    for field in _TABLED_FIELDS:
        value = getattr(schedule, field)
        if value != Schedule.model_fields[field].default:
            block[field] = value
    return block


TABLED = "TabledLR"

_TABLED_FIELDS = (
    *("warmup_rule", "warmup_shape", "decay_steps", "num_cycles", "power", "timescale", "shift"),
    *("wsd_decay_steps", "wsd_shape"),
)

# mindformers' learning rate classes with a formula of ours -> the kind of Schedule.
STOCK_SCHEDULES = {
    "ConstantWarmUpLR": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "PolynomialWithWarmUpLR": "polynomial",
    "CosineWithRestartsAndWarmUpLR": "cosine_with_restarts",
}


def schedule_from(block: Mapping[str, Any]) -> Schedule | None:
    """The Schedule that run.yaml's lr_schedule means, or None for a class that is not known here.

    Raises:
        UsageError: keys that do not go together.
    """
    kind = block.get("kind") if block["type"] == TABLED else STOCK_SCHEDULES.get(block["type"])
    if kind is None and block["type"] != TABLED:
        return None
    total = block["total_steps"]
    warmup = block.get("warmup_steps", 0)
    if block.get("warmup_ratio") is not None:
        warmup = int(total * block["warmup_ratio"])  # mindformers lets the ratio win
    values = {key: block[key] for key in _TABLED_FIELDS if block.get(key) is not None}
    if block["type"] == "PolynomialWithWarmUpLR" and values.get("power", 1.0) == 1.0:
        kind = "linear"  # how lr_schedule_block writes one that ends above 0
    if block["type"] == "CosineWithRestartsAndWarmUpLR":
        values.setdefault("num_cycles", 1.0)
    return spec_from(
        Schedule,
        {
            "kind": kind,
            "learning_rate": block["learning_rate"],
            "min_learning_rate": block.get("lr_end", 0.0),
            "warmup_steps": warmup,
            "warmup_init": block.get("warmup_lr_init", 0.0),
            "total_steps": total,
            **values,
        },
        "run.yaml: lr_schedule",
    )


# Our AdamW that decays every tensor; mindformers always leaves 1-D tensors and biases out.
DECAY_ALL = "AdamWDecayAll"


def scale_sense(scale: LossScale) -> float | dict[str, Any]:
    """run.yaml's runner_wrapper.scale_sense."""
    if not scale.dynamic:
        return scale.value
    return {
        "type": "DynamicLossScaleUpdateCell",
        "loss_scale_value": scale.value,
        "scale_factor": scale.factor,
        "scale_window": scale.window,
        **({"scale_floor": scale.floor} if scale.floor != 1.0 else {}),
    }


def build(
    spec: ModelSpec,
    recipe: Recipe,
    *,
    steps_per_epoch: int,
    layer_spec: str = "portable",
    device: str = "CPU",
) -> dict[str, Any]:
    """The content of run.yaml as plain data, in the order of the file."""
    config_class, network_class, model_type = ARCHITECTURES[spec.family]
    epochs = -(-recipe.schedule.total_steps // max(steps_per_epoch, 1))
    clip = recipe.max_grad_norm if recipe.max_grad_norm is not None else NO_CLIPPING
    model_config = {
        "type": config_class,
        "model_type": model_type,
        "architectures": [network_class],
        **model_config_from(spec, recipe.seq_length, recipe.precision, layer_spec),
    }
    if recipe.precision.fp32_residual:
        model_config["fp32_residual_connection"] = True
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
            "sink_mode": device == "Ascend",
            "sink_size": 1,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        },
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "use_clip_grad": True,
            "max_grad_norm": clip,
            "scale_sense": scale_sense(recipe.loss_scale),
            **({"calculate_per_token_loss": True} if recipe.per_token_loss else {}),
        },
        "optimizer": {
            "type": "AdamW" if recipe.optimizer.decay == "matrices" else DECAY_ALL,
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
        "recompute_config": recompute.block(recipe.recompute),
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


def float_text(value: float) -> str:
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
        lambda representer, value: representer.represent_scalar("tag:yaml.org,2002:float", float_text(value)),
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


def data_files(content: Mapping[str, Any], root: Path = Path()) -> list[Path]:
    """The files that train_dataset reads, absolute; `root` is where relative paths start.

    As mindformers' CausalLanguageModelDataset: `dataset_dir` before `dataset_files`; in it and below every file
    whose name ends in "mindrecord" and digits.

    Raises:
        UsageError: neither is given, or the directory holds no such file.
    """
    loader = content["train_dataset"]["data_loader"]
    if loader.get("dataset_dir"):
        directory = (root / loader["dataset_dir"]).resolve()
        found = sorted(
            path
            for path in directory.rglob("*")
            if path.is_file() and re.search(r"mindrecord\d*$", path.name)
        )
    else:
        named = loader.get("dataset_files") or []
        found = [(root / name).resolve() for name in ([named] if isinstance(named, str) else named)]
    if not found:
        raise UsageError(
            f"{root / 'run.yaml'}: train_dataset.data_loader: no MindRecord files",
            remedy="name them in dataset_files, or a directory that holds them in dataset_dir",
            id="data.no-files",
        )
    return found


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
        sections = [each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields")]
        if not sections:
            break
        model = sections[0]
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
    recompute.check(content, str(path))
    return content
