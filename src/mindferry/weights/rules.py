"""Weight rules as data, and what they mean for one model: the steps of a conversion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import field_validator, model_validator

from mindferry.errors import MindferryError, nearest
from mindferry.spec import ModelSpec, Spec
from mindferry.weights.target import symbolic_shapes, target_names
from mindferry.weights.tensor_store import TensorStore, listing, same_bits
from mindferry.weights.transforms import WORDS, Chain, Geometry, Shape

HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


class WeightRule(Spec):
    """One line of a family's table. `{}` stands for the layer number.

    Attributes:
        source: the source tensor, or the several that are fused into one target.
        target: the mindformers parameter. The rule counts only when the network has it.
        transform: words of `transforms.WORDS`, applied left to right.
        if_absent: what to fill the target with when no layer of the source has the tensor. Without it a
            missing tensor is an error.
        when: spec fields and values; only such models may lack the tensor.
        because: why the source may lack it.
    """

    source: tuple[str, ...]
    target: str
    transform: tuple[str, ...] = ()
    if_absent: Literal["zeros", "ones"] | None = None
    when: dict[str, bool | int | str] = {}  # noqa: RUF012 - pydantic copies defaults
    because: str = ""

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("transform", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return tuple(value.split()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _closed(self) -> WeightRule:
        unknown = [word for word in self.transform if word not in WORDS]
        if unknown:
            raise ValueError(f"unknown transform {unknown}; known: {sorted(WORDS)}")
        layered = {"{}" in name for name in (*self.source, self.target)}
        if len(layered) != 1:
            raise ValueError("either all names of a rule have {} or none has")
        if bool(self.if_absent) != bool(self.because):
            raise ValueError("if_absent needs a reason in `because`, and only then")
        return self

    def may_be_absent(self, spec: ModelSpec) -> bool:
        """True when a model of `spec` may lack the tensor."""
        return bool(self.if_absent) and all(getattr(spec, f) == v for f, v in self.when.items())


class IgnoreRule(Spec):
    """Source tensors that carry no learned number, with the reason."""

    source: str
    because: str

    def matches(self, name: str, num_layers: int) -> bool:
        """True for a name of this pattern whose layer number exists."""
        pattern = re.escape(self.source).replace(r"\{\}", "([0-9]+)")
        found = re.fullmatch(pattern, name)
        return bool(found) and all(int(number) < num_layers for number in found.groups())  # type: ignore[union-attr]


@dataclass(frozen=True)
class Step:
    """One target parameter: made from `sources` by `chain`, or filled when there are none."""

    sources: tuple[str, ...]
    target: str
    chain: Chain
    source_shapes: tuple[Shape, ...]
    target_shape: Shape
    rule: WeightRule

    @property
    def transform(self) -> str:
        """The words of the rule, or "rename"."""
        return " ".join(self.chain.words) or "rename"


@dataclass(frozen=True)
class BoundRules:
    """The rules of a family, spelled out for one model.

    Attributes:
        steps: one for each parameter of the network, in network order.
        head: source name of the untied head; for a tied model it may be there if it equals `tied_to`.
    """

    geometry: Geometry
    steps: tuple[Step, ...]
    ignored: tuple[IgnoreRule, ...]
    head: str | None
    tied_to: str

    def source_shapes(self) -> dict[str, Shape]:
        """Every source tensor the rules use, and the shape it must have."""
        return {
            name: shape
            for step in self.steps
            for name, shape in zip(step.sources, step.source_shapes, strict=True)
        }


def bind(rules: Iterable[WeightRule], ignored: Iterable[IgnoreRule], geometry: Geometry) -> BoundRules:
    """Spell `rules` out for the model of `geometry`.

    Raises:
        ValueError: the declaration leaves a parameter of the network empty or fills one twice.
    """
    rules = tuple(rules)
    spec = geometry.spec
    shapes = target_names(spec)
    steps: dict[str, Step] = {}
    for rule in rules:
        chain = Chain.of(rule.transform, geometry)
        for number in range(spec.num_layers) if "{}" in rule.target else (0,):
            target = rule.target.replace("{}", str(number))
            if target not in shapes:
                continue
            if target in steps:
                raise ValueError(f"two rules fill {target}")
            sources = tuple(name.replace("{}", str(number)) for name in rule.source)
            needed = tuple(chain.source_shapes([shapes[target]]))
            if len(needed) != len(sources):
                raise ValueError(f"{rule.target}: {len(sources)} sources, the transform takes {len(needed)}")
            steps[target] = Step(sources, target, chain, needed, shapes[target], rule)
    empty = [name for name in shapes if name not in steps]
    if empty:
        raise ValueError(f"no rule fills {listing(empty)}")
    sources_of = {rule.target: rule.source for rule in rules}
    head = sources_of[HEAD][0] if HEAD in sources_of else None
    return BoundRules(
        geometry, tuple(steps[name] for name in shapes), tuple(ignored), head, sources_of[EMBEDDING][0]
    )


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, checked against the tensors that are there.

    Attributes:
        used: steps with sources; `created`: steps whose target is filled (see WeightRule.if_absent).
        ignored: source name -> reason.
    """

    used: tuple[Step, ...]
    created: tuple[Step, ...]
    ignored: dict[str, str]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in network order as far as the names tell."""
        return self.used + self.created


def make_plan(bound: BoundRules, store: TensorStore, key_of: Mapping[str, str] | None = None) -> Plan:
    """Hold `bound` against the tensors of `store`: every tensor used once or ignored, every target filled.

    Args:
        key_of: spec field -> the source's own key and value, for messages about shapes.

    Raises:
        MindferryError: tensors are missing, surplus, of the wrong shape or type, or the head contradicts
            `tie_word_embeddings`; one error that counts all and names the first of each kind.
    """
    present = store.names()
    names = set(present)
    spec = bound.geometry.spec
    optional = {id(step.rule): step.rule for step in bound.steps if step.rule.may_be_absent(spec)}
    absent_rules = {key for key, rule in optional.items() if not (_sources_of(bound, rule) & names)}
    created = tuple(
        replace(step, sources=(), source_shapes=()) for step in bound.steps if id(step.rule) in absent_rules
    )
    used = tuple(step for step in bound.steps if id(step.rule) not in absent_rules)
    wanted = {n: s for step in used for n, s in zip(step.sources, step.source_shapes, strict=True)}
    ignored, surplus = _leftovers(bound, store, [name for name in present if name not in wanted])
    problems = _missing(bound, wanted, present, surplus)
    problems += _surplus(bound, surplus, wanted)
    problems += _misshaped(bound, used, store, names, key_of or {})
    if problems:
        raise MindferryError(
            f"{store.location(present[0]) if present else 'weights'}: the tensors do not fit the "
            "configuration; " + "; ".join(problems),
            remedy="config and weights must come from the same model; nothing was written",
            id="weights.do-not-fit",
        )
    return Plan(used, created, ignored)


def _sources_of(bound: BoundRules, rule: WeightRule) -> set[str]:
    return {name for step in bound.steps if step.rule is rule for name in step.sources}


def _leftovers(bound: BoundRules, store: TensorStore, names: list[str]) -> tuple[dict[str, str], list[str]]:
    ignored: dict[str, str] = {}
    surplus: list[str] = []
    layers = bound.geometry.spec.num_layers
    for name in names:
        reason = next((rule.because for rule in bound.ignored if rule.matches(name, layers)), None)
        if reason is None and name == bound.head and bound.geometry.spec.tie_word_embeddings:
            reason = _tied_head(bound, store)
        if reason is None:
            surplus.append(name)
        else:
            ignored[name] = reason
    return ignored, surplus


def _tied_head(bound: BoundRules, store: TensorStore) -> str | None:
    """The reason to leave the head out, after checking that it equals the embedding bit for bit."""
    head, embedding = bound.head or "", bound.tied_to
    if embedding not in store.names():
        return None
    same = store.shape(head) == store.shape(embedding) and store.dtype(head) == store.dtype(embedding)
    if same:
        same = same_bits(store.read(head), store.read(embedding))
        store.release(head)
        store.release(embedding)
    if not same:
        raise MindferryError(
            f"{store.location(head)}: {head} differs from {embedding}, but the configuration says "
            "tie_word_embeddings = true",
            remedy="set tie_word_embeddings to false in config.json if the head is a matrix of its own",
            id="weights.tied-head-differs",
        )
    return f"equal to {embedding}: the head is tied to the embedding"


def _missing(
    bound: BoundRules, wanted: Mapping[str, Shape], present: list[str], surplus: list[str]
) -> list[str]:
    have = set(present)
    missing = [name for name in wanted if name not in have]
    if missing == [bound.head]:
        return [
            f"{bound.head} is missing, and the configuration says tie_word_embeddings = false "
            "(true would use the embedding as the head)"
        ]
    if not missing:
        return []
    shown = []
    for name in missing[:6]:
        close = nearest(name, surplus, n=1)
        shown.append(name + (f" (nearest: {close[0]})" if close else ""))
    more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
    return [f"{len(missing)} missing: {', '.join(shown)}{more}"]


def _surplus(bound: BoundRules, surplus: list[str], wanted: Mapping[str, Shape]) -> list[str]:
    if not surplus:
        return []
    numbers = re.compile(r"[0-9]+")
    known = {numbers.sub("{}", name) for name in wanted}
    deeper = [name for name in surplus if numbers.sub("{}", name) in known]
    hint = ""
    if deeper:
        found = max(int(number) for name in deeper for number in numbers.findall(name)) + 1
        hint = f" (the file has {found} layers, the configuration says {bound.geometry.spec.num_layers})"
    return [f"{len(surplus)} surplus: {listing(surplus)}{hint}"]


def _misshaped(
    bound: BoundRules,
    used: tuple[Step, ...],
    store: TensorStore,
    names: set[str],
    key_of: Mapping[str, str],
) -> list[str]:
    symbols = symbolic_shapes(bound.geometry.spec)
    wrong, keys, odd = [], [], []
    for step in used:
        for name, shape in zip(step.sources, step.source_shapes, strict=True):
            if name not in names:
                continue
            if store.shape(name) != shape:
                wrong.append(f"{name} found {list(store.shape(name))}, expected {list(shape)}")
                fields = [f for dim in symbols[step.target] for f in dim if not f.isdigit()]
                keys += [key_of.get(field, field) for field in fields]
            elif store.dtype(name).kind not in "fV" or store.dtype(name).itemsize < 2:
                odd.append(f"{name} ({store.dtype(name).name})")
    problems = []
    if wrong:
        follow = ", ".join(dict.fromkeys(keys))
        problems.append(f"{len(wrong)} of another shape: {listing(wrong)} (shapes follow from {follow})")
    if odd:
        problems.append(f"{len(odd)} are no plain floating-point numbers: {listing(odd)}")
    return problems
