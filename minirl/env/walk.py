"""Walk over a square field, one place a turn: eight decisions, one reward, and places that come again.

    prompt        16 to 40 in 8\n         from column 1, row 6 to column 4, row 0, in 8 turns
    action        e\n                     n, s, e or w: one place to the north, south, east, west
    observation   26\n                    where that leads to; at the border one stays, and so with any other action
    action        s\n
    observation   25\n
    ...                                   the end: there, reward 1, or out of turns

The way is two turns shorter than the time: one wrong step can be made good, two cannot. Rows of one prompt meet in the
same places, which is what credit by states needs, and most rows that arrive have a bad step in them, and most rows that
do not have good ones, which is what the credit of whole rows suffers from. The demonstrations are a drunkard's.
"""

from dataclasses import dataclass
from random import Random

from minirl.config import UserError
from minirl.env.base import Example, Step, check_split, sample_problems

MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}
SIDE = 10  # places, so that a coordinate is a digit
SPARE = 2  # turns more than the way needs
SOBER = 0.7  # of the steps of a demonstration lead nearer; the others go anywhere


def move(x: int, y: int, action: str) -> tuple[int, int]:
    dx, dy = MOVES.get(action, (0, 0))
    return min(max(x + dx, 0), SIDE - 1), min(max(y + dy, 0), SIDE - 1)


@dataclass
class WalkEpisode:
    """One row: where one is, and how many turns are left."""

    prompt: str
    at: tuple[int, int]
    goal: tuple[int, int]
    left: int

    def step(self, action: str) -> Step:
        """Move, and say where that led."""
        self.left -= 1
        action = action.removesuffix("\n")
        before, self.at = self.at, move(*self.at, action)
        there, known = self.at == self.goal, action in MOVES
        nearer = distance(self.at, self.goal) < distance(before, self.goal)
        info = {"tool_call": True if known else None, "process": 1.0 if nearer else -1.0}
        if there or not self.left:
            return Step("", float(there), True, info | {"format": known, "cut": not there})
        return Step(f"{self.at[0]}{self.at[1]}\n", 0.0, False, info)


class Walk:
    """Ways of 3 x `difficulty` steps, in 2 turns more; reward 1 for arriving."""

    name = "walk"
    stop = ("\n",)

    def __init__(self, difficulty: int = 2, seed: int = 0):
        if not 1 <= 3 * difficulty <= 2 * (SIDE - 1):
            raise UserError(f"difficulty {difficulty}: walk has ways of 3 to 18 steps, 3 times the difficulty (1 to 6)")
        self.steps, self.seed = 3 * difficulty, seed
        self.turns = self.steps + SPARE
        self.max_new_tokens = 3 * self.turns  # a letter and a new line each, some to waste

    def make(self, rng: Random) -> Example:
        """A start and a goal that lie `steps` apart."""
        start = goal = (0, 0)
        while abs(start[0] - goal[0]) + abs(start[1] - goal[1]) != self.steps:
            start, goal = ((rng.randrange(SIDE), rng.randrange(SIDE)) for _ in range(2))
        actions, at = [], start
        while at != goal and len(actions) < self.turns:
            nearer = [name for name in MOVES if distance(move(*at, name), goal) < distance(at, goal)]
            actions.append(rng.choice(nearer if rng.random() < SOBER else sorted(MOVES)))
            at = move(*at, actions[-1])
        text = f"{start[0]}{start[1]} to {goal[0]}{goal[1]} in {self.turns}\n"
        return Example(text, f"{goal[0]}{goal[1]}", tuple(f"{action}\n" for action in actions), (start, goal))

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return sample_problems(self.make, self.seed, count, start, split)

    def size(self, split: str) -> None:
        check_split(split)
        return None

    def reset(self, example: Example) -> WalkEpisode:
        return WalkEpisode(example.prompt, *example.state, self.turns)


def distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
