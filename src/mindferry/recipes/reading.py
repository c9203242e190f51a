"""Which kind of recipe a file is."""

from __future__ import annotations

from pathlib import Path

from mindferry.errors import UsageError
from mindferry.recipes.stated import Stated

MAX_TEXT_BYTES = 1 << 20


def read_recipe(path: Path) -> Stated:
    """The recipe in `path`, by its name's ending.

    .json, .yaml, .yml, training_args.bin: transformers' TrainingArguments. .py: nanoGPT. .sh: a launch script
    of Megatron-LM. .pt: the arguments in a Megatron-LM checkpoint.

    Raises:
        UsageError: no such file, an unknown ending, or settings that cannot be carried over.
        MindferryError: a damaged or unsafe file.
    """
    from mindferry.recipes import huggingface, megatron, nanogpt

    if not path.is_file():
        raise UsageError(f"--recipe: {path}: no such file", id="recipe.missing")
    if path.suffix == ".pt":
        return megatron.read(path, megatron.checkpoint_arguments(path))
    readers = {
        ".json": huggingface.read,
        ".yaml": huggingface.read,
        ".yml": huggingface.read,
        ".bin": huggingface.read,
        ".py": nanogpt.read,
        ".sh": megatron.read,
    }
    if path.suffix not in readers:
        raise UsageError(
            f"--recipe: {path}: found {path.suffix or 'no ending'!r}, expected one of "
            f"{', '.join((*readers, '.pt'))}",
            remedy="see docs/recipe.md for the kinds of recipes",
            id="recipe.kind",
        )
    if path.suffix != ".bin" and path.stat().st_size > MAX_TEXT_BYTES:
        raise UsageError(f"--recipe: {path}: larger than {MAX_TEXT_BYTES} bytes", id="recipe.size")
    if path.suffix not in (".bin", ".json", ".yaml", ".yml"):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as err:
            raise UsageError(f"--recipe: {path}: not UTF-8 text: {err}", id="recipe.syntax") from None
    return readers[path.suffix](path)
