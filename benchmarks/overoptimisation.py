"""Over-optimisation: PPO is paid by a reward model, and the verifier looks on without paying.

    python benchmarks/overoptimisation.py            prints the table; about 10 minutes of one idle core
    python benchmarks/overoptimisation.py --docs     also puts it into docs/ppo.md
    python benchmarks/overoptimisation.py --task calculator     where a reward model can be right about nearly all pairs

A policy that adds two digits now and then answers some problems several times, and a reward model learns from pairs of
those answers. It has seen no others. PPO then finds what it likes, which at first is what is right, and later what it
has never been told is wrong: the proxy goes on rising and the true reward turns (arXiv:2210.10760). Three ways to live
with that: a price on the distance from the start, stopping in time, and a reward model that is taught with what the
policy writes by now (CoRLHF: rounds of both).

Everything is train_sft.py, train_dpo.py and train_ppo.py with the options below. The runs stay in --run-dir; a command
that was stopped goes on from there.
"""

import argparse
from pathlib import Path
from statistics import mean

from experiment import into_docs, train  # which finds the trainers

import train_dpo
import train_ppo
import train_sft
from minirl.metrics import read_metrics

SHOWN = {"addition": (1, 10, 20, 30, 40, 60, 80), "calculator": (1, 3, 5, 10, 20, 30, 40)}  # rollouts
ONCE = dict(save_every=20, keep=1)
BASE = {"addition": ONCE | dict(until_accuracy=0.41, schedule="constant", eval_every=5, eval_rows=0),
        "calculator": ONCE | dict(steps=300, schedule="constant", eval_every=0, eval_rows=0)}
OF_ENDS = ONCE | dict(loss="reward", eval_every=0, lr=5e-4, pairs_per_problem=1, prefixes=False)
REWARD = {"addition": OF_ENDS | dict(problems=8192, epochs=4.0),
          "calculator": OF_ENDS | dict(problems=1000, epochs=6.0)}
PPO = ONCE | dict(prompts_per_step=64, group_size=4, schedule="constant", lr=5e-4, eval_every=0)
WAYS = {
    "free": dict(kl_coef=0.0),
    "`--kl-coef 0.2`": dict(kl_coef=0.2),
    "`--reward-model-every 1`": dict(kl_coef=0.0, reward_model_every=1),
}



def around(rows: list[dict], step: int, name: str) -> float:
    """A metric, averaged over the five rollouts around a step: one alone is noise."""
    return mean(row[name] for row in rows if abs(row["step"] - step) <= 2 and name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*SHOWN], default="addition")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/overoptimisation"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/ppo.md (of addition)")
    args = parser.parse_args()
    shown, task = SHOWN[args.task], dict(task=args.task)
    base = train(train_sft, args.run_dir / "base", **task | BASE[args.task])
    reward_model = train(train_dpo, args.run_dir / "reward", init=str(base), **task | REWARD[args.task])
    accuracy = read_metrics(reward_model.parent / "metrics.jsonl")[-1]["eval/preference_accuracy"]
    print(f"the reward model is right about {accuracy:.3f} of the held-out pairs")
    lines = ["| | " + " | ".join(f"after {step}" for step in shown) + " | best |", "|---" * (len(shown) + 2) + "|"]
    for number, (way, options) in enumerate(WAYS.items()):
        run = train(train_ppo, args.run_dir / f"ppo_{number}", init=str(base), reward_model=str(reward_model),
                    steps=shown[-1], **task | PPO | options)
        rows = read_metrics(run.parent / "metrics.jsonl")
        cells = [f"{around(rows, step, 'reward_mean'):.2f} ({around(rows, step, 'score_mean'):+.2f})"
                 for step in shown]
        best = max(range(1, shown[-1] + 1), key=lambda step: around(rows, step, "reward_mean"))
        lines.append(f"| {way} | " + " | ".join(cells) + f" | {around(rows, best, 'reward_mean'):.2f} after {best} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    print("\n" + table)
    if args.docs:
        into_docs("ppo.md", "overoptimisation.py", table)


if __name__ == "__main__":
    main()
