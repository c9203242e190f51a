"""Ctrl-C and SIGTERM in a training run: the first finishes the step and saves, the second ends at once.

MindSpore installs a SIGINT handler of its own around every compilation and graph execution, which turns Ctrl-C into
a SIGTERM. So the signals are blocked for the whole process and one thread waits for them: threads started later
inherit the block, and no handler ever runs.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Remembers the first signal.

    `with Interruption() as interruption:` must be entered before MindSpore, a progress bar or anything else starts
    threads; only the thread that enters it, and threads started inside it, are covered.

    Attributes:
        number: the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._closed = threading.Event()

    def __enter__(self) -> Interruption:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()
        return self

    def _wait(self) -> None:
        while not self._closed.is_set():
            received = signal.sigtimedwait(SIGNALS, 0.2)
            if received is None:
                continue
            if self.number:
                end_at_once(received.si_signo)
            self.number = received.si_signo

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


class StopFile:
    """The wish to stop of whoever started this process: the number of the signal, written to a file.

    Attributes:
        number: the signal, or 0.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def number(self) -> int:
        try:
            return int(self._path.read_text())
        except (OSError, ValueError):
            return 0


def end_at_once(number: int) -> None:
    """Kill child processes and leave without any clean-up; files being written stay partial and unused."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(128 + number)
