"""ZeRO (arXiv:1910.02054): N replicas need not hold N copies. In three steps, over one idea.

The idea: the parameters of a unit (the embedding; a block; last norm and head) lie in one flat vector, padded to a
multiple of N. **Rank r owns slice r**, and it alone updates those numbers.

    unit          [ q_proj      | k_proj  | ...  | down_proj     | norms |pad]      matrices first, so that those which
    N = 4         [ rank 0      | rank 1       | rank 2        | rank 3      ]      decay are the first of a slice, too

    step          kept in slices                         sent in an update of M microbatches
    0             nothing                                all-reduce of the gradients              (P numbers)
    1             optimizer                              reduce-scatter of the gradients, all-gather of the parameters
    2             optimizer, gradients                   M reduce-scatters, one all-gather
    3             optimizer, gradients, parameters       M reduce-scatters, 2 M all-gathers (embedding and head: M)

A ring all-reduce *is* a reduce-scatter and an all-gather (`ring.py`), so step 1 sends what plain data parallelism does,
and so does step 2 with one microbatch; step 3 sends half as much again. A trained parameter costs a rank, in bytes
(float32; bfloat16 with float32 masters),

    step          parameters          gradients           optimizer
    0             4      2            4      2            8      12
    1             4      2            4      2            8 / N  12 / N
    2             4      2            4 / N  2 / N        8 / N  12 / N
    3             4 / N  2 / N        4 / N  2 / N        8 / N  12 / N

and a frozen one (LoRA's base) only its first column. Besides, for a while: step 2 two units' gradients, one being
found and one on its way; and step 3 **two units**, which are

    forward     a unit's parameters, and the next one's, on their way while it computes
    backward    a unit's parameters and its gradients as they are found; then, without the parameters, the gradients and
                the vector that they leave in, which is gone before the next unit's parameters come

So backward computes, or it sends: to do both at once (`overlap`) takes four units, two of parameters and two of
gradients. A tied embedding is one matrix more either way: it stays here from the first forward to the head's backward,
and as a gradient from there to the end.

A block is gathered before its forward and before its backward, and dropped after each. With recomputed blocks
(`gradient_checkpointing`) backward's gather serves both. Whatever else reads parameters, sampling above all, does so in
`with gathered(model)`, which gathers all of them once.

    zero.shard(model, mesh, stage=3)
    optimizer = ShardedAdamW(model, lr, offload=True)             offload: averages and masters in the host's memory
    stats = forward_backward(model, microbatches, loss_fn, mesh)
    guard.step(optimizer, clip_gradients(model.parameters(), max_norm, mesh), lr, stats["loss"])

With a pipeline gradients stay whole until the last microbatch, as in step 1, because many microbatches are under way at
once. With tensor parallelism a flat vector is made of the local parts.

Planned, not built: ZeRO++ (arXiv:2306.10209). Its three parts fit in here: weights quantised to int8 in blocks before
they are gathered (`Flat.begin_gather` would send codes and scales), a second slice of the weights within each machine,
so that backward's gather need not leave it (a `Group` of the machine), and gradients quantised to int4 and exchanged by
an all-to-all in place of the reduce-scatter. The first and the last change the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minirl.config import UserError
from minirl.model import Transformer
from minirl.parallel.collectives import begin_all_gather, begin_reduce_scatter
from minirl.parallel.data import Bucket, Overlap, complete_gradients, flat_gradients
from minirl.parallel.mesh import Group, Mesh
from minirl.parallel.placement import is_tied, mark_tied

EMBEDDING = -1  # number of the unit before block 0; what is behind the last of L blocks has number L


def shard(model: Transformer, mesh: Mesh, stage: int, overlap: bool = False) -> Transformer:
    """Spread the model over the mesh's data group, in place; stage 0 leaves it as it is. Returns the model.

    overlap : in step 3 backward goes on while gradients leave and the next block comes, for two blocks' memory more

    From then on `parameter.piece` is what this rank owns of a parameter, gradient included. Do not move or cast the
    model afterwards: its parameters are views.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"--zero {stage} is unknown: use 0 (off), 1, 2 or 3")
    if hasattr(model, "zero"):
        raise UserError(f"the model is sharded already, by ZeRO-{model.zero.stage}: load it anew to change that")
    if stage:
        model.zero = Zero(model, mesh, stage, overlap)
    return model


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """The whole model on every rank, to read: for sampling, evaluation, saving. Every rank must come here."""
    zero = getattr(model, "zero", None)
    if zero is None or zero.held:
        yield model
        return
    zero.hold()
    try:
        yield model
    finally:
        zero.held = False
        zero.release(*zero.units)


