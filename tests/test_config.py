import gc
import json
import os
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from minirl.config import (
    UserError,
    cli,
    field_comments,
    load_config,
    read_json,
    run,
    save_config,
    usual_mode,
    write_text,
)


@dataclass(frozen=True)
class Base:
    """A parent. # not a comment"""

    out: str | None = None  # run folder


@dataclass(frozen=True)
class Config(Base):
    # optimisation

    lr: float = 1e-3  # peak learning rate, 50% of it
                      # at the end
    group_size: int = 8  # samples a prompt
    schedule: Literal["cosine", "linear"] = "cosine"  # how it falls
    compile: bool = False  # with torch.compile
    # sampling
    mark: str = "# no comment"  # text in front
    warm: bool = True  # reuse the cache
    budget: int | None = 3  # tokens

    def __post_init__(self):
        # of a method: explains no field
        if self.lr < 0:  # neither does this
            raise ValueError(f"lr {self.lr} is negative:\ntake one above 0")


def refusal(capsys, *argv):
    """What `cli` prints when it exits with 2."""
    with pytest.raises(SystemExit) as exit_:
        cli(Config, argv)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, "a refusal is one line on stderr"
    return err


@dataclass(frozen=True)
class Files:
    kind: Literal["a", "b"]  # which
    files: tuple[str, ...]  # what to read
    out: str  # what to write
    twice: bool = False  # do it again


def test_what_has_no_default_is_given_by_its_place(capsys):
    assert cli(Files, ["a", "x", "y", "z", "--twice"]) == Files("a", ("x", "y"), "z", True)
    assert cli(Files, ["--twice", "b", "x", "y"]) == Files("b", ("x",), "y", True)
    for argv in (["a", "x"], ["c", "x", "y"]):
        with pytest.raises(SystemExit):
            cli(Files, argv)
    assert "required: OUT" in capsys.readouterr().err


def test_without_flags_the_config_has_its_defaults():
    assert cli(Config, []) == Config()


def test_flags_are_the_kebab_case_of_the_fields_and_keep_their_types():
    config = cli(Config, "--lr 3e-4 --group-size=4 --schedule linear --compile --no-warm --out a/b".split())
    assert config == Config(lr=3e-4, group_size=4, schedule="linear", compile=True, warm=False, out="a/b")
    assert cli(Config, ["--budget", "none"]).budget is None
    assert cli(Config, ["--budget", "12"]).budget == 12
    assert cli(Config, ["--mark", "none"]).mark == "none", "only an optional field can be None"


def test_help_shows_docstring_groups_comments_and_defaults(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli(Config, ["--help"], description="Train a thing.\n\n    python train.py\n")
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "Train a thing.\n\n    python train.py\n" in text
    places = [text.index(word) for word in ("--out", "\noptimisation:", "--lr", "\nsampling:", "--mark")]
    assert places == sorted(places)
    assert "peak learning rate, 50% of it at the end (default: 0.001)" in " ".join(text.split())
    assert "--warm, --no-warm" in text and "{cosine,linear}" in text and "text in front" in text


def test_every_field_finds_its_comment_and_a_field_without_one_is_seen():
    comments = field_comments(Config)
    assert list(comments) == [field.name for field in fields(Config)]
    assert comments["out"] == ("", "run folder")
    assert comments["lr"] == ("optimisation", "peak learning rate, 50% of it at the end")
    assert comments["group_size"] == ("optimisation", "samples a prompt")
    assert comments["mark"] == ("sampling", "text in front")
    assert all(text for _, text in comments.values())

    @dataclass
    class Bare:
        size: int = 1
        # a title
        other: int = 2  # told

    assert field_comments(Bare) == {"size": ("", ""), "other": ("a title", "told")}


@pytest.mark.parametrize(("wrong", "near"), [("--gruop-size", "--group-size"), ("--group", "--group-size"),
                                             ("--group_size", "--group-size"), ("--no-wram", "--no-warm")])
def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys, wrong, near):
    assert refusal(capsys, wrong, "4") == f"error: unknown flag {wrong}; did you mean {near}?\n"
    assert refusal(capsys, f"{wrong}=4") == f"error: unknown flag {wrong}; did you mean {near}?\n"


def test_a_flag_like_no_other_points_to_help(capsys):
    assert refusal(capsys, "--zzzz") == "error: unknown flag --zzzz; --help lists them all\n"
    assert "'7'" in refusal(capsys, "7")


