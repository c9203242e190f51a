"""Building, caching and falling back."""

import shutil
import subprocess
import sys

import pytest

from mindferry import kernels
from mindferry.kernels import build, selftest


def test_a_machine_without_a_compiler_gets_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels.KernelsUnavailable, match="no C\\+\\+ compiler found \\(no-such-compiler\\)"):
        build.toolchain()


def test_a_failing_compiler_shows_its_first_error(lib, tmp_path, monkeypatch):
    broken = tmp_path / "csrc"
    broken.mkdir()
    (broken / "pool.cpp").write_text("int broken(;\n")
    monkeypatch.setattr(build, "SOURCES", broken)
    monkeypatch.setenv("MINDFERRY_CACHE", str(tmp_path / "cache"))
    with pytest.raises(kernels.KernelsUnavailable, match=r"failed: .*error"):
        build.built_library(build.toolchain())
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_an_unwritable_cache_is_named(lib, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINDFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(kernels.KernelsUnavailable, match="cannot write the kernel cache"):
        build.built_library(build.toolchain())


def test_the_key_follows_sources_compiler_flags_and_cpu(lib, tmp_path, monkeypatch):
    tools = build.toolchain()
    keys = {build.key(tools), build.key(tools, (*build.FLAGS, "-g"))}
    monkeypatch.setattr(build, "cpu_description", lambda: "another CPU")
    keys.add(build.key(build.toolchain()))
    other = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, other)
    (other / "pool.h").write_text((other / "pool.h").read_text() + "// changed\n")
    monkeypatch.setattr(build, "SOURCES", other)
    keys.add(build.key(tools))
    assert len(keys) == 4


def test_a_second_load_takes_the_cached_library(lib, monkeypatch):
    monkeypatch.setattr(build, "compile_library", lambda *args: pytest.fail("compiled again"))
    assert build.built_library(build.toolchain()) == lib.path


def test_the_self_test_finds_a_wrong_kernel(lib):
    class Wrong:
        """The library with one kernel that does nothing."""

        def __getattr__(self, name):
            return getattr(lib, name)

        def call(self, name, inputs, outputs):
            lib.call(name, inputs, outputs)
            if name == "mf_adamw":
                inputs[3][0] += 1.0

    assert selftest.failures(lib) == []
    assert selftest.failures(Wrong()) == ["AdamW is off by 1"]


def test_state_of_a_machine_where_it_cannot_work(monkeypatch):
    monkeypatch.setattr(kernels, "_attempt", lambda: "no oneDNN")
    state = kernels.state()
    assert not state.usable
    assert state.reason == "no oneDNN"
    with pytest.raises(kernels.KernelsUnavailable, match="no oneDNN"):
        kernels.load()


def test_importing_the_package_imports_no_mindspore():
    code = "import sys, mindferry.kernels; assert 'mindspore' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_threads_follow_the_affinity(lib):
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from mindferry import kernels; print(kernels.load().threads())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.split() == ["1"]
