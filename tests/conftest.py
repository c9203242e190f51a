"""Sources and runs that several test rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .support import make_run, make_source

# mindformers writes ./output/log while it is imported; keep it out of the checkout.
os.environ.setdefault("LOG_MF_PATH", "/tmp/mindferry-tests-mindformers-log")
os.environ.setdefault("GLOG_v", "3")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few documents of real English text."""
    from mindferry.demo.source import corpus_texts

    directory = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(corpus_texts()[:6]):
        (directory / f"{number}.txt").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer source with tanh GELU and a tied head."""
    return make_source(tmp_path_factory.mktemp("source") / "gpt2")


@pytest.fixture
def run(source: Path, corpus: Path, tmp_path: Path) -> Path:
    """A fresh run of `source`, for tests that train it or change it."""
    return make_run(source, corpus, tmp_path / "run")
