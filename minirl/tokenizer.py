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
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sentencepiece

from minirl import spm
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
    special: Mapping[str, int] = MappingProxyType({})  # name -> id of every control token
    bos_token: str | None = None  # the names that a chat template asks for
    eos_token: str | None = None
    chat_template: str | None = None  # of tokenizer_config.json, and written back by `save`
    leading_space = False  # does encode() put a space in front of a text?
    _more_stops: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Where generation ends: eos_id, the other control tokens that generation_config.json lists, those added."""
        return (self.eos_id, *self._more_stops)

    def add_stops(self, ids: Iterable[int]) -> None:
        """End generation at these control tokens as well, the end of a turn in a chat template for one."""
        self._more_stops = tuple(token for token in dict.fromkeys([*self._more_stops, *ids]) if token != self.eos_id)

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
        parts = (names.get(token) or self.token_bytes(token) for token in ids) if names else map(self.token_bytes, ids)
        text = b"".join(parts).decode(errors="replace")
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
    eos_token = "<|endoftext|>"

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.special = {"<|endoftext|>": 256, "<|pad|>": 257}
        self._added = Added(AddedToken(name, token, special=True) for name, token in self.special.items())

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        """As `Tokenizer.encode`: text to ids; names of special tokens count only with `special`."""
        ids = []
        for part in self._added.split(text, special):
            ids += [part] if isinstance(part, int) else _whole(part).encode()
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

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
            "eos_token": "<|endoftext|>", "pad_token": "<|pad|>",
            **({"chat_template": self.chat_template} if self.chat_template else {})})


class _FileTokenizer(Tokenizer):
    """What the two kinds that are read from files share: control tokens, other added tokens, and their settings."""

    def _read_files(self, files: Files, added: Added, table: list[bytes], bos_id: int | None,
                    own_eos: int | None, spare: int | None) -> None:
        """table: the bytes of the vocabulary by id; own_eos: the vocabulary's; spare: a row that no text gives."""
        self._files, self._added, self.special = files, added, added.special
        for token in added.tokens.values():
            table += [b""] * (token.id + 1 - len(table))
            table[token.id] = b"" if token.special else self._added_text(token).encode()
        self._table, self.vocab_size = table, len(table)
        self.bos_id = bos_id
        self.eos_id, *more = files.ends(self.special, own_eos)
        self._more_stops = tuple(more)
        self.pad_id = files.pad(self.special, self.eos_id, spare)
        self._table[self.pad_id] = b""
        names = {token: name for name, token in self.special.items()}
        self.eos_token = names[self.eos_id]
        self.bos_token = files.name("bos_token") or names.get(self.bos_id)
        self.chat_template = files.config.get("chat_template")

    def _added_text(self, token: AddedToken) -> str:
        """What a token that is no control token stands for: Gemma adds runs of spaces, written as U+2581."""
        return token.content.replace(SPACE, " ")

    def token_bytes(self, token: int) -> bytes:
        return self._table[token] if 0 <= token < len(self._table) else b""

    def _save_config(self, folder: Path, own_class: str | None = None, **defaults: Any) -> None:
        """tokenizer_config.json as it was read, with the control tokens in use, and the defaults where it is silent.

        own_class: tokenizer_class where tokenizer.json is ours. transformers' LlamaTokenizer would not read all of it.
        """
        names = {token: name for name, token in self.special.items()}
        used = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": names.get(self.pad_id),
                "chat_template": self.chat_template, "tokenizer_class": own_class}
        config = {"clean_up_tokenization_spaces": False, **defaults, **self._files.config,
                  **{key: value for key, value in used.items() if value is not None}}
        config.pop("auto_map", None)  # names code in a folder that is not this one
        decoder = {str(token): {"content": name, "special": name in self.special}  # from added_tokens.json
                   for name, token in self._files.more.items()} | (config.get("added_tokens_decoder") or {})
        if decoder:
            config["added_tokens_decoder"] = decoder
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
        files = Files(path.parent)
        json_file = path.with_name("tokenizer.json")
        self._json = json_file.read_bytes() if json_file.is_file() else None
        listed = (read_json(json_file).get("added_tokens") or []) if json_file.is_file() else []
        try:
            plain = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            self._model = spm.Model(path.read_bytes())
            added, proto = self._read_added(files, listed)
            self._first = sentencepiece.SentencePieceProcessor(model_proto=proto)
            self._next = sentencepiece.SentencePieceProcessor(model_proto=proto + spm.NO_DUMMY_PREFIX)
        except (RuntimeError, IndexError):
            raise UserError(f"{path} is no SentencePiece model, or only a part of one") from None
        self.leading_space = self._model.adds_space and files.config.get("add_prefix_space") is not False
        self._legacy = bool(files.config.get("legacy"))
        start = plain.id_to_piece(plain.bos_id()) if plain.bos_id() >= 0 else None
        own_eos = plain.eos_id() if plain.eos_id() >= 0 else None
        self._read_files(files, added, [_piece_bytes(piece) for piece in self._model.pieces],
                         files.bos(added.special, start), own_eos, spare=plain.unk_id())

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        """As `Tokenizer.encode`: text to ids; names of special tokens count only with `special`."""
        ids: list[int] = []
        for number, part in enumerate(self._added.split(text, special)):
            if isinstance(part, int):
                ids.append(part)
            else:
                begins = self._legacy if number else not continued
                ids += (self._first if begins and self.leading_space else self._next).encode(_whole(part))
        return ids

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.model unchanged, the same as a tokenizer.json, and tokenizer_config.json.

        llama.cpp reads the first, transformers and vLLM the second. Their ids are the same, with two exceptions: a
        model that rewrites characters (nmt_nfkc) swaps or loses some combining marks there, and one that tidies up
        spaces does so behind control tokens as well.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self._model.proto)
        own_class = None
        if self._json is not None:
            (folder / "tokenizer.json").write_bytes(self._json)
        else:
            found = [AddedToken(piece.name, token, normalized=True) for token, piece in enumerate(self._model.pieces)
                     if piece.kind == spm.USER_DEFINED and piece.name not in self._added.tokens]
            added = sorted([*self._added.tokens.values(), *found], key=lambda token: token.id)
            bos = next((name for name, token in self.special.items() if token == self.bos_id), None)
            file = self._model.tokenizer_json(list(map(asdict, added)), bos, self.leading_space, self._legacy)
            if file is not None:
                _write_json(folder / "tokenizer.json", file)
                own_class = "PreTrainedTokenizerFast"
        unknown = self._first.id_to_piece(self._first.unk_id())
        self._save_config(folder, own_class, tokenizer_class="PreTrainedTokenizerFast", legacy=False,
                          add_eos_token=False, add_bos_token=self.bos_id is not None, unk_token=unknown)

    def _read_added(self, files: Files, listed: list[dict]) -> tuple[Added, bytes]:
        """The added tokens, the file's own control pieces among them; and the file with all of these as control pieces.

        SentencePiece finds user-defined pieces in plain text. Those that look like a mark, `<|im_end|>` or `[INST]`,
        are control tokens, unless a JSON file says that they are ordinary.
        """
        known = {row["content"] for row in files.rows(listed)}
        marks = {piece.name for piece in self._model.pieces if piece.kind == spm.USER_DEFINED
                 and re.fullmatch(r"[<\[].{1,98}[>\]]", piece.name, re.DOTALL)} - known
        own = [{"id": token, "content": piece.name, "special": True} for token, piece in enumerate(self._model.pieces)
               if piece.kind in (spm.UNKNOWN, spm.CONTROL) or piece.name in marks]
        ids = {piece.name: token for token, piece in enumerate(self._model.pieces)}
        added = files.added([*listed, *own], ids.get)
        text = {piece.name for token, piece in enumerate(self._model.pieces)
                if piece.kind in (spm.NORMAL, spm.USER_DEFINED) and added.special.get(piece.name) == token}
        return added, self._model.with_control(text)


