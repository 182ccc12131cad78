"""The metrics file, the console line, the hints, and the page that is printed from the table."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from minirl.config import UserError
from minirl.metrics import (
    BY_NAME,
    HINT_WINDOW,
    HINTS,
    MetricsLogger,
    document,
    duration,
    hints,
    read_metrics,
    sparkline,
)

REPO = Path(__file__).parent.parent
HEALTHY = {"reward_mean": 0.5, "reward_std": 0.5, "zero_variance_groups": 0.2, "approx_kl": 0.005,
           "clip_frac": 0.2, "kl_ref": 1.0, "entropy": 0.5, "truncated": 0.0, "grad_norm": 1.0,
           "ratio_max_deviation": 1e-6}


def strict_lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON: other readers of metrics.jsonl stop here")
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# --- the file ------------------------------------------------------------------------------------------

def test_each_step_is_one_line_of_strict_json_with_null_for_what_is_not_finite(tmp_path):
    logger = MetricsLogger(tmp_path / "new" / "run", ["reward_mean"], total_steps=2)
    logger.log(1, {"reward_mean": torch.tensor(0.5), "grad_norm": math.nan, "loss": -math.inf, "tokens": 7})
    assert strict_lines(logger.path) == [
        {"step": 1, "reward_mean": 0.5, "grad_norm": None, "loss": None, "tokens": 7}]
    assert math.isnan(read_metrics(logger.path)[0]["grad_norm"])


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = MetricsLogger(tmp_path, [], total_steps=2)
    logger.log(1, {"loss": 0.1})
    assert logger.path.read_text().endswith("}\n")


def test_resuming_keeps_the_lines_up_to_the_checkpoint_byte_for_byte(tmp_path):
    logger = MetricsLogger(tmp_path, [], total_steps=9)
    logger.log(0, {"eval/accuracy": 0.3})
    for step in (1, 2, 3, 4):
        logger.log(step, {"loss": step / 3, "grad_norm": math.inf})
    kept = logger.path.read_text().splitlines(keepends=True)[:3]
    with logger.path.open("a") as file:
        file.write('{"step": 5, "lo')                                   # killed in the middle of a write
    resumed = MetricsLogger(tmp_path, [], total_steps=9, resume_step=2)
    assert resumed.path.read_text() == "".join(kept)
    resumed.log(3, {"loss": 1.0})
    assert [row["step"] for row in strict_lines(resumed.path)] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == [resumed.path]


def test_a_last_line_that_was_cut_off_is_dropped_even_if_no_other_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss"')
    logger = MetricsLogger(tmp_path, [], total_steps=9, resume_step=7)
    logger.log(8, {"loss": 0.25})
    assert [row["step"] for row in strict_lines(logger.path)] == [1, 8]


def test_a_new_run_starts_a_new_file(tmp_path):
    MetricsLogger(tmp_path, [], total_steps=1).log(0, {"eval/accuracy": 0.3})
    assert MetricsLogger(tmp_path, [], total_steps=1).path.read_text() == ""


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", ""])
def test_a_broken_line_in_the_middle_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not an object"):
        read_metrics(path)


def test_ranks_other_than_the_first_touch_and_print_nothing(tmp_path, capsys):
    logger = MetricsLogger(tmp_path / "run", ["loss"], total_steps=1, enabled=False)
    logger.log(1, {"loss": 1.0})
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


# --- the console ---------------------------------------------------------------------------------------

def test_console_lines_have_fixed_columns_whatever_is_logged(tmp_path, capsys):
    columns = ["reward_mean", "lr", "skipped_steps", "eval/accuracy", "my_own_number_with_a_long_name"]
    logger = MetricsLogger(tmp_path, columns, total_steps=120)
    logger.log(0, {"eval/accuracy": 0.25})
    logger.log(7, {"reward_mean": 0.5, "lr": 3e-4, "skipped_steps": 2.0, columns[-1]: 2.5,
                   "time/tokens_per_second": torch.tensor(12345.6)})
    header, first, second = capsys.readouterr().out.splitlines()
    assert len(header) == len(first) == len(second)
    assert header.split() == ["step", "reward", "lr", "skipped", "eval", columns[-1], "tok/s", "left"]
    assert first.split() == ["0/120", "0.250"]
    assert second.split()[:-1] == ["7/120", "0.500", "3.0e-04", "2", "2.5", "12346"]
    assert header.index("eval") + 4 == first.index("0.250") + 5       # right-aligned below its label


def test_time_left_counts_only_the_steps_of_this_process(tmp_path, capsys):
    logger = MetricsLogger(tmp_path, [], total_steps=100, resume_step=90)
    logger.started -= 50                                              # 5 steps in 50 seconds, 5 to go
    logger.log(95, {})
    assert capsys.readouterr().out.split()[-1] == "50s"
    assert [duration(s) for s in (0.4, 59.6, 200, 7500)] == ["0s", "1m00s", "3m20s", "2h05m"]


# --- hints ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("change", "metric"), [
    ({"approx_kl": 0.021}, "approx_kl"),
    ({"approx_kl": 0.02}, None),
    ({"clip_frac": 0.51}, "clip_frac"),
    ({"clip_frac": 0.31}, "clip_frac"),
    ({"clip_frac": 0.09, "approx_kl": 0.004}, "clip_frac"),
    ({"clip_frac": 0.09, "approx_kl": 0.01}, None),                     # far enough, with few tokens clipped
    ({"clip_frac": 0.1}, None),
    ({"clip_frac": 0.0, "approx_kl": 0.0}, None),                     # one update a rollout: 0 is right
    ({"clip_frac": 0.0, "approx_kl": 1e-9}, None),                    # ... up to rounding
    ({"kl_ref": 10.1}, "kl_ref"),
    ({"reward_std": 0.0, "zero_variance_groups": 1.0}, "reward_std"),
    ({"zero_variance_groups": 0.95}, "zero_variance_groups"),
    ({"entropy": 0.01}, "entropy"),
    ({"entropy": 0.01, "reward_mean": 0.97}, None),                   # sure of itself, and right
    ({"truncated": 0.6}, "truncated"),
    ({"ratio_max_deviation": 0.2}, "ratio_max_deviation"),
    ({"grad_norm": math.nan}, "grad_norm"),
    ({"kl_ref": math.nan}, None),
])
def test_one_hint_for_each_unhealthy_region_and_none_for_a_healthy_run(change, metric):
    assert hints(HEALTHY) == []
    found = hints(HEALTHY | change)
    assert [hint.split()[1] for hint in found] == ([metric] if metric else [])


def test_a_hint_says_value_and_remedy_in_one_line():
    [hint] = hints({"approx_kl": 0.034})
    assert hint == ("hint: approx_kl 0.034: above 0.02 the old samples no longer describe the policy. "
                    "Lower --lr or --epochs.")
    assert hints({}) == hints({"clip_frac": 0.05}) == []        # what a trainer does not log is not judged


def test_a_run_that_stays_or_hovers_in_a_region_is_told_once_and_again_after_a_long_absence():
    bad, good = {"kl_ref": 11.0}, {"kl_ref": 9.0}
    steps = [bad, bad, good, bad, *[good] * HINT_WINDOW, bad]
    given = [bool(hints(step, steps[:i])) for i, step in enumerate(steps)]
    assert [i for i, hint in enumerate(given) if hint] == [0, len(steps) - 1]


def test_a_resumed_run_does_not_repeat_the_hints_before_its_checkpoint(tmp_path, capsys):
    logger = MetricsLogger(tmp_path, [], total_steps=9)
    logger.log(0, {"kl_ref": 11.0})
    logger.log(1, {"kl_ref": 11.0})
    assert capsys.readouterr().out.count("hint: kl_ref") == 1
    MetricsLogger(tmp_path, [], total_steps=9, resume_step=1).log(2, {"kl_ref": 12.0})
    assert "hint" not in capsys.readouterr().out


def test_what_a_run_does_on_purpose_is_not_remarked_on(tmp_path, capsys):
    for name, expected in (("a", ()), ("b", ("ratio_max_deviation",))):
        logger = MetricsLogger(tmp_path / name, [], total_steps=9, expected=expected)
        logger.log(1, {"ratio_max_deviation": 0.3, "kl_ref": 11.0})
        out = capsys.readouterr().out
        assert ("hint: ratio_max_deviation" in out) == (not expected) and "hint: kl_ref" in out


# --- sparkline and page --------------------------------------------------------------------------------

@pytest.mark.parametrize(("values", "expected"), [
    ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
    ([1, -1, math.nan, 0], "█▁ ▄"),
    ([2, 2], "▁▁"),
    ([math.inf], " "),
    ([], ""),
])
def test_a_sparkline_runs_from_the_smallest_to_the_largest_value(values, expected):
    assert sparkline(values) == expected


def test_a_long_sparkline_averages_neighbours():
    assert sparkline([0, 2, 1, 1, 7, math.nan, 8, 8], width=4) == "▁▁▇█"
    assert len(sparkline(range(1001), width=60)) == 60


def test_the_metrics_page_is_current():
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == document(), "run: python -m minirl.metrics > docs/metrics.md"


def test_every_hint_is_about_a_metric_of_the_table():
    assert {name for hint in HINTS for name in (hint.metric, *hint.needs)} <= BY_NAME.keys()


def test_pages_and_hints_name_only_flags_that_the_trainers_have():
    trainers = [pytest.importorskip(name) for name in ("train_dpo", "train_ppo", "train_grpo")]
    flags = {"--" + field.name.replace("_", "-") for trainer in trainers
             for field in dataclasses.fields(trainer.Config)}
    flags.add("--metrics")                                      # of minirl.plot
    text = document() + " ".join(hint.text for hint in HINTS)
    text += (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--[a-z][a-z-]*[a-z]", text)) <= flags
