"""Hugging Face's spelling of each architecture: its config.json to and from ModelConfig, its tensors to and from ours.

Nearly everybody writes what Llama writes. A row of ARCHITECTURES says what is different: what its config.json may say
and what silence means there, which options go without saying, and which modules have other names. An architecture whose
options `ModelConfig` has is one more row.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.config import UserError
from minirl.rope import TYPES, RopeScaling, original
from minirl.shape import MAX_LAYERS, ModelConfig


@dataclass(frozen=True)
class Architecture:
    """One `model_type`. Where a dictionary translates, our name is on the left and Hugging Face's on the right."""

    class_name: str
    says: dict[str, Any] = field(default_factory=dict)  # what its config.json may say beyond SAYS: what silence means
    implies: dict[str, Any] = field(default_factory=dict)  # options of ModelConfig that go without saying
    options: dict[str, str] = field(default_factory=dict)  # other names of config fields,
    modules: dict[str, str] = field(default_factory=dict)  # and of modules; one for several of ours: fused in our order
    prefix: str = "model."  # of all names but the head's
    transposed: bool = False  # linear layers are stored as (inputs, outputs)
    slides: Callable[[dict[str, Any], int], bool] = lambda said, layer: True  # has a layer the window, if not said?
    local_theta: float | None = None  # RoPE's base in layers with a window; 0: that of the others; None: no such thing
    requires: dict[str, Any] = field(default_factory=dict)  # what its config.json may say in one way only
    constants: tuple[str, ...] = (".rotary_emb.inv_freq",)  # ends of names: what older files hold beside the weights


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")  # must be said
SAYS = {"num_key_value_heads": 0, "head_dim": 0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 2048, "tie_word_embeddings": False}
NULL_IS_0 = ("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}

_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOW = {"sliding_window": 4096, "layer_types": ()}
_QWEN = {**_WINDOW, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "head_dim": 256, "attention_bias": False,
          "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = {**_GEMMA, **_WINDOW, "query_pre_attn_scalar": 256.0, "attn_logit_softcapping": 50.0,
           "final_logit_softcapping": 30.0}
_GEMMA3 = {**_GEMMA, **_WINDOW, "max_position_embeddings": 131072, "query_pre_attn_scalar": 256.0, "rope_theta": 1e6,
           "final_logit_softcapping": 0.0, "sliding_window_pattern": 6}  # its cap of attention has no effect
_LIKE_GEMMA = {"norm": "gemma", "scale_embedding": True}
_OLMO = {"attention_bias": False, "rms_norm_eps": 1e-5}
_LIKE_OLMO = {"norm_placement": "post", "qk_norm_across_heads": True}
_OUTPUT_NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {**_OUTPUT_NORMS, "post_attention_layernorm": "pre_feedforward_layernorm"}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _from_a_layer_on(said: dict[str, Any], layer: int) -> bool:
    return layer >= said["max_window_layers"]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _BIASES),
    "mistral": Architecture("MistralForCausalLM", {"max_position_embeddings": 131072, "sliding_window": 4096}),
    "ministral": Architecture("MinistralForCausalLM", {"max_position_embeddings": 131072, **_WINDOW}),
    "qwen2": Architecture("Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}, slides=_from_a_layer_on),
    "qwen3": Architecture("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128, "attention_bias": False}, {"qk_norm": True},
                          slides=_from_a_layer_on),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        {**_BIASES, **_WINDOW, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
         "use_sliding_window": False, "no_rope_layers": (), "no_rope_layer_interval": 4},
        slides=lambda said, layer: not said["no_rope_layers"][layer]),
    "gemma": Architecture("GemmaForCausalLM", _GEMMA, _LIKE_GEMMA, requires={"use_bidirectional_attention": False}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _GEMMA2, {**_LIKE_GEMMA, "norm_placement": "both"}, {"hidden_act": "hidden_activation"},
        _FOUR_NORMS, slides=lambda said, layer: layer % 2 == 0, requires={"use_bidirectional_attention": False}),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM", _GEMMA3, {**_LIKE_GEMMA, "norm_placement": "both", "qk_norm": True},
        {"hidden_act": "hidden_activation"}, _FOUR_NORMS, local_theta=10000.0,
        slides=lambda said, layer: (layer + 1) % said["sliding_window_pattern"] != 0,
        requires={"use_bidirectional_attention": False}),
    "olmo2": Architecture("Olmo2ForCausalLM", _OLMO, _LIKE_OLMO, modules=_OUTPUT_NORMS),
    "olmo3": Architecture("Olmo3ForCausalLM", {**_OLMO, **_WINDOW, "rope_theta": 500000.0}, _LIKE_OLMO,
                          modules=_OUTPUT_NORMS, local_theta=0.0, slides=lambda said, layer: (layer + 1) % 4 != 0),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "sliding_window": 0, "partial_rotary_factor": 1.0},
        modules={**dict.fromkeys(_QKV, "self_attn.qkv_proj"),
                 **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj")}),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"max_position_embeddings": 1024, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
         "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 0},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "gated_mlp": False, "norm": "layer",
         "learned_positions": True, "num_key_value_heads": 0, "head_dim": 0, "rope_theta": 10000.0},
        {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
         "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
         "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"},
        {"embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
         "input_layernorm": "ln_1", **dict.fromkeys(_QKV, "attn.c_attn"), "self_attn.o_proj": "attn.c_proj",
         "post_attention_layernorm": "ln_2", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        prefix="transformer.", transposed=True,
        requires={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        constants=(".attn.bias", ".attn.masked_bias")),
}

