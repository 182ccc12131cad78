"""GRPO on one page: from right and wrong alone, a policy that knows nothing learns one-digit addition.

    python -m minirl.demo

The "language model" is a table of logits: 100 problems (0 + 0 to 9 + 9) by 19 answers (0 to 18). An answer
is one token: no masks, no lengths, no network. What is left is the algorithm, as in `train_grpo.py`:

    1. rollout    sample a group of G answers to each problem
    2. reward     check each answer: 1 if right, 0 if wrong
    3. advantage  was it better than the rest of its group? (reward - mean) / std
    4. loss       make the better ones likelier, the worse ones less likely, and stay near the start
    5. update     a gradient step or two; then sample again, from the new policy

GRPO is arXiv:2402.03300 eq. 3. In the shapes P = 100 problems, G = 16 answers.
"""

import argparse

import torch
from torch import Tensor

LEFT, RIGHT = torch.arange(100) // 10, torch.arange(100) % 10      # problem p asks: LEFT[p] + RIGHT[p] = ?
GROUP_SIZE = 16
UPDATES = 2             # on each rollout; by the second the policy has moved, and the ratio is not 1
EPS = 0.2               # a ratio is rewarded up to 1.2, and down to 0.8
KL_COEF = 0.01


def reward(answers: Tensor) -> Tensor:
    """(P, G) answers -> (P, G) rewards. The checker knows the rule of addition; the policy never sees it."""
    return (answers == (LEFT + RIGHT)[:, None]).float()


def group_advantages(rewards: Tensor) -> Tensor:
    """(P, G) -> (P, G). The group is its own baseline; where all are right, or all wrong, it is 0."""
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True, correction=0)
    return (rewards - mean) / (std + 1e-6)


def logprobs_of(logits: Tensor, answers: Tensor) -> Tensor:
    """(P, 19) logits, (P, G) answers -> (P, G) nats."""
    return logits.gather(1, answers) - logits.logsumexp(1, keepdim=True)


def grpo_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Four (P, G) tensors -> one number to minimise. Only `logprobs` carries a gradient."""
    ratio = (logprobs - old_logprobs).exp()                  # how much likelier than when it was sampled
    clipped = ratio.clamp(1 - EPS, 1 + EPS)                  # beyond this, one batch has had enough say
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    log_ratio = ref_logprobs - logprobs
    kl = log_ratio.exp() - log_ratio - 1                     # k3: 0 at the start, never negative
    return (KL_COEF * kl - surrogate).mean()


def row(name: str, values: Tensor, form: str) -> str:
    return f"  {name:<10}" + "".join(f"{value:6{form}}" for value in values.tolist())


def explain(p: int, answers: Tensor, rewards: Tensor, advantages: Tensor) -> None:
    """Prints group number p of the first rollout as a worked example, and the legend of the table."""
    print(f"""A policy that knows nothing answers {GROUP_SIZE} times:

{row(f"{LEFT[p]} + {RIGHT[p]} =", answers[p], "d")}
{row("reward", rewards[p], ".0f")}
{row("advantage", advantages[p], ".2f")}

Reward mean {rewards[p].mean():.4f}, std {rewards[p].std(correction=0):.4f}; advantage = (reward - mean) / std
The loss is minus the mean of ratio x advantage. Each ratio is still 1 and the advantages add up to 0,
so it is {abs(advantages[p].mean()):.4f}. Its gradient is not: right becomes likelier, wrong less likely.

  reward   share of right answers among the {rewards.numel()} samples of this step
  mixed    share of groups with right and wrong answers: no other group teaches anything
  KL       of the policy from its start, in nats; log 19 = 2.94 when it is sure of every answer
  loss     of the last update; it does not measure progress, and ends above 0 because of the KL term

step  reward  mixed     KL     loss""")


def train(steps: int = 60, seed: int = 0) -> list[float]:
    """Learns, telling what happens; returns the share of right answers among all samples of each step."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(100, 19, requires_grad=True)        # the policy: all answers alike, 1 in 19 is right
    reference = logits.detach().clone()                      # where it started; never updated
    optimizer = torch.optim.Adam([logits], lr=0.06)
    curve = []
    for step in range(1, steps + 1):
        # rollout, reward, advantage: no gradient flows through these
        policy = logits.detach().softmax(1)                                                         # (P, 19)
        answers = torch.multinomial(policy, GROUP_SIZE, replacement=True, generator=generator)      # (P, G)
        rewards = reward(answers)
        advantages = group_advantages(rewards)
        old_logprobs, ref_logprobs = logprobs_of(logits.detach(), answers), logprobs_of(reference, answers)
        curve.append(rewards.mean().item())
        if step == 1:
            example = int((rewards.sum(1) == 1).nonzero()[-1])               # a group with one right answer
            explain(example, answers, rewards, advantages)
        # loss, update
        for _ in range(UPDATES):
            loss = grpo_loss(logprobs_of(logits, answers), old_logprobs, ref_logprobs, advantages)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step == 1 or step % 5 == 0:
            mixed = (rewards.std(1) > 0).float().mean()
            kl = (policy * (policy / reference.softmax(1)).log()).sum(1).mean()
            print(f"{step:4}{curve[-1]:8.3f}{mixed:7.2f}{kl:7.3f}{loss.item():9.4f}")

    print(f"\nThe same problem now:\n\n{row(f'{LEFT[example]} + {RIGHT[example]} =', answers[example], 'd')}")
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * r))] for r in curve[::max(1, steps // 60)])
    accuracy = (logits.argmax(1) == LEFT + RIGHT).float().mean()
    print(f"\nReward 0 to 1: {bars}\nAccuracy of the likeliest answer, over all 100 problems: {accuracy:.2f}")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="rollouts (default 60)")
    options = parser.parse_args()
    train(options.steps) if options.steps > 0 else parser.error(f"--steps {options.steps}: must be above 0")
