"""Functions around those of a batch: what brings a step's inputs to the device, and copies a page of every pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor

__all__ = ["page_read_ir", "page_write_ir", "staging_ir"]


def staging_ir(inputs: Sequence[tuple[str, tuple[int, ...], str]], chosen: int = 0) -> dict[str, Any]:
    """IR that copies tensors: from memory that host and device see to memory of the device's own.

    Where there are tokens that were ``chosen``, int64 [C], a row of the first tensor [R, 1] may be one of them: the
    input ``sources`` int64 [R] says which, -1 for what the tensor holds. A choice that failed, which is negative, is 0.

    Args:
        inputs: Name, shape and data type of each; the outputs are called ``NAME_there``.
        chosen: C; 0 for none.
    """
    graph = IRBuilder()
    given = [graph.input(*each) for each in inputs]
    copies = [graph.same("clone.default", each, name=f"{each['name']}_there") for each in given[bool(chosen) :]]
    return graph.build("staging", [_first_or_chosen(graph, given[0], chosen), *copies] if chosen else copies)


def _first_or_chosen(graph: IRBuilder, first: IRTensor, chosen: int) -> IRTensor:
    rows, kind = first["shape"][0], first["dtype"]
    sources, held = graph.input("sources", (rows,), "int64"), graph.input("chosen", (chosen,), "int64")
    place = graph.same("clamp.default", sources, min=0, max=chosen - 1)
    found = graph.add("index_select.default", "int64", (rows,), held, place, dim=0)
    token = graph.same("clamp_min.default", found, min=0)
    if kind != "int64":
        token = graph.add("_to_copy.default", kind, (rows,), token, dtype=kind)
    is_known = graph.compare("lt.Scalar", (rows,), sources, other=0)
    taken = graph.add("where.self", kind, (rows,), is_known, graph.view(first, (rows,)), token)
    return graph.add("view.default", kind, (rows, 1), taken, size=[rows, 1], name=f"{first['name']}_there")


def page_read_ir(pools: Sequence[tuple[tuple[int, ...], str]], dtype: str) -> dict[str, Any]:
    """IR that takes a page out of each pool.

    Its inputs are ``pool_N`` [pages, ...] and ``source`` int64 [1]; its outputs ``page_N`` [1, ...].

    Args:
        pools: Their shapes and data types, as the device has them.
        dtype: What the model computes in.
    """
    graph = IRBuilder()
    given = [graph.input(f"pool_{number}", shape, kind) for number, (shape, kind) in enumerate(pools)]
    source = graph.input("source", (1,), "int64")
    pages = [
        graph.add("index_select.default", kind, (1, *shape[1:]), pool, source, dim=0, name=f"page_{number}")
        for number, (pool, (shape, kind)) in enumerate(zip(given, pools, strict=True))
    ]
    return graph.build("page_read", pages, compute_dtype=dtype)


def page_write_ir(pools: Sequence[tuple[tuple[int, ...], str]], dtype: str) -> dict[str, Any]:
    """IR that puts a page into each pool: the inverse of `page_read_ir`.

    Its inputs are ``pool_N``, ``page_N`` and ``target`` int64 [1]; its outputs ``new_N``, which take the places of
    the pools.

    Args:
        pools: Their shapes and data types, as the device has them.
        dtype: What the model computes in.
    """
    graph = IRBuilder()
    given = [graph.input(f"pool_{number}", shape, kind) for number, (shape, kind) in enumerate(pools)]
    pages = [graph.input(f"page_{number}", (1, *shape[1:]), kind) for number, (shape, kind) in enumerate(pools)]
    target = graph.input("target", (1,), "int64")
    new = [
        graph.add("index_copy.default", kind, shape, pool, target, page, dim=0, name=f"new_{number}")
        for number, (pool, page, (shape, kind)) in enumerate(zip(given, pages, pools, strict=True))
    ]
    return graph.build("page_write", new, compute_dtype=dtype)
