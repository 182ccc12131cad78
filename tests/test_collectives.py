"""The grid of ranks, each collective beside its plain meaning, each dual beside autograd, the ring beside the sum."""

import doctest
import warnings

import pytest
import torch
from ranks import run_ranks

import minirl.parallel.mesh
from minirl.config import UserError
from minirl.parallel import collectives as c
from minirl.parallel import init_mesh
from minirl.parallel.mesh import AXES, Mesh, coordinates, partners
from minirl.parallel.ring import ring_all_reduce

# ------------------------------------------------------------------ the grid


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(minirl.parallel.mesh).failed == 0


def test_tp_partners_are_neighbours_and_dp_partners_are_far_apart():
    sizes = {"dp": 2, "pp": 2, "cp": 1, "tp": 2}
    assert partners(sizes, ("tp",)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert partners(sizes, ("pp",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert partners(sizes, ("dp",)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert partners(sizes, ("dp", "cp")) == partners(sizes, ("dp",))
    assert partners(sizes, AXES) == [tuple(range(8))]


@pytest.mark.parametrize("sizes", [(2, 3, 1, 2), (1, 1, 4, 2), (3, 1, 2, 1)])
def test_every_rank_has_its_own_place_and_one_group_along_each_axis(sizes):
    grid = dict(zip(AXES, sizes, strict=True))
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    places = [tuple(coordinates(rank, grid).values()) for rank in range(world)]
    assert len(set(places)) == world and places == sorted(places)
    for axis in AXES:
        groups = partners(grid, (axis,))
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
        assert {len(ranks) for ranks in groups} == {grid[axis]}


def test_sizes_that_do_not_fill_the_job_are_refused():
    with pytest.raises(UserError, match="dp 1 x pp 1 x cp 1 x tp 2 makes 2 ranks, but 1 were started"):
        init_mesh("cpu", tp=2)


def test_a_gpu_is_the_default_one_of_its_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(minirl.parallel.mesh, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [init_mesh("cuda:1").device] == chosen == [torch.device("cuda:1")]


def places():
    mesh = init_mesh("cpu", dp=2, tp=2)
    assert init_mesh("cpu", dp=2, tp=2).tp_group.ranks == mesh.tp_group.ranks, "a second call in the same process"
    ones = torch.ones(1)
    sums = [float(c.all_reduce(ones * 10**(2 * mesh.dp_rank + mesh.tp_rank), group)) for group in
            (mesh.dp_group, mesh.tp_group, mesh.pp_group, mesh.data_group, mesh.world_group)]
    assert float(ones) == 1, "a collective changed its input"
    return mesh.is_main, [*mesh.share(4)], sums


@pytest.mark.dist
def test_groups_of_a_job_of_four():
    assert run_ranks(places, 4) == [
        (True, [0, 1], [101, 11, 1, 101, 1111]), (False, [0, 1], [1010, 11, 10, 1010, 1111]),
        (False, [2, 3], [101, 1100, 100, 101, 1111]), (False, [2, 3], [1010, 1100, 1000, 1010, 1111])]


# ------------------------------------------------------------------ collectives


def plain():
    """Each collective on what every rank can compute for all: x[r] belongs to rank r."""
    warnings.simplefilter("error", FutureWarning)  # of names that torch is about to drop
    mesh = init_mesh("cpu", tp=3, dp=1)
    group, r, n = mesh.tp_group, mesh.tp_rank, 3
    x = torch.arange(n * 6 * 6, dtype=torch.float64).view(n, 6, 6).sin()
    mine = x[r].t()  # not contiguous
    before = mine.clone()
    check = torch.testing.assert_close
    check(c.all_reduce(mine, group), x.sum(0).t())
    check(c.all_reduce(mine, group, c.MAX), x.amax(0).t())
    for dim in (0, 1, -1):
        check(c.all_gather(mine, group, dim), torch.cat([y.t() for y in x], dim))
        check(c.own_slice(mine, group, dim), mine.chunk(n, dim)[r])
        check(c.reduce_scatter(mine, group, dim), x.sum(0).t().chunk(n, dim)[r])
        check(c.all_to_all(mine, group, dim, 0), torch.cat([y.t().chunk(n, dim)[r] for y in x], 0))
    for source in range(n):
        check(c.broadcast(mine, group, source), x[source].t())
    first, second = c.ring_exchange([mine, mine[0]], group)
    check(first, x[r - 1].t())
    check(second, x[r - 1].t()[0])
    check(mine, before)
    with pytest.raises(ValueError, match=r"dimension 0 of \(5, 6\) does not divide over 3 ranks of tp"):
        c.own_slice(mine[:5], group)
    return True


@pytest.mark.dist
def test_collectives_do_what_they_say_and_leave_their_input_alone():
    assert run_ranks(plain, 3) == [True] * 3


DUALS = {  # name -> the function with its dimensions, on x, in a group
    "copy_to": lambda x, g: c.copy_to(x, g), "reduce_from": lambda x, g: c.reduce_from(x, g),
    "split_to": lambda x, g: c.split_to(x, g, 1), "gather_from": lambda x, g: c.gather_from(x, g, 1),
    "gather_sum": lambda x, g: c.gather_sum(x, g, 0), "scatter_sum": lambda x, g: c.scatter_sum(x, g, 0),
    "exchange": lambda x, g: c.exchange(x, g, 0, 1),
}
SUMMED = ("copy_to", "gather_sum")  # behind them every rank does another part of the work


def duals(name):
    """Gradient of a loss through one collective, and what one process finds for the same computation.

    Where every rank goes on with the same numbers they all compute the same loss; else the losses of the ranks add up.
    """
    mesh = init_mesh("cpu", tp=2, dp=1)
    group, r, n = mesh.tp_group, mesh.tp_rank, 2
    inputs = torch.arange(n * 16, dtype=torch.float64).view(n, 4, 4).cos()
    if name in ("copy_to", "split_to"):
        inputs = inputs[:1].expand(n, 4, 4).contiguous()  # replicated
    mine = inputs[r].clone().requires_grad_()
    out = DUALS[name](mine, group)
    replicated = name in ("reduce_from", "gather_from")
    weights = torch.arange(out.numel(), dtype=torch.float64).view(out.shape) + (0 if replicated else 100 * r)
    (out.square() * weights).sum().backward()

    x = inputs.clone().requires_grad_()
    same = x[0] if name in ("copy_to", "split_to") else None
    outs = {"copy_to": lambda k: same, "reduce_from": lambda k: x.sum(0), "split_to": lambda k: same.chunk(n, 1)[k],
            "gather_from": lambda k: torch.cat([*x], 1), "gather_sum": lambda k: torch.cat([*x], 0),
            "scatter_sum": lambda k: x.sum(0).chunk(n, 0)[k],
            "exchange": lambda k: torch.cat([y.chunk(n, 0)[k] for y in x], 1)}[name]
    base = torch.arange(out.numel(), dtype=torch.float64).view(out.shape)
    losses = [(outs(k).square() * (base + (0 if replicated else 100 * k))).sum() for k in range(n)]
    (losses[0] if replicated else sum(losses)).backward()
    torch.testing.assert_close(out.detach(), outs(r).detach())
    torch.testing.assert_close(mine.grad, x.grad[0] if same is not None else x.grad[r])
    return mine.grad.abs().sum().item()


def all_duals():
    return [duals(name) for name in DUALS]


@pytest.mark.dist
def test_each_dual_is_the_gradient_of_its_forward():
    for gradients in run_ranks(all_duals, 2):
        assert min(gradients) > 0


def test_a_group_of_one_returns_its_input():
    group, x = Mesh().tp_group, torch.ones(2, 2, requires_grad=True)
    for function in DUALS.values():
        assert function(x, group) is x
    assert c.all_reduce(x, group) is x and c.ring_exchange([x], group) == [x] and ring_all_reduce(x, group) is x
    assert not group.ledger.calls


# ------------------------------------------------------------------ the ring


def ring(shape):
    mesh = init_mesh("cpu")
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin() * (1 + mesh.dp_rank)
    before = x.clone()
    total = ring_all_reduce(x, mesh.dp_group)
    assert torch.equal(x, before)
    sent = mesh.ledger.bytes["send", "dp"]
    torch.testing.assert_close(total, c.all_reduce(x, mesh.dp_group), rtol=1e-14, atol=0)
    return mesh.ledger.calls["send", "dp"], sent, mesh.ledger.bytes["all_reduce", "dp"]


SHAPES = [(24,), (5, 7), ()]


def rings():
    return [ring(shape) for shape in SHAPES]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_sums_in_2_n_minus_1_steps_and_sends_what_the_formula_says(ranks):
    for found in run_ranks(rings, ranks):
        for shape, (calls, sent, whole) in zip(SHAPES, found, strict=True):
            numel = torch.Size(shape).numel()
            chunk = -(-numel // ranks)  # rounded up: the last chunk is padded
            assert calls == 2 * (ranks - 1)
            assert sent == 2 * (ranks - 1) * chunk * 8
            assert whole == numel * 8
            if numel % ranks == 0:
                assert sent == 2 * (ranks - 1) / ranks * whole
