"""Sequence parallelism (arXiv:2205.05198 section 4.2.2): between the matrices, each rank has its share of the tokens.

Tensor parallelism leaves what lies between the matrices, the residual stream and its norms, whole on every rank: the
same additions N times, the same activations kept N times for backward. All of that looks at one token at a time. So
each rank takes some of the tokens: the all-reduce behind a row-parallel layer becomes a reduce-scatter, and an
all-gather stands before the next column-parallel layer.

                  into a layer                  out of it          the residual stream on each rank
    without       copy_to                       reduce_from        (B, T, D)
    with          gather_tokens                 scatter_tokens     (1, ceil(B T / N), D)

An all-reduce is a reduce-scatter and an all-gather in a row: as many bytes travel, 1/N of the activations stay.

The paper cuts T. Here all rows are laid end to end and that list is cut: its first dimension, so that no collective has
to copy its input into order first; T need not divide; and a decode step, T = 1, is cut as well. The last token is
repeated until the list divides: a token that is really there, since in a row of zeros a norm may find 0 / 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minirl.parallel.collectives import gather_from, gather_sum, own_slice, scatter_sum
from minirl.parallel.mesh import Group


def tokens_here(count: int, group: Group) -> int:
    """How many of B T tokens a rank has, the same on all."""
    return -(-count // group.size)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """(1, n, D) -> (1, N n, D), into layers of which each rank has a part; backward: reduce-scatter."""
    return gather_sum(x, group, 1)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Parts of a sum (B, T, D) -> (1, n, D), the sum for the own tokens; backward: all-gather."""
    return scatter_sum(_filled(x, group), group, 1)


def own_tokens(x: Tensor, group: Group) -> Tensor:
    """(B, T, D), the same on every rank -> (1, n, D). Backward stays local: of a parameter behind x it is a part."""
    return own_slice(_filled(x, group), group, 1)


def whole_tokens(x: Tensor, shape: torch.Size, group: Group) -> Tensor:
    """(1, n, D) -> (B, T, D), for what every rank then does alike; backward: own slice."""
    return in_rows(gather_from(x, group, 1), shape)


def in_rows(x: Tensor, shape: torch.Size) -> Tensor:
    """The list of tokens as rows again, without the repeats at its end: (1, N n, D) -> (B, T, D)."""
    return x[0, : shape.numel()].view(*shape, -1)


def _filled(x: Tensor, group: Group) -> Tensor:
    """(B, T, D) -> (1, N n, D)."""
    x = x.reshape(1, -1, x.shape[-1])
    missing = tokens_here(x.shape[1], group) * group.size - x.shape[1]
    return torch.cat((x, x[:, -1:].expand(-1, missing, -1)), 1) if missing else x
