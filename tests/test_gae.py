"""Token rewards, GAE, whitening, the value loss and the KL controllers: tables worked by hand, the double sum, TRL."""

import json
import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, tensor

from minirl import advantages, kl_control
from minirl.config import UserError
from minirl.gae import explained_variance, gae, length_adaptive_lambda, reward_to_go, token_rewards, whiten
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, value_loss
from minirl.parallel import init_mesh

GOLDEN = Path(__file__).resolve().parents[2] / "shared/golden"
T = True
F = False


def assert_near(a: Tensor, b, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


def some_rows(B: int = 5, S: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, a mask with holes and a padded end, and what comes after the cut."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(B, S, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(B, S, generator=g) < 0.6
    mask[torch.arange(S) >= torch.randint(3, S + 1, (B, 1), generator=g)] = False
    return rewards, values, mask, torch.randn(B, generator=g, dtype=torch.float64)


def double_sum(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_{t + k}, written down as it stands, row by row over its action tokens."""
    result = torch.zeros_like(values)
    for row in range(len(mask)):
        steps = mask[row].nonzero()[:, 0].tolist()
        V = [float(values[row, s]) for s in steps] + [float(bootstrap[row])]
        delta = [float(rewards[row, s]) + gamma * V[i + 1] - V[i] for i, s in enumerate(steps)]
        for i, s in enumerate(steps):
            result[row, s] = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(steps)))
    return result


# ---- rewards on tokens ----

def test_the_score_lands_on_the_last_action_token_and_never_on_padding():
    mask = tensor([[T, T, T, F, F], [F, T, T, T, T], [F, F, F, F, F]])
    assert_near(token_rewards(tensor([5.0, 2.0, 7.0]), mask), [[0, 0, 5, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0]])


def test_after_a_tool_the_score_is_on_the_last_thing_the_policy_wrote_and_kl_on_all_of_it():
    mask, kl = tensor([[T, T, F, F, T, T, F]]), tensor([[0.2, 0.4, 9.0, 9.0, -0.1, 0.3, math.nan]])
    assert_near(token_rewards(tensor([1.0]), mask, kl, 0.1), [[-0.02, -0.04, 0, 0, 0.01, 0.97, 0]])


def test_kl_is_charged_once():
    assert_near(token_rewards(tensor([1.0]), tensor([[T, T]]), tensor([[0.2, 0.4]]), 0.1), [[-0.02, 0.96]])


# ---- GAE ----

def test_gae_of_an_ended_row_by_hand():
    mask, values = tensor([[T, T, T]]), torch.full((1, 3), 0.5)
    advantage, returns = gae(tensor([[0.0, 0, 1]]), values, mask, 1.0, 0.95)
    assert_near(advantage, [[0.45125, 0.475, 0.5]])
    assert_near(returns, [[0.95125, 0.975, 1.0]])


def test_a_cut_row_goes_on_from_the_value_of_its_last_state_and_as_an_end_it_is_worth_nothing():
    mask, values, rewards = tensor([[T, T, T]]), torch.full((1, 3), 0.5), torch.zeros(1, 3)
    assert_near(gae(rewards, values, mask, 1.0, 0.95, tensor([0.8]))[0], [[0.27075, 0.285, 0.3]])
    assert_near(gae(rewards, values, mask, 1.0, 0.95)[0][:, -1], [-0.5])


def test_what_stands_in_padding_never_leaks():
    mask = tensor([[T, T, T, F, F]])
    values, rewards = tensor([[0.5, 0.5, 0.5, 9.9, math.nan]]), tensor([[0, 0, 1.0, -3, math.inf]])
    advantage, returns = gae(rewards, values, mask, 1.0, 0.95)
    assert_near(advantage, [[0.45125, 0.475, 0.5, 0, 0]])
    assert advantage.count_nonzero() == mask.sum(), "one an action token, and none behind the last"
    assert_near(returns, [[0.95125, 0.975, 1.0, 0, 0]])


def test_tool_output_is_skipped_and_not_walked_over():
    mask = tensor([[T, T, F, F, F, T]])
    values, rewards = tensor([[0.5, 0.5, 7, 8, 9, 0.5]]), tensor([[0, 0, 3.0, 3, 3, 1]])
    advantage, returns = gae(rewards, values, mask, 0.9, 0.95)
    plain, plain_returns = gae(tensor([[0.0, 0, 1]]), torch.full((1, 3), 0.5), tensor([[T, T, T]]), 0.9, 0.95)
    assert_near(advantage[mask], plain[0])
    assert_near(returns[mask], plain_returns[0])
    assert not advantage[~mask].any() and not returns[~mask].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0), (0.0, 0.7)])
def test_gae_is_the_double_sum(gamma, lam):
    rewards, values, mask, bootstrap = some_rows()
    found, returns = gae(rewards, values, mask, gamma, lam, bootstrap)
    assert_near(found, double_sum(rewards, values, mask, gamma, lam, bootstrap), 1e-12)
    assert_near(returns, torch.where(mask, found + values, 0.0), 1e-12)


def test_lambda_0_is_the_td_error_and_lambda_1_what_was_earned_less_the_value():
    rewards, values, mask, bootstrap = some_rows(seed=1)
    for row in range(len(mask)):
        steps = mask[row].nonzero()[:, 0]
        after = torch.cat((values[row, steps[1:]], bootstrap[row : row + 1]))[: len(steps)]
        td = gae(rewards, values, mask, 0.9, 0.0, bootstrap)[0][row, steps]
        assert_near(td, rewards[row, steps] + 0.9 * after - values[row, steps], 1e-12)
        earned, total = [], float(bootstrap[row])
        for s in steps.flip(0).tolist():
            total = float(rewards[row, s]) + 0.9 * total
            earned.insert(0, total)
        monte_carlo, returns = gae(rewards, values, mask, 0.9, 1.0, bootstrap)
        assert_near(returns[row, steps], earned, 1e-12)
        assert_near(monte_carlo[row, steps], tensor(earned, dtype=torch.float64) - values[row, steps], 1e-12)


def test_padding_the_order_of_rows_and_their_company_change_nothing():
    rewards, values, mask, bootstrap = some_rows()
    found = gae(rewards, values, mask, 0.9, 0.8, bootstrap)
    order = torch.tensor([3, 0, 4, 1, 2])
    pad = lambda x: torch.nn.functional.pad(x, (0, 3), value=5)
    mixed = gae(pad(rewards)[order], pad(values)[order], torch.nn.functional.pad(mask, (0, 3))[order], 0.9, 0.8,
                bootstrap[order])
    for a, b in zip(found, mixed, strict=True):
        assert torch.equal(a[order], b[:, :-3]) and not b[:, -3:].any()
    alone = gae(rewards[2:3], values[2:3], mask[2:3], 0.9, 0.8, bootstrap[2:3])
    assert torch.equal(alone[0], found[0][2:3])


def test_each_row_may_have_its_own_lambda():
    rewards, values, mask, bootstrap = some_rows()
    lams = tensor([0.0, 0.3, 0.5, 0.9, 1.0], dtype=torch.float64)
    found = gae(rewards, values, mask, 1.0, lams, bootstrap)[0]
    for row, lam in enumerate(lams.tolist()):
        assert_near(found[row], gae(rewards, values, mask, 1.0, lam, bootstrap)[0][row], 1e-12)


def test_inputs_stay_as_they_are_and_no_gradient_leaves():
    rewards, values, mask, bootstrap = some_rows()
    copies = [x.clone() for x in (rewards, values, mask, bootstrap)]
    found = gae(rewards.requires_grad_(), values.requires_grad_(), mask, 0.9, 0.8, bootstrap)
    whiten(values, mask)
    assert not any(x.requires_grad for x in found)
    assert all(torch.equal(a, b) for a, b in zip((rewards, values, mask, bootstrap), copies, strict=True))
    assert advantages.gae is gae


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (-0.1, 0.9), (1.0, 1.1), (1.0, -1.0)])
def test_a_discount_outside_0_to_1_is_refused(gamma, lam):
    rewards, values, mask, _ = some_rows()
    with pytest.raises(UserError, match="between 0 and 1"):
        gae(rewards, values, mask, gamma, lam)


def test_reinforce_weighs_a_token_by_what_was_earned_from_it_on():
    assert_near(reward_to_go(tensor([[-0.1, 5.0, -0.2, 1.0]]), tensor([[T, F, T, T]]), 0.5), [[0.05, 0, 0.3, 1.0]])


def test_vapo_two_lambdas_by_hand():
    """PAPERS.md: rewards [0, 0, 1], V [.5, .6, .7]: targets with lambda 1 are 1, advantages with lambda 1/2 as here."""
    rewards, values, mask = tensor([[0.0, 0, 1]]), tensor([[0.5, 0.6, 0.7]]), tensor([[T, T, T]])
    assert_near(gae(rewards, values, mask, 1.0, 1.0)[1], [[1.0, 1, 1]])
    assert_near(gae(rewards, values, mask, 1.0, 0.5)[0], [[0.225, 0.25, 0.3]])


def test_length_adaptive_lambda_by_hand():
    assert_near(length_adaptive_lambda(tensor([1000, 100, 20, 10, 0]), 0.05), [0.98, 0.8, 0, 0, 0])


# ---- whitening, explained variance ----

@pytest.mark.parametrize(("ddof", "wanted"), [(1, [-1, 0, 1, 0]), (0, [-1.224745, 0, 1.224745, 0])])
def test_whitening_leaves_padding_out(ddof, wanted):
    x, mask = tensor([[1.0, 2, 3, 99]]), tensor([[T, T, T, F]])
    assert_near(whiten(x, mask, ddof=ddof), [wanted], 1e-5)
    kept = whiten(x, mask, shift_mean=False, ddof=ddof)
    assert_near(kept[mask], tensor(wanted)[:3] + 2, 1e-5)
    assert kept[0, 3] == 0


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_single_value_and_equal_ones_become_0(ddof):
    assert whiten(tensor([[3.0, math.nan]]), tensor([[T, F]]), ddof=ddof).tolist() == [[0, 0]]
    assert not whiten(torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool), ddof=ddof).any()
    assert not whiten(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), ddof=ddof).any()


def test_far_from_0_the_spread_survives_float32():
    x, mask = tensor([[1.0, 2, 3, 4]]), torch.ones(1, 4, dtype=torch.bool)
    assert_near(whiten(1e4 + x, mask), whiten(x, mask), 1e-4)


def test_explained_variance_by_hand():
    mask = tensor([[T, T, T, F]])
    returns = tensor([[0.0, 1, 2, 50]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 7, returns, mask) == pytest.approx(1), "a constant error has no variance"
    assert explained_variance(torch.ones(1, 4), returns, mask) == 0
    assert explained_variance(tensor([[0.0, 1, 1, 0]]), returns, mask) == pytest.approx(1 - (2 / 9) / (2 / 3))
    assert math.isnan(explained_variance(returns, torch.ones(1, 4), mask))


def on_a_rank() -> tuple[Tensor, float]:
    mesh = init_mesh("cpu")
    rows = mesh.share(4)
    rewards, values, mask, _ = some_rows(4)
    part = slice(rows.start, rows.stop)
    return whiten(rewards[part], mask[part], mesh), explained_variance(values[part], rewards[part], mask[part], mesh)


@pytest.mark.dist
def test_statistics_are_those_of_all_replicas():
    rewards, values, mask, _ = some_rows(4)
    found = run_ranks(on_a_rank, 2)
    assert_near(torch.cat([x for x, _ in found]), whiten(rewards, mask), 1e-12)
    assert [v for _, v in found] == pytest.approx([explained_variance(values, rewards, mask)] * 2)


# ---- value loss ----

def test_the_value_loss_takes_the_worse_of_clipped_and_unclipped():
    for value, loss, slope in ((1.0, 1.62, 0.0), (0.1, 0.5 * 3.61, -1.9), (-1.0, 4.5, -3.0)):
        v = tensor([[value]], requires_grad=True)
        found = value_loss(v, tensor([[0.0]]), tensor([[2.0]]), 0.2)
        found.sum().backward()
        assert_near(found.detach(), [[loss]])
        assert_near(v.grad, [[slope]])
    assert_near(value_loss(tensor([[1.0]]), tensor([[0.0]]), tensor([[2.0]])), [[0.5]])


def test_the_gradient_of_the_value_loss_is_that_of_its_values():
    g = torch.Generator().manual_seed(3)
    values, old, returns = (torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(3))
    for clip in (0.0, 0.3):
        assert torch.autograd.gradcheck(value_loss, (values.clone().requires_grad_(), old, returns, clip))
    value_loss(values.requires_grad_(), old.requires_grad_(), returns.requires_grad_(), 0.3).sum().backward()
    assert old.grad is None and returns.grad is None


# ---- KL controllers ----

@pytest.mark.parametrize(("kl", "wanted"), [(6.6, 0.101), (6.0, 0.1), (5.4, 0.099), (60.0, 0.102), (0.0, 0.098)])
def test_the_proportional_controller_by_hand(kl, wanted):
    assert kl_control.proportional(0.1, kl, 6.0) == pytest.approx(wanted)
    assert kl_control.next_kl_coef("proportional", 0.1, kl, 6.0) == pytest.approx(wanted)


@pytest.mark.parametrize(("kl", "wanted"), [(9.1, 0.2), (8.9, 0.1), (6.0, 0.1), (3.1, 0.1), (2.9, 0.05)])
def test_the_threshold_controller_by_hand(kl, wanted):
    assert kl_control.threshold(0.1, kl, 6.0) == pytest.approx(wanted)
    assert kl_control.next_kl_coef("threshold", 0.1, kl, 6.0) == pytest.approx(wanted)
    assert kl_control.next_kl_coef("fixed", 0.1, kl, 6.0) == 0.1


def test_an_unknown_controller_is_refused():
    with pytest.raises(UserError, match="controller 'pid' does not exist"):
        kl_control.next_kl_coef("pid", 0.1, 1.0, 1.0)


# ---- TRL 0.29.1 ----

CASES = json.loads((GOLDEN / "ppo.json").read_text())["cases"] if GOLDEN.is_dir() else []


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_losses_and_gradients_are_those_of_trl(case):
    """To 1e-6, in TRL's convention: its critic has a state more a row, the one **after** the last token, and the score
    lies there. Our mask of that width gives the same numbers; with our own the score is on the last token itself."""
    name, data = case["name"], {k: v.double() for k, v in load_file(GOLDEN / "ppo.safetensors").items()}
    old, new, ref, values = (data[f"in.{key}"] for key in ("logprobs", "new_logprobs", "ref_logprobs", "values"))
    length, column = data["in.sequence_lengths"].long()[:, None], torch.arange(old.shape[1])
    mask, longer = column <= length, column <= length + 1
    values = torch.where(longer, values, 0.0)
    kl = torch.where(mask, kl_estimate(old, ref, case["kl"]), 0.0)
    rewards = token_rewards(data["in.scores"], longer, kl, 0.05)
    assert_near(rewards, data[f"rewards.{name}"])
    advantage, returns = gae(rewards, values, longer, case["gamma"], case["lam"])
    assert_near(returns, data[f"returns.{name}"])
    advantage = whiten(advantage, mask, ddof=1)
    assert_near(advantage, data[f"advantages.{name}"])

    new, vpred = new.requires_grad_(), data["in.vpred"].requires_grad_()
    policy = aggregate(clipped_surrogate(new, old, advantage, 0.2, 0.2), mask, "token", mask.sum())
    value = aggregate(value_loss(vpred, values, returns, 0.2), longer, "token", longer.sum())
    loss = policy + 0.1 * value
    loss.backward()
    for mine, theirs in ((loss, "loss"), (policy, "pg_loss"), (value, "vf_loss")):
        assert mine.item() == pytest.approx(case[theirs], abs=1e-6)
    assert_near(new.grad, data[f"grad_logp.{name}"])
    assert_near(vpred.grad, data[f"grad_v.{name}"])

    ours = token_rewards(data["in.scores"], mask, kl, 0.05)
    assert torch.equal((ours + 0.05 * kl).nonzero()[:, 1], length[:, 0]), "on the last token, not behind it"
