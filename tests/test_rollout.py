"""The Rollout and its tapes: one shift, and cuts that lose or double nothing."""

from itertools import product

import pytest
import torch

from minirl.config import UserError
from minirl.env.base import Step
from minirl.rollout import Rollout, Tapes

PAD = 99


def by_hand():
    """Two rows. Row 0: prompt 10 11, action 20 21, tool 30 31, action 22; row 1: prompt 12, action 23."""
    tapes = Tapes([[10, 11], [12]], 3, PAD, torch.float64)
    tapes.append(torch.tensor([0, 1]), torch.tensor([20, 23]), torch.tensor([-0.5, -0.25]))
    tapes.append(torch.tensor([0]), torch.tensor([21]), torch.tensor([-1.5]))
    tapes.extend(0, [30, 31], chosen=False)
    tapes.append(torch.tensor([0]), torch.tensor([22]), torch.tensor([-2.0]))
    tapes.finished[1] = True
    return tapes


def test_a_tape_is_shifted_once_so_that_column_s_belongs_to_token_s_plus_1():
    rollout = by_hand().rollout(first_id=6, group_size=2)
    assert rollout.tokens.tolist() == [[10, 11, 20, 21, 30, 31, 22], [12, 23] + [PAD] * 5]
    assert rollout.action_mask.int().tolist() == [[0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]], "20 is column 1, token 2"
    assert rollout.old_logprobs.tolist() == [[0, -0.5, -1.5, 0, 0, -2.0], [-0.25, 0, 0, 0, 0, 0]]
    assert rollout.lengths.tolist() == [7, 2]
    assert rollout.sample_ids.tolist() == [6, 7] and rollout.group.tolist() == [3, 3]
    assert rollout.finished.tolist() == [False, True]
    assert len(rollout) == 2
    chosen = rollout.tokens[:, 1:][rollout.action_mask].tolist()
    assert chosen == [20, 21, 22, 23], "the mask covers a token that was forced"


def test_a_tape_grows_past_its_buffer_and_keeps_what_was_written():
    tapes, wanted = Tapes([[1], [2, 3, 4]], 1, PAD), [[1], [2, 3, 4]]
    chosen, logprobs = [[False], [False] * 3], [[0.0], [0.0] * 3]
    for step in range(200):
        row = step % 3 % 2
        if step % 7 == 0:
            tapes.extend(row, [step] * (step % 5), chosen=step % 2 == 0)
            new = [(step, step % 2 == 0, 0.0)] * (step % 5)
        else:
            tapes.append(torch.tensor([row]), torch.tensor([step]), torch.tensor([-step / 8]))
            new = [(step, True, -step / 8)]
        wanted[row] += [token for token, _, _ in new]
        chosen[row] += [flag for _, flag, _ in new]
        logprobs[row] += [logprob for _, _, logprob in new]
    T = max(map(len, wanted))
    rollout = tapes.rollout(0, 1)
    assert rollout.tokens.shape == (2, T)
    for row in range(2):
        n = len(wanted[row])
        assert rollout.lengths[row] == n
        assert rollout.tokens[row].tolist() == wanted[row] + [PAD] * (T - n), "new room is not padded"
        assert rollout.action_mask[row].tolist() == (chosen[row] + [False] * (T - n))[1:]
        assert rollout.old_logprobs[row].tolist() == (logprobs[row] + [0.0] * (T - n))[1:]
        assert tapes.read(torch.tensor([row])) == [wanted[row]]


def test_growing_copies_the_buffer_few_times():
    tapes, widths = Tapes([[1]], 1, PAD), set()
    for _ in range(1000):
        tapes.extend(0, [7], chosen=True)
        widths.add(tapes.tokens.shape[1])
    assert len(widths) < 30, "one copy a token is quadratic"


def example(lengths=(3, 7, 2, 5, 7, 4), first=0, group_size=2):
    """Rows whose every number tells which row and column it belongs to."""
    B, T = len(lengths), max(lengths)
    ids = first + torch.arange(B)
    cell = 100 * ids[:, None] + torch.arange(T)
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    tokens = torch.where(real, cell, 0)
    number = torch.where(real, cell, 0)[:, 1:].double()
    return Rollout(tokens=tokens, action_mask=real[:, 1:] & (cell[:, 1:] % 2 == 1), lengths=torch.tensor(lengths),
                   group=ids // group_size, sample_ids=ids, old_logprobs=-number, finished=ids % 3 == 0,
                   rewards=ids / 8, advantages=ids[:, None] / 4, ref_logprobs=-2 * number, prompt_tokens=10 * ids,
                   texts=[f"text {i}" for i in ids.tolist()],
                   turns=[[Step("", float(i), True, {})] for i in ids.tolist()])


