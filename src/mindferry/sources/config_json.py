"""config.json -> ModelSpec, driven by a family's table; every key is accounted for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, did_you_mean
from mindferry.sources.family import Common, ConfigKey, Derived, Family, MustBe
from mindferry.sources.rope import flatten_rope_parameters, read_rope_scaling
from mindferry.spec import ModelSpec, RopeScaling, spec_from
from mindferry.weights.header import no_duplicates

MAX_CONFIG_BYTES = 4 << 20
# Begins the note of a key that the source does not have; the way back leaves such keys out again.
ABSENT = "absent"


@dataclass(frozen=True)
class ConfigDecision:
    """Where one key of the source went.

    Attributes:
        source_key: the source's key, or "" for a value no key states.
        target_key: the ModelSpec field, or "" when the key is dropped or only checked.
        note: why, where it is not a plain copy.
    """

    source_key: str
    target_key: str
    source_value: Any
    target_value: Any
    note: str = ""


@dataclass(frozen=True)
class ConfigReading:
    """The result of reading a configuration."""

    spec: ModelSpec
    decisions: list[ConfigDecision]
    warnings: list[str]

    def key_of(self) -> dict[str, str]:
        """Spec field -> "key = value" of the source, for messages."""
        result: dict[str, str] = {}
        for item in self.decisions:
            if item.target_key and item.source_key:
                result.setdefault(item.target_key, f"{item.source_key} = {json.dumps(item.source_value)}")
        return result


def read_json_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in `path`, of at most `limit` bytes; duplicate keys, NaN literals and huge files are refused."""

    def refuse(literal: str) -> None:
        raise ValueError(f"{literal} is not a JSON number")

    try:
        if path.stat().st_size > limit:
            raise ValueError(f"larger than {limit} bytes")
        tree = json.loads(path.read_text("utf-8"), object_pairs_hook=no_duplicates, parse_constant=refuse)
        if not isinstance(tree, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as err:
        raise MindferryError(
            f"{path}: cannot be read: {err}", remedy="correct or fetch the file again", id="source.bad-json"
        ) from None
    return tree


def read_config(tree: Mapping[str, Any], family: Family, shared: Common, origin: str) -> ConfigReading:
    """Turn the configuration `tree` into a spec, following `family`.

    Raises:
        MindferryError: values are missing, of the wrong kind, or mean something the target cannot do; all
            of them in one message.
    """
    flat, problems = flatten_rope_parameters(tree)
    reader = _Reader(flat, family, shared)
    reader.problems += problems
    values = reader.read()
    if reader.problems:
        raise MindferryError(
            f"{origin}: " + "; ".join(reader.problems),
            remedy=reader.remedy,
            id="source.config",
        )
    spec = spec_from(ModelSpec, values, origin)
    return ConfigReading(spec, reader.decisions, reader.warnings)


class _Reader:
    """Collects values, decisions and problems key by key."""

    def __init__(self, tree: Mapping[str, Any], family: Family, shared: Common) -> None:
        self._tree, self._family = tree, family
        self._must_be = {**shared.must_be, **family.must_be}
        self._dropped = {**shared.dropped, **family.dropped}
        self.values: dict[str, Any] = {"family": family.family, **family.fixed, **family.assumed}
        self.decisions: list[ConfigDecision] = []
        self.warnings: list[str] = []
        self.problems: list[str] = []
        self.remedy = "correct the named keys in config.json"

    def read(self) -> dict[str, Any]:
        for field, value in self._family.fixed.items():
            self._decide("", field, None, value, f"the same for every {self._family.title} model")
        for field, value in self._family.assumed.items():
            self._decide("", field, None, value, "not stated by the source; assumed")
        for name, key in self._family.config.items():
            self._key(name, key)
        for name, key in self._family.config.items():
            if key.when_null is not None and self.values.get(key.to) is None:
                self._null(name, key, key.when_null)
        for field, derived in self._family.derived.items():
            if field not in self.values:
                value = self._derive(derived, field)
                self.values[field] = value
                self._decide("", field, None, value, f"= {derived.formula()}")
        self._check_tokens()
        self._check_rest()
        return self.values

    def _decide(self, source: str, target: str, old: Any, new: Any, note: str = "") -> None:
        if isinstance(new, RopeScaling):  # decisions are plain values, as JSON has them
            new = new.model_dump(exclude_none=True)
        self.decisions.append(ConfigDecision(source, target, old, new, note))

    def _key(self, name: str, key: ConfigKey) -> None:
        given = [alias for alias in (name, *key.aliases) if alias in self._tree]
        if not given:
            if key.required:
                self.problems.append(f"key {name!r} is missing{self._near(name)}")
                return
            self.values[key.to] = self._value(name, key, key.default)
            if key.when_null is None or key.default is not None:
                self._decide(
                    name, key.to, None, self.values[key.to], f"{ABSENT}; the source's default is filled in"
                )
            return
        first = self._tree[given[0]]
        for other in given[1:]:
            if self._tree[other] != first:
                self.problems.append(
                    f"{given[0]} = {first!r} and {other} = {self._tree[other]!r} mean the same thing"
                )
        value = self._value(given[0], key, first)
        self.values[key.to] = value
        for alias in given:
            if value is not None or key.when_null is None:
                note = f"{first!r} means {value}" if key.values and str(first) != str(value) else ""
                self._decide(alias, key.to, self._tree[alias], value, note)

    def _value(self, name: str, key: ConfigKey, raw: Any) -> Any:
        """`raw` as the spec wants it; notes a problem and returns None when it cannot be."""
        if raw is None:
            if key.when_null is None and not key.nullable and key.kind != "token_id":
                self.problems.append(f"{name} is null, expected {key.kind}")
            return None
        if key.kind == "token_id" and isinstance(raw, list) and raw and type(raw[0]) is int:
            self.warnings.append(f"{name} lists {raw}; the first one is used to separate documents")
            raw = raw[0]
        if key.kind == "rope_scaling":
            scaling, problems = read_rope_scaling(name, raw)
            self.problems += problems
            return scaling
        wanted: dict[str, tuple[type, ...]] = {
            "int": (int,), "token_id": (int,), "float": (int, float), "bool": (bool,), "str": (str,),
        }  # fmt: skip
        if type(raw) not in wanted[key.kind]:
            self.problems.append(f"{name}: found {raw!r}, expected {key.kind.replace('_', ' ')}")
            return None
        if key.values is not None:
            if raw not in key.values:
                self.problems.append(f"{name}: {raw!r} is not supported; known: {', '.join(key.values)}")
                return None
            return key.values[raw]
        if key.negated:
            return not raw
        return float(raw) if key.kind == "float" else raw

    def _null(self, name: str, key: ConfigKey, derived: Derived) -> None:
        value = self._derive(derived, key.to)
        self.values[key.to] = value
        how = "null" if name in self._tree else ABSENT
        self._decide(name, key.to, None, value, f"{how} means {derived.formula()}")

    def _derive(self, derived: Derived, field: str) -> Any:
        base = self.values.get(derived.field)
        if derived.times == 1 and derived.divided_by is None:
            return base
        if not isinstance(base, int):
            return None  # its own key is already a problem
        value = base * derived.times
        if derived.divided_by is None:
            return value
        divisor = self.values.get(derived.divided_by)
        if not isinstance(divisor, int) or divisor <= 0:
            return None
        if value % divisor:
            self.problems.append(
                f"{derived.field} {value} is not a multiple of {derived.divided_by} {divisor}, "
                f"so {field} has no value"
            )
            return None
        return value // divisor

    def _check_tokens(self) -> None:
        vocab = self.values.get("vocab_size")
        for name, key in self._family.config.items():
            token = self.values.get(key.to)
            if key.kind != "token_id" or not isinstance(token, int) or not isinstance(vocab, int):
                continue
            if not 0 <= token < vocab:
                self.values[key.to] = None
                self.decisions = [d for d in self.decisions if d.target_key != key.to]
                note = f"outside the vocabulary of {vocab}; left unset"
                how = "" if name in self._tree else f"{ABSENT}; the default {token} is "
                self._decide(name, key.to, self._tree.get(name), None, how + note)
                if name in self._tree:
                    self.warnings.append(f"{name} = {token} is {note}")

    def _check_rest(self) -> None:
        known = set(self._family.config) | {a for k in self._family.config.values() for a in k.aliases}
        for name, rule in self._must_be.items():
            if name in self._tree or rule.same_as is not None:
                self._check_value(name, rule, self._tree.get(name, rule.default))
        for name, value in self._tree.items():
            if name in known or name in self._must_be:
                continue
            if name in self._dropped:
                self._decide(name, "", value, None, f"dropped: {self._dropped[name]}")
            else:
                note = f"unknown to the family {self._family.family}, not carried over"
                self._decide(name, "", value, None, f"dropped: {note}")
                self.warnings.append(f"key {name!r} is {note}{self._near(name, known)}")

    def _check_value(self, name: str, rule: MustBe, value: Any) -> None:
        accepted = list(rule.accept)
        if rule.same_as is not None:
            accepted.append(self.values.get(self._family.config[rule.same_as].to))
        good = any(value == item and type(value) is type(item) for item in accepted)
        if rule.each and isinstance(value, list):
            good = all(item in rule.each for item in value)
        if not good:
            self.problems.append(f"{name} = {json.dumps(value)[:80]}: {rule.because}")
            self.remedy = "this model cannot be carried over as it is"
        elif name in self._tree:
            self._decide(name, "", value, None, "checked: has a value that can be kept")

    def _near(self, name: str, known: Any = None) -> str:
        hint = did_you_mean(name, self._tree if known is None else known)
        return f" - {hint}" if hint else ""
