"""What every test shares: caches of its own and a fixed seed."""

from __future__ import annotations

import tests.support.environment  # noqa: F401, before numpy and torch read it

# isort: split
import gc
import signal
from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import settings

from tests.cuda.kernels import remember_in
from tests.support.host_kernels import keep_compiled_in

# An example may take any time: the machine may be slow, or busy.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# In the background of a shell Ctrl-C is ignored, and so it is by whatever is started there; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are collected without Python's collector of cycles, which from then on leaves out what is there.

    Of 20,000 tests and what they import nothing is a cycle that ends, and looking through it takes a second each time.
    What tests import later is as large: a tenth of the time would go to looking through that.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        result = yield
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        return result
    finally:
        if runs:
            gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the recorded plans of tests/golden anew")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed, so that a failure can be repeated."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """No kernel, and no header, is compiled twice in a session, whichever of its processes comes first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own  # of pytest-xdist's workers
    remember_in(shared / "compiled_kernels")
    keep_compiled_in(shared / "compiled_for_the_host")
