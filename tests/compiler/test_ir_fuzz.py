"""Mutated IR: whatever is wrong with it, only documented errors come out, soon and without much memory."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npu_compiler
from npu_compiler.errors import NPUError
from tests.compiler.test_determinism import model

_IR = model()
_STRANGE: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["aten.relu.default", "aten.matmul.default", "float16", "int64", "x", "p_w", "inf"]),
    st.lists(st.integers(-2, 9), max_size=5),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *_places(item, (*path, key))]]


def _mutate(draw: Any, ir: dict[str, Any]) -> None:
    *way, last = draw(st.sampled_from(_places(ir)))
    place: Any = ir
    for key in way:
        place = place[key]
    action = draw(st.sampled_from(["replace", "remove", "repeat"]))
    if action == "replace":
        place[last] = draw(_STRANGE)
    elif action == "remove":
        del place[last]
    elif isinstance(place, list):
        place.insert(draw(st.integers(0, len(place))), copy.deepcopy(place[last]))


@given(st.data())
@settings(max_examples=400, deadline=5000, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_mutated_ir_compiles_or_is_refused(data: st.DataObject) -> None:
    ir = copy.deepcopy(_IR)
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data.draw, ir)
    with contextlib.suppress(NPUError):
        npu_compiler.compile(ir).to_bytes()


@given(st.data())
@settings(max_examples=200, deadline=5000, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_mutated_node_is_supported_or_not(data: st.DataObject) -> None:
    node = {"node": copy.deepcopy(data.draw(st.sampled_from(_IR["nodes"])))}
    _mutate(data.draw, node)
    with contextlib.suppress(NPUError):
        npu_compiler.is_op_supported(node.get("node", {}))
