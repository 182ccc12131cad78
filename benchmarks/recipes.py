"""Every recipe on one toy task: how fast, how well, how diverse. `python benchmarks/recipes.py`, then with `--table`.

One-digit addition, a model of 2 layers, one cold start a seed that all recipes share, and the same number of steps,
rows and learning rate for all: nothing is tuned for a recipe. The problems are those that are trained on (there are
only a hundred), so this is about optimisation and not about generalisation. A stopped run goes on where it was.
"""

import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the trainers are scripts, not installed

import train_grpo
import train_sft
from minirl.checkpoint import load_model
from minirl.config import run
from minirl.env import make_env
from minirl.env.loop import collect
from minirl.metrics import read_metrics
from minirl.recipes import RECIPES
from minirl.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Config:
    # benchmark
    out: str = "runs/recipes"  # folder of the runs, and of results.jsonl
    seeds: int = 3  # of everything: weights, problems, samples
    steps: int = 40  # rollouts of 32 prompts x 8 answers
    recipes: str = ""  # names with commas; empty: all
    flags: str = ""  # for all of them, such as "staleness=4 old_logprobs=trainer"; they belong to the name in the table
    table: bool = False  # print what there is, as Markdown, and run nothing


def main(config: Config) -> None:
    results = Path(config.out) / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    if config.table:
        return print_table(done)
    torch.set_num_threads(1)
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


def cold_start(folder: Path, seed: int) -> Path:
    """A model that is right now and then."""
    last = folder / "step_60"
    if not last.is_dir():
        with contextlib.redirect_stdout(io.StringIO()):
            train_sft.main(train_sft.Config(
                run_dir=str(folder), device="cpu", seed=seed, difficulty=1, hidden_size=48, layers=2, steps=60,
                batch_size=64, lr=1e-2, warmup_steps=5, eval_every=0, eval_rows=0, eval_problems=8))
    return last


def measure(config: Config, recipe: str, name: str, flags: dict[str, str], start: Path, seed: int) -> dict:
    hints = {"staleness": int, "sampler_noise": float, "epochs": int, "minibatches": int, "lr": float}
    options = {key: hints.get(key, str)(value) for key, value in flags.items()}
    folder = Path(config.out) / f"{name.replace(' ', '_')}_{seed}_{int(time.time())}"
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        train_grpo.main(train_grpo.Config(**dict(
            run_dir=str(folder), init=str(start), recipe=recipe, device="cpu", seed=seed, difficulty=1,
            steps=config.steps, prompts_per_step=32, group_size=8, minibatches=2, lr=3e-3, warmup_steps=2,
            schedule="constant", save_every=10**6, keep=1, eval_every=0, eval_problems=8) | options))
    seconds = time.perf_counter() - began
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    reached = next((row["step"] for row in steps if row["reward_mean"] >= 0.9), None)
    policy, tokenizer = load_model(folder / f"step_{config.steps}"), load_tokenizer(folder / f"step_{config.steps}")
    env = make_env("addition", "", "", 1, seed)
    samples = collect(policy, tokenizer, env, env.sample(200), 8, max_new_tokens=env.max_new_tokens, seed=seed + 1)
    right = samples.rewards.view(-1, 8)
    return {"steps_to_0.9": reached, "seconds": seconds / config.steps, "pass@1": float(right.mean()),
            "pass@8": float(right.amax(1).mean()), "length": steps[-1]["response_length"],
            "entropy": steps[-1]["entropy"], "skipped": steps[-1]["skipped_steps"]}


def print_table(rows: list[dict]) -> None:
    """Mean over the seeds, and the range of pass@1."""
    print("| recipe | seeds | steps to 0.9 | ms a step | pass@1 (range) | pass@8 | length | entropy |")
    print("|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == name]
        mean = {key: statistics.mean(row[key] for row in own)
                for key in ("seconds", "pass@1", "pass@8", "length", "entropy")}
        reached = [row["steps_to_0.9"] for row in own if row["steps_to_0.9"]]
        when = f"{statistics.mean(reached):.0f}" if reached else "-"
        if 0 < len(reached) < len(own):
            when += f" ({len(reached)} of {len(own)})"
        low, high = (f(row["pass@1"] for row in own) for f in (min, max))
        print(f"| `{name}` | {len(own)} | {when} | {1000 * mean['seconds']:.0f} | {mean['pass@1']:.3f} "
              f"({low:.2f}..{high:.2f}) | {mean['pass@8']:.3f} | {mean['length']:.2f} | {mean['entropy']:.3f} |")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
