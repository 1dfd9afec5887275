"""What clients may ask for, field by field.

Unknown fields are ignored, as the API does; those that are known and not supported are refused (`UNSUPPORTED`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "ErrorBody",
    "JSONSchema",
    "Message",
    "NamedTool",
    "ResponseFormat",
    "SamplingFields",
    "TokenizeRequest",
    "Tool",
    "UNSUPPORTED",
]

_MOST_STRINGS = 16
_MOST_TEXTS = 128
_MOST_INPUTS = 2048
_INT64 = 1 << 63


def _list(most: int | None = None, least: int | None = None) -> Any:
    """So many items. The first wrong one is told alone: where a list is of another kind, all of a million are."""
    return Field(min_length=least, max_length=most, fail_fast=True)


Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_INT64)]], _list(least=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    """A JSON object; what it has beyond its fields is kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None


class SamplingFields(_Body):
    """How tokens are chosen, for chats and for texts."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Stop | Annotated[list[Stop], _list(_MOST_STRINGS)] | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_TEXTS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None


class Part(_Body):
    type: str
    text: str | None = None


class FunctionCall(_Body):
    name: str
    arguments: str = "{}"


class CalledTool(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], _list()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], _list()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(_Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class _Name(_Body):
    name: str


class NamedTool(_Body):
    """The one tool to call."""

    type: Literal["function"]
    function: _Name


class JSONSchema(_Body):
    """A schema for answers."""

    name: str = "answer"
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(_Body):
    """The form of answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], _list(least=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], _list(_MOST_TEXTS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: (
        str | Annotated[list[str], _list(_MOST_TEXTS, 1)] | TokenIds | Annotated[list[TokenIds], _list(_MOST_TEXTS, 1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None


class EmbeddingRequest(_Body):
    """POST /v1/embeddings"""

    model: str
    input: (
        str
        | Annotated[list[str], _list(_MOST_INPUTS, 1)]
        | TokenIds
        | Annotated[list[TokenIds], _list(_MOST_INPUTS, 1)]
    )
    encoding_format: Literal["float", "base64"] | None = None


class TokenizeRequest(_Body):
    """POST /tokenize"""

    prompt: str | None = None
    messages: Annotated[list[Message], _list(least=1)] | None = None
    add_special_tokens: bool | None = None


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What is answered when something is wrong."""

    error: _Error


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "min_tokens": (None, 0),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "grammar": (None, ""),
    "dimensions": (None,),
}
"""Fields that clients know and that nothing is done about, with the values that ask for nothing."""
