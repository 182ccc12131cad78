"""The MDP that every task speaks: examples go in, actions are judged, rewards come out.

An `Env` hands out `Example`s; `reset(example)` starts an `Episode`, the state of one row; `step(action)`
answers each turn of the policy with a `Step`. After a step that is not the last, the observation is forced
onto the row's tape and the policy writes its next action; nothing follows the last step. A row's reward is
the sum over its steps.

A new environment is one small class, see addition.py, and one line in `make_env`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

from minirl.config import UserError


@dataclass(frozen=True)
class Example:
    """One problem. `solution`: a demonstration for the cold start, action by action; () if there is none.
    `state`: what an episode starts from where the prompt does not say it all: a database, documents.
    """

    prompt: str
    answer: str
    solution: tuple[str, ...] = ()
    state: Any = field(default=None, compare=False, repr=False)


class Step(NamedTuple):
    """What the environment says to one action. On the last step `done` is True and `observation` is "".

    info : for evaluation, and for leaving rows out of training (turns.py); never a reward.
           "format" on the last step: an answer could be read from the action, right or wrong. "tool_call" on every step
           of a task with tools: the call in the action could be carried out; None: there was none. "cut" on the last
           step: it is the last because no turn was left. "process", if there is an opinion on the step itself: from -1,
           bad, to 1, good, for credit within a row (--process), and never for what the row is paid
    action : what it answers, filled in by `collect`
    """

    observation: str
    reward: float
    done: bool
    info: dict
    action: str = ""


class Transition(NamedTuple):
    """One turn of a trajectory, as the literature writes it; `state` is what the policy saw last."""

    state: str
    action: str
    observation: str
    reward: float
    done: bool
    info: dict


def trajectory(prompt: str, steps: Sequence[Step]) -> list[Transition]:
    """The turns of one row of a Rollout (`rollout.turns[row]`); its tokens are `rollout.tokens[row]`."""
    states = [prompt, *(step.observation for step in steps)]
    return [Transition(state, step.action, *step[:4]) for state, step in zip(states, steps, strict=False)]


class Episode(Protocol):
    """The state of one row; `action` is the text of one turn, its stop mark included, EOS not."""

    prompt: str

    def step(self, action: str) -> Step: ...


class Env(Protocol):
    """A task. `sample` is a pure function of the env's seed, the split and the index: problem i is the same
    whoever asks, so that resuming needs one integer and ranks take slices. "eval" is never in "train".
    """

    name: str
    stop: tuple[str, ...]  # strings that end an action, besides EOS
    max_new_tokens: int  # budget of the sampled tokens of a whole row, all turns together

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        """Problems start .. start + count - 1 of the split's endless stream (a finite "eval" starts over)."""

    def size(self, split: str) -> int | None:
        """Number of different examples in the split, None if there is no end of them."""

    def reset(self, example: Example) -> Episode: ...


@dataclass
class SingleTurn:
    """The episode of a task that is over after one action."""

    prompt: str
    judge: Callable[[str], float]  # action -> reward
    has_answer: Callable[[str], bool] = bool  # can an answer be read from the action? Without a rule, from any text

    def step(self, action: str) -> Step:
        return Step("", self.judge(action), True, {"format": self.has_answer(action)})


def check_split(split: str) -> None:
    """Refuse other names than "train" and "eval": a misspelt "eval" must not be served training problems."""
    if split not in ("train", "eval"):
        raise UserError(f'split "{split}" is unknown: use "train" or "eval"')


def counter_random(seed: int, split: str, index: int) -> Random:
    """The generator of problem number `index`: the same in every process, independent of its neighbours."""
    return Random(f"{seed}/{split}/{index}")  # through SHA-512, unlike hash(), which varies


def held_out(key: str) -> bool:
    """True for a tenth of all keys, whatever the seed: no run trains on what another one evaluates."""
    return hashlib.sha256(key.encode()).digest()[0] < 26  # 26 / 256 = 10.2 %


def sample_problems(
    make: Callable[[Random], Example],
    seed: int,
    count: int,
    start: int,
    split: str,
    key: Callable[[Example], str] = lambda example: example.prompt,
) -> list[Example]:
    """`Env.sample` for a task that invents its problems: number i is the first one that `make` draws from
    generator i and that lies on the split's side of `held_out(key(example))`."""
    check_split(split)
    examples = []
    for index in range(start, start + count):
        rng = counter_random(seed, split, index)
        example = make(rng)
        while held_out(key(example)) != (split == "eval"):
            example = make(rng)
        examples.append(example)
    return examples


def sample_rows(rows: list[Example], seed: int, count: int, start: int) -> list[Example]:
    """`Env.sample` for a finite training set: epoch after epoch, each in its own seeded order. The epoch is
    index // len(rows), so there is no counter that somebody could forget to advance."""
    picked: list[Example] = []
    for index in range(start, start + count):
        epoch, place = divmod(index, len(rows))
        if not picked or place == 0:
            order = counter_random(seed, "epoch", epoch).sample(range(len(rows)), len(rows))
        picked.append(rows[order[place]])
    return picked
