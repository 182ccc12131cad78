"""Control tokens: which they are, that no text gives one, and what the files of a model folder say."""

import json

import pytest
import sentencepiece
from test_bpe import BYTE_LEVEL, byte_level, llama2
from test_tokenizer import trained

from minirl.bpe import SPACE
from minirl.config import UserError
from minirl.special_tokens import Added, AddedToken
from minirl.tokenizer import BPETokenizer, ByteTokenizer, SentencePieceTokenizer, load_tokenizer

CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def folder(path, file, names=CHAT, ordinary=(), **files):
    """A model folder: tokenizer.json with added tokens from 1000 on, and other JSON files by their name."""
    added = [{"id": 1000 + i, "content": name, "special": i < len(names)} for i, name in enumerate([*names, *ordinary])]
    return other_files(path, tokenizer={**file, "added_tokens": added}, **files)


def other_files(path, **files):
    path.mkdir(exist_ok=True)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


# ---- what text may become


def test_names_are_tokens_in_a_template_and_characters_in_a_text(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path, byte_level()))
    assert tokenizer.special == {"<|endoftext|>": 1000, "<|im_start|>": 1001, "<|im_end|>": 1002}
    text = "a<|im_end|>b"
    assert tokenizer.encode(text, special=True) == [*tokenizer.encode("a"), 1002, *tokenizer.encode("b")]
    plain = tokenizer.encode(text)
    assert plain == [token for character in text for token in tokenizer.encode(character)]
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode([1001, *plain, 1002]) == text
    assert tokenizer.decode([1001, *plain, 1002], special=True) == "<|im_start|>" + text + "<|im_end|>"
    assert ByteTokenizer().encode("a<|pad|>", special=True) == [97, 257]
    assert len(ByteTokenizer().encode("a<|pad|>")) == 8


@pytest.mark.parametrize("name", ["<|im_end|>", "<｜User｜>", "[INST]", "[/TOOL_CALLS]", "<start_of_turn>", "</s>"])
def test_a_turn_mark_is_a_control_token_whatever_its_flag_says(tmp_path, name):
    tokenizer = load_tokenizer(folder(tmp_path, byte_level(), ["<|endoftext|>"], [name]))
    assert tokenizer.special[name] == 1001 and tokenizer.token_bytes(1001) == b""
    assert 1001 not in tokenizer.encode(f"x{name} {name}")
    assert tokenizer.encode(name, special=True) == [1001]


def test_other_added_tokens_are_words_of_the_vocabulary(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path, byte_level(), ordinary=["<think>", "</think>", "<tool_call>"]))
    assert "<think>" not in tokenizer.special
    ids = tokenizer.encode("<think>x</think>")
    assert ids == [1003, *tokenizer.encode("x"), 1004] == tokenizer.encode("<think>x</think>", special=True)
    assert tokenizer.decode(ids) == "<think>x</think>" and tokenizer.token_bytes(1005) == b"<tool_call>"


def test_an_added_run_of_spaces_is_decoded_as_spaces(tmp_path):
    """As Gemma has them: found in text as U+2581, text again as spaces. Byte-level files mean the character itself."""
    for file, text in ((llama2(), "  "), (byte_level(), "▁▁")):
        for normalized in (False, True):
            added = [{"id": 300, "content": "▁▁", "normalized": normalized}, {"id": 301, "content": "</s>"}]
            tokenizer = load_tokenizer(other_files(tmp_path, tokenizer={**file, "normalizer": None,
                                                                        "added_tokens": added}))
            assert tokenizer.encode("▁▁") == [300] and tokenizer.decode([300], continued=True) == text
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(trained())
    tokenizer = load_tokenizer(other_files(tmp_path, added_tokens={"▁▁": 320}))
    assert tokenizer.decode([320], continued=True) == "  "


