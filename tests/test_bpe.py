import random
import re
import sys
import time
import unicodedata
from itertools import pairwise

import pytest

from minirl.bpe import BPE, GPT2_WORDS, SPACE, WHITESPACE, Split, byte_characters
from minirl.config import UserError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA3 = (CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def byte_level(merges=(), **file):
    """A byte-level BPE whose vocabulary is the bytes and then what the merges make."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = {"type": "BPE", "vocab": vocab, "merges": [list(merge) for merge in merges], **file.pop("model", {})}
    return {"model": model, "pre_tokenizer": BYTE_LEVEL, "decoder": {"type": "ByteLevel"}, **file}


def llama2(**file):
    """Letters, two words and byte tokens, in the manner of Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
              SPACE, "a", "b", "c", "ab", SPACE + "a", SPACE + "ab", SPACE * 2]
    merges = [(SPACE, SPACE), ("a", "b"), (SPACE, "a"), (SPACE, "ab")]
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": merges,
             "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, **file.pop("model", {})}
    prepend = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return {"model": model, "normalizer": prepend, "pre_tokenizer": None, "decoder": decoder, **file}


def pieces(file, text, **options):
    bpe = BPE(file)
    names = {token: piece for piece, token in bpe.vocab.items()}
    return [names[token] for token in bpe.encode(text, **options)]


# ---- merging


def merged_slowly(ids, rank, joined):
    """The definition: look for the best pair, the leftmost of equals, join it, and begin again."""
    while pairs := [(rank[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in rank]:
        best, i = min(pairs)
        ids = [*ids[:i], joined[best], *ids[i + 2:]]
    return ids


def test_merging_by_heap_equals_the_definition():
    rng = random.Random(0)
    for _ in range(20):
        symbols, merges = list("abc"), []
        while len(merges) < 25:
            pair = rng.choice(symbols), rng.choice(symbols)
            if pair not in merges and len(pair[0] + pair[1]) < 7:
                merges.append(pair)
                symbols.append(pair[0] + pair[1])
        rng.shuffle(merges)  # also such orders as no training gives
        bpe = BPE(byte_level(merges))
        rank = {(bpe.vocab[left], bpe.vocab[right]): i for i, (left, right) in enumerate(merges)}
        joined = [bpe.vocab[left + right] for left, right in merges]
        for _ in range(20):
            word = "".join(rng.choice("abc") for _ in range(rng.randint(1, 30)))
            assert bpe.encode(word) == merged_slowly([bpe.vocab[c] for c in word], rank, joined)


def test_the_order_of_the_merges_decides():
    assert pieces(byte_level([("a", "b"), ("b", "c")]), "abc") == ["ab", "c"]
    assert pieces(byte_level([("b", "c"), ("a", "b")]), "abc") == ["a", "bc"]
    assert pieces(byte_level([("a", "a"), ("aa", "a")]), "aaaaa") == ["aa", "aaa"]
    strings = byte_level([("a", "b")])
    strings["model"]["merges"] = ["a b"]  # the older way to write them
    assert pieces(strings, "ab") == ["ab"]


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "\n " * 50_000, "-=&" * 33_000, "é" * 50_000])
def test_a_long_word_takes_no_quadratic_time(text):
    bpe = BPE(byte_level([("a" * n, "a" * n) for n in (1, 2, 4, 8)] + [("Ġ", "Ġ"), ("1", "1")]))
    begin = time.perf_counter()
    ids = bpe.encode(text)
    assert time.perf_counter() - begin < 5, "a hang, not a timing: this takes half a second"
    assert b"".join(map(bpe.piece_bytes().__getitem__, ids)).decode() == text
    if text[0] == "a":
        assert ids == [bpe.vocab["a" * 16]] * 6250


