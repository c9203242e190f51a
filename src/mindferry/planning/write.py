"""Writes a strategy as YAML for mindformers 1.x or 2.x, and the commands that start it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.planning.estimate import Job
from mindferry.planning.runfile import ALIASES
from mindferry.planning.settings import load_yaml
from mindferry.planning.strategy import Strategy
from mindferry.spec import ModelSpec
from mindferry.targets import run_directory

COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")
# Regular expressions over the attributes of a layer (LayerSetting.set_pattern_recompute). mindformers'
# defaults name operators that only a gated MLP has.
_SELECT = {
    "gated": [r"mlp\.mul", r"mlp\.activation_func\.silu"],
    "plain": [r"mlp\.activation_func\.gelu"],
    "core": [r"self_attention\.core_attention"],
}


def select_patterns(model: ModelSpec, flash_attention: bool) -> list[str]:
    """select_recompute patterns that mean something for this model."""
    patterns = list(_SELECT["gated" if model.gated_linear_unit else "plain"])
    return patterns if flash_attention else patterns + _SELECT["core"]


def sections(st: Strategy, job: Job, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """What `st` sets in a mindformers 1.x YAML, section by section."""
    pipeline = st.pipeline_stage > 1
    parallel: dict[str, Any] = {
        "parallel_mode": 1,
        "gradients_mean": False,
        "full_batch": False,
        "dataset_strategy": [
            [st.data_parallel, 1, 1, 1] if name == "attention_mask" else [st.data_parallel, 1]
            for name in columns
        ],
        "enable_parallel_optimizer": st.optimizer_shard_level > 0,
    }
    if st.optimizer_shard_level:
        parallel["parallel_optimizer_config"] = {
            "optimizer_level": f"level{st.optimizer_shard_level}",
            "parallel_optimizer_threshold": 64,
            "optimizer_weight_shard_size": st.optimizer_weight_shard_size or -1,
        }
    if st.pp_interleave_num > 1:
        parallel["pipeline_config"] = {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    full = st.recompute_name == "full"
    model_config: dict[str, Any] = {"seq_length": job.seq_length}
    offset = st.offset(job.model.num_layers)
    if offset != 0:
        model_config["offset"] = offset
    if st.pp_interleave_num > 1:
        model_config["pp_interleave_num"] = st.pp_interleave_num
    if st.vocab_size and st.vocab_size != job.model.vocab_size:
        model_config["vocab_size"] = st.vocab_size
    return {
        "use_parallel": True,
        "use_legacy": False,
        "runner_config": {
            "batch_size": st.batch_size,
            "gradient_accumulation_steps": 1 if pipeline else st.micro_batch_num,
        },
        "parallel": parallel,
        "parallel_config": {
            "data_parallel": st.data_parallel,
            "model_parallel": st.model_parallel,
            "context_parallel": st.context_parallel,
            "pipeline_stage": st.pipeline_stage,
            "micro_batch_num": st.micro_batch_num if pipeline else 1,
            "use_seq_parallel": st.use_seq_parallel,
            "vocab_emb_dp": False,
        },
        "recompute_config": {
            "recompute": True if full else (list(st.recompute) if any(st.recompute) else False),
            "select_recompute": select_patterns(job.model, job.flash_attention) if st.select else False,
            "mp_comm_recompute": True,
            "parallel_optimizer_comm_recompute": st.optimizer_shard_level == 3,
        },
        "model": {"model_config": model_config},
    }


def mcore_model_config(job: Job, params_dtype: str) -> dict[str, Any]:
    """`model.model_config` with the names of mindformers' TransformerConfig, for a model without a YAML of
    its own."""
    m = job.model
    config: dict[str, Any] = {
        "vocab_size": m.vocab_size, "hidden_size": m.hidden_size, "num_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads, "num_query_groups": m.num_query_groups,
        "kv_channels": m.kv_channels, "ffn_hidden_size": m.ffn_hidden_size, "seq_length": job.seq_length,
        "max_position_embeddings": m.max_position_embeddings, "position_embedding_type": m.position_embedding,
        "normalization": m.normalization, "layernorm_epsilon": m.layernorm_epsilon,
        "add_bias_linear": m.add_bias_linear, "add_qkv_bias": m.add_qkv_bias,
        "gated_linear_unit": m.gated_linear_unit, "hidden_act": "silu" if m.activation == "silu" else "gelu",
        "qk_layernorm": m.qk_layernorm, "tie_word_embeddings": m.tie_word_embeddings,
        "hidden_dropout": float(m.hidden_dropout), "attention_dropout": float(m.attention_dropout),
        "compute_dtype": job.compute_dtype, "params_dtype": params_dtype,
        "use_flash_attention": job.flash_attention,
    }  # fmt: skip
    return config


def _fresh(job: Job, params_dtype: str) -> dict[str, Any]:
    """The parts of a training YAML that no strategy decides, for a model without one; paths are to be filled
    in."""
    family = job.model.family
    return {
        "seed": 42,
        "run_mode": "train",
        "output_dir": "./output",
        "use_legacy": False,
        "use_parallel": True,
        "load_checkpoint": "",
        "load_ckpt_format": "safetensors",
        "auto_trans_ckpt": True,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": family},
        "runner_config": {"epochs": 1, "batch_size": 1, "sink_mode": True, "sink_size": 1,
                          "gradient_accumulation_steps": 1},
        "runner_wrapper": {"type": "MFTrainOneStepCell", "use_clip_grad": True, "max_grad_norm": 1.0,
                           "scale_sense": 1.0},
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.1},
        "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 0.0003, "lr_end": 0.00003,
                        "warmup_steps": 100, "total_steps": -1},
        "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_files": ["./data/train.mindrecord"],
                                          "shuffle": True},
                          "input_columns": list(COLUMNS), "construct_args_key": list(COLUMNS),
                          "num_parallel_workers": 8, "drop_remainder": True, "prefetch_size": 1},
        "train_dataset_task": {"type": "CausalLanguageModelDataset"},
        "context": {"mode": 0, "device_target": "Ascend", "max_call_depth": 10000},
        "callbacks": [{"type": "MFLossMonitor", "per_print_times": 1}],
        "model": {"model_config": {"model_type": family, **mcore_model_config(job, params_dtype)}},
    }  # fmt: skip


def _own_run_yaml(job: Job, params_dtype: str) -> dict[str, Any] | None:
    """A complete run.yaml through mindferry's own writer, for families it knows."""
    from mindferry.spec import Precision, Recipe, Schedule
    from mindferry.targets import run_yaml

    if job.model.family not in getattr(run_yaml, "ARCHITECTURES", {}):
        return None
    recipe = Recipe(
        schedule=Schedule(learning_rate=3e-4, warmup_steps=100, total_steps=1000),
        precision=Precision.model_validate({"compute": job.compute_dtype, "params": params_dtype}),
        seq_length=job.seq_length,
    )
    content = run_yaml.build(job.model, recipe, steps_per_epoch=1000, layer_spec="reference", device="Ascend")
    return dict(content)