_SCORERS = {"gemma3_text": "Gemma3TextForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}


# ---- config.json ----

LAYER_TYPES = ("full_attention", "sliding_attention")
_KINDS = typing.get_type_hints(ModelConfig)


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The shape of a model from a Hugging Face config.json, as transformers 4 or 5 writes it.

    UserError names what minirl does not compute, and values that make no sense.
    """
    kind = hf.get("model_type")
    if kind == "mistral" and hf.get("layer_types"):
        kind = "ministral"  # as transformers has it
    if str(kind) not in ARCHITECTURES:
        raise UserError(f"model type {kind!r} is not supported: supported are {[*ARCHITECTURES]}")
    if quantized := hf.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(f"weights quantised by {method!r} are not supported: use the bfloat16 version of the model")
    arch = ARCHITECTURES[kind]
    for name, only in arch.requires.items():
        if hf.get(name) not in (None, only):
            raise UserError(f"{name} {hf[name]!r} is not supported: supported is {only!r}")

    said = SAYS | arch.says
    for name in {**dict.fromkeys(SIZES), **said}:
        spelled = arch.options.get(name, name)
        if hf.get(spelled) is not None:
            said[name] = _checked(spelled, hf[spelled], _KINDS.get(name) or type(said[name]))
        elif name not in said:
            raise UserError(f"{spelled} is missing")
        elif name in NULL_IS_0 and spelled in hf:  # null means none; elsewhere it means the same as silence
            said[name] = 0
    for name in ("no_rope_layer_interval", "sliding_window_pattern"):
        if said.get(name, 1) < 1:
            raise UserError(f"{name} {said[name]} must be above 0")
    layers = range(min(said["num_hidden_layers"], MAX_LAYERS))  # more, ModelConfig refuses
    said["intermediate_size"] = said["intermediate_size"] or 4 * said["hidden_size"]  # so GPT-2 means its null
    if kind == "gemma" and said["hidden_act"] == "gelu":
        said["hidden_act"] = "gelu_pytorch_tanh"  # so the first Gemmas were trained, whatever their files say
    said["hidden_act"] = SYNONYMS.get(said["hidden_act"], said["hidden_act"])
    said["qkv_bias"] = said["output_bias"] = said.get("attention_bias", False)
    if "no_rope_layers" in said and not said["no_rope_layers"]:
        said["no_rope_layers"] = tuple(int((i + 1) % said["no_rope_layer_interval"] != 0) for i in layers)
    if not said.get("sliding_window") or not said.get("use_sliding_window", True):
        said |= {"sliding_window": 0, "layer_types": ()}
    elif not said.get("layer_types"):
        said["layer_types"] = tuple(LAYER_TYPES[bool(arch.slides(said, i))] for i in layers)
    said |= _read_rope(hf, said, arch) | arch.implies | {"model_type": kind, "num_labels": _read_labels(hf)}
    return canonical(ModelConfig(**{name: value for name, value in said.items() if name in _KINDS}))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model: of the architecture that it came from, or else of the first that computes the same.

    Whether an architecture has words for a model is found by trying: what is read back must be the same.
    UserError: none has.
    """
    for kind in dict.fromkeys((config.model_type, *ARCHITECTURES)):
        if kind in ARCHITECTURES:
            hf = _spelled(config, kind)
            try:
                if from_hf(hf) == canonical(config):
                    return hf
            except UserError:  # fewer words than this model needs
                continue
    unusual = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in SAYS and f.name != "model_type"
               and f.default is not MISSING and getattr(config, f.name) != f.default}
    raise UserError(f"no Hugging Face architecture combines {unusual}")


