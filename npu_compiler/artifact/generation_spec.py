"""What a folder with a language model holds, and by which names its functions take and give their tensors."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from npu_compiler.artifact.batch_spec import BatchSpec, BatchStepSpec
from npu_compiler.artifact.codec import decode
from npu_compiler.dtypes import ALL
from npu_compiler.errors import IRError, ProgramFormatError

__all__ = ["FILE_NAME", "GenerationSpec", "StepSpec"]

FILE_NAME = "generation.json"
_FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True)
class StepSpec:
    """A function that takes some tokens of one sequence, and updates the caches.

    Attributes:
        ir: Name of its IR file.
        length: How many tokens it takes.
        tokens: The input with the tokens: int64 [1, length].
        positions: The input with their positions, which are their places in the caches too: int64 [length].
        last: The input that says which token's logits to give: int64 [1]; empty where there is one token.
        logits: The output with the logits: [1, 1, vocabulary].
        caches: For each cache its input, and the output that is its new state.
    """

    ir: str
    length: int
    tokens: str
    positions: str
    last: str
    logits: str
    caches: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GenerationSpec:
    """A language model as IR: functions of several lengths that share weights and caches.

    Attributes:
        model: Name of the model's class.
        dtype: Data type that it computes in, and of its weights where they are not codes.
        vocabulary: How many logits there are.
        cache_length: The most tokens that a sequence may have.
        cache_shapes: Shape of each cache: [1, heads, cache_length, head size]; of the scales of one in codes the head
            size is 1.
        stop_ids: Tokens that end a text.
        weights: Name of the safetensors file.
        functions: The functions by name; one of them takes a single token.
        batch: Functions for many texts at once, which share the weights; None without.
        cache_dtypes: Data type of each cache; `dtype` for all where there are none.
    """

    model: str
    dtype: str
    vocabulary: int
    cache_length: int
    cache_shapes: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]
    weights: str
    functions: dict[str, StepSpec]
    batch: BatchSpec | None = None
    cache_dtypes: tuple[str, ...] = ()

    @property
    def caches(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and data type of each cache."""
        return [*zip(self.cache_shapes, self.cache_dtypes or (self.dtype,) * len(self.cache_shapes), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """The content of ``generation.json``."""
        return {"format": _FORMAT} | dataclasses.asdict(self)

    @classmethod
    def load(cls, folder: Path) -> GenerationSpec:
        """Reads ``generation.json``.

        Raises:
            IRError: It is missing, or does not say what it must.
        """
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise IRError(
                f"cannot read '{path}': {error.strerror}; give a folder that `npu extract-llm` made"
            ) from error
        except (ValueError, RecursionError) as error:
            raise IRError(f"'{path}' is not JSON ({error}); extract the model again") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise IRError(f"'{path}' is not of format {_FORMAT}; extract the model again with this release")
        functions, batch = _step_fields(StepSpec, content.get("functions")), _batch_fields(content.get("batch"))
        try:
            read = {"cache_dtypes": [], **content, "functions": functions, "batch": batch}
            spec = _decoded(cls, read, str(path))
        except ProgramFormatError as error:
            raise IRError(f"{error}; extract the model again") from error
        _check(spec, path)
        return spec


def _step_fields(kind: type[Any], functions: object) -> object:
    if not isinstance(functions, dict):
        return functions
    return {name: _ordered(kind, fields) for name, fields in functions.items()}


def _batch_fields(batch: object) -> object:
    if not isinstance(batch, dict):
        return batch
    read = {"pool_dtypes": [], **batch}
    return _ordered(BatchSpec, read | {"functions": _step_fields(BatchStepSpec, batch.get("functions"))})


def _ordered(kind: type[Any], fields: object) -> object:
    """The fields of a JSON object in the order of a dataclass, as `decode` takes them."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [fields[name] for name in names] if isinstance(fields, dict) and set(fields) == set(names) else fields


def _decoded(kind: type[T], content: dict[str, Any], where: str) -> T:
    value: T = decode(kind, _ordered(kind, content), where)
    return value


def _check(spec: GenerationSpec, path: Path) -> None:
    """Refuses what contradicts itself, and files outside the folder."""
    batched = [] if spec.batch is None else [step.ir for step in spec.batch.functions.values()]
    for name in (spec.weights, *(step.ir for step in spec.functions.values()), *batched):
        if Path(name).name != name:
            raise IRError(f"'{path}' names the file '{name}', expected one beside it; extract the model again")
    known = {kind.name for kind in ALL}
    if len(spec.cache_dtypes) not in (0, len(spec.cache_shapes)) or not {*spec.cache_dtypes} <= known:
        raise IRError(
            f"'{path}' has {len(spec.cache_shapes)} caches of the data types {list(spec.cache_dtypes)}, expected one "
            "that there is for each; extract the model again"
        )
    lengths = sorted(step.length for step in spec.functions.values())
    if not lengths or lengths[0] != 1 or len(set(lengths)) != len(lengths) or lengths[-1] > spec.cache_length:
        raise IRError(
            f"'{path}' has functions of {lengths} tokens for a cache of {spec.cache_length}, expected different "
            "lengths up to that, the first of them 1; extract the model again"
        )
    if any(shape[2:3] != (spec.cache_length,) for shape in spec.cache_shapes):
        raise IRError(f"'{path}' has caches of other than {spec.cache_length} tokens; extract the model again")
    for name, step in spec.functions.items():
        if len(step.caches) != len(spec.cache_shapes) or (step.last == "") != (step.length == 1):
            raise IRError(f"'{path}': function '{name}' does not fit the caches or its length; extract the model again")
    wrong = "" if spec.batch is None else spec.batch.contradiction()
    if wrong:
        raise IRError(f"'{path}' has {wrong}; extract the model again")
