"""A module without what nn.Module does around its forward.

    layer = bare(block)        the same forward on the same weights; layer(...) returns what block(...) would

Each call of an nn.Module looks for hooks, and each `self.q_proj` in a forward searches three dictionaries in Python: 20
microseconds a layer on a slow core, where the product of a small layer takes 30. Training does not notice it, but a
sampler calls every layer for every token. Here the search is done once: a layer becomes its forward over a plain record
of what it holds. There is no second forward to keep true.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch.nn.functional as F
from torch import Tensor, nn


def bare(module: nn.Module, plain: tuple[type[nn.Module], ...]) -> Callable[..., Tensor]:
    """What a call of `module` comes to, for as long as nobody gives it other weights, layers or hooks.

    plain : classes whose forward uses nothing but what an object holds: weights, layers, settings, and no methods
    """
    if module._forward_pre_hooks or module._forward_hooks:  # how shards talk to each other
        return module
    if type(module) is nn.Linear:
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if type(module) is nn.Identity:
        return _same
    if type(module) not in plain:
        return module.forward
    children = {name: bare(child, plain) for name, child in module.named_children()}
    return partial(type(module).forward, SimpleNamespace(**vars(module), **module._parameters, **children))


def _same(x: Tensor) -> Tensor:
    return x
