"""The kernels on a GPU, beside torch eager, torch.compile and, if installed, Liger; elsewhere, what they would take.

    python benchmarks/gpu_kernels.py              8,192 tokens, hidden 1,024, vocabulary 151,936 (Qwen3-0.6B), bfloat16

Forward and backward of log-probs: the median of many, over several inputs in turn, so that none finds its own in a
cache. The floor is what the operations of a part take at 790 TFLOP/s, or its bytes at 4.3 TB/s, whichever is longer, as
measured on an H200; it is printed where there is no GPU as well. (In this folder `kernels.py` would hide the package.)
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_kl, linear_logprob

FLOPS, BYTES = 790e12, 4.3e12  # an H200: bfloat16 products, copies
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, weight, targets) -> scalar


def eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def methods() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "triton": lambda *x: -linear_logprob(*x, impl="triton").sum(),
        "triton, entropy": lambda *x: -sum(y.sum() for y in linear_logprob(*x, entropy=True, impl="triton")),
        "torch, in tiles": lambda *x: -linear_logprob(*x, impl="torch").sum(),
        "triton, linear_kl": lambda h, w, t: linear_kl(h, w, h.detach().roll(1, 0), w.detach(), impl="triton").sum(),
        "eager": eager,
        "torch.compile": torch.compile(eager),
    }
    if find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found["liger"] = lambda h, w, t: liger(w, h, t)
    return found


def floors(tokens: int, size: int, vocab: int) -> dict[str, tuple[float, float, float]]:
    """(operations, bytes, seconds) of each form, forward and backward. A part takes the longer of its two times."""
    one = 2 * tokens * size * vocab  # operations of a product
    read = 2 * (tokens + vocab) * size  # bytes of its inputs
    logits = tokens * vocab
    parts = {
        "triton": [(one, read), (one, read + 2 * logits), (2 * one, 4 * logits + 2 * read)],
        "linear_kl": [(2 * one, 2 * read)] * 2 + [(2 * one, 2 * read + 2 * logits), (2 * one, 4 * logits + 2 * read)],
        "eager": [(one, read + 2 * logits), (0, 6 * logits), (0, 12 * logits), (0, 14 * logits),
                  (2 * one, 4 * logits + 2 * read)],  # product; to float32; log_softmax; its backward; products
    }
    return {name: (sum(f for f, _ in form), sum(b for _, b in form), sum(max(f / FLOPS, b / BYTES) for f, b in form))
            for name, form in parts.items()}


def seconds(loss: Loss, inputs: list[tuple[Tensor, Tensor, Tensor]], rounds: int) -> float:
    """Median of forward and backward."""
    times = []
    for number in range(rounds + 3):
        hidden, weight, targets = inputs[number % len(inputs)]
        hidden.grad = weight.grad = None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss(hidden, weight, targets).backward()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:  # the first ones compile
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main(options: argparse.Namespace) -> None:
    N, D, V = options.tokens, options.hidden, options.vocab
    expected = floors(N, D, V)
    print(f"{N} tokens, hidden {D}, vocabulary {V}, bfloat16, forward and backward; floor of an H200:")
    for name, (operations, moved, floor) in expected.items():
        print(f"  {name:10}{operations / 1e12:7.2f} TFLOP{moved / 1e9:8.2f} GB{floor * 1e3:9.2f} ms")
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    make = lambda rows: torch.randn(rows, D, device="cuda", dtype=torch.bfloat16).mul_(D**-0.25).requires_grad_()
    inputs = [(make(N), make(V), torch.randint(V, (N,), device="cuda")) for _ in range(3)]
    print(f"\n{torch.cuda.get_device_name()}\n{'':20}{'ms':>9}{'TFLOP/s':>9}{'TB/s':>7}{'x floor':>9}{'GB peak':>9}")
    for name, loss in methods().items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            time = seconds(loss, inputs, options.rounds)
        except torch.OutOfMemoryError:
            print(f"{name:20}  out of memory")
            continue
        form = "linear_kl" if "kl" in name else "eager" if name in ("eager", "torch.compile") else "triton"
        operations, moved, floor = expected[form]
        peak = torch.cuda.max_memory_allocated() - before
        print(f"{name:20}{time * 1e3:9.2f}{operations / time / 1e12:9.0f}{moved / time / 1e12:7.2f}{time / floor:9.2f}"
              f"{peak / 1e9:9.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=50)
    main(parser.parse_args())
