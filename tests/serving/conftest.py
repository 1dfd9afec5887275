"""The official client, and one SSL context for the clients of all tests."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

# A client of httpx reads the certificates of all authorities, for 30 ms, though no server here speaks HTTPS.
_create_once = cache(ssl.create_default_context)


@pytest.fixture(scope="module", autouse=True)
def one_ssl_context() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", _create_once)
        yield


@pytest.fixture(scope="session")
def openai() -> Any:
    """The official client's package, which takes a second to import: in the processes that run its tests."""
    return pytest.importorskip("openai")
