"""The tiny run of the benchmark's tests."""

from tests.bench.conftest import tiny  # noqa: F401
