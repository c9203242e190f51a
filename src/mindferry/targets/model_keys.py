"""The keys of `model.model_config` in run.yaml: one table for writing, reading and building.

mindformers spells one thing in several ways (num_heads, num_attention_heads, n_head) and from 1.9 on ignores
unknown keys. Here each key has one canonical name, its aliases, a default and, where mindformers'
TransformerConfig knows the thing, the name it has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindferry.errors import UsageError, did_you_mean
from mindferry.spec import ModelSpec, Precision


@dataclass(frozen=True)
class Key:
    """One key: canonical name, default, other spellings, and TransformerConfig's name (None: ours alone)."""

    name: str
    default: Any
    aliases: tuple[str, ...] = ()
    target: str | None = None


KEYS: tuple[Key, ...] = (
    Key("vocab_size", 50257, (), "vocab_size"),
    Key("hidden_size", 768, ("embed_dim", "n_embd"), "hidden_size"),
    Key("num_layers", 12, ("num_hidden_layers", "n_layer"), "num_layers"),
    Key("num_heads", 12, ("num_attention_heads", "n_head"), "num_attention_heads"),
    Key("num_query_groups", None, ("n_kv_heads", "num_key_value_heads"), "num_query_groups"),
    Key("kv_channels", None, ("head_dim",), "kv_channels"),
    Key("ffn_hidden_size", None, ("intermediate_size", "n_inner"), "ffn_hidden_size"),
    Key("seq_length", 1024, (), "seq_length"),
    Key("max_position_embeddings", None, ("n_positions",), "max_position_embeddings"),
    Key("position_embedding_type", "learned_absolute", (), "position_embedding_type"),
    Key("rotary_base", 10000.0, ("rope_theta", "theta"), None),
    Key("rotary_percent", 1.0, (), None),
    Key("rope_scaling", None, (), None),
    Key("normalization", "LayerNorm", (), "normalization"),
    Key("layernorm_epsilon", 1e-5, ("layer_norm_epsilon", "rms_norm_eps"), "layernorm_epsilon"),
    Key("trainable_norm_bias", True, (), None),
    Key("qk_layernorm", False, ("use_qk_norm",), "qk_layernorm"),
    Key("parallel_residual", False, (), None),
    Key("activation", "gelu_tanh", (), None),
    Key("gated_linear_unit", False, (), "gated_linear_unit"),
    Key("add_bias_linear", True, (), "add_bias_linear"),
    Key("add_qkv_bias", False, ("qkv_has_bias", "attention_bias"), "add_qkv_bias"),
    Key("tie_word_embeddings", True, (), "tie_word_embeddings"),
    Key("embedding_dropout", 0.1, ("embedding_dropout_prob", "embd_pdrop"), None),
    Key("hidden_dropout", 0.1, ("hidden_dropout_rate", "resid_pdrop"), "hidden_dropout"),
    Key("attention_dropout", 0.1, ("attention_dropout_rate", "attn_pdrop"), "attention_dropout"),
    Key("init_method_std", 0.02, ("initializer_range",), "init_method_std"),
    Key("compute_dtype", "float16", (), "compute_dtype"),
    Key("param_init_type", "float32", ("params_dtype",), "params_dtype"),
    Key("layernorm_compute_type", "float32", ("layernorm_compute_dtype",), "layernorm_compute_dtype"),
    Key("softmax_compute_type", "float32", ("softmax_compute_dtype",), None),
    Key("fp32_residual_connection", False, (), "fp32_residual_connection"),
    Key("offset", 0, (), "offset"),
    Key(
        "pp_interleave_num",
        1,
        ("virtual_pipeline_model_parallel_size",),
        "virtual_pipeline_model_parallel_size",
    ),
    Key("use_contiguous_weight_layout_attention", False, (), "use_contiguous_weight_layout_attention"),
    Key("use_interleaved_weight_layout_mlp", True, (), "use_interleaved_weight_layout_mlp"),
    Key("layer_spec", "portable", (), None),
)

