"""Keeps two runs from updating one buffer at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from npu_compiler.errors import InputError
from npu_runtime.buffer import NPUBuffer

__all__ = ["exclusive_use"]

_lock = Lock()
_in_use: set[int] = set()  # identities of the memory that a run updates in place


@contextmanager
def exclusive_use(state: Mapping[str, NPUBuffer]) -> Iterator[None]:
    """Marks buffers that a run updates in place, for the time of the block.

    Args:
        state: The buffers by the name of the input they are given for.

    Raises:
        InputError: Another run updates one of them.
    """
    owners = {id(buffer.data): name for name, buffer in state.items()}
    with _lock:
        taken = [name for identity, name in owners.items() if identity in _in_use]
        if taken:
            raise InputError(
                f"the buffer given for '{taken[0]}' is being updated by another run; give each run a buffer of its "
                "own, or wait for the other to end"
            )
        _in_use.update(owners)
    try:
        yield
    finally:
        with _lock:
            _in_use.difference_update(owners)
