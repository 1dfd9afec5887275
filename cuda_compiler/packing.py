"""Packs: neighbouring elements that one thread loads, computes and stores together, 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.dialect import CUDA
from cuda_compiler.guards import Guard, conditions, is_uniform
from npu_compiler.lowering.dialect import Printer, is_small
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import Positions, inner_axes, unpack
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Checked, Expr, Iota, Load, leaves, walk

__all__ = ["CHUNK", "CHUNK_BYTES", "PACK_SIZES", "PackedLoad", "define_indexed", "each_element", "is_guarded"]
__all__ += [
    "asking",
    "is_plain",
    "loads_in",
    "pack_positions",
    "pack_size",
    "pack_source",
    "packed_loads",
    "with_packs",
]

PACK_SIZES = (8, 4, 2)
CHUNK_BYTES = 16
"""What threads copy at a time."""
CHUNK = 8
"""Elements of 16 bits of a chunk."""


@dataclass(frozen=True)
class PackedLoad:
    """A load of neighbouring elements.

    Attributes:
        leaf: What it loads.
        size: Elements.
        storage: Their storage type.
        pointer: Where their tensor lies.
        address: Where the first of them lies in it; where the leaf has an index, that is the same for the whole pack,
            and the text has ``{index}`` for it.
        guard: The condition that they exist; empty where they always do.
    """

    leaf: Load
    size: int
    storage: str
    pointer: str
    address: str
    guard: str

    @property
    def source(self) -> str:
        """The text that loads the pack."""
        return self.source_at(self.address)

    def source_at(self, address: str) -> str:
        """The same with another text in the place of the address."""
        source = f"load_pack<{self.size}>({self.pointer} + {address})"
        return f"{self.guard} ? {source} : Pack<{self.storage}, {self.size}>()" if self.guard else source


def pack_size(group: Group, operands: Operands, width: int, axis: int = -1, most: int = PACK_SIZES[0]) -> int:
    """Elements of a pack: the most for which the output, and best all contiguous operands, are aligned; else 1.

    Args:
        group: What is computed.
        operands: Its operands.
        width: Extent of the dimension that packs run along.
        axis: That dimension, counted from the last.
        most: Elements that the kernel stores at a time at the most.
    """
    if group.index is not None and any(operands.walks[leaf][axis] for leaf in _leaves(group.index)):
        return 1
    along, outer = _split(operands.walks[None], axis)
    item, offset = group.output.dtype.size, output_argument(group).offset
    outer = [*outer, group.index_stride]
    sizes = (*([most] if most > PACK_SIZES[0] else []), *PACK_SIZES)
    fitting = [s for s in sizes if along == 1 and width % s == 0 and _aligned(outer, offset, s, item)]
    walks = [(load, operands.walks.get(load)) for load in loads_in([group.expr])]
    contiguous = [load for load, walk in walks if walk is not None and walk[axis] == 1]
    for wanted in (len(contiguous), sum(not is_guarded(operands, load) for load in contiguous)):
        for size in fitting:
            whole = group.is_elementwise
            if len(packed_loads(operands, [group.expr], size, axis, whole, whole)) >= wanted:
                return size
    return fitting[0] if fitting else 1


def pack_positions(pack: str, operands: Operands, sizes: Sequence[int], size: int) -> Positions:
    """How the number of a pack becomes the position of its first element; the extent ``packs`` is their number.

    Args:
        pack: Name of the number.
        operands: What is read.
        sizes: Extents of the dimensions that packs are counted along, the last of which they run along.
        size: Elements of a pack, a divisor of that.
    """
    axes, counts = inner_axes(len(sizes)), (*sizes[:-1], sizes[-1] // size)
    moved = [f"    {axes[-1]} *= {size};"] if size > 1 else []
    return Positions(operands, (*unpack(pack, axes, counts), *moved), {"packs": prod(counts)}, axes[-1])


def packed_loads(
    operands: Operands,
    exprs: Sequence[Expr],
    size: int,
    axis: int = -1,
    indexed: bool = False,
    checked: bool = False,
) -> list[PackedLoad]:
    """The loads that may read `size` neighbours along a dimension at once.

    Args:
        operands: What `exprs` read.
        exprs: What is computed.
        size: Elements of a pack.
        axis: The dimension, counted from the last.
        indexed: Whether loads at a computed place count, too: of their packs, `source` has ``{index}`` for it.
        checked: Whether these count where the place is checked, so that whoever reads the pack records a fault.
    """
    if size == 1:
        return []
    found = []
    indices = [load for load in loads_in(exprs) if load.index is not None] if indexed else []
    same = {load for load in indices if _is_same(load, operands, axis, size, checked)}
    taken = [load for load in loads_in(exprs) if load.index is None or load in same]
    walks = ((load, operands.walks.get(load)) for load in taken)
    contiguous = [(load, strides) for load, strides in walks if strides is not None and strides[axis] == 1]
    held = conditions(exprs) if any(is_guarded(operands, load) for load, _ in contiguous) else {}
    for load, strides in contiguous:
        guards = held[load] if is_guarded(operands, load) else {}
        pointer, address, _ = operands.names.loads[load]
        argument, dtype = operands.pointers[int(pointer[len(operands.prefix) + 1 :])]
        assert dtype is not None
        outer, storage = _split(strides, axis)[1], CUDA.storage[dtype.name]
        if guards:
            outer.append(load.ref.view.offset)  # part of the address, as neither side of the tensor is safe to read
        elif load.ref.view.offset < 0 or is_guarded(operands, load):
            continue
        uniform = all(is_small(guard) and is_uniform(guard, operands.walks, axis, size) for guard, _ in guards)
        if uniform and _aligned(outer, argument.offset, size, dtype.size):
            further = f" + int({{index}}) * {load.index_stride}" if load.index is not None else ""
            guard = _all_of(guards, operands) if guards else ""
            found.append(PackedLoad(load, size, storage, pointer, f"{address}{further}", guard))
    return found


def pack_source(load: PackedLoad, printer: Printer) -> str:
    """The text that loads a pack; a printer has the statements that say where it lies."""
    index = load.leaf.index
    return load.source if index is None else load.source.replace("{index}", printer.value(index))


def define_indexed(printer: Printer, packs: Mapping[str, PackedLoad]) -> None:
    """Tells a printer of the elements, at ``u``, of packs at computed places, which nobody has to compute again."""
    for name, load in packs.items():
        if load.leaf.index is not None:
            printer.define(load.leaf, f"{CUDA.register(load.leaf.dtype)}({name}[u])")


def _is_same(load: Load, operands: Operands, axis: int, size: int, checked: bool) -> bool:
    """Whether a load at a computed place reads, for all of a pack wherever it is, neighbours from one place on."""
    assert load.index is not None
    nodes = walk(load.index)
    still = all(not operands.walks[leaf][axis] for leaf in nodes if isinstance(leaf, Load | Iota))
    checks = [node for node in nodes if isinstance(node, Checked)]
    somewhere = any(is_guarded(operands, each) for each in loads_in([load]))
    somewhere = somewhere or any(operands.names.checks[check][1] for check in checks)
    return still and (checked or not checks) and not somewhere and load.index_stride % size == 0


def _all_of(guards: Iterable[Guard], operands: Operands) -> str:
    """The condition that all guards hold, at the first element of a pack."""
    printer = Printer(CUDA, operands.names)
    texts = [f"{'' if wanted else '!'}{printer.inline(condition)}" for condition, wanted in guards]
    return f"({' && '.join(texts)})"


def _leaves(expr: Expr) -> list[Load | Iota]:
    return [node for node in walk(expr) if isinstance(node, Load | Iota)]


def loads_in(exprs: Sequence[Expr]) -> list[Load]:
    """The loads of some expressions, each once."""
    return list(dict.fromkeys(load for expr in exprs for load in leaves(expr)))


def is_guarded(operands: Operands, load: Load) -> bool:
    """Whether a load may name elements that do not exist."""
    return operands.names.loads[load][2]


def _split(walk: Sequence[int], axis: int) -> tuple[int, list[int]]:
    """The stride along a dimension, counted from the last, and those along all others."""
    return walk[axis], [stride for dim, stride in enumerate(walk) if dim != len(walk) + axis]


def _aligned(outer_strides: Sequence[int], offset: int, size: int, item: int) -> bool:
    return all(stride % size == 0 for stride in outer_strides) and offset % min(16, size * item) == 0


def each_element(inner: str, size: int, indent: str) -> list[str]:
    """The head of a loop over the elements of a pack, ``u``, in which `inner` is the position of each.

    Args:
        inner: Ahead of the loop the position of the first one.
        size: Elements of the pack.
        indent: What each line begins with.
    """
    return [
        f"{indent}const int first = {inner};",
        f"{indent}#pragma unroll",
        f"{indent}for (int u = 0; u < {size}; ++u) {{",
        f"{indent}    const int {inner} = first + u;",
    ]


def with_packs(operands: Operands, loads: Sequence[PackedLoad], prefix: str = "", suffix: str = "") -> Operands:
    """Operands whose packed loads are read from variables ``x0``, ``x1``..., so named or as members, at ``u``."""
    names = dict(operands.names.loads)
    names.update({load.leaf: (f"{prefix}x{number}{suffix}", "u", False) for number, load in enumerate(loads)})
    return changed(operands, names=changed(operands.names, loads=names))


def asking(loads: Iterable[PackedLoad]) -> list[str]:
    """Statements that have the lines of memory in which packs lie on their way to the level-2 cache, where these do not
    depend on what is read.
    """
    return [f"ask_for{load.source[load.source.index('(') :]};" for load in loads if is_plain(load)]


def is_plain(load: PackedLoad) -> bool:
    """Whether where it lies depends on nothing that is read."""
    return load.leaf.index is None and not load.guard
