"""Tool calls in text: read to the letter, refused with a sentence that the model can use."""

import json

import pytest

from minirl.chat import ToolCallError, parse_tool_calls, render_text
from minirl.config import UserError


def tagged(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ADD = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
ADDED = {"name": "add", "arguments": {"a": 2, "b": 3}}


@pytest.mark.parametrize(("text", "calls"), [
    ("", []),
    ("It is 5. {\"name\": 1}", []),
    (tagged(ADD), [ADDED]),
    ("Let me see.\n" + tagged(ADD, '{"name": "now", "arguments": {}}'), [ADDED, {"name": "now", "arguments": {}}]),
    ("<tool_call>" + ADD + "</tool_call>", [ADDED]),
    ('<tool_call>{"arguments": {"a": 2, "b": 3}, "name": "add"}</tool_call> and more text', [ADDED]),
    # apostrophes and braces, an object followed by a sibling, tags within a string
    (tagged('{"name":"s","arguments":{"q":"what\'s {up}"}}'), [{"name": "s", "arguments": {"q": "what's {up}"}}]),
    (tagged('{"name":"s","arguments":{"q":{"a":{"b":1}},"k":2}}'),
     [{"name": "s", "arguments": {"q": {"a": {"b": 1}}, "k": 2}}]),
    (tagged('{"name":"s","arguments":{"q":"</tool_call><tool_call>{"}}'),
     [{"name": "s", "arguments": {"q": "</tool_call><tool_call>{"}}]),
    # a string of an object, as ToolBench and OpenAI write arguments
    (tagged(json.dumps({"name": "add", "arguments": '{"a": 2, "b": 3}'})), [ADDED]),
    # thoughts are no calls
    ("<think>\nmaybe " + tagged('{"broken') + "\n</think>\n\n" + tagged(ADD), [ADDED]),
    ("<think>\nI am still thinking", []),
])
def test_calls_between_tags(text, calls):
    for template in ["qwen3", "qwen2_5", "plain"]:
        assert parse_tool_calls(text, template) == calls


@pytest.mark.parametrize(("text", "message"), [
    (tagged('{"name": "add", "arguments": {"a": 2}'), "Error in tool call 1: invalid JSON, Expecting ',' delimiter at "
                                                       "character 39 ('</tool_call>')."),
    (tagged(ADD, "add(2, 3)"), "Error in tool call 2: invalid JSON, Expecting value at character 1 ('add(2, 3)\\n"),
    (tagged("{'name': 'add'}"), "Error in tool call 1: invalid JSON, Expecting property name"),
    ("<tool_call>", "Error in tool call 1: invalid JSON, Expecting value at character 1"),
    ("<tool_call>\n" + ADD, "Error in tool call 1: the text ends where </tool_call> must close it."),
    ("<tool_call>\n" + ADD + "\n<tool_call>", "Error in tool call 1: '<tool_call>' follows where </tool_call> must"),
    (ADD + "</tool_call>", "Error: there is a </tool_call> without <tool_call> after 0 tool calls."),
    (tagged(ADD) + "</tool_call>", "Error: there is a </tool_call> without <tool_call> after 1 tool calls."),
    (tagged("[1]"), "Error in tool call 1: it is not an object. Write {\"name\": <function-name>, \"arguments\": "),
    (tagged('{"arguments": {}}'), 'Error in tool call 1: "name" is missing. Write {"name"'),
    (tagged('{"name": "now"}'), 'Error in tool call 1: "arguments" is missing.'),
    (tagged('{"name": "now", "arguments": null}'), 'Error in tool call 1: "arguments" is not an object.'),
    (tagged('{"name": "now", "arguments": [1]}'), 'Error in tool call 1: "arguments" is not an object.'),
    (tagged('{"name": "now", "arguments": "[1]"}'), 'Error in tool call 1: "arguments" is not an object.'),
    (tagged('{"name": "now", "arguments": "soon"}'), 'Error in tool call 1: "arguments" is not an object.'),
    (tagged('{"name": 5, "arguments": {}}'), 'Error in tool call 1: "name" is not the name of a function.'),
    (tagged('{"name": "", "arguments": {}}'), 'Error in tool call 1: "name" is not the name of a function.'),
    (tagged('{"name": "a", "arguments": {}, "parameters": {}}'), 'Error in tool call 1: "parameters" is not a part'),
    (tagged('{"name": "a", "arguments": {"x": 1, "x": 2}}'), "Error in tool call 1: invalid JSON, key 'x' is given"),
    (tagged('{"name": "a", "arguments": {"x": NaN}}'), "Error in tool call 1: invalid JSON, NaN is not a number"),
    (tagged('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}"), "Error in tool call 1: invalid JSON, Exceeds"),
    (tagged("[" * 100_000), "Error in tool call 1: invalid JSON, nested too deeply."),
    ("<think>\n" + tagged(ADD), "Error: <think> is not closed. Write </think> before the first <tool_call>."),
])
def test_a_broken_call_is_an_observation_and_makes_no_call(text, message):
    with pytest.raises(ToolCallError) as error:
        parse_tool_calls(text, "qwen3")
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(("text", "calls"), [
    ("It is 5.", []),
    ('{"name": "add", "parameters": {"a": 2}}', [{"name": "add", "arguments": {"a": 2}}]),
    ('\n{"name": "add", "parameters": "{\\"a\\": 2}"}\n', [{"name": "add", "arguments": {"a": 2}}]),
    ('{"answer": 5}', []),
    ('{"name": "add", "arguments": {"a": 2}}', '"parameters" is missing'),
    ('{"name": "add", "parameters": {"a": 2}}; {"name": "add", "parameters": {"a": 2}}', "Write one call alone."),
    ('{"name": "add", "parameters": {"a": 2}', "invalid JSON"),
    ('{"parameters": {"a": 2}}', '"name" is missing'),
])
def test_the_bare_call_of_llama(text, calls):
    if isinstance(calls, list):
        assert parse_tool_calls(text, "llama3_1") == calls
        return
    with pytest.raises(ToolCallError) as error:
        parse_tool_calls(text, "llama3_1")
    assert calls in str(error.value)


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_training", "plain", "llama3_1"])
def test_what_render_writes_parse_reads(template):
    calls = [{"name": "f", "arguments": {"q": "é \" </tool_call></think> {}", "n": [1, None, {"k": True}]}},
             {"name": "g", "arguments": {}}][:1 if template == "llama3_1" else 2]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    before = render_text(messages[:1], template=template, eos="</s>", add_generation_prompt=True)
    after = render_text(messages, template=template, eos="</s>")
    said = after[len(before):].removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
    assert parse_tool_calls(said.removesuffix("</s>"), template) == calls


def test_templates_without_calls_say_so():
    with pytest.raises(UserError, match="template 'llama3' has no tool calls"):
        parse_tool_calls("x", "llama3")


@pytest.mark.parametrize("text", ["<tool_call>" * 30_000, "</tool_call>" * 30_000, "<tool_call>" + " " * 300_000,
                                  "<think>" * 50_000, "</think>" * 50_000, tagged(*[ADD] * 10_000),
                                  "<tool_call>" + '{"a":' * 50_000, tagged('{"name": "' + "\\" * 300_001)])
def test_the_time_grows_with_the_text_and_not_faster(text):
    try:
        parse_tool_calls(text, "qwen3")  # a parser that starts over at each tag would take minutes
    except ToolCallError as error:
        assert len(str(error)) < 300
