"""The first page: it learns, it tells the truth about its numbers, and it stays one page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minirl import demo


def test_the_demo_learns_addition_in_its_default_run_and_prints_the_curve(capsys):
    curve = demo.train()
    text = capsys.readouterr().out
    assert curve[0] < 0.1 and curve[-1] > 0.95
    assert text.rstrip().endswith("1.00") and "nan" not in text
    rows = re.findall(r"^ +\d+ +\d\.\d{3} .*$", text, re.MULTILINE)
    assert [int(row.split()[0]) for row in rows] == [1, *range(5, 61, 5)]


def test_the_worked_group_is_a_group_with_one_right_answer_and_its_advantages_add_up_to_zero(capsys):
    demo.train(steps=1)
    lines = capsys.readouterr().out.splitlines()
    left, _, right, _, *answers = lines[2].split()
    rewards, advantages = lines[3].split()[1:], [float(a) for a in lines[4].split()[1:]]
    assert [int(a) == int(left) + int(right) for a in answers] == [r == "1" for r in rewards]
    assert rewards.count("1") == 1 and len(rewards) == demo.GROUP_SIZE
    assert sum(advantages) == pytest.approx(0, abs=0.1)              # printed with two digits


def test_a_group_without_variance_has_advantage_zero_and_the_others_unit_scale():
    rewards = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]])
    expected = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0], [1, -1, -1, 1]])
    torch.testing.assert_close(demo.group_advantages(rewards), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("ratio", "advantage", "surrogate", "gradient"), [
    (1.0, 1.0, 1.0, 1.0),
    (1.5, 1.0, 1.2, 0.0),        # good, and already likelier than EPS allows: no more push
    (0.5, 1.0, 0.5, 0.5),
    (1.5, -1.0, -1.5, -1.5),     # bad, and likelier than before: always pushed back
    (0.5, -1.0, -0.8, 0.0),
])
def test_the_loss_is_minus_the_clipped_surrogate(ratio, advantage, surrogate, gradient, monkeypatch):
    monkeypatch.setattr(demo, "KL_COEF", 0.0)
    logprobs = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    old = torch.zeros(1, 1, dtype=torch.float64)
    loss = demo.grpo_loss(logprobs, old, old, torch.full_like(old, advantage))
    loss.backward()
    assert loss.item() == pytest.approx(-surrogate)
    assert logprobs.grad.item() == pytest.approx(-gradient)


def test_on_the_first_pass_the_loss_is_zero_and_the_gradient_is_not():
    logits = torch.zeros(100, 19, requires_grad=True)
    answers = torch.arange(19).repeat(100, 1)                       # one right answer in each group of 19
    logprobs = demo.logprobs_of(logits, answers)
    old, advantages = logprobs.detach(), demo.group_advantages(demo.reward(answers))
    loss = demo.grpo_loss(logprobs, old, old, advantages)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert (logits.grad.argmin(1) == demo.LEFT + demo.RIGHT).all()  # descent raises the right answer's logit


def test_the_demo_is_one_page_and_imports_nothing_of_minirl():
    source = Path(demo.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 120
    assert "import minirl" not in source and "from minirl" not in source


def test_zero_steps_are_refused_in_one_line():
    command = [sys.executable, "-m", "minirl.demo", "--steps", "0"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("error: --steps 0: must be above 0")
