"""Advantages beyond one number a row: the papers' numbers, and what must hold for any."""

import math

import pytest
import torch
from torch.testing import assert_close

from minirl.advantages import group_advantages
from minirl.config import UserError
from minirl.credit import (
    amplify,
    grpo_s_rewards,
    gtpo_advantages,
    gtpo_rewards,
    listwise_advantages,
    min_form,
    pure_advantages,
    success_weight,
    suffix_mask,
    ucpo_advantages,
    vps_advantages,
)

T, F = True, False


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


# ---- UCPO ----

def test_ucpo_gives_rare_right_answers_more_and_all_together_the_same():
    rewards, group = torch.tensor([1.0, 1, 1, 0]).double(), torch.zeros(4).long()
    base = group_advantages(rewards, group, ddof=1)
    logp = torch.tensor([0.5, 0.3, 0.2, 0.9]).double().log() - 5  # q is their softmax: a constant does not matter
    assert base[:, 0].tolist() == [0.5, 0.5, 0.5, -1.5]
    got = ucpo_advantages(base, rewards > 0, logp, group)
    assert_close(got, column([0.458065, 0.496774, 0.545161, -1.5]), atol=1e-6, rtol=0)
    assert got[:3].sum().item() == pytest.approx(1.5)
    assert_close(got[:3, 0] / 1.5, column([0.305376, 0.331183, 0.363441])[:, 0], atol=1e-6, rtol=0)
    assert_close(ucpo_advantages(base, rewards > 0, logp, group, 0.0), base)


def test_ucpo_needs_two_right_answers_in_the_same_group():
    correct, group = torch.tensor([T, F, T, F, F, F]), torch.tensor([0, 0, 1, 1, 2, 2])
    base = column([1.0, -1, 1, -1, 0, 0])
    logp = torch.tensor([-1.0, -9, -3, -9, -1, -2]).double()
    assert torch.equal(ucpo_advantages(base, correct, logp, group), base)


def test_ucpo_gives_no_more_than_its_share_to_an_answer_of_no_probability():
    logp = torch.tensor([0.0, 0.0, -1000.0]).double()  # q is taken for 1e-6
    got = ucpo_advantages(column([1.0, 1, 1]), torch.tensor([T] * 3), logp, torch.zeros(3).long())[:, 0]
    rare = 0.2 * 3 / (1e6 + 4)
    assert got.tolist() == pytest.approx([0.8 + 2 * rare, 0.8 + 2 * rare, 0.8 + 1e6 * rare])


def test_ucpo_is_the_gradient_of_its_objective():
    """log Z - tau KL(u || q) over the right answers: the gradient has the weights (1 - tau) q + tau u."""
    logits = torch.tensor([0.3, -0.2, 1.0, 0.4], dtype=torch.float64, requires_grad=True)
    tau, right = 0.2, slice(0, 3)
    logp = logits.log_softmax(0)
    z = logp[right].logsumexp(0)
    q = (logp[right] - z).exp()
    objective = z - tau * (math.log(1 / 3) - q.log()).mean()
    grad, = torch.autograd.grad(objective, logits, retain_graph=True)
    weights = ((1 - tau) * q + tau / 3).detach()
    want, = torch.autograd.grad((weights * logp[right]).sum(), logits)
    assert_close(grad, want, atol=1e-8, rtol=0)
    # Right answers are drawn with probability q: the weight there is n w_i = (1 - tau) + tau / (n q).
    got = ucpo_advantages(column([1.0, 1, 1]), torch.tensor([T] * 3), q.detach().log(), torch.zeros(3).long(), tau)
    assert_close(got[:, 0], (1 - tau) + tau * 3 / q.detach() / (1 / q.detach()).sum())


# ---- entropy ----

def gtpo(correct, entropy, mask, group=None, function=gtpo_advantages):
    group = [0] * len(correct) if group is None else group
    return function(torch.tensor(correct), torch.tensor(entropy).double(), torch.tensor(mask), torch.tensor(group))


