"""Rows that begin alike read that once, and nobody can tell: same numbers, same gradients, in every layout."""

import pytest
import torch
from ranks import run_ranks
from torch.testing import assert_close

from minirl import prefixes
from minirl.critic import ValueHead
from minirl.logprobs import Output, read_rows, rollout_logprobs, rollout_values
from minirl.lora import add_lora
from minirl.model import ModelConfig, Transformer
from minirl.optim import clip_gradients
from minirl.parallel import Mesh, forward_backward, init_mesh
from minirl.parallel.layout import parallelize
from minirl.parallel.zero import gathered
from minirl.prefixes import find_prefixes
from minirl.rollout import Rollout

V = 19
KINDS = {
    "llama": {},
    "capped": dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "window": dict(sliding_window=3, layer_types=("sliding_attention", "full_attention")),
    "window of all layers": dict(sliding_window=4),
    "window and cap": dict(sliding_window=3, attn_logit_softcapping=2.0),
    "qk norms": dict(qk_norm=True, head_dim=6),
    "learned positions": dict(learned_positions=True, norm="layer", gated_mlp=False),
    "two thetas": dict(sliding_window=3, layer_types=("sliding_attention", "full_attention"), rope_local_base_freq=9.0),
}


def make_model(kind: str = "llama", **more) -> Transformer:
    options = dict(max_position_embeddings=32) | KINDS[kind] | more
    config = ModelConfig(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, **options)
    model = Transformer(config).double()
    for number, p in enumerate(model.parameters()):  # larger than at the start, so that every mistake is visible
        torch.nn.init.normal_(p, std=0.4, generator=torch.Generator().manual_seed(number))
    return model


def make_rows(prompts: list[int], answers: list[list[int]], seed: int = 1) -> Rollout:
    """A prompt of each length, and to each of them answers of some lengths; padding is noise."""
    generator = torch.Generator().manual_seed(seed)
    T = max(p + n for p, row in zip(prompts, answers, strict=True) for n in row)
    made = []
    for number, (p, row) in enumerate(zip(prompts, answers, strict=True)):
        prompt = torch.randint(V, (p,), generator=generator)
        for n in row:
            tokens = torch.randint(V, (T,), generator=generator)
            tokens[:p] = prompt
            mask = torch.zeros(T - 1, dtype=torch.bool)
            mask[p - 1 : p + n - 1] = True
            if n > 3:  # a word of a tool
                mask[p + 1] = False
            made.append((tokens, mask, p + n, number))
    tokens, masks, lengths, groups = zip(*made, strict=True)
    ids = torch.arange(len(made))
    return Rollout(torch.stack(tokens), torch.stack(masks), torch.tensor(lengths), torch.tensor(groups), ids)


ROWS = {
    "equal": make_rows([5, 5], [[3, 3, 3], [3, 3, 3]]),
    "ragged": make_rows([2, 6, 4], [[5, 1, 3], [4, 2], [1, 7, 1, 6]]),
    "one group": make_rows([7], [[4, 5, 2]]),
    "one token": make_rows([4], [[1, 1, 1, 1]]),
    "short prompt": make_rows([1, 6], [[2, 3], [4, 4, 4]]),
    "short last": make_rows([7, 2], [[4, 4, 4], [1, 2]]),
}


