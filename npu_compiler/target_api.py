"""What a package with a target of its own imports of the compiler. These names stay, wherever their modules move to."""

from __future__ import annotations

from npu_compiler.artifact.extension import ArgumentExtension, LaunchExtension, TargetExtensions
from npu_compiler.artifact.plan import FAULTS, Argument, KernelCall, KernelSource, LibraryCall, Step
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, traffic_of
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import CodedRows, Computed, Dequantised, GroupedCodes, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.pooling import Divisor, Pooling
from npu_compiler.lowering.problems.problem import Added, Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.problems.windows import Windows
from npu_compiler.lowering.target import CodegenTarget, Lowering, lowering_of
from npu_compiler.tensor.expr import (
    FUNCTIONS,
    Call,
    Checked,
    Combination,
    Const,
    Expr,
    Iota,
    Load,
    Reduce,
    Slot,
    walk,
)
from npu_compiler.tensor.layout import Layout, dense
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["CodegenTarget", "Lowering", "lowering_of", "OpRefusal", "Layout", "View", "dense"]
__all__ += ["Group", "TracedTensor", "flops_of", "traffic_of"]
__all__ += ["Problem", "Product", "Convolution", "Pooling", "Attention", "Recurrence", "Scan", "Sort"]
__all__ += ["Windows", "Divisor"]
__all__ += ["Operand", "Computed", "CodedRows", "Dequantised", "GroupedCodes", "Scattered", "Added"]
__all__ += ["Expr", "Const", "Load", "Iota", "Call", "Reduce", "Combination", "Slot", "Checked", "walk", "FUNCTIONS"]
__all__ += ["KernelSource", "KernelCall", "LibraryCall", "Argument", "Step", "FAULTS"]
__all__ += ["TargetExtensions", "LaunchExtension", "ArgumentExtension"]
