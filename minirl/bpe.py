"""Byte-pair encoding as a Hugging Face tokenizer.json describes it: normalise, cut into words, merge.

    bpe = BPE(read_json("tokenizer.json"))
    bpe.encode("hello world")                        [31373, 995]

Two families share the file format. GPT-2, Llama 3, Qwen and SmolLM cut a text into words with a regular expression
and merge the *bytes* of a word (byte-level BPE). Llama 2, TinyLlama and Mistral write a space as U+2581, merge
*characters*, and fall back to byte tokens for a character that has no token of its own.

A merge list is a priority: of all neighbours in a word the pair that was learned first is joined, then the next, until
no pair is left (Sennrich et al. 2015, arXiv 1508.07909). A text consists of few different words, so each word is
merged once and remembered.

Only ids and bytes live here; names with a meaning of their own (`<|im_end|>`) are `special_tokens.py`.
"""

import re
import sys
import unicodedata
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from minirl.config import UserError

SPACE = "▁"  # U+2581, how SentencePiece writes a space
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029" \
             "\u202f\u205f\u3000"  # White_Space of Unicode; Python's own \s has U+001C to U+001F besides
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_ID = 2**22  # no vocabulary is larger, and a broken file that says so shall not cost the memory
CACHED_WORDS, CACHED_LENGTH = 2**17, 64  # the memory of a long run stays bounded


