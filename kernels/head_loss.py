"""Output head and loss in one pass, chunk by chunk with the backward at once: three products, as autograd needs.

`linear_logprob` must wait for the gradient of its log-probs, and then computes the logits again. Where the loss is a
sum over tokens, and its denominator is known beforehand, nothing has to wait: for some columns of the batch

    logits -> log-probs -> this chunk's share of the loss -> d loss / d logprob -> d loss / d logits, in the same memory
           -> its part of the gradients of hidden and weight

and then the next columns. Kept for the backward of the model is the gradient of hidden (and of the weight, which
is there in any case). One chunk of HEAD_LOGITS floats is alive.

    products of 2 N D V operations    naive 3    linear_logprob 4    here 3
    bytes                             the weight and its gradient twice a chunk; at 2,048 tokens, D = 896 and
                                      V = 151,936 in 19 chunks: 41 GB beside 1.7 TFLOP
    floor on an H200                  9.5 ms by bytes (4.3 TB/s), 2.1 ms by products (790 TFLOP/s): there HEAD_LOGITS
                                      could be larger; on a CPU products take seconds, and bytes do not count
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.linear_logprob import Head, Reduce, Sums, check_shapes, check_temperature, row_chunks, slope, spread, wide

# (columns, logprobs (B, s), entropy (B, s) or None) -> the share of the loss, a scalar
PieceLoss = Callable[[slice, Tensor, Tensor | None], Tensor]
HEAD_LOGITS = 2**24  # 64 MB of float32: for thinner chunks, weight and its gradient are read too often
GROUP_LOGITS = 2**20  # 4 MB, which stay in the cache while the softmax goes over them several times


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, piece_loss: PieceLoss, temperature: float = 1.0,
              entropy: bool = False, softcap: float = 0.0, start: int = 0, reduce: Reduce | None = None, *,
              bias: Tensor | None = None) -> Tensor:
    """The sum of piece_loss over all columns, a scalar; differentiable to hidden, weight and bias, once.

    hidden     : (B, S, D)     weight : (V, D)     targets : (B, S) int64, and the rest as in `linear_logprob`
    piece_loss : called for one slice of the columns after another, with tensors of their own. Losses that look at whole
                 rows (a ratio of sequences, a preference) cannot be said so
    """
    check_temperature(temperature)
    check_shapes(hidden, weight, bias, targets, start if reduce is None else None)
    head = Head(temperature, softcap, start, reduce)
    return _HeadLoss.apply(hidden, weight, bias, targets, piece_loss, head, entropy)


class _HeadLoss(torch.autograd.Function):
    """Saves the finished gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, piece_loss, head, entropy):
        """hidden (B, S, D), weight (V, D), bias (V,), targets (B, S) -> the loss, a scalar."""
        B, S, D = hidden.shape
        wants = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=wide(hidden)) if wants[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide(hidden)) if wants[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide(hidden)) if wants[2] else None
        every, loss = slice(0, len(weight)), hidden.new_zeros((), dtype=wide(hidden))
        most = max(1, HEAD_LOGITS // (len(weight) * max(B, 1)))  # columns of a chunk
        size = max(1, GROUP_LOGITS // len(weight))  # rows of a group
        # Once for all: between the small tensors that are kept, freed memory of this size is not always found again.
        room = hidden.new_empty(B * min(S, most), len(weight), dtype=wide(hidden))
        exps = room.new_empty(min(size, len(room)), len(weight))
        for columns in row_chunks(S, most):
            here, words = hidden[:, columns].reshape(-1, D), targets[:, columns].reshape(-1)  # (n, D), (n,), n = B s
            logits = head.logits(here, weight, bias, every, out=room[: len(here)])  # (n, V)
            groups = list(row_chunks(len(here), size))
            # Sums.of leaves z - peak in the logits, and slope makes their gradient of that.
            sums = Sums.cat([Sums.of(logits[rows], words[rows], head.start, entropy, exps[: rows.stop - rows.start])
                             for rows in groups])
            whole = sums.over_ranks(head.reduce)
            logprobs, ent, _ = whole.results()
            shift = whole.peak - sums.peak + whole.total.log()  # this shard's peak may be lower
            with torch.enable_grad():
                leaves = [x.view_as(targets[:, columns]).requires_grad_() for x in (logprobs, ent) if x is not None]
                share = piece_loss(columns, leaves[0], leaves[1] if entropy else None)
                found = torch.autograd.grad(share, leaves, allow_unused=True) if share.requires_grad else [None, None]
            loss += share.detach()
            ups = [None if g is None else g.reshape(-1) / head.temperature for g in (*found, None)]
            for rows in groups:
                bend = head.bend(logits[rows] + sums.peak[rows, None]) if head.softcap else None
                ent_here, up, up_ent = (None if x is None else x[rows] for x in (ent, ups[0], ups[1]))
                grad = slope(logits[rows].sub_(shift[rows, None]), ent_here, words[rows], head.start, up, up_ent, None)
                logits[rows] = grad if bend is None else grad.mul_(bend)
            part = None if grad_hidden is None else logits.new_zeros(len(here), D)
            spread(logits, here, weight, every, part, grad_weight, grad_bias)
            if part is not None:
                grad_hidden[:, columns] = part.view_as(hidden[:, columns])
        inputs = hidden, weight, bias
        ctx.grads = [None if g is None else (g, x.dtype) for g, x in zip((grad_hidden, grad_weight, grad_bias), inputs)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        """The gradients that forward has made; scaled in place, so that weight's is not there twice, and rounded after
        that: of a loss times 65,536, a float16 gradient must not have been 0 before."""
        if ctx.grads is None:
            raise RuntimeError("head_loss has given its gradients away: its backward runs once")
        grads, ctx.grads = ctx.grads, None
        return *(None if g is None else g[0].mul_(upstream).to(g[1]) for g in grads), None, None, None, None
