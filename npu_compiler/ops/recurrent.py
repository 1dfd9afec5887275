"""Recurrent layers: the products with their inputs are made for all steps at once; what is left is a recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.ops.elementwise import relu, sigmoid
from npu_compiler.ops.indexing import cat
from npu_compiler.ops.linear import product
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.expr import Const
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, where
from npu_compiler.tensor.trace import Map

_GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


@dataclass(frozen=True)
class _Weights:
    """The weights of one direction of a layer.

    Attributes:
        given, hidden: [gates * hidden, input size] and [gates * hidden, size of h].
        biases: Those of the products with the input and with h; none, or both.
        projection: [size of h, hidden], for an LSTM whose h is a projection.
    """

    given: Tensor
    hidden: Tensor
    biases: tuple[Tensor, ...] = ()
    projection: Tensor | None = None


def _flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """Of the products with the weights: two operations for each weight of each step, and each row of the batch."""
    rows = prod(operands[0][:-1])
    return 2 * rows * sum(prod(shape) for shape in operands[1:] if len(shape) == 2)


@op("aten.lstm.input", work=Work.ANCHOR, is_learned=True, flops=_flops)
def lstm(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Layers of long short-term memory: all outputs of the last layer, the last h and c of each layer."""
    if len(hx) != 2:
        raise OpRefusal(f"given {len(hx)} initial states, expected h and c")
    _refuse_training(dropout, train)
    return _layers("lstm", input, hx, params, has_biases, num_layers, bidirectional, batch_first)


