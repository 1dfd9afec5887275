"""How the texts of kernels are put together for CUDA."""

from __future__ import annotations

import re

from cuda_compiler.dialect import CUDA, FLOAT8_CODE, NUMBER_OF_BYTE, PACK_OF_BYTES, PACK_OF_FLOAT8, SUM_OF_LANES
from cuda_compiler.early_launches import EarlyLaunch, kernel_number
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.lowering.anchors import Epilogue, KernelWriter, definitions
from npu_compiler.lowering.dialect import CHECK
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch

__all__ = ["KERNELS", "QUIET_CHECK"]

_CALLED = {
    "checks.cuh": (CHECK,),
    "float8_codes.cuh": (FLOAT8_CODE, PACK_OF_FLOAT8),
    "byte_packs.cuh": (NUMBER_OF_BYTE, PACK_OF_BYTES),
    "lane_sums.cuh": (SUM_OF_LANES,),
}
"""Files that generated text calls functions of, by name."""

QUIET_CHECK = "quiet_index"
"""As `CHECK`, without a record of the fault (checks.cuh)."""

_BODY = re.compile(r'extern "C" __global__ [^{]*\{\n')
"""What stands ahead of a kernel's first statement."""


class _CUDAKernels(KernelWriter):
    """What is generated stands behind the files that it builds on, and ahead of those that build on it."""

    package = "cuda_compiler"
    dialect = CUDA

    def source(self, launch: Launch, declaration: str, fused: Epilogue | None = None) -> KernelSource:
        template, prologues = launch.template, launch.prologues.values()
        own = [text for text in (launch.text, *(prologue.text for prologue in prologues)) if text]
        before = [*template.before.split(), *(file for prologue in prologues for file in prologue.files)]
        macros = launch.defined
        if fused is not None:
            macros = {**fused.macros, **macros}
            own = [fused.text, *(own or ([""] if fused.group.problem is not None else []))]
        checks = [file for file, names in _CALLED.items() if any(name in text for name in names for text in own)]
        after = [file for file in (*template.files.split(), *launch.files) if file not in checks]
        return KernelSource(
            template.entry,
            *(self.file("common.cuh"), definitions(macros), declaration),
            *map(self.file, (*checks, *before)),
            *(own or [""]),
            *map(self.file, after),
            _with_places(self.file(f"{template.entry}.cuh"), launch.threads),
        )

    def number(self, launch: Launch, source: KernelSource, lowering: Lowering) -> int:
        if not isinstance(launch, EarlyLaunch):
            return kernel_number(source, lowering)
        return kernel_number(source, lowering, launch.hurries, launch.streams)


def _with_places(text: str, threads: tuple[int, int, int]) -> str:
    """A kernel's file, of which the kernel first tells the compiler how many threads a block has (common.cuh)."""
    begin = f"    know_places<{', '.join(map(str, threads))}>();\n"
    return _BODY.sub(lambda found: found[0] + begin, text)


KERNELS = _CUDAKernels()
