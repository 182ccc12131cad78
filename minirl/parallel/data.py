"""Data parallelism: every rank has the whole model and a share of the rows; gradients are added up.

They are **summed**, never averaged. The loss of a row is divided by one denominator that counts the rows or tokens of
all ranks and all microbatches (`losses.loss_total`), so the parts of a step simply add up, however they are cut. A mean
over ranks of means over microbatches would weigh a token by the company it happens to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from minirl.logprobs import Output, token_logprobs
from minirl.model import Transformer
from minirl.parallel.collectives import MAX, all_reduce, gather_objects
from minirl.parallel.context import cut_columns
from minirl.parallel.mesh import Mesh
from minirl.parallel.pipeline import run_schedule, sum_tied_gradients
from minirl.parallel.placement import sum_partial_gradients
from minirl.rollout import Rollout

LossFn = Callable[[Output, Rollout], tuple[Tensor, dict[str, Tensor]]]


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
                     temperature: float = 1.0, entropy: bool = False) -> dict[str, float]:
    """One optimizer update's worth of forward and backward passes; gradients end up summed over all replicas.

    loss_fn : (out, microbatch) -> (loss, stats). `loss` is already divided by the denominator of the whole update.
              `stats` are sums over the microbatch, except names that begin with "max_", which are maxima.
              Under context parallelism a microbatch has this rank's columns; sums over whole rows, which all ranks
              of a cp group then have alike, have names that begin with "row".
    entropy : whether out.entropy is wanted (it is None otherwise)
    returns : the stats of all microbatches and replicas, "loss" among them
    """
    run = one_by_one if model.pipeline is None else run_schedule
    totals: dict[str, Tensor] = {}
    for stats in run(model, microbatches, loss_fn, mesh, temperature, entropy):
        for name, value in stats.items():
            value = value.double()
            old = totals.get(name, torch.zeros_like(value))
            totals[name] = torch.maximum(old, value) if name.startswith("max_") else old + value
    sum_tied_gradients(model)
    sum_gradients(model, mesh)
    return gather_objects(reduce_stats(totals, mesh), mesh.pp_group)[-1]  # only the last stage of a pipeline has any


def one_by_one(model: Transformer, microbatches: Iterable[Rollout], loss_fn: LossFn, mesh: Mesh, temperature: float,
               entropy: bool) -> Iterator[dict[str, Tensor]]:
    """Forward and backward of each microbatch on a whole model; its stats, with "loss"."""
    for microbatch in microbatches:
        out = token_logprobs(model, microbatch.tokens, temperature, microbatch.documents, entropy, mesh.cp_group)
        loss, stats = loss_fn(out if entropy else Output(out, None), cut_columns(microbatch, mesh))
        loss.backward()
        yield {**stats, "loss": loss.detach()}


def sum_gradients(model: Transformer, mesh: Mesh) -> None:
    """Complete the gradients within a replica, then add up those of all replicas: one all-reduce over one flat buffer.

    A parameter that this rank's rows did not reach takes part with zeros; leaving it out would shift every number
    behind it, or hang the others.
    """
    sum_partial_gradients(model, mesh.tp_group)
    if mesh.data_group.size == 1:
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = all_reduce_sum(flat, mesh)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)


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
    """This replica's prompts of a rollout, with all their rows."""
    prompts = rollout.group.unique()
    mine = mesh.share(len(prompts), "prompts of the replayed rollout")
    return rollout.rows(torch.isin(rollout.group, prompts[mine.start : mine.stop]).nonzero()[:, 0])
