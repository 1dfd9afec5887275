"""`extract_language_model`: a decoder of Hugging Face to IR: prefill of several lengths, and a decode step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from npu_compiler.artifact.batch_spec import BatchSpec, BatchStepSpec
from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec, StepSpec
from npu_compiler.artifact.output_file import write_file
from npu_compiler.errors import ExtractionError, IRError
from npu_compiler.frontend.cache_forms import RowForm, row_form
from npu_compiler.frontend.cached_decoder import CachedDecoder, cache_shapes
from npu_compiler.frontend.decoder_request import (
    WEIGHTS,
    BatchRequest,
    RoundingRequest,
    allowed_length,
    check_request,
    prefill_lengths,
)
from npu_compiler.frontend.decoder_source import load_decoder
from npu_compiler.frontend.extraction import Extraction, extract
from npu_compiler.frontend.paged_decoder import PagedDecoder
from npu_compiler.frontend.weight_file import write_json, write_weights

__all__ = ["extract_language_model"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_WRAPPER = "model."  # what `CachedDecoder` puts before the model's own names


def extract_language_model(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    cache_length: int | None = None,
    prefill: Sequence[int] | None = None,
    dtype: str | None = None,
    seed: int = 0,
    batch: BatchRequest | None = None,
    rounding: RoundingRequest | None = None,
) -> GenerationSpec:
    """Writes a decoder-only language model as IR, with one file of weights that all its functions share.

    The folder gets ``generation.json``, ``decode.json``, a ``prefill_N.json`` for each length, ``model.safetensors``,
    and the tokenizer's files where the source has them; for many texts at once a ``decode_B.json`` for each number of
    lanes, a ``chunk_N.json`` for each chunk of a prompt, and a ``chunk_NxR.json`` for chunks of R prompts. Functions of
    an earlier extraction are removed from it.

    Args:
        source: A Hugging Face folder; or a configuration, as a file or a folder without weights, for seeded weights.
        folder: Where to write; made where it does not exist.
        cache_length: The most tokens of a sequence; 2048 when None, or as many positions as the model knows.
        prefill: Lengths of prompts to extract a function for; 128 and 512 when None, as far as the cache holds them.
        dtype: Of weights and caches; `decoder_source.load_decoder` says what None means.
        seed: Of the weights, where the source has none.
        batch: What is wanted for many texts at once; None for nothing.
        rounding: What is rounded to codes of a byte; what the checkpoint says when None.

    Raises:
        ExtractionError: The source is no language model that keeps plain keys and values, an argument does not fit it,
            or the folder cannot be written.
    """
    rounded = rounding or RoundingRequest()
    check_request(Path(source), Path(folder), cache_length, prefill, seed, batch)
    model = load_decoder(Path(source), dtype, seed, rounded.activations)
    length = _checked_length(model.config, cache_length)
    lengths = prefill_lengths(prefill, length)
    form = row_form(rounded.kv_cache, model.dtype)
    caches = _empty_caches(model, length, form)
    decoder = CachedDecoder(model, form)
    _check_same_results(decoder, caches)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _remove_functions(target)
        _copy_tokenizer(Path(source), target)
    except OSError as error:
        raise ExtractionError(f"cannot write to '{target}': {error.strerror}; choose another folder") from error
    weights: dict[str, torch.Tensor] = {}
    steps = {}
    for name, count in {**{f"prefill_{n}": n for n in lengths}, "decode": 1}.items():
        extraction = extract(decoder, _example(count, caches), model_name=f"{type(model).__name__}.{name}")
        _merge(weights, extraction, name)
        write_json(target / f"{name}.json", extraction.ir)
        steps[name] = _step(extraction.ir, f"{name}.json", count)
    batched = None if batch is None else _extract_batch(batch, model, form, length, target, weights)
    write_weights(target / WEIGHTS, weights)
    spec = GenerationSpec(
        model=type(model).__name__,
        dtype=_name(model.dtype),
        vocabulary=int(model.get_output_embeddings().out_features),
        cache_length=length,
        cache_shapes=tuple(tuple(cache.shape) for cache in caches),
        cache_dtypes=tuple(_name(cache.dtype) for cache in caches),
        stop_ids=_stop_ids(model),
        weights=WEIGHTS,
        functions=steps,
        batch=batched,
    )
    write_json(target / FILE_NAME, spec.to_json())
    return spec


def _extract_batch(
    request: BatchRequest, model: Any, form: RowForm, length: int, target: Path, weights: dict[str, torch.Tensor]
) -> BatchSpec:
    """Writes the functions for many texts at once, and adds what they alone hold to the weights."""
    context, size = request.context(length), request.page_tokens
    pages = request.all_pages(context)
    shapes = [(pages + 1, shape[1], size, shape[3]) for shape in cache_shapes(model, 1)]
    held = [each for shape in shapes for each in form.empty(shape)]
    pools = tuple(torch.empty(1, dtype=kind).expand(shape) for shape, kind in held)  # of no memory
    plain = form.tensors == 1 and all(each.is_floating_point() and each.element_size() > 1 for each in model.buffers())
    plain = plain and all(each.dtype == model.dtype for each in model.parameters())
    steps = {}
    for name, (lanes, count, fills) in request.shapes(context, plain).items():
        inputs: dict[str, Any] = {key: torch.zeros(lanes, count, dtype=torch.long) for key in ("tokens", "positions")}
        inputs |= {"tables": torch.zeros(lanes, context // size, dtype=torch.int32), "pools": pools}
        decoder = PagedDecoder(model, form, fills=fills)
        extraction = extract(decoder, inputs, model_name=f"{type(model).__name__}.{name}")
        _merge(weights, extraction, name)
        write_json(target / f"{name}.json", extraction.ir)
        steps[name] = _batch_step(extraction.ir, f"{name}.json", (lanes, count), fills)
    return BatchSpec(
        size, pages, context, tuple(shape for shape, _ in held), steps, tuple(_name(kind) for _, kind in held)
    )


def _batch_step(ir: Mapping[str, Any], file: str, shape: tuple[int, int], fills: bool) -> BatchStepSpec:
    """As `_step`, for `PagedDecoder`."""
    tokens, positions, tables, *pools = (entry["name"] for entry in ir["graph_inputs"])
    updated = [entry["name"] for entry in ir["graph_outputs"]]
    logits = "" if fills else updated.pop(0)
    return BatchStepSpec(file, *shape, tokens, positions, tables, "", logits, tuple(zip(pools, updated, strict=True)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked_length(config: Any, requested: int | None) -> int:
    return allowed_length(getattr(config, "max_position_embeddings", None), requested)


def _remove_functions(folder: Path) -> None:
    """Removes an earlier model's functions, the list of them first: until all is written, the folder holds no model."""
    with suppress(IRError):  # there is none
        earlier = GenerationSpec.load(folder)
        batched = () if earlier.batch is None else (step.ir for step in earlier.batch.functions.values())
        for name in (FILE_NAME, *(step.ir for step in earlier.functions.values()), *batched):
            (folder / name).unlink(missing_ok=True)


