"""Pairs: read in TRL's formats, made of rollouts, dealt and cut without tearing one."""

import json
from pathlib import Path

import pytest
import torch

from minirl.config import UserError
from minirl.data.preferences import (
    Preferences,
    best_and_worst,
    common_prefix,
    encode_pair,
    mismatched,
    read_preferences,
    sample_pairs,
    stack,
)
from minirl.env import make_env
from minirl.model import ModelConfig, Transformer
from minirl.pairs import microbatches, pair_metrics, rows_of
from minirl.parallel import Mesh
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
USER = {"role": "user", "content": "2+2="}


def said(content: str) -> dict:
    return {"role": "assistant", "content": content}


def encoded(row: dict):
    return encode_pair(row, "rows.jsonl:1", BYTES, "plain")


def test_what_is_compared_are_the_answers_with_their_end():
    pair = encoded({"prompt": "2+2=", "chosen": "4", "rejected": "five"})
    assert pair.chosen.tokens == [*b"2+2=4", BYTES.eos_id] and pair.chosen.mask == [False] * 4 + [True] * 2
    assert pair.rejected.tokens == [*b"2+2=five", BYTES.eos_id] and pair.rejected.mask == [False] * 4 + [True] * 5
    assert pair.scores is None


@pytest.mark.parametrize(("implicit", "explicit"), [
    ({"chosen": "2+2=4", "rejected": "2+2=5"}, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
    ({"chosen": "Two is even", "rejected": "Two is odd"}, {"prompt": "Two is", "chosen": " even", "rejected": " odd"}),
    ({"chosen": "yes", "rejected": "no"}, {"prompt": "", "chosen": "yes", "rejected": "no"}),
    ({"chosen": [USER, said("4")], "rejected": [USER, said("5")]},
     {"prompt": [USER], "chosen": [said("4")], "rejected": [said("5")]}),
])
def test_an_implicit_prompt_is_what_both_begin_with(implicit, explicit):
    assert encoded(implicit) == encoded(explicit)


def test_a_conversation_is_compared_from_where_it_parts():
    """The first answer is the same in both, so it was given and is not judged."""
    first = [USER, said("4"), {"role": "user", "content": "and 3+3?"}]
    pair = encoded({"chosen": [*first, said("6")], "rejected": [*first, said("7")]})
    answer = [token for token, mine in zip(*pair.chosen[:2]) if mine]
    assert BYTES.decode(answer).strip() == "6"


def test_the_prefix_of_nothing_and_of_one_that_goes_on():
    assert common_prefix("", "a") == 0 and common_prefix("ab", "abc") == 2 and common_prefix(" a", " b") == 0


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same, so the pair prefers nothing"),
    ({"chosen": "ab", "rejected": "abc"}, "chosen is empty behind the prompt"),
    ({"prompt": "p", "chosen": "", "rejected": "b"}, "chosen is empty"),
    ({"prompt": "p", "chosen": [], "rejected": [said("b")]}, "chosen is empty"),
    ({"prompt": [USER], "chosen": [said("a")], "rejected": [said("")]}, "rejected is empty"),
    ({"chosen": [USER, said("a")], "rejected": [USER, said("")]}, "rejected is empty"),
    ({"prompt": "p", "chosen": "a", "rejected": [said("b")]}, "chosen is a str and rejected a list"),
    ({"prompt": "p", "completion": "a"}, "chosen is a NoneType.*columns are 'prompt', 'completion'"),
    ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "prompt is a list"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": "7"}, "score_chosen is '7', not a finite number"),
])
def test_a_row_that_is_no_pair_is_refused_by_its_place(row, message):
    with pytest.raises(UserError, match=f"^rows.jsonl:1.*{message}"):
        encoded(row)


def test_scores_of_a_file_become_rewards():
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5},
            {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 8, "score_rejected": 3.5}]
    assert stack([encoded(row) for row in rows], 0).rewards.tolist() == [0.5, 0, 8, 3.5]
    rows.append({"prompt": "p", "chosen": "a", "rejected": "b"})
    assert stack([encoded(row) for row in rows], 0).rewards is None, "not of all: of none"


def read(tmp_path: Path, count: int) -> Preferences:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}=", "chosen": "1" * (1 + i % 4), "rejected": "0"}) + "\n"
                            for i in range(count)))
    return read_preferences(str(file), "", BYTES, "auto")


def test_the_last_tenth_is_held_out_and_each_epoch_deals_every_pair_once(tmp_path):
    data = read(tmp_path, 30)
    assert data.size() == 27 and len(data.held_out) == 6
    epochs = [data.numbers(27 * epoch, 27).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(27)) for epoch in epochs) and epochs[0] != epochs[1]
    assert torch.equal(data.numbers(20, 14), torch.tensor([*epochs[0][20:], *epochs[1][:7]])), "a batch over the border"
    with pytest.raises(UserError, match="has one row, and none is left to hold out"):
        read(tmp_path, 1)


