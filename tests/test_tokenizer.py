import io
import json

import pytest
import sentencepiece

from minirl.config import UserError
from minirl.tokenizer import ByteTokenizer, SentencePieceTokenizer, load_tokenizer

TEXTS = ["", "Once upon a time", " leading", "a\nb", "a\tb", "x = 1\n    return x\n", "é ü 日本 🙂", "2+3=5",
         "</s> <s> <unk> <pad> <|endoftext|> <0x0A>", "\x00\x7f", "e\u0301", "🙂" * 3]


def trained(**options) -> bytes:
    """A small SentencePiece model that keeps text as it is: bytes for what it does not know, no tidying."""
    lines = [f"the cat sat on mat number {i} and said hello world to {i * 7} dogs" for i in range(200)]
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 320, "normalization_rule_name": "identity",
               "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, byte_fallback=True, hard_vocab_limit=False,
        minloglevel=2, **options)
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


@pytest.mark.parametrize("folder", ["", "golden/tokenizers/spm_bpe_llama2", "models/stories260k"])
def test_transformers_opens_a_saved_tokenizer_and_gives_the_same_ids(request, tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(request.getfixturevalue("shared") / folder) if folder else ByteTokenizer()
    tokenizer.save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id, len(other)) == ids_of(tokenizer)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for text in ["Once upon a time", "a\nb", "a\tb", "é 日本 🙂", "def f(x):\n\treturn 1"]:
        assert other(text)["input_ids"] == start + tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == text


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
