"""AdamW, learning-rate schedules, gradient clipping, and the guard against a non-finite update.

One update of a trainer, `learner.Learner.update`, reads

    grad_norm = clip_gradients(policy.parameters(), max_norm, mesh)
    guard.step(optimizer, grad_norm, lr=lr_at(step, total_steps, peak), loss=loss)
    optimizer.zero_grad()

`step` counts steps of the trainer (rollouts in GRPO), never microbatches or ranks: the schedule of a run stays the same
whatever its microbatch size and world size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minirl.config import UserError
from minirl.parallel.collectives import all_reduce
from minirl.parallel.mesh import Mesh
from minirl.parallel.placement import is_tied, placement
from minirl.parallel.zero import layout_of

SCHEDULES = ("cosine", "linear", "constant")


class AdamW:
    """Adam with decoupled weight decay, arXiv:1711.05101 algorithm 2.

    named_parameters : (name, tensor) pairs, as `module.named_parameters()`; frozen ones are left out
    weight_decay     : pulls matrices towards zero; vectors (norms, biases) are never decayed
    offload          : averages and master copies lie in the host's memory, and the update is computed there

    A parameter below float32 keeps a float32 master copy: in bfloat16 a step smaller than 1/256 of the
    weight would be rounded away, and at RL's learning rates nearly all are.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], lr: float,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0,
                 offload: bool = False):
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        if not self.parameters:
            raise UserError("no parameter to train: all are frozen; set requires_grad on those to be trained")
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.updates = 0
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in self.parameters.items()}
        self.master = {name: p.detach().to("cpu" if offload else p.device, wide[name], copy=True)
                       for name, p in self.parameters.items() if offload or p.dtype != wide[name]}
        weights = {name: self.master.get(name, p) for name, p in self.parameters.items()}
        self.exp_avg = {name: torch.zeros_like(w, requires_grad=False) for name, w in weights.items()}
        self.exp_avg_sq = {name: torch.zeros_like(w, requires_grad=False) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """One update in place from each parameter's `.grad`; those without a gradient are left alone."""
        lr = self.lr if lr is None else lr
        beta1, beta2 = self.betas
        self.updates += 1
        # Both averages start at zero; divided by 1 - beta^t they are averages of the gradients seen so far.
        step_size = lr / (1 - beta1**self.updates)
        unbias2 = 1 / math.sqrt(1 - beta2**self.updates)
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            weight = self.master.get(name, parameter)
            m, v = self.exp_avg[name], self.exp_avg_sq[name]
            grad = parameter.grad.to(weight.device, weight.dtype)
            m.lerp_(grad, 1 - beta1)                                      # m = beta1 m + (1 - beta1) g
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)           # v = beta2 v + (1 - beta2) g^2
            if self.weight_decay:
                # A shard is flat, and knows how many of its first numbers are those of matrices.
                matrix = weight if weight.dim() >= 2 else weight[: getattr(parameter, "decayed", 0)]
                matrix.mul_(1 - lr * self.weight_decay)                   # decoupled: never enters m or v
            weight.addcdiv_(m, v.sqrt().mul_(unbias2).add_(self.eps), value=-step_size)
            if weight is not parameter:
                parameter.copy_(weight)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs, under flat names for safetensors. Not copies: save them at once."""
        state = {"step": torch.tensor(self.updates)}
        for kind in ("exp_avg", "exp_avg_sq", "master"):
            for name, tensor in getattr(self, kind).items():
                if kind != "master" or tensor.dtype != self.parameters[name].dtype:  # else it only says the same
                    state |= {f"{kind}.{part}": view for part, view in self._views(name, tensor).items()}
        return state

    def _views(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The names under which a tensor is saved."""
        return {name: tensor}

    @torch.no_grad()
    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Copies a saved state in; UserError, and nothing changed, when it belongs to another model."""
        own = self.state_tensors()
        if wrong := sorted(own.keys() ^ state.keys()):
            where = "checkpoint" if wrong[0] in own else "model"
            raise UserError(f"optimizer state does not fit: {wrong[0]} is not in the {where} "
                            f"({len(wrong)} such names); resume with the model and dtype of the saved run")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise UserError(f"optimizer state {name} has shape {tuple(state[name].shape)}, but the model "
                                f"needs {tuple(tensor.shape)}; resume with the model of the saved run")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        for name, tensor in self.master.items():
            if tensor.dtype == self.parameters[name].dtype:
                tensor.copy_(self.parameters[name])
        self.updates = int(state["step"])


class ShardedAdamW(AdamW):
    """AdamW on a model that `parallel.zero.shard` has spread out: each rank updates the slices that it owns.

    Options and results are AdamW's. A state has the names that AdamW would give it, but is this rank's alone: of every
    tensor the numbers that lie here, flat. `layout.read_training` leads to any other number of ranks.
    """

    def __init__(self, model: nn.Module, lr: float, **options):
        self.zero, self.flats = model.zero, {next(iter(flat.named)): flat for flat in model.zero.buckets}
        super().__init__(((name, flat.shard) for name, flat in self.flats.items()), lr, **options)
        self.layout = layout_of(model)

    def step(self, lr: float | None = None) -> None:
        super().step(lr)
        self.zero.spread()

    def state_tensors(self) -> dict[str, Tensor]:
        shapes = {f"shape.{name}": torch.tensor(p.shape, dtype=torch.int64)
                  for flat in self.flats.values() for name, p in flat.named.items()}
        return super().state_tensors() | {"ranks": torch.tensor([self.layout.rank, self.layout.ranks])} | shapes

    def _views(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {part: p.piece.of(tensor) for part, p in self.flats[name].named.items()}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """As AdamW's; UserError when it is the state of another rank, or of another number of ranks."""
        own = [self.layout.rank, self.layout.ranks]
        if "ranks" not in state or state["ranks"].tolist() != own:
            whose = "the whole model" if "ranks" not in state else "rank {} of {}".format(*state["ranks"].tolist())
            raise UserError("optimizer state of {}, but this is rank {} of {}: load_checkpoint(folder, model, mesh) "
                            "reads what this rank needs".format(whose, *own))
        super().load_state_tensors(state)