def test_a_pair_longer_than_the_context_is_an_error_or_left_out_whole(tmp_path):
    data = read(tmp_path, 30)
    with pytest.raises(UserError, match=r"\d+ of 27 pairs do not fit .* context of 7 tokens: the longest has 8"):
        data.fit(7)
    left = data.fit(7, drop=True)
    assert 0 < left.size() < 27 and int(left.train.lengths.max()) == 7
    assert left.train.group.view(-1, 2).diff().eq(0).all(), "both answers of a pair stay or go"
    with pytest.raises(UserError, match="no pair to learn fits the context of 2 tokens"):
        data.fit(2, drop=True)


def test_flipping_exchanges_the_answers_of_a_share_of_the_pairs(tmp_path):
    data = read(tmp_path, 30)
    assert torch.equal(data.flipped(1.0).train.sample_ids.view(-1, 2), data.train.sample_ids.view(-1, 2).flip(1))
    assert torch.equal(data.flipped(0.0).train.tokens, data.train.tokens)
    some = data.flipped(0.3).train.sample_ids.view(-1, 2)
    assert 0 < int((some[:, 0] > some[:, 1]).sum()) < 18
    assert torch.equal(some, data.flipped(0.3).train.sample_ids.view(-1, 2))


def test_microbatches_never_tear_a_pair(tmp_path):
    train = read(tmp_path, 30).train
    for size in (1, 4, 100):
        parts = list(microbatches(train, size))
        assert max(len(part) for part in parts) <= 2 * size
        assert sorted(i for part in parts for i in part.sample_ids.tolist()) == list(range(54))
        assert all((part.sample_ids[1::2] - part.sample_ids[::2] == 1).all() for part in parts)
    assert rows_of(torch.tensor([3, 0])).tolist() == [6, 7, 0, 1]


def rollout(rewards: list[float], group: list[int]) -> Rollout:
    n = len(rewards)
    tokens = torch.arange(n)[:, None].repeat(1, 4)
    mask = torch.tensor([[False, True, False]]).repeat(n, 1)  # with a hole, where a tool spoke
    return Rollout(tokens, mask, torch.full((n,), 4), torch.tensor(group), torch.arange(n),
                   rewards=torch.tensor(rewards), texts=["x"] * n)


def test_the_best_answer_is_paired_with_the_worst_and_equals_give_no_pair():
    pairs = best_and_worst(rollout([0.2, 1, 1, 0, 0, 0, 0.5, -1], [4, 4, 4, 4, 7, 7, 9, 9]))
    assert pairs.sample_ids.tolist() == [1, 3, 6, 7] and pairs.rewards.tolist() == [1, 0, 0.5, -1]
    assert pairs.action_mask.tolist() == [[False, True, False]] * 4, "what a tool said is no part of the answer"
    assert len(best_and_worst(rollout([1, 1], [0, 0]))) == 0


def test_the_best_answer_may_meet_several_of_the_worst_each_another_text():
    rows = rollout([0, 1, 0.5, 0, 1, 0], [3] * 6)
    rows.tokens[3] = rows.tokens[0]
    assert best_and_worst(rows, 9).sample_ids.tolist() == [1, 0, 1, 5, 1, 2], "row 3 says what row 0 said"
    assert best_and_worst(rows, 2).sample_ids.tolist() == [1, 0, 1, 5]


@pytest.mark.parametrize("task", ["addition", "calculator"])
def test_a_policy_that_is_never_right_gives_no_pair_and_a_clear_line(task):
    env = make_env(task, difficulty=1)
    policy = Transformer(ModelConfig(258, 8, 8, 1, 2, 2, max_position_embeddings=64, rope_theta=100.0))
    policy.init_weights(torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match=f"3 problems of {task}, answered 2 times each, gave no pair"):
        sample_pairs(policy, BYTES, env, 3, 2, 1, "train", Mesh(), max_new_tokens=2, seed=0)


def test_mismatched_rows_are_a_prompt_with_the_next_pairs_answer():
    pairs = stack([encoded({"prompt": f"{i}=", "chosen": word, "rejected": "?"})
                   for i, word in enumerate(("one", "two!", "3"))], BYTES.pad_id)
    rows = mismatched(pairs, BYTES.pad_id, 64)
    texts = [BYTES.decode(row[:length]) for row, length in zip(rows.tokens.tolist(), rows.lengths.tolist())]
    assert texts == ["0=two!", "1=3", "2=one"]
    assert rows.action_mask.sum(1).tolist() == [5, 2, 4], "the answer and its EOS"
    assert mismatched(pairs, BYTES.pad_id, 5).lengths.tolist() == [5, 4, 5]


def test_metrics_are_means_over_pairs():
    assert pair_metrics({"rows": 4, "row_accuracy": 3, "row_margin": 2, "loss": 9}, "eval/") == {
        "eval/preference_accuracy": 0.75, "eval/reward_margin": 0.5}
