"""Tokenizers from files, never from code: tokenizer.json, or GPT-2's vocab.json and merges.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_FILE_BYTES = 1 << 28

# Documents longer than this are encoded in pieces, so that memory stays bounded and all cores have work.
PIECE_CHARACTERS = 1 << 17

# Text on each side of a cut that must encode to the same ids with and without the cut.
_WINDOW = 512

# How far back from the end of a piece a place to cut is looked for.
_SEARCH = 1 << 15

# Where to try: behind a word, behind anything before white space, behind CJK punctuation.
_CUTS = (re.compile(r"(?<=\w)(?=\s)"), re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=[。！？；，、])(?=\w)"))

# Places tried of each kind.
_TRIES = 32

# What GPT2Tokenizer registers as special when its directory says nothing else.
_GPT2_SPECIAL = "<|endoftext|>"


class Tokenizer:
    """Text to ids with the `tokenizers` library; no special tokens are added.

    Attributes:
        name: the files it came from.
        size: number of known tokens, added ones included.
    """

    def __init__(self, backend: Any, name: str) -> None:
        # A tokenizer.json may carry the truncation and padding of the last call that used it.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name = name
        self.size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, in order; all cores work on it (RAYON_NUM_THREADS limits them)."""
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(item.ids, dtype=np.int64) for item in encoded]

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens shown."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def split_point(self, text: str) -> int:
        """A place near the end of `text` where encoding the two halves gives the ids of the whole; 0: none.

        Each candidate is proven on the text around it, so that no knowledge of the tokenizer's kind is needed.
        """
        for kind in _CUTS:
            candidates = [
                match.start()
                for match in kind.finditer(text, max(0, len(text) - _SEARCH))
                if 0 < match.start() <= len(text) - _WINDOW
            ]
            for at in candidates[: -_TRIES - 1 : -1]:
                left, right = text[max(0, at - _WINDOW) : at], text[at : at + _WINDOW]
                whole, first, second = self.encode([left + right, left, right])
                if np.array_equal(whole, np.concatenate([first, second])):
                    return at
        return 0


def load_tokenizer(files: dict[str, Path]) -> Tokenizer:
    """The tokenizer that `files` (name -> path) describe; tokenizer.json wins.

    Raises:
        UsageError: no usable files, or a damaged one.
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers import Tokenizer as Backend

    if "tokenizer.json" in files:
        path = files["tokenizer.json"]
        return Tokenizer(_guarded(path, lambda: Backend.from_file(str(path))), "tokenizer.json")
    if "vocab.json" in files and "merges.txt" in files:
        vocab, merges = files["vocab.json"], files["merges.txt"]
        _check_size(merges)

        def make() -> Any:
            # No prefix space and no normalisation, as GPT-2 was trained.
            backend = ByteLevelBPETokenizer(str(vocab), str(merges), add_prefix_space=False)._tokenizer
            if backend.token_to_id(_GPT2_SPECIAL) is not None:
                backend.add_special_tokens([_GPT2_SPECIAL])
            return backend

        return Tokenizer(_guarded(vocab, make), "vocab.json, merges.txt")
    missing = "merges.txt" if "vocab.json" in files else "vocab.json" if "merges.txt" in files else ""
    raise UsageError(
        "the source has no tokenizer that can be read: "
        + (
            f"{missing} is missing" if missing else "found neither tokenizer.json nor vocab.json + merges.txt"
        ),
        remedy="put tokenizer.json, or vocab.json and merges.txt, beside the model's config.json",
        id="tokenizer.missing",
    )


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="tokenizer.unreadable") from None
    if size > MAX_FILE_BYTES:
        raise UsageError(
            f"{path}: found {size} bytes, expected at most {MAX_FILE_BYTES}", id="tokenizer.size"
        )


def _guarded(path: Path, make: Any) -> Any:
    """Run `make`; whatever the library throws, panics of its Rust side included, names the file."""
    _check_size(path)
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as err:  # pyo3's PanicException is no Exception
        reason = " ".join(str(err).split())[:200]
        raise UsageError(
            f"{path}: no tokenizer that the tokenizers library can read: {reason}",
            remedy="save it again with tokenizer.save_pretrained(...), or fetch it anew",
            id="tokenizer.invalid",
        ) from None
