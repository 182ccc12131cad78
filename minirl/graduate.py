"""Is a model ready for RL? Measures of its samples and of its training curve, and the checklist that they make.

RL makes likelier what the model already does now and then. So it needs answers that can be read, some of them right,
and samples that differ: where all samples of a prompt are one text, all advantages are 0. SFT has done its part when
its losses are flat, and has done too much of it when it knows its own rows better than others.

    python -m minirl.evaluate runs/sft --graduate

The thresholds are rules of thumb. Where few texts are right, as in addition, a good model must repeat itself: there
the two lines about diversity fail for the best of reasons, and say something only as long as accuracy leaves room.
"""

import math
import operator
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, takewhile
from typing import Any, NamedTuple

from minirl.rollout import Rollout

Sample = Sequence[int]  # the tokens that the policy chose, without the end of text
EVALUATIONS = 3  # over which a loss must be flat


# ---- samples ----

def sample_measures(rollout: Rollout, group_size: int, ends: Collection[int]) -> dict[str, float | str]:
    """The measures of a Rollout of samples, `group_size` to a prompt; a text says why one could not be taken.

    ends : the tokens that end an answer: end of text, and in a conversation the end of a turn
    """
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.tokens[:, 1:], rollout.action_mask)]
    chosen = [list(takewhile(lambda token: token not in ends, row)) for row in rows]
    groups = [chosen[start : start + group_size] for start in range(0, len(chosen), group_size)]
    ended = [end or len(said) < len(row) for end, said, row in zip(rollout.finished.tolist(), chosen, rows)]
    infos = [[step.info for step in turns] for turns in rollout.turns or [[]] * len(rollout)]
    return {
        "format": format_rate(ended, infos),
        "tool_format": tool_format_rate(infos),
        "unique_ratio": unique_ratio(groups),
        "pair_diversity": pair_diversity(groups),
    }


def unique_ratio(groups: Sequence[Sequence[Sample]]) -> float:
    """Different samples / samples of a prompt, mean over the prompts: from 1 / samples (all the same) to 1."""
    return mean([len(set(map(tuple, group))) / len(group) for group in groups])


def pair_diversity(groups: Sequence[Sequence[Sample]]) -> float:
    """1 - similarity, mean over the pairs of samples of a prompt, then over the prompts: from 0 (all the same) to 1."""
    return mean([mean([1 - similarity(a, b) for a, b in combinations(group, 2)]) for group in groups])


def similarity(a: Sample, b: Sample) -> float:
    """2 LCS(a, b) / (len(a) + len(b)): the share of both that they have in common, in order. 1 if both are empty."""
    return 2 * common_subsequence(a, b) / (len(a) + len(b)) if a or b else 1.0


def common_subsequence(a: Sample, b: Sample) -> int:
    """LCS: the length of the longest common subsequence.

    A row of the dynamic programme, one entry a token of `a`, grows by 0 or 1 from entry to entry. Where by 0 is kept
    in the bits of one integer, so that a row costs four operations (Hyyrö 2004, "Bit-parallel LCS-length computation
    revisited").
    """
    places: dict[int, int] = {}  # token -> the bits of its positions in a
    for position, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << position
    whole = (1 << len(a)) - 1
    flat = whole
    for token in b:
        here = flat & places.get(token, 0)
        flat = ((flat + here) | (flat - here)) & whole
    return len(a) - bin(flat).count("1")


