"""Kernels made at random of the forms that region splitting knows give the bits of the fibers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.software_gpu.harness import HEAD, Array, pipeline, run, uints

KERNELS = 12  # of one source
FUNCTIONS = """
METAL_FUNC float mixed(float a, float b) { return clamp(a * 0.5f + b, -9.0f, 9.0f); }
METAL_FUNC void stepped(thread float& a, float b) { a = mixed(b, a); }
METAL_FUNC float passed_on(float own, thread float& last, threadgroup float* shared, uint tid) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared[tid] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  last = shared[127];
  float next = shared[(tid + 1) % 128];
  return clamp(next - own, -7.0f, 7.0f);
}
"""
HEADER = """
kernel void k{}(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint* steps [[buffer(2)]],
                uint tid [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
                uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {{
  threadgroup float shared[128];
  shared[tid] = x[group * 128 + tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float first = x[tid] * 2.0f;
  uint turn = steps[1] + 1;
"""


@dataclass
class Maker:
    """Writes the body of a kernel.

    Attributes:
        level: Who takes the same way here: 0 the threadgroup, 1 a simdgroup, 2 none.
        together: Whether lanes of a simdgroup may work together here.
        whole: Whether all lanes of a simdgroup are here, so that any may be read.
        values: Variables of type float in scope.
        fixed: Those that may not be changed.
        counts: Variables of type uint in scope; all threads share `turn`.
    """

    random: random.Random
    level: int = 0
    together: bool = True
    whole: bool = True
    values: list[str] = field(default_factory=lambda: ["first"])
    fixed: set[str] = field(default_factory=set)
    counts: list[str] = field(default_factory=lambda: ["tid", "group", "lane", "simdgroup", "turn"])
    lines: list[str] = field(default_factory=list)
    made: int = 0

    def kernel(self, number: int) -> str:
        self.statements(9, 0)
        if self.random.random() < 0.4:
            self.add(f"if (tid > {self.random.randrange(20, 120)}) return;")
            self.whole = False
            self.statements(3, 0)
        self.add(f"y[group * 128 + tid] = {' + '.join(self.values)} + float(turn);")
        return HEADER.format(number) + "\n".join(self.lines) + "\n}\n"

    def add(self, line: str) -> None:
        self.lines.append("  " + line)

    def name(self) -> str:
        self.made += 1
        return f"v{self.made}"

    def count(self) -> str:
        return self.random.choice(self.counts)

    def leaf(self) -> str:
        pick = self.random.random()
        if pick < 0.6:
            return self.random.choice(self.values)
        if pick < 0.7:
            return f"x[(group * 128 + {self.count()} * {self.random.randrange(1, 9)}) % 512]"
        if pick < 0.8:
            return f"shared[({self.count()} + {self.random.randrange(128)}) % 128]"
        return f"float({self.count()} % {self.random.randrange(2, 40)}) * 0.25f"

    def value(self) -> str:
        a, b, c = self.leaf(), self.leaf(), self.leaf()
        forms = (
            f"{a} + {b}", f"{a} * 0.5f - {b}", f"max({a}, {b})", f"{a} < {b} ? {c} : {a}", f"mixed({a}, {b})", a,
            f"abs({a}) - {b} * 0.125f", f"floor({a}) + {b}",
        )  # fmt: skip
        return f"clamp({self.random.choice(forms)}, -8.0f, 8.0f)"

    def statements(self, count: int, depth: int) -> None:
        for _ in range(count):
            kinds: list[Callable[[int], None]] = [self.declares, self.declares, self.declares, self.assigns, self.array]
            kinds += [self.collects, self.collects] if self.together else []
            kinds += [self.exchanges] if self.level == 0 else []
            kinds += [self.branches, self.loops] if depth < 3 else []
            self.random.choice(kinds)(depth)

    def declares(self, _: int) -> None:
        name, value = self.name(), self.value()
        self.add(f"float {name} = {value};")
        self.values.append(name)

    def assigns(self, _: int) -> None:
        free = [name for name in self.values if name not in self.fixed]
        if self.level == 0 and self.random.random() < 0.2:
            self.add("turn = turn * 5 % 7 + 1;")
        elif free:
            name, value = self.random.choice(free), self.value()
            self.add(f"stepped({name}, {value});" if self.random.random() < 0.3 else f"{name} = {value};")

    def array(self, _: int) -> None:
        name, value, at = self.name(), self.name(), self.count()
        self.add(f"float {name}[3] = {{{self.leaf()}, {self.leaf()}, 1.0f}};")
        self.add(f"{name}[{at} % 3] += {self.leaf()};")
        self.add(f"float {value} = clamp({name}[{self.count()} % 3] + {name}[1], -8.0f, 8.0f);")
        self.values.append(value)

    def collects(self, _: int) -> None:
        name, value, other = self.name(), self.value(), self.leaf()
        forms = [f"simd_sum({value})", f"simd_max({value})", f"simd_min({value}) + {other}"]
        forms += [f"simd_prefix_exclusive_sum({value})", f"simd_broadcast_first({value})"]
        if self.whole:
            forms += [f"simd_shuffle_xor({value}, {self.random.choice((1, 7, 16))}) * {other}"]
            forms += [f"simd_shuffle({value}, (lane + {self.count()}) % 32)"]
            forms += [f"simd_broadcast({self.leaf()}, {self.random.randrange(32)}) - simd_shuffle_up({other}, 3)"]
        self.add(f"float {name} = clamp({self.random.choice(forms)}, -8.0f, 8.0f);")
        self.values.append(name)

    def exchanges(self, _: int) -> None:
        name, last = self.name(), self.name()
        if self.random.random() < 0.5:
            self.add(f"float {last} = 0.0f;")
            self.add(f"float {name} = passed_on({self.value()}, {last}, shared, tid);")
            self.values += [name, last]
        else:
            self.add(f"float {name} = {self.value()};")
            self.add("threadgroup_barrier(mem_flags::mem_threadgroup);")
            self.add(f"shared[tid] = {name};")
            self.add("threadgroup_barrier(mem_flags::mem_threadgroup);")

    def branches(self, depth: int) -> None:
        limit = self.random.randrange(2, 30)
        conditions = [f"turn % {limit} < 2", f"group + {limit} > 17"], [f"simdgroup < {limit % 4}"]
        lanes = [f"{self.random.choice(self.values)} > 0.5f", f"lane > {limit}", f"tid % {limit} != 0"]
        level = self.random.randrange(3)
        condition = self.random.choice([*conditions, lanes][level])
        self.add(f"if ({condition}) {{")
        self.inside(depth, max(level, self.level), whole=level < 2)
        if self.random.random() < 0.5:
            self.add("} else {")
            self.inside(depth, max(level, self.level), whole=level < 2)
        self.add("}")
        self.meets(level)

    def loops(self, depth: int) -> None:
        name, rounds = self.name(), self.random.randrange(2, 5)
        heads = (f"0; {name} < {rounds}", 0), (f"turn % 2; {name} < {rounds} + group", 0), (f"0; {name} < 70", 0)
        rows, lanes = (f"simdgroup; {name} < 6", 1), (f"tid; {name} < 300 + group", 2)
        head, level = self.random.choice([*heads, rows, lanes])
        step = f"{name} += 128" if level == 2 else f"{name} += 4" if level == 1 else f"++{name}"
        self.add(f"for (uint {name} = {head}; {step}) {{")
        self.counts.append(name)
        self.inside(depth, max(level, self.level), whole=level < 2, together=level < 2)
        self.counts.remove(name)
        self.add("}")
        self.meets(level)

    def inside(self, depth: int, level: int, *, whole: bool, together: bool = True) -> None:
        before = self.level, self.together, self.whole, list(self.values)
        self.level, self.together, self.whole = level, self.together and together, self.whole and whole
        self.statements(self.random.randrange(1, 5), depth + 1)
        self.level, self.together, self.whole, self.values = before

    def meets(self, level: int) -> None:
        """Lanes wait for each other behind what only some of them have done."""
        if level == 2 and self.level < 2:
            self.add("simdgroup_barrier(mem_flags::mem_none);")


def source(seed: int) -> str:
    return HEAD + FUNCTIONS + "".join(Maker(random.Random(100 * seed + n)).kernel(n) for n in range(KERNELS))


def outcome(text: str, kernel: str, kind: str) -> Array:
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    return run(text, kernel, [x, np.zeros(512, np.float32), uints(3, 5)], (4, 1, 1), (128, 1, 1), kind=kind)[1]


@pytest.mark.parametrize("seed", range(2))
def test_random_kernels_give_the_bits_of_the_fibers(seed: int) -> None:
    text = source(seed)
    kernels = [f"k{number}" for number in range(KERNELS)]
    assert all("region" in pipeline(text, kernel).kernel.entries for kernel in kernels)
    for kernel in kernels:
        fast, fibers = outcome(text, kernel, "fast"), outcome(text, kernel, "fibers")
        np.testing.assert_array_equal(fast.view(np.uint32), fibers.view(np.uint32), f"{kernel} of {seed}")
