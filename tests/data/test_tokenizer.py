"""Tokenizers: lossless, cut without a trace, and refused with a reason."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindferry.data.inputs import Reading, Source, pieces
from mindferry.data.megatron import open_megatron
from mindferry.data.text_files import _NO_TEXT
from mindferry.data.tokenizer import load_tokenizer
from mindferry.data.tokens import Job, token_dtype, tokenize
from mindferry.errors import MindferryError, UsageError

from .conftest import help_texts

FIXTURES_ARE_CONSTANT = [HealthCheck.function_scoped_fixture]


def ids_of_file(text: str | bytes, path: Path, files: dict[str, Path], vocab_size: int = 600) -> np.ndarray:
    """The ids that the whole machinery writes for one file."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    job = Job([Source(path, "text")], Reading(), load_tokenizer(files), vocab_size, None)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        _, prefixes = tokenize(job, Path(work), workers=2)
        return np.array(open_megatron(prefixes["train"]).stream())


def looks_binary(raw: bytes) -> bool:
    return raw.count(0) > 0.1 * len(raw) or raw.startswith(tuple(_NO_TEXT))


@settings(max_examples=150, deadline=None, suppress_health_check=FIXTURES_ARE_CONSTANT)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda t: t.strip() and not looks_binary(t.encode())
    )
)
def test_text_to_ids_to_text_is_lossless(tmp_path: Path, tokenizer_files: dict[str, Path], text: str) -> None:
    ids = ids_of_file(text, tmp_path / "t.txt", tokenizer_files)
    assert load_tokenizer(tokenizer_files).decode(ids.tolist()) == text.removeprefix("\ufeff")


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURES_ARE_CONSTANT)
@given(raw=st.binary(min_size=1, max_size=200))
def test_any_bytes_at_all(tmp_path: Path, tokenizer_files: dict[str, Path], raw: bytes) -> None:
    """Whatever a file holds: the text of its valid parts comes back, one U+FFFD for each other byte."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or looks_binary(raw):
        with pytest.raises(UsageError, match=r"UTF-16|no text|, expected text"):
            ids_of_file(raw, tmp_path / "t.txt", tokenizer_files)
        return
    ids = ids_of_file(raw, tmp_path / "t.txt", tokenizer_files)
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    expected = "".join("\ufffd" if "\udc80" <= ch <= "\udcff" else ch for ch in text)
    assert load_tokenizer(tokenizer_files).decode(ids.tolist()) == (expected if expected.strip() else "")


def llama3_like(directory: Path) -> dict[str, Path]:
    """Byte-level BPE behind the regex of Llama 3, where punctuation takes the line ends behind it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(help_texts(), trainer)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return {"tokenizer.json": path}


LONG = {
    "english": "\n\n".join(help_texts(40)),
    "punctuation before line ends": "So it was.\n\nAnd then?!\n" * 20_000,
    "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n" * 12_000,
    "chinese, one line": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 12_000,
    "long runs of blanks": ("word" + " " * 700 + "\n" * 600) * 300,
}


@pytest.mark.parametrize("kind", list(LONG))
@pytest.mark.parametrize("tokenizer", ["gpt2", "llama3"])
def test_long_documents_are_cut_without_a_trace(
    tmp_path: Path, tokenizer_files: dict[str, Path], tokenizer: str, kind: str
) -> None:
    from tokenizers import Tokenizer

    files = tokenizer_files if tokenizer == "gpt2" else llama3_like(tmp_path)
    text = LONG[kind]
    assert len(text) > 1 << 17
    whole = Tokenizer.from_file(str(files["tokenizer.json"])).encode(text).ids
    np.testing.assert_array_equal(ids_of_file(text, tmp_path / "t.txt", files), whole)


def test_document_without_a_place_to_cut(tmp_path: Path, tokenizer_files: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="no place where this tokenizer's ids stay the same"):
        ids_of_file("x" * ((1 << 22) + (1 << 19)), tmp_path / "t.txt", tokenizer_files)


def test_both_forms_agree_with_transformers(tokenizer_dir: Path) -> None:
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast(str(tokenizer_dir / "vocab.json"), str(tokenizer_dir / "merges.txt"))
    texts = [*help_texts(10), "a<|endoftext|>b", " leading", "tabs\t\tand  spaces \n", "数据 émigré 🚢"]
    forms = (["tokenizer.json"], ["vocab.json", "merges.txt"])
    for names in forms:
        ours = load_tokenizer({name: tokenizer_dir / name for name in names})
        for text, ids in zip(texts, ours.encode(texts), strict=True):
            assert ids.tolist() == theirs(text)["input_ids"]


def test_stored_truncation_and_padding_do_not_act(tmp_path: Path, tokenizer_dir: Path) -> None:
    content = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    text = "for the sake of a longer sentence"
    plain = load_tokenizer({"tokenizer.json": tokenizer_dir / "tokenizer.json"}).encode([text])[0]
    np.testing.assert_array_equal(load_tokenizer({"tokenizer.json": path}).encode([text])[0], plain)
    assert len(plain) > 3


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"version": "1.0"}', b"\xff\xfe", b'{"model": {"type": "BPE"}}']
)
def test_damaged_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json: no tokenizer that can be read"):
        load_tokenizer({"tokenizer.json": path})


@pytest.mark.parametrize(
    ("vocab", "merges"), [("[]", ""), ("{", ""), ('{"a": 0}', "a b\n"), ('{"a": -1}', "")]
)
def test_damaged_vocab_and_merges(tmp_path: Path, vocab: str, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(UsageError, match=r"vocab\.json: no tokenizer that"):
        load_tokenizer({name: tmp_path / name for name in ("vocab.json", "merges.txt")})


def test_width_of_an_id() -> None:
    assert token_dtype(50257) == np.uint16
    assert token_dtype(65536) == np.uint16  # largest id 65535
    assert token_dtype(65537) == np.int32
    with pytest.raises(MindferryError):
        token_dtype((1 << 31) + 1)


@pytest.fixture(scope="module")
def sentencepiece_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A byte-fallback BPE with a dummy prefix, the kind that Llama has."""
    import sentencepiece

    directory = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in help_texts() for line in text.splitlines()),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=590,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=True,
        minloglevel=2,
    )
    return {"tokenizer.model": directory / "tokenizer.model"}


def test_sentencepiece(tmp_path: Path, sentencepiece_files: dict[str, Path]) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_files["tokenizer.model"]))
    ours = load_tokenizer(sentencepiece_files)
    assert ours.size == 590
    assert ours.token_to_id("</s>") == theirs.eos_id()
    assert ours.token_to_id("no such piece") is None
    for text in (*help_texts(5), "数据 🚢 émigré", "  two  spaces"):
        (ids,) = ours.encode([text])
        assert ids.tolist() == theirs.encode(text)
        assert ours.decode(ids.tolist()) == text
    long = "\n\n".join(help_texts(40))
    assert len(long) > 1 << 17
    # Every text of this kind begins with a space of its own: pieces must not, so they carry a context.
    (tmp_path / "t.txt").write_text(long)
    made = list(pieces(Source(tmp_path / "t.txt", "text"), Reading(), ours))
    assert len(made) > 1
    assert all(piece.context for piece in made[1:])
    np.testing.assert_array_equal(
        ids_of_file(long, tmp_path / "t.txt", sentencepiece_files), np.asarray(theirs.encode(long))
    )
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(UsageError, match="no tokenizer that can be read"):
        load_tokenizer({"tokenizer.model": tmp_path / "tokenizer.model"})
