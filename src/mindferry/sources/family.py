"""A family of models as data: the schema of families/*.yaml and formats/*.yaml, and their one reader."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Literal

from pydantic import Field, model_validator

from mindferry.errors import MindferryError
from mindferry.spec import ModelSpec, Spec
from mindferry.weights.rules import IgnoreRule, WeightRule

HUGGING_FACE = "_huggingface"


class Derived(Spec):
    """A value computed from fields of the spec: field * times // divided_by."""

    field: str
    times: int = 1
    divided_by: str | None = None

    def formula(self) -> str:
        """The value in words, e.g. `4 x hidden_size`."""
        text = f"{self.times} x {self.field}" if self.times != 1 else self.field
        return f"{text} / {self.divided_by}" if self.divided_by else text


class ConfigKey(Spec):
    """One key of the source's configuration and the spec field it sets.

    Attributes:
        aliases: other names of the same key; giving two with different values is an error.
        default: what the source framework uses when the key is absent. Without one the key is required.
        when_null: the value that null stands for; null is refused without it (null default apart).
        values: source value -> spec value; any other value is an error.
        negated: the spec field is the opposite of this key.
    """

    to: str
    kind: Literal["int", "float", "bool", "str", "token_id", "rope_scaling"]
    aliases: tuple[str, ...] = ()
    default: Any = None
    required: bool = False
    when_null: Derived | None = None
    nullable: bool = False
    values: dict[str, str | bool] | None = None
    negated: bool = False


class MustBe(Spec):
    """A key that would change the numbers in a way the target cannot follow.

    Attributes:
        accept: values that can be kept.
        each: for a list: values that each of its elements may have.
        same_as: another key whose value is accepted too.
        default: what the source uses when the key is absent; checked only together with `same_as`.
    """

    accept: tuple[Any, ...] = ()
    each: tuple[Any, ...] = ()
    same_as: str | None = None
    default: Any = None
    because: str


class Common(Spec):
    """Keys that every family of a format shares."""

    must_be: dict[str, MustBe] = Field(default_factory=dict)
    dropped: dict[str, str] = Field(default_factory=dict)


class Family(Common):
    """Everything that is particular to one family.

    A file may start from another with `extends: NAME`: tables are merged, null removes an entry, and a
    weight rule replaces the one with the same target.

    Attributes:
        model_types: values of `model_type` that mean this family.
        prefixes: prefixes of tensor names that may be there or not.
        architecture: the class transformers writes, for the way back.
        fixed: spec fields that are the same for every model of the family.
        assumed: spec fields the format does not state, and what is taken unless the person says otherwise.
        config: source key -> spec field.
        derived: spec fields without a key of their own.
        must_be: keys that are refused unless they have an accepted value; dropped: keys and why they go.
        weights, ignored: see mindferry.weights.rules.
    """

    family: str
    title: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    architecture: str = ""
    fixed: dict[str, Any] = Field(default_factory=dict)
    assumed: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, ConfigKey]
    derived: dict[str, Derived] = Field(default_factory=dict)
    weights: tuple[WeightRule, ...]
    ignored: tuple[IgnoreRule, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> Family:
        known = ModelSpec.model_fields
        named = [key.to for key in self.config.values()] + [*self.fixed, *self.assumed, *self.derived]
        for field in named:
            if field not in known:
                raise ValueError(f"{field} is not a field of ModelSpec")
        twice = {field for field in named if named.count(field) > 1 and field not in self.derived}
        if twice:
            raise ValueError(f"set by more than one key: {sorted(twice)}")
        return self


@functools.cache
def families() -> dict[str, Family]:
    """All families that ship with the package, by name."""
    result = {}
    for entry in sorted(resources.files(__package__).joinpath("families").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml") and not entry.name.startswith("_"):
            family = Family(**_load(entry.name))
            if f"{family.family}.yaml" != entry.name:
                raise ValueError(f"{entry.name}: declares family {family.family!r}")
            result[family.family] = family
    return result


@functools.cache
def common(name: str = HUGGING_FACE) -> Common:
    """The keys all families of a format share."""
    return Common(**_load(f"{name}.yaml"))


@functools.cache
def declaration(name: str) -> Family:
    """The tables of a format that is not Hugging Face's (`formats/NAME.yaml`)."""
    return Family(**_load(f"{name}.yaml", "formats"))


def family_of(model_type: object, origin: str) -> Family:
    """The family whose `model_types` has `model_type`.

    Raises:
        MindferryError: no family has it; the message lists what is supported.
    """
    table = {name: family for family in families().values() for name in family.model_types}
    if isinstance(model_type, str) and model_type in table:
        return table[model_type]
    found = f"model_type is {model_type!r}" if model_type is not None else "there is no model_type"
    reason = _load("_refused.yaml").get(model_type) if isinstance(model_type, str) else None
    if reason:
        raise MindferryError(
            f"{origin}: {found}: {reason}",
            remedy=f"supported are {', '.join(sorted(table))}",
            id="source.refused-family",
        )
    raise MindferryError(
        f"{origin}: {found}; supported: {', '.join(sorted(table))}",
        remedy="a new family is one file of declarations; see docs/sources.md",
        id="source.unknown-family",
    )


def _load(name: str, folder: str = "families") -> dict[str, Any]:
    from ruamel.yaml import YAML

    text = resources.files(__package__).joinpath(folder).joinpath(name).read_text("utf-8")
    tree = YAML(typ="safe", pure=True).load(text)
    base = tree.pop("extends", None)
    return _merged(_load(f"{base}.yaml", folder), tree) if base else tree


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = {**base, **over}
    for table in ("fixed", "config", "derived", "must_be", "dropped"):
        both = {**base.get(table, {}), **over.get(table, {})}
        result[table] = {key: value for key, value in both.items() if value is not None}
    replaced = {rule["target"] for rule in over.get("weights", ())}
    kept = [rule for rule in base.get("weights", ()) if rule["target"] not in replaced]
    result["weights"] = [*kept, *over.get("weights", ())]
    result["ignored"] = [*base.get("ignored", ()), *over.get("ignored", ())]
    return result
