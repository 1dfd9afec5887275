"""The kernel files by themselves: each compiles with its defaults, and its parameters are those that are packed."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from metal_compiler.attention.lowering import ATTENTION_FIELDS, COMBINE_FIELDS
from metal_compiler.images.convolution import CONV2D_FIELDS, DIRECT_FIELDS
from metal_compiler.images.pooling import POOL_FIELDS
from metal_compiler.products.matmul import MATMUL_FIELDS, MATVEC_FIELDS
from metal_compiler.tiles.tiling import GROUP
from software_gpu import metal

FIELDS = {
    "attention": ATTENTION_FIELDS,
    "attention_combine": COMBINE_FIELDS,
    "conv2d": CONV2D_FIELDS,
    "conv2d_direct": DIRECT_FIELDS,
    "matmul": MATMUL_FIELDS,
    "matvec": MATVEC_FIELDS,
    "matvec_columns": MATVEC_FIELDS,
    "pool2d": POOL_FIELDS,
}


def text_of(name: str) -> str:
    """A kernel file with the files that it includes."""
    text = files("metal_compiler").joinpath("kernels", name).read_text(encoding="utf-8")
    return re.sub(r'#include "(.*)"', lambda match: text_of(match[1]), text)


@pytest.mark.parametrize("name", FIELDS)
def test_compiles_by_itself(name: str) -> None:
    library, error = metal.create_device().newLibraryWithSource_options_error_(text_of(f"{name}.metal"), None, None)
    assert library is not None, str(error)
    assert library.functionNames() == [name]


@pytest.mark.parametrize("name", FIELDS)
def test_default_parameters_are_those_that_are_packed(name: str) -> None:
    struct = re.search(r"struct Params \{(.*?)\};", text_of(f"{name}.metal"), re.DOTALL)
    assert struct is not None
    names = tuple(re.findall(r"\w+(?=[,;])", struct[1]))
    assert tuple(n for n in names if not n.startswith("o_")) == FIELDS[name]


def test_results_stored_together() -> None:
    (size,) = re.findall(r"int GROUP = (\d+);", text_of("store.metal"))
    assert int(size) == GROUP
