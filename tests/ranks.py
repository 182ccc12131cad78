"""Real processes for tests: `run_ranks` is torchrun in miniature, `start` is for those that a test wants to kill.

They are forked from a server that has imported once what they need (a start costs a moment and not seconds) and
nothing else has happened in, so that no thread or lock of pytest is copied. Results travel as pickled bytes, tensors
included.
"""

import gc
import io
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait starve others of few cores
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([  # torch's compiler: two seconds a rank, at the first checkpointed block
    "torch.distributed", "torch._dynamo", "pytest", "minirl.plan", "train_dpo", "train_grpo", "train_ppo", "train_sft"])


class RankError(Exception):
    """One rank failed; the text holds its own traceback."""


def start(function: Callable, *args, threads: int = 1, environment: dict[str, str] | None = None,
          output: Path | None = None) -> BaseProcess:
    """function(*args) in a process of its own, to be joined or killed. Its text goes to the file `output`."""
    process = context.Process(target=_child, args=(function, args, threads, environment or {}, output), daemon=True)
    process.start()
    return process


def run_ranks(function: Callable, world_size: int, *args, timeout: float = 120) -> list[Any]:
    """function(*args) on `world_size` ranks, which find each other as under torchrun. What each returned, in order.

    RankError: a rank raised or died; TimeoutError: some were not done in `timeout` seconds. Either way all are gone.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # port 0: one that is free
    environment = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    deadline = time.monotonic() + timeout
    processes: dict[Connection, BaseProcess] = {}
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            processes[reader] = start(_rank, writer, function, args,
                                      environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            writer.close()  # or its end would never be seen
        ranks = {reader: rank for rank, reader in enumerate(processes)}
        while len(results) < world_size:
            ready = wait([reader for reader, rank in ranks.items() if rank not in results],
                         max(0.0, deadline - time.monotonic()))
            if not ready:
                running = [rank for rank in ranks.values() if rank not in results]
                raise TimeoutError(f"ranks {running} of {world_size} were not done after {timeout} s")
            failures = []
            for reader in ready:
                when, failure, results[ranks[reader]] = _receive(reader, processes[reader])
                if failure:
                    failures.append((when, f"rank {ranks[reader]} of {world_size}: {failure}"))
                    time.sleep(0.5)  # the first failure is the cause, the others lost their partner: hear them all
                    ready.extend(wait([r for r in ranks if ranks[r] not in results and r not in ready], 0))
            if failures:
                raise RankError(min(failures)[1])
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """What each returned. Ranks wait for each other half of their time, in which those of another job can compute.

    The last job runs in this thread, which alone may set signal handlers, as a trainer does.
    """
    with ThreadPoolExecutor(len(jobs)) as pool:
        waiting = [pool.submit(job) for job in jobs[:-1]]
        last = jobs[-1]()
        return [*(job.result() for job in waiting), last]


def _receive(reader: Connection, process: BaseProcess) -> tuple[float, str, Any]:
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        return 0.0, f"died with exit code {process.exitcode}", None


def _rank(writer: Connection, function: Callable, args: tuple) -> None:
    try:
        message = (0.0, "", function(*args))
    except BaseException:  # SystemExit as well: a rank that leaves early is a failure
        message = (time.monotonic(), traceback.format_exc(), None)
    data = io.BytesIO()
    Pickler(data).dump(message)
    writer.send_bytes(data.getbuffer())
    if dist.is_initialized() and not message[1]:
        dist.destroy_process_group()


class Pickler(pickle.Pickler):
    """Tensors as their bytes. Torch's own way makes a file of each, which takes longer, and results have thousands."""

    def reducer_override(self, x: Any):
        if type(x) is not torch.Tensor or x.requires_grad or x.layout != torch.strided:
            return NotImplemented
        return _tensor, (x.contiguous().flatten().view(torch.uint8).numpy().tobytes(), x.dtype, x.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _child(function: Callable, args: tuple, threads: int, environment: dict[str, str], output: Path | None) -> None:
    gc.freeze()  # what the server has imported stays, and need not be looked through at each collection
    os.environ.update(environment, OMP_NUM_THREADS=str(threads))
    torch.set_num_threads(threads)
    for kind in (FutureWarning, DeprecationWarning):  # of torch above all: what it will take away is not used
        warnings.simplefilter("error", kind)
    if output:
        with open(output, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    function(*args)
    sys.stdout.flush()


def bytes_in_memory() -> int:
    """Of all storages that a Python object made since gc.freeze(), or its gradient, refers to."""
    storages = {}
    for tensor in [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]:
        for x in (tensor, tensor.grad if tensor.is_leaf else None):
            if x is not None and not x.is_meta:
                storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sum(storages.values())


class Weigh(TorchDispatchMode):
    """Counts the bytes of all storages made inside, after each operation: Python's and those that only autograd has.

    with weigh, weigh.activations():    what autograd keeps for backward, but for `weights`, is left out

    most : the largest count since it was set to 0
    """

    def __init__(self):
        super().__init__()
        self.made, self.kept, self.weights = {}, {}, set()
        self.most, self.blind = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if not self.blind:
            grown = False  # or the count is no larger than it was
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    if storage._cdata not in self.made or self.made[storage._cdata].expired():
                        self.made[storage._cdata], grown = StorageWeakRef(storage), True
            if grown:
                self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self.made.items()):  # a weak reference: no storage begins at the place of a dead one
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.made[key]
            elif key not in self.kept:
                total += storage.nbytes()
        return total

    def activations(self):
        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in self.weights:
                self.kept[storage._cdata] = StorageWeakRef(storage)
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
