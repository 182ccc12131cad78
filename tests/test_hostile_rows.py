"""Forty broken rows of each format and more, among sound ones: every one is refused by file, number and reason, and the
sound ones are all there. Then every value of a sound row is exchanged for values of other types."""

import copy
import json
import re

import pytest
from test_agent_data import ANSWER, FINISH, LOOK, SYSTEM, node, processed, step, tree, user

from minirl.config import UserError
from minirl.data import convert
from minirl.data.augment import messages_of
from minirl.data.sft import encode_row
from minirl.data.trajectories import RowError, check_trajectory
from minirl.tokenizer import ByteTokenizer

FUNCTION = {"name": "f", "description": "d", "parameters": {
    "type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "array", "items": {"type": "string"}},
                                   "c": {"type": "dict", "properties": {"d": {"type": "integer"}}}},
    "required": ["a"]}}
GROUND_TRUTH = [{"f": {"a": [2, 3], "b": [["x", "y"], ""], "c": [{"d": [1]}]}}]
CIRCLE = [turn for _ in range(2) for turn in ({"from": "human", "value": "q", "loss": None},
                                              {"from": "gpt", "value": "a", "loss": True})]
SOUND = {
    "bfcl": {"id": "x_0", "question": [[user("go")]], "function": [FUNCTION]},
    "toolbench": tree(step("look", {"at": 1}, "dark", ANSWER, thought="Look.")),
    "processed": processed(LOOK, ("function", "nothing"), FINISH),
    "query": {"query": "Where?", "query_id": 5, "api_list": [{
        "api_name": "Look", "tool_name": "Eye", "api_description": "d",
        "required_parameters": [{"name": "at", "type": "NUMBER", "description": "d"}], "optional_parameters": []}]},
    "apibench": {"code": "###Instruction: Find cats.\n###Output: {'domain': 'x'}",
                 "api_call": "torch.hub.load('a/b', 'c', pretrained=True)"},
    "thudm": {"id": "os_0", "conversations": CIRCLE},
    "microsoft": {"messages": json.dumps([{"role": "system", "content": ""}, user("q"),
                                          {"role": "assistant", "content": "a"}])},
    "gsm8k": {"question": "Ann has 48 pens and halves them?", "answer": "48/2=<<48/2=24>>24\n#### 24"}}
FORMAT = {"processed": "toolbench", "query": "toolbench", "thudm": "agentinstruct", "microsoft": "agentinstruct"}

BROKEN = [b"{", b"[1]", b"5", b"null", b'"text"', b"true", b'{"a": 1, "a": 2}', b'{"a": "\xff"}', b"{'a': 1}",
          b'{"a": 1} {"b": 2}', b'{"a": "\x01"}', b'{"a": "\\ud800"}', b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000,
          b'{"a":' * 50_000, b"{}", b'{"x": 1}', b'{"a": 1,}', b"\xef\xbb\xbf\xef\xbb\xbf{}", b"\x00"]


def changed(row, *path_and_value):
    """A copy of the row with another value at a path; ... takes what is there away."""
    *path, last, value = path_and_value
    row = at = copy.deepcopy(row)
    for key in path:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return row


