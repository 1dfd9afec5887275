"""Answers that must be of a form: JSON, JSON of a schema, calls of tools. The masks are those of llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError, MissingDependencyError
from npu_text.serving.tool_calls import BEGIN, END
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["Grammars", "TokenGrammar", "json_grammar"]


_ALL = np.uint32(0xFFFFFFFF)


class Grammars:
    """What makes grammars for the tokens of one model."""

    def __init__(self, vocabulary: Vocabulary, size: int, ends: Sequence[int]) -> None:
        """For a model.

        Args:
            vocabulary: Its tokens.
            size: How many logits it gives.
            ends: Tokens that end a text.

        Raises:
            MissingDependencyError: llguidance is not installed.
        """
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "answers of a form need the package 'llguidance'; install it: pip install 'npu-compiler[serve]'"
            ) from error
        self._matcher: Any = llguidance.LLMatcher
        self._executor: Any = llguidance.LLExecutor()
        self._tokens: Any = llguidance.LLTokenizer(vocabulary.json, n_vocab=size, eos_token=list(ends) or None)
        self._has_end = bool(ends)

    def calls(self, tools: Sequence[dict[str, Any]], several: bool) -> str:
        """The grammar of calls of tools, as `ToolCalls` reads them.

        Args:
            tools: The functions that may be called: ``name`` and ``parameters``.
            several: Whether there may be more than one call.
        """
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    "arguments": tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        one = f'{self._symbol(BEGIN)} "\\n" call "\\n" {self._symbol(END)}'
        start = f'start: one ("\\n" one)*\none: {one}' if several else f"start: {one}"
        return _lark(start, call=calls[0] if len(calls) == 1 else {"anyOf": calls})

    def _symbol(self, text: str) -> str:
        """A text that may be a token of its own, as a grammar names it."""
        tokens = self._tokens.tokenize_str(text, parse_special=True)
        is_token = len(tokens) == 1 and self._tokens.is_special_token(tokens[0])
        return f"<[{tokens[0]}]>" if is_token else json.dumps(text)

    def make(self, grammar: str) -> TokenGrammar:
        """What follows a grammar of llguidance from its beginning.

        Raises:
            InputError: It is damaged, asks for what llguidance does not know, or nothing fits it.
        """
        matcher = self._matcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"nothing can be written to this form: {matcher.get_error()[:500]}")
        return TokenGrammar(matcher, self)

    def write_masks(self, places: Sequence[tuple[TokenGrammar, int]], masks: NDArray[np.uint32]) -> None:
        """As `MaskSource.write_masks`, on several cores; the lock of the interpreter is free meanwhile."""
        address, nbytes = masks.ctypes.data, masks.shape[1] * masks.itemsize
        matchers = [(grammar.matcher, row) for grammar, row in places]
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(address + row * nbytes, nbytes)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, address, nbytes, len(masks))
        if not self._has_end:  # else one that ends a text is in each
            for _, row in places:
                if not masks[row].any():
                    masks[row] = _ALL


class TokenGrammar:
    """Where a text is in its grammar.

    Attributes:
        matcher: llguidance's.
    """

    def __init__(self, matcher: Any, grammars: Grammars) -> None:
        """For `Grammars.make`."""
        self.matcher, self._grammars = matcher, grammars

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end."""
        return bool(self.matcher.is_stopped())

    def write_masks(self, places: Sequence[tuple[TokenGrammar, int]], masks: NDArray[np.uint32]) -> None:
        """As `MaskSource.write_masks`: the tokens that may follow; at the end only those that end a text."""
        self._grammars.write_masks(places, masks)

    def take(self, token: int) -> None:
        """Goes on behind `token`."""
        self.matcher.consume_token(token)


def json_grammar(schema: dict[str, Any] | None) -> str:
    """JSON of a schema, or any object.

    Raises:
        InputError: The schema is none.
    """
    return _lark("start: answer", answer=schema if schema is not None else {"type": "object"})


def _lark(start: str, **schemas: dict[str, Any]) -> str:
    """A grammar in llguidance's form of Lark."""
    rules = [f"{name}: %json {json.dumps(schema)}" for name, schema in schemas.items()]
    return "%llguidance {}\n" + "\n".join([start, *rules])