# ---- the flat vector ----

def span(offset: int, numel: int, size: int, rank: int) -> tuple[int, int]:
    """Which of a parameter's numbers lie in slice `rank` of a flat vector: start, stop; the same if none.

    The parameter's `numel` numbers begin at `offset` of the vector, and slices have `size` numbers.

    >>> [span(3, 7, 5, rank) for rank in range(3)]       # 7 numbers at places 3 .. 9; slices 0-4, 5-9, 10-14
    [(0, 2), (2, 7), (7, 7)]
    """
    return tuple(min(max(edge * size - offset, 0), numel) for edge in (rank, rank + 1))


# What may be asked of a parameter that is not here: how it looks, and for its gradient.
LOOKS = {"shape", "size", "ndim", "dim", "numel", "dtype", "itemsize", "element_size", "nbytes", "device", "is_meta",
         "layout", "is_floating_point", "is_complex", "is_leaf", "requires_grad", "requires_grad_", "grad",
         "grad_dtype", "zeros_like", "empty_like", "untyped_storage", "register_post_accumulate_grad_hook",
         "_post_accumulate_grad_hooks", "_backward_hooks"}


class Away(nn.Parameter):
    """What a parameter is while its numbers lie on other ranks. To read them would end the process: say so instead."""

    @classmethod
    def __torch_function__(cls, function: Callable, types, args: tuple = (), kwargs: dict | None = None):
        attribute = function.__name__ in ("__get__", "__set__", "__delete__")
        if (function.__self__ if attribute else function).__name__ not in LOOKS:
            raise RuntimeError("the model's parameters lie in slices: use it in forward_backward, or in "
                               "`with gathered(model)` on every rank")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


class Piece(NamedTuple):
    """What this rank owns of one parameter: numbers start .. stop of it, which begin at number `begin` of the slice."""

    flat: Flat
    start: int
    stop: int
    begin: int

    def of(self, slice_: Tensor) -> Tensor:
        """The part of a tensor that lies as the slice does, as a view."""
        return slice_[self.begin : self.begin + self.stop - self.start]

    @property
    def grad(self) -> Tensor | None:
        return None if self.flat.shard.grad is None else self.of(self.flat.shard.grad)


