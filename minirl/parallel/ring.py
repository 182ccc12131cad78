"""An all-reduce by hand: where 2 (N - 1) / N comes from. The way in; training uses torch's own.

N ranks stand in a ring, each has n numbers, and each shall have the sums. Cut the numbers into N chunks. Sending all to
one rank would make that rank's line the bottleneck, N n numbers long; in the ring every line is busy all the time and
carries only

    N - 1 steps of reduce-scatter   pass one chunk on, add the one that comes       -> every rank has one full sum
    N - 1 steps of all-gather       pass on the full sum that came last             -> every rank has all of them

of n / N numbers each: 2 (N - 1) / N x n are sent by every rank, however many there are.

    3 ranks, chunk c of rank r is rc       step 1          step 2            step 3         step 4
    rank 0   00 01 02                      02 + 22         01 + 21 + 11      chunk 0        chunk 2
    rank 1   10 11 12                      10 + 00         12 + 02 + 22      chunk 1        chunk 0
    rank 2   20 21 22                      21 + 11         20 + 10 + 00      chunk 2        chunk 1
                                           its sum of one chunk grows        full sums arrive
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.parallel.collectives import ring_exchange
from minirl.parallel.mesh import Group


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks of the group; x is left as it is."""
    n, rank = group.size, group.rank
    if n == 1:
        return x
    chunks = list(F.pad(x.flatten(), (0, -x.numel() % n)).view(n, -1).unbind())
    for step in range(n - 1):  # reduce-scatter: chunk (rank - step) leaves, the one before it arrives
        arrived = (rank - step - 1) % n
        (part,) = ring_exchange([chunks[(rank - step) % n]], group)
        chunks[arrived] = chunks[arrived] + part
    for step in range(n - 1):  # all-gather: begins with the chunk that is full here, (rank + 1)
        (chunks[(rank - step) % n],) = ring_exchange([chunks[(rank + 1 - step) % n]], group)
    return torch.cat(chunks)[: x.numel()].view_as(x)