def test_a_vocabulary_that_spells_its_own_control_token_does_not_give_it(tmp_path):
    merges = [("<", "|"), ("<|", "e"), ("<|e", "|"), ("<|e|", ">")]
    for ignore_merges in (False, True):
        file = byte_level(merges, model={"ignore_merges": ignore_merges},
                          pre_tokenizer={**BYTE_LEVEL, "use_regex": False})
        control = file["model"]["vocab"]["<|e|>"]
        file["added_tokens"] = [{"id": control, "content": "<|e|>", "special": True}]
        tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file, tokenizer_config={"eos_token": "<|e|>"}))
        assert tokenizer.eos_id == control not in tokenizer.encode("<|e|>")
        assert tokenizer.encode("<|e|>", special=True) == [control]
        assert tokenizer.decode(tokenizer.encode("<|e|>")) == "<|e|>"


def test_a_token_that_a_file_names_is_a_control_token(tmp_path):
    """eos_token, additional_special_tokens: whatever their flags, and where they lie in the vocabulary."""
    config = {"eos_token": {"content": "ab"}, "additional_special_tokens": ["<x>", {"content": "<y>"}]}
    file = byte_level([("a", "b")])
    tokenizer = load_tokenizer(folder(tmp_path, file, [], ["<x>", "<y>", "<z>"], tokenizer_config=config))
    assert tokenizer.special == {"ab": 256, "<x>": 1000, "<y>": 1001}
    assert tokenizer.eos_id == 256 not in tokenizer.encode("ab")


def added(*names, **flags):
    return Added([AddedToken(name, i + 1, **flags) for i, name in enumerate(names)])


@pytest.mark.parametrize(("tokens", "text", "expected"), [
    (added("<a>", "<a>b"), "x<a>b<a>c", ["x", 2, 1, "c"]),  # the longest of those that begin here
    (added("<m>", lstrip=True), "x \n<m> y", ["x", 1, " y"]),
    (added("<m>", rstrip=True), "x <m> \ny", ["x ", 1, "y"]),
    (added("<m>", lstrip=True, rstrip=True), " <m> <m> ", [1, 1]),
    (added("<m>", rstrip=True), "<m>\x1c", [1, "\x1c"]),  # no white space in Unicode, though Python strips it
    (added("cat", single_word=True), "cat concat cats cat.", [1, " concat cats ", 1, "."]),
    (added("cat", single_word=True), "éecat cat\u0301 _cat", ["éecat cat\u0301 _cat"]),
    (added("a.c"), "abc a.c", ["abc ", 1]),
    (added("<m>", special=True), "x<m>", ["x<m>"]),
    (added(""), "x", ["x"]), (added("<m>"), "", []),
])
def test_added_tokens_are_found_in_text(tokens, text, expected):
    assert tokens.split(text, special=False) == expected


def test_many_marks_take_no_quadratic_time():
    tokens = added("<m>", lstrip=True, rstrip=True, single_word=True)
    assert tokens.split("<m> " * 50_000, special=False) == [1] * 50_000
    assert len(tokens.split(" " * 200_000 + "x", special=False)) == 1


def test_added_tokens_that_are_found_in_normalised_text(tmp_path):
    file = byte_level(normalizer={"type": "NFC"})
    file["added_tokens"] = [{"id": 300, "content": "é!", "normalized": True}, {"id": 301, "content": "e\u0301?"},
                            {"id": 302, "content": "</s>", "special": True, "normalized": True}]
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file))
    assert tokenizer.encode("e\u0301!") == [300] == tokenizer.encode("é!")
    assert tokenizer.encode("e\u0301?") == [301] and 301 not in tokenizer.encode("é?")
    assert tokenizer.encode("é!</s>", special=True) == [300, 302]
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    file = llama2(normalizer=None, pre_tokenizer=step, added_tokens=[
        {"id": 2, "content": "</s>", "special": True}, {"id": 300, "content": "b!", "normalized": True}])
    vocab = file["model"]["vocab"]
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file))
    assert tokenizer.encode("ab!a") == [vocab["▁a"], 300, vocab["a"]]


