"""A run.yaml changed in place: comments, quotes and what is not touched stay as they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindferry.targets.run_directory import write_text


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The content of `path` (a mapping), written back whole at the end of the block; not after an exception.

    The file is expected to have passed `run_yaml.read`.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    content = yaml.load(path.read_text(encoding="utf-8"))
    yield content
    stream = io.StringIO()
    yaml.dump(content, stream)
    write_text(path, stream.getvalue())
