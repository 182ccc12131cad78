"""Measuring: how good is the policy on problems that it was never trained on, and what did a training step do?

    python -m minirl.evaluate runs/sft                              a run's newest checkpoint on its own task
    python -m minirl.evaluate FOLDER --task gsm8k --data test.jsonl     any model
    python -m minirl.evaluate runs/sft --graduate                   is it ready for RL? Exit code 0 if so, 1 if not
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minirl.adapters import open_policy, tokenizer_folder
from minirl.advantages import constant_groups
from minirl.chat import turn_ends
from minirl.checkpoint import latest_checkpoint
from minirl.config import UserError, check_not_negative, check_positive, read_json, run
from minirl.data.dataset import Demonstrations, Rows, read_rows
from minirl.env import make_env
from minirl.env.base import Env
from minirl.env.loop import collect
from minirl.gae import explained_variance
from minirl.generate import generate
from minirl.graduate import checklist, is_ready, loss_measures, report, sample_measures
from minirl.logprobs import rollout_logprobs
from minirl.metrics import read_metrics
from minirl.model import Transformer
from minirl.parallel import Mesh, all_reduce_sum, close_mesh, init_mesh, pick_dtype
from minirl.parallel.collectives import all_reduce, gather_objects
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer, load_tokenizer


def evaluate(policy: Transformer, tokenizer: Tokenizer, env: Env, problems: int, mesh: Mesh,
             max_new_tokens: int = 0, max_rows: int = 4096) -> dict[str, float]:
    """Greedy pass@1 on the first `problems` held-out problems, each answered once by one of the ranks.

    returns {"eval/accuracy": share of full rewards, "eval/response_length": sampled tokens, mean}
    """
    problems = min(problems, env.size("eval") or problems)
    mine = mesh.portion(problems)
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    with gathered(policy):
        if mine:
            rollout = greedy(policy, tokenizer, env, mine.start, len(mine), max_new_tokens, max_rows)
            sums[0], sums[1], sums[2] = (rollout.rewards >= 1).sum(), rollout.action_mask.sum(), len(mine)
    solved, tokens, count = all_reduce_sum(sums, mesh).tolist()
    return {"eval/accuracy": solved / count, "eval/response_length": tokens / count}


@torch.no_grad()
def evaluate_loss(policy: Transformer, data: Demonstrations | Rows, rows: int, mesh: Mesh,
                  microbatch_size: int, split: str = "eval") -> dict[str, float]:
    """{"eval/loss": mean negative log-likelihood of a target token, nats} on the first `rows` held-out rows.

    split="train": {"train/loss": the same on the first rows that are learnt}
    """
    rows = min(rows, data.size(split) or rows)
    mine = mesh.portion(rows)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with gathered(policy):
        if mine:
            batch = (data.held_out if split == "eval" else data.batch)(mine.start, len(mine)).to(mesh.device)
            logprobs = rollout_logprobs(policy, batch, microbatch_size)
            sums[0], sums[1] = -logprobs[batch.action_mask].sum(dtype=torch.float64), batch.action_mask.sum()
    loss, tokens = all_reduce_sum(sums, mesh).tolist()
    return {f"{split}/loss": loss / tokens}


def greedy(policy: Transformer, tokenizer: Tokenizer, env: Env, start: int, count: int, max_new_tokens: int = 0,
           max_rows: int = 4096) -> Rollout:
    """Greedy answers to held-out problems start .. start + count - 1."""
    examples = env.sample(count, start=start, split="eval")
    return collect(policy, tokenizer, env, examples, max_new_tokens=max_new_tokens or env.max_new_tokens,
                   temperature=0.0, max_rows=max_rows)


def sample_text(policy: Transformer, tokenizer: Tokenizer, env: Env, max_new_tokens: int = 0) -> str:
    """One held-out problem and what the policy makes of it, for a person to read."""
    rollout = greedy(policy, tokenizer, env, 0, 1, max_new_tokens)
    example = env.sample(1, split="eval")[0]
    return f"{example.prompt + rollout.texts[0]!r}  (right: {example.answer}, reward {rollout.rewards[0]:.1f})"


def show_sample(label: str, policy: Transformer, tokenizer: Tokenizer, env: Env, mesh: Mesh,
                max_new_tokens: int = 0) -> None:
    """`sample_text` on the console. Every rank calls it."""
    text = sample_text(policy, tokenizer, env, max_new_tokens)
    if mesh.is_main:
        print(label, text)


def rollout_metrics(rollout: Rollout, mesh: Mesh) -> dict[str, float]:
    """Rewards and lengths of one step's rollout, over all replicas: sums first, so that the split cannot matter."""
    groups = len(rollout.group.unique())
    grouped = groups < len(rollout)  # with one answer a prompt there is nothing to compare
    constant = constant_groups(rollout.rewards, rollout.group) if grouped else rollout.rewards.new_zeros(groups)
    if rollout.expert is not None:  # what an expert wrote is in its group, and no sample of the policy
        rollout = rollout.rows((~rollout.expert).nonzero()[:, 0])
    rewards, actions = rollout.rewards.double(), rollout.action_mask.sum()
    sums = [rewards.sum(), rewards.square().sum(), constant.sum(), actions, (~rollout.finished).sum(),
            rollout.lengths.sum()]
    counts = torch.tensor([len(rollout), len(constant)], dtype=torch.float64, device=rewards.device)
    sums = torch.cat((torch.stack([value.double() for value in sums]), counts))
    # Not over cp: its ranks all have the same rows.
    total, square, flat, actions, cut, tokens, rows, groups = all_reduce(sums, mesh.dp_group).tolist()
    mean = total / rows
    return {
        "reward_mean": mean,
        "reward_std": max(0.0, square / rows - mean**2) ** 0.5,
        **({"zero_variance_groups": flat / groups} if grouped else {}),
        "response_length": actions / rows,
        "truncated": cut / rows,
        "tokens": int(tokens),
        **reward_parts(rollout, mesh),
    }


