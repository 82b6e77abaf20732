"""The angle by which a key turns from one position to the next: the frequencies of a model's rotary embedding.

Sources: RoPE (arXiv:2104.09864), position interpolation ("linear", arXiv:2306.15595), NTK-aware scaling ("dynamic"),
YaRN (arXiv:2309.00071) and the scaling of Llama 3.1 ("llama3"). Factors on sines and cosines (YaRN's mscale) do not
belong here: cached keys include them, and turning a key does not change its length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError

Frequencies = NDArray[np.float64]
"""Radians per position of each pair: shape [rotary_dim / 2]."""

Pairing = Literal["neox", "gptj"]
"""Which elements turn together: i with i + rotary_dim / 2, or 2 i with 2 i + 1."""

Scaling = Literal["default", "linear", "dynamic", "yarn", "llama3"]
SCALINGS: tuple[Scaling, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding, in the terms of Hugging Face configurations.

    Attributes:
        head_dim: elements of a head.
        rotary_dim: how many leading elements of a head turn; even.
        theta: base of the frequencies.
        max_positions: length for which the model was made; only "dynamic" uses it.
        original_positions: length before the context was extended; "yarn" and "llama3" use it.
        truncate: whether to round YaRN's correction range to whole dimensions.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    pairing: Pairing = "neox"
    scaling: Scaling = "default"
    factor: float = 1.0
    max_positions: int = 0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ConfigError(f"rope scaling {self.scaling!r}: allowed are {', '.join(SCALINGS)}")
        if self.pairing not in ("neox", "gptj"):
            raise ConfigError(f"rope pairing {self.pairing!r}: allowed are 'neox' and 'gptj'")
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim {self.rotary_dim}: even, and from 2 to head_dim, which is {self.head_dim}"
            )
        if self.theta <= 1.0 or self.factor <= 0.0:
            raise ConfigError(f"rope theta {self.theta} and factor {self.factor}: above 1 and above 0")
        needs = {"dynamic": self.max_positions, "yarn": self.original_positions}
        needs["llama3"] = self.original_positions
        if needs.get(self.scaling, 1) < 1:
            raise ConfigError(f"rope scaling {self.scaling!r} needs the number of positions that it extends")

    def frequencies(self, positions: int | None = None) -> Frequencies:
        """The frequencies for prompts of up to `positions` tokens, a number that only "dynamic" uses."""
        base = self.theta
        if self.scaling == "dynamic" and positions is not None and positions > self.max_positions:
            grown = self.factor * positions / self.max_positions - (self.factor - 1.0)
            base *= grown ** (self.rotary_dim / (self.rotary_dim - 2))
        plain = base ** -(np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "yarn":
            return self._yarn(plain)
        return self._llama3(plain) if self.scaling == "llama3" else plain

    def _yarn(self, plain: Frequencies) -> Frequencies:
        """High frequencies are unchanged, low ones are divided by the factor, and those in between are interpolated."""

        def dimension(rotations: float) -> float:
            wavelength = self.original_positions / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(self.rotary_dim // 2, dtype=np.float64) - low) / width, 0.0, 1.0)
        return plain / self.factor * ramp + plain * (1.0 - ramp)

    def _llama3(self, plain: Frequencies) -> Frequencies:
        """Short wavelengths are unchanged, long ones are stretched by the factor, and those in between are
        interpolated.
        """
        waves = self.original_positions * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = np.clip((waves - self.low_freq_factor) / span, 0.0, 1.0)
        return (1.0 - smooth) * plain / self.factor + smooth * plain
