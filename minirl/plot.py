"""The curves of one or several runs: sparklines in the terminal, and a PNG where matplotlib is installed.

    python -m minirl.plot runs/NAME [runs/OTHER ...] [--metrics reward_mean,entropy] [--out FILE.png]
"""

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from minirl.config import UserError
from minirl.metrics import BY_NAME, read_metrics, sparkline

DEFAULT_METRICS = ("reward_mean", "eval/accuracy", "kl_ref", "entropy", "response_length", "loss",
                   "tokens")
Curve = list[tuple[int, float]]                        # (step, value) of the steps that logged it


def load_run(run: Path) -> dict[str, Curve]:
    """Metric name -> its curve. UserError if the folder has no metrics, or an empty file."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run} has no metrics.jsonl; give the folder of a run, such as runs/NAME")
    curves: dict[str, Curve] = {}
    for row in read_metrics(path):
        step = row.pop("step")
        for name, value in row.items():
            curves.setdefault(name, []).append((step, value))
    if not curves:
        raise UserError(f"{path} is empty: the run has not finished its first step")
    return curves


def choose(runs: dict[str, dict[str, Curve]], wanted: Sequence[str]) -> list[str]:
    """`wanted`, each of which some run must have; without any, those of DEFAULT_METRICS that are there."""
    there = {name for curves in runs.values() for name in curves}
    if not wanted:
        return [name for name in DEFAULT_METRICS if name in there] or sorted(there)
    for name in wanted:
        if name not in there:
            nearest = difflib.get_close_matches(name, there, n=1, cutoff=0)
            raise UserError(f"metric {name!r} is in none of the runs; the nearest is {nearest[0]}")
    return list(wanted)


def print_sparklines(runs: dict[str, dict[str, Curve]], names: Sequence[str]) -> None:
    """A line for each metric and run: first value, curve, last value."""
    width = max(len(run) for run in runs)
    for name in names:
        print(name)
        for run, curves in runs.items():
            if values := [value for _, value in curves.get(name, [])]:
                print(f"  {run:<{width}}  {values[0]:>9.4g} {sparkline(values)} {values[-1]:.4g}")


def save_png(runs: dict[str, dict[str, Curve]], names: Sequence[str], out: Path) -> None:
    """One panel a metric, one line a run. A metric of few points, as an evaluation, shows them."""
    import matplotlib
    matplotlib.use("Agg")                                          # no display needed
    import matplotlib.pyplot as plt

    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names):
        for run, curves in runs.items():
            steps, values = zip(*curves.get(name, [(0, float("nan"))]))
            axis.plot(steps, values, label=run, linewidth=1.6, marker="o" if len(steps) < 30 else None,
                      markersize=3.5)
        axis.set_title(f"{name} ({BY_NAME[name].unit})" if name in BY_NAME else name, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(names):]:
        axis.set_visible(False)
    for axis in axes.flat[len(names) - columns:len(names)]:            # the lowest of each column
        axis.set_xlabel("step", fontsize=9)
    if len(runs) > 1:
        axes.flat[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Sparklines are printed always, the PNG is written where matplotlib is installed."""
    parser = argparse.ArgumentParser(prog="python -m minirl.plot", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with a metrics.jsonl")
    parser.add_argument("--metrics", default="", help="names, separated by commas (default: reward, KL, ...)")
    parser.add_argument("--out", type=Path, help="PNG to write (default: metrics.png in the first run)")
    options = parser.parse_args(argv)
    runs = {str(run): load_run(run) for run in options.runs}
    names = choose(runs, [name for name in options.metrics.split(",") if name])
    print_sparklines(runs, names)
    if importlib.util.find_spec("matplotlib") is None:
        if options.out:
            raise UserError(f"--out {options.out} needs matplotlib: pip install 'minirl[plot]'")
        return
    out = options.out or options.runs[0] / "metrics.png"
    save_png(runs, names, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