def reward_parts(rollout: Rollout, mesh: Mesh) -> dict[str, float]:
    """{"reward/NAME": mean over the rows that came to their end} for each part of a mixture; {} without one."""
    parts = [turns[-1].info["rewards"] for turns in rollout.turns if turns and "rewards" in turns[-1].info]
    mine = {name: sum(row[name] for row in parts) for name in (parts[0] if parts else ())} | {"rows": len(parts)}
    every = [mine] if mesh.dp == 1 else gather_objects(mine, mesh.dp_group)
    sums = {name: sum(part.get(name, 0.0) for part in every) for name in sorted({n for part in every for n in part})}
    rows = sums.pop("rows")
    return {f"reward/{name}": value / rows for name, value in sums.items()}


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """The diagnostics of a step's policy updates, from the stats of `policy_stats` that each of them gave.

    updates : one dict an update, already summed over microbatches and ranks; none: {}
    """
    if not updates:
        return {}

    def mean(name: str, count: float) -> float:
        return sum(update[name] for update in updates) / max(count, 1)

    tokens = sum(update["tokens"] for update in updates)
    passes = sum(update["rows"] for update in updates)
    metrics = {
        "loss": mean("loss", len(updates)),
        "approx_kl": mean("approx_kl", tokens),
        "old_approx_kl": mean("old_approx_kl", tokens),
        "clip_frac": mean("clip_frac", tokens),
        "entropy": mean("entropy", tokens),
        "grad_norm": mean("grad_norm", len(updates)),
        "ratio_max_deviation": updates[0]["max_ratio_deviation"],  # of the first pass: later the policy has moved
    }
    if "policy_loss" in updates[0]:  # the surrogate alone, where the loss has more terms
        metrics["policy_loss"] = mean("policy_loss", tokens)
    if "kl_ref" in updates[0]:
        metrics["kl_ref"] = mean("kl_ref", passes)  # nats a response
    return metrics


def critic_metrics(updates: list[dict[str, float]], rollout: Rollout, mesh: Mesh) -> dict[str, float]:
    """The same of the critic's updates, from the stats of `value_stats`; of a network of its own, the gradient too.

    And how much of the rollout's returns its values had explained before.
    """
    tokens = max(1, sum(update["value_tokens"] for update in updates))
    metrics = {name: sum(update[name] for update in updates) / tokens for name in ("value_loss", "value_clip_frac")}
    metrics["explained_variance"] = explained_variance(rollout.values, rollout.returns, rollout.action_mask, mesh)
    if "tokens" not in updates[0]:
        metrics["critic_grad_norm"] = sum(update["grad_norm"] for update in updates) / len(updates)
    return metrics


