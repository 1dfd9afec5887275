"""Cases of recurrent layers and their cells."""

from __future__ import annotations

from typing import Any

from tests.ops.cases import Case, Operand, case, floats, refused

ON_KERNELS = ("metal", "cuda")  # which have one for recurrences


def small(*shape: int) -> Operand:
    """Weights of a size that keeps states between their limits."""
    bound = min(0.5, 2 / shape[-1] ** 0.5)
    return floats(*shape, low=-bound, high=bound)


def weights(
    gates: int, size: int, hidden: int, *, layers: int = 1, directions: int = 1, biases: bool = True, projected: int = 0
) -> list[Operand]:
    """Of all layers and directions, in PyTorch's order."""
    found, states = [], projected or hidden
    for layer in range(layers):
        for _ in range(directions):
            given = directions * states if layer else size
            found += [small(gates * hidden, given), small(gates * hidden, states)]
            found += [small(gates * hidden)] * (2 * biases) + [small(projected, hidden)] * bool(projected)
    return found


def layers(
    name: str, *sizes: int, count: int = 1, both: bool = False, batch_first: bool = False, biases: bool = True,
    projected: int = 0, input: Operand | None = None,
) -> Case:  # fmt: skip
    """A call of a recurrent layer with initial states; `sizes` are those of steps, batch, input and h."""
    steps, batch, size, hidden = sizes
    directions = 2 if both else 1
    x = input or (floats(batch, steps, size) if batch_first else floats(steps, batch, size))
    states: Any = floats(count * directions, batch, projected or hidden)
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    if name == "lstm":
        states = [states, floats(count * directions, batch, hidden)]
    given = weights(gates, size, hidden, layers=count, directions=directions, biases=biases, projected=projected)
    made = case(f"{name}.input", x, states, given, biases, count, 0.0, False, both, batch_first)
    return made.storing(2 + 4 * count + 2 * bool(projected)).only_on(*ON_KERNELS)


CASES = [
    layers("lstm", 5, 3, 7, 6),
    layers("lstm", 4, 2, 8, 12, count=2, both=True),
    layers("lstm", 3, 5, 8, 4, batch_first=True, biases=False),
    layers("lstm", 1, 1, 3, 1),
    layers("lstm", 4, 2, 5, 8, projected=3),
    layers("lstm", 3, 2, 5, 6, count=2, both=True, projected=4, batch_first=True),
    layers("lstm", 6, 9, 16, 64, batch_first=True),
    layers("lstm", 3, 2, 4, 8, input=floats(2, 3, 4).through("aten.transpose.int", 0, 1)),
    layers("gru", 5, 3, 7, 6),
    layers("gru", 4, 2, 8, 12, count=2, both=True, batch_first=True),
    layers("gru", 3, 1, 4, 5, biases=False),
    layers("gru", 4, 6, 16, 40),
    layers("rnn_tanh", 5, 3, 7, 6),
    layers("rnn_tanh", 3, 2, 4, 8, count=2, both=True, batch_first=True),
    layers("rnn_relu", 4, 3, 7, 6),
    layers("rnn_relu", 3, 1, 4, 8, both=True, biases=False),
    refused(
        "call model.eval()", "lstm.input", floats(3, 2, 4), [floats(1, 2, 4)] * 2, weights(4, 4, 4),
        True, 1, 0.5, True, False, False,
    ),
    case("lstm_cell.default", floats(3, 7), [floats(3, 6), floats(3, 6)], *weights(4, 7, 6)).storing(2),
    case("lstm_cell.default", floats(1, 7), [floats(1, 5), floats(1, 5)], *weights(4, 7, 5, biases=False)).storing(2),
    case("gru_cell.default", floats(3, 7), floats(3, 6), *weights(3, 7, 6)).storing(3),
    case("gru_cell.default", floats(2, 7), floats(2, 5), *weights(3, 7, 5, biases=False)).storing(3),
    case("rnn_tanh_cell.default", floats(3, 7), floats(3, 6), *weights(1, 7, 6)).storing(2),
    case("rnn_relu_cell.default", floats(3, 7), floats(3, 6), *weights(1, 7, 6)).storing(2),
]  # fmt: skip
