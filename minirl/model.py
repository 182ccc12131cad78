"""The transformer: a Llama-style decoder in one page, with options that cover its relatives.

    hidden = model(tokens)             (B, T) -> (B, T, D)   final norm applied, no logits
    logits = model.logits(hidden)      (B, T, D) -> (B, T, V)
    scores = model.scores(hidden)      (B, T, D) -> (B, T)   of a reward model or critic, which has no words to say

B rows, T tokens, D hidden size, V vocabulary, H query heads, K key/value heads (H is a multiple of K), E head size.

A Llama is what is left when every option of `ModelConfig` has its default. Modules carry the names of its Hugging Face
checkpoints, so that opening one is a copy and not a translation (for its relatives `architectures.py` translates). What
is deliberately absent: losses, padding masks, dropout, and anything distributed. Rows are padded on the right, and a
causal model cannot look there: the padded tail needs no mask, only a loss that skips it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.linear_logprob import Impl
from minirl.bare import bare
from minirl.config import UserError
from minirl.prefixes import Prefixes
from minirl.rope import Rotary
from minirl.shape import ModelConfig
from minirl.sight import cache_sight, restart, row_sight


class KVCache:
    """Keys and values of the tokens seen so far. **The slot of a token is its position.**

    A slot is visible to a query when slot <= the query's position. Rows may therefore have different lengths: what
    lies beyond a row's own position (padding, or the remains of an earlier tenant) is invisible until a real token
    overwrites it. Decoding reads the used part of every tensor once a token: keep `slots` not much larger than that,
    since reading with gaps is slower than reading through.
    """

    def __init__(self, model: Transformer, rows: int, slots: int):
        """Of the layers, and in them the heads, that `model` has here: number of the layer -> (B, K, slots, E)."""
        layers = {i: block.self_attn for i, block in enumerate(model.layers) if isinstance(block, Block)}
        self.keys, self.values = ({i: attention.k_proj.weight.new_zeros(
            rows, attention.kv_heads, slots, attention.head_dim) for i, attention in layers.items()} for _ in range(2))

    def select(self, rows: Tensor, slots: int) -> KVCache:
        """A copy of some rows (R,), in any order and with repeats, that holds the first `slots` slots of each."""
        return self._map(lambda x: _resized(x.index_select(0, rows), slots))

    def join(self, other: KVCache) -> KVCache:
        """The rows of both, in a new cache as wide as this one."""
        return self._map(lambda x, y: torch.cat((x, _resized(y, x.shape[2]))), other)

    def resize(self, slots: int) -> KVCache:
        """The same rows with another number of slots."""
        return self._map(lambda x: _resized(x, slots))

    def put(self, rows: Tensor, other: KVCache) -> None:
        """Write the rows of `other` over the rows (R,) of this cache."""
        for i in self.keys:
            self.keys[i][rows], self.values[i][rows] = other.keys[i], other.values[i]

    def _map(self, function: Callable[..., Tensor], *others: KVCache) -> KVCache:
        """A new cache, from function(x, ...) of every tensor x and its counterparts."""
        new = KVCache.__new__(KVCache)
        new.keys = {i: function(x, *(other.keys[i] for other in others)) for i, x in self.keys.items()}
        new.values = {i: function(x, *(other.values[i] for other in others)) for i, x in self.values.items()}
        return new


def _resized(x: Tensor, slots: int) -> Tensor:
    """Cut or extend (with zeros) the axis of the slots: (B, K, any, E) -> (B, K, slots, E)."""
    return x[:, :, :slots] if slots <= x.shape[2] else F.pad(x, (0, 0, 0, slots - x.shape[2]))


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467). The square is taken in float32 or wider."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GemmaNorm(RMSNorm):
    """RMSNorm as Gemma stores it, weight - 1, so that weight decay pulls to 1; multiplied before it is rounded."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


NORMS = {"rms": RMSNorm, "gemma": GemmaNorm, "layer": nn.LayerNorm}


