"""Text to token ids and back: bytes, or a SentencePiece model.

Control tokens (beginning and end of text, padding, chat marks) are put into a sequence by their id, never by
their name: `encode` takes any text, a tool's output included, as plain characters, so that nobody can forge
the end of a turn by writing `</s>`. Nor is BOS or EOS ever added behind the caller's back.

Ids are the truth and text is a view of them: `encode(decode(ids))` may differ from `ids` (a model may write
`s`, `a`, `t` where the tokenizer would write `sat`), so sampled ids are kept, and never encoded again.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from minirl.config import UserError, read_json, write_text


class Tokenizer(ABC):
    """What the rest of minirl asks of a tokenizer.

    A prompt is `([bos_id] if bos_id is not None else []) + encode(text)`; whatever follows it, an answer or
    the output of a tool, is `encode(text, continued=True)`.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int  # a row of the embedding, and never eos_id: a padded tail must not look like an end of text
    leading_space = False  # does encode() put a space in front of a text?

    @abstractmethod
    def encode(self, text: str, continued: bool = False) -> list[int]:
        """The ids of a text, without BOS and EOS. `continued`: it goes on after other text."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; none for a control token, or an id beyond the vocabulary."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files that `load_tokenizer`, and transformers' AutoTokenizer, open."""

    def decode(self, ids: Iterable[int], continued: bool = False) -> str:
        """The text of some ids: their bytes joined, then read as UTF-8, where U+FFFD marks what is none.

        `continued` says that they go on after other text, as in `encode`: the space that begins a first word
        is then kept, so that decode(a) + decode(b, continued=True) == decode(a + b) for a cut between two
        characters. A character may be spread over tokens: to stream, join `token_bytes`.
        """
        text = b"".join(self.token_bytes(token) for token in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.leading_space and not continued else text


class ByteTokenizer(Tokenizer):
    """One token a byte of UTF-8, then `<|endoftext|>` (256) and `<|pad|>` (257): nothing to train."""

    vocab_size = 258
    bos_id = None
    eos_id = 256
    pad_id = 257

    def encode(self, text: str, continued: bool = False) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))  # half a surrogate pair becomes "?"

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def save(self, folder: str | Path) -> None:
        """In transformers' words: a byte-level BPE without merges, and two special tokens."""
        names = {self.eos_id: "<|endoftext|>", self.pad_id: "<|pad|>"}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                      "trim_offsets": False}
        added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        _write_json(Path(folder) / "tokenizer.json", {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": token, "content": name, **added} for token, name in names.items()],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": _byte_characters(), "merges": []}})
        _write_json(Path(folder) / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "eos_token": names[self.eos_id], "pad_token": names[self.pad_id]})


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer.model as Llama and Mistral have it; BOS and EOS are those of the file.

    pad_id: few files have a pad piece. Then it is the unknown piece, which text never gives where the model
    falls back to bytes. It is not EOS, or masking the padding would mask the end of text as well.

    SentencePiece writes a space as U+2581 and puts one in front of every text, so that a word has the same
    token at the beginning and inside. A text cut into segments must get it once only, hence two processors.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.proto = Path(path).read_bytes()
            proto = _reserve_marks(self.proto)
            self._first = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._next = sentencepiece.SentencePieceProcessor(model_proto=proto + _NO_DUMMY_PREFIX)
        except (RuntimeError, IndexError):
            raise UserError(f"{path} is no SentencePiece model, or only a part of one") from None
        if self._first.eos_id() < 0:
            raise UserError(f"{path} has no end-of-text piece; minirl needs one to end a sequence")
        self.vocab_size = self._first.vocab_size()
        self.bos_id = self._first.bos_id() if self._first.bos_id() >= 0 else None
        self.eos_id = self._first.eos_id()
        pad = self._first.pad_id()
        self.pad_id = pad if pad >= 0 and pad != self.eos_id else self._first.unk_id()
        self.leading_space = self._first.normalize("a").startswith("▁")
        self._bytes = [self._piece_bytes(token) for token in range(self.vocab_size)]

    def encode(self, text: str, continued: bool = False) -> list[int]:
        return (self._next if continued else self._first).encode(text.encode("utf-8", errors="replace"))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < self.vocab_size else b""

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.model unchanged, and the tokenizer_config.json of a Llama tokenizer.

        transformers 5 reads the pieces into an engine of its own, which gives the same ids for a BPE model,
        unless a text begins with a space (it adds no second one) or the model tidies up runs of spaces.
        """
        (Path(folder) / "tokenizer.model").write_bytes(self.proto)
        special = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id,
                   "unk_token": self._first.unk_id()}
        _write_json(Path(folder) / "tokenizer_config.json", {
            "tokenizer_class": "LlamaTokenizer", "clean_up_tokenization_spaces": False, "legacy": False,
            "add_bos_token": self.bos_id is not None, "add_eos_token": False,
            **{name: self._first.id_to_piece(token) for name, token in special.items() if token is not None}})

    def _piece_bytes(self, token: int) -> bytes:
        if self._first.is_control(token) or self._first.is_unknown(token):
            return b""
        piece = self._first.id_to_piece(token)
        if self._first.is_byte(token):  # <0x0A>
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder: its tokenizer.model, or a tokenizer.json that ByteTokenizer wrote."""
    folder = Path(folder)
    if (folder / "tokenizer.model").is_file():
        return SentencePieceTokenizer(folder / "tokenizer.model")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} holds no tokenizer: neither tokenizer.model nor tokenizer.json")
    model = read_json(folder / "tokenizer.json").get("model", {})
    if model.get("vocab") != _byte_characters() or model.get("merges"):
        raise UserError(f"{folder}/tokenizer.json is not the byte tokenizer: supported are that and a "
                        "SentencePiece tokenizer.model")
    return ByteTokenizer()


# Protobuf messages merge when they are concatenated, and the last value counts. This one holds only
# normalizer_spec { add_dummy_prefix: false  remove_extra_whitespaces: false }; without the second, " b"
# after "a" would lose its space in a model that tidies up spaces.
_NO_DUMMY_PREFIX = b"\x1a\x04\x18\x00\x20\x00"


def _reserve_marks(proto: bytes) -> bytes:
    """Make control pieces of those `user_defined_symbols` that look like one: `<|im_end|>`, `[INST]`.

    SentencePiece finds user-defined pieces in plain text, and a tool could write the end of its turn. This
    walks the fields of ModelProto (all length-delimited; 1 is a piece) and appends a new type (3).
    """
    parts, at = [], 0
    while at < len(proto):
        start = at
        at += 1  # one-byte tags: field numbers below 16
        length, shift, more = 0, 0, True
        while more:
            length |= (proto[at] & 127) << shift
            shift, more, at = shift + 7, proto[at] > 127, at + 1
        body = proto[at:at + length]
        at += length
        if proto[start] == 0x0a and re.match(rb"\n.[<\[].{1,98}[>\]]\x15....\x18\x04\Z", body, re.DOTALL):
            body += b"\x18\x03"  # type: CONTROL instead of USER_DEFINED (4)
            parts.append(bytes([proto[start], len(body)]) + body)
        else:
            parts.append(proto[start:at])
    return b"".join(parts)


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte -> the byte: itself where printable, else from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=2) + "\n")