DEFAULTS: dict[str, Any] = {key.name: key.default for key in KEYS}
_CANONICAL: dict[str, str] = {alias: key.name for key in KEYS for alias in (key.name, *key.aliases)}

# Keys that mindformers' PretrainedConfig or its trainer put beside ours.
BASE_KEYS = frozenset(
    {
        *("type", "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("checkpoint_name_or_path", "pretrained_model_dir", "name_or_path", "tokenizer_class"),
        *("parallel_config", "dataset_config", "moe_config", "monitor_config", "pet_config"),
        *("quantization_config", "batch_size", "calculate_per_token_loss", "print_separate_loss"),
        *("is_encoder_decoder", "disable_lazy_inline", "mindformers_version"),
    }
)

# The article's `dropout_prob` and mindformers' `hidden_act` stand for something wider or vaguer than a key.
_DROPOUTS = ("embedding_dropout", "hidden_dropout", "attention_dropout")
_HIDDEN_ACT = {"gelu": "gelu_tanh", "silu": "silu", "swiglu": "silu"}


def known_keys() -> list[str]:
    """Every spelling that `model_config` accepts."""
    return sorted({*_CANONICAL, *BASE_KEYS, "dropout_prob", "hidden_act"})


def canonical(
    values: Mapping[str, Any], origin: str = "model_config"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split raw keys into ours (canonical names) and mindformers' own.

    Raises:
        UsageError: unknown key, or two spellings of one key with different values.
    """
    ours: dict[str, Any] = {}
    base: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        if key in BASE_KEYS:
            base[key] = value
            continue
        if key == "dropout_prob":
            continue
        if key == "hidden_act":
            if value not in _HIDDEN_ACT:
                raise UsageError(
                    f"{origin}: hidden_act: found {value!r}, expected one of {sorted(_HIDDEN_ACT)}",
                    remedy="name the exact function with `activation`: gelu_tanh, gelu_erf or silu",
                    id="config.value",
                )
            name, value = "activation", _HIDDEN_ACT[value]
        elif key in _CANONICAL:
            name = _CANONICAL[key]
        else:
            raise UsageError(
                f"{origin}: unknown key {key!r}",
                remedy=did_you_mean(key, known_keys()) or "remove it",
                id="config.unknown-key",
            )
        if name in ours and ours[name] != value:
            raise UsageError(
                f"{origin}: {spelled[name]!r} and {key!r} are one setting, "
                f"found {ours[name]!r} and {value!r}",
                remedy="keep one of them",
                id="config.conflict",
            )
        ours[name], spelled[name] = value, key
    if "dropout_prob" in values:
        for name in _DROPOUTS:
            ours.setdefault(name, values["dropout_prob"])
    return ours, base


def transformer_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerConfig keywords for complete canonical `settings`.

    Pinned besides the table: pad_token_id -1, so that no real token is masked out of attention (mindformers
    masks ids equal to pad_token_id, 0 by default, a real token of GPT-2); use_eod_reset for learned
    positions, since GPTModel drops position_ids without it; flash attention only in the reference layers,
    where it casts q, k and v to half precision.
    """
    values = {key.target: settings[key.name] for key in KEYS if key.target is not None}
    for name in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
        if values[name] is None:
            del values[name]
    if values["max_position_embeddings"] is None:
        values["max_position_embeddings"] = settings["seq_length"]
    reference = settings["layer_spec"] == "reference"
    values["hidden_act"] = "silu" if settings["activation"] == "silu" else "gelu"
    values["use_flash_attention"] = reference
    values["fused_norm"] = reference
    values["use_eod_reset"] = settings["position_embedding_type"] == "learned_absolute"
    values["pad_token_id"] = -1
    values["hidden_dropout"] = float(values["hidden_dropout"])
    values["attention_dropout"] = float(values["attention_dropout"])
    values["attention_softmax_in_fp32"] = settings["softmax_compute_type"] == "float32"
    return values


def model_config_from(
    spec: ModelSpec, seq_length: int, precision: Precision, layer_spec: str
) -> dict[str, Any]:
    """The `model_config` block for a model, every number-changing key written out."""
    config: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_attention_heads,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "seq_length": seq_length,
        "max_position_embeddings": spec.max_position_embeddings,
        "position_embedding_type": spec.position_embedding,
        "normalization": spec.normalization,
        "layernorm_epsilon": spec.layernorm_epsilon,
        "activation": spec.activation,
        "gated_linear_unit": spec.gated_linear_unit,
        "add_bias_linear": spec.add_bias_linear,
        "add_qkv_bias": spec.add_qkv_bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "embedding_dropout": spec.embedding_dropout,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "init_method_std": spec.init_method_std,
        "compute_dtype": precision.compute,
        "layernorm_compute_type": precision.layernorm,
        "softmax_compute_type": precision.softmax,
        "param_init_type": precision.params,
        "use_contiguous_weight_layout_attention": False,
        "use_interleaved_weight_layout_mlp": True,
        "layer_spec": layer_spec,
    }
    if spec.num_query_groups != spec.num_attention_heads:
        config["num_query_groups"] = spec.num_query_groups
    if spec.kv_channels * spec.num_attention_heads != spec.hidden_size:
        config["kv_channels"] = spec.kv_channels
    if spec.qk_layernorm:
        config["qk_layernorm"] = True
    if spec.parallel_residual:
        config["parallel_residual"] = True
    if spec.position_embedding == "rope":
        config["rotary_base"] = spec.rotary_base
        config["rotary_percent"] = spec.rotary_percent
        if spec.rope_scaling is not None:
            config["rope_scaling"] = spec.rope_scaling.model_dump(exclude_none=True)
    if spec.bos_token_id is not None:
        config["bos_token_id"] = spec.bos_token_id
    if spec.eos_token_id is not None:
        config["eos_token_id"] = spec.eos_token_id
    return config


# What mindformers 1.9.0's TransformerConfig would take where run.yaml said nothing (a test compares these with
# the real class). Only keys whose value changes numbers.
MINDFORMERS_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "gated_linear_unit": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.02,
    "compute_dtype": "bfloat16",
    "params_dtype": "float32",
    "layernorm_compute_dtype": "float32",
    "use_contiguous_weight_layout_attention": False,
    "use_interleaved_weight_layout_mlp": True,
    "use_flash_attention": True,
    "use_eod_reset": False,
    "pad_token_id": 0,
    "untie_embeddings_and_output_weights": True,
}

_WHY = {
    "position_embedding_type": "the source has learned positions",
    "compute_dtype": "float32 is what can be compared with the source",
    "use_flash_attention": "flash attention casts to half precision and has no CPU kernel",
    "use_eod_reset": "GPTModel drops position_ids without it",
    "pad_token_id": "mindformers masks this id out of attention; 0 is a real token of GPT-2",
    "untie_embeddings_and_output_weights": "the source's head is its embedding",
}


def differing_defaults(model_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where leaving a key out of run.yaml would have changed the model: default there, value written, why."""
    ours, _ = canonical(model_config)
    written = transformer_keys({**DEFAULTS, **ours})
    written["untie_embeddings_and_output_weights"] = not ours.get("tie_word_embeddings", True)
    rows = [
        {
            "target_key": key,
            "target_default": default,
            "value": written[key],
            "note": _WHY.get(key, "as the source has it"),
        }
        for key, default in MINDFORMERS_DEFAULTS.items()
        if key in written and written[key] != default
    ]
    if ours.get("activation") == "gelu_erf":
        rows.append(
            {
                "target_key": "hidden_act",
                "target_default": "gelu (the tanh approximation)",
                "value": "gelu_erf",
                "note": "the source uses the exact GELU",
            }
        )
    return rows
