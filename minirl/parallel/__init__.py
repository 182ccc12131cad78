"""Training on several processes. A mesh says who they are; `forward_backward` is the one place that uses it."""

from minirl.parallel.data import all_reduce_max, all_reduce_sum, barrier, forward_backward, share_of
from minirl.parallel.mesh import Mesh, close_mesh, init_mesh, pick_dtype
from minirl.parallel.stop import StopSignal

__all__ = ["Mesh", "StopSignal", "all_reduce_max", "all_reduce_sum", "barrier", "close_mesh", "forward_backward",
           "init_mesh", "pick_dtype", "share_of"]
