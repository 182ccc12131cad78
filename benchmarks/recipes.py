"""Every recipe on one toy task: how fast, how well, how diverse. `python benchmarks/recipes.py`, then with `--table`.

    ac=..41        each of eight letters has a digit, to be told in turn, behind as many dots as one likes

The novice of the cold start says each digit right half of the time, so one answer in four is right, and it is sure of
nothing. A model of one layer, one cold start a seed that all recipes share, and the same number of steps, rows and
learning rate for all: nothing is tuned for a recipe. "0.9" is of the samples of five steps. The problems are those that
are trained on, so this is about optimisation and not about generalisation. A stopped run goes on where it was.
"""

import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the trainers are scripts, not installed

from claims import DIGITS, LETTERS, Task, interval, novice

import train_grpo
from minirl.checkpoint import load_model, save_model
from minirl.config import run
from minirl.env.base import Env, Example, counter_random
from minirl.env.loop import collect
from minirl.env.posing import TwoWordings
from minirl.metrics import read_metrics
from minirl.recipes import RECIPES
from minirl.tokenizer import ByteTokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    # benchmark
    out: str = "runs/recipes"  # folder of the runs, and of results.jsonl
    seeds: int = 5  # of everything: weights, problems, samples
    steps: int = 80  # rollouts of 16 prompts x 8 answers, two updates each
    recipes: str = ""  # names with commas; empty: all
    flags: str = ""  # for all of them, such as "staleness=4 old_logprobs=trainer"; they belong to the name in the table
    table: bool = False  # print what there is, as Markdown, and run nothing


def main(config: Config) -> None:
    results = Path(config.out) / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    if config.table:
        return print_table(done)
    torch.set_num_threads(1)
    train_grpo.pose = pose  # the trainer as it is, on a task of ours
    flags = dict(pair.split("=") for pair in config.flags.split())
    for seed in range(config.seeds):
        start = cold_start(Path(config.out) / f"cold_{seed}", seed)
        for recipe in config.recipes.split(",") if config.recipes else RECIPES:
            name = " ".join([recipe, *(f"{key}={value}" for key, value in flags.items())])
            if not any((row["recipe"], row["seed"]) == (name, seed) for row in done):
                row = {"recipe": name, "seed": seed, **measure(config, recipe, name, flags, start, seed)}
                print(row, flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")


class Letters(Task):
    """Two letters of eight, large or small, each with its digit of `seed`; right are the two digits, behind any number
    of dots."""

    name, max_new_tokens, sft_steps = "letters", 7, 80

    def make(self, rng: Random) -> Example:
        letters = rng.choices(LETTERS[:8], k=2)
        digits = [counter_random(self.seed, "digit", ord(letter)).choice(DIGITS) for letter in letters]
        said = [digit if rng.random() < 0.5 else rng.choice(DIGITS) for digit in digits]
        text = "".join(letters) + "="
        return Example(rng.choice((text, text.upper())), "".join(digits), ("." * rng.randrange(4) + "".join(said),))

    def right(self, example: Example, action: str) -> bool:
        return action.lstrip(".") == example.answer

    def rephrase(self, example: Example) -> Example:
        return Example(example.prompt.swapcase(), example.answer)


def pose(config: train_grpo.Config) -> Env:
    """What the trainer asks for its task."""
    env = Letters(config.seed)
    return TwoWordings(env) if config.labels == "co-rewarding" else env


def cold_start(folder: Path, seed: int) -> Path:
    """The novice of a seed."""
    if not folder.is_dir():
        save_model(novice(Letters(seed)), folder, ByteTokenizer())
    return folder


def measure(config: Config, recipe: str, name: str, flags: dict[str, str], start: Path, seed: int) -> dict:
    hints = {"staleness": int, "sampler_noise": float, "epochs": int, "minibatches": int, "lr": float}
    options = {key: hints.get(key, str)(value) for key, value in flags.items()}
    folder = Path(config.out) / f"{name.replace(' ', '_')}_{seed}_{int(time.time())}"
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        train_grpo.main(train_grpo.Config(**dict(
            run_dir=str(folder), init=str(start), recipe=recipe, device="cpu", seed=seed, steps=config.steps,
            prompts_per_step=16, group_size=8, minibatches=2, lr=3e-3, warmup_steps=2,
            schedule="constant", save_every=10**6, keep=1, eval_every=0, eval_problems=8) | options))
    seconds = time.process_time() - began  # one thread: what others take of a shared machine is not in it
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    rewards = [row["reward_mean"] for row in steps]
    reached = next((k for k in range(5, len(steps) + 1) if statistics.mean(rewards[k - 5 : k]) >= 0.9), None)
    policy, tokenizer = load_model(folder / f"step_{config.steps}"), load_tokenizer(folder / f"step_{config.steps}")
    env = Letters(seed)
    samples = collect(policy, tokenizer, env, env.sample(200, split="eval"), 8, max_new_tokens=env.max_new_tokens,
                      seed=seed + 1)
    right = samples.rewards.view(-1, 8)
    return {"steps_to_0.9": reached, "seconds": seconds / config.steps, "pass@1": float(right.mean()),
            "pass@8": float(right.amax(1).mean()), "length": steps[-1]["response_length"],
            "flat": statistics.mean(row["zero_variance_groups"] for row in steps),
            "entropy": steps[-1]["entropy"], "skipped": steps[-1]["skipped_steps"]}


def print_table(rows: list[dict]) -> None:
    """Means over the seeds, with 95 % intervals; of one or two seeds their values."""
    print("| recipe | seeds | steps to 0.9 | seconds to 0.9 | pass@1 | pass@8 | length | entropy | flat |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == name]
        reached = [row for row in own if row["steps_to_0.9"]]
        when = interval([row["steps_to_0.9"] for row in reached], 0)
        if 0 < len(reached) < len(own):
            when += f" ({len(reached)} of {len(own)})"
        took = interval([row["steps_to_0.9"] * row["seconds"] for row in reached], 1)
        cells = [interval([row[key] for row in own], digits) for key, digits in
                 (("pass@1", 3), ("pass@8", 3), ("length", 2), ("entropy", 3), ("flat", 2))]
        print(f"| `{name}` | {len(own)} | {when} | {took} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
