"""Reads a Hugging Face model directory: config.json, safetensors, tokenizer files."""

from __future__ import annotations

from pathlib import Path

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.config_json import read_config, read_json_object
from mindferry.sources.family import common, family_of
from mindferry.sources.names import CanonicalStore
from mindferry.sources.source import Source
from mindferry.weights.rules import bind, make_plan
from mindferry.weights.tensor_store import SafetensorsStore, TensorStore, check_link
from mindferry.weights.transforms import Geometry, TargetLayout

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_huggingface(path: Path, layout: TargetLayout | None = None) -> Source:
    """Open the directory `path`; reads headers and, for a tied head that is stored, the head.

    Raises:
        UsageError: `path` is not a directory with a config.json and weights.
        MindferryError: the files contradict each other or cannot be carried over.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise UsageError(
            f"{path}: no config.json",
            remedy="give the directory that save_pretrained wrote",
            id="source.no-config",
        )
    check_link(path, config_file)
    tree = read_json_object(config_file)
    family = family_of(tree.get("model_type"), str(config_file))
    reading = read_config(tree, family, common(), str(config_file))
    warnings = list(reading.warnings)
    inner = open_weights(path, warnings)
    store = CanonicalStore(inner, family.prefixes)
    bound = bind(family.weights, family.ignored, Geometry(reading.spec, layout or TargetLayout()))
    key_of = reading.key_of()
    make_plan(bound, store, key_of)
    return Source(
        path=path,
        format="huggingface",
        family=family.family,
        spec=reading.spec,
        decisions=reading.decisions,
        warnings=warnings + store.warnings,
        tensors=store,
        rules=bound,
        tokenizer_files=_tokenizer_files(path),
        key_of=key_of,
        original_names=store.original,
    )


def _tokenizer_files(path: Path) -> dict[str, Path]:
    found = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    for file in found.values():
        check_link(path, file)
    return found


def open_weights(path: Path, warnings: list[str]) -> TensorStore:
    """The weights in directory `path`, whichever of the usual files holds them."""
    present = [name for name in (SINGLE, INDEX) if (path / name).exists()]
    if not present:
        raise _no_weights(path)
    if len(present) > 1:
        warnings.append(f"{path}: both {SINGLE} and {INDEX} are there; {SINGLE} was taken")
    chosen = path / present[0]
    check_link(path, chosen)
    return SafetensorsStore([chosen]) if present[0] == SINGLE else SafetensorsStore.open_index(chosen)


def _no_weights(path: Path) -> MindferryError:
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        found = f"found {', '.join(shards[:3])} but no {INDEX}"
    else:
        found = f"no {SINGLE} and no {INDEX}"
    return UsageError(f"{path}: no weights: {found}", remedy="fetch the weight files", id="source.no-weights")
