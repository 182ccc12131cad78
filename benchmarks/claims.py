"""What papers claim, on tasks so small that twenty seeds take minutes: `python benchmarks/claims.py`, then `--table`.

    variety    UCPO keeps pass@8 higher than GRPO: one of eight tricks may do, which ones nobody can know
    groups     DAPO's dynamic sampling leaves no group without variance: copy one of three digits
    length     penalties for length shorten answers at equal accuracy: a digit behind any number of dots
    stale      samples that are 4 steps old: does TIS or IcePop beat no correction? eight letters, a digit for each
    noise      log-probs that a sampler got wrong by 0.3 nats a token, on the task with dots: GRPO and GSPO

Each seed has a policy of one layer, which first imitates a clumsy novice for some steps, and then the steps of
train_grpo.py without its files: collect, advantages, two updates. All recipes of a task begin with the same weights.
A stopped run goes on where it was.
"""

import copy
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minirl.config import run
from minirl.env.base import Example, SingleTurn, counter_random
from minirl.env.loop import collect, demonstrate
from minirl.env.rounds import collect_step, disturb
from minirl.evaluate import rollout_metrics
from minirl.losses import aggregate, loss_total, prompt_tokens, sft_loss
from minirl.model import ModelConfig, Transformer
from minirl.objective import by_token, leave_out, look_again, make_advantages, recipe_loss, weigh
from minirl.optim import adamw, clip_gradients
from minirl.parallel import forward_backward, init_mesh
from minirl.recipes import RecipeOptions, fill_in
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

PROMPTS, GROUP, MINIBATCHES, EVAL = 16, 8, 2, 128
LETTERS, DIGITS = "abcdefghijklmnop", "0123456789"


@dataclass(frozen=True)
class Options(RecipeOptions):
    def __post_init__(self):
        fill_in(self)


# ---- tasks ----

@dataclass(frozen=True)
class Task:
    """Problem i of a split is a pure function of seed, split and i; `right` says whether an action is."""

    seed: int
    stop = ()
    name, max_new_tokens, sft_steps, steps, lr = "", 2, 40, 60, 3e-3

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return [self.make(counter_random(self.seed, split, i)) for i in range(start, start + count)]

    def size(self, split: str) -> None:
        return None

    def make(self, rng: Random) -> Example:
        raise NotImplementedError

    def right(self, example: Example, action: str) -> bool:
        return action == example.answer

    def reset(self, example: Example) -> SingleTurn:
        return SingleTurn(example.prompt, lambda action: float(self.right(example, action)))


class Variety(Task):
    """Three letters that say nothing, and eight digits: one is right in 0.4 of the problems, the others in 0.25."""

    name, sft_steps, steps, lr = "variety", 30, 50, 1e-3

    def make(self, rng: Random) -> Example:
        text = "".join(rng.choices(LETTERS, k=3)) + "="
        chances = [0.4 if i == self.seed % 8 else 0.25 for i in range(8)]
        works = "".join(digit for digit, chance in zip(DIGITS[:8], chances, strict=True) if rng.random() < chance)
        return Example(text, works, (rng.choice(DIGITS[:8]),))

    def right(self, example: Example, action: str) -> bool:
        return len(action) == 1 and action in example.answer


class Groups(Task):
    """Copy the second of three digits; the novice copies any."""

    name, steps = "groups", 30

    def make(self, rng: Random) -> Example:
        digits = rng.choices(DIGITS, k=3)
        return Example("".join(digits) + "=", digits[1], (rng.choice(digits),))


class Length(Task):
    """Copy a digit, behind as many dots as one likes; the novice likes up to eight, and is wrong one time in five."""

    name, max_new_tokens, sft_steps, steps, lr = "length", 12, 80, 40, 2e-3

    def make(self, rng: Random) -> Example:
        digit = rng.choice(DIGITS)
        said = digit if rng.random() < 0.8 else rng.choice(DIGITS)
        return Example(f"{digit}=", digit, ("." * rng.randrange(9) + said,))

    def right(self, example: Example, action: str) -> bool:
        return action.lstrip(".") == example.answer


