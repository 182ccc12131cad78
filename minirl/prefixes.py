"""Rows that begin alike read their beginning once (Prefix Grouper, arXiv:2506.05433).

GRPO answers each prompt G times and then trains on G rows that all repeat it. What a causal model makes of the prompt
does not depend on what follows, so its tokens go through the layers once, and each answer's queries look at the keys
and values of its prompt, then at its own:

    4 rows, 23 tokens           2 prefixes and 4 tails, 16 tokens

    p p p p a a                 p p p p                    keys that a tail sees
    p p p p b b                 q q q                      a a      p p p p | a a
    q q q c c                                              b b      p p p p | b b
    q q q d d d                                            c c      q q q   | c c
                                                           d d d    q q q   | d d d

All else in a transformer looks at one token at a time and does not care where it lies: prefixes and tails are laid end
to end in one row of N tokens, and only attention cuts it up again. The numbers are those of whole rows but for
rounding, and so are the gradients: that of a shared token is the sum over the rows that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.sight import additive, row_sight

HASH = 6364136223846793005  # of a row: the sum over its columns of token * HASH**column, modulo 2**64
WORTH = 0.9  # share only what leaves at most so much of the tokens: cutting and joining cost something too


@dataclass(frozen=True)
class Prefixes:
    """P prefixes of at most A tokens, and B tails of C: how B rows of S tokens are read as one of N = P A + B C."""

    tokens: Tensor  # (1, N) int64
    positions: Tensor  # (1, N) int64, those in the rows
    lengths: Tensor  # (P,) int64
    owner: Tensor  # (B,) int64, which of the prefixes each row has
    index: Tensor  # (B, S) int64, where in the N each token of a row is
    shape: tuple[int, int, int, int]  # P, A, B, C

    def rows(self, hidden: Tensor) -> Tensor:
        """(1, N, D) -> (B, S, D)"""
        return hidden[0].index_select(0, self.index.flatten()).view(*self.index.shape, -1)

    def cut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1, N, ...) -> (P, A, ...) and (B, C, ...)"""
        P, A, B, C = self.shape
        return x[0, : P * A].view(P, A, *x.shape[2:]), x[0, P * A :].view(B, C, *x.shape[2:])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, masks: tuple[Tensor | None, Tensor],
               attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
        """Attention of one row of prefixes and tails. q: (1, N, H, E); k, v: (1, N, K, E); returns (1, N, H, E).

        masks  : for prefixes and for tails, from `sight`
        attend : (q (B, T, H, E), keys and values (B, K, S, E), mask) -> (B, T, H, E)
        """
        heads, tails = zip(*(self.cut(x) for x in (q, k, v)), strict=True)
        first = attend(heads[0], heads[1].transpose(1, 2), heads[2].transpose(1, 2), masks[0])
        keys, values = (torch.cat((head.index_select(0, self.owner), tail), 1).transpose(1, 2)
                        for head, tail in zip(heads[1:], tails[1:], strict=True))
        second = attend(tails[0], keys, values, masks[1])
        return torch.cat((first.flatten(0, 1), second.flatten(0, 1)))[None]

    def sight(self, window: int, share: int, dtype: torch.dtype,
              plain: bool) -> tuple[Tensor | None, int, int, Prefixes, Tensor]:
        """The last fields of a `model.Frame`, from `mask` on: what prefixes and tails see. Both masks are additive.

        plain : prefixes need no mask, (1, 1, share * A, A); that of tails is (B, 1, share * C, A + C)
        """
        A, B, C = self.shape[1:]
        heads, tails = self.cut(self.positions)  # (P, A), (B, C)
        columns = torch.arange(max(A, C), device=tails.device)
        hidden = torch.cat(((columns[:A] >= self.lengths[:, None])[self.owner][:, None].expand(B, C, A),
                            (columns[:C] > columns[:C, None]).expand(B, C, C)), 2)
        if window:
            keys = torch.cat((heads[self.owner], tails), 1)  # (B, A + C)
            hidden = hidden | (tails[:, :, None] - keys[:, None] >= window)
        mask = None if plain else row_sight(heads[:1], None, window, share, dtype)
        return mask, 0, 0, self, additive(hidden[:, None], dtype).repeat(1, 1, share, 1)


def find_prefixes(inputs: Tensor, action_mask: Tensor, lengths: Tensor) -> Prefixes | None:
    """What rows read before their first action, where some have it in common; None where that is not worth it.

    inputs (B, S) int64, action_mask (B, S) bool: column s is the prediction of what follows inputs[:, : s + 1]
    lengths (B,) int64: real tokens of a row; what comes later is not read
    """
    B, S = inputs.shape
    ends = action_mask.int().argmax(1) + 1  # (B,) tokens read when the first action is chosen
    columns = torch.arange(S, device=inputs.device)
    begun = torch.where(columns < ends[:, None], inputs, -1)  # rows alike in this are alike in their prefix
    keys, owner = (begun * HASH ** columns).sum(1).unique(return_inverse=True)  # int64, which wraps around
    P, A, C = len(keys), int(ends.max()), min(S - int(ends.min()), int((lengths - ends).max()))
    if P * A + B * C > WORTH * B * S:
        return None
    first = owner.new_full((P,), B).scatter_reduce_(0, owner, torch.arange(B, device=owner.device), "amin")
    heads, sizes = begun[first], ends[first]
    if not torch.equal(heads[owner], begun):  # two prefixes of one key: once in 2**64 / B**2 microbatches
        return None
    at = ends[:, None] + columns[:C]  # (B, C) the column of each token of a tail
    tails = inputs.gather(1, at.clamp(max=S - 1))  # those beyond the row are as padding: nobody looks at them
    tokens = torch.cat((heads[:, :A].clamp(min=0).flatten(), tails.flatten()))[None]
    positions = torch.cat((columns[:A].expand(P, A).flatten(), at.clamp(max=S - 1).flatten()))[None]
    behind = (columns - ends[:, None]).clamp(max=C - 1)  # (B, S)
    index = torch.where(behind < 0, owner[:, None] * A + columns,
                        P * A + torch.arange(B, device=inputs.device)[:, None] * C + behind)
    return Prefixes(tokens, positions, sizes, owner, index, (P, A, B, C))
