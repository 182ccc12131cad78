"""Rollouts of one prompt as a tree: they part where they act differently, and a node knows how its rows ended.

    root   a   c   R 1          Q of a node: the mean reward of the rows that go through it
           |   d   R 0              root 1/2    a 2/3 (three rows)    c 1    d 0    b 0
           |   c   R 1          a fork: a node whose children differ in Q by a lot
           b       R 0              at the root a beats b by 2/3, at a c beats d by 1

T-STAR, arXiv:2604.07165: merge rollouts, back rewards up, find the forks, and at each teach the better step against the
worse one with a Bradley-Terry loss on the tokens of that step alone; added to the loss of GRPO, or another.

**Not established** (we know the abstract, the figure and notes): mean or max as the back-up, a discount, when two
nodes are merged, which gap makes a fork, beta, and the weight of the second loss. Ours: the mean over visits, the only
one for which the paper's 1/k holds, since a node with k rows is a mean of k rewards; no discount; nodes are merged
where texts are equal. The paper merges where the policy's outputs are close in KL and the actions that changed the
state agree, and it lets the model itself write the better step ("thought grafting"); here the better branch has it.

What a mean can do and what not: the rows of a node of the tree, having the same past and the same action, have the same
gradient there, so that it makes no difference to their sum, the update, whether each has its own reward or all have
the mean (`python -m minirl.exact` shows it: `tstar` is `default`). It does make one where rows of different pasts are
merged, where a clip or a minibatch looks at rows one by one, and for whoever reads Q to find the forks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from minirl.losses import sequence_logprobs
from minirl.preference_losses import preference_loss

if TYPE_CHECKING:
    from minirl.env.base import Step

Path = Sequence[Hashable]  # the node of each turn of a row
ROOT = ()


def tree_paths(turns: Sequence[Sequence[Step]], merge: Literal["past", "state"] = "past") -> list[list[Hashable]]:
    """The node that each turn of each row leads to; rows of one prompt share nodes.

    merge : "past"   the same observations and actions up to and with this one: a tree, in any task
            "state"  the same turn, observation before it, and action: branches that part may meet again. As good as a
                     tree if the observation says all that matters for what comes. An action that could not be carried
                     out (info["tool_call"] False) changed nothing: all such are one
    """
    paths = []
    for row in turns:
        seen, path, past = "", [], ROOT
        for number, step in enumerate(row):
            changed = step.action if step.info.get("tool_call") is not False else None
            past = (*past, (seen, step.action)) if merge == "past" else (number, seen, changed)
            path.append(past)
            seen = step.observation
        paths.append(path)
    return paths


@torch.no_grad()
def row_mean_through(nodes: Tensor, values: Tensor) -> Tensor:
    """(B, K): at each turn the mean value of the rows that go through its node.

    nodes  : (B, K) int64, the same number for the same node, -1 where there is no turn; no row meets a node twice
    values : (B,) of whole rows
    """
    at = nodes >= 0
    count = torch.bincount(nodes[at]).clamp(min=1)
    mean = values.new_zeros(len(count)).index_add(0, nodes[at], values[:, None].expand_as(nodes)[at]) / count
    return torch.where(at, mean[nodes.clamp(min=0)] if len(mean) else 0.0, 0.0)


def back_up(paths: Sequence[Path], rewards: Sequence[float]) -> dict[Hashable, float]:
    """Q of every node, ROOT included: the mean reward of the rows through it, each counted once. One prompt's rows."""
    through: dict[Hashable, list[float]] = {}
    for path, reward in zip(paths, rewards, strict=True):
        for node in dict.fromkeys((ROOT, *path)):
            through.setdefault(node, []).append(reward)
    return {node: sum(found) / len(found) for node, found in through.items()}


class Fork(NamedTuple):
    """A place where it mattered what was done. Rows are numbers into the paths."""

    node: Hashable
    turn: int  # of both rows, the one in which they parted
    better: int  # a row that took the child of highest Q
    worse: int  # a row that took the child of lowest Q
    gap: float  # between the two Q


def critical_forks(paths: Sequence[Path], q: Mapping[Hashable, float], gap: float) -> list[Fork]:
    """The nodes whose best and worst child differ in Q by `gap` or more, in the order in which rows come to them."""
    children: dict[Hashable, dict[Hashable, tuple[int, int]]] = {}  # node -> child -> (a row, its turn there)
    for row, path in enumerate(paths):
        for turn, (node, child) in enumerate(zip((ROOT, *path), path)):
            children.setdefault(node, {}).setdefault(child, (row, turn))
    forks = []
    for node, taken in children.items():
        best, worst = max(taken, key=q.__getitem__), min(taken, key=q.__getitem__)
        if len(taken) > 1 and q[best] - q[worst] >= gap:
            forks.append(Fork(node, taken[best][1], taken[best][0], taken[worst][0], q[best] - q[worst]))
    return forks


def surgical_loss(logprobs: tuple[Tensor, Tensor], ref_logprobs: tuple[Tensor, Tensor],
                  step_mask: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """-log sigmoid(beta (margin of the better step - margin of the worse)), (F,) for F forks: Bradley-Terry.

    logprobs, ref_logprobs : (F, S) nats of the rows with the better and of those with the worse step
    step_mask              : (F, S) bool, the tokens of the forked step alone (`turn_numbers(mask) == turn`): nothing
                             before it, which the rows share, nor behind it has a gradient
    """
    sums = [sequence_logprobs(x, mask, "sum") for x, mask in zip(logprobs, step_mask, strict=True)]
    reference = [sequence_logprobs(x, mask, "sum") for x, mask in zip(ref_logprobs, step_mask, strict=True)]
    return preference_loss("dpo", *sums, *reference, beta=beta)
