"""Chat templates: how a conversation is written down for one family of models, part by part.

    Part("<|im_start|>user\n"), Part("Hi", names="none"), Part("<|im_end|>"), ...

Joined, the parts are the text that the model's own jinja template gives, to the character. A part knows two things that
the finished string has lost: whether control tokens may stand in it (in what the template writes they may, in what a
user or a tool writes they may not), and whether the model itself said it. `minirl.chat` makes ids and mask of that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from minirl.config import UserError
from minirl.messages import Message, to_json

# ------------------------------------------------------------------ templates


@dataclass(frozen=True)
class Template:
    """How the turns of one family of models look. A row of TEMPLATES."""

    header: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>"  # the end-of-turn token, an action in the assistant's turn; "": the tokenizer's EOS
    gap: str = "\n"  # between the end of a turn and the next header: nobody's action
    bos: str | None = ""  # what comes first of all; None: the tokenizer's BOS, if it has one
    system: str = ""  # the system prompt of a conversation that brings none
    trim: bool = False  # contents lose the spaces around them
    calls: Literal["none", "tags", "json"] = "none"  # JSON between <tool_call> tags, or bare (Llama 3.1)
    thinking: Literal["none", "last", "all"] = "none"  # <think> after the last question only, or in every answer
    newline_is_said: bool = False  # the mask begins at the newline that ends the header

    @property
    def controls(self) -> list[str]:
        """The control tokens without which a tokenizer cannot write this template."""
        return re.findall(r"<\|\w+\|>", (self.bos or "") + self.header + self.end)

    @property
    def prefix_stable(self) -> bool:
        """See `minirl.chat.prefix_stable`."""
        return self.thinking != "last"


_QWEN2_5 = Template(calls="tags",
                    system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
_LLAMA3 = Template(header="<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>", gap="",
                   bos="<|begin_of_text|>", trim=True)

TEMPLATES = {
    "plain": Template(header="{role}:\n", end="", gap="", bos=None, calls="tags"),
    "chatml": Template(),
    "qwen2_5": _QWEN2_5,
    "qwen3": Template(calls="tags", thinking="last"),
    "qwen3_instruct": Template(calls="tags"),  # Qwen3 without thoughts: Instruct-2507
    "llama3": _LLAMA3,
    "llama3_1": replace(_LLAMA3, calls="json"),
    # TRL's variants for training. The mask of its Qwen2.5 begins one token early, at a newline that a sampler is
    # given and does not choose: to go on from rendered turns by RL, take "qwen2_5".
    "qwen2_5_training": replace(_QWEN2_5, newline_is_said=True),
    "qwen3_training": Template(calls="tags", thinking="all"),
    "llama3_training": _LLAMA3,
}


def find_template(name: str) -> Template:
    """The row of TEMPLATES with that name, or a UserError with the nearest one."""
    if name not in TEMPLATES:
        nearest = difflib.get_close_matches(str(name), TEMPLATES, n=1, cutoff=0)[0]
        raise UserError(f"chat template {name!r} is unknown; the nearest is {nearest!r} of {[*TEMPLATES]}")
    return TEMPLATES[name]


# ------------------------------------------------------------------ parts


class Part(NamedTuple):
    """A piece of the text.

    names  : which control tokens are recognised in it. "all": the template itself wrote it. "marks": the system
             prompt and the assistant, in whose text <tool_call> and <think> are tokens, but no turn begins or ends.
             "none": users, tools and their schemas: characters, whatever they spell.
    action : the model said it
    """

    text: str
    names: Literal["all", "marks", "none"] = "all"
    action: bool = False


MARKS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"


def write(template: Template, messages: list[Message], tools: Sequence[dict[str, Any]] = (), *, bos: str = "",
          eos: str = "", date_string: str = "", enable_thinking: bool = True,
          add_generation_prompt: bool = False) -> list[Part]:
    """The conversation in the words of a template; joined, the parts are the text of the model's own template.

    enable_thinking=False puts an empty <think> block behind the header of an answer. It is then not the model's.
    """
    def turn(role: str, *body: Part) -> list[Part]:
        said, header = role == "assistant", template.header.format(role=role)
        cut = len(header) - (said and template.newline_is_said)
        return [Part(header[:cut]), Part(header[cut:], action=True), *body,
                Part(template.end or eos, action=said), Part(template.gap)]

    if template.trim:  # Llama 3.1 writes a tool's result as a JSON string, spaces and all
        messages = [message if message.role == "tool" and template.calls == "json"
                    else replace(message, text=message.text.strip()) for message in messages]
    parts = [Part(bos)]
    opening, messages = _opening(template, messages, tools, date_string)
    if opening:
        parts += turn("system", *opening)
    for i, message in enumerate(messages):
        if message.role == "system" and i == 0 and opening:
            continue
        if message.role == "assistant":
            parts += turn("assistant", *_answer(template, messages, i, enable_thinking))
        elif message.role == "system":
            parts += turn("system", Part(message.text, "marks"))
        elif message.role == "user" or template.calls == "none":
            parts += turn(message.role, Part(message.text, "none"))
        elif template.calls == "json":
            parts += turn("ipython", Part(to_json(message.text), "none"))
        elif messages[i - 1].role != "tool":  # the results of parallel calls share a turn
            results = takewhile(lambda message: message.role == "tool", messages[i:])
            parts += turn("user", *_tool_responses(results))
    if add_generation_prompt:
        no_thought = NO_THOUGHT if template.thinking != "none" and not enable_thinking else ""
        parts += [Part(template.header.format(role="assistant") + no_thought)]
    return [part for part in parts if part.text]


# ------------------------------------------------------------------ what stands in a turn

NO_THOUGHT = "<think>\n\n</think>\n\n"
TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
LLAMA_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.Do not use variables.\n\n")


def _opening(template: Template, messages: list[Message], tools: Sequence[dict[str, Any]],
             date_string: str) -> tuple[list[Part], list[Message]]:
    """The body of the first system turn where the template composes it (else []), and the messages it leaves.

    A system message that comes first is a part of that body. Llama 3.1 tells the tools in the message after it.
    """
    given = messages[0].role == "system"
    system = messages[0].text if given else template.system
    if template.calls == "json":
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date_string}\n\n"
        body = [Part("Environment: ipython\n" * bool(tools) + dates, "none"), Part(system, "marks")]
        return body, _with_tools(messages, int(given), tools) if tools else messages
    if template.calls == "tags" and tools:
        space = "\n\n" if given or system else ""
        schemas = "\n".join(map(to_json, tools))
        return [Part(system, "marks"), Part(space + TOOLS_BEFORE), Part(schemas, "none"), Part(TOOLS_AFTER)], messages
    return [Part(system)] if system and not given else [], messages


def _with_tools(messages: list[Message], i: int, tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Llama 3.1: the messages with the tools in front of message i."""
    if len(messages) == i or messages[i].role == "assistant":
        raise UserError(f"message {i} should be the user's: template 'llama3_1' declares the tools there")
    schemas = "".join(to_json(tool, indent=4) + "\n\n" for tool in tools)
    return [*messages[:i], Message("user", LLAMA_TOOLS + schemas + messages[i].text), *messages[i + 1:]]


