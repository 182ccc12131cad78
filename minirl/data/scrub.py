"""E-mail addresses, phone numbers and keys leave the data before a model can learn them by heart.

    scrub({"content": "write to ann@example.org or +687 27.25.92"})     {"content": "write to <email-1> or <phone-1>"}

The same address has the same name throughout a row, so that a call still asks for what a tool has said.
"""

from __future__ import annotations

import re
from typing import Any

# A text may be JSON inside a string: in "\nann@example.org" the n is no part of the address, and taking it would leave
# a lone backslash, which is no JSON any more. Each pattern can only begin where a run of its characters does: one pass.
START = r"(?:(?<=\\[nrt])|(?<![\w.+\\-]))"
PATTERNS = {
    "email": re.compile(START + r"[A-Za-z0-9][\w.+%-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}", re.A),
    "key": re.compile(
        START + r"(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|xox[abprs]-[\w-]{10,}"
        r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*-----END [A-Z ]*PRIVATE KEY-----"
        r"|(?<=[Bb]earer )[\w.~+/=-]{16,}"
        r"|(?<![^\W_])(?:api[_-]?key|access[_-]?token|secret|password)\\?['\"]?\s?[:=]\s?\\?['\"]?(?P<value>[\w.~+/-]{8,})",
        re.A | re.I),
    "phone": re.compile(
        START + r"(?:\+[1-9][0-9]{0,3}(?:[ .-]?\(?[0-9]{1,4}\)?){2,6}|\([0-9]{3}\) ?[0-9]{3}[ .-][0-9]{4}"
        r"|[0-9]{3}[ .-][0-9]{3}[ .-][0-9]{4})(?![\w-]|\.[0-9])", re.A),
}


def scrub(value: Any) -> tuple[Any, dict[str, int]]:
    """A copy of `value` (a row, messages, a text) without them, and how many of each kind were taken out.

    Objects are gone through to the last string; keys of objects and the arguments of calls too.
    """
    names: dict[tuple[str, str], str] = {}
    counts = dict.fromkeys(PATTERNS, 0)

    def text(found: str) -> str:
        """Without them. Equal ones get one name, so that who is who can still be told."""
        for kind, pattern in PATTERNS.items():
            def replace(match: re.Match, kind: str = kind) -> str:
                secret = match.groupdict().get("value") or match[0]
                counts[kind] += 1
                name = names.setdefault((kind, secret), f"<{kind}-{1 + sum(key[0] == kind for key in names)}>")
                return match[0][: len(match[0]) - len(secret)] + name
            found = pattern.sub(replace, found)
        return found

    def walk(inner: Any) -> Any:
        """Every string of it by `text`."""
        if isinstance(inner, str):
            return text(inner)
        if isinstance(inner, list | tuple):
            return [walk(part) for part in inner]
        if isinstance(inner, dict):
            return {walk(key): walk(part) for key, part in inner.items()}
        return inner

    return walk(value), counts
