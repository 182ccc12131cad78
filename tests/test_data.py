"""Files of rows: which tokens are learnt, windows that leak nothing, batches that anyone can ask for again."""

import json
import math

import pytest
import torch
from stubs import Pieces, random_policy
from talk import chat_tokenizer

from minirl.config import UserError
from minirl.data.dataset import POOL, Demonstrations, Rows, collate, read_rows
from minirl.data.jsonl import read_jsonl
from minirl.data.sft import Row, encode_row, pack
from minirl.env import GSM8K, Addition
from minirl.jinja_templates import chat_template
from minirl.logprobs import rollout_logprobs, token_logprobs
from minirl.losses import aggregate, loss_total, sft_loss
from minirl.parallel import forward_backward, init_mesh
from minirl.tokenizer import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id


def encode(row, tokenizer=BYTES, template="plain"):
    return encode_row(row, "rows.jsonl:1", tokenizer, template)


# ------------------------------------------------------------------ formats


def test_a_completion_is_learnt_with_its_end_and_the_prompt_is_not():
    row = encode({"prompt": "2+2=", "completion": "4!"})
    assert row.tokens == [*b"2+2=4!", EOS]
    assert row.mask == [False] * 4 + [True] * 3


def test_a_text_is_learnt_whole():
    row = encode({"text": "abc"})
    assert row.tokens == [*b"abc", EOS] and row.mask == [True] * 4


def test_bos_comes_first_once_and_is_not_learnt(shared):
    tokenizer = load_tokenizer(shared / "models/stories260k")
    for row in ({"text": "Once upon"}, {"prompt": "Once", "completion": " upon"}):
        encoded = encode(row, tokenizer)
        assert encoded.tokens[0] == tokenizer.bos_id and encoded.tokens.count(tokenizer.bos_id) == 1
        assert encoded.tokens[-1] == tokenizer.eos_id and encoded.tokens.count(tokenizer.eos_id) == 1
        assert encoded.mask[0] is False and encoded.mask[-1] is True
    assert tokenizer.decode(encoded.tokens) == "Once upon", "the space between prompt and completion is the user's own"


def test_every_assistant_turn_is_learnt_and_in_a_completion_only_the_last():
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "xy"},
             {"role": "user", "content": "B"}, {"role": "assistant", "content": "z"}]
    whole, last = encode({"messages": turns}), encode({"prompt": turns[:3], "completion": turns[3:]})
    assert whole.tokens == last.tokens
    learnt = [BYTES.decode([t for t, m in zip(row.tokens, row.mask, strict=True) if m]) for row in (whole, last)]
    assert learnt == ["xyz", "z"]
    assert sum(whole.mask) == 5 and sum(last.mask) == 2, "each turn with its end"


def test_what_is_learnt_of_a_completion_does_not_depend_on_what_a_template_deletes(tmp_path):
    """Qwen3's deletes the thoughts before the last question: with the completion the prompt is shorter than alone."""
    prompt = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "<think>hm hm hm hm</think>x"}]
    completion = [{"role": "user", "content": "B"}, {"role": "assistant", "content": "<think>t</think>yz"}]
    tokenizer = chat_tokenizer(tmp_path)
    row = encode({"prompt": prompt, "completion": completion}, tokenizer, "qwen3")
    said = tokenizer.decode([t for t, m in zip(row.tokens, row.mask, strict=True) if m], special=True)
    assert said == "<think>\nt\n</think>\n\nyz<|im_end|>"
    first = encode({"prompt": [], "completion": [{"role": "assistant", "content": "yz"}]})
    assert BYTES.decode(first.tokens) == "assistant:\nyz" and sum(first.mask) == 3


