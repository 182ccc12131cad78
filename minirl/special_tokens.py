"""Tokens with a name: `<|im_end|>`, `</s>`, `<think>`. Read from the files of a model folder, and found in text.

A *control* token ends a text, pads a row, marks a turn. Text never turns into one, or a tool could write the end of its
turn and speak as the system: control tokens are recognised only where the caller says that a text is a template of
his own (`special=True`). Control is, whatever else the files say of it,

- an added token that is flagged `"special": true`, or named as bos, eos, pad, unk, an additional special token;
- one whose name is that of a turn mark: between bars (`<|user|>`, and DeepSeek's wide ones), `[INST]`,
  `<start_of_turn>`. Some files flag these `"special": false`.

The other added tokens (`<think>`, `<tool_call>`, runs of spaces) are ordinary vocabulary, as in Hugging Face: found in
any text, and text again when decoded. They cannot open or close a turn. The unknown token is the one control token
that text can give, for a character that a vocabulary without bytes lacks; it marks nothing.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirl.bpe import MAX_ID, WHITESPACE
from minirl.config import UserError, read_json

TURN_MARK = re.compile(r"<\|.*\|>|<｜.*｜>|\[/?[A-Z_]+\]|<(start|end)_of_turn>|</?s>", re.DOTALL)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>")
SPARE = ("pad", "reserved", "unused", "extra")  # in the names of rows that mean nothing


_SPACES = re.compile(f"[{WHITESPACE}]*")


@dataclass(frozen=True)
class AddedToken:
    """A row of `added_tokens`. strip: white space beside it belongs to it; single_word: not inside a word."""

    content: str
    id: int
    special: bool = False
    normalized: bool = False  # looked for after the normaliser, and not before
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Added:
    """The added tokens of a tokenizer: `split` finds them in a text."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.tokens = {token.content: token for token in tokens if token.content}
        self.special = {token.content: token.id for token in self.tokens.values() if token.special}
        self._patterns: dict[tuple[bool, bool], tuple[re.Pattern, dict[str, AddedToken]] | None] = {}

    def split(self, text: str, special: bool, normalise: Callable[[str], str] | None = None) -> list[str | int]:
        """Cut a text at its added tokens: the text between them, and their ids.

        special: are control tokens looked for, too? normalise: look for the tokens that are found in normalised
        text, which `text` must be, instead of the others.
        """
        key = special, normalise is not None
        if key not in self._patterns:
            self._patterns[key] = self._pattern(special, normalise)
        if self._patterns[key] is None:
            return [text] if text else []
        pattern, tokens = self._patterns[key]
        parts, end = [], 0
        for match in pattern.finditer(text):
            token, (a, b) = tokens[match.group()], match.span()
            if token.single_word and (_in_word(text[a - 1:a]) or _in_word(text[b:b + 1])):
                continue
            before = text[end:a].rstrip(WHITESPACE if token.lstrip else "")
            parts += [before, token.id] if before else [token.id]
            end = _SPACES.match(text, b).end() if token.rstrip else b
        return [*parts, text[end:]] if end < len(text) else parts

    def _pattern(self, special: bool, normalise: Callable | None) -> tuple[re.Pattern, dict[str, AddedToken]] | None:
        tokens = {normalise(token.content) if normalise else token.content: token for token in self.tokens.values()
                  if (special or not token.special) and token.normalized == (normalise is not None)}
        if not tokens:
            return None
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))), tokens


