"""A key-value database as the state of a row: tools that read and change it, and a reward that looks at what is left.

What the policy says that it has done is words; `state == wanted` is what it has done.
"""

from minirl.env.tools import Tool

MAX_KEYS, MAX_LENGTH = 1000, 1000  # rows of a database, characters of a key or value: a policy writes without end


def get(database: dict[str, str], key: str) -> str:
    """The value of a key."""
    if key not in database:
        raise ValueError("no such key")
    return database[key]


def put(database: dict[str, str], key: str, value: str) -> str:
    """Set the value of a key, which may be new."""
    if max(len(key), len(value)) > MAX_LENGTH or (key not in database and len(database) >= MAX_KEYS):
        raise ValueError("database full")
    database[key] = value
    return "ok"


def take(database: dict[str, str], key: str, count: int) -> str:
    """Lower the number under a key; refused where it is not large enough."""
    stock = get(database, key)
    if not stock.isdecimal() or not 0 < count <= int(stock):
        raise ValueError(f"only {stock[:20]}")
    database[key] = str(int(stock) - count)
    return "ok"


def give(database: dict[str, str], key: str, count: int) -> str:
    """Raise the number under a key by more than 0."""
    stock = get(database, key)
    if not stock.isdecimal() or count <= 0 or len(stock) > 18:
        raise ValueError(f"{count} to {stock[:20]}")
    database[key] = str(int(stock) + count)
    return "ok"


def delete(database: dict[str, str], key: str) -> str:
    """Remove a key."""
    if database.pop(key, None) is None:
        raise ValueError("no such key")
    return "ok"


DATABASE = (Tool(get), Tool(put), Tool(take), Tool(give), Tool(delete))