def _answer(template: Template, messages: list[Message], i: int, enable_thinking: bool) -> list[Part]:
    """What the assistant says in message i: thoughts where the template shows them, text, calls."""
    message = messages[i]
    if template.calls == "json" and message.calls:
        if len(message.calls) > 1:
            raise UserError(f"message {i} has {len(message.calls)} tool calls: template 'llama3_1' takes one a turn")
        name, arguments = message.calls[0]
        return [Part(f'{{"name": "{name}", "parameters": {arguments}}}', "marks", action=True)]

    thought, text = _split_thought(message) if template.thinking != "none" else ("", message.text)
    calls = _tagged_calls(message) if template.calls == "tags" else ""
    space = "\n" if text and calls else ""
    if template.thinking == "all" or (template.thinking == "last" and _is_recent(messages, i, thought)):
        thought, text = thought.strip("\n"), text.lstrip("\n")
        if not thought and not enable_thinking:
            return [Part(NO_THOUGHT), Part(text + space + calls, "marks", action=True)]
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    return [Part(text + space + calls, "marks", action=True)]


def _tagged_calls(message: Message) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                     for name, arguments in message.calls)


def _split_thought(message: Message) -> tuple[str, str]:
    """(reasoning, answer): the field reasoning_content, or else what stands before </think>."""
    if message.reasoning is not None or "</think>" not in message.text:
        return message.reasoning or "", message.text
    before, after = message.text.split("</think>")[0], message.text.split("</think>")[-1]
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _is_recent(messages: list[Message], i: int, thought: str) -> bool:
    """Does Qwen3 show the thoughts of message i? If it comes after the last question, and thought or is the last."""
    last = len(messages) - 1
    questions = [k for k, message in enumerate(messages) if message.role == "user" and not (
        message.text.startswith("<tool_response>") and message.text.endswith("</tool_response>"))]
    return i > max(questions, default=last) and (i == last or bool(thought))


def _tool_responses(results: Iterable[Message]) -> list[Part]:
    parts = []
    for result in results:
        parts += [Part("\n<tool_response>\n"), Part(result.text, "none"), Part("\n</tool_response>")]
    return [Part(parts[0].text.removeprefix("\n")), *parts[1:]]


def left_out(template: Template, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[str]:
    """What of a conversation the template has no words for, and leaves out as the model's own template does."""
    found = []
    if template.calls == "none":
        found += ["the tools"] * bool(tools) + ["tool calls"] * any(message.calls for message in messages)
    if template.calls == "json" and any(message.calls and message.text for message in messages):
        found += ["the text beside a tool call"]
    if template.thinking == "none" and any(message.reasoning for message in messages):
        found += ["reasoning_content"]
    return found