class Files:
    """The JSON files beside a vocabulary, each of them optional."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = self._read("tokenizer_config.json")  # transformers' settings
        self.names = self._read("special_tokens_map.json")
        self.generation = self._read("generation_config.json")
        self.model = self._read("config.json")
        self.more = self._read("added_tokens.json")  # {"<|im_end|>": 32000}
        template = folder / "chat_template.jinja"
        if template.is_file():
            self.config["chat_template"] = template.read_text(encoding="utf-8")

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if (self.folder / name).is_file() else {}

    def name(self, key: str) -> str | None:
        """The name of "eos_token" and the like, if a file has one."""
        return _content(self.config.get(key)) or _content(self.names.get(key))

    def added(self, listed: list[dict], find: Callable[[str], int | None]) -> Added:
        """All added tokens: those `listed` in tokenizer.json, in tokenizer_config.json, in added_tokens.json.

        find: the id that the vocabulary itself gives a name. UserError for an id that is none.
        """
        tokens: dict[str, AddedToken] = {}
        for row in self.rows(listed):
            token = _added_token(row)
            known = tokens.setdefault(token.content, token)
            tokens[token.content] = replace(known, special=known.special or token.special)
        for name in self._special_names():
            if name not in tokens and len(name) > 1 and (token := find(name)) is not None:
                tokens[name] = AddedToken(name, token)
            if name in tokens:
                tokens[name] = replace(tokens[name], special=True)
        control = {name for name, token in tokens.items() if token.special or TURN_MARK.fullmatch(name)}
        return Added(replace(token, special=True, normalized=False) if name in control else token
                     for name, token in tokens.items())

    def rows(self, listed: list[dict]) -> list[dict]:
        decoder = self.config.get("added_tokens_decoder") or {}
        return [*listed, *({**row, "id": int(token)} for token, row in decoder.items()),
                *({"id": token, "content": name} for name, token in self.more.items())]

    def _special_names(self) -> list[str]:
        names = [name for key in NAMED if (name := self.name(key))]
        for values in (self.config, self.names):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = values.get(key) or []
                names += map(_content, more.values() if isinstance(more, dict) else more)
        return names

    def ends(self, special: dict[str, int], own: int | None) -> tuple[int, ...]:
        """The ids that end a sequence, eos_id first: what tokenizer_config.json names, else the vocabulary's `own`,
        else what generation_config.json or config.json list, else a token with the name of an end of text."""
        listed = self.generation.get("eos_token_id", self.model.get("eos_token_id"))
        ids = [token for token in (listed if isinstance(listed, list) else [listed]) if token in special.values()]
        name = self.name("eos_token")
        if name is not None and name not in special:
            raise UserError(f"{self.folder}: the eos_token {name!r} has no id in the vocabulary")
        ids = [token for token in [special.get(name, own), *ids] if token is not None]
        ids = ids or [special[name] for name in ENDS if name in special][:1]
        if not ids:
            raise UserError(f"{self.folder}: no end-of-text token; name an eos_token in tokenizer_config.json")
        return tuple(dict.fromkeys(ids))

    def pad(self, special: dict[str, int], eos_id: int, spare: int | None) -> int:
        """The id of the padding. Never eos_id, as many files have it: masking the padding would mask the end.

        Without a pad token of the files: a control token that means nothing by its name, then the unknown token,
        then `spare`, a row that no text gives; then the last control token.
        """
        candidates = [special.get(self.name("pad_token")), self.generation.get("pad_token_id"),
                      *(token for word in SPARE for name, token in special.items() if word in name.lower()),
                      special.get(self.name("unk_token")), spare, *reversed(special.values())]
        allowed = {*special.values(), spare} - {eos_id, None}
        for token in candidates:
            if token in allowed:
                return token
        raise UserError(f"{self.folder}: no row is left for padding, which must not be the eos_token")

    def bos(self, special: dict[str, int], start: str | None) -> int | None:
        """What a text begins with: `start`, the vocabulary's own, unless tokenizer_config.json decides otherwise.

        A bos_token that transformers does not put in front (GPT-2's, Qwen's) is none.
        """
        adds = self.config.get("add_bos_token", start is not None)
        return special.get(self.name("bos_token") if start is None else start) if adds else None


def _content(value: Any) -> str | None:
    """A token is written as its name, or as {"content": name}."""
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise UserError(f"a special token is named {name!r}, which is no name")
    return name


def _in_word(character: str) -> bool:
    return bool(character) and (unicodedata.category(character)[0] in "LM" or character in "\u200c\u200d"
                                or unicodedata.category(character) in ("Nd", "Nl", "Pc"))


def template_start(post_processor: dict | None) -> str | None:
    """The special token that a template post-processor puts before a text."""
    if post_processor is None:
        return None
    if post_processor["type"] == "Sequence":
        return next(filter(None, map(template_start, post_processor["processors"])), None)
    first = post_processor["single"][0] if post_processor["type"] == "TemplateProcessing" else {}
    return first["SpecialToken"]["id"] if "SpecialToken" in first else None


def _added_token(row: dict) -> AddedToken:
    known = {name: row[name] for name in AddedToken.__dataclass_fields__ if name in row}
    if type(known.get("id")) is not int or not 0 <= known["id"] < MAX_ID or not isinstance(known.get("content"), str):
        raise UserError(f"the added token {row!r} needs an id between 0 and {MAX_ID}, and a content")
    return AddedToken(**known)
