"""Tensor parallelism (arXiv:1909.08053 section 3): each rank has a slice of every matrix, and they meet twice a block.

An MLP is down(act(up(x))). Cut `up` by its outputs and `down` by its inputs, and what one rank computes between them is
nobody else's business: the activation works on each component alone.

    up    (I, D)   by rows     x (B, T, D) on every rank  ->  (B, T, I / N)
    down  (D, I)   by columns  (B, T, I / N)  ->  a part of the sum (B, T, D)      all-reduce: the whole, on every rank

Attention is the same with heads in the place of components: q, k and v by rows, o by columns.

    x ──┬─ copy_to ── q, k, v ─ attend ─ o ── reduce_from ─(+)─┬─ copy_to ── gate, up ─ act ─ down ── reduce_from ─(+)──
        └──────────────────────────────────────────────────────┘ ...

`copy_to` is the identity, whose gradient is all-reduced: each rank knows what its own slice wants of x. With
`sequence=True` the pair becomes an all-gather and a reduce-scatter (see `sequence.py`).

The embedding is cut by words. A rank looks up those that it has, the others are 0, and an all-reduce makes the sum. The
output matrix is cut by words as well; `linear_logprob` and `sample` exchange a few numbers a token, and no rank ever
has all the logits.

What a rank sends for L blocks, in units of a "layer": B T D numbers, where `sequence` rounds B T up to a multiple of N.

                 all-reduce        with `sequence`:  all-gather    reduce-scatter    all-reduce
    forward      2 L + 1                             2 L + 1       2 L + 1           .
    backward     2 L + 1                             2 L + 1       2 L               1

And small things: log-probs all-reduce B T and then 2 B T numbers (with entropy 3 B T) of float32 or wider; norms across
heads (OLMo 2) all-reduce B T numbers, 2 L times forward and 2 L times backward; an update all-reduces the partial
gradients once (`placement.py`). Gradient checkpointing repeats what a block sends forward, but for the very last where
no norm follows.

A model is sharded in place, with hooks and a few subclasses: `model.py` knows nothing of it, and parameters keep their
names. Each says in its `placement` what a rank has of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minirl.config import UserError
from minirl.model import Attention, Block, Embedding, ModelConfig, RMSNorm, Transformer
from minirl.parallel.collectives import MAX, SUM, all_gather, all_reduce, copy_to, reduce_from
from minirl.parallel.mesh import Group, Mesh
from minirl.parallel.placement import Placement, cut, even_sizes, mark, whole
from minirl.parallel.sequence import gather_tokens, in_rows, own_tokens, scatter_tokens, whole_tokens

# Which dimension of a layer's parameters is cut. None: every rank has the whole parameter and a part of its gradient.
# (LoRA: y = W x + B A x. Of the two thin matrices, the one on the side that is cut is cut with it.)
COLUMN = {"weight": 0, "bias": 0, "lora_A": None, "lora_B": 0}
ROW = {"weight": 1, "bias": None, "lora_A": 1, "lora_B": None}
UNCUT = {"weight": None, "bias": None}


def shard(model: Transformer, mesh: Mesh, sequence: bool = False) -> Transformer:
    """Leave on each rank its slice of a model, in place; returns the model. Every rank must hold the same one.

    sequence  : Megatron's sequence parallelism as well
    UserError : heads or words that do not divide, NF4 weights, dropout; nothing is changed then

    Adapters are put on, and trained parameters chosen, before. The hidden states that the model returns are whole on
    every rank, and so must be the gradient that comes back to them.
    """
    group, config = mesh.tp_group, model.config
    if group.size == 1:
        return model
    check(model, group.size)
    for block in model.layers:
        if isinstance(block, Block):  # in a pipeline, some are elsewhere
            shard_attention(block.self_attn, config, group)
            shard_mlp(block.mlp, group)
            connect(block, group, sequence)
    shard_vocabulary(model, group, sequence)
    model.repeats = config.num_attention_heads // max(config.num_key_value_heads, group.size)
    return model


def check(model: Transformer, size: int) -> None:
    """Refuse, before anything is changed, what cannot be cut."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in possible:
        raise UserError(f"tp {size}: {heads} heads with {kv_heads} key/value heads do not divide over {size} ranks: "
                        f"use one of {possible}")
    for name in ("vocab_size", "intermediate_size"):
        if getattr(config, name) < size:
            raise UserError(f"tp {size}: {name} {getattr(config, name)} leaves some ranks with nothing: "
                            f"use at most tp {getattr(config, name)}")
    if config.qk_norm_across_heads and config.norm != "rms":
        raise UserError(f"tp {size}: a norm of kind {config.norm!r} across heads is not supported: supported is 'rms'")
    for name, module in model.named_modules():
        if next(module.named_buffers(recurse=False), None):
            raise UserError(f"tp {size}: {name} ({type(module).__name__}) holds quantised or merged weights, which are "
                            "not cut: open the base without quantising, or unmerge the adapter")
        if getattr(module, "dropout", 0):
            raise UserError(f"tp {size}: {name} has dropout {module.dropout}, and the ranks would drop something else "
                            "than one process: use 0")


