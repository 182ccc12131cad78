"""Data parallelism: every rank has the whole model and a share of the rows; gradients are added up.

They are **summed**, never averaged. The loss of a row is divided by one denominator that counts the rows or tokens of
all ranks and all microbatches (`losses.loss_total`), so the parts of a step simply add up, however they are cut. A mean
over ranks of means over microbatches would weigh a token by the company it happens to keep.

`sum_gradients` is all there is to it: one all-reduce after the last backward. `Overlap` does the same sooner: it sends
the gradients of the last layers while backward is still at work on the first ones.

    backward    [ layer 3 ][ layer 2 ][ layer 1 ][ layer 0 ]                 of the last microbatch of an update;
    network                [ bucket of 3 ][ bucket of 2 ][ of 1, 0 ]         those before it send nothing

Gradients have their parameter's dtype, and are summed in it, over microbatches as over ranks. In bfloat16 each sum
rounds, although master weights are float32. Measured (`tests/test_parallel.py`), as a part of the gradient: sums over 8
ranks of 8 microbatches are off by 0.5 %, what is summed by 1.4 %, because backward itself is in bfloat16, and both
together by 1.5 %. Sums in float32 would take twice the traffic, and twice the memory of gradients, to gain that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from minirl.logprobs import LossFn, Output, first_action, loss_here, read_rows
from minirl.model import Transformer
from minirl.parallel.collectives import MAX, all_reduce, begin_all_reduce, gather_objects
from minirl.parallel.context import cut_columns
from minirl.parallel.mesh import Group, Mesh
from minirl.parallel.pipeline import run_schedule, sum_tied_gradients
from minirl.parallel.placement import is_tied, mark_tied, sum_partial_gradients
from minirl.rollout import Rollout

BUCKET_BYTES = 25 * 2**20  # large enough to fill the network, small enough that the first leaves early


def all_reduce_sum(value: Tensor, mesh: Mesh | None) -> Tensor:
    """The sum over all that hold the same weights for other tokens (dp x cp); the input is left as it is."""
    return value if mesh is None else all_reduce(value, mesh.data_group)


def all_reduce_max(value: Tensor, mesh: Mesh | None) -> Tensor:
    """The maximum over them; the input is left as it is."""
    return value if mesh is None else all_reduce(value, mesh.data_group, MAX)


def barrier(mesh: Mesh) -> None:
    """Nobody goes on before everybody is here."""
    all_reduce(torch.zeros(1, device=mesh.device), mesh.world_group)


def forward_backward(model: Transformer, microbatches: Iterable[Rollout], loss_fn: LossFn, mesh: Mesh,
                     temperature: float = 1.0, entropy: bool = False, by_token: bool = False) -> dict[str, float]:
    """One optimizer update's worth of forward and backward passes; gradients end up summed over all replicas.

    loss_fn : (out, microbatch) -> (loss, stats). `loss` is already divided by the denominator of the whole update.
              `stats` are sums over the microbatch, except names that begin with "max_", which are maxima.
              Under context parallelism a microbatch has this rank's columns; sums over whole rows, which all ranks
              of a cp group then have alike, have names that begin with "row".
              Before the first column with an action in any row, log-probs and entropies are 0: nobody asks for them.
    entropy : whether out.entropy is wanted (it is None otherwise). A reward model or critic gives out.values alone
    by_token: the loss is a sum over tokens, each of which looks at its own column alone. With a large vocabulary
              loss_fn is then called for some columns after the others, and three products of the head do for four
    returns : the stats of all microbatches and replicas, "loss" among them

    A parameter that no row reached has a gradient of zeros, in every layout.
    """
    run = one_by_one if model.pipeline is None else run_schedule
    totals: dict[str, Tensor] = {}
    microbatches, sync = list(microbatches), getattr(model, "zero", None) or Overlap(model, mesh)
    if sync.in_step:
        microbatches, loss_fn = in_step(microbatches, loss_fn, mesh)
    with own_dropout(mesh), sync:
        for stats in run(model, microbatches, loss_fn, mesh, temperature, entropy, by_token, sync.backward):
            for name, value in stats.items():
                value = value.double()
                old = totals.get(name, torch.zeros_like(value))
                totals[name] = torch.maximum(old, value) if name.startswith("max_") else old + value
        sum_tied_gradients(model)
    return gather_objects(reduce_stats(totals, mesh), mesh.pp_group)[-1]  # only the last stage of a pipeline has any


def one_by_one(model: Transformer, microbatches: Sequence[Rollout], loss_fn: LossFn, mesh: Mesh, temperature: float,
               entropy: bool, by_token: bool, backward: Callable) -> Iterator[dict[str, Tensor]]:
    """Forward and backward of each microbatch on a whole model; its stats, with "loss"."""
    for number, microbatch in enumerate(microbatches, 1):
        reading = read_rows(microbatch, mesh.cp_group)
        microbatch = cut_columns(microbatch, mesh)
        first = first_action(microbatch.action_mask)
        hidden, targets = reading.hidden(model), reading.targets  # (B, S, D), (B, S)
        loss, stats = loss_here(model, hidden, targets, microbatch, first, loss_fn, temperature, entropy, by_token)
        backward(loss, last=number == len(microbatches))
        yield {**stats, "loss": loss.detach()}


# ---- the sum, in one piece ----

def sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Add up the gradients of all replicas: one all-reduce over one flat buffer. `Overlap` does the same."""
    sum_partial_gradients(model, mesh.tp_group)
    parameters = [p for p in model.parameters() if p.requires_grad]
    set_gradients(parameters, all_reduce_sum(flat_gradients(parameters), mesh))