def _empty_caches(model: Any, length: int, form: RowForm) -> tuple[torch.Tensor, ...]:
    """Caches of zeros for each layer's keys and values."""
    try:
        shapes = cache_shapes(model, length)
    except Exception as error:  # whatever a model raises that keeps something else between tokens
        raise ExtractionError(
            f"{type(model).__name__} does not run with a cache of plain keys and values for each layer "
            f"({type(error).__name__}: {error}); expected a decoder-only transformer"
        ) from error
    return tuple(torch.zeros(held, dtype=kind) for shape in shapes for held, kind in form.empty(shape))


def _example(count: int, caches: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    inputs: dict[str, Any] = {"tokens": torch.zeros(1, count, dtype=torch.long), "positions": torch.arange(count)}
    inputs["caches"] = caches
    return inputs | ({"last": torch.tensor([count - 1])} if count > 1 else {})


def _check_same_results(decoder: CachedDecoder, caches: tuple[torch.Tensor, ...]) -> None:
    """Refuses a model that does not do with positions and mask what it does without a cache."""
    window = getattr(decoder.model.config, "sliding_window", None) or 0
    tokens = torch.arange(min(max(4, window + 2), caches[0].shape[2]))[None]
    with torch.no_grad():
        expected = decoder.model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        state = caches
        last = tokens.shape[1] - 1
        for at in (slice(last), slice(last, None)) if last else (slice(1),):  # a prefill, and a step
            logits, *state_list = decoder(tokens[:, at], torch.arange(tokens.shape[1])[at], state)
            state = tuple(state_list)
    difference = float((logits[0, 0].float() - expected).norm() / expected.norm())
    if not difference < 0.05:  # of bfloat16, with room
        raise ExtractionError(
            f"{type(decoder.model).__name__} gives other logits with a cache than without (they differ by "
            f"{difference:.0%}); expected a decoder that takes positions, a mask and plain keys and values"
        )


def _merge(weights: dict[str, torch.Tensor], extraction: Extraction, function: str) -> None:
    """Adds a function's weights, by the names that the model itself gives them, and renames them in its IR.

    What only this function holds, such as a constant, and what another one calls the same, gets the function's name.
    """
    names = {}
    for name, tensor in extraction.weights.items():
        own = name.removeprefix(_WRAPPER)
        if not (tensor is weights.get(own) or _same(tensor, weights.setdefault(own, tensor))):
            own = f"{function}.{own}"
            weights[own] = tensor
        names[name] = own
    ir = extraction.ir
    ir["weights"] = [entry | {"name": names[entry["name"]]} for entry in ir["weights"]]
    ir["weight_name_mapping"] = {place: names[name] for place, name in ir["weight_name_mapping"].items()}
    if "constants" in ir:
        ir["constants"] = {names[name]: constant for name, constant in ir["constants"].items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def _step(ir: Mapping[str, Any], file: str, count: int) -> StepSpec:
    """The names that an IR gives to what `CachedDecoder` takes and gives, in the order of `_example`."""
    tokens, positions, *rest = (entry["name"] for entry in ir["graph_inputs"])
    last = rest.pop() if count > 1 else ""
    logits, *updated = (entry["name"] for entry in ir["graph_outputs"])
    return StepSpec(file, count, tokens, positions, last, logits, tuple(zip(rest, updated, strict=True)))


def _stop_ids(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, Iterable) else () if ids is None else (int(ids),)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    origin = source if source.is_dir() else source.parent
    for name in _TOKENIZER_FILES:
        if (origin / name).is_file():
            write_file(folder / name, (origin / name).read_bytes(), [origin / name], ExtractionError)