def content_1x(st: Strategy, job: Job, params_dtype: str) -> dict[str, Any]:
    """A whole mindformers 1.x YAML for `st`; data paths and the schedule are placeholders to fill in."""
    base = _own_run_yaml(job, params_dtype) or _fresh(job, params_dtype)
    _merge(base, sections(st, job))
    base["context"]["max_device_memory"] = device_memory_text(job)
    return base


def device_memory_text(job: Job) -> str:
    """max_device_memory as mindformers writes it."""
    return f"{int(job.device.usable_bytes / 2**30)}GB"


def _merge(base: Any, extra: Mapping[str, Any]) -> None:
    """Put `extra` into `base`, section by section; lists and values replace."""
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            _merge(base[key], value)
        else:
            base[key] = value


def content_2x(st: Strategy, job: Job) -> dict[str, Any]:
    """The sections of mindformers 2.x (PyNative layout) for `st`.

    Made from reading mindformers 2.1.0's configuration classes; nothing of it was run: that release needs
    packages that are not on PyPI.
    """
    starts, spans = 0, []
    per_stage: list[list[str]] = [[] for _ in range(st.pipeline_stage)]
    for row in st.layers:
        for stage, count in enumerate(row):
            if count:
                per_stage[stage].append(f"{starts}-{starts + count - 1}")
            starts += count
    for stage, count in enumerate(st.recompute):
        spans.append(_first_layers(per_stage[stage], count))
    recompute: dict[str, Any] = {"mode": "None"}
    if any(st.recompute):
        recompute = {"mode": "full", "full_recompute_layer": spans}
    elif st.select:
        whole = [",".join(item) for item in per_stage]
        recompute = {"mode": "select", "select_module": {"mlp.activation_func": whole}}
    schedule = "interleaved_1f1b" if st.pp_interleave_num > 1 else "1f1b"
    even = len({n for row in st.layers for n in row}) == 1
    return {
        "run_mode": "train",
        "training": {"local_batch_size": st.batch_size, "global_batch_size": st.global_batch},
        "parallelism": {
            "data_parallel_shard": st.shard_ranks,
            "data_parallel_shard_strategy": "optim_grads_params",
            "tensor_parallel": st.model_parallel,
            "sequence_parallel": st.model_parallel > 1,
            "context_parallel": st.context_parallel,
            "pipeline_parallel": st.pipeline_stage,
            "pipeline_parallel_layers_per_stage": "auto"
            if even
            else "|".join(",".join(x) for x in per_stage),
            "pipeline_parallel_schedule": schedule,
            "pipeline_parallel_interleave_num": st.pp_interleave_num,
            "npu_nums_per_device": job.device.devices_per_host,
        },
        "recompute": recompute,
        "context": {"mode": 1, "device_target": "Ascend", "max_device_memory": device_memory_text(job)},
        "model": {"model_type": job.model.family, **mcore_model_config(job, "float32")},
    }