def flat_gradients(parameters: Sequence[nn.Parameter], length: int = 0) -> Tensor:
    """All gradients behind one another, then zeros up to `length`.

    A parameter that this rank's rows did not reach takes part with zeros; leaving it out would shift every number
    behind it, or hang the others.
    """
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    padding = length - sum(map(len, parts))
    return torch.cat([*parts, parts[0].new_zeros(padding)] if padding > 0 else parts)


def set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """The way back: each gradient becomes a view of its part of the buffer."""
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)


# ---- the same in buckets, while backward goes on ----

class Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self.missing = 0  # how many of their gradients backward has not found yet
        self.tied = any(is_tied(p) for p in parameters)


class Overlap:
    """Sums the gradients of all replicas during the last backward of an update.

        with Overlap(model, mesh) as sync:
            sync.backward(loss, last=False)         gradients of the microbatches add up where they are
            sync.backward(loss, last=True)          a bucket leaves as soon as its last gradient is there
                                                    at the end: send what is left, wait for all

    Backward finds gradients from the last layer to the first, so buckets are filled in that order. And on every rank
    they leave in that order, no matter which is full first: the ranks match collectives by their order alone. A bucket
    that is never full, because rows of this rank do not reach a parameter or there are no rows, leaves at the end.

    What a tensor-parallel group holds in parts is summed within the group before it leaves. A tied embedding, which the
    first and the last stage of a pipeline have both, leaves at the end, so that the stages can add up their gradients
    after the last backward.
    """

    in_step = False  # whether all ranks must do the same number of microbatches

    def __init__(self, model: nn.Module, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES):
        self.mesh = mesh
        mark_tied(model)
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self.buckets = [Bucket(parameters) for parameters in split_by_size(trained, bucket_bytes)]

    def __enter__(self) -> Overlap:
        self.armed, self.waits = False, []
        self.hooks = [p.register_post_accumulate_grad_hook(partial(self.arrived, bucket))
                      for bucket in self.buckets for p in bucket.parameters if self.mesh.size > 1]
        self.refill()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        for hook in self.hooks:
            hook.remove()
        if kind is None:  # else the other ranks are not here, and waiting for them would hide the error
            self.flush()
            for wait in self.waits:
                wait()

    def backward(self, tensor: Tensor, last: bool, grad: Tensor | None = None) -> None:
        """Backward of one microbatch, from a loss, or from a stage's output and its gradient.

        last : no later backward of this update reaches the same parameters
        """
        self.armed = last
        torch.autograd.backward(tensor, grad)
        self.armed = False

    def refill(self) -> None:
        """Every bucket waits for all its gradients."""
        self.queue = list(self.buckets)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Called by autograd when a parameter has its gradient of this backward."""
        if not self.armed:
            return
        bucket.missing -= 1
        while self.queue and not self.queue[0].missing and not self.queue[0].tied:
            self.send(self.queue.pop(0))

    def flush(self) -> None:
        """Send what is left."""
        while self.queue:
            self.send(self.queue.pop(0))

    @torch.no_grad()
    def send(self, bucket: Bucket) -> None:
        """Start the sum of a full bucket over the replicas; backward goes on meanwhile."""
        complete_gradients(bucket.parameters, self.mesh.tp_group)
        if self.mesh.data_group.size == 1:
            return
        flat = flat_gradients(bucket.parameters)
        set_gradients(bucket.parameters, flat)  # views of what is still being summed: nobody reads them before the end
        self.waits.append(begin_all_reduce(flat, self.mesh.data_group))


def split_by_size(parameters: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Pieces of one dtype and at most `size` bytes (or one parameter), in order; tied ones apart, at the end."""
    pieces: list[list[nn.Parameter]] = []
    room, kind = 0, None
    for p in sorted(parameters, key=is_tied):
        if p.nbytes > room or kind != (p.dtype, is_tied(p)):
            pieces.append([])
            room, kind = size, (p.dtype, is_tied(p))
        pieces[-1].append(p)
        room -= p.nbytes
    return pieces