def test_words_are_remembered_but_not_without_end(monkeypatch):
    monkeypatch.setattr("minirl.bpe.CACHED_WORDS", 10)
    bpe = BPE(byte_level([("a", "b")]))
    for i in range(50):
        assert bpe.encode(f"ab{i} ") == bpe.encode(f"ab{i} ")
        assert len(bpe._cache) <= 10
    bpe.encode("x" * 1000)
    assert "x" * 1000 not in bpe._cache


def test_ignore_merges_takes_a_word_that_is_a_token_as_it_is():
    file = byte_level([("a", "b"), ("b", "c"), ("a", "bc")])
    assert pieces(file, "abc") == ["ab", "c"]
    file["model"]["ignore_merges"] = True
    assert pieces(file, "abc") == ["abc"] and pieces(file, "abcd") == ["ab", "c", "d"]


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_no_text_gives_a_forbidden_token(ignore_merges):
    """A vocabulary may hold the pieces of its own control token, and the merges that make it."""
    file = byte_level([("<", "e"), ("<e", ">")], model={"ignore_merges": ignore_merges},
                      pre_tokenizer={**BYTE_LEVEL, "use_regex": False})
    control = file["model"]["vocab"]["<e>"]
    assert BPE(file).encode("<e>") == [control], "the danger"
    bpe = BPE(file, frozenset([control]))
    assert bpe.encode("<e>") == [bpe.vocab["<e"], bpe.vocab[">"]]


# ---- words


def test_letters_numbers_and_spaces_are_those_of_unicode():
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x32000, 5), 0x10FFFF]
    everything = {chr(code): unicodedata.category(chr(code)) for code in codes}
    for pattern, test in [(r"\p{L}", lambda c, kind: kind[0] == "L"),
                          (r"\p{Lu}", lambda c, kind: kind == "Lu"),
                          (r"[^\s\p{L}\p{N}]", lambda c, kind: c not in WHITESPACE and kind[0] not in "LN"),
                          (r"[一-龥ー\p{Nd}]", lambda c, kind: "一" <= c <= "龥" or c == "ー" or kind == "Nd")]:
        found = "".join(Split(pattern, "Removed", invert=True)("".join(everything)))
        assert found == "".join(c for c, kind in everything.items() if test(c, kind)), pattern


def test_white_space_is_that_of_unicode_and_not_pythons():
    assert len(WHITESPACE) == 25
    assert {c for c in map(chr, range(0x10000)) if re.match(r"\s", c)} - {*WHITESPACE} == set("\x1c\x1d\x1e\x1f")


@pytest.mark.parametrize(("pattern", "text", "words"), [
    (GPT2_WORDS, "I'll  pay $5.00", ["I", "'ll", " ", " pay", " $", "5", ".", "00"]),
    (GPT2_WORDS, "DON'T\n\n  x", ["DON", "'", "T", "\n\n ", " x"]),
    (GPT2_WORDS, "a\x1cb\x85c", ["a", "\x1c", "b", "\x85", "c"]),
    (GPT2_WORDS, "e\u0301 ½ Ⅷ 日本", ["e", "\u0301", " ½", " Ⅷ", " 日本"]),
    (LLAMA3, "DON'T 12345\r\n\r\n  x", ["DON", "'T", " ", "123", "45", "\r\n\r\n", " ", " x"]),
    (LLAMA3, "it'ſa K'Sa", ["it", "'ſ", "a", " K", "'S", "a"]),  # Unicode folds ſ to s
    (LLAMA3, "(a) !?\n\n", ["(a", ")", " !?\n\n"]),
    (LLAMA3, "a   ", ["a", "   "]),
    (QWEN2, "3.14é", ["3", ".", "1", "4", "é"]),
    (r"[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s\p{L}\p{N}]++|\s+", "!a !!", ["!a", " !!"]),
    (r"\p{N}{1,3}", "a1234b", ["a", "123", "4", "b"]),
    (r"[一-龥]+", "a日本b", ["a", "日本", "b"]),
    (r"\u0041|\x{1F600}|\x42", "xA😀B", ["x", "A", "😀", "B"]),
])
def test_words_are_cut_as_the_regular_expression_says(pattern, text, words):
    if "?+" in pattern and sys.version_info < (3, 11):
        pytest.skip("possessive quantifiers came with Python 3.11")
    assert Split(pattern)(text) == words