def _first_layers(spans: list[str], count: int) -> str:
    """The first `count` layers of `spans` ("0-3", "8-11") as one range text."""
    out = []
    for span in spans:
        low, high = map(int, span.split("-"))
        take = min(count, high - low + 1)
        if take > 0:
            out.append(f"{low}-{low + take - 1}")
        count -= take
    return ",".join(out)


_HEADER_1X = """\
# {label}
# on {devices} x {device}, written by mindferry plan for mindformers 1.9.0; expected {seconds}.
# Check it again after changes: mindferry plan --check THIS_FILE --devices {devices} --device {device}
"""
_HEADER_2X = """\
# NOT RUN: mindformers 2.x needs packages that are not on PyPI. Made from reading its configuration classes
# (2.1.0). {label} on {devices} x {device}; expected {seconds} (estimated for the 1.x engine).
# optimizer_shard_level of the plan: {level}. Fill in training.steps, optimizer, lr_scheduler and
# train_dataset.
"""


def write_yaml(
    path: Path, st: Strategy, job: Job, *, seconds: float, base: Path | None = None, layout: str = "1.x",
    params_dtype: str = "float32",
) -> None:  # fmt: skip
    """Write `st` to `path`: into a copy of `base` (comments kept) or as a new file. All or nothing.

    Raises:
        UsageError: `path` is a directory or cannot be written.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"--write {path}: not a file in an existing directory", remedy="name a file", id="plan.write"
        )
    values = {"label": st.label(), "devices": st.devices, "device": job.device.name,
              "seconds": f"{seconds:.3g} s a step", "level": st.optimizer_shard_level}  # fmt: skip
    if layout == "2.x":
        text = _HEADER_2X.format(**values) + _dump(content_2x(st, job))
    elif base is not None:
        text = _HEADER_1X.format(**values) + _updated(base, st, job)
    else:
        text = _HEADER_1X.format(**values) + _dump(content_1x(st, job, params_dtype))
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write `path` whole or not at all.

    Raises:
        UsageError: the directory cannot be written to.
    """
    try:
        run_directory.write_text(path, text)
    except OSError as err:
        raise UsageError(
            f"{path}: cannot be written: {err.strerror or err}",
            remedy="choose another place",
            id="plan.write",
        ) from None


def _updated(base: Path, st: Strategy, job: Job) -> str:
    """`base` with the strategy's keys changed in place: comments, order and everything else stay."""
    from ruamel.yaml import YAML

    load_yaml(base)  # size limit, safe and readable
    yaml = YAML(typ="rt")
    yaml.width = 110
    yaml.preserve_quotes = True
    yaml.boolean_representation = ["False", "True"]  # type: ignore[attr-defined]
    yaml.indent(mapping=2, sequence=4, offset=2)
    content = yaml.load(base.read_text(encoding="utf-8"))
    columns = (content.get("train_dataset") or {}).get("input_columns")
    wanted = sections(st, job, tuple(columns) if isinstance(columns, list) else COLUMNS)
    wanted.pop("use_legacy")
    _leave_behind(content, st)
    config = content.setdefault("model", {}).setdefault("model_config", {})
    sizes = {"num_layers": job.model.num_layers, **wanted["model"]["model_config"]}
    wanted["model"]["model_config"] = {_spelling(config, name): value for name, value in sizes.items()}
    _merge(content, _flow(wanted))
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def _spelling(config: Mapping[str, Any], name: str) -> str:
    """The spelling of `name` that `config` uses; two spellings of one key are an error to mindformers."""
    return next((key for key in ALIASES.get(name, (name,)) if key in config), name)


