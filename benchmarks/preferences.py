"""Experiments with the DPO family on two-digit addition. Every number is a run of train_dpo.py with the options below.

    python benchmarks/preferences.py flips          0 to 40 % of the labels the wrong way round: DPO, cDPO, robust, IPO
    python benchmarks/preferences.py reference      the start as reference, or a uniform one
    python benchmarks/preferences.py family         every loss of the table, with one setting for all
    python benchmarks/preferences.py flips --docs   also puts the table into docs/preferences.md

All runs begin with one model, after a cold start of SFT, and learn from the same pairs that it has sampled (but for the
flips). cDPO and robust DPO are told the true share of wrong labels. The runs stay in --run-dir, and a command that was
stopped goes on from there. About 20 seconds a run on one idle core.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

from experiment import into_docs, train  # which finds the trainers

import train_dpo
from minirl.checkpoint import load_model
from minirl.config import read_json, write_text
from minirl.env import make_env
from minirl.metrics import read_metrics
from minirl.pairs import evaluate_kl
from minirl.parallel import Mesh
from minirl.preference_losses import PREFERENCES
from minirl.tokenizer import load_tokenizer

OPTIONS = dict(problems=4096, epochs=4.0, lr=5e-4, nll_coef=None, eval_every=0, save_every=10**6, keep=1,
               log_every=100)
FLIPS = {f"{loss} {share}": dict(loss=loss, flip_labels=share, **({"label_smoothing": share} if smooths else {}))
         for share in (0.0, 0.1, 0.2, 0.3, 0.4)
         for loss, smooths in (("dpo", False), ("cdpo", True), ("robust", True), ("ipo", False))
         if share or not smooths}  # without wrong labels these two are DPO
REFERENCE = {f"{reference}, beta {beta:g}": dict(reference=reference, beta=beta)
             for beta in (0.1, 0.3, 1.0, 3.0) for reference in ("start", "uniform")}
FAMILY = {loss: dict(loss=loss) for loss in PREFERENCES}
EXPERIMENTS = {"flips": FLIPS, "reference": REFERENCE, "family": FAMILY}
COLUMNS = {"eval/accuracy": "problems solved", "eval/preference_accuracy": "held-out pairs", "kl": "KL to the start",
           "eval/logprob_chosen": "log-prob of chosen", "eval/logprob_rejected": "of rejected"}


def measure(folder: Path) -> dict[str, float]:
    """Of the last step of a run, and before the first."""
    rows = read_metrics(folder.parent / "metrics.jsonl")
    policy, start, env = load_model(folder), load_model(folder.parent / "step_0"), make_env("addition")
    kl = evaluate_kl(policy, lambda: nullcontext(start), load_tokenizer(folder), env, 500, Mesh(), 512,
                     max_new_tokens=env.max_new_tokens)
    found = {name: rows[-1][name] for name in COLUMNS if name in rows[-1]} | {"kl": kl["eval/kl_ref"]}
    return found | {"before": rows[0]["eval/accuracy"]}


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["| run | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[column]:.3g}" for column in COLUMNS) + " |")
    start = next(iter(found.values()))["before"]
    return "\n".join(lines) + f"\n\nBefore the first update {start:.3g} of the problems were solved.\n"


def grid(found: dict[str, dict[str, float]]) -> str:
    """The table of the flips: losses across, shares down."""
    losses = ("dpo", "cdpo", "robust", "ipo")
    shares = list(dict.fromkeys(name.split()[1] for name in found))
    lines = ["| wrong labels | " + " | ".join(f"`{loss}`" for loss in losses) + " |", "|---" * (len(losses) + 1) + "|"]
    for share in shares:
        cells = [found.get(f"{loss} {share}") or found[f"dpo {share}"] for loss in losses]
        cells = [f"{cell['eval/accuracy']:.3f}, {cell['eval/preference_accuracy']:.3f}" for cell in cells]
        lines.append(f"| {float(share):.0%} | " + " | ".join(cells) + " |")
    start = next(iter(found.values()))["before"]
    return "\n".join(lines) + (f"\n\nShare of held-out problems solved ({start:.3f} before), and of held-out pairs, "
                               "rightly labelled, that are told apart.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/preferences.md")
    args = parser.parse_args()
    first = args.run_dir / "first"  # makes the start and the pairs of all the others
    if not (first / "step_0").is_dir():
        train(train_dpo, first, **OPTIONS, steps=1)
    found = {}
    for name, options in EXPERIMENTS[args.experiment].items():
        folder = args.run_dir / args.experiment / name.replace(", ", " ").replace(" ", "_")
        file = folder / "measured.json"
        if not file.is_file():
            last = train(train_dpo, folder, **OPTIONS, init=str(first / "step_0"), pairs=str(first / "pairs"),
                         **options)
            write_text(file, json.dumps(measure(last)) + "\n")
        found[name] = read_json(file)
        print(f"{name}:", *(f"{column} {found[name][column]:.3f}" for column in COLUMNS), flush=True)
    text = (grid if args.experiment == "flips" else table)(found)
    print("\n" + text)
    if args.docs:
        into_docs("preferences.md", args.experiment, text)


if __name__ == "__main__":
    main()
