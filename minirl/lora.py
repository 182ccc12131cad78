"""LoRA: fine-tune a model through a small low-rank addition to its linear layers (arXiv:2106.09685 eq. 3).

    y = W x + scale * B A x          W (out, in) frozen;  A (r, in), B (out, r) trained;  scale = alpha / r

A begins random and B at zero: step 0 is the base model to the bit. The base is never written to: the same model with
its adapters off *is* the reference model, without a second copy.

    model = load_model(folder)
    add_lora(model, rank=8, alpha=16, targets=["q_proj", "v_proj"])     after `quantize_base(model)`: QLoRA
    optimizer = AdamW(trainable_parameters(model).items(), lr)
    with adapters_off(model): ref_logprobs = token_logprobs(model, tokens)
    save_adapter(model, "adapter")                                      a folder that PEFT opens
    export_merged(model, "merged")                                      a plain model folder

    python -m minirl.merge runs/lora/step_200 merged                     the same, from the shell

Names of modules, in targets and in files, are those of the Hugging Face model: `model.layers.0.self_attn.q_proj`,
`lm_head`. The format and the meaning of each option are PEFT's; what is not computed here is refused by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minirl.config import UserError
from minirl.lora_config import LoRAConfig, Plan, check_used, plan_adapters
from minirl.model import Transformer
from minirl.nf4 import NF4Linear

# ---- the two kinds of adapter ----

class LoRALinear(nn.Module):
    """A frozen linear layer (plain or NF4) with a low-rank addition.

    A layer that is read through its matrix instead of called, as the head is, works too: `weight` is differentiable.
    No dropout there, and below float32 the sum is rounded to the weight's dtype at each use, as if it were merged.
    """

    def __init__(self, base: nn.Linear | NF4Linear, rank: int, alpha: float, dropout: float = 0.0,
                 rslora: bool = False, generator: torch.Generator | None = None):
        super().__init__()
        self.base, self.dropout, self.enabled = base, dropout, True
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        like, bound = base.weight, base.in_features**-0.5
        # Drawn on the CPU in float32: the same numbers on each device and rank, and in each dtype.
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(like.device, like.dtype))  # (r, in)
        self.lora_B = nn.Parameter(like.new_zeros(base.out_features, rank))  # (out, r)
        self.register_buffer("merged", None, persistent=False)  # (out, in) while merged

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not self.enabled:
            return self.base(x)
        if self.merged is not None:
            return F.linear(x, self.merged, self.base.bias)
        flat = x.reshape(-1, x.shape[-1])
        dropped = F.dropout(flat, self.dropout) if self.dropout and self.training else None
        out = _LoRAProduct.apply(flat, dropped, self.lora_A, self.lora_B, self.base, self.scale)
        return out.view(*x.shape[:-1], out.shape[-1])

    def summed(self) -> Tensor:
        """(out, in): W + scale * B A, in float32 or wider and rounded once."""
        base = self.base.weight
        wide = torch.promote_types(base.dtype, torch.float32)
        return torch.addmm(base.to(wide), self.lora_B.to(wide), self.lora_A.to(wide), alpha=self.scale).to(base.dtype)

    @property
    def weight(self) -> Tensor:
        """(out, in), what the layer multiplies by."""
        if not self.enabled:
            return self.base.weight
        return self.summed() if self.merged is None else self.merged

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}  # as PEFT names them


class _LoRAProduct(torch.autograd.Function):
    """x W^T + bias + scale * z A^T B^T, where z is x, or x after dropout.   x, z (N, in); A (r, in); B (out, r).

    W and bias are constants here. W is asked for again in backward: an NF4 weight is then made anew and not kept.

    d x = grad W        d z = scale grad B A        d A = scale B^T grad^T z        d B^T = scale (z A^T)^T grad

    By hand since half of what adapters cost can be saved: sums are made inside the products, and the thin side comes
    first. On a CPU (r, N) @ (N, out) takes a fifth of the (out, N) @ (N, r) that autograd takes for B's gradient.
    """

    @staticmethod
    def forward(ctx, x, z, a, b, base, scale):
        """z None: the same as x."""
        ctx.base, ctx.scale, ctx.dropped = base, scale, z is not None
        z = x if z is None else z
        low = a @ z.t()  # (r, N)
        ctx.save_for_backward(z, low, a, b)
        return F.linear(x, base.weight, base.bias).addmm_(low.t(), b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """The four gradients of the class's docstring; grad (N, out)."""
        z, low, a, b = ctx.saved_tensors
        grad_low = (b.t() @ grad.t()).mul_(ctx.scale)  # (r, N)
        grad_b = (low @ grad).mul_(ctx.scale).t()
        grad_x = grad_z = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.base.weight
            if ctx.dropped:
                grad_z = grad_low.t() @ a
            else:
                grad_x.addmm_(grad_low.t(), a)
        return grad_x, grad_z, grad_low @ z, grad_b, None, None


