"""LoRA: fine-tune a model through a small low-rank addition to its linear layers (arXiv:2106.09685 eq. 3).

    y = W x + scale * B A x          W (out, in) frozen;  A (r, in), B (out, r) trained;  scale = alpha / r

A begins random and B at zero: step 0 is the base model to the bit. The base is never written to: the same model with
its adapters off *is* the reference model, without a second copy.

    model = load_model(folder)
    add_lora(model, rank=8, alpha=16, targets=["q_proj", "v_proj"])     after `quantize_base(model)`: QLoRA
    optimizer = AdamW(trainable_parameters(model).items(), lr)
    with adapters_off(model): ref_logprobs = token_logprobs(model, tokens)
    save_adapter(model, "adapter")                                      a folder that PEFT opens
    export_merged(model, "merged")                                      a plain model folder

    python -m minirl.lora runs/lora/step_200 merged                     the same, from the shell

Names of modules, in targets and in files, are those of the Hugging Face model: `model.layers.0.self_attn.q_proj`,
`lm_head`. The format and the meaning of each option are PEFT's; what is not computed here is refused by name.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minirl.architectures import ARCHITECTURES, hf_name, to_hf
from minirl.checkpoint import (
    _checked_names,
    _list,
    _open,
    _save_tensors,
    generation_config,
    latest_checkpoint,
    load_model,
    save_model,
)
from minirl.config import UserError, read_json, run, write_text
from minirl.model import Transformer
from minirl.nf4 import HEADS, NF4Linear, quantize_base
from minirl.parallel import Mesh
from minirl.parallel.layout import Whole
from minirl.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoRAConfig:
    """What is adapted, and how strongly. UserError for a value that makes no sense."""

    rank: int = 8  # r
    alpha: float = 16  # B A counts alpha / r times
    # Names or their ends: "q_proj", "self_attn.q_proj". A string is a regular expression for the whole name, except
    # "all-linear", which stands for all but the head.
    targets: str | Sequence[str] = "all-linear"
    exclude: str | Sequence[str] = ()  # written like targets, and stronger
    dropout: float = 0.0  # of what A reads, in training mode. In RL keep 0: else the first ratio is not 1
    rslora: bool = False  # scale = alpha / sqrt(r), so that a high rank learns as fast (arXiv:2312.03732 theorem 3.2)
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # end of a name, a regular expression -> its own rank
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)  # the same -> its own alpha; the first one counts
    layers_to_transform: int | Sequence[int] = ()  # numbers of blocks, from 0, unless a target is a whole name; (): all
    layers_pattern: str | Sequence[str] = ()  # name of the list of blocks; (): whatever stands before the number
    modules_to_save: Sequence[str] = ()  # trained whole, as a copy: all names that end so ("norm": input_layernorm too)
    ensure_weight_tying: bool = True  # a copy of a tied embedding is the head as well. Nothing else is supported
    base_model: str = ""  # folder of the base, noted for whoever opens the adapter

    def __post_init__(self):
        for name, kind in (("targets", str), ("exclude", str), ("layers_to_transform", int), ("layers_pattern", str),
                           ("modules_to_save", str)):
            value = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, Iterable) or (isinstance(value, str) and name not in ("targets", "exclude")):
                value = (value,)
            value = value if isinstance(value, str) and value else tuple(value)
            if not all(isinstance(each, kind) for each in value):
                raise UserError(f"{name} {value!r}: not a list of {kind.__name__}")
            object.__setattr__(self, name, value)
        for name, kind, what in (("rank_pattern", Mapping, "a table from patterns to numbers"),
                                 ("alpha_pattern", Mapping, "a table from patterns to numbers"),
                                 ("rslora", bool, "true or false"), ("ensure_weight_tying", bool, "true or false"),
                                 ("base_model", str, "the name of a folder")):
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"{name} {getattr(self, name)!r}: not {what}")
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or rank < 1:
                raise UserError(f"rank {rank!r}: it must be a whole number, 1 or more")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
                raise UserError(f"alpha {alpha!r}: it must be a number above 0")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise UserError(f"dropout {self.dropout!r}: it must be a number from 0 to below 1")
        regexes = [each for each in (self.targets, self.exclude) if isinstance(each, str)]
        for regex in [*regexes, *self.layers_pattern, *self.rank_pattern, *self.alpha_pattern]:
            try:
                re.compile(regex)
            except re.error as error:
                raise UserError(f"{regex!r} is no regular expression: {error}") from None
        if self.layers_to_transform and isinstance(self.targets, str) and self.targets != "all-linear":
            raise UserError("layers_to_transform needs a list of targets: or write the numbers into the regular "
                            f"expression {self.targets!r}")


# ---- the two kinds of adapter ----

class LoRALinear(nn.Module):
    """A frozen linear layer (plain or NF4) with a low-rank addition.

    A layer that is read through its matrix instead of called, as the head is, works too: `weight` is differentiable.
    No dropout there, and below float32 the sum is rounded to the weight's dtype at each use, as if it were merged.
    """

    def __init__(self, base: nn.Linear | NF4Linear, rank: int, alpha: float, dropout: float = 0.0,
                 rslora: bool = False, generator: torch.Generator | None = None):
        super().__init__()
        self.base, self.dropout, self.enabled = base, dropout, True
        self.scale = alpha / (math.sqrt(rank) if rslora else rank)
        like, bound = base.weight, base.in_features**-0.5
        # Drawn on the CPU in float32: the same numbers on each device and rank, and in each dtype.
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(start.to(like.device, like.dtype))  # (r, in)
        self.lora_B = nn.Parameter(like.new_zeros(base.out_features, rank))  # (out, r)
        self.register_buffer("merged", None, persistent=False)  # (out, in) while merged

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not self.enabled:
            return self.base(x)
        if self.merged is not None:
            return F.linear(x, self.merged, self.base.bias)
        flat = x.reshape(-1, x.shape[-1])
        dropped = F.dropout(flat, self.dropout) if self.dropout and self.training else None
        out = _LoRAProduct.apply(flat, dropped, self.lora_A, self.lora_B, self.base, self.scale)
        return out.view(*x.shape[:-1], out.shape[-1])

    def summed(self) -> Tensor:
        """(out, in): W + scale * B A, in float32 or wider and rounded once."""
        base = self.base.weight
        wide = torch.promote_types(base.dtype, torch.float32)
        return torch.addmm(base.to(wide), self.lora_B.to(wide), self.lora_A.to(wide), alpha=self.scale).to(base.dtype)

    @property
    def weight(self) -> Tensor:
        """(out, in), what the layer multiplies by."""
        if not self.enabled:
            return self.base.weight
        return self.summed() if self.merged is None else self.merged

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}  # as PEFT names them


class _LoRAProduct(torch.autograd.Function):
    """x W^T + bias + scale * z A^T B^T, where z is x, or x after dropout.   x, z (N, in); A (r, in); B (out, r).

    W and bias are constants here. W is asked for again in backward: an NF4 weight is then made anew and not kept.

    d x = grad W        d z = scale grad B A        d A = scale B^T grad^T z        d B^T = scale (z A^T)^T grad

    By hand since half of what adapters cost can be saved: sums are made inside the products, and the thin side comes
    first. On a CPU (r, N) @ (N, out) takes a fifth of the (out, N) @ (N, r) that autograd takes for B's gradient.
    """

    @staticmethod
    def forward(ctx, x, z, a, b, base, scale):
        """z None: the same as x."""
        ctx.base, ctx.scale, ctx.dropped = base, scale, z is not None
        z = x if z is None else z
        low = a @ z.t()  # (r, N)
        ctx.save_for_backward(z, low, a, b)
        return F.linear(x, base.weight, base.bias).addmm_(low.t(), b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, low, a, b = ctx.saved_tensors
        grad_low = (b.t() @ grad.t()).mul_(ctx.scale)  # (r, N)
        grad_b = (low @ grad).mul_(ctx.scale).t()
        grad_x = grad_z = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.base.weight
            if ctx.dropped:
                grad_z = grad_low.t() @ a
            else:
                grad_x.addmm_(grad_low.t(), a)
        return grad_x, grad_z, grad_low @ z, grad_b, None, None


class TrainedCopy(nn.Module):
    """A module that is trained whole, next to the frozen original that `adapters_off` goes back to."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.copy, self.enabled = base, copy.deepcopy(base).requires_grad_(True), True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.copy if self.enabled else self.base)(*args, **kwargs)

    @property
    def weight(self) -> Tensor:
        return (self.copy if self.enabled else self.base).weight

    @property
    def bias(self) -> Tensor | None:
        return (self.copy if self.enabled else self.base).bias

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.copy.named_parameters())


