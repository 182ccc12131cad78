"""Log-probs and entropy of the output head, without ever holding all the logits.

    logprob_i = z_i[target_i] - logsumexp(z_i)        z_i = weight @ hidden_i / temperature     (V,)
    entropy_i = -sum_v p_iv log p_iv                  p_i = softmax(z_i)

(Gemma 2 caps its logits softly: z_i = c tanh(weight @ hidden_i / c) / temperature.)

N tokens, D hidden size, V vocabulary. A batch of 64 rows x 1,000 tokens at V = 150,000 has 38 GB of float32
logits, and autograd keeps more than one copy. Here only one chunk of rows is alive at a time, and backward
makes it again. At V = 258 on a CPU this costs no time: the chunk stays in the cache.

With the vocabulary spread over ranks (arXiv:1909.08053 section 3), each has some rows of the weight and computes the
distribution among its own words; then p(word) = p(shard) p(word | shard), for which three numbers a row are exchanged.

This is the plain torch reference. Left out: a bias of the head, and an ignored label (a mask is applied to
the result; a padded position has a valid token id like any other).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Reduce = Callable[[Tensor, str], Tensor]  # (x, "sum" or "max") -> that over the ranks, on all of them

CHUNK_LOGITS = 2**18  # logits alive at once: 1 MB of float32, the cache of one core,
CHUNK_ROWS = 256  # but never fewer rows than this: a thin product reads the whole weight for little work


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                   entropy: bool = False, softcap: float = 0.0, start: int = 0,
                   reduce: Reduce | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature); differentiable, once.

    hidden  : (..., D)       weight : (V, D)       targets : (...) int64 in 0..V-1
    softcap : c, if logits are capped; 0: they are not
    start   : number of the word of weight's first row, and
    reduce  : how to ask the ranks that have the others. All call this with the same hidden and targets, and get the
              same results; the gradient of hidden is **this shard's part** of a sum. None: all words are here
    returns : logprobs (...) nats; with entropy=True (logprobs, entropy), both (...) nats and differentiable

    All arithmetic is in float32, or float64 for float64 inputs: a bfloat16 logit near 20 is rounded by up to
    0.06, which the ratio of a policy gradient would take for a change of the policy.
    A logit of -inf is a token of probability 0. A row of nothing else has no distribution: NaN.
    ValueError: a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0: greedy decoding has no distribution")
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logprobs, ent = _LinearLogprob.apply(hidden.reshape(-1, hidden.shape[-1]).to(dtype), weight.to(dtype),
                                         targets.reshape(-1), temperature, entropy, softcap, start, reduce)
    logprobs = logprobs.view(targets.shape)
    return (logprobs, ent.view(targets.shape)) if entropy else logprobs


class _LinearLogprob(torch.autograd.Function):
    """Saves the inputs and two numbers a row (logsumexp, entropy), not the logits.

    d logprob / d z_v = [v = target] - p_v          d entropy / d z_v = -p_v (log p_v + entropy)
    d (c tanh(y / c)) / dy = 1 - tanh(y / c)^2
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, want_entropy, softcap, start, reduce):
        """hidden (N, D), weight (V, D), targets (N,) -> logprobs (N,), entropy (N,) or None."""
        lse, logprobs = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))  # (N,)
        entropy = hidden.new_empty(len(hidden)) if want_entropy else None
        targets, mine = _local(targets, start, len(weight), reduce)
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, temperature, softcap)  # (n, V)
            lse[rows] = logits.logsumexp(-1) if reduce is None else _finite(logits.logsumexp(-1))
            logp = logits.sub_(lse[rows, None])
            logprobs[rows] = logp.gather(-1, targets[rows, None])[:, 0]
            if want_entropy:
                entropy[rows] = logp.exp().mul_(_finite(logp)).sum(-1).neg_()
        if reduce is not None:
            lse, logprobs, entropy = _join(lse, logprobs, entropy, mine, reduce)
        ctx.save_for_backward(hidden, weight, targets, mine, lse, entropy)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in backward
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        """Makes each chunk's logits again; weight's gradient (V, D) is summed over the chunks."""
        hidden, weight, targets, mine, lse, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / ctx.temperature
        grad_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, ctx.temperature, ctx.softcap)  # (n, V)
            bend = 1 - (logits * (ctx.temperature / ctx.softcap)) ** 2 if ctx.softcap else None
            logp = logits.sub_(lse[rows, None])
            grad = logp.exp()
            if grad_entropy is None:
                grad.mul_(-grad_logprobs[rows, None])
            else:
                slope = _finite(logp).add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad.mul_(slope.add_(grad_logprobs[rows, None]).neg_())
            hits = grad_logprobs[rows] if mine is None else grad_logprobs[rows] * mine[rows]
            grad.scatter_add_(-1, targets[rows, None], hits[:, None])
            if bend is not None:
                grad.mul_(bend)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[rows])
        return grad_hidden, grad_weight, *[None] * 6


def _local(targets: Tensor, start: int, count: int, reduce: Reduce | None) -> tuple[Tensor, Tensor | None]:
    """Targets as rows of this shard (0 if they are elsewhere), and which are here: (N,), (N,) bool; None: all."""
    if reduce is None:
        return targets, None
    targets = targets - start
    mine = (targets >= 0) & (targets < count)
    return targets.where(mine, 0), mine


def _join(lse: Tensor, logprobs: Tensor, entropy: Tensor | None, mine: Tensor,
          reduce: Reduce) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the distribution among this shard's words to that among all: (N,) each.

    With w_r = p(shard r) = exp(lse_r) / sum: log p = log w_r + log p_r, and the entropy is sum_r w_r (H_r - log w_r).
    """
    peak = reduce(lse, "max")
    gap = lse - peak  # log w_r, up to a constant
    parts = [gap.exp(), (gap + logprobs).where(mine, 0)]
    if entropy is not None:
        parts.append(gap.exp() * (entropy - gap))
    total, *parts = reduce(torch.stack(parts), "sum")
    shift = total.log()
    return peak + shift, parts[0] - shift, None if entropy is None else parts[1] / total + shift


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(CHUNK_ROWS, CHUNK_LOGITS // len(weight))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float) -> Tensor:
    logits = hidden @ weight.T
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _finite(logp: Tensor) -> Tensor:
    """-inf -> the lowest float, in place: 0 * -inf would be NaN where 0 * log 0 = 0 is meant."""
    return logp.clamp_(min=torch.finfo(logp.dtype).min)
