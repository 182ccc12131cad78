"""Losses, their reduction, and what is logged about them.

A loss takes log-probs and returns one value a token, (B, S), unreduced and unmasked; `aggregate` reduces it.
They are two steps because the reduction is a choice of its own, the one that codes named GRPO disagree about.

    total = loss_total(mode, action_mask, mesh)                     once an optimizer update
    loss  = aggregate(clipped_surrogate(...), mask, mode, total)    for each of its microbatches

B rows, S predictions. logprobs, old_logprobs, ref_logprobs: (B, S) in nats, of the token that was sampled,
under the policy now, at sampling time, and under the frozen reference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.preference_losses import preference_loss as preference_loss

if TYPE_CHECKING:
    from minirl.parallel.mesh import Group, Mesh

Mode = Literal["token", "sequence", "prompt", "constant"]

# The exp of a float32 above 88.7 is inf, and inf * 0 is NaN. Beyond a log-ratio of 20 (a token 500 million
# times likelier: the run is broken in any case) exp is continued by its tangent: finite, and its gradient
# still points home, which a clamp would cut off just where it is needed.
MAX_LOG_RATIO = 20.0


def bounded_expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, with the tangent beyond MAX_LOG_RATIO. As written it would be mostly rounding near 0."""
    return x.clamp(max=MAX_LOG_RATIO).expm1() + math.exp(MAX_LOG_RATIO) * (x - MAX_LOG_RATIO).clamp(min=0)


def sft_loss(logprobs: Tensor) -> Tensor:
    """Cross-entropy (B, S) in nats: the negative log-prob of the tokens of the data."""
    return -logprobs


def clipped_surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float,
                      eps_high: float) -> Tensor:
    """Per-token clipped policy loss (lower is better); gradient flows to `logprobs` only.

    advantages : (B, 1) or (B, S) unitless
    returns    : (B, S) unreduced and unmasked: pass it to `aggregate`

    PPO, arXiv:1707.06347 eq. 7. eps_high > eps_low is DAPO's clip-higher (arXiv:2503.14476 sec. 3.1).
    On the first pass over fresh samples the ratio is 1 and the value is -advantages: with the mode "sequence"
    the loss is then 0, since the advantages of a group add up to 0. Its gradient is not.
    """
    ratio = 1 + bounded_expm1(logprobs - old_logprobs.detach())  # (B, S)
    advantages = advantages.detach()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    # min, for either sign of the advantage: clipping may only make the objective more pessimistic, so a bad
    # move (the ratio drifting the wrong way) always keeps its gradient.
    return -torch.minimum(unclipped, clipped)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.0) -> Tensor:
    """Half the squared error of the critic, (B, S), unreduced and unmasked; gradient flows to `values` only.

    clip : above 0, the worse of this error and that of the value held within old_values +- clip: as with the policy, a
           critic that has moved further than that towards its target has no gradient, one that moved away keeps it.
           0: never

    1/2 max((V - R)^2, (clip(V, old - c, old + c) - R)^2), as OpenAI's PPO did it; the paper, arXiv:1707.06347 eq. 9,
    has no clip and no 1/2.
    """
    error = (values - returns.detach()).square()
    if clip > 0:
        old = old_values.detach()
        clipped = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns.detach()).square())
    return error / 2


