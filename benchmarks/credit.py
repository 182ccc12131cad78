"""Credit over turns: the same walk of eight turns, learnt with one credit after the other, from the same starts.

    python benchmarks/credit.py            prints the table; about half an hour of one idle core
    python benchmarks/credit.py --docs     also puts it into docs/credit.md

The task is `walk` (minirl/env/walk.py): 6 places away, 8 turns, reward 1 at the end for arriving. A drunkard's walks
are imitated for a little while, and from there GRPO trains with the options below, which are alike for all credits: no
division by std, one update a rollout, no KL. Only --credit and what it needs differ. `tree` is left out: with one
update a rollout it is `trajectory`, gradient by gradient (minirl/tree.py).

Everything is train_sft.py and train_grpo.py. The runs stay in --run-dir; a command that was stopped goes on from there.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from experiment import into_docs, train  # which finds the trainers

import train_grpo
import train_sft
from minirl.config import write_text
from minirl.metrics import read_metrics

CREDITS = {
    "trajectory": {},
    "gigpo": {},
    "merged": {},
    "turn": dict(turn_gamma=1.0),
    "grow": {},
}
STEPS, EVERY = 60, 10
SFT = dict(device="cpu", task="walk", steps=500, until_accuracy=0.3, eval_every=10, eval_problems=100, eval_rows=0,
           schedule="constant", save_every=50, keep=1)
GRPO = dict(device="cpu", task="walk", steps=STEPS, prompts_per_step=32, group_size=16, minibatches=1, lr=1e-3,
            warmup_steps=0, schedule="constant", advantage_scale="none", kl_coef=0.0, mask_constant=False, eval_every=0,
            eval_problems=200, save_every=10, keep=1)


def experiment(run: Path, seed: int, credit: str) -> list[dict[str, float]]:
    """The metrics of one credit from one start."""
    found = run / "start.json"
    if not found.is_file():
        write_text(found, json.dumps(str(train(train_sft, run / "start", seed=seed, **SFT))) + "\n")
    metrics = run / credit / "metrics.jsonl"
    if not metrics.is_file() or read_metrics(metrics)[-1]["step"] < STEPS:
        train(train_grpo, run / credit, seed=seed, init=json.loads(found.read_text()), credit=credit,
              **GRPO | CREDITS[credit])
    return read_metrics(metrics)


def curve(rows: list[dict[str, float]]) -> list[float]:
    """Share of the sampled walks that arrive, a mean over EVERY steps each."""
    arrived = [row["reward_mean"] for row in rows if "reward_mean" in row]
    return [mean(arrived[i : i + EVERY]) for i in range(0, STEPS, EVERY)]


def table(found: dict[str, list[list[dict[str, float]]]]) -> str:
    """Markdown: the mean over the seeds, and for the last two columns the lowest and the highest."""
    steps = [f"{i + 1}-{i + EVERY}" for i in range(0, STEPS, EVERY)]
    lines = ["| credit | " + " | ".join(steps) + " | all steps | greedy, held out |", "|---" * (len(steps) + 3) + "|"]
    for credit, seeds in found.items():
        curves = [curve(rows) for rows in seeds]
        cells = [f"{mean(values):.2f}" for values in zip(*curves, strict=True)]
        for values in ([mean(values) for values in curves], [rows[-1]["eval/accuracy"] for rows in seeds]):
            cells.append(f"{mean(values):.3f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(f"| `{credit}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/credit"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/credit.md")
    args = parser.parse_args()
    found = {credit: [] for credit in CREDITS}
    for seed in range(args.seeds):
        for credit in CREDITS:
            rows = experiment(args.run_dir / f"seed_{seed}", seed, credit)
            found[credit].append(rows)
            print(f"seed {seed}, {credit}:", *(f"{value:.2f}" for value in curve(rows)),
                  f"greedy {rows[-1]['eval/accuracy']:.3f}", flush=True)
    text = table(found)
    print("\n" + text)
    if args.docs:
        into_docs("credit.md", "credit.py", text)


if __name__ == "__main__":
    main()
