"""Tokenizers from files, never from code: tokenizer.json, GPT-2's vocab.json and merges.txt, sentencepiece."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mindferry.errors import MindferryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 28

# Documents longer than this are encoded in pieces, so that memory stays bounded and all cores have work.
PIECE_CHARACTERS = 1 << 17

# Text on each side of a cut on which the cut is proven.
_WINDOW = 512

# How far back from the end of a piece a place to cut is looked for.
_SEARCH = 1 << 15

# Where to try: behind a word, behind anything before white space, behind CJK punctuation.
_CUTS = (re.compile(r"(?<=\w)(?=\s)"), re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=[。！？；，、])(?=\w)"))

# Places tried of each kind.
_TRIES = 32

# Characters of the text before a cut that are encoded again where a piece needs them in front of it.
_CONTEXT = 64

# What GPT2Tokenizer registers as special when its directory says nothing else.
_GPT2_SPECIAL = "<|endoftext|>"

FILE_NAMES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")


class Cut(NamedTuple):
    """A place in a text: what follows encodes as `context` + what follows, less the first `drop` ids."""

    at: int
    context: str = ""
    drop: int = 0


class Tokenizer(ABC):
    """Text to ids; no special tokens are added.

    Attributes:
        name: the files it came from.
        digest: SHA-256 of their content.
        size: number of known tokens, added ones included.
    """

    name: str
    digest: str
    size: int

    @abstractmethod
    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, in order. May be called from several threads."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens shown where the tokenizer has them as text."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Id of one token, None where it is not known."""

    def split_point(self, text: str) -> Cut | None:
        """A place near the end of `text` where encoding the two sides gives the ids of the whole.

        Each candidate is proven on the text around it, so that no knowledge of the tokenizer's kind is needed.
        Tokenizers that put something before every text (sentencepiece's dummy prefix) get a context.
        """
        for kind in _CUTS:
            candidates = [
                match.start()
                for match in kind.finditer(text, max(0, len(text) - _SEARCH))
                if 0 < match.start() <= len(text) - _WINDOW
            ]
            for at in candidates[: -_TRIES - 1 : -1]:
                cut = self._proven(at, text[max(0, at - _WINDOW) : at], text[at : at + _WINDOW])
                if cut is not None:
                    return cut
        return None

    def _proven(self, at: int, left: str, right: str) -> Cut | None:
        context = left[-_CONTEXT:]
        whole, before, after, small, joined = self.encode(
            [left + right, left, right, context, context + right]
        )
        if not np.array_equal(whole[: len(before)], before):
            return None
        rest = whole[len(before) :]
        if np.array_equal(rest, after):
            return Cut(at)
        if np.array_equal(rest, joined[len(small) :]):
            return Cut(at, context, len(small))
        return None


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Any, name: str, digest: str) -> None:
        # A tokenizer.json may carry the truncation and padding of the last call that used it.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name, self.digest = name, digest
        self.size = int(backend.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        encoded = _guarded(
            lambda: self._backend.encode_batch_fast(texts, add_special_tokens=False), self._cannot(texts)
        )
        return [np.asarray(item.ids, dtype=np.int64) for item in encoded]

    def _cannot(self, texts: list[str]) -> Callable[[str], MindferryError]:
        start = (texts[0] if texts else "")[:40]
        return lambda reason: MindferryError(
            f"{self.name}: cannot encode a text near {start!r}: {reason}",
            cause="the tokenizer has no token for something in it, and no unknown token",
            remedy="give a tokenizer that covers the text",
            id="tokenizer.encode",
        )

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (tokenizer.model of Llama, Mistral, T5)."""

    def __init__(self, processor: Any, name: str, digest: str) -> None:
        self._processor = processor
        self.name, self.digest = name, digest
        self.size = int(processor.vocab_size())

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        encoded = self._processor.encode(texts, out_type=int, num_threads=1)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))

    def token_to_id(self, token: str) -> int | None:
        found = int(self._processor.piece_to_id(token))
        return None if found == self._processor.unk_id() else found


class ByteTokenizer(Tokenizer):
    """Every UTF-8 byte its value, 0..255; 256 stays free for the end of a document."""

    name, digest, size = "bytes", "bytes", 257

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        raw = token.encode("utf-8")
        return raw[0] if len(raw) == 1 else None


def load_tokenizer(files: dict[str, Path]) -> Tokenizer:
    """The tokenizer that `files` (name -> path) describe: the first complete set of FILE_NAMES, in their order.

    Raises:
        UsageError: no usable files, or a damaged one.
    """
    if "tokenizer.json" in files:
        return _from_json(files["tokenizer.json"])
    if "vocab.json" in files and "merges.txt" in files:
        return _from_vocab(files["vocab.json"], files["merges.txt"])
    if "tokenizer.model" in files:
        return _from_sentencepiece(files["tokenizer.model"])
    missing = "merges.txt" if "vocab.json" in files else "vocab.json" if "merges.txt" in files else ""
    raise UsageError(
        "the source has no tokenizer that can be read: "
        + (
            f"{missing} is missing"
            if missing
            else "found neither tokenizer.json nor vocab.json + merges.txt nor tokenizer.model"
        ),
        remedy="put tokenizer.json, or vocab.json and merges.txt, beside the model's config.json",
        id="tokenizer.missing",
    )


def _from_json(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    digest = _digest(path)
    backend = _guarded(lambda: Backend.from_file(str(path)), _invalid(path))
    return HuggingFaceTokenizer(backend, "tokenizer.json", digest)


def _from_vocab(vocab: Path, merges: Path) -> Tokenizer:
    from tokenizers import ByteLevelBPETokenizer

    def make() -> Any:
        # No prefix space and no normalisation, as GPT-2 was trained.
        backend = ByteLevelBPETokenizer(str(vocab), str(merges), add_prefix_space=False)._tokenizer
        if backend.token_to_id(_GPT2_SPECIAL) is not None:
            backend.add_special_tokens([_GPT2_SPECIAL])
        return backend

    digest = _digest(vocab, merges)
    return HuggingFaceTokenizer(_guarded(make, _invalid(vocab)), "vocab.json, merges.txt", digest)


def _from_sentencepiece(path: Path) -> Tokenizer:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise UsageError(
            f"{path}: needs sentencepiece", remedy="pip install sentencepiece, or give a tokenizer.json"
        ) from None
    digest = _digest(path)
    processor = _guarded(lambda: SentencePieceProcessor(model_file=str(path)), _invalid(path))
    return SentencePieceTokenizer(processor, "tokenizer.model", digest)


def _digest(*paths: Path) -> str:
    """SHA-256 of the files together, after a look at their size."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise UsageError(
                    f"{path}: found {size} bytes, expected at most {MAX_FILE_BYTES}", id="tokenizer.size"
                )
            digest.update(path.read_bytes())
        except OSError as err:
            raise UsageError(f"{path}: cannot be read: {err.strerror}", id="tokenizer.unreadable") from None
    return digest.hexdigest()


def _invalid(path: Path) -> Callable[[str], MindferryError]:
    return lambda reason: UsageError(
        f"{path}: no tokenizer that can be read: {reason}",
        remedy="save it again with tokenizer.save_pretrained(...), or fetch it anew",
        id="tokenizer.invalid",
    )


def _guarded(work: Callable[[], T], error: Callable[[str], MindferryError]) -> T:
    """Do `work`; whatever the library throws, panics of its Rust side included, becomes `error`(reason)."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as err:  # pyo3's PanicException is no Exception
        raise error(" ".join(str(err).split())[:200]) from None
