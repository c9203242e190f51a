"""A byte-level BPE tokenizer of our own, trained by the tests on Python's help texts."""

from __future__ import annotations

from pathlib import Path

import pytest

EOD = "<|endoftext|>"


def help_texts(n: int = 40) -> list[str]:
    from pydoc_data.topics import topics

    return [text for _, text in sorted(topics.items())][:n]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json, merges.txt and tokenizer.json of 600 tokens; <|endoftext|> is id 0."""
    from tokenizers import ByteLevelBPETokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(help_texts(), vocab_size=600, special_tokens=[EOD], show_progress=False)
    tokenizer.save_model(str(directory))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def tokenizer_files(tokenizer_dir: Path) -> dict[str, Path]:
    return {"tokenizer.json": tokenizer_dir / "tokenizer.json"}


@pytest.fixture(scope="session")
def letters_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One id a letter: a=1, b=2, ..., i=9; anything else gives no token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate("_abcdefghi")}, unk_token="_")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    tokenizer.save(str(path))
    return {"tokenizer.json": path}
