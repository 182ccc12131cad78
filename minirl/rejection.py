"""Rejection sampling: what a policy gets right becomes rows to imitate, read by train_sft.py unchanged.

    python -m minirl.rejection runs/r1/rl rows.jsonl --problems 1000 --samples 4
    torchrun train_sft.py --task jsonl --data rows.jsonl --init FOLDER

DeepSeek-R1's third stage (arXiv:2501.12948 sec. 2.3.3): the RL policy answers training problems several times, answers
that are wrong or hard to read are thrown away, and a base model learns from the rest. An answer is kept if it came to
its end and has the full reward of the run: with `--rewards r1` it is right and well-formed. Of equal texts one is kept,
and of a problem at most --most, the shortest first.
"""

from __future__ import annotations

from dataclasses import dataclass

from minirl.adapters import open_policy, tokenizer_folder
from minirl.config import UserError, check_positive, read_json, run, write_text
from minirl.env import make_env
from minirl.env.base import Example
from minirl.env.loop import collect, fit_to_context
from minirl.evaluate import locate
from minirl.messages import to_json
from minirl.mixture import paid_by
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.rollout import Rollout
from minirl.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    run: str  # folder of a run of train_grpo.py or train_ppo.py: its newest checkpoint, or one step_N of it
    out: str  # JSONL file to write: rows of prompt and completion
    problems: int = 1000  # training problems, the first of their stream
    start: int = 0  # number of the first one
    samples: int = 4  # answers to each
    most: int = 1  # rows of a problem
    rewards: str = ""  # what full reward means; empty: as the run was paid
    temperature: float = 1.0  # of the answers
    max_new_tokens: int = 0  # longest answer; 0: the task's own
    max_rows: int = 4096  # rows decoded at once
    seed: int = 1  # of the answers
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it

    def __post_init__(self):
        check_positive(self, "problems", "samples", "most", "temperature", "max_rows")


def kept_rows(rollout: Rollout, examples: list[Example], tokenizer: Tokenizer, most: int = 1) -> list[dict[str, str]]:
    """{"prompt", "completion"} of the answers with full reward that ended by themselves, `most` of each problem.

    rollout : one turn a row, the same number of rows for each of `examples` in turn
    """
    rows, group_size = [], len(rollout) // len(examples)
    paid = ((rollout.rewards >= 1) & rollout.finished).tolist()
    for number, example in enumerate(examples):
        mine = range(number * group_size, (number + 1) * group_size)
        texts = {rollout.turns[row][0].action: int(rollout.lengths[row]) for row in mine if paid[row]}
        rows += [{"prompt": example.prompt, "completion": text} for text in sorted(texts, key=texts.get)[:most]]
    return rows


def main(config: Config) -> None:
    """Sample, keep, write, and say how many were right."""
    run_dir, folder = locate(config.run)
    if run_dir is None:
        raise UserError(f"{config.run} is no run, and does not say what its task is: give a run, or a step_N of it")
    saved = read_json(run_dir / "config.json")
    device = pick_device(config.device)
    policy = open_policy(folder, pick_dtype(config.dtype, device), device, saved.get("qlora", False))
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    env = make_env(saved["task"], saved["data"], saved["eval_data"], saved["difficulty"], saved["seed"])
    env = paid_by(fit_to_context(env, tokenizer, policy.config.context), config.rewards or saved.get("rewards", "task"))
    examples = env.sample(config.problems, config.start)
    rollout = collect(policy, tokenizer, env, examples, config.samples, config.start, seed=config.seed,
                      max_new_tokens=config.max_new_tokens or env.max_new_tokens, temperature=config.temperature,
                      max_rows=config.max_rows)
    if any(len(turns) > 1 for turns in rollout.turns):
        raise UserError(f"task {saved['task']} takes several turns, and a row of prompt and completion holds one: "
                        "choose a run on a task of one turn")
    rows = kept_rows(rollout, examples, tokenizer, config.most)
    if not rows:
        raise UserError(f"none of the {len(rollout)} answers has the full reward: train longer, or take more --samples")
    write_text(config.out, "".join(to_json(row) + "\n" for row in rows))
    share = (rollout.rewards >= 1).double().mean()
    print(f"{share:.3f} of {len(rollout)} answers are right; {len(rows)} rows in {config.out}")


if __name__ == "__main__":
    run(main, Config, description=__doc__)