@torch.no_grad()
def value_stats(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> dict[str, Tensor]:
    """What to log about an update of the critic: scalars, sums over the action tokens, as in `policy_stats`.

    value_loss        of `value_loss`, with its 1/2
    value_clip_frac   tokens whose value has moved further than clip from the one at sampling time
    value_tokens      how many
    """
    moved = (values - old_values).abs() > clip if clip > 0 else torch.zeros_like(mask)
    return {"value_loss": row_sum(value_loss(values, old_values, returns, clip), mask).sum(),
            "value_clip_frac": row_sum(moved.float(), mask).sum(), "value_tokens": mask.sum()}


def right_tokens(mask: Tensor, rewards: Tensor) -> Tensor:
    """(B, S) bool: the action tokens of answers with full reward (1 or more), for the likelihood of what was right.

    VAPO adds mu times their mean negative log-prob to the loss: arXiv:2504.05118 sec. 4.3. (0.1
    there: a right answer is rare at first, and imitating it uses it better.)
    """
    return mask & (rewards >= 1)[:, None]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy || reference) from the sampled token of each position: (B, S) nats, unreduced and unmasked.

    With d = logprobs - ref_logprobs, and averaged over tokens drawn from the policy:

    kind  formula           value                      gradient, as a term of the loss
    k1    d                 the KL; noisy, often < 0   0: it trains nothing. Its place is in the reward
    k2    d^2 / 2           near the KL                that of KL(policy || ref): the true one
    k3    exp(-d) - 1 + d   the KL; never below 0      that of KL(ref || policy): other way, same place

    GRPO's loss has k3 (arXiv:2402.03300 eq. 4). The table holds for fresh samples: after some updates on the
    same ones each token would need the weight `ratio`, which GRPO leaves out. Gradient flows to `logprobs`
    only. Where d is below -MAX_LOG_RATIO, k3 goes on along its tangent. http://joschu.net/blog/kl-approx.html
    """
    d = logprobs - ref_logprobs.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return bounded_expm1(-d) + d
    raise UserError(f'KL estimator {kind!r} does not exist: use "k1", "k2" or "k3"')


def row_sum(x: Tensor, mask: Tensor, cp_group: Group | None = None) -> Tensor:
    """(B, S), mask (B, S) bool -> (B,). Every sum over the tokens of a row is made here.

    By `where`, since inf or NaN in a masked column times 0 would be NaN, in the sum and in the gradient.

    cp_group : the ranks that hold other columns of the same rows (context parallelism), for a sum that is needed
               whole, as in a ratio of whole rows. An all-reduce, and one more in backward, for each rank goes on with
               the sum in its own way: its loss is a share. `aggregate` only adds up and needs no such thing
    """
    rows = torch.where(mask, x, 0.0).sum(1)
    if cp_group is None or cp_group.size == 1:
        return rows
    from minirl.parallel.collectives import copy_to, reduce_from  # torch.distributed is not needed on a laptop

    return copy_to(reduce_from(rows, cp_group), cp_group)


def sequence_logprobs(logprobs: Tensor, mask: Tensor, reduce: Literal["sum", "mean"], row_tokens: Tensor | None = None,
                      cp_group: Group | None = None) -> Tensor:
    """Log-prob of each whole answer, or its mean over the answer's tokens: (B, S), mask (B, S) bool -> (B,) nats.

    Prompt, padding and what a tool said are no part of the sum, nor of the count. An answer without a token has 0.

    row_tokens, cp_group : under context parallelism the tokens of whole rows, and who has the other columns
    """
    rows = row_sum(logprobs, mask, cp_group)
    return rows if reduce == "sum" else rows / (mask.sum(1) if row_tokens is None else row_tokens).clamp(min=1)


def aggregate(per_token: Tensor, mask: Tensor, mode: Mode, total: Tensor | float,
              prompt_tokens: Tensor | None = None, row_tokens: Tensor | None = None) -> Tensor:
    """This microbatch's share of the loss, a scalar; the shares of all microbatches and ranks add up to it.

    per_token     : (B, S)          mask : (B, S) bool
    total         : from `loss_total`, for the whole optimizer update
    prompt_tokens : (B,) from the function of that name, for the mode "prompt"
    row_tokens    : (B,) action tokens of the whole rows, where per_token and mask hold only some of their columns
                    (context parallelism; `cut_columns` counts them); None: they hold all

    mode        weight of a token                                source
    "token"     1 / all action tokens                            SFT; DAPO's code
    "sequence"  1 / tokens of its row / rows                     GRPO, arXiv:2402.03300 eq. 3
    "prompt"    1 / tokens of all rows of its prompt / prompts   DAPO, arXiv:2503.14476 eq. 8
    "constant"  1 / (rows x a fixed length)                      Dr. GRPO, arXiv:2503.20783 sec. 3.2

    With "sequence" the tokens of a long row weigh less, so a long wrong answer is punished less for each.
    A row with an empty mask adds 0 and still counts as a row. If nothing is left the loss is 0, not 0 / 0.
    """
    rows = row_sum(per_token, mask)  # (B,)
    if mode == "sequence":
        rows = rows / (mask.sum(1) if row_tokens is None else row_tokens).clamp(min=1)
    elif mode == "prompt":
        if prompt_tokens is None:
            raise UserError('mode "prompt" divides by the tokens of a prompt: pass prompt_tokens(mask, group)'
                            " of the whole batch, cut like it")
        rows = rows / prompt_tokens.clamp(min=1)
    elif mode not in ("token", "constant"):
        raise _no_such(mode)
    return rows.sum() / torch.as_tensor(total).clamp(min=1)


@torch.no_grad()
def loss_total(mode: Mode, mask: Tensor, mesh: Mesh | None = None, group: Tensor | None = None,
               constant_length: int | None = None) -> Tensor:
    """The one denominator of an optimizer update: int64 scalar, summed over replicas.

    mask            : (B, S) bool, all rows of this replica in this update, after filters and truncation masks. Whole
                      rows: they are cut over the ranks of context parallelism later, which all count the same here
    group           : (B,) the prompt of each row, for the mode "prompt"; the rows of a prompt lie on one rank
    constant_length : tokens, for the mode "constant": a number of the config. Never the width of the batch,
                      which changes with its longest answer

    Averaging the means of microbatches or ranks instead would favour the tokens of the shorter ones: 2 tokens
    with loss 1 and 8 with 0.25 have the mean 0.4, but the mean of the two means is 0.625.
    """
    rows = mask.new_full((), len(mask), dtype=torch.int64)
    if mode == "token":
        total = mask.sum()
    elif mode == "sequence":
        total = rows
    elif mode == "prompt":
        if group is None:
            raise UserError('mode "prompt" divides by the number of prompts: pass group')
        total = rows.new_full((), len(group.unique()))
    elif mode == "constant":
        if not constant_length or constant_length < 0:
            raise UserError(f'mode "constant" divides by a fixed length, not by {constant_length}: '
                            "pass as constant_length the most tokens an answer may have")
        total = rows * constant_length
    else:
        raise _no_such(mode)
    if mesh is not None and mesh.dp > 1:
        from minirl.parallel.collectives import all_reduce  # torch.distributed is not needed on a laptop

        total = all_reduce(total, mesh.dp_group)
    return total


@torch.no_grad()
def prompt_tokens(mask: Tensor, group: Tensor) -> Tensor:
    """(B,) int64: the action tokens of all rows that answer this row's prompt. Whole batch in, slices out.

    mask : (B, S) bool, group : (B,) int64
    """
    _, index = group.unique(return_inverse=True)
    return torch.zeros_like(index).index_add(0, index, mask.sum(1))[index]


@torch.no_grad()
def policy_stats(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, entropy: Tensor | None,
                 advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float,
                 clipped: Tensor | None = None, row_tokens: Tensor | None = None) -> dict[str, Tensor]:
    """What to log about a policy update: scalars, **sums** over the action tokens of this microbatch.

    Add them up over microbatches and ranks, then divide by "tokens"; a mean of means would depend on how the
    batch was cut. A key that begins with "max_" is a maximum, and reduced by the maximum; one that begins with
    "row" counts whole rows, also where a rank has some of their columns.

    tokens, rows         how many, of rows those with an action; row_tokens as in `aggregate`
    approx_kl            KL(old || now) in nats, by k3: how far the updates on this rollout have gone
    old_approx_kl        the same by k1, noisier
    clip_frac            tokens whose gradient the clip takes away: A > 0 and ratio > 1 + eps_high, or
                         A < 0 and ratio < 1 - eps_low; or those of `clipped` (B, S), where another bound is in use
    kl_ref               KL(policy || reference) in nats, by k3; only with ref_logprobs
    entropy              nats; only with entropy
    max_ratio_deviation  largest |ratio - 1|. More than 1e-5 on a first pass in float32: sampler and trainer
                         do not compute the same thing
    """
    excess = bounded_expm1(logprobs - old_logprobs)  # ratio - 1
    binds = ((advantages > 0) & (excess > eps_high)) | ((advantages < 0) & (excess < -eps_low))
    binds = binds if clipped is None else clipped
    per_token = {"approx_kl": kl_estimate(old_logprobs, logprobs, "k3"), "old_approx_kl": old_logprobs - logprobs,
                 "clip_frac": binds.float()}
    if ref_logprobs is not None:
        per_token["kl_ref"] = kl_estimate(logprobs, ref_logprobs, "k3")
    if entropy is not None:
        per_token["entropy"] = entropy
    stats = {name: row_sum(value, mask).sum() for name, value in per_token.items()}
    stats["tokens"] = mask.sum()
    stats["rows"] = ((mask.sum(1) if row_tokens is None else row_tokens) > 0).sum()
    stats["max_ratio_deviation"] = torch.where(mask, excess.abs(), 0.0).amax()
    return stats


def _no_such(mode: str) -> UserError:
    return UserError(f'loss mode {mode!r} does not exist: use "token", "sequence", "prompt" or "constant"')
