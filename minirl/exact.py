"""What every recipe does on average, without sampling: `python -m minirl.exact`, some seconds in float64.

Curves cannot settle whether an update is biased: noise, Adam and the task are in the way. Here a policy is so small
that every answer can be listed, and every group of answers. It writes up to two words, `a` or `b`, and may end before:

    .    a.    b.    aa    ab    ba    bb              7 answers, the last four cut at the limit
    7 x 7 x 7 x 7 = 2,401 groups of 4, of which 210 differ by more than the order of their rows

So the expected update of a recipe is a finite sum, each group's gradient times its probability, and is compared with
the gradient of the expected reward, which is a finite sum as well. A recipe is called through the code that trains:
`make_advantages`, `leave_out`, `weigh`, `recipe_loss`, `aggregate`. The old policy is the policy, as in the first
update on a rollout. A bonus for entropy is another goal than the reward, and left out.

    scale     expected update = scale x gradient + rest; Adam does not care about it
    cosine    between the two: 1, the update points where the reward grows fastest
    bias      |expected update - gradient| / |gradient|: 0, unbiased
    noise     std of the update of one group / |expected update|: how many groups it takes, square rooted
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import all_logprobs
from minirl.config import UserError, run
from minirl.env.base import Step
from minirl.losses import aggregate, loss_total, prompt_tokens
from minirl.objective import leave_out, make_advantages, recipe_loss, weigh
from minirl.recipes import RECIPES, RecipeOptions, fill_in
from minirl.rollout import Rollout

A, B, END = range(3)
ANSWERS = [(END,), (A, END), (B, END), (A, A), (A, B), (B, A), (B, B)]
LIMIT, GROUP = 2, 4


@dataclass(frozen=True)
class Recipe(RecipeOptions):
    """A row of the table alone, as a trainer's config holds it."""

    def __post_init__(self):
        fill_in(self)


class Report(NamedTuple):
    scale: float
    cosine: float
    bias: float
    noise: float


class World(NamedTuple):
    """Everything there is. Three states, "" "a" "b", with three logits each: theta (9,)."""

    theta: Tensor  # (9,) float64
    rewards: Tensor  # (7,) of each answer

    def logprobs(self, theta: Tensor) -> Tensor:
        """(7, 2) nats, of the tokens of each answer; 0 behind its end."""
        states = all_logprobs(theta.view(3, 3))
        rows = [[states[0, first], *(states[1 + first, second] for second in rest)] for first, *rest in ANSWERS]
        return torch.stack([torch.stack([*row, *[theta.new_zeros(())] * (LIMIT - len(row))]) for row in rows])

    def gains(self, logprobs: Tensor) -> Tensor:
        """(7, 2): how much likelier each word of an answer makes a right one; the last one settles it."""
        p = logprobs.exp() * (logprobs != 0)
        first = torch.tensor([answer[0] for answer in ANSWERS])
        likely = torch.stack([(p[:, 1] * self.rewards)[first == word].sum() for word in (A, B)])
        start = (logprobs.sum(1).exp() * self.rewards).sum()
        after = torch.where(first == END, self.rewards, likely[first.clamp(max=1)])
        return torch.stack((after - start, torch.where(first == END, 0.0, self.rewards - after)), 1)

    def gradient(self) -> Tensor:
        """(9,) of the expected reward, sum of p(y) r(y) over the seven answers."""
        theta = self.theta.clone().requires_grad_()
        expected = (self.logprobs(theta).sum(1).exp() * self.rewards).sum()
        return torch.autograd.grad(expected, theta)[0]


