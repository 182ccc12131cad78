"""The shape of a model: every option that `model.py` has, and which values make no sense."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, field
from typing import Literal

from minirl.config import UserError
from minirl.rope import RopeScaling, frequencies, limit, magnitude

MAX_LAYERS, MAX_LENGTH, MAX_SIZE = 2**12, 2**31, 2**20  # beyond, it is a broken file that would cost all memory


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. Field names are those of a Hugging Face `config.json` wherever it has one.

    The defaults are Llama's; behind an option stands who needs it.
    """

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # width of the MLP
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int = 0  # K; 0: as many as query heads
    head_dim: int = 0  # E; 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048  # longest context in tokens
    tie_word_embeddings: bool = True
    num_labels: int = 0  # 1: a score of each token in the place of the words' logits (reward models, critics)
    # how a layer computes
    qkv_bias: bool = False  # Qwen2
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] = "silu"
    gated_mlp: bool = True  # GPT-2 has no gate
    norm: Literal["rms", "gemma", "layer"] = "rms"  # RMSNorm; RMSNorm that stores weight - 1; LayerNorm (GPT-2)
    rms_norm_eps: float = 1e-5  # of every norm
    norm_placement: Literal["pre", "post", "both"] = "pre"  # f(norm(x)); norm(f(x)): OLMo 2; norm(f(norm(x))): Gemma 2
    qk_norm: bool = False  # a norm on each query and key head (Qwen3, Gemma 3),
    qk_norm_across_heads: bool = False  # or one over all of them (OLMo 2)
    query_pre_attn_scalar: float = 0.0  # scores are divided by its square root (Gemma 2, 3); 0: head_dim
    attn_logit_softcapping: float = 0.0  # c: a score z becomes c tanh(z / c) (Gemma 2); 0: off
    final_logit_softcapping: float = 0.0  # the same for the logits
    scale_embedding: bool = False  # times sqrt(hidden_size) (Gemma)
    # where a token stands
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None  # how a longer context was reached
    rope_local_base_freq: float = 0.0  # theta of layers with a window, without scaling (Gemma 3); 0: as the others
    partial_rotary_factor: float = 1.0  # share of a head's components that turn (Phi-4 mini)
    no_rope_layers: tuple[Literal[0, 1], ...] = ()  # of each layer; 0: it does not turn (SmolLM3); (): all layers do
    learned_positions: bool = False  # an embedding of each position, instead of rotations (GPT-2)
    # what a token sees
    sliding_window: int = 0  # itself and the window - 1 tokens before it (Mistral); 0: all before it
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()  # of each layer; (): all have a window
    # where it came from
    model_type: str = field(default="", compare=False)  # Hugging Face's name; "": as the options say

    def __post_init__(self):
        self._check_values()
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            raise UserError(f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads: "
                            "use a multiple, or give head_dim")
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        self._check_fit()

    def _check_values(self) -> None:
        """Each value on its own."""
        for name, kind in typing.get_type_hints(ModelConfig).items():
            value, form, choices = getattr(self, name), typing.get_origin(kind), typing.get_args(kind)
            least = 1 if kind is int and getattr(ModelConfig, name, 1) else 0
            most = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_LENGTH,
                    "sliding_window": MAX_LENGTH}.get(name, MAX_SIZE)
            if kind is float and not 0 <= value < math.inf:
                raise UserError(f"{name} {value} must be at least 0, and finite")
            if kind is int and not least <= value <= most:
                raise UserError(f"{name} {value} must be at least {least}, and at most {most}")
            if form is Literal and value not in choices:
                raise UserError(f"{name} {value!r} is not supported: supported are {[*choices]}")
            if form is tuple and value:
                choices = typing.get_args(choices[0])
                if len(value) != self.num_hidden_layers or not {*value} <= {*choices}:
                    raise UserError(f"{name} must hold {choices[0]!r} or {choices[1]!r} for each of "
                                    f"{self.num_hidden_layers} layers, not {[*value]}")
        if not self.rope_theta:
            raise UserError("rope_theta 0 must be above 0")

    def _check_fit(self) -> None:
        """One value beside another."""
        heads, kv_heads, turning = self.num_attention_heads, self.num_key_value_heads, self.rotary_size
        if heads % kv_heads:
            raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs, make it even")
        if turning % 2 or not 0 < turning <= self.head_dim:
            raise UserError(f"partial_rotary_factor {self.partial_rotary_factor} turns {turning} of {self.head_dim} "
                            "components: rotary embeddings turn pairs, make it even")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise UserError("layer_types has layers of sliding_attention, but sliding_window is 0")
        if self.rope_scaling and self.rope_scaling.rope_type == "longrope":
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.rope_scaling, name))) != turning // 2:
                    raise UserError(f"{name} has {count} numbers for {turning // 2} rotary pairs")
        try:
            speed = frequencies(self.rope_theta, turning, self.max_position_embeddings, self.rope_scaling)
            finite = math.isfinite(speed.sum() * magnitude(self.max_position_embeddings, self.rope_scaling))
        except (ArithmeticError, ValueError):
            finite = False
        if not finite:
            raise UserError(f"rope_theta {self.rope_theta} gives no finite rotation of {turning} components with "
                            f"{self.rope_scaling or 'no scaling'}")

    @property
    def windows(self) -> tuple[int, ...]:
        """How many tokens a query of each layer sees, itself included; 0: all up to itself."""
        types = self.layer_types or ("sliding_attention",) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else 0 for kind in types)

    @property
    def rotary_size(self) -> int:
        """R, how many components of each head turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def limit(self) -> float:
        """The length that no row in a cache may exceed: beyond, there is no embedding, or every earlier key changes."""
        if self.learned_positions:
            return self.max_position_embeddings
        return limit(self.max_position_embeddings, self.rope_scaling)

    @property
    def context(self) -> int:
        """The longest row that can be sampled, in tokens."""
        return int(min(self.max_position_embeddings, self.limit))
