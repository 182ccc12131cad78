"""The DPO family, as one table: how much better a model should find the preferred answer than the other.

    answers = losses.sequence_logprobs(logprobs, mask, PREFERENCES["dpo"].reduce)            (B,), sums or means
    loss = preference_loss("dpo", chosen, rejected, ref_chosen, ref_rejected, beta=0.1)       (P,), one a pair

P pairs. Each loss is a pure function of two numbers a pair, c of the chosen and r of the rejected answer:

    c = log pi(chosen | x) - log ref(chosen | x)       where the row has a reference: what the implicit reward of DPO,
    r = log pi(rejected | x) - log ref(rejected | x)   beta times this, is made of (arXiv:2305.18290 eq. 5)
    c = log pi(chosen | x),  r = log pi(rejected | x)  where it has none

With h = beta (c - r), s = sigmoid and e = label_smoothing, the table PREFERENCES says what is minimised. `nll` in a row
is the weight of a term that the trainer adds, for the paper has it: the negative log-likelihood of the chosen answers,
a mean over their tokens (`losses.sft_loss`).

Sum or mean of the token log-probs? The derivation of DPO has log pi(y | x), a sum. With the mean, long and short
answers count alike, and the scale changes: a beta for sums of 100 tokens corresponds to one 100 times larger for means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.config import UserError


@dataclass(frozen=True)
class PreferenceOptions:
    """Of train_dpo.py. An option that is none is that of the loss's row."""

    # objective
    loss: Literal["dpo", "cdpo", "robust", "ipo", "hinge", "simpo", "orpo", "cpo", "kto", "apo_zero", "apo_down", "exo",
                  "nca", "bco", "sppo", "reward"] = "dpo"  # a row of docs/preferences.md; reward: a reward model
    beta: float | None = 1.0  # strength of the preference; less for longer answers; none: the row's own
    label_smoothing: float | None = None  # share of pairs believed to be the wrong way round; none: the row's own
    gamma: float | None = None  # simpo: margin between the two answers; none: the row's own
    logprobs: Literal["auto", "sum", "mean"] = "auto"  # of an answer's tokens; auto: the row's own
    nll_coef: float | None = 1.0  # weight of the chosen answers' negative log-likelihood; 0 is DPO alone; none: the
                                  # row's own
    reference: Literal["start", "uniform"] = "start"  # the model before the first update, or all answers alike
    precompute_ref: bool = False  # ask the reference about all pairs once, then let its memory go
    backbone_layers: int = 4  # reward, without --init: blocks of the model that it begins as, which imitates the expert
                              # in --cold-start-steps; 0: it begins as the model that answered
    centring: float = 0.01  # reward: keeps the mean score of a pair at 0
    prefixes: bool = True  # reward: compare what both answers were worth after each token, too
    margins: bool = False  # reward: a pair's scores must differ by as much as its rewards


class Options(NamedTuple):
    """What a loss may depend on besides the pair."""

    beta: float  # strength of the preference; in the losses with a reference 1 / beta is the freedom to leave it
    label_smoothing: float = 0.0  # e: the share of pairs thought to have been labelled the wrong way round
    gamma: float = 0.0  # simpo: margin that c must have over r, in units of h
    shift: Tensor | float = 0.0  # kto: z0, bco: delta; a number from the whole batch, without gradient


# ---- pairs ----

def dpo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    h = o.beta * (c - r)
    return -(1 - o.label_smoothing) * F.logsigmoid(h) - o.label_smoothing * F.logsigmoid(-h)


def robust(c: Tensor, r: Tensor, o: Options) -> Tensor:
    """DPO's loss, unbiased by labels of which e are flipped: the expectation over flips is DPO's on true labels."""
    e, h = o.label_smoothing, o.beta * (c - r)
    return (-(1 - e) * F.logsigmoid(h) + e * F.logsigmoid(-h)) / (1 - 2 * e)


def ipo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    """A target for c - r instead of "the more the better": pairs that are certain do not pull beyond 1 / 2 beta."""
    return (c - r - 1 / (2 * o.beta)).square()


