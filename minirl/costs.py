"""What a rank of a layout holds, sends and takes, as formulas: memory, bytes on the way, time. No process, no weights.

    memory = rank_memory(config, layout, stage)     parameters, gradients, optimizer, activations, logits
    sent   = traffic(config, layout, stage)         (operation, group) -> bytes of an update
    taken  = seconds(config, layout, tokens, ...)   from 6 N a token and the pipeline's bubble

The parameters of a rank are counted on a model without memory (torch's meta device) that the code of training itself
has cut: pipeline, tensor parallelism, ZeRO. Bytes are formulas, one function a strategy, with the keys of the ledger
(`parallel/mesh.py`). The tests hold them against what real ranks have sent, and activations against what autograd kept.
`plan.py` asks them which layout fits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import lcm, prod
from typing import Literal, NamedTuple

import torch
from torch import nn

from kernels.head_loss import HEAD_LOGITS
from kernels.linear_logprob import CHUNK_ROWS, CHUNK_WORDS, GRAD_LOGITS, KEEP_LOGITS
from minirl.config import UserError, check_not_negative, check_positive
from minirl.lora import add_lora
from minirl.model import Block, ModelConfig, Transformer
from minirl.parallel import pipeline, zero
from minirl.parallel.layout import parallelize
from minirl.parallel.mesh import Group, Mesh
from minirl.parallel.placement import placement
from minirl.parallel.schedule import Kind, schedule, simulate

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class Layout:
    # layout
    dp: int = 1  # replicas, each with its own rows
    tp: int = 1  # ranks that share every matrix
    pp: int = 1  # stages of the pipeline
    cp: int = 1  # ranks that share the columns of a row
    sp: bool = False  # share the tokens between tensor-parallel layers as well
    zero: int = 0  # 1 optimizer, 2 gradients, 3 parameters in slices over dp x cp
    zero_overlap: bool = False  # ZeRO-3 computes while it sends, for two units' memory more
    schedule: Kind = "1f1b"  # of the pipeline
    chunks: int = 1  # slices of the model a stage, for interleaved
    context: Literal["ring", "ulysses"] = "ring"  # how --cp brings keys and queries together
    # work
    microbatch_size: int = 1  # rows of one forward pass on one replica
    sequence_length: int = 4096  # tokens of a row that the model reads
    rows_per_step: int = 0  # rows of one update, over all replicas; 0: 8 microbatches a replica
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"  # of weights, gradients and activations
    gradient_checkpointing: bool = False  # backward computes each block again
    lora_rank: int = 0  # adapters on all linear layers, the rest frozen; 0: all is trained
    qlora: bool = False  # and the frozen layers in 4 bits

    def __post_init__(self):
        check_positive(self, "dp", "tp", "pp", "cp", "chunks", "microbatch_size", "sequence_length")
        check_not_negative(self, "rows_per_step", "lora_rank")
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"--zero {self.zero} is unknown: use 0 (off), 1, 2 or 3")
        if self.zero_overlap and self.zero != 3:
            raise UserError(f"--zero-overlap is about gathered weights: use --zero 3, not {self.zero}")
        if self.sp and self.tp == 1:
            raise UserError("--sp shares the tokens of tensor-parallel ranks: give --tp 2 or more")
        if self.qlora and (not self.lora_rank or self.tp > 1):
            raise UserError("--qlora needs --lora-rank, and quantised weights are not cut: use --tp 1")
        round_ = self.dp * self.microbatch_size
        if self.rows_per_step % round_:
            raise UserError(f"--rows-per-step {self.rows_per_step} does not divide over {self.dp} replicas with "
                            f"microbatches of {self.microbatch_size}: use a multiple of {round_}")
        schedule(self.schedule, 0, self.pp, self.microbatches, self.chunks)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights: the data group, over which ZeRO cuts."""
        return self.dp * self.cp

    @property
    def groups(self) -> dict[str, int]:
        """How many ranks a group has, by the ledger's names."""
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp_cp": self.replicas}

    @property
    def rows(self) -> int:
        return self.rows_per_step or 8 * self.dp * self.microbatch_size

    @property
    def microbatches(self) -> int:
        return self.rows // (self.dp * self.microbatch_size)

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def wide(self) -> int:
        """Bytes of the type in which a head, a norm or an optimizer computes: float32 at least."""
        return max(self.itemsize, FLOAT)

    @property
    def columns(self) -> int:
        """Tokens of one row on one rank."""
        pieces = 2 * self.cp if self.cp > 1 else 1
        return -(-self.sequence_length // pieces) * pieces // self.cp

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank, B S."""
        return self.microbatch_size * self.columns

    @property
    def stream(self) -> int:
        """Tokens of the residual stream on one rank: with --sp a share, rounded up."""
        return -(-self.tokens // self.tp) if self.sp else self.tokens

    def describe(self) -> str:
        words = [f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(self, name) > 1]
        words += ["sp"] * self.sp + [f"zero {self.zero}"] * bool(self.zero)
        words += ["recomputation"] * self.gradient_checkpointing
        return ", ".join(words or ["one rank"]) + f", {self.microbatches} x {self.microbatch_size} rows a replica"


# ---- the parameters of a rank ----

def mesh_at(layout: Layout, stage: int = 0) -> Mesh:
    """The mesh of the first rank of a stage, with groups of the right sizes that cannot communicate."""
    sizes = layout.groups | {"dp": layout.dp}
    groups = {name: Group(name, tuple(range(size)), stage if name == "pp" else 0) for name, size in sizes.items()}
    return Mesh(layout.dp, layout.pp, layout.cp, layout.tp, pp_rank=stage, data_group=groups.pop("dp_cp"),
                **{f"{name}_group": group for name, group in groups.items()})


def local_model(config: ModelConfig, layout: Layout, stage: int = 0) -> Transformer:
    """What the first rank of a stage would hold, on the meta device. No rank of that stage holds more.

    UserError: what does not divide, or does not go together.
    """
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(getattr(torch, layout.dtype))
    if layout.lora_rank:
        add_lora(model, layout.lora_rank, generator=torch.Generator())
    if layout.qlora:
        for module in model.layers.modules():
            if isinstance(module, nn.Linear):  # no parameter any more, as in `nf4.NF4Linear`
                module.quantised = nf4_bytes(module.weight.numel())
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    return parallelize(model, mesh_at(layout, stage), sequence=layout.sp, zero_stage=layout.zero,
                       zero_overlap=layout.zero_overlap, schedule=layout.schedule, chunks=layout.chunks,
                       context_kind=layout.context)


def blocks_of(model: Transformer) -> list[Block]:
    """Those that are on this stage."""
    return [block for block in model.layers if isinstance(block, Block)]


class Held(NamedTuple):
    """Numbers (not bytes) that one rank holds, padding of ZeRO's slices included."""

    trained: int  # as they are used
    frozen: int
    own_trained: int  # of which this rank owns, as ZeRO deals them out: a part of 1 / (dp cp), or all
    own_frozen: int
    ends: int  # of the units before and behind the blocks
    passing: int  # that ZeRO has besides at the fullest moment: units' parameters and gradients, before they are cut


def held(model: Transformer) -> Held:
    """Count the parameters of a rank, which `local_model` has cut."""
    trained, frozen = (sum(p.numel() for p in model.parameters() if p.requires_grad is kind) for kind in (True, False))
    if (sharded := getattr(model, "zero", None)) is None:
        return Held(trained, frozen, trained, frozen, 0, 0)
    flats = [(flat.size, flat.shard.requires_grad) for unit in sharded.units.values() for flat in unit]
    own, kept = (sum(size for size, trained in flats if trained is kind) for kind in (True, False))
    whole = {number: sum(len(flat.whole) for flat in unit) for number, unit in sharded.units.items()}
    found = [sum(len(flat.whole) for flat in unit if flat.shard.requires_grad) for unit in sharded.units.values()]
    if sharded.stage < 3 or sharded.overlap:
        largest = max(found)
        passing = 2 * largest + largest // sharded.mesh.data_group.size  # found, on their way, and the slice that comes
        if sharded.stage == 3:
            passing += 2 * max(whole.values())
    else:
        pairs = [size + whole.get(number + 1, 0) for number, size in whole.items()]
        passing = max(*pairs, *(size + grads for size, grads in zip(whole.values(), found, strict=True)))
    ends = sum(size for number, size in whole.items() if number in (zero.EMBEDDING, sharded.behind))
    if sharded.stage == 3 and sharded.stays:
        passing += whole[zero.EMBEDDING]
    return Held(own * sharded.mesh.data_group.size, frozen, own, kept if sharded.stage == 3 else frozen, ends, passing)


def nf4_bytes(numbers: int) -> int:
    """A matrix in NF4 (`nf4.py`): 4 bits a weight, 8 a block of 64, a float32 for 256 blocks, a mean and 16 levels."""
    blocks = -(-numbers // 64)
    return 32 * blocks + blocks + FLOAT * (1 + -(-blocks // 256) + 16)


# ---- memory ----

@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the fullest moment of an update."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0  # two averages and, below float32, master copies
    activations: int = 0
    head: int = 0  # a tile of logits and its gradient; the gradient of the head in float32
    buffers: int = 0  # what ZeRO has on its way

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def state_memory(trained: float, frozen: float = 0, own_trained: float | None = None, own_frozen: float | None = None,
                 stage: int = 0, itemsize: int = 2) -> Memory:
    """Parameters, gradients and optimizer of AdamW: in bfloat16 2 + 2 + 12 bytes a parameter, in float32 4 + 4 + 8.

    The numbers that a rank uses and those that it owns (arXiv:1910.02054 figure 1), bytes out.
    """
    own_trained = trained if own_trained is None else own_trained
    own_frozen = frozen if own_frozen is None else own_frozen
    averages = 2 * max(itemsize, FLOAT) + (FLOAT if itemsize < FLOAT else 0)
    parameters = own_trained + own_frozen if stage >= 3 else trained + frozen
    return Memory(round(parameters * itemsize), round((own_trained if stage >= 2 else trained) * itemsize),
                  round((own_trained if stage >= 1 else trained) * averages))


def rank_memory(config: ModelConfig, layout: Layout, stage: int) -> Memory:
    """The memory of the first rank of a stage."""
    model = local_model(config, layout, stage)
    count, quantised = held(model), sum(getattr(module, "quantised", 0) for module in model.modules())
    memory = state_memory(count.trained, count.frozen, count.own_trained, count.own_frozen, layout.zero,
                          layout.itemsize)
    gradients = memory.gradients
    if layout.zero >= 2 and layout.pp > 1:  # whole until the last microbatch, and then in slices besides
        gradients += count.trained * layout.itemsize
    activations, head = activation_memory(config, layout, model, stage)
    return replace(memory, parameters=memory.parameters + quantised, gradients=gradients, activations=activations,
                   head=head, buffers=count.passing * layout.itemsize)


def fullest(config: ModelConfig, layout: Layout) -> tuple[int, Memory]:
    """The stage whose ranks need most, and what.

    Of stages between the first and the last that have as many layers, the earliest keeps most microbatches.
    """
    slices = pipeline.stage_layers(config, layout.pp, layout.chunks)
    kinds: dict[tuple, int] = {}
    for stage in range(layout.pp):
        layers = [len(slice_) for slice_ in slices[stage :: layout.pp]]
        kinds.setdefault((*layers, stage == 0, stage == layout.pp - 1), stage)
    found = [(stage, rank_memory(config, layout, stage)) for stage in kinds.values()]
    return max(found, key=lambda each: each[1].total)


def norm_bytes(config: ModelConfig, layout: Layout, size: int, count: int = 1) -> int:
    """What a norm of `count` vectors of `size` keeps a token: its input and, to find the weight's gradient, its result
    before the weight (`RMSNorm`: the input in float32, the result in the model's type); and a statistic."""
    if config.norm == "layer":
        return count * (size * layout.itemsize + 2 * layout.wide)
    return count * (size * (layout.wide + layout.itemsize) + layout.wide)


def block_bytes(config: ModelConfig, layout: Layout, heads: int, kv_heads: int, mlp: int) -> int:
    """What autograd keeps of one block for one microbatch. heads, kv_heads, mlp: those on this rank.

    a token, in numbers    two norms 2 (2 D + 1); inputs of q, k, v and of gate, up: 2 D; attention q, k, v, its
    (float32, Llama)       result and logsumexp: (2 H + 2 K) E + H; gate, its activation, up, their product: 4 I
                           6 D + 2 (H + K) E + 4 I + H + 2 in all

    With tensor parallelism H, K and I are shares; with --sp so are the tokens of the norms, but not the inputs of the
    matrices, which are gathered.
    """
    D, E, s = config.hidden_size, config.head_dim, layout.itemsize
    norms = {"pre": 2, "post": 2, "both": 4}[config.norm_placement]
    copies = key_copies(kv_heads, layout.cp) if layout.context == "ulysses" else 1
    attention = (2 * heads + 2 * kv_heads * copies) * E * s + heads * layout.wide
    if layout.cp > 1:
        attention += heads * E * s  # the result once more, in the order in which the next matrix reads it
    if config.qk_norm:
        attention += norm_bytes(config, layout, E, heads + kv_heads)
    if config.qk_norm_across_heads:
        attention += norm_bytes(config, layout, (heads + kv_heads) * E) + layout.wide
    return (layout.stream * norms * norm_bytes(config, layout, D)
            + layout.tokens * (2 * D * s + attention + (4 if config.gated_mlp else 2) * mlp * s))


def key_copies(kv_heads: int, ranks: int) -> int:
    """In how many copies Ulysses sends key heads, so that they divide over the ranks."""
    return lcm(kv_heads, ranks) // kv_heads


def activation_memory(config: ModelConfig, layout: Layout, model: Transformer, stage: int) -> tuple[int, int]:
    """(what autograd keeps at the fullest moment, what the head needs while it works), bytes on a rank of a stage.

    A pipeline keeps as many microbatches as its schedule has under way. With recomputation a block keeps its input
    alone, and one block at a time is there in full.
    """
    D, s, wide = config.hidden_size, layout.itemsize, layout.wide
    blocks = blocks_of(model)
    attention, up = blocks[0].self_attn, blocks[0].mlp.up_proj
    width = (up.lora_B if layout.lora_rank else up.weight).shape[0]
    block = block_bytes(config, layout, attention.heads, attention.kv_heads, width)
    kept = layout.stream * D * s if layout.gradient_checkpointing else block
    live, last = 1, True  # slices of the stage that wait for their backward
    layers, slices = len(blocks), 1
    if layout.pp > 1:
        slices, last = layout.chunks, stage == layout.pp - 1
        live = simulate(layout.schedule, layout.pp, layout.microbatches, layout.chunks).peak[stage]
        layers = max(len(model.pipeline.slices[number]) for number in model.pipeline.mine)
    total = live * layers * kept + (block if layout.gradient_checkpointing else 0)
    if not last:
        return total, 0
    V = model.head_weight.shape[0]
    small = layout.tokens * V <= KEEP_LOGITS
    kept = V * wide if small and layout.tp == 1 and V <= CHUNK_WORDS else 0  # log-probs
    total += -(-live // slices) * layout.tokens * (norm_bytes(config, layout, D) + D * s + wide + 8 + kept)
    logits = 2 * min(CHUNK_ROWS, layout.tokens) * min(CHUNK_WORDS, V) * wide
    if not small:  # one chunk: of float32 in head_loss, or on a GPU, for which bfloat16 stands, that of its kernels
        logits = min(layout.tokens * V * wide, HEAD_LOGITS * wide if s > 2 else GRAD_LOGITS * s)
    gradient = 0
    if model.head_weight.requires_grad:  # of a tied one, autograd keeps the head's until the embedding's is there too
        gradient = V * D * (wide + (s if config.tie_word_embeddings and layout.pp == 1 else 0))
    return total, logits + gradient


def cache_bytes(config: ModelConfig, itemsize: int = 2, layers: int | None = None, kv_heads: int | None = None) -> int:
    """The KV cache of one token: 2 x layers x key heads x head size numbers. Those of a rank, or of the model."""
    layers = config.num_hidden_layers if layers is None else layers
    return 2 * layers * (kv_heads or config.num_key_value_heads) * config.head_dim * itemsize


def role_memory(config: ModelConfig, layout: Layout, rows: int, length: int) -> dict[str, int]:
    """Bytes on the fullest rank of each model that RL needs, all in one layout; and of a rollout's cache.

    rows, length : sampled at once by one replica, and the tokens of each; without a pipeline the ranks of cp share them
    """
    stage, policy = fullest(config, layout)
    model = local_model(config, layout, stage)
    blocks = blocks_of(model)
    frozen = 0 if layout.lora_rank else policy.parameters
    cache = cache_bytes(config, layout.itemsize, len(blocks), blocks[0].self_attn.kv_heads)
    return {"policy": policy.total, "critic": policy.total, "reference": frozen, "reward model": policy.parameters,
            "KV cache": cache * -(-rows // layout.cp) * length}


# ---- bytes on the way ----

Traffic = dict[tuple[str, str], int]  # (operation, group) -> bytes, as the ledger of a rank counts them


def add(*parts: Traffic) -> Traffic:
    total: Traffic = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return {key: count for key, count in total.items() if count}


def tensor_traffic(config: ModelConfig, layout: Layout, model: Transformer, stage: int) -> Traffic:
    """Tensor parallelism, an update (`tensor.py`): each layer meets twice forward and twice backward.

    With recomputation a block's forward collectives come again, but for the last: what lies behind is not needed.
    """
    if layout.tp == 1:
        return {}
    first, last = stage == 0, stage == layout.pp - 1
    layers = len(blocks_of(model))
    again = layers * layout.gradient_checkpointing
    # A frozen embedding wants no gradient, and so the first matrices that read it send none back.
    frozen = first and layout.lora_rank > 0
    size, M = config.hidden_size * layout.itemsize, layout.microbatches
    if layout.sp:
        whole = layout.stream * layout.tp * size  # what is gathered, and what is scattered
        traffic = {("all_gather", "tp"): M * whole * (4 * layers + 2 * again + last + (first and not frozen)),
                   ("reduce_scatter", "tp"): M * whole * (4 * layers + again + first - frozen),
                   ("all_reduce", "tp"): M * layout.tokens * size * last}
    else:
        count = 4 * layers + again + first + last - frozen
        traffic = {("all_reduce", "tp"): M * layout.tokens * size * count}
    norms = (4 * layers + 2 * again) * config.qk_norm_across_heads * M * layout.tokens * layout.wide
    head = 3 * last * M * layout.tokens * layout.wide  # a maximum, and two sums a token
    return add(traffic, {("all_reduce", "tp"): norms + head + partial_bytes(layout, model)})


def partial_bytes(layout: Layout, model: Transformer) -> int:
    """Gradients of which the ranks of a tp group have parts (`placement.py`): once an update, or once a microbatch."""
    numbers = 0
    for p in model.parameters():
        where = placement(p)
        if p.requires_grad and (where.partial or where.copies > 1):
            shape = list(p.shape)
            if where.copies > 1:
                shape[where.dim] = sum(where.sizes)
            numbers += prod(shape)
    return numbers * layout.itemsize * (layout.microbatches if layout.zero >= 2 and layout.pp == 1 else 1)


def data_traffic(layout: Layout, count: Held) -> Traffic:
    """Data parallelism and ZeRO, an update with its optimizer step (`data.py`, `zero.py`)."""
    if layout.replicas == 1:
        return {}
    s, M = layout.itemsize, layout.microbatches
    if layout.zero == 0:
        return {("all_reduce", "dp_cp"): count.trained * s}
    sums = M if layout.zero >= 2 and layout.pp == 1 else 1
    traffic = {("reduce_scatter", "dp_cp"): sums * count.trained * s}
    if layout.zero < 3:
        return traffic | {("all_gather", "dp_cp"): count.trained * s}
    whole = count.trained + count.own_frozen * layout.replicas
    return traffic | {("all_gather", "dp_cp"): (2 * M * (whole - count.ends) + M * count.ends) * s}


def pipeline_traffic(config: ModelConfig, layout: Layout, model: Transformer, stage: int) -> Traffic:
    """What a stage sends, an update (`pipeline.py`): hidden states on, their gradients back."""
    if layout.pp == 1:
        return {}
    slices, mine = len(model.pipeline.slices), model.pipeline.mine
    borders = sum((number < slices - 1) + (number > 0) for number in mine)
    sent = borders * layout.microbatches * layout.stream * config.hidden_size * layout.itemsize
    if config.tie_word_embeddings and stage in (0, layout.pp - 1):
        weight = model.embed_tokens.weight
        sent += weight.numel() * layout.itemsize * weight.requires_grad
    return {("send", "pp"): sent}


def context_traffic(config: ModelConfig, layout: Layout, model: Transformer) -> Traffic:
    """What a rank sends to bring keys and queries together, an update (`context.py`)."""
    if layout.cp == 1:
        return {}
    blocks = blocks_of(model)
    heads, kv_heads = blocks[0].self_attn.heads, blocks[0].self_attn.kv_heads
    passes, N = 1 + layout.gradient_checkpointing, layout.cp
    head = layout.tokens * config.head_dim  # numbers of one head on this rank
    if layout.context == "ring":
        sent = (passes + 1) * (N - 1) * layout.itemsize + N * layout.wide  # k and v, and dk and dv
        return {("send", "cp"): len(blocks) * layout.microbatches * 2 * kv_heads * head * sent}
    moved = (2 * heads + 2 * kv_heads * key_copies(kv_heads, N)) * head * layout.itemsize
    return {("all_to_all", "cp"): len(blocks) * layout.microbatches * (passes + 1) * moved}


def traffic(config: ModelConfig, layout: Layout, stage: int = 0) -> Traffic:
    """What the ledger of the first rank of a stage shows after one update, sums of a few numbers left out."""
    model = local_model(config, layout, stage)
    return add(tensor_traffic(config, layout, model, stage), data_traffic(layout, held(model)),
               pipeline_traffic(config, layout, model, stage), context_traffic(config, layout, model))


def on_wire(operation: str, size: int, count: int) -> int:
    """Bytes that one of N ranks sends for a tensor of `count` bytes, with ring algorithms (`ring.py`).

    all-reduce 2 (N - 1) / N, of which a reduce-scatter and an all-gather are half each; what is sent goes once
    """
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}.get(operation)
    return count if share is None else round(count * share * (size - 1) / size)


# ---- time ----

def parameter_count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def flops_per_token(parameters: int, recomputation: bool = False, lora: bool = False) -> int:
    """6 N: 2 forward, 2 for the gradient of what a matrix reads and 2 for its own, which a frozen one does not need.
    Recomputation does the forward twice: 8 N. Attention to long rows comes on top, and is left out."""
    return (6 + 2 * recomputation - 2 * lora) * parameters


def bubble(layout: Layout) -> float:
    """The share of their time in which the stages stand idle, without the sends."""
    return simulate(layout.schedule, layout.pp, layout.microbatches, layout.chunks).bubble


def seconds(config: ModelConfig, layout: Layout, tokens: float, tflops: float, mfu: float) -> float:
    """Time to train on so many tokens, where a GPU that works does mfu x tflops."""
    work = flops_per_token(parameter_count(config), layout.gradient_checkpointing, layout.lora_rank > 0) * tokens
    return work / (layout.size * tflops * 1e12 * mfu * (1 - bubble(layout)))
