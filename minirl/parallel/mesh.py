"""Who am I among the processes of this job, and with whom do I share what? Only this file reads torchrun's variables.

Ranks are laid out on a grid of four axes, dp x pp x cp x tp, the last running fastest:

    dp  data parallel       replicas of the model, each with its own rows
    pp  pipeline parallel   stages: each holds some of the layers
    cp  context parallel    each holds some columns of every row
    tp  tensor parallel     each holds a slice of every matrix; most talkative, so neighbours (one machine) share it

    8 ranks, dp=2 pp=2 tp=2         tp pairs (0 1) (2 3) (4 5) (6 7)      pp pairs (0 2) (1 3) (4 6) (5 7)
                                    dp pairs (0 4) (1 5) (2 6) (3 7)
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from minirl.config import UserError
from minirl.parallel import guard

CPU = torch.device("cpu")
TIMEOUT = 600.0  # seconds: a rank that waits longer than this for another gives up with an error
LATER = 10.0  # seconds by which, on a busy machine, the first rank may come to an error after the others
AXES = ("dp", "pp", "cp", "tp")
LOST = re.compile("closed by peer|reset by peer|broken pipe|time[d ]*out", re.IGNORECASE)  # gloo, NCCL, the store


@dataclass
class Ledger:
    """What was communicated: (operation, name of the group) -> number of calls, and bytes of the tensors.

    Bytes are those of the whole tensor that an operation is about: the input of an all-reduce or a reduce-scatter, the
    result of an all-gather, what one rank sends otherwise. `costs.py` turns them into bytes on the wire.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, operation: str, group: str, tensor: torch.Tensor) -> None:
        key = operation, group
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0) + tensor.numel() * tensor.element_size()

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


