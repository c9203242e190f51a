"""`make sanitize` finds what it is there for: faults are planted in a small library built and loaded its way."""

import subprocess
import sys

import pytest

from mindferry.kernels.build import SANITIZE

from . import sanitized

PLANTED = """
#include <cstdlib>
extern "C" int fine(int n) { return n + 1; }
extern "C" int past_the_end(int n) {
    volatile char* p = static_cast<char*>(malloc(n));
    return p[n];
}
extern "C" int overflow(int n) { return n * 2; }
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    if not sanitized.runtimes():
        pytest.skip("g++ with libasan and libubsan is not installed")
    place = tmp_path_factory.mktemp("planted")
    (place / "planted.cpp").write_text(PLANTED)
    library = place / "planted.so"
    command = ["g++", "-fPIC", "-shared", *SANITIZE, str(place / "planted.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library


def call(library, function):
    number = 2**30 if function == "overflow" else 16
    code = f"import ctypes; print('gave', ctypes.CDLL({str(library)!r}).{function}({number}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=sanitized.environment(sanitized.runtimes()),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [("past_the_end", "AddressSanitizer: heap-buffer-overflow"), ("overflow", "signed integer overflow")],
)
def test_a_planted_fault_ends_the_process(planted, function, said):
    done = call(planted, function)
    assert done.returncode != 0
    assert said in done.stderr
    assert "gave" not in done.stdout


def test_a_sound_function_passes(planted):
    done = call(planted, "fine")
    assert (done.returncode, done.stderr) == (0, "")


def test_without_the_runtimes_it_says_that_it_is_skipped(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert sanitized.runtimes() == []
    assert sanitized.main([]) == 0
    assert "sanitize: skipped" in capsys.readouterr().out
