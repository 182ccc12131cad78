"""Every number that a run reports: what it means, how it is logged, and when it deserves a hint.

A run folder holds `metrics.jsonl`, one JSON object a step, and the console shows one line of it. Names are
CleanRL's where CleanRL has one; `eval/NAME` is measured on held-out problems and `time/NAME` on the clock, so
that two runs of one seed are equal in everything outside `time/`.

METRICS is the one place where a metric is defined: the console takes its format from it, `docs/metrics.md`
is printed from it (`python -m minirl.metrics > docs/metrics.md`). HINTS are its healthy ranges as code.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minirl.config import UserError, write_text
from minirl.monitor import gamed


class Metric(NamedTuple):
    name: str          # in metrics.jsonl
    label: str         # at the head of its column on the console
    format: str        # of a number in that column
    unit: str
    meaning: str
    healthy: str
    bad: str           # what a value outside the healthy range means
    remedy: str


METRICS = {
    "Reward": [
        Metric("reward_mean", "reward", ".3f", "reward", "mean reward of the samples of this step",
               "rises, with noise of about reward_std / sqrt(samples)",
               "flat: nothing is learned. Up while eval/accuracy is not: the reward is being gamed",
               "`docs/troubleshooting.md`; read the samples"),
        Metric("reward_std", "std", ".3f", "reward", "standard deviation of the same rewards",
               "above 0; falls as the task is solved",
               "0: all samples score alike, every advantage is 0, and nothing moves the policy (where a recipe keeps "
               "such groups, its KL term does)",
               "easier problems or a longer `--cold-start-steps` if reward_mean is low, harder ones if high"),
        Metric("zero_variance_groups", "flat", ".2f", "share", "groups whose samples all got the same reward",
               "below 0.8", "near 1: almost no prompt teaches anything",
               "a larger `--group-size`, or problems solved in 20 to 80 % of the tries"),
    ],
    "Policy and update": [
        Metric("approx_kl", "kl_old", ".1e", "nats a token",
               "KL(old policy || current policy), estimated as mean of ratio - 1 - log ratio",
               "below 0.02; 0 with one update a rollout",
               "above 0.02: the updates leave the region in which the old samples are valid",
               "a lower `--lr`, fewer `--epochs`"),
        Metric("old_approx_kl", "kl_k1", ".1e", "nats a token", "the same, estimated as mean of - log ratio",
               "near approx_kl; may be below 0", "", ""),
        Metric("clip_frac", "clip", ".3f", "share", "action tokens whose ratio was clipped",
               "0.1 to 0.3 with several updates a rollout; 0 with one, where the ratio is 1",
               "below 0.1: timid updates. Above 0.3: many tokens have no gradient left. Above 0.5: the old "
               "samples no longer describe the policy",
               "low: more `--epochs` or `--lr`, if the reward is slow. High: less of them"),
        Metric("kl_ref", "kl_ref", ".3f", "nats a response",
               "KL(policy || reference), summed over each response's action tokens, mean over responses",
               "rises slowly, below 10",
               "rising past 10 to 15: the policy forgets the reference; expect odd text and gamed rewards",
               "a higher `--kl-coef`, a lower `--lr`, or stop earlier"),
        Metric("entropy", "entropy", ".3f", "nats a token", "mean entropy of the policy at the action tokens",
               "falls slowly; ends low only when the task is solved",
               "near 0 while the reward is not at its best: collapse, all samples of a group are the same",
               "a lower `--lr`, a higher `--eps-high`, a higher `--temperature`"),
        Metric("ratio_max_deviation", "ratio-1", ".1e", "unitless",
               "largest |ratio - 1| in the first pass over a fresh rollout, where the policy has not moved",
               "rounding, see below: in float32 2e-6 with fresh weights, about 1e-5 in a trained policy, 1e-4 in a "
               "rare step; 1e-12 in float64, about 1e-2 in bfloat16",
               "above 1e-3 in float32: sampler and trainer disagree about the policy: temperature, mask, positions, "
               "weights",
               "a bug in the code, not a setting: with `--dtype float64` it stays; compare both log-probs of one row, "
               "token by token"),
    ],
    "PPO: critic, reward model, KL": [
        Metric("explained_variance", "expl_var", ".3f", "share",
               "1 - var(returns - values) / var(returns) at the action tokens, values from before the updates: 1 is a "
               "perfect critic, 0 one that says the same of every state",
               "rises above 0.5. With `--value-lam` below 1 the returns hold some of the values themselves",
               "near 0: advantages are as noisy as without a critic. Below 0: worse than that",
               "a higher `--critic-lr`, `--value-pretraining`, `--value-lam 1`, `--critic-init`"),
        Metric("value_loss", "v_loss", ".4f", "reward^2", "mean of half the squared error of the critic",
               "falls; its floor is half the variance that no critic can know", "rises: the returns drift, or its "
               "learning rate is too high", "a lower `--critic-lr`"),
        Metric("value_clip_frac", "v_clip", ".3f", "share", "tokens whose value moved more than `--value-clip`",
               "below 0.2", "near 1: the critic is held back", "a larger `--value-clip`, or 0"),
        Metric("critic_grad_norm", "v_grad", ".3f", "unitless", "grad_norm of a critic with its own network", "as "
               "grad_norm", "", ""),
        Metric("policy_loss", "p_loss", ".4f", "unitless", "the clipped surrogate alone, where the loss has more terms",
               "near 0, says nothing about progress", "", ""),
        Metric("score_mean", "score", ".3f", "score", "mean score of the samples by the reward model; reward_mean is "
               "what the verifier says of the same samples, and pays nothing then",
               "rises with reward_mean", "rises while reward_mean falls: over-optimisation, see `docs/ppo.md`",
               "the checkpoint from before; a higher `--kl-coef`; `--reward-model-every`"),
        Metric("kl_coef", "kl_coef", ".1e", "reward / nat", "price of the distance from the reference in this step",
               "steady, or settling under a controller", "", ""),
        Metric("updates", "updates", ".0f", "updates", "policy updates of this step",
               "`--epochs` x `--minibatches`; less where `--target-kl` stopped it", "", ""),
    ],
    "Preferences": [
        Metric("preference_accuracy", "pref", ".3f", "share",
               "pairs of this step whose chosen answer has the higher reward; equal ones count half",
               "rises from 0.5", "1 while eval/preference_accuracy stays behind: the pairs are learnt by heart",
               "more pairs, fewer `--epochs`, a smaller `--lr`; a loss for wrong labels, `docs/preferences.md`"),
        Metric("reward_margin", "margin", ".3f", "unitless",
               "reward_chosen - reward_rejected, mean over pairs", "rises, then levels off",
               "grows for ever: the pairs are certain and still pull", "a larger `--beta`, `--loss ipo`"),
        Metric("reward_chosen", "chosen", ".3f", "unitless",
               "beta x logratio_chosen (without a reference: x logprob_chosen); of a reward model its score",
               "0 or above", "falls: see logprob_chosen", ""),
        Metric("reward_rejected", "rejected", ".3f", "unitless", "the same of the rejected answers", "falls", "", ""),
        Metric("logprob_chosen", "lp chosen", ".2f", "nats an answer",
               "log-prob of the chosen answers (a mean over their tokens where the loss takes means)",
               "stays or rises", "falls with logprob_rejected: both answers lose probability to something else",
               "`--nll-coef 1`, a larger `--beta`, a smaller `--lr`, `--loss nca` or `apo_zero`"),
        Metric("logprob_rejected", "lp rejected", ".2f", "nats an answer", "the same of the rejected answers",
               "falls", "", ""),
        Metric("logratio_chosen", "c", ".2f", "nats an answer",
               "log(policy / reference) of the chosen answers", "near 0 or above", "below -2: as logprob_chosen", ""),
        Metric("logratio_rejected", "r", ".2f", "nats an answer", "the same of the rejected answers", "falls", "", ""),
    ],
    "Responses": [
        Metric("response_length", "length", ".1f", "tokens", "mean number of action tokens of a response",
               "what the task needs", "grows without reward: padding is rewarded. Shrinks to 1: collapse",
               "check the reward for length; choose another `--aggregate`"),
        Metric("truncated", "cut", ".2f", "share", "responses that ran out of tokens before they ended",
               "below 0.1", "near 1: the policy never ends its answer, so hardly any can be right",
               "a longer `--cold-start-steps` or `--max-new-tokens`; check that training rows end with EOS"),
    ],
    "Every trainer": [
        Metric("loss", "loss", ".4f", "nats a token",
               "SFT: mean negative log-likelihood of the target tokens. RL: the surrogate, see below",
               "SFT: falls. RL: near 0, says nothing about progress", "NaN: the step is skipped",
               "`docs/troubleshooting.md`"),
        Metric("grad_norm", "grad", ".3f", "unitless", "norm of the whole gradient before clipping",
               "steady, within a factor of 10", "spikes: a lone bad batch. Grows for long: about to diverge",
               "a lower `--lr`; clipping absorbs lone spikes"),
        Metric("lr", "lr", ".1e", "unitless", "learning rate of this update", "warm-up, then a fall", "", ""),
        Metric("skipped_steps", "skipped", ".0f", "updates",
               "updates skipped so far: loss or gradient not finite", "0",
               "grows: the numbers overflow. 10 in a row end the run", "a lower `--lr`; `--dtype float32`"),
        Metric("tokens", "tokens", ".0f", "tokens", "tokens of this step, over all ranks", "", "", ""),
    ],
    "Evaluation": [
        Metric("eval/accuracy", "eval", ".3f", "share",
               "held-out problems solved by greedy decoding (pass@1)",
               "rises with reward_mean", "falls while reward_mean rises: overfitting or a gamed reward",
               "a checkpoint from before the fall; a stricter reward"),
        Metric("eval/loss", "eval loss", ".4f", "nats a token", "SFT: the loss of rows that are never trained on",
               "falls with loss, then levels off", "rises while loss falls: over-fitting",
               "the checkpoint where it is lowest, fewer `--epochs`; `docs/sft.md`"),
        Metric("eval/preference_accuracy", "eval pref", ".3f", "share", "preference_accuracy on held-out pairs",
               "rises; each other number of Preferences has its `eval/` too", "levels off while the step's rises",
               "as preference_accuracy"),
        Metric("eval/kl_ref", "eval kl", ".2f", "nats an answer",
               "DPO: KL(policy || reference) on answers that the policy samples to held-out problems",
               "rises slowly, below 10", "as kl_ref", "a larger `--beta`, a lower `--lr`"),
        Metric("eval/response_length", "eval len", ".1f", "tokens", "mean length of those answers",
               "as response_length", "", ""),
    ],
    "Time": [
        Metric("time/tokens_per_second", "tok/s", ".0f", "tokens/s",
               "tokens of the step / its whole duration", "steady",
               "drifts down: longer responses, or another program on the machine",
               "response_length; `top`"),
    ],
}
BY_NAME = {metric.name: metric for section in METRICS.values() for metric in section}
SPEED = "time/tokens_per_second"
HEADER_EVERY = 25      # lines of the console


# --- hints ---------------------------------------------------------------------------------------------

class Hint(NamedTuple):
    metric: str
    inside: Callable[[Mapping[str, float]], bool]    # is this step in the region? All metrics it reads exist
    needs: tuple[str, ...]                           # metrics read besides `metric`
    text: str


# Order matters only for printing. With one update a rollout the ratio is 1, so that clip_frac 0 is right and
# nothing to remark on; and who moves far (approx_kl) is not timid, however few tokens are clipped. A schedule's
# last updates are meant to be small.
TIMID = 1e-4, 5e-3
HINTS = [
    Hint("reward_std", lambda m: m["reward_std"] == 0, (),
         "every sample scored the same, so there is nothing to learn from. Too hard or too easy, or answers "
         "that are not parsed: read the samples"),
    Hint("zero_variance_groups", lambda m: m["zero_variance_groups"] > 0.9 and m["reward_std"] > 0,
         ("reward_std",), "hardly any group has a right and a wrong answer. Raise --group-size, or choose "
         "problems that are neither solved always nor never"),
    Hint("approx_kl", lambda m: m["approx_kl"] > 0.02, (),
         "above 0.02 the old samples no longer describe the policy. Lower --lr or --epochs"),
    Hint("clip_frac", lambda m: m["clip_frac"] > 0.5, (),
         "more than half of the tokens are clipped. Lower --lr or --epochs"),
    Hint("clip_frac", lambda m: 0.3 < m["clip_frac"] <= 0.5, (),
         "above 0.3: many tokens have no gradient left. A lower --lr or fewer --epochs may learn faster"),
    Hint("clip_frac", lambda m: m["clip_frac"] < 0.1 and TIMID[0] < m["approx_kl"] < TIMID[1]
         and m["reward_std"] > 0, ("approx_kl", "reward_std"),
         "below 0.1: the updates are timid. If the reward is slow, raise --lr or --epochs"),
    Hint("kl_ref", lambda m: m["kl_ref"] > 10, (),
         "past 10 to 15 nats the policy forgets its reference. Raise --kl-coef, lower --lr, or stop here"),
    Hint("entropy", lambda m: m["entropy"] < 0.02 and m["reward_mean"] < 0.9, ("reward_mean",),
         "collapsed before the task was solved: the samples of a group are alike. Lower --lr, raise "
         "--eps-high or --temperature"),
    Hint("explained_variance", lambda m: m["explained_variance"] < -0.2, (),
         "the critic is worse than a constant, and its advantages are noise. Give it time (--value-pretraining), or "
         "another --critic-lr"),
    Hint("truncated", lambda m: m["truncated"] > 0.5, (),
         "most answers run out of tokens. Raise --max-new-tokens, or teach the model to end by more "
         "--cold-start-steps"),
    Hint("ratio_max_deviation", lambda m: m["ratio_max_deviation"] > 0.05, (),
         "sampler and trainer disagree about the policy; in float32 this should be below 1e-5. A bug"),
    Hint("logratio_chosen", lambda m: m["logratio_chosen"] < -2, (),
         "the chosen answers lose probability as well, to answers that nobody has judged. Add --nll-coef 1, raise "
         "--beta, or lower --lr"),
    Hint("grad_norm", lambda m: not math.isfinite(m["grad_norm"]), (),
         "the gradient is not finite, the update was skipped. If it stays so: lower --lr, --dtype float32"),
]
HINT_WINDOW = 20       # steps for which a hint, once given, is not repeated


def hints(metrics: Mapping[str, float], history: Sequence[Mapping[str, float]] = ()) -> list[str]:
    """One line for each unhealthy region that this step enters; `history` is the steps before, in order.

    A region is entered when this step is inside and none of the last HINT_WINDOW steps was: a run that stays
    there, or hovers at the border, is told once.
    """
    def inside(hint: Hint, step: Mapping[str, float]) -> bool:
        return all(name in step for name in (hint.metric, *hint.needs)) and hint.inside(step)

    given = [f"hint: {hint.metric} {metrics[hint.metric]:.3g}: {hint.text}." for hint in HINTS
             if inside(hint, metrics) and not any(inside(hint, old) for old in history[-HINT_WINDOW:])]
    if gamed([*history, metrics]):
        given.append(f"hint: reward_mean {metrics['reward_mean']:.3g} has risen, and eval/accuracy has not: the reward "
                     "may be gamed. Read the samples at both ends, in the run's folder samples.")
    return given


# --- the file and the console --------------------------------------------------------------------------

def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl. A last line cut off by a kill is left out; null reads as NaN."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line or "null")
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and "step" in row:
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
        elif number < len(lines):    # the last one has no newline: it is empty, or its write was cut
            raise UserError(f'{path}:{number} is not an object with a "step": {line[:40]!r}; delete the line')
    return rows


def json_line(row: Mapping[str, Any]) -> str:
    """One strict JSON object; NaN and infinity, for which JSON has no word, become null."""
    clean = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    clean = {name: value if math.isfinite(value) else None for name, value in clean.items()}
    return json.dumps(clean, allow_nan=False) + "\n"


class MetricsLogger:
    """Writes metrics.jsonl, prints the line of each step and the hints.

    columns     : names shown on the console, in order, before tokens/s and the time left; a name that is not
                  in METRICS gets a general format
    total_steps : of the whole run, for the time left
    resume_step : completed steps of the checkpoint. Later lines of metrics.jsonl are dropped, since those
                  steps are run again. 0 is a new run with a new file
    print_every : steps between lines on the console; the file gets every step
    expected    : metrics that this run puts out of their healthy range on purpose: no hint about them
    enabled     : False on every rank but the first: nothing is read, written or printed
    """

    def __init__(self, run_dir: str | Path, columns: Sequence[str], total_steps: int, resume_step: int = 0,
                 enabled: bool = True, print_every: int = 1, expected: Sequence[str] = ()):
        self.path = Path(run_dir) / "metrics.jsonl"
        self.columns = [BY_NAME.get(name, Metric(name, name, ".4g", *[""] * 5)) for name in (*columns, SPEED)]
        self.total_steps, self.resume_step, self.enabled = total_steps, resume_step, enabled
        self.print_every, self.expected = print_every, expected
        self.history: list[Mapping[str, float]] = []
        self.started = time.perf_counter()
        self.lines_printed = 0
        if enabled:
            self._rewind()

    def _rewind(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(self.path) if self.resume_step and self.path.exists() else []
        rows = [row for row in rows if row["step"] <= self.resume_step]
        self.history.extend(rows)              # a resumed run gives the hints that an unbroken one would
        write_text(self.path, "".join(json_line(row) for row in rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends {"step": step, **metrics} to the file and prints it; `step` counts completed steps.

        Values are numbers or scalar tensors. Evaluation before training is step 0.
        """
        if not self.enabled:
            return
        metrics = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:      # closed, hence flushed, after every line
            file.write(json_line({"step": step, **metrics}))
        if step % self.print_every == 0 or step == self.total_steps:
            self._print(step, metrics)
        judged = {name: value for name, value in metrics.items() if name not in self.expected}
        for hint in hints(judged, self.history):
            print(hint, flush=True)
        self.history.append(metrics)

    def _print(self, step: int, metrics: Mapping[str, float]) -> None:
        total = str(self.total_steps)
        if self.lines_printed % HEADER_EVERY == 0:
            self._print_row(f"{'step':>{len(total) * 2 + 1}}", [c.label for c in self.columns], "left")
        self.lines_printed += 1
        cells = [f"{metrics[c.name]:{c.format}}" if c.name in metrics else "" for c in self.columns]
        done, elapsed = step - self.resume_step, time.perf_counter() - self.started
        left = duration(elapsed / done * (self.total_steps - step)) if done > 0 else ""
        self._print_row(f"{step:>{len(total)}}/{total}", cells, left)

    def _print_row(self, step: str, cells: Sequence[str], left: str) -> None:
        widths = [max(8, len(c.label)) for c in self.columns]
        print(step, *(f"{cell:>{width}}" for cell, width in zip(cells, widths)), f"{left:>7}", flush=True)


