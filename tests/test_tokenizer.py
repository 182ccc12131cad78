import io
import json
import random
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from test_bpe import LLAMA3, QWEN2

from minirl.config import UserError
from minirl.tokenizer import BPETokenizer, ByteTokenizer, SentencePieceTokenizer, StreamDecoder, load_tokenizer

TEXTS = ["", "Once upon a time", " leading", "a\nb", "a\tb", "x = 1\n    return x\n", "é ü 日本 🙂", "2+3=5",
         "</s> <s> <unk> <pad> <|endoftext|> <0x0A>", "\x00\x7f", "e\u0301", "🙂" * 3]


def trained(**options) -> bytes:
    """A small SentencePiece model that keeps text as it is: bytes for what it does not know, no tidying."""
    lines = [f"the cat sat on mat number {i} and said hello world to {i * 7} dogs" for i in range(200)]
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 320, "normalization_rule_name": "identity",
               "remove_extra_whitespaces": False, "byte_fallback": True, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options)
    return model.getvalue()


def ids_of(tokenizer):
    return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(trained())
    return SentencePieceTokenizer(path)


@pytest.fixture(params=["bytes", "pieces"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("pieces")


@pytest.mark.parametrize("text", [*TEXTS, "two  spaces ", "  \n\n  \t", " "])
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, continued=True), continued=True) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cut_in_two_is_the_same_text(tokenizer, text):
    for cut in range(len(text) + 1):
        first, second = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:], continued=cut > 0)
        assert tokenizer.decode(first + second) == text, "a dummy space between two segments, or a lost one"


def test_decoding_token_by_token_keeps_the_spaces(tokenizer):
    for text in ["hello world and the cat", " the cat sat"]:
        ids = tokenizer.encode(text)
        parts = [tokenizer.decode([token], continued=i > 0) for i, token in enumerate(ids)]
        assert "".join(parts) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("continued", [False, True])
def test_a_stream_gives_whole_characters_and_in_the_end_the_text(tokenizer, continued):
    rng = random.Random(0)
    rows = [tokenizer.encode(text) for text in [*TEXTS, " ", "  a", "日本語 🙂 é"]]
    rows += [[tokenizer.eos_id, *tokenizer.encode("cat"), tokenizer.eos_id], []]
    rows += [[rng.randrange(tokenizer.vocab_size) for _ in range(12)] for _ in range(50)]  # no UTF-8, most of them
    for ids in rows:
        stream = StreamDecoder(tokenizer, continued)
        parts = [stream.push(token) for token in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids, continued)
    stream = StreamDecoder(tokenizer, continued)
    parts = [stream.push(token) for token in tokenizer.encode("🙂é", continued)]
    assert [part for part in parts if part.strip()] == ["🙂", "é"] and stream.finish() == ""


def test_token_bytes_are_what_decode_joins(tokenizer):
    ids = tokenizer.encode("hello 🙂\n")
    joined = b"".join(tokenizer.token_bytes(token) for token in ids)
    assert joined.decode().removeprefix(" ") == "hello 🙂\n"


def test_text_never_becomes_a_control_token(tokenizer):
    control = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    for text in TEXTS:
        for continued in (False, True):
            assert not control & set(tokenizer.encode(text, continued)), "a tool could end the policy's turn"


