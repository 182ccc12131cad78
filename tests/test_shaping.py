"""What is added to rewards: the papers' numbers, and answers without their questions."""

import math

import pytest
import torch
from stubs import random_policy
from torch.testing import assert_close

from minirl.logprobs import rollout_logprobs, token_logprobs
from minirl.rollout import Rollout
from minirl.shaping import (
    answer_alone,
    cosine_length_reward,
    kimi_length_reward,
    put_back,
    repetition_penalty,
    self_aligned_reward,
)

T, F = True, False


def test_kimi_rewards_being_short_among_the_answers_of_a_group():
    lengths, correct, group = torch.tensor([100, 200, 300, 100]), torch.tensor([T, T, F, F]), torch.zeros(4).long()
    assert kimi_length_reward(lengths, correct, group).tolist() == [0.5, 0, -0.5, 0]
    assert kimi_length_reward(torch.tensor([7, 7]), torch.tensor([T, F]), torch.zeros(2).long()).tolist() == [0, 0]
    apart = kimi_length_reward(torch.tensor([1, 50, 3, 60]), torch.tensor([T] * 4), torch.tensor([9, 2, 9, 2]))
    assert apart.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_the_cosine_falls_for_right_answers_and_rises_for_wrong_ones():
    lengths = torch.tensor([0, 50, 99, 100, 0, 50, 100, 120])
    correct = torch.tensor([T] * 4 + [F] * 4)
    got = cosine_length_reward(lengths, correct, 100)
    near = 0.5 + 0.5 * (1 + math.cos(0.99 * math.pi)) / 2
    assert got.tolist() == pytest.approx([1, 0.75, near, -1, -1, -0.5, -1, -1], abs=1e-6)
    paper = cosine_length_reward(torch.tensor([0, 0]), torch.tensor([T, F]), 10, (2.0, 1.0), (-10.0, 0.0), -10.0)
    assert paper.tolist() == [2, -10]


def test_repetition_is_the_share_of_ngrams_written_before():
    tokens = torch.tensor([[9, 1, 1, 1, 1, 1], [9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 1, 2], [9, 1, 1, 1, 1, 1]])
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[3] = torch.tensor([T, T, F, T, T])  # a tool spoke in between: no trigram is the policy's
    assert repetition_penalty(tokens, mask, 3).tolist() == pytest.approx([-2 / 3, 0, 0, 0])
    assert repetition_penalty(tokens, mask, 2).tolist() == pytest.approx([-3 / 4, 0, -1 / 4, -1 / 2])
    assert repetition_penalty(tokens, torch.zeros_like(mask)).tolist() == [0] * 4


def test_an_answer_gains_by_what_the_question_makes_likely():
    def reward(ppl_alone, ppl, tokens=3):
        alone, with_question = (torch.full((1, 5), -math.log(p)).double() for p in (ppl_alone, ppl))
        return self_aligned_reward(alone, with_question, torch.arange(5)[None] < tokens).item()

    assert reward(4, 2) == pytest.approx(0.5) and 1 + 0.2 * reward(4, 2) == pytest.approx(1.1)
    assert reward(2, 8) == -1 and 0.2 * reward(2, 8) == -0.2
    assert reward(1, 1) == 0 and reward(3, 2, tokens=0) == 0


def test_an_answer_alone_has_the_log_probs_of_its_tokens_behind_the_first_token():
    tokens = torch.tensor([[5, 6, 7, 1, 2, 3, 0], [5, 1, 4, 2, 8, 8, 8], [5, 6, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[F, F, T, F, T, F], [T, T, T, F, F, F], [F, F, F, F, F, F]])
    rollout = Rollout(tokens=tokens, action_mask=mask, lengths=torch.tensor([6, 4, 2]), group=torch.arange(3),
                      sample_ids=torch.arange(3))
    before = tokens.clone()
    alone = answer_alone(rollout, 9)
    assert alone.tokens[0, :4].tolist() == [9, 1, 2, 3] and alone.lengths.tolist() == [4, 4, 2]
    policy = random_policy(10)
    got = put_back(rollout_logprobs(policy, alone, 2), mask)
    want = token_logprobs(policy, torch.tensor([[9, 1, 2, 3]]))[0].detach()
    assert_close(got[0], torch.tensor([0, 0, want[0], 0, want[2], 0]).double())
    assert_close(got[1, :3], token_logprobs(policy, torch.tensor([[9, 1, 4, 2]]))[0].detach())
    assert got[2].count_nonzero() == 0 and torch.equal(tokens, before)
