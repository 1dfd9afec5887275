"""The server's application: which address answers what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from npu_compiler import __version__
from npu_compiler.errors import InputError, NPUError
from npu_text.serving.chat import Chat, conversation
from npu_text.serving.completions import Completion
from npu_text.serving.embeddings import Embedder, Embeddings
from npu_text.serving.errors import APIError, api_error, field_error, unknown_model
from npu_text.serving.guard import Guard, GuardOptions
from npu_text.serving.metrics import Metrics
from npu_text.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ErrorBody,
    TokenizeRequest,
)
from npu_text.serving.replies import EventStream, unless_gone
from npu_text.serving.service import Service

__all__ = ["AppOptions", "make_app"]

_Read = TypeVar("_Read")
_LARGE = 16 << 10  # bytes of a request whose tokens and forms may take longer than others should wait
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}


@dataclass(frozen=True)
class AppOptions:
    """How a server behaves.

    Attributes:
        guard: What is let through.
        reader: Seconds for which the reader of a stream may take nothing.
        leave: Seconds that texts have to end when the server stops.
    """

    guard: GuardOptions = field(default_factory=GuardOptions)
    reader: float = 60.0
    leave: float = 30.0


def make_app(
    service: Service | None, embedder: Embedder | None, metrics: Metrics, options: AppOptions | None = None
) -> ASGIApp:
    """The application of a server.

    Args:
        service: The model for texts, if there is one.
        embedder: The model for embeddings, if there is one.
        metrics: What /metrics tells.
        options: How it behaves.
    """
    options = options or AppOptions()
    reader = _Reader()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if service is not None:
            service.core.start()
            metrics.watch(service.core.driver)
        yield
        if service is not None:
            await service.core.stop(options.leave)
        reader.stop()

    app = FastAPI(title="npu serve", version=__version__, lifespan=lifespan, responses=_REFUSALS)
    _add_errors(app)
    if service is not None:
        _add_texts(app, service, reader, options)
    if embedder is not None:
        _add_embeddings(app, embedder, reader)
    _add_rest(app, service, embedder, metrics)
    _forget_other_refusals(app)
    everywhere = CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return Guard(everywhere, options.guard)


class _Reader:
    """Makes of requests what answers them; of large ones in a thread, so that they hold up nobody but each other.

    One thread: tokenizers keep words for each thread that asks them.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-requests")

    async def read(self, request: Request, make: Callable[[], _Read]) -> _Read:
        """What `make` gives."""
        if len(await request.body()) < _LARGE:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def stop(self) -> None:
        """Ends the thread; what waits for it is not read any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _add_texts(app: FastAPI, service: Service, reader: _Reader, options: AppOptions) -> None:
    events: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
    page = (files("npu_text.serving") / "page.html").read_text(encoding="utf-8")

    async def answer(what: Chat | Completion, stream: bool | None, request: Request) -> Response:
        if not stream:
            return JSONResponse(await unless_gone(what.whole(), request))
        parts = what.stream()
        return EventStream(await anext(parts), parts, options.reader)

    @app.post("/v1/chat/completions", responses=events)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer(await reader.read(request, lambda: Chat(service, body)), body.stream, request)

    @app.post("/v1/completions", responses=events)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer(await reader.read(request, lambda: Completion(service, body)), body.stream, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        tokens = await reader.read(request, lambda: _tokens(service, body))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.core.engine.context}

    @app.get("/status", include_in_schema=False)
    async def status() -> dict[str, Any]:
        return service.core.driver.status()._asdict()

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return HTMLResponse(page)


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise APIError("given neither or both of prompt and messages, expected one", param="prompt")
    if body.messages is not None:
        return conversation(service, body.messages, [], None)
    try:
        return service.vocabulary.encode(body.prompt or "", special=body.add_special_tokens is not False)
    except InputError as error:
        raise APIError(str(error), param="prompt") from error


def _add_embeddings(app: FastAPI, embedder: Embedder, reader: _Reader) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        return await (await reader.read(request, lambda: Embeddings(embedder, body))).whole()


def _add_rest(app: FastAPI, service: Service | None, embedder: Embedder | None, metrics: Metrics) -> None:
    created = int(time.time())
    names = [model.name for model in (service, embedder) if model is not None]
    models = {name: {"id": name, "object": "model", "created": created, "owned_by": "npu"} for name in names}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(models.values())}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        if model not in models:
            raise unknown_model(model, names)
        return models[model]

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if service is not None and (failure := service.core.driver.status().failure):
            raise APIError(failure, status=503)
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def all_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    """Answers errors in the API's form, whoever raised them."""

    def answer(error: APIError, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse(error.body, error.status, dict(headers or {}) | error.headers)

    def on(kind: type[Exception], told: Callable[[Any], APIError]) -> None:
        async def handler(_: Request, error: Exception) -> Response:
            return answer(told(error), getattr(error, "headers", None))

        app.add_exception_handler(kind, handler)

    on(APIError, lambda error: error)
    on(NPUError, api_error)
    on(RequestValidationError, _invalid)
    on(HTTPException, lambda error: APIError(str(error.detail), status=error.status_code))
    on(ClientDisconnect, lambda _: APIError("the client left", status=400))
    on(Exception, lambda _: APIError("an error of the server; its log says more", status=500))


def _invalid(error: RequestValidationError) -> APIError:
    """The first thing that is wrong with a body."""
    (first, *_) = found = error.errors()
    if first["type"] == "json_invalid":
        return APIError(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    return field_error([each | {"loc": each["loc"][1:]} for each in found])


def _forget_other_refusals(app: FastAPI) -> None:
    """Takes out of the description what FastAPI would answer without our handlers."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        schema = describe()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = described  # type: ignore[method-assign]
