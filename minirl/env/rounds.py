"""The rows of one step: rounds of sampling until the groups have something to teach, the same on every rank.

DAPO's dynamic sampling (arXiv:2503.14476 sec. 3.2): a group whose answers all earn the same gives every one of them the
advantage 0, so it is left out and another prompt takes its place. It asks what the task paid, before any penalty for
length, and is not a schedule of how many samples to draw. It always ends: after `rounds` more rounds the places that
are still empty go to the first groups that had nothing to teach, so that a step has the same number of rows everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minirl.advantages import constant_groups
from minirl.env.base import Env
from minirl.env.loop import collect
from minirl.generate import uniform
from minirl.model import Transformer
from minirl.parallel.context import gather_rollouts
from minirl.parallel.data import share_of
from minirl.parallel.mesh import Mesh
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


def collect_step(policy: Transformer, tokenizer: Tokenizer, env: Env, number: int, prompts: int, group_size: int,
                 rounds: int, mesh: Mesh, **sampling) -> Rollout:
    """Rollout `number` (1, 2, ..) of a run: this replica's share of `prompts` groups of answers.

    rounds   : at most so many after the first; 0: every group is kept
    sampling : passed to `generate` (max_new_tokens, temperature, seed, ...)

    Rollout n has the problems (n - 1) prompts (rounds + 1) .. of the endless stream to itself, whether it needs all of
    them or not: a resumed run need not remember how many were drawn.
    """
    share = mesh.share(prompts, "prompts of --prompts-per-step")
    kept: list[Rollout] = []
    for i in range(rounds + 1):
        first = ((number - 1) * (rounds + 1) + i) * prompts + share.start
        examples = env.sample(len(share), start=first)
        rollout = collect(policy, tokenizer, env, examples, group_size, first, mesh, **sampling)
        if rounds == 0:
            return rollout
        # Every rank looks at the groups of all, and so all choose the same and stop together.
        kept.append(gather_rollouts(rollout, mesh.dp_group))
        whole = Rollout.join(kept)
        chosen, complete = choose_groups(whole.rewards, whole.group, prompts)
        if complete:
            break
    mine = torch.isin(whole.group, chosen[share.start : share.stop])
    return whole.rows(mine.nonzero()[:, 0]).to(mesh.device)


def replayed(path: str, tokenizer: Tokenizer, mesh: Mesh) -> Rollout | None:
    """This replica's share of a saved rollout that stands for those of every step; None: no path, they are sampled."""
    return share_of(Rollout.load_sampled(path, tokenizer.vocab_size), mesh).to(mesh.device) if path else None


def choose_groups(rewards: Tensor, group: Tensor, count: int) -> tuple[Tensor, bool]:
    """(ids (count,) of the groups to keep, ascending; whether every one of them has unequal rewards (B,))."""
    ids, constant = group.unique(), constant_groups(rewards, group)
    teaching, rest = ids[~constant][:count], ids[constant]
    return torch.cat((teaching, rest[: count - len(teaching)])).sort().values, len(teaching) == count


def disturb(rollout: Rollout, std: float, seed: int) -> Rollout:
    """The rollout as of a sampler whose log-probs are wrong by noise of `std` nats a token: another kernel or dtype.

    The noise belongs to sample and column, so that it is the same in every layout.
    """
    columns = torch.arange(rollout.action_mask.shape[1], device=rollout.action_mask.device)
    u = uniform(seed + 2, rollout.sample_ids[:, None], columns)  # the tokens themselves were drawn with `seed`
    noise = std * 2**0.5 * torch.erfinv((2 * u - 1).clamp(-1 + 1e-12, 1 - 1e-12))
    old = rollout.old_logprobs
    return rollout.replace(old_logprobs=torch.where(rollout.action_mask, old + noise.to(old.dtype), old))