@op("aten.gru.input", work=Work.ANCHOR, is_learned=True, flops=_flops)
def gru(
    input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Layers of gated recurrent units: all outputs of the last layer, and the last h of each layer."""
    _refuse_training(dropout, train)
    return _layers("gru", input, (hx,), params, has_biases, num_layers, bidirectional, batch_first)


@op("aten.rnn_tanh.input", work=Work.ANCHOR, is_learned=True, flops=_flops)
def rnn_tanh(
    input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Layers of ``h = tanh(weights @ (x, h))``: all outputs of the last layer, and the last h of each layer."""
    _refuse_training(dropout, train)
    return _layers("tanh", input, (hx,), params, has_biases, num_layers, bidirectional, batch_first)


@op("aten.rnn_relu.input", work=Work.ANCHOR, is_learned=True, flops=_flops)
def rnn_relu(
    input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Layers of ``h = relu(weights @ (x, h))``: all outputs of the last layer, and the last h of each layer."""
    _refuse_training(dropout, train)
    return _layers("relu", input, (hx,), params, has_biases, num_layers, bidirectional, batch_first)


@op("aten.lstm.data", work=Work.ANCHOR, is_learned=True)
def packed_lstm(
    data: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same over packed sequences, which only the CPU has: their lengths decide how much each step computes."""
    raise OpRefusal(_PACKED)


@op("aten.gru.data", "aten.rnn_tanh.data", "aten.rnn_relu.data", work=Work.ANCHOR, is_learned=True)
def packed_rnn(
    data: Tensor, batch_sizes: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same over packed sequences, which only the CPU has: their lengths decide how much each step computes."""
    raise OpRefusal(_PACKED)


_MOST_STEPS = 1 << 16  # a target may need a launch for each
_PACKED = "given a packed sequence, whose lengths are values of a tensor, expected a padded one of a known length"


def _refuse_training(dropout: float, train: bool) -> None:
    if train and dropout:
        raise OpRefusal(f"given dropout={dropout} in training, expected none; call model.eval() before extraction")


@op("aten.lstm_cell.default", is_learned=True)
def lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step of long short-term memory: h and c."""
    if len(hx) != 2:
        raise OpRefusal(f"given {len(hx)} states, expected h and c")
    h, c = hx
    entry, forget, candidate, output = _split(_sum(_linear(input, w_ih, b_ih), _linear(h, w_hh, b_hh)), 4)
    carried = sigmoid(forget) * c + sigmoid(entry) * apply("tanh", candidate)
    return sigmoid(output) * apply("tanh", carried), carried


@op("aten.gru_cell.default", is_learned=True)
def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of a gated recurrent unit."""
    of_input, of_state = _linear(input, w_ih, b_ih), _linear(hx, w_hh, b_hh)
    if of_input.shape != of_state.shape:
        raise OpRefusal(f"given products of {list(of_input.shape)} and {list(of_state.shape)}, expected equal shapes")
    given, kept = _split(of_input, 3), _split(of_state, 3)
    reset, update = sigmoid(given[0] + kept[0]), sigmoid(given[1] + kept[1])
    candidate = apply("tanh", given[2] + reset * kept[2])
    return candidate + update * (hx - candidate)


@op("aten.rnn_tanh_cell.default", is_learned=True)
def rnn_tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``tanh(w_ih @ input + w_hh @ hx)``, with biases."""
    return apply("tanh", _sum(_linear(input, w_ih, b_ih), _linear(hx, w_hh, b_hh)))


@op("aten.rnn_relu_cell.default", is_learned=True)
def rnn_relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``relu(w_ih @ input + w_hh @ hx)``, with biases."""
    return relu(_sum(_linear(input, w_ih, b_ih), _linear(hx, w_hh, b_hh)))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(x.shape) != 2 or len(weight.shape) != 2:
        raise OpRefusal(f"given shapes {list(x.shape)} and {list(weight.shape)}, expected two dimensions each")
    result = product(x, weight.swap(0, 1))
    return result if bias is None else result + bias


def _sum(of_input: Tensor, of_state: Tensor) -> Tensor:
    if of_input.shape != of_state.shape:
        raise OpRefusal(f"given products of {list(of_input.shape)} and {list(of_state.shape)}, expected equal shapes")
    return (of_input + of_state).realize()


def _split(gates: Tensor, count: int) -> list[Tensor]:
    """The gates of a cell, side by side in the last dimension."""
    if gates.shape[-1] % count:
        raise OpRefusal(f"given {gates.shape[-1]} rows of weights, expected a multiple of {count}")
    size, whole = gates.shape[-1] // count, gates.realize()
    return [whole.slice(-1, size * gate, size) for gate in range(count)]


def _layers(
    cell: str, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers, one after another: the outputs of the last one, and the last states of each.

    Args:
        cell: A `Cell`'s value.
        x: [steps, batch, size], or [batch, steps, size] where `batch_first`.
        states: The initial h, and c of an LSTM, [layers * directions, batch, size].
        params: By layer and direction: two weights, two biases where it has them, a projection where it has one.
        has_biases, num_layers, bidirectional, batch_first: As the op takes them.
    """
    directions = 2 if bidirectional else 1
    weights = _read_weights(cell, params, has_biases, num_layers * directions)
    if len(x.shape) != 3 or any(len(state.shape) != 3 or state.shape[0] != len(weights) for state in states):
        shapes = ", ".join(str(list(t.shape)) for t in (x, *states))
        raise OpRefusal(f"given {shapes}, expected three dimensions each, and states of {len(weights)} directions")
    result, last = x.swap(0, 1) if batch_first else x, []
    for layer in range(num_layers):
        first = layer * directions
        own = [state.slice(0, first, directions) for state in states]
        result, *ended = _layer(cell, result, weights[first : first + directions], own)
        last.append(ended)
    ends = [_joined(parts, 0) for parts in zip(*last, strict=True)]
    return result.swap(0, 1) if batch_first else result, *ends


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return cat(parts, dim) if len(parts) > 1 else parts[0]


def _read_weights(cell: str, params: Sequence[Tensor], has_biases: bool, count: int) -> list[_Weights]:
    plain = 4 if has_biases else 2
    if len(params) not in (count * plain, count * (plain + 1)):
        raise OpRefusal(f"given {len(params)} weights, expected {plain} for each of {count} directions")
    each = len(params) // count
    found = []
    for first in range(0, len(params), each):
        given, hidden, *rest = params[first : first + each]
        weights = _Weights(given, hidden, tuple(rest[: plain - 2]), rest[-1] if each > plain else None)
        _check_weights(cell, weights)
        found.append(weights)
    return found


def _check_weights(cell: str, weights: _Weights) -> None:
    given, hidden, projection = weights.given, weights.hidden, weights.projection
    rows = hidden.shape[0]
    size = rows // _GATES[cell] if projection is None else projection.shape[0]
    fits = len(given.shape) == len(hidden.shape) == 2 and given.shape[0] == rows and hidden.shape[1] == size
    fits = fits and rows % _GATES[cell] == 0 and all(bias.shape == (rows,) for bias in weights.biases)
    if projection is not None:
        fits = fits and cell == "lstm" and projection.shape == (size, rows // _GATES[cell])
    if not fits:
        parts = (given, hidden, *weights.biases, *([] if projection is None else [projection]))
        raise OpRefusal(f"weights of shapes {', '.join(str(list(t.shape)) for t in parts)} do not fit together")


def _layer(cell: str, x: Tensor, weights: Sequence[_Weights], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs [steps, batch, directions * size] of a layer, and its last states.

    An LSTM's projection R is moved out of the steps: weight @ (R @ h) is (weight @ R) @ h, and what is projected are
    all outputs at once.
    """
    (steps, batch, _), directions = x.shape, len(weights)
    if steps > _MOST_STEPS:
        raise OpRefusal(f"given {steps} steps, expected at most {_MOST_STEPS}")
    rows, size = weights[0].hidden.shape
    hidden, projected = rows // _GATES[cell], weights[0].projection is not None
    _check_states(states, [(directions, batch, size), (directions, batch, hidden)])
    operands: dict[str, Tensor] = {}
    for number, own in enumerate(weights):
        operands |= _of_direction(cell, x, own, states[0], number)
    if not (projected or _is_zero(states[0])):
        operands["hidden"] = states[0]
    if cell == "lstm" and not _is_zero(states[1]):
        operands["carried"] = states[1]
    kept = directions * batch * hidden
    count, ended = steps * kept, kept if cell == "lstm" else 0
    result = x.trace.anchor(
        "recurrence", tuple(operands.values()), (count + ended,), x.dtype, cell=cell, names=tuple(operands)
    )
    outputs = result.slice(0, 0, count).reshape((steps, batch, directions * hidden))
    parts = [outputs.slice(2, number * hidden, hidden) for number in range(directions)]
    if projected:
        parts = [_projected(part, own) for part, own in zip(parts, weights, strict=True)]
        outputs = _joined(parts, 2)
    last = _joined([part.slice(0, 0 if number else steps - 1, 1) for number, part in enumerate(parts)], 0)
    carried = [result.slice(0, count, kept).reshape((directions, batch, hidden))] if cell == "lstm" else []
    return outputs, last, *carried


def _of_direction(cell: str, x: Tensor, weights: _Weights, start: Tensor, number: int) -> dict[str, Tensor]:
    """The operands that a direction has for itself."""
    gates, weight = _gates(cell, x, weights), weights.hidden
    if weights.projection is not None:
        weight = product(weights.hidden, weights.projection)
        if not _is_zero(start):
            first = product(start.slice(0, number, 1).reshape(start.shape[1:]), weights.hidden.swap(0, 1))
            here = apply("eq", arange(x.trace, x.shape[0]), x.shape[0] - 1 if number else 0)
            gates = gates + where(here.reshape((-1, 1, 1)), first, 0.0)
    operands = {f"gates{number}": gates, f"weight{number}": weight}
    if cell == "gru" and weights.biases:
        hidden = weight.shape[1]
        operands[f"bias{number}"] = weights.biases[1].slice(0, 2 * hidden, hidden)
    return operands


def _gates(cell: str, x: Tensor, weights: _Weights) -> Tensor:
    """What each step adds to the product with h: [steps, batch, gates * hidden].

    The biases are both in it, but for that of a GRU's candidate, which its reset multiplies.
    """
    steps, batch, size = x.shape
    if size != weights.given.shape[1]:
        raise OpRefusal(f"given an input of size {size}, expected {weights.given.shape[1]}")
    turned = not _has_rows(x)
    rows = (x.swap(0, 1) if turned else x).reshape((steps * batch, size))
    result = product(rows, weights.given.swap(0, 1))
    if weights.biases:
        added, of_state = weights.biases
        if cell == "gru":
            hidden = of_state.shape[0] // 3
            kept = arange(x.trace, 3 * hidden) < 2 * hidden
            of_state = where(kept, of_state, 0.0)
        result = result + (added + of_state)
    result = result.realize()
    shape = (batch, steps, -1) if turned else (steps, batch, -1)
    return result.reshape(shape).swap(0, 1) if turned else result.reshape(shape)


def _has_rows(x: Tensor) -> bool:
    """Whether strides say the steps and the batch as one dimension; else they do so in the other order."""
    steps, batch, size = x.shape
    return x.ref is None or x.ref.view.reshape((steps * batch, size)) is not None


def _projected(outputs: Tensor, weights: _Weights) -> Tensor:
    assert weights.projection is not None
    steps, batch, hidden = outputs.shape
    result = product(outputs.reshape((steps * batch, hidden)), weights.projection.swap(0, 1))
    return result.realize().reshape((steps, batch, -1))


def _check_states(states: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    for state, wanted in zip(states, expected, strict=False):
        if state.shape != wanted:
            raise OpRefusal(f"given an initial state {list(state.shape)}, expected {list(wanted)}")


def _is_zero(x: Tensor) -> bool:
    """Whether a tensor is known to hold zeros alone, as the states do that a model begins with by itself."""
    exprs = [x.expr]
    if x.ref is not None:
        source = x.trace.tensors[x.ref.tensor].source
        exprs = [source.expr] if isinstance(source, Map) else []
    return bool(exprs) and all(isinstance(expr, Const) and expr.value == 0 for expr in exprs)