def cut_layer(layer: nn.Module, dims: dict[str, int | None], sizes: tuple[int, ...], group: Group,
              copies: int = 1) -> None:
    """Leave this rank's part of a layer's parameters, and of all that is wrapped in it: adapters, trained copies."""
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if dims[name] is None:
                mark(parameter, Placement(partial=True))
            else:
                setattr(module, name, cut(parameter, Placement(dims[name], sizes, copies), group))
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
            if dims is ROW and module._parameters["bias"] is not None:
                module.__class__, module.adds_bias = RowLinear, group.rank == 0


class RowLinear(nn.Linear):
    """A row-parallel layer with a bias, which the first rank alone adds: in the sum over N ranks it counts once."""

    adds_bias: bool

    @property
    def bias(self) -> Tensor | None:
        return self._parameters["bias"] if self.adds_bias else None


# ---- the parts of a block ----

def shard_attention(attention: Attention, config: ModelConfig, group: Group) -> None:
    """Some heads a rank. With fewer key heads than ranks, neighbours hold `copies` of one, each for its own queries."""
    N, heads, kv_heads, width = group.size, attention.heads, attention.kv_heads, attention.head_dim
    copies = max(1, N // kv_heads)
    attention.heads, attention.kv_heads = heads // N, kv_heads * copies // N
    queries, keys = attention.heads * width, attention.kv_heads * width  # components on this rank
    q_sizes, k_sizes = (queries,) * N, (keys,) * (N // copies)
    cut_layer(attention.q_proj, COLUMN, q_sizes, group)
    cut_layer(attention.k_proj, COLUMN, k_sizes, group, copies)
    cut_layer(attention.v_proj, COLUMN, k_sizes, group, copies)
    cut_layer(attention.o_proj, ROW, q_sizes, group)
    if not config.qk_norm_across_heads:
        for norm in (attention.q_norm, attention.k_norm):
            cut_layer(norm, UNCUT, (), group)  # one weight for all heads, of which a rank sees its own
        return
    attention.normed = queries, keys
    for norm, sizes, share in ((attention.q_norm, q_sizes, 1), (attention.k_norm, k_sizes, copies)):
        cut_layer(norm, {"weight": 0}, sizes, group, share)
        for module in norm.modules():
            if isinstance(module, RMSNorm):
                module.__class__, module.group = NormAcrossRanks, group


class NormAcrossRanks(RMSNorm):
    """RMSNorm of a vector that is spread over ranks: one number a token, the sum of squares, is all-reduced.

    Its gradient too, since each rank scales its own components with it.
    """

    group: Group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.group), self.group)
        mean = squares / (self.weight.numel() * self.group.size)  # a head with copies counts so often in both
        return self.weight * (wide * (mean + self.eps).rsqrt()).to(x.dtype)