def test_gtpo_pays_right_tokens_more_and_wrong_ones_less_where_entropy_is_high():
    right = gtpo([T, T], [[1.0, 3], [3, 99]], [[T, T], [T, F]], function=gtpo_rewards)
    assert_close(right, torch.tensor([[1.05, 1.1], [1.15, 0]]).double())
    wrong = gtpo([F, F], [[0.5], [2.0]], [[T], [T]], function=gtpo_rewards)
    assert_close(wrong, torch.tensor([[-1.16], [-1.04]]).double())
    both = gtpo([T, F, T, F], [[1.0, 3], [0.5, 7], [3, 99], [2, 7]], [[T, T], [T, F], [T, F], [T, F]],
                function=gtpo_rewards)
    assert_close(both[[0, 2]], right)
    assert_close(both[[1, 3], :1], wrong)


def test_gtpo_blames_the_sure_tokens_of_right_answers():
    """Right answers without a wrong one beside them: paid 1 or more for each token, and yet on average nothing."""
    entropy = [[0.1, 0.2, 2.0], [1.5, 1.0, 0.3]]
    got = gtpo([T, T], entropy, [[T] * 3] * 2)
    assert got.mean().abs() < 1e-12 and got[0, 0] < 0 < got[0, 2] and got[1, 2] < 0 < got[1, 0]


def test_gtpo_normalises_right_and_wrong_tokens_apart():
    right = gtpo([T, T], [[1.0, 3], [3, 99]], [[T, T], [T, F]])
    assert_close(right, torch.tensor([[-1.224745, 0], [1.224745, 0]]).double(), atol=1e-6, rtol=0)  # 1.05 1.1 | 1.15
    wrong = gtpo([F, F], [[0.5], [2.0]], [[T], [T]])
    assert_close(wrong, torch.tensor([[-1.0], [1.0]]).double())  # -1.16, -1.04: the sure one is blamed more
    both = gtpo([T, F, T, F], [[1.0, 3], [0.5, 7], [3, 99], [2, 7]], [[T, T], [T, F], [T, F], [T, F]])
    assert_close(both[[0, 2]], right)
    assert_close(both[[1, 3], :1], wrong)


def test_gtpo_counts_an_answers_own_tokens_and_its_own_group():
    base = gtpo([T, T], [[1.0, 3], [3, 99]], [[T, T], [T, F]])
    later = gtpo([T, T], [[7.0, 1, 3], [3, 7, 99]], [[F, T, T], [T, F, F]])  # a longer prompt in front of one
    assert later[0, 1:].tolist() == base[0].tolist() and later[1, 0] == base[1, 0]
    two = gtpo([T, T, T, T], [[1.0, 3], [3, 99], [5, 5], [5, 5]], [[T, T], [T, F], [T, F], [T, F]], [4, 4, 1, 1])
    assert_close(two[:2], base)
    assert two[2:].count_nonzero() == 0  # all alike


def test_grpo_s_adds_the_share_of_entropy():
    entropy, mask = torch.tensor([[1.0, 3], [6, 99]]).double(), torch.tensor([[T, T], [T, F]])
    got = grpo_s_rewards(torch.tensor([1.0, 0]).double(), entropy, mask, torch.zeros(2).long(), 0.1)
    assert got.tolist() == pytest.approx([1 + 0.1 * 2 * 2 / 8, 0.1 * 2 * 6 / 8])


# ---- retries ----

def test_r3l_amplifies_what_is_better_than_the_mean_but_not_a_full_reward():
    rewards = torch.tensor([1, 0.5, 0.2, -0.1]).double()
    base = group_advantages(rewards, torch.zeros(4).long(), "none")
    assert_close(amplify(base, rewards), column([1, 0.3, -0.2, -0.5]))


