"""Reads a GPTModel of MindSpore Transformers 1.6 and later: a training YAML and a checkpoint, whole or cut for ranks.

The names are the target's own. What must be found out is how q, k, v and gate, up are packed: 1.6 writes [q | k | v]
and [gate; up], 1.7 and later groups of heads and alternating rows, under the same names and shapes. It is taken from
the YAML's keys, from the release it names, from a model class that only one packing ever had, or from the person;
never guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.assemble import Options, assemble
from mindferry.sources.config_json import read_config
from mindferry.sources.family import Common, Family, declaration, families
from mindferry.sources.huggingface import tokenizer_files
from mindferry.sources.source import Source
from mindferry.sources.yaml_file import read_yaml_object
from mindferry.spec import ModelSpec
from mindferry.weights.tensor_store import MemoryStore, SafetensorsStore, TensorStore, check_link
from mindferry.weights.transforms import TargetLayout

FORMAT = "mindformers-mcore"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREFIX = "mindferry_"  # of the model_type that mindferry registers its families under

# The packing of each release, where no key says it (1.6.0 and 1.7.0's transformer_config.py).
CONTIGUOUS, GROUPED = TargetLayout("flat", "concatenated"), TargetLayout()
RELEASES = {"1.6": CONTIGUOUS, "1.7": GROUPED, "1.8": GROUPED, "1.9": GROUPED}

# The keys that say it, and the packing of the release that brought them (1.6's MLP has no choice).
KEYS = {
    "use_contiguous_weight_layout": CONTIGUOUS,
    "use_contiguous_weight_layout_attention": GROUPED,
    "use_interleaved_weight_layout_mlp": GROUPED,
}

# What a model class of mindformers sets whatever the YAML says, or where it says nothing
# (models/qwen3/configuration_qwen3.py, modeling_qwen3_train.py). Qwen3 trains from 1.7 on only.
CLASSES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "qk_layernorm": True,
        "hidden_act": "silu",
        "layernorm_epsilon": 1e-6,
        "tie_word_embeddings": False,
        "kv_channels": 128,
        "attention_dropout": 0.0,
        "use_contiguous_weight_layout_attention": False,
        "use_interleaved_weight_layout_mlp": True,
    }
}
# mindformers' words -> (the exact function, whether it is gated by its name).
ACTIVATIONS = {"gelu": ("gelu_tanh", None), "silu": ("silu", None), "swiglu": ("silu", True),
               "fusedswiglu": ("silu", True)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """Where the parts lie: the YAML, and the directory of the weights."""

    config: Path
    weights: Path


def find(path: Path) -> Found | None:
    """The YAML and the weights when directory `path` holds such a model, or is a checkpoint of a run."""
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if (run / "run.yaml").is_file():
        configs = [run / "run.yaml"]
    else:
        configs = [file for file in sorted(path.glob("*.yaml")) if file.is_file()]
    places = [place for place in (path, path / "model", path / "checkpoint") if _names_gpt_model(place)]
    return Found(configs[0], places[0]) if len(configs) == 1 and places else None


def _names_gpt_model(place: Path) -> bool:
    """Whether the weights in `place` are a GPTModel's, by the names in one file of them."""
    from mindferry.weights.header import read_header

    if not place.is_dir():
        return False
    files = sorted([*place.glob("*.safetensors"), *place.glob("rank_0/*.safetensors")])
    try:
        return bool(files) and any(
            name.startswith("decoder.layers.") for name in read_header(files[0]).entries
        )
    except (MindferryError, OSError):
        return False


def open_mindformers_mcore(path: Path, found: Found, options: Options) -> Source:
    """The model made of the YAML and the weights.

    Raises:
        UsageError: the YAML is no training YAML, or the packing must be said.
        MindferryError: YAML and weights do not fit each other.
    """
    check_link(found.config.parent, found.config)
    block = _block(found.config)
    origin = f"{found.config}: model_config"
    assumed = dict(options.assume)
    layout, why = packing(block, assumed.pop("mindformers", None), origin)
    family = _packed(declaration("mindformers_mcore"), layout)
    tree, assumed = _tree(block, family, assumed)
    warnings = [f"packing of q, k, v and gate, up: {_words(layout)} ({why})"]
    if (found.config.parent / "checkpoints").is_dir() and found.weights.name == "model":
        warnings.append(
            "the weights before training were taken; give a checkpoints/step-* directory for later ones"
        )
    source = assemble(
        path=path,
        format=FORMAT,
        tree=tree,
        family=family,
        shared=Common(),
        origin=origin,
        inner=_weights(found, layout, warnings),
        options=dataclasses.replace(options, assume=assumed),
        tokenizer_files=_tokenizer(found),
        warnings=warnings,
    )
    name = _family_name(block, source)
    return dataclasses.replace(source, family=name, spec=source.spec.model_copy(update={"family": name}))


