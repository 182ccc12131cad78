"""From a dataclass to a command line, and to config.json and back. Standard library only.

A trainer's options are the fields of one dataclass. The comment behind a field is its help text, and a
comment on a line of its own starts a group, so that the source and `--help` cannot disagree:

    @dataclass(frozen=True)
    class Config:
        # optimisation
        lr: float = 1e-3                              # peak learning rate
        schedule: Literal["cosine", "linear"] = "cosine"    # how it falls after warm-up

    if __name__ == "__main__":
        run(main, Config, description=__doc__)        # --lr 3e-4 --schedule linear
"""

import argparse
import ast
import dataclasses
import difflib
import gc
import inspect
import io
import json
import math
import os
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """Input that the user can mend: a value, a file, a folder. One line: what is wrong, and the remedy.

    Scripts print it as `error: ...` and exit with 2 (see `run`). Any other exception, a ValueError from torch
    included, is a bug and keeps its traceback; that is why this is a class of its own.
    """


def run(main: Callable[[T], Any], config_class: type[T], description: str | None = None,
        argv: Sequence[str] | None = None) -> Any:
    """Parse the command line and return `main(config)`; a UserError becomes one line and exit code 2."""
    from minirl.parallel.mesh import explain  # which needs UserError from here

    config = cli(config_class, argv, description)
    gc.freeze()  # what torch made on its import stays; to look through it at each collection takes 80 ms on a slow core
    try:
        return main(config)
    except UserError as error:
        _fail(str(error))
    except RuntimeError as error:
        explain(error)
        raise
    finally:
        gc.unfreeze()


def fill(config: Any, values: dict[str, Any]) -> None:
    """Called while a config is made, which is frozen: an option that was not given, and is None, takes its value."""
    for name, value in values.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def cli(config_class: type[T], argv: Sequence[str] | None = None, description: str | None = None) -> T:
    """A config from the command line: one `--kebab-case` flag a field (`--flag / --no-flag` for a bool).

    A field without a default is given by its place, before or after the flags: `minirl.evaluate FOLDER --task T`.
    Fields are int, float, str, bool, Literal[...], or one of these `| None` (written `none`); one that is given by its
    place may be tuple[str, ...], at least one word. An unknown flag
    is refused with the nearest one there is, and never completed: `--group` is not `--group-size`.
    A ValueError raised by `__post_init__` is reported like a wrong flag: one line, exit code 2.
    """
    fields = dataclasses.fields(config_class)
    places = [field.name for field in fields if field.default is dataclasses.MISSING]
    parser = _Parser(description=(description or "").strip(), allow_abbrev=False, formatter_class=_Help,
                     usage=" ".join(["%(prog)s", *map(str.upper, places), "[--flag value ...]"]))
    comments = field_comments(config_class)
    hints = typing.get_type_hints(config_class)
    filled = _filled(config_class)
    groups = {"": parser}
    for field in fields:
        title, text = comments[field.name]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        options = {"help": text.replace("%", "%%")} | _argument(hints[field.name])
        if field.name in places:
            groups[title].add_argument(field.name, **options | {"metavar": field.name.upper()})
            continue
        default = field.default
        if default is None and getattr(filled, field.name, None) is not None:  # what stands in for it is shown
            options["help"] += f" (default: {getattr(filled, field.name)})"
            default = argparse.SUPPRESS
        groups[title].add_argument("--" + field.name.replace("_", "-"), default=default, **options)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            _fail(f"unexpected argument {name!r}: every value needs its flag in front (see --help)")
        near = difflib.get_close_matches(name, parser._option_string_actions, n=1)
        _fail(f"unknown flag {name}; " + (f"did you mean {near[0]}?" if near else "--help lists them all"))
    try:
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(values).items()}
        return config_class(**given)
    except ValueError as error:
        _fail(str(error))