@dataclass
class Frame:
    """What all layers of one kind share in a forward: the rotation of each position, and who may see whom."""

    cos: Tensor | None  # (B or 1, T, 1, R); None: nothing turns
    sin: Tensor | None  # (B or 1, T, 1, R); the first half negated, so that a rotation is x * cos + roll(x, R/2) * sin
    positions: Tensor  # (B, T)
    mask: Tensor | None  # additive (B or 1, 1, T, T), or of `grouped_attention`; None: plain causal, or all seen
    start: int = 0  # slots start .. used - 1 of the cache are seen
    used: int = 0
    prefixes: Prefixes | None = None  # rows that begin alike read that once
    tail_mask: Tensor | None = None  # then what follows the prefixes has this one, and `mask` is theirs


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions (arXiv:2104.09864)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, width
        self.scale = (config.query_pre_attn_scalar or width) ** -0.5
        self.softcap = config.attn_logit_softcapping
        self.attend = fused_attention  # context parallelism puts its own here
        self.q_proj = nn.Linear(size, self.heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, self.kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, self.kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * width, size, bias=config.output_bias)
        self.q_norm, self.k_norm, self.normed = nn.Identity(), nn.Identity(), (width, width)
        if config.qk_norm or config.qk_norm_across_heads:
            self.normed = (self.heads * width, self.kv_heads * width) if config.qk_norm_across_heads else self.normed
            self.q_norm, self.k_norm = (NORMS[config.norm](n, config.rms_norm_eps) for n in self.normed)

    def forward(self, x: Tensor, frame: Frame, cache: KVCache | None, layer: int) -> Tensor:
        """x: (B, T, D) -> (B, T, D). With a cache, keys and values of x are written to its number `layer`."""
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.normed[0])).view(B, T, -1, self.head_dim)  # (B, T, H, E)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.normed[1])).view(B, T, -1, self.head_dim)  # (B, T, K, E)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        q, k = rotate(q, frame), rotate(k, frame)
        if cache is not None:
            k, v = write(k, v, cache.keys[layer], cache.values[layer], frame)  # (B, K, slots, E)
            out = grouped_attention(q, k, v, frame.mask, self.scale, self.softcap)
        elif frame.prefixes is not None:
            out = frame.prefixes.attend(q, k, v, (frame.mask, frame.tail_mask), self.whole_rows)
        else:
            out = self.whole_rows(q, k.transpose(1, 2), v.transpose(1, 2), frame.mask)
        return self.o_proj(out.reshape(B, T, -1))

    def whole_rows(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention without a cache. q: (B, T, H, E); k, v: (B, K, S, E); returns (B, T, H, E)."""
        if self.softcap:
            return grouped_attention(q, k, v, mask, self.scale, self.softcap)
        return self.attend(q.transpose(1, 2), k, v, mask, self.scale).transpose(1, 2)


def rotate(x: Tensor, frame: Frame) -> Tensor:
    """Rotary embedding in Llama's rotate-half form: component i turns with i + R/2.  x: (B, T, heads, E).

    Only the first R components turn; mostly that is all.
    """
    if frame.cos is None:
        return x
    if (R := frame.cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :R], frame), x[..., R:]), -1)
    return torch.addcmul(x * frame.cos, x.roll(R // 2, -1), frame.sin)


def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """Store k and v (B, T, K, E) at their positions in keys and values (B, K, slots, E); returns the slots in sight."""
    if frame.mask is None:  # all rows write the same slot, the last in use
        keys[:, :, frame.used - 1] = k[:, 0]
        values[:, :, frame.used - 1] = v[:, 0]
    else:
        rows = torch.arange(len(k), device=k.device)[:, None]  # (B, 1), indexes with positions (B, T)
        keys.transpose(1, 2).index_put_((rows, frame.positions), k)
        values.transpose(1, 2).index_put_((rows, frame.positions), v)
    return keys[:, :, frame.start : frame.used], values[:, :, frame.start : frame.used]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention of whole rows. q: (B, H, T, E); k, v: (B, K, T, E); mask as in Frame; returns (B, H, T, E)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                                          enable_gqa=q.shape[1] != k.shape[1])


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float,
                      softcap: float = 0.0) -> Tensor:
    """Attention in plain products: for so few queries a row as decoding has they cost less than the fused kernel.

    q: (B, T, H, E); keys, values: (B, K, S, E); mask: additive (B or 1, 1, H/K * T, S); returns (B, T, H, E). The H/K
    query heads that share a key head go in as so many queries of one head, so that each key is read once.
    """
    B, T, H, E = q.shape
    K, S = keys.shape[1:3]
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # (B * K, S, E)
    q = (q * scale).view(B, T, K, H // K, E).permute(0, 2, 3, 1, 4).reshape(B * K, -1, E)  # (B * K, H/K * T, E)
    scores = torch.bmm(q, keys.transpose(1, 2))  # (B * K, H/K * T, S)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = (scores.view(B, K, -1, S) + mask).flatten(0, 1)
    out = torch.bmm(scores.softmax(-1), values)  # (B * K, H/K * T, E)
    return out.view(B, K, H // K, T, E).permute(0, 3, 1, 2, 4).reshape(B, T, H, E)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x)), or with another activation, or without the gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, width, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(size, width, bias=bias)
        self.down_proj = nn.Linear(width, size, bias=bias)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream. The norm before the MLP has Llama's odd name."""

    def __init__(self, config: ModelConfig):
        super().__init__()

        def norm(*placements: str) -> nn.Module:
            here = config.norm_placement in placements
            return NORMS[config.norm](config.hidden_size, config.rms_norm_eps) if here else nn.Identity()

        self.input_layernorm = norm("pre", "both")
        self.self_attn = Attention(config)
        self.attention_output_norm = norm("post", "both")
        self.post_attention_layernorm = norm("pre", "both")
        self.mlp = MLP(config)
        self.mlp_output_norm = norm("post", "both")

    def forward(self, x: Tensor, frame: Frame, cache: KVCache | None, layer: int) -> Tensor:
        x = x + self.attention_output_norm(self.self_attn(self.input_layernorm(x), frame, cache, layer))
        return x + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)))