def assert_is_row(rollout, i, whole, j):
    """Row i of rollout is row j of whole, but for padding."""
    n = int(whole.lengths[j])
    for name, value in whole.tensors().items():
        mine, wanted = getattr(rollout, name)[i], value[j]
        assert mine.dtype == wanted.dtype
        if name == "tokens":
            mine, wanted = mine[:n], wanted[:n]
        elif value.dim() == 2 and name != "advantages":
            mine, wanted = mine[: n - 1], wanted[: n - 1]
        assert torch.equal(mine, wanted), f"{name} of row {j}"


def unpadded(rollout):
    T = int(rollout.lengths.max())
    assert rollout.tokens.shape[1] == T, "padding that costs time"
    for name in ("action_mask", "old_logprobs", "ref_logprobs"):
        assert getattr(rollout, name).shape[1] == T - 1, f"{name} is cut otherwise than tokens"


@pytest.mark.parametrize("index", [[0], [2, 0], [5, 3, 1], [2, 2], [0, 1, 2, 3, 4, 5]])
def test_rows_come_in_the_order_asked_for_with_all_their_parts(index):
    whole = example()
    part = whole.rows(torch.tensor(index))
    for i, j in enumerate(index):
        assert_is_row(part, i, whole, j)
    assert part.texts == [f"text {j}" for j in index]
    assert [turns[0].reward for turns in part.turns] == index
    assert part.advantages.shape == (len(index), 1), "one advantage a row is no column of tokens"
    unpadded(part)


def test_rows_of_a_rollout_without_texts_have_none():
    part = example().replace(texts=[], turns=[], advantages=None).rows(torch.tensor([1, 0]))
    assert (part.texts, part.turns, part.advantages) == ([], [], None)


def test_advantages_of_tokens_are_cut_with_the_tokens():
    whole = example()
    whole = whole.replace(advantages=whole.old_logprobs + 1)
    part = whole.rows(torch.tensor([0, 2]))
    assert torch.equal(part.advantages, whole.advantages[[0, 2], :2])


def test_no_rows_make_an_empty_rollout():
    empty = example().rows(torch.tensor([], dtype=torch.int64))
    assert len(empty) == 0 and list(empty.microbatches(4)) == []
    assert empty.tokens.shape == (0, 1) and empty.action_mask.shape == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 100])
