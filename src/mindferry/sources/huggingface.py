"""Reads a Hugging Face model directory: config.json, weights, tokenizer files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import pickled
from mindferry.sources.assemble import Options, assemble
from mindferry.sources.config_json import read_json_object
from mindferry.sources.family import common, family_of
from mindferry.sources.source import Source
from mindferry.weights.tensor_store import SafetensorsStore, TensorStore, check_link

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
# In the order of transformers: the first that is there is taken.
WEIGHT_FILES: dict[str, Callable[[Path], TensorStore]] = {
    "model.safetensors": lambda file: SafetensorsStore([file]),
    "model.safetensors.index.json": SafetensorsStore.open_index,
    "pytorch_model.bin": pickled.open_bin,
    "pytorch_model.bin.index.json": pickled.open_bin_index,
}


def open_huggingface(path: Path, options: Options) -> Source:
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
    warnings: list[str] = []
    return assemble(
        path=path,
        format="huggingface",
        tree=tree,
        family=family,
        shared=common(),
        origin=str(config_file),
        inner=open_weights(path, warnings),
        options=options,
        tokenizer_files=tokenizer_files(path),
        warnings=warnings,
    )


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The usual tokenizer files that are in directory `path`."""
    found = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    for file in found.values():
        check_link(path, file)
    return found


def open_weights(path: Path, warnings: list[str]) -> TensorStore:
    """The weights in directory `path`, whichever of the usual files holds them."""
    present = [name for name in WEIGHT_FILES if (path / name).exists()]
    if not present:
        raise _no_weights(path)
    if len(present) > 1:
        warnings.append(f"{' and '.join(present)} are all there; {present[0]} was taken")
    chosen = path / present[0]
    check_link(path, chosen)
    return WEIGHT_FILES[present[0]](chosen)


def _no_weights(path: Path) -> MindferryError:
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        found = f"found {', '.join(shards[:3])} but no model.safetensors.index.json"
    else:
        found = f"none of {', '.join(WEIGHT_FILES)} is there"
    return UsageError(f"{path}: no weights: {found}", remedy="fetch the weight files", id="source.no-weights")
