"""Rewards made of several: rules in [0, 1], weighed, each logged by itself; and templates for five kinds of task.

    mixture = maths()
    parts = mixture.parts(sample)            {"accuracy": 1.0, "format": 0.0, "efficiency": 0.8, "safety": 1.0, ...}
    mixture.total(parts, progress=0.5)       0.82, in [0, 1]

What a policy could gain by breaking a rule, it does not: a rule that raises, or gives NaN, pays 0. A gate that is 0
makes the whole reward 0. And what is worth something only in a right answer, such as brevity, is scaled by accuracy:
the shortest wrong answer would otherwise be paid for being short.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minirl.config import UserError
from minirl.env.base import Env, Episode, Example, Step
from minirl.rewards import (
    Rule,
    Sample,
    calls_rule,
    citation_rule,
    format_rule,
    honest_rule,
    length_rule,
    number_rule,
    repetition_rule,
    safety_rule,
    steps_rule,
    text_rule,
    tool_rule,
)

EARLY = 0.2  # of the training, in which the early weights hold


@dataclass(frozen=True)
class Mixture:
    """A weighted mean of rules.

    weights : of the rules by name; a rule without a weight is logged, and pays nothing
    early   : weights in the first fifth of training, when a policy first has to learn the format; empty: the same
    gates   : rules whose 0 makes the reward 0
    scaled  : {"efficiency": "accuracy"}: the first is multiplied by the second before it is weighed
    """

    rules: Mapping[str, Rule]
    weights: Mapping[str, float]
    early: Mapping[str, float] = field(default_factory=dict)
    gates: tuple[str, ...] = ()
    scaled: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        named = {*self.weights, *self.early, *self.gates, *self.scaled, *self.scaled.values()}
        if unknown := sorted(named - self.rules.keys()):
            raise UserError(f'reward "{unknown[0]}" has a weight but no rule: rules are {", ".join(self.rules)}')
        for weights in (self.weights, self.early or self.weights):
            if any(not 0 <= weight < math.inf for weight in weights.values()) or not sum(weights.values()):
                raise UserError(f"reward weights {dict(weights)}: give numbers from 0 on, not all of them 0")

    def parts(self, sample: Sample) -> dict[str, float]:
        """The value of every rule, in [0, 1]; "broken" is the share of them that raised or gave no number."""
        values = {name: judged(rule, sample) for name, rule in self.rules.items()}
        broken = sum(value is None for value in values.values()) / len(values)
        return {name: value or 0.0 for name, value in values.items()} | {"broken": broken}

    def total(self, parts: Mapping[str, float], progress: float = 1.0) -> float:
        """The reward of a sample with these parts, in [0, 1]. progress: share of the training that is done."""
        weights = self.early if self.early and progress < EARLY else self.weights
        if any(parts[name] <= 0 for name in self.gates):
            return 0.0
        worth = {name: parts[name] * parts[self.scaled[name]] if name in self.scaled else parts[name]
                 for name in weights}
        return sum(weight * worth[name] for name, weight in weights.items()) / sum(weights.values())


def judged(rule: Rule, sample: Sample) -> float | None:
    """What a rule says, clamped to [0, 1]; None where it broke: no sample may end a run, or gain by an exception."""
    try:
        value = float(rule(sample))
    except Exception:
        return None
    return None if math.isnan(value) else min(1.0, max(0.0, value))


# ---- templates: weights to begin with ----

def maths(tokens: int = 200, limit: int = 1000, tolerance: float = 0.0) -> Mixture:
    """A thought and a number: accuracy .60, format .15, efficiency .15, safety .10; at first format .50."""
    return Mixture(
        rules={"accuracy": lambda s: number_rule(s, tolerance), "format": format_rule,
               "efficiency": lambda s: length_rule(s, tokens, limit) * repetition_rule(s), "safety": safety_rule,
               "honest": honest_rule},
        weights={"accuracy": 0.60, "format": 0.15, "efficiency": 0.15, "safety": 0.10},
        early={"accuracy": 0.30, "format": 0.50, "efficiency": 0.10, "safety": 0.10},
        gates=("honest",), scaled={"efficiency": "accuracy"})


def code(pass_rate: Rule, tokens: int = 400, limit: int = 2000) -> Mixture:
    """A program: `pass_rate` runs its tests in the sandbox. Accuracy .70, format .10, efficiency .10, safety .10."""
    return Mixture(
        rules={"accuracy": pass_rate, "format": lambda s: float(program(s.final) is not None),
               "efficiency": lambda s: length_rule(s, tokens, limit), "safety": safety_rule, "honest": honest_rule},
        weights={"accuracy": 0.70, "format": 0.10, "efficiency": 0.10, "safety": 0.10},
        early={"accuracy": 0.40, "format": 0.40, "efficiency": 0.10, "safety": 0.10},
        gates=("honest",), scaled={"efficiency": "accuracy", "safety": "format"})


def retrieval(steps: int = 3, limit: int = 8) -> Mixture:
    """An answer with citations of what was found: accuracy .50, citations .20, format, efficiency, safety .10 each."""
    return Mixture(
        rules={"accuracy": text_rule, "citations": citation_rule, "format": format_rule,
               "efficiency": lambda s: steps_rule(s, steps, limit), "safety": safety_rule, "honest": honest_rule},
        weights={"accuracy": 0.50, "citations": 0.20, "format": 0.10, "efficiency": 0.10, "safety": 0.10},
        early={"accuracy": 0.30, "citations": 0.20, "format": 0.40, "efficiency": 0.0, "safety": 0.10},
        gates=("honest",), scaled={"citations": "accuracy", "efficiency": "accuracy"})


def tools(steps: int = 2, limit: int = 8) -> Mixture:
    """Calls by name and arguments: accuracy .60, calls that could be carried out .20, efficiency .10, safety .10."""
    return Mixture(
        rules={"accuracy": calls_rule, "tools": tool_rule, "efficiency": lambda s: steps_rule(s, steps, limit),
               "safety": safety_rule, "honest": honest_rule},
        weights={"accuracy": 0.60, "tools": 0.20, "efficiency": 0.10, "safety": 0.10},
        early={"accuracy": 0.40, "tools": 0.50, "efficiency": 0.0, "safety": 0.10},
        gates=("honest",), scaled={"efficiency": "accuracy", "tools": "accuracy"})


def role_play(persona: Rule, judge: Rule, tokens: int = 150, limit: int = 600) -> Mixture:
    """A character that stays one: half of it rules, half a judge (see judges.py): persona .30, variety .10, length .05,
    safety .05; judge .50."""
    return Mixture(
        rules={"persona": persona, "judge": judge, "variety": repetition_rule,
               "length": lambda s: length_rule(s, tokens, limit), "safety": safety_rule, "honest": honest_rule},
        weights={"judge": 0.50, "persona": 0.30, "variety": 0.10, "length": 0.05, "safety": 0.05},
        gates=("honest",), scaled={"variety": "persona", "length": "persona"})


def program(text: str) -> str | None:
    """The one fenced block of Python in a text; None for none or several: which of them is meant to be run?"""
    pieces = text.split("```")
    if len(pieces) != 3:
        return None
    return re.sub(r"\A(?:python|py)?3?[ \t]*\r?\n", "", pieces[1], flags=re.IGNORECASE)


# ---- a task paid by a mixture ----

@dataclass(frozen=True)
class Scored:
    """A task whose last step is paid by a mixture; the parts are in `info["rewards"]`. Evaluate on `env` itself, where
    1 is a solved problem.

    facts    : of an example and the task's own reward, what the rules need; see `Sample.facts`
    progress : share of the training that is done
    tokens   : of a text, for rules of length; words and signs without it
    """

    env: Env
    mixture: Mixture
    progress: float = 1.0
    facts: Callable[[Example, float], Mapping[str, Any]] = lambda example, reward: {"reward": reward}
    tokens: Callable[[str], int] = lambda text: len(text.split())

    @property
    def name(self) -> str:
        return self.env.name

    @property
    def stop(self) -> tuple[str, ...]:
        return self.env.stop

    @property
    def max_new_tokens(self) -> int:
        return self.env.max_new_tokens

    @property
    def threads(self) -> int:
        return getattr(self.env, "threads", 0)

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return self.env.sample(count, start, split)

    def size(self, split: str) -> int | None:
        return self.env.size(split)

    def reset(self, example: Example) -> "ScoredEpisode":
        return ScoredEpisode(self, example, self.env.reset(example))


@dataclass
class ScoredEpisode:
    task: Scored
    example: Example
    episode: Episode
    steps: list[Step] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return self.episode.prompt

    def step(self, action: str) -> Step:
        """Pass the action on; at the end pay by the mixture instead of the task."""
        step = self.episode.step(action)._replace(action=action)
        self.steps.append(step)
        if not step.done:
            return step._replace(reward=0.0)
        sample = sample_of(self.example, self.steps, self.task)
        parts = self.task.mixture.parts(sample)
        return step._replace(reward=self.task.mixture.total(parts, self.task.progress),
                             info=step.info | {"rewards": parts})


def sample_of(example: Example, steps: Sequence[Step], task: Scored) -> Sample:
    actions = tuple(step.action for step in steps)
    facts = task.facts(example, sum(step.reward for step in steps))
    tokens = sum(task.tokens(action) for action in actions)
    return Sample(example.prompt, actions, example.answer, tuple(steps), tokens, facts)


def solved(sample: Sample) -> float:
    """The task's own reward as a rule, for a mixture on top of a task that has a verifier."""
    return sample.facts["reward"]