def test_of_a_retry_only_the_suffix_is_its_own():
    mask = torch.tensor([[F, T, T, F, T], [T, T, F, F, F]])
    assert suffix_mask(mask, torch.tensor([1, 0])).tolist() == [[F, F, T, F, T], [T, T, F, F, F]]


def test_srpo_normalises_fresh_answers_and_suffixes_apart_and_trains_suffixes_by_reinforce():
    from minirl.losses import aggregate
    from minirl.policy_loss import policy_loss
    rewards, group = torch.tensor([1.0, 0, 0, 0, 1, 0, 1, 0]), torch.arange(2).repeat_interleave(4)
    got = group_advantages(rewards, group)[:, 0].tolist()
    assert got == pytest.approx([1.732051, -0.577350, -0.577350, -0.577350, 1, -1, 1, -1], abs=1e-6)
    logp = torch.tensor([[-1.0, -2, -3], [-1, -1, -1]])
    mask = suffix_mask(torch.ones(2, 3, dtype=torch.bool), torch.tensor([1, 0]))
    loss = policy_loss(logp, logp, torch.tensor([[1.0], [-1.0]]), mask, surrogate="reinforce").per_token
    assert aggregate(loss, mask, "sequence", 2).item() == pytest.approx(0.75)


# ---- steps ----

def test_min_form_puts_the_credit_on_the_worst_step():
    rewards, on = torch.tensor([[0.9, 0.5, -0.8]]).double(), torch.ones(1, 3, dtype=torch.bool)
    sharp = min_form(rewards, on)
    assert sharp[0].tolist() == pytest.approx([0, 0.000001, -0.799998], abs=1e-6)
    assert sharp.sum().item() == pytest.approx(-0.799997, abs=1e-6)
    soft = min_form(rewards, on, 1.0)
    assert (soft / rewards)[0].tolist() == pytest.approx([0.125537, 0.187279, 0.687184], abs=1e-6)
    assert soft[0].tolist() == pytest.approx([0.112983, 0.093640, -0.549747], abs=1e-6)
    assert soft.sum().item() == pytest.approx(-0.343124, abs=1e-6)
    padded = min_form(torch.tensor([[0.9, 0.5, -0.8, -9]]).double(), torch.tensor([[T, T, T, F]]))
    assert_close(padded[:, :3], sharp)
    assert padded[0, 3] == 0


def test_pure_compares_with_the_others_credit_for_as_many_tokens():
    credit = torch.tensor([[0.2, 0.4], [-0.1, 0.0], [0.5, 0.0]]).double()
    tokens = torch.tensor([[2, 4], [10, 0], [5, 5]])
    got = pure_advantages(credit, tokens, torch.zeros(3).long())
    rate = (-0.1 + 0.5) / 20  # what the others get for a token
    assert got[0].tolist() == pytest.approx([0.6 - 6 * rate, 0.4 - 4 * rate])
    assert got[1, 1] == 0


def test_a_segment_is_credited_with_the_belief_it_adds():
    belief = torch.tensor([[0.1, 0.3, 0.2, 0.8]]).double()
    got = vps_advantages(column([1.0]), belief, torch.tensor([[0, 1, 2]]), 0.5)
    assert got[0].tolist() == pytest.approx([1.1, 0.95, 1.3])
    assert (got - 1).sum().item() == pytest.approx(0.5 * 0.7)
    with pytest.raises(UserError, match="segment 3"):
        vps_advantages(column([1.0]), belief, torch.tensor([[3]]))


