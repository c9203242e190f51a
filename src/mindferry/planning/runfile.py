"""Reads a training YAML (ours, a stock mindformers one, or a legacy one) into a model and a `Layout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError, did_you_mean
from mindferry.planning.layout import BEFORE, SILENT, Layout, Violation
from mindferry.planning.settings import load_yaml, model_from
from mindferry.spec import ModelSpec

# Spellings of one size in mindformers 1.3 to 2.x, Hugging Face and the article; the first is ours.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd", "embed_dim"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_head"),
    "num_query_groups": ("num_query_groups", "num_key_value_heads", "n_kv_heads", "multi_query_group_num"),
    "kv_channels": ("kv_channels", "head_dim"),
    "ffn_hidden_size": ("ffn_hidden_size", "intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "seq_length": ("seq_length",),
    "max_position_embeddings": ("max_position_embeddings", "max_position_embedding", "n_positions"),
    "position_embedding": ("position_embedding_type", "extend_method"),
    "normalization": ("normalization",),
    "layernorm_epsilon": ("layernorm_epsilon", "layer_norm_epsilon", "rms_norm_eps"),
    "gated_linear_unit": ("gated_linear_unit",),
    "add_bias_linear": ("add_bias_linear",),
    "add_qkv_bias": ("add_qkv_bias", "qkv_has_bias", "attention_bias"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "qk_layernorm": ("qk_layernorm", "use_qk_norm"),
    "hidden_dropout": ("hidden_dropout", "hidden_dropout_rate", "resid_pdrop", "dropout_prob"),
    "attention_dropout": ("attention_dropout", "attention_dropout_rate", "attn_pdrop"),
    "compute_dtype": ("compute_dtype",),
    "params_dtype": ("params_dtype", "param_init_type"),
    "use_flash_attention": ("use_flash_attention",),
    "num_experts": ("num_experts", "n_routed_experts", "num_moe_experts"),
    "offset": ("offset",),
    "pp_interleave_num": ("pp_interleave_num", "virtual_pipeline_model_parallel_size"),
    "fine_grain_interleave": ("fine_grain_interleave",),
}

# Keys that mindformers 1.9.0 knows in the sections where it refuses others (tools/register/template.py).
CLOSED_SECTIONS: dict[str, frozenset[str]] = {
    "parallel_config": frozenset(
        {"data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage",
         "micro_batch_num", "seq_split_num", "use_seq_parallel", "optimizer_shard",
         "gradient_aggregation_group", "vocab_emb_dp", "context_parallel_algo", "ulysses_degree_in_cp", "mem_coeff"}
    ),
    "recompute_config": frozenset(
        {"recompute", "select_recompute", "parallel_optimizer_comm_recompute", "select_comm_recompute",
         "mp_comm_recompute", "recompute_slice_activation", "select_recompute_exclude",
         "select_comm_recompute_exclude"}
    ),
    "runner_config": frozenset(
        {"batch_size", "epochs", "sink_mode", "sink_size", "gradient_accumulation_steps", "num_classes", "stop_step"}
    ),
}  # fmt: skip
# Sections whose unknown keys mindformers passes over; a near miss of a known key is a typing error.
KNOWN_KEYS: dict[str, frozenset[str]] = {
    "parallel": frozenset(
        {"parallel_mode", "full_batch", "search_mode", "enable_parallel_optimizer", "gradients_mean",
         "enable_alltoall", "strategy_ckpt_save_file", "strategy_ckpt_config", "parallel_optimizer_config",
         "pipeline_config", "dataset_strategy", "loss_repeated_mean", "auto_pipeline", "pipeline_stages"}
    ),
    "model_config": frozenset(name for names in ALIASES.values() for name in names),
}  # fmt: skip
# mindformers refuses a YAML whose mappings nest deeper (YAML_MAX_NESTING_DEPTH).
MAX_DEPTH = 10
_MODES = {
    "stand_alone": -1,
    "data_parallel": 0,
    "semi_auto_parallel": 1,
    "auto_parallel": 2,
    "hybrid_parallel": 3,
}
_POSITIONS = {"learned_absolute": "learned_absolute", "none": "none", "None": "rope", "relative": "none"}


@dataclass
class RunFile:
    """What was read.

    Attributes:
        model: None when the YAML leaves sizes to a model directory that was not given.
        missing: the sizes that were missing then.
        unread: violations found while reading (unknown keys and the like).
        devices_stated: False when the device count was derived from the degrees.
    """

    path: Path
    layout: Layout
    model: ModelSpec | None
    missing: tuple[str, ...] = ()
    seq_length: int = 1024
    compute_dtype: str = "float16"
    params_dtype: str = "float32"
    unread: list[Violation] = field(default_factory=list)
    devices_stated: bool = True


def is_training_yaml(path: Path) -> bool:
    """Whether `path` looks like a YAML file rather than a model."""
    return path.suffix.lower() in (".yaml", ".yml") and path.is_file()


def read(path: Path, devices: int | None = None, model: ModelSpec | None = None) -> RunFile:
    """Read `path`; wrong values become violations of the result, an unusable file an error.

    Args:
        devices: cards of the run; the product of the degrees when None.
        model: sizes to use instead of those in the YAML.

    Raises:
        UsageError: not a YAML mapping, or a section is no mapping.
    """
    content = load_yaml(path)
    if not isinstance(content, Mapping):
        raise UsageError(
            f"{path}: found {type(content).__name__}, expected a mapping of sections", id="plan.not-yaml",
            remedy="give a training YAML of mindformers",
        )  # fmt: skip
    if "parallelism" in content and "parallel_config" not in content:
        raise UsageError(
            f"{path}: this is the 2.x layout (parallelism, training, ...)", id="plan.layout-2x",
            remedy="--check reads the layout of mindformers 1.x; write the 2.x one from it with --layout 2.x",
        )  # fmt: skip
    sections = {name: _section(content, name, path) for name in
                ("parallel", "parallel_config", "recompute_config", "runner_config", "swap_config",
                "train_dataset")}  # fmt: skip
    model_section = _section(content, "model", path)
    config = _section(model_section, "model_config", path)
    found = RunFile(path, Layout(), None)
    found.unread.extend(_unknown_keys({**sections, "model_config": config}))
    depth = _depth(content)
    if depth > MAX_DEPTH:
        found.unread.append(
            Violation(
                "keys.depth", f"YAML nesting depth {depth} exceeds the maximum allowed value of {MAX_DEPTH}", BEFORE,
                "mindformers tools/check_rules.py", "fewer sections inside each other",
            )
        )  # fmt: skip
    values = _model_values(config, path)
    found.seq_length = _whole(values, "seq_length", 1024, path)
    found.compute_dtype = _dtype(values.get("compute_dtype"), "float16")
    found.params_dtype = _dtype(values.get("params_dtype"), "float32")
    if model is None:
        model, found.missing = _model(config, values, path, _section(model_section, "arch", path))
    found.model = model
    found.layout = _layout(content, sections, values, model, path)
    if devices is None:
        found.devices_stated = False
        found.layout.devices = max(1, found.layout.product)
    else:
        found.layout.devices = devices
    return found


def _depth(node: Any, depth: int = 0) -> int:
    """Mappings inside mappings, as mindformers counts them: lists end the count."""
    if isinstance(node, Mapping) and node:
        return max(_depth(value, depth + 1) for value in node.values())
    return depth


def _section(content: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{path}: section {name!r}: found {type(value).__name__}, expected a mapping", id="plan.not-yaml",
            remedy="correct the indentation",
        )  # fmt: skip
    return {str(key): item for key, item in value.items()}


def _unknown_keys(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Violation]:
    for name, known in CLOSED_SECTIONS.items():
        for key in sections[name]:
            if key not in known:
                yield Violation(
                    "keys.unknown",
                    f"The config '{name}' gets an unexpected key: {key}",
                    BEFORE,
                    "mindformers tools/register/template.py",
                    did_you_mean(key, known) or f"remove {key}",
                )
    for name, known in KNOWN_KEYS.items():
        for key in sections[name]:
            hint = did_you_mean(key, known)
            if key not in known and hint and _one_edit(key, known):
                yield Violation(
                    "keys.typing",
                    f"{name}: {key!r} is passed over without a word",
                    SILENT,
                    "planner",
                    hint,
                    "warning",
                )


def _one_edit(word: str, known: frozenset[str]) -> bool:
    """Whether `word` is at most one insertion, deletion, swap or change away from a known key."""
    for other in known:
        if abs(len(word) - len(other)) > 1:
            continue
        i = next(
            (i for i, (x, y) in enumerate(zip(word, other, strict=False)) if x != y),
            min(len(word), len(other)),
        )
        a, b = word[i:], other[i:]
        if a[1:] == b[1:] or a == b[1:] or a[1:] == b or (a[:2] == b[:2][::-1] and a[2:] == b[2:]):
            return True
    return False


def _model_values(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Canonical name -> value; two spellings with different values are an error."""
    values: dict[str, Any] = {}
    for name, spellings in ALIASES.items():
        given = {key: config[key] for key in spellings if config.get(key) is not None}
        if len({repr(v) for v in given.values()}) > 1:
            raise UsageError(
                f"{path}: model_config: {' and '.join(given)} are one setting, found "
                f"{', '.join(repr(v) for v in given.values())}",
                remedy="keep one of them",
                id="config.conflict",
            )
        if given:
            values[name] = next(iter(given.values()))
    return values


