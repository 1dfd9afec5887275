"""Groups of one form are lowered once, and a program is the same as if each had been lowered by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import npu_compiler
from benchmarks.compile_time import chain
from npu_compiler.artifact.plan import KernelCall, Step
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.repeats import Lower, Repeats

LAYERS = 12
on_each_target = pytest.mark.parametrize("target", ["metal", "cuda"])


class Lowered:
    """Counts what is lowered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.lowered = 0
        known = Repeats.lower

        def counted(repeats: Repeats, groups: Sequence[Group], lower: Lower) -> list[Step]:
            def once(members: Sequence[Group]) -> list[Step]:
                self.lowered += 1
                return lower(members)

            self.asked += 1
            return known(repeats, groups, once)

        monkeypatch.setattr(Repeats, "lower", counted)


def alone(monkeypatch: pytest.MonkeyPatch, ir: dict[str, Any], target: str) -> bytes:
    """The program of which each group was lowered by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "lower", lambda repeats, groups, lower: lower(groups))
        return npu_compiler.compile(ir, target=target).to_bytes()


@on_each_target
@pytest.mark.parametrize("name", ["relu(conv2d(x))", "linear", "softmax(x)", "x.T + 0.5", "cat(x, x)[2:6]"])
def test_a_program_is_the_same_as_without(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ir = chain(name, 2 * LAYERS)
    assert npu_compiler.compile(ir, target=target).to_bytes() == alone(monkeypatch, ir, target)


@on_each_target
def test_equal_layers_are_lowered_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Lowered(monkeypatch)
    plan = npu_compiler.compile(chain("relu(conv2d(x))", 2 * LAYERS), target=target).main
    assert lowered.asked >= LAYERS
    assert lowered.lowered <= lowered.asked - LAYERS + 3  # the first, the last, and what packs the image, are others
    calls = [call for call in plan.calls if isinstance(call, KernelCall) and call.label.startswith("n")]
    assert len({call.label for call in calls}) == LAYERS
    assert len({call.args[1:] for call in calls}) > LAYERS // 2  # weights


def test_scratch_is_each_groups_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of parts, of layers whose launches could be ahead of each other, lie where nobody else's do."""
    ir = chain("linear", LAYERS)
    for tensor in [*ir["graph_inputs"], *ir["weights"], *ir["graph_outputs"]]:
        tensor["shape"] = [512 if size == 16 else 64 for size in tensor["shape"]]
    for node in ir["nodes"]:
        for tensor in (*node["inputs"], *node["outputs"]):
            tensor["shape"] = [512 if size in (16, 512) else 64 for size in tensor["shape"]]
    assert npu_compiler.compile(ir, target="cuda").to_bytes() == alone(monkeypatch, ir, "cuda")
