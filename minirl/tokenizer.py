"""Text to token ids and back: bytes, a SentencePiece model, or the BPE of a tokenizer.json.

Control tokens (beginning and end of text, padding, chat marks) are put into a sequence by their id, never by
their name: `encode` takes any text, a tool's output included, as plain characters, so that nobody can forge
the end of a turn by writing `</s>`. Nor is BOS or EOS ever added behind the caller's back. Only for a template that
the caller wrote himself, `encode(text, special=True)` reads names as control tokens.

Ids are the truth and text is a view of them: `encode(decode(ids))` may differ from `ids` (a model may write
`s`, `a`, `t` where the tokenizer would write `sat`), so sampled ids are kept, and never encoded again.
"""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from minirl.bpe import BPE, SPACE, byte_characters
from minirl.config import UserError, read_json, write_text
from minirl.special_tokens import Added, AddedToken, Files, template_start


class Tokenizer(ABC):
    """What the rest of minirl asks of a tokenizer.

    A prompt is `([bos_id] if bos_id is not None else []) + encode(text)`; whatever follows it, an answer or
    the output of a tool, is `encode(text, continued=True)`.
    """

    vocab_size: int
    bos_id: int | None  # what every text begins with; None if this tokenizer's texts begin with nothing
    eos_id: int
    pad_id: int  # a row of the embedding, and never eos_id: a padded tail must not look like an end of text
    stop_ids: tuple[int, ...]  # eos_id, and other control tokens at which generation_config.json stops
    special: dict[str, int]  # name -> id of every control token
    bos_token: str | None = None  # the names that a chat template asks for
    eos_token: str | None = None
    chat_template: str | None = None  # of tokenizer_config.json, and written back by `save`
    leading_space = False  # does encode() put a space in front of a text?

    @abstractmethod
    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        """The ids of a text, without BOS and EOS.

        continued: it goes on after other text. special: names of control tokens in it become those tokens; for
        templates only, never for what a user, a tool or a model wrote.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; none for a control token, or an id beyond the vocabulary."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files that `load_tokenizer`, and transformers' AutoTokenizer, open."""

    def decode(self, ids: Iterable[int], continued: bool = False, special: bool = False) -> str:
        """The text of some ids: their bytes joined, then read as UTF-8, where U+FFFD marks what is none.

        `continued` says that they go on after other text, as in `encode`: the space that begins a first word
        is then kept, so that decode(a) + decode(b, continued=True) == decode(a + b) for a cut between two
        characters. A character may be spread over tokens: `StreamDecoder` waits for it. special: show the names
        of control tokens, which are no text otherwise.
        """
        names = {token: name.encode() for name, token in self.special.items()} if special else {}
        text = b"".join(names.get(token) or self.token_bytes(token) for token in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.leading_space and not continued else text


class StreamDecoder:
    """Text as its tokens arrive: `push` returns the characters that are whole by now, `finish` what is left.

    The pieces together are `decode(ids, continued)`; half a character at the end is U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, continued: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.leading_space and not continued

    def push(self, token: int) -> str:
        return self._out(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        return self._out(self._utf8.decode(b"", final=True))

    def _out(self, text: str) -> str:
        if text and self._strip:
            self._strip, text = False, text.removeprefix(" ")
        return text


class ByteTokenizer(Tokenizer):
    """One token a byte of UTF-8, then `<|endoftext|>` (256) and `<|pad|>` (257): nothing to train."""

    vocab_size = 258
    bos_id = None
    eos_id = 256
    pad_id = 257
    stop_ids = (256,)
    eos_token = "<|endoftext|>"

    def __init__(self) -> None:
        self.special = {"<|endoftext|>": 256, "<|pad|>": 257}
        self._added = Added(AddedToken(name, token, special=True) for name, token in self.special.items())

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        ids = []
        for part in self._added.split(text, special):
            ids += [part] if isinstance(part, int) else _whole(part).encode()
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def save(self, folder: str | Path) -> None:
        """In transformers' words: a byte-level BPE without merges, and two special tokens."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False,
                      "trim_offsets": False}
        added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        _write_json(Path(folder) / "tokenizer.json", {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": token, "content": name, **added} for name, token in self.special.items()],
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": _byte_vocab(), "merges": []}})
        _write_json(Path(folder) / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"})


class _FileTokenizer(Tokenizer):
    """What the two kinds that are read from files share: control tokens, other added tokens, and their settings."""

    def _read_files(self, files: Files, added: Added, table: list[bytes], bos_id: int | None,
                    own_eos: int | None, spare: int | None) -> None:
        """table: the bytes of the vocabulary by id; own_eos: the vocabulary's; spare: a row that no text gives."""
        self._files, self._added, self.special = files, added, added.special
        for token in added.tokens.values():
            table += [b""] * (token.id + 1 - len(table))
            table[token.id] = b"" if token.special else token.content.encode()
        self._table, self.vocab_size = table, len(table)
        self.bos_id = bos_id
        self.stop_ids = files.ends(self.special, own_eos)
        self.eos_id = self.stop_ids[0]
        self.pad_id = files.pad(self.special, self.eos_id, spare)
        self._table[self.pad_id] = b""
        names = {token: name for name, token in self.special.items()}
        self.eos_token = names[self.eos_id]
        self.bos_token = files.name("bos_token") or names.get(self.bos_id)
        self.chat_template = files.config.get("chat_template")

    def token_bytes(self, token: int) -> bytes:
        return self._table[token] if 0 <= token < len(self._table) else b""

    def _save_config(self, folder: Path, **defaults: Any) -> None:
        """tokenizer_config.json as it was read, with the control tokens in use, and the defaults where it is silent."""
        names = {token: name for name, token in self.special.items()}
        used = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": names.get(self.pad_id),
                "chat_template": self.chat_template}
        config = {"clean_up_tokenization_spaces": False, **defaults, **self._files.config,
                  **{key: value for key, value in used.items() if value is not None}}
        config.pop("auto_map", None)  # names code in a folder that is not this one
        _write_json(folder / "tokenizer_config.json", config)


class SentencePieceTokenizer(_FileTokenizer):
    """A tokenizer.model as Llama and Mistral have it, and the tokens that the JSON files beside it add.

    pad_id: few files have a pad piece. Then it is the unknown piece, which text never gives where the model
    falls back to bytes. It is not EOS, or masking the padding would mask the end of text as well.

    SentencePiece writes a space as U+2581 and puts one in front of every text, so that a word has the same
    token at the beginning and inside. A text cut into segments must get it once only, hence two processors.
    What follows a control token inside of one text is such a segment; with `"legacy": true` in
    tokenizer_config.json it gets a space of its own, as Llama 2 was trained.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        json_file = path.with_name("tokenizer.json")
        self._json = read_json(json_file) if json_file.is_file() else None
        try:
            self.proto = path.read_bytes()
            plain = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
            added, proto = self._read_added(plain, files := Files(path.parent))
            self._first = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._next = sentencepiece.SentencePieceProcessor(model_proto=proto + _NO_DUMMY_PREFIX)
        except (RuntimeError, IndexError):
            raise UserError(f"{path} is no SentencePiece model, or only a part of one") from None
        self._prefix = files.config.get("add_prefix_space") is not False
        self._legacy = bool(files.config.get("legacy"))
        self.leading_space = self._prefix and self._first.normalize("a").startswith(SPACE)
        start = plain.id_to_piece(plain.bos_id()) if plain.bos_id() >= 0 else None
        own_eos = plain.eos_id() if plain.eos_id() >= 0 else None
        self._read_files(files, added, [self._piece_bytes(token) for token in range(plain.vocab_size())],
                         files.bos(added.special, start), own_eos, spare=plain.unk_id())

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._added.split(text, special)):
            if isinstance(part, int):
                ids.append(part)
            else:
                begins = not continued if number == 0 else self._legacy
                ids += (self._first if begins and self._prefix else self._next).encode(_whole(part))
        return ids

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.model unchanged, and the tokenizer_config.json of a Llama tokenizer.

        transformers 5 reads the pieces into an engine of its own, which gives the same ids for a BPE model,
        unless a text begins with a space (it adds no second one) or the model tidies up runs of spaces.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self.proto)
        unknown = self._first.id_to_piece(self._first.unk_id())
        self._save_config(folder, tokenizer_class="LlamaTokenizer", legacy=False, add_eos_token=False,
                          add_bos_token=self.bos_id is not None, unk_token=unknown)

    def _read_added(self, plain: sentencepiece.SentencePieceProcessor, files: Files) -> tuple[Added, bytes]:
        """The added tokens, the file's own control pieces among them; and the file with all of these as control pieces.

        SentencePiece finds user-defined pieces in plain text. Those that look like a mark, `<|im_end|>` or `[INST]`,
        are control tokens, unless a JSON file says that they are ordinary.
        """
        pieces = {plain.id_to_piece(token): token for token in range(plain.vocab_size())}
        listed = (self._json or {}).get("added_tokens", [])
        known = {row["content"] for row in files.rows(listed)}
        marks = {name for _, _, name, kind in _pieces(self.proto) if kind == 4 and name not in known
                 and re.fullmatch(r"[<\[].{1,98}[>\]]", name, re.DOTALL)}
        own = [{"id": token, "content": piece, "special": True} for piece, token in pieces.items()
               if plain.is_control(token) or plain.is_unknown(token) or piece in marks]
        added = files.added([*listed, *own], pieces.get)
        ordinary = {name for name, token in added.special.items() if pieces.get(name) == token
                    and not (plain.is_control(token) or plain.is_unknown(token) or plain.is_byte(token))}
        return added, _as_control(self.proto, ordinary)

    def _piece_bytes(self, token: int) -> bytes:
        if self._first.is_control(token) or self._first.is_unknown(token):
            return b""
        piece = self._first.id_to_piece(token)
        if self._first.is_byte(token):  # <0x0A>
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()


class BPETokenizer(_FileTokenizer):
    """The BPE of a tokenizer.json: GPT-2, Llama 3, Qwen, SmolLM, and Llama 2 where it has no tokenizer.model."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._json = (folder / "tokenizer.json").read_bytes()
        file, files = read_json(folder / "tokenizer.json"), Files(folder)
        vocab = file["model"]["vocab"] if file["model"].get("type", "BPE") == "BPE" else {}
        added = files.added(file.get("added_tokens") or [], vocab.get)
        self._bpe = BPE(file, frozenset(added.special.values()))
        self.leading_space = self._bpe.leading_space
        self._normalized = any(token.normalized for token in added.tokens.values())
        bos_id = files.bos(added.special, template_start(file.get("post_processor")))
        self._read_files(files, added, self._bpe.piece_bytes(), bos_id, None, self._bpe.unused_byte())

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._added.split(_whole(text), special)):
            if isinstance(part, int):
                ids.append(part)
                continue
            prefix = not continued if number == 0 else self._bpe.prefix_everywhere
            if not self._normalized:
                ids += self._bpe.encode(part, prefix)
                continue
            text = self._bpe.normalise(part, prefix)
            for inner in self._added.split(text, special, self._bpe.normalise):
                ids += [inner] if isinstance(inner, int) else self._bpe.encode_normalised(inner, prefix)
        return ids

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json back as it was, and tokenizer_config.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self._json)
        self._save_config(folder, tokenizer_class="PreTrainedTokenizerFast")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder: its tokenizer.model, or its tokenizer.json.

    Of a folder with both, tokenizer.model is taken: it is the original, exact in its treatment of spaces and fast.
    tokenizer.json then tells the added tokens. But where the two do not agree about the ids of the pieces, or
    tokenizer.model is no SentencePiece model (Llama 3's is not), tokenizer.json is taken, as other tools do.
    """
    folder = Path(folder)
    model, json_file = folder / "tokenizer.model", folder / "tokenizer.json"
    if not json_file.is_file():
        if not model.is_file():
            raise UserError(f"{folder} holds no tokenizer: neither tokenizer.model nor tokenizer.json")
        return SentencePieceTokenizer(model)
    file = read_json(json_file)
    try:
        if model.is_file() and _agree(model, file):
            return SentencePieceTokenizer(model)
        if file["model"]["vocab"] == _byte_vocab() and not file["model"]["merges"] and len(file["added_tokens"]) == 2:
            return ByteTokenizer()
        return BPETokenizer(folder)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{json_file} is no tokenizer that minirl can read: {type(error).__name__} {error}") from None


def _agree(model: Path, file: dict[str, Any]) -> bool:
    """Does tokenizer.json give the pieces of tokenizer.model the same ids?"""
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    except RuntimeError:
        return False
    vocab = file["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: token for token, (piece, _) in enumerate(vocab)}
    ids.update({row["content"]: row["id"] for row in file.get("added_tokens", [])})
    return all(ids.get(pieces.id_to_piece(token)) == token for token in range(pieces.vocab_size()))


# Protobuf messages merge when they are concatenated, and the last value counts. This one holds only
# normalizer_spec { add_dummy_prefix: false  remove_extra_whitespaces: false }; without the second, " b"
# after "a" would lose its space in a model that tidies up spaces.
_NO_DUMMY_PREFIX = b"\x1a\x04\x18\x00\x20\x00"


def _pieces(proto: bytes) -> Iterator[tuple[int, int, str, int]]:
    """(start, end, name, type) of every piece in a SentencePiece ModelProto; the types are 1 normal, 4 user-defined...

    All fields of ModelProto have a length, and field 1 is a piece: name (field 1), score (2, a float), type (3).
    """
    at = 0
    while at < len(proto):
        start = at
        length, body = _varint(proto, at + 1)
        at = body + length
        if proto[start] == 0x0A:
            size, name = _varint(proto, body + 1)
            kind = re.search(rb"\x18(.)\Z", proto[name + size:at], re.DOTALL)
            yield start, at, proto[name:name + size].decode(errors="replace"), kind[1][0] if kind else 1


def _as_control(proto: bytes, names: set[str]) -> bytes:
    """The model with some of its pieces made control pieces, which SentencePiece does not find in text."""
    parts, done = [], 0
    for start, end, name, _ in _pieces(proto):
        if name in names:
            length, body = _varint(proto, start + 1)
            parts += [proto[done:start], b"\n", _to_varint(length + 2), proto[body:end], b"\x18\x03"]
            done = end  # of two types in a piece the last one counts, so one is appended
    return b"".join([*parts, proto[done:]])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in protobuf's seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def _to_varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _to_varint(value >> 7)


def _byte_vocab() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def _whole(text: str) -> str:
    """The text without half surrogate pairs, which UTF-8 cannot say: each becomes "?"."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=2) + "\n")
