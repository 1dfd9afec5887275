"""A folder, served: opens what is in it, and listens until it is told to stop."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec
from npu_compiler.errors import DeviceError, InputError, MissingDependencyError
from npu_runtime.device import Device
from npu_text.batching.engine import BatchEngine
from npu_text.batching.paged_engine import PagedEngine
from npu_text.batching.texts import Limits
from npu_text.serving.limited_http import http_protocol

__all__ = [
    "Served",
    "ServerOptions",
    "app_of",
    "needing_extra",
    "open_app",
    "open_model",
    "prefer_texts",
    "run",
    "run_at",
]

_log = logging.getLogger("uvicorn.error")
_SWITCH_SECONDS = 0.0005
_LEAVE_SECONDS = 30  # for texts to end when the server is told to stop


@dataclass(frozen=True)
class ServerOptions:
    """How a folder is served.

    Attributes:
        name: By which clients ask for the model; the folder's name when empty.
        keys: Those that clients may have; any, where there are none.
        body: Bytes of a request's body, at most.
        patience: Seconds for which a text may wait to start.
        temperature: Where a request names none.
        limits: Of the scheduler.
    """

    name: str = ""
    keys: tuple[str, ...] = ()
    body: int = 4 << 20
    patience: float = 60.0
    temperature: float = 1.0
    limits: Limits = field(default_factory=Limits)


class Served(NamedTuple):
    """A folder's model, ready to answer once its core is started: one for texts, or an encoder.

    Attributes:
        service: A `Service`; None for an encoder.
        embedder: An `Embedder`; None for a language model.
        metrics: The `Metrics` of the one and the other.
    """

    service: Any
    embedder: Any
    metrics: Any

    def check(self) -> None:
        """Looks whether it still answers.

        Raises:
            DeviceError: The device failed; only a new start helps.
        """
        if self.service is not None and (failure := self.service.core.driver.status().failure):
            raise DeviceError(failure)


@contextmanager
def needing_extra() -> Iterator[None]:
    """Imports of what serving needs.

    Raises:
        MissingDependencyError: The extra ``serve`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"serving needs the package '{error.name}', which is not installed; install the extra that has it: "
            "pip install 'npu-compiler[serve]'"
        ) from error


def open_app(folder: Path, device: Device, options: ServerOptions, engine: BatchEngine | None = None) -> Any:
    """The application that serves a folder: `app_of` what `open_model` gives."""
    with needing_extra():
        import_module("npu_text.serving.app")  # what is missing is told before the model is compiled
    return app_of(open_model(folder, device, options, engine), options)


def open_model(folder: Path, device: Device, options: ServerOptions, engine: BatchEngine | None = None) -> Served:
    """The model of a folder.

    Args:
        folder: What ``npu extract-llm --lanes`` made, or an encoder (`encoder.open_encoder`).
        device: Where to run.
        options: How it is served.
        engine: Computes; a `PagedEngine` on the device when omitted.

    Raises:
        MissingDependencyError: The extra ``serve`` is not installed.
        NPUError: The folder is none of these, incomplete or damaged, or the device cannot run the model.
    """
    if not folder.is_dir():
        raise InputError(f"'{folder}' is no folder; give what `npu extract-llm --lanes` made")
    with needing_extra():
        from npu_text.serving.chat_template import ChatTemplate
        from npu_text.serving.core import Core
        from npu_text.serving.encoder import open_encoder
        from npu_text.serving.grammars import Grammars
        from npu_text.serving.metrics import Metrics
        from npu_text.serving.service import Service, ServiceOptions
        from npu_text.serving.vocabulary import Vocabulary

    name, metrics = options.name or folder.resolve().name, Metrics()
    vocabulary = Vocabulary.load(folder)
    if not (folder / FILE_NAME).is_file():
        return Served(None, open_encoder(name, folder, device, vocabulary), metrics)
    spec = GenerationSpec.load(folder)
    engine = engine or PagedEngine(folder, device)
    service = Service(
        name,
        Core(engine, vocabulary, options.limits, metrics),
        frozenset(spec.stop_ids),
        ChatTemplate.load(folder),
        Grammars(vocabulary, engine.vocabulary, spec.stop_ids),
        ServiceOptions(patience=options.patience, temperature=options.temperature),
    )
    return Served(service, None, metrics)


def app_of(model: Served, options: ServerOptions) -> Any:
    """The application that answers for a model.

    Raises:
        MissingDependencyError: The extra ``serve`` is not installed.
    """
    with needing_extra():
        from npu_text.serving.app import AppOptions, make_app
        from npu_text.serving.guard import GuardOptions
    guard = GuardOptions(keys=options.keys, body=options.body)
    return make_app(model.service, model.embedder, model.metrics, AppOptions(guard=guard))


def run(app: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until the process is told to stop (SIGINT, SIGTERM); texts then have some time to end.

    Args:
        app: What `open_app` gave.
        host, port: Where to listen; port 0 for any that is free.
        ready: Is told the address when clients may come.

    Raises:
        InputError: Nothing can listen there.
    """
    config = _config(app, host=host, port=port)
    try:
        _listen(config, lambda bound: ready(f"http://{host}:{bound[1]}"), signal.SIGINT, signal.SIGTERM)
    except SystemExit as error:  # uvicorn has told on standard error what it was
        raise InputError(f"nothing can listen on {host}:{port}; choose another with --host and --port") from error


def run_at(app: Any, path: str, ready: Callable[[], None]) -> None:
    """Serves at a socket that other processes of this machine find by its path, until SIGTERM.

    Args:
        app: What `open_app` gave.
        path: Of the socket.
        ready: Is called when clients may come.
    """
    _listen(_config(app, uds=path), lambda _: ready(), signal.SIGTERM)


def _config(app: Any, **place: Any) -> Any:
    import uvicorn

    return uvicorn.Config(
        app,
        **place,
        http=http_protocol(),
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_LEAVE_SECONDS,
    )


def _listen(config: Any, ready: Callable[[Any], None], *signals: signal.Signals) -> None:
    """Serves until one of the signals; tells the address when clients may come."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As the class does, but a server that was told to stop has not failed."""
            before = {number: signal.signal(number, self.handle_exit) for number in signals}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            _log.disabled = self.force_exit  # who asks twice wants no traceback of what is cut off

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready(self.servers[0].sockets[0].getsockname())

    prefer_texts()
    try:
        Server(config).run()
    finally:
        _log.disabled = False


def prefer_texts() -> None:
    """Keeps Python from holding up texts in this process, whose model is open.

    Its threads take turns more often: the engine's is not to wait for one that writes JSON. What there is by now stays,
    and is looked through for cycles no more, which stops all threads for tens of milliseconds each time.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
