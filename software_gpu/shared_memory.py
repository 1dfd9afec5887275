"""The memory of the software GPU: one file without a name, mapped by the host and by the device's process alike.

Both see it at the same addresses, so that an address in a command means the same on either side. It begins with what
the two tell each other, goes on with the kernels' code, which the device may run and not write, and then holds the
buffers. The file is sparse: what was never touched takes no memory, and what is released is given back.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from npu_compiler.errors import DeviceError, OutOfMemoryError
from npu_compiler.integers import ceil_div

__all__ = ["CODE_BYTES", "CONTROL_BYTES", "Range", "SharedMemory", "shared_memory"]

CONTROL_BYTES = 16 << 20
CODE_BYTES = 4 << 30
_DATA_BYTES_OF_PHYSICAL = 4  # addresses are cheap, and room keeps pieces together
_LEAST_DATA_BYTES = 64 << 20
# Where neither interpreters nor libraries are put; the last ones are for processors with 39 bits of address.
_BASES = (1 << 44, 1 << 45, 1 << 43, 3 << 35, 1 << 36)
_MAP_FIXED, _MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x10, 0x4000, 0x100000
# What was released last is kept for the next of its size rather than given back: inputs and outputs come again with
# each run, and the first touch of a page costs both processes more than filling it with zeros.
_MOST_KEPT_BYTES, _MOST_KEPT = 32 << 20, 64


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _map(address: int, nbytes: int, file: int, flags: int) -> int | None:
    """Where the system put it; None where it refused, or had another place in mind."""
    flags |= mmap.MAP_SHARED | _MAP_NORESERVE
    found: int | None = _libc().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if found != address and found is not None and found != ctypes.c_void_p(-1).value:
        _libc().munmap(found, nbytes)  # a system older than MAP_FIXED_NOREPLACE
    return address if found == address else None


class Range:
    """A piece of the memory, given back once nothing refers to it or to an array made of it."""

    def __init__(self, memory: SharedMemory, address: int, nbytes: int, serial: int) -> None:
        self._memory, self.address, self.nbytes, self.serial = memory, address, nbytes, serial

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else the names of this module may be gone, and the memory goes with the process
            self._memory.release(self.address, self.serial)


class SharedMemory:
    """All of it.

    Attributes:
        file: Its descriptor.
        base: Where it begins, in the host and in the device.
        nbytes: How long it is; most of it is never touched.
    """

    def __init__(self) -> None:
        """Reserves the addresses; takes no memory yet.

        Raises:
            OutOfMemoryError: The system has no room for them.
        """
        self.file = _create()
        self.base, self.nbytes = self._reserve()
        self.code, self._data = self.base + CONTROL_BYTES, self.base + CONTROL_BYTES + CODE_BYTES
        self._code_used = 0
        self._free: list[tuple[int, int]] = [(self._data, self.base + self.nbytes - self._data)]
        self._kept: list[tuple[int, int]] = []  # length and address, those released last at the end
        self._kept_bytes = 0
        self._live: dict[int, int] = {}
        self._released: deque[tuple[int, int]] = deque()
        self._serial = self._pinned_before = 0
        self._lock = threading.Lock()
        self._borrowed = False  # this process was forked, and the file is still its parent's
        os.register_at_fork(
            before=self._lock_for_fork, after_in_parent=self._forked_parent, after_in_child=self._forked_child
        )

    def _reserve(self) -> tuple[int, int]:
        page = mmap.PAGESIZE
        data = _DATA_BYTES_OF_PHYSICAL * _physical_bytes() // page * page
        while data >= _LEAST_DATA_BYTES:
            total = CONTROL_BYTES + CODE_BYTES + data
            try:
                os.ftruncate(self.file, total)
                for base in _BASES:
                    if _map(base, total, self.file, _MAP_FIXED_NOREPLACE) is not None:
                        return base, total
            except OSError:
                pass  # a limit of the size of files; less may do
            data = data // 2 // page * page
        os.close(self.file)
        raise OutOfMemoryError(
            "no addresses are left for the software GPU's memory. Raise the limits of address space and of the size of "
            "files (ulimit -v and -f)"
        )

    def allocate(self, nbytes: int) -> Range:
        """A piece of zeros, page aligned; pages take memory when they are first touched.

        Raises:
            OutOfMemoryError: There is not that much.
        """
        page = mmap.PAGESIZE
        room = (ceil_div(nbytes, page) + 1) * page  # a page between any two
        with self._lock:
            self._drain()
            self._own()
            kept = self._take_kept(room)
            address = self._take(room, nbytes) if kept is None else kept
            self._live[address] = room
            self._serial += 1
            serial = self._serial
        self._drain_unless_locked()  # what was released while the lock was held
        if kept is not None:
            ctypes.memset(address, 0, nbytes)
        return Range(self, address, nbytes, serial)

    def place_code(self, nbytes: int) -> int:
        """Room in the code region, page aligned, for good.

        Raises:
            OutOfMemoryError: The region is full.
        """
        with self._locked():
            self._own()
            start, room = self._code_used, ceil_div(nbytes, mmap.PAGESIZE) * mmap.PAGESIZE
            if start + room > CODE_BYTES:
                raise OutOfMemoryError(
                    f"the software GPU has room for {CODE_BYTES} bytes of kernels; start a new process"
                )
            self._code_used = start + room
            return self.code + start

    @property
    def code_used(self) -> int:
        return self._code_used

    def bytes_in_use(self) -> int:
        """Memory that the file takes."""
        return os.fstat(self.file).st_blocks * 512

    def release(self, address: int, serial: int) -> None:
        """Gives a range back. The collector may call this at any moment, in any thread, also within `allocate`."""
        self._released.append((address, serial))
        self._drain_unless_locked()

    def _drain_unless_locked(self) -> None:
        """Leaves it to whoever holds the lock, who looks once more after its release."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._drain()
            yield
        self._drain_unless_locked()  # what was released while the lock was held

    def _take_kept(self, room: int) -> int | None:
        for index in reversed(range(len(self._kept))):
            if self._kept[index][0] == room:
                self._kept_bytes -= room
                return self._kept.pop(index)[1]
        return None

    def _take(self, room: int, nbytes: int) -> int:
        """The first gap that is long enough, shortened."""
        if nbytes <= _physical_bytes():
            for index, (start, length) in enumerate(self._free):
                if length >= room:
                    self._free[index : index + 1] = [(start + room, length - room)] if length > room else []
                    return start
        raise OutOfMemoryError(f"no memory for a buffer of {nbytes} bytes; free others, or use a smaller model")

    def _drain(self) -> None:
        while self._released:
            address, serial = self._released.popleft()
            room = self._live.pop(address)
            if serial <= self._pinned_before or self._borrowed:
                continue  # a forked process may yet take a copy
            self._kept.append((room, address))
            self._kept_bytes += room
        while len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES:
            room, address = self._kept.pop(0)
            self._kept_bytes -= room
            _libc().madvise(address, room, mmap.MADV_REMOVE)
            self._insert(address, room)

    def _insert(self, start: int, length: int) -> None:
        """Adds a gap, joined with its neighbours."""
        index = bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            begin, before = self._free.pop(index)
            start, length = begin, before + length
        self._free.insert(index, (start, length))

    def _lock_for_fork(self) -> None:
        self._lock.acquire()

    def _forked_parent(self) -> None:
        self._pinned_before = self._serial
        self._lock.release()

    def _forked_child(self) -> None:
        self._lock = threading.Lock()
        self._borrowed = True

    def own(self) -> None:
        """Makes the memory this process's own where a fork shares it with its parent: a copy, at the same addresses."""
        with self._locked():
            self._own()

    def _own(self) -> None:
        if not self._borrowed:
            return
        parents, copy = self.file, _create()
        os.ftruncate(copy, self.nbytes)
        for start, length in [(self.code, self._code_used), *self._live.items()]:
            _copy(parents, copy, start - self.base, length)
        if _map(self.base, self.nbytes, copy, _MAP_FIXED) is None:
            raise OutOfMemoryError("the software GPU's memory could not be mapped anew after a fork")
        os.close(parents)
        self.file, self._borrowed, self._pinned_before = copy, False, 0
        self._kept.clear()
        self._kept_bytes = 0
        edges = sorted(self._live.items())
        ends = [self._data, *(start + length for start, length in edges)]
        starts = [*(start for start, _ in edges), self.base + self.nbytes]
        self._free = [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]


def _create() -> int:
    try:
        return os.memfd_create("software-gpu", os.MFD_CLOEXEC)
    except OSError as error:
        raise DeviceError(f"the system gives the software GPU no shared memory (memfd_create): {error}") from error


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _copy(source: int, target: int, start: int, length: int) -> None:
    """Copies bytes between files, but for the holes."""
    at, end = start, start + length
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return  # only a hole is left
        stop = min(os.lseek(source, at, os.SEEK_HOLE), end)
        while at < stop:
            at += os.pwrite(target, os.pread(source, min(stop - at, 1 << 24), at), at)


_creation = threading.Lock()  # a cache alone lets two threads make one each
os.register_at_fork(before=_creation.acquire, after_in_parent=_creation.release, after_in_child=_creation.release)


def shared_memory() -> SharedMemory:
    """The memory of this process's software GPU.

    Raises:
        OutOfMemoryError: The system has no addresses for it.
        DeviceError: The system has no such memory.
    """
    with _creation:
        return _created_memory()


@functools.cache
def _created_memory() -> SharedMemory:
    return SharedMemory()
