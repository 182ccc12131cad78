import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from kernels.linear_logprob import KEEP_LOGITS
from minirl.logprobs import Output, first_action, rollout_logprobs, shift_mask, token_logprobs
from minirl.losses import aggregate
from minirl.model import ModelConfig, Transformer
from minirl.parallel import Mesh, forward_backward
from minirl.rollout import Rollout

V = 19


@pytest.fixture(params=["tied", "untied", "capped"])
def model(request):
    config = ModelConfig(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=request.param == "tied",
                         final_logit_softcapping=2.0 if request.param == "capped" else 0.0)
    model = Transformer(config).double()
    for p in model.parameters():  # larger than at the start of a training, so that every mistake is visible
        torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.fixture
def tokens():
    return torch.randint(V, (3, 8), generator=torch.Generator().manual_seed(1))


def test_column_s_is_the_token_s_plus_1_given_all_before_it(model, tokens):
    got = token_logprobs(model, tokens, temperature=0.7)
    assert got.shape == (3, 7)
    for row in range(3):
        for s in range(7):
            logits = model.logits(model(tokens[row : row + 1, : s + 1]))[0, -1] / 0.7
            assert_close(got[row, s], F.log_softmax(logits, 0)[tokens[row, s + 1]])


def test_entropy_comes_with_the_same_log_probs(model, tokens):
    out = token_logprobs(model, tokens, temperature=0.7, entropy=True)
    assert isinstance(out, Output) and out.entropy.shape == (3, 7)
    assert_close(out.logprobs, token_logprobs(model, tokens, temperature=0.7))
    logp = F.log_softmax(model.logits(model(tokens[:, :-1])) / 0.7, -1)
    assert_close(out.entropy, -(logp.exp() * logp).sum(-1))


def test_every_parameter_gets_a_gradient(model, tokens):
    token_logprobs(model, tokens).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.count_nonzero() > 0, name


def test_neither_padding_nor_the_other_rows_nor_the_training_flag_change_a_row(model, tokens):
    want = token_logprobs(model, tokens)
    padded = F.pad(tokens, (0, 5), value=3)
    assert_close(token_logprobs(model, padded)[:, :7], want)
    assert_close(token_logprobs(model, tokens[[2, 0]]), want[[2, 0]])
    model.eval()
    assert_close(token_logprobs(model, tokens), want, rtol=0, atol=0)


def test_a_second_pass_gives_a_ratio_of_one(model, tokens):
    with torch.no_grad():
        old = token_logprobs(model, tokens, temperature=0.6)
    ratio = (token_logprobs(model, tokens, temperature=0.6) - old).exp()
    assert (ratio - 1).abs().max() < 1e-12
    assert ((token_logprobs(model, tokens) - old).exp() - 1).abs().max() > 0.01, "temperature is not applied"


def test_packed_documents_are_scored_as_if_each_were_alone(model, tokens):
    a, b = tokens[:1, :3], tokens[1:2, :4]
    packed, documents = torch.cat((a, b), 1), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    got = token_logprobs(model, packed, documents=documents)
    assert_close(got[:, :2], token_logprobs(model, a))
    assert_close(got[:, 3:], token_logprobs(model, b))
    assert not torch.allclose(token_logprobs(model, packed)[:, 3:], got[:, 3:]), "the test sees no difference"

    changed = packed.clone()
    changed[0, 0] = (changed[0, 0] + 1) % V
    assert_close(token_logprobs(model, changed, documents=documents)[:, 3:], got[:, 3:], rtol=0, atol=0)

    mask = shift_mask(torch.ones_like(packed, dtype=torch.bool), documents)
    alone = token_logprobs(model, a).sum() + token_logprobs(model, b).sum()
    assert_close(got[mask].sum(), alone)


@pytest.mark.parametrize("keep", [KEEP_LOGITS, 0], ids=["small", "large"])
def test_what_the_prompt_would_have_said_is_not_computed_and_nothing_else_changes(model, tokens, keep, monkeypatch):
    """Loss, statistics and every gradient are those of the whole; with a large head, in pieces, too."""
    monkeypatch.setattr("minirl.logprobs.KEEP_LOGITS", keep)
    monkeypatch.setattr(sys.modules["kernels.head_loss"], "HEAD_LOGITS", 2 * 3 * V)  # two columns a piece
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 3:6] = mask[1, 5:] = mask[2, 4] = True
    ids = torch.arange(3)
    rows = Rollout(tokens, mask, torch.full((3,), 8), ids, ids)
    asked = []

    def loss_fn(out, mb):
        asked.append(int(out.logprobs.count_nonzero()))
        loss = aggregate(-out.logprobs - 0.1 * out.entropy, mb.action_mask, "token", 6)
        return loss, {"tokens": mb.action_mask.sum()}

    stats = forward_backward(model, [rows], loss_fn, Mesh(), 0.7, entropy=True, by_token=True)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert sum(asked) == 3 * 4 and stats["tokens"] == 6
    model.zero_grad()
    out = token_logprobs(model, tokens, 0.7, entropy=True)
    loss = (-out.logprobs - 0.1 * out.entropy)[mask].sum() / 6
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-12)
    for name, p in model.named_parameters():
        assert_close(found[name], p.grad, rtol=1e-10, atol=1e-12)
    got = rollout_logprobs(model, rows, 2, 0.7)
    assert_close(got[mask], out.logprobs[mask])
    assert not got[:, :3].any()
    assert first_action(mask) == 3 and first_action(mask & False) == 0


def test_documents_of_3_and_4_tokens_have_5_targets():
    mask = shift_mask(torch.ones(1, 7, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    assert mask.tolist() == [[True, True, False, True, True, True]]


def test_a_token_mask_moves_one_column_to_the_left():
    assert shift_mask(torch.tensor([[True, False, True, True]])).tolist() == [[False, True, True]]


def test_rows_without_an_action_are_not_read_and_change_no_other(model, tokens, monkeypatch):
    mask, read = torch.ones(3, 7, dtype=torch.bool), []
    mask[1] = False
    rollout = Rollout(tokens, mask, torch.full((3,), 8), torch.arange(3), torch.arange(3))
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, x, *args, **kwargs: read.append(x) or forward(
        self, x, *args, **kwargs))
    got = rollout_logprobs(model, rollout, 1)
    assert len(read) == 2 and not any(torch.equal(x, tokens[1:2]) for x in read)
    assert not got[1].any()
    for row in (0, 2):
        assert_close(got[row], token_logprobs(model, tokens)[row].detach())
    nothing = rollout_logprobs(model, rollout.replace(action_mask=torch.zeros_like(mask)), 2)
    assert nothing.shape == (3, 7), "a step in which all groups are alike"
