"""A process reward model for agents: how good was this action here, learnt from how rollouts through it ended.

    rollouts  ->  Q targets of (state, action)  ->  rows that a reward model is trained on (soft labels)
    states, several actions each  ->  scored by that model  ->  pairs for DPO  ->  a better policy, and again

AgentPRM, arXiv:2502.10325 (Choudhury), has three stages: rollouts, the reward model, the policy by online DPO with that
model as judge. How its pairs are picked we did not read; `dpo_pairs` is ours. Another paper of that name,
arXiv:2511.08325 (Xi et al.), labels "promise and progress" by TD and GAE: its constants are **not established**, and
it is not here.

State and action are texts: the state is all that the policy had seen, its own earlier actions included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from minirl.config import UserError

if TYPE_CHECKING:
    from minirl.env.base import Step

Pair = tuple[Hashable, Hashable]  # state, action


def decisions(prompt: str, turns: Sequence[Step]) -> list[tuple[str, str]]:
    """(state, action) of each turn of a row; the state is the prompt and all that was said since."""
    states, seen = [], prompt
    for step in turns:
        states.append((seen, step.action))
        seen += step.action + step.observation
    return states


def mc_q_targets(rows: Sequence[Sequence[Pair]], outcomes: Sequence[float], gamma: float = 0.95,
                 discount: Literal["to-end", "from-start"] = "to-end") -> dict[Pair, float]:
    """Q of every (state, action): how the rows through it ended, on average; 0 .. 1.

    rows     : the (state, action)s of each rollout, in their order; of any number of prompts
    outcomes : 0 .. 1 a row. They are averaged as -1 .. 1, so that a discounted failure is not taken for a success, and
               the average is brought back to 0 .. 1
    discount : of turn t = 0 .. T - 1
               "to-end"      gamma^(T - 1 - t), what a return is: our choice
               "from-start"  gamma^t, as in the paper's released script: the last, decisive action weighs least
    """
    if discount not in ("to-end", "from-start"):
        raise UserError(f'discount {discount!r} does not exist: use "to-end" or "from-start"')
    found: dict[Pair, list[float]] = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        if not 0 <= outcome <= 1:
            raise UserError(f"an outcome is {outcome}: Q targets are of outcomes between 0 and 1")
        for t, decision in enumerate(row):
            away = len(row) - 1 - t if discount == "to-end" else t
            found.setdefault(decision, []).append(gamma**away * (2 * outcome - 1))
    return {decision: (sum(values) / len(values) + 1) / 2 for decision, values in found.items()}


def prm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the model's probability of success with a soft target: (N,), (N,) in 0 .. 1 -> (N,) nats.

    Least where sigmoid(logit) is the target; its mean over all rows of an update is minimised.
    """
    return F.binary_cross_entropy_with_logits(logits, targets.detach(), reduction="none")


class Preference(NamedTuple):
    """A row for preference training: `vars`-like keys are those of a JSONL file of prompt, chosen, rejected."""

    prompt: str
    chosen: str
    rejected: str


def dpo_pairs(candidates: Mapping[str, Sequence[str]], judge: Callable[[str, str], float],
              gap: float = 0.0) -> list[Preference]:
    """For each state its best and its worst action, where their scores differ by more than `gap`.

    candidates : state -> actions, fresh samples of the policy that is trained ("online"), or those of `mc_q_targets`
    judge      : (state, action) -> score: the reward model, or a table of Q targets
    """
    pairs = []
    for state, actions in candidates.items():
        scores = {action: judge(state, action) for action in dict.fromkeys(actions)}
        best, worst = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
        if scores[best] - scores[worst] > gap:
            pairs.append(Preference(state, best, worst))
    return pairs
