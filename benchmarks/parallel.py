"""Each way to spread a training step over two processes: minirl beside torch's own, on the same weights, in turns.

    python benchmarks/parallel.py                    starts two processes with gloo, one thread each
    python benchmarks/parallel.py --only dp tp       dp, zero, tp, sp or pp
    python benchmarks/parallel.py --only zero --profile

    dp      replicas                        DistributedDataParallel
    zero    ZeRO-3                          FSDP2: fully_shard of every block
    tp      tensor parallel                 DTensor: ColwiseParallel, RowwiseParallel, loss_parallel
    sp      and sequence parallel           DTensor: SequenceParallel as well
    pp      pipeline, 1F1B                  torch.distributed.pipelining, Schedule1F1B on the same stages

16 rows of 128 targets and 11 million parameters, in float32: forward, backward, clipping, AdamW, and the loss as a
number on every rank. Both sides run the same model and log-probs, minirl's (with DTensor the log-probs are torch's);
what differs is who sends what when, and the optimizer, AdamW's own on each side. A third turn in each round is one
process that does the whole batch alone.

Rounds alternate and the ratio is taken round by round: another program on the machine slows both sides alike. The
slower of two ranks counts. The first two rounds are not counted. Loss and gradient norm of the first step must agree.
--cpu-time counts what a process computes, without its waits: a number that holds on a busy machine as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter, process_time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sample import report, seconds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from minirl.logprobs import Output, head_output, token_logprobs
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.model import ModelConfig, Transformer
from minirl.optim import adamw, clip_gradients
from minirl.parallel import Mesh, close_mesh, forward_backward, init_mesh
from minirl.parallel.layout import parallelize
from minirl.parallel.pipeline import stage_layers
from minirl.rollout import Rollout

RANKS, WARM_UP = 2, 2
ROWS, LENGTH, MICROBATCHES = 16, 129, 8  # 128 targets a row; microbatches of the pipeline
LR, MAX_NORM = 1e-4, 1.0
CONFIG = ModelConfig(vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
                     num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=256,
                     tie_word_embeddings=False)

Step = Callable[[Tensor], tuple[float, float]]  # an update from tokens (ROWS, LENGTH): loss and gradient norm before it


def new_model() -> Transformer:
    return Transformer(CONFIG).init_weights(torch.Generator().manual_seed(0))


def batch(number: int) -> Tensor:
    """(ROWS, LENGTH) tokens, new ones for each step."""
    return torch.randint(CONFIG.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def own_rows(tokens: Tensor) -> Tensor:
    return tokens.chunk(RANKS)[dist.get_rank()]


# ---- minirl ----

def minirl_step(mesh: Mesh, microbatches: int = 1, **layout) -> Step:
    """train_sft.py's update in any layout."""
    model = parallelize(new_model(), mesh, **layout)
    optimizer = adamw(model, LR)

    def step(tokens: Tensor) -> tuple[float, float]:
        mine = mesh.share(ROWS)
        tokens = tokens[mine.start : mine.stop]
        ids, mask = torch.arange(len(tokens)), torch.ones(len(tokens), LENGTH - 1, dtype=torch.bool)
        rows = Rollout(tokens, mask, torch.full((len(tokens),), LENGTH), group=ids, sample_ids=ids)
        total = loss_total("token", rows.action_mask, mesh)

        def loss_fn(out: Output, mb: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
            return aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total), {"tokens": mb.action_mask.sum()}

        stats = forward_backward(model, rows.microbatches(len(tokens) // microbatches), loss_fn, mesh)
        norm = clip_gradients(model.parameters(), MAX_NORM, mesh)
        optimizer.step()
        optimizer.zero_grad()
        return stats["loss"], float(norm)

    return step


# ---- torch ----

class Loss(nn.Module):
    """The mean negative log-prob of a batch as a module, for DDP and FSDP wrap a forward."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return -token_logprobs(self.model, tokens).mean()


class Optimizer:
    """torch's AdamW (fused: on a CPU its fastest) and clipping. DTensors and plain tensors cannot share a list."""

    def __init__(self, model: nn.Module, stages: bool = False):
        parameters = list(model.parameters())
        self.lists = [found for kind in (True, False) if (found := [p for p in parameters
                                                                    if isinstance(p, DTensor) is kind])]
        self.stages = stages  # whether ranks have different parameters, and plain ones
        self.adamw = torch.optim.AdamW([{"params": some} for some in self.lists], LR, betas=(0.9, 0.95),
                                       weight_decay=0.0, fused=True)

    def step(self) -> float:
        """Returns the gradient norm before clipping."""
        norms = [get_total_norm([p.grad for p in some]) for some in self.lists]
        square = sum((norm.full_tensor() if isinstance(norm, DTensor) else norm).square() for norm in norms)
        if self.stages:
            dist.all_reduce(square)
        norm = square.sqrt()
        for some in self.lists:
            clip_grads_with_norm_(some, MAX_NORM, norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return norm.item()


def replicas_step(wrap: Callable[[Loss], nn.Module]) -> Step:
    """DDP and FSDP: each rank has its rows, gradients are averaged."""
    module = wrap(Loss(new_model()))
    optimizer = Optimizer(module)

    def step(tokens: Tensor) -> tuple[float, float]:
        loss = module(own_rows(tokens))
        loss.backward()
        norm = optimizer.step()
        mean = loss.detach() / RANKS
        dist.all_reduce(mean)
        return mean.item(), norm

    return step


def fsdp(module: Loss) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in module.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def dtensor_step(sequence: bool) -> Step:
    """The plan of torch's tutorial: matrices by outputs, then by inputs; with `sequence` tokens between them."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, mesh = new_model(), init_device_mesh("cpu", (RANKS,))
    between = Shard(1) if sequence else Replicate()  # where the residual stream lies
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)}
    block = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    block |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    block |= {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    # What enters attention and MLP becomes a DTensor once: each matrix of its own would sum its own gradient.
    nothing = (None, None, None)  # frame, cache and number of the layer
    block |= {"self_attn": PrepareModuleInput(input_layouts=(between, *nothing),
                                              desired_input_layouts=(Replicate(), *nothing)),
              "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))}
    if sequence:
        plan["norm"] = SequenceParallel()
        block |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, plan)
    optimizer = Optimizer(model)

    def step(tokens: Tensor) -> tuple[float, float]:
        with loss_parallel():
            logits = model.lm_head(model(tokens[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        norm = optimizer.step()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item(), norm

    return step


class Stage(nn.Module):
    """The layers of one stage, with what stands before the first and behind the last."""

    def __init__(self, model: Transformer, layers: Iterable[int]):
        super().__init__()
        self.layers, self.frames = nn.ModuleList(model.layers[number] for number in layers), model.frames
        self.first, self.last = 0 in layers, CONFIG.num_hidden_layers - 1 in layers
        if self.first:
            self.embed_tokens = model.embed_tokens
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        frame = self.frames(x[..., 0] if x.dim() == 3 else x, None, None, None)[0]
        x = self.embed_tokens(x) if self.first else x
        for layer in self.layers:
            x = layer(x, frame, None, 0)
        return self.norm(x) if self.last else x


def pipelining_step() -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, rank = new_model(), dist.get_rank()
    module = Stage(model, stage_layers(CONFIG, RANKS)[rank])
    schedule = Schedule1F1B(PipelineStage(module, rank, RANKS, torch.device("cpu")), MICROBATCHES,
                            loss_fn=lambda hidden, targets: -head_output(model, hidden, targets).logprobs.mean())
    optimizer = Optimizer(module, stages=True)

    def step(tokens: Tensor) -> tuple[float, float]:
        losses: list[Tensor] = []
        if module.last:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(tokens[:, :-1].contiguous())
        norm = optimizer.step()
        loss = torch.stack(losses).mean() if module.last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item(), norm

    return step


# ---- both ----

KINDS: dict[str, tuple[str, str, Callable[[], Step], Callable[[], Step]]] = {
    "dp": ("data parallel", "DDP", lambda: minirl_step(init_mesh("cpu")),
           lambda: replicas_step(partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True))),
    "zero": ("ZeRO-3", "FSDP2", lambda: minirl_step(init_mesh("cpu"), zero_stage=3), lambda: replicas_step(fsdp)),
    "tp": ("tensor parallel", "DTensor", lambda: minirl_step(init_mesh("cpu", tp=RANKS)), partial(dtensor_step, False)),
    "sp": ("tensor and sequence", "DTensor", lambda: minirl_step(init_mesh("cpu", tp=RANKS), sequence=True),
           partial(dtensor_step, True)),
    "pp": ("pipeline 1F1B", "pipelining", lambda: minirl_step(init_mesh("cpu", pp=RANKS), MICROBATCHES),
           pipelining_step),
}


def one_process() -> Step:
    """The first rank has all rows; the other waits."""
    step = minirl_step(Mesh()) if dist.get_rank() == 0 else None
    return lambda tokens: step(tokens) if step else (0.0, 0.0)


def slowest(taken: float) -> float:
    """The longest of what the ranks took."""
    value = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def alternate(steps: dict[str, Step], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each in each round: A B C A B C ..., on both ranks together."""
    times = {name: [] for name in steps}
    for r in range(WARM_UP + rounds):
        found = {}
        for name, step in steps.items():
            tokens = batch(r)
            dist.barrier()
            start = clock()
            found[name] = step(tokens)
            taken = slowest(clock() - start)
            if r >= WARM_UP:
                times[name].append(taken)
        if r == 0 and dist.get_rank() == 0:
            agree(found)
    return times


def agree(found: dict[str, tuple[float, float]]) -> None:
    """Loss and gradient norm of all are the same up to 1e-4 of them."""
    print("   ".join(f"{name}: loss {loss:.5f}, norm {norm:.5f}" for name, (loss, norm) in found.items()))
    for values in zip(*found.values(), strict=True):
        assert max(values) - min(values) < 1e-4 * max(values), found


def compare(kind: str, rounds: int, clock: Callable[[], float]) -> None:
    ours, theirs, make_ours, make_theirs = KINDS[kind]
    ours = f"minirl {ours}"
    times = alternate({ours: make_ours(), theirs: make_theirs(), "one process": one_process()}, rounds, clock)
    if dist.get_rank() == 0:
        report(times, theirs, ours)  # ours / theirs: below 1 we are faster
        alone = statistics.median(a / b for a, b in zip(times["one process"], times[ours], strict=True))
        print(f"one process / {ours}: {alone:.2f} times\n", flush=True)


# ---- where time goes ----

def profile(kind: str) -> None:
    """The operations of one step on the first rank, side by side. The profiler costs about 1 us an operation.

    What is left of the step is Python, and waiting for the other rank.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    _, theirs, *makers = KINDS[kind]
    tables, walls = [], []
    for make in makers:
        step = make()
        step(batch(0))
        dist.barrier()
        with torch_profile(activities=[ProfilerActivity.CPU]) as trace:
            walls.append(seconds(partial(step, batch(1))))
        tables.append({event.key: event for event in trace.key_averages()})
    if dist.get_rank() == 0:
        side_by_side(kind, theirs, tables, walls)


def side_by_side(kind: str, theirs: str, tables: Sequence[dict], walls: Sequence[float]) -> None:
    """Calls and self time in ms of the operations that take longest on either side; a 0 is an operation that is not."""
    def numbers(key: str) -> list[float]:
        return [value for table in tables for value in
                ((table[key].count, table[key].self_cpu_time_total / 1e3) if key in table else (0, 0.0))]

    print(f"{kind:38} {'minirl':>16} {theirs:>16}\n{'operation':38} {'calls':>7} {'ms':>8} {'calls':>7} {'ms':>8}")
    rows = {key: numbers(key) for key in {*tables[0], *tables[1]}}
    for key, (calls, taken, their_calls, their) in sorted(rows.items(), key=lambda row: -max(row[1][1::2]))[:30]:
        print(f"{key[:38]:38} {calls:7} {taken:8.2f} {their_calls:7} {their:8.2f}")
    print(f"{'the whole step':38} {1e3 * walls[0]:16.2f} {1e3 * walls[1]:16.2f}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    parser.add_argument("--cpu-time", action="store_true", help="of the process, without its waits")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, on either side")
    args = parser.parse_args()
    if "RANK" not in os.environ:  # become torchrun, which starts this file anew on each rank
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                                  str(RANKS), *sys.argv])
    init_mesh("cpu")
    for kind in args.only:
        if args.profile:
            profile(kind)
        else:
            compare(kind, args.rounds, process_time if args.cpu_time else perf_counter)
    close_mesh()


if __name__ == "__main__":
    main()