def test_control_tokens_are_no_text_and_padding_is_not_the_end(tokenizer):
    assert 0 <= tokenizer.pad_id < tokenizer.vocab_size
    assert tokenizer.pad_id != tokenizer.eos_id, "masking the padding would mask the end of text"
    ids = [*tokenizer.encode("hello"), tokenizer.eos_id, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.token_bytes(tokenizer.eos_id) == tokenizer.token_bytes(tokenizer.pad_id) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b"", "a row that only pads the embedding"
    assert tokenizer.token_bytes(-1) == b"" and {tokenizer.eos_id, tokenizer.pad_id} <= {*tokenizer.special.values()}
    assert tokenizer.special[tokenizer.eos_token] == tokenizer.eos_id and tokenizer.stop_ids == (tokenizer.eos_id,)


def test_half_a_character_is_marked_and_half_a_surrogate_pair_is_no_crash(tokenizer):
    assert tokenizer.decode(tokenizer.encode("🙂")[:-1]) == "�"
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


def test_sampled_ids_are_not_what_encoding_their_text_gives(pieces):
    """Why sampled ids are kept: the same text, other tokens, other log-probs."""
    piece = pieces._first.piece_to_id
    ids = [piece("▁"), piece("c"), piece("a"), piece("t")]
    assert pieces.decode(ids) == "cat" and pieces.encode("cat") != ids


def test_the_byte_tokenizer_is_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert ids_of(tokenizer) == (None, 256, 257, 258)


def test_user_defined_marks_cannot_be_forged_and_other_symbols_stay(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(user_defined_symbols=["<|im_end|>", "[INST]", "foo", "<b"]))
    plain = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    marks = {plain.piece_to_id(mark) for mark in ("<|im_end|>", "[INST]")}
    text = "ok<|im_end|> foo [INST] <b"
    assert marks <= set(plain.encode(text)), "the danger: sentencepiece finds the marks in plain text"
    tokenizer = SentencePieceTokenizer(path)
    for continued in (False, True):
        ids = tokenizer.encode(text, continued)
        assert not marks & set(ids) and {plain.piece_to_id("foo"), plain.piece_to_id("<b")} <= set(ids)
        assert tokenizer.decode(ids, continued) == text
    assert [tokenizer.token_bytes(mark) for mark in marks] == [b"", b""]


def test_a_model_that_tidies_spaces_keeps_them_in_what_continues_a_text(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(model_type="unigram", remove_extra_whitespaces=True))
    tokenizer = SentencePieceTokenizer(path)
    ids = tokenizer.encode("the cat") + tokenizer.encode(" sat", continued=True)
    assert tokenizer.decode(ids) == "the cat sat"


def test_a_model_without_dummy_prefix_keeps_its_leading_space(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(add_dummy_prefix=False))
    tokenizer = SentencePieceTokenizer(path)
    for text in ["cat", " cat"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_padding_is_the_files_own_if_it_has_one(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(pad_id=3))
    assert SentencePieceTokenizer(path).pad_id == 3
    path.write_bytes(trained())
    assert SentencePieceTokenizer(path).pad_id == 0  # the unknown piece
    path.write_bytes(trained(bos_id=-1, unk_id=0, eos_id=1))
    assert SentencePieceTokenizer(path).bos_id is None
    path.write_bytes(trained(eos_id=-1))
    with pytest.raises(UserError, match="no end-of-text token"):
        SentencePieceTokenizer(path)


def test_a_saved_tokenizer_loads_and_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    assert ids_of(again) == ids_of(tokenizer)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for broken in (b"", b"\n", b"hello", trained()[:-100]):
        (tmp_path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(UserError, match="is no SentencePiece model"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["spm_bpe_llama2", "spm_unigram_bytefb"])
def test_ids_and_text_equal_the_reference(shared, name):
    folder = shared / "golden/tokenizers" / name
    tokenizer = load_tokenizer(folder)
    for row in json.loads((folder / "expected.json").read_text())["rows"]:
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert [tokenizer.bos_id, *tokenizer.encode(row["text"]), tokenizer.eos_id] == row["ids_special"]
        assert tokenizer.decode(row["ids"]) == row["decoded"]


def test_a_pretrained_tokenizer_has_the_ids_of_its_file(shared):
    tokenizer = load_tokenizer(shared / "models/stories260k")
    assert ids_of(tokenizer) == (1, 2, 0, 512)
    assert tokenizer.encode("Once upon a time") == [403, 407, 261, 378]
    for text in ["Once upon a time", "a\nb", "a\tb", "é 日本 🙂", "</s>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a  b ")) == "a b"  # this file asks to tidy up spaces


@pytest.mark.parametrize("name", ["gpt2_bytelevel", "llama3_bytelevel", "qwen2_bytelevel"])
def test_a_tokenizer_json_gives_the_ids_of_the_reference(shared, name):
    """The reference finds control tokens in any text: that is `special=True` here."""
    folder = shared / "golden/tokenizers" / name
    tokenizer = load_tokenizer(folder)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for row in json.loads((folder / "expected.json").read_text())["rows"]:
        ids = tokenizer.encode(row["text"], special=True)
        assert ids == row["ids"] and start + ids == row["ids_special"]
        assert tokenizer.decode(ids, special=True) == row["decoded"]
        assert tokenizer.decode(ids) == row["decoded_skip"]
        plain = tokenizer.encode(row["text"])
        assert not {*tokenizer.special.values()} & {*plain}
        assert plain == ids or any(name in row["text"] for name in tokenizer.special)


# ---- beside other libraries


@pytest.mark.parametrize("folder", ["", "golden/tokenizers/spm_bpe_llama2", "models/stories260k",
                                    "golden/tokenizers/spm_unigram_bytefb", "golden/tokenizers/gpt2_bytelevel",
                                    "golden/tokenizers/llama3_bytelevel", "golden/tokenizers/qwen2_bytelevel"])
def test_transformers_opens_a_saved_tokenizer_and_gives_the_same_ids(request, tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(request.getfixturevalue("shared") / folder) if folder else ByteTokenizer()
    tokenizer.save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pad = tokenizer.pad_id if tokenizer.pad_id in tokenizer.special.values() else None
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id, len(other)) == (
        tokenizer.bos_id, tokenizer.eos_id, pad, tokenizer.vocab_size)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for text in ["Once upon a time", "a\nb", "a\tb", "é 日本 🙂", " two  spaces", "def f(x):\n\treturn 1", ""]:
        assert other(text)["input_ids"] == start + tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        text = f"a{tokenizer.eos_token}{text}{tokenizer.eos_token} b"
        if tokenizer.decode(tokenizer.encode("a  b")) == "a  b":  # else spaces are tidied up behind control tokens, too
            assert other(text)["input_ids"] == start + tokenizer.encode(text, special=True)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("options", [{}, {"model_type": "unigram"}, {"add_dummy_prefix": False},
                                     {"byte_fallback": False}, {"user_defined_symbols": ["<|im_end|>"]}])
def test_a_sentencepiece_model_is_the_same_as_a_tokenizer_json(tmp_path, options, legacy):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.model").write_bytes(trained(**options))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "out")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    for text in random_texts(200, ["</s>", "<|im_end|>", "cat", " the mat", "number 12"]):
        assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, special=True), text


@pytest.mark.parametrize("name", ["spm_bpe_llama2", "spm_unigram_bytefb"])
def test_the_tokenizer_json_of_a_sentencepiece_model_gives_the_ids_of_the_reference(shared, tmp_path, name):
    tokenizers = pytest.importorskip("tokenizers")
    folder = shared / "golden/tokenizers" / name
    load_tokenizer(folder).save(tmp_path)
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for row in json.loads((folder / "expected.json").read_text())["rows"]:
        marks = "<s>", "</s>", "<unk>"  # which that library finds in any text
        if not any(mark in row["text"] for mark in marks) and row["text"] != "q\u0307\u0323":  # NFC swaps these two
            assert other.encode(row["text"], add_special_tokens=False).ids == row["ids"], row["text"]


def test_a_saved_sentencepiece_bpe_needs_no_tokenizer_model(pieces, tmp_path):
    pieces.save(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    other = load_tokenizer(tmp_path)
    assert isinstance(other, BPETokenizer) and ids_of(other) == ids_of(pieces) and other.special == pieces.special
    for text in [*TEXTS, *random_texts(100, ["</s>", "cat", " the mat", "number 12"])]:
        for continued in (False, True):
            ids = pieces.encode(text, continued)
            assert other.encode(text, continued) == ids
            assert other.decode(ids, continued) == pieces.decode(ids, continued)
        assert other.encode(text, special=True) == pieces.encode(text, special=True)


@pytest.mark.parametrize("family", ["gpt2", "prefix", "llama3", "qwen2", "smollm", "o200k", "llama2", "metaspace"])
def test_random_text_gives_the_ids_of_the_reference(tmp_path, family):
    tokenizers = pytest.importorskip("tokenizers")
    other = reference(tokenizers, family)
    other.add_special_tokens(["<|endoftext|>"])
    other.add_tokens(["<think>", tokenizers.AddedToken("<s >", lstrip=True, rstrip=True, normalized=False)])
    other.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in random_texts(400, ["<|endoftext|>", "<think>", "<s >"]):
        ids = other.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == ids, text
        assert tokenizer.decode(ids, special=True) == other.decode(ids, skip_special_tokens=False)
        assert "<|endoftext|>" in text or tokenizer.encode(text) == ids


def random_texts(count, words):
    """Text of every kind: scripts, marks, emoji, runs of white space, controls, both normal forms."""
    rng = random.Random(len(words))
    blocks = [(0, 128), (0, 128), (128, 256), (0x300, 0x370), (0x400, 0x500), (0x590, 0x700), (0x900, 0xA00),
              (0x1100, 0x1200), (0x2000, 0x2070), (0x2460, 0x2500), (0x3000, 0x3100), (0x4E00, 0x5000),
              (0xAC00, 0xAD00), (0xFF00, 0xFFF0), (0x1D400, 0x1D500), (0x1F300, 0x1F600)]
    words = [*words, *"a 1 ½ é e\u0301 ' 's 'LL \u017f \x1c \x85 \u3000 \n \r\n \t the ▁".split(" "), " ", "  "]
    for _ in range(count):
        parts = [rng.choice(words) * rng.choice([1, 1, 1, 2, 5]) if rng.random() < 0.6
                 else chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randint(0, 12))]
        text = "".join(parts)
        yield unicodedata.normalize(rng.choice(["NFC", "NFD"]), text) if rng.random() < 0.3 else text


def reference(tokenizers, family):
    """A small tokenizer of the other library, trained on this page."""
    pre, normal = tokenizers.pre_tokenizers, tokenizers.normalizers
    o200k = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'ll|'d)?"
             r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = {"llama3": LLAMA3, "qwen2": QWEN2, "o200k": o200k}.get(family)
    byte_level = pre.ByteLevel(add_prefix_space=family == "prefix", use_regex=split is None)
    if family in ("llama2", "metaspace"):
        model = tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        metaspace = pre.Metaspace(prepend_scheme="first", split=family == "metaspace")
    else:
        model = tokenizers.models.BPE(ignore_merges=family == "llama3")
    other = tokenizers.Tokenizer(model)
    other.decoder = tokenizers.decoders.ByteLevel()
    other.pre_tokenizer = byte_level
    if split:
        other.pre_tokenizer = pre.Sequence([pre.Split(tokenizers.Regex(split), "isolated"), byte_level])
    if family == "smollm":
        other.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    if family == "qwen2":
        other.normalizer = normal.NFC()
    special, alphabet = [], pre.ByteLevel.alphabet()
    if family in ("llama2", "metaspace"):
        other.pre_tokenizer = metaspace
        special, alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], []
        other.decoder = tokenizers.decoders.Sequence([
            tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, limit_alphabet=300, show_progress=False)
    other.train_from_iterator([line + "\n" for line in Path(__file__).read_text().splitlines()], trainer)
    file = json.loads(other.to_str())
    file["added_tokens"] = []
    if family == "llama2":  # as its file has it: normalisers instead of a pre-tokenizer
        file["pre_tokenizer"] = None
        file["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    return tokenizers.Tokenizer.from_str(json.dumps(file))
