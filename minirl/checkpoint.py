"""Models on disk in Hugging Face's layout, and the training state beside them.

    run/step_200/                   opens unchanged in transformers and vLLM
        config.json  generation_config.json  model.safetensors  tokenizer files
        training/                   what a resumed run needs besides; a folder down, since vLLM reads every
            state.safetensors       safetensors file at the top as weights
            state.json              written last, with the size of every other file: present means complete

A save goes to `step_200.tmp`, is synced to the disk and then renamed, so that a kill or a full disk costs the
new checkpoint and never the last one. No pickle: opening a file never runs code.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minirl.architectures import ARCHITECTURES, Stored, from_hf, tensor_layout, to_hf
from minirl.config import UserError, read_json, usual_mode, write_text
from minirl.model import ModelConfig, Transformer
from minirl.parallel import Mesh, barrier
from minirl.parallel.layout import ALONE, Whole, describe, read_training, training_file
from minirl.parallel.zero import gathered
from minirl.tokenizer import Tokenizer

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types that weights may have
SHARD_BYTES = 5 * 10**9


# ---- a model folder ----

def save_model(model: nn.Module, folder: str | Path, tokenizer: Tokenizer | None = None,
               shard_bytes: int = SHARD_BYTES, mesh: Mesh | None = None) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files; each file whole or not at all.

    config.json is of the architecture that the model was loaded from, or of the first that computes the same. Weights
    beyond `shard_bytes` are spread over several files, one tensor at least in each. UserError before anything is
    written: no architecture computes this, or the model has parameters of its own (adapters must be merged first).

    The model may be wrapped by DistributedDataParallel or torch.compile: the names written are plain. If it is spread
    over a mesh, every rank calls this, and the first one writes.
    """
    folder, plain = Path(folder), getattr(model, "module", model)  # out of DistributedDataParallel
    config, dtype = plain.config, next(plain.parameters()).dtype
    described = to_hf(config)
    state = {name.replace("_orig_mod.", ""): tensor.detach()  # torch.compile's mark, of model or layer
             for name, tensor in plain.state_dict().items()}
    if mesh is not None and mesh.size > 1:
        state = Whole(state, dict(plain.named_parameters()), mesh)
    writes = mesh is None or mesh.is_main
    with torch.device("meta"):
        wanted = dict(Transformer(config).named_parameters())
    if state.keys() != wanted.keys():
        missing, beyond = name_some(wanted.keys() - state.keys()), name_some(state.keys() - wanted.keys())
        raise UserError(f"the model cannot be saved as its config says: without {missing}, and beyond it {beyond}")
    generation = generation_config(plain, tokenizer)
    ids = {name: generation.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    folder.mkdir(parents=True, exist_ok=True)
    written = _save_weights(tensor_layout(described["model_type"], wanted), state, dtype, folder, shard_bytes, writes)
    if not writes:
        return
    if tokenizer is not None:
        tokenizer.save(folder)
    write_text(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    described |= ids | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(described, indent=2) + "\n")
    for path in folder.glob("model*.safetensors*"):  # of an earlier save with other shards
        if path.name not in written:
            path.unlink()


def load_model(folder: str | Path, dtype: torch.dtype | None = torch.float32,
               device: str | torch.device = "cpu") -> Transformer:
    """Open a Hugging Face folder of one of `architectures.ARCHITECTURES`. dtype None: that of the file.

    Tensors go one at a time from the file to their place: the peak memory is one copy of the model.
    Every name is accounted for: a UserError lists what is missing, unexpected, of another shape, or quantised. What is
    read must be finite: `check_finite`.
    """
    model, layout, found = survey(folder)
    head = found.pop("lm_head.weight", None) if model.tied else None
    state = {}
    for full, (path, name, _) in found.items():
        with open_tensors(path) as file:  # anew for each: what was read of a file stays in memory until it is closed
            for ours, tensor in layout[full].split(file.get_tensor(name)).items():
                state[ours] = tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
                check_finite(state[ours], name, path)
    if head is not None:
        with open_tensors(head[0]) as file:
            if not torch.equal(file.get_tensor(head[1]).to(device, dtype), state["embed_tokens.weight"]):
                warnings.warn(f"{folder}: config.json ties the head to the embedding, but the lm_head.weight there "
                              "differs; it is ignored", stacklevel=2)
    if dtype is None:  # a few files keep their norms wider than the rest, and a matrix takes no mixture
        state = {name: tensor.to(state["embed_tokens.weight"].dtype) for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    model.generation_config = _read_generation_config(Path(folder))
    return model


def check_model(folder: str | Path) -> ModelConfig:
    """UserError unless `load_model` can open the folder; reads names and shapes, and no weights. Its config."""
    return survey(folder)[0].config


def survey(folder: str | Path) -> tuple[Transformer, dict[str, Stored], dict[str, tuple[Path, str, tuple[int, ...]]]]:
    """A model folder without its weights: the model on the meta device, its layout, and (file, name, shape) of each."""
    config = read_model_config(folder)
    with torch.device("meta"):
        model = Transformer(config)  # shapes without memory
    layout = tensor_layout(config.model_type, dict(model.named_parameters()))
    prefix, constants = ARCHITECTURES[config.model_type].prefix, ARCHITECTURES[config.model_type].constants
    found = {}
    for path, promised in weight_files(folder).items():
        with open_tensors(path) as file:
            for name in checked_names(file, path, promised, constants):
                whole = name.startswith((prefix, "lm_head.", "score."))
                full = name if whole else prefix + name  # saved without its head
                if full in found:
                    raise UserError(f"{path} holds {full} twice, under {found[full][1]} and {name}")
                found[full] = path, name, tuple(file.get_slice(name).get_shape())
    ignored = {"lm_head.weight"} if model.tied else set()  # a second copy of the embedding
    check_shapes({name: stored.shape for name, stored in layout.items()},
                 {name: shape for name, (_, _, shape) in found.items() if name not in ignored},
                 f"the tensors in {folder} do not fit its config.json")
    return model, layout, found


def read_model_config(folder: str | Path) -> ModelConfig:
    """The shape of a model from Hugging Face's config.json, in the layout of transformers 4 or 5.

    UserError names what minirl does not compute, and values that make no sense.
    """
    if not Path(folder).is_dir():
        raise UserError(f"model folder {folder} does not exist")
    path = Path(folder) / "config.json"
    hf = read_json(path)
    try:
        return from_hf(hf)
    except UserError as error:
        check_no_run(folder)
        raise UserError(f"{path}: {error}") from None


# ---- the training state ----

# What a resumed run may change: where and how it computes, and how long (a schedule that falls is stretched with it).
FREE_TO_CHANGE = {"run_dir", "resume", "device", "steps", "save_every", "keep", "eval_every", "eval_problems",
                  "microbatch_size", "max_rows", "save_rollouts", "patience", "gradient_checkpointing", "log_every",
                  "impl", "dp", "tp", "sp", "pp", "pipeline", "chunks", "cp", "cp_kind", "zero",
                  "zero_overlap", "timeout"}


def open_run(config: Any, mesh: Mesh, free: Container[str] = FREE_TO_CHANGE) -> Path | None:
    """Look into the run folder `config.run_dir`: the checkpoint to resume from, or None for a new run.

    Touches nothing, so that an option found wrong later leaves no folder behind. UserError: the folder holds a run
    and --resume is not given, or it is given and the run was started with other options (but for those in `free`).
    """
    for path in (Path(config.run_dir), *Path(config.run_dir).parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--run-dir {config.run_dir} cannot be made: {path} is a file; name a folder")
        if path.is_dir():
            if not os.access(path, os.W_OK | os.X_OK):
                raise UserError(f"--run-dir {config.run_dir}: you may not write into {path}; name another folder")
            break
    folder = latest_checkpoint(config.run_dir)
    if folder and not config.resume:
        raise UserError(f"{config.run_dir} already holds {folder.name}: go on from there with --resume, "
                        "or start afresh with another --run-dir")
    if folder and (Path(config.run_dir) / "config.json").is_file():
        saved = read_json(Path(config.run_dir) / "config.json")
        for name, value in asdict(config).items():
            if name in saved and saved[name] != value and name not in free:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"the run in {config.run_dir} was started with {flag} {saved[name]!r}, not {value!r}: "
                                f"resume with the same, or start afresh with another --run-dir")
    barrier(mesh)  # the first rank may write only when all have looked
    return folder


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """UserError if the tokenizer has tokens beyond the model's vocabulary.

    But for control tokens at its end that are never written: Gemma 3's has one for images, its text models no row.
    """
    used = {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.stop_ids}
    unused, size = {*tokenizer.special.values()} - used, tokenizer.vocab_size
    while size - 1 in unused:
        size -= 1
    if size > vocab_size:
        raise UserError(f"the tokenizer has {size} tokens, but the model's vocab_size is {vocab_size}: they do not "
                        "belong together")


def save_checkpoint(run_dir: str | Path, step: int, model: nn.Module, tokenizer: Tokenizer | None,
                    tensors: dict[str, Tensor], state: dict[str, Any], keep: int = 2, protect: int = 0,
                    write: Callable[..., None] = save_model, mesh: Mesh | None = None) -> Path:
    """Write run_dir/step_N, then delete all but the newest `keep` checkpoints, step_0 and step_`protect`.

    Every rank of the mesh calls it, and comes back when the checkpoint is there.

    tensors : what else is made of tensors (optimizer, random state), of this rank; names are free
    state   : what else there is (data position, counters), as plain JSON values
    write   : how the model itself is written, (model, folder, tokenizer, mesh=): whole, or only its adapter
              (`lora.save_policy`)
    returns : the folder; at every moment of a save, a repeated one included, some complete checkpoint exists
    """
    if keep < 1:
        raise UserError(f"keep {keep}: a run must keep at least 1 checkpoint")
    mesh = mesh or Mesh()
    run, layout = Path(run_dir), describe(model, mesh)
    final, temporary, old = (run / f"step_{step}{suffix}" for suffix in ("", ".tmp", ".old"))
    try:
        if mesh.is_main:
            for orphan in run.glob("step_*.tmp"):  # of a run that was killed
                shutil.rmtree(orphan)
            (temporary / "training").mkdir(parents=True)
        barrier(mesh)
        with gathered(model):
            write(model, temporary, tokenizer, mesh=mesh)
        if name := training_file(layout, mesh):
            save_tensors(tensors, temporary / "training" / name)
        barrier(mesh)  # every rank's file is there
        if not mesh.is_main:
            barrier(mesh)
            return final
        sizes = {str(path.relative_to(temporary)): path.stat().st_size
                 for path in sorted(temporary.rglob("*")) if path.is_file()}
        content = {"step": step, "state": state, "layout": layout, "files": sizes}
        write_text(temporary / "training/state.json", json.dumps(content, indent=2) + "\n")
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)  # a rename that reaches the disk before the data leaves an empty checkpoint
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    if final.exists():  # a folder cannot be renamed onto another: until the new one is there, `old` counts
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    _sync(run)
    _prune(run, step, keep, {0, protect})
    barrier(mesh)
    return final


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None; an incomplete one is ignored with a warning."""
    for _, _, folder in sorted(_checkpoints(Path(run_dir)), reverse=True):
        if flaw := _flaw(folder):
            warnings.warn(f"ignoring checkpoint {folder}: {flaw}", stacklevel=2)
        else:
            return folder
    return None


def check_no_run(folder: str | Path) -> None:
    """UserError if somebody gives the folder of a run for that of a model."""
    if newest := latest_checkpoint(folder):
        raise UserError(f"{folder} is the folder of a run: give one of its checkpoints, the newest is {newest}")


def load_checkpoint(folder: str | Path, model: nn.Module | None = None,
                    mesh: Mesh | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU) and state that `save_checkpoint` was given; `load_model` opens the weights.

    model, mesh : in which layout the tensors are wanted; default: whole, as one process has them
    """
    if flaw := _flaw(Path(folder)):
        raise UserError(f"{folder} is no complete checkpoint: {flaw}")
    training = Path(folder) / "training"
    content = read_json(training / "state.json")
    return read_training(training, content.get("layout") or ALONE, model, mesh), content["state"]


def rng_tensors() -> dict[str, Tensor]:
    """The state of torch's random generators (uint8), to be saved among a checkpoint's tensors."""
    state = {"rng.cpu": torch.get_rng_state()}
    return state | ({"rng.cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_rng(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Continue the random numbers where `rng_tensors` left them; returns the other tensors of the checkpoint."""
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}


# ---- the pieces ----

def generation_config(model: Transformer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """generation_config.json of a save: what the model's folder said, with the tokenizer's special tokens.

    eos_token_id is one number, or the list of all at which generation ends: a chat model has several.
    """
    said = model.generation_config
    if tokenizer is None:
        return said
    check_tokenizer(tokenizer, model.config.vocab_size)
    ends = said.get("eos_token_id")
    ends = ends if isinstance(ends, list) and tokenizer.eos_id in ends else []  # else of another tokenizer
    ends = [*dict.fromkeys([*ends, *tokenizer.stop_ids])]
    return said | {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id,
                   "eos_token_id": ends if len(ends) > 1 else ends[0]}


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Special tokens and sampling defaults, which a save gives back."""
    path = folder / "generation_config.json"
    said = {name: value for name, value in read_json(folder / "config.json").items() if name.endswith("os_token_id")}
    return said | (read_json(path) if path.is_file() else {})


def _save_weights(layout: dict[str, Stored], state: Mapping[str, Tensor], dtype: torch.dtype, folder: Path,
                  shard_bytes: int, writes: bool) -> set[str]:
    """Write the weights, one shard in memory at a time; returns the names of the files.

    writes : False on a rank that only helps to put the tensors together
    """
    shards, room, total = [], 0, 0
    for name, stored in layout.items():
        size = prod(stored.shape) * dtype.itemsize
        total += size
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for shard, path in zip(shards, names, strict=True):
        tensors = {}
        for name in shard:
            tensor = layout[name].join(state)
            if writes:  # the others need it no more
                tensors[name] = tensor.contiguous()  # here, one at a time: all at once would be a second copy
        if writes:
            save_tensors(tensors, folder / path)
    if len(shards) > 1 and writes:
        index = {"metadata": {"total_size": total},
                 "weight_map": {name: path for shard, path in zip(shards, names, strict=True) for name in shard}}
        names.append("model.safetensors.index.json")
        write_text(folder / names[-1], json.dumps(index, indent=2) + "\n")
    return {*names}


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors refuses two names for one memory, and transposed views: those are copied first."""
    unique, spans = {}, []  # parts of one storage that do not overlap, as ZeRO gathers them, need no copy
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        unique[name] = tensor.clone() if any(start < e and s < end for s, e in spans) else tensor
        spans.append((start, end))
    temporary = path.with_name(path.name + ".tmp")
    save_file(unique, temporary, metadata={"format": "pt"})
    usual_mode(temporary)
    _sync(temporary)
    os.replace(temporary, path)


def open_tensors(path: Path) -> safe_open:
    """A safetensors file to read from. UserError: there is none, or it is broken."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated, or no safetensors file: {error}") from None


def weight_files(folder: str | Path) -> dict[Path, set[str] | None]:
    """The files of a model and the names that the index promises for each (None: a single file, no index)."""
    folder = Path(folder)
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UserError(f"{folder} holds no weights: neither model.safetensors nor {index.name} (pickled "
                        ".bin and .pt files can run code and are never opened)")
    files, names = {}, read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(shard, str) for shard in names.values()):
        raise UserError(f"{index} has no weight_map from the names of tensors to those of files")
    for name, shard in names.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):  # `../` would read a file from elsewhere
            raise UserError(f"{index}: shard {shard!r} is not the name of a safetensors file in the same folder")
        files.setdefault(folder / shard, set()).add(name)
    return files


def checked_names(file: safe_open, path: Path, promised: set[str] | None, constants: tuple[str, ...]) -> Iterable[str]:
    """The names of the weights in a file; a UserError if they are not those that the index promises."""
    names = set(file.keys())
    if promised is not None and names != promised:
        raise UserError(f"{path} does not agree with the index: without {name_some(promised - names)}, "
                        f"and beyond it {name_some(names - promised)}")
    names = [name for name in names if not name.endswith(constants)]
    if strange := [f"{name} ({kind})" for name in names if (kind := file.get_slice(name).get_dtype()) not in FLOATS]:
        raise UserError(f"{path} holds weights that are no floats of 16 bits or more, which is not supported: "
                        f"{name_some(strange)}")
    return names


def check_shapes(wanted: dict[str, tuple], found: dict[str, tuple], complaint: str) -> None:
    """UserError, which begins with the complaint, unless tensors of these names and shapes are what is wanted."""
    problems = {
        "missing": [f"{name} {wanted[name]}" for name in wanted.keys() - found.keys()],
        "unexpected": [f"{name} {found[name]}" for name in found.keys() - wanted.keys()],
        "of another shape": [f"{name} {found[name]} instead of {wanted[name]}"
                             for name in wanted.keys() & found.keys() if wanted[name] != found[name]]}
    if any(problems.values()):
        raise UserError(f"{complaint}: " +
                        "; ".join(f"{what}: {name_some(names)}" for what, names in problems.items() if names))


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """UserError if a tensor that was read has NaN or infinity in it, with which nothing can be computed or trained.

    By its extremes, which a NaN becomes both of: no memory, and 0.1 s a GB on one slow core, a fifth of what reading
    takes; `isfinite` costs ten times that.
    """
    if not all(map(isfinite, torch.stack(tensor.aminmax()).tolist())):
        raise UserError(f"{path} is of a model that broke: {name} holds NaN or infinity; give an earlier checkpoint")


def name_some(names: Iterable[str], limit: int = 10) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


def _checkpoints(run: Path) -> list[tuple[int, bool, Path]]:
    """(step, is not an `.old` that is being replaced, folder), in no order."""
    matches = [(re.fullmatch(r"step_(\d+)(\.old)?", path.name), path) for path in run.glob("step_*")]
    return [(int(match[1]), match[2] is None, path) for match, path in matches if match]


def _flaw(folder: Path) -> str:
    """Why a checkpoint is not complete; empty if it is."""
    try:
        sizes = read_json(folder / "training/state.json").get("files")
    except UserError as error:
        return str(error)
    if not isinstance(sizes, dict):
        return f"{folder / 'training/state.json'} lists no files"
    for name, size in sizes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (folder / name).stat().st_size != size:
            return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
    return ""


def _prune(run: Path, step: int, keep: int, protected: set[int]) -> None:
    """Steps beyond `step` stay: they are of a run that this one branched off."""
    folders = _checkpoints(run)
    steps = sorted((number for number, plain, _ in folders if plain and number <= step), reverse=True)
    for number, plain, folder in folders:
        if not plain or (number in steps[keep:] and number not in protected):
            doomed = folder.with_name(folder.name + ".tmp")  # half deleted must not look like a checkpoint
            folder.rename(doomed)
            shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
