"""Log-probs and entropy of the output head, without ever holding all the logits.

    z_iv      = (weight_v . hidden_i + bias_v) / temperature      N tokens, D hidden size, V vocabulary
    lse_i     = log sum_v exp z_iv                                the log-normaliser
    logprob_i = z_i,target - lse_i
    entropy_i = -sum_v p_iv log p_iv                              p_iv = exp(z_iv - lse_i)

(Gemma 2 caps its logits softly: z = c tanh((weight . hidden + bias) / c) / temperature.)

Forward goes over tiles of CHUNK_ROWS tokens x CHUNK_WORDS words. Of the tiles of a row four numbers are kept,

    peak = max_v z_v    total = sum_v exp(z_v - peak)    dot = sum_v exp(z_v - peak) (z_v - peak)    hit = z_target

and two sets of them are joined as one softmax over both: the sums of each are moved to the common peak. So

    lse = peak + log total      logprob = hit - peak - log total      entropy = log total - dot / total

A vocabulary spread over ranks (arXiv:1909.08053 section 3) is one more level of tiles: the ranks join their numbers
with an all-reduce of the peaks, and one of the sums.

Backward makes each tile of logits again, which is one more product than autograd needs:

    d logprob / d z_v = [v = target] - p_v      d entropy / d z_v = -p_v (log p_v + entropy)      d lse / d z_v = p_v

                  products (2 N D V each)    floats alive beyond inputs and gradients
    autograd      3                          3 N V: logits, log_softmax, their gradient
    here          4                          2 tiles; N V <= KEEP_LOGITS: the log-probs are kept, and products are 3
    head_loss     3                          HEAD_LOGITS, 64 MB; the loss must be known (`head_loss.py`)

Bytes: weight and its gradient pass once for each CHUNK_ROWS tokens, hidden and its gradient once for each CHUNK_WORDS
words. At 2,048 tokens, D = 896 and V = 151,936 that is 4.4 GB beside 2.2 TFLOP: products decide, on any machine
(on an H200 1.0 ms by bytes at 4.3 TB/s, 2.8 ms by products at 790 TFLOP/s).

This is the plain torch reference; `triton_linear_logprob.py` does the same on a GPU. Left out: an ignored label (a mask
is applied to the result; a padded position has a valid token id like any other).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Impl = Literal["auto", "torch", "triton"]
Reduce = Callable[[Tensor, str], Tensor]  # (x, "sum" or "max") -> that over the ranks, on all of them

CHUNK_ROWS = 1024  # with a byte vocabulary a tile is 1 MB of float32, the cache of one core;
CHUNK_WORDS = 2048  # with a large one 8 MB, and weight's gradient is not read and written again for every few tokens
GRAD_LOGITS = 2**26  # on a GPU: gradients of logits alive in backward, 128 MB of bfloat16
KEEP_LOGITS = 2**22  # 16 MB: what is as small as this is kept for backward, and not computed again


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   entropy: bool = False, softcap: float = 0.0, start: int = 0,
                   reduce: Reduce | None = None, *, bias: Tensor | None = None,
                   lse: bool = False, impl: Impl = "auto") -> Tensor | tuple[Tensor, ...]:
    """Log-prob of each target under softmax((hidden @ weight.T + bias) / temperature); differentiable, once.

    hidden  : (..., D)       weight : (V, D)       bias : (V,) or None       targets : (...) int64 in 0..V-1
    softcap : c, if logits are capped; 0: they are not
    start   : number of the word of weight's first row, and
    reduce  : how to ask the ranks that have the others. All call this with the same hidden and targets, and get the
              same results; the gradient of hidden is **this shard's part** of a sum. None: all words are here
    impl    : "auto", "torch" or "triton": see `pick`
    returns : logprobs (...) nats, or a tuple: logprobs; with entropy=True the entropy (...) nats; with lse=True the
              log-normaliser (...). All are differentiable

    All arithmetic is in float32, or float64 for float64 inputs: a bfloat16 logit near 20 is rounded by up to
    0.06, which the ratio of a policy gradient would take for a change of the policy.
    A logit of -inf is a token of probability 0. A row of nothing else has no distribution: NaN.
    ValueError: a temperature that is not above 0; shapes that do not belong together; on a CPU a target that no word
    has, such as -100 (a GPU would have to be waited for: there its log-prob is -lse); Triton where it cannot be.
    """
    return _apply(hidden, weight, bias, targets, temperature, entropy, lse, softcap, start, reduce, impl)


def logprob(logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy: bool = False, softcap: float = 0.0,
            start: int = 0, reduce: Reduce | None = None, *, lse: bool = False) -> Tensor | tuple[Tensor, ...]:
    """The same from logits (..., V) that somebody has computed: no product, and their gradient is all that is made."""
    return _apply(logits, None, None, targets, temperature, entropy, lse, softcap, start, reduce)


def all_logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """(..., V) -> (..., V) nats, of every word: for a sampler, which wants them all."""
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)


def _apply(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, temperature: float,
           entropy: bool, lse: bool, softcap: float, start: int, reduce: Reduce | None,
           impl: Impl = "torch") -> Tensor | tuple[Tensor, ...]:
    check_temperature(temperature)
    check_shapes(hidden, weight, bias, targets, start if reduce is None else None)
    function = _LinearLogprob
    if pick(impl, hidden) == "triton":
        from kernels import triton_linear_logprob  # here, since a laptop may not have Triton

        function = triton_linear_logprob.TritonLinearLogprob
    head = Head(temperature, softcap, start, reduce)
    results = function.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1), head, entropy)
    logprobs, ent, norm = (None if x is None else x.view(targets.shape) for x in results)
    wanted = (logprobs, *[ent] * entropy, *[norm] * lse)
    return wanted if len(wanted) > 1 else logprobs


def pick(impl: Impl, x: Tensor) -> Literal["torch", "triton"]:
    """Which implementation computes with x. "auto": Triton on a GPU where it is installed, but not for float64."""
    if impl == "auto":
        return "triton" if x.is_cuda and x.dtype != torch.float64 and triton_installed() else "torch"
    if impl not in Impl.__args__:
        raise ValueError(f"impl {impl!r} does not exist: use one of {', '.join(Impl.__args__)}")
    if impl == "triton":
        if not triton_installed():
            raise ValueError('impl "triton": it is not installed here (it runs on Linux alone): use "torch"')
        if x.dtype == torch.float64:
            raise ValueError('impl "triton" computes in float32, and inputs are float64: use "torch"')
        from kernels.triton_linear_logprob import interpreted

        if not x.is_cuda and not interpreted:
            raise ValueError(f'impl "triton" needs a GPU, and inputs are on {x.device}: use "torch"')
    return impl


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def check_temperature(temperature: float) -> None:
    """ValueError: not above 0."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0: greedy decoding has no distribution")