def hostile(name):
    """Rows that nobody may keep."""
    row = SOUND[name]
    if name == "bfcl":
        function = ("function", 0)
        return [*(changed(row, *change) for change in [
            ("id", ...), ("id", 5), ("id", None), ("id", "nobody"), ("question", ...), ("question", "go"),
            ("question", []), ("question", [[]]), ("question", [5]), ("question", [["go"]]),
            ("question", [[user("a")], [user("b")]]), ("question", [[{"role": "robot", "content": "go"}]]),
            ("question", [[{"role": "user"}]]), ("question", [[{"role": "user", "content": 5}]]),
            ("question", [[{"role": "user", "content": [{"type": "image"}]}]]),
            ("question", [[{"role": "tool", "content": "5"}]]), ("question", [[{"role": ["user"], "content": "go"}]]),
            ("question", [[user("a"), {"role": "assistant", "content": "b"}]]),
            ("function", ...), ("function", {}), ("function", []), ("function", [5]), ("function", [[]]),
            ("function", [{}]), ("function", [{"name": 5}]), ("function", [FUNCTION, FUNCTION]),
            (*function, "name", "g"), (*function, "parameters", "x"), (*function, "parameters", [5]),
            (*function, "parameters", "type", "HashMap"), (*function, "parameters", "type", 5),
            (*function, "parameters", "type", ["dict"]), (*function, "parameters", "properties", {}),
            (*function, "parameters", "properties", "a", 5), (*function, "parameters", "properties", "a", "float"),
            (*function, "parameters", "properties", "a", "type", "boolean"),
            (*function, "parameters", "properties", "c", "properties", "d", "type", "long"),
            (*function, "parameters", "required", ["a", "z"]),
            (*function, "parameters", "properties", "b", "type", "x"),
            (*function, "parameters", "properties", "a", ...)])]
    if name == "toolbench":
        root, first = ("tree", "tree"), ("tree", "tree", "children", 0)
        generation = "answer_generation"
        cut = tree(node("Thought", "Hm."))
        return [*(changed(row, *change) for change in [
            ("tree", ...), ("tree", 5), ("tree", {}), (*root, []), (*root, "x"), (*root, "children", ...),
            (*root, "children", None), (*root, "children", {}), (*root, "children", [5]), (*root, "children", []),
            (*first, "children", None), (*first, "children", "x"), (*first, "children", [[]]),
            (*first, "node_type", ...), (*first, "node_type", 5), (*first, "node_type", "Musing"),
            (*first, "node_type", ["Thought"]), (*first, "node_type", "Action"), (*first, "node_type", "Action Input"),
            (*first, "description", ...), (*first, "description", 5), (*first, "description", ["x"]),
            (*first, "children", 0, "description", "fly"), (*first, "children", 0, "description", ""),
            (*first, "children", 0, "node_type", "Thought"),
            *((*first, "children", 0, "children", 0, "description", text) for text in (
                "", "{", "[1]", "5", "null", '"x"', "{'at': 1}", '{"at": 1, "at": 2}', "[" * 100_000)),
            *((*first, "children", 0, "children", 0, "observation", text) for text in (..., None, 5, {}, ["x"])),
            (generation, ...), (generation, 5), (generation, "query", ...), (generation, "query", 5),
            (generation, "query", " "), (generation, "function", ...), (generation, "function", {}),
            (generation, "function", []), (generation, "function", [5]), (generation, "function", [{}]),
            (generation, "function", 0, "name", 5), (generation, "function", 1, "name", "look")]), cut]
    if name == "processed":
        turns = "conversations"
        answers = ["", "Hello", "Thought: x", "Action: look", "Action Input: {}", "Thought: a\nAction: look",
                   "Action: look\nAction Input:", "Action: look\nAction Input: {", "Action: look\nAction Input: [1]",
                   "Action: look\nAction Input: 5", "Action: look\nAction Input: null", "Action: \nAction Input: {}",
                   'Action: look\nAction Input: {"at": 1, "at": 2}', 'Action: look\nAction Input: {"at": 5}',
                   'Action: look\nAction Input: {"where": "x"}', "Action: fly\nAction Input: {}",
                   'Action: look\nAction Input: {"at": ' + "[" * 100_000, "Action: look\nAction Input: {} and then"]
        systems = ["", "Hi", SYSTEM + "x", SYSTEM[:-2], SYSTEM.replace("'name': 'look'", "'name': 5"),
                   SYSTEM.replace("'name': 'look'", "'name': 'Finish'"), SYSTEM.partition("[")[0] + "[]",
                   SYSTEM.partition("[")[0] + "[open('x')]", SYSTEM.partition("[")[0] + "[" * 100_000,
                   SYSTEM.partition("[")[0] + "5"]
        return [*(changed(row, *change) for change in [
            (turns, []), (turns, "x"), (turns, {}), (turns, None), (turns, [5]), (turns, [[]]), (turns, 0, 5),
            *((turns, 2, "from", role) for role in ("robot", 5, None, ["assistant"], {}, "user")),
            *((turns, 2, "value", value) for value in (5, None, ["x"], {}, *answers)),
            *((turns, 0, "value", text) for text in systems),
            (turns, 3, "value", 5), (turns, 3, ...), (turns, 4, ...), (turns, 2, ...),
            (turns, 4, "value", 'Action: Finish\nAction Input: {"return_type": "give_up_and_restart"}'),
            (turns, 4, "value", "Action: Finish\nAction Input: {}"),
            (turns, 3, "from", "system"), (turns, 1, "from", "function")])]
    if name == "query":
        api = ("api_list", 0)
        return [*(changed(row, *change) for change in [
            *(("query", value) for value in (..., None, 5, "", " ", [], ["x"], {})),
            *(("api_list", value) for value in (..., None, 5, "x", {}, [], [5], [[]], [{}], [None])),
            *((*api, key, value) for key in ("api_name", "tool_name") for value in (..., None, 5, [], {}, True)),
            *((*api, key, value) for key in ("required_parameters", "optional_parameters")
              for value in ([5], ["x"], [{}], [[]], [None], [{"name": 5}], [{"name": None}], 5, "x", {"a": 1}))])]
    if name == "apibench":
        calls = ["", " ", "x", "5", "f", "f(", "f(x)(y)", "f(*x)", "f(**x)", "f(1)", "f(a=open)", "f(a=g())",
                 "f(a=b'x')",
                 "f(a=1e999)", "f(a=1, a=2)", "f(a={1: 2})", "f(a=lambda: 1)", "x = f()", "f()\ng()", "import os",
                 "[f(a=1), f(a=2)]", "[]", "f(a=" + "[" * 10_000, "f(a='" + "x" * 100_000 + "')", "\0",
                 "f(a=1 for a in b)",
                 "f[0](a=1)", "(lambda: 1)(a=1)", "f(a=...)", "f(a=1j)", "f(a=f'{x}')", "f(a=-x)"]
        codes = ["", " ", "Find cats.", "###Instruction: Find cats.", "###Output: x", "###Instruction: \n###Output: x",
                 "###Instruction: ''\n###Output: x", "Instruction: a\nOutput: b"]
        return [*(changed(row, "api_call", value) for value in (..., None, 5, [], {}, *calls)),
                *(changed(row, "code", value) for value in (..., None, 5, [], {}, *codes))]
    if name == "thudm":
        turns = "conversations"
        return [*(changed(row, *change) for change in [
            *((turns, value) for value in (..., None, 5, "x", {}, [], [5], [[]], [None], [{}])),
            *((turns, 1, "from", value) for value in (..., None, 5, "robot", "assistant", ["gpt"], {}, True, "human ")),
            *((turns, 1, "value", value) for value in (..., None, 5, 1.5, True, [], ["x"], {})),
            *((turns, 1, "loss", value) for value in ("yes", 1, 0, 1.5, [], {}, "")),
            *((turns, 0, "loss", value) for value in ("yes", 1)), (turns, 3, ...), (turns, 2, ...),
            (turns, 2, "from", "gpt"), (turns, 0, "from", "gpt"), (turns, CIRCLE[:1]),
            (turns, [{**turn, "loss": False} for turn in CIRCLE]), (turns, [*CIRCLE, CIRCLE[0]])])]
    if name == "microsoft":
        said = {"role": "assistant", "content": "a"}
        lists = ["", "x", "{", "[", "[{", "null", "5", "true", "{}", "[]", '"x"', "[5]", "[[]]", "[null]", "[{}]",
                 '[{"role": "user", "role": "user", "content": ""}]', "[" * 100_000,
                 *(json.dumps(messages) for messages in (
                     [user("q")], [user("q"), said, said], [user("q"), {**said, "role": "robot"}],
                     [user("q"), {**said, "role": "tool"}], [user("q"), {**said, "role": 5}],
                     [user("q"), {**said, "role": ["assistant"]}], [user("q"), {"role": "assistant"}],
                     *([user("q"), {**said, "content": value}] for value in (None, 5, 1.5, True, [], {}, ["x"])),
                     [user("q"), {"content": "a"}], [user("q"), said, user("r")], [5, said], user("q"))),
                 '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\ud800"}]']
        return [changed(row, "messages", value) for value in (..., None, 5, True, {}, [5], [None], *lists)]
    answers = ["", " ", "24", "#### 24", "48/2=<<48/2=24>>24", "x\n####", "x\n#### ", "x\n#### 24 25",
               "<<48/2\n#### 24", "<<48/2=25>>25\n#### 25", "<<48/0=0>>0\n#### 0", "<<x=1>>1\n#### 1",
               "<<=1>>1\n#### 1", "<<1=>>1\n#### 1",
               "<<1+1=x>>2\n#### 2", "<<9**9**9=1>>1\n#### 1", "<<" + "(" * 10_000 + "=1>>1\n#### 1",
               "<<" + "9" * 10_000 + "+1=1>>1\n#### 1", "<<1+1==2>>2\n#### 2", "<<<<1+1=2>>2\n#### 2",
               "<<1+1=2>>2\n#### two", "<<import os=2>>2\n#### 2", "<<1e999=2>>2\n#### 2", "<<1+1=2\n>>2\n#### 2"]
    return [*(changed(row, key, value) for key in ("question", "answer") for value in (..., None, 5, 1.5, True, [], {},
                                                                                     ["x"])),
            *(changed(row, "answer", answer) for answer in answers), changed(row, "question", " \n")]