def weights(rows: Rollout) -> torch.Tensor:
    return torch.randn(rows.action_mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def loss_fn(out: Output, mb: Rollout) -> tuple[torch.Tensor, dict]:
    """A different weight for every column of every row, so that no two errors cancel."""
    weight = mb.old_logprobs * mb.action_mask
    parts = [(x * weight).sum() for x in (out.logprobs, out.entropy, out.values) if x is not None]
    return sum(parts), {}


def gradients(model: Transformer, rows: Rollout, mesh: Mesh | None = None) -> tuple[float, list[torch.Tensor]]:
    rows = rows.replace(old_logprobs=weights(rows))
    parameters = [p for p in model.parameters() if p.requires_grad]
    stats = forward_backward(model, [rows], loss_fn, mesh or Mesh(), 0.7, entropy=True)
    found = [p.grad.clone() for p in parameters]
    model.zero_grad()
    return stats["loss"], found


@pytest.fixture
def apart(monkeypatch):
    """Calls a function while every row is read whole."""
    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(prefixes, "WORTH", -1)
            return function(*args)
    return call


def test_what_is_read_of_a_batch_written_out_by_hand():
    tokens = torch.tensor([[1, 2, 3, 7, 9], [1, 2, 3, 8, 9], [4, 5, 6, 0, 0], [1, 2, 3, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]).bool()
    found = find_prefixes(tokens[:, :-1], mask, torch.tensor([5, 5, 3, 4]))
    assert found.shape == (2, 3, 4, 2)
    heads, tails = found.cut(found.tokens)
    assert sorted(heads.tolist()) == [[1, 2, 3], [4, 5, 0]]  # the last one is padding: 4 5 is read before 6 is chosen
    first, second = (heads.tolist().index(x) for x in ([1, 2, 3], [4, 5, 0]))
    assert found.owner.tolist() == [first, first, second, first]
    assert found.lengths.tolist() == [3 if i == first else 2 for i in range(2)]
    assert tails[:, 0].tolist() == [7, 8, 6, 9] and tails[2].tolist() == [6, 0]
    where = found.cut(found.positions)
    assert where[0].tolist() == [[0, 1, 2]] * 2
    assert where[1][:, 0].tolist() == [3, 3, 2, 3], "an answer goes on where its own prompt ends"
    a, b = 3 * first, 3 * second
    assert found.index[:, :4].tolist() == [[a, a + 1, a + 2, 6], [a, a + 1, a + 2, 8], [b, b + 1, 10, 11],
                                           [a, a + 1, a + 2, 12]]


@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_each_token_comes_back_to_its_place(rows):
    found = find_prefixes(rows.tokens[:, :-1], rows.action_mask, rows.lengths)
    back = found.rows(found.tokens[..., None])[..., 0]
    where = found.rows(found.positions[..., None])[..., 0]
    real = torch.arange(back.shape[1]) < rows.lengths[:, None] - 1
    assert torch.equal(back[real], rows.tokens[:, :-1][real])
    assert torch.equal(where[real], torch.arange(back.shape[1]).expand_as(back)[real])
    assert found.tokens.numel() < rows.tokens[:, :-1].numel()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
def test_loss_and_every_gradient_are_those_of_whole_rows(kind, rows, apart):
    model = make_model(kind)
    assert read_rows(rows).prefixes is not None, "the test shares nothing"
    loss, found = gradients(model, rows)
    loss1, wanted = apart(gradients, model, rows)
    assert loss == pytest.approx(loss1, rel=1e-11)
    assert any(x.abs().max() > 1e-3 for x in wanted)
    for (name, _), a, b in zip(model.named_parameters(), found, wanted, strict=True):
        assert_close(a, b, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("change", ["checkpointing", "lora", "value head", "critic"])
def test_so_are_those_of_a_model_with_more_to_it(change, apart):
    model = make_model(num_labels=1) if change == "critic" else make_model()
    if change == "checkpointing":
        model.gradient_checkpointing = True
    elif change == "lora":
        add_lora(model, rank=3)
        for number, p in enumerate(p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(number))
    elif change == "value head":
        model.value_head = ValueHead(16, detached=False).double()
        torch.nn.init.normal_(next(model.value_head.parameters()), generator=torch.Generator().manual_seed(3))
    loss, found = gradients(model, ROWS["ragged"])
    loss1, wanted = apart(gradients, model, ROWS["ragged"])
    assert loss == pytest.approx(loss1, rel=1e-11)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=0, atol=1e-11)


def test_without_gradient_too_and_values_are_there_behind_the_last_action(apart):
    rows, model, critic = ROWS["ragged"], make_model(), make_model(num_labels=1)
    found = rollout_logprobs(model, rows, 5, 0.7, None, True)
    wanted = apart(rollout_logprobs, model, rows, 5, 0.7, None, True)
    for name in ("logprobs", "entropy"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert_close(a[rows.action_mask], b[rows.action_mask], rtol=0, atol=1e-12)
    real = torch.arange(rows.action_mask.shape[1]) < rows.lengths[:, None]
    values, wanted = rollout_values(critic, rows, 9), apart(rollout_values, critic, rows, 9)
    assert_close(values[real], wanted[real], rtol=0, atol=1e-12)


def test_answers_do_not_see_each_other_nor_another_prompt():
    rows, model = ROWS["equal"], make_model()
    before = rollout_logprobs(model, rows, 6)
    tokens = rows.tokens.clone()
    tokens[0, 5:] = (tokens[0, 5:] + 1) % V  # an answer of the first prompt
    tokens[3:, :5] = (tokens[3:, :5] + 1) % V  # the whole other prompt
    after = rollout_logprobs(model, rows.replace(tokens=tokens), 6)
    assert read_rows(rows.replace(tokens=tokens)).prefixes is not None
    assert_close(after[1:3], before[1:3], rtol=0, atol=1e-13)
    assert (after[3:] - before[3:])[rows.action_mask[3:]].abs().min() > 1e-6


def test_rows_are_read_whole_where_sharing_does_not_pay():
    model = make_model()
    other = make_rows([5, 5, 5], [[3], [3], [3]])
    long = make_rows([2], [[20, 20]])
    packed = ROWS["equal"].replace(documents=torch.zeros_like(ROWS["equal"].tokens))
    for rows in (other, long, packed):
        reading = read_rows(rows)
        assert reading.prefixes is None and torch.equal(reading.tokens, rows.tokens[:, :-1])
        gradients(model, rows)
    nothing = ROWS["equal"].replace(action_mask=ROWS["equal"].action_mask & False)  # alike in one token or in none
    assert torch.isfinite(rollout_logprobs(model, nothing, 6)).all()


def test_prompts_are_told_apart_by_their_tokens_and_not_by_a_number_made_of_them(monkeypatch):
    monkeypatch.setattr(prefixes, "HASH", 0)  # then the first token is all that the number tells
    rows = ROWS["one group"]
    tokens = rows.tokens.clone()
    tokens[1, 3] = (tokens[1, 3] + 1) % V
    assert find_prefixes(rows.tokens[:, :-1], rows.action_mask, rows.lengths) is not None
    assert find_prefixes(tokens[:, :-1], rows.action_mask, rows.lengths) is None


def test_one_prompt_answered_at_two_points_is_two_prefixes():
    rows = make_rows([6], [[4, 4, 4, 4]])
    mask = rows.action_mask.clone()
    mask[2:, 5] = False  # the first token of two of them was given
    tokens = rows.tokens.clone()
    tokens[3, 6] = tokens[2, 6]
    found = find_prefixes(tokens[:, :-1], mask, rows.lengths)
    assert found.shape[0] == 2 and sorted(found.lengths.tolist()) == [6, 7]


MANY = make_rows([5, 6], [[4, 2, 3, 4, 1, 3], [2, 4, 4, 3, 3, 1]])
LAYOUTS = [dict(tp=2), dict(tp=2, sequence=True), dict(pp=2), dict(dp=2, zero_stage=3), dict(cp=2)]


def on_ranks() -> list:
    found = []
    for number, layout in enumerate(LAYOUTS):
        axes = {axis: layout.get(axis, 1) for axis in ("dp", "pp", "cp", "tp")}
        mesh = init_mesh("cpu", **axes)
        options = {name: value for name, value in layout.items() if name not in axes}
        model = parallelize(make_model(), mesh, **options)
        rows = MANY.replace(old_logprobs=weights(MANY))
        mine = rows.rows(torch.arange(mesh.dp_rank, len(rows), mesh.dp))
        parts = list(mine.microbatches(len(mine) // 2))
        assert [read_rows(part, mesh.cp_group).prefixes is None for part in parts] == [mesh.cp == 2] * 2
        stats = forward_backward(model, parts, loss_fn, mesh, 0.7, entropy=True)
        norm = float(clip_gradients(model.parameters(), 0, mesh))
        model.zero_grad()
        with torch.no_grad(), gathered(model):
            found.append((number, stats["loss"], norm, rollout_logprobs(model, rows, 5, 0.7, mesh)))
    return found


@pytest.mark.dist
def test_every_layout_reads_prompts_once(apart):
    model = make_model()
    wanted, grads = apart(gradients, model, MANY)
    norm = sum(float(x.square().sum()) for x in grads) ** 0.5
    logprobs = apart(rollout_logprobs, model, MANY, 5, 0.7)
    mask = MANY.action_mask
    for found in run_ranks(on_ranks, 2):
        for number, loss, grad_norm, got in found:
            assert (loss, grad_norm) == pytest.approx((wanted, norm), rel=1e-10), LAYOUTS[number]
            assert_close(got[mask], logprobs[mask], rtol=0, atol=1e-11)
