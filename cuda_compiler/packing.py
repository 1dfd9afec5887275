"""Packs: neighbouring elements that one thread loads, computes and stores together, 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.dialect import CUDA, NUMBER_OF_BYTE, PACK_OF_BYTES
from cuda_compiler.guards import Guard, conditions, is_uniform
from npu_compiler.dtypes import FLOAT32, INT8, INT32, UINT8
from npu_compiler.lowering.anchors import function, pointer_arguments, pointer_parameters
from npu_compiler.lowering.dialect import Printer, is_small
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, scatter_place
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import Positions, inner_axes, unpack
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Checked, Expr, Iota, Load, leaves, walk
from npu_compiler.tensor.rounded import by_constant

__all__ = ["PACK_SIZES", "PackedLoad", "define_indexed", "element_functions", "epilogue", "is_plain", "pack_size"]
__all__ += ["pack_positions", "pack_source", "packed_loads", "packs_by_element", "with_packs"]

PACK_SIZES = (8, 4, 2)


@dataclass(frozen=True)
class PackedLoad:
    """A load of neighbouring elements: its leaf, the text that loads the pack, and its storage type.

    Where the leaf has an index, that is the same for the whole pack, and what it says is added to the address.
    """

    leaf: Load
    source: str
    storage: str


@dataclass(frozen=True)
class _Side:
    """A load of an epilogue that is the same for all columns, or for all rows but not of neighbours.

    Attributes:
        leaf: The load.
        name: What it is called where it was fetched.
        source: The text that loads an element.
        storage: Its storage type.
        by_row: Whether it is the same for all columns.
        count: How many of it a pack of results takes.
    """

    leaf: Load
    name: str
    source: str
    storage: str
    by_row: bool
    count: int

    def lines(self, inner: str) -> list[str]:
        """Statements that fetch it; `inner` is the position of the first result of a pack."""
        if self.count == 1:
            return [f"    fetched.{self.name}[0] = {self.source};"]
        return [
            "    #pragma unroll",
            f"    for (int u = 0, first = {inner}; u < {self.count}; ++u) {{",
            f"        const int {inner} = first + u;",
            f"        fetched.{self.name}[u] = {self.source};",
            "    }",
        ]


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
    walks = [(load, operands.walks.get(load)) for load in _loads([group.expr])]
    contiguous = [load for load, walk in walks if walk is not None and walk[axis] == 1]
    for wanted in (len(contiguous), sum(not _guarded(operands, load) for load in contiguous)):
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
    indices = [load for load in _loads(exprs) if load.index is not None] if indexed else []
    same = {load for load in indices if _is_same(load, operands, axis, size, checked)}
    taken = [load for load in _loads(exprs) if load.index is None or load in same]
    walks = ((load, operands.walks.get(load)) for load in taken)
    contiguous = [(load, strides) for load, strides in walks if strides is not None and strides[axis] == 1]
    held = conditions(exprs) if any(_guarded(operands, load) for load, _ in contiguous) else {}
    for load, strides in contiguous:
        guards = held[load] if _guarded(operands, load) else {}
        pointer, address, _ = operands.names.loads[load]
        argument, dtype = operands.pointers[int(pointer[len(operands.prefix) + 1 :])]
        assert dtype is not None
        outer, storage = _split(strides, axis)[1], CUDA.storage[dtype.name]
        if guards:
            outer.append(load.ref.view.offset)  # part of the address, as neither side of the tensor is safe to read
        elif load.ref.view.offset < 0 or _guarded(operands, load):
            continue
        uniform = all(is_small(guard) and is_uniform(guard, operands.walks, axis, size) for guard, _ in guards)
        if uniform and _aligned(outer, argument.offset, size, dtype.size):
            further = f" + int({{index}}) * {load.index_stride}" if load.index is not None else ""
            source = f"load_pack<{size}>({pointer} + {address}{further})"
            if guards:
                source = f"{_all_of(guards, operands)} ? {source} : Pack<{storage}, {size}>()"
            found.append(PackedLoad(load, source, storage))
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


def define_bytes(printer: Printer, expr: Expr, packs: Mapping[str, PackedLoad], size: int) -> None:
    """Tells a printer of the numbers, at ``u``, that packs of bytes in `expr` hold, which take no conversion."""
    bytes_of = {load.leaf: name for name, load in packs.items() if load.leaf.dtype in (INT8, UINT8)}
    if not bytes_of or size % 4:
        return
    for node in walk(expr):
        number, zero = by_constant(node, "sub") or (node, 0)
        code = number.args[0] if isinstance(number, Call) and number.fn == "cast" else None
        if number.dtype != FLOAT32 or not isinstance(code, Load) or code not in bytes_of:
            continue
        if zero in (range(-128, 128) if code.dtype == INT8 else range(256)):
            printer.define(node, f"{NUMBER_OF_BYTE}({bytes_of[code]}, u, {int(zero)})")


def _is_same(load: Load, operands: Operands, axis: int, size: int, checked: bool) -> bool:
    """Whether a load at a computed place reads, for all of a pack wherever it is, neighbours from one place on."""
    assert load.index is not None
    nodes = walk(load.index)
    still = all(not operands.walks[leaf][axis] for leaf in nodes if isinstance(leaf, Load | Iota))
    checks = [node for node in nodes if isinstance(node, Checked)]
    somewhere = any(_guarded(operands, each) for each in _loads([load]))
    somewhere = somewhere or any(operands.names.checks[check][1] for check in checks)
    return still and (checked or not checks) and not somewhere and load.index_stride % size == 0


def _all_of(guards: Iterable[Guard], operands: Operands) -> str:
    """The condition that all guards hold, at the first element of a pack."""
    printer = Printer(CUDA, operands.names)
    texts = [f"{'' if wanted else '!'}{printer.inline(condition)}" for condition, wanted in guards]
    return f"({' && '.join(texts)})"


def _leaves(expr: Expr) -> list[Load | Iota]:
    return [node for node in walk(expr) if isinstance(node, Load | Iota)]


def _loads(exprs: Sequence[Expr]) -> list[Load]:
    return list(dict.fromkeys(load for expr in exprs for load in leaves(expr)))


def _guarded(operands: Operands, load: Load) -> bool:
    return operands.names.loads[load][2]


def _split(walk: Sequence[int], axis: int) -> tuple[int, list[int]]:
    """The stride along a dimension, counted from the last, and those along all others."""
    return walk[axis], [stride for dim, stride in enumerate(walk) if dim != len(walk) + axis]


def _aligned(outer_strides: Sequence[int], offset: int, size: int, item: int) -> bool:
    return all(stride % size == 0 for stride in outer_strides) and offset % min(16, size * item) == 0


def with_packs(operands: Operands, loads: Sequence[PackedLoad], prefix: str = "", suffix: str = "") -> Operands:
    """Operands whose packed loads are read from variables ``x0``, ``x1``..., so named or as members, at ``u``."""
    names = dict(operands.names.loads)
    names.update({load.leaf: (f"{prefix}x{number}{suffix}", "u", False) for number, load in enumerate(loads)})
    return changed(operands, names=changed(operands.names, loads=names))


def epilogue(
    group: Group, found: Positions, size: int, positions: str, names: str, values: str = "", gives: bool = False
) -> str:
    """Device functions that compute `size` neighbours from their position, and store them.

    ``fetch`` reads what it takes in packs, ``store`` does the rest, ``finish`` does both. With an anchor, ``fetch`` has
    three parts: ``fetch_by_row`` reads what is the same for all columns, ``fetch_by_column`` what is the same for all
    rows, ``fetch_by_element`` other packs, and ``ask_by_element`` has these on their way to the level-2 cache.

    Args:
        group: What to compute.
        found: Its operands.
        size: Elements of a pack.
        positions: Parameters for the kernel's positions, each with a comma after it.
        names: The same without types.
        values: Parameter for the anchor's own results, with a comma after it; empty without an anchor.
        gives: Whether there is, in the place of ``store``, ``results_of``, which gives back a pack. Where that goes,
            ``result_target`` says; and ``element_source`` where the one pack of ``fetch_by_element`` lies, if it has
            one.
    """
    storage = CUDA.storage[group.output.dtype.name]
    loads = packed_loads(found.operands, [group.expr], size, indexed=True, checked=group.is_elementwise)
    sides = _sides(group, found, loads, size) if values else []
    operands = _with_sides(with_packs(found.operands, loads, "fetched."), sides)
    pointers, passed = f"{pointer_parameters(operands, CUDA)}const Params& p", f"{pointer_arguments(operands)}p"
    value = "value, " if values else ""
    inline = "__device__ __forceinline__"
    packs = {f"x{number}": load for number, load in enumerate(loads)}
    by_column = {name: load for name, load in packs.items() if values and _is_by_column(load.leaf, found)}
    by_element = {name: load for name, load in packs.items() if name not in by_column}
    parameters, arguments = f"{positions}{pointers}", f"{names}{passed}"
    if values:
        fetching = [
            *_fetching("FetchedByRow", "fetch_by_row", {}, size, parameters, found, _of(sides, True)),
            *_fetching("FetchedByColumn", "fetch_by_column", by_column, size, parameters, found, _of(sides, False)),
            *_fetching("FetchedByElement", "fetch_by_element", by_element, size, parameters, found),
            "struct Fetched : FetchedByRow, FetchedByColumn, FetchedByElement {};",
            f"{inline} Fetched fetch({parameters})",
            "{",
            f"    return {{fetch_by_row({arguments}), fetch_by_column({arguments}), fetch_by_element({arguments})}};",
            "}",
            *_asking(by_element, parameters, found),
            *(_source_of_element(by_element, parameters, found) if gives else []),
        ]
    else:
        fetching = _fetching("Fetched", "fetch", packs, size, parameters, found)
    lines = [
        *fetching,
        f"{inline} {f'Pack<{storage}, {size}> results_of' if gives else 'void store'}"
        f"({values}const Fetched& fetched, {positions}{storage}* out, {pointers})",
        "{",
        *found.statements,
        *(_give_lines if gives else _store_lines)(group, operands, found.inner, size, packs),
        "}",
    ]
    if gives:
        head = f"{inline} {storage}* result_target({positions}{storage}* out, {pointers})"
        return "\n".join([*lines, function(head, found.statements, f"out + {operands.output}")])
    lines += [
        f"{inline} void finish({values}{positions}{storage}* out, {pointers})",
        "{",
        f"    store({value}fetch({names}{passed}), {names}out, {passed});",
        "}",
    ]
    return "\n".join(lines)


def _is_by_column(load: Load, found: Positions) -> bool:
    """Whether what is loaded is the same for all rows and batches, and another for each column."""
    walk = found.operands.walks[load]
    return bool(walk[-1]) and not any(walk[:-1]) and not found.statements and not _guarded(found.operands, load)


def _is_by_row(load: Load, found: Positions) -> bool:
    """Whether what is loaded is the same for all columns."""
    return not found.operands.walks[load][-1] and not found.statements and not _guarded(found.operands, load)


def _sides(group: Group, found: Positions, packed: Sequence[PackedLoad], size: int) -> list[_Side]:
    """What an epilogue reads element by element though it is the same for all rows, or for all columns."""
    names, taken = found.operands.names.loads, {load.leaf for load in packed}
    loads = [load for load in _loads([group.expr]) if load.index is None and load in names and load not in taken]
    sides: list[_Side] = []
    for load in loads:
        by_row = _is_by_row(load, found)
        if by_row or _is_by_column(load, found):
            pointer, address, _ = names[load]
            storage, count = CUDA.storage[load.dtype.name], 1 if by_row else size
            sides.append(_Side(load, f"s{len(sides)}", f"{pointer}[{address}]", storage, by_row, count))
    return sides


def _of(sides: Sequence[_Side], by_row: bool) -> list[_Side]:
    return [side for side in sides if side.by_row == by_row]


def _with_sides(operands: Operands, sides: Sequence[_Side]) -> Operands:
    """Operands whose sides are read where they were fetched."""
    names = dict(operands.names.loads)
    names.update({side.leaf: (f"fetched.{side.name}", "u" if side.count > 1 else "0", False) for side in sides})
    return changed(operands, names=changed(operands.names, loads=names))


def _fetching(
    struct: str,
    function: str,
    packs: Mapping[str, PackedLoad],
    size: int,
    parameters: str,
    found: Positions,
    sides: Sequence[_Side] = (),
) -> list[str]:
    """A struct of packs and of what is read element by element, and the function that reads them."""
    printer = Printer(CUDA, found.operands.names)
    sources = {name: pack_source(load, printer) for name, load in packs.items()}
    return [
        f"struct {struct} {{",
        *(f"    Pack<{load.storage}, {size}> {name};" for name, load in packs.items()),
        *(f"    Pack<{side.storage}, {side.count}> {side.name};" for side in sides),
        "};",
        f"__device__ __forceinline__ {struct} {function}({parameters})",
        "{",
        *found.statements,
        *printer.lines,
        f"    {struct} fetched;",
        *(f"    fetched.{name} = {source};" for name, source in sources.items()),
        *(line for side in sides for line in side.lines(found.inner)),
        "    return fetched;",
        "}",
    ]


def element_functions(group: Group, found: Positions, positions: str) -> str:
    """Device functions that compute an element from the anchor's result, ``element``, and say where it goes, ``place``.

    They serve kernels whose threads hold results that do not lie side by side.

    Args:
        group: What to compute around an anchor, without scattering.
        found: Its operands.
        positions: Parameters for the kernel's positions, each with a comma after it.
    """
    storage = CUDA.storage[group.output.dtype.name]
    printer = Printer(CUDA, found.operands.names)
    result = printer.value(group.expr)
    inline, statements = "__device__ __forceinline__", found.statements
    pointers = pointer_parameters(found.operands, CUDA)
    element = f"{inline} {storage} element(float sum, {positions}{pointers}const Params& p)"
    place = f"{inline} long long place({positions}const Params& p)"
    return "\n".join(
        (
            function(element, (*statements, *printer.lines), f"{storage}({result})"),
            function(place, statements, found.operands.output),
        )
    )


def _asking(packs: Mapping[str, PackedLoad], parameters: str, found: Positions) -> list[str]:
    """A function that asks for the lines of memory that packs lie in, where they do not depend on what is read."""
    plain = [load for load in packs.values() if is_plain(load)]
    return [
        f"__device__ __forceinline__ void ask_by_element({parameters})",
        "{",
        *found.statements,
        *(f"    ask_for{load.source[load.source.index('(') :]};" for load in plain),
        "}",
    ]


def _source_of_element(packs: Mapping[str, PackedLoad], parameters: str, found: Positions) -> list[str]:
    """A function that says where a pack lies; none where there are several, or it depends on what is read."""
    if len(packs) != 1 or not all(map(is_plain, packs.values())):
        return []
    (load,) = packs.values()
    place = load.source[load.source.index("(") + 1 : -1]
    head = f"__device__ __forceinline__ const {load.storage}* element_source({parameters})"
    return [function(head, found.statements, place)]


def is_plain(load: PackedLoad) -> bool:
    """Whether where it lies depends on nothing that is read."""
    return load.leaf.index is None and load.source.startswith("load_pack")


def packs_by_element(group: Group, found: Positions, size: int) -> list[PackedLoad]:
    """What ``fetch_by_element`` of an epilogue reads."""
    loads = packed_loads(found.operands, [group.expr], size, indexed=True, checked=group.is_elementwise)
    return [load for load in loads if not _is_by_column(load.leaf, found)]


def _result_lines(
    group: Group, operands: Operands, inner: str, size: int, packs: Mapping[str, PackedLoad]
) -> list[str]:
    """Statements that compute a pack."""
    storage = CUDA.storage[group.output.dtype.name]
    printer = Printer(CUDA, operands.names, "        ")
    fetched = {f"fetched.{name}": load for name, load in packs.items()}
    define_indexed(printer, fetched)
    define_bytes(printer, group.expr, fetched, size)
    in_bytes = _is_in_bytes(group, size)
    result = _low_byte(group.expr, printer) if in_bytes else printer.value(group.expr)
    return [
        f"    int result[{size}];" if in_bytes else f"    Pack<{storage}, {size}> result;",
        f"    const int first = {inner};",
        "    #pragma unroll",
        f"    for (int u = 0; u < {size}; ++u) {{",
        f"        const int {inner} = first + u;",
        *_own_results(group),
        *printer.lines,
        f"        result[u] = {result if in_bytes else f'{storage}({result})'};",
        "    }",
    ]


def _give_lines(group: Group, operands: Operands, inner: str, size: int, packs: Mapping[str, PackedLoad]) -> list[str]:
    """Statements that compute a pack and give it back."""
    return [*_result_lines(group, operands, inner, size, packs), "    return result;"]


def _store_lines(group: Group, operands: Operands, inner: str, size: int, packs: Mapping[str, PackedLoad]) -> list[str]:
    """Statements that compute a pack and store it; a scatter's values go where its index says."""
    storage = CUDA.storage[group.output.dtype.name]
    indices = Printer(CUDA, operands.names)
    place = scatter_place(group, operands.output, indices)
    result = f"{PACK_OF_BYTES}<{storage}>(result)" if _is_in_bytes(group, size) else "result"
    return [
        *indices.lines,
        f"    {storage}* target = out + {place.address};",
        *_result_lines(group, operands, inner, size, packs),
        f"    {place.condition}store_pack(target, {result});",
    ]


def _is_in_bytes(group: Group, size: int) -> bool:
    """Whether a pack is bytes by fours, which are put together from integers."""
    return group.output.dtype in (INT8, UINT8) and size % 4 == 0


def _low_byte(expr: Expr, printer: Printer) -> str:
    """Text of an integer whose low byte is that of `expr`."""
    if isinstance(expr, Call) and expr.fn == "code":
        return CUDA.call(expr.fn, [printer.value(argument) for argument in expr.args], INT32)
    is_cut = isinstance(expr, Call) and expr.fn == "cast" and expr.args[0].dtype == INT32
    return printer.value(expr.args[0] if isinstance(expr, Call) and is_cut else expr)


def _own_results(group: Group) -> list[str]:
    """Names for the anchor's own results; the odd column of a pair is ``sum1``."""
    if group.anchor is None:
        return []
    own = f"        const {CUDA.register(group.anchor.dtype)} sum = "
    return [f"{own}value[u];"] if group.pairs == 1 else [f"{own}value[2 * u], sum1 = value[2 * u + 1];"]
