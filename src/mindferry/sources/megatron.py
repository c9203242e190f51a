"""Reads Megatron-LM checkpoints: arguments -> configuration, shards -> whole tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError
from mindferry.sources.assemble import Options, assemble
from mindferry.sources.config_json import ConfigDecision
from mindferry.sources.family import Common, Family, declaration
from mindferry.sources.megatron_shards import Heads, Shard, iteration_directory, merge, read_shards
from mindferry.sources.source import Source
from mindferry.spec import ModelSpec
from mindferry.weights.tensor_store import MemoryStore

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
# Padded tables of these tokenizers are recognised when nothing states the true size.
KNOWN_VOCABULARIES = {50257: "the GPT-2 tokenizer"}


def open_megatron(path: Path, options: Options) -> Source:
    """The checkpoint at `path`: its root, an iteration directory or one rank's directory."""
    directory = iteration_directory(path)
    shards = read_shards(directory)
    family = declaration("megatron")
    heads: list[Heads] = []
    store = merge(shards, lambda: heads[0])
    args = _arguments(shards[0])
    warnings: list[str] = []
    tree = _tree(args, family, store, options, warnings)
    padded = _vocab(tree, args, store, shards, options, warnings, directory)
    _check_positions(tree, store, directory, bool(args))
    heads.append(_heads(tree, shards, directory))
    source = assemble(
        path=path,
        format="megatron",
        tree=tree,
        family=family,
        shared=Common(),
        origin=f"{directory}: arguments",
        inner=store,
        options=replace(options, assume=_not_in(options.assume, tree, family)),
        warnings=warnings,
        padded_vocab_size=padded,
    )
    _describe(source, args, shards)
    return replace(source, family=_family(source.spec), spec=_renamed(source.spec))


def _arguments(shard: Shard) -> dict[str, Any]:
    args = shard.args
    if args is None:
        return {}
    return dict(args) if isinstance(args, Mapping) else dict(vars(args)) if hasattr(args, "__dict__") else {}


def _tree(
    args: Mapping[str, Any], family: Family, store: MemoryStore, options: Options, warnings: list[str]
) -> dict[str, Any]:
    """The keys that shape the network, from the arguments, the person, or (without arguments) the shapes."""
    known = {*family.must_be, *family.config} | {a for k in family.config.values() for a in k.aliases}
    tree = {name: value for name, value in args.items() if name in known}
    for name, key in family.config.items():
        if key.to in options.assume and tree.get(name) is None:
            tree[name] = _spelled(key, options.assume[key.to])
    if not args:
        warnings.append(
            "the checkpoint has no arguments: sizes are read from the tensors, the rest is assumed"
        )
        for name, value in _from_shapes(store).items():
            tree.setdefault(name, value)
    if tree.get("num_query_groups") is not None and args.get("group_query_attention") is False:
        tree["num_query_groups"] = None
    if args.get("use_rotary_position_embeddings") is True:
        tree["position_embedding_type"] = "rope"
    tree.setdefault("activation", _activation(args))
    scaling = _rope_scaling(args)
    if scaling is not None:
        tree["rope_scaling"] = scaling
    for name in ("rotary_base", "rotary_percent"):
        if tree.get(name, 0) is None:
            del tree[name]
    return tree


def _spelled(key: Any, value: Any) -> Any:
    """A spec value as the declaration's key spells it."""
    if key.values is not None:
        return next((name for name, meant in key.values.items() if meant == value), value)
    return not value if key.negated else value


