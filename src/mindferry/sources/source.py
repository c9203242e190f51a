"""What every reader gives back: a Source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindferry.sources.config_json import ConfigDecision
from mindferry.sources.family import Family
from mindferry.spec import ModelSpec
from mindferry.weights.rules import BoundRules
from mindferry.weights.tensor_store import TensorStore


@dataclass
class Source:
    """A model somebody trained, read but not changed.

    Attributes:
        path: the directory or file as given.
        format: "huggingface", ...
        family: name of the rules, e.g. "gpt2".
        decisions: where every key of the configuration went, and the defaults that were filled in.
        warnings: what a person should look at; nothing here stops a migration.
        tensors: the weights under the names the rules use (wrappers and optional prefixes removed).
        tokenizer_files: file name -> path, for those that are there.
        rules: the weight rules, spelled out for this model.
        key_of: spec field -> "key = value" of the source's configuration.
        original_names: name in `tensors` -> name in the file, where they differ.
        declaration: the family's tables, for the way back.
    """

    path: Path
    format: str
    family: str
    spec: ModelSpec
    decisions: list[ConfigDecision]
    warnings: list[str]
    tensors: TensorStore
    rules: BoundRules
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    key_of: Mapping[str, str] = field(default_factory=dict)
    original_names: Mapping[str, str] = field(default_factory=dict)
    declaration: Family | None = None

    def original(self, name: str) -> str:
        """The tensor's name in the file."""
        return self.original_names.get(name, name)
