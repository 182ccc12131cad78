"""NF4: a frozen weight in 4.127 bits (QLoRA, arXiv:2305.14314 section 3).

    weights   blocks of 64, each divided by its scale (its largest magnitude); one of 16 levels a weight, 4 bits;
              two in a byte, the first in the upper half
    scales    themselves quantised: their mean is taken off, the rest is 8 bits in blocks of 256 with one float32 step

    4  +  8 / 64  +  32 / (64 * 256)  =  4.127 bits a weight, and one mean and 16 levels a matrix

The base of a LoRA run needs no gradient and no optimizer state, so its weight is all that it costs; here that weight is
a quarter of bfloat16. It is made whole again for the moment of a product, in forward and once more in backward.

One departure from the paper: the 8 bits are evenly spaced integers, not an FP8 type. What is left of a scale without
the mean is a plain bell curve, on which 255 even steps err a third as much as FP8's 3 bits of mantissa; and they
exist on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.config import UserError

BLOCK = 64  # weights that share a scale
GROUP = 256  # scales that share a step
HEADS = ("lm_head", "score")  # linears that read the last hidden state: neither quantised nor in "all-linear"


def nf4_levels() -> Tensor:
    """The 16 levels of "4-bit NormalFloat", (16,) float32, from -1 to 1 with an exact 0 at index 7.

    Quantiles of a normal distribution: each level then stands for about as many weights as any other. An even number of
    symmetric levels would have no 0, so the halves differ: 8 steps of equal probability from 0 up and 7 down. The
    outermost quantile would be infinite; it stops short of probability 1 by the mean of the half steps of 15 and of 16
    levels, (1/30 + 1/32) / 2.
    """
    edge = 1 - (1 / 30 + 1 / 32) / 2
    up = torch.special.ndtri(torch.linspace(0.5, edge, 9, dtype=torch.float64))  # 0 and the 8 above
    down = -torch.special.ndtri(torch.linspace(edge, 0.5, 8, dtype=torch.float64))[:-1]  # the 7 below
    return (torch.cat((down, up)) / up[-1]).float()


class Quantized(NamedTuple):
    """A matrix of N weights. Rows of zeros fill up the last block and the last group."""

    packed: Tensor  # (ceil(N / 64) * 32,) uint8, two levels each
    codes: Tensor  # (blocks,) int8, the scales
    scales: Tensor  # (1 + ceil(blocks / 256),) float32: the mean scale, then the step of each group


def quantize(weight: Tensor) -> Quantized:
    """The nearest levels to a weight of any shape; UserError if it is not finite."""
    if not torch.isfinite(weight).all():
        raise UserError("a weight that is infinite or NaN cannot be quantised: mend the checkpoint first")
    levels = nf4_levels().to(weight.device)
    blocks = _split(weight.detach().float().flatten(), BLOCK)
    absmax = blocks.abs().amax(1)
    mean = absmax.mean()
    rest = _split(absmax - mean, GROUP)
    steps = rest.abs().amax(1) / 127
    codes = (rest / steps.clamp_min(torch.finfo(steps.dtype).tiny)[:, None]).round().to(torch.int8)
    scales = torch.cat((mean[None], steps))
    codes = codes.flatten()[: len(blocks)].contiguous()
    # Against the scale that decoding will use, not the exact one: its error is made up for where it can be.
    unit = blocks / _decode_scales(codes, scales).clamp_min(torch.finfo(scales.dtype).tiny)[:, None]
    index = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(-1, 2)
    return Quantized(index[:, 0] * 16 + index[:, 1], codes, scales)


def dequantize(quantized: Quantized, levels: Tensor, shape: torch.Size) -> Tensor:
    """The weight again, float32."""
    pairs = torch.cartesian_prod(levels, levels)  # (256, 2), what a byte stands for
    blocks = F.embedding(quantized.packed.int(), pairs).view(-1, BLOCK)
    weight = blocks * _decode_scales(quantized.codes, quantized.scales)[:, None]
    return weight.flatten()[: shape.numel()].view(shape)


def _decode_scales(codes: Tensor, scales: Tensor) -> Tensor:
    rest = codes * scales[1:].repeat_interleave(GROUP)[: len(codes)]
    return (scales[0] + rest).clamp_min_(0)  # rounding may leave a block near 0 just below it, with its signs turned


def _split(flat: Tensor, size: int) -> Tensor:
    """(N,) -> (ceil(N / size), size), filled up with zeros."""
    return F.pad(flat, (0, -len(flat) % size)).view(-1, size)


class NF4Linear(nn.Module):
    """A frozen linear layer whose weight is kept in NF4; the gradient flows to its input (and bias) only."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, tensor in quantize(linear.weight)._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("levels", nf4_levels().to(linear.weight.device))
        self.register_buffer("like", linear.weight.detach().new_empty(0))  # its dtype is the one to compute in
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(out, in) as the layer computes with it: made anew at each access."""
        quantized = Quantized(self.packed, self.codes, self.scales)
        return dequantize(quantized, self.levels, torch.Size((self.out_features, self.in_features))).to(self.like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = _FrozenLinear.apply(x, self)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn, recurse=True):
        """`.to(bfloat16)` is about what to compute in: scales and levels stay float32, or each weight would move."""
        kept = {name: getattr(self, name) for name in ("scales", "levels")}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            setattr(self, name, tensor.to(self.packed.device))
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _FrozenLinear(torch.autograd.Function):
    """x @ weight.T. Keeps nothing for backward but the module: saving the whole weight would undo the quantisation."""

    @staticmethod
    def forward(ctx, x, linear):
        """x (..., in) -> (..., out)."""
        ctx.linear = linear
        return F.linear(x, linear.weight)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.linear.weight, None


def quantize_base(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Replace, in place, every linear layer by its NF4 form, but not the head; embedding and norms stay too.

    device : where to; of a model on the CPU a layer at a time, so that a GPU never holds the whole weights

    Before `add_lora`; the rounding is the same each time. UserError: there are adapters already, or a weight that is
    not finite.
    """
    if any("lora_" in name for name, _ in model.named_parameters()):
        raise UserError("the model has adapters already: call quantize_base before add_lora or load_adapter")
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name not in HEADS]
    for name in linears:
        model.set_submodule(name, NF4Linear(model.get_submodule(name).to(device)))
    return model.to(device)
