"""Which layers LoRA is put on, and with which rank: PEFT's options, and PEFT's rules of what a name matches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from minirl.architectures import ARCHITECTURES, hf_name, to_hf
from minirl.checkpoint import name_some
from minirl.config import UserError
from minirl.model import Transformer
from minirl.nf4 import HEADS, NF4Linear

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


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


def read_targets(text: str) -> str | list[str]:
    """Targets from a command line: "q_proj,v_proj" is a list of names; what has other signs is a regular expression."""
    names = re.split(r"\s*,\s*", text)
    return names if all(re.fullmatch(r"[\w.]+", name) for name in names) else text


class Plan(NamedTuple):
    config: LoRAConfig  # "all-linear" spelled out
    linears: dict[str, tuple[int, float]]  # plain name -> rank and alpha
    copies: list[str]  # plain names
    used: set[str]  # patterns that matched something


def plan_adapters(model: Transformer, config: LoRAConfig) -> Plan:
    """What becomes of which module, by PEFT's rules. Changes nothing."""
    if hasattr(model, "zero") or model.pipeline or model.vocab:
        raise UserError("the model is spread over ranks already: put adapters on before parallelize")
    if hasattr(model, "lora_config"):
        raise UserError("the model has adapters already: train those (without --lora-rank), or merge them first, by "
                        "python -m minirl.merge ADAPTER FOLDER")
    spell = spelling(model)
    names = {spell(name): name for name, _ in model.named_modules() if name}
    linears = {hf for hf in names if type(model.get_submodule(names[hf])) in (nn.Linear, NF4Linear)}
    ends = {hf.rpartition(".")[2] for hf in linears}
    if config.targets == "all-linear":
        config = replace(config, targets=sorted(ends - set(HEADS)))
    copies, chosen, used = [], {}, set()
    for hf in names:
        patterns = [end for end in config.modules_to_save if hf.endswith(end)]
        if not patterns or _within(hf, copies):
            continue
        # Of a whole block each layer for itself, so that sampler, parallel layouts and export find a block there.
        for part in [other for other in names if _within(other, [hf])]:
            layer = model.get_submodule(names[part])
            if isinstance(layer, NF4Linear):
                raise UserError(f"modules_to_save matches {part}, which is quantised to 4 bits and cannot be trained: "
                                "adapt it by targets, or do without --qlora")
            if [*layer.parameters(recurse=False)]:
                used.update(patterns)
                copies.append(part)
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
        raise UserError(f"targets {config.targets!r} leave no linear layer to adapt; there are {name_some(ends)}")
    return Plan(config, chosen, [names[hf] for hf in copies], used)


def check_used(model: Transformer, config: LoRAConfig, plan: Plan) -> None:
    """UserError for a name or pattern that matches nothing: most likely it is misspelt."""
    lists = {"targets": config.targets, "modules_to_save": config.modules_to_save,
             "rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
    for what, patterns in lists.items():
        if not isinstance(patterns, str) and (unused := [each for each in patterns if each not in plan.used]):
            names = {end for name, _ in model.named_modules() if not (end := name.rpartition(".")[2]).isdigit()}
            raise UserError(f"{what}: nothing matches {name_some(unused)}; there are {name_some(names - {''}, 30)}")


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


def spelling(model: Transformer) -> Callable[[str], str]:
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
