"""Between likelihood and RL, for a policy that never succeeds: Tsallis' logarithm. `python -m minirl.tsallis`

P is the probability that an answer is right (arXiv:2604.25907). RL raises P, imitation log P, and in between lies

    ln_q(P) = (P^(1 - q) - 1) / (1 - q)        q = 0: P - 1, RL        q = 1: log P, likelihood
    its gradient, P^-q grad P                  the same direction for each problem; only problems weigh otherwise

With a success rate of one in a million, grad P is a millionth as well: RL needs of the order of 1 / P_0 steps to get
away from there, and sampling needs as many answers to see the first success at all; likelihood takes log(1 / P_0). Who
knows the right answer y need not wait for it to be sampled: of a thought z that was sampled, pi(y | x, z) is a number,
and P their mean over thoughts. That is GARL, gradient-amplified RL, `garl_loss`. A reward that is 0 or 1 can be
amplified likewise, `success_power` in the table of recipes: it makes hard problems count more, not impossible ones.

q near 1 learns wrong labels by heart as imitation does; the paper finds 0.75 good for a start, and less later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minirl.config import UserError, check_positive, run
from minirl.credit import sum_within


def tsallis_log(log_p: Tensor, q: float) -> Tensor:
    """ln_q of probabilities that are given by their logarithms, with gradient; q = 1 gives them back."""
    if not 0 <= q <= 1:
        raise UserError(f"q is {q}: it lies between 0, the objective of RL, and 1, that of likelihood")
    return log_p if q == 1 else ((1 - q) * log_p).expm1() / (1 - q)


def garl_loss(thoughts: Tensor, answers: Tensor, group: Tensor, q: float = 0.75) -> Tensor:
    """(B,) losses of sampled thoughts, whose mean over a group has minus the gradient of ln_q(P), amplified by an
    estimate of P: GARL, arXiv:2604.25907.

    thoughts : (B,) nats, log pi(z | x) of each sampled thought, with gradient
    answers  : (B,) nats, log pi(y | x, z) of the right answer behind it, with gradient
    group    : (B,) int64, which problem; at least two rows of each
    A thought is rewarded by the probability that it leaves the right answer, less that of the other thoughts (leave one
    out: unbiased); the answer is imitated in proportion to its probability. Both times (mean probability of the group)
    ^-q, whose own noise is the estimator's bias, of the order q / (rows P^(q + 1)). q 0: none.
    **Inferred** from the abstract and the factorisation that it names; the leave-one-out baseline is ours.
    """
    _, index, count = group.unique(return_inverse=True, return_counts=True)
    if (count < 2).any():
        raise UserError("a problem has one thought, and nothing to compare it with: take two or more")
    n = count[index].to(answers.dtype)
    # Within a group everything is divided by its largest p, and that once by P^q: 1e-200 would be 0 in float32.
    top = answers.detach().new_full((len(count),), -torch.inf).scatter_reduce(0, index, answers.detach(), "amax")[index]
    p = (answers.detach() - top).exp()
    mean = sum_within(p, index) / n
    gain = (p - (n * mean - p) / (n - 1)) * thoughts + p * answers  # p grad log p is grad p
    return -gain * ((1 - q) * top - q * mean.log()).exp()


# ---- how long it takes ----

def steps_to_succeed(words: int, length: int, q: float, lr: float = 1.0, goal: float = 0.9, limit: int = 10**6) -> int:
    """Exact gradient ascent on ln_q(P) from a uniform policy: steps until P is `goal`; `limit` if it takes longer.

    One right answer of `length` tokens out of `words`, a softmax for each place: P_0 = words^-length. All places are
    alike, so one number is enough: by how much the right word's logit exceeds the others'.
    """
    logit = 0.0
    for step in range(limit):
        log_s = -math.log1p((words - 1) * math.exp(-logit))  # of the right word
        if length * log_s >= math.log(goal):
            return step
        # d ln_q(P) / d logit of the right word is P^(1 - q) (1 - s); the others share minus that
        logit += lr * math.exp((1 - q) * length * log_s) * -math.expm1(log_s) * words / (words - 1)
    return limit


@dataclass(frozen=True)
class Config:
    words: int = 10  # to choose from at each place of the answer
    group_size: int = 16  # answers that GRPO samples a step
    lr: float = 1.0  # of gradient ascent

    def __post_init__(self):
        check_positive(self, "group_size", "lr")
        if self.words < 2:
            raise UserError(f"--words {self.words}: with fewer than 2 there is nothing to learn")


def main(config: Config) -> None:
    """Steps from a uniform policy to P = 0.9, for answers of 1 .. 6 tokens."""
    powers = (0.0, 0.25, 0.5, 0.75, 1.0)
    print(f"steps to P = 0.9 by exact gradients, lr {config.lr:g}; and until one of {config.group_size} samples is "
          "first right\n")
    print(f"{'P_0':>8} {'GRPO waits':>11} " + " ".join(f"{f'q = {q:g}':>9}" for q in powers))
    for length in range(1, 7):
        chance = config.words**-length
        waits = 1 / -math.expm1(config.group_size * math.log1p(-chance))
        steps = [steps_to_succeed(config.words, length, q, config.lr) for q in powers]
        shown = [f"{'> 1e6' if count == 10**6 else count:>9}" for count in steps]
        print(f"{chance:8.0e} {waits:11.0f} " + " ".join(shown), flush=True)


if __name__ == "__main__":
    run(main, Config, description=__doc__)
