"""Which tokens see which: the masks of attention, additive, 0 or -inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """bool (True: may not be seen) -> 0 or -inf. A token always sees itself, so no row is all -inf."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def cache_sight(positions: Tensor, first: int, last: int, window: int, share: int,
                dtype: torch.dtype) -> tuple[Tensor | None, int, int]:
    """Which slots do tokens at `positions` (B, T) see, the first and last of which are given?

    Returns mask, start, used: mask is additive (B, 1, share * T, used - start), for `share` query heads a key head.
    """
    start, used = max(first - window + 1, 0) if window else 0, last + 1
    if first == last:  # rows of one length, one token each: all slots in sight are seen
        return None, start, used
    slots = torch.arange(start, used, device=positions.device)
    hidden = slots > positions[..., None]  # (B, T, used - start)
    if window:
        hidden |= slots <= positions[..., None] - window
    return additive(hidden[:, None], dtype).repeat(1, 1, share, 1), start, used


def row_sight(positions: Tensor, documents: Tensor | None, window: int, share: int, dtype: torch.dtype) -> Tensor:
    """Which tokens of a row see which? None that comes later, none of another document, none `window` positions back.

    positions (B or 1, T), documents (B, T); returns an additive mask (B or 1, 1, share * T, T).
    """
    T = positions.shape[1]
    hidden = torch.ones(1, T, T, dtype=torch.bool, device=positions.device).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None, :])  # positions alone would not isolate them
    if window:
        hidden = hidden | (positions[:, :, None] - positions[:, None, :] >= window)
    return additive(hidden[:, None], dtype).repeat(1, 1, share, 1)


def restart(documents: Tensor) -> Tensor:
    """(B, T) document ids -> (B, T) positions that begin at 0 in each document: [7, 7, 9, 9, 9] -> [0, 1, 0, 1, 2]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values