def format_rate(ended: Sequence[bool], infos: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Share of the samples that ended and from which an answer can be read, right or wrong.

    infos : the `Step.info` of each sample's steps. Where a task says nothing of "format", the end alone counts
    """
    return mean([bool(end and (not steps or steps[-1].get("format", True))) for end, steps in zip(ended, infos)])


def tool_format_rate(infos: Sequence[Sequence[Mapping[str, Any]]]) -> float | str:
    """Share of the attempted tool calls that could be carried out; 0 where a task has tools and nobody calls one."""
    calls = [info["tool_call"] for steps in infos for info in steps if "tool_call" in info]
    attempted = [call for call in calls if call is not None]
    return mean(attempted or [0]) if calls else "no tools here"


# ---- curves ----

def loss_measures(history: Sequence[Mapping[str, float]]) -> dict[str, float | str]:
    """How much the losses still move, from the rows of metrics.jsonl."""
    held_out, training = losses(history)
    if not held_out:
        return dict.fromkeys(("eval_loss_range", "train_loss_range"), "no history")
    return {"eval_loss_range": last_range(held_out), "train_loss_range": last_range(training)}


def losses(history: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """Of each evaluation: its eval/loss, and the mean of the training loss since the one before it.

    The mean, because batches differ: the loss of a single step is noise.
    """
    held_out, training, since = [], [], []
    for row in history:
        since += [row["loss"]] if "loss" in row else []
        if "eval/loss" in row:
            held_out.append(row["eval/loss"])
            training.append(mean(since))
            since = []
    return held_out, training


def last_range(values: Sequence[float]) -> float:
    """Largest - smallest of the last EVALUATIONS values; NaN if there are fewer, or one is not finite."""
    last = values[-EVALUATIONS:]
    return max(last) - min(last) if len(last) == EVALUATIONS and all(map(math.isfinite, last)) else math.nan


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# ---- the checklist ----

class Check(NamedTuple):
    name: str
    measure: str  # its name among the measured values
    relation: Callable[[float, float], bool]  # NaN stands in none: it fails
    threshold: float | str  # a number, or the name of another measured value
    meaning: str
    remedy: str


SIGNS = {operator.le: "<=", operator.lt: "<", operator.ge: ">=", operator.gt: ">"}
UNDEFINED = f"not a number: fewer than {EVALUATIONS} evaluations (a smaller --eval-every), or a loss that is not finite"
REPEATS = ("samples repeat: fewer --epochs, an earlier checkpoint, rows that differ more. Where few texts are right "
           "and the accuracy is high, the model repeats what is right, and nothing is wrong")
CHECKS = [
    Check("validation loss flat", "eval_loss_range", operator.le, 0.01,
          f"range of the last {EVALUATIONS} eval/loss, nats a token",
          "falling: more --steps or --epochs. Rising: an earlier checkpoint (--patience), fewer --epochs"),
    Check("format", "format", operator.ge, 0.9, "samples that end, with an answer that can be read",
          "read the samples. No end: a larger --max-new-tokens, or rows that lack their end of text. No answer: rows "
          "in the format that the task reads, and a prompt as in those rows"),
    Check("tool-call format", "tool_format", operator.ge, 0.85, "attempted tool calls that could be carried out",
          "more rows with calls, in the syntax that the task reads. 0: nothing was called"),
    Check("accuracy above baseline", "accuracy", operator.gt, "baseline", "held-out problems solved, greedy",
          "SFT taught nothing that counts: compare prompt and answer of its rows with the task's; a higher --lr, more "
          "--steps, easier problems"),
    Check("unique samples", "unique_ratio", operator.ge, 0.5, "different samples / samples of a prompt", REPEATS),
    Check("pair diversity", "pair_diversity", operator.ge, 0.6, "1 - similarity of two samples of a prompt", REPEATS),
    Check("train-validation gap", "gap", operator.lt, 0.15, "eval/loss - loss of training rows, nats a token",
          "over-fitted: fewer --epochs, an earlier checkpoint (--patience), more rows, a smaller --lora-rank"),
    Check("training loss flat", "train_loss_range", operator.le, 0.01,
          "as above, of the mean training loss between them",
          "falling: more --steps or --epochs, an --lr that ends low. Up and down: a larger --eval-every or "
          "--batch-size against the noise, a lower --lr"),
]


class Result(NamedTuple):
    check: Check
    value: float | str  # a text says why it was not measured
    threshold: float
    passed: bool | None  # None: not measured


def checklist(measured: Mapping[str, float | str], checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Every check, in order. A measure that is a text, or absent, was not taken: it neither passes nor fails."""
    results = []
    for check in checks:
        value = measured.get(check.measure, "not measured")
        limit = measured[check.threshold] if check.threshold in measured else check.threshold
        passed = None if isinstance(value, str) else bool(check.relation(value, limit))
        results.append(Result(check, value, limit, passed))
    return results


def is_ready(results: Sequence[Result]) -> bool:
    """Nothing that was measured fails, and something was measured."""
    verdicts = {result.passed for result in results}
    return True in verdicts and False not in verdicts


def report(results: Sequence[Result]) -> str:
    """The checklist as text: verdict, value, threshold; under a line that fails, what to change."""
    lines = []
    for check, value, threshold, passed in results:
        mark = {True: "pass", False: "FAIL", None: "-"}[passed]
        sign = ("not " if passed is False else "") + SIGNS[check.relation]
        number = value if isinstance(value, str) else f"{value:.4g} {sign} {threshold:.3g}"
        lines.append(f"{mark:4}  {check.name:24} {number:22} {check.meaning}")
        if passed is False:
            remedy = UNDEFINED if math.isnan(value) else check.remedy
            lines += ["      " + line for line in textwrap.wrap(remedy, 104, break_on_hyphens=False)]
    failed, skipped = (sum(result.passed is state for result in results) for state in (False, None))
    verdict = "ready for RL" if is_ready(results) else f"not ready: {failed} of {len(results) - skipped} lines fail"
    return "\n".join([*lines, verdict + (f" ({skipped} not measured)" if skipped else "")])
