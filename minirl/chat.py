"""Conversations as token ids, with an exact mask of what the assistant said.

    tokens, action_mask = render(messages, tokenizer, tools=tools, template="qwen3")
    forced = reply([{"role": "tool", "content": "5"}], tokenizer, "qwen3")      what follows an action on the tape
    calls = parse_tool_calls(action_text(action, tokenizer), "qwen3")           [{"name": "add", "arguments": {...}}]

    python -m minirl.chat FOLDER            talk to a model; see terminal.py

**Who may write what.** Control tokens open and close a turn, and only the template writes those, by their ids. What
users and tools write is encoded as text, `<|im_end|>` as its characters: no text can end its turn or begin another.
(`<tool_call>` and `<think>` are ordinary words of some vocabularies, Qwen's among them. Whoever writes them gets their
token, as in transformers; they are calls and thoughts only where the assistant says them.)

**Multi-turn RL appends tokens and never renders again.** Tokens to text to tokens is not the identity, and a template
may rewrite the past: Qwen3's deletes what was thought before the last question. So a rollout renders the first prompt,
keeps the sampled ids as they are, and appends `reply(...)` after every action. `prefix_stable(template)` says whether
rendering a longer conversation keeps what was rendered before; for SFT on every turn of Qwen3, take qwen3_training.

**Where text is cut.** Between two control tokens text is encoded in one piece: a tokenizer may join the end of a
header to the beginning of a content ("\\n" + "\\nHi"), and models have been trained on what it then gives. Only at the
beginning of an action is there a cut: a sampler is given the header and chooses what follows. The ids are therefore
those of the whole string with its control tokens recognised, as in transformers, except for an answer whose first
characters would have been joined to its header, and for text that spells a control token.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from minirl.config import UserError
from minirl.jinja_templates import chat_template
from minirl.jinja_templates import template_of as template_of
from minirl.messages import Message, check_messages, check_tools
from minirl.templates import MARKS, Part, find_template, left_out, write
from minirl.tokenizer import Tokenizer
from minirl.tool_calls import ToolCallError as ToolCallError
from minirl.tool_calls import parse_tool_calls as parse_tool_calls

DATE = "26 Jul 2024"  # Llama 3.1 tells the model a date, this one by default: a prompt should not change overnight

# ------------------------------------------------------------------ messages to tokens


def render(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] | None = None,
           template: str = "chatml", *, add_generation_prompt: bool = False, enable_thinking: bool = True,
           bos: str | None = None, date_string: str = DATE) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and for each whether the assistant said it, its end-of-turn token included.

    messages              : OpenAI's format; `messages.check_messages` refuses the wrong ones, by their number
    tools                 : [{"type": "function", "function": {"name", "description", "parameters"}}, ...]
    template              : a name in `templates.TEMPLATES`; `template_of` finds it in a model folder
    add_generation_prompt : end with the header of the assistant's next turn
    enable_thinking       : Qwen3; False: an answer has an empty <think> block before it, which is no action
    bos                   : name of the token that comes first; None: as the template has it, "": none
    returns               : tokens, action_mask of one length. The mask is per token: it is shifted once, when rows
                            are put together (column s of a Rollout's mask is that of tokens[s + 1])
    """
    names = _Names(template, tokenizer, bos)
    return names.encode(_parts(messages, tools, template, names.bos, names.eos, date_string=date_string,
                               add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking))


def render_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                template: str = "chatml", *, add_generation_prompt: bool = False, enable_thinking: bool = True,
                bos: str | None = None, eos: str | None = None, date_string: str = DATE) -> str:
    """The conversation as a string, to look at. What a model should be given are the ids of `render`; options as there.

    bos, eos : names of the tokens where a template leaves them to the tokenizer ("plain" ends its turns by eos)
    """
    bos = (find_template(template).bos or "") if bos is None else bos
    parts = _parts(messages, tools, template, bos, eos or "<|endoftext|>", date_string=date_string,
                   add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking)
    return "".join(part.text for part in parts)


def reply(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer, template: str = "chatml", *,
          enable_thinking: bool = True, ended: bool = True) -> list[int]:
    """The tokens to force after an action: tool results or a user's turn, and the header of the next answer.

    ended   : the action has closed its turn itself; False (it was cut, or a stop string ended it): close it first
    returns : what `render` of the longer conversation has behind the action, token for token
    """
    checked = check_messages(messages, after_call=True)
    if any(message.role == "assistant" for message in checked):
        raise UserError("a reply holds no assistant message: it is what comes between two of them")
    names = _Names(template, tokenizer, bos="")
    parts = write(find_template(template), [Message("user", ""), Message("assistant", ""), *checked], eos=names.eos,
                  enable_thinking=enable_thinking, add_generation_prompt=True)
    end = max(i for i, part in enumerate(parts) if part.action)  # the end of the turn that is taken as said
    return names.encode(parts[end + ended:], begins=False)[0]


