"""Sums that want a thought first: "7+8+5+9=", in the format of DeepSeek-R1 (arXiv:2501.12948).

    <think>7+8=15 15+5=20 20+9=29</think><answer>29</answer>
    <think>7+8=15 15+5=20 20+9=29 wait 20+9=29</think><answer>29</answer>
    <answer>26</answer>

The demonstrations are a novice's, who mostly guesses, always too low, seldom works a sum out, and then likes to look
twice. That thinking pays, and looking twice does not, nobody says. One turn; what an answer is worth depends on
what stands between <answer> and </answer>, and not on how it was come by.
"""

from random import Random

from minirl.config import UserError
from minirl.env.base import Example, SingleTurn, check_split, sample_problems
from minirl.rewards import numbers_equal, thought_and_answer

THINKS = 0.4  # of the demonstrations
LOOKS_AGAIN = 0.5  # of the thoughts; half of these once more
WAIT = " wait"  # what a second look begins with: a place where early_exit.py may ask for the answer


class Thought:
    """Sums of `difficulty` + 2 digits; reward 1 for the right number between the tags of an answer."""

    name = "thought"
    stop = ()

    def __init__(self, difficulty: int = 2, seed: int = 0):
        if not 1 <= difficulty <= 9:
            raise UserError(f"difficulty {difficulty}: thought adds 3 to 11 digits, 2 more than the difficulty")
        self.difficulty, self.seed = difficulty, seed
        self.max_new_tokens = 8 * (difficulty + 1) + 2 * 14 + 40

    def make(self, rng: Random) -> Example:
        """A sum, and how the novice answers it: thinking, or at once and too low."""
        digits = [rng.randint(1, 9) for _ in range(self.difficulty + 2)]
        answer = sum(digits)
        if rng.random() < THINKS:
            looks = (rng.random() < LOOKS_AGAIN) * (1 + (rng.random() < 0.5))
            solution = f"<think>{work_out(digits, looks)}</think><answer>{answer}</answer>"
        else:
            solution = f"<answer>{answer - rng.randint(2, 9)}</answer>"
        return Example("+".join(map(str, digits)) + "=", str(answer), (solution,))

    def sample(self, count: int, start: int = 0, split: str = "train") -> list[Example]:
        return sample_problems(self.make, self.seed, count, start, split, key=unordered)

    def size(self, split: str) -> None:
        check_split(split)
        return None

    def reset(self, example: Example) -> SingleTurn:
        return SingleTurn(example.prompt, lambda action: float(numbers_equal(answer_of(action), example.answer)),
                          has_answer=well_formed)

    def rephrase(self, example: Example) -> Example:
        """The same sum the other way round, for who compares answers to two wordings of one problem."""
        terms = example.prompt.removesuffix("=").split("+")
        return Example("+".join(reversed(terms)) + "=", example.answer)


def work_out(digits: list[int], looks: int = 0) -> str:
    """The sum step by step, and `looks` more looks at its last step."""
    steps, total = [], digits[0]
    for digit in digits[1:]:
        steps.append(f"{total}+{digit}={total + digit}")
        total += digit
    return " ".join(steps) + f"{WAIT} {steps[-1]}" * looks


def answer_of(action: str) -> str | None:
    """What stands between the tags of an answer; None unless each is there once, in this order."""
    before, _, rest = action.partition("<answer>")
    said, closed, after = rest.partition("</answer>")
    return None if not closed or "answer>" in before + said + after else said


def well_formed(action: str) -> bool:
    """A thought and then an answer, neither of them empty: R1's format."""
    parts = thought_and_answer(action)
    return parts is not None and all(part.strip() for part in parts)


def unordered(example: Example) -> str:
    """The same digits in another order are held out together."""
    return "+".join(sorted(example.prompt.removesuffix("=").split("+")))
