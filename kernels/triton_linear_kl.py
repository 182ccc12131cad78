"""`linear_kl` on a GPU: value and gradient as in the table of `linear_kl.py`, over tiles that never leave the chip.

The normalisers of both heads (`sums_kernel`, a launch each), then sums over words of what they make of a row; in
backward the gradient of some words' logits, (N, words), from which two plain products go on as in
`triton_linear_logprob.py`. A tile is computed under both heads at once, and two sets of float32 sums share the
registers with the logarithms of Jensen-Shannon: tiles have half the rows and half the words, and take half as much of D
at a time. (With 64 numbers of D, a bias and a soft cap, 40 bytes a thread went to memory on sm_80.)

At N = 8,192, D = 1,024 for both, V = 151,936, bfloat16, on an H200 (4.3 TB/s, 790 TFLOP/s):

                           operations              bytes                    floor
    normalisers            4 N D V       5.1e12    0.7e9                     6.5 ms
    sums                   4 N D V       5.1e12    0.7e9                     6.5 ms
    backward, logits       4 N D V       5.1e12    0.7e9, N V 2 written      6.5 ms
    backward, products     4 N D V       5.1e12    5.6e9                     6.5 ms
                                                                     in all 25.8 ms
    with both logits in memory: four products, 12.9 ms, and 20 passes over 5 GB of float32: 23 ms more
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.linear_logprob import Head
from kernels.triton_linear_logprob import (
    GRAD_LOGITS,
    PROGRAMS,
    Tiles,
    blocks_of,
    head_sums,
    logits_of,
    product,
)

KINDS = {"reverse": 0, "forward": 1, "js": 2}


@triton.jit
def both_logprobs(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lses, ref_lses, rows, words, N, V, D, ref_D,
                  stride_n, stride_hd, stride_v, stride_wd, ref_stride_n, ref_stride_hd, ref_stride_v, ref_stride_wd,
                  softcap, inverse_temperature, HAS_BIAS: tl.constexpr, HAS_REF_BIAS: tl.constexpr,
                  SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    """log p and log q of a tile, and the policy's logits; -inf where there is no such word or row."""
    logits = logits_of(hidden, weight, bias, rows, words, N, V, D, stride_n, stride_hd, stride_v, stride_wd, softcap,
                       inverse_temperature, HAS_BIAS, SOFTCAP, UPCAST, BLOCK_N, BLOCK_V, BLOCK_D)
    others = logits_of(ref_hidden, ref_weight, ref_bias, rows, words, N, V, ref_D, ref_stride_n, ref_stride_hd,
                       ref_stride_v, ref_stride_wd, softcap, inverse_temperature, HAS_REF_BIAS, SOFTCAP, UPCAST,
                       BLOCK_N, BLOCK_V, BLOCK_D)
    real = (words < V)[None, :]
    logp = logits - tl.load(lses + rows, mask=rows < N, other=float("inf"))[:, None]
    logq = others - tl.load(ref_lses + rows, mask=rows < N, other=float("inf"))[:, None]
    return tl.where(real, logp, float("-inf")), tl.where(real, logq, float("-inf")), logits


@triton.jit
def score(logp, logq, KIND: tl.constexpr):
    """r of the table in linear_kl.py, of log-probs cut at -1e4: exp is 0 there, and differences are numbers."""
    if KIND == 2:
        higher = tl.maximum(logp, logq)
        middle = higher + tl.log(1 + tl.exp(tl.minimum(logp, logq) - higher)) - 0.6931471805599453
        return 0.5 * (logp - middle)
    return logp - logq