# ---- put on, switch off, merge ----

def add_lora(model: Transformer, rank: int = 8, alpha: float = 16, targets: str | Sequence[str] = "all-linear", *,
             generator: torch.Generator | None = None, **options: Any) -> Transformer:
    """Freeze the model and put adapters on it, in place; returns the model.

    options   : the other fields of LoRAConfig (dropout, rslora, modules_to_save, ...)
    generator : of the initial A, on the CPU; default: torch's own. Data-parallel ranks must draw the same
    UserError : a target or pattern that matches nothing, or something else than a linear layer; a tied head
    """
    config = LoRAConfig(rank, alpha, targets, **options)
    plan = _plan(model, config)
    lists = {"targets": config.targets, "modules_to_save": config.modules_to_save,
             "rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    for what, patterns in lists.items():
        if not isinstance(patterns, str) and (unused := [each for each in patterns if each not in plan.used]):
            names = {end for name, _ in model.named_modules() if not (end := name.rpartition(".")[2]).isdigit()}
            raise UserError(f"{what}: nothing matches {_list(unused)}; there are {_list(names - {''}, 30)}")
    return _install(model, plan, generator)


def read_targets(text: str) -> str | list[str]:
    """Targets from a command line: "q_proj,v_proj" is a list of names; what has other signs is a regular expression."""
    names = re.split(r"\s*,\s*", text)
    return names if all(re.fullmatch(r"[\w.]+", name) for name in names) else text


def adapters(model: nn.Module) -> dict[str, LoRALinear | TrainedCopy]:
    """The adapters of a model by their plain names; empty when it has none."""
    plain = getattr(model, "module", model)  # out of DistributedDataParallel
    return {name.replace("_orig_mod.", ""): module  # torch.compile's mark
            for name, module in plain.named_modules() if isinstance(module, LoRALinear | TrainedCopy)}


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer shall have: with adapters, theirs alone."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model is its base, to the bit: the reference of a KL term. Nests, and survives exceptions.

    Modules that are trained whole go back to their originals too. UserError for a model without adapters, which
    would be compared with itself.
    """
    found = _required(model).values()
    before = [adapter.enabled for adapter in found]
    try:
        for adapter in found:
            adapter.enabled = False
        yield model
    finally:
        for adapter, enabled in zip(found, before):
            adapter.enabled = enabled


@torch.no_grad()
def merge_lora(model: Transformer) -> Transformer:
    """Compute with W + scale * B A as one matrix, as fast as the base, to sample and to evaluate. Merged twice is once.

    The sum is a matrix of its own and the base keeps its weight, which costs the adapted layers once more in memory. In
    return `unmerge_lora` is exact in every dtype after any number of rounds, and `adapters_off` works meanwhile.
    Subtracting B A again would not be exact: in bfloat16 one round leaves every tenth weight or so another than before.

    float32: logits differ from the unmerged ones by rounding, about 1e-6. bfloat16: the sum has 8 bits, and a change
    below 1/512 of a weight disappears; keep a small update unmerged, or merge in float32.

    While merged nothing is trained: backward fails, rather than to give adapters that are not used no gradient.
    """
    for adapter in _required(model).values():
        if isinstance(adapter, LoRALinear) and adapter.merged is None:
            adapter.merged = adapter.summed()
        for parameter in adapter.trained().values():
            parameter.requires_grad_(False)
    return model


def unmerge_lora(model: Transformer) -> Transformer:
    """Back to base and adapter apart, to the bit as before `merge_lora`, and ready to train."""
    for adapter in _required(model).values():
        if isinstance(adapter, LoRALinear):
            adapter.merged = None
        for parameter in adapter.trained().values():
            parameter.requires_grad_(True)
    return model


# ---- on disk ----

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
PREFIX = "base_model.model."  # of every tensor's name in PEFT's file
PEFT_NAMES = {name: name for name in LoRAConfig.__dataclass_fields__} | {
    "rank": "r", "alpha": "lora_alpha", "targets": "target_modules", "exclude": "exclude_modules",
    "dropout": "lora_dropout", "rslora": "use_rslora", "base_model": "base_model_name_or_path"}
# Options that say nothing about the computation, and values of others that change nothing. Whatever else is neither
# false nor empty is refused: also what PEFT may learn tomorrow.
SILENT = {"task_type", "inference_mode", "revision", "auto_mapping", "peft_version", "megatron_core",
          "qalora_group_size", "runtime_config"}
ALLOWED = {"peft_type": ["LORA"], "bias": ["none"],
           "init_lora_weights": [True, "gaussian", "orthogonal"]}  # pissa, olora, ... belong to a changed base


def save_adapter(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None,
                 mesh: Mesh | None = None) -> None:
    """Write the adapter alone, as PEFT does, and the tokenizer's files; each file whole or not at all.

    generation_config.json goes with the tokenizer: it lists the tokens at which generation ends.

    The base is not written: adapter_config.json names its folder (LoRAConfig.base_model), for `load_adapted`. If the
    model is spread over a mesh, every rank calls this, and the first one writes.
    """
    folder, plain = Path(folder), getattr(model, "module", model)
    spell = _spelling(plain)
    tensors = {f"{PREFIX}{spell(name)}.{leaf}": parameter
               for name, adapter in _required(model).items() for leaf, parameter in adapter.trained().items()}
    if mesh is not None and mesh.size > 1:
        tensors = dict(Whole(tensors, tensors, mesh))
        if not mesh.is_main:
            return
    values = {PEFT_NAMES[name]: None if value in ((), "") else value
              for name, value in asdict(plain.lora_config).items()}
    values |= {"peft_type": "LORA", "task_type": "SEQ_CLS" if plain.config.num_labels else "CAUSAL_LM", "bias": "none",
               "inference_mode": True}
    embedding = tensors.get(f"{PREFIX}{EMBEDDING}.weight")
    values["ensure_weight_tying"] = plain.config.tie_word_embeddings and embedding is not None
    if values["ensure_weight_tying"]:
        tensors[f"{PREFIX}{HEAD}.weight"] = embedding
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(tensors, folder / "adapter_model.safetensors")
    if tokenizer is not None:
        tokenizer.save(folder)
        write_text(folder / "generation_config.json", json.dumps(generation_config(plain, tokenizer), indent=2) + "\n")
    write_text(folder / "adapter_config.json", json.dumps(values, indent=2) + "\n")


def load_adapter(model: Transformer, folder: str | Path) -> Transformer:
    """Put a saved adapter on its base model, in place and ready to train, in the base's dtype; returns the model.

    UserError, and the model as it was: a feature of PEFT that is not computed here, an adapter of another model (each
    missing, unexpected or misshapen tensor is named), a pickled file.
    """
    config = read_adapter_config(folder)
    plan, spell = _plan(model, config), _spelling(model)
    tensors, wanted = _read_tensors(Path(folder)), {}
    for name, (rank, _) in plan.linears.items():
        linear, hf = model.get_submodule(name), spell(name)
        wanted[f"{hf}.lora_A.weight"] = rank, linear.in_features
        wanted[f"{hf}.lora_B.weight"] = linear.out_features, rank
        if (base := f"{hf}.base_layer.weight") in tensors:  # PEFT repeats the base of a head: new only if resized
            wanted[base] = linear.out_features, linear.in_features
    for name in plan.copies:
        wanted |= {f"{spell(name)}.{leaf}": tuple(p.shape) for leaf, p in model.get_submodule(name).named_parameters()}
    if model.config.tie_word_embeddings and f"{EMBEDDING}.weight" in tensors:
        head = tensors.get(f"{HEAD}.weight")
        if head is not None and torch.equal(head, tensors[f"{EMBEDDING}.weight"]):  # one matrix under both names
            del tensors[f"{HEAD}.weight"]
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted.keys() - found.keys()],
        "unexpected": [f"{name} {found[name]}" for name in found.keys() - wanted.keys()],
        "of another shape": [f"{name} {found[name]} instead of {wanted[name]}"
                             for name in wanted.keys() & found.keys() if wanted[name] != found[name]]}
    if any(problems.values()):
        base = config.base_model or "an unnamed model"
        raise UserError(f"the adapter in {folder}, made for {base}, does not fit this model: " +
                        "; ".join(f"{what}: {_list(names)}" for what, names in problems.items() if names))
    _install(model, plan)
    with torch.no_grad():
        for name, adapter in adapters(model).items():
            for leaf, parameter in adapter.trained().items():
                parameter.copy_(tensors[f"{spell(name)}.{leaf}"])
    return model


def load_adapted(folder: str | Path, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu",
                 quantize: bool = False) -> Transformer:
    """The base that an adapter's folder names, and the adapter on it: how a LoRA run is resumed, or its result opened.

    quantize : NF4 weights in the base. Give the same as in training, which PEFT's file does not note: a QLoRA adapter
               has learned around the rounding
    """
    return load_adapter(_open_model(base_of(folder), dtype, device, quantize), folder)


def base_of(folder: str | Path) -> Path:
    """The base model's folder, as an adapter's adapter_config.json names it. UserError if it is not there."""
    base = read_adapter_config(folder).base_model
    if not Path(base or "?").is_dir():
        raise UserError(f"{folder} names {base!r} as its base model, which is no folder here: write where it is under "
                        "base_model_name_or_path in adapter_config.json")
    return Path(base)


def is_adapter(folder: str | Path) -> bool:
    """Does the folder hold an adapter? Else a model, or nothing ("")."""
    return bool(str(folder)) and (Path(folder) / "adapter_config.json").is_file()


def tokenizer_folder(folder: str | Path) -> Path:
    """Where the tokenizer and chat template of a policy are: in its folder, or its base's. PEFT writes none.

    UserError: no such folder, or one of a run and not of a model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return folder
    if newest := latest_checkpoint(folder):
        raise UserError(f"{folder} is the folder of a run: give one of its checkpoints, the newest is {newest}")
    return base_of(folder) if is_adapter(folder) else folder


def open_policy(folder: str | Path, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu",
                quantize: bool = False) -> Transformer:
    """Whatever a trainer wrote or was given: a model folder, or an adapter's with its base. `quantize`: NF4 weights."""
    if is_adapter(folder):
        return load_adapted(folder, dtype, device, quantize)
    return _open_model(folder, dtype, device, quantize)


def save_policy(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None,
                mesh: Mesh | None = None) -> None:
    """What `open_policy` opens again: the adapter alone where there is one, else the model."""
    (save_adapter if adapters(model) else save_model)(model, folder, tokenizer, mesh=mesh)


def export_merged(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None,
                  dtype: torch.dtype | None = None) -> None:
    """Write a plain model folder in which base and adapter are one, and NF4 weights are whole again.

    dtype : of the file; None: the model's. Below float32 the sums are rounded, once, as `merge_lora` tells
    """
    source = getattr(model, "module", model)
    with torch.device("meta"):
        plain = Transformer(source.config)
    state = {}
    with torch.no_grad():
        for name, _ in plain.named_parameters():
            module, _, leaf = name.rpartition(".")
            tensor = getattr(source.get_submodule(module), leaf).detach()
            state[name] = tensor.to(dtype or tensor.dtype)
    plain.load_state_dict(state, assign=True)
    plain.generation_config = source.generation_config
    save_model(plain, folder, tokenizer)


def read_adapter_config(folder: str | Path) -> LoRAConfig:
    """PEFT's adapter_config.json. UserError names every option in it that is not computed here."""
    path = Path(folder) / "adapter_config.json"
    peft = read_json(path)
    known = {*PEFT_NAMES.values(), *SILENT}
    if strange := [f"{name} {value!r}" for name, value in peft.items()
                   if value and name not in known and value not in ALLOWED.get(name, [])]:
        raise UserError(f"{path}: not supported: {_list(strange)}")
    if absent := [name for name in ("peft_type", "r", "lora_alpha", "target_modules") if peft.get(name) is None]:
        raise UserError(f"{path} gives no {', '.join(absent)}")
    values = {name: peft[theirs] for name, theirs in PEFT_NAMES.items() if peft.get(theirs) is not None}
    try:
        return LoRAConfig(**{"ensure_weight_tying": False} | values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# ---- the pieces ----

def _open_model(folder: str | Path, dtype: torch.dtype | None, device: str | torch.device,
                quantize: bool) -> Transformer:
    return quantize_base(load_model(folder, dtype), device) if quantize else load_model(folder, dtype, device)


class _Plan(NamedTuple):
    config: LoRAConfig  # "all-linear" spelled out
    linears: dict[str, tuple[int, float]]  # plain name -> rank and alpha
    copies: list[str]  # plain names
    used: set[str]  # patterns that matched something


def _plan(model: Transformer, config: LoRAConfig) -> _Plan:
    """What becomes of which module, by PEFT's rules. Changes nothing."""
    if hasattr(model, "zero") or model.pipeline or model.vocab:
        raise UserError("the model is spread over ranks already: put adapters on before parallelize")
    if adapters(model):
        raise UserError("the model has adapters already: train those (without --lora-rank), or merge them first, by "
                        "python -m minirl.lora ADAPTER FOLDER")
    spell = _spelling(model)
    names = {spell(name): name for name, _ in model.named_modules() if name}
    linears = {hf for hf in names if type(model.get_submodule(names[hf])) in (nn.Linear, NF4Linear)}
    ends = {hf.rpartition(".")[2] for hf in linears}
    if config.targets == "all-linear":
        config = replace(config, targets=sorted(ends - set(HEADS)))
    copies, chosen, used = [], {}, set()
    for hf in names:
        patterns = [end for end in config.modules_to_save if hf.endswith(end)]
        if patterns and not _within(hf, copies) and [*model.get_submodule(names[hf]).parameters()]:
            used.update(patterns)
            copies.append(hf)
    if model.config.tie_word_embeddings:
        _check_tied(config, EMBEDDING in copies)
        used.add(HEAD)
    for hf, name in names.items():
        patterns = _matches(config.targets, hf)
        used.update(patterns)
        if not patterns or _matches(config.exclude, hf) or not _in_layers(config, hf) or _within(hf, copies):
            continue
        if hf not in linears:
            raise UserError(f"targets match {hf}, which is no linear layer: train it whole, by modules_to_save")
        found = [[p for p in table if re.match(rf"(.*\.)?({p})$", hf)]
                 for table in (config.rank_pattern, config.alpha_pattern)]
        used.update(*found)
        chosen[name] = (config.rank_pattern[found[0][0]] if found[0] else config.rank,
                        config.alpha_pattern[found[1][0]] if found[1] else config.alpha)
    if not chosen:
        raise UserError(f"targets {config.targets!r} leave no linear layer to adapt; there are {_list(ends)}")
    return _Plan(config, chosen, [names[hf] for hf in copies], used)


def _check_tied(config: LoRAConfig, copied: bool) -> None:
    """Head and embedding are one matrix, and stay one."""
    head = [end for end in config.modules_to_save if HEAD.endswith(end)]
    if (_matches(config.targets, HEAD) and not _matches(config.exclude, HEAD)) or (head and not copied):
        raise UserError("the head is tied to the embedding: adapted alone it would part from it, and merged it would "
                        "change both; train both by modules_to_save=['embed_tokens']")
    if copied and not config.ensure_weight_tying:
        raise UserError("the adapter has an embedding of its own, while the head stays tied to the old one "
                        "(ensure_weight_tying is off): not supported")


def _matches(patterns: str | Sequence[str], hf: str) -> list[str]:
    """Those that match: a string as a regular expression for the whole name, of a list each name, or end of a name."""
    if isinstance(patterns, str):
        return [patterns] if re.fullmatch(patterns, hf) else []
    return [each for each in patterns if f".{hf}".endswith(f".{each}")]


def _in_layers(config: LoRAConfig, hf: str) -> bool:
    if not config.layers_to_transform or hf in config.targets:
        return True
    for pattern in config.layers_pattern or [r"[^.]*"]:
        if match := re.match(rf"(?:.*\.)?{pattern}\.(\d+)\.", hf):
            return int(match[1]) in config.layers_to_transform
    return False


def _within(hf: str, modules: list[str]) -> bool:
    return any(f"{hf}.".startswith(f"{module}.") for module in modules)


def _install(model: Transformer, plan: _Plan, generator: torch.Generator | None = None) -> Transformer:
    model.requires_grad_(False)
    for name, (rank, alpha) in plan.linears.items():
        base = model.get_submodule(name)
        model.set_submodule(name, LoRALinear(base, rank, alpha, plan.config.dropout, plan.config.rslora, generator))
    for name in plan.copies:
        model.set_submodule(name, TrainedCopy(model.get_submodule(name)))
    model.lora_config = plan.config
    return model.train(model.training)  # new modules begin in training mode, whatever the model is in


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter under the names of the Hugging Face model."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(f"{folder / 'adapter_model.bin'} is pickled: it can run code, and is never opened; let PEFT "
                        "write safetensors")
    tensors = {}
    with _open(path) as file:
        for name in _checked_names(file, path, None, ()):
            if (plain := name.removeprefix(PREFIX)) in tensors:
                raise UserError(f"{path} holds {plain} twice, once as {PREFIX}{plain}")
            tensors[plain] = file.get_tensor(name)
    return tensors


def _required(model: nn.Module) -> dict[str, LoRALinear | TrainedCopy]:
    found = adapters(model)
    if not found:
        raise UserError("the model has no adapters: call add_lora or load_adapter first")
    return found


def _spelling(model: Transformer) -> Callable[[str], str]:
    """From our name of a module to the Hugging Face model's.

    Phi-3 and GPT-2 have one matrix there for several here. Adapters of these keep Llama's names, and PEFT, which does
    not find them in its model, refuses them.
    """
    try:
        kind = to_hf(model.config)["model_type"]
    except UserError:
        kind = "llama"
    modules = ARCHITECTURES[kind].modules
    fused = len({*modules.values()}) < len(modules)
    return lambda name: hf_name(f"{name}.weight", "llama" if fused else kind).removesuffix(".weight")


# ---- the command line ----

@dataclass(frozen=True)
class MergeConfig:
    adapter: str  # folder of the adapter: step_N of a run, or what PEFT saved
    out: str  # folder of the merged model, a new one
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"  # of its weights; auto: the base's
    qlora: bool = False  # the adapter was trained with --qlora: merge with the base as it was then, rounded to 4 bits


def main(config: MergeConfig) -> None:
    """Merge an adapter with the base that it names: summed in float32 or wider, and rounded once."""
    out = Path(config.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already: name a new folder for the merged model")
    if not is_adapter(config.adapter):
        raise UserError(f"{config.adapter} holds no adapter_config.json: give step_N of a LoRA run, or a folder that "
                        "PEFT saved")
    tokenizer = load_tokenizer(tokenizer_folder(config.adapter))
    model = load_model(base_of(config.adapter), None)
    own = model.embed_tokens.weight.dtype
    dtype = own if config.dtype == "auto" else getattr(torch, config.dtype)
    model.to(torch.promote_types(torch.promote_types(own, dtype), torch.float32))
    load_adapter(quantize_base(model) if config.qlora else model, config.adapter)
    export_merged(model, out, tokenizer, dtype)
    print(f"{out}: {base_of(config.adapter)} and {config.adapter} merged, {str(dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    run(main, MergeConfig, "Merge a LoRA adapter and its base into a plain model folder.\n\n"
        "    python -m minirl.lora runs/lora/step_200 merged")
