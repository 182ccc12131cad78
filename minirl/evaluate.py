"""Measuring: how good is the policy on problems that it was never trained on, and what did a training step do?"""

from __future__ import annotations

import torch

from minirl.advantages import constant_groups
from minirl.data.dataset import Demonstrations, Rows
from minirl.env.base import Env
from minirl.env.loop import collect
from minirl.logprobs import rollout_logprobs
from minirl.model import Transformer
from minirl.parallel import Mesh, all_reduce_sum
from minirl.parallel.collectives import all_reduce
from minirl.parallel.zero import gathered
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


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
                  microbatch_size: int) -> dict[str, float]:
    """{"eval/loss": mean negative log-likelihood of a target token, nats} on the first `rows` held-out rows."""
    rows = min(rows, data.size("eval") or rows)
    mine = mesh.portion(rows)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with gathered(policy):
        if mine:
            batch = data.held_out(mine.start, len(mine)).to(mesh.device)
            logprobs = rollout_logprobs(policy, batch, microbatch_size)
            sums[0], sums[1] = -logprobs[batch.action_mask].sum(dtype=torch.float64), batch.action_mask.sum()
    loss, tokens = all_reduce_sum(sums, mesh).tolist()
    return {"eval/loss": loss / tokens}


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


def rollout_metrics(rollout: Rollout, mesh: Mesh) -> dict[str, float]:
    """Rewards and lengths of one step's rollout, over all replicas: sums first, so that the split cannot matter."""
    constant = constant_groups(rollout.rewards, rollout.group)
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
        "zero_variance_groups": flat / groups,
        "response_length": actions / rows,
        "truncated": cut / rows,
        "tokens": int(tokens),
    }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """The diagnostics of a step's policy updates, from the stats of `policy_stats` that each of them gave.

    updates : one dict an update, already summed over microbatches and ranks
    """
    def mean(name: str, count: float) -> float:
        return sum(update[name] for update in updates) / max(count, 1)

    tokens = sum(update["tokens"] for update in updates)
    passes = sum(update["rows"] for update in updates)
    metrics = {
        "loss": mean("loss", len(updates)),
        "approx_kl": mean("approx_kl", tokens),
        "clip_frac": mean("clip_frac", tokens),
        "entropy": mean("entropy", tokens),
        "grad_norm": mean("grad_norm", len(updates)),
        "ratio_max_deviation": updates[0]["max_ratio_deviation"],  # of the first pass: later the policy has moved
    }
    if "kl_ref" in updates[0]:
        metrics["kl_ref"] = mean("kl_ref", passes)  # nats a response
    return metrics