def _piece_bytes(piece: spm.Piece) -> bytes:
    if piece.kind in (spm.CONTROL, spm.UNKNOWN):
        return b""
    return bytes([int(piece.name[3:5], 16)]) if piece.kind == spm.BYTE else piece.name.replace(SPACE, " ").encode()


class BPETokenizer(_FileTokenizer):
    """The BPE of a tokenizer.json: GPT-2, Llama 3, Qwen, SmolLM, and Llama 2 where it has no tokenizer.model."""

    def __init__(self, folder: str | Path, file: dict[str, Any]) -> None:
        """file: what tokenizer.json in the folder holds."""
        files = Files(Path(folder))
        self._json = (Path(folder) / "tokenizer.json").read_bytes()
        vocab = file["model"]["vocab"] if file["model"].get("type", "BPE") == "BPE" else {}
        added = files.added(file.get("added_tokens") or [], vocab.get)
        self._bpe = BPE(file, frozenset(added.special.values()))
        self.leading_space = self._bpe.leading_space
        self._normalized = any(token.normalized for token in added.tokens.values())
        bos_id = files.bos(added.special, template_start(file.get("post_processor")))
        self._read_files(files, added, self._bpe.piece_bytes(), bos_id, None, self._bpe.unused())

    def _added_text(self, token: AddedToken) -> str:
        text = self._bpe.normalise(token.content) if token.normalized else token.content
        return text if self._bpe.byte_level else text.replace(SPACE, " ")

    def encode(self, text: str, continued: bool = False, special: bool = False) -> list[int]:
        """As `Tokenizer.encode`: text to ids; names of special tokens count only with `special`."""
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
                prefix = self._bpe.prefix_everywhere
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
    if not model.is_file() and not json_file.is_file():
        raise UserError(f"{folder} holds no tokenizer: neither tokenizer.model nor tokenizer.json")
    try:
        file = read_json(json_file) if json_file.is_file() else None
        if file is None or (model.is_file() and _agree(model, file)):
            return SentencePieceTokenizer(model)
        names = {row.get("content"): row.get("id") for row in file.get("added_tokens") or []}
        if file["model"]["vocab"] == _byte_vocab() and not file["model"]["merges"] and names == ByteTokenizer().special:
            return ByteTokenizer(Files(folder).config.get("chat_template"))
        return BPETokenizer(folder, file)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{folder}: {error}") from None
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{folder} has a tokenizer that minirl cannot read: {type(error).__name__}: {error}") from None


def _agree(model: Path, file: dict[str, Any]) -> bool:
    """Does tokenizer.json give the pieces of tokenizer.model the same ids?"""
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    except RuntimeError:
        return False
    vocab = file["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: token for token, (piece, _) in enumerate(vocab)}
    ids.update({row.get("content"): row.get("id") for row in file.get("added_tokens") or []})
    return all(ids.get(pieces.id_to_piece(token)) == token for token in range(pieces.vocab_size()))


def _byte_vocab() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def _whole(text: str) -> str:
    """The text without half surrogate pairs, which UTF-8 cannot say: each becomes "?"."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=2) + "\n")
