"""The file of SentencePiece: what is in a tokenizer.model, pieces made control tokens, the same as a tokenizer.json.

A tokenizer.model is a protobuf message, ModelProto, of which four things matter here: the pieces (field 1: name, score,
type), the kind of model (2.3: 1 unigram, 2 BPE), and the normaliser (3.2: a table of characters, 3.3: does a text begin
with a space? 3.4: are spaces tidied up?).
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

SPACE = "▁"  # U+2581 stands for a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2

# Messages merge when they are concatenated, and the last value counts. This one holds only
# normalizer_spec { add_dummy_prefix: false  remove_extra_whitespaces: false }; without the second, " b"
# after "a" would lose its space in a model that tidies up spaces.
NO_DUMMY_PREFIX = b"\x1a\x04\x18\x00\x20\x00"


class Piece(NamedTuple):
    name: str
    score: float
    kind: int


class Model:
    """The parts of a tokenizer.model that the sentencepiece package does not tell. IndexError for a broken file."""

    def __init__(self, proto: bytes) -> None:
        self.proto = proto
        self.pieces: list[Piece] = []
        self._spans: list[tuple[int, int]] = []  # where a piece begins and ends in proto
        trainer, normaliser = {}, {}
        for number, value, start, end in _fields(proto):
            if number == 1:
                piece = {number: value for number, value, _, _ in _fields(value)}
                score, = struct.unpack("<f", piece.get(2, bytes(4)))
                self.pieces.append(Piece(piece.get(1, b"").decode(errors="replace"), score, piece.get(3, NORMAL)))
                self._spans.append((start, end))
            elif number in (2, 3):
                (trainer if number == 2 else normaliser).update((n, value) for n, value, _, _ in _fields(value))
        self.kind: int = trainer.get(3, UNIGRAM)
        self.characters: bytes = normaliser.get(2, b"")
        self.adds_space = bool(normaliser.get(3, 1))
        self.tidies = bool(normaliser.get(4, 1))

    def with_control(self, names: set[str]) -> bytes:
        """The file with some of its pieces made control pieces, which SentencePiece does not find in a text."""
        parts, done = [], 0
        for piece, (start, end) in zip(self.pieces, self._spans):
            if piece.name in names:
                body = _varint(self.proto, start + 1)[1]
                parts += [self.proto[done:start], b"\n", _to_varint(end - body + 2), self.proto[body:end], b"\x18\x03"]
                done = end  # of two types in a piece the last one counts, so one is appended
        return b"".join([*parts, self.proto[done:]])

    def tokenizer_json(self, added: list[dict[str, Any]], bos: str | None, adds_space: bool,
                       everywhere: bool) -> dict[str, Any] | None:
        """The same tokenizer in Hugging Face's format; None for a model of words or characters.

        added: its added tokens. bos: what a text begins with. adds_space: does a text begin with a space? everywhere:
        so does what follows a control token.
        """
        if self.kind not in (UNIGRAM, BPE):
            return None
        unknown = next(number for number, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)
        in_text = (NORMAL, USER_DEFINED)
        never = min(piece.score for piece in self.pieces) - 1000.0  # else the text "<0x0A>" would be a line feed
        fallback = any(piece.kind == BYTE for piece in self.pieces)
        if self.kind == UNIGRAM:
            model = {"type": "Unigram", "unk_id": unknown, "byte_fallback": fallback,
                     "vocab": [[piece.name, piece.score if piece.kind in in_text else never] for piece in self.pieces]}
        else:
            model = {"type": "BPE", "dropout": None, "unk_token": self.pieces[unknown].name, "fuse_unk": True,
                     "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": fallback,
                     "ignore_merges": False, "merges": self._merges(),
                     "vocab": {piece.name: number for number, piece in enumerate(self.pieces)}}
        characters = [{"type": "NFC"},  # "Precompiled" does not put the letters of a Korean syllable together
                      {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(self.characters).decode()}]
        tidy = [{"type": "Replace", "pattern": {"Regex": f"[ {SPACE}]+\\z"}, "content": ""},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * adds_space
        first = {"SpecialToken": {"id": bos, "type_id": 0}}
        ids = [row["id"] for row in added if row["content"] == bos]
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model,
            "normalizer": {"type": "Sequence", "normalizers": [
                *(characters if self.characters else []), *(tidy if self.tidies else []),
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]},
            "pre_tokenizer": _spaces("always" if everywhere else "first", self.tidies) if adds_space else None,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "post_processor": None if bos is None else {
                "type": "TemplateProcessing", "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
                "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}}

    def _merges(self) -> list[list[str]]:
        """SentencePiece joins the neighbours whose union has the highest score: all cuts of all pieces, best first."""
        names = {piece.name for piece in self.pieces if piece.kind == NORMAL}
        best_first = sorted((piece for piece in self.pieces if piece.kind == NORMAL), key=lambda piece: -piece.score)
        return [[piece.name[:cut], piece.name[cut:]] for piece in best_first for cut in range(1, len(piece.name))
                if piece.name[:cut] in names and piece.name[cut:] in names]


def _spaces(scheme: str, tidies: bool) -> dict[str, Any]:
    """The pre-tokenizer that puts a U+2581 before a text.

    Metaspace adds none where there is one already, which is right if the model tidies spaces up. Else SentencePiece
    adds one to whatever there is: a first step adds a blank (the normaliser has replaced all others), and a second
    one turns it into U+2581.
    """
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    return step if tidies else {"type": "Sequence", "pretokenizers": [
        {**step, "replacement": " "}, {**step, "prepend_scheme": "never"}]}


def _fields(message: bytes) -> Iterator[tuple[int, Any, int, int]]:
    """(number, value, start, end) of the fields of a protobuf message: ints, and bytes for all other types."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            if at + size > len(message):
                raise IndexError("the file ends in the middle of a field")
            value, at = message[at:at + size], at + size
        yield tag >> 3, value, start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in protobuf's seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def _to_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _to_varint(value >> 7)
