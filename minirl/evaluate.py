"""How good is the policy on problems that it was never trained on?"""

from __future__ import annotations

import torch

from minirl.env.base import Env
from minirl.env.loop import collect
from minirl.model import Transformer
from minirl.parallel import Mesh, all_reduce_sum
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer


def evaluate(policy: Transformer, tokenizer: Tokenizer, env: Env, problems: int, mesh: Mesh,
             max_new_tokens: int = 0, max_rows: int = 4096) -> dict[str, float]:
    """Greedy pass@1 on the first `problems` held-out problems, each answered once by one of the ranks.

    returns {"eval/accuracy": share of full rewards, "eval/response_length": sampled tokens, mean}
    """
    problems = min(problems, env.size("eval") or problems)
    start, end = (problems * (mesh.dp_rank + i) // mesh.dp for i in range(2))  # uneven shares, nothing twice
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    if end > start:
        rollout = greedy(policy, tokenizer, env, start, end - start, max_new_tokens, max_rows)
        sums += torch.stack([(rollout.rewards >= 1).sum(), rollout.action_mask.sum(), torch.tensor(end - start)])
    solved, tokens, count = all_reduce_sum(sums, mesh).tolist()
    return {"eval/accuracy": solved / count, "eval/response_length": tokens / count}


def greedy(policy: Transformer, tokenizer: Tokenizer, env: Env, start: int, count: int, max_new_tokens: int = 0,
           max_rows: int = 4096) -> Rollout:
    """Greedy answers to held-out problems start .. start + count - 1."""
    examples = env.sample(count, start=start, split="eval")
    return collect(policy, tokenizer, env, examples, max_new_tokens=max_new_tokens or env.max_new_tokens,
                   temperature=0.0, max_rows=max_rows)


def show_sample(policy: Transformer, tokenizer: Tokenizer, env: Env, title: str, max_new_tokens: int = 0) -> None:
    """Print one held-out problem and what the policy makes of it, for a person to read."""
    rollout = greedy(policy, tokenizer, env, 0, 1, max_new_tokens)
    example = env.sample(1, split="eval")[0]
    print(f"{title}: {example.prompt + rollout.texts[0]!r}  (right: {example.answer}, "
          f"reward {rollout.rewards[0]:.1f})", flush=True)
