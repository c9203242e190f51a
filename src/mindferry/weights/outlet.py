"""Tensors into a file, block by block, with their checksums made beside it.

Writing into the page cache is half of the work and hashing (SHA-256 runs at 0.7 to 1.5 GB/s a core) a quarter of it, so
blocks go down a line: the caller makes a tensor and casts it, a thread writes, threads hash. A digest is a chain, so
several tensors are hashed at a time. Blocks are cast into buffers that are used again, as fresh memory costs more than
the cast. The disk is told to begin early, so that little is left to wait for at the end.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mindferry.weights.dtypes import cast, count_not_finite

BLOCK_BYTES = 4 << 20
BLOCKS = 32  # made and not yet hashed, at most
HASHERS = 2
FLUSH_BYTES = 64 << 20

# What is written of one tensor, and the buffer it lies in, if any; None after its last block.
Block = tuple[memoryview, np.ndarray | None] | None
Blocks = queue.SimpleQueue[Block]


class Outlet:
    """Writes tensors to an open raw file. To be used as a context; on leaving, all is written or an error raised.

    Args:
        handle: opened for writing without buffering.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._room = threading.Semaphore(BLOCKS)
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._hashers = ThreadPoolExecutor(HASHERS, thread_name_prefix="hash")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flushing: Future[None] | None = None
        self._unflushed = 0
        self._to_write: queue.SimpleQueue[tuple[Block, Blocks] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._writer = threading.Thread(target=self._write, name="write")
        self._writer.start()

    def __enter__(self) -> Outlet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._to_write.put(None)
        self._writer.join()
        self._hashers.shutdown()
        self._flusher.shutdown()
        if exc[0] is None:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def put(self, array: np.ndarray, dtype: np.dtype[Any]) -> tuple[Future[str], int]:
        """Cast `array` and have it written.

        Returns:
            (sha256 of its bytes in the file, once they are there; number of values that are NaN or infinite).

        Raises:
            OSError: what came before could not be written.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        count = BLOCK_BYTES // dtype.itemsize
        blocks: Blocks = queue.SimpleQueue()
        digest = self._hashers.submit(self._hash, blocks)
        not_finite = 0
        try:
            for start in range(0, flat.size, count):
                part = flat[start : start + count]
                self._room.acquire()
                self._raise()
                buffer = None if part.dtype == dtype else self._buffer()
                out = None if buffer is None else buffer[: part.size * dtype.itemsize].view(dtype)
                block = cast(part, dtype, out)
                not_finite += count_not_finite(block)
                data = memoryview(block.view(np.uint8))  # type: ignore[arg-type]
                self._to_write.put(((data, buffer), blocks))
        finally:
            self._to_write.put((None, blocks))
        return digest, not_finite

    def _buffer(self) -> np.ndarray:
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return np.empty(BLOCK_BYTES, np.uint8)

    def _write(self) -> None:
        """The writing thread. After an error it goes on without writing, so that nobody waits for room."""
        while (task := self._to_write.get()) is not None:
            block, blocks = task
            if block is not None and self._error is None:
                try:
                    self._write_bytes(block[0])
                    self._flush_after(block[0].nbytes)
                except BaseException as err:  # raised where `put` and the context are
                    self._error = err
            blocks.put(block)

    def _write_bytes(self, data: Any) -> None:
        """Raw file objects may write less than asked for."""
        view = memoryview(data)
        while view:
            view = view[self._handle.write(view) :]

    def _hash(self, blocks: Blocks) -> str:
        digest = hashlib.sha256()
        while (block := blocks.get()) is not None:
            data, buffer = block
            digest.update(data)  # lets go of the interpreter lock
            if buffer is not None:
                self._buffers.put(buffer)
            self._room.release()
        return digest.hexdigest()

    def _flush_after(self, written: int) -> None:
        self._unflushed += written
        idle = self._flushing is None or self._flushing.done()
        if self._unflushed >= FLUSH_BYTES and idle:
            self._unflushed = 0
            self._flushing = self._flusher.submit(os.fdatasync, self._handle.fileno())
