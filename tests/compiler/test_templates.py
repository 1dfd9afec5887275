"""Kernel templates say what their files use, no less and no more, and refuse launches that give something else."""

from __future__ import annotations

import itertools
import pkgutil
import re
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Any

import pytest
import torch

import npu_compiler
import npu_compiler.frontend.coded_layers  # registers the op of codes with PyTorch
from npu_compiler.artifact.plan import Argument, KernelSource
from npu_compiler.errors import CompileError
from npu_compiler.graph.lane_tokens import Feature, lane_tokens_ir
from npu_compiler.lowering.anchors import KernelWriter
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue
from tests.cuda import shapes, test_back_to_back, test_pooled_windows, test_prefill
from tests.cuda.test_attention_decode import Sizes, Step, tensors
from tests.ops import recurrent_cases
from tests.ops.cases import case, floats
from tests.ops.collected import COMPUTED
from tests.ops.test_experts import grouped_rows
from tests.support import coded_cache, paged_steps
from tests.support.byte_products import ByteProduct
from tests.support.ir_builder import IRBuilder
from tests.support.paged_steps import PagedStep, step_inputs

DRAW = lane_tokens_ir((2, 1, 40), "float16", 2, {Feature.DRAWN})
TARGETS = {"metal": "metal_compiler", "cuda": "cuda_compiler"}


def declared(package: str) -> dict[str, KernelTemplate]:
    """The templates at module level of a target's package, by module and name."""
    root = import_module(package)
    found: dict[str, KernelTemplate] = {}
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        members = vars(import_module(module.name))
        found |= {f"{module.name}.{name}": t for name, t in members.items() if isinstance(t, KernelTemplate)}
    return found


@dataclass(frozen=True)
class Made:
    """A launch, the writer of its kernel, and the kernel."""

    launch: Launch
    writer: KernelWriter
    source: KernelSource

    @property
    def files(self) -> str:
        """The text of the kernel's file and of those that it builds on, without comments and strings."""
        template, prologues = self.launch.template, self.launch.prologues.values()
        suffix = "metal" if self.writer.package == TARGETS["metal"] else "cuh"
        before = [*template.before.split(), *(file for prologue in prologues for file in prologue.files)]
        names = (*before, *template.files.split(), *self.launch.files, f"{template.entry}.{suffix}")
        return re.sub(_COMMENTS, " ", "\n".join(map(self.writer.file, names)))


@dataclass
class Kernel:
    """What all launches of a kernel file have in common: each leaves some of it to the preprocessor.

    Attributes:
        templates: Its templates.
        files: The texts of all files that it builds on.
        told: What the target tells it by macros and constants, beside what its templates declare.
        passed: Parameters of what computes its operands.
    """

    templates: list[KernelTemplate]
    files: str
    told: set[str]
    passed: set[str]

    def macros(self) -> set[str]:
        return {re.split(r"[?(]", macro)[0] for template in self.templates for macro in template.macros.split()}

    def free_names(self) -> set[str]:
        """Names in the style of macros and of their types that the files use and do not define."""
        used = {name for name in re.findall(r"(?<!::)\b[A-Za-z_]\w*", self.files) if re.fullmatch(_STYLE, name)}
        return used.difference(*(re.findall(defined, self.files) for defined in _DEFINED), _LANGUAGE)


_COMMENTS = r'//[^\n]*|"(?:[^"\\\n]|\\.)*"'
_STYLE = r"[A-Z][A-Z0-9_]*|\w+_t|\w+_T"
_DEFINED = (
    r"(?:#define|\b(?:int|uint|bool|float|size_t|typename|class))\s+(\w+)",
    r",\s*(\w+)\s*=",  # a further one of several
    r"typedef .*?(\w+);",
)
_LANGUAGE = {"INFINITY", "METAL_FUNC"}


