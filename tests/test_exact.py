"""The table without sampling: what is known of it, and that it is what sampling gives."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from minirl.config import UserError
from minirl.exact import (
    ANSWERS,
    Config,
    Recipe,
    as_rollout,
    compare,
    expected_update,
    groups_of,
    judged,
    main,
    make_world,
    update,
)

WORLD = make_world()
LOGPROBS = WORLD.logprobs(WORLD.theta)


def test_the_answers_are_all_there_are():
    assert LOGPROBS.sum(1).exp().sum().item() == pytest.approx(1, abs=1e-14)


def test_every_group_is_counted():
    groups = groups_of(LOGPROBS, 4)
    assert len(groups) == 210 and sum(p for _, p in groups) == pytest.approx(1, abs=1e-14)
    uniform = groups_of(torch.full((7, 1), -math.log(7)).double(), 4)
    assert sum(round(p * 7**4) for _, p in uniform) == 2401


def test_the_gradient_is_that_of_the_expected_reward():
    step = 1e-6 * torch.eye(9, dtype=torch.float64)
    value = lambda theta: (WORLD.logprobs(theta).sum(1).exp() @ WORLD.rewards).item()
    numeric = [(value(WORLD.theta + e) - value(WORLD.theta - e)) / 2e-6 for e in step]
    assert_close(WORLD.gradient(), torch.tensor(numeric, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", [0, 16])
def test_rloo_is_unbiased_and_a_mean_that_contains_the_reward_shrinks_it_by_g_minus_1_over_g(seed):
    world = make_world(seed)
    for size in (2, 4):
        assert compare(Recipe("rloo"), world, size).bias < 1e-10
        mean = compare(Recipe("rloo", baseline="mean"), world, size)
        assert mean.scale == pytest.approx((size - 1) / size, abs=1e-12) and mean.cosine == pytest.approx(1, abs=1e-12)


def test_what_leaves_the_direction_alone_and_what_does_not():
    reports = {name: compare(Recipe(name), WORLD) for name in ("rloo", "dr_grpo", "grpo", "opo", "deepswe")}
    assert reports["dr_grpo"].cosine == pytest.approx(1, abs=1e-12)  # 3/4 of the gradient, over 2 tokens
    assert reports["dr_grpo"].scale == pytest.approx(0.375, abs=1e-12)
    assert reports["grpo"].cosine == pytest.approx(0.970, abs=1e-3)  # std, and the mean of each row's tokens
    assert reports["opo"].cosine < 1 - 1e-4 and reports["deepswe"].cosine < 0.9


def test_clips_do_not_matter_on_policy_and_ratios_only_as_far_as_they_weigh_tokens():
    grpo = compare(Recipe("grpo"), WORLD)
    for name in ("r1", "gspo", "gspo_token", "gmpo", "sapo"):
        assert compare(Recipe(name), WORLD) == pytest.approx(grpo), name


def test_the_order_of_a_group_does_not_matter_and_sampled_updates_average_to_the_expected_one():
    recipe = Recipe("grpo")
    members = (0, 1, 1, 4)
    whole = update(as_rollout(members, WORLD, LOGPROBS), recipe)
    for order in itertools.permutations(range(4)):
        again = update(as_rollout(tuple(members[i] for i in order), WORLD, LOGPROBS), recipe)
        assert_close(again, whole[list(order)])
    slopes = torch.func.jacrev(WORLD.logprobs)(WORLD.theta)
    mean, variance = expected_update(recipe, WORLD)
    g = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(LOGPROBS.sum(1).exp(), 4 * 1000, replacement=True, generator=g).view(1000, 4)
    sampled = torch.stack([torch.einsum("rs,rsp->p", update(as_rollout(tuple(row.tolist()), WORLD, LOGPROBS), recipe),
                                        slopes[row]) for row in drawn])
    assert (sampled.mean(0) - mean).norm() < 3 * (variance / 1000) ** 0.5


def test_the_table_has_every_recipe(capsys):
    main(Config(group_size=2))
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("49 groups of 2") and [line.split()[0] for line in out[3:]] == judged()
    assert len(ANSWERS) == 7
    with pytest.raises(UserError, match="between 2 and 8"):
        Config(group_size=1)
    with pytest.raises(UserError, match="no such row"):
        Config(recipe="nobody")