@pytest.mark.parametrize(("behavior", "cut", "inverted"), [
    ("Isolated", ["a", "-", "-", "b", "-", "c"], ["a", "-", "-", "b", "-", "c"]),
    ("Removed", ["a", "b", "c"], ["-", "-", "-"]),
    ("MergedWithPrevious", ["a-", "-", "b-", "c"], ["a", "-", "-b", "-c"]),
    ("MergedWithNext", ["a", "-", "-b", "-c"], ["a-", "-", "b-", "c"]),
    ("Contiguous", ["a", "--", "b", "-", "c"], ["a", "--", "b", "-", "c"]),
])
def test_what_becomes_of_a_match(behavior, cut, inverted):
    assert Split("-", behavior)("a--b-c") == cut
    assert Split("-", behavior, invert=True)("a--b-c") == inverted


@pytest.mark.parametrize("pattern", [
    r"\w+", r"\bx", "^a", "a$", r"(a)\1", "(?<=a)b", "(?<name>a)", r"\p{Han}", r"\p{^L}", "[[a]b]", "[a&&b]", "(a",
    "a)", "[a", "(a+)+", "(?:ab)*", "(?:ab){2}", "*a", r"[a-\p{L}]", "[\U00010000-\U0010FFFF]", r"\K", "(?m:a)"])
def test_a_regular_expression_that_cannot_be_translated_is_named(pattern):
    with pytest.raises(UserError, match=r"regular expression .* is not supported") as error:
        Split(pattern)
    assert repr(pattern) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("step", "text", "expected"), [
    ({"type": "Digits", "individual_digits": True}, "a12", ["a", "1", "2"]),
    ({"type": "Digits", "individual_digits": False}, "a12", ["a", "12"]),
    ({"type": "Split", "pattern": {"String": "a."}, "behavior": "Isolated"}, "a.ab", ["a.", "ab"])])
def test_steps_before_the_bytes(step, text, expected):
    file = byte_level([("1", "2"), ("a", "b"), ("a", ".")])
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, {**BYTE_LEVEL, "use_regex": False}]}
    assert pieces(file, text) == expected


def test_a_text_that_goes_on_gets_no_space_in_front():
    file = byte_level([("Ġ", "a")], pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True})
    assert pieces(file, "a a") == ["Ġa", "Ġa"] and pieces(file, " a") == ["Ġa"]
    assert pieces(file, "a a", prefix=False) == ["a", "Ġa"]


# ---- normalisers, and the family of Llama 2


def test_normal_forms():
    file = byte_level(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    assert bytes(BPE(file).encode("e\u0301")) == "é".encode()
    assert bytes(BPE(byte_level(normalizer={"type": "NFKC"})).encode("ﬁ")) == b"fi"


@pytest.mark.parametrize(("text", "prefix", "expected"), [
    ("ab a", True, ["▁ab", "▁a"]),
    (" ab", True, ["▁▁", "ab"]),  # Prepend adds one to whatever there is
    ("ab a", False, ["ab", "▁a"]),
    ("", True, []),
    ("a\né", True, ["▁a", "<0x0A>", "<0xC3>", "<0xA9>"]),
    ("<0x0A>", False, ["<0x3C>", "<0x30>", "<0x78>", "<0x30>", "<0x41>", "<0x3E>"]),
    ("</s>", False, ["<0x3C>", "<0x2F>", "<0x73>", "<0x3E>"]),
])
def test_characters_with_a_fall_back_to_bytes(text, prefix, expected):
    assert pieces(llama2(), text, prefix=prefix) == expected


@pytest.mark.parametrize(("scheme", "split", "expected"), [
    ("always", True, ["▁ab", "▁", "▁a"]), ("first", False, ["▁ab", "▁▁", "a"]), ("never", False, ["ab", "▁▁", "a"])])
def test_metaspace(scheme, split, expected):
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}
    file = llama2(normalizer=None, pre_tokenizer=step)
    assert pieces(file, "ab  a") == expected
    assert pieces(file, " a") == ["▁a"], "no second space"
    assert BPE(file).prefix_everywhere == (scheme != "first")


