"""Weights of tokens: the papers' numbers, the batch of all ranks, and what lies under a mask."""

import math

import pytest
import torch
from ranks import run_ranks
from torch.testing import assert_close

from minirl.config import UserError
from minirl.parallel import close_mesh, init_mesh
from minirl.token_weights import (
    clip_cov,
    covariance,
    delta_weights,
    mismatch_weight,
    normalized,
    off_policy_keep,
    top_tokens,
)

T, F = True, False


def weights(mode, low=0.0, high=2.0, differences=((1.0, 2.0, -1.0),), mask=None):
    d = torch.tensor(differences).double()
    mask = torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return mismatch_weight(d - 3, torch.full_like(d, -3), mask, mode, low, high)


def test_the_corrections_of_a_sampler_that_disagrees():
    assert weights("tis")[0].tolist() == pytest.approx([2, 2, 0.367879], abs=1e-6)
    assert weights("tis", high=100.0)[0].tolist() == pytest.approx([2.718282, 7.389056, 0.367879], abs=1e-6)
    assert weights("icepop", 0.5, 5.0)[0].tolist() == pytest.approx([2.718282, 0, 0], abs=1e-6)
    assert weights("sequence-tis", high=3.0)[0].tolist() == [3] * 3  # exp(2)
    assert weights("sequence-tis", high=9.0)[0].tolist() == pytest.approx([math.exp(2)] * 3)
    assert weights("sequence-mask", 0.5, 5.0)[0].tolist() == [0] * 3
    assert weights("geometric-mask", 0.5, 2.0)[0].tolist() == [1] * 3  # exp(2 / 3) = 1.95
    assert weights("geometric-mask", 0.5, 1.9)[0].tolist() == [0] * 3
    with pytest.raises(UserError, match="use one of none, tis"):
        weights("tiss")


def test_a_masked_token_has_no_part_in_the_weight_of_its_row():
    for mode in ("sequence-tis", "sequence-mask", "geometric-mask"):
        whole = weights(mode, 0.5, 5.0, [[0.3, 0.4]])
        held = weights(mode, 0.5, 5.0, [[0.3, math.inf, 0.4]], [[T, F, T]])
        assert_close(held[:, [0, 2]], whole)


def test_bad_answers_that_the_policy_has_left_are_dropped():
    keep = off_policy_keep(torch.tensor([[-1.0], [-1], [1]]), torch.tensor([[0.7], [0.3], [0.7]]), 0.5)
    assert keep[:, 0].tolist() == [False, True, True]


def test_covariance_of_advantage_and_log_prob():
    advantages, logp = torch.tensor([[1.0, 1], [-1, -1]]).double(), torch.tensor([[-0.1, -2], [-0.2, -2.5]]).double()
    on = torch.ones(2, 2, dtype=torch.bool)
    cov = covariance(advantages, logp, on)
    assert cov.flatten().tolist() == pytest.approx([1.1, -0.8, -1, 1.3])
    assert top_tokens(cov, on, 2e-4).flatten().tolist() == [F, F, F, T]  # at least one
    noise = torch.tensor([[0.3, 0.9], [0.8, 0.6]])
    assert clip_cov(cov, on, noise, 0.5).flatten().tolist() == [0, 1, 1, 0]  # both candidates
    assert clip_cov(cov, on, noise, 0.25).flatten().tolist() == [1, 1, 1, 0]  # the one with the larger number
    assert clip_cov(cov, on, noise, 0.25, low=2.0).flatten().tolist() == [1] * 4  # none
    wide = covariance(torch.tensor([[1.0], [-1]]).double(), torch.nn.functional.pad(logp, (0, 1), value=math.nan),
                      torch.nn.functional.pad(on, (0, 1)))
    assert_close(wide[:, :2], cov)


def test_the_top_share_is_of_the_tokens_that_count():
    score = torch.tensor([[5.0, 1, 99], [4, 3, 2]])
    mask = torch.tensor([[T, T, F], [T, T, T]])
    assert top_tokens(score, mask, 0.4).tolist() == [[T, F, F], [T, F, F]]
    assert top_tokens(score, mask, 1.0).tolist() == mask.tolist()
    assert not top_tokens(score, torch.zeros_like(mask), 0.2).any()


def top_of_a_rank(score, mask):
    mesh = init_mesh("cpu", dp=2)
    mine = slice(mesh.dp_rank, mesh.dp_rank + 1)
    found = top_tokens(score[mine], mask[mine], 0.4, mesh), covariance(score[mine, :1], score[mine], mask[mine], mesh)
    close_mesh()
    return found


def test_scores_that_differ_by_rounding_are_equal():
    score, on = torch.tensor([[1.0, 0.3, 0.3 + 1e-16 * 3, 0.3 - 1e-16 * 3]]).double(), torch.ones(1, 4).bool()
    assert top_tokens(score, on, 0.5).tolist() == [[True] * 4]
    assert top_tokens(score, on, 0.25).tolist() == [[True, False, False, False]]


@pytest.mark.dist
def test_the_batch_is_that_of_all_replicas():
    score, mask = torch.tensor([[5.0, 4, 99], [1, 3, 2]]), torch.tensor([[T, T, F], [T, T, T]])
    found = run_ranks(top_of_a_rank, 2, score, mask)
    assert torch.cat([top for top, _ in found]).tolist() == [[T, T, F], [F, F, F]]
    assert_close(torch.cat([cov for _, cov in found]), covariance(score[:, :1], score, mask))


def test_delta_tells_the_sides_apart_and_leaves_what_they_share():
    vectors = torch.tensor([[[2.0, 0], [0, 1]], [[-2, 0], [0, 1]]]).double()
    advantages, on = torch.tensor([[1.0], [-1.0]]).double(), torch.ones(2, 2, dtype=torch.bool)
    alpha = (delta_weights(vectors, advantages, on, 0)[0] - 0.8) / 0.4
    assert alpha.tolist() == pytest.approx([0.880797, 0.5], abs=1e-6)
    assert (4 * alpha.logit()).tolist() == pytest.approx([8, 0])  # the margins; their mean size is 4
    lam = delta_weights(vectors, advantages, on)
    # with these weights the centroid of the right side is made anew
    refined = (vectors[0] * alpha[:, None]).sum(0) / alpha.sum()
    assert refined.tolist() == pytest.approx([1.275781, 0.362110], abs=1e-6)
    assert lam[0].tolist() == pytest.approx([1.152319, 1.0], abs=1e-6) and lam[1].tolist() == lam[0].tolist()
    objective = (lam[0] * torch.tensor([1.0, -1.0])).sum() / lam[0].sum()
    assert objective.item() == pytest.approx(0.070770, abs=1e-6)
    mean_one = normalized(lam, on)
    assert (mean_one[0] * torch.tensor([1.0, -1.0])).mean().item() == pytest.approx(0.070770, abs=1e-6)
    assert delta_weights(vectors, advantages.abs(), on).tolist() == [[1, 1], [1, 1]]
    masked = delta_weights(torch.cat((vectors, vectors.new_full((2, 1, 2), math.nan)), 1), advantages,
                           torch.nn.functional.pad(on, (0, 1)))
    assert_close(masked[:, :2], lam)
