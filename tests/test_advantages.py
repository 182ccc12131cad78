import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from minirl.advantages import constant_groups, group_advantages
from minirl.config import UserError


def advantages(rewards, group=None, **options):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    group = torch.zeros(len(rewards), dtype=torch.int64) if group is None else torch.tensor(group)
    return group_advantages(rewards, group, **options)[:, 0].tolist()


def test_the_four_rewards_of_the_textbook():
    assert advantages([1, 0, 0, 1]) == [1, -1, -1, 1]  # exactly
    assert advantages([1, 0, 0, 1], scale="none") == [0.5, -0.5, -0.5, 0.5]
    verl = advantages([1, 0, 0, 1], ddof=1, eps=1e-6)
    assert verl == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert advantages([1, 0, 0, 0], ddof=1, eps=1e-4) == pytest.approx([1.4997] + [-0.4999] * 3, abs=1e-4)
    assert advantages([1, 0, 0, 0], ddof=0, eps=1e-4) == pytest.approx([1.7317] + [-0.5772] * 3, abs=1e-4)


@pytest.mark.parametrize("right", [1, 2, 5, 7])
def test_binary_rewards_give_the_odds_of_the_success_rate(right):
    p = right / 8
    got = advantages([1.0] * right + [0.0] * (8 - right))
    assert got[0] == pytest.approx(math.sqrt((1 - p) / p))
    assert got[-1] == pytest.approx(-math.sqrt(p / (1 - p)))


def test_one_right_answer_in_four_by_hand():
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.732051] + [-0.577350] * 3, abs=1e-6)
    assert advantages([1, 0, 0, 0], scale="none") == [0.75, -0.25, -0.25, -0.25]  # 1 - p, -p


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, -0.1, 0.0, 1e8])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_give_exactly_zero_though_their_float32_mean_is_another_number(reward, scale):
    rewards = torch.full((8,), reward, dtype=torch.float32)
    got = group_advantages(rewards, torch.zeros(8, dtype=torch.int64), scale=scale)
    assert got.count_nonzero() == 0


def test_equal_rewards_added_up_in_another_order_are_equal():
    assert advantages([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]) == [0, 0]
    assert advantages([1e6, 1e6 + 1]) == [-1, 1]


def test_a_group_is_compared_with_itself_and_never_with_the_batch():
    assert advantages([1, 1, 1, 0, 0, 0], [4, 4, 4, 9, 9, 9]) == [0] * 6  # an easy prompt is no merit
    want = advantages([1, 0, 0, 0.5, 0.25, 1], [0, 0, 0, 1, 1, 1])
    assert advantages([1, 0, 0, 10.5, 10.25, 11], [0, 0, 0, 1, 1, 1]) == pytest.approx(want)


def test_rows_may_come_in_any_order_and_groups_in_any_size():
    g = torch.Generator().manual_seed(0)
    rewards, order = torch.rand(9, generator=g), torch.randperm(9, generator=g)
    group = torch.tensor([7] * 4 + [2] * 5)
    want = group_advantages(rewards, group)
    assert_close(group_advantages(rewards[order], group[order]), want[order])
    for members in (slice(0, 4), slice(4, 9)):
        assert want[members].mean().item() == pytest.approx(0, abs=1e-6)
        assert want[members].std(correction=0).item() == pytest.approx(1, abs=1e-6)
        assert_close(group_advantages(rewards[members], group[members]), want[members])


def test_the_result_is_a_column_without_gradient_in_the_type_of_the_rewards():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    got = group_advantages(rewards, torch.zeros(2, dtype=torch.int64))
    assert got.shape == (2, 1) and not got.requires_grad and got.dtype == torch.float32
    right = torch.tensor([True, False])
    assert group_advantages(right, torch.zeros(2, dtype=torch.int64)).tolist() == [[1], [-1]]


def test_what_cannot_be_compared_is_refused_in_one_line():
    cases = [("prompt 5 has one sample", "group_size of 2", ([1, 0, 1], [3, 3, 5])),
             ("row 2 \\(prompt 4\\) is nan", "finite", ([1, 0, math.nan, 1], [3, 3, 4, 4])),
             ("row 0 \\(prompt 3\\) is inf", "finite", ([math.inf, 0], [3, 3])),
             ("must both be", "\\(3,\\) and group \\(2,\\)", ([1, 0, 1], [3, 3]))]
    for what, remedy, arguments in cases:
        with pytest.raises(UserError, match=what) as error:
            advantages(*arguments)
        assert error.match(remedy) and "\n" not in str(error.value)
    for options in ({"scale": "median"}, {"ddof": 2}, {"baseline": "best"}, {"baseline": "length"}):
        with pytest.raises(UserError, match=r"use|pass"):
            advantages([1, 0], **options)


def test_a_group_has_something_to_teach_unless_all_its_rewards_are_equal():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1])
    group = torch.tensor([8] * 4 + [3] * 4 + [5] * 4)
    assert constant_groups(rewards, group).tolist() == [False, True, False]  # prompts 3, 5, 8


def test_trl_gives_the_same_with_its_own_std_and_eps(shared):
    golden = load_file(shared / "golden" / "advantages.safetensors")
    case = json.loads((shared / "golden" / "advantages.json").read_text())["cases"][0]
    rewards = golden["rewards"] @ torch.tensor(case["weights"], dtype=torch.float64)
    group = torch.arange(4).repeat_interleave(case["num_generations"])
    theirs = golden["adv.rewards.sum_then_normalize.group"][:, None]
    assert_close(group_advantages(rewards, group, ddof=1, eps=1e-4), theirs)
    assert_close(group_advantages(rewards, group, scale="none"),
                 golden["adv.rewards.sum_then_normalize.none"][:, None])
    # Our default is the population's std without eps: the same direction, longer by sqrt(4 / 3) and a little.
    assert_close(group_advantages(rewards, group), theirs * math.sqrt(4 / 3), rtol=1e-3, atol=0)


def test_trl_lets_nan_rewards_pass_and_we_do_not(shared):
    rewards = load_file(shared / "golden" / "advantages.safetensors")["rewards_nan"].sum(1)
    with pytest.raises(UserError, match="rewards must be finite"):
        group_advantages(rewards, torch.arange(4).repeat_interleave(4))
