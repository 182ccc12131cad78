"""Ratios and surrogates: numbers by hand, gradients, TRL's values, and what must not matter."""

import json
import math
from itertools import product

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch.autograd import gradcheck
from torch.testing import assert_close

from minirl.advantages import group_advantages
from minirl.config import UserError
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, loss_total
from minirl.parallel import close_mesh, init_mesh
from minirl.parallel.context import cut
from minirl.policy_loss import Ratio, Surrogate, check_pair, expert_loss, policy_loss


def defined(ratio, surrogate):
    try:
        check_pair(ratio, surrogate)
        return True
    except UserError:
        return False


PAIRS = [pair for pair in product(Ratio.__args__, Surrogate.__args__) if defined(*pair)]
WIDE = dict(eps_low=0.15, eps_high=0.25, dual_clip=1.5, tau=0.9, tau_negative=1.05)


def loss_of(log_ratios, advantage, options, old=-0.5, mode="sequence"):
    """(the loss of one row of tokens with these log-ratios, its gradient a token, which tokens are clipped)."""
    d = torch.tensor([log_ratios], dtype=torch.float64)
    mask, before = torch.ones_like(d, dtype=torch.bool), torch.full_like(d, old)
    logprobs = (before + d).requires_grad_()
    loss, clipped = policy_loss(logprobs, before, torch.tensor([[advantage]], dtype=torch.float64), mask, **options)
    total = aggregate(loss, mask, mode, loss_total(mode, mask))
    return total.item(), torch.autograd.grad(total, logprobs)[0][0].tolist(), clipped[0].tolist()


# ---- by hand ----

GSPO = dict(ratio="sequence", eps_low=3e-4, eps_high=4e-4)


@pytest.mark.parametrize("ratio", ["sequence", "gspo-token"])
def test_gspo_clips_the_geometric_mean_of_the_ratios(ratio):
    d = [0.1, -0.2, 0.4]  # s = exp(0.1)
    loss, grad, clipped = loss_of(d, 1.0, GSPO | {"ratio": ratio})
    assert loss == pytest.approx(-1.0004) and grad == [0, 0, 0] and clipped == [True] * 3
    loss, grad, clipped = loss_of(d, -1.0, GSPO | {"ratio": ratio})
    assert loss == pytest.approx(1.105171, abs=1e-6) and clipped == [False] * 3
    assert grad == pytest.approx([0.368390] * 3, abs=1e-6)  # s / |y|, the same for all tokens


