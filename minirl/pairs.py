"""Rollouts whose rows come in pairs: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

How they are cut, and what a policy, its frozen reference or a reward model make of them. P pairs, 2P rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minirl.env.base import Env
from minirl.env.loop import collect
from minirl.learner import Learner
from minirl.logprobs import Output, rollout_logprobs
from minirl.losses import aggregate, kl_estimate, loss_total, row_sum, sequence_logprobs, sft_loss
from minirl.model import Transformer
from minirl.parallel import Mesh, all_reduce_sum
from minirl.parallel.context import gather_rollouts
from minirl.parallel.data import reduce_stats
from minirl.parallel.zero import gathered
from minirl.preference_losses import (
    Options,
    Preference,
    PreferenceOptions,
    objective,
    preference_loss,
    preference_stats,
)
from minirl.reward_model import reward_loss, reward_stats, score_inputs, score_rows
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


def rows_of(pairs: Tensor) -> Tensor:
    """Numbers of pairs (P,) -> numbers of their rows (2P,): 3, 0 -> 6, 7, 0, 1."""
    return (2 * pairs[:, None] + torch.arange(2, device=pairs.device)).flatten()


def microbatches(pairs: Rollout, size: int) -> Iterator[Rollout]:
    """Pieces of at most `size` pairs, similar lengths together. A pair is never torn: its loss needs both answers."""
    longest = pairs.lengths.view(-1, 2).amax(1)
    parts = torch.argsort(longest, stable=True).split(size)
    return (pairs.rows(rows_of(part)) for part in parts if len(part))  # a replica may have none, in one empty part


def answers(logprobs: Tensor, mb: Rollout, row: Preference, mesh: Mesh | None = None) -> tuple[Tensor, Tensor]:
    """Token log-probs (2P, S) -> those of the whole answers, chosen (P,) and rejected (P,), summed or averaged."""
    cp_group = None if mesh is None else mesh.cp_group
    return split(sequence_logprobs(logprobs, mb.action_mask, row.reduce, mb.row_tokens, cp_group))


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """One number a row (2P,) -> of the chosen and of the rejected answers, (P,) each."""
    return rows[0::2], rows[1::2]


def pair_loss(out: Output, mb: Rollout, total: Tensor, mesh: Mesh, centring: float = 0.01,
              margins: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of a reward model's loss over `total` pairs, and what to log: a loss_fn.

    mb       : `pair_inputs`
    centring : of `reward_loss`
    margins  : the scores of a pair must differ by as much as its rewards
    """
    chosen, rejected = split(row_sum(out.values, mb.action_mask, mesh.cp_group))
    margin = torch.sub(*split(mb.rewards)) if margins else torch.zeros_like(chosen)
    losses = reward_loss(chosen, rejected, margin, centring)
    if mb.weights is not None:  # of the comparisons on the way; the rest is that of the whole answers
        weights = mb.weights[0::2]
        before = reward_loss(*split(out.values), margin[:, None], centring) * weights
        share, before = (row_sum(x, weights > 0, mesh.cp_group) for x in (weights, before))
        losses = (1 - share) * losses + before
    loss = losses.sum() / total / mesh.cp  # ranks of cp have the whole sums
    return loss, reward_stats(chosen, rejected) | {"rows_length": mb.lengths.sum()}