def write(folder, name, rows):
    """The rows as a file of the format, with BFCL's answers beside it: objects, or lines as they are."""
    path = folder / f"{name}.json"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    if name == "bfcl":
        (folder / "possible_answer").mkdir(exist_ok=True)
        (folder / "possible_answer" / path.name).write_text(json.dumps({"id": "x_0", "ground_truth": GROUND_TRUTH}))
    return path


@pytest.mark.parametrize("name", SOUND)
def test_broken_rows_are_refused_one_by_one_and_sound_ones_are_kept(name, tmp_path, capsys):
    bad = [*BROKEN, *hostile(name)]
    rows = [row for one in bad for row in (one, SOUND[name])]
    assert len(hostile(name)) >= 36 and len(bad) >= 56
    path, out = write(tmp_path, name, [SOUND[name], *rows]), tmp_path / "out.jsonl"
    convert.main(convert.Config(FORMAT.get(name, name), (str(path),), str(out), prompts=name == "query"))
    refused = (tmp_path / "out.jsonl.refused.txt").read_text().splitlines()
    places = [re.match(rf"{re.escape(str(path))}:(\d+): .+ \[.+\]$", line) for line in refused]
    numbers = [int(place[1]) for place in places if place]
    kept = {2 + 2 * i: bad[i] for i in range(len(bad))}.keys() - {*numbers}
    assert not kept, [str(rows[number - 2])[:300] for number in kept]
    assert numbers == [*range(2, 2 * len(bad) + 1, 2)] and None not in places, "each by its number, and no sound one"
    assert f"{len(bad) + 1} written" in capsys.readouterr().out
    assert all(len(line) < 600 for line in refused), "a huge row is named and not repeated"


