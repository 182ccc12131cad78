"""Rotary positions: how fast each pair of components turns, and what was done to it for a longer context.

RoPE (arXiv:2104.09864) turns pair i of a query or key at position p by the angle p * f_i. Plain RoPE has
f_i = theta^(-2i/R), where R components turn: the first pair by a radian a token, the last by a radian in about theta.
A model trained on L positions has seen every angle of a fast pair, and of a slow one only those up to L * f_i. Beyond L
it meets angles that it does not know; the scalings below trade them for finer steps between the known ones.

    linear     f / factor for every pair                                  arXiv:2306.15595
    dynamic    a larger theta as a row grows: fast pairs hardly change    "NTK-aware scaled RoPE", bloc97 (2023)
    llama3     f / factor for pairs that turn less than low_freq_factor times in L, f for those that turn more than
               high_freq_factor times, a mean of both in between          Llama 3.1, arXiv:2407.21783
    yarn       the same with beta_slow and beta_fast, and attention made a little sharper    arXiv:2309.00071
    longrope   f / a factor of each pair, which a search has found        arXiv:2402.13753
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.config import UserError


@dataclass(frozen=True)
class RopeScaling:
    """How a context of `original_max_position_embeddings` was stretched. Field names are Hugging Face's."""

    rope_type: str  # a name of TYPES
    factor: float = 0.0  # how many times longer; 0: max_position_embeddings / original_max_position_embeddings
    original_max_position_embeddings: int = 0  # L; 0: max_position_embeddings
    low_freq_factor: float = 1.0  # llama3: turns in L below which a pair is slowed by the whole factor,
    high_freq_factor: float = 4.0  # and above which it is left alone
    beta_slow: float = 1.0  # yarn: the same two
    beta_fast: float = 32.0
    truncate: bool = True  # yarn: round the pairs found by the betas outwards to whole ones
    attention_factor: float = 0.0  # yarn, longrope: what cos and sin are multiplied by; 0: by the paper's formula
    mscale: float = 0.0  # yarn as DeepSeek wrote it: the factor is a ratio of two formulas
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()  # longrope: of each pair, for rows of up to L tokens,
    long_factor: tuple[float, ...] = ()  # and for longer ones

    def __post_init__(self):
        if self.rope_type not in TYPES:
            raise UserError(f"rope type {self.rope_type!r} is not supported: supported are 'default', "
                            f"{', '.join(map(repr, TYPES))}")
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise UserError(f"rope {name} {value} must be at least 0, and finite")
        if 0 < self.factor < 1:
            raise UserError(f"rope factor {self.factor} is below 1: it is new length / old length")
        if self.rope_type in ("linear", "dynamic", "llama3") and not self.factor:
            raise UserError(f"rope type {self.rope_type!r} needs a factor")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(f"low_freq_factor {self.low_freq_factor} must lie above 0 and below high_freq_factor "
                            f"{self.high_freq_factor}")
        if self.rope_type == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise UserError(f"beta_slow {self.beta_slow} must lie above 0, and not above beta_fast {self.beta_fast}")
        if min((1.0, *self.short_factor, *self.long_factor)) <= 0:
            raise UserError("a number in short_factor or long_factor is not above 0")


class Rotary:
    """The rotations of one kind of layer.

    A plain object and no buffer of the model: model.bfloat16() would round the frequencies, and at position 10,000 a
    rounded angle is off by whole turns.
    """

    def __init__(self, theta: float, size: int, context: int, scaling: RopeScaling | None = None):
        """theta: base; size: R, how many components turn; context: max_position_embeddings."""
        self.theta, self.size, self.context, self.scaling = theta, size, context, scaling
        self.frequencies = frequencies(theta, size, context, scaling)
        self.magnitude = magnitude(context, scaling)
        self.limit = limit(context, scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (B, T) -> cos, sin (B, T, 1, R), the first half of sin negated as `model.rotate` wants it."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        speed = self.frequencies
        if self.limit < math.inf and (length := int(positions.max()) + 1) > self.limit:
            speed = frequencies(self.theta, self.size, self.context, self.scaling, length).to(positions.device)
        angles = positions[..., None].float() * speed  # (B, T, R/2), in float32 whatever the weights are
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return torch.cat((cos, cos), -1)[:, :, None].to(dtype), torch.cat((-sin, sin), -1)[:, :, None].to(dtype)


def limit(context: int, scaling: RopeScaling | None) -> float:
    """The length beyond which a row has other frequencies than a shorter one has; mostly there is none."""
    if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
        return math.inf
    return original(context, scaling)


def original(context: int, scaling: RopeScaling | None) -> int:
    """L, the length before the stretch. That of `dynamic` is the context, whatever else the file says."""
    if scaling is None or scaling.rope_type == "dynamic":
        return context
    return scaling.original_max_position_embeddings or context


def frequencies(theta: float, size: int, context: int, scaling: RopeScaling | None = None, length: int = 0) -> Tensor:
    """Radians that each pair turns from one position to the next: (size/2,) float32, on the CPU.

    length: of the longest row, in tokens; only `dynamic` and `longrope` look at it.
    """
    index = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")  # 2i; a model may be built on the meta device
    plain = 1 / theta ** (index / size)
    if scaling is None:
        return plain
    L = original(context, scaling)
    factor = scaling.factor or context / L
    if scaling.rope_type == "linear":
        return plain / factor
    if scaling.rope_type == "dynamic":
        stretch = max(1.0, factor * length / L - (factor - 1))  # the slowest pair is slowed by so much
        return 1 / (theta * stretch ** (size / (size - 2))) ** (index / size)
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if length > L else scaling.short_factor
        return plain / torch.tensor(factors, dtype=torch.float32, device="cpu")
    if scaling.rope_type == "llama3":
        turns = L * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # yarn: a straight line over the pairs, between the one that turns beta_fast times and the beta_slow one
        first, last = (size * math.log(L / (2 * math.pi * turns)) / (2 * math.log(theta))
                       for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        kept = 1 - ((index / 2 - first) / ((last - first) or 0.001)).clamp(0, 1)
    return plain * kept + plain / factor * (1 - kept)


def magnitude(context: int, scaling: RopeScaling | None) -> float:
    """What cos and sin, and so every query and key, are multiplied by."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    L = original(context, scaling)
    factor = scaling.factor or context / L
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(L)) if factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_magnitude(factor, scaling.mscale) / _yarn_magnitude(factor, scaling.mscale_all_dim)
    return _yarn_magnitude(factor)


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """arXiv:2309.00071 eq. 22: the square root of 1/t."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


_LENGTHS = ("factor", "original_max_position_embeddings")
TYPES = {  # and the fields that each reads
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (*_LENGTHS, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_LENGTHS, "beta_slow", "beta_fast", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": (*_LENGTHS, "attention_factor", "short_factor", "long_factor"),
}
