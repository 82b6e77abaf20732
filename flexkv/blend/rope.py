"""The frequencies of a model's rotary embedding: the angles by which a key is rotated from one position to the next.

Sources: RoPE (arXiv:2104.09864), position interpolation ("linear", arXiv:2306.15595), NTK-aware scaling ("dynamic"),
YaRN (arXiv:2309.00071) and the scaling of Llama 3.1 ("llama3"). Factors on sines and cosines (YaRN's mscale) are not
needed here, because cached keys already include them and a rotation does not change a key's length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError

Frequencies = NDArray[np.float64]
"""Radians per position for each pair of elements, shape [rotary_dim / 2]."""

Pairing = Literal["neox", "gptj"]
"""Which elements of a head are rotated together. "neox": i and i + rotary_dim / 2; "gptj": 2 i and 2 i + 1."""

Scaling = Literal["default", "linear", "dynamic", "yarn", "llama3"]
SCALINGS: tuple[Scaling, ...] = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding, in the terms of Hugging Face configurations.

    Attributes:
        head_dim: elements of a head.
        rotary_dim: number of leading elements of a head that are rotated; even.
        theta: base of the frequencies.
        pairing: which elements are rotated together.
        scaling: how the frequencies are changed for long contexts; "default" leaves them unchanged.
        factor: factor by which the context was extended; "default" ignores it.
        max_positions: context length that the model was made for, in tokens; only "dynamic" uses it.
        original_positions: context length before it was extended, in tokens; only "yarn" and "llama3" use it.
        beta_fast, beta_slow: bounds of YaRN's interpolated range, in rotations over the original context.
        truncate: whether to round YaRN's interpolated range to integer dimensions.
        low_freq_factor, high_freq_factor: bounds of the interpolated range of "llama3", in rotations over the original
            context.
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
        """Returns the frequencies for prompts of up to `positions` tokens. Only "dynamic" uses `positions`; None stands
        for prompts of up to `max_positions` tokens.
        """
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
        """Leaves high frequencies unchanged, divides low frequencies by the factor, and interpolates in between."""

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
        """Leaves short wavelengths unchanged, multiplies long wavelengths by the factor, and interpolates in
        between."""
        waves = self.original_positions * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = np.clip((waves - self.low_freq_factor) / span, 0.0, 1.0)
        return (1.0 - smooth) * plain / self.factor + smooth * plain