VALUES = (None, True, 0, -1.5, float("inf"), float("nan"), "", "x", "é\u2028\u202e", [], [None], ["x"], {},
          {"x": 1}, [[]])


def places(value, path=()):
    """The path of every value inside a value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


@pytest.mark.parametrize("name", SOUND)
def test_any_value_anywhere_is_refused_or_can_be_learnt(name, tmp_path):
    """No exchange of one value ends the conversion, or gives a row that training would trip over."""
    row = {"messages": json.loads(SOUND[name]["messages"])} if name == "microsoft" else SOUND[name]
    spoilt = [changed(row, *path, value) for path in places(row) for value in (*VALUES, ...)]
    if name == "microsoft":
        spoilt = [changed(row, "messages", json.dumps(each.get("messages"))) for each in spoilt]
    found = [*convert.read_file(FORMAT.get(name, name), write(tmp_path, name, spoilt), prompts=name == "query")]
    assert len(found) == len(spoilt) > 30
    for (place, rows), row in zip(found, spoilt, strict=True):
        if isinstance(rows, UserError):
            assert isinstance(rows, RowError) and str(rows).startswith(f"{place}: ")
            continue
        for made in json.loads(json.dumps(rows)):
            if name != "query":
                check_trajectory(messages_of(made), made.get("tools"))
                assert any(encode_row(made, place, ByteTokenizer(), "plain").mask), row
