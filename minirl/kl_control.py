"""The price of leaving the reference: fixed, or turned up and down until the policy stays at a wanted distance.

A policy that is paid for a learned reward and pays `kl_coef` for every nat between it and the reference settles where
the two are even, and nobody knows in advance where that is. A controller asks for the distance instead:

    kl_coef = proportional(kl_coef, kl, target)        once a rollout, kl measured on its samples: nats a response
"""

from __future__ import annotations

from typing import Literal

from minirl.config import UserError

KlControl = Literal["fixed", "proportional", "threshold"]


def proportional(kl_coef: float, kl: float, target: float, gain: float = 0.1) -> float:
    """Ziegler et al., arXiv:1909.08593 sec. 2.2: kl_coef (1 + gain clip(kl / target - 1, -0.2, 0.2)).

    At most 2 % a rollout: slow, so that one odd batch moves nothing.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + gain * error)


def threshold(kl_coef: float, kl: float, target: float, low: float = 0.5, high: float = 1.5) -> float:
    """Twice the coefficient where kl is above high x target, half of it below low x target, else as it is.

    PPO, arXiv:1707.06347 sec. 4, with two thirds for `low`. Quick, and it may go back and forth.
    """
    if kl > high * target:
        return kl_coef * 2
    return kl_coef / 2 if kl < low * target else kl_coef


def next_kl_coef(control: KlControl, kl_coef: float, kl: float, target: float) -> float:
    """The coefficient of the next rollout, by the controller of that name; kl and target in nats a response."""
    if control == "fixed":
        return kl_coef
    if control == "proportional":
        return proportional(kl_coef, kl, target)
    if control == "threshold":
        return threshold(kl_coef, kl, target)
    raise UserError(f'KL controller {control!r} does not exist: use "fixed", "proportional" or "threshold"')
