"""Talking to a model: the row that a conversation becomes, and the command."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stubs import Chain, Reader, random_policy
from talk import chat_tokenizer, user

from minirl.adapters import save_adapter
from minirl.chat import render, reply
from minirl.checkpoint import save_model
from minirl.config import UserError
from minirl.generate import generate
from minirl.jinja_templates import chat_template, save_chat_template
from minirl.lora import add_lora, trainable_parameters
from minirl.terminal import Config, Conversation, Row, lines, main
from minirl.tokenizer import ByteTokenizer

REPO = Path(__file__).parent.parent
END = 302  # <|im_end|> of chat_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A base model of bytes."""
    save_model(random_policy(258, context=128), tmp_path, ByteTokenizer())
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0},
                                     {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}])
def test_an_answer_is_what_generate_samples(options):
    policy, prompt = random_policy(258), [*b"user:\nHi"]
    config = Config("", max_new_tokens=20, **options)
    row = Row(policy, [*prompt])
    sampled = [*row.sample({256}, config)]
    theirs = generate(policy, [prompt], ByteTokenizer(), max_new_tokens=20, temperature=config.temperature,
                      top_k=config.top_k, top_p=config.top_p, seed=config.seed)
    assert prompt + sampled == row.tokens == theirs.tokens[0, :theirs.lengths[0]].tolist()


def test_the_cache_is_kept_over_the_turns_and_no_token_is_read_twice():
    policy, config = random_policy(258), Config("", max_new_tokens=6)
    row = Row(policy, [*b"ab"])
    first = [*row.sample({256}, config)]
    row.tokens += [*b"cd"]
    second = [*row.sample({256}, config)]
    again = Row(policy, [*b"ab", *first, *b"cd"])
    assert [*again.sample({256}, config)] == second
    assert row.seen == len(row.tokens) - 1


