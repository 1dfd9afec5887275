"""Tells voices apart with the weights of a speaker encoder, three LSTMs. ``python examples/tell_voices.py``.

Needs the weights in ``resemblyzer``, which examples/weights.txt lists. The voices are synthesised: pulses of a pitch,
filtered by the resonances of a throat.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter

import npu_compiler
import npu_runtime
from npu_cli.extras import package_folder

_RATE, _STEP, _WINDOW, _MELS, _FRAMES = 16000, 160, 400, 40, 160
# Pitch in Hz, and how much longer the throat is than an average one.
_VOICES = {"low": (98.0, 1.15), "middle": (160.0, 1.0), "high": (235.0, 0.85)}
_VOWELS = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480))  # resonances in Hz


class SpeakerEncoder(torch.nn.Module):
    """Generalised end-to-end speaker verification (Wan and others, 2018): a unit vector for each spectrogram."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(_MELS, 256, 3, batch_first=True)
        self.linear = torch.nn.Linear(256, 256)
        self.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / (raw * raw).sum(dim=1, keepdim=True).sqrt()


def speech(pitch: float, throat: float, seed: int) -> NDArray[np.float64]:
    """A second and a half of vowels in a random order, the pitch of each a little off."""
    rng = np.random.default_rng(seed)
    parts = []
    for vowel in rng.permutation(len(_VOWELS)):
        samples = (_FRAMES * _STEP + _WINDOW) // len(_VOWELS)
        phase = np.cumsum(np.full(samples, pitch * rng.uniform(0.95, 1.05) / _RATE))
        wave = np.diff(np.floor(phase), prepend=0) + 0.003 * rng.standard_normal(samples)
        for resonance in _VOWELS[vowel]:
            angle, radius = 2 * np.pi * resonance / throat / _RATE, np.exp(-np.pi * 80 / _RATE)
            wave = lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], wave)
        parts.append(wave / np.abs(wave).max())
    whole: NDArray[np.float64] = np.concatenate(parts)
    level = float(np.sqrt((whole**2).mean()))
    return whole * (10 ** (-30 / 20) / level)


def mel_spectrogram(wave: NDArray[np.float64]) -> NDArray[np.float32]:
    """Power in bands that are even on the mel scale, of shape [frames, bands]."""
    starts = np.arange(_FRAMES) * _STEP
    frames = np.stack([wave[start : start + _WINDOW] for start in starts if start + _WINDOW <= len(wave)])
    power = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW))) ** 2
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + _RATE / 2 / 700), _MELS + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(_WINDOW, 1 / _RATE)
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    bands = np.clip(np.minimum(rising, falling), 0, None) * 2 / (edges[2:] - edges[:-2])[:, None]
    return (power @ bands.T).astype(np.float32)


def main() -> None:
    folder = package_folder("resemblyzer", "resemblyzer")
    state = torch.load(folder / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    encoder = SpeakerEncoder(state).eval()
    spoken = [(name, seed) for name in _VOICES for seed in (0, 1)]
    mels = np.stack([mel_spectrogram(speech(*_VOICES[name], seed)) for name, seed in spoken])
    model = npu_runtime.load(npu_compiler.extract(encoder, torch.from_numpy(mels)))
    found = model(mels)
    with torch.no_grad():
        wanted = encoder(torch.from_numpy(mels)).numpy()
    for first, second in combinations_with_replacement(_VOICES, 2):
        rows = [[index for index, (name, _) in enumerate(spoken) if name == voice] for voice in (first, second)]
        one, other = rows[0][0], rows[1][1]
        print(f"{first} and {second}: {found[one] @ found[other]:.3f}, PyTorch {wanted[one] @ wanted[other]:.3f}")


if __name__ == "__main__":
    main()
