"""Environments: the MDP's protocol (base.py), the tasks, and `make_env`, which finds a task by its name."""

from difflib import get_close_matches

from minirl.config import UserError, fill
from minirl.env.addition import Addition
from minirl.env.base import Env, Episode, Example, Step
from minirl.env.calculator import Calculator, CalculatorError, calculate
from minirl.env.countdown import countdown
from minirl.env.gsm8k import GSM8K
from minirl.env.gsm8k_calc import GSM8KCalc
from minirl.env.lookup import lookup
from minirl.env.programs import code
from minirl.env.shop import shop
from minirl.env.thought import Thought
from minirl.env.walk import Walk

MADE = {"addition": Addition, "calculator": Calculator, "code": code, "countdown": countdown, "lookup": lookup,
        "shop": shop, "thought": Thought, "walk": Walk}  # make their own problems
READ = {"gsm8k": GSM8K, "gsm8k_calc": GSM8KCalc}  # read them from files
TASKS = (*sorted([*MADE, *READ]),)
# Long rows of different lengths: fewer of them, and few at a time. The cold start has a fixed length: who
# solves half of the problems may not be sure of anything yet, and sampling finds that out.
SMALL = dict(cold_start_steps=250, cold_start_accuracy=1.0, prompts_per_step=32, microbatch_size=32, eval_problems=200)
SIZES = {"calculator": dict(steps=15), "code": dict(steps=30, **SMALL), "countdown": dict(steps=20, **SMALL),
         "lookup": dict(steps=20, **SMALL), "shop": dict(steps=30, **SMALL)}

__all__ = [
    "GSM8K",
    "TASKS",
    "Addition",
    "Calculator",
    "CalculatorError",
    "Env",
    "Episode",
    "Example",
    "Step",
    "calculate",
    "make_env",
]


def fill_sizes(config) -> None:
    """Called while a config of train_grpo.py is made: what was not given is what the task takes from nothing."""
    usual = dict(cold_start_steps=1000, cold_start_accuracy=0.41, prompts_per_step=128, steps=300, microbatch_size=512,
                 eval_problems=500)
    fill(config, usual | SIZES.get(config.task, {}))


def make_env(name: str, data: str = "", eval_data: str = "", difficulty: int = 2, seed: int = 0) -> Env:
    """The task of that name. data, eval_data: files for gsm8k; difficulty: see each task."""
    if name not in TASKS:
        nearest = get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise UserError(f'task "{name}" is unknown, did you mean "{nearest}"? Tasks: {", ".join(TASKS)}')
    if name in READ:
        return READ[name](data, eval_data, seed)
    if path := data or eval_data:
        raise UserError(f"task {name} makes its own problems: drop the file {path}, or choose --task gsm8k")
    return MADE[name](difficulty, seed)