def adamw(model: nn.Module, lr: float, **options) -> AdamW:
    """AdamW for a model as it lies: on slices where `parallel.zero` has spread it, else on whole parameters."""
    if hasattr(model, "zero"):
        return ShardedAdamW(model, lr, **options)
    return AdamW(model.named_parameters(), lr, **options)


def lr_at(step: int, total_steps: int, peak: float, warmup_steps: int = 0,
          schedule: str = "cosine", floor: float = 0.0) -> float:
    """Learning rate of optimizer update number `step`, which counts from 0.

    Warm-up is a straight line that already starts at peak / warmup_steps: update 0 does something, and
    update warmup_steps - 1 is the first at `peak`. From there the schedule falls to `floor`, which it
    reaches at total_steps, one past the last update: with floor 0 no update is wasted, and a run of one
    step still learns.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule {schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))    # 0 .. 1
    remaining = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (peak - floor) * remaining


def gradient(parameter: Tensor) -> Tensor | None:
    """What this rank holds of a parameter's gradient: all of it, or under ZeRO the piece that it owns."""
    return getattr(parameter, "piece", parameter).grad


def global_norm(parameters: Iterable[Tensor], mesh: Mesh | None = None) -> Tensor:
    """Euclidean norm of all gradients of the model as one vector, a scalar tensor, summed in float32 or better.

    It expects gradients that are already summed over the ranks, hence equal on all replicas. Summing the
    squares over replicas once more would make the norm grow with the world size.

    mesh : if ranks hold different parameters (tp, pp) or slices (ZeRO): their squares are added up. Every number
           counts once, on the first of the ranks that hold it, and all ranks end with the same norm.
    """
    parameters = list(parameters)
    grads = [grad for p in parameters if (grad := gradient(p)) is not None and (mesh is None or _is_first(p, mesh))]
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=mesh and mesh.device)
    if mesh is None:
        return norm
    sharded = any(hasattr(p, "piece") for p in parameters)
    groups = [group for group in (mesh.tp_group, mesh.pp_group, mesh.data_group if sharded else None)
              if group is not None and group.size > 1]
    if not groups:
        return norm
    square = norm.double().square()
    for group in groups:
        square = all_reduce(square, group)
    return square.sqrt()


def _is_first(parameter: Tensor, mesh: Mesh) -> bool:
    """Of those ranks that hold the same part of a parameter, is this the first?"""
    where = placement(parameter)
    first_in_tp = mesh.tp_rank == 0 if where.dim is None else mesh.tp_rank % where.copies == 0
    return first_in_tp and (mesh.pp_rank == 0 or not is_tied(parameter))


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, mesh: Mesh | None = None) -> Tensor:
    """Scales all gradients, in place, so that their global norm is at most `max_norm` (0: never clip).

    Returns the norm before clipping. If it is not finite the gradients stay as they are: scaling by
    max_norm / inf would turn a bad step, which can be skipped, into zeros and NaN that look like a step.
    """
    parameters = list(parameters)
    grad_norm = global_norm(parameters, mesh)
    if max_norm > 0 and torch.isfinite(grad_norm) and grad_norm > max_norm:
        scale = max_norm / grad_norm.item()
        for parameter in parameters:
            if (grad := gradient(parameter)) is not None:
                grad.mul_(scale)
    return grad_norm


@dataclass
class SkipCounter:
    """Takes optimizer steps, except those whose loss or gradient norm is not finite, which it counts.

    A skipped step touches nothing: weights, averages and the optimizer's own count stay as they were, so
    one bad batch costs one batch. Every rank decides alike, because a sum over ranks with one NaN in it is
    NaN everywhere: pass the norm and the loss after reduction. Both counts belong into the checkpoint.
    """

    skipped: int = 0          # over the whole run; logged as skipped_steps
    in_a_row: int = 0
    limit: int = 10           # this many in a row are no accident: the weights themselves have diverged

    def step(self, optimizer: AdamW, grad_norm: Tensor | float, lr: float,
             loss: Tensor | float = 0.0) -> bool:
        """True if the step was taken; UserError at the `limit`-th skip in a row."""
        if math.isfinite(grad_norm) and math.isfinite(loss):
            optimizer.step(lr)
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise UserError(f"skipped {self.in_a_row} updates in a row (loss {float(loss)}, grad_norm "
                            f"{float(grad_norm)}); resume a checkpoint with a lower --lr or in float32")
        return False
