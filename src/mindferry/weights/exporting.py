"""A run or one of its checkpoints -> the format other frameworks load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindferry.errors import MindferryError, UsageError
from mindferry.weights import export_megatron
from mindferry.weights.backward import backward_items
from mindferry.weights.conversion import MAX_SHARD_BYTES
from mindferry.weights.dtypes import DTYPES, cast
from mindferry.weights.export_megatron import DIVISOR, Cut, arguments
from mindferry.weights.rules import BoundRules, bind
from mindferry.weights.tensor_store import TensorStore
from mindferry.weights.transforms import Geometry, TargetLayout
from mindferry.weights.writer import Item, write_checkpoint

if TYPE_CHECKING:
    from mindferry.sources.family import Family
    from mindferry.spec import ModelSpec

FORMATS = ("hf", "nanogpt", "megatron", "mindformers-1.3.2")
# Formats that are not Hugging Face's: the declaration to write by, and the name of the format as a source.
DECLARATIONS = {
    "nanogpt": ("nanogpt", "nanogpt"),
    "megatron": ("megatron", "megatron"),
    "mindformers-1.3.2": ("mindformers_gpt2", "mindformers-1.x"),
}
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Trained:
    """A model to export.

    Attributes:
        weights: directory with model.safetensors or its shards.
        step: optimizer steps done; 0 for the migrated weights themselves.
        migration: the run's migration.json.
    """

    run: Path
    weights: Path
    step: int
    spec: ModelSpec
    layout: TargetLayout
    migration: dict[str, Any]

    def store(self) -> TensorStore:
        """The parameters."""
        from mindferry.sources.huggingface import open_weights

        return open_weights(self.weights, [])


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        created: parameters that were filled with zeros, since the run has none.
    """

    out: str
    format: str
    family: str
    weights: str
    step: int
    tensors: int
    bytes: int
    created: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def locate(path: Path, checkpoint: str | None = None) -> Trained:
    """The model meant by `path`: a run (its newest complete checkpoint, or the migrated weights when it has
    not trained), or a checkpoint directory inside a run.

    Args:
        checkpoint: name of a checkpoint of the run, or "none" for the migrated weights.
    """
    from mindferry.targets import model_keys, run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import checkpoints

    root = path.resolve()
    if not (root / "run.yaml").is_file() and (root.parent.parent / "run.yaml").is_file():
        root, checkpoint = root.parent.parent, root.name
    run = RunDirectory.open(root)
    weights, step = run.model, 0
    if checkpoint is None:
        newest, _ = checkpoints.newest(run.checkpoints)
        if newest is not None:
            weights, step = newest.model, newest.step
    elif checkpoint != "none":
        chosen = run.checkpoints / checkpoint
        if Path(checkpoint).name != checkpoint or not chosen.is_dir():
            found = sorted(p.name for p in run.checkpoints.glob("step-*"))
            raise UsageError(
                f"{path}: no checkpoint {checkpoint!r}; found: {', '.join(found) or 'none'}",
                id="export.no-checkpoint",
            )
        problem = checkpoints.problem_with(chosen)
        if problem:
            raise MindferryError(f"{chosen}: incomplete: {problem}", id="export.damaged-checkpoint")
        weights, step = chosen / "model", int(checkpoint.rpartition("-")[2])
    config, _ = model_keys.canonical(run_yaml.read(run.yaml)["model"]["model_config"], str(run.yaml))
    migration = _migration(run.migration)
    layout = TargetLayout(
        "flat" if config.get("use_contiguous_weight_layout_attention") else "per_group",
        "interleaved" if config.get("use_interleaved_weight_layout_mlp", True) else "concatenated",
    )
    return Trained(root, weights, step, _spec(migration, config, str(run.yaml)), layout, migration)


