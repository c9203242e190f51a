"""Documents in records: JSON lines, parquet, arrow and Hugging Face datasets saved on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mindferry.data.compressed import blocks, file_size
from mindferry.data.text_files import check_first, clean
from mindferry.errors import MindferryError, UsageError, did_you_mean

# Field names tried in this order where none is given.
FIELDS = ("text", "content", "document", "raw_content", "body")

MAX_LINE_BYTES = 1 << 26

# Rows of a table that are held at a time: with documents of a megabyte, 512 took 1.1 GB.
_ROWS = 64


class Record(NamedTuple):
    """One document: its name ("x.jsonl: line 3"), its text, invalid characters in it, bytes read for it."""

    name: str
    text: str
    invalid: int
    read: int


def choose_field(path: Path, available: dict[str, bool], given: str | None) -> str:
    """The field with the text; `available` maps field names to whether they hold text.

    Raises:
        UsageError: `given` is not there, or there is no telling which field it is.
    """
    names = ", ".join(list(available)[:12])
    if given is not None:
        if given in available:
            return given
        hint = did_you_mean(given, available)
        raise UsageError(
            f"{path}: no field {given!r} (found {names})" + (f" - {hint}" if hint else ""),
            remedy="name the field that holds the text",
            id="data.field",
        )
    for name in FIELDS:
        if available.get(name):
            return name
    texts = [name for name, is_text in available.items() if is_text]
    if len(texts) == 1:
        return texts[0]
    raise UsageError(
        f"{path}: cannot tell which field holds the text (found {names or 'none'})",
        remedy="name it with --text-field",
        id="data.field",
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """(line number from 1, line, bytes read since the last one)."""
    number, held, read = 1, b"", 0
    for block, consumed in blocks(path, 1 << 20):
        if number == 1 and not held:
            check_first(path, block)
        read += consumed
        parts = (held + block).split(b"\n") if held else block.split(b"\n")
        held = parts.pop()
        for line in parts:
            yield number, line, read
            number, read = number + 1, 0
        if len(held) > MAX_LINE_BYTES:
            raise UsageError(
                f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes",
                remedy="expected one JSON object a line; is it one big JSON array? convert it to lines",
                id="data.jsonl",
            )
    if held:
        yield number, held, read


def _array(path: Path) -> UsageError:
    return UsageError(
        f"{path}: one JSON array, expected an object a line",
        remedy=f"convert it: jq -c '.[]' {path} > lines.jsonl",
        id="data.jsonl",
    )


def _json_object(path: Path, number: int, line: bytes) -> tuple[dict[str, Any], int]:
    """The object of a line, and the number of bytes in it that are not UTF-8."""
    try:
        text, invalid = clean(line.decode("utf-8", "surrogateescape"))
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        if number == 1 and line.lstrip().startswith(b"["):
            raise _array(path) from None
        where = f", column {err.colno}: {err.msg}" if isinstance(err, json.JSONDecodeError) else f": {err}"
        raise MindferryError(
            f"{path}: line {number}{where}",
            cause="the line is no JSON",
            remedy="correct the line, or take it out",
            id="data.jsonl",
        ) from None
    if number == 1 and isinstance(value, list):
        raise _array(path)
    if not isinstance(value, dict):
        raise MindferryError(
            f"{path}: line {number}: found {type(value).__name__}, expected an object", id="data.jsonl"
        )
    return value, invalid


def jsonl_field(path: Path, given: str | None) -> str | None:
    """The text field, looked up in the first object; None: the file is empty."""
    for number, line, _ in _lines(path):
        if line.strip():
            record, _ = _json_object(path, number, line.removeprefix(b"\xef\xbb\xbf"))
            # A null may be the text of an empty document.
            kinds = {name: v is None or isinstance(v, str) for name, v in record.items()}
            return choose_field(path, kinds, given)
    return None


def jsonl_records(path: Path, field: str) -> Iterator[Record]:
    """Documents of a JSON-lines file; a null text is an empty document, blank lines are passed over.

    Raises:
        UsageError: unreadable, or a line of more than MAX_LINE_BYTES.
        MindferryError: names the line that is no JSON object, lacks the field, or holds no text there.
    """
    unreported = 0
    for number, line, read in _lines(path):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            unreported += read
            continue
        record, invalid = _json_object(path, number, line)
        if field not in record:
            raise MindferryError(
                f"{path}: line {number}: no field {field!r} (found {', '.join(list(record)[:12]) or 'none'})",
                remedy="correct the line, or take it out",
                id="data.field",
            )
        value = record[field]
        if value is not None and not isinstance(value, str):
            raise MindferryError(
                f"{path}: line {number}: field {field!r}: found {type(value).__name__}, expected text",
                id="data.field",
            )
        text, surrogates = clean(value or "")
        yield Record(f"{path}: line {number}", text, invalid + surrogates, read + unreported)
        unreported = 0


def _arrow(path: Path) -> Any:
    """The pyarrow module."""
    try:
        import pyarrow

        return pyarrow
    except ImportError:
        raise UsageError(f"{path}: needs pyarrow", remedy="pip install pyarrow", id="data.pyarrow") from None


@contextlib.contextmanager
def _table(path: Path) -> Iterator[tuple[Any, Any]]:
    """(schema, function from a column name to an iterator of record batches) of a parquet or arrow file."""
    pa = _arrow(path)
    try:
        with contextlib.ExitStack() as stack:
            if path.suffix.lower() == ".parquet":
                import pyarrow.parquet

                file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
                yield file.schema_arrow, lambda name: file.iter_batches(batch_size=_ROWS, columns=[name])
                return
            source = stack.enter_context(pa.memory_map(str(path)))
            schema, found = _arrow_batches(pa, source)
            yield schema, lambda name: found
    except (pa.ArrowException, OSError) as err:
        raise MindferryError(
            f"{path}: cannot be read as {path.suffix.lstrip('.')}: {' '.join(str(err).split())[:160]}",
            remedy="fetch the file anew",
            id="data.table",
        ) from None


def _arrow_batches(pa: Any, source: Any) -> tuple[Any, Iterator[Any]]:
    """(schema, record batches) of an arrow stream, which is what `datasets` writes, or of an arrow file."""
    try:
        stream = pa.ipc.open_stream(source)
        return stream.schema, iter(stream)
    except pa.ArrowInvalid:
        source.seek(0)
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))


def _is_text(pa: Any, kind: Any) -> bool:
    """Whether a column of this type gives text; pandas writes categories as dictionaries of strings."""
    types = pa.types
    if types.is_dictionary(kind):
        return _is_text(pa, kind.value_type)
    views = getattr(types, "is_string_view", None)
    return bool(types.is_string(kind) or types.is_large_string(kind) or (views is not None and views(kind)))


def table_field(path: Path, given: str | None) -> str:
    """The text column of a parquet or arrow file.

    Raises:
        UsageError: none, or not clear which.
        MindferryError: the file is damaged.
    """
    pa = _arrow(path)
    with _table(path) as (schema, _):
        kinds = {field.name: _is_text(pa, field.type) for field in schema}
    name = choose_field(path, kinds, given)
    if not kinds[name]:
        raise UsageError(f"{path}: field {name!r} holds no text", id="data.field")
    return name


def table_records(path: Path, field: str) -> Iterator[Record]:
    """Documents of a parquet or arrow file, a row each; null is an empty document.

    Raises:
        UsageError: no such column.
        MindferryError: the file is damaged.
    """
    table_field(path, field)
    size, row = file_size(path), 0
    with _table(path) as (_, batches):
        pending = size
        for batch in batches(field):
            column: Iterable[Any] = batch.column(batch.schema.get_field_index(field))
            for value in column:
                text, invalid = clean(value.as_py() or "")
                yield Record(f"{path}: row {row}", text, invalid, pending)
                row, pending = row + 1, 0


def saved_dataset(directory: Path) -> list[Path] | None:
    """The arrow files of a Hugging Face dataset saved with save_to_disk, or None if `directory` is none.

    A dataset with splits gives its "train".

    Raises:
        UsageError: splits without "train".
        MindferryError: the description of the dataset is damaged, or names files that are not there.
    """
    splits = directory / "dataset_dict.json"
    if splits.is_file():
        names = _read_json(splits).get("splits")
        if not isinstance(names, list) or "train" not in names:
            raise UsageError(
                f"{splits}: no split 'train' (found {names})", remedy="name the directory of one split"
            )
        return saved_dataset(directory / "train")
    state = directory / "state.json"
    if not state.is_file():
        return None
    listed = _read_json(state).get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise MindferryError(f"{state}: lists no data files", id="data.table")
    files = []
    for entry in listed:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
            raise MindferryError(f"{state}: data file {name!r} is not in {directory}", id="data.table")
        files.append(directory / name)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 1 << 24:
            raise ValueError("too large")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as err:
        raise MindferryError(f"{path}: cannot be read: {err}", id="data.table") from None
    if not isinstance(value, dict):
        raise MindferryError(f"{path}: found {type(value).__name__}, expected an object", id="data.table")
    return value
