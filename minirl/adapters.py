"""Adapters in PEFT's files, and policies, whatever they are: the folder of a model, or of an adapter with its base."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from minirl.checkpoint import (
    check_finite,
    check_no_run,
    check_shapes,
    checked_names,
    generation_config,
    load_model,
    name_some,
    open_tensors,
    save_model,
    save_tensors,
)
from minirl.config import UserError, read_json, write_text
from minirl.lora import adapters, install, required_adapters
from minirl.lora_config import EMBEDDING, HEAD, LoRAConfig, plan_adapters, spelling
from minirl.model import Transformer
from minirl.nf4 import quantize_base
from minirl.parallel import Mesh
from minirl.parallel.layout import Whole
from minirl.tokenizer import Tokenizer

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


# ---- PEFT's files ----

def save_adapter(model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None,
                 mesh: Mesh | None = None) -> None:
    """Write the adapter alone, as PEFT does, and the tokenizer's files; each file whole or not at all.

    generation_config.json goes with the tokenizer: it lists the tokens at which generation ends.

    The base is not written: adapter_config.json names its folder (LoRAConfig.base_model), for `load_adapted`. If the
    model is spread over a mesh, every rank calls this, and the first one writes.
    """
    folder, plain = Path(folder), getattr(model, "module", model)
    spell = spelling(plain)
    tensors = {f"{PREFIX}{spell(name)}.{leaf}": parameter
               for name, adapter in required_adapters(model).items() for leaf, parameter in adapter.trained().items()}
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
    save_tensors(tensors, folder / "adapter_model.safetensors")
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
    plan, spell = plan_adapters(model, config), spelling(model)
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
    base = config.base_model or "an unnamed model"
    check_shapes(wanted, found, f"the adapter in {folder}, made for {base}, does not fit this model")
    install(model, plan)
    with torch.no_grad():
        for name, adapter in adapters(model).items():
            for leaf, parameter in adapter.trained().items():
                parameter.copy_(tensors[f"{spell(name)}.{leaf}"])
    return model


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter under the names of the Hugging Face model."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(f"{folder / 'adapter_model.bin'} is pickled: it can run code, and is never opened; let PEFT "
                        "write safetensors")
    tensors = {}
    with open_tensors(path) as file:
        for name in checked_names(file, path, None, ()):
            if (plain := name.removeprefix(PREFIX)) in tensors:
                raise UserError(f"{path} holds {plain} twice, once as {PREFIX}{plain}")
            tensors[plain] = file.get_tensor(name)
            check_finite(tensors[plain], name, path)
    return tensors


def read_adapter_config(folder: str | Path) -> LoRAConfig:
    """PEFT's adapter_config.json. UserError names every option in it that is not computed here."""
    path = Path(folder) / "adapter_config.json"
    peft = read_json(path)
    known = {*PEFT_NAMES.values(), *SILENT}
    if strange := [f"{name} {value!r}" for name, value in peft.items()
                   if value and name not in known and value not in ALLOWED.get(name, [])]:
        raise UserError(f"{path}: not supported: {name_some(strange)}")
    if absent := [name for name in ("peft_type", "r", "lora_alpha", "target_modules") if peft.get(name) is None]:
        raise UserError(f"{path} gives no {', '.join(absent)}")
    values = {name: peft[theirs] for name, theirs in PEFT_NAMES.items() if peft.get(theirs) is not None}
    try:
        return LoRAConfig(**{"ensure_weight_tying": False} | values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# ---- a policy, adapted or not ----

def is_adapter(folder: str | Path) -> bool:
    """Does the folder hold an adapter? Else a model, or nothing ("")."""
    return bool(str(folder)) and (Path(folder) / "adapter_config.json").is_file()


def open_policy(folder: str | Path, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu",
                quantize: bool = False, scores: bool = False) -> Transformer:
    """Whatever a trainer wrote or was given: a model folder, or an adapter's with its base. `quantize`: NF4 weights.

    UserError: a model with a score in the place of words, unless it is one of those that is wanted (`scores`)
    """
    model = (load_adapted if is_adapter(folder) else _open_model)(folder, dtype, device, quantize)
    if model.config.num_labels and not scores:
        raise UserError(f"{folder} is a reward model or a critic, which gives scores and no words: give the folder of "
                        "a language model")
    return model


def load_adapted(folder: str | Path, dtype: torch.dtype | None = torch.float32, device: str | torch.device = "cpu",
                 quantize: bool = False) -> Transformer:
    """The base that an adapter's folder names, and the adapter on it: how a LoRA run is resumed, or its result opened.

    quantize : NF4 weights in the base. Give the same as in training, which PEFT's file does not note: a QLoRA adapter
               has learned around the rounding
    """
    return load_adapter(_open_model(base_of(folder), dtype, device, quantize), folder)


def _open_model(folder: str | Path, dtype: torch.dtype | None, device: str | torch.device,
                quantize: bool) -> Transformer:
    return quantize_base(load_model(folder, dtype), device) if quantize else load_model(folder, dtype, device)


def base_of(folder: str | Path) -> Path:
    """The base model's folder, as an adapter's adapter_config.json names it. UserError if it is not there."""
    base = read_adapter_config(folder).base_model
    if not Path(base or "?").is_dir():
        raise UserError(f"{folder} names {base!r} as its base model, which is no folder here: write where it is under "
                        "base_model_name_or_path in adapter_config.json")
    return Path(base)


def tokenizer_folder(folder: str | Path, base: str | Path = "") -> Path:
    """Where the tokenizer and chat template of a policy are: in its folder, or its base's. PEFT writes none.

    base      : of an adapter that is put on another base than the one it names
    UserError : no such folder, or one of a run and not of a model
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return folder
    check_no_run(folder)
    if is_adapter(folder):
        return tokenizer_folder(base) if base else base_of(folder)
    return folder


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
