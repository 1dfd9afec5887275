"""The text of epilogues: device functions that fetch what they read, and compute and store packs of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuda_compiler.dialect import CUDA, NUMBER_OF_BYTE, PACK_OF_BYTES
from cuda_compiler.early_launches import are_settled
from cuda_compiler.followers import follower_elements, follower_stores
from cuda_compiler.packing import (
    PackedLoad,
    asking,
    define_indexed,
    each_element,
    is_guarded,
    is_plain,
    loads_in,
    pack_source,
    packed_loads,
    with_packs,
)
from npu_compiler.dtypes import FLOAT32, INT8, INT32, UINT8
from npu_compiler.lowering.anchors import function, pointer_arguments, pointer_parameters
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import scatter_place
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Expr, Load, walk
from npu_compiler.tensor.rounded import by_constant

__all__ = ["columns_are_settled", "element_functions", "epilogue", "packs_by_element"]


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
    exprs = _exprs(group, found)
    loads = packed_loads(found.operands, exprs, size, indexed=True, checked=group.is_elementwise)
    sides = _sides(exprs, found, loads, size) if values else []
    operands = _with_sides(with_packs(found.operands, loads, "fetched."), sides)
    pointers, passed = f"{pointer_parameters(operands, CUDA)}const Params& p", f"{pointer_arguments(operands)}p"
    value = "value, " if values else ""
    inline = CUDA.inline
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
            f"{inline} void ask_by_element({parameters})",
            "{",
            *found.statements,
            *(f"    {line}" for line in asking(by_element.values())),
            "}",
            *(_source_of_element(by_element, parameters, found) if gives else []),
        ]
    else:
        fetching = _fetching("Fetched", "fetch", packs, size, parameters, found)
    lines = [
        *([found.functions] if found.functions else []),
        *fetching,
        f"{inline} {f'Pack<{storage}, {size}> results_of' if gives else 'void store'}"
        f"({values}const Fetched& fetched, {positions}{storage}* out, {pointers})",
        "{",
        *found.statements,
        *(_give_lines if gives else _store_lines)(group, changed(found, operands=operands), size, packs),
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


def _exprs(group: Group, found: Positions) -> list[Expr]:
    """All that an epilogue computes."""
    return [group.expr, *(each.group.expr for each in found.followers)]


def _is_by_column(load: Load, found: Positions) -> bool:
    """Whether what is loaded is the same for all rows and batches, and another for each column."""
    walk = found.operands.walks[load]
    return bool(walk[-1]) and not any(walk[:-1]) and not found.statements and not is_guarded(found.operands, load)


def _is_by_row(load: Load, found: Positions) -> bool:
    """Whether what is loaded is the same for all columns."""
    return not found.operands.walks[load][-1] and not found.statements and not is_guarded(found.operands, load)


def _sides(exprs: Sequence[Expr], found: Positions, packed: Sequence[PackedLoad], size: int) -> list[_Side]:
    """What an epilogue reads element by element though it is the same for all rows, or for all columns."""
    names, taken = found.operands.names.loads, {load.leaf for load in packed}
    loads = [load for load in loads_in(exprs) if load.index is None and load in names and load not in taken]
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
    name: str,
    packs: Mapping[str, PackedLoad],
    size: int,
    parameters: str,
    found: Positions,
    sides: Sequence[_Side] = (),
) -> list[str]:
    """A struct of packs and of what is read element by element, and the function that reads them."""
    printer = Printer(CUDA, found.operands.names)
    sources = {pack: pack_source(load, printer) for pack, load in packs.items()}
    return [
        f"struct {struct} {{",
        *(f"    Pack<{load.storage}, {size}> {pack};" for pack, load in packs.items()),
        *(f"    Pack<{side.storage}, {side.count}> {side.name};" for side in sides),
        "};",
        f"{CUDA.inline} {struct} {name}({parameters})",
        "{",
        *found.statements,
        *printer.lines,
        f"    {struct} fetched;",
        *(f"    fetched.{pack} = {source};" for pack, source in sources.items()),
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
    inline, statements = CUDA.inline, found.statements
    pointers = pointer_parameters(found.operands, CUDA)
    element = f"{inline} {storage} element(float sum, {positions}{pointers}const Params& p)"
    place = f"{inline} long long place({positions}const Params& p)"
    return "\n".join(
        (
            function(element, (*statements, *printer.lines), f"{storage}({result})"),
            function(place, statements, found.operands.output),
        )
    )


def columns_are_settled(group: Group, found: Positions, lowering: Lowering) -> bool:
    """Whether what ``fetch_by_column`` reads is there before the launch ahead has finished."""
    known = (load for load in loads_in(_exprs(group, found)) if load in found.operands.walks)
    return are_settled((load for load in known if _is_by_column(load, found)), lowering)


def _source_of_element(packs: Mapping[str, PackedLoad], parameters: str, found: Positions) -> list[str]:
    """A function that says where a pack lies; none where there are several, or it depends on what is read."""
    if len(packs) != 1 or not all(map(is_plain, packs.values())):
        return []
    (load,) = packs.values()
    place = load.source[load.source.index("(") + 1 : -1]
    head = f"{CUDA.inline} const {load.storage}* element_source({parameters})"
    return [function(head, found.statements, place)]


def packs_by_element(group: Group, found: Positions, size: int) -> list[PackedLoad]:
    """What ``fetch_by_element`` of an epilogue reads."""
    loads = packed_loads(found.operands, [group.expr], size, indexed=True, checked=group.is_elementwise)
    return [load for load in loads if not _is_by_column(load.leaf, found)]


def _result_lines(group: Group, found: Positions, size: int, packs: Mapping[str, PackedLoad]) -> list[str]:
    """Statements that compute a pack."""
    storage, inner = CUDA.storage[group.output.dtype.name], found.inner
    printer = Printer(CUDA, found.operands.names, "        ")
    fetched = {f"fetched.{name}": load for name, load in packs.items()}
    define_indexed(printer, fetched)
    _define_bytes(printer, group.expr, fetched, size)
    in_bytes = _is_in_bytes(group, size)
    result = _low_byte(group.expr, printer) if in_bytes else printer.value(group.expr)
    return [
        f"    int result[{size}];" if in_bytes else f"    Pack<{storage}, {size}> result;",
        *each_element(inner, size, " " * 4),
        *_own_results(group),
        *printer.lines,
        f"        result[u] = {result if in_bytes else f'{storage}({result})'};",
        *follower_elements(found.followers, printer),
        "    }",
    ]


def _give_lines(group: Group, found: Positions, size: int, packs: Mapping[str, PackedLoad]) -> list[str]:
    """Statements that compute a pack and give it back."""
    return [*_result_lines(group, found, size, packs), "    return result;"]


def _store_lines(group: Group, found: Positions, size: int, packs: Mapping[str, PackedLoad]) -> list[str]:
    """Statements that compute a pack and store it; a scatter's values go where its index says."""
    storage = CUDA.storage[group.output.dtype.name]
    indices = Printer(CUDA, found.operands.names)
    place = scatter_place(group, found.operands.output, indices)
    result = f"{PACK_OF_BYTES}<{storage}>(result)" if _is_in_bytes(group, size) else "result"
    ahead, behind = follower_stores(found.followers, size, found.inner)
    return [
        *indices.lines,
        f"    {storage}* target = out + {place.address};",
        *ahead,
        *_result_lines(group, found, size, packs),
        f"    {place.condition}store_pack(target, {result});",
        *behind,
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


def _define_bytes(printer: Printer, expr: Expr, packs: Mapping[str, PackedLoad], size: int) -> None:
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
