"""Conversations as the text that a model was trained on, by the template that came with it.

Templates come from strangers: they are rendered in jinja2's sandbox, which shows them nothing of the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from npu_compiler.errors import InputError, MissingDependencyError

__all__ = ["ChatTemplate"]

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """A chat template of Hugging Face."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """A template.

        Args:
            source: In jinja2.
            names: Of special tokens, such as ``bos_token``.

        Raises:
            MissingDependencyError: jinja2 is not installed.
            InputError: It is no template.
        """
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "chat templates need the package 'jinja2'; install it: pip install 'npu-compiler[serve]'"
            ) from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # jinja2 writes Python, which refuses what is nested too deep, or numbers that are too long
            raise InputError(f"the chat template is damaged: {error}") from error
        self._names = dict(names)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """That of a model's folder: ``chat_template.jinja``, or a field of ``tokenizer_config.json``.

        Raises:
            InputError: It is damaged.
            MissingDependencyError: jinja2 is not installed.
        """
        path, own = folder / _CONFIG, folder / _FILE
        try:
            config = json.loads(path.read_bytes()) if path.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"'{path}' is not JSON ({error}); copy it anew from the model") from error
        if not isinstance(config, dict):
            raise InputError(f"'{path}' holds a {type(config).__name__}, expected an object; copy it anew")
        source = config.get("chat_template")
        try:
            source = own.read_text(encoding="utf-8") if own.is_file() else source
        except (OSError, ValueError) as error:
            raise InputError(f"'{own}' cannot be read as text ({error}); copy it anew from the model") from error
        if isinstance(source, list):  # several, by names
            named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
            source = next((entry.get("template") for entry in named), None)
        if not isinstance(source, str):
            return None
        return cls(source, {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation, up to where the model goes on.

        Args:
            messages, tools: As templates take them.
            options: What else the template may read, by any names; those of the messages and tools win.

        Raises:
            InputError: The template does not take it.
        """
        variables = {"add_generation_prompt": True} | self._names | dict(options)
        try:
            return self._template.render(variables | {"messages": messages, "tools": tools})
        except Exception as error:  # a template is a program, and may fail as any does
            raise InputError(f"the model's chat template does not take these messages: {error}") from error


def _content(token: Any) -> str:
    """The text of a special token, which is written in two ways."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