def test_the_first_word_is_the_one_at_the_beginning_of_the_text():
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    cut = {"type": "Split", "pattern": {"String": "b"}, "behavior": "Removed"}
    file = llama2(normalizer=None, pre_tokenizer={"type": "Sequence", "pretokenizers": [cut, step]})
    assert pieces(file, "aba") == ["▁a", "a"] and pieces(file, "aba", prefix=False) == ["a", "a"]


def test_what_the_vocabulary_lacks_is_unknown():
    file = llama2(model={"byte_fallback": False})
    assert pieces(file, "axyb", prefix=False) == ["a", "<unk>", "b"]
    file["model"]["fuse_unk"] = False
    assert pieces(file, "axyb", prefix=False) == ["a", "<unk>", "<unk>", "b"]


def test_merges_across_words_are_found_where_there_are_some():
    """Llama 2's merges never join a letter to the space behind it, so that its words are merged one by one."""
    file = llama2()
    file["model"]["vocab"]["b▁"] = len(file["model"]["vocab"])
    file["model"]["merges"] = [("b", SPACE), *file["model"]["merges"]]
    assert pieces(file, "ab a", prefix=False) == ["a", "b▁", "a"]


def test_bytes_of_the_pieces():
    bpe = BPE(llama2())
    table = bpe.piece_bytes()
    assert [table[bpe.vocab[piece]] for piece in ("▁ab", "<0x0A>", "▁▁", "a")] == [b" ab", b"\n", b"  ", b"a"]
    bpe = BPE(byte_level([("Ġ", "a"), ("Ã", "©")]))
    assert bpe.piece_bytes()[-2:] == [b" a", "é".encode()] and bpe.piece_bytes()[200] == bytes([200])
    assert bpe.leading_space is False and BPE(llama2()).leading_space is True


@pytest.mark.parametrize(("change", "message"), [
    ({"model": {"type": "WordPiece", "vocab": {}}}, "type WordPiece is not supported: BPE is, and SentencePiece"),
    ({"model": {"type": "Unigram", "vocab": []}}, "type Unigram is not supported"),
    ({"model": {"vocab": {}}}, "type . is not supported"),
    ({"model": {"dropout": 0.1}}, "dropout = 0.1"),
    ({"model": {"end_of_word_suffix": "</w>"}}, "end_of_word_suffix"),
    ({"model": {"merges": [["a", "zz"]]}}, "merge 0, 'a' . 'zz', is not in the vocabulary"),
    ({"model": {"vocab": {"a": -1}}}, "ids that are not between 0 and"),
    ({"model": {"vocab": {"a": 10**12}}}, "ids that are not between 0 and"),
    ({"model": {"vocab": {"a": "1"}}}, "ids that are not between 0 and"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "normalizer Precompiled is not supported"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}}, "not of a regular expression"),
    ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, "pre-tokenizer BertPreTokenizer at place 1 is not supported"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}}, "ByteLevel at place 1"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Odd"}}, "behavior Odd"),
    ({"decoder": {"type": "WordPiece"}}, "decoder WordPiece is not supported"),
])
def test_what_is_not_supported_is_refused_by_name(change, message):
    file = byte_level()
    model = change.get("model", {})
    file.update(change)
    file["model"] = model if "type" in model or model == {"vocab": {}} else {**byte_level()["model"], **model}
    with pytest.raises(UserError, match=message) as error:
        BPE(file)
    assert "\n" not in str(error.value)
