"""Over-training: SFT on 200 demonstrations for 1, 2, 3, 5, 10 and 20 epochs, and what a little GRPO makes of each.

    python benchmarks/overtraining.py            prints the table; about 5 minutes of one idle core
    python benchmarks/overtraining.py --docs     also puts it into docs/sft.md

The task is the calculator's. A base model has seen a stream of demonstrations, long enough to write the syntax and too
short to copy a tool's result. Then it imitates 200 demonstrations, epoch after epoch. To copy is a skill, of which more
epochs give more. Whether a demonstration calls the tool or only estimates was decided by chance, and nothing in a
problem says so: what the last epochs learn about that, they learn by heart, and it is wrong about other problems.

Everything is train_sft.py and train_grpo.py with the options below, for each of three seeds. The runs stay in
--run-dir; a command that was stopped goes on from there.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from experiment import into_docs, train  # which finds the trainers

import train_grpo
import train_sft
from minirl.checkpoint import load_model
from minirl.config import read_json, write_text
from minirl.data.dataset import Demonstrations
from minirl.env import make_env
from minirl.env.loop import collect
from minirl.evaluate import evaluate, evaluate_loss
from minirl.graduate import sample_measures
from minirl.metrics import read_metrics
from minirl.parallel import Mesh
from minirl.rollout import Rollout
from minirl.tokenizer import load_tokenizer

ROWS, EPOCHS, SEEDS = 200, (0, 1, 2, 3, 5, 10, 20), (0, 1, 2)
PROBLEMS, SAMPLES = 200, 8  # held-out problems that are sampled
ONCE = dict(task="calculator", eval_every=0, save_every=10**6, keep=1)  # measured here, saved at the end
SFT = ONCE | dict(eval_rows=0, eval_problems=1)
BASE = SFT | dict(steps=90, schedule="constant")
TUNE = SFT | dict(train_rows=ROWS, batch_size=8, lr=1e-3, warmup_steps=5)
GRPO = ONCE | dict(steps=8, prompts_per_step=16, group_size=8, minibatches=1, lr=3e-4, warmup_steps=0,
                   schedule="constant", mask_constant=False, eval_problems=500)
COLUMNS = {
    "train": "loss on the 200", "eval": "held-out loss", "greedy": "greedy", "pass1": "pass@1", "pass8": "pass@8",
    "unique_ratio": "unique ratio", "pair_diversity": "pair diversity",
    "grpo": f"greedy after {GRPO['steps']} GRPO steps",
}



def measure(folder: Path, seed: int) -> dict[str, float]:
    policy, tokenizer, env, mesh = load_model(folder), load_tokenizer(folder), make_env("calculator", seed=seed), Mesh()
    data = Demonstrations(env, tokenizer, ROWS, seed)

    def samples(temperature: float) -> Rollout:
        return collect(policy, tokenizer, env, env.sample(PROBLEMS, split="eval"), SAMPLES, seed=seed,
                       max_new_tokens=env.max_new_tokens, temperature=temperature)

    solved = (samples(1.0).rewards >= 1).view(PROBLEMS, SAMPLES).double()
    return sample_measures(samples(0.7), SAMPLES, {tokenizer.eos_id}) | {
        "train": evaluate_loss(policy, data, ROWS, mesh, ROWS, "train")["train/loss"],
        "eval": evaluate_loss(policy, data, 1000, mesh, 1000)["eval/loss"],
        "greedy": evaluate(policy, tokenizer, env, 500, mesh)["eval/accuracy"],
        "pass1": float(solved.mean()),
        "pass8": float(solved.amax(1).mean()),
    }


def table(found: dict[int, list[dict[str, float]]]) -> str:
    """Markdown: the mean over the seeds, and the lowest and the highest."""
    lines = ["| epochs | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for epochs, seeds in found.items():
        cells = [[seed[name] for seed in seeds] for name in COLUMNS]
        cells = [f"{mean(values):.3f} ({min(values):.2f} to {max(values):.2f})" for values in cells]
        lines.append(f"| {epochs or '0: the base'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def experiment(run: Path, seed: int, epochs: int) -> dict[str, float]:
    """One row of the table for one seed."""
    base = train(train_sft, run / "base", seed=seed, **BASE)
    fresh = seed + 100  # problems that the base has not seen
    model = base
    if epochs:
        model = train(train_sft, run / f"epochs_{epochs}", init=str(base), epochs=epochs, seed=fresh, **TUNE)
    measured = measure(model, fresh)
    after = train(train_grpo, run / f"grpo_{epochs}", init=str(model), seed=fresh, **GRPO)
    return measured | {"grpo": read_metrics(after.parent / "metrics.jsonl")[-1]["eval/accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/overtraining"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/sft.md")
    args = parser.parse_args()
    found = {epochs: [] for epochs in EPOCHS}
    for seed in SEEDS:
        for epochs in EPOCHS:
            run = args.run_dir / f"seed_{seed}"
            file = run / f"measured_{epochs}.json"
            if not file.is_file():
                measured = experiment(run, seed, epochs)
                write_text(file, json.dumps(measured) + "\n")
            found[epochs].append(read_json(file))
            print(f"seed {seed}, {epochs} epochs:",
                  *(f"{name} {found[epochs][-1][name]:.3f}" for name in COLUMNS), flush=True)
    print("\n" + table(found))
    if args.docs:
        into_docs("sft.md", "overtraining.py", table(found))


if __name__ == "__main__":
    main()