def agentic(tokens: int = 60, limit: int = 200) -> Mixture:
    """Any task of ours with tools: its own verdict .70, calls that could be carried out .15, brevity .15."""
    return Mixture(
        rules={"accuracy": solved, "tools": tool_rule, "efficiency": lambda s: length_rule(s, tokens, limit),
               "honest": honest_rule},
        weights={"accuracy": 0.70, "tools": 0.15, "efficiency": 0.15}, scaled={"efficiency": "accuracy",
                                                                               "tools": "accuracy"})


def readable(sample: Sample) -> float:
    """1 if the last action has the task's format, whatever it says: `info["format"]` of its step."""
    return float(bool(sample.steps[-1].info.get("format")))


def r1() -> Mixture:
    """DeepSeek-R1-Zero: the task's verdict and the format, and nothing else. The paper adds them up and gives no
    weights; .80 and .20 are ours."""
    return Mixture(rules={"accuracy": solved, "format": readable}, weights={"accuracy": 0.80, "format": 0.20})


def with_judge(mixture: Mixture, judge: Rule) -> Mixture:
    """Half rules, half judge: whoever fools the judge has half of the reward, and not all of it."""
    share = sum(mixture.weights.values())
    early = {**mixture.early, "judge": sum(mixture.early.values())} if mixture.early else {}
    return replace(mixture, rules={**mixture.rules, "judge": judge}, weights={**mixture.weights, "judge": share},
                   early=early)


def paid_by(env: Env, rewards: str, progress: float = 1.0) -> Env:
    """The task under --rewards: "task" itself, or paid by the mixture of that name."""
    mixtures = {"agentic": agentic, "maths": maths, "r1": r1}
    return env if rewards == "task" else Scored(env, mixtures[rewards](), progress)
