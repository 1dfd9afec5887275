"""Several processes that serve the same folder, each on a device of its own and on a socket that only they know."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from npu_compiler.errors import DeviceError, NPUError
from npu_text.serving.server import run_at

__all__ = ["Replica", "Replicas"]

_log = logging.getLogger("uvicorn.error")  # where the server that they stand behind tells of its troubles
_SPAWN = multiprocessing.get_context("spawn")  # a fork would share a device that is open
_END_SECONDS = 40.0  # for a process to end that was told to: more than texts have
_GONE_SECONDS = 5.0  # the same, of one that has closed all that it had
_PAUSES = (1.0, 30.0)  # seconds before another start where one failed: at first, and at most


class Replica:
    """A process that serves, started again as often as need be.

    Attributes:
        name: What to call it.
        path: Of its socket.
        is_ready: Whether it answers.
    """

    def __init__(self, name: str, path: Path, make: Callable[[], Any]) -> None:
        """Starts nothing yet.

        Args:
            name: What to call it.
            path: Of its socket.
            make: Makes the application, in the process; can be pickled.
        """
        self.name, self.path, self._make = name, path, make
        self.is_ready = False
        self._process: Any = None
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        """Starts the process, and waits until it answers.

        Raises:
            DeviceError: It does not.
        """
        ours, its = _SPAWN.Pipe(duplex=False)
        with self._lock:
            if self._stopped:
                raise DeviceError(f"{self.name} was told to stop")
            arguments = (self._make, str(self.path), its)
            process = _SPAWN.Process(target=_serve, args=arguments, name=self.name, daemon=True)
            try:
                process.start()
            except OSError as error:
                raise DeviceError(f"{self.name} does not start: {error}") from error
            self._process = process
        its.close()
        try:
            trouble = ours.recv()
        except EOFError:
            process.join()
            trouble = f"it ended with the exit code {process.exitcode}"
        finally:
            ours.close()
        if trouble:
            raise DeviceError(f"{self.name} does not start: {trouble}")
        self.is_ready = True

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read when the process has ended."""
        return int(self._process.sentinel)

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid)

    def kill(self) -> None:
        """Ends a process that is of no use any more."""
        self._process.kill()

    def end(self, patience: float) -> int | None:
        """Waits so many seconds for the process to end, then ends it; gives its exit code. None where there is none."""
        if self._process is None:
            return None
        self._process.join(patience)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
        return int(self._process.exitcode)

    def tell_to_stop(self) -> None:
        """Asks the process to end; there will be no other."""
        with self._lock:
            self._stopped, self.is_ready = True, False
            if self._process is not None and self._process.is_alive():
                self._process.terminate()


class Replicas:
    """All of them.

    Attributes:
        all: By their numbers.
    """

    def __init__(self, makes: Sequence[tuple[str, Callable[[], Any]]]) -> None:
        """Starts nothing yet.

        Args:
            makes: For each its name, and what makes its application in its process; can be pickled.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="npu-serve-")  # which nobody else can look into
        self.all = [
            Replica(name, Path(self._folder.name) / str(number), make) for number, (name, make) in enumerate(makes)
        ]

    @property
    def ready(self) -> list[int]:
        """The numbers of those that answer."""
        return [number for number, replica in enumerate(self.all) if replica.is_ready]

    def start(self) -> None:
        """Starts them: one, which may have kernels to compile that all of them need, then the others.

        Raises:
            DeviceError: One does not start; then none runs.
        """
        troubles: list[DeviceError] = []

        def start(replica: Replica) -> None:
            try:
                replica.start()
            except DeviceError as error:
                troubles.append(error)

        try:
            for some in (self.all[:1], self.all[1:]):
                threads = [threading.Thread(target=start, args=(replica,), daemon=True) for replica in some]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if troubles:
                    raise troubles[0]
        except BaseException:
            self.stop()
            raise

    async def keep(self, on_loss: Callable[[int], None]) -> None:
        """Starts again what ends, until it is cancelled.

        Args:
            on_loss: Is told which one ended.
        """
        await asyncio.gather(*(self._keep(number, on_loss) for number in range(len(self.all))))

    async def _keep(self, number: int, on_loss: Callable[[int], None]) -> None:
        replica = self.all[number]
        while True:
            await _readable(replica.sentinel)
            replica.is_ready = False
            on_loss(number)
            _log.error("%s ended with the exit code %s; it is started again", replica.name, replica.end(_GONE_SECONDS))
            pause, most = _PAUSES
            while not replica.is_ready:
                try:
                    await asyncio.to_thread(replica.start)
                except DeviceError as error:
                    _log.error("%s; the next try is in %g s", error, pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, most)

    def stop(self) -> None:
        """Ends all of them."""
        for replica in self.all:
            replica.tell_to_stop()
        for replica in self.all:
            replica.end(_END_SECONDS)
        self._folder.cleanup()


def _serve(make: Callable[[], Any], path: str, told: Connection) -> None:
    """What runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started this one, and tells it to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        app = make()
    except NPUError as error:
        told.send(str(error))
        sys.exit(1)
    run_at(app, path, lambda: told.send(""))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


async def _readable(descriptor: int) -> None:
    loop, found = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, found.set)
    try:
        await found.wait()
    finally:
        loop.remove_reader(descriptor)