def check_shapes(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor,
                 start: int | None) -> None:
    """ValueError: what would be broadcast, or read beyond its end. start: None where other ranks have words too."""
    if hidden.shape[:-1] != targets.shape:  # of (3, 2) for (2, 3), each row would get another's target
        raise ValueError(f"targets {tuple(targets.shape)} do not fit hidden {tuple(hidden.shape)}")
    check_head(hidden, weight, bias)
    words = hidden.shape[-1] if weight is None else len(weight)
    if start is not None and targets.device.type == "cpu" and targets.numel():
        low, high = (x.item() for x in targets.aminmax())
        if low < start or high >= start + words:
            wrong = low if low < start else high
            raise ValueError(f"target {wrong} is none of the words {start}..{start + words - 1}: "
                             "give any of them where it does not count, and mask the result")


def check_head(hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """ValueError: not (..., D), (V, D) and (V,)."""
    if weight is not None and weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit hidden {tuple(hidden.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


class Head(NamedTuple):
    """How products become logits, and whose words they are."""

    temperature: float = 1.0
    softcap: float = 0.0
    start: int = 0
    reduce: Reduce | None = None

    def logits(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, words: slice,
               out: Tensor | None = None) -> Tensor:
        """(n, D) -> (n, words), a tensor of its own, or `out`. Without a weight, hidden are logits (n, V) already."""
        dtype = wide(hidden)
        if weight is None:
            logits = hidden[:, words].to(dtype, copy=True)
        else:
            logits = torch.matmul(hidden.to(dtype), weight[words].to(dtype).T, out=out)
            if bias is not None:
                logits += bias[words]
        if self.softcap:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def bend(self, logits: Tensor) -> Tensor:
        """Slope of the soft cap: d (c tanh(y / c)) / dy = 1 - tanh(y / c)^2."""
        return 1 - (logits * (self.temperature / self.softcap)) ** 2


class Sums(NamedTuple):
    """What is known of a row's softmax after some of its words: (n,) each."""

    peak: Tensor  # the largest logit
    total: Tensor  # sum of exp(z - peak)
    dot: Tensor | None  # sum of exp(z - peak) (z - peak), where an entropy is wanted
    hit: Tensor  # the target's logit; 0 if it is elsewhere

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, first: int, entropy: bool, room: Tensor | None = None) -> Sums:
        """Of one tile (n, w), whose first word has the number `first`. Leaves z - peak in the logits.

        room : (n, w) to work in; None: taken anew
        """
        column, here = local(targets, first, logits.shape[1])
        hit = logits.gather(-1, column[:, None])[:, 0].where(here, 0)
        peak = finite(logits.amax(-1))  # -inf - -inf is NaN: a tile may be all -inf
        gap = logits.sub_(peak[:, None])
        weights = torch.exp(gap, out=room)
        total = weights.sum(-1)
        dot = weights.mul_(finite(gap)).sum(-1) if entropy else None  # 0 * -inf is NaN, where 0 * log 0 = 0 is meant
        return cls(peak, total, dot, hit)

    @classmethod
    def cat(cls, parts: list[Sums]) -> Sums:
        """Of the rows of all."""
        return cls(*(None if x[0] is None else torch.cat(x) for x in zip(*parts)))

    def moved(self, peak: Tensor) -> Sums:
        """The same sums, relative to a peak that is at least as high."""
        gap = self.peak - peak
        scale = gap.exp()
        dot = None if self.dot is None else scale * (self.dot + gap * self.total)
        return Sums(peak, scale * self.total, dot, self.hit)

    def join(self, other: Sums) -> Sums:
        """Of the words of both."""
        peak = torch.maximum(self.peak, other.peak)
        a, b = self.moved(peak), other.moved(peak)
        return Sums(peak, a.total + b.total, None if a.dot is None else a.dot + b.dot, a.hit + b.hit)

    def over_ranks(self, reduce: Reduce | None) -> Sums:
        """Of the words of all ranks: two all-reduces, of 1 and of 2 or 3 numbers a row."""
        if reduce is None:
            return self
        peak, total, dot, hit = self.moved(reduce(self.peak, "max"))
        total, hit, *dots = reduce(torch.stack([total, hit] if dot is None else [total, hit, dot]), "sum")
        return Sums(peak, total, dots[0] if dots else None, hit)

    def results(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """logprobs, entropy, lse: (n,) each."""
        log = self.total.log()
        entropy = None if self.dot is None else log - self.dot / self.total
        return self.hit - self.peak - log, entropy, self.peak + log


class _LinearLogprob(torch.autograd.Function):
    """Saves the inputs and two numbers a row (lse, entropy), and the log-probs of all words only where they are few."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, want_entropy):
        """hidden (N, D), weight (V, D), bias (V,), targets (N,) -> logprobs, entropy or None, lse: (N,) each."""
        words = len(hidden.T) if weight is None else len(weight)
        few = words <= CHUNK_WORDS and len(hidden) * words <= KEEP_LOGITS
        keep = few and weight is not None and head.reduce is None and any(ctx.needs_input_grad)
        kept, parts = [], []
        for rows in row_chunks(len(hidden)):
            sums = None
            for tile in word_chunks(words):
                logits = head.logits(hidden[rows], weight, bias, tile)  # (n, w)
                tile_sums = Sums.of(logits, targets[rows], head.start + tile.start, want_entropy)
                sums = tile_sums if sums is None else sums.join(tile_sums)
            if keep:
                kept.append(logits.sub_(sums.total.log()[:, None]))
            parts.append(sums)
        logprobs, entropy, lse = Sums.cat(parts).over_ranks(head.reduce).results()
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, *kept)
        ctx.head = head
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in backward
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, grad_lse):
        """Makes each tile of logits again, if it is not kept."""
        hidden, weight, bias, targets, lse, entropy, *kept = ctx.saved_tensors
        head, wants = ctx.head, ctx.needs_input_grad
        grads = [None if g is None else g / head.temperature for g in (grad_logprobs, grad_entropy, grad_lse)]
        words = len(hidden.T) if weight is None else len(weight)
        grad_hidden = torch.zeros_like(hidden, dtype=None if weight is None else wide(hidden)) if wants[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide(hidden)) if wants[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide(hidden)) if wants[2] else None
        for i, rows in enumerate(row_chunks(len(hidden))):
            for tile in word_chunks(words):
                if kept:
                    logp, logits = kept[i].clone(), kept[i] + lse[rows, None] if head.softcap else None
                else:
                    logits = head.logits(hidden[rows], weight, bias, tile)  # (n, w)
                    logp = logits - lse[rows, None] if head.softcap else logits.sub_(lse[rows, None])
                upstream = (None if g is None else g[rows] for g in grads)
                ent = None if entropy is None else entropy[rows]
                grad = slope(logp, ent, targets[rows], head.start + tile.start, *upstream)
                if head.softcap:
                    grad.mul_(head.bend(logits))
                spread(grad, hidden[rows], weight, tile, None if grad_hidden is None else grad_hidden[rows],
                       grad_weight, grad_bias)
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype),
                None if grad_weight is None else grad_weight.to(weight.dtype),
                None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None)


def slope(logp: Tensor, entropy: Tensor | None, targets: Tensor, first: int, grad_logprobs: Tensor | None,
          grad_entropy: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """d loss / d z of one tile (n, w), from its log-probs, which it destroys; the three upstream gradients are (n,)."""
    level = (0 if grad_lse is None else grad_lse) - (0 if grad_logprobs is None else grad_logprobs)
    level = torch.as_tensor(level, dtype=logp.dtype, device=logp.device).expand(len(logp))[:, None]
    if grad_entropy is None:
        grad = logp.exp_().mul_(level)
    else:
        grad = logp.exp().mul_(finite(logp).add_(entropy[:, None]).mul_(-grad_entropy[:, None]).add_(level))
    if grad_logprobs is not None:
        column, here = local(targets, first, logp.shape[1])
        grad.scatter_add_(-1, column[:, None], grad_logprobs.where(here, 0)[:, None])
    return grad


def spread(grad: Tensor, hidden: Tensor, weight: Tensor | None, words: slice, grad_hidden: Tensor | None,
           grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Adds what the gradient of a tile (n, w) means for hidden (n, D), weight (V, D) and bias (V,), in place."""
    if weight is None:
        grad_hidden[:, words] = grad
        return
    if grad_hidden is not None:
        grad_hidden.addmm_(grad, weight[words].to(grad.dtype))
    if grad_weight is not None:
        grad_weight[words].addmm_(grad.T, hidden.to(grad.dtype))
    if grad_bias is not None:
        grad_bias[words] += grad.sum(0)


def local(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Targets as columns of a tile that begins with the word `first` (0 if elsewhere); which are in it: (N,) both."""
    column = targets - first
    here = (column >= 0) & (column < count)
    return column.where(here, 0), here


def row_chunks(count: int, size: int = 0) -> Iterator[slice]:
    """0..count in pieces of `size`, of CHUNK_ROWS if it is 0. No rows are one empty piece."""
    size = size or CHUNK_ROWS
    return (slice(begin, min(begin + size, count)) for begin in range(0, max(count, 1), size))


def word_chunks(count: int) -> Iterator[slice]:
    return row_chunks(count, CHUNK_WORDS)


def wide(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def finite(x: Tensor) -> Tensor:
    """-inf -> the lowest float, in place."""
    return x.clamp_(min=torch.finfo(x.dtype).min)
