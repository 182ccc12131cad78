"""KL of two whole distributions over the vocabulary, p of the policy and q of a reference, with the gradient to p.

    kind       value of a row                               d value / d z_v,   z = policy's logits, p = softmax(z)
    "reverse"  KL(p || q) = sum_v p_v (log p_v - log q_v)   p_v (r_v - sum_u p_u r_u),    r = log p - log q
    "forward"  KL(q || p) = sum_v q_v (log q_v - log p_v)   p_v - q_v
    "js"       (KL(p || m) + KL(q || m)) / 2                p_v (r_v - sum_u p_u r_u),    r = (log p - log m) / 2
               m = (p + q) / 2

"reverse" is what the penalty of RLHF means, and what k1, k2 and k3 (`minirl.losses.kl_estimate`) estimate from the
token that was sampled; here nothing is estimated, and the whole vocabulary is looked at. "forward" is that of
distillation, "js" (Jensen-Shannon) is symmetric and at most log 2. q gets no gradient.

Two passes over tiles of tokens x words: the normalisers of both, then the sum. In one pass, the sum of p (z - y) would
have to be corrected by lse_q - lse_p, and of a KL of 1e-6 between logits near 20 nothing would be right. Six products
of 2 N D V operations forward and backward for two heads, and never more than a few tiles alive. At 2,048 tokens,
D = 896, V = 151,936: 3.3 TFLOP, 4.2 ms of an H200 (790 TFLOP/s); `triton_linear_kl.py` has what a GPU moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.linear_logprob import (
    Head,
    Impl,
    Reduce,
    Sums,
    check_head,
    check_temperature,
    pick,
    row_chunks,
    spread,
    wide,
    word_chunks,
)

Kind = Literal["reverse", "forward", "js"]
HeadInputs = Sequence[Tensor | None]  # hidden (N, D), weight (V, D) or None, bias (V,) or None


def linear_kl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, kind: Kind = "reverse",
              temperature: float = 1.0, softcap: float = 0.0, reduce: Reduce | None = None, *,
              bias: Tensor | None = None, ref_bias: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """KL of the distributions that two heads make of two hidden states: nats, (...); gradient to the first three.

    hidden : (..., D), weight (V, D), bias (V,) or None: the policy's; differentiable, once
    ref_*  : the reference's, of a size D' of its own
    reduce : as in `linear_logprob`, where each rank has some of the words, the same ones of both heads

    A token that p (of "forward": q) alone can give makes the KL inf; its gradient is then NaN. "js" is always finite.
    ValueError: an unknown kind, a temperature that is not above 0, shapes that do not belong together
    """
    head = Head(temperature, softcap, 0, reduce)
    return _apply(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, kind, head, impl)


def kl(logits: Tensor, ref_logits: Tensor, kind: Kind = "reverse", temperature: float = 1.0, softcap: float = 0.0,
       reduce: Reduce | None = None) -> Tensor:
    """The same from two tensors of logits (..., V) that somebody has computed."""
    return _apply(logits, None, None, ref_logits, None, None, kind, Head(temperature, softcap, 0, reduce))


def _apply(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, ref_hidden: Tensor, ref_weight: Tensor | None,
           ref_bias: Tensor | None, kind: Kind, head: Head, impl: Impl = "torch") -> Tensor:
    if kind not in Kind.__args__:
        raise ValueError(f"kind {kind!r} does not exist: use one of {', '.join(Kind.__args__)}")
    check_temperature(head.temperature)
    check_head(hidden, weight, bias)
    check_head(ref_hidden, ref_weight, ref_bias)
    rows, ref_rows = hidden.shape[:-1], ref_hidden.shape[:-1]
    words, ref_words = (x.shape[-1] if w is None else len(w) for x, w in ((hidden, weight), (ref_hidden, ref_weight)))
    if rows != ref_rows or words != ref_words:  # one row or one word would be broadcast
        raise ValueError(f"the reference has logits {(*ref_rows, ref_words)}, and the policy {(*rows, words)}")
    flat, ref_flat = (x.reshape(-1, x.shape[-1]) for x in (hidden, ref_hidden))
    ref = (None if x is None else x.detach() for x in (ref_flat, ref_weight, ref_bias))
    function = _LinearKl
    if pick(impl, hidden) == "triton":
        from kernels import triton_linear_kl  # here, since a laptop may not have Triton

        function = triton_linear_kl.TritonLinearKl
    return function.apply(flat, weight, bias, *ref, kind, head).view(hidden.shape[:-1])


class Tile(NamedTuple):
    """Log-probs of some words under both: (n, w)."""

    p: Tensor
    q: Tensor

    def score(self, kind: Kind) -> Tensor:
        """r of the table (n, w); 0 where p is, whatever q says."""
        r = 0.5 * (self.p - self.middle()) if kind == "js" else self.p - self.q
        return r.where(self.p > -math.inf, 0)

    def middle(self) -> Tensor:
        """log m = log((p + q) / 2)."""
        return torch.logaddexp(self.p, self.q) - math.log(2)

    def sums(self, kind: Kind) -> tuple[Tensor, Tensor | int]:
        """This tile's part of the value, and of sum_u p_u r_u: (n,) each."""
        mean = value = 0
        if kind != "forward":
            mean = value = (self.p.exp() * self.score(kind)).sum(-1)
        if kind != "reverse":
            other = self.q - self.p if kind == "forward" else 0.5 * (self.q - self.middle())
            value = value + (self.q.exp() * other.where(self.q > -math.inf, 0)).sum(-1)
        return value, mean

    def slope(self, kind: Kind, mean: Tensor) -> Tensor:
        """d value / d z (n, w); mean (n,) is that of all words."""
        return self.p.exp() - self.q.exp() if kind == "forward" else self.p.exp() * (self.score(kind) - mean[:, None])


