"""Log-probs of a large vocabulary, forward and backward: seconds, and bytes beyond the inputs and their gradients.

    python benchmarks/logprob_memory.py         2,048 tokens, hidden 896, vocabulary 151,936 (Qwen2.5-0.5B), float32
    python benchmarks/logprob_memory.py --step  a GRPO update of a model as wide as Qwen3-0.6B, in the memory that
                                                `minirl.plan` expects it to need: with minirl's head, and the naive one

Each measurement is a process of its own, since the peak of a process (ru_maxrss) never falls; the methods take turns,
and a ratio is of two measurements in the same turn. `--file FILE` keeps them: turns of several calls count together.

    naive            logits, log_softmax, gather, as autograd has it
    linear_logprob   the operator: forward, and backward from any gradient of the log-probs
    head_loss        head and loss in one pass, where the loss is known
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from kernels import head_loss, linear_logprob
from minirl.costs import Layout, rank_memory
from minirl.logprobs import Output
from minirl.losses import aggregate, clipped_surrogate
from minirl.model import ModelConfig, Transformer
from minirl.parallel import forward_backward, init_mesh
from minirl.rollout import Rollout


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return ((hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0] * scale).sum()


def operator(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return (linear_logprob(hidden, weight, targets) * scale).sum()


def one_pass(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return head_loss(hidden, weight, targets, lambda columns, logprobs, _: (logprobs * scale[:, columns]).sum())


def step(head: str, limited: bool, tokens: int, layers: int) -> str:
    """Forward and backward of a GRPO update on one row, in this process; limited: to what `minirl.plan` expects."""
    config = ModelConfig(151936, 1024, 3072, layers, 16, 8, head_dim=128, qk_norm=True, max_position_embeddings=tokens)
    model, mesh = Transformer(config), init_mesh("cpu")
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02, generator=g)
        parameter.grad = torch.zeros_like(parameter).fill_(0.0)
    one = torch.zeros(1, dtype=torch.int64)
    ids, mask = torch.randint(151936, (1, tokens + 1), generator=g), torch.ones(1, tokens, dtype=torch.bool)
    rows = Rollout(ids, mask, one + tokens + 1, one, one, old_logprobs=torch.full((1, tokens), -12.0),
                   advantages=torch.ones(1, 1))

    def loss_fn(out: Output, mb: Rollout):
        per_token = clipped_surrogate(out.logprobs, mb.old_logprobs, mb.advantages, 0.2, 0.2)
        return aggregate(per_token, mb.action_mask, "token", tokens), {}

    def update() -> float:
        if head == "minirl":
            return forward_backward(model, [rows], loss_fn, mesh, by_token=True)["loss"]
        logprobs = model.logits(model(ids[:, :-1])).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = loss_fn(Output(logprobs), rows)[0]
        loss.backward()
        return loss.item()

    plan = rank_memory(config, Layout(sequence_length=tokens, dtype="float32"), 0)
    planned, before, began = plan.activations + plan.head, resident(), perf_counter()
    if limited:  # beside what is there by now: weights, gradients and torch
        resource.setrlimit(resource.RLIMIT_DATA, (private() + planned, resource.RLIM_INFINITY))
    say = f"{head:8}{planned / 1e6 if limited else math.inf:12.0f}"
    try:
        loss = update()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return f"{say}  does not fit"
    seconds, peak = perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    norm = sum(parameter.grad.norm() ** 2 for parameter in model.parameters()) ** 0.5
    return f"{say}{peak / 1e6:8.0f}{seconds:9.1f}{loss:11.5f}{norm:11.5f}"


def steps(tokens: int, layers: int) -> None:
    print(f"{tokens} tokens, {layers} layers; logits + log_softmax are {2 * tokens * 151936 * 4 / 1e6:.0f} MB\n"
          f"{'head':8}{'limit in MB':>12}{'peak':>8}{'seconds':>9}{'loss':>11}{'|grad|':>11}", flush=True)
    for arguments in (("minirl", "1"), ("naive", "1"), ("naive", "")):
        print(in_process("--one-step", *arguments, tokens, layers).rstrip(), flush=True)


def in_process(*arguments: object) -> str:
    """What this file prints with these arguments, in a fresh process."""
    return subprocess.run([sys.executable, "-W", "ignore", __file__, *map(str, arguments)], stdout=subprocess.PIPE,
                          text=True, check=True).stdout


METHODS = {"naive": naive, "linear_logprob": operator, "head_loss": one_pass}


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def private() -> int:
    """Bytes that it has asked for, touched or not: what RLIMIT_DATA counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def measure(method: str, tokens: int, size: int, vocab: int) -> dict[str, float]:
    """In a fresh process: {"seconds", "bytes", "loss", "grad"}."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, size, generator=g).requires_grad_()
    weight = torch.randn(vocab, size, generator=g).mul_(size**-0.5).requires_grad_()
    targets, scale = torch.randint(vocab, (1, tokens), generator=g), torch.randn(1, tokens, generator=g)
    small = torch.zeros(1, 1, size, requires_grad=True), torch.zeros(8, size, requires_grad=True)
    METHODS[method](*small, targets[:, :1] * 0, scale[:, :1]).backward()  # torch loads late
    before, began = resident(), perf_counter()
    loss = METHODS[method](hidden, weight, targets, scale)
    loss.backward()
    seconds = perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": peak - before - hidden.grad.nbytes - weight.grad.nbytes, "loss": loss.item(),
            "grad": weight.grad.norm().item()}


def main(options: argparse.Namespace) -> None:
    sizes = options.tokens, options.hidden, options.vocab
    turns = [json.loads(line) for line in open(options.file)] if options.file and os.path.exists(options.file) else []
    for _ in range(options.rounds):
        turns.append({method: json.loads(in_process("--measure", method, *sizes)) for method in options.methods})
        if options.file:
            with open(options.file, "a") as file:
                print(json.dumps(turns[-1]), file=file)
    both = 2 * options.tokens * options.vocab * 4
    print(f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocab}, float32, "
          f"{torch.get_num_threads()} threads, {len(turns)} turns: median (quartiles); logits + log_softmax are "
          f"{both / 1e6:.0f} MB")
    print(f"{'':16}{'seconds':>21}{'ratio':>24}{'MB':>8}{'1 in':>8}{'loss':>12}{'|grad|':>10}")
    for method in options.methods:
        seconds = [turn[method]["seconds"] for turn in turns]
        ratios = [turn[method]["seconds"] / turn[options.methods[0]]["seconds"] for turn in turns]
        peak = max(turn[method]["bytes"] for turn in turns)
        print(f"{method:16}{spread(seconds, 1):>21}{spread(ratios, 3):>24}{peak / 1e6:8.1f}{both / peak:8.1f}"
              f"{turns[0][method]['loss']:12.4f}{turns[0][method]['grad']:10.4f}")


def spread(values: list[float], digits: int) -> str:
    low, middle, high = (f"{x:.{digits}f}" for x in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        steps(*(map(int, sys.argv[2:]) if sys.argv[2:] else (2048, 2)))
    elif sys.argv[1:2] == ["--one-step"]:
        print(step(sys.argv[2], bool(sys.argv[3]), *map(int, sys.argv[4:])))
    elif sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--tokens", type=int, default=2048)
        parser.add_argument("--hidden", type=int, default=896)
        parser.add_argument("--vocab", type=int, default=151936)
        parser.add_argument("--rounds", type=int, default=1, help="turns: measurements of each")
        parser.add_argument("--file", default="", help="keeps the measurements; those that it holds count, too")
        parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
        main(parser.parse_args())