@pytest.mark.parametrize(("scheme", "expected"), [("always", ["▁a", 2, "▁a", 2]), ("first", ["▁a", 2, "a", 2])])
def test_the_space_behind_a_control_token(tmp_path, scheme, expected):
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    file = llama2(normalizer=None, pre_tokenizer=step, added_tokens=[{"id": 2, "content": "</s>", "special": True}])
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file))
    names = {token: name for name, token in file["model"]["vocab"].items() if token != 2}
    assert [names.get(token, token) for token in tokenizer.encode("a</s>a</s>", special=True)] == expected
    assert tokenizer.encode("</s>a", special=True)[1:] == tokenizer.encode("a", continued=scheme == "first")
    assert tokenizer.encode("a</s>", continued=True, special=True) == [file["model"]["vocab"]["a"], 2]
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


def test_llama_2_of_a_tokenizer_json(tmp_path):
    start = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {}}]}
    names = [{"id": i, "content": name, "special": True, "normalized": True}
             for i, name in enumerate(["<unk>", "<s>", "</s>"])]
    file = llama2(post_processor={"type": "Sequence", "processors": [start]}, added_tokens=names)
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file))
    a = file["model"]["vocab"]["▁a"]
    assert tokenizer.encode("a</s>", special=True) == [a, 2], "found before the space is added, whatever its flag"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    for text in ["ab a", " ab", "", "é\n日本 </s>", "  a"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not {0, 1, 2} & {*tokenizer.encode(text)}
        for cut in range(1, len(text)):
            halves = tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:], continued=True)
            assert tokenizer.decode(halves) == text


# ---- which token ends, pads, begins


NAMES = ["<|endoftext|>", "<|im_end|>", "<|pad|>", "<|bos|>"]


@pytest.mark.parametrize(("files", "eos", "stops", "pad"), [
    ({}, "<|endoftext|>", [], "<|pad|>"),
    ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>", [], "<|pad|>"),
    ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, "<|im_end|>", [], "<|pad|>"),
    ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, "<|im_end|>", [], "<|pad|>"),
    ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "special_tokens_map": {"eos_token": "<|endoftext|>"}},
     "<|im_end|>", [], "<|pad|>"),
    ({"generation_config": {"eos_token_id": [1001, 1000], "pad_token_id": 1000}}, "<|im_end|>", ["<|endoftext|>"],
     "<|endoftext|>"),
    ({"tokenizer_config": {"eos_token": "<|endoftext|>"}, "generation_config": {"eos_token_id": [1001, 1000, 77]}},
     "<|endoftext|>", ["<|im_end|>"], "<|pad|>"),
    ({"config": {"eos_token_id": 1001}}, "<|im_end|>", [], "<|pad|>"),
    ({"generation_config": {"eos_token_id": 1000}, "config": {"eos_token_id": 1001}}, "<|endoftext|>", [], "<|pad|>"),
    ({"tokenizer_config": {"pad_token": "<|im_end|>"}}, "<|endoftext|>", [], "<|im_end|>"),
    ({"tokenizer_config": {"pad_token": "<|endoftext|>"}}, "<|endoftext|>", [], "<|pad|>"),  # as many files have it
    ({"tokenizer_config": {"pad_token": "[PAD]"}}, "<|endoftext|>", [], "<|pad|>"),  # a token without an id
])
def test_what_the_files_say_of_the_end_and_the_padding(tmp_path, files, eos, stops, pad):
    tokenizer = load_tokenizer(folder(tmp_path, byte_level(), NAMES, **files))
    names = {token: name for name, token in tokenizer.special.items()}
    assert [names[token] for token in tokenizer.stop_ids] == [eos, *stops]
    assert (tokenizer.eos_id, tokenizer.eos_token) == (tokenizer.special[eos], eos)
    assert names[tokenizer.pad_id] == pad and tokenizer.pad_id != tokenizer.eos_id


