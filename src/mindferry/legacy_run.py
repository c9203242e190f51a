"""A freshly migrated run becomes one for mindformers 1.3.2: gpt2.yaml, gpt2.ckpt, rows of seq_length + 1 tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindferry.data import legacy_rows
from mindferry.errors import MindferryError, UsageError
from mindferry.spec import ModelSpec, Recipe
from mindferry.targets import mindformers_132 as legacy
from mindferry.targets.run_directory import write_text

NOTES = (
    "mindformers 1.3.2 computes GPT-2 in float16: expect its rounding against the source",
    "not run on hardware; what was checked is in docs/migrate.md",
)


def check_model(spec: ModelSpec) -> None:
    """Refuse, before anything is written, what the GPT-2 of 1.3.2 cannot be.

    Raises:
        MindferryError: epsilon, an untied head, another activation, norm or position embedding; all are named.
        UsageError: an MLP that is no whole multiple of hidden_size.
    """
    from mindferry.sources.config_back import widened
    from mindferry.sources.family import declaration

    try:
        widened(spec, declaration("mindformers_gpt2"))
    except MindferryError as err:
        raise MindferryError(err.message, remedy="stay with the current mindformers", id=err.id) from None
    legacy.check_ratio(spec)


def check_recompute(config: dict[str, Any]) -> None:
    """Refuse recomputation of single layers or operators, whose names are others there.

    Raises:
        UsageError: recompute or select_recompute is more than yes or no.
    """
    for key in ("recompute", "select_recompute"):
        if not isinstance(config[key], bool):
            raise UsageError(
                f"--target {legacy.TARGET}: {key}: found {config[key]}, expected yes or no for all layers",
                remedy="choose --recompute full or none",
                id="legacy.recompute",
            )


def rewrite(
    run: Path,
    spec: ModelSpec,
    recipe: Recipe,
    content: dict[str, Any],
    steps_per_epoch: int,
    progress: Callable[[int, str], None] | None = None,
) -> tuple[list[dict[str, str]], list[str]]:
    """Turn the run in the staging directory `run` into one for 1.3.2.

    Returns:
        (a row for each parameter of 1.3.2: name, sha256; warnings).
    """
    warnings = [*legacy.check_recipe(recipe), *NOTES]
    check_recompute(content["recompute_config"])
    made = legacy.build(spec, recipe, steps_per_epoch=steps_per_epoch, recompute=content["recompute_config"])
    write_text(run / legacy.YAML, legacy.dump(made))
    rows = _write_weights(run, spec, progress)
    shutil.rmtree(run / "model")
    (run / "run.yaml").unlink()
    _rewrite_data(run / "data", recipe.seq_length)
    return rows, warnings


def _write_weights(
    run: Path, spec: ModelSpec, progress: Callable[[int, str], None] | None
) -> list[dict[str, str]]:
    """gpt2.ckpt from the weights under today's names, by the same rules as `export`."""
    from mindferry.sources.config_back import widened
    from mindferry.sources.family import declaration
    from mindferry.sources.huggingface import open_weights
    from mindferry.weights.backward import backward_items
    from mindferry.weights.ckpt import write_ckpt
    from mindferry.weights.rules import bind
    from mindferry.weights.transforms import Geometry

    family = declaration("mindformers_gpt2")
    bound = bind(family.weights, family.ignored, Geometry(widened(spec, family)))
    items, _ = backward_items(bound, open_weights(run / "model", []))
    digests = write_ckpt(items, run / legacy.WEIGHTS, progress)
    return [{"parameter": item.name, "sha256": digests[item.name]} for item in items]


def _rewrite_data(data: Path, seq_length: int) -> None:
    """data/train.mindrecord with the columns of 1.3.2 in place of today's."""
    aside = data / "legacy"
    aside.mkdir()
    legacy_rows.rewrite(data / "train.mindrecord", aside / "train.mindrecord", seq_length)
    for name in ("train.mindrecord", "train.mindrecord.db"):
        (aside / name).replace(data / name)
    aside.rmdir()