@pytest.mark.parametrize("argv", ["--lr abc", "--group-size 1.5", "--schedule square", "--budget many"])
def test_a_value_of_the_wrong_type_is_refused_by_flag_and_value(capsys, argv):
    flag, value = argv.split()
    message = refusal(capsys, flag, value)
    assert flag in message and repr(value) in message


def test_a_value_error_of_the_config_is_one_line(capsys):
    assert refusal(capsys, "--lr", "-1") == "error: lr -1.0 is negative: take one above 0\n"


@dataclass(frozen=True)
class Placed:
    folder: str  # where to look
    count: int = 2  # how often


def test_a_field_without_a_default_is_given_by_its_place(capsys):
    for argv in (["runs/a", "--count", "3"], ["--count", "3", "runs/a"]):
        assert run(lambda config: config, Placed, argv=argv) == Placed("runs/a", 3)
    for argv, said in ((["--count", "3"], "required: FOLDER"), (["a", "b"], "unexpected argument 'b'"),
                       (["--folder", "a"], "unknown flag --folder")):
        with pytest.raises(SystemExit) as exit_:
            cli(Placed, argv)
        err = capsys.readouterr().err
        assert exit_.value.code == 2 and said in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        cli(Placed, ["--help"])
    out = capsys.readouterr().out
    assert "FOLDER [--flag value ...]" in out and "where to look" in out and "where to look (default" not in out


def test_run_prints_a_user_error_and_keeps_the_traceback_of_any_other(capsys):
    def main(config):
        if config.group_size == 2:
            raise UserError("no data at x: name another file")
        if config.group_size == 3:
            raise ValueError("a bug")
        print(config.group_size)

    run(main, Config, argv=["--group-size", "1"])
    assert capsys.readouterr().out == "1\n"
    with pytest.raises(SystemExit) as exit_:
        run(main, Config, argv=["--group-size", "2"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: no data at x: name another file\n"
    with pytest.raises(ValueError, match="a bug"):
        run(main, Config, argv=["--group-size", "3"])


def test_a_saved_config_reads_back_equal(tmp_path):
    config = Config(lr=1 / 3, group_size=5, compile=True, budget=None, out="é")
    save_config(config, tmp_path / "new")
    assert load_config(Config, tmp_path / "new") == config
    assert os.listdir(tmp_path / "new") == ["config.json"]


@pytest.mark.parametrize(("content", "said"), [
    ('{"gruop_size": 3}', "unknown option 'gruop_size'; did you mean 'group_size'?"),
    ('{"lr": "abc"}', "lr is 'abc', but it must be of type float"),
    ('{"group_size": true}', "group_size is True, but it must be of type int"),
    ('{"group_size": null}', "group_size is None"),
    ('{"schedule": "square"}', "schedule is 'square', but it must be one of 'cosine', 'linear'"),
    ("{", "is not valid JSON"),
    ("[" * 100_000, "is not valid JSON"),
    ("[]", "holds a list"),
])
def test_a_config_file_with_a_mistake_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as error:
        load_config(Config, tmp_path)
    assert said in str(error.value) and "config.json" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_or_a_link_to_itself_in_the_place_of_a_file_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for name, said in (("folder", "Is a directory"), ("link", "Too many levels of symbolic links")):
        with pytest.raises(UserError, match=f"{name} cannot be read: {said}"):
            read_json(tmp_path / name)


def test_a_file_of_a_library_gets_the_permissions_of_any_other(tmp_path):
    path = tmp_path / "file"
    path.touch(mode=0o600)
    for umask, mode in ((0o022, 0o644), (0o007, 0o660)):
        before = os.umask(umask)
        usual_mode(path)
        assert os.umask(before) == umask, "it is as it was"
        assert path.stat().st_mode & 0o777 == mode


def test_a_config_file_may_lack_options_and_write_a_float_as_an_integer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"lr": 1, "budget": None}))
    assert load_config(Config, tmp_path) == Config(lr=1, budget=None)
    with pytest.raises(UserError, match="does not exist"):
        load_config(Config, tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch):
    write_text(tmp_path / "a", "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"


def test_what_imports_made_is_frozen_while_main_runs_and_no_longer():
    """Frozen for good, bindings would report all of it as leaked at the end."""
    @dataclass
    class Nothing:
        pass

    assert run(lambda _: gc.get_freeze_count(), Nothing, argv=[]) > 1000 and gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 / 0, Nothing, argv=[])
    assert gc.get_freeze_count() == 0