def make_world(seed: int = 16) -> World:
    """Random logits, and the reward of a verifier: 1 for `a.` and `ab`, 0 for the others."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(9, generator=g, dtype=torch.float64)
    return World(theta, torch.tensor([0, 1, 0, 0, 1, 0, 0], dtype=torch.float64))


def groups_of(logprobs: Tensor, size: int) -> list[tuple[tuple[int, ...], float]]:
    """Every group as the sorted numbers of its answers, with the probability of all its orders together."""
    p = logprobs.sum(1).exp().tolist()
    found = []
    for members in combinations_with_replacement(range(len(ANSWERS)), size):
        orders = math.factorial(size)
        for count in Counter(members).values():
            orders //= math.factorial(count)
        found.append((members, orders * math.prod(p[i] for i in members)))
    return found


def as_rollout(members: tuple[int, ...], world: World, logprobs: Tensor) -> Rollout:
    """One prompt and its answers, as `collect` and `look_again` would return them. An answer is as likely without the
    prompt, for there is but one; and the sampler agrees with the trainer. A word is a turn, which the environment
    echoes: the columns are word, echo, word, (G, 3). The belief in a right answer is the probability of one, and the
    vector of a word is its true gradient. No row branches off another, or starts again: groups are independent answers.
    """
    index, answers = torch.tensor(members), [ANSWERS[i] for i in members]
    states = all_logprobs(world.theta.view(3, 3))
    entropy = -(states.exp() * states).sum(1)  # (3,) of each state
    entropy = torch.tensor([[entropy[0], entropy[1 + answer[0]] if len(answer) > 1 else 0] for answer in answers],
                           dtype=torch.float64)
    words = torch.tensor([[*answer, *[END] * (LIMIT - len(answer))] for answer in answers])
    chosen = torch.arange(LIMIT) < torch.tensor([[len(answer)] for answer in answers])
    turns = [[Step("ab"[word], 0.0, False, {"tool_call": True}, "ab"[word]) for word in answer[:-1]]
             + [Step("", reward, True, {"tool_call": True}, "ab."[answer[-1]])]
             for answer, reward in zip(answers, world.rewards[index].tolist(), strict=True)]
    gains = world.gains(logprobs)[index]
    first, second = words[:, 0], words[:, 1]
    slopes = torch.eye(9, dtype=torch.float64).view(3, 3, 9) - torch.block_diag(*states.exp()).view(3, 1, 9)
    vectors = torch.stack((slopes[0, first], torch.zeros(len(index), 9, dtype=torch.float64),
                           slopes[1 + first.clamp(max=1), second] * chosen[:, 1:]), 1)
    words, mask, logprobs, entropy, gains = (F.pad(x[:, :, None], (0, 1)).flatten(1)[:, :-1]
                                             for x in (words, chosen, logprobs[index], entropy, gains))
    return Rollout(tokens=F.pad(words, (1, 0)), action_mask=mask, lengths=2 * chosen.sum(1),
                   group=torch.zeros(len(members), dtype=torch.int64), sample_ids=torch.arange(len(members)),
                   old_logprobs=logprobs, sampler_logprobs=logprobs, alone_logprobs=logprobs, old_entropy=entropy,
                   finished=torch.tensor([answer[-1] == END for answer in answers]), rewards=world.rewards[index],
                   gains=gains, vectors=vectors, parent=torch.arange(len(members)),
                   shared=torch.zeros(len(members), dtype=torch.int64), turns=turns)


def update(rollout: Rollout, recipe: RecipeOptions) -> Tensor:
    """(G, 2): what one gradient step adds to the log-prob of each word, minus the gradient of the loss."""
    rollout = weigh(leave_out(rollout.replace(advantages=make_advantages(rollout, recipe, LIMIT)), recipe), recipe, 0)
    mask, mode, logprobs = rollout.action_mask, recipe.aggregate, rollout.old_logprobs.clone().requires_grad_()
    loss, _ = recipe_loss(logprobs, rollout, recipe)
    total = loss_total(mode, mask, group=rollout.group, constant_length=recipe.constant_length or LIMIT)
    loss = aggregate(loss, mask, mode, total, prompt_tokens(mask, rollout.group))
    return -torch.autograd.grad(loss, logprobs)[0][:, ::2]  # of words, not of echoes


def expected_update(recipe: RecipeOptions, world: World, group_size: int = GROUP) -> tuple[Tensor, float]:
    """(the expected update of theta (9,), the expected square of its distance from that), over all groups."""
    logprobs = world.logprobs(world.theta)
    slopes = torch.func.jacrev(world.logprobs)(world.theta)  # (7, 2, 9)
    updates, weights = [], []
    for members, probability in groups_of(logprobs, group_size):
        step = update(as_rollout(members, world, logprobs), recipe)
        updates.append(torch.einsum("rs,rsp->p", step, slopes[list(members)]))
        weights.append(probability)
    updates, weights = torch.stack(updates), torch.tensor(weights, dtype=torch.float64)
    mean = weights @ updates
    return mean, float(weights @ (updates - mean).square().sum(1))


def compare(recipe: RecipeOptions, world: World, group_size: int = GROUP) -> Report:
    """The expected update beside the gradient of the expected reward."""
    mean, variance = expected_update(recipe, world, group_size)
    true = world.gradient()
    scale = float(mean @ true / (true @ true))
    return Report(scale, float(mean @ true / (mean.norm() * true.norm())), float((mean - true).norm() / true.norm()),
                  variance**0.5 / float(mean.norm()))


def judged() -> list[str]:
    """The rows that look at the task's verdict; the others have another goal than the expected reward."""
    return [name for name, options in RECIPES.items() if options["labels"] == "task"]


@dataclass(frozen=True)
class Config:
    # world
    seed: int = 16  # of the policy's logits
    group_size: int = GROUP  # answers to the prompt
    recipe: str = ""  # one row of the table; empty: all

    def __post_init__(self):
        if not 2 <= self.group_size <= 8:
            raise UserError(f"--group-size {self.group_size}: between 2 and 8, for every group is looked at")
        if self.recipe:
            Recipe(self.recipe)


def main(config: Config) -> None:
    """Print the table: every recipe's expected update beside the true gradient."""
    world = make_world(config.seed)
    orders = len(ANSWERS) ** config.group_size
    success = float(world.logprobs(world.theta).sum(1).exp() @ world.rewards)
    print(f"{orders:,} groups of {config.group_size}, success rate {success:.3f}\n")
    print(f"{'recipe':24} {'scale':>9} {'cosine':>9} {'bias':>9} {'noise':>9}")
    for name in [config.recipe] if config.recipe else judged():
        report = compare(Recipe(name), world, config.group_size)
        bias = "0" if report.bias < 1e-10 else f"{report.bias:.4f}"
        print(f"{name:24} {report.scale:9.4f} {report.cosine:9.5f} {bias:>9} {report.noise:9.3f}", flush=True)


if __name__ == "__main__":
    run(main, Config, description=__doc__)
