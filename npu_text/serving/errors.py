"""Errors as clients of the API expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_compiler.errors import BusyError, InputError, MissingDependencyError, NPUError

__all__ = ["APIError", "api_error", "field_error", "unknown_model"]

_RETRY_SECONDS = 1


class APIError(Exception):
    """An answer that says what is wrong.

    Attributes:
        status: Of HTTP.
        message: What is wrong, and what to do.
        kind: The API's name of the kind of error.
        param: The field that it is about.
        code: The API's name of the error.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)
        self.status, self.code = status, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers: when to try again."""
        return {"Retry-After": str(_RETRY_SECONDS)} if self.status in (429, 503) else {}


def _sendable(text: str) -> str:
    """A text with what UTF-8 cannot hold by its number: a request may name halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def api_error(error: NPUError) -> APIError:
    """An error of the project, told to a client."""
    if isinstance(error, BusyError):
        return APIError(str(error), status=429, kind="rate_limit_error", code="overloaded")
    if isinstance(error, InputError | MissingDependencyError):
        return APIError(str(error))
    return APIError(str(error), status=503)


def field_error(found: Sequence[Mapping[str, Any]]) -> APIError:
    """The first thing that is wrong with the fields of a request: errors as pydantic lists them, told to a client."""
    first = max(found, key=lambda each: len(each["loc"]))  # of choices, the one that came the farthest
    place = [str(part) for part in first["loc"]]
    return APIError(f"{'.'.join(place) or 'body'}: {first['msg']}", param=place[0] if place else None)


def unknown_model(model: str, names: Sequence[str]) -> APIError:
    """A model is asked for that is none of those with these names."""
    return APIError(
        f"the model '{model:.80}' is not here; this server has {', '.join(names)}",
        status=404,
        param="model",
        code="model_not_found",
    )
