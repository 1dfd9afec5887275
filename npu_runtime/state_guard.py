"""Keeps two runs from updating one buffer at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, get_ident

from npu_compiler.errors import InputError
from npu_runtime.buffer import NPUBuffer

__all__ = ["exclusive_use"]

_lock = Lock()
_in_use: dict[int, int] = {}  # identities of the memory that a run updates in place, and the thread that runs it


@contextmanager
def exclusive_use(state: Mapping[str, NPUBuffer]) -> Iterator[None]:
    """Marks buffers that a run updates in place, for the time of the block.

    A run may be part of another one in the same thread, as that of a partition is.

    Args:
        state: The buffers by the name of the input they are given for.

    Raises:
        InputError: Another run updates one of them.
    """
    owners = {id(buffer.data): name for name, buffer in state.items()}
    thread = get_ident()
    with _lock:
        taken = [name for identity, name in owners.items() if _in_use.get(identity, thread) != thread]
        if taken:
            raise InputError(
                f"the buffer given for '{taken[0]}' is being updated by another run; give each run a buffer of its "
                "own, or wait for the other to end"
            )
        own = [identity for identity in owners if identity not in _in_use]
        _in_use.update(dict.fromkeys(own, thread))
    try:
        yield
    finally:
        with _lock:
            for identity in own:
                del _in_use[identity]
