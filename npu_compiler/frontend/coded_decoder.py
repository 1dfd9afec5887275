"""Language models whose checkpoint is quantised: the model of the configuration, with coded layers in their places.

No weight is made into numbers here but for a look: what is held is the codes, so that importing takes the memory of the
checkpoint's file and of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from npu_compiler.dtypes import FLOAT8_E4M3FN
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.cached_decoder import attention_of
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.importer import Importer, describing
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.frontend.coded_experts import CodedExperts, hold_codes
from npu_compiler.frontend.coded_layers import CodedEmbedding, CodedLinear, CodedWeight, as_tensor

__all__ = ["ACTIVATIONS", "coded_decoder"]

_MOST_LISTED = 4
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # which models make of their configuration


ACTIVATIONS = {"fp8": getattr(torch, FLOAT8_E4M3FN.name), "int8": torch.int8, "16": None}
"""What inputs of linears may be rounded to, by the names of the option."""


def coded_decoder(
    config: Any, importer: Importer, tensors: Tensors, dtype: torch.dtype, activations: str | None = None
) -> Any:
    """A causal language model in eval mode whose linears and embeddings are codes where the checkpoint has them.

    Args:
        config: The configuration as transformers has it, without a quantisation.
        importer: Of the checkpoint's format.
        tensors: The checkpoint's.
        dtype: What the model computes in.
        activations: What inputs of linears are rounded to, ``fp8`` or ``int8``, where their weights are of that type
            with a scale for each row; ``16`` for nowhere; where the checkpoint says so when None.

    Raises:
        ExtractionError: Tensors are missing, of another shape, hold what they must not, or are left over; or no weight
            is of the type that activations are to be rounded to.
    """
    with (
        describing("the model"),
        no_init_weights(),
    ):  # nothing touches the memory of its weights, which only takes addresses
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
    model.eval()
    head, rounded = model.get_output_embeddings(), 0
    for name, module in list(_matrices(model)):
        size = (int(module.weight.shape[0]), int(module.weight.shape[1]))
        with describing(f"'{name}'"):
            coded = importer.matrix(name, size, tensors)
            coded = None if coded is None else coded.check(name)
        if coded is not None:
            _check_alone(name, coded, tensors)
            layer = _layer(name, module, coded, tensors, dtype)
            asked = importer.activations(name) if activations is None else activations
            if asked is not None and module is not head and isinstance(layer, CodedLinear):
                layer.activations = _fitting(coded, ACTIVATIONS[asked])
                rounded += layer.activations is not None
            model.set_submodule(name, layer)
    _take_experts(model, importer, tensors, dtype)
    if activations not in (None, "16") and not rounded:
        raise ExtractionError(
            f"given activations='{activations}' for weights of which none are of that type with one scale for a row; "
            "expected such weights, as npu quantize makes them, or other activations"
        )
    _fill(model, tensors, dtype)
    _tie(model, config)
    _check_all_taken(tensors)
    return model


def _fitting(coded: CodedMatrix, kind: torch.dtype | None) -> torch.dtype | None:
    """The type of codes that an input is rounded to, where the weight is of that type, with a scale for each row."""
    if kind is None or coded.codes.dtype.name != str(kind).removeprefix("torch."):
        return None
    plain = coded.zeros is None and coded.biases is None and coded.codebook is None and not coded.zero
    return kind if plain and coded.group == coded.columns == coded.shape[1] else None


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            yield name, module


def _take_experts(model: Any, importer: Importer, tensors: Tensors, dtype: torch.dtype) -> None:
    """Puts codes in the place of the matrices of experts that the checkpoint has as codes."""
    for path, module in list(model.named_modules()):
        coded = {}
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim != 3:
                continue
            name = f"{path}.{own}"
            count, inputs, outputs = (int(size) for size in parameter.shape)
            with describing(f"'{name}'"):
                matrix = importer.experts(name, (count, inputs, outputs), tensors)
            if matrix is None:
                continue
            if name in tensors:
                raise ExtractionError(f"given '{name}' as numbers and in codes, expected the weight in one format")
            weight = CodedWeight(matrix.check(name), dtype)
            coded[own] = CodedExperts(weight, (count, inputs, outputs))
        if coded:
            hold_codes(module, coded)


def _check_alone(name: str, coded: CodedMatrix, tensors: Tensors) -> None:
    """Refuses a weight in two formats."""
    others = [f"{name}.{suffix}" for suffix in ("weight", "qweight", "weight_packed") if f"{name}.{suffix}" in tensors]
    if len(others) > 1:
        raise ExtractionError(f"given {' and '.join(map(repr, others))}, expected the weight in one format")


def _layer(
    name: str, module: Any, coded: CodedMatrix, tensors: Tensors, dtype: torch.dtype
) -> CodedLinear | CodedEmbedding:
    """What takes the place of a module."""
    weight = CodedWeight(coded, dtype)
    if isinstance(module, torch.nn.Embedding):
        if coded.permutation is not None:
            raise ExtractionError(f"'{name}': given an embedding whose columns are permuted, expected them in order")
        return CodedEmbedding(weight)
    bias = None
    if module.bias is not None:
        bias = as_tensor(tensors.take(f"{name}.bias", tuple(module.bias.shape))).to(dtype)
    else:
        _skip_zeros(f"{name}.bias", tensors)
    order = None if coded.permutation is None else torch.from_numpy(coded.permutation)
    return CodedLinear(weight, order, bias)


def _skip_zeros(name: str, tensors: Tensors) -> None:
    """Takes a bias that the model has not, and that is 0: some producers write one."""
    bias = tensors.take_if_there(name)
    if bias is not None and bias.astype("float32").any():
        raise ExtractionError(f"'{name}': given a bias other than 0, expected none by the model's configuration")


def _fill(model: Any, tensors: Tensors, dtype: torch.dtype) -> None:
    """Gives the plain parameters their values."""
    tied = set(model.all_tied_weights_keys or ()) if hasattr(model, "all_tied_weights_keys") else set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in tensors and (name in tied or name == "lm_head.weight") and model.config.tie_word_embeddings:
            continue
        kinds = ("float16", "bfloat16", "float32", "float64")
        owner, _, own = name.rpartition(".")
        value = as_tensor(tensors.take(name, tuple(parameter.shape), kinds)).to(dtype)
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(value, requires_grad=False))


def _tie(model: Any, config: Any) -> None:
    """Makes the output layer share the embedding's weight, where the configuration says so and no other is given."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(head, CodedLinear) or not config.tie_word_embeddings:
        return
    if isinstance(embedding, CodedEmbedding):
        model.set_output_embeddings(CodedLinear(embedding.matrix))
    elif head is not None:
        head.weight = embedding.weight


def _check_all_taken(tensors: Tensors) -> None:
    left = [name for name in tensors.left() if not name.endswith(_COMPUTED)]
    if left:
        more = f" and {len(left) - _MOST_LISTED} more" if len(left) > _MOST_LISTED else ""
        shown = ", ".join(f"'{name}'" for name in left[:_MOST_LISTED])
        raise ExtractionError(
            f"given the tensors {shown}{more}, which the model and the format of its configuration have no place for; "
            "expected one format in all layers"
        )
