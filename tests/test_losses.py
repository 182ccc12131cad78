import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.autograd import gradcheck
from torch.testing import assert_close

from kernels import linear_logprob
from minirl.advantages import constant_groups, group_advantages
from minirl.config import UserError
from minirl.logprobs import shift_mask
from minirl.losses import (
    aggregate,
    clipped_surrogate,
    kl_estimate,
    loss_total,
    policy_stats,
    prompt_tokens,
    row_sum,
    sft_loss,
)

MODES = ("token", "sequence", "prompt", "constant")
LENGTH = 8  # the fixed length of the mode "constant"
ON = torch.ones(1, 1, dtype=torch.bool)


def batch(rows=8, S=6):
    """Random log-probs near each other, ragged masks with holes, two rows a prompt, one row all masked."""
    g = torch.Generator().manual_seed(0)
    new, old, ref = torch.randn(3, rows, S, generator=g, dtype=torch.float64).mul(0.3).sub(1.5)
    mask = torch.rand(rows, S, generator=g) < 0.8
    mask &= torch.arange(S) < torch.randint(2, S + 1, (rows, 1), generator=g)
    mask[3] = False
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64)
    return SimpleNamespace(new=new, old=old, ref=ref, mask=mask, advantages=advantages,
                           group=torch.arange(rows) % (rows // 2))


def loss_and_gradient(b, mode, pieces):
    """Of the GRPO loss, added up over pieces of the batch."""
    total = loss_total(mode, b.mask, group=b.group, constant_length=LENGTH)
    tokens = prompt_tokens(b.mask, b.group)
    new, loss = b.new.detach().requires_grad_(), 0.0
    for rows in pieces:
        per_token = clipped_surrogate(new[rows], b.old[rows], b.advantages[rows], 0.2, 0.28)
        per_token = per_token + 0.1 * kl_estimate(new[rows], b.ref[rows], "k3")
        part = aggregate(per_token, b.mask[rows], mode, total, tokens[rows])
        part.backward()
        loss += part.item()
    return loss, new.grad


def whole(b, mode):
    return loss_and_gradient(b, mode, [torch.arange(len(b.mask))])


# ---- the clipped surrogate ----


@pytest.mark.parametrize("ratio, advantage, loss, grad", [
    (1.5, +1, -1.2, 0), (1.5, -1, 1.5, +1.5), (0.5, -1, 0.8, 0), (0.5, +1, -0.5, -0.5),
    (1.0, +1, -1.0, -1.0), (1.0, -1, 1.0, +1.0),  # on policy: the value says nothing, the gradient does
    (math.exp(0.3), +1, -1.2, 0), (math.exp(0.3), -1, 1.349859, 1.349859)])
def test_the_clip_binds_only_on_moves_that_are_already_good_enough(ratio, advantage, loss, grad):
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    got = clipped_surrogate(new, torch.zeros_like(new), torch.full_like(new, advantage), 0.2, 0.2)
    got.backward()
    assert got.item() == pytest.approx(loss, abs=1e-6)
    assert new.grad.item() == pytest.approx(grad, abs=1e-6)  # d ratio / d logprob is the ratio itself


def test_clip_higher_moves_the_upper_bound_alone():
    def loss(ratio, advantage, eps_high=0.28):
        new = torch.tensor([[math.log(ratio)]])
        return clipped_surrogate(new, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2, eps_high).item()

    assert loss(1.25, 1) == pytest.approx(-1.25) and loss(1.30, 1) == pytest.approx(-1.28)
    assert loss(1.25, 1, 0.2) == pytest.approx(-1.2)
    assert loss(0.7, -1) == pytest.approx(0.8)


def test_the_ratio_is_of_tokens_and_not_of_the_whole_answer():
    new, mask = torch.full((1, 100), 0.01), torch.ones(1, 100, dtype=torch.bool)
    stats = policy_stats(new, torch.zeros(1, 100), None, None, torch.ones(1, 1), mask, 0.2, 0.2)
    assert stats["clip_frac"] == 0 and stats["max_ratio_deviation"].item() == pytest.approx(0.01005, abs=1e-5)


def test_the_surrogate_trains_the_current_policy_and_nothing_else():
    b = batch()
    inputs = [x.clone().requires_grad_() for x in (b.new, b.old, b.advantages)]
    clipped_surrogate(*inputs, 0.2, 0.2).sum().backward()
    assert inputs[0].grad.count_nonzero() > 0 and inputs[1].grad is None and inputs[2].grad is None
    new = b.new.clone().requires_grad_()  # a caller who does not detach the old log-probs
    clipped_surrogate(new, new, b.advantages, 0.2, 0.2).sum().backward()
    assert_close(new.grad, -b.advantages.expand_as(new))


@pytest.mark.parametrize("log_ratio", [21.0, 89.0, 1000.0])
def test_a_huge_ratio_is_finite_and_its_gradient_points_home(log_ratio):
    new = torch.tensor([[log_ratio]], requires_grad=True)
    for advantage, sign in ((-1.0, 1), (1.0, 0), (0.0, 0)):
        loss = clipped_surrogate(new, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2, 0.2)
        grad, = torch.autograd.grad(loss, new)
        assert loss.isfinite() and grad.isfinite() and grad.sign() == sign


# ---- KL ----


def test_k3_of_half_a_nat():
    value = kl_estimate(torch.tensor(-1.0), torch.tensor(-0.5), "k3")
    assert value.item() == pytest.approx(0.148721, abs=1e-6)


@pytest.mark.parametrize("kind, value, gradient",
                         [("k1", 0.082283, 0.0), ("k2", 0.078767, 0.17793), ("k3", 0.082283, 0.2)])
def test_value_and_gradient_of_the_kl_estimators_averaged_over_the_policy(kind, value, gradient):
    policy = torch.tensor([0.7, 0.3], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    estimate = kl_estimate(F.log_softmax(logits, 0), torch.full((2,), math.log(0.5)), kind)
    if kind == "k1":  # a single token's value is no KL: 0.336 or -0.511
        assert estimate.tolist() == pytest.approx([0.33647, -0.51083], abs=1e-5)
    assert (policy * estimate).sum().item() == pytest.approx(value, abs=1e-6)
    grad, = torch.autograd.grad((policy * estimate).sum(), logits)
    assert grad.tolist() == pytest.approx([gradient, -gradient], abs=1e-5)


def test_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_reverse_kl():
    g = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 9, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = F.log_softmax(logits, 0), F.log_softmax(ref_logits, 0)
    for kind, full in (("k2", (logp.exp() * (logp - ref)).sum()), ("k3", (ref.exp() * (ref - logp)).sum())):
        sampled = (logp.detach().exp() * kl_estimate(logp, ref, kind)).sum()
        got, want = (torch.autograd.grad(x, logits, retain_graph=True) for x in (sampled, full))
        assert_close(got, want)


def test_k1_and_k3_of_many_samples_average_to_the_full_kl():
    g = torch.Generator().manual_seed(0)
    logp, ref = F.log_softmax(torch.randn(2, 7, generator=g, dtype=torch.float64), -1)
    full = (logp.exp() * (logp - ref)).sum()
    ids = torch.multinomial(logp.exp(), 200_000, replacement=True, generator=g)
    for kind in ("k1", "k3"):
        sample = kl_estimate(logp[ids], ref[ids], kind)
        assert abs(sample.mean() - full) < 4 * sample.std() / math.sqrt(len(ids))


def test_k3_is_never_negative_not_even_by_rounding():
    d = torch.logspace(-12, 1.9, 5000)
    for ref in (d, -d):
        assert kl_estimate(torch.zeros_like(d), ref, "k3").min() >= 0


@pytest.mark.parametrize("log_ratio", [21.0, 89.0, 1000.0])
def test_k3_is_finite_far_from_the_reference_and_pulls_towards_it(log_ratio):
    new = torch.tensor([0.0], requires_grad=True)
    value = kl_estimate(new, torch.tensor([log_ratio]), "k3")
    grad, = torch.autograd.grad(value, new)
    assert value.isfinite() and value > 0 and grad.isfinite()
    assert grad < 0, "descent must raise the log-prob of a token that the reference likes better"


def test_a_step_down_the_kl_term_lowers_the_kl():
    for kind in ("k2", "k3"):
        logits = torch.tensor([0.7, 0.3], dtype=torch.float64).log().requires_grad_()
        kl = lambda logp: (logp.exp() * (logp - math.log(0.5))).sum()
        logp = F.log_softmax(logits, 0)
        loss = (logp.detach().exp() * kl_estimate(logp, torch.full((2,), math.log(0.5)), kind)).sum()
        moved = logits - 0.01 * torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert kl(F.log_softmax(moved, 0)) < kl(logp)


# ---- reduction ----


def test_the_four_reductions_of_one_table():
    per_token = torch.tensor([[1.0, 1, 100, 100], [2, 2, 2, 2]])
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    apart, together = torch.tensor([5, 9]), torch.tensor([5, 5])

    def reduce(mode, group=apart):
        total = loss_total(mode, mask, group=group, constant_length=LENGTH)
        return aggregate(per_token, mask, mode, total, prompt_tokens(mask, group)).item()

    assert reduce("token") == pytest.approx(10 / 6)
    assert reduce("sequence") == pytest.approx(1.5)
    assert reduce("constant") == pytest.approx(10 / (2 * 8))
    assert reduce("prompt", apart) == pytest.approx(1.5)
    assert reduce("prompt", together) == pytest.approx(10 / 6)


def test_one_short_good_and_one_long_bad_answer_tell_the_reductions_apart():
    objective = torch.tensor([[1.0, 0, 0], [-1, -1, -1]])
    mask = torch.tensor([[True, False, False], [True] * 3])
    got = {mode: aggregate(objective, mask, mode, loss_total(mode, mask, constant_length=4)).item()
           for mode in ("token", "sequence", "constant")}
    assert got == pytest.approx({"token": -0.5, "sequence": 0.0, "constant": -0.25})


def test_a_loss_of_zero_on_policy_still_trains():
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    advantages, values = torch.tensor([[1.0], [-1.0]]), {}
    for mode in ("token", "sequence", "constant"):
        new = torch.full((2, 4), -1.0, requires_grad=True)
        per_token = clipped_surrogate(new, new, advantages, 0.2, 0.2)
        loss = aggregate(per_token, mask, mode, loss_total(mode, mask, constant_length=LENGTH))
        assert torch.autograd.grad(loss, new)[0].norm() > 0
        values[mode] = loss.item()
    assert values == pytest.approx({"token": 1 / 3, "sequence": 0.0, "constant": 1 / 8})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_microbatches_of_any_size_give_the_same_loss_and_gradient(mode, size):
    b = batch()
    cut = loss_and_gradient(b, mode, torch.arange(8).split(size))
    assert_close(cut, whole(b, mode), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_neither_the_order_of_the_rows_nor_how_unevenly_they_are_dealt_changes_the_loss(mode):
    b = batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    cut = loss_and_gradient(b, mode, order.split([5, 1, 2]))
    assert_close(cut, whole(b, mode), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_neither_loss_nor_gradient(mode):
    b = batch()
    wide = SimpleNamespace(**vars(b))
    wide.new, wide.old, wide.ref = (F.pad(x, (0, 10), value=-7.0) for x in (b.new, b.old, b.ref))
    wide.mask = F.pad(b.mask, (0, 10))
    loss, grad = whole(wide, mode)
    assert_close((loss, grad[:, :6]), whole(b, mode), rtol=1e-14, atol=1e-15)
    assert grad[:, 6:].count_nonzero() == 0


def test_microbatches_with_few_tokens_weigh_no_more_than_their_tokens():
    losses = torch.tensor([[1.0, 1] + [0] * 6, [0.25] * 8])
    mask = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])
    total = loss_total("token", mask)
    assert sum(aggregate(losses[[i]], mask[[i]], "token", total) for i in (0, 1)).item() == pytest.approx(0.4)


@pytest.mark.parametrize("mode, mine", [("token", 3), ("sequence", 2), ("prompt", 1), ("constant", 16)])
def test_the_denominator_is_summed_over_ranks(monkeypatch, mode, mine):
    import minirl.parallel.collectives

    monkeypatch.setattr(minirl.parallel.collectives, "all_reduce", lambda value, group: value + group)
    mask, group = torch.tensor([[True, True, True], [False] * 3]), torch.tensor([4, 4])
    total = lambda mesh: int(loss_total(mode, mask, mesh, group=group, constant_length=LENGTH))
    assert total(None) == total(SimpleNamespace(dp=1)) == mine
    assert total(SimpleNamespace(dp=2, dp_group=7)) == mine + 7


def test_a_single_process_does_not_load_the_parallel_code():
    code = ("import sys, torch; from minirl.losses import loss_total; loss_total('token', torch.eye(2) > 0);"
            "assert 'minirl.parallel' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_with_every_token_masked_the_loss_is_zero_and_so_is_the_gradient(mode):
    b = batch()
    b.mask = torch.zeros_like(b.mask)
    loss, grad = whole(b, mode)
    assert loss == 0 and grad.count_nonzero() == 0 and grad.isfinite().all()
    assert aggregate(b.new[:0], b.mask[:0], mode, 0, torch.zeros(0, dtype=torch.int64)) == 0  # no row at all


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("mode", MODES)
def test_what_lies_under_the_mask_never_comes_out(mode, garbage):
    b = batch()
    want = whole(b, mode)
    b.old, b.ref = b.old.masked_fill(~b.mask, garbage), b.ref.masked_fill(~b.mask, garbage)
    assert_close(whole(b, mode), want, rtol=0, atol=0)

    per_token = torch.ones(8, 6).masked_fill(~b.mask, garbage).requires_grad_()
    total = loss_total(mode, b.mask, group=b.group, constant_length=LENGTH)
    loss = aggregate(per_token, b.mask, mode, total, prompt_tokens(b.mask, b.group))
    loss.backward()
    assert loss.isfinite() and per_token.grad[~b.mask].count_nonzero() == 0


def test_a_row_with_an_empty_mask_counts_as_a_row():
    mask = torch.tensor([[True, True], [False, False]])
    assert aggregate(torch.ones(2, 2), mask, "sequence", loss_total("sequence", mask)).item() == 0.5
    assert loss_total("constant", mask, constant_length=5) == 10
    assert loss_total("prompt", mask, group=torch.tensor([3, 4])) == 2


def test_prompt_tokens_are_those_of_all_rows_of_the_prompt():
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    assert prompt_tokens(mask, torch.tensor([9, 2, 9])).tolist() == [5, 1, 5]


def test_what_a_mode_needs_is_asked_for_in_one_line():
    mask = torch.ones(2, 2, dtype=torch.bool)
    x = torch.ones(2, 2)
    for call in (lambda: loss_total("constant", mask),
                 lambda: loss_total("constant", mask, constant_length=-1),
                 lambda: loss_total("prompt", mask), lambda: aggregate(x, mask, "prompt", 2),
                 lambda: loss_total("tokens", mask), lambda: aggregate(x, mask, "tokens", 2),
                 lambda: kl_estimate(x, x, "k4")):
        with pytest.raises(UserError, match=r"pass|use") as error:
            call()
        assert "\n" not in str(error.value)


# ---- a group without variance ----


def test_a_constant_group_has_no_gradient_but_that_of_the_kl_term_and_dilutes_the_mean():
    rewards, group = torch.tensor([1.0, 0, 0.7, 0.7]), torch.tensor([0, 0, 1, 1])
    advantages, mask = group_advantages(rewards, group), torch.ones(4, 3, dtype=torch.bool)
    old, ref = torch.full((4, 3), -1.0), torch.full((4, 3), -2.0)

    def gradient(kl_coef, rows=slice(None)):
        new = torch.full((4, 3), -1.0, requires_grad=True)
        per_token = clipped_surrogate(new, old, advantages, 0.2, 0.2) + kl_coef * kl_estimate(new, ref, "k3")
        loss = aggregate(per_token[rows], mask[rows], "token", loss_total("token", mask[rows]))
        return torch.autograd.grad(loss, new)[0]
    assert gradient(0.0)[2:].count_nonzero() == 0 and gradient(0.0)[:2].count_nonzero() == 6
    assert gradient(0.1)[2:].count_nonzero() == 6
    assert_close(gradient(0.0)[:2], gradient(0.0, slice(0, 2))[:2] / 2)  # its tokens are in the denominator


# ---- SFT ----


def test_the_sft_loss_is_cross_entropy_over_the_unmasked_tokens():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, generator=g), torch.randint(7, (2, 5), generator=g)
    mask = torch.tensor([[True, False, True, True, False], [False, False, True, False, True]])

    def loss(logits):
        logprobs = F.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        return aggregate(sft_loss(logprobs), mask, "token", loss_total("token", mask))
    assert_close(loss(logits), F.cross_entropy(logits[mask], targets[mask]))
    shouted = torch.where(mask[..., None], logits, logits + 100 * torch.randn(2, 5, 7, generator=g))
    assert_close(loss(shouted), loss(logits), rtol=0, atol=0)


# ---- statistics ----


def test_statistics_are_sums_over_action_tokens_by_hand():
    ratio = torch.tensor([[1.5, 0.5, 1.0, 9.0], [1.5, 0.5, 1.25, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2)
    advantages, zeros = torch.tensor([[1.0], [-1.0]]), torch.zeros_like(ratio)
    ref = torch.tensor([[math.log(2), 0, 0, 50]] * 2) + ratio.log()  # twice as likely under the reference
    entropy = torch.tensor([[0.5, 0.25, 0, math.nan]] * 2)
    stats = policy_stats(ratio.log(), zeros, ref, entropy, advantages, mask, 0.2, 0.28)
    got = {name: value.item() for name, value in stats.items()}
    assert got == pytest.approx({
        "tokens": 6,
        "rows": 2,
        "approx_kl": sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.5, 0.5, 1.25)),
        "old_approx_kl": -sum(math.log(r) for r in (1.5, 0.5, 1.5, 0.5, 1.25)),
        "clip_frac": 2,  # 1.5 with A > 0, 0.5 with A < 0; the other two moved the wrong way
        "kl_ref": 2 * (2 - 1 - math.log(2)),
        "entropy": 1.5,
        "max_ratio_deviation": 0.5})
    assert set(policy_stats(ratio.log(), zeros, None, None, advantages, mask, 0.2, 0.28)) == {
        "tokens", "rows", "approx_kl", "old_approx_kl", "clip_frac", "max_ratio_deviation"}


def test_statistics_of_microbatches_add_up_and_a_masked_row_changes_no_mean():
    b = batch()
    b.new.requires_grad_()

    def stats(rows):
        tensors = (x[rows] for x in (b.new, b.old, b.ref, b.new, b.advantages, b.mask))
        return policy_stats(*tensors, 0.2, 0.28)
    every, pieces = stats(slice(None)), [stats([i]) for i in range(8)]
    for name, value in every.items():
        assert not value.requires_grad
        together = torch.stack([p[name] for p in pieces])
        assert_close(together.amax() if name.startswith("max_") else together.sum(), value)
    empty = pieces[3]
    assert empty["tokens"] == empty["approx_kl"] == empty["max_ratio_deviation"] == 0


# ---- every loss ----


@pytest.mark.parametrize("loss", [
    sft_loss,
    lambda x: clipped_surrogate(x, torch.tensor([[0.3, -0.4, 0.05]]).double(), torch.ones(1, 1), 0.2, 0.2),
    lambda x: clipped_surrogate(x, torch.tensor([[0.3, -0.4, -25.0]]).double(), -torch.ones(1, 1), 0.2, 0.2),
    *(lambda x, k=k: kl_estimate(x, torch.tensor([[0.3, -0.4, 25]]).double(), k)
      for k in ("k1", "k2", "k3")),
    *(lambda x, m=m: aggregate(x, torch.tensor([[True, False, True]]), m, 3, torch.tensor([2]))
      for m in MODES),
], ids=["sft", "surrogate, A > 0", "surrogate, A < 0", "k1", "k2", "k3", *MODES])
def test_gradcheck(loss):
    x = torch.tensor([[0.0, 0.1, -0.1]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(loss, x)


LOGP, GROUP = torch.linspace(-3, -0.1, 6).view(2, 3), torch.tensor([4, 4])
MASK = torch.tensor([[True, False, True]] * 2)


@pytest.mark.parametrize("function, arguments", [
    (linear_logprob, (LOGP, torch.ones(5, 3), GROUP, 0.5, True)),  # GROUP: two ids below 5, as good as any
    (shift_mask, (MASK, GROUP[:, None].expand(2, 3))),
    (group_advantages, (torch.tensor([1.0, 0]), GROUP)),
    (constant_groups, (torch.tensor([1.0, 0]), GROUP)),
    (sft_loss, (LOGP,)),
    (clipped_surrogate, (LOGP, LOGP.flip(0), torch.ones(2, 1), 0.2, 0.2)),
    *((kl_estimate, (LOGP, LOGP.flip(0), kind)) for kind in ("k1", "k2", "k3")),
    (row_sum, (LOGP, MASK)),
    *((aggregate, (LOGP, MASK, mode, torch.tensor(4), torch.tensor([4, 4]))) for mode in MODES),
    *((loss_total, (mode, MASK, None, GROUP, 3)) for mode in MODES),
    (prompt_tokens, (MASK, GROUP)),
    (policy_stats, (LOGP, LOGP.flip(0), LOGP + 1, LOGP, torch.ones(2, 1), MASK, 0.2, 0.2)),
], ids=lambda value: getattr(value, "__name__", ""))
def test_no_function_changes_what_it_is_given(function, arguments):
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    function(*arguments)
    for now, then in zip(arguments, before, strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then


# ---- TRL ----

OURS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}  # TRL's name: our mode


def test_trl_gives_the_same_losses_gradients_and_metrics(shared):
    golden = load_file(shared / "golden" / "grpo.safetensors")
    cases = json.loads((shared / "golden" / "grpo.json").read_text())["cases"]
    # Its level "sequence" is GSPO, and CISPO is another objective.
    cases = [c for c in cases if c["kwargs"].get("level") != "sequence" and c["kwargs"]["loss_type"] in OURS]
    new, old, ref, entropy = (golden[f"in.{name}"].double() for name in
                              ("new_logps", "old_logps", "ref_logps", "entropies"))
    advantages = golden["in.advantages"][:, None].double()
    assert len(cases) >= 20
    for case in cases:
        name, options, metrics = case["name"], case["kwargs"], case["metrics"]
        mode, kl_coef = OURS[options["loss_type"]], options.get("beta", 0.0)
        eps_high = options.get("eps_high", 0.28)
        mask = golden["in.completion_mask"].bool()
        if options.get("use_tool"):
            mask = mask & golden["in.tool_mask"].bool()
        if options.get("zero_row"):
            mask = mask & (torch.arange(8) != 2)[:, None]
        x = new.clone().requires_grad_()
        behind = old if options.get("use_old", True) else new
        per_token = clipped_surrogate(x, behind, advantages, 0.2, eps_high)
        per_token = per_token + kl_coef * kl_estimate(x, ref, "k3")
        loss = aggregate(per_token, mask, mode, loss_total(mode, mask, constant_length=16))
        assert loss.item() == pytest.approx(case["loss"], rel=1e-6), name
        assert_close(torch.autograd.grad(loss, x)[0], golden[f"grad.{name}"], rtol=1e-6, atol=1e-9, msg=name)

        stats = policy_stats(x, behind, ref, entropy, advantages, mask, 0.2, eps_high)
        mean = {key: value.item() / mask.sum().item() for key, value in stats.items()}
        assert mean["entropy"] == pytest.approx(metrics["entropy"], rel=1e-5), name
        assert mean["clip_frac"] == pytest.approx(metrics["clip_ratio/region_mean"], abs=1e-6), name
        if kl_coef:
            assert mean["kl_ref"] == pytest.approx(metrics["kl"], rel=1e-5), name
