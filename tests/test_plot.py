"""Curves of a run: sparklines always, a PNG where matplotlib is installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from minirl.config import UserError
from minirl.metrics import MetricsLogger
from minirl.plot import main

REPO = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    logger = MetricsLogger(tmp_path / "run", [], total_steps=8)
    logger.log(0, {"eval/accuracy": 0.25})
    for step in range(1, 9):
        logger.log(step, {"reward_mean": step / 8, "grad_norm": float("nan"), "loss": 0.0})
    return tmp_path / "run"


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_without_matplotlib_the_curves_are_printed_and_nothing_is_written(run, capsys, without_matplotlib):
    capsys.readouterr()
    main([str(run), "--metrics", "reward_mean,eval/accuracy"])
    name, curve, second, dot = capsys.readouterr().out.splitlines()
    assert (name, second) == ("reward_mean", "eval/accuracy")
    assert curve.split() == [str(run), "0.125", "▁▂▃▄▅▆▇█", "1"]
    assert dot.split() == [str(run), "0.25", "▁", "0.25"]
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(UserError, match=r"needs matplotlib: pip install 'minirl\[plot\]'"):
        main([str(run), "--out", "x.png"])


def test_with_matplotlib_two_runs_become_one_png_even_where_a_metric_is_missing_or_never_finite(run, capsys):
    pytest.importorskip("matplotlib")
    other = MetricsLogger(run.parent / "other", [], total_steps=1)
    other.log(1, {"reward_mean": 0.5})
    out = run.parent / "docs" / "curve.png"
    main([str(run), str(run.parent / "other"), "--metrics", "reward_mean,grad_norm", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    main([str(run)])
    assert (run / "metrics.png").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["absent"], "absent has no metrics.jsonl; give the folder of a run"),
    (["new"], "metrics.jsonl is empty: the run has not finished its first step"),
    (["run", "--metrics", "reward_men"], "'reward_men' is in none of the runs; the nearest is reward_mean"),
])
def test_what_cannot_be_drawn_is_one_line_that_says_why(run, arguments, message, without_matplotlib):
    MetricsLogger(run.parent / "new", [], total_steps=1)
    with pytest.raises(UserError) as error:
        main([str(run.parent / arguments[0]), *arguments[1:]])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_command_line_exits_with_2_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "minirl.plot", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path} has no metrics.jsonl;")
    assert result.stderr.count("\n") == 1
