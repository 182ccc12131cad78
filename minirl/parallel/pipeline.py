"""Pipeline parallelism: a model that is too large for one rank is cut between its layers, and hidden states travel.

    2 stages of 2 chunks, so 4 slices; one chunk is the plain case

    stage 0    tokens ─ embedding, layers 0-6 ─┐            ┌─ layers 14-20 ─┐
    stage 1                                    └─ layers 7-13 ─┘             └─ layers 21-27, norm, head, loss

Every stage holds the whole microbatch (tokens, masks, advantages). Only hidden states are sent, and their gradients on
the way back. In which order is data, made by `schedule.py`; `run_schedule` executes it. The last slice computes the
loss as one process would, and a slice's backward is autograd's, from the gradient that arrived. So losses and
gradients are those of one process, to rounding.

**What is sent.** A microbatch crosses each border between two of the P v slices once forward and once backward:

    2 (P v - 1) x B x S x D x itemsize        bytes a microbatch, over all stages: the ledger's "send" of "pp"
    2 x V x D x itemsize                      bytes an update, if embedding and head are tied and trained

**What is kept.** The activations of as many microbatches as `schedule.simulate` says, and what the last turns sent.

Without gradient (log-probs of a reference, sampling) a forward goes through the stages one after the other. Several
overlap; but the tokens of a row cannot, and a decode step takes as long as on one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minirl.config import UserError
from minirl.logprobs import first_action, loss_here, read_rows
from minirl.model import Frame, KVCache, ModelConfig, Transformer
from minirl.parallel.collectives import broadcast, gather_objects, start_exchange
from minirl.parallel.context import cut_columns
from minirl.parallel.mesh import Group, Mesh
from minirl.parallel.schedule import Kind, Op, schedule, turns
from minirl.rollout import Rollout

AHEAD = 2  # turns until a stage makes sure that what it sent has been received, and forgets it


# ---- who has what ----

def stage_layers(config: ModelConfig, stages: int, chunks: int = 1) -> list[range]:
    """The layers of each of the stages x chunks slices of a model; number chunk * stages + stage is a stage's own.

    The slowest slice sets the pace, so the largest is made as small as can be. Work is counted in weights that a token
    is multiplied with: a layer's, and in the last slice the head's, which may outweigh several layers (Qwen3-0.6B: 10).
    Looking up an embedding is no work.

    UserError: fewer layers than slices.
    """
    layers, slices, D = config.num_hidden_layers, stages * chunks, config.hidden_size
    if layers < slices:
        raise UserError(f"{layers} layers do not fill {stages} stages" + f" of {chunks} chunks" * (chunks > 1) +
                        f": use --pp {max(1, layers // chunks)} or less" + ", or fewer chunks" * (chunks > 1))
    if slices == 1:
        return [range(layers)]
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = D * (2 * heads * config.head_dim + (2 + config.gated_mlp) * config.intermediate_size)
    head = config.vocab_size * D / layer  # in layers
    last = min(range(1, layers - slices + 2), key=lambda n: (max(-(-(layers - n) // (slices - 1)), n + head), -n))
    size, more = divmod(layers - last, slices - 1)
    # Those with one layer more come late: early stages keep the activations of more microbatches.
    sizes = [size] * (slices - 1 - more) + [size + 1] * more + [last]
    ends = [sum(sizes[: i + 1]) for i in range(slices)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


class Elsewhere(nn.Module):
    """In the place of what another stage has. It has no parameters, so the names of the others stay as they are."""

    def forward(self, *args) -> Tensor:
        raise RuntimeError("this part of the model is on another stage of the pipeline")


def split_stages(model: Transformer, mesh: Mesh, chunks: int = 1, kind: Kind = "1f1b",
                 sequence: bool = False) -> Transformer:
    """Leave on each stage its slices of a whole model, in place; returns the model, which now knows its `pipeline`.

    The first slice has the embedding, the last one the final norm and the head. If these two are tied both have the
    matrix, and `sum_tied_gradients` keeps it one.

    kind      : the schedule of an update, one of `schedule.KINDS`
    sequence  : between the layers a rank of the tp group has its share of the tokens only (`sequence.py`)
    UserError : fewer layers than slices; several chunks without "interleaved", or without a pipeline
    """
    schedule(kind, mesh.pp_rank, mesh.pp, 1, chunks)  # what this refuses shall be refused now
    if mesh.pp == 1 and chunks != 1:
        raise UserError(f"{chunks} chunks a stage need a pipeline: use --pp 2 or more, or 1 chunk")
    if mesh.pp == 1:
        return model
    slices = stage_layers(model.config, mesh.pp, chunks)
    model.pipeline = Pipeline(mesh.pp_group, slices, kind, chunks, mesh.tp if sequence else 1)
    here = {layer for number in model.pipeline.mine for layer in slices[number]}
    for layer in {*range(len(model.layers))} - here:
        model.layers[layer] = Elsewhere()
    first, last, tied = mesh.pp_rank == 0, model.pipeline.is_last, model.tied
    for name, kept in (("embed_tokens", first or (last and tied)), ("embed_positions", first), ("norm", last),
                       ("lm_head", last), ("score", last), ("value_head", last)):
        if getattr(model, name, None) is not None and not kept:
            setattr(model, name, Elsewhere())
    return model


@dataclass
class Pipeline:
    """What a stage knows of the others."""

    group: Group  # the stages, in order
    slices: list[range]  # from `stage_layers`
    kind: Kind
    chunks: int
    token_ranks: int  # so many ranks of a stage share the tokens of a hidden state
    peak: int = 0  # of the last update: most forwards whose backward had not been done yet

    @property
    def mine(self) -> range:
        """Numbers of this stage's slices."""
        return range(self.group.rank, len(self.slices), self.group.size)

    @property
    def is_last(self) -> bool:
        return self.group.rank == self.group.size - 1

    def run(self, model: Transformer, number: int, x: Tensor | None, tokens: Tensor, frames: list[Frame],
            cache: KVCache | None = None) -> Tensor:
        """Hidden states through slice `number`. The first begins with the tokens, the last one ends with the norm."""
        x = model.embed(tokens, frames) if number == 0 else x
        x = model.run(x, frames, cache, self.slices[number])
        return model.norm(x) if number == len(self.slices) - 1 else x

    def room(self, model: Transformer, tokens: Tensor) -> Tensor:
        """Where hidden states of tokens (B, T) will arrive, or their gradient: (B, T, D), or (1, share of B T, D)."""
        shape = tokens.shape if self.token_ranks == 1 else (1, -(-tokens.numel() // self.token_ranks))
        return torch.empty(*shape, model.config.hidden_size, dtype=model.dtype, device=tokens.device)

    def forward(self, model: Transformer, tokens: Tensor, frames: list[Frame], cache: KVCache | None) -> Tensor:
        """`Transformer.forward` through all stages, without gradient. Only what the last stage returns has a meaning.

        RuntimeError: gradient is wanted. It would end at the border of the stage.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("a forward through the stages of a pipeline has no gradient: use forward_backward, or "
                               "torch.no_grad()")
        x, stages = None, self.group.size
        for number in self.mine:
            if number > 0:
                x = self.room(model, tokens)
                wait(start_exchange([], [(x, (number - 1) % stages)], self.group)[1])
            x = self.run(model, number, x, tokens, frames, cache)
            if number < len(self.slices) - 1:
                wait(start_exchange([(x.contiguous(), (number + 1) % stages)], [], self.group)[0])
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """The last stage's x, on every stage. Theirs has its shape and dtype."""
        return broadcast(x, self.group, self.group.size - 1)

    def drawn_by_last(self, drawn: tuple[Tensor, Tensor] | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens (R,) that the last stage has drawn with noise (R,), and their log-probs (R,), on every stage.

        drawn : None on the others. In one message of float64, in which a token id stays what it is
        """
        both = torch.stack([x.double() for x in drawn]) if drawn else noise.new_empty(2, len(noise))
        tokens, logprobs = self.from_last(both)
        return tokens.long(), logprobs


# ---- an update ----

def plain_backward(tensor: Tensor, last: bool, grad: Tensor | None = None) -> None:
    torch.autograd.backward(tensor, grad)


class Passes:
    """The forward and backward passes of one stage in one update, and what lies between the two of a microbatch."""

    def __init__(self, model: Transformer, microbatches: Sequence[Rollout], mesh: Mesh, loss: Callable,
                 backward: Callable):
        """loss: (hidden, targets, microbatch, first) -> (loss, stats); backward: of `run_schedule`"""
        self.model, self.mesh, self.microbatches, self.loss, self.backward = model, mesh, microbatches, loss, backward
        self.readings = [read_rows(microbatch, mesh.cp_group) for microbatch in microbatches]
        self.live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (microbatch, chunk) -> input and output
        self.stats: list[dict[str, Tensor]] = []

    def run(self, op: Op, x: Tensor | None) -> Tensor | None:
        """What `op` makes of what has arrived for it, and the next stage waits for."""
        return (self.run_forward if op.forward else self.run_backward)(op, x)

    def run_forward(self, op: Op, x: Tensor | None) -> Tensor:
        """x: what the stage before sent; None on the first. Returns what the next stage reads, or the loss."""
        pipeline, reading = self.model.pipeline, self.readings[op.microbatch]
        number = pipeline.mine[op.chunk]
        x = None if x is None else x.requires_grad_()
        frames = self.model.frames(reading.tokens, reading.positions, reading.documents, None, reading.prefixes)
        out = pipeline.run(self.model, number, x, reading.tokens, frames)
        if number == len(pipeline.slices) - 1:
            microbatch = cut_columns(self.microbatches[op.microbatch], self.mesh)
            first = first_action(microbatch.action_mask)
            out, sums = self.loss(reading.rows(out), reading.targets, microbatch, first)
            self.stats.append({**sums, "loss": out.detach()})
        self.live[op.microbatch, op.chunk] = x, out
        return out.detach()

    def run_backward(self, op: Op, grad: Tensor | None) -> Tensor | None:
        """grad: of what `run_forward` returned; None for the loss. Returns the gradient of x, None without an x."""
        x, out = self.live.pop((op.microbatch, op.chunk))
        if grad is None or out.requires_grad:  # all up to here may be frozen; but a loss without gradient is an error
            self.backward(out, op.microbatch == len(self.microbatches) - 1, grad)
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad


def run_schedule(model: Transformer, microbatches: Iterable[Rollout], loss_fn: Callable, mesh: Mesh,
                 temperature: float = 1.0, entropy: bool = False, by_token: bool = False,
                 backward: Callable = plain_backward) -> list[dict[str, Tensor]]:
    """Forward and backward of every microbatch through the stages. Gradients add up in the parameters that are here.

    microbatches : the same on all stages of a replica, of any number (or none) and any shapes
    loss_fn      : as in `forward_backward`; called on the last stage only
    backward     : (tensor, last, grad) -> None; last: no later backward of this update reaches the same parameters
    returns      : on the last stage the stats of each microbatch, "loss" among them; [] on the others

    RuntimeError: the stages have been given different microbatches.
    """
    def loss(*seen) -> tuple[Tensor, dict[str, Tensor]]:
        return loss_here(model, *seen, loss_fn, temperature, entropy, by_token)

    microbatches, pipeline, group = list(microbatches), model.pipeline, mesh.pp_group
    check_same([tuple(microbatch.tokens.shape) for microbatch in microbatches], group)
    passes = Passes(model, microbatches, mesh, loss, backward)
    arriving: dict[Op, tuple[dist.Work, Tensor]] = {}  # what an operation waits for
    sending: deque[tuple[list[dist.Work], list]] = deque()
    pipeline.peak = 0
    for op, to, arrivals in turns(pipeline.kind, mesh.pp_rank, mesh.pp, len(microbatches), pipeline.chunks):
        result = None
        if op is not None:
            work, x = arriving.pop(op, (None, None))
            wait([work] if work else [])
            result = passes.run(op, x)
            pipeline.peak = max(pipeline.peak, len(passes.live))
        sends = [] if to is None else [(result.contiguous(), to)]
        receives = [(pipeline.room(model, passes.readings[later.microbatch].tokens), source)
                    for later, source in arrivals]
        sent, received = start_exchange(sends, receives, group)
        for (later, _), work, (x, _) in zip(arrivals, received, receives, strict=True):
            arriving[later] = work, x
        sending.append((sent, sends))
        if len(sending) > AHEAD:
            wait(sending.popleft()[0])
    for works, _ in sending:
        wait(works)
    return passes.stats


def wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def check_same(shapes: list[tuple[int, ...]], group: Group) -> None:
    """Stages that expect different messages would wait for each other for ever."""
    first, *others = gather_objects(shapes, group)
    for stage, other in enumerate(others, 1):
        if other != first:
            raise RuntimeError(f"all stages of a pipeline must be given the same microbatches, but stage 0 has tokens "
                               f"of {first} and stage {stage} of {other}")


def sum_tied_gradients(model: Transformer) -> None:
    """The first stage's embedding and the last one's head are one matrix if they are tied: add up their gradients.

    Once an update, after the last backward and before the sum over replicas. Both get the same bits.
    """
    pipeline = model.pipeline
    if pipeline is None or not model.tied:
        return
    first, last = 0, pipeline.group.size - 1
    if pipeline.group.rank not in (first, last):
        return
    other = last - pipeline.group.rank
    for p in model.embed_tokens.parameters():
        if p.requires_grad:
            mine = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            theirs = torch.empty_like(mine)
            works = start_exchange([(mine, other)], [(theirs, other)], pipeline.group)
            wait([*works[0], *works[1]])
            p.grad = mine + theirs
