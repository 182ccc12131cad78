"""Who am I among the processes of this job? The only file that reads torchrun's environment variables."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minirl.config import UserError

CPU = torch.device("cpu")
TIMEOUT = datetime.timedelta(minutes=10)  # a rank that waits longer than this for another gives up with an error


@dataclass(frozen=True)
class Mesh:
    """The processes of one job. `dp` replicas of the model share the work; each is one rank."""

    dp: int = 1
    dp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    device: torch.device = CPU

    @property
    def size(self) -> int:
        """Ranks whose rows and tokens add up to one batch."""
        return self.dp

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.dp_rank == 0

    def share(self, count: int, what: str = "items") -> range:
        """The slice of 0 .. count-1 that falls to this replica: contiguous, equal, complete."""
        if count % self.dp:
            raise UserError(f"{count} {what} do not divide over {self.dp} ranks: use a multiple of {self.dp}")
        size = count // self.dp
        return range(self.dp_rank * size, (self.dp_rank + 1) * size)


def pick_device(name: str) -> torch.device:
    """"auto" is cuda (this process's own), else mps, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from None
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """"auto" is bfloat16 where the hardware has it (and not where torch only emulates it), else float32."""
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float32
    kinds = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    if name not in kinds:
        raise UserError(f"--dtype {name} is unknown: use auto, {', '.join(kinds)}")
    return kinds[name]


def init_mesh(device: str = "auto") -> Mesh:
    """Join the job that torchrun started (gloo on CPU, NCCL on GPU), or be a job of one. May be called twice."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = pick_device(device)
    if "WORLD_SIZE" in os.environ:
        die_with_parent()
    if world == 1:
        return Mesh(device=place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
    return Mesh(dp=world, dp_rank=rank, dp_group=dist.group.WORLD, device=place)


def close_mesh() -> None:
    """Leave the job in good order."""
    if dist.is_initialized():
        dist.destroy_process_group()


def die_with_parent() -> None:
    """On Linux, ask to be killed when torchrun dies: the workers of a killed launcher otherwise live on for ever."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