class Stale(Task):
    """A digit for each of eight letters, to be found out; the novice says any."""

    name, steps, lr = "stale", 80, 2e-3

    def make(self, rng: Random) -> Example:
        letter = rng.choice(LETTERS[:8])
        return Example(f"{letter}=", counter_random(self.seed, "digit", ord(letter)).choice(DIGITS),
                       (rng.choice(DIGITS),))


class Noise(Length):
    """Answers of a few tokens, so that there is something to average over."""

    name = "noise"


PLAIN = dict(kl_coef=0.0)
ARMS = {  # task: {arm: (options of the recipe, staleness, noise)}; the first arm is what the others are compared with
    Variety: {"GRPO": (dict(recipe="ucpo", ucpo_tau=0.0), 0, 0.0), "UCPO": (dict(recipe="ucpo"), 0, 0.0),
              "UCPO, tau 1": (dict(recipe="ucpo", ucpo_tau=1.0), 0, 0.0)},
    Groups: {"GRPO": (PLAIN, 0, 0.0), "resample 4": (PLAIN | dict(resample=4), 0, 0.0)},
    Length: {"none": (PLAIN, 0, 0.0), "overlong": (PLAIN | dict(overlong=0.5), 0, 0.0),
             "Kimi": (PLAIN | dict(length_reward="kimi"), 0, 0.0)},
    Stale: {"no correction": (PLAIN | dict(old_logprobs="trainer"), 4, 0.0), "sampler's ratio": (PLAIN, 4, 0.0),
            "TIS": (PLAIN | dict(recipe="tis"), 4, 0.0), "IcePop": (PLAIN | dict(recipe="icepop"), 4, 0.0),
            "fresh samples": (PLAIN, 0, 0.0)},
    Noise: {"GRPO, trainer's log-probs": (PLAIN | dict(recipe="grpo", old_logprobs="trainer"), 0, 0.3),
            "GRPO, sampler's": (PLAIN | dict(recipe="grpo"), 0, 0.3),
            "GSPO, trainer's log-probs": (dict(recipe="gspo", old_logprobs="trainer"), 0, 0.3),
            "GSPO, sampler's": (dict(recipe="gspo"), 0, 0.3)},
}


# ---- one run ----