def test_without_a_spare_name_the_padding_is_a_byte_that_no_text_has(tmp_path):
    """GPT-2 has one control token, which ends the text. The byte 0xFF is in no UTF-8."""
    tokenizer = load_tokenizer(folder(tmp_path, byte_level(), ["<|endoftext|>"]))
    assert tokenizer.pad_id == 255 and tokenizer.token_bytes(255) == b""
    assert 255 not in tokenizer.encode("".join(map(chr, range(1, 3000))))
    tokenizer.save(tmp_path / "out")
    assert "pad_token" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert load_tokenizer(tmp_path / "out").pad_id == 255


@pytest.mark.parametrize(("names", "pad"), [
    (["</s>", "<unk>", "<|im_start|>"], "<unk>"), (["</s>", "<|reserved_0|>", "<|right_pad_id|>"], "<|right_pad_id|>"),
    (["</s>", "<|x|>", "<unused1>"], "<unused1>")])
def test_the_padding_is_a_token_that_means_nothing(tmp_path, names, pad):
    tokenizer = load_tokenizer(folder(tmp_path, byte_level(), names, tokenizer_config={"unk_token": "<unk>"}))
    assert tokenizer.pad_id == tokenizer.special[pad]


@pytest.mark.parametrize(("template", "config", "bos"), [
    (False, {"bos_token": "<|bos|>"}, None),  # GPT-2, SmolLM: named, and not put before a text
    (True, {"bos_token": "<|bos|>"}, 1003), (True, {}, 1003), (True, {"add_bos_token": False}, None),
    (False, {"bos_token": "<|bos|>", "add_bos_token": True}, 1003), (False, {"add_bos_token": True}, None)])
def test_a_text_begins_with_bos_only_where_transformers_puts_one(tmp_path, template, config, bos):
    start = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}]}
    file = byte_level(post_processor=start if template else {"type": "ByteLevel"})
    tokenizer = load_tokenizer(folder(tmp_path, file, NAMES, tokenizer_config=config))
    assert tokenizer.bos_id == bos
    assert tokenizer.bos_token == ("<|bos|>" if "bos_token" in config or bos else None)


def test_a_folder_without_an_end_is_refused(tmp_path):
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(folder(tmp_path, byte_level(), ["<|x|>"]))
    with pytest.raises(UserError, match="the eos_token '</s>' has no id"):
        load_tokenizer(folder(tmp_path, byte_level(), ["<|x|>"], tokenizer_config={"eos_token": "</s>"}))


# ---- the tokens that a folder adds to its vocabulary