def test_a_conversation_is_the_row_of_render_and_reply(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    policy = Chain(406, {10: 52, 52: 50, 50: END}, context=256)  # after a header "42", then the end of the turn
    conversation = Conversation(policy, tokenizer, "chatml", Config("", system="S", temperature=0.0))
    assert "".join(conversation.answer("x")) == "42" and conversation.ended
    assert "".join(conversation.answer("<|im_end|>")) == "42"
    prompt, _ = render([{"role": "system", "content": "S"}, user("x")], tokenizer, add_generation_prompt=True)
    answer = [52, 50, END]
    assert conversation.row.tokens == prompt + answer + reply([user("<|im_end|>")], tokenizer) + answer


def test_an_answer_that_was_cut_is_closed_before_the_next_turn(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    policy = Chain(406, {10: 52, 52: 50, 50: END}, context=256)
    conversation = Conversation(policy, tokenizer, "chatml", Config("", temperature=0.0, max_new_tokens=1))
    assert "".join(conversation.answer("x")) == "4" and not conversation.ended
    "".join(conversation.answer("y"))
    tokens = conversation.row.tokens
    assert tokens[tokens.index(52):][:3] == [52, END, 10]


def test_only_whole_characters_are_printed():
    smile = [*"🙂".encode()]
    policy = Chain(258, dict(zip([*b">", *smile], [*smile, 256])))
    conversation = Conversation(policy, ByteTokenizer(), None, Config("", temperature=0.0))
    assert [*conversation.answer(">")] == ["", "", "", "🙂", "", ""]
    half = Conversation(policy, ByteTokenizer(), None, Config("", temperature=0.0, max_new_tokens=2))
    assert "".join(half.answer(">")) == "\ufffd"


def test_a_base_model_continues_each_text_by_itself():
    policy = Chain(258, {97: 98, 98: 256})
    conversation = Conversation(policy, ByteTokenizer(), None, Config("", temperature=0.0))
    assert "".join(conversation.answer("a")) == "b"
    assert "".join(conversation.answer("a")) == "b" and conversation.row.tokens == [97, 98, 256]
    with pytest.raises(UserError, match="there is nothing to continue"):
        "".join(conversation.answer(""))


def test_a_full_context_is_an_error_and_one_that_fills_up_cuts_the_answer():
    policy = Chain(258, {97: 97}, context=8)
    conversation = Conversation(policy, ByteTokenizer(), None, Config("", temperature=0.0))
    assert "".join(conversation.answer("aaa")) == "aaaaa" and not conversation.ended
    with pytest.raises(UserError, match="has 8 tokens, and the model's context holds 8: begin a new one"):
        "".join(conversation.answer("a" * 8))


def test_the_command_prints_the_answer_alone(folder, capsys):
    config = Config(str(folder), message="Hi", max_new_tokens=5, temperature=0.0, dtype="float64")
    main(config)
    out, err = capsys.readouterr()
    row = Row(random_policy(258, context=128), [*b"Hi"])
    assert out == ByteTokenizer().decode(row.sample({256}, config)) + "\n"
    assert err == "[the answer was cut]\n"


def test_the_folders_template_is_taken_unless_told_otherwise(folder, monkeypatch):
    save_chat_template(folder, "plain")
    rows = []
    monkeypatch.setattr(Row, "sample", lambda row, ends, config: rows.append(row.tokens) or iter(()))
    for options in [{}, {"template": "none"}, {"system": "S"}]:
        main(Config(str(folder), message="Hi", **options))
    question = [*b"user:\nHi", 256, *b"assistant:\n"]
    assert rows == [question, [*b"Hi"], [*b"system:\nS", 256, *question]]


def test_an_adapter_is_put_on_the_model(folder, capsys, tmp_path_factory):
    adapter = tmp_path_factory.mktemp("adapter")
    policy = add_lora(random_policy(258, context=128), rank=2, base_model=str(folder))
    for name, parameter in trainable_parameters(policy).items():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    save_adapter(policy, adapter)
    config = Config(str(folder), adapter=str(adapter), message="Hi", max_new_tokens=9, temperature=0.0, dtype="float64")
    main(config)
    answer = ByteTokenizer().decode(Row(policy, [*b"Hi"]).sample({256}, config))
    assert capsys.readouterr().out == answer + "\n"
    main(Config(str(adapter), message="Hi", max_new_tokens=9, temperature=0.0, dtype="float64"))
    assert capsys.readouterr().out == answer + "\n", "an adapter alone: on the base that it names"
    main(Config(str(folder), message="Hi", max_new_tokens=9, temperature=0.0, dtype="float64"))
    assert capsys.readouterr().out != answer + "\n"


def test_an_adapter_brings_the_template_that_it_was_trained_with(folder, capsys):
    """A base model has none: its adapter would be asked in another form than it has learned."""
    policy = add_lora(random_policy(258, context=128), rank=2, base_model="nowhere")
    save_adapter(policy, folder / "adapter", ByteTokenizer(chat_template("plain")))
    main(Config(str(folder), str(folder / "adapter"), message="Hi", max_new_tokens=9, temperature=0.0,
                dtype="float64"))
    asked = [*b"user:\nHi", 256, *b"assistant:\n"]
    answer = ByteTokenizer().decode(Row(policy, asked).sample({256}, Config("", temperature=0.0, max_new_tokens=9)))
    assert capsys.readouterr().out == answer + "\n"


def test_lines_end_with_the_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\nb"))
    assert [*lines()] == ["a", "", "b"]


def test_ctrl_c_ends_the_answer_and_not_the_conversation(folder, capsys, monkeypatch):
    def interrupted(conversation, text):
        conversation.row = Row(conversation.model, [1])
        yield text.upper()
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    main(Config(str(folder)))
    assert capsys.readouterr().out == "A\nB\n"


@pytest.mark.parametrize(("options", "message"), [
    ({"folder": "nowhere"}, "model folder nowhere does not exist"),
    ({"system": "S"}, "--system needs a chat template"),
    ({"template": "chatml"}, "the tokenizer has no control token '<|im_end|>'"),
    ({"template": "chat"}, "chat template 'chat' is unknown; the nearest is 'chatml'"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
    ({"seed": -1}, "--seed is -1"),
])
def test_what_is_wrong_is_said_in_one_line(folder, options, message):
    with pytest.raises(UserError) as error:
        main(Config(**{"folder": str(folder), "message": "Hi", **options}))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_python_m_minirl_chat(folder):
    command = [sys.executable, "-m", "minirl.chat", str(folder), "--message", "Hi", "--max-new-tokens", "3"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[the answer was cut]\n") and done.stdout


def test_a_real_model_goes_on_with_a_story(shared, capsys):
    main(Config(str(shared / "models" / "stories260k"), message="Once upon a time", temperature=0.0, max_new_tokens=40))
    assert capsys.readouterr().out.startswith(", there was a little girl named Lily. She loved to play outside")


def test_a_calculator_writes_what_a_call_gives():
    asked, row = "Q:<calc>48/2</calc>\n", [*b"Q:<calc>48/2</calc>\n24\n#### 24", 256]
    policy = Reader(258, [row], context=64)
    policy.after[tuple(asked.encode())] = ord("9")  # what the model would say if it had to go on alone
    conversation = Conversation(policy, ByteTokenizer(), None, Config("", temperature=0.0, calculator=True))
    assert "".join(conversation.answer("Q:")) == "<calc>48/2</calc>\n24\n#### 24"
    assert conversation.ended and conversation.row.tokens == row
    short = Reader(258, [row], context=len(asked) + 2)
    conversation = Conversation(short, ByteTokenizer(), None, Config("", temperature=0.0, calculator=True))
    assert "".join(conversation.answer("Q:")) == "<calc>48/2</calc>\n24\n", "the context is full: no more is said"