@triton.jit
def kl_kernel(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lses, ref_lses, values, means, N, V, D, ref_D,
              run, stride_n, stride_hd, stride_v, stride_wd, ref_stride_n, ref_stride_hd, ref_stride_v, ref_stride_wd,
              softcap, inverse_temperature, HAS_BIAS: tl.constexpr, HAS_REF_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
              UPCAST: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
              BLOCK_D: tl.constexpr):
    """Grid (blocks of rows, runs of words): value and mean of r of each row over each run, (runs, N) float32."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * run
    value = tl.zeros((BLOCK_N,), dtype=tl.float32)
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(first, tl.minimum(first + run, V), BLOCK_V):
        words = begin + tl.arange(0, BLOCK_V)
        logp, logq, _ = both_logprobs(
            hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lses, ref_lses, rows, words, N, V, D, ref_D,
            stride_n, stride_hd, stride_v, stride_wd, ref_stride_n, ref_stride_hd, ref_stride_v, ref_stride_wd,
            softcap, inverse_temperature, HAS_BIAS, HAS_REF_BIAS, SOFTCAP, UPCAST, BLOCK_N, BLOCK_V, BLOCK_D)
        p, q = tl.exp(logp), tl.exp(logq)
        low, ref_low = tl.maximum(logp, -1e4), tl.maximum(logq, -1e4)
        if KIND != 1:
            part = p * score(low, ref_low, KIND)
            if KIND == 0:  # what p alone can give
                part = tl.where((p > 0) & (logq == float("-inf")), float("inf"), part)
            mean += tl.sum(part, 1)
        if KIND != 0:
            part = q * score(ref_low, low, KIND)
            if KIND == 1:
                part = tl.where((q > 0) & (logp == float("-inf")), float("inf"), part)
            value += tl.sum(part, 1)
    out = tl.program_id(1).to(tl.int64) * N + rows
    tl.store(values + out, value + mean, mask=rows < N)
    tl.store(means + out, mean, mask=rows < N)


@triton.jit
def kl_slope_kernel(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lses, ref_lses, means, upstream, grad, N,
                    V, D, ref_D, first, width, stride_n, stride_hd, stride_v, stride_wd, ref_stride_n, ref_stride_hd,
                    ref_stride_v, ref_stride_wd, softcap, inverse_temperature, HAS_BIAS: tl.constexpr,
                    HAS_REF_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, KIND: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (blocks of rows, blocks of words): d value / d (product) of `width` words from `first`, (N, width)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    logp, logq, logits = both_logprobs(
        hidden, weight, bias, ref_hidden, ref_weight, ref_bias, lses, ref_lses, rows, first + column, N, V, D, ref_D,
        stride_n, stride_hd, stride_v, stride_wd, ref_stride_n, ref_stride_hd, ref_stride_v, ref_stride_wd, softcap,
        inverse_temperature, HAS_BIAS, HAS_REF_BIAS, SOFTCAP, UPCAST, BLOCK_N, BLOCK_V, BLOCK_D)
    if KIND == 1:
        slope = tl.exp(logp) - tl.exp(logq)
    else:
        mean = tl.load(means + rows, mask=rows < N, other=0.0)[:, None]
        slope = tl.exp(logp) * (score(tl.maximum(logp, -1e4), tl.maximum(logq, -1e4), KIND) - mean)
    slope *= inverse_temperature * tl.load(upstream + rows, mask=rows < N, other=0.0)[:, None]
    if SOFTCAP:
        bent = logits / (inverse_temperature * softcap)
        slope *= 1 - bent * bent
    tl.store(grad + rows[:, None].to(tl.int64) * width + column[None, :], slope.to(grad.dtype.element_ty),
             mask=(rows < N)[:, None] & (column < width)[None, :])


class TritonLinearKl(torch.autograd.Function):
    """As `_LinearKl`: saves the inputs and three numbers a row."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ref_hidden, ref_weight, ref_bias, kind, head):
        """-> (N,) nats, float32."""
        bias, ref_bias = (None if x is None else x.contiguous() for x in (bias, ref_bias))
        own, ref = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
        nobody = torch.full((len(hidden),), -1, device=hidden.device)  # a target that no tile has
        lse, ref_lse = (head_sums(*x, nobody, head._replace(start=0), False).over_ranks(head.reduce).results()[2]
                        for x in (own, ref))
        N, V = len(hidden), len(weight)
        tiles = kl_tiles(hidden)
        blocks, steps = triton.cdiv(N, tiles.block_n), triton.cdiv(V, tiles.block_v)
        run = triton.cdiv(steps, max(1, min(steps, PROGRAMS // max(blocks, 1)))) * tiles.block_v
        sums = hidden.new_zeros(2, triton.cdiv(V, run), N, dtype=torch.float32)
        if N:
            kl_kernel[blocks, sums.shape[1]](*own, *ref, lse, ref_lse, *sums, N, V, hidden.shape[1],
                                             ref_hidden.shape[1], run, **options(own, ref, kind, head))
        value, mean = sums.sum(1) if head.reduce is None else head.reduce(sums.sum(1), "sum")
        ctx.save_for_backward(*own, *ref, lse, ref_lse, mean)
        ctx.kind, ctx.head = kind, head
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        """upstream (N,) -> the gradients of the policy's hidden (N, D), weight (V, D) and bias (V,)."""
        *inputs, lse, ref_lse, mean = ctx.saved_tensors
        own, ref, (hidden, weight, bias) = inputs[:3], inputs[3:], inputs[:3]
        wants, N, V, tiles = ctx.needs_input_grad, len(hidden), len(weight), kl_tiles(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants[0] else None
        grad_weight = torch.zeros_like(weight) if wants[1] else None
        grad_bias = torch.zeros_like(bias) if wants[2] else None
        grad_dtype = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
        for first in range(0, V if N else 0, step := max(1, GRAD_LOGITS // max(N, 1))):
            width = min(step, V - first)
            grad = hidden.new_empty(N, width, dtype=grad_dtype)
            kl_slope_kernel[triton.cdiv(N, tiles.block_n), triton.cdiv(width, tiles.block_v)](
                *own, *ref, lse, ref_lse, mean.contiguous(), upstream.contiguous(), grad, N, V, hidden.shape[1],
                ref[0].shape[1], first, width, **options(own, ref, ctx.kind, ctx.head))
            words = slice(first, first + width)
            if wants[0]:
                grad_hidden += product(grad, weight[words])
            if wants[1]:
                grad_weight[words] = product(grad.T, hidden)
            if wants[2]:
                grad_bias[words] = grad.sum(0, dtype=torch.float32)
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *[None] * 5)


def tiles_of(itemsize: int, backend: str = "cuda") -> Tiles:
    """By the bytes of an input number."""
    if itemsize == 4:
        return Tiles(32, 32, 16, 4, 3)
    return Tiles(64, 64, 32, 8, 3 if backend == "cuda" else 1)


def kl_tiles(hidden: Tensor) -> Tiles:
    return tiles_of(hidden.element_size(), "hip" if torch.version.hip else "cuda")


def options(own, ref, kind: str, head: Head) -> dict:
    """The arguments that both kernels end with."""
    (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias) = own, ref
    names = ("stride_n", "stride_hd", "stride_v", "stride_wd")
    strides = dict(zip(names, (*hidden.stride(), *weight.stride())))
    ref_strides = dict(zip((f"ref_{name}" for name in names), (*ref_hidden.stride(), *ref_weight.stride())))
    return {**strides, **ref_strides, "softcap": head.softcap or 1.0, "inverse_temperature": 1 / head.temperature,
            "HAS_BIAS": bias is not None, "HAS_REF_BIAS": ref_bias is not None, "SOFTCAP": bool(head.softcap),
            "UPCAST": not hidden.is_cuda, "KIND": KINDS[kind], **blocks_of(kl_tiles(hidden))}