class BPE:
    """The `model`, `normalizer`, `pre_tokenizer` and `decoder` of a tokenizer.json.

    forbidden: ids of control tokens. No text may give them, so merges that would make one are left out.
    """

    def __init__(self, file: dict[str, Any], forbidden: frozenset[int] = frozenset()) -> None:
        model = file.get("model") or {}
        kind = model.get("type", "BPE" if "merges" in model else "?")
        if kind != "BPE":
            raise UserError(f"a tokenizer of type {kind} is not supported: BPE is, and SentencePiece's tokenizer.model")
        for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(option):
                raise UserError(f"BPE with {option} = {model[option]!r} is not supported")
        self.vocab: dict[str, int] = model["vocab"]
        if not all(type(token) is int and 0 <= token < MAX_ID for token in self.vocab.values()):
            raise UserError(f"a vocabulary with ids that are not between 0 and {MAX_ID}")
        self._forbidden = forbidden
        self._ignore_merges = bool(model.get("ignore_merges"))
        self._read_merges(model["merges"])
        self._normalisers = _normalisers(file.get("normalizer"))
        self._read_pre_tokenizer(file.get("pre_tokenizer"))
        self._read_decoder(file.get("decoder"))
        unknown = model.get("unk_token")
        self._unknown, self._fuse = self.vocab.get(unknown), bool(model.get("fuse_unk"))
        characters = byte_characters() if self.byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        self._byte_ids = [self.vocab.get(character) for character in characters]
        self._byte_fallback = not self.byte_level and bool(model.get("byte_fallback"))
        self._cache: dict[str, list[int]] = {}

    # ---- text to ids

    def encode(self, text: str, prefix: bool = True) -> list[int]:
        """The ids of a text. prefix: put the space in front that this tokenizer begins a text with, if it does."""
        return self.encode_normalised(self.normalise(text, prefix), prefix)

    def normalise(self, text: str, prefix: bool = True) -> str:
        """The first half of `encode`. Some added tokens are looked for between the two (`AddedToken.normalized`)."""
        for normaliser in self._normalisers:
            text = normaliser(text, prefix)
        return text

    def encode_normalised(self, text: str, prefix: bool = True) -> list[int]:
        """The second half: cut the text into words, and merge each that has not been met before."""
        if not text:
            return []
        words = [text]
        for step in self._steps:
            words = step(words, prefix)
        ids, cache = [], self._cache
        for word in words:
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= CACHED_LENGTH:
                    if len(cache) >= CACHED_WORDS:
                        cache.clear()
                    cache[word] = known
            ids += known
        return ids

    def _encode_word(self, word: str) -> list[int]:
        if self._ignore_merges:
            key = word.encode().decode("latin-1").translate(_BYTE_TABLE) if self.byte_level else word
            token = self.vocab.get(key)
            if token is not None and token not in self._forbidden:
                return [token]
        return self._merge(self._symbols(word))

    def _symbols(self, word: str) -> list[int]:
        """One id a byte, or one a character. What the vocabulary lacks is the unknown token, or dropped."""
        if self.byte_level:
            return [token for token in map(self._byte_ids.__getitem__, word.encode()) if token is not None]
        ids = []
        for character in word:
            token = self.vocab.get(character)
            if token is not None and token not in self._forbidden:
                ids.append(token)
                continue
            tokens = [self._byte_ids[byte] for byte in character.encode()] if self._byte_fallback else [None]
            if None not in tokens:
                ids += tokens
            elif self._unknown is not None and not (self._fuse and ids and ids[-1] == self._unknown):
                ids.append(self._unknown)
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Join the pair of lowest rank, the leftmost of equals, until none is left. O(n log n).

        A heap holds the candidates, and a linked list says who is whose neighbour: looking for the best pair
        over and over is quadratic, which a word of 100,000 letters (a tool's output) would show.
        """
        ranks, n = self._ranks, len(ids)
        heap = [rank * n + i for i, pair in enumerate(pairwise(ids)) if (rank := ranks.get(pair)) is not None]
        if not heap:
            return ids
        heapify(heap)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        while heap:
            rank, i = divmod(heappop(heap), n)
            j = after[i]
            if j == n or ranks.get((ids[i], ids[j])) != rank:
                continue  # one of the two has been joined to another in the meantime
            ids[i], ids[j] = self._joined[rank], -1
            k = after[i] = after[j]
            if k < n:
                before[k] = i
                if (rank := ranks.get((ids[i], ids[k]))) is not None:
                    heappush(heap, rank * n + i)
            h = before[i]
            if h >= 0 and (rank := ranks.get((ids[h], ids[i]))) is not None:
                heappush(heap, rank * n + h)
        return [token for token in ids if token >= 0]

    # ---- ids to bytes

    def piece_bytes(self) -> list[bytes]:
        """The bytes of every token, by id. b"" where the vocabulary has a gap."""
        table = [b""] * (max(self.vocab.values(), default=-1) + 1)
        if self.byte_level:
            to_byte = {ord(character): byte for byte, character in enumerate(byte_characters())}
            for piece, token in self.vocab.items():
                try:
                    table[token] = piece.translate(to_byte).encode("latin-1")
                except UnicodeEncodeError:  # a name that is not written in byte characters
                    table[token] = piece.encode()
            return table
        for piece, token in self.vocab.items():
            is_byte = self._byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", piece)
            table[token] = bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, " ").encode()
        return table

    def unused(self) -> int | None:
        """A row that no text gives: the unknown token where there are byte tokens, or the byte 0xFF, in no UTF-8."""
        return self._unknown if self._byte_fallback and self._unknown is not None else self._byte_ids[0xFF]

    # ---- reading the file

    def _read_merges(self, merges: list) -> None:
        """[["a", "b"], ...] or ["a b", ...] in order of priority -> rank of a pair of ids, and what it becomes."""
        vocab = self.vocab
        self._ranks: dict[tuple[int, int], int] = {}
        self._joined: list[int] = []
        self._crosses_words = False
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            try:
                joined = vocab[left + right]
                pair = vocab[left], vocab[right]
            except KeyError:
                raise UserError(f"merge {rank}, {left!r} + {right!r}, is not in the vocabulary") from None
            self._joined.append(joined)
            if joined not in self._forbidden:
                self._ranks[pair] = rank
                self._crosses_words |= right[0] == SPACE and left[-1] != SPACE

    def _read_pre_tokenizer(self, config: dict | None) -> None:
        self.byte_level = False
        self.prefix_everywhere = True  # also behind a control token, or only where the text begins?
        self._steps: list[Callable[[list[str], bool], list[str]]] = []
        steps = _sequence(config, "pretokenizers")
        for number, step in enumerate(steps):
            kind = step["type"]
            if kind == "ByteLevel" and number == len(steps) - 1:
                self.byte_level = True
                if step.get("add_prefix_space", True):
                    self._steps.append(lambda words, prefix: [" " + word if word[0] != " " and (prefix or i) else word
                                                              for i, word in enumerate(words)])
                if step.get("use_regex", True):
                    self._steps.append(_each(Split(GPT2_WORDS)))
            elif kind == "Split":
                (syntax, pattern), = step["pattern"].items()
                source = pattern if syntax == "Regex" else re.escape(pattern)
                self._steps.append(_each(Split(source, step["behavior"], step.get("invert", False))))
            elif kind == "Digits":
                self._steps.append(_each(Split(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")))
            elif kind == "Metaspace" and (space := step.get("replacement", SPACE)) in (SPACE, " "):
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                self.prefix_everywhere &= scheme != "first"
                self._steps.append(_metaspace(space, scheme))
                if step.get("split", True):
                    self._steps.append(_each(re.compile(f"{space}[^{space}]*|[^{space}]+").findall))
            else:
                raise UserError(f"pre-tokenizer {kind} at place {number + 1} is not supported: Split, Digits, "
                                "Metaspace and, in the last place, ByteLevel are")
        if not self.byte_level and not self._crosses_words and not self._ignore_merges and SPACE in self.vocab:
            # No merge joins a letter to a space behind it, so words can be merged one by one, and remembered.
            self._steps.append(_each(re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+").findall))

    def _read_decoder(self, config: dict | None) -> None:
        self.leading_space = False
        for step in _sequence(config, "decoders"):
            kind = step["type"]
            if kind == "Strip" and step.get("content") == " ":
                self.leading_space = step.get("start", 0) > 0
            elif kind == "Metaspace":
                self.leading_space = step.get("prepend_scheme", "always") != "never"
            elif kind not in ("ByteLevel", "ByteFallback", "Fuse", "Replace"):
                raise UserError(f"decoder {kind} is not supported: ByteLevel, Metaspace, Replace, ByteFallback, Fuse "
                                "and Strip are")


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of every byte: itself where printable, else the next one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_TABLE = dict(enumerate(byte_characters()))


def _sequence(config: dict | None, parts: str) -> list[dict]:
    """The steps of a component that may be absent, one step, or a Sequence of them."""
    if config is None:
        return []
    if config["type"] != "Sequence":
        return [config]
    return [step for part in config[parts] for step in _sequence(part, parts)]


def _each(split: Callable[[str], list[str]]) -> Callable[[list[str], bool], list[str]]:
    return lambda words, prefix: [piece for word in words for piece in split(word)]


def _metaspace(space: str, scheme: str) -> Callable[[list[str], bool], list[str]]:
    def step(words: list[str], prefix: bool) -> list[str]:
        words = [word.replace(" ", space) for word in words]
        adds = {"always": lambda i: prefix or i, "first": lambda i: prefix and not i, "never": lambda i: False}[scheme]
        return [space + word if adds(i) and not word.startswith(space) else word for i, word in enumerate(words)]
    return step


def _normalisers(config: dict | None) -> list[Callable[[str, bool], str]]:
    steps = []
    for step in _sequence(config, "normalizers"):
        kind = step["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            steps.append(lambda text, prefix, form=kind: unicodedata.normalize(form, text))
        elif kind == "Prepend":
            steps.append(lambda text, prefix, what=step["prepend"]: what + text if prefix and text else text)
        elif kind == "Replace" and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            steps.append(lambda text, prefix, old=old, new=new: text.replace(old, new))
        else:
            raise UserError(f"normalizer {kind} is not supported: NFC, NFD, NFKC, NFKD, Prepend and Replace (of a "
                            "string, not of a regular expression) are")
    return steps


# ---- cutting a text into words


class Split:
    """Cut a text where a regular expression matches: `split(text) -> list of pieces`, none of them empty.

    behavior: what becomes of a match (a piece of its own, dropped, glued to a neighbour). invert: the text between
    the matches plays their part.
    """

    def __init__(self, source: str, behavior: str = "Isolated", invert: bool = False) -> None:
        if behavior not in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
            raise UserError(f"Split with behavior {behavior} is not supported")
        self.behavior, self.invert = behavior, invert
        self.alphabet = _Alphabet(source)
        self.pattern = self.alphabet.pattern

    def __call__(self, text: str) -> list[str]:
        plain = text.isascii()
        reduced = text if plain else text.translate(self.alphabet)
        if self.behavior == "Isolated" and plain:
            words = self.pattern.findall(text)
            if sum(map(len, words)) == len(text):  # the matches leave no gap, as in all known tokenizers
                return words
        pieces, end = [], 0  # (is a match, start, end)
        for match in self.pattern.finditer(reduced):
            a, b = match.span()
            if a > end:
                pieces.append((self.invert, end, a))
            if b > a:
                pieces.append((not self.invert, a, b))
                end = b
        if end < len(text):
            pieces.append((self.invert, end, len(text)))
        return [text[a:b] for a, b in self._behave(pieces)]

    def _behave(self, pieces: list[tuple[bool, int, int]]) -> list[tuple[int, int]]:
        if self.behavior == "Isolated":
            return [(a, b) for _, a, b in pieces]
        if self.behavior == "Removed":
            return [(a, b) for is_match, a, b in pieces if not is_match]
        spans, previous = [], None
        for is_match, a, b in pieces:
            glued = {"MergedWithPrevious": is_match and previous is False,
                     "MergedWithNext": not is_match and previous is True,
                     "Contiguous": is_match == previous}[self.behavior]
            if glued:
                spans[-1] = spans[-1][0], b
            else:
                spans.append((a, b))
            previous = is_match
        return spans


class _Alphabet(dict):
    r"""A pattern in the regular expressions of tokenizer.json (Oniguruma's), made to run on Python's `re`.

    `re` has no \p{L}. Written out, the letters of Unicode are 600 ranges, half of them tried one by one at every
    character. So the text is reduced instead: `text.translate(alphabet)` puts one example of its general category in
    the place of each character beyond ASCII (all upper-case letters become À), and every class of the pattern is a
    short list of such examples. Characters that the pattern names stay what they are.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.kept = {"\x85", "\u017f", "\u212a"}  # a space among controls; and what (?i:s) and (?i:k) match as well
        self.examples: dict[str, str] = {}
        self.members = ""
        self._parse()  # a first time to see which characters the pattern names
        for code in reversed(range(128, 0xE001)):
            if chr(code) not in self.kept:
                self.examples[unicodedata.category(chr(code))] = chr(code)
        self.members = "".join(map(chr, range(128))) + "".join(sorted({*self.kept, *self.examples.values()}))
        try:
            self.pattern = re.compile(self._parse())
        except re.error as error:
            raise self._refusal(f"Python {sys.version_info.major}.{sys.version_info.minor} says {error}") from None

    def __missing__(self, code: int) -> str:
        character = chr(code)
        keep = code < 128 or character in self.kept
        self[code] = character if keep else self.examples[unicodedata.category(character)]
        return self[code]

    def _refusal(self, what: str) -> UserError:
        return UserError(f"the regular expression {self.source!r} of the pre-tokenizer is not supported: {what}")

    def _parse(self) -> str:
        self.at = 0
        pattern = self._alternatives(ignore_case=False)
        if self.at < len(self.source):
            raise self._refusal("unbalanced )")
        return pattern

    def _alternatives(self, ignore_case: bool) -> str:
        out = []
        while self.at < len(self.source) and self.source[self.at] != ")":
            if self._take(r"\|"):
                out.append("|")
            elif group := self._take(r"\((\?(i?:|[=!]))?"):
                opening = "(?:" if group in ("(", "(?i:") else group
                inside = self._alternatives(ignore_case or group == "(?i:")
                if not self._take(r"\)"):
                    raise self._refusal("unbalanced (")
                out.append(opening + inside + ")" + self._take(r"\?[+?]?"))  # no (a+)+, which takes exponential time
            else:
                out.append(self._class(self._atom(), ignore_case))
                out.append(self._take(r"[?*+][+?]?|\{\d+(,\d*)?\}|\{,\d+\}"))
        return "".join(out)

    def _take(self, expression: str) -> str:
        match = re.compile(expression).match(self.source, self.at)
        self.at = match.end() if match else self.at
        return match.group() if match else ""

    def _class(self, test: Callable[[str], bool], ignore_case: bool) -> str:
        folded = {c.casefold() for c in self.members if test(c)} if ignore_case else set()
        members = [c for c in self.members if test(c) or c.casefold() in folded]
        ranges: list[list[int]] = []
        for code in map(ord, members):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
        inside = "".join(re.escape(chr(a)) + ("-" + re.escape(chr(b)) if b > a else "") for a, b in ranges)
        return f"[{inside}]" if inside else "(?!)"

    def _atom(self) -> Callable[[str], bool]:
        """A character, an escape, `.` or a [class], as a function that says which characters it matches."""
        if self._take(r"\."):
            return lambda c: c != "\n"
        if not self._take(r"\["):
            return self._item(in_class=False)
        negated, tests = bool(self._take(r"\^")), []
        while not self._take(r"\]"):
            if self.at >= len(self.source):
                raise self._refusal("unbalanced [")
            if self._take(r"\[|&&"):
                raise self._refusal("a class inside a class")
            start = self._item(in_class=True)
            if isinstance(start, _Only) and self._take(r"-(?!\])"):
                end = self._item(in_class=True)
                if not isinstance(end, _Only):
                    raise self._refusal("a range without an end")
                self._keep(start.character, end.character)
                tests.append(lambda c, a=start.character, b=end.character: a <= c <= b)
            else:
                tests.append(start)
        return lambda c: any(test(c) for test in tests) != negated

    def _item(self, in_class: bool) -> Callable[[str], bool]:
        if prop := self._take(r"\\[pP]\{[A-Z][a-z]?\}"):
            category, negated = prop[3:-1], prop[1] == "P"
            return lambda c: unicodedata.category(c).startswith(category) != negated
        if named := self._take(r"\\[sSdD]"):
            inside = _is_space if named[1] in "sS" else lambda c: unicodedata.category(c) == "Nd"
            negated = named[1].isupper()
            return lambda c: inside(c) != negated
        if code := self._take(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\x\{[0-9a-fA-F]+\}"):
            character = chr(int(code[2:].strip("{}"), 16))
        elif control := self._take(r"\\[rntfv]"):
            character = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}[control[1]]
        elif escaped := self._take(r"\\[^a-zA-Z0-9]"):
            character = escaped[1]
        elif what := self._take(r"\\[pP]\{[^}]*\}|\\.?" + ("" if in_class else r"|[\^$?*+{]")):
            raise self._refusal(what)
        else:
            character, self.at = self.source[self.at], self.at + 1
        self._keep(character, character)
        return _Only(character)

    def _keep(self, first: str, last: str) -> None:
        if ord(last) - ord(first) > 100_000:
            raise self._refusal(f"the range {first!r} to {last!r} is too wide")
        self.kept |= {chr(code) for code in range(max(128, ord(first)), ord(last) + 1)}


class _Only:
    def __init__(self, character: str) -> None:
        self.character = character

    def __call__(self, character: str) -> bool:
        return character == self.character


def _is_space(character: str) -> bool:
    return character in WHITESPACE
