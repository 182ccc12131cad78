"""Between likelihood and RL: the objective, its estimator, and how long a policy takes that never succeeds."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from minirl.config import UserError
from minirl.objective import make_advantages
from minirl.recipes import RecipeOptions, fill_in
from minirl.rollout import Rollout
from minirl.tsallis import Config, garl_loss, main, steps_to_succeed, tsallis_log


def test_the_logarithm_runs_from_p_minus_1_to_log_p():
    log_p = torch.tensor([0.25, 1.0, 1e-6]).double().log()
    assert_close(tsallis_log(log_p, 0.0), log_p.exp() - 1)
    assert torch.equal(tsallis_log(log_p, 1.0), log_p)
    assert_close(tsallis_log(log_p, 0.5), 2 * (log_p.exp().sqrt() - 1))
    assert_close(tsallis_log(log_p, 1 - 1e-9), log_p, rtol=1e-6, atol=0)
    log_p.requires_grad_()
    tsallis_log(log_p, 0.75).sum().backward()
    assert_close(log_p.grad, log_p.detach().exp() ** 0.25)  # by p it is p^-q, by log p one p more
    with pytest.raises(UserError, match="q is 2"):
        tsallis_log(log_p, 2.0)


class World:
    """Three thoughts, and behind each a chance of the right answer: five logits."""

    def __init__(self):
        self.theta = torch.tensor([0.3, -0.5, 0.1, -3.0, -1.0, -6.0], dtype=torch.float64, requires_grad=True)

    def logprobs(self):
        return self.theta[:3].log_softmax(0), torch.nn.functional.logsigmoid(self.theta[3:])

    def gradient(self, q: float):
        thoughts, answers = self.logprobs()
        return torch.autograd.grad(tsallis_log((thoughts + answers).logsumexp(0), q), self.theta)[0]

    def expected(self, q: float, rows: int):
        """The update of every group of `rows` thoughts, times its probability."""
        total = torch.zeros(6, dtype=torch.float64)
        for members in itertools.product(range(3), repeat=rows):
            thoughts, answers = self.logprobs()
            loss = garl_loss(thoughts[list(members)], answers[list(members)], torch.zeros(rows).long(), q).mean()
            chance = thoughts.detach()[list(members)].sum().exp()
            total -= chance * torch.autograd.grad(loss, self.theta)[0]
        return total


def test_without_amplification_the_estimator_is_unbiased():
    for rows in (2, 3):
        assert_close(World().expected(0.0, rows), World().gradient(0.0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("q", [0.5, 1.0])
def test_its_bias_shrinks_with_the_number_of_rows(q):
    want = World().gradient(q)
    bias = [float((World().expected(q, rows) - want).norm() / want.norm()) for rows in (2, 4, 7)]
    assert bias[0] > bias[1] > bias[2] and bias[2] < 0.8 * bias[0], bias


def test_groups_do_not_mix_and_tiny_probabilities_do_not_vanish():
    thoughts = torch.tensor([-1.0, -2, -1, -1], requires_grad=True)
    answers = torch.tensor([-1.0, -3, -230, -231], requires_grad=True)  # e^-230 is 0 in float32
    group = torch.tensor([5, 5, 2, 2])
    whole = garl_loss(thoughts, answers, group, 1.0)
    assert_close(garl_loss(thoughts[2:], answers[2:], group[2:], 1.0), whole[2:])
    whole.sum().backward()
    share = torch.tensor([-1.0, -3, 0, -1]).exp().view(2, 2)
    assert_close(answers.grad, -(share / share.mean(1, keepdim=True)).flatten())
    with pytest.raises(UserError, match="one thought"):
        garl_loss(thoughts, answers, torch.tensor([0, 0, 0, 1]))


# ---- escape ----

def by_autograd(words: int, length: int, q: float) -> int:
    """The same ascent with a tensor of logits."""
    logits = torch.zeros(length, words, dtype=torch.float64, requires_grad=True)
    for step in range(10**4):
        log_p = logits.log_softmax(1)[:, 0].sum()
        if log_p >= math.log(0.9):
            return step
        gradient, = torch.autograd.grad(tsallis_log(log_p, q), logits)
        logits = (logits + gradient).detach().requires_grad_()
    raise AssertionError


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
def test_the_steps_are_those_of_gradient_ascent(q):
    assert steps_to_succeed(4, 2, q) == by_autograd(4, 2, q)


def test_rl_needs_1_over_p_steps_and_likelihood_hardly_more_for_a_rare_success():
    rl = [steps_to_succeed(10, length, 0.0) for length in (3, 4)]
    likelihood = [steps_to_succeed(10, length, 1.0) for length in (3, 4)]
    assert rl[1] > 5 * rl[0] and likelihood[1] < 1.5 * likelihood[0]
    steps = [steps_to_succeed(10, 4, q) for q in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert steps == sorted(steps, reverse=True)


def test_garl_gets_away_from_where_grpo_stands_still():
    """Sixteen answers a step out of a million possible ones: none is ever right. The thought that would do is one of
    four, and the right answer is known."""
    torch.manual_seed(0)

    def chance(theta):
        thoughts, words = theta[:4].log_softmax(0), theta[4:].view(4, 6, 10).log_softmax(2)
        return thoughts, words[:, :, 0].sum(1), words

    def run(step, lr):
        theta = torch.zeros(4 + 240, dtype=torch.float64)
        for _ in range(150):
            theta = theta.requires_grad_()
            loss = step(theta)
            theta = (theta - lr * torch.autograd.grad(loss, theta)[0]).detach()
        thoughts, right, _ = chance(theta)
        return float((thoughts + right).logsumexp(0).exp())

    def grpo(theta):
        thoughts, _, words = chance(theta)
        z = torch.multinomial(thoughts.detach().exp(), 16, replacement=True)
        said = torch.multinomial(words[z].detach().exp().flatten(0, 1), 1).view(16, 6)
        logp = thoughts[z] + words[z].gather(2, said[:, :, None])[:, :, 0].sum(1)
        rewards = (said == 0).all(1).double()
        rollout = Rollout(said, torch.ones(16, 5).bool(), torch.full((16,), 6), torch.zeros(16).long(),
                          torch.arange(16), old_logprobs=torch.zeros(16, 5), rewards=rewards)
        options = RecipeOptions(recipe="default")
        fill_in(options)
        return -(make_advantages(rollout, options, 6)[:, 0] * logp).mean()

    def garl(theta):
        thoughts, answers, _ = chance(theta)
        z = torch.multinomial(thoughts.detach().exp(), 16, replacement=True)
        return garl_loss(thoughts[z], answers[z], torch.zeros(16).long(), 0.75).mean()

    assert run(grpo, 1.0) == pytest.approx(1e-6) and run(garl, 1.0) > 0.9


def test_the_module_prints_its_table(capsys):
    main(Config(words=3))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[2].split()[:3] == ["P_0", "GRPO", "waits"]
    with pytest.raises(UserError, match="fewer than 2"):
        Config(words=1)