def _block(config: Path) -> Mapping[str, Any]:
    model = read_yaml_object(config).get("model")
    block = model.get("model_config") if isinstance(model, Mapping) else None
    if not isinstance(block, Mapping):
        raise UsageError(
            f"{config}: no model.model_config", remedy="give the run's training YAML", id="source.no-config"
        )
    return block


def read_network(config: Path, layout: TargetLayout | None = None) -> tuple[ModelSpec, TargetLayout]:
    """The network of a training YAML, without any weights, and its packing (`layout`, where that is known).

    Raises:
        UsageError: no training YAML, or nothing says the packing.
        MindferryError: it leaves out what changes the network.
    """
    block, origin = _block(config), f"{config}: model_config"
    if layout is None:
        try:
            layout, _ = packing(block, None, origin)
        except UsageError as err:
            keys = "use_contiguous_weight_layout_attention and use_interleaved_weight_layout_mlp"
            raise UsageError(
                err.message, cause=err.cause, remedy=f"write {keys} into the YAML", id=err.id
            ) from None
    family = declaration("mindformers_mcore")
    spec = read_config(_tree(block, family, {})[0], family, Common(), origin).spec
    name = str(block.get("model_type")).removeprefix(PREFIX)
    return spec.model_copy(update={"family": name if name in families() else "model"}), layout


def packing(block: Mapping[str, Any], assumed: Any, origin: str) -> tuple[TargetLayout, str]:
    """(how the weights are packed, what says so).

    The keys tell the release, too: use_contiguous_weight_layout is 1.6's, the other two came with 1.7.

    Args:
        assumed: the release that wrote them, as the person says ("1.6").

    Raises:
        UsageError: nothing says it, an unknown release, or keys of another one.
    """
    stated = {**CLASSES.get(str(block.get("model_type")), {}), **block}
    base, why = _release(assumed if assumed is not None else block.get("mindformers_version"), origin)
    found = [(key, of) for key, of in KEYS.items() if stated.get(key) is not None]
    if len({of for _, of in found} | ({base} if base is not None else set())) > 1:
        raise UsageError(
            f"{origin}: {' and '.join(key for key, _ in found)} {'with ' + why if why else 'together'}: keys of "
            "different releases",
            remedy="give the YAML the checkpoint was trained with",
            id="source.packing",
        )
    if found:
        base = found[0][1]
        why = why or f"{found[0][0]} is there"
    if base is None:
        raise UsageError(
            f"{origin}: neither {' nor '.join(KEYS)} is there",
            cause="mindformers 1.6 packs q, k, v and gate, up one way and 1.7 another, under the same names and shapes",
            remedy="say which release wrote the checkpoint: --assume mindformers=1.6 (or 1.7, 1.8, 1.9)",
            id="source.packing",
        )
    flat = stated.get("use_contiguous_weight_layout_attention", stated.get("use_contiguous_weight_layout"))
    interleaved = stated.get("use_interleaved_weight_layout_mlp")
    return TargetLayout(
        base.qkv if flat is None else ("flat" if flat else "per_group"),
        base.gate_up if interleaved is None else ("interleaved" if interleaved else "concatenated"),
    ), why


def _release(release: Any, origin: str) -> tuple[TargetLayout | None, str]:
    """(the packing of a release, its name); (None, "") when none is given."""
    if release is None:
        return None, ""
    base = RELEASES.get(".".join(str(release).split(".")[:2]))
    if base is None:
        raise UsageError(
            f"{origin}: mindformers {release!r} is none of {', '.join(RELEASES)}",
            remedy="say which release wrote the checkpoint: --assume mindformers=1.6",
            id="source.packing",
        )
    return base, f"mindformers {release}"


def _words(layout: TargetLayout) -> str:
    qkv = "[q | k | v]" if layout.qkv == "flat" else "by group of heads"
    return f"{qkv}; {'[gate; up]' if layout.gate_up == 'concatenated' else 'gate and up alternate'}"


