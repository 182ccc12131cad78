"""DEER: stop thinking once the answer is sure. Dynamic early exit, arXiv:2504.15895; at decoding time, no training.

    python -m minirl.early_exit runs/r1/final --threshold 0.95

A thinker reaches its answer and looks again, and again. At a word that begins another look ("wait") the thought is
closed on trial and the answer asked for:

    <think>7+8=15 15+5=20 20+9=29 | wait ...
                                  | </think><answer> 29</answer>        trial, greedy; how sure is each token?

If the mean probability of the trial's tokens is above the threshold, and the trial came to its end, it is the answer.
Else the word is written after all and thinking goes on. Each trial costs one pass over the row so far and a few tokens;
the main row is read once more as well when it goes on, for its cache is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minirl.adapters import open_policy, tokenizer_folder
from minirl.config import UserError, check_positive, read_json, run
from minirl.env import make_env
from minirl.env.loop import fit_to_context, prompt_tokens
from minirl.env.thought import WAIT
from minirl.evaluate import locate
from minirl.generate import generate
from minirl.logprobs import rollout_logprobs
from minirl.losses import row_sum
from minirl.model import Transformer
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.tokenizer import Tokenizer, load_tokenizer

Mean = Literal["arithmetic", "geometric"]


class Thoughts(NamedTuple):
    """What came of each prompt."""

    texts: list[str]
    tokens: list[int]  # in the row behind the prompt
    trials: list[int]  # tokens spent on trials that were thrown away
    exited: list[bool]  # left at a trial


def confidence(logprobs: Tensor, mask: Tensor, mean: Mean = "arithmetic") -> Tensor:
    """(B,): mean probability of the chosen tokens of a trial; logprobs, mask (B, S), nats of greedy tokens.

    arithmetic : their code's avg1; geometric : avg2, exp of the mean log-prob, which one doubtful token pulls down more
    Their code leaves the first token of a trial out. Here that is the answer's own, for `trial` is given: it counts.
    """
    tokens = mask.sum(1).clamp(min=1)
    if mean == "geometric":
        return (row_sum(logprobs, mask) / tokens).exp()
    return row_sum(logprobs.exp(), mask) / tokens


def think(policy: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
          threshold: float = 0.95, mean: Mean = "arithmetic", wait: str = WAIT, trial: str = "</think><answer>",
          end: str = "</answer>", trial_tokens: int = 20, temperature: float = 0.0, seed: int = 0) -> Thoughts:
    """Answer every prompt, leaving early where a trial is sure.

    prompts      : token ids
    threshold    : of `confidence`; from 1 on nobody is asked, and the rows are those of `generate` with temperature 0
    wait         : the word at which to try; it is taken back for the trial
    trial, end   : what closes the thought and opens the answer, and what closes that
    trial_tokens : longest answer on trial
    """
    if not wait or not trial or not end:
        raise UserError("early exit needs a word to stop at, a text that asks for the answer, and one that ends it")
    rows = [list(prompt) for prompt in prompts]
    starts, spent, exited = [len(row) for row in rows], [0] * len(rows), [False] * len(rows)
    ask = tokenizer.encode(trial, continued=True)
    going = list(range(len(rows)))
    while going:
        rollout = generate(policy, [rows[i] for i in going], tokenizer, max_new_tokens=max_new_tokens, stop=[wait],
                           temperature=temperature, seed=seed)
        waiting = []
        for i, tokens, length, before in zip(going, rollout.tokens.tolist(), rollout.lengths.tolist(),
                                             [len(rows[i]) for i in going], strict=True):
            said = tokens[before : min(length, starts[i] + max_new_tokens)]
            rows[i] += said
            paused = tokenizer.decode(said, continued=True).endswith(wait)
            if paused and len(rows[i]) < min(starts[i] + max_new_tokens, policy.config.context - 1):
                waiting.append(i)
        cut = {i: without(rows[i], starts[i], wait, tokenizer) for i in waiting}
        tried = [i for i in waiting if threshold < 1 and len(cut[i]) + len(ask) < policy.config.context]
        if tried:
            tapes = [cut[i] + ask for i in tried]
            trials = generate(policy, tapes, tokenizer, max_new_tokens=trial_tokens, stop=[end], temperature=0.0)
            logprobs = rollout_logprobs(policy, trials, len(tried))  # greedy log-probs are 0 in the sampler
            sure = (confidence(logprobs, trials.action_mask, mean) > threshold) & trials.finished
            for i, leaves, tokens, length in zip(tried, sure.tolist(), trials.tokens.tolist(), trials.lengths.tolist(),
                                                 strict=True):
                if leaves:
                    rows[i], exited[i] = tokens[:length], True
                else:
                    spent[i] += length - len(cut[i])
        going = [i for i in waiting if not exited[i]]
    texts = [tokenizer.decode(row[start:], continued=True) for row, start in zip(rows, starts, strict=True)]
    return Thoughts(texts, [len(row) - start for row, start in zip(rows, starts, strict=True)], spent, exited)


def without(row: list[int], start: int, wait: str, tokenizer: Tokenizer) -> list[int]:
    """The row up to the word: tokens off its end until the text behind `start` has it no more at its end."""
    kept = len(row)
    whole = tokenizer.decode(row[start:], continued=True)
    while kept > start and len(tokenizer.decode(row[start:kept], continued=True)) > len(whole) - len(wait):
        kept -= 1
    return row[:kept]


@dataclass(frozen=True)
class Config:
    folder: str  # a run on --task thought, or one step_N of it
    threshold: float = 0.95  # leave where the trial is surer than this; above 1: never
    mean: Mean = "arithmetic"  # of the probabilities of the trial's tokens
    problems: int = 500  # held-out problems
    temperature: float = 0.0  # of the thought
    seed: int = 0  # of the samples
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it

    def __post_init__(self):
        check_positive(self, "problems", "threshold")


def main(config: Config) -> None:
    """Accuracy and tokens on held-out problems, without early exit and with it."""
    run_dir, folder = locate(config.folder)
    saved = read_json(run_dir / "config.json") if run_dir else {}
    device = pick_device(config.device)
    policy = open_policy(folder, pick_dtype(config.dtype, device), device, saved.get("qlora", False))
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    env = fit_to_context(make_env("thought", difficulty=saved.get("difficulty", 2), seed=saved.get("seed", 0)),
                         tokenizer, policy.config.context)
    examples = env.sample(config.problems, split="eval")
    prompts = [prompt_tokens(tokenizer, example.prompt) for example in examples]
    print(f"{'threshold':>9} {'accuracy':>9} {'tokens':>7} {'trials':>7} {'left early':>11}")
    for threshold in (2.0, config.threshold):
        found = think(policy, tokenizer, prompts, max_new_tokens=env.max_new_tokens, threshold=threshold,
                      mean=config.mean, temperature=config.temperature, seed=config.seed)
        right = [env.reset(example).step(text).reward
                 for example, text in zip(examples, found.texts, strict=True)]
        tokens, trials, left = (torch.tensor(x, dtype=torch.float64).mean().item() for x in found[1:])
        name = "never" if threshold > 1 else f"{threshold:g}"
        print(f"{name:>9} {sum(right) / len(right):9.3f} {tokens:7.1f} {trials:7.1f} {left:11.3f}")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
