"""How kernels are written for Metal: how texts are put together, and how pointers and bindings are printed."""

from __future__ import annotations

from string import Template

from metal_compiler.dialect import METAL
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.lowering.anchors import Epilogue, KernelWriter, definitions, pointer_macros
from npu_compiler.lowering.dialect import CHECK
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.templates import Launch

__all__ = ["KERNELS"]


class _MetalKernels(KernelWriter):
    """All bindings are numbered: the inputs, the output, what the epilogue reads, what a prologue reads, parameters."""

    package = "metal_compiler"
    dialect = METAL
    prologue_last = True

    def source(self, launch: Launch, declaration: str, fused: Epilogue | None = None) -> KernelSource:
        template, name = launch.template, f"{launch.template.entry}.metal"
        if template.filled:
            blanks = launch.macros if fused is None else {**launch.macros, **_blanks(fused)}
            parts = ["", declaration, Template(self.file(name)).substitute(blanks)]
        else:
            defined = {**launch.macros, **(_stored(launch) if fused is None else _told(launch, fused))}
            prologues = launch.prologues.values()
            own = [launch.text, *(prologue.text for prologue in prologues)]
            functions = [*(() if fused is None else (fused.text,)), *filter(None, own)]
            files = (*(file for prologue in prologues for file in prologue.files), *template.files.split(), name)
            parts = [definitions(defined), declaration, *functions, *map(self.file, files)]
        checks = ["checks.metal"] if any(CHECK in part for part in parts) else []
        return KernelSource(template.entry, *map(self.file, ("common.metal", *checks)), *parts)


KERNELS = _MetalKernels()


def _bound(operands: Operands, first: int) -> str:
    """Kernel parameters for the operands' pointers ``e0``, ``e1``... (after their prefix), bound from `first` on."""
    kinds = (METAL.pointer_to(dtype) for _, dtype in operands.pointers)
    return "".join(f"    {kind} {operands.prefix}e{i} [[buffer({first + i})]],\n" for i, kind in enumerate(kinds))


def _blanks(fused: Epilogue) -> dict[str, object]:
    """What every skeleton is filled with."""
    operands = fused.found.operands
    return {
        "storage": METAL.storage[fused.group.output.dtype.name],
        "pointers": _bound(operands, 1),
        "params": 1 + len(operands.pointers),
        "positions": "\n".join(fused.found.statements),
        "body": fused.text,
    }


def _told(launch: Launch, fused: Epilogue) -> dict[str, object]:
    """What the files need to be told of output, epilogue and prologue."""
    operands, output = fused.found.operands, len(launch.inputs)
    before, behind = _read_by_prologues(launch, output + 1 + len(operands.pointers))
    return {
        "PAIRS": fused.group.pairs,
        "OUT_BUFFER": output,
        "EPILOGUE_BUFFERS": _bound(operands, output + 1).replace("\n", " "),
        **pointer_macros("EPILOGUE", operands, METAL),
        "PROLOGUE": 0,
        "PROLOGUE_BUFFERS": before,
        "PARAMS_BUFFER": behind,
        "out_t": METAL.storage[fused.group.output.dtype.name],
        "result_t": METAL.register(fused.group.expr.dtype),
        **launch.prologue_macros,
    }


def _stored(launch: Launch) -> dict[str, object]:
    """What a file that stores its results by itself needs to be told: where its outputs are bound."""
    numbers = {f"{name.upper()}_BUFFER": number for number, name in enumerate(launch.outputs, len(launch.inputs))}
    before, behind = _read_by_prologues(launch, len(launch.inputs) + len(launch.outputs))
    bound = {"PROLOGUE_BUFFERS": before} if launch.template.computed else {}
    return {**numbers, "PARAMS_BUFFER": behind, **bound, **launch.prologue_macros}


def _read_by_prologues(launch: Launch, first: int) -> tuple[str, int]:
    """Kernel parameters for what prologues read, bound from `first` on, and the number behind them."""
    bound = ""
    for read in (read for prologue in launch.prologues.values() for read in prologue.operands):
        bound += _bound(read, first)
        first += len(read.pointers)
    return bound.replace("\n", " "), first