def _packed(family: Family, layout: TargetLayout) -> Family:
    """`family` with the words of `layout` in its weight rules."""
    words = {"qkv_per_group": f"qkv_{layout.qkv}", "gate_up_interleaved": f"gate_up_{layout.gate_up}"}
    rules = tuple(
        rule.model_copy(update={"transform": tuple(words.get(word, word) for word in rule.transform)})
        for rule in family.weights
    )
    return family.model_copy(update={"weights": rules})


def _tree(
    block: Mapping[str, Any], family: Family, assumed: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys with what the model class and the person add; the assumptions that are left."""
    spelled = {alias: name for name, key in family.config.items() for alias in (name, *key.aliases)}
    tree = dict(block)
    present = {spelled.get(name, name) for name in tree}
    for name, value in CLASSES.get(str(block.get("model_type")), {}).items():
        if name not in present and not (name == "hidden_act" and "activation" in present):
            tree[name] = value
    word = tree.pop("hidden_act", None)
    if word is not None and "activation" not in tree:
        tree["activation"], gated = ACTIVATIONS.get(str(word), (word, None))
        if gated:
            tree["gated_linear_unit"] = True
    if "untie_embeddings_and_output_weights" in tree:
        tree.setdefault("tie_word_embeddings", not tree.pop("untie_embeddings_and_output_weights"))
    present = {spelled.get(name, name) for name in tree}
    left = dict(assumed)
    for name, key in family.config.items():
        if key.to in left and name not in present:
            tree[name] = left.pop(key.to)
    return tree, left


def _weights(found: Found, layout: TargetLayout, warnings: list[str]) -> TensorStore:
    """The parameters, whole; an optimizer's tensors beside them are left out."""
    from mindferry.partition import rank_files

    place = found.weights
    if rank_files.is_cut(place):
        return _merged(found, layout, warnings)
    if (place / INDEX).exists():
        store = SafetensorsStore.open_index(place / INDEX)
    else:
        files = [place / SINGLE] if (place / SINGLE).exists() else sorted(place.glob("*.safetensors"))
        for file in files:
            check_link(place, file)
        store = SafetensorsStore(files)
    warnings += store.warnings
    names = [name for name in store.names() if name.startswith(("decoder.", "embedding.", "output_layer."))]
    rest = [
        name for name in store.names() if name not in set(names) and not name.startswith(("adam_", "accu_"))
    ]
    sized = [name for name in rest if len(store.shape(name)) > 1]
    tensors = {n: (store.shape(n), store.dtype(n), lambda n=n: store.read(n)) for n in (*names, *sized)}
    return MemoryStore(tensors, store.location(names[0]))


def _merged(found: Found, layout: TargetLayout, warnings: list[str]) -> TensorStore:
    """The ranks' shares as whole tensors, each put together when it is read."""
    from mindferry.partition import manifest
    from mindferry.partition.opening import Asked, open_checkpoint
    from mindferry.weights.target import target_names

    ours = (found.weights / manifest.NAME).is_file()
    asked = Asked() if ours else Asked(config=found.config, layout=layout)
    opened = open_checkpoint(found.weights, asked)
    checkpoint, spec = opened.checkpoint, opened.network.spec
    if ours and checkpoint.spread.layout != layout:
        raise MindferryError(
            f"{found.weights / manifest.NAME}: another packing than {found.config} says",
            remedy="give the YAML that belongs to the checkpoint",
            id="source.packing",
        )
    warnings.append(f"merged from {checkpoint.spread.grid}")
    tensors = {}
    for name, shape in target_names(spec).items():
        whole = checkpoint.whole(name, shape)
        tensors[name] = (shape, checkpoint.dtype(name), whole)
    return MemoryStore(tensors, found.weights)


def _tokenizer(found: Found) -> dict[str, Path]:
    beside = found.config.parent
    place = beside / "tokenizer" if (beside / "tokenizer").is_dir() else beside
    return tokenizer_files(place)


def _family_name(block: Mapping[str, Any], source: Source) -> str:
    """The Hugging Face family the network is one of: by its name, or the first that can hold it."""
    from mindferry.sources.config_back import widened

    known = families()
    named = str(block.get("model_type")).removeprefix(PREFIX)
    order = [named] if named in known else ["gpt2", "llama", "qwen2", "qwen3", "gpt_neox", "opt"]
    for name in order:
        try:
            if widened(source.spec, known[name]) == source.spec:
                return name
        except MindferryError:
            continue
    raise MindferryError(
        f"{source.path}: no family of {', '.join(order)} is like this network",
        remedy="a new family is one file of declarations; see docs/sources.md",
        id="source.unknown-family",
    )
