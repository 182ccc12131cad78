"""A shop with a database: "sell 3 axe 2 saw", and what counts is the stock that is left.

Look, then act: all items are sold or, where one is short, none is ("no"). Both look-ups fit in one turn:

    sell 3 axe 2 saw
    <get>axe</get><get>saw</get>\n                7, 2
    <take>axe 3</take><take>saw 2</take>\n        ok, ok
    ok

The demonstrations are a novice's: half of them forget the last item, or sell although something is short; some mistype
a key, read the error and do it again. The reward compares the whole database with the one that should be there.
"""

from random import Random

from minirl.config import UserError
from minirl.env.agent import ToolEnv
from minirl.env.base import Example
from minirl.env.database import get, take
from minirl.env.tools import Tool

ITEMS = ("axe", "saw", "hoe", "cup", "pan", "jar", "mat", "bed", "fan", "key", "map", "pen", "rug", "tap", "urn", "wax")
STOCKED = 4  # items in the shop of one problem
SHORT = 0.3  # of the orders cannot be filled
CARELESS = 0.5  # of the demonstrations
SLIPS = 0.1  # of the look-ups are mistyped first


def make(rng: Random, items: int) -> Example:
    """A stocked shop, an order, and the calls of an expert who sometimes errs and recovers."""
    stock = {item: rng.randint(1, 9) for item in rng.sample(ITEMS, STOCKED)}
    order = {item: rng.randint(1, stock[item]) for item in rng.sample(sorted(stock), items)}
    if rng.random() < SHORT:
        item = rng.choice(sorted(order))
        stock[item] = rng.randrange(order[item])
    enough = all(stock[item] >= count for item, count in order.items())
    wanted = {item: count - (order.get(item, 0) if enough else 0) for item, count in stock.items()}

    careless = rng.random() < CARELESS
    looks = "".join(f"<get>{item}</get>" for item in order) + "\n"
    actions = [looks]
    if rng.random() < SLIPS:
        item = rng.choice(sorted(order))
        actions.insert(0, looks.replace(item, rng.choice(sorted(set(ITEMS) - set(stock)))))
    if enough or careless:
        sold = list(order)[: len(order) - careless * enough * (len(order) > 1)]
        actions.append("".join(f"<take>{item} {order[item]}</take>" for item in sold) + "\n")
    actions.append("ok" if enough or careless else "no")
    prompt = "sell" + "".join(f" {count} {item}" for item, count in order.items()) + "\n"
    return Example(prompt, as_text(wanted), tuple(actions), {item: str(count) for item, count in stock.items()})


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
        tools=(Tool(get), Tool(take)),
        make=lambda rng: make(rng, difficulty),
        judge=judge,
        has_answer=lambda answer: answer in ("ok", "no"),
        max_turns=5,
        max_calls=2 * difficulty,
        max_new_tokens=difficulty * 60 + 20,
        max_observation=24,
        seed=seed,
    )