class Embedding(nn.Embedding):
    """nn.Embedding that draws no weights on the meta device: that imports torch's compiler, over a second of work."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Transformer(nn.Module):
    """Embedding, blocks, final norm. `forward` returns hidden states, `logits` applies the head where it is needed."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = NORMS[config.norm](config.hidden_size, config.rms_norm_eps)
        self.tied = config.tie_word_embeddings and not config.num_labels
        if config.num_labels:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif not self.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.kinds = layer_kinds(config)
        self.repeats = config.num_attention_heads // config.num_key_value_heads  # query heads that share a key head
        self.vocab = None  # under tensor parallelism: which words are here, and how to ask for the others
        self.value_head: nn.Module | None = None  # a critic that shares these layers: `critic.ValueHead`
        self.generation_config: dict = {}  # special tokens and sampling defaults of its folder, for the next save
        self.head_impl: Impl = "auto"  # what computes log-probs: "torch", "triton", or what there is
        self.gradient_checkpointing = False  # True: backward computes each block again, and keeps its input alone
        self.pipeline = None  # `parallel.pipeline.Pipeline`, when other processes have some of the layers
        self.bare_layers: list[Callable[..., Tensor]] | None = None  # while the sampler runs, see bare.py

    @property
    def head_weight(self) -> Tensor:
        """(V, D), the output matrix: the embedding itself when the two are tied."""
        if self.config.num_labels:
            raise UserError("a reward model or critic scores texts and has no words to say: give a language model")
        return self.embed_tokens.weight if self.tied else self.lm_head.weight

    @property
    def has_head(self) -> bool:
        """False on all stages of a pipeline but the last: there `forward` returns no final hidden states."""
        return self.pipeline is None or self.pipeline.is_last

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype  # of any: the stages of a pipeline have none in common

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None,
                cache: KVCache | None = None, prefixes: Prefixes | None = None) -> Tensor:
        """Hidden states of every token, final norm applied.

        tokens    : (B, T) int64, padded on the right
        positions : (B, T) int64; default: 0..T-1, or counted anew in each document
        documents : (B, T) int64, for packed rows: a token sees only earlier tokens of its own document
        cache     : a KVCache, written in place at `positions`; then T is the number of new tokens
        prefixes  : tokens and positions are this object's, of rows that begin alike
        returns   : (B, T, D)
        """
        frames = self.frames(tokens, positions, documents, cache, prefixes)
        if self.pipeline is not None:
            return self.pipeline.forward(self, tokens, frames, cache)
        return self.norm(self.run(self.embed(tokens, frames), frames, cache, range(len(self.layers))))

    def embed(self, tokens: Tensor, frames: list[Frame]) -> Tensor:
        """(B, T) -> (B, T, D), what the first block reads."""
        x = self.embed_tokens(tokens)
        if self.config.scale_embedding:
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded, as it was in Gemma's training
        return x + self.embed_positions(frames[0].positions) if self.config.learned_positions else x

    def run(self, x: Tensor, frames: list[Frame], cache: KVCache | None, layers: Iterable[int]) -> Tensor:
        """(B, T, D) -> (B, T, D) through the blocks of those numbers."""
        blocks = self.layers if cache is None or self.bare_layers is None else self.bare_layers
        for layer in layers:
            if self.gradient_checkpointing and cache is None:
                x = checkpoint(blocks[layer], x, frames[layer], None, layer, use_reentrant=False)
            else:
                x = blocks[layer](x, frames[layer], cache, layer)
        return x

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """While this lasts there is no dropout, which would make what is sampled another distribution than what is
        scored, and passes with a cache call the layers as `bare` makes them: the weights must stay where they are."""
        was_training = self.training
        self.eval()
        self.bare_layers = [bare(layer, (Block, Attention, MLP, RMSNorm, GemmaNorm)) for layer in self.layers]
        try:
            yield
        finally:
            self.bare_layers = None
            self.train(was_training)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in float32 or wider: sampling then sees the distribution that `linear_logprob` scores.

        A bfloat16 logit near 20 is rounded by up to 0.06, and the first ratio of an update would be off by as much.
        If the vocabulary is spread over ranks (`self.vocab`), these are the logits of the words that are here.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden.to(dtype), self.head_weight.to(dtype))
        cap = self.config.final_logit_softcapping
        return cap * (logits / cap).tanh() if cap else logits

    def scores(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (...), in float32 or wider: what a reward model or critic (num_labels 1) makes of each token."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.score.weight.to(dtype))[..., 0]

    def init_weights(self, generator: torch.Generator) -> Transformer:
        """Normal, std 1 / sqrt(inputs): every projection keeps the scale of what it reads. Norms 1, biases 0.

        Two exceptions: what is added to the residual stream is scaled down by sqrt(2 layers), as in GPT-2, and the
        embedding by 2, since it is also the output matrix. (With 0.02 for all, attention starts so even that a small
        model looks for its first pattern for hundreds of steps.)
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                is_one = "norm" in name and name.endswith("weight") and self.config.norm != "gemma"
                nn.init.constant_(parameter, float(is_one))
                continue
            std = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            elif name.startswith("embed_"):
                std /= 2
            nn.init.normal_(parameter, std=std, generator=generator)
        return self

    def frames(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None,
               cache: KVCache | None, prefixes: Prefixes | None = None) -> list[Frame]:
        """The frame of each layer; layers of one kind share theirs."""
        config, dtype, share = self.config, self.dtype, self.repeats
        T = tokens.shape[1] if prefixes is None else prefixes.index.shape[1]  # of a row
        span = T if positions is None or prefixes is not None else math.inf  # how far apart a row's positions may lie
        if positions is None:
            positions = torch.arange(T, device=tokens.device)[None] if documents is None else restart(documents)
        windows = {window for _, window in self.kinds}
        if cache is not None:
            first, last = (int(p) for p in positions.aminmax())
            if last >= config.limit:
                raise UserError(f"a row of {last + 1} tokens is too long: this model's cache holds for {config.limit}")
            positions = positions.expand(tokens.shape)
            sights = {window: cache_sight(positions, first, last, window, share, dtype) for window in windows}
        else:
            if config.learned_positions and T > config.limit:
                raise UserError(f"a row of {T} tokens is too long: this model has {config.limit} positions")
            fused = not config.attn_logit_softcapping  # that kernel knows by itself what causal means, and who shares
            share = 1 if fused else share
            sights = {}
            for window in windows:
                plain = fused and documents is None and (not window or span <= window)
                if prefixes is not None:
                    sights[window] = prefixes.sight(window, share, dtype, plain)
                else:
                    sights[window] = None if plain else row_sight(positions, documents, window, share, dtype), 0, 0
        alike = cache is not None and first == last  # all tokens at one position: one rotation serves all rows
        turns = {rotary: rotary(positions[:1] if alike else positions, dtype) if rotary else (None, None)
                 for rotary in {rotary for rotary, _ in self.kinds}}
        positions = positions.expand(tokens.shape)
        frames = {kind: Frame(*turns[kind[0]], positions, *sights[kind[1]]) for kind in {*self.kinds}}
        return [frames[kind] for kind in self.kinds]


def layer_kinds(config: ModelConfig) -> list[tuple[Rotary | None, int]]:
    """What makes the layers of a model differ: how each turns, and its window."""
    shape = config.rotary_size, config.max_position_embeddings
    far = near = Rotary(config.rope_theta, *shape, config.rope_scaling)
    if config.rope_local_base_freq:
        near = Rotary(config.rope_local_base_freq, *shape)
    turning = config.no_rope_layers or [not config.learned_positions] * config.num_hidden_layers
    return [((near if window else far) if turns else None, window) for turns, window in zip(turning, config.windows)]
