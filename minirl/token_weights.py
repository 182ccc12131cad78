"""How much each token counts: because sampler and trainer disagree, or because some tokens teach more than others.

A weight (B, S) has no gradient and multiplies the policy loss of its token, not the KL term. What is "of the batch" is
of one optimizer update: all rows of all replicas, computed once before its first forward from what is known of the
samples (their log-probs and entropies when they were drawn), so that microbatches and ranks cannot matter.

    mode               k = exp(trainer - sampler), of a token or a whole row; its weight is           source
    "tis"              min(k, high)                                                  high 2           truncated IS
    "icepop"           k where low <= k <= high, else 0                              0.5, 5           arXiv:2510.18855
    "sequence-tis"     min(product of the row's k, high)                                              verl, TRL
    "sequence-mask"    1 where low <= product of the row's k <= high, else 0                          verl
    "geometric-mask"   1 where low <= geometric mean of the row's k <= high, else 0  0.99, 1.01       verl
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.gae import masked_moments
from minirl.losses import bounded_expm1, row_sum

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh

Mismatch = Literal["none", "tis", "icepop", "sequence-tis", "sequence-mask", "geometric-mask"]


@torch.no_grad()
def mismatch_weight(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, mode: Mismatch, low: float,
                    high: float) -> Tensor:
    """(B, S): what makes up for samples that another policy drew than the one whose ratio is clipped. Whole rows in.

    trainer_logprobs, sampler_logprobs : (B, S) nats, of the trainer before this rollout's first update, and as drawn
    """
    difference = torch.where(mask, trainer_logprobs - sampler_logprobs, 0.0)
    if mode in ("sequence-tis", "sequence-mask", "geometric-mask"):
        difference = row_sum(difference, mask)[:, None]
    if mode == "geometric-mask":
        difference = difference / mask.sum(1, keepdim=True).clamp(min=1)
    k = (1 + bounded_expm1(difference)).expand(mask.shape)
    inside = ((k >= low) & (k <= high)).to(k.dtype)
    if mode in ("tis", "sequence-tis"):
        return k.clamp(max=high)
    if mode == "icepop":
        return k * inside
    if mode in ("sequence-mask", "geometric-mask"):
        return inside
    raise UserError(f"mismatch correction {mode!r} does not exist: use one of {', '.join(Mismatch.__args__)}")


@torch.no_grad()
def off_policy_keep(advantages: Tensor, gap: Tensor, limit: float) -> Tensor:
    """(B, 1) bool: False for a bad answer (A < 0) that the policy has left: the mean of old - now is above `limit`.

    advantages : (B, 1) or (B, S), gap : (B, 1) nats. DeepSeek-V3.2's mask, arXiv:2512.02556.
    """
    return ~((advantages < 0) & (gap > limit))


# ---- the tokens that stand out ----

@torch.no_grad()
def top_tokens(score: Tensor, mask: Tensor, share: float, mesh: Mesh | None = None) -> Tensor:
    """(B, S) bool: the `share` of the batch's tokens with the highest scores, at least one; ties may add some.

    score : (B, S) floating; two that differ by its rounding are equal
    """
    values = score[mask].double()
    count = torch.tensor(len(values), device=score.device)
    if mesh is not None and mesh.dp > 1:
        from minirl.parallel.collectives import all_gather, all_reduce  # torch.distributed is not needed on a laptop

        count = all_reduce(count, mesh.dp_group)
    k = min(max(1, round(share * int(count))), int(count))
    best = values.new_full((k,), -torch.inf)
    own = values.topk(min(k, len(values))).values
    best[: len(own)] = own
    if mesh is not None and mesh.dp > 1:
        best = all_gather(best, mesh.dp_group).topk(k).values
    if not k:
        return torch.zeros_like(mask)
    # Equal tokens of equal rows have equal scores but for rounding, which a layout must not decide by.
    slack = 64 * torch.finfo(score.dtype).eps * best.abs().max()
    return mask & (score.double() >= best[-1] - slack)


@torch.no_grad()
def covariance(advantages: Tensor, logprobs: Tensor, mask: Tensor, mesh: Mesh | None = None) -> Tensor:
    """(B, S): (A - mean A) (logp - mean logp) over the batch's tokens, arXiv:2505.22617: what each does to the entropy.

    Its mean over all tokens drives the entropy down: likely tokens that are praised, unlikely ones that are blamed.
    """
    advantages = advantages.expand(mask.shape)
    centred = [x - masked_moments(x, mask, mesh)[0].to(x.dtype) for x in (advantages, logprobs)]
    return torch.where(mask, centred[0] * centred[1], 0.0)


@torch.no_grad()
def clip_cov(cov: Tensor, mask: Tensor, noise: Tensor, share: float, low: float = 1.0, high: float = 5.0,
             mesh: Mesh | None = None) -> Tensor:
    """(B, S): 0 for the tokens that Clip-Cov detaches, else 1: `share` of the batch's, of those with low < cov < high.

    noise : (B, S) numbers of a generator that belong to the tokens, so that the draw is the same in every layout
    The paper leaves out tokens that the PPO clip has taken already; before the first forward there are none.
    """
    candidates = mask & (cov > low) & (cov < high)
    chosen = candidates & top_tokens(torch.where(candidates, noise, -1.0), mask, share, mesh)
    return 1.0 - chosen.to(cov.dtype)


@torch.no_grad()
def delta_weights(vectors: Tensor, advantages: Tensor, mask: Tensor, refinements: int = 1, low: float = 0.8,
                  high: float = 1.2, mesh: Mesh | None = None) -> Tensor:
    """(B, S), low .. high: more for tokens whose gradient is like that of their own side. DelTA, arXiv:2605.21467.

    vectors : (B, S, D), a stand-in for each token's gradient: (1 - p(token)) times its last hidden state
    The centroids mu of the tokens with A > 0 and of those with A < 0 are means weighed by |A|. A token's margin is
    m = |v - mu_other|^2 - |v - mu_own|^2, and alpha = sigmoid(m / gamma); the centroids are made anew with the weights
    |A| alpha, `refinements` times, and low + (high - low) alpha comes out. The loss divides by the sum of the weights.

    **Not established**: gamma ("adaptive, from the current distance scale", App. H). Here: the mean |m| of the side.
    """
    advantages = advantages.expand(mask.shape).to(vectors.dtype)
    sides = [mask & (advantages > 0), mask & (advantages < 0)]

    def total(x: Tensor) -> Tensor:
        if mesh is None or mesh.dp == 1:
            return x
        from minirl.parallel.collectives import all_reduce  # torch.distributed is not needed on a laptop

        return all_reduce(x, mesh.dp_group)

    if not all(total(side.sum()) for side in sides):
        return torch.ones_like(advantages)  # one side alone has nothing to be told from
    alpha = torch.ones_like(advantages)
    for _ in range(refinements + 1):
        weight = advantages.abs() * alpha
        centroids = [total((vectors[side] * weight[side][:, None]).sum(0)) / total(weight[side].sum())
                     for side in sides]
        alpha = torch.full_like(alpha, 0.5)
        for side, own, other in ((sides[0], *centroids), (sides[1], *centroids[::-1])):
            margin = (vectors[side] - other).square().sum(1) - (vectors[side] - own).square().sum(1)
            gamma = total(margin.abs().sum()) / total(side.sum())
            alpha[side] = torch.sigmoid(margin / gamma.clamp(min=1e-12))
    return low + (high - low) * alpha


@torch.no_grad()
def normalized(weights: Tensor, mask: Tensor, mesh: Mesh | None = None) -> Tensor:
    """The weights times one number, so that their mean over the batch's tokens is 1: what is divided by the number of
    tokens is then divided by the sum of the weights."""
    mean = masked_moments(weights, mask, mesh)[0]
    return weights / mean.to(weights.dtype) if mean > 0 else weights