def _leave_behind(content: Any, st: Strategy) -> None:
    """Take out of a YAML what an earlier strategy set and this one contradicts."""
    parallel = content.get("parallel") or {}
    if st.pp_interleave_num == 1:
        parallel.pop("pipeline_config", None)
        ((content.get("model") or {}).get("model_config") or {}).pop("pp_interleave_num", None)
    config = (content.get("model") or {}).get("model_config") or {}
    if config.get("offset"):
        config["offset"] = 0
    (parallel.get("parallel_optimizer_config") or {}).pop("gradient_accumulation_shard", None)
    if not st.optimizer_shard_level:
        parallel.pop("parallel_optimizer_config", None)
    if content.get("micro_batch_interleave_num", 1) != 1:
        content["micro_batch_interleave_num"] = 1


def _dump(content: dict[str, Any]) -> str:
    """YAML text that 1.1 and 1.2 readers take alike (PyYAML reads 1e-05 as a string); inner lists on one
    line."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.width = 110
    yaml.default_flow_style = False
    yaml.representer.add_representer(
        float,
        lambda rep, value: rep.represent_scalar("tag:yaml.org,2002:float", float_text(value)),
    )
    stream = io.StringIO()
    yaml.dump(_flow(content), stream)
    return stream.getvalue()


def _flow(value: Any) -> Any:
    """`value` with its lists of plain values marked to be written on one line."""
    from ruamel.yaml.comments import CommentedSeq

    if isinstance(value, Mapping):
        return {key: _flow(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        out = CommentedSeq([_flow(item) for item in value])
        if not any(isinstance(item, Mapping) for item in value):
            out.fa.set_flow_style()
        return out
    return value


def float_text(value: float) -> str:
    """Text that stays a float in YAML 1.1: with a dot, also before an exponent."""
    text = repr(value)
    mantissa, sep, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if sep and "." not in mantissa else text


# ---- commands ----------------------------------------------------------------------------------------------

_ENTRY = "\"$(python -c 'import mindferry; print(mindferry.__path__[0])')/__main__.py\" train"


# More hosts than this get one line to run everywhere instead of a line each.
MAX_HOST_LINES = 16


def launch_commands(st: Strategy, devices_per_host: int, run: str = "run/") -> list[str]:
    """What starts the training: the line that writes the launch files, then one for each host.

    Every host gets as many processes, the most that divide the devices: msrun numbers ranks node_rank x
    local_worker_num + i, so unequal hosts would give numbers twice (MindSpore 2.9.0, parallel/cluster/
    process_entity/_api.py).
    """
    n = st.devices
    if n == 1:
        return [f"mindferry train {run}"]
    local = next(count for count in range(min(devices_per_host, n), 0, -1) if n % count == 0)
    hosts = n // local
    start = f"bash {run.rstrip('/')}/launch/start.sh"
    if hosts > MAX_HOST_LINES:
        names, lines = "FILE", [f"{start} NODE  # on each of {hosts} hosts, NODE 0 to {hosts - 1}"]
    else:
        names, lines = (
            ",".join(f"HOST{node}" for node in range(hosts)),
            [f"{start} {node}  # on host {node}" for node in range(hosts)],
        )
    option = "--hosts-file" if hosts > MAX_HOST_LINES else "--hosts"
    return [f"mindferry launch {run} {option} {names} --devices-per-host {local}", *lines]


def dryrun_commands(st: Strategy, run: str = "run/") -> list[str]:
    """MindSpore's own memory count without devices, one rank a stage (ranks are laid out stage by stage).

    Needs the Ascend build of MindSpore and CANN on a host, no cards at level 1. Feed its log back with
    --dryrun-log.
    """
    per_stage = st.devices // st.pipeline_stage
    environment = "MS_SIMULATION_LEVEL=1 MS_MEMORY_STATISTIC=1 MS_KERNEL_LAUNCH_SKIP=all"
    environment += f" RANK_SIZE={st.devices}"
    return [
        f"{environment} RANK_ID={stage * per_stage} python {_ENTRY} {run} > dryrun_stage{stage}.log 2>&1"
        for stage in range(st.pipeline_stage)
    ]