def duration(seconds: float) -> str:
    """A time a person can read: 48s, 3m20s or 2h05m."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text: ▁▂▃▄▅▆▇█ from the smallest to the largest value, a blank for NaN.

    More than `width` values are averaged in neighbouring bins of (almost) equal size.
    """
    bins = min(width, len(values))
    edges = [i * len(values) // bins for i in range(bins + 1)] if bins else [0]
    means = []
    for start, stop in itertools.pairwise(edges):
        finite = [float(v) for v in values[start:stop] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    finite = [v for v in means if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = 7.999 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[int((v - low) * scale)] if math.isfinite(v) else " " for v in means)


# --- docs/metrics.md -----------------------------------------------------------------------------------

PREFACE = """# Metrics

Printed by `python -m minirl.metrics > docs/metrics.md`; its text stands in `minirl/metrics.py`.

`metrics.jsonl` in the run folder has one object a step with all of these. The console shows some of
them, under the short names of `column`, and a `hint:` line when a run enters an unhealthy region.
Draw them with `python -m minirl.plot runs/NAME`.

What is said of policy and update is a mean over the rows that were trained on. In GRPO, unless `--recipe` names a row
that keeps them all, these are the rows of groups whose rewards differ (`mask_constant`).
"""

AFTERWORD = """
## What healthy curves look like

`reward_mean` is noisy and rises, fast at first; `eval/accuracy` follows it with little noise. `entropy`
falls slowly all along. `kl_ref` grows roughly with the distance learnt and then levels off.
`response_length` may move either way, but not without the reward. `loss` looks like noise around 0.

## Why is GRPO's loss 0, or rising?

Because its value measures nothing. On the first pass over a rollout the ratio is 1, so the loss of a
token is minus its advantage, and advantages of a group add up to 0. The *gradient* is not 0: that of
ratio x advantage is advantage x grad log-prob, which raises the good samples and lowers the bad ones.
Take one group with advantages +1 and -1 and responses of 2 and 4 tokens:

| reduction | loss | gradient |
|---|---|---|
| `sequence`: mean of each response, then of those (GRPO, arXiv:2402.03300 eq. 3) | (-1 + 1) / 2 = 0 | not 0 |
| `token`: mean of all tokens (DAPO, arXiv:2503.14476 sec. 3.1) | (-2 + 4) / 6 = 0.3333 | not 0 |

So a loss of exactly 0 is right, and so is one above 0 that rises: longer wrong answers weigh more. With
`--kl-coef` above 0 the KL term is added, which starts at 0 and grows as the policy leaves its reference.
Judge a run by `reward_mean` and `eval/accuracy`. In SFT the loss does mean something, and should fall.

## Why is the first ratio not exactly 1?

The sampler reads one token at a time from its cache, the trainer whole rows: the same sums in another order. Each
is off by some roundings of its own, and so is their difference. On `lookup`, 32 prompts x 16 rows:

| policy | dtype | largest logit | largest \\|ratio - 1\\| | in roundings of that logit |
|---|---|---|---|---|
| fresh weights | float32 | 2.4 | 1.9e-6 | 13 |
| after the cold start | float32 | 15 | 8.5e-6 | 9.5 |
| trained | float32 | 15 | 9.4e-6 | 10 |
| fresh weights | float64 | 2.4 | 3.6e-15 | 13 |
| after the cold start | float64 | 15 | 9.8e-15 | 6 |
| trained | float64 | 15 | 6.9e-15 | 4 |

(One rounding is 2^-24 or 2^-53 of the logit; float64 with 4 prompts.) So it is rounding, about ten times that of the
largest logit. Over the steps of a run the largest is larger: on `lookup` the median step has 8e-6 and the worst of
20 has 3e-5, on `addition` 1e-5 and the worst of 111 has 1.2e-4. No single operation is to blame. With all else in
float32, queries, keys and scores in float64 take a third of the error away, the MLP a quarter, the head and the
softmax nothing that is seen; only all of them in float64 bring it below 1e-6. It is no bias: its mean over tokens is
below 1e-8.

Who wants the first ratio to be 1 asks the trainer for the old log-probs as well, for a forward pass a step: with
`--old-logprobs trainer` the largest \\|ratio - 1\\| in four steps of trained policies is 3.9e-6 on `addition`,
9.5e-7 on `code` and 1.7e-6 on `shop`, where the sampler's own give 1.3e-5, 1.1e-5 and 9.4e-6.

## Which KL is which?

Two different pairs of policies, both from the log-probs of the sampled tokens. `approx_kl` compares the
policy that sampled with the one being trained, and says whether this update goes too far; it is never a
loss. `kl_ref` compares the policy with the frozen reference, and says how far the whole run has gone; it
is what `--kl-coef` weighs. With r = log(reference / policy), the estimators
(http://joschu.net/blog/kl-approx.html) are

| | value | as a loss term |
|---|---|---|
| k1 | -r: unbiased, can be negative | useless: its expected gradient on policy is 0 |
| k2 | r^2 / 2: biased, low variance | the gradient of KL(policy to reference) |
| k3 | exp(r) - r - 1: unbiased, never negative | the gradient of KL(reference to policy); GRPO's choice |
"""


def document() -> str:
    """The text of docs/metrics.md."""
    lines = [PREFACE]
    for section, metrics in METRICS.items():
        lines += [f"## {section}", "", "| metric | column | unit | meaning | healthy | otherwise | remedy |",
                  "|---|---|---|---|---|---|---|"]
        for m in metrics:
            cells = (f"`{m.name}`", m.label, m.unit, m.meaning, m.healthy, m.bad, m.remedy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + AFTERWORD


if __name__ == "__main__":
    print(document(), end="")
