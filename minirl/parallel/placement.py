"""Which part of a parameter a rank holds, and what its gradient lacks. Put on the parameter as `parameter.placement`.

The model file knows nothing of it. Whoever shards a model (`tensor.py`) notes here what was done, and whoever needs
the whole again (gradient norm, checkpoints) reads it: no list of names to keep in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.parallel.collectives import all_gather, all_reduce
from minirl.parallel.mesh import Group


@dataclass(frozen=True)
class Placement:
    """How a parameter lies on the ranks of a tensor-parallel group."""

    dim: int | None = None  # cut along this dimension; None: every rank has all of it
    sizes: tuple[int, ...] = ()  # of the parts, in order; they may differ
    copies: int = 1  # so many neighbours hold the same part (fewer key heads than ranks)
    partial: bool = False  # each rank's gradient is a part of the sum, although the parameter is whole

    def part_of(self, rank: int) -> int:
        """The number of the part that a rank holds."""
        return rank // self.copies


WHOLE = Placement()


def placement(parameter: Tensor) -> Placement:
    return getattr(parameter, "placement", WHOLE)


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` parts of a dimension, which differ by 1 at most: 10 over 4 is 3, 3, 2, 2. None is empty."""
    return tuple((length + parts - 1 - part) // parts for part in range(parts))


def cut(parameter: Tensor, where: Placement, group: Group) -> nn.Parameter:
    """This rank's part of a whole parameter, as a parameter of its own that knows its placement."""
    part = where.part_of(group.rank)
    start = sum(where.sizes[:part])
    piece = parameter.detach().narrow(where.dim, start, where.sizes[part]).clone()
    return mark(nn.Parameter(piece, requires_grad=parameter.requires_grad), where)


def mark(parameter: nn.Parameter, where: Placement) -> nn.Parameter:
    parameter.placement = where
    return parameter


def whole(tensor: Tensor, where: Placement, group: Group) -> Tensor:
    """The whole of a tensor that lies as `where` says, a parameter, its gradient or its averages; on every rank."""
    if where.dim is None or group.size == 1:
        return tensor
    largest = max(where.sizes)
    front = tensor.detach().movedim(where.dim, 0)
    padded = F.pad(front, (0, 0) * (front.dim() - 1) + (0, largest - front.shape[0]))
    parts = all_gather(padded, group).view(group.size, largest, *front.shape[1:])[:: where.copies]
    return torch.cat([part[:size] for part, size in zip(parts, where.sizes, strict=True)]).movedim(0, where.dim)


@torch.no_grad()
def sum_partial_gradients(model: nn.Module | Iterable[nn.Parameter], group: Group) -> None:
    """Complete the gradients that a tensor-parallel group holds in parts: one all-reduce.

    Two kinds: parameters that all hold but use on different tokens or heads (`partial`), and parts with `copies`, which
    are laid into a whole of zeros, summed, and cut out again.
    """
    if group.size == 1:
        return
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    found = [(p, placement(p)) for p in parameters
             if p.requires_grad and (placement(p).partial or placement(p).copies > 1)]
    if not found:
        return
    pieces = []
    for p, where in found:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if where.copies > 1:
            shape = list(p.shape)
            shape[where.dim] = sum(where.sizes)
            part = where.part_of(group.rank)
            laid = grad.new_zeros(shape)
            laid.narrow(where.dim, sum(where.sizes[:part]), where.sizes[part]).copy_(grad)
            grad = laid
        pieces.append(grad)
    flat = all_reduce(torch.cat([piece.flatten() for piece in pieces]), group)
    for (p, where), piece, part in zip(found, pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
        part = part.view_as(piece)
        if where.copies > 1:
            number = where.part_of(group.rank)
            part = part.narrow(where.dim, sum(where.sizes[:number]), where.sizes[number])
        p.grad = part.contiguous()


def mark_tied(model: nn.Module) -> None:
    """Note on a parameter that another stage of the pipeline has it too: it counts once in the norm, on the first."""
    if getattr(model, "pipeline", None) is not None and model.tied:
        for p in model.embed_tokens.parameters():
            p.tied = True


def is_tied(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "tied", False)