def canonical(config: ModelConfig) -> ModelConfig:
    """The same model with nothing said that has no effect: two configs that compute the same become equal."""
    changes = {}
    if not any(config.windows):
        changes = {"sliding_window": 0, "layer_types": (), "rope_local_base_freq": 0.0}
    elif all(config.windows):
        changes = {"layer_types": ()}
    if config.rope_local_base_freq == config.rope_theta and not config.rope_scaling:
        changes["rope_local_base_freq"] = 0.0
    if all(config.no_rope_layers):
        changes["no_rope_layers"] = ()
    if config.query_pre_attn_scalar == config.head_dim:
        changes["query_pre_attn_scalar"] = 0.0
    if (scaling := config.rope_scaling) and not scaling.original_max_position_embeddings:
        length = config.max_position_embeddings
        changes["rope_scaling"] = replace(scaling, original_max_position_embeddings=length)
    return replace(config, **changes)


def _spelled(config: ModelConfig, kind: str) -> dict[str, Any]:
    """A config.json in the words of an architecture, whether or not it has words for everything."""
    arch, windows = ARCHITECTURES[kind], config.windows
    sliding = [layer for layer, window in enumerate(windows) if window]
    scalar = config.query_pre_attn_scalar or config.head_dim
    values = {f.name: getattr(config, f.name) for f in fields(config)} | {
        "attention_bias": config.output_bias,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # transformers wants an int
        "attn_logit_softcapping": config.attn_logit_softcapping or None,
        "final_logit_softcapping": config.final_logit_softcapping or None,
        "sliding_window": config.sliding_window or None,
        "layer_types": [LAYER_TYPES[bool(window)] for window in windows],
        "use_sliding_window": bool(sliding),
        "max_window_layers": min(sliding, default=len(windows)),
        "sliding_window_pattern": 1 + (windows.index(0) if 0 in windows else len(windows)),
        "no_rope_layers": [*config.no_rope_layers] or [1] * len(windows),
        "no_rope_layer_interval": 4,  # without effect beside the list
        "original_max_position_embeddings": original(config.max_position_embeddings, config.rope_scaling),
    }
    if not sliding and "layer_types" in arch.says and "use_sliding_window" not in arch.says:
        values["sliding_window"] = arch.says["sliding_window"]  # transformers wants a number, used or not
    if kind == "gpt2" and config.hidden_act == "gelu_pytorch_tanh":
        values["hidden_act"] = "gelu_new"  # the same formula, rounded as ever
    said = {arch.options.get(name, name): values[name] for name in (*SIZES, *SAYS, *arch.says)
            if name not in arch.implies}
    name, labels = arch.class_name, {}
    if config.num_labels:  # as Hugging Face calls a model that gives one number
        name = _SCORERS.get(kind) or name.replace("ForCausalLM", "ForSequenceClassification")
        labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [name], "model_type": kind, **said, **labels, **arch.requires, **_write_rope(config, arch)}


def _read_labels(hf: dict[str, Any]) -> int:
    """ModelConfig.num_labels: 1 for a class that scores a text, 0 for one that goes on with it."""
    name = next(iter(_checked("architectures", hf.get("architectures") or [], tuple[str, ...])), "")
    if not name.endswith("ForSequenceClassification"):
        return 0
    labels = hf.get("num_labels") or len(hf.get("id2label") or ()) or 2  # as transformers takes silence
    if labels != 1:
        raise UserError(f"a {name} with {labels} labels is not supported: supported is one score (num_labels 1)")
    return 1