class Flat(Bucket):
    """Parameters of a unit as one vector, of which they become views.

    whole : (N n,)  all numbers and the padding, in memory only while `here`
    shard : (n,)    this rank's slice: of `whole`, or, if the whole is not kept, in memory of its own
    """

    def __init__(self, number: int, named: Mapping[str, nn.Parameter], group: Group, keep: bool):
        self.named = dict(sorted(named.items(), key=lambda item: item[1].dim() < 2))  # matrices first
        super().__init__([*self.named.values()])
        self.number, self.group, self.keep, self.here = number, group, keep, True
        self.wait: Callable[[], object] | None = None
        first, numel = self.parameters[0], sum(p.numel() for p in self.parameters)
        self.size = -(-numel // group.size)  # n
        self.whole = torch.zeros(self.size * group.size, dtype=first.dtype, device=first.device)
        mine = self.whole[group.rank * self.size :][: self.size]
        offset = decayed = 0
        for p in self.parameters:
            start, stop = span(offset, p.numel(), self.size, group.rank)
            p.piece = Piece(self, start, stop, max(0, offset + start - group.rank * self.size))
            decayed += stop - start if p.dim() >= 2 else 0
            place = self.whole[offset : offset + p.numel()].view(p.shape)
            place.copy_(p.detach())
            p.data = place
            offset += p.numel()
        self.shard = nn.Parameter(mine if keep else mine.clone(), requires_grad=first.requires_grad)
        self.shard.decayed = decayed
        if not keep:
            self.free()

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Ask the other ranks for their slices."""
        # The memory comes and goes beneath the views: autograd keeps views of its own, made in forward, for backward.
        if not self.here:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.wait = begin_all_gather(self.whole, self.shard.detach(), self.group)
        self.here = True

    def end_gather(self) -> None:
        if self.wait is not None:
            self.wait()
            self.wait = None
            for p in self.parameters:
                p.__class__ = nn.Parameter

    def free(self) -> None:
        self.end_gather()
        self.whole.untyped_storage().resize_(0)
        self.here = False
        for p in self.parameters:
            p.__class__ = Away


def flats_of(number: int, named: Mapping[str, nn.Parameter], group: Group, keep: bool) -> list[Flat]:
    """A vector for each dtype; trained apart from frozen, and apart from what two stages share (see `Overlap`)."""
    alike: dict[tuple, dict[str, nn.Parameter]] = {}
    for name, p in named.items():
        alike.setdefault((p.requires_grad, p.dtype, is_tied(p)), {})[name] = p
    return [Flat(number, some, group, keep) for some in alike.values()]


# ---- the three steps ----

class Zero(Overlap):
    """The units of a sharded model. As a context it is what `Overlap` is, with other collectives."""

    def __init__(self, model: Transformer, mesh: Mesh, stage: int, overlap: bool = False):
        self.mesh, self.stage, self.overlap, self.held = mesh, stage, overlap, False
        self.every = stage >= 2 and mesh.pp == 1  # gradients leave after every microbatch, not after the last alone
        self.in_step = stage >= 2
        mark_tied(model)
        self.behind = len(model.layers)
        self.head = (self.behind, EMBEDDING) if model.tied else (self.behind,)  # units that the head reads
        self.stays = model.tied and mesh.pp == 1  # the embedding, until the head has been through
        units: dict[int, dict[str, nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad or stage == 3:
                first, number, *_ = f"{name}.".split(".")
                number = int(number) if first == "layers" else EMBEDDING if first.startswith("embed_") else self.behind
                units.setdefault(number, {})[name] = p
        self.units = {number: flats_of(number, named, mesh.data_group, stage < 3) for number, named in units.items()}
        # As backward finds them: what is behind the blocks, blocks from the last to the first, the embedding.
        self.buckets = [flat for number in sorted(self.units, reverse=True) for flat in self.units[number]
                        if flat.shard.requires_grad]
        embeddings = [module for name, module in model.named_children() if name.startswith("embed_")]
        self.modules = [(EMBEDDING, module) for module in embeddings] + [*enumerate(model.layers)]

    # gradients

    def __enter__(self) -> Zero:
        self.coming: Callable[[], None] | None = None  # receives the gradient that is on its way
        self.current: int | None = None  # the unit that backward is in
        super().__enter__()
        if self.stage == 3:
            for number, module in self.modules:
                self.hooks += [module.register_forward_pre_hook(partial(self.before_forward, number)),
                               module.register_forward_hook(partial(self.after_forward, number))]
        return self

    def __exit__(self, kind: type[BaseException] | None, *details) -> None:
        super().__exit__(kind, *details)
        if kind is None:
            self.receive()
            self.release(*self.units)

    def backward(self, tensor: Tensor, last: bool, grad: Tensor | None = None) -> None:
        """As Overlap's; with step 2 or 3 every microbatch sends its gradients, for no rank has room to keep them."""
        if self.every:
            self.refill()
        if grad is None:  # from a loss, so through the head
            self.need(*self.head)
            self.current = self.behind
        super().backward(tensor, last or self.every, grad)
        if self.every:
            self.flush()
        if not self.overlap:
            self.receive()
        self.current = None
        self.release(*self.units)

    @torch.no_grad()
    def send(self, flat: Flat) -> None:
        """The unit's gradients leave; what comes back, this rank's slice of the sum, is added to shard.grad."""
        self.receive()  # the one before: at most one on its way, and one being found
        self.drop(flat)  # the gradients are there, so all has been read; and the next line needs the room
        complete_gradients(flat.parameters, self.mesh.tp_group)
        whole = flat_gradients(flat.parameters, len(flat.whole))
        for p in flat.parameters:
            p.grad = None
        mine = torch.empty_like(flat.shard, requires_grad=False)
        wait = begin_reduce_scatter(mine, whole, flat.group)
        self.coming = partial(self.add, flat, mine, whole, wait)

    def receive(self) -> None:
        if self.coming is not None:
            self.coming()
            self.coming = None

    @torch.no_grad()
    def add(self, flat: Flat, mine: Tensor, whole: Tensor, wait: Callable[[], object]) -> None:
        """`whole` is being read until `wait` returns."""
        wait()
        flat.shard.grad = mine if flat.shard.grad is None else flat.shard.grad.add_(mine)

    def spread(self) -> None:
        """After an update: everyone gets everyone's slices, where the whole is kept."""
        if self.stage < 3:
            for flat in self.buckets:
                flat.begin_gather()
            for flat in self.buckets:
                flat.end_gather()

    # parameters, in step 3

    def hold(self) -> None:
        self.prefetch(*self.units)
        self.need(*self.units)
        self.held = True

    def need(self, *numbers: int) -> None:
        """The units are here when this returns."""
        self.prefetch(*numbers)
        for number in numbers:
            for flat in self.units.get(number, ()):
                flat.end_gather()

    def prefetch(self, *numbers: int) -> None:
        """Ask for units, if they are not here and there are some of those numbers."""
        for number in numbers:
            for flat in self.units.get(number, ()):
                if not flat.here:
                    flat.begin_gather()

    def release(self, *numbers: int) -> None:
        for number in numbers:
            for flat in self.units.get(number, ()):
                self.drop(flat)

    def drop(self, flat: Flat) -> None:
        if flat.here and not flat.keep and not self.held:
            flat.free()

    def before_forward(self, number: int, *_) -> None:
        """The unit of a block is here, and the next one is asked for."""
        if number == self.current:  # backward is recomputing the block that it is in
            return
        if number == 0 and not self.stays:
            self.release(EMBEDDING)
        self.need(number)
        self.prefetch(number + 1)

    def after_forward(self, number: int, block: nn.Module, args: tuple, output: Tensor) -> None:
        """A unit leaves when it has been used, and says where backward will need it again."""
        if number == self.current:
            return
        if number != EMBEDDING:  # which the head may read yet
            self.release(number)
        if number + 1 == self.behind:
            self.need(*self.head)
        if output.requires_grad:
            output.register_hook(partial(self.before_backward, number))

    def before_backward(self, number: int, grad: Tensor) -> None:
        """The gradient of a unit's output is known, so backward is through with the unit behind it.

        To drop all of that one when its last gradient was found would have been too soon: those of adapters are found
        before a frozen norm is read. And if a gradient is still missing there, since no row of this rank reaches the
        parameter, the others leave now: later they would come after the next gather here, and before it on other ranks.
        """
        self.release(*(self.head if number + 1 == self.behind else [number + 1]))
        while self.armed and self.queue and self.queue[0].number > number:
            self.send(self.queue.pop(0))
        self.current = number
        if not self.overlap:
            self.receive()
        if number != EMBEDDING:  # whose backward reads no weights
            self.need(number)
        if self.overlap and number > 0:
            self.prefetch(number - 1)


# ---- the optimizer's state ----

class Layout(NamedTuple):
    """Which numbers of each parameter a rank owns."""

    rank: int
    ranks: int
    spans: dict[str, tuple[int, int]]  # name -> start, stop


def layout_of(model: nn.Module) -> Layout:
    """Which numbers of a sharded model's trained parameters this rank owns."""
    zero = model.zero
    pieces = {name: p.piece for flat in zero.buckets for name, p in flat.named.items()}
    return Layout(zero.mesh.data_group.rank, zero.mesh.data_group.size,
                  {name: (piece.start, piece.stop) for name, piece in pieces.items()})