def _not_in(assume: Mapping[str, Any], tree: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Assumptions that went into the tree are no contradiction to it."""
    used = {key.to for name, key in family.config.items() if name in tree and key.to in assume}
    stated = {key.to: tree[name] for name, key in family.config.items() if name in tree and key.to in assume}
    return {f: v for f, v in assume.items() if f not in used or _spelled_back(family, f, stated[f]) != v}


def _spelled_back(family: Family, field: str, value: Any) -> Any:
    key = next(key for key in family.config.values() if key.to == field)
    if key.values is not None:
        return key.values.get(value, value)
    return not value if key.negated else value


def _from_shapes(store: MemoryStore) -> dict[str, Any]:
    names = set(store.names())
    found: dict[str, Any] = {}
    numbers = [int(m[1]) for name in names if (m := re.match(r"decoder\.layers\.([0-9]+)\.", name))]
    found["num_layers"] = max(numbers, default=-1) + 1
    if EMBEDDING in names:
        found["hidden_size"] = store.shape(EMBEDDING)[1]
    if POSITIONS in names:
        found["max_position_embeddings"] = store.shape(POSITIONS)[0]
    inner = "decoder.layers.0.mlp.linear_fc2.weight"
    if inner in names:
        found["ffn_hidden_size"] = store.shape(inner)[1]
    return found


def _activation(args: Mapping[str, Any]) -> str:
    """The function that was really run.

    Megatron's fused bias-GELU, the default, computes the tanh form whatever the argument is called; without
    the fusion, or without biases to fuse, F.gelu is the exact function.
    """
    if args.get("swiglu"):
        return "silu"
    if args.get("openai_gelu"):
        return "gelu_tanh"
    fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused else "gelu_erf"


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    factor = args.get("rotary_seq_len_interpolation_factor")
    if factor is not None:
        return {"rope_type": "linear", "factor": factor}
    if args.get("use_rope_scaling"):
        # Megatron states the factor alone; the other three are constants of its RotaryEmbedding.
        return {
            "rope_type": "llama3",
            "factor": args.get("rope_scaling_factor", 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return None


def _vocab(
    tree: dict[str, Any],
    args: Mapping[str, Any],
    store: MemoryStore,
    shards: list[Shard],
    options: Options,
    warnings: list[str],
    directory: Path,
) -> int | None:
    """Puts the true vocabulary into `tree`; returns the number of rows the tables have."""
    if EMBEDDING not in store.names():
        return None
    rows = store.shape(EMBEDDING)[0]
    ranks = max(shard.tensor_rank for shard in shards) + 1
    true = tree.get("vocab_size")
    if true is None:
        divisor = args.get("make_vocab_size_divisible_by", 128)
        for known, whose in KNOWN_VOCABULARIES.items():
            if isinstance(divisor, int) and divisor > 0 and rows == padded_vocab(known, divisor, ranks):
                true = known
                warnings.append(f"vocab_size {known} is assumed: {rows} rows are what {whose} is padded to")
    if true is None:
        true = rows
        warnings.append(
            f"the true vocabulary is not stated; all {rows} rows are kept (give vocab_size to cut)"
        )
    if not isinstance(true, int) or true > rows or true <= 0:
        raise MindferryError(
            f"{directory}: vocab_size {true!r}, but the embedding has {rows} rows",
            remedy="give the true size of the vocabulary",
            id="megatron.vocab",
        )
    if true < rows:
        warnings.append(f"the vocabulary of {true} was padded to {rows} rows; the last {rows - true} are cut")
    tree["vocab_size"] = true
    return rows


def padded_vocab(size: int, divisor: int, tensor_parallel: int) -> int:
    """Megatron's padded vocabulary: the next multiple of divisor x tensor-parallel ranks."""
    multiple = divisor * tensor_parallel
    return -(-size // multiple) * multiple


def _check_positions(tree: dict[str, Any], store: MemoryStore, directory: Path, has_args: bool) -> None:
    """Case of checkpoints trained with rotary positions whose arguments do not say so."""
    if (
        POSITIONS in store.names()
        or tree.get("position_embedding_type", "learned_absolute") != "learned_absolute"
    ):
        return
    stated = "position_embedding_type = learned_absolute" if has_args else "there are no arguments"
    raise MindferryError(
        f"{directory}: no {POSITIONS}, and {stated}",
        cause="checkpoints with rotary positions have no such table; their arguments say "
        "position_embedding_type rope or use_rotary_position_embeddings",
        remedy="if the model was trained with rotary positions, assume position_embedding=rope",
        id="megatron.positions",
    )


def _heads(tree: Mapping[str, Any], shards: list[Shard], directory: Path) -> Heads:
    heads = tree.get("num_attention_heads")
    if not isinstance(heads, int) or heads <= 0:
        raise MindferryError(
            f"{directory}: num_attention_heads is {heads!r}, and no tensor tells it",
            remedy="give it: assume num_attention_heads=16 (or what it was)",
            id="megatron.heads",
        )
    groups = tree.get("num_query_groups") or heads
    head_dim = tree.get("kv_channels") or int(tree.get("hidden_size") or 0) // heads
    ranks = max(shard.tensor_rank for shard in shards) + 1
    if not isinstance(groups, int) or groups % ranks or heads % ranks:
        raise MindferryError(
            f"{directory}: {heads} heads in {groups} groups do not divide over {ranks} tensor-parallel ranks",
            id="megatron.heads",
        )
    if shards[0].version < 2.0 and groups != heads:
        raise MindferryError(
            f"{directory}: checkpoint_version {shards[0].version} has no grouped-query attention",
            id="megatron.heads",
        )
    return Heads(heads, groups, int(head_dim), bool(tree.get("swiglu")))


def _family(spec: ModelSpec) -> str:
    if spec.position_embedding == "learned_absolute" and spec.normalization == "LayerNorm":
        return "gpt2"
    if spec.position_embedding == "rope" and spec.normalization == "RMSNorm" and spec.gated_linear_unit:
        return "llama"
    return "megatron"


def _renamed(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"family": _family(spec)})


def _describe(source: Source, args: Mapping[str, Any], shards: list[Shard]) -> None:
    """Decisions for what is no key of the network: the shards and the many other arguments."""
    stages = max(shard.stage for shard in shards) + 1
    ranks = max(shard.tensor_rank for shard in shards) + 1
    if ranks * stages > 1:
        source.warnings.append(f"merged from {ranks} tensor-parallel ranks x {stages} pipeline stages")
    taken = {item.source_key for item in source.decisions}
    rest = sorted(name for name in args if name not in taken)
    if rest:
        source.decisions.append(
            ConfigDecision(
                "args", "", f"{len(rest)} more", None, "dropped: settings of training, data and parallelism"
            )
        )