def _migration(file: Path) -> dict[str, Any]:
    from mindferry.sources.config_json import read_json_object

    tree = read_json_object(file, limit=1 << 28)
    for key in ("model", "source", "config", "weights"):
        if key not in tree:
            raise MindferryError(f"{file}: no {key!r} in it", remedy="migrate again", id="export.migration")
    return tree


def _spec(migration: dict[str, Any], config: dict[str, Any], origin: str) -> ModelSpec:
    """The migrated spec; where run.yaml says otherwise (a changed dropout), run.yaml holds."""
    from mindferry.spec import ModelSpec, spec_from

    own = {k: v for k, v in config.items() if k in ModelSpec.model_fields and v is not None}
    return spec_from(ModelSpec, {**migration["model"], **own}, origin)


def export(
    trained: Trained,
    to: str,
    out: Path,
    *,
    dtype: str | None = None,
    cut: Cut | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write `trained` into the new directory `out` as `to`, one of FORMATS.

    Args:
        cut: over how many ranks and stages a Megatron checkpoint is cut; 1 x 1 by default.
        dtype: of all tensors; without it each has the type it had in the source, so that a model that was
            not trained comes back bit for bit.

    Raises:
        UsageError: unknown format or dtype, or `out` is taken.
        MindferryError: that format cannot hold the model; nothing is written.
    """
    from mindferry.sources.megatron import padded_vocab
    from mindferry.targets.run_directory import staged

    if to not in FORMATS:
        raise UsageError(f"format {to!r} is not one of {', '.join(FORMATS)}", id="export.format")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", id="export.dtype")
    family, same = _family(trained, to)
    cut = cut or Cut()
    padded = padded_vocab(trained.spec.vocab_size, DIVISOR, cut.tensor_parallel) if to == "megatron" else None
    bound, spec = _bound(trained, family, padded)
    if to == "megatron":
        cut.check(spec)
        arguments(spec, cut, padded or 0)
    names = _Names(trained, family, bound, same)
    items, created = backward_items(
        bound, trained.store(), name_of=names.of, dtype_of=lambda name: dtype or names.dtype(name)
    )
    report = ExportReport(
        out=str(out),
        format=to,
        family=family.family,
        weights=str(trained.weights),
        step=trained.step,
        tensors=len(items),
        bytes=sum(item.nbytes for item in items),
        created=created,
    )
    with staged(out) as staging:
        if to == "hf":
            _write_hf(trained, spec, family, same, items, staging, max_shard_bytes, progress)
        elif to == "nanogpt":
            _write_nanogpt(trained, spec, items, staging, progress, report)
        elif to == "megatron":
            export_megatron.write(items, spec, cut, padded or 0, trained.step, staging, progress)
            if padded != spec.vocab_size:
                report.warnings.append(
                    f"the vocabulary of {spec.vocab_size} was padded to {padded} rows with zeros"
                )
        else:
            _write_mindformers(spec, items, staging, progress, report)
    return report


def _family(trained: Trained, to: str) -> tuple[Family, bool]:
    """(the declaration to write by, whether the model came from this very format)."""
    from mindferry.sources.family import declaration, families

    origin = trained.migration["source"]
    if to in DECLARATIONS:
        name, format = DECLARATIONS[to]
        return declaration(name), origin["format"] == format
    known = families()
    if trained.spec.family not in known:
        raise MindferryError(
            f"no Hugging Face family {trained.spec.family!r}; known: {', '.join(known)}", id="export.family"
        )
    return known[trained.spec.family], origin["format"] == "huggingface"


def _bound(trained: Trained, family: Family, padded: int | None) -> tuple[BoundRules, ModelSpec]:
    from mindferry.sources.config_back import widened

    spec = widened(trained.spec, family)
    return bind(family.weights, family.ignored, Geometry(spec, trained.layout, padded)), spec


class _Names:
    """Names and types the tensors had in the source, where the model came from this very format."""

    def __init__(self, trained: Trained, family: Family, bound: BoundRules, same: bool) -> None:
        from mindferry.sources.names import canonical

        rows = trained.migration["weights"].get("used", []) if same else []
        self._dtypes = {canonical(row["source"], family.prefixes): row["source_dtype"] for row in rows}
        self._bare = bool(rows) and not any(_has_prefix(row["source"], family) for row in rows)
        self._prefix = family.prefixes[0] if family.prefixes and not self._bare else ""
        self._head = bound.head

    def of(self, name: str) -> str:
        return name if name == self._head else self._prefix + name

    def dtype(self, name: str) -> str | None:
        found = self._dtypes.get(name)
        return found if found in DTYPES else None


def _has_prefix(name: str, family: Family) -> bool:
    from mindferry.sources.names import canonical

    return any(canonical(name).startswith(prefix) for prefix in family.prefixes)


def _write_hf(
    trained: Trained,
    spec: ModelSpec,
    family: Family,
    same: bool,
    items: list[Item],
    out: Path,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    from mindferry.sources.config_back import write_config

    config = write_config(spec, family, trained.migration["config"] if same else ())
    kinds = {item.dtype.name for item in items}
    for key in [k for k in ("dtype", "torch_dtype") if k in config] or ["torch_dtype"]:
        config[key] = kinds.pop() if len(kinds) == 1 else "float32"
        kinds = {config[key]}
    text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    # transformers refuses files that do not state the format "pt".
    write_checkpoint(
        items, out, max_shard_bytes=max_shard_bytes, metadata={"format": "pt"}, progress=progress
    )
    tokenizer = trained.run / "tokenizer"
    if tokenizer.is_dir():
        for file in sorted(tokenizer.iterdir()):
            if file.is_file():
                shutil.copyfile(file, out / file.name)


def _write_nanogpt(
    trained: Trained,
    spec: ModelSpec,
    items: list[Item],
    out: Path,
    progress: Progress | None,
    report: ExportReport,
) -> None:
    """ckpt.pt as train.py saves it, but without an optimizer: enough for sample.py."""
    from mindferry.sources.family import declaration
    from mindferry.sources.pickled import import_torch

    torch = import_torch(out / "ckpt.pt")
    state: dict[str, Any] = {}
    for item in items:
        array = cast(item.make(), item.dtype)
        if array.dtype.kind == "V":  # numpy knows bfloat16 only as words
            state[item.name] = torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
        else:
            state[item.name] = torch.from_numpy(array.copy())
        if progress is not None:
            progress(item.nbytes, item.name)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    tree = {
        "model": state,
        "model_args": {name: getattr(spec, key.to) for name, key in declaration("nanogpt").config.items()},
        "iter_num": trained.step,
        "best_val_loss": float("inf"),
        "config": {},
    }
    torch.save(tree, out / "ckpt.pt")
    report.warnings.append("ckpt.pt has no optimizer: sample.py loads it, train.py's resume does not")
    if spec.activation != "gelu_erf":
        report.warnings.append(
            f"the model uses {spec.activation}, and nanoGPT's nn.GELU() is gelu_erf; change it in model.py"
        )


def _write_mindformers(
    spec: ModelSpec, items: list[Item], out: Path, progress: Progress | None, report: ExportReport
) -> None:
    """The weights of a mindformers 1.3.2 GPT-2 (it loads .ckpt only) and the `model` block of its YAML."""
    from mindferry.targets import mindformers_132 as legacy
    from mindferry.weights.ckpt import write_ckpt

    block = legacy.model_block(spec, spec.max_position_embeddings)
    write_ckpt(items, out / legacy.WEIGHTS, progress)
    (out / legacy.YAML).write_text(legacy.dump({"model": block}), encoding="utf-8")
    report.warnings.append(
        "mindformers 1.3.2 computes GPT-2 in float16 whatever compute_dtype says, and masks every eos_token_id "
        "out of attention and loss where its data has no attention_mask"
    )


__all__ = ["FORMATS", "Cut", "ExportReport", "Trained", "export", "locate"]
