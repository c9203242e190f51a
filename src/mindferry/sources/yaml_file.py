"""YAML that came with a checkpoint: plain data, of limited size, every key once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError

MAX_YAML_BYTES = 1 << 20


def read_yaml_object(path: Path) -> dict[str, Any]:
    """The table in `path` (YAML 1.2, so 1e-5 is a number).

    Raises:
        MindferryError: too large, not YAML, a tag or alias in it, a key twice, or no table.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise ValueError(f"larger than {MAX_YAML_BYTES} bytes")
        text = path.read_text("utf-8")
        reader = YAML(typ="safe", pure=True)
        if any(type(event).__name__ == "AliasEvent" for event in reader.parse(text)):
            raise ValueError("it has aliases, which can grow without limit")
        tree = YAML(typ="safe", pure=True).load(text)
        if not isinstance(tree, dict):
            raise ValueError("not a table")
    except (OSError, ValueError, RecursionError, YAMLError) as err:
        lines = str(err).strip().splitlines()
        raise MindferryError(
            f"{path}: cannot be read: {' '.join(line.strip() for line in lines)[:300]}",
            remedy="correct or fetch the file again",
            id="source.bad-yaml",
        ) from None
    return tree