def complete_gradients(parameters: Sequence[nn.Parameter], tp_group: Group) -> None:
    """Zeros where no row came by, and whole sums where a tensor-parallel group has parts."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    sum_partial_gradients(parameters, tp_group)


# ---- around it ----

@contextmanager
def own_dropout(mesh: Mesh) -> Iterator[None]:
    """Other masks on ranks that see other tokens (dp, cp) or layers (pp); a tensor-parallel group drops the same.

    torch's generator, from which dropout draws, begins alike on every rank. One draw from it seeds what happens inside;
    after it the ranks are in step again, so that a checkpoint needs the state of one of them only.
    """
    seed = int(torch.randint(2**62, ())) + mesh.data_group.rank * mesh.pp + mesh.pp_rank
    with torch.random.fork_rng([mesh.device] if mesh.device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield


def in_step(microbatches: list[Rollout], loss_fn: LossFn, mesh: Mesh) -> tuple[list[Rollout], LossFn]:
    """As many microbatches as the replica with the most has: the ranks meet in every one of them (`zero.py`).

    Those added are one row of two tokens, whose loss is 0 times something.
    """
    most = all_reduce_max(torch.tensor(len(microbatches), device=mesh.device), mesh)
    one = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    idle = Rollout(torch.zeros(1, 2, dtype=torch.int64, device=mesh.device), one[None] > 0, one + 2, one, one)

    def loss_or_nothing(out: Output, microbatch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        if microbatch.lengths is not idle.lengths:
            return loss_fn(out, microbatch)
        return sum(x.sum() * 0 for x in (out.logprobs, out.values) if x is not None), {}

    return microbatches + [idle] * (int(most) - len(microbatches)), loss_or_nothing


def reduce_stats(totals: dict[str, Tensor], mesh: Mesh) -> dict[str, float]:
    """Sums (or maxima) over replicas -> Python floats. A replica without rows has no names of its own to report."""
    if mesh.cp_rank:  # the first rank of each cp group has counted the rows
        totals = {name: torch.zeros_like(value) if name.startswith("row") else value for name, value in totals.items()}
    names = sorted(set().union(*gather_objects(list(totals), mesh.data_group)))
    if not names:
        return {}
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    values = torch.stack([totals.get(name, zero) for name in names])
    sums, maxima = all_reduce_sum(values, mesh).tolist(), all_reduce_max(values, mesh).tolist()
    return {name: maxima[i] if name.startswith("max_") else sums[i] for i, name in enumerate(names)}


def share_of(rollout: Rollout, mesh: Mesh) -> Rollout:
    """This replica's groups of a rollout, with all their rows: as many as the others have, or one more or less."""
    groups = rollout.group.unique()
    first, end = (len(groups) * (mesh.dp_rank + i) // mesh.dp for i in range(2))
    return rollout.rows(torch.isin(rollout.group, groups[first:end]).nonzero()[:, 0])