class TrainedCopy(nn.Module):
    """A module that is trained whole, next to the frozen original that `adapters_off` goes back to."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.copy, self.enabled = base, copy.deepcopy(base).requires_grad_(True), True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.copy if self.enabled else self.base)(*args, **kwargs)

    @property
    def weight(self) -> Tensor:
        return (self.copy if self.enabled else self.base).weight

    @property
    def bias(self) -> Tensor | None:
        return (self.copy if self.enabled else self.base).bias

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.copy.named_parameters())


# ---- put on, switch off, merge ----

def add_lora(model: Transformer, rank: int = 8, alpha: float = 16, targets: str | Sequence[str] = "all-linear", *,
             generator: torch.Generator | None = None, **options: Any) -> Transformer:
    """Freeze the model and put adapters on it, in place; returns the model.

    options   : the other fields of LoRAConfig (dropout, rslora, modules_to_save, ...)
    generator : of the initial A, on the CPU; default: torch's own. Data-parallel ranks must draw the same
    UserError : a target or pattern that matches nothing, or something else than a linear layer; a tied head
    """
    config = LoRAConfig(rank, alpha, targets, **options)
    plan = plan_adapters(model, config)
    check_used(model, config, plan)
    return install(model, plan, generator)


def adapters(model: nn.Module) -> dict[str, LoRALinear | TrainedCopy]:
    """The adapters of a model by their plain names; empty when it has none."""
    plain = getattr(model, "module", model)  # out of DistributedDataParallel
    return {name.replace("_orig_mod.", ""): module  # torch.compile's mark
            for name, module in plain.named_modules() if isinstance(module, LoRALinear | TrainedCopy)}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer shall have: with adapters, theirs alone."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model is its base, to the bit: the reference of a KL term. Nests, and survives exceptions.

    Modules that are trained whole go back to their originals too. UserError for a model without adapters, which
    would be compared with itself.
    """
    found = required_adapters(model).values()
    before = [adapter.enabled for adapter in found]
    try:
        for adapter in found:
            adapter.enabled = False
        yield model
    finally:
        for adapter, enabled in zip(found, before):
            adapter.enabled = enabled


@torch.no_grad()
def merge_lora(model: Transformer) -> Transformer:
    """Compute with W + scale * B A as one matrix, as fast as the base, to sample and to evaluate. Merged twice is once.

    The sum is a matrix of its own and the base keeps its weight, which costs the adapted layers once more in memory. In
    return `unmerge_lora` is exact in every dtype after any number of rounds, and `adapters_off` works meanwhile.
    Subtracting B A again would not be exact: in bfloat16 one round leaves every tenth weight or so another than before.

    float32: logits differ from the unmerged ones by rounding, about 1e-6. bfloat16: the sum has 8 bits, and a change
    below 1/512 of a weight disappears; keep a small update unmerged, or merge in float32.

    While merged nothing is trained: backward fails, rather than to give adapters that are not used no gradient.
    """
    for adapter in required_adapters(model).values():
        if isinstance(adapter, LoRALinear) and adapter.merged is None:
            adapter.merged = adapter.summed()
        for parameter in adapter.trained().values():
            parameter.requires_grad_(False)
    return model


def unmerge_lora(model: Transformer) -> Transformer:
    """Back to base and adapter apart, to the bit as before `merge_lora`, and ready to train."""
    for adapter in required_adapters(model).values():
        if isinstance(adapter, LoRALinear):
            adapter.merged = None
        for parameter in adapter.trained().values():
            parameter.requires_grad_(True)
    return model


def required_adapters(model: nn.Module) -> dict[str, LoRALinear | TrainedCopy]:
    """`adapters`, or UserError if there are none."""
    found = adapters(model)
    if not found:
        raise UserError("the model has no adapters: call add_lora or load_adapter first")
    return found


def install(model: Transformer, plan: Plan, generator: torch.Generator | None = None) -> Transformer:
    """The plan carried out, in place; returns the model."""
    model.requires_grad_(False)
    for name, (rank, alpha) in plan.linears.items():
        base = model.get_submodule(name)
        model.set_submodule(name, LoRALinear(base, rank, alpha, plan.config.dropout, plan.config.rslora, generator))
    for name in plan.copies:
        model.set_submodule(name, TrainedCopy(model.get_submodule(name)))
    model.lora_config = plan.config
    return model.train(model.training)  # new modules begin in training mode, whatever the model is in