def novice(task: Task) -> Transformer:
    """A policy of one layer that imitates the demonstrations."""
    mesh, tokenizer = init_mesh("cpu"), ByteTokenizer()
    shape = ModelConfig(tokenizer.vocab_size, 32, 64, 1, 4, 4, max_position_embeddings=32, rope_theta=100.0)
    policy = Transformer(shape).init_weights(torch.Generator().manual_seed(task.seed))
    optimizer = adamw(policy, 1e-2)
    for step in range(task.sft_steps):
        rows = demonstrate(tokenizer, task, task.sample(64, 10**6 + 64 * step))
        total = loss_total("token", rows.action_mask, mesh)

        def loss_fn(out, mb, total=total):
            return aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total), {}

        forward_backward(policy, [rows], loss_fn, mesh)
        clip_gradients(policy.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
    return policy


def train(policy: Transformer, task: Task, options: Options, staleness: int, noise: float) -> dict[str, float]:
    """The loop of train_grpo.py; what came of it."""
    mesh, tokenizer, optimizer, ahead, steps = init_mesh("cpu"), ByteTokenizer(), adamw(policy, task.lr), [], []
    sampling = dict(max_new_tokens=task.max_new_tokens, seed=task.seed)
    for step in range(1, task.steps + 1):
        while len(ahead) <= staleness:
            rollout = collect_step(policy, tokenizer, task, step + len(ahead), PROMPTS, GROUP, options.resample, mesh,
                                   **sampling)
            ahead.append(disturb(rollout, noise, task.seed) if noise else rollout)
        rollout = ahead.pop(0)
        rollout = look_again(policy, rollout, options, tokenizer.eos_id, PROMPTS * GROUP, 1.0, mesh)
        rollout = rollout.replace(advantages=make_advantages(rollout, options, task.max_new_tokens, mesh))
        clipped = tokens = 0
        for minibatch in leave_out(rollout, options).minibatches(MINIBATCHES):
            mask = minibatch.action_mask
            minibatch = weigh(minibatch, options, task.seed, mesh).replace(
                prompt_tokens=prompt_tokens(mask, minibatch.group))
            total = loss_total(options.aggregate, mask, mesh, minibatch.group,
                               options.constant_length or task.max_new_tokens)

            def loss_fn(out, mb: Rollout, total=total):
                loss, bound = recipe_loss(out.logprobs, mb, options, entropy=out.entropy)
                return (aggregate(loss, mb.action_mask, options.aggregate, total, mb.prompt_tokens, mb.row_tokens),
                        {"clipped": (bound & mb.action_mask).sum(), "tokens": mb.action_mask.sum()})

            stats = forward_backward(policy, [minibatch], loss_fn, mesh, entropy=options.entropy_coef > 0,
                                     by_token=by_token(options))
            clip_gradients(policy.parameters(), 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()
            clipped, tokens = clipped + stats["clipped"], tokens + stats["tokens"]
        steps.append(rollout_metrics(rollout, mesh) | {"clipped": clipped / tokens})
    samples = collect(policy, tokenizer, task, task.sample(EVAL, split="eval"), GROUP, **sampling | {"seed": 10**6})
    right = samples.rewards.view(EVAL, GROUP)
    flat = [row["zero_variance_groups"] for row in steps]
    return {"pass@1": float(right.mean()), "pass@8": float(right.amax(1).mean()),
            "length": samples.action_mask.sum().item() / len(samples), "flat groups": statistics.mean(flat),
            "steps with one": statistics.mean(value > 0 for value in flat),
            "mean reward": statistics.mean(row["reward_mean"] for row in steps),
            "clipped": statistics.mean(row["clipped"] for row in steps)}


# ---- all of them ----

@dataclass(frozen=True)
class Config:
    # benchmark
    out: str = "runs/claims.jsonl"  # a line for each run
    seeds: int = 20  # of everything: weights, problems, samples
    tasks: str = ""  # names with commas; empty: all
    table: bool = False  # print what there is, as Markdown, and run nothing


def main(config: Config) -> None:
    """What is still missing, or the tables."""
    out = Path(config.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    if config.table:
        return print_tables(done)
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(config.seeds):
        for kind, arms in ARMS.items():
            task, start = kind(seed), None
            if config.tasks and task.name not in config.tasks.split(","):
                continue
            for arm, (options, staleness, noise) in arms.items():
                if any((row["task"], row["arm"], row["seed"]) == (task.name, arm, seed) for row in done):
                    continue
                start = start or novice(task)
                row = {"task": task.name, "arm": arm, "seed": seed,
                       **train(copy.deepcopy(start), task, Options(**options), staleness, noise)}
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


T95 = (4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.2, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.1, 2.09)


def interval(values: list[float], digits: int = 3) -> str:
    """Mean, and how far its 95 % interval reaches (T95: Student's t of 3 .. 20 values); of one or two, themselves."""
    if len(values) < 3:
        return ", ".join(f"{value:.{digits}f}" for value in values) or "-"
    width = T95[min(len(values), 20) - 3] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ± {width:.{digits}f}"


def print_tables(rows: list[dict]) -> None:
    """A table a task: means over the seeds with their intervals, and the mean difference to the first arm, by seed."""
    shown = {"variety": ("pass@1", "pass@8"), "groups": ("flat groups", "steps with one", "pass@1"),
             "length": ("pass@1", "length"), "stale": ("pass@1", "mean reward"),
             "noise": ("pass@1", "mean reward", "clipped")}
    for kind, arms in ARMS.items():
        own = {arm: {row["seed"]: row for row in rows if (row["task"], row["arm"]) == (kind.name, arm)} for arm in arms}
        columns, first = shown[kind.name], own[next(iter(arms))]
        print(f"\n| {kind.name} | seeds | " + " | ".join(f"{name} | difference" for name in columns) + " |")
        print("|---|---|" + "---|" * (2 * len(columns)))
        for arm, runs in own.items():
            cells = []
            for name in columns:
                apart = [row[name] - first[seed][name] for seed, row in runs.items() if seed in first]
                cells += [interval([row[name] for row in runs.values()]), interval(apart) if runs is not first else ""]
            print(f"| {arm} | {len(runs)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