def shard_mlp(mlp: nn.Module, group: Group) -> None:
    """Some components a rank."""
    sizes = even_sizes(mlp.up_proj.weight.shape[0], group.size)
    for layer in (mlp.gate_proj, mlp.up_proj):
        if layer is not None:
            cut_layer(layer, COLUMN, sizes, group)
    cut_layer(mlp.down_proj, ROW, sizes, group)


def connect(block: Block, group: Group, sequence: bool) -> None:
    """The collectives of a block: hooks before and behind attention and MLP."""
    attention, mlp = block.self_attn, block.mlp
    if sequence:
        # Attention gets rows; the frame, its second argument, knows how many. The MLP takes tokens as they come.
        attention.register_forward_pre_hook(
            lambda _, args: (in_rows(gather_tokens(args[0], group), args[1].positions.shape), *args[1:]))
        mlp.register_forward_pre_hook(lambda _, args: (gather_tokens(args[0], group),))
        for layer in block.children():
            if layer not in (attention, mlp):
                cut_layer(layer, UNCUT, (), group)  # the norms: whole, but each rank's gradient is of its own tokens
    else:
        attention.register_forward_pre_hook(lambda _, args: (copy_to(args[0], group), *args[1:]))
        mlp.register_forward_pre_hook(lambda _, args: (copy_to(args[0], group),))
    leave = scatter_tokens if sequence else reduce_from
    for layer in (attention, mlp):
        layer.register_forward_hook(lambda _, args, out: leave(out, group))


# ---- the vocabulary ----

@dataclass(frozen=True)
class Vocabulary:
    """Which words are on which rank, and how to ask for the others. `model.vocab` of a sharded model."""

    sizes: tuple[int, ...]  # words of each rank, in order
    group: Group

    @property
    def start(self) -> int:
        """The first word of this rank."""
        return sum(self.sizes[: self.group.rank])

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states on their way into the output matrix; the gradients of the ranks' words are summed."""
        return copy_to(hidden, self.group)

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """The "sum" or the "max" over the ranks."""
        return all_reduce(x, self.group, {"sum": SUM, "max": MAX}[op])

    def each(self, x: Tensor) -> Tensor:
        """What every rank has: (...) -> (N, ...)."""
        return all_gather(x[None], self.group)

    def whole(self, logits: Tensor) -> Tensor:
        """(B, V / N) -> (B, V): for evaluation, where top-k and top-p rank all the words."""
        return whole(logits, Placement(1, self.sizes), self.group)


class VocabEmbedding(Embedding):
    """The embedding of the words that are here; that of any other is 0."""

    start: int

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.start
        here = (row >= 0) & (row < len(self.weight))
        return super().forward(row.where(here, 0)) * here[..., None]


def shard_vocabulary(model: Transformer, group: Group, sequence: bool) -> None:
    """Some words a rank: embedding, output matrix, and between blocks and final norm the end of `sequence`."""
    model.vocab = Vocabulary(even_sizes(model.config.vocab_size, group.size), group)
    for name in ("embed_tokens", "lm_head"):
        if (layer := getattr(model, name, None)) is not None:
            cut_layer(layer, COLUMN, model.vocab.sizes, group)
            for module in layer.modules():
                if isinstance(module, Embedding):
                    module.__class__, module.start = VocabEmbedding, model.vocab.start
                    module.num_embeddings = len(module.weight)
    if (embedding := getattr(model, "embed_tokens", None)) is not None:
        leave = scatter_tokens if sequence else reduce_from
        embedding.register_forward_hook(lambda _, args, out: leave(out, group))
    if not sequence:
        return
    if (positions := getattr(model, "embed_positions", None)) is not None:
        cut_layer(positions, UNCUT, (), group)
        positions.register_forward_hook(lambda _, args, out: own_tokens(out, group))
    if isinstance(last := model.layers[-1], Block):
        last.register_forward_hook(lambda _, args, out: whole_tokens(out, args[1].positions.shape, group))
