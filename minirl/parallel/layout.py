"""Any layout, one model: `parallelize` spreads it over a mesh, `Whole` and `read_training` lead back to one process.

    policy = parallelize(load_model(folder), mesh, sequence=True, zero_stage=1)
    save_checkpoint(..., mesh=mesh)      the same Hugging Face folder from every layout
    --resume --tp 4                      a run goes on in another layout than it was saved in

Weights are written whole, by the first rank, one shard in memory at a time. The optimizer's tensors stay where they
are: each rank writes what it has, and the layout is noted beside them. A run that goes on in the same layout reads its
own file; in another one the parts are put together (over ZeRO's slices, then over tp, then over pp) and cut anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from minirl.config import UserError
from minirl.model import Transformer
from minirl.parallel import context, pipeline, tensor, zero
from minirl.parallel.collectives import broadcast, gather_objects
from minirl.parallel.mesh import Mesh
from minirl.parallel.placement import Placement, placement, whole


def parallelize(model: Transformer, mesh: Mesh, *, sequence: bool = False, zero_stage: int = 0,
                schedule: pipeline.Kind = "1f1b", chunks: int = 1, context_kind: str = "ring") -> Transformer:
    """Leave on each rank its part of a model that all of them have whole, in place; returns the model.

    sequence     : between tensor-parallel layers each rank has its share of the tokens
    zero_stage   : 1 optimizer, 2 gradients and 3 parameters in slices over dp x cp
    schedule     : of a pipeline, with `chunks` slices of the model a stage
    context_kind : "ring" or "ulysses"

    Adapters are put on before. UserError, the same on every rank: what does not divide, or does not go together.
    """
    if sequence and mesh.tp == 1:
        raise UserError("--sp shares the tokens of tensor-parallel ranks: give --tp 2 or more")
    pipeline.split_stages(model, mesh, chunks, schedule, sequence)
    tensor.shard(model, mesh, sequence)
    context.attach(model, mesh, context_kind)
    return zero.shard(model, mesh, zero_stage)


class Whole(Mapping[str, Tensor]):
    """Named tensors of which each rank has a part, whole, one at a time.

    mine   : what this rank has under each name;  owners : the parameters that know how it is cut

    Reading a tensor is a collective: all ranks read all names in one order, and all get it.
    """

    def __init__(self, mine: Mapping[str, Tensor], owners: Mapping[str, nn.Parameter], mesh: Mesh):
        self.mine, self.owners, self.mesh = mine, owners, mesh
        self.stage: dict[str, int] = {}  # the first that has it
        self.kind: dict[str, tuple] = {}  # whole shape, dtype
        for stage, found in enumerate(gather_objects({name: self._kind(name) for name in mine}, mesh.pp_group)):
            for name, kind in found.items():
                self.stage.setdefault(name, stage)
                self.kind[name] = kind

    def _kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        where, shape = placement(self.owners[name]), list(self.mine[name].shape)
        if where.dim is not None:
            shape[where.dim] = sum(where.sizes)
        return tuple(shape), self.mine[name].dtype

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self.kind[name]
        if name in self.mine:
            full = whole(self.mine[name].detach(), placement(self.owners[name]), self.mesh.tp_group)
        else:
            full = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        return broadcast(full, self.mesh.pp_group, self.stage[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stage)

    def __len__(self) -> int:
        return len(self.stage)


# ---- the training state ----

ALONE = {"pp": 1, "tp": 1, "data": 1, "cut": {}}  # one process, or replicas that all have everything


def describe(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """The layout of the optimizer's tensors, as plain JSON values. Every rank must call it.

    pp, tp : stages, and ranks that share matrices;  data : ranks that share the optimizer (ZeRO), 1: each has all
    cut    : of each parameter that is cut over tp: dimension, sizes of the parts, copies
    """
    mine = {name: [p.placement.dim, list(p.placement.sizes), p.placement.copies]
            for name, p in model.named_parameters() if placement(p).dim is not None}
    cut = {name: where for stage in gather_objects(mine, mesh.pp_group) for name, where in stage.items()}
    return {"pp": mesh.pp, "tp": mesh.tp, "data": mesh.data_group.size if hasattr(model, "zero") else 1, "cut": cut}


def training_file(layout: Mapping[str, Any], mesh: Mesh) -> str:
    """The file for what this rank has of the optimizer; "": another replica has the same, and writes it."""
    if layout["data"] == 1 and mesh.data_group.rank:
        return ""
    return _file(layout, mesh.pp_rank, mesh.tp_rank, mesh.data_group.rank)


def _file(layout: Mapping[str, Any], pp: int, tp: int, data: int) -> str:
    alone = layout["pp"] == layout["tp"] == layout["data"] == 1
    return "state.safetensors" if alone else f"state_pp{pp}_tp{tp}_data{data}.safetensors"


def read_training(folder: Path, saved: Mapping[str, Any], model: nn.Module | None = None,
                  mesh: Mesh | None = None) -> dict[str, Tensor]:
    """What this rank had when the checkpoint was written, or would have had in the layout of today.

    folder : with the files of all ranks;  saved : the layout of then;  model, mesh : of now, None: one process
    """
    mesh = mesh or Mesh()
    now = ALONE if model is None else describe(model, mesh)
    if now == saved:
        data = mesh.data_group.rank if now["data"] > 1 else 0
        return load_file(folder / _file(now, mesh.pp_rank, mesh.tp_rank, data))
    full = merge(folder, saved)
    if now == ALONE:
        return full
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {}
    for key, value in full.items():
        _, _, name = key.partition(".")
        if name in now["cut"] and name in names:
            where = Placement(*now["cut"][name])
            part = where.part_of(mesh.tp_rank)
            value = value.narrow(where.dim, sum(where.sizes[:part]), where.sizes[part]).contiguous()
        if not name or name in names:
            state[key] = value
    state = zero.cut_state(state, zero.layout_of(model)) if now["data"] > 1 else state
    return state | {key: value for key, value in full.items() if key.startswith("rng.")}


def merge(folder: Path, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The files of a checkpoint as the one that one process would have written; random state of the first rank."""
    cut = {name: Placement(*where) for name, where in saved["cut"].items()}
    full: dict[str, Tensor] = {}
    for pp in range(saved["pp"]):
        places = []
        for tp in range(saved["tp"]):
            files = [load_file(folder / _file(saved, pp, tp, data)) for data in range(saved["data"])]
            rng = {key: value for key, value in files[0].items() if key.startswith("rng.")}
            states = [{key: value for key, value in file.items() if key not in rng} for file in files]
            places.append((zero.merge_states(states) if saved["data"] > 1 else states[0]) | rng)
        for key in places[0].keys() - full.keys():
            where = cut.get(key.partition(".")[2], Placement())
            parts = [place[key] for place in places]
            full[key] = parts[0] if where.dim is None else torch.cat(parts[:: where.copies], where.dim)
    return full
