"""TensorBoard event files: scalars in and out, without TensorFlow.

A file is a row of TFRecords: length uint64, masked CRC-32C of it, data, masked CRC-32C of the data; the data is
a tensorflow.Event message (wall_time 1: double, step 2: int64, file_version 3: string, summary 5), a summary
holds values (1) of tag (1) and simple_value (2: float) or tensor (8) with float_val (5) or tensor_content (4).
A session_log (7) of status (1) START = 1 makes readers drop what they have from its step on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_RECORD = 64 << 20


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message; raises ValueError or IndexError on what is none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(wire)
            if wire == 2:
                size, at = _varint(data, at)
            if size is None or at + size > len(data):
                raise ValueError("torn message")
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _tensor_value(data: bytes) -> float | None:
    for name, value in _fields(data):
        if name in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
    return None


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, result = "", None
    for name, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if name == 1:
            tag = value.decode("utf-8", "replace")
        elif name == 2 and len(value) == 4:
            result = float(struct.unpack("<f", value)[0])
        elif name == 8:
            result = _tensor_value(value)
    return None if result is None else (tag, result)


def read_scalars(path: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """Tag -> [(step, value)] in file order, and a note where the file is torn or damaged ("" otherwise)."""
    found: dict[str, list[tuple[int, float]]] = {}
    with open(path, "rb") as handle:
        while header := handle.read(12):
            if len(header) < 12:
                return found, "the event file ends in the middle of a record"
            (length,) = struct.unpack("<Q", header[:8])
            if length > MAX_RECORD or struct.unpack("<I", header[8:])[0] != masked_crc(header[:8]):
                return found, "the event file is damaged; what stands before the damage was read"
            data = handle.read(length + 4)
            if len(data) < length + 4:
                return found, "the event file ends in the middle of a record"
            try:
                _take(data[:length], found)
            except (ValueError, IndexError, struct.error):
                return found, "the event file is damaged; what stands before the damage was read"
    return found, ""


def _take(data: bytes, found: dict[str, list[tuple[int, float]]]) -> None:
    step, summaries = 0, []
    for name, value in _fields(data):
        if name == 2 and isinstance(value, int):
            step = value
        elif name == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for name, value in _fields(summary):
            scalar = _scalar(value) if name == 1 and isinstance(value, bytes) else None
            if scalar is not None:
                found.setdefault(scalar[0], []).append((step, scalar[1]))


def _length(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _message(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _length(len(data)) + data


def _record(handle: BinaryIO, data: bytes) -> None:
    head = struct.pack("<Q", len(data))
    handle.write(head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data)))


def begin(handle: BinaryIO, wall: float) -> None:
    """Begin an event file: its version, and that what was shown of earlier files is void from step 1 on."""
    stamp = b"\x09" + struct.pack("<d", wall)
    _record(handle, stamp + _message(3, b"brain.Event:2"))
    _record(handle, stamp + b"\x10\x01" + _message(7, b"\x08\x01"))


def append_scalars(handle: BinaryIO, wall: float, step: int, values: dict[str, float]) -> None:
    """Append tag -> value (kept as float32) of a step; `wall` is Unix time in seconds."""
    summary = b"".join(
        _message(1, _message(1, tag.encode()) + b"\x15" + _float32(value)) for tag, value in values.items()
    )
    _record(handle, b"\x09" + struct.pack("<d", wall) + b"\x10" + _length(step) + _message(5, summary))


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def write_scalars(path: Path, rows: list[tuple[float, int, dict[str, float]]]) -> None:
    """Write an event file of (wall time in s, step, tag -> value)."""
    with open(path, "wb") as handle:
        begin(handle, rows[0][0] if rows else 0.0)
        for wall, step, values in rows:
            append_scalars(handle, wall, step, values)
