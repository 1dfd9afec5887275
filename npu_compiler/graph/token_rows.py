"""The function behind a decode step whose token the host chooses: IR like a model's, compiled like one."""

from __future__ import annotations

from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.graph.token_matrix import as_matrix, padded_logits, relative_weights

__all__ = ["token_rows_ir"]


def token_rows_ir(vocabulary: int, dtype: str, weighed: bool) -> dict[str, Any]:
    """IR of the logits for the host, with what spares it a look at all of them.

    Its inputs are ``logits`` [1, 1, `vocabulary`] and, where the host draws, ``inverse_temperature`` float32 [1]. Its
    outputs are of the matrix that the tokens are looked at as (`as_matrix`): ``all_logits`` [`vocabulary`], row by row;
    ``highest`` float32 [rows, 1], the highest logit of each row, NaN where one is; and where the host draws ``sums``
    float32 [rows, 1] of how probable the tokens of a row are, relative to the likeliest of all.

    Args:
        vocabulary: How many logits there are.
        dtype: Data type of the logits.
        weighed: Whether the host draws.
    """
    rows, columns = as_matrix(vocabulary)
    graph = IRBuilder()
    logits = graph.input("logits", (1, 1, vocabulary), dtype)
    flat = graph.view(logits, (vocabulary,))
    matrix = graph.view(padded_logits(graph, flat, rows * columns), (rows, columns))
    highest = graph.reduce("amax.default", matrix, dim=1)
    sums: tuple[IRTensor, ...] = ()
    if weighed:
        inverse = graph.input("inverse_temperature", (1,), "float32")
        weights = relative_weights(graph, matrix, graph.reduce("amax.default", highest, dim=0), inverse)
        sums = (graph.add("sum.dim_IntList", "float32", (rows, 1), weights, dim=[1], keepdim=True, name="sums"),)
    wide = graph.add("_to_copy.default", "float32", (rows, 1), highest, dtype="float32", name="highest")
    copied = graph.add("clone.default", dtype, (vocabulary,), flat, name="all_logits")
    return graph.build("token_rows", (copied, wide, *sums), compute_dtype=dtype)