def field_comments(config_class: type) -> dict[str, tuple[str, str]]:
    """(group, help) of every field, read from the comments in the class's source.

    The help is the comment behind the field, and goes on in comment lines that are indented deeper than it.
    """
    found = {}
    for cls in reversed(config_class.__mro__):  # base classes first, as dataclasses orders their fields
        if "__dataclass_params__" not in cls.__dict__:
            continue
        source = textwrap.dedent(inspect.getsource(cls))
        comments = {token.start[0]: token for token in tokenize.generate_tokens(io.StringIO(source).readline)
                    if token.type == tokenize.COMMENT}
        alone = {line: token.start[1] for line, token in comments.items()  # a line of their own -> its column
                 if token.line.lstrip().startswith("#")}
        group, line = "", 1
        for node in ast.parse(source).body[0].body:
            for above in range(line, node.lineno):
                if above in alone:
                    group = comments[above].string.lstrip("# ")
            line, words = node.end_lineno, []
            while line in comments and (line == node.end_lineno or alone.get(line, 0) > node.col_offset):
                words.append(comments[line].string.lstrip("# "))
                line += 1
            if isinstance(node, ast.AnnAssign):
                found[node.target.id] = (group, " ".join(words))
    return found


def check_positive(config: Any, *names: str) -> None:
    """UserError for a field that is not above 0, by the name of its flag."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be above 0, and finite")


def check_not_negative(config: Any, *names: str) -> None:
    """UserError for a field that is below 0, by the name of its flag."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be 0 or above, and finite")


def save_config(config: Any, folder: str | Path) -> None:
    """Write config.json into `folder` (made if absent), whole or not at all."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def load_config(config_class: type[T], folder: str | Path) -> T:
    """The config that `save_config` wrote; a field that the file lacks takes its default.

    UserError for a file that is absent or no JSON, an unknown name, a value of the wrong type.
    """
    path = Path(folder) / "config.json"
    values = read_json(path)
    hints = typing.get_type_hints(config_class)
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{path}: unknown option {name!r}{hint}")
        kind, choices, optional = _unpack(hints[name])
        allowed = (int, float) if kind is float else (kind,)  # JSON may write 1.0 as 1; True is no int here
        fits = type(value) in allowed and (not choices or value in choices)
        if not fits and not (optional and value is None):
            expected = f"one of {', '.join(map(repr, choices))}" if choices else f"of type {kind.__name__}"
            raise UserError(f"{path}: {name} is {value!r}, but it must be {expected}")
    return config_class(**values)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; UserError names the file when it is absent, broken or something else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:  # a folder, no permission, a link to itself
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError; "[[[[..."
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old text or the new one and never a part."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the rename may reach the disk before the text does
    os.replace(temporary, path)


def usual_mode(path: str | Path) -> None:
    """Give a file the permissions of any new one: safetensors makes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)  # it can only be read by setting it
    os.chmod(path, 0o666 & ~umask)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


def _fail(message: str) -> NoReturn:
    from minirl.parallel.mesh import let_first_rank_speak

    let_first_rank_speak()
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def _filled(config_class: type[T]) -> T | None:
    """A config of defaults, where `__post_init__` has filled in what depends on other options; None: there is none."""
    try:
        return config_class()
    except (TypeError, ValueError):  # something must be given, or given otherwise
        return None


def _unpack(hint: Any) -> tuple[type, tuple | None, bool]:
    """`X`, `X | None`, `Literal[...]` -> (type, choices, may be None)."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return type(choices[0]), choices, optional
    assert hint in (int, float, str, bool), f"{hint} cannot be an option: use int, float, str, bool, Literal"
    return hint, None, optional


def _argument(hint: Any) -> dict[str, Any]:
    """The part of `add_argument` that depends on a field's type."""
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+"}
    kind, choices, optional = _unpack(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}

    def convert(text: str) -> Any:
        value = None if optional and text == "none" else kind(text)
        if isinstance(value, float) and not math.isfinite(value):  # NaN would pass every comparison with a bound
            raise argparse.ArgumentTypeError(f"{text} is not a finite number")
        return value

    convert.__name__ = kind.__name__  # argparse's message: invalid float value: 'abc'
    if choices and optional:
        choices = (*choices, None)
    return {"type": convert, "choices": choices, "metavar": None if choices else kind.__name__}
