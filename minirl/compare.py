"""Several models on one task, side by side: what did each stage of a project bring?

    python -m minirl.compare runs/base/step_250 runs/sft/step_250 runs/grpo --task gsm8k_calc --data test.jsonl

    accuracy    held-out problems solved, greedy: the task's full reward
    format      answers that ended and that the task could read, right or wrong
    length      tokens that the model chose, mean
    turns       actions, mean; tool calls: share of those tried that could be carried out
    N calls     accuracy on the problems for which the demonstration calls a tool N times, where there are several N
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minirl.adapters import open_policy, tokenizer_folder
from minirl.agent_metrics import side_by_side
from minirl.config import check_positive, run
from minirl.env import make_env
from minirl.env.base import Env
from minirl.env.loop import fit_to_context
from minirl.evaluate import greedy, locate
from minirl.graduate import format_rate, tool_format_rate
from minirl.model import Transformer
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    folders: tuple[str, ...]  # models, or runs (their newest checkpoint)
    task: str = ""  # a task of train_grpo.py
    data: str = ""  # file of gsm8k and gsm8k_calc; its last tenth is held out
    eval_data: str = ""  # file of held-out problems
    difficulty: int = 2  # of tasks that make their own problems
    problems: int = 200  # held-out problems
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it

    def __post_init__(self):
        check_positive(self, "problems")


def measure(policy: Transformer, tokenizer: Tokenizer, env: Env, problems: int,
            max_rows: int = 4096) -> dict[str, float]:
    """The measures above on the first `problems` held-out problems."""
    env = fit_to_context(env, tokenizer, policy.config.context)
    problems = min(problems, env.size("eval") or problems)
    rollout = greedy(policy, tokenizer, env, 0, problems, max_rows=max_rows)
    infos = [[step.info for step in steps] for steps in rollout.turns]
    calls = tool_format_rate(infos)
    solved = (rollout.rewards >= 1).double()
    found = {"accuracy": solved.mean().item(),
             "format": format_rate(rollout.finished.tolist(), infos),
             "length": rollout.action_mask.sum(1).double().mean().item(),
             "turns": sum(map(len, rollout.turns)) / len(rollout)}
    found |= {} if isinstance(calls, str) else {"tool calls": calls}
    depths = torch.tensor([len(example.solution) - 1 for example in env.sample(problems, split="eval")])
    levels = depths.unique().tolist()
    return found | {f"{n} calls": solved[depths == n].mean().item() for n in levels if len(levels) > 1}


def main(config: Config) -> None:
    """Every folder on the same held-out problems, in one table."""
    device = pick_device(config.device)
    reports = {}
    for folder in config.folders:
        model = locate(folder)[1]
        env = make_env(config.task, config.data, config.eval_data, config.difficulty)
        reports["/".join(Path(model).parts[-2:])] = measure(
            open_policy(model, pick_dtype(config.dtype, device), device), load_tokenizer(tokenizer_folder(model)), env,
            config.problems)
    print(side_by_side(reports))


if __name__ == "__main__":
    run(main, Config, __doc__)
