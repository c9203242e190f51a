"""One tiny real run for all tests of bench and tune."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import make_run, make_source


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A directory with src/ (transformers) and run/ (migrated)."""
    from mindferry.demo.source import write_corpus

    root = tmp_path_factory.mktemp("tiny")
    make_source(root / "src")
    write_corpus(root / "corpus")
    make_run(root / "src", root / "corpus", root / "run")
    return root