def test_columns_of_trl_are_read_unchanged(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+2", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
                {"role": "tool", "name": "add", "content": "3"}, {"role": "assistant", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    plain = encode({"messages": messages, "tools": tools})
    assert plain == encode({"messages": messages, "tools": json.dumps(tools)})
    others = {"prompt": None, "completion": None, "text": None, "chat_template_kwargs": None, "score": math.nan}
    assert plain == encode({"messages": messages, "tools": tools, **others})
    tokenizer = chat_tokenizer(tmp_path)
    chat = {"messages": [messages[1], messages[4]]}
    quiet = encode({**chat, "chat_template_kwargs": {"enable_thinking": False}}, tokenizer, "qwen3")
    assert sum(quiet.mask) < sum(encode(chat, tokenizer, "qwen3").mask), "an empty thought is given, not said"


@pytest.mark.parametrize(("column", "message"), [
    ({"tools": "[oops"}, "tools is '[oops': a list, or a string that holds one as JSON"),
    ({"tools": '"add"'}, "tools is 'add', not a list"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs is [1], not an object"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking is 'no', not a bool"),
    ({"chat_template_kwargs": {"thinking": True}}, "has 'thinking', which no template here knows: they know enable_"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": math.nan}}}]}, "is no JSON"),
])
def test_a_column_that_would_be_misread_is_named(column, message):
    chat = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(UserError) as error:
        encode({"messages": chat, **column})
    assert str(error.value).startswith("rows.jsonl:1: ") and message in str(error.value)


def test_a_template_is_looked_for_only_where_there_are_messages(tmp_path):
    texts, chats = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl"
    texts.write_text(2 * '{"text": "a"}\n')
    chats.write_text(2 * '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    foreign = ByteTokenizer(chat_template="{{ '[INST]' }}")
    assert read_rows(str(texts), "", foreign, "auto", 0, 1).template == ""
    assert read_rows(str(chats), "", foreign, "plain", 0, 1).template == "plain"
    assert read_rows(str(chats), "", BYTES, "auto", 0, 1).template == "plain"
    assert read_rows(str(chats), "", ByteTokenizer(chat_template("plain")), "auto", 0, 1).fit(99).template == "plain"
    with pytest.raises(UserError, match="looks like Llama 2's or Mistral's"):
        read_rows(str(chats), "", foreign, "auto", 0, 1)
    with pytest.raises(UserError, match="chat template 'plane' is unknown; the nearest is 'plain'"):
        read_rows(str(texts), "", BYTES, "plane", 0, 1)


def test_control_tokens_in_a_row_are_plain_text():
    row = encode({"prompt": "<|endoftext|>", "completion": "<|pad|>"})
    assert row.tokens.count(EOS) == 1 and BYTES.pad_id not in row.tokens


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "a"}, "the row has ['prompt'] of messages"),
    ({"question": "a", "answer": "b"}, "the row has none of messages"),
    ({"question": "a", "answer": "b"}, "or text; its columns are 'question', 'answer'"),
    ({"text": "a", "messages": []}, "the row has ['messages', 'text']"),
    ({"text": 3}, "text is a int"),
    ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "completion is a list, prompt is a str"),
    ({"text": None}, "the row has none of messages"),
    ({"messages": None, "prompt": "a"}, "the row has ['prompt'] of messages"),
    ({"prompt": "a", "completion": ""}, "nothing in the row is to be learnt"),
    ({"text": ""}, "nothing in the row is to be learnt"),
    ({"messages": [{"role": "user", "content": "a"}]}, "nothing in the row is to be learnt"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "'robot'"),
])
def test_a_row_that_cannot_be_used_is_named_with_its_place(row, message):
    with pytest.raises(UserError) as error:
        encode(row)
    assert str(error.value).startswith("rows.jsonl:1: ") and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "message"), [
    ("", "is empty"), ("\n\n", "is empty"), ('{"text": "a"}\n\n{oops', ":3: not JSON"), ("[1]", ":1: a list, not"),
    (b"\xff\xfe", ":1: not JSON"), (b'{"text": "caf\xe9"}', r":1: not JSON \('utf-8' codec can't decode byte 0xe9"),
    ('{\n  "text": "a"\n}', r":1: not JSON \(.* at column 2\): each line must hold one whole object"),
    ('{"text": "a"}\n{"text": "a", "text": "b"}', r":2: not JSON \(the key 'text' stands there twice\)"),
    ('{"text": [{"a": 1, "b": 2, "a": 3}]}', "the key 'a' stands there twice"),
    ('{"text": "\\ud800"}', ":1: not JSON .*surrogates not allowed"), (100000 * "[", ":1: not JSON .*recursion"),
    ('{"text": ' + 5000 * "9" + "}", ":1: not JSON .*digits"),
])
def test_a_broken_file_is_named_with_its_line(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_jsonl(path)
    with pytest.raises(UserError, match="cannot read"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    assert read_jsonl(path) == [(f"{path}:1", {"text": "a\u2028b\x85c"})]
    path.write_text('{"text": "\\ud83d\\ude00"}')
    assert read_jsonl(path) == [(f"{path}:1", {"text": "\N{GRINNING FACE}"})]


def test_the_last_tenth_is_held_out_unless_a_file_is_given(tmp_path):
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(25)))
    other.write_text(json.dumps({"text": "held"}) + "\n")
    rows = read_rows(str(path), "", BYTES, "plain", 0, 4)
    assert [rows.size(split) for split in ("train", "eval")] == [23, 2]
    assert BYTES.decode(rows.eval[1].tokens) == "row 24"
    rows = read_rows(str(path), str(other), BYTES, "plain", 0, 4)
    assert [rows.size(split) for split in ("train", "eval")] == [25, 1]
    for data, message in ((str(other), "one row"), ("", "give --data")):
        with pytest.raises(UserError, match=message):
            read_rows(data, "", BYTES, "plain", 0, 4)