def _read_rope(hf: dict[str, Any], said: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """ModelConfig's options of rotary positions: under rope_parameters (transformers 5, there perhaps by type of layer)
    or in rope_theta, rope_scaling and rope_local_base_freq (transformers 4)."""
    rope = _checked("rope_parameters", hf.get("rope_parameters") or hf.get("rope_scaling") or {}, dict)
    by_type = {name: _checked(name, rope[name], dict) for name in LAYER_TYPES if rope.get(name)}
    rope, local = (by_type.get(name, {}) for name in LAYER_TYPES) if by_type else (rope, {})
    theta = _checked("rope_theta", rope.get("rope_theta", said["rope_theta"]), float)
    kind = _checked("rope_type", rope.get("rope_type") or rope.get("type") or "default", str)
    kind = {"su": "longrope", "default": None}.get(kind, kind)
    options = {"rope_theta": theta, "rope_scaling": None}
    if kind:
        kinds = typing.get_type_hints(RopeScaling)
        values = {name: _checked(name, rope[name], kinds[name])
                  for name in TYPES.get(kind, ()) if rope.get(name) is not None}
        if "original_max_position_embeddings" in said and kind == "longrope":
            values = {"original_max_position_embeddings": said["original_max_position_embeddings"]} | values
        options["rope_scaling"] = RopeScaling(kind, **values)
    if "partial_rotary_factor" in said and "partial_rotary_factor" in rope:
        options["partial_rotary_factor"] = _checked("partial_rotary_factor", rope["partial_rotary_factor"], float)
    if arch.local_theta is not None:
        if local.get("rope_type", "default") != "default":
            raise UserError(f"rope type {local['rope_type']!r} in layers of sliding_attention is not supported: "
                            "supported is 'default'")
        older = hf.get("rope_local_base_freq") or arch.local_theta or theta
        options["rope_local_base_freq"] = _checked("rope_theta", local.get("rope_theta") or older, float)
    return options


def _write_rope(config: ModelConfig, arch: Architecture) -> dict[str, Any]:
    """Both layouts: transformers 5 reads the new one, older programs the other."""
    if config.learned_positions:
        return {}
    scaling = {}
    if config.rope_scaling:
        said = asdict(canonical(config).rope_scaling)
        scaling = {name: said[name] for name in ("rope_type", *TYPES[said["rope_type"]])
                   if said[name] or said[name] is False}  # 0 and () stand for nothing said
    top = {"rope_theta": config.rope_theta}
    if "partial_rotary_factor" in arch.says:
        top["partial_rotary_factor"] = config.partial_rotary_factor
    rope = {"rope_type": "default", **scaling, **top}
    if arch.local_theta is not None:
        top["rope_local_base_freq"] = config.rope_local_base_freq or config.rope_theta
        local = {"rope_type": "default", "rope_theta": top["rope_local_base_freq"]}
        rope = {"full_attention": rope, "sliding_attention": local}
    if "original_max_position_embeddings" in arch.says and scaling.get("rope_type") == "longrope":
        derived = config.max_position_embeddings / scaling["original_max_position_embeddings"]
        if scaling.get("factor", derived) == derived and "attention_factor" not in scaling:
            # Older readers want no more than this. (Newer ones believe it, too, and not the layout beside it.)
            scaling = {"type": "longrope", **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    return {**top, "rope_scaling": scaling or None, "rope_parameters": rope}


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value out of a JSON file, as the number, text, tuple or dictionary that it has to be."""
    form, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if form is tuple and isinstance(value, list | tuple):
        return tuple(_checked(name, each, inner[0]) for each in value)
    if form is typing.Literal:
        form = type(inner[0])  # which of them, ModelConfig checks
    if form is float and type(value) is int:
        return float(value)
    if type(value) is not form:
        raise UserError(f"{name} is {value!r}: it must be of type {'list' if form is tuple else form.__name__}")
    return value


# ---- tensors ----

class Stored(NamedTuple):
    """A tensor in a file, and what of ours it holds."""

    names: list[str]  # of our parameters; several are the rows of one matrix, one below the other
    rows: list[int]  # of each
    shape: tuple[int, ...]  # in the file
    transposed: bool  # in the file

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our parameters, as views of the file's tensor."""
        parts = (tensor.T if self.transposed else tensor).split(self.rows)
        return dict(zip(self.names, parts, strict=True))

    def join(self, parameters: dict[str, Tensor]) -> Tensor:
        """The file's tensor."""
        parts = [parameters[name] for name in self.names]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.T if self.transposed else whole


def tensor_layout(kind: str, parameters: dict[str, Tensor]) -> dict[str, Stored]:
    """What the files of a `model_type` hold, by Hugging Face's names. The parameters' values are not looked at."""
    ours, layout = {}, {}
    for name in parameters:
        ours.setdefault(hf_name(name, kind), []).append(name)
    for theirs, names in ours.items():
        rows = [parameters[name].shape[0] for name in names]
        shape = sum(rows), *parameters[names[0]].shape[1:]
        transposed = ARCHITECTURES[kind].transposed and names[0].endswith("_proj.weight")
        layout[theirs] = Stored(names, rows, shape[::-1] if transposed else shape, transposed)
    return layout


def hf_name(name: str, kind: str) -> str:
    """layers.3.mlp.up_proj.weight -> model.layers.3.mlp.up_proj.weight, or GPT-2's transformer.h.3.mlp.c_fc.weight."""
    arch = ARCHITECTURES[kind]
    layer, module, leaf = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(\w+)", name).groups()
    if module in ("lm_head", "score"):
        return name
    where = f"{arch.modules.get('layers', 'layers')}.{layer}." if layer else ""
    return f"{arch.prefix}{where}{arch.modules.get(module, module)}.{leaf}"