def test_gspo_does_not_see_masked_tokens():
    d = torch.tensor([[0.2, -0.4, 0.5, 10.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    loss, _ = policy_loss(d, torch.zeros_like(d), -torch.ones(1, 1).double(), mask, **GSPO)
    assert loss[0, 0].item() == pytest.approx(1.10517, abs=1e-5)  # not 1.1801, the mean of ratios, nor their product
    loss = aggregate(loss, mask, "sequence", 1)
    assert torch.autograd.grad(loss, d)[0][0].tolist() == pytest.approx([0.36839] * 3 + [0], abs=1e-5)


def test_a_token_has_an_advantage_of_its_own_only_in_the_token_form_of_gspo():
    d = torch.tensor([[0.01, -0.02, 0.01]], dtype=torch.float64, requires_grad=True)
    mask, advantages = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[1.0, 0.0, -2.0]]).double()
    loss = policy_loss(d, torch.zeros_like(d), advantages, mask, ratio="gspo-token").per_token
    assert torch.autograd.grad(loss.sum(), d)[0][0].tolist() == pytest.approx([-1, 0, 2])
    loss = policy_loss(d, torch.zeros_like(d), advantages, mask, ratio="sequence").per_token
    assert torch.autograd.grad(loss.sum(), d)[0][0].tolist() == pytest.approx([1 / 3] * 3)


def test_cispo_keeps_the_gradient_that_ppo_drops():
    d = [math.log(2.0)]
    cap = dict(surrogate="weight", eps_low=1.0, eps_high=0.28)
    loss, grad, clipped = loss_of(d, 1.0, cap, old=-0.5 - d[0])  # log-prob now: -0.5
    assert loss == pytest.approx(0.64) and grad == pytest.approx([-1.28]) and clipped == [True]
    assert loss_of(d, 1.0, dict(eps_high=0.28), old=-0.5 - d[0])[1] == [0]
    assert loss_of([-5.0], 1.0, cap)[1] == pytest.approx([-math.exp(-5)])  # no lower bound


def test_gmpo_clips_token_by_token_in_log_space_and_then_takes_the_mean():
    options = dict(ratio="sequence", surrogate="geometric", eps_low=0.4, eps_high=0.4)
    loss, grad, clipped = loss_of([0.1, 0.9, -0.7], 1.0, options)
    assert loss == pytest.approx(-0.935507, abs=1e-6) and clipped == [False, True, False]
    assert grad == pytest.approx([-0.935507 / 3, 0, -0.935507 / 3], abs=1e-6)
    loss, _, clipped = loss_of([0.1, 0.9, -0.7], -1.0, options)
    assert loss == pytest.approx(1.221403, abs=1e-6) and clipped == [False, False, True]


def test_sapo_fades_out():
    def f(rho, advantage):
        return loss_of([math.log(rho)], advantage, dict(surrogate="soft", tau=1.0, tau_negative=1.05))

    assert -f(1.0, 1.0)[0] == pytest.approx(2) and -f(1.5, 1.0)[0] == pytest.approx(2.489837, abs=1e-6)
    slope = lambda rho, a: -a * f(rho, a)[1][0] / rho  # by the ratio, not by its log
    assert slope(1.0, 1.0) == pytest.approx(1) and slope(1.5, 1.0) == pytest.approx(0.940015, abs=1e-6)
    assert slope(1.5, -1.0) == pytest.approx(0.934140, abs=1e-6)


def test_kimi_regresses_the_advantage_on_the_log_ratio_of_the_answer():
    options = dict(ratio="product", surrogate="square", tau=0.5)
    for split in ([0.1], [0.04, 0.06]):  # a sum over the row: not a mean
        assert loss_of(split, 0.5, options)[0] == pytest.approx(0.2025)
        assert loss_of([-x for x in split], -0.5, options)[0] == pytest.approx(0.2025)
    grad = loss_of([0.0, 0.0], 0.5, options)[1]
    assert grad == pytest.approx([-2 * 0.5 * 0.5] * 2)  # towards the better answers, 2 tau times REINFORCE's


@pytest.mark.parametrize("ratio, advantage, loss, grad, clipped", [
    (1.5, 1, -1.2, 0, True), (1.5, -1, 1.5, 1.5, False), (0.5, -1, 0.8, 0, True), (0.5, 1, -0.5, -0.5, False),
    (5, -1, 3.0, 0, True), (5, 1, -1.2, 0, True), (2.9, -1, 2.9, 2.9, False)])
def test_a_dual_clip_bounds_what_a_bad_answer_can_weigh(ratio, advantage, loss, grad, clipped):
    got = loss_of([math.log(ratio)], advantage, dict(dual_clip=3.0))
    assert got == (pytest.approx(loss), pytest.approx([grad]), [clipped])


def test_reinforce_and_the_unclipped_ratio():
    assert loss_of([0.7], 2.0, dict(surrogate="reinforce"), old=-1.0) == (pytest.approx(0.6), [-2], [False])
    assert loss_of([0.7], 2.0, dict(surrogate="unclipped"))[:2] == (
        pytest.approx(-2 * math.exp(0.7)), pytest.approx([-2 * math.exp(0.7)]))


def test_luffy_shapes_an_experts_tokens_so_that_unlikely_ones_learn():
    p = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    logprobs, mask = p.log().requires_grad_(), torch.ones(1, 2, dtype=torch.bool)
    loss = expert_loss(logprobs, torch.ones(1, 1), mask)
    assert (-loss)[0].tolist() == pytest.approx([0.5, 0.9])
    grad, = torch.autograd.grad(loss.sum(), logprobs)
    assert (-grad)[0].tolist() == pytest.approx([0.25, 0.09])
    assert (-grad / p)[0].tolist() == pytest.approx([2.5, 0.1])
    assert gradcheck(lambda x: expert_loss(x, torch.full((1, 1), -2.0), mask), logprobs)
    rewards = group_advantages(torch.tensor([1.0, 0, 1, 0]), torch.zeros(4).long(), "none")
    assert rewards[:, 0].tolist() == [0.5, -0.5, 0.5, -0.5]


# ---- what holds for every pair ----

def batch(rows=4, S=6):
    g = torch.Generator().manual_seed(1)
    old = torch.randn(rows, S, generator=g, dtype=torch.float64).mul(0.3).sub(1.5)
    new = old + torch.randn(rows, S, generator=g, dtype=torch.float64).mul(0.2)
    mask = torch.rand(rows, S, generator=g) < 0.7
    mask[-1] = False
    return new, old, torch.randn(rows, 1, generator=g, dtype=torch.float64), mask


def total_loss(new, old, advantages, mask, pair, **options):
    loss = policy_loss(new, old, advantages, mask, ratio=pair[0], surrogate=pair[1], **WIDE | options).per_token
    return aggregate(loss, mask, "sequence", loss_total("sequence", mask), row_tokens=options.get("row_tokens"))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gradcheck(pair):
    if pair[0] == "gspo-token" or pair[1] == "weight":
        pytest.skip("the value and the gradient are meant to differ")
    new, old, advantages, mask = batch(2, 4)
    assert gradcheck(lambda x: total_loss(x, old, advantages, mask, pair), new.requires_grad_())


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_on_policy_all_pairs_but_the_square_point_in_the_direction_of_reinforce(pair):
    _, old, advantages, mask = batch()
    x = old.clone().requires_grad_()
    loss = policy_loss(x, old, advantages, mask, ratio=pair[0], surrogate=pair[1], tau=0.5, tau_negative=0.5)
    grad = torch.autograd.grad(aggregate(loss.per_token, mask, "sequence", 4), x)[0]
    counts = mask.sum(1, keepdim=True).clamp(min=1)
    want = torch.where(mask, -advantages / counts / 4, 0.0)
    assert_close(grad, want * counts if pair[1] == "square" else want)  # 2 tau = 1: and the sum, not the mean, of a row
    assert not loss.clipped[mask].any()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("garbage", [math.inf, math.nan])
def test_padding_and_what_lies_under_the_mask_change_nothing(pair, garbage):
    new, old, advantages, mask = batch()
    x = new.clone().requires_grad_()
    want = total_loss(x, old, advantages, mask, pair)
    grad, = torch.autograd.grad(want, x)
    pad = lambda t, value: torch.nn.functional.pad(t, (0, 3), value=value)
    y = pad(new.masked_fill(~mask, garbage), garbage).requires_grad_()
    got = total_loss(y, pad(old.masked_fill(~mask, garbage), garbage), advantages, pad(mask, False), pair)
    assert_close(got, want)
    assert_close(torch.autograd.grad(got, y)[0], pad(grad, 0.0))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_nothing_is_changed_and_only_the_policy_learns(pair):
    tensors = [x.clone() for x in batch()]
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    total_loss(*inputs, pair).backward()
    assert inputs[0].grad.count_nonzero() and inputs[1].grad is None and inputs[2].grad is None
    assert all(torch.equal(a, b) for a, b in zip(inputs, tensors, strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_huge_ratio_has_a_finite_loss_and_gradient(pair):
    for d, advantage in product((1000.0, -1000.0), (1.0, -1.0, 0.0)):
        loss, grad, _ = loss_of([d, d], advantage, dict(ratio=pair[0], surrogate=pair[1]))
        assert math.isfinite(loss) and all(map(math.isfinite, grad))


def test_the_pair_of_ppo_is_clipped_surrogate():
    new, old, advantages, mask = batch()
    got = policy_loss(new, old, advantages, mask, eps_low=0.1, eps_high=0.2).per_token
    assert torch.equal(got[mask], clipped_surrogate(new, old, advantages, 0.1, 0.2)[mask])


def test_unknown_names_and_pairs_are_refused_in_one_line():
    for pair, text in ((("tokens", "clip"), "does not exist: use one of token"),
                       (("token", "ppo"), "does not exist: use one of clip"),
                       (("token", "square"), "not defined for the ratio 'token': use product"),
                       (("product", "clip"), "use token or sequence or gspo-token")):
        with pytest.raises(UserError, match=text):
            policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1) > 0, ratio=pair[0],
                        surrogate=pair[1])


# ---- rows in pieces ----

def columns_of_a_rank():
    """(pair -> loss and gradient of this rank's columns) with the columns of each row on two ranks."""
    mesh = init_mesh("cpu", cp=2)
    found = {}
    for pair in PAIRS:
        new, old, advantages, mask = batch()
        x = new.clone().requires_grad_()
        mine = [cut(t, mesh.cp_group) for t in (x, old, mask)]
        loss = total_loss(mine[0], mine[1], advantages, mine[2], pair, row_tokens=mask.sum(1), cp_group=mesh.cp_group)
        loss.backward()
        found[pair] = loss.detach(), x.grad
    close_mesh()
    return found


@pytest.mark.dist
def test_ranks_that_share_the_columns_of_a_row_have_shares_of_its_loss_and_gradient():
    first, second = run_ranks(columns_of_a_rank, 2)
    for pair in PAIRS:
        new, old, advantages, mask = batch()
        x = new.clone().requires_grad_()
        want = total_loss(x, old, advantages, mask, pair)
        want.backward()
        assert_close(first[pair][0] + second[pair][0], want.detach(), msg=str(pair))
        assert_close(first[pair][1] + second[pair][1], x.grad, msg=str(pair))


# ---- TRL ----

MODES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant", "cispo": "token"}


def test_trl_gives_the_same_losses_and_gradients_in_every_case(shared):
    golden = load_file(shared / "golden" / "grpo.safetensors")
    cases = json.loads((shared / "golden" / "grpo.json").read_text())["cases"]
    assert {case["kwargs"]["loss_type"] for case in cases} <= MODES.keys()
    new, old, ref = (golden[f"in.{name}"].double() for name in ("new_logps", "old_logps", "ref_logps"))
    advantages = golden["in.advantages"][:, None].double()
    for case in cases:
        name, kwargs = case["name"], case["kwargs"]
        mask = golden["in.completion_mask"].bool()
        if kwargs.get("use_tool"):
            mask = mask & golden["in.tool_mask"].bool()
        if kwargs.get("zero_row"):
            mask = mask & (torch.arange(8) != 2)[:, None]
        options = dict(eps_low=kwargs.get("eps_low", 0.2), eps_high=kwargs.get("eps_high", 0.28),
                       ratio=kwargs.get("level", "token"))
        if kwargs["loss_type"] == "cispo":  # TRL's eps_high is the cap itself, ours its distance from 1
            options |= dict(surrogate="weight", eps_low=1.0, eps_high=options["eps_high"] - 1)
        x = new.clone().requires_grad_()
        loss, _ = policy_loss(x, old if kwargs.get("use_old", True) else new, advantages, mask, **options)
        loss = loss + kwargs.get("beta", 0.0) * kl_estimate(x, ref, "k3")
        mode = MODES[kwargs["loss_type"]]
        loss = aggregate(loss, mask, mode, loss_total(mode, mask, constant_length=16))
        assert loss.item() == pytest.approx(case["loss"], rel=1e-6), name
        assert_close(torch.autograd.grad(loss, x)[0], golden[f"grad.{name}"], rtol=1e-6, atol=1e-9, msg=name)
