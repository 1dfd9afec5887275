"""A server with a simulated device and a small tokenizer, in a thread, for clients of all kinds."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from npu_text.batching.texts import Limits
from npu_text.serving.limited_http import http_protocol
from tests.support.simulated_engine import SimulatedEngine

__all__ = ["CHAT", "END", "MODEL", "Server", "make_service", "make_tokenizer", "running", "serve", "simulated_app"]

MODEL, END = "tiny", 256
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant\n"
)


def make_tokenizer() -> Any:
    """A tokenizer of `tokenizers`: the 256 bytes, and some tokens that stand for themselves."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


@dataclass
class Server:
    """A server that runs.

    Attributes:
        url: Without a path.
        engine: Its device.
        service: Its model.
    """

    url: str
    engine: SimulatedEngine
    service: Any


def make_service(
    engine: SimulatedEngine | None = None, limits: Limits | None = None, metrics: Any = None, **options: Any
) -> Any:
    """A `Service` on a simulated device; `options` are those of `ServiceOptions`."""
    for module in ("fastapi", "uvicorn", "llguidance", "prometheus_client", "jinja2"):
        pytest.importorskip(module)
    from npu_text.serving.chat_template import ChatTemplate
    from npu_text.serving.core import Core
    from npu_text.serving.grammars import Grammars
    from npu_text.serving.service import Service, ServiceOptions
    from npu_text.serving.vocabulary import Vocabulary

    if engine is None:
        engine = SimulatedEngine(lanes=4, pages=400, page_tokens=16, context=1024)
        engine.chunks, engine.ending = (32, 128, 512), END
    tokenizer = make_tokenizer()
    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer)
    return Service(
        MODEL,
        Core(engine, vocabulary, limits, metrics),
        frozenset({END}),
        ChatTemplate(CHAT, {}),
        Grammars(vocabulary, engine.vocabulary, [END]),
        ServiceOptions(**options),
    )


def simulated_app(
    engine: SimulatedEngine | None = None, limits: Limits | None = None, **options: Any
) -> tuple[Any, Any]:
    """An application and its service; `options` are those of `AppOptions`, and `service` those of `ServiceOptions`."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("fastapi")
    from npu_text.serving.app import AppOptions, make_app
    from npu_text.serving.metrics import Metrics

    metrics = Metrics()
    service = make_service(engine, limits, metrics, **options.pop("service", {}))
    embedder = options.pop("embedder", None)
    return make_app(service, embedder, metrics, AppOptions(**{"leave": 1} | options)), service


@contextmanager
def serve(engine: SimulatedEngine | None = None, limits: Limits | None = None, **options: Any) -> Iterator[Server]:
    """A server on a free port; the arguments are those of `simulated_app`."""
    app, service = simulated_app(engine, limits, **options)
    with running(app) as url:
        yield Server(url, service.core.engine, service)


@contextmanager
def running(app: Any, head_seconds: float = 30.0) -> Iterator[str]:
    """An application on a free port; heads of requests must arrive within so many seconds."""
    uvicorn = pytest.importorskip("uvicorn")
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=http_protocol(head_seconds), log_level="warning", lifespan="on", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # as uvicorn's own `run` does
            runner.run(server.serve([listening]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"
