"""A step of PPO beside a step of GRPO on the same number of rows, and where its time goes.

    python benchmarks/ppo_step.py --init runs/grpo/step_0            about a minute on an idle machine

Both trainers run as they are, in turns, from one checkpoint of the addition task; the functions that they call are
timed from outside. Medians over the steps, of seconds a step.
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # the trainers are scripts, not installed

import minirl.learner  # noqa: E402
import minirl.ppo  # noqa: E402
import train_grpo  # noqa: E402
import train_ppo  # noqa: E402

STEPS, ROUNDS = 4, 3  # the first step of a run warms up and is left out
COMMON = dict(steps=STEPS, eval_every=0, eval_problems=1, save_every=10**6)
RUNS = {
    "GRPO, 128 prompts x 16": (train_grpo, dict(mask_constant=False)),  # as many rows as PPO
    "PPO, 128 prompts x 16": (train_ppo, dict(prompts_per_step=128, group_size=16)),
    "PPO, 2,048 prompts x 1": (train_ppo, dict(prompts_per_step=2048)),
    "the same, joint head": (train_ppo, dict(prompts_per_step=2048, critic="joint")),
}
PARTS = {"collect_step": "sampling", "next": "sampling", "rollout_logprobs": "reference", "state_values": "values",
         "gae": "advantages", "whiten": "advantages", "token_rewards": "advantages", "forward_backward": "gradients",
         "clip_gradients": "gradients"}


def run(trainer: ModuleType, init: str, **options) -> list[dict[str, float]]:
    """Seconds of each step but the first: the whole, and its parts."""
    spent: dict[str, float] = defaultdict(float)
    owners = (trainer, minirl.learner, minirl.ppo, getattr(trainer, "Collector", None))
    originals = {(owner, name): getattr(owner, name) for name in PARTS for owner in owners if hasattr(owner, name)}
    log, steps = trainer.MetricsLogger.log, []

    def timed(name: str, function):
        def call(*args, **kwargs):
            began = perf_counter()
            result = function(*args, **kwargs)
            part = PARTS[name]
            if name == "forward_backward":
                part += " of the critic" if args[0].config.num_labels else " of the policy"
            spent[part] += perf_counter() - began
            return result
        return call

    def note(logger, step, metrics):
        if step > 1:
            steps.append({"step": metrics["time/rollout"] + metrics["time/update"], **spent})
        spent.clear()
        log(logger, step, metrics)

    for (module, name), function in originals.items():
        setattr(module, name, timed(name, function))
    trainer.MetricsLogger.log = note
    try:
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            trainer.main(trainer.Config(run_dir=f"{folder}/run", init=init, **COMMON | options))
    finally:
        trainer.MetricsLogger.log = log
        for (module, name), function in originals.items():
            setattr(module, name, function)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", required=True, help="a checkpoint that has been cold-started on addition")
    init = parser.parse_args().init
    found: dict[str, list] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, (trainer, options) in RUNS.items():
            found[name] += run(trainer, init, **options)
    base = median(step["step"] for step in found["GRPO, 128 prompts x 16"])
    for name, steps in found.items():
        whole = median(step["step"] for step in steps)
        parts = {part: median(step.get(part, 0.0) for step in steps) for part in steps[0] if part != "step"}
        print(f"{name:24} {whole:.3f} s, {whole / base:.2f} x GRPO:",
              ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts.items()))


if __name__ == "__main__":
    main()