def policy_pair_loss(out: Output, mb: Rollout, config: PreferenceOptions, shift: Tensor | float, total: Tensor,
                     total_tokens: Tensor, mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of a policy's loss over `total` pairs, and what to log: a loss_fn.

    mb           : with ref_logprobs if the loss of `config` has a reference
    shift        : of kto and bco, `preference_losses.Options`
    total_tokens : of the chosen answers, over which their negative log-likelihood is a mean
    """
    row, options, nll_coef = objective(config)
    chosen, rejected = answers(out.logprobs, mb, row, mesh)
    ref = answers(mb.ref_logprobs, mb, row, mesh) if row.reference else (None, None)
    losses = preference_loss(config.loss, chosen, rejected, *ref, **options._replace(shift=shift)._asdict())
    loss = losses.sum() / total / mesh.cp  # ranks of cp have the whole sums
    if nll_coef:
        nll = aggregate(sft_loss(out.logprobs[0::2]), mb.action_mask[0::2], "token", total_tokens)
        loss = loss + nll_coef * nll
    return loss, preference_stats(chosen, rejected, *ref, options.beta) | {"rows_length": mb.lengths.sum()}


def pair_update(learner: Learner, pairs: Rollout, microbatch_size: int, lr: float) -> dict[str, float]:
    """One step of a reward model on all pairs of all ranks; its stats. {}: there are none, and nothing is done."""
    total = loss_total("sequence", pairs.action_mask[0::2], learner.mesh)
    if not total:
        return {}
    loss_fn = partial(pair_loss, total=total, mesh=learner.mesh)
    return learner.update(loss_fn, microbatches(score_inputs(pairs), microbatch_size), lr)


def with_reference(reference: Transformer | None, rollout: Rollout, microbatch_size: int, mesh: Mesh) -> Rollout:
    """The whole of a data set with the reference's log-probs, on every rank, on the CPU. The ranks share the work.

    reference : None: a uniform one, to which every answer is equally likely; its log-probs are a constant, and cancel
    """
    if reference is None:
        return rollout.replace(ref_logprobs=torch.zeros(rollout.action_mask.shape))
    mine, part = mesh.portion(len(rollout)), None
    with gathered(reference):
        if mine:
            part = rollout.rows(torch.arange(mine.start, mine.stop)).to(mesh.device)
            part = part.replace(ref_logprobs=rollout_logprobs(reference, part, microbatch_size))
    return gather_rollouts(part, mesh.data_group)


@torch.no_grad()
def mismatch_kl(policy: Transformer, rows: Rollout, microbatch_size: int, mesh: Mesh) -> Tensor:
    """KTO's z0: how much likelier the policy finds answers to other questions than the reference does; never below 0.

    rows : this replica's, from `mismatched`, with ref_logprobs. A scalar in nats an answer, the same on every rank
    """
    logprobs = rollout_logprobs(policy, rows, microbatch_size, mesh=mesh)
    difference = row_sum(logprobs - rows.ref_logprobs, rows.action_mask)  # (P,)
    sums = torch.stack([difference.sum().double(), difference.new_full((), len(rows)).double()])
    total, count = all_reduce_sum(sums, mesh)
    return (total / count).clamp(min=0)


# ---- what is logged ----

def pair_metrics(stats: dict[str, float], prefix: str = "") -> dict[str, float]:
    """Means over pairs of the sums that `preference_stats` and `reward_stats` give."""
    names = {"row_accuracy": "preference_accuracy", "row_margin": "reward_margin"}
    return {prefix + names.get(name, name.removeprefix("row_")): value / stats["rows"]
            for name, value in stats.items() if name.startswith("row_")}


@torch.no_grad()
def evaluate_pairs(model: Transformer, pairs: Rollout, row: Preference | None, options: Options | None, mesh: Mesh,
                   microbatch_size: int) -> dict[str, float]:
    """{"eval/preference_accuracy": share of the pairs whose chosen answer is rated higher, ...}, see `pair_metrics`.

    row, options : of the loss, for a policy; its `pairs` have ref_logprobs if the loss has a reference. A reward model
                   has neither
    """
    mine, stats = mesh.portion(len(pairs) // 2), {}
    with gathered(model):
        if mine:
            part = pairs.rows(rows_of(torch.arange(mine.start, mine.stop))).to(mesh.device)
            if row is None:
                stats = reward_stats(*split(score_rows(model, part, microbatch_size)))
            else:
                logprobs = rollout_logprobs(model, part, microbatch_size)
                ref = answers(part.ref_logprobs, part, row) if row.reference else (None, None)
                stats = preference_stats(*answers(logprobs, part, row), *ref, options.beta)
    # Each rank of dp x cp had other pairs, whereas a name with "row" would count those of one cp rank alone.
    sums = reduce_stats({f"of_{name}": value.double() for name, value in stats.items()}, mesh)
    return pair_metrics({name.removeprefix("of_"): value for name, value in sums.items()}, "eval/")


@torch.no_grad()
def evaluate_kl(policy: Transformer, frozen: Callable[[], AbstractContextManager[Transformer]], tokenizer: Tokenizer,
                env: Env, problems: int, mesh: Mesh, microbatch_size: int, **sampling: Any) -> dict[str, float]:
    """{"eval/kl_ref": KL(policy || reference), nats an answer, by k3}, on answers that the policy samples.

    Not on those of the pairs: they are another model's, and say nothing about what this one does elsewhere.

    frozen   : opens the reference, as a context
    sampling : passed to `generate`
    """
    mine = mesh.portion(min(problems, env.size("eval") or problems))
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with gathered(policy):
        if mine:
            examples = env.sample(len(mine), start=mine.start, split="eval")
            rollout = collect(policy, tokenizer, env, examples, first_prompt=mine.start, **sampling)
            logprobs = rollout_logprobs(policy, rollout, microbatch_size)
    with frozen() as reference, gathered(reference):
        if mine:
            kl = kl_estimate(logprobs, rollout_logprobs(reference, rollout, microbatch_size), "k3")
            sums[0], sums[1] = row_sum(kl, rollout.action_mask).sum(), len(rollout)
    kl, count = all_reduce_sum(sums, mesh).tolist()
    return {"eval/kl_ref": kl / count}
