"""Conversations as text: the words of each template to the character, and what is refused."""

import copy
import itertools
import json
import random
import warnings

import pytest
from talk import TOOLS, assistant, call, conversations, golden, system, tool, user

from minirl.chat import prefix_stable, render_text, template_of
from minirl.config import UserError
from minirl.jinja_templates import chat_template, recognise, save_chat_template
from minirl.templates import TEMPLATES


@pytest.mark.filterwarnings("ignore:template:UserWarning")
def test_every_template_writes_the_reference_texts_to_the_character(shared):
    conversations = golden(shared, "conversations.json")
    for case in golden(shared, "rendered.json"):
        conversation = conversations[case["conv"]]
        before = copy.deepcopy(conversation)
        text = render_text(conversation["messages"], conversation.get("tools"), case["template"], bos=case["bos"],
                           eos=case["eos"], date_string=case["date_string"],
                           add_generation_prompt=case["add_generation_prompt"], **case["kwargs"])
        assert text == case["text"], (case["template"], case["conv"])
        assert conversation == before


QWEN = "<|im_start|>{}\n{}<|im_end|>\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"


@pytest.mark.parametrize(("template", "messages", "text"), [
    ("plain", [system("S"), user("Hi"), assistant("4")], "system:\nS</s>user:\nHi</s>assistant:\n4</s>"),
    ("chatml", [user("\nx\n"), assistant("\n\ny\n")],
     QWEN.format("user", "\nx\n") + QWEN.format("assistant", "\n\ny\n")),
    ("chatml", [system("A"), user("x"), system("B")],
     QWEN.format("system", "A") + QWEN.format("user", "x") + QWEN.format("system", "B")),
    ("qwen2_5", [system(""), user("x")], QWEN.format("system", "") + QWEN.format("user", "x")),
    ("qwen2_5", [user("x"), assistant(None, tool_calls=[call(), call("é".upper(), {})]), tool("5"), tool(" 6\n")],
     QWEN.format("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
     + QWEN.format("user", "x")
     + QWEN.format("assistant", '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
                                '<tool_call>\n{"name": "É", "arguments": {}}\n</tool_call>')
     + QWEN.format("user", "<tool_response>\n5\n</tool_response>\n<tool_response>\n 6\n\n</tool_response>")),
    ("qwen3", [user("x"), assistant("A", reasoning_content="\nt\n", tool_calls=[call()]), tool("5"), assistant("B")],
     QWEN.format("user", "x")
     + QWEN.format("assistant", '<think>\nt\n</think>\n\nA\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n'
                                "</tool_call>")
     + QWEN.format("user", "<tool_response>\n5\n</tool_response>")
     + QWEN.format("assistant", "<think>\n\n</think>\n\nB")),
    ("qwen3", [user("x"), assistant("<think>\nt\n</think>\n\nA"), user("y")],
     QWEN.format("user", "x") + QWEN.format("assistant", "A") + QWEN.format("user", "y")),
    ("qwen3_training", [user("x"), assistant("<think>\nt\n</think>\n\nA"), user("y")],
     QWEN.format("user", "x") + QWEN.format("assistant", "<think>\nt\n</think>\n\nA") + QWEN.format("user", "y")),
    ("llama3", [user(" x\n"), assistant("\ty ")],
     "<|begin_of_text|>" + LLAMA.format("user", "x") + LLAMA.format("assistant", "y")),
    ("llama3_1", [user("x"), assistant(None, tool_calls=[call()]), tool(' é"\n')],
     "<|begin_of_text|>" + LLAMA.format("system", "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n")
     + LLAMA.format("user", "x") + LLAMA.format("assistant", '{"name": "add", "parameters": {"a": 2}}')
     + LLAMA.format("ipython", '" é\\"\\n"')),
])
def test_turns_written_out_by_hand(template, messages, text):
    assert render_text(messages, template=template, eos="</s>") == text


@pytest.mark.parametrize("template", ["plain", "qwen2_5", "qwen3", "llama3_1"])
def test_arguments_may_be_an_object_or_a_string_of_it(template):
    def text(arguments, flat=False):
        made = call(arguments=arguments)
        return render_text([user("x"), assistant(tool_calls=[made["function"] if flat else made])], template=template)

    assert text({"city": "Zürich", "n": [1, None, True]}) == text('{"city": "Zürich", "n": [1, null, true]}')
    assert text({"a": 1}) == text({"a": 1}, flat=True)
    assert '{"a":1}' in text('{"a":1}'), "a string is written as the model, or the data set, wrote it"


def test_content_may_be_a_list_of_text_parts():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    assert render_text([user(parts)]) == render_text([user("What is 2+2?")])


@pytest.mark.parametrize(("messages", "message"), [
    ([], "messages is []: give a list"),
    ("Hi", "messages is 'Hi': give a list"),
    ([user("x"), "y"], "message 1 is 'y': it must be a dict"),
    ([user("x"), {"role": "human", "content": "y"}], "message 1 has the role 'human': roles are system, user"),
    ([{"content": "y"}], "message 0 has the role None"),
    ([user("x"), {"role": "assistant"}], "message 1 has no content"),
    ([user(None)], "message 0 has no content"),
    ([user(5)], "message 0 has the content 5: give a string"),
    ([user([{"type": "image", "url": "x"}])], "message 0 has the content {'type': 'image', 'url': 'x'}"),
    ([user("x"), assistant("y"), assistant("z")], "message 2 is the second assistant message in a row"),
    ([user("x"), tool("y")], "message 1 is a tool result without a call"),
    ([user("x"), assistant("y"), tool("z")], "message 2 is a tool result without a call"),
    ([user("x"), assistant(tool_calls=[call()]), tool("1"), tool("2")], "message 3 is a tool result without a call"),
    ([user("x"), assistant(tool_calls=[call()]), user("y"), tool("2")], "message 3 is a tool result without a call"),
    ([user("x"), {**user("y"), "tool_calls": [call()]}], r"message 1 (user) has tool_calls"),
    ([user("x"), assistant(tool_calls={"name": "f"})], "message 1: tool_calls is {'name': 'f'}, not a list"),
    ([user("x"), assistant(tool_calls=[{"id": 1}])], "message 1, tool call 0 is {'id': 1}"),
    ([user("x"), assistant(tool_calls=[call('a"b')])], "message 1, tool call 0 has the name 'a\"b'"),
    ([user("x"), assistant(tool_calls=[call(), call(arguments=[1])])], "message 1, tool call 1 has the arguments [1]"),
    ([user("x"), assistant(tool_calls=[call(arguments="{")])], "message 1, tool call 0 has the arguments '{'"),
    ([user("x"), assistant(tool_calls=[call(arguments={"a": {1}})])], "message 1, tool call 0: arguments is no JSON"),
    ([user("x"), assistant("y", reasoning_content=1)], "message 1: reasoning_content is 1, not a string"),
])
def test_a_wrong_message_is_refused_by_its_number(messages, message):
    with pytest.raises(UserError) as error:
        render_text(messages)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tools", "message"), [
    ({}, None), ([], None), (None, None),
    (5, "tools is 5, not a list"),
    ([{"name": "add"}], "tool 0 is {'name': 'add'}: its form is"),
    ([*TOOLS, {"type": "function", "function": {"name": "f", "x": {1}}}], "tool 1 is no JSON"),
])
def test_tools_are_openai_schemas(tools, message):
    if message is None:
        assert render_text([user("x")], tools or None, "qwen3") == render_text([user("x")], template="qwen3")
        return
    with pytest.raises(UserError) as error:
        render_text([user("x")], tools, "qwen3")
    assert message in str(error.value)


