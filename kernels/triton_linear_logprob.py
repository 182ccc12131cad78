"""`linear_logprob` on a GPU: the same sums as in `linear_logprob.py`, over tiles that never leave the chip.

Forward. A program has BLOCK_N tokens and a run of words. It goes through its words BLOCK_V at a time: a product over
D makes a tile of logits in registers, the four numbers of each row (peak, total, dot, hit: see `Sums`) take it in,
and it is gone. There are as many runs of words as it takes to fill the machine; they are joined like the shards of a
vocabulary that is spread over ranks, and then with the ranks.

Backward. Of GRAD_LOGITS / N words at a time, a kernel makes each tile of logits again and writes its gradient,

    d loss / d z_v = p_v (g_lse - g_logprob - g_entropy (log p_v + entropy)) + [v = target] g_logprob

in bfloat16 where the inputs have it, as autograd would, and in float32 else (a float16 ends at 6e-8, and many a p of
a large vocabulary is below it); two plain products make of it the gradients of hidden and weight. A kernel that did
these too would have to add N D numbers for each tile of words to memory. Sums are float32 throughout.

What it moves and computes at N = 8,192 tokens, D = 1,024 (Qwen3-0.6B), V = 151,936, bfloat16, and the floor on an
H200 (4.3 TB/s, 790 TFLOP/s):

                        operations          bytes                                                floor
    forward             2 N D V   2.5e12    (N + V) D 2 = 0.33e9, once if L2 keeps the tokens    3.2 ms (bytes: 0.1 ms)
    backward, logits    2 N D V   2.5e12    the same, and N V 2 = 2.5e9 written                  3.2 ms (bytes: 0.7 ms)
    backward, products  4 N D V   5.1e12    2 N V 2 = 5.0e9 read, V D 2 written                  6.5 ms (bytes: 1.2 ms)
                                                                                        in all  12.9 ms
    with the logits in memory: 9.7 ms for three products, and 13 passes over 5 GB of float32: 15 ms more

Tiles. Of BLOCK_N x BLOCK_V logits a step over BLOCK_D reads BLOCK_N + BLOCK_V rows: 128 x 128 is 64 operations a byte
of L2. Of 128 x 256, the sums and what is made of them do not fit the registers of 8 warps (352 bytes a thread go to
memory; with 16 warps 216). 64 numbers of D are 128 bytes, a whole line. Three steps under way take up to 96 KB of
shared memory: sm_80 has 163, sm_90 227; gfx942 has 64, and takes one step. In float32 a tensor core would round its
inputs to 10 bits, so products are plain, and tiles small; 8 warps share one, for in 4 the sums of a soft cap do not
fit. Programs that run side by side have the same words and other tokens: a tile of the weight is read from memory once.
(The resource table is in docs/kernels.md.)

Offsets are int64, for row 524,288 of hidden states of size 4,096 begins at number 2^31; row and word numbers are int32,
which are compared with half the registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.linear_logprob import GRAD_LOGITS, Head, Sums

PROGRAMS = 512  # of the forward: four for each multiprocessor of an H200
LOWEST = -3.4028234663852886e38  # of float32; -inf - -inf would be NaN


class Tiles(NamedTuple):
    """Tokens, words and numbers of D of a tile, and how it is worked on."""

    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int


def tiles_of(itemsize: int, backend: str = "cuda") -> Tiles:
    """By the bytes of an input number."""
    if itemsize == 4:
        return Tiles(64, 64, 16, 8, 3)
    return Tiles(128, 128, 64, 8, 3 if backend == "cuda" else 1)


@triton.jit
def logits_of(hidden, weight, bias, rows, words, N, V, D, stride_n, stride_hd, stride_v, stride_wd, softcap,
              inverse_temperature, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """Logits of BLOCK_N rows x BLOCK_V words, float32; 0 where there is no such word."""
    row, word = rows[:, None].to(tl.int64) * stride_n, words[None, :].to(tl.int64) * stride_v
    logits = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for begin in range(0, D, BLOCK_D):
        column = begin + tl.arange(0, BLOCK_D)
        h = tl.load(hidden + row + column[None, :] * stride_hd,
                    mask=(rows < N)[:, None] & (column < D)[None, :], other=0.0)
        w = tl.load(weight + word + column[:, None] * stride_wd,
                    mask=(words < V)[None, :] & (column < D)[:, None], other=0.0)
        if UPCAST:  # the interpreter has no products of bfloat16
            h, w = h.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(h, w, logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(bias + words, mask=words < V, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        logits = softcap * (1 - 2 / (1 + tl.exp(tl.minimum(logits * (2 / softcap), 80.0))))  # 1 - 2 / (1 + e^2x): tanh
    return logits * inverse_temperature


@triton.jit
def sums_kernel(hidden, weight, bias, targets, peaks, totals, dots, hits, N, V, D, start, run, stride_n, stride_hd,
                stride_v, stride_wd, softcap, inverse_temperature, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
                UPCAST: tl.constexpr, ENTROPY: tl.constexpr, LOWEST: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (blocks of rows, runs of `run` words): the Sums of each row over each run, (runs, N) float32."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * run
    target = (tl.load(targets + rows, mask=rows < N, other=-1) - start).to(tl.int32)
    peak = tl.full((BLOCK_N,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
    hit = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(first, tl.minimum(first + run, V), BLOCK_V):
        words = begin + tl.arange(0, BLOCK_V)
        logits = logits_of(hidden, weight, bias, rows, words, N, V, D, stride_n, stride_hd, stride_v, stride_wd,
                           softcap, inverse_temperature, HAS_BIAS, SOFTCAP, UPCAST, BLOCK_N, BLOCK_V, BLOCK_D)
        # (A word beyond V has the logit 0, should the target of another shard have its number.)
        hit += tl.sum(tl.where(words[None, :] == target[:, None], logits, 0.0), 1)
        logits = tl.where((words < V)[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        gap = logits - higher[:, None]
        weights = tl.exp(gap)
        scale = tl.exp(peak - higher)
        if ENTROPY:
            dot = scale * (dot + (peak - higher) * total) + tl.sum(weights * tl.maximum(gap, LOWEST), 1)
        total = scale * total + tl.sum(weights, 1)
        peak = higher
    out = tl.program_id(1).to(tl.int64) * N + rows
    tl.store(peaks + out, peak, mask=rows < N)
    tl.store(totals + out, total, mask=rows < N)
    tl.store(hits + out, hit, mask=rows < N)
    if ENTROPY:
        tl.store(dots + out, dot, mask=rows < N)


@triton.jit
def slope_kernel(hidden, weight, bias, targets, lses, entropies, up_logprobs, up_entropies, up_lses, grad, N, V, D,
                 start, first, width, stride_n, stride_hd, stride_v, stride_wd, softcap, inverse_temperature,
                 HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, ENTROPY: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (blocks of rows, blocks of words): d loss / d (product) of `width` words from `first`, (N, width)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    real = rows < N
    logits = logits_of(hidden, weight, bias, rows, first + column, N, V, D, stride_n, stride_hd, stride_v, stride_wd,
                       softcap, inverse_temperature, HAS_BIAS, SOFTCAP, UPCAST, BLOCK_N, BLOCK_V, BLOCK_D)
    target = (tl.load(targets + rows, mask=real, other=-1) - start - first).to(tl.int32)
    up_logprob = tl.load(up_logprobs + rows, mask=real, other=0.0)
    logp = logits - tl.load(lses + rows, mask=real, other=float("inf"))[:, None]
    slope = (tl.load(up_lses + rows, mask=real, other=0.0) - up_logprob)[:, None]
    if ENTROPY:
        entropy = tl.load(entropies + rows, mask=real, other=0.0)
        up_entropy = tl.load(up_entropies + rows, mask=real, other=0.0)
        slope = slope - up_entropy[:, None] * (tl.maximum(logp, -1e4) + entropy[:, None])  # 0 * -inf would be NaN
    slope = tl.exp(logp) * slope + tl.where(column[None, :] == target[:, None], up_logprob[:, None], 0.0)
    slope *= inverse_temperature
    if SOFTCAP:
        bent = logits / (inverse_temperature * softcap)
        slope *= 1 - bent * bent
    tl.store(grad + rows[:, None].to(tl.int64) * width + column[None, :], slope.to(grad.dtype.element_ty),
             mask=real[:, None] & (column < width)[None, :])


interpreted = not isinstance(sums_kernel, triton.JITFunction)  # TRITON_INTERPRET=1, for tests: tiles are numpy arrays


class TritonLinearLogprob(torch.autograd.Function):
    """As `_LinearLogprob`: saves the inputs and two numbers a row."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, want_entropy):
        """hidden (N, D), weight (V, D), bias (V,), targets (N,) -> logprobs, entropy or None, lse: (N,) float32."""
        bias = None if bias is None else bias.contiguous()  # kernels know the strides of matrices alone
        sums = head_sums(hidden, weight, bias, targets, head, want_entropy)
        logprobs, entropy, lse = sums.over_ranks(head.reduce).results()
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        """Three of (N,), or None -> the gradients of hidden (N, D), weight (V, D) and bias (V,)."""
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        wants, N = ctx.needs_input_grad, len(hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants[0] else None
        grad_weight = torch.zeros_like(weight) if wants[1] else None
        grad_bias = torch.zeros_like(bias) if wants[2] else None
        width = max(1, GRAD_LOGITS // max(N, 1))
        for first in range(0, len(weight) if N else 0, width):
            words = slice(first, min(first + width, len(weight)))
            grad = slopes(hidden, weight, bias, targets, lse, entropy, upstream, ctx.head, words)  # (N, words)
            if wants[0]:
                grad_hidden += product(grad, weight[words])
            if wants[1]:  # all rows at once: no sum in the weight's own precision
                grad_weight[words] = product(grad.T, hidden)
            if wants[2]:
                grad_bias[words] = grad.sum(0, dtype=torch.float32)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def head_sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head,
              entropy: bool) -> Sums:
    """The Sums of this shard's words, (N,) each: what ranks with other words exchange."""
    (N, D), V = hidden.shape, len(weight)
    tiles = tiles_for(hidden)
    blocks, steps = triton.cdiv(N, tiles.block_n), triton.cdiv(V, tiles.block_v)
    run = triton.cdiv(steps, max(1, min(steps, PROGRAMS // max(blocks, 1)))) * tiles.block_v
    peak, total, dot, hit = hidden.new_empty(4, triton.cdiv(V, run), N, dtype=torch.float32)
    if N:
        sums_kernel[blocks, len(peak)](
            hidden, weight, bias, targets.contiguous(), peak, total, dot, hit, N, V, D, head.start, run,
            *hidden.stride(), *weight.stride(), head.softcap or 1.0, 1 / head.temperature, **flags(hidden, bias, head),
            ENTROPY=entropy, LOWEST=LOWEST, **blocks_of(tiles))
    joined = None
    for run_sums in zip(peak, total, dot if entropy else [None] * len(peak), hit):
        joined = Sums(*run_sums) if joined is None else joined.join(Sums(*run_sums))
    return joined


def slopes(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, lse: Tensor, entropy: Tensor | None,
           upstream: tuple[Tensor | None, ...], head: Head, words: slice) -> Tensor:
    """d loss / d (hidden @ weight.T + bias) of some words: (N, words), bfloat16 or float32."""
    (N, D), V, width = hidden.shape, len(weight), words.stop - words.start
    tiles = tiles_for(hidden)
    up_logprobs, up_entropy, up_lse = (torch.zeros_like(lse) if g is None else g.contiguous() for g in upstream)
    grad = hidden.new_empty(N, width, dtype=torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32)
    slope_kernel[triton.cdiv(N, tiles.block_n), triton.cdiv(width, tiles.block_v)](
        hidden, weight, bias, targets.contiguous(), lse, lse if entropy is None else entropy, up_logprobs, up_entropy,
        up_lse, grad, N, V, D, head.start, words.start, width, *hidden.stride(), *weight.stride(), head.softcap or 1.0,
        1 / head.temperature, **flags(hidden, bias, head), ENTROPY=entropy is not None and upstream[1] is not None,
        **blocks_of(tiles))
    return grad


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, of bfloat16 on a tensor core."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def flags(hidden: Tensor, bias: Tensor | None, head: Head) -> dict[str, bool]:
    return {"HAS_BIAS": bias is not None, "SOFTCAP": bool(head.softcap), "UPCAST": not hidden.is_cuda}


def tiles_for(hidden: Tensor) -> Tiles:
    return tiles_of(hidden.element_size(), "hip" if torch.version.hip else "cuda")


def blocks_of(tiles: Tiles) -> dict[str, int]:
    return {"BLOCK_N": tiles.block_n, "BLOCK_V": tiles.block_v, "BLOCK_D": tiles.block_d,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
