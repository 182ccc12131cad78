"""Public tool-use data: every row is converted exactly, or refused with its file, its number and the reason."""

import copy
import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from minirl.config import UserError, cli
from minirl.data import convert
from minirl.data.apibench import read_instruction
from minirl.data.augment import new_values, number_names, recovery_row, shuffle_tools
from minirl.data.bfcl import NO_CALL, ast_error, ast_score, convert_bfcl, parse_python_calls
from minirl.data.failures import FAILURES, classify, preference_pairs
from minirl.data.jsonl import each_row
from minirl.data.made_up import copying_row, made_up_row
from minirl.data.quality import quality_parts, quality_score
from minirl.data.scrub import scrub
from minirl.data.sft import encode_row
from minirl.data.teacher import synthesise
from minirl.data.toolbench import convert_processed, convert_tree, tree_pairs
from minirl.data.trajectories import RowError, check_trajectory, find_problems, schema_errors
from minirl.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def user(text):
    return {"role": "user", "content": text}


def said(text=None, *calls):
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def result(text):
    return {"role": "tool", "content": text}


def tool(name, properties=None, required=()):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": properties or {}, "required": [*required]}}}


ADD = tool("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}, ["a", "b"])
GOOD = [user("2+3?"), said(None, ("add", {"a": 2, "b": 3})), result("5"), said("It is 5.")]


def run(capsys, *argv):
    convert.main(cli(convert.Config, [str(word) for word in argv]))
    return capsys.readouterr().out


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def learnt(row):
    encoded = encode_row(row, "row", BYTES, "plain")
    return BYTES.decode([t for t, m in zip(encoded.tokens, encoded.mask, strict=True) if m and t != BYTES.eos_id])


# ------------------------------------------------------------------ files


def test_a_broken_row_takes_no_other_with_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\n{"a": 1, "a": 2}\n{"a": "\xff"}\n{"a": 3}\n')
    found = dict(each_row(path))
    assert [place.rpartition(":")[2] for place, row in found.items() if isinstance(row, dict)] == ["1", "7"]
    assert {place.rpartition(":")[2] for place, row in found.items() if isinstance(row, UserError)} == set("2356")
    path.write_text('[{"a": 1}, 5, {"a": 1, "a": 2}, {"a": 3}, {"a": ')
    kinds = [type(row).__name__ for _, row in each_row(path)]
    assert kinds == ["dict", "UserError", "UserError", "dict", "UserError"]
    path.write_text('{\n "a": 1\n}\n')
    assert [*each_row(path)] == [(f"{path}:1", {"a": 1})]
    path.write_text('[{"a": 1} {"a": 2}]')
    assert [type(row).__name__ for _, row in each_row(path)] == ["dict", "UserError"]
    path.write_text('[{"a": 1}')
    assert [type(row).__name__ for _, row in each_row(path)] == ["dict", "UserError"]
    path.write_text("")
    with pytest.raises(UserError, match="is empty"):
        [*each_row(path)]


COUNTS = {("apibench", "apibench/torchhub_train.json"): (60, 58), ("apibench", "apibench/torchhub_eval.json"): (60, 52),
          ("bfcl", "bfcl/BFCL_v4_simple_python.json"): (60, 60), ("bfcl", "bfcl/BFCL_v4_multiple.json"): (60, 60),
          ("bfcl", "bfcl/BFCL_v4_parallel.json"): (60, 60), ("bfcl", "bfcl/BFCL_v4_irrelevance.json"): (60, 60),
          ("toolbench", "toolbench/answer/G1_10.json"): (1, 1), ("toolbench", "toolbench/answer/G1_11.json"): (1, 1),
          ("toolbench", "toolbench/answer/G2_127.json"): (1, 0),
          ("toolbench", "toolbench/instruction/G1_query.json"): (5, 0),
          ("gsm8k", "gsm8k/train.jsonl"): (1000, 996), ("gsm8k", "gsm8k/test.jsonl"): (200, 199)}


@pytest.mark.parametrize(("name", "file"), COUNTS, ids=lambda value: str(value))
def test_every_real_row_is_converted_or_refused(shared, name, file):
    found = [*convert.read_file(name, shared / "data" / file)]
    kept = [row for _, rows in found if not isinstance(rows, UserError) for row in rows]
    assert (len(found), len(kept)) == COUNTS[name, file]
    for row in kept[::7]:
        check_trajectory(row["messages"], row["tools"])
        assert encode_row(json.loads(json.dumps(row)), "row", BYTES, "plain").mask.count(True) > 1
    for place, error in found:
        if isinstance(error, UserError):
            assert str(error).startswith(f"{shared / 'data' / file}:") and str(error).startswith(f"{place}: ")
            assert error.kind in ("not a call", "argument is no literal", "argument without a name", "no answer",
                                  "not arithmetic")


def test_the_docs_have_these_counts_and_failures():
    text = (Path(__file__).resolve().parents[1] / "docs/agent_data.md").read_text(encoding="utf-8")
    for kind, (what, becomes) in FAILURES.items():
        assert f"| {kind} | {what} | {becomes} |" in text
    for (_, file), (total, kept) in COUNTS.items():
        assert re.search(rf"{re.escape(file)}`? +\| +{total} +\| +{kept} ", text), file


def test_the_command_counts_refusals_and_writes_what_sft_reads(tmp_path, capsys):
    source, out = tmp_path / "BFCL_x.json", tmp_path / "out.jsonl"
    (tmp_path / "possible_answer").mkdir()
    function = {"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "float"}}, "required": ["a"]}}
    rows = [{"id": "x_0", "question": [[user("go")]], "function": [function]},
            {"id": "x_1", "question": [[user("go")]], "function": [function]},
            {"id": "x_2", "question": [[user("go")]], "function": [function]},
            {"id": "x_3", "question": [[{"role": "robot", "content": ""}]], "function": [function]},
            {"id": "irrelevance_4", "question": [[user("go")]], "function": [function]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    answers = [{"id": "x_0", "ground_truth": [{"f": {"a": [2, 3]}}]},
               {"id": "x_1", "ground_truth": [{"g": {"a": [2]}}]},
               {"id": "x_3", "ground_truth": [{"f": {"a": [2]}}]}]
    (tmp_path / "possible_answer" / "BFCL_x.json").write_text("".join(json.dumps(row) + "\n" for row in answers))
    printed = run(capsys, "bfcl", source, out)
    assert "6 rows, 2 converted, 4 refused; 2 written" in printed
    refused = (tmp_path / "out.jsonl.refused.txt").read_text().splitlines()
    assert [re.match(r".*?BFCL_x\.json:(\d): .*\[(.*)\]$", line).groups() for line in refused] == [
        ("2", "unknown tool"), ("3", "no answer"), ("4", "format"), ("6", "broken JSON")]
    first, second = read(out)
    assert first["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 2}}
    assert first["tools"][0]["function"]["parameters"]["properties"]["a"]["type"] == "number"
    assert learnt(first) == '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
    assert learnt(second) == "None of the functions I have can answer this."
    with pytest.raises(UserError, match="none of the 1 rows"):
        source.write_text("{broken\n")
        run(capsys, "bfcl", source, out)


# ------------------------------------------------------------------ BFCL


def bfcl(shared):
    for category in ("simple_python", "multiple", "parallel"):
        name = f"BFCL_v4_{category}.json"
        answers = convert.bfcl_answers(shared / "data/bfcl" / name)
        for _, row in each_row(shared / "data/bfcl" / name):
            yield row["function"], answers[row["id"]], [
                call["function"] for call in convert_bfcl(row, answers)["messages"][-1]["tool_calls"]]


def test_possible_answers_score_one_and_mutated_ones_fail(shared):
    rng, tried = Random(0), 0
    for functions, answers, calls in bfcl(shared):
        assert ast_score(calls, functions, answers) == 1.0
        assert ast_score(calls[::-1], functions, answers) == 1.0, "parallel calls have no order"
        for mutate in MUTATIONS:
            wrong = copy.deepcopy(calls)
            if mutate(wrong, rng) is not False:
                assert ast_score(wrong, functions, answers) == 0.0, (mutate.__name__, wrong, answers)
                tried += 1
        # every accepted value is accepted, not only the first
        for call, answer in zip(calls, answers, strict=True):
            for argument, values in next(iter(answer.values())).items():
                for value in values:
                    if value != "" and not isinstance(value, dict):
                        other = [call | {"arguments": call["arguments"] | {argument: value}} if c is call else c
                                 for c in calls]
                        assert ast_error(other, functions, answers) is None
    assert tried > 1000


def test_types_spelling_order_and_optional_arguments_of_the_real_rows(shared):
    tried = Counter()
    for functions, answers, calls in bfcl(shared):
        def score(argument, value, functions=functions, answers=answers, calls=calls):
            made = copy.deepcopy(calls)
            made[0]["arguments"][argument] = value
            return ast_score(made, functions, answers)

        declared = next(each for each in functions if each["name"] == calls[0]["name"])["parameters"]["properties"]
        accepted = answers[0][calls[0]["name"]]
        for argument, values in accepted.items():
            kind, value = declared[argument]["type"], next((value for value in values if value != ""), None)
            where = (functions, answers, argument, value)
            if "" in values and value is not None:
                tried["optional"] += 1
                assert score(argument, value) == 1 and score(argument, {"zz": 1}) == 0, where
            if kind == "integer" and type(value) is int:
                tried["integer"] += 1
                assert score(argument, float(value)) == 0 and score(argument, bool(value)) == 0, where
            if kind == "float" and value is not None and float(value).is_integer():
                tried["float"] += 1
                assert score(argument, int(value)) == score(argument, float(value)) == 1, where
            if kind == "string" and isinstance(value, str) and value:
                tried["string"] += 1
                assert score(argument, f" {value.upper()}._-/*^,") == 1 and score(argument, value + "q") == 0, where
            if isinstance(value, list) and value[::-1] not in values:
                tried["order"] += 1
                assert score(argument, value[::-1]) == 0 and score(argument, [*value, value[0]]) == 0, where
            if isinstance(value, dict):
                tried["object"] += 1
                plain = {key: inner[0] for key, inner in value.items()}
                first = next(key for key, inner in value.items() if "" not in inner)
                assert score(argument, plain) == 1 and score(argument, plain | {"zz": 1}) == 0, where
                assert score(argument, {key: inner for key, inner in plain.items() if key != first}) == 0, where
    assert all(tried[name] >= least for name, least in (("optional", 60), ("integer", 60), ("float", 5),
                                                         ("string", 100), ("order", 5), ("object", 2))), tried


def test_no_call_is_the_only_answer_where_nothing_fits(shared):
    for _, row in each_row(shared / "data/bfcl/BFCL_v4_irrelevance.json"):
        assert ast_score([], row["function"], []) == 1
        assert ast_score([{"name": row["function"][0]["name"], "arguments": {}}], row["function"], []) == 0


def rename(calls, rng):
    calls[0]["name"] += "x"


def drop_a_call(calls, rng):
    calls.pop()


def repeat_a_call(calls, rng):
    calls.append(calls[0])


def invent_an_argument(calls, rng):
    calls[0]["arguments"]["invented"] = 1


def drop_a_needed_argument(calls, rng):
    if not calls[0]["arguments"]:
        return False
    calls[0]["arguments"].popitem()  # what convert_bfcl leaves in is either required or cannot be left out


def change_a_value(calls, rng):
    for argument, value in calls[0]["arguments"].items():
        wrong = {bool: lambda v: "yes", int: lambda v: v + 100003, float: lambda v: v + 100003.5,
                 str: lambda v: v + " zzqq", list: lambda v: [*v, *v, 7], dict: lambda v: v | {"zzqq": 1}}[type(value)]
        calls[0]["arguments"][argument] = wrong(value)
        return None
    return False


def quote_a_number(calls, rng):
    numbers = [name for name, value in calls[0]["arguments"].items() if isinstance(value, int | float)]
    if not numbers:
        return False
    calls[0]["arguments"][numbers[0]] = str(calls[0]["arguments"][numbers[0]])


MUTATIONS = (rename, drop_a_call, repeat_a_call, invent_an_argument, drop_a_needed_argument, change_a_value,
             quote_a_number)


def function(kind, required=True, **more):
    return [{"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": kind, **more}},
                                         "required": ["x"] if required else []}}]


@pytest.mark.parametrize(("kind", "accepted", "value", "right"), [
    ("integer", [5], 5, True), ("integer", [5], 5.0, False), ("integer", [1], True, False),
    ("float", [5.0], 5, True), ("float", [5], 5.0, True), ("float", [1.0], True, False),
    ("boolean", [True], True, True), ("boolean", [True], 1, False), ("boolean", [True], "true", False),
    ("string", ["New York, NY"], "new york ny", True), ("string", ["it's"], 'IT"S', True),
    ("string", ["a_b-c/d.e*f^g"], "abcdefg", True), ("string", ["ab"], "a b c", False), ("string", ["a"], 5, False),
    ("array", [["Ab", "C"]], ["ab", "c"], True), ("array", [["a", "b"]], ["b", "a"], False),
    ("array", [["a"], ["b"]], ["b"], True), ("array", [["a"]], "a", False), ("array", [[]], [], True),
    ("tuple", [[1, 2]], [1, 2], True), ("tuple", [[1, 2]], (1, 2), True), ("array", [[1, 2]], (1, 2), False),
    ("any", ["Ab"], "a b", True), ("any", [5], 5, True), ("any", [5], 5.0, False), ("any", ["x", 5], 5, False),
    ("dict", [{"min": [1], "max": [2, ""]}], {"min": 1}, True), ("dict", [{"min": [1], "max": [2]}], {"min": 1}, False),
    ("dict", [{"min": [1]}], {"min": 1, "x": 2}, False), ("dict", [{"a": ["Q w"]}], {"a": "qw"}, True),
    ("dict", [{"on": [True]}], {"on": 1}, False), ("array", [[{"a": [1, 2]}]], [{"a": 2}], True),
    ("dict", [{"a": [["Q w"]]}], {"a": ["Q w"]}, True), ("dict", [{"a": [["Q w"]]}], {"a": ["qw"]}, False),
    ("dict", [{"a": [{"b": [1, 2]}]}], {"a": {"b": [1, 2]}}, True),
    ("dict", [{"a": [{"b": [1, 2]}]}], {"a": {"b": 1}}, False),
    ("array", [[["Q w"]]], [["Q w"]], True), ("array", [[["Q w"]]], [["qw"]], False),
    ("integer", ["size_of_it"], "size_of_it", True), ("integer", ["size_of_it"], 5, False),
    ("integer", ["size_of_it"], "Size_of_it", False), ("string", [5, "Five"], "five", False),
])
def test_values_by_hand(kind, accepted, value, right):
    assert ast_score([{"name": "f", "arguments": {"x": value}}], function(kind), [{"f": {"x": accepted}}]) == right


def test_items_optional_arguments_and_irrelevance_by_hand():
    numbers = function("array", items={"type": "integer"})
    assert ast_score([{"name": "f", "arguments": {"x": [1, 2]}}], numbers, [{"f": {"x": [[1, 2]]}}])
    assert not ast_score([{"name": "f", "arguments": {"x": [1.0, 2]}}], numbers, [{"f": {"x": [[1, 2]]}}])
    assert not ast_score([{"name": "f", "arguments": {"x": [True, 2]}}], numbers, [{"f": {"x": [[1, 2], ""]}}])
    optional, may = function("integer", required=False), [{"f": {"x": [5, ""]}}]
    assert ast_score([{"name": "f", "arguments": {}}], optional, may)
    assert ast_score([{"name": "f", "arguments": {"x": 5}}], optional, may)
    assert not ast_score([{"name": "f", "arguments": {"x": 6}}], optional, may)
    assert not ast_score([{"name": "f", "arguments": {}}], optional, [{"f": {"x": [5]}}])
    assert ast_score([], optional, []) and not ast_score([{"name": "f", "arguments": {}}], optional, [])


@pytest.mark.parametrize(("item", "accepted", "value", "right"), [
    ("float", [[1.0, 2.0]], [1.0, 2.0], True), ("float", [[1.0, 2.0]], [1, 2.0], False),  # whole numbers are no floats
    ("float", [[1, 2.5]], [1, 2.5], True), ("float", [[1, 2.5]], [1.0, 2.5], True),  # unless the first of the answer is
    ("float", [[0.5, 2], [1, 2]], [1, 2], True), ("float", [[0.5, 2]], [0.5, 2], False),
    ("float", [[1.0, 2.0], ""], [1, 2], True), ("float", [[1.0], ""], [], True), ("float", [[1.0]], [], False),
    ("integer", [[1]], [1.0], False), ("integer", [["n", 1]], ["n", 1], True), ("string", [["n"]], [1], False),
    ("dict", [[{"a": ["Q w"], "b": [1, ""]}]], [{"a": "qw"}], True),
    ("dict", [[{"a": [1]}, {"a": [2]}]], [{"a": 2}, {"a": 1}], False),
])
def test_items_of_a_list_by_hand(item, accepted, value, right):
    functions = function("array", items={"type": item})
    assert ast_score([{"name": "f", "arguments": {"x": value}}], functions, [{"f": {"x": accepted}}]) == right


def test_a_list_of_floats_is_written_so_that_it_passes_its_own_check():
    row = {"id": "simple_0", "question": [[{"role": "user", "content": "go"}]],
           "function": function("array", items={"type": "float"})}
    call = convert_bfcl(row, {"simple_0": [{"f": {"x": [[0.5, 2]]}}]})["messages"][-1]["tool_calls"][0]["function"]
    assert repr(call["arguments"]) == "{'x': [0.5, 2.0]}"


def test_parallel_calls_are_matched_and_not_grabbed():
    # The first call fits both answers, the second only the first one: greedy matching would fail here.
    functions, answers = function("integer"), [{"f": {"x": [1, 2]}}, {"f": {"x": [2]}}]
    for order in ([1, 2], [2, 1]):
        assert ast_score([{"name": "f", "arguments": {"x": x}} for x in order], functions, answers)
    assert not ast_score([{"name": "f", "arguments": {"x": 1}}] * 2, functions, answers)


def test_calls_written_as_python():
    assert parse_python_calls("[math.hypot(x=4, y=-5.5), f()]") == [
        {"name": "math.hypot", "arguments": {"x": 4, "y": -5.5}}, {"name": "f", "arguments": {}}]
    assert parse_python_calls("f(a=[1, 'x', (True, None)], b={'k': name})") == [
        {"name": "f", "arguments": {"a": [1, "x", (True, None)], "b": {"k": "name"}}}]
    assert parse_python_calls("f(a=(1, [(2,)]))", tuples=False) == [{"name": "f", "arguments": {"a": [1, [[2]]]}}]
    for text in ("", "f", "f(1)", "f(**x)", "f(a=1)(b=2)", "f(a=open('x'))", "f(a=1e999)", "x = f()", "f(a={1: 2})",
                 "f(a=1, a=2)", "(" * 5000, "f(a=" + "-" * 10000 + "1)", "f(a=b'x')", "\0", "f(a=1)\nf()"):
        with pytest.raises(RowError):
            parse_python_calls(text)


# ------------------------------------------------------------------ the other formats


@pytest.mark.parametrize("code", [
    "###Instruction: Find cats.\n###Output: {'domain': 'x'}", "{'Instruction': Find cats., 'Output': {'domain': 'x'}}",
    "{'Instruction': 'Find cats.', 'Output': {}}", '{"Instruction": "Find cats.", "Output": {}}',
    "### Instruction: Find cats.\n### Output: <<<domain>>>: x\n<<<api_call>>>: y"])
def test_instructions_of_apibench(code):
    assert read_instruction(code) == "Find cats."
    with pytest.raises(RowError):
        read_instruction(code.replace("Output", "Result"))


def node(kind, text, *children, **more):
    return {"node_type": kind, "description": text, "children": [*children], **more}


def step(action, arguments, observation, *children, thought=None):
    made = node("Action", action, node("Action Input", json.dumps(arguments), *children, observation=observation))
    return made if thought is None else node("Thought", thought, made)


def tree(*children, names=("look", "Finish")):
    return {"win": True, "tree": {"tree": node("Action Input", "", *children)},
            "answer_generation": {"query": "\nWhere?\n", "function": [
                {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": True}}
                for name in names]}}


GIVE_UP = step("Finish", {"return_type": "give_up_and_restart"}, "")
ANSWER = step("Finish", {"return_type": "give_answer", "final_answer": "here"}, "ok", thought="I know.")


def test_a_tree_gives_its_first_path_that_answers():
    row = tree(step("look", {"at": 1}, "dark", GIVE_UP), step("look", {"at": 2}, "bright", ANSWER, thought="Try 2."))
    assert convert_tree(row)["messages"] == [
        user("Where?"), said("Try 2.", ("look", {"at": 2})), result("bright"),
        said("I know.", ("Finish", {"return_type": "give_answer", "final_answer": "here"}))]
    (pair,) = tree_pairs(row)
    assert pair["prompt"] == [user("Where?")]
    assert pair["chosen"] == [said("Try 2.", ("look", {"at": 2}))]
    assert pair["rejected"] == [said(None, ("look", {"at": 1}))]
    # a fork deeper down: the common step is part of the prompt
    (pair,) = tree_pairs(tree(step("look", {}, "hm", GIVE_UP, ANSWER)))
    assert [message["role"] for message in pair["prompt"]] == ["user", "assistant", "tool"]
    assert pair["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"return_type": "give_up_and_restart"}


def refusal(row):
    with pytest.raises(RowError) as error:
        converted = convert_tree(row)
        check_trajectory(converted["messages"], converted["tools"])
    return error.value.kind


def test_trees_that_are_refused():
    assert refusal(tree(GIVE_UP)) == "no answer"
    assert refusal(tree()) == "no answer"
    assert refusal(tree(step("look", {}, "hm", ANSWER), names=("Finish",))) == "unknown tool"
    assert refusal(tree(step("look", {}, None, ANSWER))) == "bad tree"
    assert refusal(tree(node("Action", "look", node("Action Input", "{broken", ANSWER, observation="")))) == (
        "arguments are no JSON")
    assert refusal(tree(node("Surprise", "?", ANSWER))) == "bad tree"
    assert refusal(tree(node("Action", "look", ANSWER))) == "bad tree"
    broken = node("Action", "look", node("Action Input", "{broken", ANSWER, observation=""))
    two = tree(broken, step("look", {}, "", ANSWER))
    sound = convert_tree(json.loads(json.dumps(two)))["messages"]
    assert sound[1] == said(None, ("look", {})), "a broken path hides no sound one"
    assert refusal({"tree": 5, "answer_generation": {}}) == "bad tree"
    cyclic = tree(step("look", {}, "hm"))
    cyclic["tree"]["tree"]["children"][0]["children"][0]["children"].append(cyclic["tree"]["tree"])
    assert refusal(cyclic) == "cyclic tree"
    deep = GIVE_UP
    for _ in range(3000):
        deep = step("look", {}, "hm", deep)
    assert refusal(tree(deep)) == "no answer"


SYSTEM = ("You can use tools. Your output should follow this format:\nThought:\nAction\nAction Input:\n\nLet's Begin!\n"
          "Specifically, you have access to the following APIs: [{'name': 'look', 'description': 'it\\'s', "
          "'parameters': {'type': 'object', 'properties': {'at': {'type': 'string'}}, 'optional': ['at']}}, "
          "{'name': 'Finish', 'parameters': {'type': 'object', 'properties': {'return_type': {'type': 'string'}}}}]")


def processed(*turns, system=SYSTEM):
    return {"id": "q", "conversations": [{"from": role, "value": text} for role, text in (
        ("system", system), ("user", "\nWhere?\nBegin!\n"), *turns)]}


LOOK = ("assistant", '\nThought: One moment.\nAction: look\nAction Input: {"at": "x"}')
FINISH = ("assistant", 'Thought: \nAction: Finish\nAction Input: {"return_type": "give_answer"}')


def test_the_processed_file_of_toolbench():
    row = convert_processed(processed(LOOK, ("function", "  nothing\n"), FINISH))
    assert row["messages"] == [
        {"role": "system", "content": "You can use tools.\nLet's Begin!"}, user("Where?\nBegin!"),
        said("One moment.", ("look", {"at": "x"})), result("  nothing\n"),
        said(None, ("Finish", {"return_type": "give_answer"}))]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["look", "Finish"]
    check_trajectory(row["messages"], row["tools"])
    # The mask, by hand: what the assistant said, and nothing of what tools and people did.
    assert learnt(row) == (
        'One moment.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
        '<tool_call>\n{"name": "Finish", "arguments": {"return_type": "give_answer"}}\n</tool_call>')


@pytest.mark.parametrize(("row", "kind"), [
    (processed(("robot", "x")), "unknown role"), (processed(("assistant", "Hello")), "not a step"),
    (processed(("assistant", "Thought: a\nAction: look\nAction Input: {at}")), "arguments are no JSON"),
    (processed(("assistant", "Thought: a\nAction: look\nAction Input: [1]")), "arguments are no JSON"),
    (processed(LOOK, system="Hi"), "no functions"), (processed(LOOK, system=SYSTEM + "x"), "bad functions"),
    (processed(("assistant", 5)), "no text"), ({"conversations": []}, "no conversation"),
    (processed(("assistant", 'Thought: \nAction: Finish\nAction Input: {"return_type": "give_up_and_restart"}')),
     "no answer"),
    (processed(("assistant", "Thought: a\nAction: fly\nAction Input: {}"), ("function", ""), FINISH), "unknown tool"),
    (processed(("assistant", 'Thought: a\nAction: look\nAction Input: {"at": 5}'), ("function", ""), FINISH),
     "arguments"),
    (processed(LOOK, FINISH), "format"),
])
def test_processed_rows_that_are_refused(row, kind):
    with pytest.raises(RowError) as error:
        converted = convert_processed(row)
        check_trajectory(converted["messages"], converted["tools"])
    assert error.value.kind == kind


def turns(*parts):
    return {"id": "os_0", "conversations": [{"from": role, "value": text, "loss": loss} for role, text, loss in parts]}


def agentinstruct(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [found for _, found in convert.read_file("agentinstruct", path)]


def test_answers_of_agentinstruct_are_learnt_where_it_says_so(tmp_path):
    human = ("human", "q", None)
    (rows,) = agentinstruct(tmp_path, turns(human, ("gpt", "OK.", False), human, ("gpt", "Act: ls", True), human,
                                            ("gpt", "no", False), human, ("gpt", "yes", True)))
    assert [learnt(row) for row in rows] == ["Act: ls", "yes"], "each answer once, and only those"
    assert [len(row["prompt"]) for row in rows] == [3, 7]
    (rows,) = agentinstruct(tmp_path, turns(human, ("gpt", "a", True), human, ("gpt", "b", True)))
    assert [learnt(row) for row in rows] == ["ab"] and "messages" in rows[0]
    (rows,) = agentinstruct(tmp_path, turns(human, ("gpt", "a", None)))
    assert [learnt(row) for row in rows] == ["a"]
    (rows,) = agentinstruct(tmp_path, {"messages": json.dumps([{"role": "system", "content": ""}, user("q"),
                                                               said("é")])})
    assert learnt(rows[0]) == "é" and rows[0]["messages"][0]["content"] == ""


@pytest.mark.parametrize(("row", "kind"), [
    (turns(("human", "q", None), ("gpt", "a", False)), "nothing to learn"),
    (turns(("robot", "q", None)), "unknown role"), (turns(("human", 5, None)), "no text"),
    (turns(("human", "q", "yes")), "bad loss"), (turns(("gpt", "a", True), ("gpt", "b", True)), "format"),
    ({"conversations": "x"}, "no conversation"), ({}, "no conversation"), ({"messages": "[{"}, "broken JSON"),
    ({"messages": '[{"role": "robot", "content": ""}]'}, "unknown role"), ({"messages": "[[]]"}, "unknown role"),
    ({"messages": '[{"role": "user", "content": null}]'}, "no text"),
    ({"messages": '[{"role": "user", "content": "x"}]'}, "nothing to learn"),
])
def test_rows_of_agentinstruct_that_are_refused(tmp_path, row, kind):
    (error,) = agentinstruct(tmp_path, row)
    assert isinstance(error, RowError) and error.kind == kind and "rows.jsonl:1: " in str(error)


def test_gsm8k_annotations_become_calculator_calls(tmp_path, capsys):
    path, out = tmp_path / "gsm.jsonl", tmp_path / "out.jsonl"
    answers = ["48/2 = <<48/2=24>>24 clips.\n1/3 is $<<1/3=0.33>>0.33.\n#### 24", "2+2 = <<2+2=5>>5\n#### 5",
               "<<2+x=5>>\n#### 5", "<<2+2\n#### 5", "2+2 = <<2+2=4>>4", "<<10/3=3>>3\n#### 3", "Seven.\n#### 7"]
    path.write_text("".join(json.dumps({"question": "q", "answer": answer}) + "\n" for answer in answers))
    assert "7 rows, 2 converted, 5 refused" in run(capsys, "gsm8k", path, out, "--curriculum")
    kinds = [line.rpartition("[")[2][:-1] for line in (tmp_path / "out.jsonl.refused.txt").read_text().splitlines()]
    assert kinds == ["wrong calculation", "not arithmetic", "broken annotation", "no answer", "wrong calculation"]
    easy, hard = read(out)
    assert (easy["steps"], hard["steps"]) == (0, 2)
    assert [message["content"] for message in hard["messages"]] == [
        "q", "48/2 = ", "24", "24 clips.\n1/3 is $", "0.3333333333", "0.33.\n#### 24"]
    row = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
    assert learnt(hard) == f"48/2 = \n{row % '48/2'}24 clips.\n1/3 is $\n{row % '1/3'}0.33.\n#### 24"
    assert "1 rows" not in run(capsys, "gsm8k", path, out, "--max-steps", 1) and len(read(out)) == 1
    run(capsys, "gsm8k", path, out, "--text")
    assert [row["text"] for row in read(out)] == [
        "Question: q\nAnswer: 48/2 = 24 clips.\n1/3 is $0.33.\n#### 24", "Question: q\nAnswer: Seven.\n#### 7"]
    with pytest.raises(SystemExit):
        run(capsys, "bfcl", path, out, "--text")


# ------------------------------------------------------------------ trajectories


@pytest.mark.parametrize(("messages", "kind"), [
    (GOOD[:3], "unfinished"), ([*GOOD[:1], said(None, ("sub", {})), *GOOD[2:]], "unknown tool"),
    ([*GOOD[:1], said(None, ("add", {"a": 2})), *GOOD[2:]], "arguments"),
    ([*GOOD[:1], said(None, ("add", {"a": 2, "b": "3"})), *GOOD[2:]], "arguments"),
    ([*GOOD[:1], said(None, ("add", {"a": 2, "b": 3, "c": 4})), *GOOD[2:]], "arguments"),
    ([*GOOD[:1], said(None, ("add", "{broken")), *GOOD[2:]], "format"),
    ([*GOOD[:2], GOOD[3]], "format"), ([GOOD[0], *GOOD[2:]], "format"), ([*GOOD[:2], user("?"), GOOD[3]], "format"),
    ([{"role": "robot", "content": ""}], "format"), ([], "format"), ([*GOOD[:2], {**GOOD[2], "content": 5}], "format"),
])
def test_problems_of_trajectories(messages, kind):
    before = copy.deepcopy(messages)
    assert find_problems(GOOD, [ADD]) == []
    assert find_problems(messages, [ADD])[0].kind == kind and messages == before


def test_ids_of_calls():
    def talk(call_ids, answer_ids):
        turn = said(None, *[("add", {"a": 2, "b": 3})] * len(call_ids))
        for call, name in zip(turn["tool_calls"], call_ids, strict=True):
            call["id"] = name
        results = [{**result("5"), "tool_call_id": name} for name in answer_ids]
        return [problem.kind for problem in find_problems([user("?"), turn, *results, said("5")], [ADD])]
    assert talk(["x", "y"], ["y", "x"]) == []
    assert talk(["x", "y"], ["x", "z"]) == ["ids"]
    assert talk(["x", "y"], ["x", "x"]) == ["ids"]
    assert talk(["x", "x"], ["x", "x"]) == ["ids"]
    assert talk([5], ["y"])[0] == "ids"


@pytest.mark.parametrize(("schema", "value", "errors"), [
    ({"type": "integer"}, True, 1), ({"type": "integer"}, 2.0, 0), ({"type": "number"}, 2, 0),
    ({"type": ["string", "null"]}, None, 0), ({"type": "string"}, 5, 1), ({"enum": ["a"]}, "b", 1),
    ({"type": "array", "items": {"type": "string"}}, ["a", 5], 1), ({"type": "martian"}, 5, 0), ({}, {"x": 1}, 0),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, 0),
    ({"type": "object", "properties": {"a": {"type": "object", "properties": {}, "required": ["b"]}}}, {"a": {}}, 1),
    ({"type": "integer"}, float("inf"), 1), ("no schema", 5, 0)])
def test_schemas(schema, value, errors):
    assert len(schema_errors(value, schema)) == errors


def test_tools_are_shuffled_and_the_called_ones_stay():
    others = [tool(f"t{i}") for i in range(20)] + [tool("add")]
    row = {"messages": GOOD, "tools": [ADD, tool("own")]}
    orders = set()
    for seed in range(40):
        shuffled = shuffle_tools(row, Random(seed), others, most=5)
        names = [each["function"]["name"] for each in shuffled["tools"]]
        assert len(names) == len(set(names)) == 5 and ADD in shuffled["tools"] and "own" in names
        orders.add(names.index("add"))
        check_trajectory(shuffled["messages"], shuffled["tools"])
    assert orders == {0, 1, 2, 3, 4} and row["tools"] == [ADD, tool("own")]
    assert shuffle_tools(row, Random(1), others) == shuffle_tools(row, Random(1), others)
    assert shuffle_tools(row, Random(1), (), most=1)["tools"] == [ADD]


def test_what_a_call_repeats_is_exchanged_in_question_and_call():
    row = {"messages": [user("Heat Ann Lee's 12 pots, 120 g, to 300K at 7.5, -3 or 12, fast."), said(None, (
        "heat", {"who": "Ann Lee", "n": 12, "at": [300, 7.5, {"t": -3}], "mode": "fast", "other": 99, "on": True}))],
        "tools": [tool("heat") | {"modes": "fast or slow"}], "possible_answer": [{}], "id": "x"}
    kept = copy.deepcopy(row)
    new = new_values(row, Random(3), ["apple", "stone"])
    assert row == kept and new == new_values(row, Random(3), ["apple", "stone"])
    call = new["messages"][1]["tool_calls"][0]["function"]["arguments"]
    hot, warm, cold = *call["at"][:2], call["at"][2]["t"]
    assert new["messages"][0]["content"] == (
        f"Heat {call['who']}'s {call['n']} pots, 120 g, to {hot}K at {warm}, {cold} or {call['n']}, fast.")
    assert call["who"] in {f"{a} {b}" for a in ("Apple", "Stone") for b in ("Apple", "Stone")}
    assert (call["mode"], call["other"], call["on"]) == ("fast", 99, True), "one of the tool's choices; never said"
    assert 10 <= call["n"] <= 99 and 100 <= hot <= 999 and type(hot) is int and type(warm) is float and cold <= 0
    assert new["id"] == "x" and "possible_answer" not in new and new["tools"] == row["tools"]
    assert [new_values(row, Random(i), ["a"])["messages"][0] != row["messages"][0] for i in range(20)].count(False) == 0
    parts = {"prompt": row["messages"][:1], "completion": row["messages"][1:], "tools": row["tools"]}
    made = new_values(parts, Random(3), ["apple", "stone"])
    assert made["prompt"] + made["completion"] == new["messages"]


def test_made_up_rows_can_be_answered_from_what_they_say():
    words, kinds, rng = ["apple", "stone", "river", "engine"], Counter(), Random(0)
    for _ in range(400):
        row = made_up_row(rng, words)
        check_trajectory(row["messages"], row["tools"])
        question, answer = (message["content"] for message in row["messages"])
        calls = [call["function"] for call in row["messages"][1].get("tool_calls", [])]
        kinds[len(calls), len(row["tools"])] += 1
        assert answer == (None if calls else NO_CALL)
        for call in calls:
            for value in call["arguments"].values():
                for each in value if isinstance(value, list) else [value]:
                    assert isinstance(each, bool) or str(each) in question
    assert 70 < sum(n for (calls, _), n in kinds.items() if not calls) < 130 and {1, 2, 3} == {n for _, n in kinds}
    assert {0, 1, 2, 3} == {calls for calls, _ in kinds}
    assert made_up_row(Random(5), words) == made_up_row(Random(5), words)
    easy = [made_up_row(rng, words, 1, 1) for _ in range(50)]
    assert {len(row["tools"]) for row in easy} == {1}
    assert {len(row["messages"][1].get("tool_calls", [])) for row in easy} == {0, 1}
    copied = copying_row(rng, words)
    assert copied["prompt"] == copied["completion"] + "\n"


def test_a_mistake_is_read_and_its_mending_learnt():
    kinds = set()
    for seed in range(30):
        row = recovery_row({"messages": GOOD, "tools": [ADD]}, Random(seed))
        assert learnt(row) == '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>It is 5.'
        bad = [*row["prompt"], said("x")]
        assert find_problems(bad, [ADD])[0].kind in ("unknown tool", "arguments")
        kinds.add(row["prompt"][-1]["content"].split(":")[0] + find_problems(bad, [ADD])[0].text.split()[-1])
    assert len(kinds) >= 3
    with pytest.raises(RowError):
        recovery_row({"messages": [user("a"), said("b")], "tools": []}, Random(0))


def test_what_is_private_leaves():
    secret = {"a": ["mail ann.b+c@mail.example.org, Ann@x.io or +687 27.25.92", "call (555) 123-4567 or 555-123-4567"],
              "b": {"sk-abcdefghijklmnop1234": "AKIAABCDEFGHIJKLMNOP",
                    "c": 'api_key="s3cretvalue99" Bearer abcdef0123456789xyz'},
              "d": json.dumps({"list": "\nsales@act.nc\t+687 26.11.11"})}
    clean, counts = scrub(secret)
    assert clean["a"] == ["mail <email-1>, <email-2> or <phone-1>", "call <phone-2> or <phone-3>"]
    assert clean["b"] == {"<key-1>": "<key-2>", "c": 'api_key="<key-3>" Bearer <key-4>'}
    assert json.loads(clean["d"]) == {"list": "\n<email-3>\t<phone-4>"}, "JSON inside a string is still JSON"
    assert counts == {"email": 3, "key": 4, "phone": 4}
    same = {"x": "2019-12-13 12:30, 1234567890, 48/2=24, 3.14159, $80,000, v1.2.3, 192.168.100.200, a@b, 10.1038/nat1",
            "n": [5551234567, None, True]}
    assert scrub(same) == (same, {"email": 0, "key": 0, "phone": 0})
    assert scrub("ask ann@x.io; ann@x.io said")[0] == "ask <email-1>; <email-1> said", "one name for one address"


@pytest.mark.parametrize("text", ["a." * 50_000, "1 " * 50_000, "+1" * 50_000, "a@" * 50_000, "(555) " * 20_000,
                                  "sk-" * 30_000, "-----BEGIN PRIVATE KEY-----" * 4000, "password=" * 12_000,
                                  "eyJ" * 30_000, "+1 " + "2 " * 50_000, "x" * 100_000 + "@"])
def test_scrubbing_reads_hostile_text_once(text):
    once = scrub(text)[0]
    assert scrub(once)[0] == once


def test_quality_by_hand():
    assert quality_parts(GOOD, 1.0) == {"satisfaction": 1.0, "completion": 1.0, "tool_success": 1.0, "efficiency": 1.0}
    call = ("add", {"a": 2, "b": 3})
    messy = [user("?"), said(None, call), result("Error: no"), said(None, call), result("5"), said(None, call),
             result("5"), said("5")]
    parts = quality_parts(messy, 0.5)
    assert parts == {"satisfaction": 0.5, "completion": 1.0, "tool_success": 2 / 3, "efficiency": 1 / 3}
    assert quality_score(parts) == pytest.approx(0.15 + 0.3 + 0.2 * 2 / 3 + 0.2 / 3)
    assert quality_score(quality_parts(messy)) == pytest.approx((0.3 + 0.2) / 0.7), "an unknown part leaves the sum"
    assert quality_parts(GOOD[:3])["completion"] == 0.0
    assert quality_parts([user("?"), said(None, ("Finish", {"return_type": "give_answer"}))])["completion"] == 1.0


CALL = ("add", {"a": 2, "b": 3})


@pytest.mark.parametrize(("messages", "kind"), [
    ([user("?"), said("<tool_call>{broken")], "format"),
    ([user("?"), said(None, ("sub", {})), result(""), said("5")], "unknown tool"),
    ([user("?"), said(None, ("add", {})), result(""), said("5")], "arguments"),
    ([user("?"), said("5")], "missing call"),
    ([user("?"), said(None, CALL), result("5"), said(None, CALL), result("5"), said("5")], "loop"),
    ([user("?"), said(None, CALL), result("Error: no"), said("Sorry.")], "no recovery"),
    ([user("?"), said(None, CALL), result("5")], "unfinished"),
    ([*GOOD[:3], said("It is 6.")], "wrong answer"),
])
def test_failures_have_names(messages, kind):
    assert classify(messages, [ADD], False, GOOD) == kind and kind in FAILURES
    assert classify(messages, [ADD], True) is None
    assert classify(GOOD, [ADD], False, [user("?"), said("5")]) == "needless call"
    assert classify(GOOD, [ADD, tool("sub")], False, [user("?"), said(None, ("sub", {})), result(""), said("5")]) == (
        "wrong tool")
    assert classify(GOOD, [ADD]) is None


def test_failures_become_pairs_where_they_part():
    good = {"messages": GOOD, "tools": [ADD], "correct": True}
    wrong = {"messages": [*GOOD[:3], said("It is 6.")], "tools": [ADD], "correct": False}
    direct = {"messages": [GOOD[0], said("5!")], "tools": [ADD], "correct": False}
    noisy = {"messages": [*GOOD[:2], result("6"), said("It is 6.")], "tools": [ADD], "correct": False}
    other = {"messages": [user("3+3?"), said("6")], "tools": [ADD], "correct": False}
    pairs = preference_pairs([wrong, direct, direct, noisy, other, good, good])
    assert pairs == [
        {"prompt": GOOD[:3], "chosen": [GOOD[3]], "rejected": [said("It is 6.")], "failure": "wrong answer",
         "tools": [ADD]},
        {"prompt": GOOD[:1], "chosen": [GOOD[1]], "rejected": [said("5!")], "failure": "missing call", "tools": [ADD]}]
    with pytest.raises(UserError, match="attempt 0 has correct"):
        preference_pairs([{"messages": GOOD}])


def test_a_teacher_is_any_callable_and_only_good_rows_are_kept():
    def teacher(messages, tools):
        if messages[0]["content"] == "broken":
            return said(None, ("sub", {}))
        return GOOD[1] if messages[-1]["role"] == "user" else said(f"It is {messages[-1]['content']}.")

    tasks = [{"prompt": [user("2+3?")], "tools": [ADD]}, {"prompt": [user("broken")], "tools": [ADD]}]
    rows, refused = synthesise(tasks, teacher, {"add": lambda a, b: str(a + b)}, judge=lambda messages: 1.0)
    assert [row["messages"] for row in rows] == [GOOD] and rows[0]["quality"] == 1.0
    assert [(error.kind, str(error)[:7]) for error in refused] == [("unknown tool", "task 1:")]
    rows, refused = synthesise(tasks[:1], teacher, {"add": lambda a, b: 1 / 0}, judge=lambda messages: 0.0)
    assert not rows and refused[0].kind == "quality"


def test_names_become_numbers_wherever_they_are_used(shared):
    add = {"type": "function", "function": {"name": "math.add", "description": "math.add adds", "parameters": {
        "type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
        "required": ["right"]}}}
    now = {"type": "function", "function": {"name": "now"}}
    finish = {"type": "function", "function": {"name": "Finish", "parameters": {
        "type": "object", "properties": {"return_type": {"type": "string"}}}}}
    row = {"prompt": [user("1+2?"), said(None, ("math.add", {"right": 1, "left": 2})), result("3")],
           "completion": [said(None, ("now", {}), ("Finish", {"return_type": "give_answer"}))], "id": "x",
           "tools": [now, add, finish], "possible_answer": [{"now": {}}, {"math.add": {"right": [1], "left": [2, ""]}}]}
    kept = copy.deepcopy(row)
    numbered = number_names(row)
    assert row == kept, "a new row"
    assert numbered["prompt"] == [user("1+2?"), said(None, ("tool_2", {"arg_2": 1, "arg_1": 2})), result("3")]
    assert numbered["completion"] == [said(None, ("tool_1", {}), ("Finish", {"return_type": "give_answer"}))]
    assert numbered["tools"][0] == {"type": "function", "function": {"name": "tool_1"}}
    assert numbered["tools"][1]["function"] == {"name": "tool_2", "description": "math.add adds", "parameters": {
        "type": "object", "properties": {"arg_1": {"type": "integer"}, "arg_2": {"type": "integer"}},
        "required": ["arg_2"]}}
    assert numbered["tools"][2] == finish and numbered["id"] == "x"
    assert numbered["possible_answer"] == [{"tool_1": {}}, {"tool_2": {"arg_2": [1], "arg_1": [2, ""]}}]
    for functions, answers, calls in bfcl(shared):  # what was right stays right
        row = number_names({"messages": [user("go"), said(None, *((c["name"], c["arguments"]) for c in calls))],
                            "tools": [{"type": "function", "function": each} for each in functions],
                            "possible_answer": answers})
        made = [call["function"] for call in row["messages"][-1]["tool_calls"]]
        assert ast_score(made, [tool["function"] for tool in row["tools"]], row["possible_answer"]) == 1


def test_the_flags_of_the_command(shared, tmp_path, capsys):
    bfcl, bench, out = shared / "data/bfcl", shared / "data/toolbench", tmp_path / "out.jsonl"
    multiple = bfcl / "BFCL_v4_multiple.json"
    run(capsys, "bfcl", multiple, out)
    plain = read(out)
    assert "60 written" in run(capsys, "bfcl", multiple, out, "--number-names")
    assert all(tool["function"]["name"].startswith("tool_") for row in read(out) for tool in row["tools"])
    assert "120 written" in run(capsys, "bfcl", multiple, out, "--shuffle-tools", "--recovery", 1)
    rows = read(out)
    assert [row["messages"] for row in rows[:60]] == [row["messages"] for row in plain]
    assert sum(row["tools"] != other["tools"] for row, other in zip(rows, plain)) > 50
    for row in rows:
        encode_row(row, "row", BYTES, "plain")
        check_trajectory(row["messages"] if "messages" in row else row["completion"][-1:] and row["prompt"][:1] +
                         row["completion"], row["tools"])
    answers = sorted((bench / "answer").glob("*.json"))
    run(capsys, "toolbench", *answers, out)
    assert "sales@act.nc" in out.read_text() and "+687 27.25.92" in out.read_text()
    run(capsys, "toolbench", *answers, out, "--scrub")
    assert "@act.nc" not in out.read_text() and "+687" not in out.read_text() and "<email-1>" in out.read_text()
    assert "3 rows, 1 converted, 2 refused" in run(capsys, "toolbench", *answers, out, "--min-quality", 0.95), (
        "one of the two asks for the same thing twice")
    assert "5 rows, 5 converted" in run(capsys, "toolbench", bench / "instruction/G1_query.json", out, "--prompts")
    task = read(out)[0]
    assert [tool["function"]["name"] for tool in task["tools"]] == ["checkhealth_for_squake", "projects_for_squake"]
    with pytest.raises(UserError, match="none of the 1 rows"):
        run(capsys, "toolbench", bench / "answer/G2_127.json", out, "--pairs")