def test_added_tokens_of_three_files(tmp_path):
    files = {"tokenizer_config": {"eos_token": "<|im_end|>", "added_tokens_decoder": {
        "1000": {"content": "<|im_end|>", "special": False}, "1001": {"content": "<tool>", "special": False},
        "1004": {"content": "<x>", "special": True}}}, "added_tokens": {"<think>": 1002, "<|im_start|>": 1003}}
    file = byte_level(added_tokens=[{"id": 1004, "content": "<x>", "special": False}])
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer=file, **files))
    assert tokenizer.special == {"<|im_end|>": 1000, "<|im_start|>": 1003, "<x>": 1004} and tokenizer.vocab_size == 1005
    assert tokenizer.encode("<think><tool>") == [1002, 1001]
    tokenizer.save(tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again.special == tokenizer.special and again.encode("<think><tool>") == [1002, 1001]


def test_a_sentencepiece_model_with_the_marks_of_a_chat(tmp_path):
    """As Mistral fine-tunes have them: 320 pieces, and rows 320 and 321 in JSON files alone."""
    (tmp_path / "tokenizer.model").write_bytes(trained())
    other_files(tmp_path, added_tokens={"<|im_end|>": 320, "<|im_start|>": 321, "<think>": 322},
                tokenizer_config={"eos_token": "<|im_end|>", "chat_template": "{{ messages }}", "odd": [1]})
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (320, 1, 323)
    assert tokenizer.encode("<|im_start|>the cat<|im_end|>", special=True) == [
        321, *tokenizer.encode("the cat", continued=True), 320]
    assert not {320, 321} & {*tokenizer.encode("<|im_start|>the cat<|im_end|>")}
    assert tokenizer.encode("<think>the cat") == [322, *tokenizer.encode("the cat", continued=True)]
    tokenizer.save(tmp_path / "out")
    again = load_tokenizer(tmp_path / "out")
    assert again.special == tokenizer.special and again.encode("<think> x") == tokenizer.encode("<think> x")
    saved = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (saved["chat_template"], saved["odd"], saved["eos_token"]) == ("{{ messages }}", [1], "<|im_end|>")


@pytest.mark.parametrize("legacy", [False, True])
def test_the_space_behind_a_control_token_of_a_legacy_llama(tmp_path, legacy):
    (tmp_path / "tokenizer.model").write_bytes(trained())
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer_config={"legacy": legacy}))
    assert tokenizer.encode("</s>the cat", special=True)[1:] == tokenizer.encode("the cat", continued=not legacy)
    assert tokenizer.encode("the</s>", special=True) == [*tokenizer.encode("the"), 2]
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer_config={"add_prefix_space": False}))
    assert tokenizer.encode("the cat") == tokenizer.encode("the cat", continued=True)
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_a_piece_that_a_file_calls_special_is_no_text_anymore(tmp_path):
    """Yi and others hold `<|im_end|>` as an ordinary or a user-defined piece, which SentencePiece finds in text."""
    (tmp_path / "tokenizer.model").write_bytes(trained(user_defined_symbols=["<|im_end|>", "<b>", "stop!"]))
    plain = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    mark, bold, stop, cat = map(plain.piece_to_id, ("<|im_end|>", "<b>", "stop!", "▁cat"))
    text = "the cat<|im_end|><b> stop!"
    assert {mark, bold, stop, cat} <= {*plain.encode(text)}, "the danger"
    decoder = {str(bold): {"content": "<b>", "special": False}}
    tokenizer = load_tokenizer(other_files(tmp_path, tokenizer_config={
        "added_tokens_decoder": decoder, "additional_special_tokens": ["stop!", "▁cat"]}))
    for continued in (False, True):
        ids = tokenizer.encode(text, continued)
        assert not {mark, stop, cat} & {*ids} and bold in ids, "the file says that <b> is ordinary"
        assert tokenizer.decode(ids, continued) == text
    assert tokenizer.encode("<|im_end|>stop!", special=True) == [mark, stop]


# ---- tokenizer.model or tokenizer.json


def test_of_two_files_the_original_is_taken_if_they_agree(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained())
    load_tokenizer(tmp_path).save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["added_tokens"].append({"id": 320, "content": "<|im_end|>", "special": True})
    other_files(tmp_path, tokenizer=file)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.special["<|im_end|>"] == 320
    tokenizer.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == file
    file["model"]["vocab"] = {name: (token + 7) % 320 for name, token in file["model"]["vocab"].items()}
    assert isinstance(load_tokenizer(other_files(tmp_path, tokenizer=file)), BPETokenizer)


def test_a_tokenizer_model_that_is_none_gives_way(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # Llama 3's is in the format of tiktoken
    assert isinstance(load_tokenizer(folder(tmp_path, byte_level())), BPETokenizer)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="is no SentencePiece model"):
        load_tokenizer(tmp_path)


# ---- broken files


