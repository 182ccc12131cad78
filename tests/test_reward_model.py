"""The reward model: what its loss is, where a score is read, and that a folder of one opens elsewhere."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch.autograd import gradcheck

from minirl.checkpoint import load_model, read_model_config, save_model
from minirl.config import UserError
from minirl.learner import Learner
from minirl.logprobs import Output, rollout_values
from minirl.losses import row_sum
from minirl.model import ModelConfig, Transformer
from minirl.optim import adamw
from minirl.pairs import pair_loss, pair_update
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.parallel.layout import parallelize
from minirl.reward_model import (
    load_reward_model,
    pair_inputs,
    reward_loss,
    reward_model_of,
    reward_stats,
    score_inputs,
    score_rows,
)
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer, load_tokenizer

TINY = ModelConfig(258, 16, 24, 4, 4, 2, max_position_embeddings=64, rope_theta=100.0)
f64 = torch.float64


def model_of(config: ModelConfig = TINY, seed: int = 0) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    return reward_model_of(Transformer(config).init_weights(generator).double(), generator)


def rows(lengths: tuple[int, ...] = (5, 3, 9, 4, 4, 7), vocab_size: int = 258) -> Rollout:
    T, ids = max(lengths), torch.arange(len(lengths))
    tokens = torch.randint(vocab_size - 1, (len(lengths), T), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(lengths)
    tokens = torch.where(torch.arange(T) < lengths[:, None], tokens, vocab_size - 1)
    return Rollout(tokens, torch.ones(len(ids), T - 1, dtype=torch.bool), lengths, ids // 2, ids)


def test_the_loss_by_hand():
    """margin 1: log(1 + e^-1). A pair that is 200 the wrong way costs 200, and not infinity."""
    loss = reward_loss(torch.tensor([2.0, -100.0, 3.0]), torch.tensor([1.0, 100.0, 3.0]))
    torch.testing.assert_close(loss, torch.tensor([0.313262, 200.0, math.log(2)]))
    with_margin = reward_loss(torch.tensor([2.0]), torch.tensor([1.0]), margin=torch.tensor([1.0]))
    torch.testing.assert_close(with_margin, torch.tensor([math.log(2)]))
    centred = reward_loss(torch.tensor([2.0]), torch.tensor([1.0]), centring=0.01)
    torch.testing.assert_close(centred, torch.tensor([0.313262 + 0.09]))


def test_the_gradient_of_the_loss():
    c, r, margin = torch.randn(3, 5, dtype=f64, generator=torch.Generator().manual_seed(0))
    assert gradcheck(lambda c, r: reward_loss(c, r, margin.abs(), 0.01), (c.requires_grad_(), r.requires_grad_()))


def test_stats_are_sums_and_a_tie_is_half_right():
    stats = reward_stats(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 3.0]))
    assert {name: float(value) for name, value in stats.items()} == {
        "rows": 3, "row_reward_chosen": 3, "row_reward_rejected": 5, "row_margin": -2, "row_accuracy": 1.5}


def test_a_score_is_read_at_the_last_real_token_whatever_stands_behind_it():
    model, rollout = model_of(), rows()
    scores = score_rows(model, rollout, 100)
    for i, length in enumerate(rollout.lengths.tolist()):
        alone = model.scores(model(rollout.tokens[i : i + 1, :length]))[0, -1]
        assert scores[i] == pytest.approx(float(alone), abs=1e-12), "padding, or the token before the last"
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    for again in (score_rows(model, rollout, 2), score_rows(model, rollout.rows(order), 100)[order.argsort()],
                  score_rows(model, rollout.replace(tokens=torch.nn.functional.pad(rollout.tokens, (0, 5)),
                                                    action_mask=torch.nn.functional.pad(rollout.action_mask, (0, 5))),
                             4)):
        torch.testing.assert_close(again, scores, rtol=0, atol=1e-12)


def test_training_reads_the_same_score_as_scoring():
    model, rollout = model_of(), rows()
    inputs = score_inputs(rollout)
    values = model.scores(model(inputs.tokens[:, :-1]))
    torch.testing.assert_close(row_sum(values, inputs.action_mask), score_rows(model, rollout, 3), rtol=0, atol=1e-12)
    assert inputs.action_mask.sum(1).tolist() == [1] * 6
    torch.testing.assert_close(values, rollout_values(model, inputs, 6), rtol=0, atol=1e-12)


def pairs_of(*answers: list[int]) -> Rollout:
    """Rows behind the prompt 1, 2."""
    tokens = [torch.tensor([1, 2, *answer]) for answer in answers]
    tokens = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=9)
    ids = torch.arange(len(answers))
    mask = torch.ones(len(answers), tokens.shape[1] - 1, dtype=torch.bool)
    return Rollout(tokens, mask, torch.tensor([2 + len(answer) for answer in answers]), ids // 2, ids)


def test_beginnings_are_compared_from_where_they_part_to_where_the_shorter_answer_ends():
    """5 6 8 and 5 7 7 8 part at column 3; column 4 is the end of the first. Then 5, of which 5 8 goes on."""
    inputs = pair_inputs(pairs_of([5, 6, 8], [5, 7, 7, 8], [5], [5, 8]), prefixes=True)
    assert inputs.weights.tolist() == [[0, 0, 0, 0.5, 0, 0]] * 2 + [[0] * 6] * 2
    values = torch.zeros(4, 6, dtype=f64)
    values[:, 3] = torch.tensor([2.0, 1.0, 7.0, 0.0])  # on the way; and of the last row the end
    values[0, 4], values[1, 5], values[2, 2] = 0.5, 0.0, 3.0  # the ends of the others
    loss, stats = pair_loss(Output(None, None, values), inputs, torch.tensor(2.0), Mesh(), centring=0.0)
    by_hand = (0.5 * math.log(1 + math.exp(-1)) + 0.5 * math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-3))) / 2
    assert float(loss) == pytest.approx(by_hand, rel=1e-6) and stats["row_margin"] == 3.5, "logged is the end alone"


def test_without_beginnings_the_loss_is_that_of_the_ends():
    inputs = pair_inputs(pairs_of([5, 6, 8], [5, 7, 7, 8]))
    assert inputs.weights is None
    values = torch.arange(12.0).view(2, 6)
    loss, _ = pair_loss(Output(None, None, values), inputs, torch.tensor(1.0), Mesh(), centring=0.0)
    assert float(loss) == pytest.approx(float(reward_loss(values[0, 4], values[1, 5])))


def test_nothing_is_changed_in_place():
    model, rollout = model_of(), rows()
    before = {name: tensor.clone() for name, tensor in rollout.tensors().items()}
    score_rows(model, rollout, 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in rollout.tensors().items())


def test_the_layers_are_the_policys_and_a_tied_head_is_left_behind():
    for tied in (True, False):
        policy = Transformer(replace(TINY, tie_word_embeddings=tied)).init_weights(torch.Generator().manual_seed(0))
        model = reward_model_of(policy, torch.Generator().manual_seed(0))
        tokens = rows().tokens
        assert torch.equal(model(tokens), policy(tokens))
        assert "lm_head.weight" not in model.state_dict()
        with torch.no_grad():
            model.embed_tokens.weight.zero_()
        assert policy.embed_tokens.weight.abs().sum() > 0, "a copy, not the policy's own"


def test_asked_for_words_it_says_what_it_is():
    with pytest.raises(UserError, match="a reward model or critic scores texts"):
        model_of().logits(torch.zeros(1, 16, dtype=f64))


# ---- in layouts ----

def train(mesh, **options) -> tuple[list[float], torch.Tensor]:
    """Three updates of a reward model, and the scores after them."""
    model = parallelize(model_of(), mesh, **options)
    optimizer, losses = adamw(model, 1e-2), []
    share = mesh.share(4)
    mine = rows((5, 3, 9, 4, 4, 7, 6, 6)).rows(torch.arange(2 * share.start, 2 * share.stop))
    for _ in range(3):
        def loss_fn(out, mb):
            scores = row_sum(out.values, mb.action_mask, mesh.cp_group)
            return reward_loss(scores[0::2], scores[1::2]).sum() / 4 / mesh.cp, reward_stats(scores[0::2], scores[1::2])

        pairs = [score_inputs(mine.rows(torch.tensor([2 * i, 2 * i + 1]))) for i in range(len(mine) // 2)]
        stats = forward_backward(model, pairs, loss_fn, mesh)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(stats["loss"])
        assert stats["rows"] == 4
    return losses, score_rows(model, rows(), 4, mesh)


def train_in(layout: dict) -> tuple[list[float], torch.Tensor]:
    axes = {name: layout[name] for name in ("dp", "pp", "cp", "tp") if name in layout}
    return train(init_mesh("cpu", **axes), **{name: value for name, value in layout.items() if name not in axes})


@pytest.mark.dist
@pytest.mark.parametrize("layout", [dict(dp=2), dict(tp=2), dict(tp=2, sequence=True), dict(pp=2), dict(cp=2),
                                    dict(dp=2, zero_stage=3)], ids=str)
def test_every_layout_gives_the_same_scores(layout):
    losses, scores = train(Mesh())
    for theirs in run_ranks(train_in, 2, layout):
        assert theirs[0] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(theirs[1], scores, rtol=1e-9, atol=1e-9)


def learn(layout: dict) -> tuple[list[float], torch.Tensor]:
    """Three steps on pairs that are all the first replica's, as when the groups of the second are flat."""
    mesh = init_mesh("cpu", dp=layout["dp"])
    model = parallelize(model_of(), mesh, zero_stage=layout.get("zero_stage", 0))
    learner = Learner(model, mesh, 1e-2, 1.0)
    mine = rows((5, 3, 9, 4, 4, 7, 6, 6)).rows(torch.arange(8 if mesh.dp_rank == 0 else 0))
    losses = [pair_update(learner, mine, 2, 1e-2)["loss"] for _ in range(3)]
    assert pair_update(learner, mine.rows(torch.arange(0)), 2, 1e-2) == {}, "nobody has any"
    return losses, score_rows(model, rows(), 4, mesh)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [dict(dp=2), dict(dp=2, zero_stage=3)], ids=str)
