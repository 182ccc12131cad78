"""SIGTERM and Ctrl-C: finish the step, save, leave. The ranks agree on the step, or the others would wait for ever."""

import signal
import threading
import time
from types import FrameType

import torch

from minirl.parallel.collectives import MAX, all_reduce
from minirl.parallel.mesh import Mesh

GRACE = 3.0


class StopSignal:
    """After a first SIGTERM or Ctrl-C, `requested` is True on every rank; a later one interrupts at once.

    Within GRACE seconds a second signal is taken for the first: a terminal sends Ctrl-C to the whole process group, and
    torchrun passes on to its workers what it got itself.

    A StopSignal made while another is in force (the cold start inside a trainer) passes the signal on to it.
    """

    def __init__(self):
        self.received = False
        self.when = 0.0
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and time.monotonic() - self.when > GRACE:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.when = True, time.monotonic()
        outer = self.before[number]
        if isinstance(getattr(outer, "__self__", None), StopSignal):
            outer(number, frame)

    def requested(self, mesh: Mesh) -> bool:
        """Has any rank been asked to stop? Every rank must call this, at the same step."""
        return bool(all_reduce(torch.tensor(float(self.received), device=mesh.device), mesh.world_group, MAX))

    def close(self) -> None:
        """Give the signals back to whoever had them before."""
        for number, handler in getattr(self, "before", {}).items():
            signal.signal(number, handler)