class Block(torch.nn.Module):
    """A norm and a product of one row; a convolution added to another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.RMSNorm(256), torch.nn.Linear(256, 64)
        self.first, self.second = (torch.nn.Conv2d(64, 64, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(self.norm(x)), torch.relu(self.first(image) + self.second(image.relu()))


def coded_linear(rows: int, norm: str = "rms_norm") -> dict[str, Any]:
    """A norm, and a linear whose weight is codes of four bits in groups of 64."""
    builder = IRBuilder()
    codes = builder.weight("codes", (512, 256), torch.uint8)
    scales, x = builder.weight("scales", (512, 8), torch.float16), builder.input("x", (rows, 512), torch.float16)
    options = (4, 512, 64, 1, 8, torch.float16)
    weight = builder.call("npu_codes.dequantize.default", codes, scales, None, None, None, *options)
    normed = builder.call(f"aten.{norm}.default", x, [512])
    return builder.build(builder.call("aten.linear.default", normed, weight))


def samples() -> list[dict[str, Any]]:
    """Graphs that need every kernel of both targets."""
    first = {each.op: each for each in reversed(COMPUTED)}
    heads = [floats(1, 2, rows, 64) for rows in (1, 5000, 5000)]
    long_cache = case("scaled_dot_product_attention.default", *heads)
    long_rows = [case("argsort.default", floats(1, 9000)), case("topk.default", floats(1, 9000), 50)]
    long_rows.append(case("cumsum.default", floats(1, 30_000), 1))
    by_columns = case("mm.default", floats(1, 64), floats(64, 128))
    steps = recurrent_cases.layers("lstm", 2, 3, 16, 1024)  # too large for a cluster
    cases = [*first.values(), *shapes.CASES, test_prefill.CASES[0], long_cache, by_columns, *long_rows, steps]
    block = npu_compiler.extract(Block().eval(), (torch.zeros(1, 256), torch.zeros(1, 64, 14, 14)))
    sizes = Sizes(2048)
    step = npu_compiler.extract(Step(sizes).eval(), tensors(sizes, torch.float16))
    paged = [PagedStep(paged_steps.Sizes(2, 4), kind, torch.float16) for kind in ("16", "int8")]
    rounded = ByteProduct(224, 528, torch.int8, torch.bfloat16, norm=True)
    over_codes = coded_cache.CodedStep(coded_cache.Sizes(128), "int8")
    steps_of_decoders = (
        npu_compiler.extract(rounded.eval(), rounded.inputs(130)).ir,
        npu_compiler.extract(over_codes, over_codes.inputs(3)).ir,
        step.ir,
        *(npu_compiler.extract(each, step_inputs(each, [0, 0])).ir for each in paged),
        *map(coded_linear, (1, 40, 128)),
        coded_linear(1, "layer_norm"),
    )
    return [
        *(each.ir(torch.float32) for each in cases),
        block.ir,
        test_pooled_windows.Case((224, 224), batch=16).ir,
        test_back_to_back.Case((56, 56), made=256, batch=32).ir,
        *steps_of_decoders,
        *grouped_rows(36),
        *grouped_rows(32),
    ]


@pytest.fixture(scope="module")
def made() -> list[Made]:
    """The launches of the samples."""
    found: list[Made] = []
    with pytest.MonkeyPatch.context() as patch:
        for target, package in TARGETS.items():
            writer = import_module(f"{package}.skeleton").KERNELS
            write = writer.source

            def recorded(launch: Launch, *rest: Any, writer: Any = writer, write: Any = write) -> KernelSource:
                found.append(Made(launch, writer, write(launch, *rest)))
                return found[-1].source

            patch.setattr(writer, "source", recorded)
            for sample in (*samples(), DRAW):
                npu_compiler.compile(sample, target)
    return found


@pytest.fixture(scope="module")
def kernels(made: list[Made]) -> dict[str, Kernel]:
    """By package and entry."""
    found: dict[str, Kernel] = {}
    for each in made:
        template = each.launch.template
        kernel = found.setdefault(f"{each.writer.package}.{template.entry}", Kernel([], "", set(), set()))
        if template not in kernel.templates:
            kernel.templates.append(template)
        if each.files not in kernel.files:
            kernel.files += each.files
        kernel.passed.update(name for prologue in each.launch.prologues.values() for name in prologue.values)
        told = re.findall(r"(?:#define|constexpr \w+) (\w+)", each.source.text)
        kernel.told.update(set(told) - each.launch.defined.keys())
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_template_is_launched(target: str, made: list[Made]) -> None:
    launched = {id(each.launch.template) for each in made}
    assert [name for name, template in declared(TARGETS[target]).items() if id(template) not in launched] == []


def test_files_use_the_parameters_of_their_templates_and_no_others(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        own = {param for template in kernel.templates for _, param in template.fields}
        assert set(re.findall(r"\bp\.(\w+)", kernel.files)) - {"blocks"} - kernel.passed == own, name


def test_files_use_the_macros_of_their_templates(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.macros() <= set(re.findall(r"\w+", kernel.files)), name


def test_files_use_no_macros_but_those_of_their_templates_and_targets(kernels: dict[str, Kernel]) -> None:
    for name, kernel in kernels.items():
        assert kernel.free_names() <= kernel.macros() | kernel.told, name


def test_files_for_cuda_bind_and_launch_what_their_templates_declare(made: list[Made]) -> None:
    for each in made:
        template = each.launch.template
        if each.writer.package != TARGETS["cuda"] or "SHARED_PARAMETERS" in template.macros:
            continue
        expected: list[str] = []
        for name in template.inputs.split():
            generated = name.endswith("?") or name in template.computed.split()  # a macro of pointers
            expected += [] if generated and expected[-1:] == ["..."] else ["..." if generated else name]
        expected += template.outputs.split() or ["out", "..."]
        (parameters,) = re.findall(rf"\b{template.entry}\(([^()]*)const Params p\)", each.files)
        found = re.findall(r"(\w+)\s*(?:,|$)", re.sub(r"(\w+_PARAMETERS?\s+)+", "MACRO, ", parameters))
        optional = {"MACRO", *(name.rstrip("?") for name in template.inputs.split() if name.endswith("?"))}
        bound = ["..." if name in optional else name for name in found]
        assert [name for name, _ in itertools.groupby(bound)] == expected, template.entry
        threads = {int(number) for number in re.findall(r"__launch_bounds__\((\d+)\b", each.files)}
        assert threads <= {prod(each.launch.threads)}, template.entry


def test_files_for_metal_bind_what_their_templates_declare(made: list[Made]) -> None:
    for each in made:
        template = each.launch.template
        if each.writer.package == TARGETS["metal"]:
            found = re.findall(r"(\w+) \[\[buffer\((\d+)\)\]\]", each.files)
            beside = {f"{name}?" for name in template.computed.split()}  # bound behind the epilogue
            inputs = [name.removesuffix("?") for name in template.inputs.split() if name not in beside]
            expected = enumerate((*inputs, "out"))
            assert set(found) <= {(name, str(number)) for number, name in expected}, template.entry
            always = [name for name in template.inputs.split() if not name.endswith("?")]
            assert len(found) >= len(always), template.entry  # others may have a place that a macro says


AXPY = KernelTemplate("axpy", "int count; float step", "T TWICE?", "x y?", threads=lambda given: given["T"])
GIVEN: dict[str, Any] = {"values": {"count": 3, "step": 1}, "macros": {"T": 64}, "inputs": {"x": Argument(0)}}


def test_a_launch_gives_what_its_template_declares() -> None:
    launch = Launch(AXPY, (1, 1, 1), **GIVEN)
    assert (launch.threads, launch.shared) == ((64, 1, 1), 0)
    assert AXPY.fields == (("int", "count"), ("float", "step"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": {"count": 3}}, "without the parameter 'step'"),
        ({"values": {"count": 3, "step": 1, "u": 1}}, "with the parameter 'u'"),
        ({"macros": {}}, "without the macro 'T'"),
        ({"macros": {"T": 64, "U": 1}}, "with the macro 'U'"),
        ({"inputs": {}}, "without the input 'x'"),
        ({"inputs": {"x": Argument(0), "z": Argument(1)}}, "with the input 'z'"),
        ({"outputs": {"out": Argument(2)}}, "with the output 'out'"),
        ({"prologues": {"x": Prologue(())}}, "a prologue, and its template has no place for it"),
    ],
)
def test_a_launch_that_gives_something_else_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=f"kernel 'axpy' was given .*{message}"):
        Launch(AXPY, (1, 1, 1), **{**GIVEN, **changed})


def test_what_a_template_leaves_open_is_given_by_each_launch() -> None:
    template = replace(AXPY, threads=None)
    assert Launch(template, (1, 1, 1), block=(8, 4, 1), **GIVEN).threads == (8, 4, 1)
    with pytest.raises(CompileError, match="kernel 'axpy' was given no threads"):
        assert Launch(template, (1, 1, 1), **GIVEN).threads
