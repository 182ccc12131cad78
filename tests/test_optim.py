"""Optimizer, schedule and clipping, against torch's AdamW and numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from minirl.config import UserError
from minirl.optim import AdamW, SkipCounter, clip_gradients, global_norm, lr_at


def with_grad(*values: float, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def small_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


# --- AdamW ---------------------------------------------------------------------------------------------

def test_twenty_steps_equal_torch_adamw_with_decay_on_matrices_only():
    ours, theirs = small_model(), small_model()
    optimizer = AdamW(ours.named_parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    groups = [{"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        lr = lr_at(step, 20, 1e-2, warmup_steps=5)
        for group in reference.param_groups:
            group["lr"] = lr
        optimizer.step(lr)
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_the_first_step_moves_each_weight_by_lr_whatever_the_gradient():
    parameter = with_grad(1e-3, -50.0)
    AdamW([("p", parameter)], lr=0.1, eps=0.0).step()
    torch.testing.assert_close(parameter.data, torch.tensor([-0.1, 0.1], dtype=torch.float64))


def test_norms_and_biases_do_not_decay_and_matrices_do():
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AdamW(model.named_parameters(), lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


def test_bfloat16_weights_follow_their_float32_master_through_steps_too_small_for_bfloat16():
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = AdamW([("p", parameter)], lr=1e-4)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()                    # 1 - 1e-4 rounds to 1 in bfloat16: alone, no step would be seen
    torch.testing.assert_close(optimizer.master["p"], torch.full((4, 4), 0.99), rtol=0, atol=1e-5)
    assert torch.equal(parameter.data, optimizer.master["p"].bfloat16())
    assert optimizer.exp_avg["p"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_offloaded_states_give_the_same_bits_and_the_same_state(dtype):
    ours, theirs = small_model(dtype), small_model(dtype)
    optimizer = AdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.1, offload=True)
    plain = AdamW(theirs.named_parameters(), lr=1e-2, weight_decay=0.1)
    assert optimizer.master.keys() == dict(ours.named_parameters()).keys()
    for step in range(6):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        optimizer.step()
        plain.step()
        if step == 2:  # either goes on from the other's state
            saved = [{name: t.clone() for name, t in each.state_tensors().items()} for each in (optimizer, plain)]
            assert saved[0].keys() == saved[1].keys()
            for parameter in ours.parameters():
                parameter.data += 1
            optimizer = AdamW(ours.named_parameters(), lr=1e-2, weight_decay=0.1, offload=True)
            ours.load_state_dict(theirs.state_dict())  # weights may be loaded after the optimizer was made
            optimizer.load_state_tensors(saved[1])
            plain.load_state_tensors(saved[0])
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)


def test_frozen_parameters_and_those_without_a_gradient_are_left_alone():
    model = small_model()
    model[0].weight.requires_grad_(False)
    optimizer = AdamW(model.named_parameters(), lr=0.1, weight_decay=0.5)
    assert "0.weight" not in optimizer.parameters
    before = model[2].weight.detach().clone()
    fill_gradients(model, 0)
    model[2].weight.grad = None
    optimizer.step()
    assert torch.equal(model[2].weight, before)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UserError, match="requires_grad"):
        AdamW(model.named_parameters(), lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(dtype):
    straight, first = small_model(dtype), small_model(dtype)
    optimizer = AdamW(straight.named_parameters(), lr=1e-2, weight_decay=0.1)
    stopped = AdamW(first.named_parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(6):
        fill_gradients(straight, step)
        optimizer.step()
        if step < 3:
            fill_gradients(first, step)
            stopped.step()
    resumed = small_model(dtype)
    resumed.load_state_dict(first.state_dict())
    optimizer = AdamW(resumed.named_parameters(), lr=1e-2, weight_decay=0.1)
    optimizer.load_state_tensors({name: t.clone() for name, t in stopped.state_tensors().items()})
    for step in range(3, 6):
        fill_gradients(resumed, step)
        optimizer.step()
    for p, q in zip(straight.parameters(), resumed.parameters()):
        assert torch.equal(p, q)


def test_the_state_of_another_model_is_refused_and_changes_nothing():
    optimizer = AdamW(small_model().named_parameters(), lr=1e-2)
    state = {name: t.clone() + 1 for name, t in optimizer.state_tensors().items()}
    with pytest.raises(UserError, match=r"exp_avg\.0\.bias is not in the checkpoint"):
        optimizer.load_state_tensors({k: v for k, v in state.items() if k != "exp_avg.0.bias"})
    with pytest.raises(UserError, match=r"master\.x is not in the model"):
        optimizer.load_state_tensors(state | {"master.x": torch.zeros(1)})
    with pytest.raises(UserError, match=r"shape \(2,\), but the model needs \(3, 7\)"):
        optimizer.load_state_tensors(state | {"exp_avg.2.weight": torch.zeros(2)})
    assert optimizer.updates == 0
    assert all(t.abs().sum() == 0 for t in optimizer.state_tensors().values())


# --- schedule ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("schedule", "step", "expected"), [
    ("cosine", 0, 0.1),             # peak / warmup: the first update is not lost
    ("cosine", 4, 0.5),             # the fifth update runs at half the peak
    ("cosine", 9, 1.0),
    ("cosine", 10, 1.0),
    ("cosine", 25, 0.55),           # half-way: floor + (peak - floor) / 2
    ("cosine", 40, 0.1),
    ("cosine", 99, 0.1),            # a run that is extended stays at the floor
    ("linear", 0, 0.1),
    ("linear", 9, 1.0),
    ("linear", 20, 0.7),            # a third of the way down
    ("linear", 40, 0.1),
    ("constant", 4, 0.5),
    ("constant", 39, 1.0),
])
def test_schedules_of_40_updates_with_10_of_warmup_and_floor_a_tenth(schedule, step, expected):
    assert lr_at(step, 40, 1.0, 10, schedule, floor=0.1) == pytest.approx(expected)


def test_no_update_of_a_run_has_a_learning_rate_of_zero():
    for total in (1, 2, 5, 40):
        for warmup in (0, 1, 10, 50):
            for schedule in ("cosine", "linear", "constant"):
                assert all(0 < lr_at(step, total, 1.0, warmup, schedule) <= 1 for step in range(total))


def test_an_unknown_schedule_is_refused_with_the_list():
    with pytest.raises(UserError, match="'cosin' is unknown; choose one of cosine, linear, constant"):
        lr_at(0, 10, 1.0, schedule="cosin")


# --- clipping ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("grads", "max_norm", "clipped"), [
    ([3.0, 4.0], 10.0, [3.0, 4.0]),         # norm 5
    ([3.0, 4.0], 5.0, [3.0, 4.0]),          # exactly at the limit
    ([3.0, 4.0], 1.0, [0.6, 0.8]),
    ([3.0, 4.0], 0.0, [3.0, 4.0]),          # 0 switches clipping off
    ([0.0, 0.0], 1.0, [0.0, 0.0]),
])
def test_clipping_scales_all_gradients_by_one_factor_and_returns_the_norm_before(grads, max_norm, clipped):
    parameters = [with_grad(g) for g in grads]
    norm = clip_gradients((p for p in parameters), max_norm)
    assert norm.item() == pytest.approx(math.hypot(*grads))
    assert [p.grad.item() for p in parameters] == pytest.approx(clipped)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_the_gradients_untouched(bad):
    parameters = [with_grad(bad), with_grad(4.0)]
    assert not math.isfinite(clip_gradients(parameters, 1.0))
    assert parameters[1].grad.item() == 4.0


def test_gradients_that_are_equal_on_all_ranks_are_not_summed_over_ranks_again():
    parameters = [with_grad(0.48), with_grad(0.64)]        # on each of two ranks: 0.8; summed again: 1.1314
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(0.8)
    assert parameters[0].grad.item() == 0.48


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    parameter = with_grad(*[1.0] * 1000, dtype=torch.bfloat16)
    assert global_norm([parameter]).item() == pytest.approx(math.sqrt(1000), rel=1e-6)
    assert global_norm([nn.Parameter(torch.zeros(3))]).item() == 0.0


# --- skipped steps -------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_update_with_an_infinite_gradient_changes_nothing_and_training_goes_on(bad):
    model = small_model()
    optimizer, guard = AdamW(model.named_parameters(), lr=0.1), SkipCounter()
    for step in range(5):
        fill_gradients(model, step)
        before = {k: t.clone() for k, t in (model.state_dict() | optimizer.state_tensors()).items()}
        if step == 3:
            model[2].bias.grad[1] = bad
        taken = guard.step(optimizer, clip_gradients(model.parameters(), 1.0), lr=0.1)
        after = model.state_dict() | optimizer.state_tensors()
        unchanged = [torch.equal(before[name], after[name]) for name in after]
        assert taken == (step != 3)
        assert all(unchanged) if step == 3 else not any(unchanged)
    assert (guard.skipped, guard.in_a_row, optimizer.updates) == (1, 0, 4)


def test_a_loss_that_is_not_finite_is_skipped_even_when_its_gradient_is_finite():
    optimizer, guard = AdamW([("p", with_grad(1.0))], lr=0.1), SkipCounter()
    assert not guard.step(optimizer, torch.tensor(1.0), lr=0.1, loss=torch.tensor(math.nan))
    assert optimizer.updates == 0


def test_ten_skips_in_a_row_stop_the_run_and_nine_do_not():
    optimizer, guard = AdamW([("p", with_grad(1.0))], lr=0.1), SkipCounter()
    for _ in range(2):
        for _ in range(9):
            assert not guard.step(optimizer, math.nan, lr=0.1)
        assert guard.step(optimizer, 1.0, lr=0.1)
    for _ in range(9):
        guard.step(optimizer, math.nan, lr=0.1)
    with pytest.raises(UserError, match=r"skipped 10 updates in a row .*lower --lr"):
        guard.step(optimizer, math.nan, lr=0.1)
    assert guard.skipped == 28