def hinge(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return F.relu(1 - o.beta * (c - r))


def simpo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return dpo(c, r + o.gamma / o.beta, o)


def orpo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    """beta weighs the log odds ratio (the paper's lambda); c and r are mean log-probs, whose exp is a probability."""
    return -o.beta * F.logsigmoid(log_odds(c) - log_odds(r))


def log_odds(logprob: Tensor) -> Tensor:
    """log p / (1 - p).  1 - p by expm1, and never 0: a sure model would have infinite odds, and a gradient of NaN."""
    tiny = torch.finfo(logprob.dtype).eps
    return logprob - torch.log(-torch.expm1(logprob.clamp(max=-tiny)))


def exo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    """KL(p || q) of the model's preference p = s(h), and the label's q = 1 - e: the reverse of DPO's direction."""
    h, e = o.beta * (c - r), o.label_smoothing
    return (h.sigmoid() * (F.logsigmoid(h) - math.log(1 - e))
            + (-h).sigmoid() * (F.logsigmoid(-h) - math.log(e)))


def nca(c: Tensor, r: Tensor, o: Options) -> Tensor:
    c, r = o.beta * c, o.beta * r
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def sppo(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return (c - 0.5 / o.beta).square() + (r + 0.5 / o.beta).square()


def apo_zero(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return (-o.beta * c).sigmoid() + (o.beta * r).sigmoid()


def apo_down(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return (o.beta * c).sigmoid() + (-o.beta * (c - r)).sigmoid()


# ---- single answers, with a point of comparison from the batch ----

def kto(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return (kto_answer(c, True, o) + kto_answer(r, False, o)) / 2  # KTO's mean is over answers


def kto_answer(x: Tensor, desirable: Tensor | bool, o: Options) -> Tensor:
    """1 - s(beta (x - z0)) of a good answer, 1 - s(beta (z0 - x)) of a bad one; as many of each as there are."""
    sign = torch.where(torch.as_tensor(desirable, device=x.device), 1.0, -1.0)
    return (-o.beta * sign * (x - o.shift)).sigmoid()


def bco(c: Tensor, r: Tensor, o: Options) -> Tensor:
    return -F.logsigmoid(o.beta * c - o.shift) - F.logsigmoid(o.shift - o.beta * r)


# ---- the table ----

class Preference(NamedTuple):
    loss: Callable[[Tensor, Tensor, Options], Tensor]  # c (P,), r (P,), options -> (P,)
    formula: str
    paper: str
    idea: str
    reference: bool = True  # c and r are relative to a frozen model
    reduce: Literal["sum", "mean"] = "sum"  # of the tokens' log-probs
    beta: float = 0.1
    label_smoothing: float | None = None  # None: the loss has none
    gamma: float | None = None
    nll: float = 0.0


PREFERENCES = {
    "dpo": Preference(dpo, "-log s(h)", "2305.18290 eq. 7", "a reward model's loss with the implicit reward",
                      label_smoothing=0.0),
    "cdpo": Preference(dpo, "-(1 - e) log s(h) - e log s(-h)", "E. Mitchell's note of 2023 (ericmitchell.ai/cdpo.pdf)",
                       "labels may be wrong: stops at s(h) = 1 - e", label_smoothing=0.1),
    "robust": Preference(robust, "(-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e)", "2403.00409",
                         "labels are wrong with probability e: unbiased", label_smoothing=0.1),
    "ipo": Preference(ipo, "(c - r - 1 / (2 beta))^2", "2310.12036 eq. 17",
                      "a finite target, so that clear pairs do not pull for ever; the mean as its authors advise",
                      reduce="mean"),
    "hinge": Preference(hinge, "max(0, 1 - h)", "2305.10425 (SLiC-HF), with a reference 2309.06657",
                        "a pair with enough margin has no gradient"),
    "simpo": Preference(simpo, "-log s(h - gamma)", "2405.14734 eq. 6", "no reference, no reward for length, a margin",
                        reference=False, reduce="mean", beta=2.0, label_smoothing=0.0, gamma=1.0),
    "orpo": Preference(orpo, "-beta log s(log odds(c) - log odds(r)) + nll", "2403.07691 eq. 6, 7",
                       "SFT and preference in one; no reference", reference=False, reduce="mean", nll=1.0),
    "cpo": Preference(dpo, "-log s(h) + nll", "2401.08417", "DPO under a uniform reference, held by SFT",
                      reference=False, label_smoothing=0.0, nll=1.0),
    "kto": Preference(kto, "(s(beta (z0 - c)) + s(beta (r - z0))) / 2", "2402.01306",
                      "good and bad answers, not pairs; z0 is the KL to the reference, of mismatched answers"),
    "apo_zero": Preference(apo_zero, "s(-beta c) + s(beta r)", "2408.06266",
                           "chosen up and rejected down: for answers better than the model's"),
    "apo_down": Preference(apo_down, "s(beta c) + s(-h)", "2408.06266",
                           "both down, rejected more: for answers worse than the model's"),
    "exo": Preference(exo, "s(h) (log s(h) - log(1 - e)) + s(-h) (log s(-h) - log e)", "2402.00856 eq. 16",
                      "the KL the other way round: seeks the mode", label_smoothing=1e-3),
    "nca": Preference(nca, "-log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2", "2402.05369",
                      "absolute rewards: the chosen answer does not fall along with the other"),
    "bco": Preference(bco, "-log s(beta c - delta) - log s(delta - beta r)", "2404.04656",
                      "a classifier of answers; delta is a running mean of rewards"),
    "sppo": Preference(sppo, "(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2", "2405.00675",
                       "a target for each answer, those of a certain preference"),
}


def preference_loss(kind: str, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor | None = None,
                    ref_rejected: Tensor | None = None, *, beta: float | None = None,
                    label_smoothing: float | None = None, gamma: float | None = None,
                    shift: Tensor | float = 0.0) -> Tensor:
    """The loss of each pair, (P,), unreduced: its mean over all pairs of an update is minimised. Gradient flows to
    `chosen` and `rejected` only.

    kind                     : a row of PREFERENCES
    chosen, rejected         : (P,) nats, of whole answers, from `sequence_logprobs` as the row's `reduce` says
    ref_chosen, ref_rejected : (P,) the same of the frozen reference; not looked at by a row without one
    beta, ...                : None: the row's own
    shift                    : kto's z0 or bco's delta, `Options`

    UserError: a kind that does not exist, a reference that is missing, an option without effect or out of range.
    """
    row, options = resolve(kind, beta, label_smoothing, gamma)
    if row.reference:
        if ref_chosen is None or ref_rejected is None:
            raise UserError(f"loss {kind!r} compares with a reference: pass ref_chosen and ref_rejected")
        chosen, rejected = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    return row.loss(chosen, rejected, options._replace(shift=shift))


def resolve(kind: str, beta: float | None = None, label_smoothing: float | None = None,
            gamma: float | None = None) -> tuple[Preference, Options]:
    """A row of the table, and its options where None is its own value. UserError as in `preference_loss`."""
    if kind not in PREFERENCES:
        nearest = get_close_matches(kind, PREFERENCES, n=1, cutoff=0.0)[0]
        raise UserError(f"preference loss {kind!r} does not exist, did you mean {nearest!r}? There are "
                        f"{', '.join(PREFERENCES)}")
    row = PREFERENCES[kind]
    for name, given in (("label_smoothing", label_smoothing), ("gamma", gamma)):
        if given and getattr(row, name) is None:
            able = [other for other, its in PREFERENCES.items() if getattr(its, name) is not None]
            raise UserError(f"{name} {given} has no effect on the loss {kind!r}: leave it out, or use one of "
                            f"{', '.join(able)}")
    beta, e, gamma = (own if given is None else given for given, own in
                      ((beta, row.beta), (label_smoothing, row.label_smoothing or 0.0), (gamma, row.gamma or 0.0)))
    if not 0 < beta < math.inf:
        raise UserError(f"beta is {beta}: it must be above 0, and finite")
    if not 0 <= e < 0.5 or (kind == "exo" and e == 0):
        raise UserError(f"label_smoothing is {e}: the share of wrong labels lies between 0 and 0.5, below 0.5" +
                        (", and for exo above 0, since it is divided by" if kind == "exo" else ""))
    if not 0 <= gamma < math.inf:
        raise UserError(f"gamma is {gamma}: it must be 0 or above, and finite")
    return row, Options(beta, e, gamma)


def objective(config: PreferenceOptions) -> tuple[Preference | None, Options | None, float]:
    """(row, its options, weight of the chosen answers' likelihood) that a config asks for; a reward model has none.

    UserError: an option that the loss does not have
    """
    if config.loss == "reward":
        if given := [name for name in ("label_smoothing", "gamma") if getattr(config, name)]:
            raise UserError(f"--{given[0].replace('_', '-')} has no effect on --loss reward: leave it out")
        return None, None, 0.0
    if config.margins:
        raise UserError(f"--margins is for --loss reward, not {config.loss}: leave it out")
    row, options = resolve(config.loss, config.beta, config.label_smoothing, config.gamma)
    row = row if config.logprobs == "auto" else row._replace(reduce=config.logprobs)
    return row, options, row.nll if config.nll_coef is None else config.nll_coef


@torch.no_grad()
def preference_stats(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor | None, ref_rejected: Tensor | None,
                     beta: float) -> dict[str, Tensor]:
    """What to log about P pairs: scalars, **sums** over them; divide by "rows". Log-probs (P,) as in `preference_loss`.

    row_reward_chosen, _rejected    implicit rewards, beta c and beta r: unitless
    row_margin                      their difference
    row_accuracy                    pairs with c > r, see `wins`: a policy that still is its reference has half of them
    row_logprob_chosen, _rejected   nats
    row_logratio_chosen, _rejected  c and r, nats; with a reference only
    """
    stats = {"rows": chosen.new_full((), len(chosen)),
             "row_logprob_chosen": chosen.sum(), "row_logprob_rejected": rejected.sum()}
    size = torch.maximum(chosen.abs(), rejected.abs())
    if ref_chosen is not None:
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
        stats |= {"row_logratio_chosen": chosen.sum(), "row_logratio_rejected": rejected.sum()}
    return stats | {"row_reward_chosen": beta * chosen.sum(), "row_reward_rejected": beta * rejected.sum(),
                    "row_margin": beta * (chosen - rejected).sum(), "row_accuracy": wins(chosen, rejected, size).sum()}


def wins(chosen: Tensor, rejected: Tensor, size: Tensor) -> Tensor:
    """1 where chosen (P,) is larger, 0 where rejected is, 0.5 for a tie: a guess. (P,) float64.

    size : of the numbers that the two are differences of. What lies within their rounding is a tie, or the accuracy of
           a policy that is its own reference would depend on how a batch was cut
    """
    tie = (chosen - rejected).abs() <= 64 * torch.finfo(chosen.dtype).eps * size
    return torch.where(tie, 0.5, (chosen > rejected).double())


# ---- the table of docs/preferences.md ----

def document() -> str:
    """PREFERENCES as Markdown."""
    lines = ["| `--loss` | minimised, a pair | reference | log-probs | `beta` | `label_smoothing` | paper | idea |",
             "|---|---|---|---|---|---|---|---|"]
    for name, row in PREFERENCES.items():
        smoothing = "" if row.label_smoothing is None else f"{row.label_smoothing:g}"
        lines.append(f"| `{name}` | `{row.formula}` | {'yes' if row.reference else 'no'} | {row.reduce} | {row.beta:g} "
                     f"| {smoothing} | {link(row.paper)} | {row.idea} |")
    return "\n".join(lines) + "\n"


def link(paper: str) -> str:
    return re.sub(r"(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", paper)


if __name__ == "__main__":
    print(document(), end="")
