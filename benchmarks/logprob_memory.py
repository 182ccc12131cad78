"""Log-probs of a large vocabulary, forward and backward: seconds, and bytes beyond the inputs and their gradients.

    python benchmarks/logprob_memory.py             2,048 tokens, hidden 896, vocabulary 151,936 (Qwen2.5-0.5B), float32

Each measurement is a process of its own, since the peak of a process (ru_maxrss) never falls; the methods take turns.

    naive            logits, log_softmax, gather, as autograd has it
    linear_logprob   the operator: forward, and backward from any gradient of the log-probs
    head_loss        head and loss in one pass, where the loss is known
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from time import perf_counter

import torch
from torch import Tensor

from kernels import head_loss, linear_logprob


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return ((hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0] * scale).sum()


def operator(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return (linear_logprob(hidden, weight, targets) * scale).sum()


def one_pass(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return head_loss(hidden, weight, targets, lambda columns, logprobs, _: (logprobs * scale[:, columns]).sum())


METHODS = {"naive": naive, "linear_logprob": operator, "head_loss": one_pass}


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(method: str, tokens: int, size: int, vocab: int) -> dict[str, float]:
    """In a fresh process: {"seconds", "bytes", "loss", "grad"}."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, size, generator=g).requires_grad_()
    weight = torch.randn(vocab, size, generator=g).mul_(size**-0.5).requires_grad_()
    targets, scale = torch.randint(vocab, (1, tokens), generator=g), torch.randn(1, tokens, generator=g)
    METHODS[method](hidden[:, :1], weight[:8], targets[:, :1] * 0, scale[:, :1]).backward()  # torch loads late
    hidden.grad = weight.grad = None
    before, began = resident(), perf_counter()
    loss = METHODS[method](hidden, weight, targets, scale)
    loss.backward()
    seconds = perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": peak - before - hidden.grad.nbytes - weight.grad.nbytes, "loss": loss.item(),
            "grad": weight.grad.norm().item()}


def main(options: argparse.Namespace) -> None:
    sizes = [str(x) for x in (options.tokens, options.hidden, options.vocab)]
    found: dict[str, list[dict[str, float]]] = {method: [] for method in options.methods}
    for _ in range(options.rounds):
        for method in found:
            out = subprocess.run([sys.executable, "-W", "ignore", __file__, "--measure", method, *sizes],
                                 capture_output=True, text=True, check=True).stdout
            found[method].append(json.loads(out))
    both = 2 * options.tokens * options.vocab * 4
    print(f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocab}, float32, "
          f"{torch.get_num_threads()} threads; logits + log_softmax are {both / 1e6:.0f} MB")
    print(f"{'':16}{'seconds':>9}{'ratio':>8}{'MB':>8}{'of both':>9}{'loss':>12}{'|grad|':>10}")
    first = statistics.median(x["seconds"] for x in found[options.methods[0]])
    for method, runs in found.items():
        seconds, peak = (statistics.median(x[name] for x in runs) for name in ("seconds", "bytes"))
        print(f"{method:16}{seconds:9.2f}{seconds / first:8.3f}{peak / 1e6:8.1f}{peak / both:9.4f}"
              f"{runs[0]['loss']:12.4f}{runs[0]['grad']:10.4f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--tokens", type=int, default=2048)
        parser.add_argument("--hidden", type=int, default=896)
        parser.add_argument("--vocab", type=int, default=151936)
        parser.add_argument("--rounds", type=int, default=1, help="measurements of each")
        parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
        main(parser.parse_args())
