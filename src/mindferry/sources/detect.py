"""Tells the formats apart by what is there, and hands over to the reader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from mindferry.errors import UsageError
from mindferry.sources import (
    huggingface,
    litgpt,
    megatron,
    megatron_shards,
    mindformers_gpt2,
    mindformers_mcore,
    nanogpt,
)
from mindferry.sources.assemble import Options
from mindferry.sources.pickled import load_pickled
from mindferry.sources.source import Source
from mindferry.weights.tensor_store import check_link

KNOWN = (
    "a Hugging Face directory (config.json and weights), a nanoGPT ckpt.pt, a LitGPT directory, a Megatron-LM "
    "checkpoint, or a directory with the training YAML and the checkpoint of a mindformers GPT-2 (1.x) or GPTModel "
    "(1.6 and later)"
)


Reader = Callable[[Path, Options], Source]


def open_any(path: Path, options: Options) -> Source:
    """Open `path` with the first reader that recognises it."""
    if path.is_dir():
        readers = _readers(path)
        if not readers:
            raise UsageError(
                f"{path}: no model found: no config.json and no other known file",
                remedy=f"give {KNOWN}",
                id="source.no-config",
            )
        source = readers[0][1](path, options)
        if len(readers) > 1:
            others = " and ".join(title for title, _ in readers[1:])
            source.warnings.insert(0, f"{path} holds {readers[0][0]}, which was taken, and {others}")
        return source
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


def _mcore(found: mindformers_mcore.Found, path: Path, options: Options) -> Source:
    return mindformers_mcore.open_mindformers_mcore(path, found, options)


def _readers(path: Path) -> list[tuple[str, Reader]]:
    """(what directory `path` holds, how to read it) for each known format; the first is to be taken."""
    found: list[tuple[str, Reader]] = []
    if (path / litgpt.FILE).exists():
        # LitGPT keeps the config.json of the model it came from beside its own files.
        found.append(("a LitGPT checkpoint", litgpt.open_litgpt))
    if (path / "config.json").exists() and not found:
        found.append(("a Hugging Face model", huggingface.open_huggingface))
    if (path / nanogpt.FILE).exists():
        found.append(("a nanoGPT checkpoint", _nanogpt_directory))
    if megatron_shards.is_checkpoint(path):
        found.append(("a Megatron-LM checkpoint", megatron.open_megatron))
    mcore = mindformers_mcore.find(path) if not found else None
    if mcore is not None:
        opener = functools.partial(_mcore, mcore)
        found.append(("a GPTModel of mindformers", opener))
    legacy = mindformers_gpt2.find(path) if not found else None
    if legacy is not None:
        config, weights = legacy
        found.append(
            (
                "a GPT-2 of mindformers 1.x",
                lambda p, o: mindformers_gpt2.open_mindformers_gpt2(p, config, weights, o),
            )
        )
    return found