@dataclass(frozen=True)
class Group:
    """The ranks that differ in some axes only. `rank` is the place among them of the process that asks."""

    name: str  # "dp", "tp", ...: for the ledger
    ranks: tuple[int, ...] = (0,)  # of the whole job
    rank: int = 0
    handle: dist.ProcessGroup | None = None
    ledger: Ledger = field(default_factory=Ledger, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """The processes of one job: the size of each axis, this process's place on it, and its partners there."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0
    dp_group: Group = Group("dp")
    pp_group: Group = Group("pp")
    cp_group: Group = Group("cp")
    tp_group: Group = Group("tp")
    data_group: Group = Group("dp_cp")  # dp x cp: everyone who holds the same weights for other tokens
    replica_group: Group = Group("pp_tp")  # pp x tp: everyone who works on the same tokens with other weights
    world_group: Group = Group("world")
    device: torch.device = CPU
    ledger: Ledger = field(default_factory=Ledger, compare=False)

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.dp_rank == 0 and self.leads_replica

    @property
    def leads_replica(self) -> bool:
        """True on one rank of each replica."""
        return self.pp_rank == self.cp_rank == self.tp_rank == 0

    def share(self, count: int, what: str = "items") -> range:
        """The slice of 0 .. count-1 that falls to this replica: contiguous, equal, complete."""
        if count % self.dp:
            raise UserError(f"{count} {what} do not divide over {self.dp} replicas: use a multiple of {self.dp}")
        size = count // self.dp
        return range(self.dp_rank * size, (self.dp_rank + 1) * size)

    def portion(self, count: int) -> range:
        """The slice of 0 .. count-1 that this rank looks at when each of dp x cp takes some: uneven, perhaps empty."""
        rank, ranks = self.dp_rank * self.cp + self.cp_rank, self.dp * self.cp
        return range(count * rank // ranks, count * (rank + 1) // ranks)


def coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """The place of a rank on each axis of a grid whose last axis runs fastest.

    >>> coordinates(5, {"dp": 2, "pp": 2, "cp": 1, "tp": 2})
    {'dp': 1, 'pp': 0, 'cp': 0, 'tp': 1}
    """
    place = {}
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def partners(sizes: dict[str, int], along: tuple[str, ...]) -> list[tuple[int, ...]]:
    """All groups of ranks that differ in the axes `along` only, each in ascending order.

    >>> partners({"dp": 2, "tp": 2}, ("dp",))
    [(0, 2), (1, 3)]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes.values())):
        fixed = tuple(at for axis, at in coordinates(rank, sizes).items() if axis not in along)
        groups.setdefault(fixed, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def init_mesh(device: str = "auto", dp: int = 0, pp: int = 1, cp: int = 1, tp: int = 1,
              timeout: float = TIMEOUT) -> Mesh:
    """Join the job that torchrun started (gloo on CPU, NCCL on GPU), or be a job of one. May be called twice.

    dp        : 0 takes what the other axes leave of the ranks
    timeout   : seconds that a rank waits for another. Then, or when another is gone, it ends with an error, and its
                torchrun ends the rest: at once, or 30 s later (--shutdown-timeout) if they do not heed SIGTERM
    UserError : a size below 1, or sizes whose product is not the number of ranks
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    for axis, size in (("pp", pp), ("cp", cp), ("tp", tp)):
        if size < 1:
            raise UserError(f"--{axis} {size}: the ranks are laid out along it, so give 1 or more")
    if dp < 0:
        raise UserError(f"--dp {dp}: give the number of replicas, or 0 for as many as there are ranks for")
    sizes = {"dp": dp or max(1, world // (pp * cp * tp)), "pp": pp, "cp": cp, "tp": tp}
    if prod(sizes.values()) != world:
        raise UserError(" x ".join(f"{axis} {size}" for axis, size in sizes.items()) + f" makes "
                        f"{prod(sizes.values())} ranks, but {world} were started: "
                        f"torchrun --nproc_per_node {prod(sizes.values())}, or other sizes")
    place = pick_device(device)
    if "WORLD_SIZE" in os.environ:
        die_with_parent()
    if place.type == "cuda":
        torch.cuda.set_device(place)  # what does not name a device would go to the first GPU, from all ranks
    patience = datetime.timedelta(seconds=timeout)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=patience)
        dist.barrier()  # who leaves with an error before all are connected would hide it behind theirs
        if "TORCHELASTIC_RUN_ID" in os.environ and os.name == "posix" and world <= guard.MOST:
            start_guard(rank)
    ledger = Ledger()
    groups = {name: _group(name, sizes, along, rank, ledger, patience) for name, along in
              [*((axis, (axis,)) for axis in AXES), ("dp_cp", ("dp", "cp")), ("pp_tp", ("pp", "tp")), ("world", AXES)]}
    at = coordinates(rank, sizes)
    return Mesh(**sizes, **{f"{axis}_rank": at[axis] for axis in AXES},
                **{f"{axis}_group": groups[axis] for axis in AXES}, data_group=groups["dp_cp"],
                replica_group=groups["pp_tp"], world_group=groups["world"], device=place, ledger=ledger)


def _group(name: str, sizes: dict[str, int], along: tuple[str, ...], rank: int, ledger: Ledger,
           patience: datetime.timedelta) -> Group:
    """This rank's group. Every rank makes every group, its own or not, in the same order: torch asks for that."""
    mine = Group(name, (rank,), ledger=ledger)
    for ranks in partners(sizes, along):
        if len(ranks) > 1:
            # Gradients travel while other messages do: the ranks must not mistake one for the other.
            whole = len(ranks) == prod(sizes.values()) and (name != "dp_cp" or sizes["cp"] == 1)
            handle = dist.group.WORLD if whole else dist.new_group(ranks, timeout=patience)
            if rank in ranks:
                if name == "pp":  # NCCL wants a group's first call to be one that all take part in, and no send is
                    dist.barrier(handle)
                mine = Group(name, ranks, ranks.index(rank), handle, ledger)
    return mine


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


def close_mesh() -> None:
    """Leave the job in good order."""
    if dist.is_initialized():
        dist.destroy_process_group()


def start_guard(rank: int) -> None:
    """Have a guard beside this process (`guard.py`). Every rank must call it."""
    both = socket.has_dualstack_ipv6()  # a host's name may stand for an address of either kind
    listener = None if rank else socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET,
                                                      dualstack_ipv6=both)
    found = [None if rank else (listener.getsockname()[1], secrets.token_hex(16))]
    dist.broadcast_object_list(found)
    port, token = found[0]
    command = [sys.executable, "-I", "-S", guard.__file__, os.environ["MASTER_ADDR"], str(port), token,
               str(dist.get_world_size() - 1), str(listener.fileno()) if listener else ""]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True,
                               pass_fds=[listener.fileno()] if listener else [])
    if listener:
        listener.close()
    atexit.register(_say_goodbye, process)


def _say_goodbye(process: subprocess.Popen) -> None:
    """At the end of a process. Python has a last_value if that end is an exception."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"" if hasattr(sys, "last_value") else guard.GOODBYE)
        process.stdin.close()


def let_first_rank_speak() -> None:
    """Before an error is told that all ranks are likely to have: the first tells it, and torchrun ends the others.

    Who is alone with its error, or on another machine, tells it LATER.
    """
    if int(os.environ.get("RANK", 0)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a StopSignal would outlive what torchrun sends
        time.sleep(LATER)


def explain(error: RuntimeError) -> None:
    """Add to torch's message that a partner is silent or gone what that means."""
    if dist.is_initialized() and LOST.search(str(error)):
        error.add_note(f"rank {dist.get_rank()} has lost another rank, which failed, was killed, or did not answer in "
                       "time (--timeout). If it could still say why, that stands elsewhere in this output. Start all "
                       "ranks again with --resume to go on from the newest checkpoint.")


def die_with_parent() -> None:
    """On Linux, ask to be killed when torchrun dies: the workers of a killed launcher otherwise live on for ever."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