# ---- the command line ----

@dataclass(frozen=True)
class Config:
    # model
    folder: str  # a run (its newest checkpoint is taken), one step_N of a run, or any model
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it
    # task; what is left out is as the run was trained
    task: str | None = None  # a task (see train_grpo.py): problems to solve; jsonl: rows whose loss is measured
    data: str | None = None  # the file of gsm8k or jsonl
    eval_data: str | None = None  # its held-out rows; empty: the last tenth of --data
    template: str | None = None  # chat template of messages; auto: the model's own
    difficulty: int | None = None  # digits of an operand, hops, items, numbers or steps
    seed: int | None = None  # of the problems, and of the samples
    drop_long_rows: bool | None = None  # leave out rows of --data that do not fit the model's context
    # evaluation
    eval_problems: int = 500  # held-out problems, answered greedily
    eval_rows: int = 200  # rows whose loss is measured; 0: none
    max_new_tokens: int = 0  # longest answer, all turns together; 0: the task's own, 256 for rows
    max_rows: int = 4096  # rows decoded at once
    microbatch_size: int = 64  # rows a forward pass
    # readiness for RL
    graduate: bool = False  # is it ready? Print the checklist; the exit code is 1 if a line fails
    baseline: str = ""  # model that the accuracy must exceed; empty: the one that the run started from
    baseline_accuracy: float | None = None  # the accuracy to exceed, in place of --baseline; none: that of --baseline,
                                            # or 0 for a model that started from nothing
    prompts: int = 20  # held-out problems that are sampled
    samples: int = 8  # samples of each
    temperature: float = 0.7  # of those samples

    def __post_init__(self):
        check_positive(self, "eval_problems", "max_rows", "microbatch_size", "prompts", "temperature")
        check_not_negative(self, "eval_rows", "max_new_tokens")
        if self.samples < 2:
            raise UserError(f"--samples {self.samples}: diversity compares the samples of a prompt, so take at least 2")


def main(config: Config) -> int:
    """Measure and print. The exit code: 1 if --graduate finds the model not ready, else 0."""
    mesh = init_mesh(config.device)
    run_dir, folder = locate(config.folder)
    saved = read_json(run_dir / "config.json") if run_dir else {}
    asked, trained = settings(config, saved)
    policy = open_policy(folder, pick_dtype(config.dtype, mesh.device), mesh.device, saved.get("qlora", False))
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    data = open_data(asked, policy, tokenizer)
    env, limits = data.env, (mesh, config.max_new_tokens, config.max_rows)
    if saved and asked["task"] not in (trained["task"], "jsonl"):
        data = open_data(trained, policy, tokenizer)  # the loss is that of the rows which were learnt

    found = evaluate(policy, tokenizer, env, config.eval_problems, *limits) if env else {}
    for split in ("eval", "train") if config.eval_rows else ():
        found |= evaluate_loss(policy, data, config.eval_rows, mesh, config.microbatch_size, split)
    if mesh.is_main:
        print(f"{folder} on {asked['task']}")
        print(*(f"{name:22} {value:.4g}" for name, value in found.items()), sep="\n")
    if not config.graduate:
        return 0

    measured = loss_measures(history_of(run_dir, folder))
    if config.eval_rows:
        measured["gap"] = found["eval/loss"] - found["train/loss"]
    if env:
        measured["accuracy"] = found["eval/accuracy"]
        measured["baseline"] = baseline_accuracy(config, saved, run_dir, env, limits)
    rollout = sample_groups(policy, tokenizer, env or data, config, asked["seed"])
    if rollout:
        ends = set() if env or not data.template else turn_ends(tokenizer, data.template)
        measured |= sample_measures(rollout, config.samples, ends | {tokenizer.eos_id})
    results = checklist(measured)
    if mesh.is_main:
        if env:
            solved = (rollout.rewards >= 1).view(-1, config.samples).double()
            print(f"{config.prompts} x {config.samples} samples at temperature {config.temperature:g}: "
                  f"{solved.mean():.3f} right, {solved.amax(1).mean():.3f} of the prompts at least once")
        print("\n" + report(results))
    return 0 if is_ready(results) else 1