@pytest.mark.parametrize("function", [ucpo_advantages, gtpo_advantages, amplify])
def test_no_input_is_changed(function):
    x = torch.tensor([[1.0, 2], [3, 4]])
    arguments = {ucpo_advantages: (x[:, :1], torch.tensor([T, T]), x[:, 1], torch.zeros(2).long()),
                 gtpo_advantages: (torch.tensor([T, F]), x, x > 0, torch.zeros(2).long()),
                 amplify: (x[:, :1], x[:, 1])}[function]
    before = [a.clone() for a in arguments]
    function(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


# ---- a group as a list ----

def listwise(kind, rewards, group=None, logprobs=None, tau=1.0):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    group = torch.zeros(len(rewards)).long() if group is None else torch.tensor(group)
    logprobs = torch.zeros(len(rewards)).double() if logprobs is None else logprobs
    return listwise_advantages(kind, rewards, rewards >= 1, logprobs, group, tau)[:, 0]


def test_pairs_ask_only_who_is_better():
    assert listwise("pairs", [1.0, 0, 0, 0]).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert listwise("pairs", [0.9, 0.1, 5]).tolist() == [0, -1, 1] == listwise("pairs", [3.0, 2, 4]).tolist()
    rewards, group = torch.tensor([1.0, 0, 0, 1, 0, 1]).double(), torch.tensor([4, 4, 4, 4, 1, 1])
    rloo = group_advantages(rewards, group, "none", baseline="leave-one-out")[:, 0]
    assert_close(listwise("pairs", rewards.tolist(), group.tolist()), rloo)


def test_a_target_on_the_simplex_draws_towards_good_answers_and_asks_for_no_change_where_all_are_equal():
    e = math.e
    assert listwise("simplex", [1.0, 0, 0, 0]).tolist() == pytest.approx([4 * e / (e + 3) - 1] + [4 / (e + 3) - 1] * 3)
    assert listwise("simplex", [0.3, 0.3], tau=0.1).tolist() == [0, 0]
    apart = listwise("simplex", [1.0, 0, 1, 0], [0, 0, 1, 1], tau=0.5)
    assert apart.tolist() == pytest.approx(2 * listwise("simplex", [1.0, 0], tau=0.5).tolist())
    assert listwise("simplex", [100.0, 0, 0], tau=0.1).tolist() == pytest.approx([2, -1, -1])


def test_the_simplex_advantage_is_the_first_step_of_the_projection():
    """Minus the gradient of KL(w || softmax of the log-ratios), times G, where all log-ratios are 0."""
    ratios = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 0, 0.4]).double().softmax(0)
    kl = (w * (w.log() - ratios.log_softmax(0))).sum()
    assert_close(listwise("simplex", [1.0, 0, 0.4]), -3 * torch.autograd.grad(kl, ratios)[0])


def test_the_contrast_is_minus_the_derivative_of_infonce():
    scores = torch.tensor([-0.5, -1.5, -0.2, -2.0, -0.4], dtype=torch.float64, requires_grad=True)
    right, tau = [0, 1], 0.5
    losses = [-(scores[i] / tau - torch.stack([scores[i], *scores[2:]]).div(tau).logsumexp(0)) for i in right]
    want = -torch.autograd.grad(sum(losses) / 2, scores)[0]
    got = listwise("contrast", [1.0, 1, 0, 0, 0.5], logprobs=scores.detach(), tau=tau)
    assert_close(got, want)
    assert got.sum().abs() < 1e-12 and got[1] > got[0], "the right answer that is least apart gains most"
    both = listwise("contrast", [1.0, 1, 0, 0, 0.5] * 2, [7] * 5 + [3] * 5, scores.detach().repeat(2), tau)
    assert_close(both, got.repeat(2))
    for rewards in ([1.0, 1, 1], [0.0, 0, 0]):
        assert listwise("contrast", rewards, logprobs=scores.detach()[:3]).tolist() == [0, 0, 0]


def test_rare_success_weighs_more_and_none_at_all_cannot():
    rewards, group = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0]).double(), torch.tensor([0] * 4 + [1] * 4 + [2] * 2)
    assert success_weight(rewards, group, 0.5)[:, 0].tolist() == pytest.approx([2] * 4 + [2**0.5] * 4 + [1] * 2)
    assert success_weight(rewards, group, 0.0)[:, 0].tolist() == [1] * 10
    assert success_weight(rewards, group, 1.0)[0, 0] * (1 - 0.25) == 3  # (r - mean) / mean: the likelihood's
