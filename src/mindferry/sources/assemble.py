"""From a configuration, a declaration and tensors to a Source: the part all readers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError, did_you_mean
from mindferry.sources.config_json import ConfigDecision, ConfigReading, read_config
from mindferry.sources.family import Common, Family
from mindferry.sources.names import CanonicalStore
from mindferry.sources.source import Source
from mindferry.spec import ModelSpec, spec_from
from mindferry.weights.rules import bind, make_plan
from mindferry.weights.tensor_store import TensorStore
from mindferry.weights.transforms import Geometry, TargetLayout


@dataclasses.dataclass(frozen=True)
class Options:
    """What a person may say about a source.

    Attributes:
        layout: how fused matrices are to be packed for mindformers.
        assume: spec fields the source does not state, e.g. {"activation": "gelu_tanh"}.
        check_tensors: hold the tensors against the rules at once; `map` looks at misfits too.
    """

    layout: TargetLayout = dataclasses.field(default_factory=TargetLayout)
    assume: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check_tensors: bool = True


def assume(reading: ConfigReading, values: Mapping[str, Any], origin: str) -> ConfigReading:
    """`reading` with the person's own values in place of those that no key of the source states.

    Raises:
        UsageError: a name is no spec field, or the source states another value itself.
    """
    if not values:
        return reading
    decisions = list(reading.decisions)
    for field, value in values.items():
        if field not in ModelSpec.model_fields:
            hint = did_you_mean(field, ModelSpec.model_fields)
            raise UsageError(f"assumed value {field!r}: no such field; {hint}", id="source.assume")
        stated = next(
            (d for d in decisions if d.target_key == field and d.source_key and d.source_value is not None),
            None,
        )
        if stated is not None and stated.target_value != value:
            raise UsageError(
                f"{origin}: {stated.source_key} = {stated.source_value!r} contradicts the assumed "
                f"{field} = {value!r}",
                remedy="leave the assumption out",
                id="source.assume",
            )
        decisions = [d for d in decisions if d.target_key != field]
        decisions.append(ConfigDecision("", field, None, value, "as assumed by the person who called"))
    spec = spec_from(ModelSpec, {**reading.spec.model_dump(), **values}, origin)
    warnings = [w for w in reading.warnings if not any(w.startswith(f"{field} ") for field in values)]
    return ConfigReading(spec, decisions, warnings)


def _check_layers(spec: ModelSpec, store: TensorStore, origin: str) -> None:
    """Refuse a number of layers that no file could fill, before the rules are spelled out for each of them."""
    if spec.num_layers > len(store.names()):
        raise MindferryError(
            f"{origin}: {spec.num_layers} layers, but the weights have {len(store.names())} tensors in all",
            remedy="config and weights must come from the same model",
            id="weights.do-not-fit",
        )


def assemble(
    *,
    path: Path,
    format: str,
    tree: Mapping[str, Any],
    family: Family,
    shared: Common,
    origin: str,
    inner: TensorStore,
    options: Options,
    tokenizer_files: dict[str, Path] | None = None,
    warnings: list[str] | None = None,
    padded_vocab_size: int | None = None,
) -> Source:
    """Read `tree` by the rules of `family` and bind its weight rules to the tensors of `inner`."""
    reading = assume(read_config(tree, family, shared, origin), options.assume, origin)
    store = CanonicalStore(inner, family.prefixes)
    _check_layers(reading.spec, store, origin)
    geometry = Geometry(reading.spec, options.layout, padded_vocab_size)
    bound = bind(family.weights, family.ignored, geometry)
    key_of = reading.key_of()
    if options.check_tensors:
        make_plan(bound, store, key_of)
    return Source(
        path=path,
        format=format,
        family=family.family,
        spec=reading.spec,
        decisions=reading.decisions,
        warnings=[*reading.warnings, *(warnings or ()), *store.warnings],
        tensors=store,
        rules=bound,
        tokenizer_files=tokenizer_files or {},
        key_of=key_of,
        original_names=store.original,
        declaration=family,
    )
