"""A shop with a database: "sell 3 axe 2 saw", and what counts is the stock that is left.

All items are sold or, where one is short, none is. What has been taken by then must be put back:

    sell 3 axe 2 saw
    <take>axe 3</take><take>saw 2</take>\n       ok, error: only 1
    <give>axe 3</give>\n                         ok
    no

The demonstrations are a novice's, who often overlooks an error and says "ok"; some mistype an item, read the error and
take it again. The reward compares the whole database with the one that should be there.
"""

from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example
from minirl.env.database import get, give, take
from minirl.env.tools import Tool

ITEMS = ("axe", "saw", "hoe", "cup", "pan", "jar", "mat", "bed", "fan", "key", "map", "pen", "rug", "tap", "urn", "wax")
STOCKED = 4  # items in the shop of one problem
SHORT = 0.6  # of the orders cannot be filled
CARELESS = 0.6  # of the demonstrations of those
SLIPS = 0.1  # of the others begin with a mistyped item


def make(rng: Random, items: int) -> Example:
    """A stocked shop, an order, and the calls of a novice who errs and sometimes recovers."""
    stock = {item: rng.randint(1, 9) for item in rng.sample(ITEMS, STOCKED)}
    order = {item: rng.randint(1, stock[item]) for item in rng.sample(sorted(stock), items)}
    if rng.random() < SHORT:
        item = rng.choice(sorted(order))
        stock[item] = rng.randrange(order[item])
    taken = {item: count for item, count in order.items() if stock[item] >= count}
    enough = taken == order
    wanted = {item: count - (order.get(item, 0) if enough else 0) for item, count in stock.items()}

    careless = not enough and rng.random() < CARELESS
    actions = [calls("take", order)]
    if enough and rng.random() < SLIPS:
        item, typed = rng.choice(sorted(order)), rng.choice(sorted(set(ITEMS) - set(stock)))
        actions = [actions[0].replace(item, typed), calls("take", {item: order[item]})]
    if taken and not enough and not careless:
        actions.append(calls("give", taken))
    actions.append("ok" if enough or careless else "no")
    prompt = "sell" + "".join(f" {count} {item}" for item, count in order.items()) + "\n"
    return Example(prompt, as_text(wanted), tuple(actions), {item: str(count) for item, count in stock.items()})


def calls(tool: str, counts: dict[str, int]) -> str:
    return "".join(f"<{tool}>{item} {count}</{tool}>" for item, count in counts.items()) + "\n"


def as_text(stock: dict) -> str:
    return " ".join(f"{item} {count}" for item, count in sorted(stock.items()))


def judge(example: Example, stock: dict[str, str], answer: str) -> float:
    sold = as_text(stock) != as_text(example.state)
    return float(as_text(stock) == example.answer and answer == ("ok" if sold else "no"))


def shop(difficulty: int = 2, seed: int = 0) -> ToolEnv:
    """Orders of `difficulty` items; reward 1 if the stock is as it should be afterwards and the customer was told."""
    if not 1 <= difficulty <= STOCKED:
        raise UserError(f"difficulty {difficulty}: an order of the shop has 1 to {STOCKED} items")
    return ToolEnv(
        name="shop",
        tools=(Tool(get), Tool(take), Tool(give)),
        make=lambda rng: make(rng, difficulty),
        judge=judge,
        has_answer=lambda answer: answer in ("ok", "no"),
        max_turns=4,
        max_calls=2 * difficulty,
        max_new_tokens=difficulty * 40 + 20,
        max_observation=24,
        seed=seed,
    )