def test_a_replica_without_pairs_follows_the_others(layout):
    losses, scores = learn(dict(dp=1))
    for theirs in run_ranks(learn, 2, layout):
        assert theirs[0] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(theirs[1], scores, rtol=1e-9, atol=1e-9)


# ---- on disk ----

MODELS = ["llama", "gemma3_text", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("name", MODELS)
def test_a_reward_model_of_any_architecture_opens_in_transformers_with_the_same_scores(name, shared, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = reward_model_of(load_model(shared / "models" / name), torch.Generator().manual_seed(0))
    save_model(model, tmp_path)
    rollout = rows(vocab_size=model.config.vocab_size)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    theirs.config.pad_token_id = theirs.config.get_text_config().pad_token_id = model.config.vocab_size - 1
    assert theirs.num_labels == 1
    with torch.no_grad():
        logits = theirs(rollout.tokens).logits[:, 0]
    torch.testing.assert_close(score_rows(model, rollout, 2), logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_model(model_of(), tmp_path / "reward", ByteTokenizer())
    return tmp_path / "reward"


def test_saved_and_opened_it_gives_the_same_scores_to_the_bit(folder):
    config = read_model_config(folder)
    assert config.num_labels == 1 and config.model_type == "llama"
    again = load_reward_model(folder, ByteTokenizer(), dtype=f64)
    assert torch.equal(score_rows(again, rows(), 2), score_rows(model_of(), rows(), 2))
    text = (folder / "config.json").read_text()
    assert '"LlamaForSequenceClassification"' in text and '"pad_token_id": 257' in text


def test_what_is_no_reward_model_of_this_vocabulary_is_refused(folder, shared, tmp_path):
    stories = shared / "models/stories260k"
    with pytest.raises(UserError, match=r"is a language model, which gives no score: .*--loss reward"):
        load_reward_model(stories)
    with pytest.raises(UserError, match=r"another vocabulary than the policy \(258 tokens and 512\)"):
        load_reward_model(folder, load_tokenizer(stories))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"num_labels": 1', '"num_labels": 3'))
    with pytest.raises(UserError, match="with 3 labels is not supported"):
        load_model(other)
