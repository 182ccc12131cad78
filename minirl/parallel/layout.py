"""Any layout, one model: `parallelize` spreads it over a mesh, `Whole` and `read_training` lead back to one process.

    policy = parallelize(load_model(folder), mesh, sequence=True, zero_stage=1)
    save_checkpoint(..., mesh=mesh)      the same Hugging Face folder from every layout
    --resume --tp 4                      a run goes on in another layout than it was saved in

Weights are written whole, by the first rank, one shard in memory at a time. The optimizer's tensors stay where they
are: each rank writes what it has, and the layout is noted beside them. A run that goes on in the same layout reads its
own file; in another one a rank reads from the files of all those rows that it needs, tensor after tensor, so that no
rank ever holds more of the optimizer than its own share and one tensor's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from minirl.config import UserError
from minirl.model import Transformer
from minirl.parallel import context, pipeline, tensor, zero
from minirl.parallel.collectives import broadcast, gather_objects
from minirl.parallel.mesh import Mesh
from minirl.parallel.placement import Placement, placement, whole


def parallelize(model: Transformer, mesh: Mesh, *, sequence: bool = False, zero_stage: int = 0,
                zero_overlap: bool = False, schedule: pipeline.Kind = "1f1b", chunks: int = 1,
                context_kind: str = "ring") -> Transformer:
    """Leave on each rank its part of a model that all of them have whole, in place; returns the model.

    sequence     : between tensor-parallel layers each rank has its share of the tokens
    zero_stage   : 1 optimizer, 2 gradients and 3 parameters in slices over dp x cp
    zero_overlap : step 3 computes while it sends, for more memory
    schedule     : of a pipeline, with `chunks` slices of the model a stage
    context_kind : "ring" or "ulysses"

    Adapters are put on before. UserError, the same on every rank: what does not divide, or does not go together.
    """
    if sequence and mesh.tp == 1:
        raise UserError("--sp shares the tokens of tensor-parallel ranks: give --tp 2 or more")
    pipeline.split_stages(model, mesh, chunks, schedule, sequence)
    tensor.shard(model, mesh, sequence)
    context.attach(model, mesh, context_kind)
    return zero.shard(model, mesh, zero_stage, zero_overlap)


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
    old, state = Saved(folder, saved), {}
    trained = None if model is None else {name for name, p in model.named_parameters() if p.requires_grad}
    spans = zero.layout_of(model) if now["data"] > 1 else None
    if spans is not None:
        state["ranks"] = torch.tensor([spans.rank, spans.ranks])
    for key in old.where:
        kind, _, name = key.partition(".")
        if kind in ("step", "rng"):
            state[key] = old.first(key).get_tensor(key)
        elif name and kind != "shape" and (trained is None or name in trained):
            cut = Placement(*now["cut"].get(name, ()))
            state[key] = old.read(key, cut, mesh.tp_rank, spans and spans.spans[name])
            if spans is not None:
                state[f"shape.{name}"] = torch.tensor(old.shape(key, cut, mesh.tp_rank))
    return state


class Saved:
    """The optimizer's tensors in the files of a checkpoint: any part of each, as if one process had written it.

    where : the first stage of the pipeline that has a tensor
    """

    def __init__(self, folder: Path, layout: Mapping[str, Any]):
        self.layout = layout
        self.files = [[[safe_open(folder / _file(layout, pp, tp, data), "pt") for data in range(layout["data"])]
                       for tp in range(layout["tp"])] for pp in range(layout["pp"])]
        self.where = {key: pp for pp in reversed(range(layout["pp"])) for key in self.files[pp][0][0].keys()}
        steps = {int(file.get_tensor("step")) for stage in self.files for place in stage for file in place
                 if "step" in self.where}
        if len(steps) > 1:
            raise UserError(f"the files of {folder} are not of one save: they have steps {sorted(steps)}")

    def first(self, key: str) -> safe_open:
        """The first file that has a tensor."""
        return self.files[self.where[key]][0][0]

    def cut_then(self, key: str) -> Placement:
        return Placement(*self.layout["cut"].get(key.partition(".")[2], ()))

    def shape_then(self, key: str, tp: int) -> list[int]:
        """Of the part that a rank of tp had."""
        file = self.files[self.where[key]][tp][0]
        if self.layout["data"] == 1:
            return file.get_slice(key).get_shape()
        return file.get_tensor(f"shape.{key.partition('.')[2]}").tolist()

    def shape(self, key: str, now: Placement, tp: int) -> list[int]:
        """Of the part that a rank of tp has now."""
        shape, then = self.shape_then(key, 0), self.cut_then(key)
        if then.dim is not None:
            shape[then.dim] = sum(then.sizes)
        if now.dim is not None:
            shape[now.dim] = now.sizes[now.part_of(tp)]
        return shape

    def read(self, key: str, now: Placement, tp: int, span: tuple[int, int] | None) -> Tensor:
        """What a rank has now of a tensor: its part over tp; of that part, with a span, numbers start .. stop, flat.

        These lie in some rows of the part. From the files come those rows and no others, and of a row the columns of
        the part.
        """
        shape, then = self.shape(key, now, tp), self.cut_then(key)
        width = prod(shape[1:])
        begin, end = span or (0, prod(shape))
        rows = begin // width, -(-end // width)
        dim = next((where.dim for where in (then, now) if where.dim is not None), 0)
        offset = 0 if now.dim is None else sum(now.sizes[: now.part_of(tp)])  # of the part in the whole, along dim
        wanted = (offset + rows[0], offset + rows[1]) if dim == 0 else (offset, offset + shape[1])
        found, start = [], 0
        for number, size in enumerate(then.sizes or [self.shape_then(key, 0)[dim]]):
            low, high = max(wanted[0] - start, 0), min(wanted[1] - start, size)
            if low < high:
                box = ((low, high), None) if dim == 0 else (rows, (low, high))
                found.append(self.box(key, number * then.copies, *box))
            start += size
        region = torch.cat(found, dim) if found else self.box(key, 0, (0, 0))
        return region if span is None else region.flatten()[begin - rows[0] * width :][: end - begin].clone()

    def box(self, key: str, tp: int, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Rows of the part that a rank of tp had, or some columns of them; those of its numbers that ZeRO's slices have
        are put together."""
        files = self.files[self.where[key]][tp]
        box = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
        if self.layout["data"] == 1:
            return files[0].get_slice(key)[box]
        shape = self.shape_then(key, tp)
        width, begin, found = prod(shape[1:]), 0, []
        for file in files:
            slice_ = file.get_slice(key)
            length = slice_.get_shape()[0]
            low, high = (min(max(row * width - begin, 0), length) for row in rows)
            found.append(slice_[low:high])
            begin += length
        if begin != prod(shape):
            raise UserError(f"optimizer state {key} has {begin} numbers in {len(files)} parts, but {shape} needs "
                            f"{prod(shape)}: a part is truncated")
        return torch.cat(found).view(rows[1] - rows[0], *shape[1:])[(slice(None), *box[1:])]