@pytest.mark.parametrize(("name", "value", "message"), [
    ("tokenizer", [], "holds a list, not a JSON object"),
    ("tokenizer", {}, "cannot read: KeyError"),
    ("tokenizer", {"model": None}, "cannot read: TypeError"),
    ("tokenizer", {"model": {"type": "BPE", "vocab": [], "merges": []}}, "cannot read: AttributeError"),
    ("tokenizer", {"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "type WordPiece is not supported"),
    ("tokenizer", byte_level(model={"merges": ["a b c"]}), "cannot read: ValueError"),
    ("tokenizer", byte_level(model={"merges": [5]}), "cannot read: TypeError"),
    ("tokenizer", byte_level(pre_tokenizer={"type": "Split"}), "cannot read: KeyError"),
    ("tokenizer", byte_level(normalizer={"type": "Lowercase"}), "normalizer Lowercase is not supported"),
    ("tokenizer", byte_level(added_tokens=[{"content": "<x>"}]), "needs an id"),
    ("tokenizer", byte_level(added_tokens=[{"content": "<x>", "id": True}]), "needs an id"),
    ("tokenizer", byte_level(added_tokens=[{"content": "<x>", "id": 10**9}]), "needs an id"),
    ("tokenizer", byte_level(added_tokens=[{"content": 5, "id": 1}]), "needs an id"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<x>"}}}, "cannot read: ValueError"),
    ("tokenizer_config", {"added_tokens_decoder": [1]}, "cannot read: AttributeError"),
    ("tokenizer_config", {"eos_token": 5}, "a special token is named 5"),
    ("added_tokens", {"<x>": "5"}, "needs an id"),
    ("special_tokens_map", [], "not a JSON object"),
    ("generation_config", [], "not a JSON object"),
])
def test_a_broken_file_is_one_line(tmp_path, name, value, message):
    folder(tmp_path, byte_level())
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(other_files(tmp_path, **{name: value}))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_file_is_one_line(tmp_path):
    whole = (folder(tmp_path, byte_level()) / "tokenizer.json").read_text()
    for part in ("", whole[:100], whole[:-1], "[" * 100_000, "\0", '"\\ud800"'):
        (tmp_path / "tokenizer.json").write_text(part)
        with pytest.raises(UserError) as error:
            load_tokenizer(tmp_path)
        assert "tokenizer" in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_tokenizer(tmp_path)


# ---- saving


def test_a_tokenizer_json_is_written_back_as_it_was(tmp_path):
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "model_max_length": 32768,
              "chat_template": "{{ messages }}", "auto_map": {"AutoTokenizer": ["code.py"]}, "errors": "replace"}
    source = folder(tmp_path / "in", byte_level([("a", "b")]), tokenizer_config=config)
    raw = (source / "tokenizer.json").read_text() + "\n  \n"
    (source / "tokenizer.json").write_text(raw)
    tokenizer = load_tokenizer(source)
    tokenizer.save(tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == raw
    saved = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert "auto_map" not in saved, "it names code that is not in this folder, and nobody should run"
    assert {key: saved[key] for key in config if key != "auto_map"} == {
        key: config[key] for key in config if key != "auto_map"}
    again = load_tokenizer(tmp_path / "out")
    assert (again.special, again.stop_ids, again.pad_id) == (tokenizer.special, tokenizer.stop_ids, tokenizer.pad_id)
    again.chat_template = "{{ other }}"
    again.save(tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").chat_template == "{{ other }}"


def test_a_tokenizer_json_of_ours_names_the_class_that_reads_all_of_it(tmp_path):
    """transformers' LlamaTokenizer takes the pieces from it, and builds the rest itself: other ids."""
    (tmp_path / "tokenizer.model").write_bytes(trained())
    other_files(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": None})

    def saved_class():
        load_tokenizer(tmp_path).save(tmp_path / "out")
        return json.loads((tmp_path / "out/tokenizer_config.json").read_text())["tokenizer_class"]

    assert saved_class() == "PreTrainedTokenizerFast"
    (tmp_path / "out/tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert saved_class() == "LlamaTokenizer", "somebody else's file goes with somebody else's class"


def test_a_chat_template_may_be_a_file_of_its_own(tmp_path):
    source = folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "old"})
    (source / "chat_template.jinja").write_text("{{ é }}", encoding="utf-8")
    tokenizer = load_tokenizer(source)
    assert tokenizer.chat_template == "{{ é }}"
    tokenizer.save(tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").chat_template == "{{ é }}"
