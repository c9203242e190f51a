"""Tells the formats apart by what is there, and hands over to the reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindferry.errors import UsageError
from mindferry.sources import (
    huggingface,
    litgpt,
    megatron,
    megatron_shards,
    mindformers_gpt2,
    nanogpt,
)
from mindferry.sources.assemble import Options
from mindferry.sources.pickled import load_pickled
from mindferry.sources.source import Source
from mindferry.weights.tensor_store import check_link

KNOWN = (
    "a Hugging Face directory (config.json and weights), a nanoGPT ckpt.pt, a LitGPT directory, a Megatron-LM "
    "checkpoint, or a directory with the YAML and the checkpoint of a mindformers 1.x GPT-2"
)


def open_any(path: Path, options: Options) -> Source:
    """Open `path` with the first reader that recognises it."""
    if path.is_dir():
        for marker, reader in _DIRECTORIES:
            if (path / marker).exists():
                return reader(path, options)
        if megatron_shards.is_checkpoint(path):
            return megatron.open_megatron(path, options)
        legacy = mindformers_gpt2.find(path)
        if legacy is not None:
            return mindformers_gpt2.open_mindformers_gpt2(path, *legacy, options)
        raise UsageError(
            f"{path}: no model found: no config.json and no other known file",
            remedy=f"give {KNOWN}",
            id="source.no-config",
        )
    return _open_file(path, path, options)


def _open_file(path: Path, file: Path, options: Options) -> Source:
    if file.suffix not in (".pt", ".pth", ".ckpt", ".bin"):
        raise UsageError(f"{file}: not a model", remedy=f"give {KNOWN}", id="source.unknown-format")
    tree = load_pickled(file)
    if nanogpt.is_nanogpt(tree):
        return nanogpt.open_nanogpt(path, file, tree, options)
    keys = ", ".join(sorted(map(str, tree))[:8]) if isinstance(tree, dict) else type(tree).__name__
    raise UsageError(
        f"{file}: not a known checkpoint; it holds {keys}",
        remedy=f"give {KNOWN}",
        id="source.unknown-format",
    )


def _nanogpt_directory(path: Path, options: Options) -> Source:
    file = path / nanogpt.FILE
    check_link(path, file)
    return _open_file(path, file, options)


_DIRECTORIES: list[tuple[str, Callable[[Path, Options], Source]]] = [
    # LitGPT keeps the config.json of the model it came from beside its own files.
    (litgpt.FILE, litgpt.open_litgpt),
    ("config.json", huggingface.open_huggingface),
    (nanogpt.FILE, _nanogpt_directory),
]