def test_microbatches_hold_every_row_once(size):
    whole = example()
    parts = list(whole.microbatches(size))
    assert sorted(i for part in parts for i in part.sample_ids.tolist()) == list(range(6)), "a row is lost or doubled"
    assert all(1 <= len(part) <= size for part in parts) and len(parts) == -(-6 // size)
    for part in parts:
        unpadded(part)
        for i, j in enumerate(part.sample_ids.tolist()):
            assert_is_row(part, i, whole, j)


def test_rows_of_similar_length_go_together_and_ties_keep_their_order():
    assert [index.tolist() for index in example().split(2)] == [[2, 0], [5, 3], [1, 4]]
    assert example().split(6)[0].tolist() == [2, 0, 5, 3, 1, 4]


@pytest.mark.parametrize(("left", "kept"), [([0, 3], [0, 3]), ([], [0]), (range(6), range(6))])
def test_rows_without_an_action_are_left_out_but_never_all(left, kept):
    whole = example()
    mask = whole.action_mask & torch.tensor([i in left for i in range(6)])[:, None]
    assert whole.replace(action_mask=mask).acting().sample_ids.tolist() == list(kept)
    assert len(whole.rows(torch.tensor([], dtype=torch.int64)).acting()) == 0


@pytest.mark.parametrize(("count", "ranks"), list(product([1, 2, 4, 8], [1, 2, 4])))
def test_minibatches_are_equal_shares_wherever_the_rows_lie(count, ranks):
    whole = example(lengths=[2 + i * 7 % 5 for i in range(32)], first=64, group_size=8)  # 4 prompts of 8 rows
    parts = list(whole.minibatches(count))
    assert [len(part) for part in parts] == [32 // count] * count
    assert sorted(i for part in parts for i in part.sample_ids.tolist()) == list(range(64, 96))
    for part in parts:
        shares = part.group.bincount()[8:].tolist()
        assert shares == [8 // count] * 4, "a minibatch has more of one prompt than of another"
        unpadded(part)
    wanted = [sorted(part.sample_ids.tolist()) for part in parts]
    for places in (torch.arange(32), torch.randperm(32, generator=torch.Generator().manual_seed(0))):
        on_ranks = [list(whole.rows(index).minibatches(count)) for index in places.chunk(ranks)]
        found = [sorted(i for rank in on_ranks for i in rank[n].sample_ids.tolist()) for n in range(count)]
        assert found == wanted, "an update sees other rows when the samples are spread over ranks"


def test_each_epoch_deals_all_minibatches_again():
    ids = [part.sample_ids.tolist() for part in example().minibatches(3, epochs=2)]
    assert ids == [[0, 3], [1, 4], [2, 5]] * 2


def test_replace_and_all_cuts_leave_the_original_alone():
    whole = example()
    before = {name: value.clone() for name, value in whole.tensors().items()}
    new = whole.replace(rewards=torch.zeros(6))
    assert new.rewards.sum() == 0 and new.tokens is whole.tokens and whole.rewards.sum() > 0
    list(whole.microbatches(2)), list(whole.minibatches(3, 2)), whole.rows(torch.tensor([1])), whole.to("cpu")
    for name, value in whole.tensors().items():
        assert torch.equal(value, before[name]), f"{name} was changed in place"
    part = whole.rows(torch.tensor([0, 1]))
    part.rewards.zero_()
    part.tokens.zero_()
    assert whole.rewards[1] > 0 and whole.tokens[1, 1] > 0, "rows share memory with the whole"
    with pytest.raises(AttributeError):
        whole.rewards = torch.zeros(6)


def assert_equal(a, b):
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        other = getattr(b, name)
        assert value.dtype == other.dtype and torch.equal(value, other), name


def test_a_saved_rollout_comes_back_bit_equal(tmp_path):
    whole = example()
    whole.save(tmp_path / "new" / "folder" / "rollout.safetensors")
    loaded = Rollout.load(tmp_path / "new" / "folder" / "rollout.safetensors")
    assert_equal(loaded, whole)
    assert loaded.texts == []
    assert [[step.reward for step in steps] for steps in loaded.turns] == [[step.reward for step in steps]
                                                                           for steps in whole.turns]
    (tmp_path / "other").touch()
    assert (tmp_path / "new/folder/rollout.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "new/folder/rollout.safetensors").read_bytes()


def test_what_is_not_there_is_not_saved(tmp_path):
    whole = example().replace(advantages=None, ref_logprobs=None, rewards=None, prompt_tokens=None)
    whole.save(tmp_path / "rollout.safetensors")
    assert_equal(Rollout.load(tmp_path / "rollout.safetensors"), whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("with_advantages", [False, True])
def test_the_files_of_several_ranks_are_one_rollout_in_the_order_of_the_samples(tmp_path, ranks, with_advantages):
    whole = example(lengths=[2 + i * 7 % 5 for i in range(24)], group_size=2)
    if not with_advantages:
        whole = whole.replace(advantages=None)
    size = 24 // ranks
    for rank in range(ranks):  # rank_10 sorts before rank_2 by name; rows need not be in order in a file either
        index = torch.arange(rank * size, (rank + 1) * size).flip(0)
        whole.rows(index).save(tmp_path / f"rank_{rank}.safetensors")
    assert_equal(Rollout.load(tmp_path), whole.replace(texts=[], turns=[]))


@pytest.mark.parametrize("name", ["nothing.safetensors", "empty"])
def test_a_rollout_that_is_not_there_is_a_one_line_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no rollout at .*--save-rollouts") as error:
        Rollout.load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_view_of_a_tape_is_saved_whole(tmp_path):
    rollout = by_hand().rollout(0, 1)  # slices of wider buffers
    rollout.save(tmp_path / "rollout.safetensors")
    assert_equal(Rollout.load(tmp_path / "rollout.safetensors"), rollout)