def test_a_result_may_answer_a_call_that_the_model_wrote_itself():
    broken = assistant('<tool_call>\n{"name": \n</tool_call>')
    assert "Error" in render_text([user("x"), broken, tool("Error: invalid JSON")], template="qwen3")


def test_what_a_template_cannot_say_is_refused_or_told():
    two = [user("x"), assistant(tool_calls=[call(), call()])]
    with pytest.raises(UserError, match="message 1 has 2 tool calls: template 'llama3_1' takes one a turn"):
        render_text(two, template="llama3_1")
    with pytest.raises(UserError, match="message 1 should be the user's: template 'llama3_1' declares the tools there"):
        render_text([system("x"), assistant("y")], TOOLS, "llama3_1")
    with pytest.raises(UserError, match="chat template 'qwen_3' is unknown; the nearest is 'qwen3'"):
        render_text([user("x")], template="qwen_3")
    with pytest.warns(UserWarning, match="'chatml' has no words for the tools: left out"):
        render_text([user("x")], TOOLS, "chatml")
    with pytest.warns(UserWarning, match="'llama3' has no words for tool calls: left out"):
        render_text(two, template="llama3")
    with pytest.warns(UserWarning, match="'llama3_1' has no words for the text beside a tool call: left out"):
        render_text([user("x"), assistant("so", tool_calls=[call()])], template="llama3_1")
    with pytest.warns(UserWarning, match="'qwen2_5' has no words for reasoning_content: left out"):
        render_text([user("x"), assistant("y", reasoning_content="t")], template="qwen2_5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render_text([*two, tool("1"), tool("2")], TOOLS, "qwen2_5")
        render_text([user("x"), assistant("y", reasoning_content="t")], template="qwen3")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.filterwarnings("ignore:template:UserWarning")
def test_a_rendering_begins_with_that_of_its_first_turns_where_the_template_allows_it(template):
    messages = [system("S"), user("a"), assistant("A", reasoning_content="t", tool_calls=[call()]), tool("5"),
                assistant("B"), user("c"), assistant("C", reasoning_content="u"), user("d"), assistant("D")]
    texts = [render_text(messages[:n], TOOLS, template) for n in range(2, len(messages) + 1)]
    steps = [later.startswith(earlier) for earlier, later in itertools.pairwise(texts)]
    assert all(steps) == prefix_stable(template) == (template != "qwen3")


# ------------------------------------------------------------------ jinja

@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.filterwarnings("ignore:template:UserWarning")
def test_the_jinja_string_renders_the_same(template):
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers sets it up
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    compiled = environment.from_string(chat_template(template))
    compared = 0
    for messages, tools, prompt, thinking in conversations(random.Random(template), template, 150):
        options = {"add_generation_prompt": prompt, "enable_thinking": thinking, "date_string": "1 Jan 2025"}
        bos = "<s>" if template == "plain" else "<|begin_of_text|>"
        try:
            text = render_text(messages, tools, template, eos="</s>", bos=bos if "llama" in template or
                               template == "plain" else None, **options)
        except UserError:
            continue
        assert compiled.render(messages=messages, tools=tools, bos_token=bos, eos_token="</s>", **options) == text
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("template", ["plain", "chatml", "qwen3", "llama3_1"])
def test_transformers_renders_the_same(template, tmp_path):
    transformers = pytest.importorskip("transformers")
    from minirl.tokenizer import ByteTokenizer
    ByteTokenizer().save(tmp_path)
    save_chat_template(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [system("S"), user("é\n"), assistant("", tool_calls=[call()] if template != "chatml" else None)]
    bos = None if template in ("plain", "chatml", "qwen3") else ""
    ours = render_text(messages, TOOLS if template != "chatml" else None, template, bos=bos, eos="<|endoftext|>")
    assert theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False) == ours


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_was_written_is_recognised(template, tmp_path):
    assert template_of(tmp_path) is None, "a base model has none"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template(template)}))
    assert template_of(tmp_path) == template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": "rag", "template": "x"}, {"name": "default", "template": chat_template(template)}]}))
    assert template_of(tmp_path) == template
    (tmp_path / "tokenizer_config.json").write_text("{}")
    save_chat_template(tmp_path, template)
    assert template_of(tmp_path) == template


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(("source", "name"), [
    (CHATML, "chatml"),
    ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.content | trim }}<|eot_id|>{% endfor %}", "llama3"),
    ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{% generation %}{{ m.content | trim }}<|eot_id|>"
     "{% endgeneration %}{% endfor %}", "llama3_training"),
])
def test_the_commonest_templates_of_others_are_recognised(source, name):
    assert recognise(source) == name