def _whole(values: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**40:
        raise UsageError(
            f"{path}: {key}: found {value!r}, expected a positive whole number", id="config.value",
            remedy=f"correct {key}",
        )  # fmt: skip
    return value


def _dtype(value: Any, default: str) -> str:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    text = short.get(str(value), str(value))
    return text if text in ("float32", "float16", "bfloat16") else default


def _model(
    config: Mapping[str, Any], values: Mapping[str, Any], path: Path, arch: Mapping[str, Any]
) -> tuple[ModelSpec | None, tuple[str, ...]]:
    need = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = tuple(name for name in need if name not in values)
    if missing:
        return None, missing
    kind = " ".join(str(x) for x in (config.get("type"), config.get("model_type"), arch.get("type"))).lower()
    llama = any(word in kind for word in ("llama", "qwen", "glm", "telechat", "deepseek"))
    seq = _whole(values, "seq_length", 1024, path)
    fields: dict[str, Any] = {
        "family": str(config.get("model_type") or ("llama" if llama else "gpt2")),
        "position_embedding": "rope" if llama else "learned_absolute",
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "activation": "silu" if llama else "gelu_tanh",
        "gated_linear_unit": llama,
        "add_bias_linear": not llama,
        "add_qkv_bias": not llama,
        "tie_word_embeddings": not llama,
        "max_position_embeddings": seq,
    }
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_query_groups",
                 "kv_channels", "ffn_hidden_size", "max_position_embeddings"):  # fmt: skip
        if name in values:
            fields[name] = _whole(values, name, 1, path)
    if isinstance(config.get("expand_ratio"), int) and "ffn_hidden_size" not in values:
        fields["ffn_hidden_size"] = config["expand_ratio"] * fields["hidden_size"]
    for name in (
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "tie_word_embeddings",
        "qk_layernorm",
    ):
        if isinstance(values.get(name), bool):
            fields[name] = values[name]
    for name in ("hidden_dropout", "attention_dropout"):
        if isinstance(values.get(name), (int, float)) and not isinstance(values[name], bool):
            fields[name] = float(values[name])
    if values.get("normalization") in ("LayerNorm", "RMSNorm"):
        fields["normalization"] = values["normalization"]
    if "position_embedding" in values and not llama:
        fields["position_embedding"] = _POSITIONS.get(str(values["position_embedding"]), "rope")
    return model_from(fields, f"{path}: model_config"), ()


