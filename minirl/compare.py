"""Several models on one task, side by side: what did each stage of a project bring?

    python -m minirl.compare runs/base/step_250 runs/sft/step_250 runs/grpo --task gsm8k_calc --data test.jsonl

    accuracy    held-out problems solved, greedy: the task's full reward
    format      answers that ended and that the task could read, right or wrong
    length      tokens that the model chose, mean
    turns       actions, mean; tool calls: share of those tried that could be carried out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minirl.adapters import open_policy, tokenizer_folder
from minirl.agent_metrics import side_by_side
from minirl.config import UserError
from minirl.env import TASKS, make_env
from minirl.env.base import Env
from minirl.env.loop import fit_to_context
from minirl.evaluate import greedy, locate
from minirl.graduate import format_rate, tool_format_rate
from minirl.model import Transformer
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.tokenizer import Tokenizer, load_tokenizer


def measure(policy: Transformer, tokenizer: Tokenizer, env: Env, problems: int,
            max_rows: int = 4096) -> dict[str, float]:
    """The measures above on the first `problems` held-out problems."""
    env = fit_to_context(env, tokenizer, policy.config.context)
    rollout = greedy(policy, tokenizer, env, 0, min(problems, env.size("eval") or problems), max_rows=max_rows)
    infos = [[step.info for step in steps] for steps in rollout.turns]
    calls = tool_format_rate(infos)
    found = {"accuracy": (rollout.rewards >= 1).double().mean().item(),
             "format": format_rate(rollout.finished.tolist(), infos),
             "length": rollout.action_mask.sum(1).double().mean().item(),
             "turns": sum(map(len, rollout.turns)) / len(rollout)}
    return found | ({} if isinstance(calls, str) else {"tool calls": calls})


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: every folder on the same held-out problems, in one table."""
    parser = argparse.ArgumentParser(prog="python -m minirl.compare", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="models, or runs (their newest checkpoint)")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", default="", help="file of gsm8k and gsm8k_calc; its last tenth is held out")
    parser.add_argument("--eval-data", default="", help="file of held-out problems")
    parser.add_argument("--difficulty", type=int, default=2, help="of tasks that make their own problems")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(argv)
    if options.problems < 1:
        raise UserError(f"--problems is {options.problems}: it must be above 0")
    device = pick_device(options.device)
    reports = {}
    for folder in options.folders:
        model = locate(folder)[1]
        env = make_env(options.task, options.data, options.eval_data, options.difficulty)
        reports["/".join(Path(model).parts[-2:])] = measure(
            open_policy(model, pick_dtype(options.dtype, device), device), load_tokenizer(tokenizer_folder(model)), env,
            options.problems)
    print(side_by_side(reports))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