def sample_groups(policy: Transformer, tokenizer: Tokenizer, source: Env | Rows, config: Config,
                  seed: int) -> Rollout | None:
    """`config.samples` answers to each of the first `config.prompts` held-out problems, or to the prompts of rows.

    None: the rows are plain texts, which begin without a prompt.
    """
    options = dict(group_size=config.samples, temperature=config.temperature, max_rows=config.max_rows, seed=seed)
    if isinstance(source, Rows):
        limit, prompts = config.max_new_tokens or ROW_TOKENS, source.prompts(config.prompts)
        return generate(policy, prompts, tokenizer, max_new_tokens=limit, **options) if prompts else None
    return collect(policy, tokenizer, source, source.sample(config.prompts, split="eval"),
                   max_new_tokens=config.max_new_tokens or source.max_new_tokens, **options)


def locate(folder: str | Path) -> tuple[Path | None, Path]:
    """(run folder, model folder) of a run, of a step_N inside a run, or of a model alone: (None, folder)."""
    folder = Path(folder)
    if newest := latest_checkpoint(folder):
        return folder, newest
    if (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} holds no complete checkpoint yet")
    inside = re.fullmatch(r"step_\d+", folder.name) and (folder.parent / "config.json").is_file()
    return (folder.parent if inside else None), folder


def history_of(run_dir: Path | None, folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl up to the checkpoint."""
    path = run_dir / "metrics.jsonl" if run_dir else None
    step = int(folder.name.removeprefix("step_")) if run_dir else 0
    return [row for row in read_metrics(path) if row["step"] <= step] if path and path.is_file() else []


ROW_TOKENS = 256  # longest answer to the prompt of a row, for which no task sets a limit
TASK_OPTIONS = {"task": "", "data": "", "eval_data": "", "template": "auto", "difficulty": 2, "seed": 0,
                "train_rows": 0, "drop_long_rows": False}


def settings(config: Config, saved: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the command line asks for, what the run was trained on), each with a value for every one of TASK_OPTIONS.

    A flag that is not given is as in the run's config.json `saved`; but another task does not read the run's files.
    """
    trained = TASK_OPTIONS | {name: saved[name] for name in TASK_OPTIONS if name in saved}
    given = {name: value for name, value in vars(config).items() if name in TASK_OPTIONS and value is not None}
    other = given.get("task", trained["task"]) != trained["task"]
    asked = trained | ({"data": "", "eval_data": ""} if other else {}) | given
    if not asked["task"]:
        raise UserError(f"{config.folder} is a model alone: say with --task on what it is to be measured")
    return asked, trained


def open_data(options: dict[str, Any], policy: Transformer, tokenizer: Tokenizer) -> Demonstrations | Rows:
    """The rows of a file, or an environment and its expert, as far as they fit the model."""
    if options["task"] == "jsonl":
        data = read_rows(options["data"], options["eval_data"], tokenizer, options["template"], options["seed"], 0,
                         options["train_rows"])
    else:
        names = ("data", "eval_data", "difficulty", "seed")
        env = make_env(options["task"], **{name: options[name] for name in names})
        data = Demonstrations(env, tokenizer, options["train_rows"], options["seed"])
    return data.fit(policy.config.context, options["drop_long_rows"])


def baseline_accuracy(config: Config, saved: dict[str, Any], run_dir: Path | None, env: Env,
                      limits: tuple[Mesh, int, int]) -> float:
    """The accuracy to exceed: the number given, or that of the model given, or of the one that the run started from.

    A run that started from nothing, and a model that nobody compares with another, must exceed 0.
    """
    if config.baseline_accuracy is not None:
        return config.baseline_accuracy
    start = config.baseline or saved.get("init") or ""
    if not start and run_dir and (run_dir / "step_0").is_dir():
        start = run_dir / "step_0"
    if not start:
        return 0.0
    if not Path(start).is_dir():
        raise UserError(f"the model to compare with, {start}, is not there: give --baseline, or --baseline-accuracy")
    mesh = limits[0]
    policy = open_policy(start, pick_dtype(config.dtype, mesh.device), mesh.device)
    tokenizer = load_tokenizer(tokenizer_folder(start))
    return evaluate(policy, tokenizer, env, config.eval_problems, *limits)["eval/accuracy"]


if __name__ == "__main__":
    code = run(main, Config, description=__doc__)
    close_mesh()
    raise SystemExit(code)
