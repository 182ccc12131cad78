"""The collectives that everything in this folder is made of. None changes its input; all are counted in the ledger.

First the plain ones, tensors in and out. Then those that autograd goes through: each has a **dual**, the collective
that carries the gradient back. Forward and backward of a parallel layer are always one of these rows (N ranks):

    name          forward            backward           local shape           used for
    copy_to       identity           all-reduce         (n) -> (n)            into a column-parallel layer
    reduce_from   all-reduce         identity           (n) -> (n)            out of a row-parallel layer
    split_to      own slice          all-gather         (n) -> (n / N)        replicated -> sharded
    gather_from   all-gather         own slice          (n / N) -> (n)        sharded -> replicated
    gather_sum    all-gather         reduce-scatter     (n / N) -> (n)        sequence parallel, into a layer
    scatter_sum   reduce-scatter     all-gather         (n) -> (n / N)        sequence parallel, out of it
    exchange      all-to-all         all-to-all back    (N a, b) -> (a, N b)  Ulysses: columns for heads

`gather_from` differs from `gather_sum` in what happens behind it: there each rank does the same with the whole tensor,
so its gradient is whole already; behind `gather_sum` each does another part of the work, and the gradients are parts
that must be added up.

A group of one rank costs nothing: every function returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.parallel.mesh import Group

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
# torch 2.13 has new names for these two, and warns of the old ones, which are all that torch 2.6 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- plain ----

def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp = SUM) -> Tensor:
    """The sum (or maximum) over the ranks, on all of them."""
    if group.size == 1:
        return x
    group.ledger.add("all_reduce", group.name, x)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, group=group.handle)
    return x


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The tensors of all ranks, joined along `dim` in the order of the ranks. All have one shape."""
    if group.size == 1:
        return x
    front = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(group.size * front.shape[0], *front.shape[1:])
    group.ledger.add("all_gather", group.name, whole)
    _all_gather(whole, front, group=group.handle)
    return whole.movedim(0, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice, along `dim`, of the sum over the ranks."""
    if group.size == 1:
        return x
    group.ledger.add("reduce_scatter", group.name, x)
    front = x.movedim(dim, 0).contiguous()
    mine = x.new_empty(_slice_size(x, group, dim), *front.shape[1:])
    _reduce_scatter(mine, front, group=group.handle)
    return mine.movedim(0, dim)


def own_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's slice along `dim`; no communication."""
    if group.size == 1:
        return x
    size = _slice_size(x, group, dim)
    return x.narrow(dim, group.rank * size, size)


def all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """Cut along `split`, send piece r to rank r, and join what comes along `join`."""
    if group.size == 1:
        return x
    group.ledger.add("all_to_all", group.name, x)
    size = _slice_size(x, group, split)
    pieces = torch.stack(x.split(size, split))  # (N, ...)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group.handle)
    return torch.cat(received.unbind(), join)


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """What rank number `source` of the group has."""
    if group.size == 1:
        return x
    group.ledger.add("broadcast", group.name, x)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(x, group.ranks[source], group=group.handle)
    return x


def ring_exchange(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Pass tensors on to the next rank of the ring, and get those of the one before."""
    if group.size == 1:
        return tensors
    after, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    received = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    operations = []
    for x, into in zip(tensors, received, strict=True):
        group.ledger.add("send", group.name, x)
        operations += [dist.P2POp(dist.isend, x.contiguous(), after, group.handle),
                       dist.P2POp(dist.irecv, into, before, group.handle)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def start_exchange(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]],
                   group: Group) -> tuple[list[dist.Work], list[dist.Work]]:
    """Begin to send each tensor to a rank of the group, and to receive into each from one; nobody waits yet.

    returns the works of the sends and of the receives. A tensor must be kept, and left alone, until its work is done.
    """
    if not sends and not receives:
        return [], []
    for x, _ in sends:
        group.ledger.add("send", group.name, x)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, group.ranks[to], group.handle) for x, to in sends] +
        [dist.P2POp(dist.irecv, x, group.ranks[source], group.handle) for x, source in receives])
    if len(works) == 1:  # NCCL makes one of them all
        works = works * (len(sends) + len(receives))
    return works[: len(sends)], works[len(sends):]


def gather_objects(value: Any, group: Group) -> list[Any]:
    """What each rank has, in the order of the ranks: small things that can be pickled, such as names."""
    values = [value] * group.size
    if group.size > 1:
        dist.all_gather_object(values, value, group=group.handle)
    return values


def broadcast_object(value: Any, group: Group) -> Any:
    """What the first rank has: something small that can be pickled. The others' value is not looked at."""
    values = [value]
    if group.size > 1:
        dist.broadcast_object_list(values, group.ranks[0], group=group.handle)
    return values[0]


# Begun now, waited for later, so that a rank can compute meanwhile. Each returns the function that waits.

def begin_all_reduce(x: Tensor, group: Group) -> Callable[[], object]:
    """x becomes the sum over the ranks."""
    if group.size == 1:
        return _done
    group.ledger.add("all_reduce", group.name, x)
    return dist.all_reduce(x, SUM, group=group.handle, async_op=True).wait


def begin_all_gather(whole: Tensor, part: Tensor, group: Group) -> Callable[[], object]:
    """whole (N n,) becomes the parts (n,) of all ranks; `part` may be this rank's slice of it."""
    if group.size == 1:
        whole.copy_(part)
        return _done
    group.ledger.add("all_gather", group.name, whole)
    return _all_gather(whole, part, group=group.handle, async_op=True).wait


def begin_reduce_scatter(part: Tensor, whole: Tensor, group: Group) -> Callable[[], object]:
    """part (n,) becomes this rank's slice of the sum of whole (N n,) over the ranks."""
    if group.size == 1:
        part.copy_(whole)
        return _done
    group.ledger.add("reduce_scatter", group.name, whole)
    return _reduce_scatter(part, whole, group=group.handle, async_op=True).wait


def _done() -> None:
    """Nothing is on its way."""


def _slice_size(x: Tensor, group: Group, dim: int) -> int:
    if x.shape[dim] % group.size:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide over {group.size} ranks of {group.name}")
    return x.shape[dim] // group.size


# ---- through autograd ----

class _Dual(torch.autograd.Function):
    """forward_op on the way there, backward_op on the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_op: Callable[[Tensor], Tensor], backward_op: Callable[[Tensor], Tensor]):
        ctx.backward_op = backward_op
        return forward_op(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.backward_op(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd wants a new tensor, not a new memory


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradient is summed over the ranks, each of which did a part of the work behind it."""
    return x if group.size == 1 else _Dual.apply(x, _same, lambda grad: all_reduce(grad, group))


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """All-reduce of the parts; everyone goes on with the same sum, so the gradient passes as it is."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: all_reduce(x, group), _same)


def split_to(x: Tensor, group: Group, dim: int) -> Tensor:
    """Own slice of what every rank has; backward: all-gather."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: own_slice(x, group, dim).contiguous(),
                                                 lambda grad: all_gather(grad, group, dim))


def gather_from(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather into what every rank then treats alike; backward: own slice."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: all_gather(x, group, dim),
                                                 lambda grad: own_slice(grad, group, dim).contiguous())


def gather_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather into what every rank uses in its own way; backward: reduce-scatter."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: all_gather(x, group, dim),
                                                 lambda grad: reduce_scatter(grad, group, dim))


def scatter_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """Reduce-scatter; backward: all-gather."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: reduce_scatter(x, group, dim),
                                                 lambda grad: all_gather(grad, group, dim))


def exchange(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """All-to-all; backward: the same with the two dimensions swapped."""
    return x if group.size == 1 else _Dual.apply(x, lambda x: all_to_all(x, group, split, join),
                                                 lambda grad: all_to_all(grad, group, join, split))
