"""Rewards without labels: what an answer is worth when nobody knows the right one. `--labels` in train_grpo.py.

    labels            an answer is paid for                                          source
    task              what the verifier says                                         every other recipe
    self-certainty    being sure: KL(uniform || policy), mean over its tokens        Intuitor, arXiv:2505.19590
    majority          saying what most of its group say                              TTRL, arXiv:2504.16084
    co-rewarding      saying what most say to the same problem in other words        Co-rewarding-I, arXiv:2508.00410

All of them go wrong in one way: a policy that always says the same, or is sure of nonsense, is paid in full. The first
two pay for what the group does itself; the last asks another group, which is harder to drag along. So watch
`reward_mean` and `eval/accuracy`, which are the verifier's in any case: training never sees them.

Left out: Co-rewarding-II, whose second opinion is an average of the policy's own past.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.losses import row_sum
from minirl.rewards import extract_answer
from minirl.rollout import Rollout

if TYPE_CHECKING:
    from minirl.env.base import Step

Labels = Literal["task", "self-certainty", "majority", "co-rewarding"]


@torch.no_grad()
def pseudo_rewards(labels: Labels, rollout: Rollout, certainty: Tensor | None = None) -> Tensor:
    """(B,): what stands in for the verdict of the task.

    certainty : (B, S) nats of `rollout_certainty`, for "self-certainty"
    """
    if labels == "self-certainty":
        tokens = rollout.action_mask.sum(1).clamp(min=1)
        return row_sum(certainty, rollout.action_mask) / tokens
    group = rollout.group.tolist()
    answers = [final_answer(turns) for turns in rollout.turns]
    if labels == "co-rewarding" and len(set(group)) % 2:
        raise UserError(f"--labels co-rewarding compares prompts in pairs, and a replica has {len(set(group))}: let "
                        "--prompts-per-step be twice a multiple of the replicas")
    judge = partner if labels == "co-rewarding" else int
    votes = {number: majority([answer for answer, own in zip(answers, group, strict=True) if own == number])
             for number in set(group)}
    agrees = [answer is not None and answer == votes[judge(number)]
              for answer, number in zip(answers, group, strict=True)]
    return torch.tensor(agrees, dtype=torch.float32, device=rollout.tokens.device)


def partner(prompt: int) -> int:
    """The number of the same problem in other words: 0 and 1, 2 and 3, .. belong together (env/posing.py)."""
    return prompt ^ 1


def majority(answers: Sequence[str | None]) -> str | None:
    """What most say; of equals, what was said first. None if nobody gave an answer."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def final_answer(turns: Sequence[Step]) -> str | None:
    """What a row says in the end: between the tags of an answer; or the number that rewards.py finds; or its text."""
    said = turns[-1].action
    if (tagged := re.findall(r"<answer>([^<]*)</answer>", said)) and len(tagged) == 1:
        return tagged[0].strip() or None
    return extract_answer(said) or said.strip() or None