@pytest.mark.parametrize(("source", "kind"), [
    ("{% if not system %}<|im_start|>system\nYou are Smol.<|im_end|>{% endif %}" + CHATML, "a relative of ChatML"),
    ("[INST] {{ message }} [/INST]", "Llama 2's or Mistral's"),
    ("<start_of_turn>user", "Gemma's"),
    ("### Human: {{ message }}", "one that begins '### Human: {{ message }}'"),
])
def test_an_unknown_template_is_refused_by_name(source, kind, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(UserError) as error:
        template_of(tmp_path)
    assert f"chat template of {tmp_path} looks like {kind}" in str(error.value)
    assert "qwen2_5, qwen3" in str(error.value)
    with pytest.raises(UserError, match="model folder nowhere does not exist"):
        template_of("nowhere")


@pytest.mark.parametrize(("value", "said"), [
    (5, "chat_template is 5, which is no text"), ({"a": 1}, "which is no text"),
    ([{"name": "default", "template": [1]}], "which is no text"), ([1, None, "a"], None), ([], None), ("", None)])
def test_a_template_of_another_type_is_one_line(value, said, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    if said is None:
        assert template_of(tmp_path) is None
        return
    with pytest.raises(UserError, match=said):
        template_of(tmp_path)


def test_a_template_in_another_encoding_is_refused_like_an_unknown_one(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="looks like one that begins"):
        template_of(tmp_path)
