"""The transformer: a Llama-style decoder in one page, with options that cover its relatives.

    hidden = model(tokens)             (B, T) -> (B, T, D)   final norm applied, no logits
    logits = model.logits(hidden)      (B, T, D) -> (B, T, V)

B rows, T tokens, D hidden size, V vocabulary, H query heads, K key/value heads (H is a multiple of K), E head size.

Modules and config fields carry the names that Hugging Face checkpoints use, so that opening a checkpoint is a copy
and not a translation. What is deliberately absent: losses, padding masks, dropout, and anything distributed. Rows are
padded on the right, and a causal model cannot look there: the padded tail needs no mask, only a loss that skips it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirl.config import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Field names are those of a Hugging Face `config.json`, biases and q/k norm apart."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # width of the MLP
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int = 0  # K; 0: as many as query heads
    head_dim: int = 0  # E; 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048  # longest context in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: RMSNorm on each query and key head

    def __post_init__(self):
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            raise UserError(f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads: "
                            "use a multiple, or give head_dim")
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                            f"num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs, make it even")


class KVCache:
    """Keys and values of the tokens seen so far. **The slot of a token is its position.**

    A slot is visible to a query when slot <= the query's position. Rows may therefore have different lengths: what
    lies beyond a row's own position (padding, or the remains of an earlier tenant) is invisible until a real token
    overwrites it. Decoding reads the used part of every tensor once a token: keep `slots` not much larger than that,
    since reading with gaps is slower than reading through.
    """

    def __init__(self, config: ModelConfig, rows: int, slots: int, dtype: torch.dtype, device: torch.device):
        shape = rows, config.num_key_value_heads, slots, config.head_dim  # (B, K, slots, E), of each layer
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

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
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[rows] = theirs

    def _map(self, function: Callable[..., Tensor], *others: KVCache) -> KVCache:
        """A new cache, from function(x, ...) of every tensor x and its counterparts."""
        new = KVCache.__new__(KVCache)
        new.keys = [function(*each) for each in zip(self.keys, *(o.keys for o in others), strict=True)]
        new.values = [function(*each) for each in zip(self.values, *(o.values for o in others), strict=True)]
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


@dataclass
class Frame:
    """What all layers of one forward share: the rotation of each position, and who may see whom."""

    cos: Tensor  # (B or 1, T, 1, E)
    sin: Tensor  # (B or 1, T, 1, E); the first half negated, so that a rotation is x * cos + roll(x, E/2) * sin
    positions: Tensor  # (B or 1, T)
    mask: Tensor | None  # additive (B, 1, T, T), or with a cache (B, 1, H/K * T, used); None: plain causal, or all seen
    used: int = 0  # slots of the cache in use


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions (arXiv:2104.09864)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, width
        self.q_proj = nn.Linear(size, self.heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, self.kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, self.kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * width, size, bias=config.output_bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, frame: Frame, cache: KVCache | None, layer: int) -> Tensor:
        """x: (B, T, D) -> (B, T, D). With a cache, keys and values of x are written to its number `layer`."""
        B, T, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)), frame)  # (B, T, H, E)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)), frame)  # (B, T, K, E)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        if cache is None:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, E)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=frame.mask, is_causal=frame.mask is None,
                                                 enable_gqa=self.heads != self.kv_heads)
            out = out.transpose(1, 2)
        else:
            out = cached_attention(q, k, v, cache.keys[layer], cache.values[layer], frame)
        return self.o_proj(out.reshape(B, T, -1))


def rotate(x: Tensor, frame: Frame) -> Tensor:
    """Rotary embedding in Llama's rotate-half form: component i turns with component i + E/2.  x: (B, T, heads, E)."""
    return torch.addcmul(x * frame.cos, x.roll(x.shape[-1] // 2, -1), frame.sin)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, frame: Frame) -> Tensor:
    """Store k and v at their positions, then attend to every visible slot.

    q: (B, T, H, E); k, v: (B, T, K, E); keys, values: (B, K, slots, E) are written; returns (B, T, H, E). The H/K query
    heads that share a key head go in as so many queries of one head, so that each key is read once. Plain products:
    for so few queries a row they cost less than the fused kernel.
    """
    B, T, H, E = q.shape
    K = k.shape[2]
    if frame.mask is None:  # all rows write the same slot, the last in use
        keys[:, :, frame.used - 1], values[:, :, frame.used - 1] = k[:, 0], v[:, 0]
    else:
        rows = torch.arange(B, device=q.device)[:, None]  # (B, 1), indexes with positions (B, T)
        keys.transpose(1, 2).index_put_((rows, frame.positions), k)
        values.transpose(1, 2).index_put_((rows, frame.positions), v)
    keys, values = keys.flatten(0, 1)[:, : frame.used], values.flatten(0, 1)[:, : frame.used]  # (B * K, used, E)
    q = (q * E**-0.5).view(B, T, K, H // K, E).permute(0, 2, 3, 1, 4).reshape(B * K, -1, E)  # (B * K, H/K * T, E)
    scores = torch.bmm(q, keys.transpose(1, 2))  # (B * K, H/K * T, used)
    if frame.mask is not None:
        scores = (scores.view(B, K, -1, frame.used) + frame.mask).flatten(0, 1)
    out = torch.bmm(scores.softmax(-1), values)  # (B * K, H/K * T, E)
    return out.view(B, K, H // K, T, E).permute(0, 3, 1, 2, 4).reshape(B, T, H, E)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, frame: Frame, cache: KVCache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), frame, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


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
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """(V, D), the output matrix: the embedding itself when the two are tied."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None,
                cache: KVCache | None = None) -> Tensor:
        """Hidden states of every token, final norm applied.

        tokens    : (B, T) int64, padded on the right
        positions : (B, T) int64; default: 0..T-1, or counted anew in each document
        documents : (B, T) int64, for packed rows: a token sees only earlier tokens of its own document
        cache     : a KVCache, written in place at `positions`; then T is the number of new tokens
        returns   : (B, T, D)
        """
        frame = self._frame(tokens, positions, documents, cache)
        x = self.embed_tokens(tokens)
        for layer, block in enumerate(self.layers):
            x = block(x, frame, cache, layer)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V), in float32 or wider: sampling then sees the distribution that `linear_logprob` scores.

        A bfloat16 logit near 20 is rounded by up to 0.06, and the first ratio of an update would be off by as much.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.head_weight.to(dtype))

    def init_weights(self, generator: torch.Generator) -> Transformer:
        """Normal, std 1 / sqrt(inputs): every projection keeps the scale of what it reads. Norms 1, biases 0.

        Two exceptions: what is added to the residual stream is scaled down by sqrt(2 layers), as in GPT-2, and the
        embedding by 2, since it is also the output matrix. (With 0.02 for all, attention starts so even that a small
        model looks for its first pattern for hundreds of steps.)
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 1.0 if "norm" in name else 0.0)
                continue
            std = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            elif name == "embed_tokens.weight":
                std /= 2
            nn.init.normal_(parameter, std=std, generator=generator)
        return self

    def _frame(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None,
               cache: KVCache | None) -> Frame:
        T, config, dtype = tokens.shape[1], self.config, self.embed_tokens.weight.dtype
        if positions is None:
            positions = torch.arange(T, device=tokens.device)[None] if documents is None else restart(documents)
        # Angles in float32 whatever the weights are: at position 10,000 a bfloat16 angle is off by whole turns.
        exponent = torch.arange(0, config.head_dim, 2, device=tokens.device, dtype=torch.float32) / config.head_dim
        angles = positions[..., None].float() * config.rope_theta**-exponent  # (B or 1, T, E/2)
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), -1)[:, :, None].to(dtype)
        sin = torch.cat((-sin, sin), -1)[:, :, None].to(dtype)

        if cache is not None:
            first, last = (int(p) for p in positions.aminmax())
            used, positions = last + 1, positions.expand(tokens.shape)
            if first == last:  # rows of one length, one token each: every slot in use is visible
                return Frame(cos, sin, positions, None, used)
            slots = torch.arange(used, device=tokens.device)
            hidden = slots > positions[..., None]  # (B, T, used)
            repeats = config.num_attention_heads // config.num_key_value_heads
            return Frame(cos, sin, positions, additive(hidden[:, None], dtype).repeat(1, 1, repeats, 1), used)
        if documents is None:
            return Frame(cos, sin, positions, None)
        future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
        foreign = documents[:, :, None] != documents[:, None, :]  # positions alone would not isolate them
        return Frame(cos, sin, positions, additive((future | foreign)[:, None], dtype))


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """bool (True: may not be seen) -> 0 or -inf. A token always sees itself, so no row is all -inf."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def restart(documents: Tensor) -> Tensor:
    """(B, T) document ids -> (B, T) positions that begin at 0 in each document: [7, 7, 9, 9, 9] -> [0, 1, 0, 1, 2]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values
