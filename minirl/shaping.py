"""What a recipe adds to the task's reward: about length, repetition, and how well an answer fits its question.

Each function returns (B,) numbers, unitless and without gradient, to be added to the rewards with a weight. What is
right or wrong is never decided here; DAPO's penalty for the last tokens before the limit is `rewards.overlong_penalty`.
Whoever asks whether a group is worth training on asks the task's reward, before any of these is added.

B rows; lengths (B,) are action tokens; group (B,) is the prompt each row answers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.losses import row_sum
from minirl.rollout import Rollout


@torch.no_grad()
def kimi_length_reward(lengths: Tensor, correct: Tensor, group: Tensor) -> Tensor:
    """Short among the answers to its prompt: 1/2 for the shortest, -1/2 for the longest. Kimi k1.5, arXiv:2501.12599.

    lambda = 1/2 - (length - min) / (max - min); a wrong answer (correct (B,) bool is False) gets at most 0, since being
    short is no merit of it. 0 where all have one length.
    """
    _, index = group.unique(return_inverse=True)
    lengths = lengths.to(torch.get_default_dtype())
    zeros = lengths.new_zeros(int(index.max()) + 1)
    low = zeros.scatter_reduce(0, index, lengths, "amin", include_self=False)[index]
    high = zeros.scatter_reduce(0, index, lengths, "amax", include_self=False)[index]
    reward = 0.5 - (lengths - low) / (high - low).clamp(min=1)
    reward = torch.where(correct, reward, reward.clamp(max=0.0))
    return torch.where(high > low, reward, 0.0)


@torch.no_grad()
def cosine_length_reward(lengths: Tensor, correct: Tensor, limit: int, right: tuple[float, float] = (1.0, 0.5),
                         wrong: tuple[float, float] = (-1.0, 0.0), cut: float = -1.0) -> Tensor:
    """A reward that goes from its first to its second value as the length goes from 0 to `limit`, along half a cosine.

    right, wrong : of correct answers (shorter is better) and of others (thinking on is better)
    cut          : of answers as long as the limit
    arXiv:2502.03373, eq. 1 as we recall it; its values are (2, 1), (-10, 0) and -10, in the place of the task's reward.
    Ours are of the size of a reward of 1, to be added to it.
    """
    share = (lengths / limit).clamp(max=1.0)
    falling = (1 + torch.cos(math.pi * share)) / 2  # 1 .. 0
    first, last = (torch.where(correct, *(share.new_tensor(values[i]) for values in (right, wrong))) for i in (0, 1))
    return torch.where(lengths >= limit, share.new_tensor(cut), last + (first - last) * falling)


@torch.no_grad()
def repetition_penalty(tokens: Tensor, mask: Tensor, n: int = 3) -> Tensor:
    """Minus the share of an answer's n-grams that it has written before: 0 .. -1, of arXiv:2502.03373's kind.

    tokens : (B, T) int64, mask : (B, S) bool, the action tokens; an n-gram does not reach over a tool's output.
    """
    penalties = []
    for row, own in zip(tokens[:, 1:].tolist(), mask.tolist(), strict=True):
        grams = [tuple(row[s : s + n]) for s in range(len(row) - n + 1) if all(own[s : s + n])]
        penalties.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
    return torch.tensor(penalties, device=tokens.device)


@torch.no_grad()
def self_aligned_reward(alone_logprobs: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """How much likelier the question makes the answer: (ppl(a) - ppl(a|q)) / ppl(a), within -1 .. 1.

    alone_logprobs, logprobs : (B, S) nats, of the answer's tokens without and with the question before them
    SAR, arXiv:2509.05489: concise answers to this question gain, text that would fit any question does not. ppl is
    exp(-mean log-prob). Weight 0.2 beside a verifier's 1.
    """
    tokens = mask.sum(1).clamp(min=1)
    gain = row_sum(alone_logprobs - logprobs, mask) / tokens  # log of ppl(a|q) / ppl(a)
    return (-gain.expm1()).clamp(-1.0, 1.0)


def answer_alone(rollout: Rollout, first_token: int) -> Rollout:
    """The rows without their prompts: `first_token` (BOS, or if there is none EOS), and all from the first action on.

    For `rollout_logprobs`, whose columns `put_back` returns to their places.
    """
    starts = first_actions(rollout.action_mask)
    T = rollout.tokens.shape[1]
    columns = (starts[:, None] + torch.arange(T, device=starts.device)).clamp(max=T - 1)  # (B, T)
    tokens = rollout.tokens.gather(1, columns)
    tokens[:, 0] = first_token
    mask = F.pad(rollout.action_mask, (0, 1)).gather(1, columns)[:, :-1]
    return Rollout(tokens=tokens, action_mask=mask, lengths=(rollout.lengths - starts).clamp(min=1),
                   group=rollout.group, sample_ids=rollout.sample_ids)


def put_back(alone_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, S) log-probs of `answer_alone`'s rows -> the columns that the tokens have in the whole rows, mask (B, S)."""
    columns = torch.arange(mask.shape[1], device=mask.device) - first_actions(mask)[:, None]
    return torch.where(mask, alone_logprobs.gather(1, columns.clamp(min=0)), 0.0)


def first_actions(mask: Tensor) -> Tensor:
    """(B,) column of each row's first action; 0 in a row without any."""
    return mask.int().argmax(1)
