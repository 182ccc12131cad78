"""How a task is posed while it is learnt: the easy problems first, or each problem twice, in two wordings.

Both leave evaluation as it is, and problem number i is the same whoever asks, so that a resumed run needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from minirl.config import UserError
from minirl.env import make_env
from minirl.env.base import Env, Episode, Example


def pose(config: Any) -> Env:
    """The task of a trainer's config, posed as its --curriculum and --labels ask."""
    def task(difficulty: int) -> Env:
        return make_env(config.task, config.data, config.eval_data, difficulty, config.seed)

    if config.curriculum and (config.data or config.eval_data):
        raise UserError("--curriculum makes problems of rising difficulty, and a file has its own: leave it out")
    env = task(config.difficulty)
    if config.curriculum:
        env = Curriculum([task(d) for d in range(1, config.difficulty)] + [env], config.curriculum)
    if config.labels == "co-rewarding":
        if not hasattr(env, "rephrase"):
            raise UserError(f"--labels co-rewarding asks each problem in two wordings, and task {config.task} has one: "
                            "choose addition or thought, or give your task a method rephrase(example)")
        env = TwoWordings(env)
    return env


@dataclass(frozen=True)
class Leveled(Example):
    """A problem that knows which task it is of, for tasks of several difficulties look at their own options."""

    env: Env | None = field(default=None, compare=False, repr=False)


class Curriculum:
    """`each` problems of every task but the last, in their order; then the last one, which is evaluated on."""

    def __init__(self, envs: list[Env], each: int):
        self.envs, self.each, self.env = envs, each, envs[-1]
        self.name, self.stop = self.env.name, self.env.stop
        self.max_new_tokens = max(env.max_new_tokens for env in envs)
        if hasattr(self.env, "rephrase"):
            self.rephrase = lambda example: relevel(example, example.env.rephrase(example))

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        if split != "train":
            return [relevel(Leveled("", "", env=self.env), example) for example in self.env.sample(count, start, split)]
        levels = [self.envs[min(i // self.each, len(self.envs) - 1)] for i in range(start, start + count)]
        return [relevel(Leveled("", "", env=env), *env.sample(1, i)) for i, env in enumerate(levels, start)]

    def size(self, split: str) -> int | None:
        return self.env.size(split)

    def reset(self, example: Leveled) -> Episode:
        return example.env.reset(example)


def relevel(level: Leveled, example: Example) -> Leveled:
    """An example as one of the same task as `level`."""
    return Leveled(**{f.name: getattr(example, f.name) for f in fields(Example)}, env=level.env)


class TwoWordings:
    """Problems 2i and 2i + 1 are problem i of the task, as it stands and in other words (`env.rephrase`)."""

    def __init__(self, env: Env):
        self.env = env
        self.name, self.stop, self.max_new_tokens = env.name, env.stop, env.max_new_tokens
        self.size: Callable[[str], int | None] = env.size
        self.reset: Callable[[Example], Episode] = env.reset

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        if split != "train":
            return self.env.sample(count, start, split)
        problems = self.env.sample((start + count + 1) // 2 - start // 2, start // 2)
        both = [wording for problem in problems for wording in (problem, self.env.rephrase(problem))]
        return both[start % 2 : start % 2 + count]
