import pytest

from mindferry import kernels


@pytest.fixture(scope="session")
def lib():
    """The kernel library of this machine."""
    state = kernels.state()
    if not state.usable and not state.compiler:
        pytest.skip(f"kernels are not available here: {state.reason}")
    return kernels.load()
