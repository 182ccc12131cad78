"""The chat templates as other tools read them: jinja strings beside a model, written and recognised.

    save_chat_template(folder, "qwen3")        transformers and vLLM then render a conversation as minirl does
    template_of(folder)                        "qwen3", or None for a base model

minirl runs no jinja, which is a program that arrives with somebody's weights. It recognises the templates that it
knows by what stands in them, and refuses the others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from minirl.config import UserError, read_json, write_text
from minirl.templates import LLAMA_TOOLS, NO_THOUGHT, TEMPLATES, TOOLS_AFTER, TOOLS_BEFORE, find_template
from minirl.tokenizer import Tokenizer

# ------------------------------------------------------------------ writing. Words in capitals are filled in.

_START = r"""
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro turn(role, body) -%}{{ BEFORE_ROLE + role + BEHIND_ROLE + body + END }}{%- endmacro -%}
{{- BOS -}}
{%- set given = messages[0].role == 'system' -%}
{%- set system = text(messages[0].content) if given else SYSTEM -%}"""

_END = r"""
{%- if add_generation_prompt -%}
    {{- BEFORE_ROLE + 'assistant' + BEHIND_ROLE -}}
    {%- if THINKS and enable_thinking is false -%}{{- NO_THOUGHT -}}{%- endif -%}
{%- endif -%}
"""

_NO_TOOLS = r"""
{%- for message in messages -%}
    {%- set said = text(message.content) -%}
    {{- turn(message.role, said.strip() if TRIMS else said) -}}
{%- endfor -%}"""

_TAGS = r"""
{%- if tools -%}
    {%- set schemas = namespace(text='') -%}
    {%- for tool in tools -%}
        {%- set schemas.text = schemas.text + ('' if loop.first else '\n') + (tool | tojson) -%}
    {%- endfor -%}
    {{- turn('system', system + ('\n\n' if given or system else '') + TOOLS_BEFORE + schemas.text + TOOLS_AFTER) -}}
{%- elif given or system -%}
    {{- turn('system', system) -}}
{%- endif -%}
{%- set messages = messages[1:] if given else messages -%}
{%- set last = namespace(question=messages | length - 1) -%}
{%- for message in messages -%}
    {%- set said = text(message.content) -%}
    {%- set is_result = said.startswith('<tool_response>') and said.endswith('</tool_response>') -%}
    {%- if message.role == 'user' and not is_result -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro calls(message, beside) -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set call = call.function or call -%}
        {{- '\n' if beside or not loop.first -}}
        {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
        {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
        {{- '}\n</tool_call>' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- set said = text(message.content) -%}
    {%- if message.role == 'tool' -%}
        {%- set result = '<tool_response>\n' + said + '\n</tool_response>' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- BEFORE_ROLE + 'user' + BEHIND_ROLE -}}
        {%- else -%}{{- '\n' -}}
        {%- endif -%}
        {{- result -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- END -}}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = '' -%}
        {%- if message.reasoning_content is string -%}{%- set thought = message.reasoning_content -%}
        {%- elif THINKS and '</think>' in said -%}
            {%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
            {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {%- set more = calls(message, said) -%}
        {%- if ALWAYS_THINKS or (THINKS and loop.index0 > last.question and (loop.last or thought)) -%}
            {%- set said = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') -%}
        {%- endif -%}
        {{- turn('assistant', said + more) -}}
    {%- else -%}
        {{- turn(message.role, said) -}}
    {%- endif -%}
{%- endfor -%}"""

_JSON = r"""
{%- set dates = 'Cutting Knowledge Date: December 2023\nToday Date: ' + (date_string or '26 Jul 2024') + '\n\n' -%}
{{- turn('system', ('Environment: ipython\n' if tools else '') + dates + system.strip()) -}}
{%- for message in (messages[1:] if given else messages) -%}
    {%- set said = text(message.content) -%}
    {%- if loop.first and tools -%}
        {%- set schemas = namespace(text='') -%}
        {%- for tool in tools -%}
            {%- set schemas.text = schemas.text + (tool | tojson(indent=4)) + '\n\n' -%}
        {%- endfor -%}
        {{- turn('user', LLAMA_TOOLS + schemas.text + said.strip()) -}}
    {%- elif message.role == 'tool' -%}
        {{- turn('ipython', said | tojson) -}}
    {%- elif message.tool_calls -%}
        {%- set call = message.tool_calls[0].function or message.tool_calls[0] -%}
        {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
        {{- turn('assistant', '{"name": "' + call.name + '", "parameters": ' + arguments + '}') -}}
    {%- else -%}
        {{- turn(message.role, said.strip()) -}}
    {%- endif -%}
{%- endfor -%}"""


def chat_template(name: str) -> str:
    """The jinja string that renders what `minirl.chat.render_text` does, for a tokenizer_config.json."""
    row = find_template(name)
    before, behind = row.header.split("{role}")
    quoted = {"BEFORE_ROLE": before, "BEHIND_ROLE": behind, "SYSTEM": row.system, "TOOLS_BEFORE": TOOLS_BEFORE,
              "TOOLS_AFTER": TOOLS_AFTER, "LLAMA_TOOLS": LLAMA_TOOLS, "NO_THOUGHT": NO_THOUGHT}
    plain = {"END": json.dumps(row.end + row.gap) if row.end else "eos_token",
             "BOS": "(bos_token or '')" if row.bos is None or row.bos else "''", "TRIMS": str(row.trim).lower(),
             "ALWAYS_THINKS": str(row.thinking == "all").lower(), "THINKS": str(row.thinking != "none").lower()}
    source = _START + {"none": _NO_TOOLS, "tags": _TAGS, "json": _JSON}[row.calls] + _END
    filled = {**{word: json.dumps(value) for word, value in quoted.items()}, **plain}
    return f"{{#- minirl: {name} -#}}" + re.sub("[A-Z_]{3,}", lambda word: filled[word.group()], source)


def save_chat_template(folder: str | Path, name: str) -> None:
    """Write chat_template.jinja into a model folder, where transformers and vLLM look for it.

    A tokenizer whose `chat_template` is set to the string writes it itself, with every checkpoint.
    """
    write_text(Path(folder) / "chat_template.jinja", chat_template(name))


# ------------------------------------------------------------------ recognising

# Template -> what must stand in its jinja, and what must not: that would be a relative with other words.
_SIGNS = {
    "llama3_1": (["<|start_header_id|>", "<|eot_id|>", "Cutting Knowledge Date", "ipython", '"parameters": '],
                 ["image"]),
    "llama3": (["<|start_header_id|>", "<|eot_id|>", "trim"], ["Cutting Knowledge Date", "tool", "image"]),
    "qwen3": (["<|im_start|>", "<tools>", "</think>", "last_query_index", "reasoning_content", "enable_thinking"],
              ["<function=", "vision"]),
    "qwen2_5": (["<|im_start|>", "<tools>", "<tool_response>", TEMPLATES["qwen2_5"].system],
                ["think", "<function=", "vision"]),
    "qwen3_instruct": (["<|im_start|>", "<tools>", "<tool_response>", "<args-json-object>"],
                       ["think", "<function=", "vision", "You are a", "created by"]),
    "chatml": (["<|im_start|>", "<|im_end|>"],
               ["<|im_start|>system", "You are", "tool", "think", "image", "bos_token", "<|endoftext|>"]),
}
_OTHERS = {"[INST]": "Llama 2's or Mistral's", "<start_of_turn>": "Gemma's", "<|user|>": "Phi's or Zephyr's",
           "<|START_OF_TURN_TOKEN|>": "Cohere's", "<|message|>": "gpt-oss's", "<｜User｜>": "DeepSeek's",
           "<|start_header_id|>": "a relative of Llama 3's", "<|im_start|>": "a relative of ChatML"}


def template_of(folder: str | Path) -> str | None:
    """The name of the template that a model folder brings, or None where it brings none: a base model.

    Looks for chat_template.jinja, then chat_template in tokenizer_config.json. UserError for one that minirl does not
    write.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    source = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    if source is None and config.is_file():
        source = read_json(config).get("chat_template")
    source = _default(source)
    if source and not isinstance(source, str):
        raise UserError(f"{config}: chat_template is {source!r:.60}, which is no text")
    return recognise(source, str(folder)) if source else None


def template_for(tokenizer: Tokenizer, name: str = "auto") -> str:
    """The template to write conversations with: `name`, which must be one; "auto": the tokenizer's own, or plain."""
    if name != "auto":
        find_template(name)
        return name
    source = _default(tokenizer.chat_template)
    return recognise(source) if source else "plain"


def _default(source: str | list | None) -> str | None:
    """Of several templates, by name, the one that is called default."""
    if isinstance(source, list):
        source = next((entry.get("template") for entry in source
                       if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return source


def recognise(source: str, where: str = "the tokenizer") -> str:
    """The name of the template that a jinja string is. UserError, which names `where`, if it is none of TEMPLATES."""
    if (ours := re.match(r"\{#- minirl: (\w+) -#\}", source)) and ours[1] in TEMPLATES:
        return ours[1]
    for name, (present, absent) in _SIGNS.items():
        if all(sign in source for sign in present) and not any(sign in source for sign in absent):
            # TRL marks what the assistant says by a block of that name, in its templates for training.
            training = re.search(r"\{%-?\s*generation\b", source) and f"{name}_training" in TEMPLATES
            return f"{name}_training" if training else name
    kind = next((kind for sign, kind in _OTHERS.items() if sign in source), f"one that begins {source.strip()[:40]!r}")
    raise UserError(f"the chat template of {where} looks like {kind}, which minirl does not write; it writes "
                    f"{', '.join(TEMPLATES)}: name the one that comes nearest yourself")