class _LinearKl(torch.autograd.Function):
    """Saves the inputs and three numbers a row: both normalisers, and the mean of r."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ref_hidden, ref_weight, ref_bias, kind, head):
        """-> (N,) nats."""
        ctx.kind, ctx.head = kind, head
        inputs = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
        norms = [normaliser(*x, head) for x in inputs]
        value, mean = norms[0].new_zeros(2, len(hidden))
        for rows, _, tile, _ in tiles(*inputs, *norms, head):
            for total, part in zip((value, mean), tile.sums(kind)):
                total[rows] += part
        if head.reduce is not None:
            value, mean = head.reduce(torch.stack((value, mean)), "sum")
        ctx.save_for_backward(*inputs[0], *inputs[1], *norms, mean)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        """upstream (N,) -> the gradients of hidden (N, D), weight (V, D) and bias (V,), of the policy alone."""
        *inputs, norm, ref_norm, mean = ctx.saved_tensors
        own, ref = inputs[:3], inputs[3:]
        upstream = (upstream / ctx.head.temperature)[:, None]
        # Sums over tiles are kept in float32; the gradient of given logits is not a sum.
        grads = [torch.zeros_like(x, dtype=x.dtype if own[1] is None else wide(x)) if need else None
                 for x, need in zip(own, ctx.needs_input_grad)]
        for rows, words, tile, logits in tiles(own, ref, norm, ref_norm, ctx.head):
            grad = tile.slope(ctx.kind, mean[rows]).mul_(upstream[rows])
            if ctx.head.softcap:
                grad.mul_(ctx.head.bend(logits))
            spread(grad, own[0][rows], own[1], words, None if grads[0] is None else grads[0][rows], *grads[1:])
        return *(None if g is None else g.to(x.dtype) for g, x in zip(grads, own)), *[None] * 5


def normaliser(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, head: Head) -> Tensor:
    """lse (N,) of all words, those of other ranks too."""
    nobody = torch.full((len(hidden),), -1, device=hidden.device)  # a target that no tile has
    count = len(hidden.T) if weight is None else len(weight)
    parts = []
    for rows in row_chunks(len(hidden)):
        sums = None
        for words in word_chunks(count):
            new = Sums.of(head.logits(hidden[rows], weight, bias, words), nobody[rows], 0, False)
            sums = new if sums is None else sums.join(new)
        parts.append(sums)
    return Sums.cat(parts).over_ranks(head.reduce).results()[2]


def tiles(own: HeadInputs, ref: HeadInputs, norm: Tensor, ref_norm: Tensor,
          head: Head) -> Iterator[tuple[slice, slice, Tile, Tensor]]:
    """(rows, words, Tile, the policy's logits (n, w)) of all tiles of tokens x words."""
    count = len(own[0].T) if own[1] is None else len(own[1])
    for rows in row_chunks(len(norm)):
        for words in word_chunks(count):
            logits = head.logits(own[0][rows], own[1], own[2], words)
            others = head.logits(ref[0][rows], ref[1], ref[2], words)
            yield rows, words, Tile(logits - norm[rows, None], others.sub_(ref_norm[rows, None])), logits