# ------------------------------------------------------------------ batches


def rows_of(*lengths, learnt=1.0):
    """Rows of random letters; the first token of each is given, of the others some are learnt."""
    generator = torch.Generator().manual_seed(1)
    return [Row(torch.randint(1, 11, (n,), generator=generator).tolist(),
                [False, *(torch.rand(n - 1, generator=generator) < learnt).tolist()]) for n in lengths]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    rows = rows_of(*range(3, 20))
    data = Rows(rows, rows[:1], pad_id=0, seed=3)
    epochs = [data.batch(17 * e, 17).lengths.tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(3, 20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert Rows(rows, rows[:1], 0, seed=4).batch(0, 17).lengths.tolist() != epochs[0]


@pytest.mark.parametrize("batch_size", [0, 4])
def test_a_batch_is_a_function_of_its_number_and_ranks_take_slices(batch_size):
    rows = rows_of(*range(3, 33))
    data = Rows(rows, rows[:1], pad_id=0, batch_size=batch_size)
    whole = data.batch(28, 8)  # into the next epoch
    again = Rows(rows, rows[:1], pad_id=0, batch_size=batch_size)
    parts = [again.batch(first, 4) for first in (32, 28)][::-1]
    assert torch.equal(whole.lengths, torch.cat([part.lengths for part in parts]))
    assert whole.sample_ids.tolist() == list(range(28, 36))


def test_rows_of_similar_length_share_a_batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 100, (POOL * 8,), generator=generator).tolist()
    rows = rows_of(*lengths)
    grouped, mixed = Rows(rows, rows[:1], 0, batch_size=8), Rows(rows, rows[:1], 0)

    def padding(data):
        return sum(int((b.tokens.numel() - b.lengths.sum()) > 0) * (b.tokens.numel() - int(b.lengths.sum()))
                   for b in (data.batch(8 * i, 8) for i in range(POOL)))

    assert padding(grouped) < 0.1 * padding(mixed)
    firsts = [int(grouped.batch(8 * i, 1).lengths[0]) for i in range(POOL)]
    assert firsts != sorted(firsts), "ascending lengths would be a curriculum"


@pytest.mark.parametrize("count", [8 * 50, 8 * 50 + 1, 8 * 9 + 7, 5])
def test_batches_of_similar_length_begin_and_end_where_updates_do(count):
    """Also when an epoch ends in the middle of one; only that one mixes lengths."""
    rows = rows_of(*range(2, 2 + count))
    data = Rows(rows, rows[:1], 0, seed=1, batch_size=8)
    epochs = [data.batch(count * epoch, count).lengths.tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(2, 2 + count)) for epoch in epochs)
    lengths = [length for epoch in epochs for length in epoch]
    whole = [lengths[8 * i : 8 * i + 8] for i in range(len(lengths) // 8)
             if 8 * i // count == (8 * i + 7) // count]
    assert len(whole) >= 4 * (count // 8 - 1)
    assert all(max(batch) - min(batch) <= (7 if count % 8 == 0 else 14) for batch in whole)


def test_too_long_rows_are_refused_or_left_out():
    data = Rows(rows_of(3, 9, 4), rows_of(5, 8), pad_id=0)
    with pytest.raises(UserError, match="2 rows do not fit the model's context of 7 tokens, the longest has 9"):
        data.fit(7)
    assert [data.fit(7, drop=True).size(split) for split in ("train", "eval")] == [2, 1]
    with pytest.raises(UserError, match="no row held out fits"):
        data.fit(4, drop=True)


# ------------------------------------------------------------------ packing


def test_windows_are_full_and_hold_every_row_once():
    rows = rows_of(5, 3, 7, 2, 8, 4, 6, 2)
    windows = pack(rows, 10)
    assert [window.documents for window in windows] == [(8, 2), (7, 3), (6, 4), (5, 2)]  # best fit, longest first
    cut = [(window.tokens[start : start + n], window.mask[start : start + n]) for window in windows
           for start, n in zip((0, window.documents[0]), window.documents, strict=True)]
    assert sorted(cut) == sorted((row.tokens, row.mask) for row in rows)
    assert len(rows) == 8, "pack must not consume its input"


def test_documents_are_numbered_and_a_first_token_is_no_target():
    rollout = collate([*pack([Row([1, 2, 3], [True] * 3), Row([4, 5], [True] * 2)], 6), Row([6], [True])], pad_id=9)
    assert rollout.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 9, 9, 9, 9]]
    assert rollout.documents.tolist() == [[0, 0, 0, 1, 1], [0] * 5]
    assert rollout.action_mask.tolist() == [[True, True, False, True], [False] * 4]
    assert collate([Row([1, 2], [True, True])], pad_id=9).documents is None, "a row of one document needs no mask"


def gradients(policy, rollouts, microbatch_size, total):
    for parameter in policy.parameters():
        parameter.grad = None

    def loss_fn(out, mb):
        return aggregate(sft_loss(out.logprobs), mb.action_mask, "token", total), {}

    loss = sum(forward_backward(policy, rollout.microbatches(microbatch_size), loss_fn, init_mesh("cpu"))["loss"]
               for rollout in rollouts)
    return loss, [parameter.grad.clone() for parameter in policy.parameters()]


def test_packing_padding_and_accumulation_change_no_loss_and_no_gradient():
    policy, rows = random_policy(12), rows_of(5, 13, 7, 2, 18, 4, 9, 3, learnt=0.6)
    plain = collate(rows, pad_id=0)
    total = loss_total("token", plain.action_mask)
    loss, wanted = gradients(policy, [plain], 8, total)
    variants = {
        "one row at a time": ([plain], 1), "three": ([plain], 3),
        "packed": ([collate(pack(rows, 20), pad_id=0)], 8), "packed, by one": ([collate(pack(rows, 20), 0)], 1),
        "other padding": ([collate(rows, pad_id=11)], 8),
        "two batches": ([collate(rows[:3], 0), collate(rows[3:], 0)], 2),
    }
    for name, (rollouts, size) in variants.items():
        other, got = gradients(policy, rollouts, size, total)
        assert other == pytest.approx(loss, rel=1e-9), name
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


def test_packing_leaves_the_held_out_rows_as_they_are():
    rows = rows_of(5, 3, 7)
    packed = Rows(rows, rows[:2], pad_id=0).packed(20)
    assert packed.size("train") == 1 and packed.held_out(0, 2).lengths.tolist() == [5, 3]


def test_a_packed_document_does_not_see_its_neighbours():
    policy, rows = random_policy(12), rows_of(5, 6, 7)
    window = collate(pack(rows, 18), pad_id=0)
    before = rollout_logprobs(policy, window, 1)
    changed = window.tokens.clone()
    changed[0, :7] = 1 + changed[0, :7] % 11  # all of the first document
    after = token_logprobs(policy, changed, documents=window.documents)
    torch.testing.assert_close(before[0, 7:], after[0, 7:], rtol=1e-12, atol=0)
    assert not torch.allclose(before[0, :6], after[0, :6])


def test_reading_a_file_is_what_the_rows_say(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n{"text": "ab"}\n')
    rows = read_rows(str(path), "", Pieces("a", "b"), "auto", 0, 1)
    assert [rows.train, rows.eval] == [[Row([0, 1, 2], [False, True, True])], [Row([0, 1, 2], [True] * 3)]]


def test_the_first_rows_of_an_endless_task_come_once_an_epoch_in_an_order_of_its_own():
    env = Addition()
    first = {tuple(row) for row in Demonstrations(env, BYTES).batch(0, 10).tokens.tolist()}
    data = Demonstrations(env, BYTES, rows=10, seed=3).fit(64)
    assert data.size("train") == 10 and data.size("eval") == env.size("eval")
    epochs = [[tuple(row) for row in data.batch(start, 10).tokens.tolist()] for start in (0, 10)]
    assert epochs[0] != epochs[1] and all(set(epoch) == first and len(first) == 10 for epoch in epochs)
    halves = [tuple(row) for start in (5, 10) for row in data.batch(start, 5).tokens.tolist()]
    assert halves == epochs[0][5:] + epochs[1][:5], "a batch depends on its number alone"
    other = Demonstrations(env, BYTES, rows=10, seed=4).batch(0, 10)
    assert [tuple(row) for row in other.tokens.tolist()] != epochs[0]
    assert torch.equal(data.held_out(0, 5).tokens, Demonstrations(env, BYTES).held_out(0, 5).tokens)


def test_no_more_rows_are_learnt_than_a_file_has(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(f'{{"question": "{i}?", "answer": "#### {i}"}}\n' for i in range(20)))
    env = GSM8K(str(path))
    assert Demonstrations(env, BYTES, rows=99).size("train") == env.size("train") == 18
    assert Demonstrations(env, BYTES, rows=5).size("train") == 5
    path.write_text("".join(f'{{"prompt": "{i}?", "completion": "{i}"}}\n' for i in range(20)))
    assert [read_rows(str(path), "", BYTES, "plain", 0, 0, rows).size("train") for rows in (0, 5, 99)] == [18, 5, 18]
    assert read_rows(str(path), str(path), BYTES, "plain", 0, 0, 5).size("eval") == 20


def test_prompts_are_what_comes_before_the_first_learnt_token():
    rows = [encode({"prompt": "ab", "completion": "c"}), encode({"text": "abc"}),
            encode({"prompt": "d", "completion": "e"}),
            encode({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
                                 {"role": "user", "content": "z"}, {"role": "assistant", "content": "w"}]})]
    prompts = Rows(rows[:1], rows, BYTES.pad_id).prompts(9)
    assert prompts[:2] == [[*b"ab"], [*b"d"]] and len(prompts) == 3, "a text leaves nothing to answer"
    assert "x" in BYTES.decode(prompts[2]) and "y" not in BYTES.decode(prompts[2])
    assert Rows(rows[:1], rows, BYTES.pad_id).prompts(1) == [[*b"ab"]]
    assert Rows(rows[:1], rows[1:2], BYTES.pad_id).prompts(1) == []