def prefix_stable(template: str) -> bool:
    """Does the rendering of a conversation begin with the rendering of its first turns?

    Counted in whole turns; the results of parallel tool calls are one turn in Qwen's templates. Only qwen3 forbids it:
    when the next question comes, its template deletes what was thought before, and an answer is no longer written as
    it was sampled. An RL row rendered anew would then have other tokens than those whose log-probs were noted.
    """
    return find_template(template).prefix_stable


def action_text(action: Iterable[int], tokenizer: Tokenizer) -> str:
    """What an action says, for `parse_tool_calls` and rewards: without its end, with <tool_call>, <think> and the like.

    `tokenizer.decode` hides these in the vocabularies that count them among the control tokens, and calls get lost.
    """
    hidden = {token for name, token in tokenizer.special.items() if name not in MARKS}
    return tokenizer.decode([token for token in action if token not in hidden], continued=True, special=True)


def turn_ends(tokenizer: Tokenizer, template: str) -> set[int]:
    """The tokens that end what the assistant says: the template's end-of-turn token, and those of the tokenizer."""
    names = _Names(template, tokenizer)
    return {*tokenizer.stop_ids, names.ids[find_template(template).end or names.eos]}


def speak(tokenizer: Tokenizer, template: str) -> None:
    """Give a tokenizer the template that its model learns, in place; "": none.

    It is written beside the model, for whoever talks to it, with the end of a turn, where its answers stop.
    """
    if template:
        tokenizer.chat_template = chat_template(template)
        tokenizer.add_stops(turn_ends(tokenizer, template))


def _parts(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, template: str, bos: str,
           eos: str, **options: Any) -> list[Part]:
    checked, tools = check_messages(messages), check_tools(tools)
    for lost in left_out(find_template(template), checked, tools):
        warnings.warn(f"template {template!r} has no words for {lost}: left out", stacklevel=3)
    return write(find_template(template), checked, tools, bos=bos, eos=eos, **options)


class _Names:
    """The control tokens that a template may write, as one tokenizer numbers them. `ids`: name -> id."""

    def __init__(self, template: str, tokenizer: Tokenizer, bos: str | None = None):
        row = find_template(template)
        self.tokenizer = tokenizer
        self.eos = self._name_of(tokenizer.eos_id)
        assert self.eos, "the EOS of a tokenizer is one of its control tokens"
        self.bos = bos if bos is not None else self._name_of(tokenizer.bos_id) if row.bos is None else row.bos
        needed = {self.eos, self.bos, *row.controls} - {""}
        if missing := sorted(needed - tokenizer.special.keys()):
            raise UserError(f"the tokenizer has no control token {missing[0]!r}, which template {template!r} needs: "
                            "take the tokenizer of a chat model, or template 'plain'")
        self.ids = {name: tokenizer.special[name] for name in (*needed, *MARKS) if name in tokenizer.special}
        # Llama 2's tokenizer.json begins every text with a space, behind a control token too; others do not.
        behind = tokenizer.encode(self.eos + "a", special=True)[1:]
        self.continued = behind == tokenizer.encode("a", continued=True)

    def _name_of(self, token: int | None) -> str:
        return next((name for name, number in self.tokenizer.special.items() if number == token), "")

    def encode(self, parts: Sequence[Part], begins: bool = True) -> tuple[list[int], list[bool]]:
        """Parts to ids and mask. begins: nothing comes before them; else they go on behind a control token."""
        allowed = {"all": self.ids, "marks": {name: self.ids[name] for name in MARKS if name in self.ids}, "none": {}}
        pieces = [(allowed[part.names].get(piece, piece), part.action)
                  for part in parts for piece in _split(part.text, allowed[part.names])]
        tokens: list[int] = []
        mask: list[bool] = []
        continued = not begins and self.continued
        for (is_text, action), group in groupby(pieces, key=lambda piece: (isinstance(piece[0], str), piece[1])):
            ids = [value for value, _ in group]
            if is_text:
                ids = self.tokenizer.encode("".join(ids), continued=continued)
            # A text begins behind BOS, as in every prompt of minirl; elsewhere it goes on behind a control token.
            continued = is_text or (self.continued and ids != [self.tokenizer.bos_id])
            tokens += ids
            mask += [action] * len(ids)
        return tokens, mask


def _split(text: str, names: Iterable[str]) -> list[str]:
    """A text with the names in it cut out: "a<think>b" -> ["a", "<think>", "b"]."""
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pieces = re.split(f"({longest_first})", text) if longest_first else [text]
    return [piece for piece in pieces if piece]


if __name__ == "__main__":
    from minirl.terminal import command  # which imports this module: only now, and only here
    command()
