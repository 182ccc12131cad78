"""Rounds of sampling: which groups are kept, that it ends, and that all ranks keep the same."""

import pytest
import torch
from ranks import run_ranks
from stubs import random_policy

from minirl.advantages import constant_groups
from minirl.env.base import Example, SingleTurn
from minirl.env.rounds import choose_groups, collect_step, disturb
from minirl.parallel import close_mesh, init_mesh
from minirl.tokenizer import ByteTokenizer


def test_groups_with_all_right_or_all_wrong_answers_make_room():
    rewards, group = torch.tensor([1.0, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    ids, complete = choose_groups(rewards, group, 1)
    assert (ids.tolist(), complete) == ([1], True)
    ids, complete = choose_groups(rewards, group, 2)
    assert (ids.tolist(), complete) == ([0, 1], False)  # a place that stays empty is filled


def test_a_group_is_kept_or_dropped_whole_and_never_by_rows():
    rewards, group = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1]), torch.arange(3).repeat_interleave(4)
    assert choose_groups(rewards, group, 2)[0].tolist() == [0, 1]


class Coins:
    """A task that pays for some answers: those whose first byte is below `bound`."""

    name, stop, max_new_tokens = "coins", (), 2

    def __init__(self, bound: int):
        self.bound, self.asked = bound, []

    def sample(self, count, start=0, split="train"):
        self.asked.append((start, count))
        return [Example(f"{i}=", "") for i in range(start, start + count)]

    def size(self, split):
        return None

    def reset(self, example):
        return SingleTurn(example.prompt, lambda action: float(bool(action) and ord(action[0]) < self.bound))


def draw(bound, rounds, dp=1, prompts=4, number=3):
    mesh = init_mesh("cpu", dp=dp)
    env, tokenizer = Coins(bound), ByteTokenizer()
    policy = random_policy(tokenizer.vocab_size)
    rollout = collect_step(policy, tokenizer, env, number, prompts, 4, rounds, mesh, seed=0, max_new_tokens=2)
    close_mesh()
    return env.asked, rollout.group.tolist(), rollout.rewards.tolist(), rollout.tokens.tolist()


def test_without_rounds_every_group_is_kept():
    asked, group, *_ = draw(0, 0)
    assert asked == [(8, 4)] and group == [i for i in range(8, 12) for _ in range(4)]


@pytest.mark.parametrize("bound", [0, 10**6])
def test_when_no_group_ever_teaches_it_ends_and_gives_a_whole_step(bound):
    asked, group, rewards, _ = draw(bound, 3)
    assert len(asked) == 4 and len(set(rewards)) == 1
    assert group == [i for i in range(32, 36) for _ in range(4)]


def test_kept_groups_teach_and_no_two_steps_share_a_problem():
    asked, group, rewards, _ = draw(20, 20)
    assert 1 < len(asked) < 21, "the test needs a bound that some groups meet"
    assert not constant_groups(torch.tensor(rewards), torch.tensor(group)).any() and len(group) == 16
    assert asked[0][0] == 2 * 21 * 4 and asked[1][0] == asked[0][0] + 4
    assert draw(20, 20, number=4)[0][0][0] == 3 * 21 * 4


@pytest.mark.dist
@pytest.mark.parametrize(("bound", "rounds"), [(20, 20), (20, 1), (0, 2)])
def test_ranks_share_the_groups_that_one_process_keeps(bound, rounds):
    _, group, rewards, tokens = draw(bound, rounds)
    parts = run_ranks(draw, 2, bound, rounds, 2)
    assert [x for part in parts for x in part[1]] == group and [x for part in parts for x in part[2]] == rewards
    assert [len(part[1]) for part in parts] == [8, 8]
    width = len(tokens[0])
    both = [row + [0] * (width - len(row)) for part in parts for row in part[3]]
    assert [row[:3] for row in both] == [row[:3] for row in tokens]


def test_the_noise_of_a_sampler_is_that_of_the_token():
    mesh, tokenizer = init_mesh("cpu"), ByteTokenizer()
    env = Coins(20)
    rollout = collect_step(random_policy(tokenizer.vocab_size), tokenizer, env, 1, 64, 8, 0, mesh, max_new_tokens=2)
    noisy = disturb(rollout, 0.1, 0)
    difference = (noisy.old_logprobs - rollout.old_logprobs)[rollout.action_mask]
    assert difference.std().item() == pytest.approx(0.1, rel=0.1) and abs(difference.mean()) < 0.01
    assert torch.equal(noisy.old_logprobs[~rollout.action_mask], rollout.old_logprobs[~rollout.action_mask])
    some = torch.tensor([5, 77, 300])
    assert torch.allclose(disturb(rollout.rows(some), 0.1, 0).old_logprobs, noisy.rows(some).old_logprobs)