def _layout(
    content: Mapping[str, Any],
    sections: Mapping[str, dict[str, Any]],
    values: Mapping[str, Any],
    model: ModelSpec | None,
    path: Path,
) -> Layout:
    parallel, degrees = sections["parallel"], sections["parallel_config"]
    again, runner = sections["recompute_config"], sections["runner_config"]
    pipe = _section(parallel, "pipeline_config", path)
    mode = parallel.get("parallel_mode", 1)
    legacy = content.get("use_legacy", True) is not False
    moe = _section(content, "moe_config", path)
    columns = sections["train_dataset"].get("input_columns")
    layout = Layout(
        parallel_mode=_MODES.get(str(mode), mode) if not isinstance(mode, int) else mode,
        use_parallel=content.get("use_parallel") is True,
        use_legacy=legacy,
        full_batch=parallel.get("full_batch", True) is not False,
        dataset_strategy=parallel.get("dataset_strategy"),
        input_columns=tuple(map(str, columns)) if isinstance(columns, list) else (),
        auto_pipeline=parallel.get("auto_pipeline") is True,
        enable_parallel_optimizer=parallel.get("enable_parallel_optimizer") is True,
        parallel_optimizer_config=_section(parallel, "parallel_optimizer_config", path),
        pipeline_interleave=pipe.get("pipeline_interleave") is True,
        pipeline_scheduler=str(pipe.get("pipeline_scheduler", "1f1b")),
        gradient_accumulation_steps=runner.get("gradient_accumulation_steps", 1),
        batch_size=runner.get("batch_size", 1),
        micro_batch_interleave_num=content.get("micro_batch_interleave_num", 1),
        recompute=again.get("recompute", False),
        select_recompute=again.get("select_recompute", False),
        select_comm_recompute=again.get("select_comm_recompute", False),
        recompute_slice_activation=again.get("recompute_slice_activation") is True,
        swap=sections["swap_config"].get("swap") is True,
        offset=values.get("offset", 0),
        pp_interleave_num=values.get("pp_interleave_num", 1),
        fine_grain_interleave=values.get("fine_grain_interleave", 1),
        use_flash_attention=values.get("use_flash_attention", not legacy) is not False,
        num_experts=int(values.get("num_experts") or moe.get("expert_num") or 0),
        vocab_emb_dp=degrees.get("vocab_emb_dp", legacy) is True,
    )
    for key in ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage",
                "micro_batch_num", "seq_split_num", "use_seq_parallel", "context_parallel_algo",
                "ulysses_degree_in_cp"):  # fmt: skip
        if degrees.get(key) is not None:
            setattr(layout, key, degrees[key])
    layout.sizes_known = model is not None
    if model is not None:
        layout.family = model.family
        sizes = {name: getattr(model, name) for name in
                 ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
                  "vocab_size", "max_position_embeddings", "gated_linear_unit")}  # fmt: skip
        for name, value in sizes.items():
            setattr(layout, name, value)
        layout.learned_positions = model.position_embedding == "learned_absolute"
    layout.seq_length = _whole(values, "seq_length", 1024, path)
    return layout
