"""ModelSpec -> config.json: the family's table read the other way round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindferry.errors import MindferryError
from mindferry.sources.config_json import ABSENT
from mindferry.sources.family import ConfigKey, Family
from mindferry.sources.rope import rope_scaling_json
from mindferry.spec import ModelSpec, RopeScaling

# A source without these biases can still be written with them: zeros change no number.
_FILLABLE = ("add_bias_linear", "add_qkv_bias")
# Settings of training; the exported weights compute the same without them.
_TRAINING_ONLY = ("embedding_dropout", "hidden_dropout", "attention_dropout", "init_method_std")


def widened(spec: ModelSpec, family: Family) -> ModelSpec:
    """`spec` with biases where the family always has them.

    Raises:
        MindferryError: the family cannot hold a model of `spec`; every reason is named.
    """
    wanted = {f: True for f in _FILLABLE if family.fixed.get(f) is True and not getattr(spec, f)}
    spec = spec.model_copy(update=wanted)
    problems = []
    for field, value in family.fixed.items():
        if field not in _TRAINING_ONLY and getattr(spec, field) != value:
            problems.append(f"{field} is {getattr(spec, field)!r} here and always {value!r} there")
    stated = {key.to: key for key in family.config.values()}
    for field, derived in family.derived.items():
        if field in stated or field in wanted or field in _TRAINING_ONLY:
            continue
        base = getattr(spec, derived.field)
        value = base * derived.times if derived.times != 1 else base
        if derived.divided_by is not None:
            value = value / getattr(spec, derived.divided_by)
        if getattr(spec, field) != value:
            problems.append(f"{field} is {getattr(spec, field)!r} here and always {derived.formula()} there")
    covered = {"family", *family.fixed, *family.assumed, *stated, *family.derived, *_TRAINING_ONLY}
    covered |= {"bos_token_id", "eos_token_id"}
    for field, info in ModelSpec.model_fields.items():
        if field not in covered and not info.is_required() and getattr(spec, field) != info.default:
            problems.append(f"{field} is {getattr(spec, field)!r} here and there is no key for it there")
    for name, key in family.config.items():
        if key.values is not None and getattr(spec, key.to) not in key.values.values():
            problems.append(f"{name} cannot say {key.to} = {getattr(spec, key.to)!r}")
    if problems:
        raise MindferryError(
            f"{family.title} cannot hold this model: " + "; ".join(problems),
            remedy="export to the format and family it came from",
            id="export.family",
        )
    return spec


def write_config(
    spec: ModelSpec, family: Family, original: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The configuration for `spec`.

    Args:
        original: decisions of the migration (as migration.json keeps them) when the model came from this
            very format: what still holds is written as it was, dropped keys included.
    """
    tree: dict[str, Any] = {
        row["source_key"]: row["source_value"]
        for row in original
        if row["source_key"] and not str(row["note"]).startswith(ABSENT)
    }
    before = {row["target_key"]: row["target_value"] for row in original if row["target_key"]}
    for name, key in family.config.items():
        value = getattr(spec, key.to)
        plain = value.model_dump() if isinstance(value, RopeScaling) else value
        kept = key.to in before and _equal(before[key.to], plain)
        if kept or (value is None and key.kind == "token_id" and name in tree):
            continue
        for alias in key.aliases:
            tree.pop(alias, None)
        tree[name] = _source_value(key, value)
    tree.setdefault("model_type", family.model_types[0] if family.model_types else None)
    if family.architecture:
        tree.setdefault("architectures", [family.architecture])
    return {name: value for name, value in tree.items() if name != "model_type" or value is not None}


def _equal(before: Any, now: Any) -> bool:
    """Equal values; a rope scaling read back from JSON is a table with the same entries."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return {k: v for k, v in before.items() if v is not None} == {
            k: v for k, v in now.items() if v is not None
        }
    return before == now and type(before) is type(now)


def _source_value(key: ConfigKey, value: Any) -> Any:
    if key.kind == "rope_scaling":
        return rope_scaling_json(value)
    if key.negated:
        return not value
    if key.values is not None:
        return next(name for name, meant in key.values.items() if meant == value)
    return value
