"""Ready for RL? Each measure by hand, the borders of each line, and the command on real runs."""

import json
import math
import operator
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from test_trainers import signals_return  # noqa: F401  (fixtures)

import minirl.evaluate
import train_sft
from minirl.adapters import open_policy
from minirl.checkpoint import save_model
from minirl.config import UserError
from minirl.data.dataset import collate, read_rows
from minirl.env import GSM8K, Addition, Calculator
from minirl.env.base import Example, SingleTurn, Step
from minirl.evaluate import Config, main
from minirl.graduate import (
    CHECKS,
    checklist,
    common_subsequence,
    format_rate,
    is_ready,
    last_range,
    loss_measures,
    losses,
    pair_diversity,
    report,
    sample_measures,
    similarity,
    tool_format_rate,
    unique_ratio,
)
from minirl.logprobs import token_logprobs
from minirl.model import ModelConfig, Transformer
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer

REPO = Path(__file__).resolve().parents[1]


# ---- samples ----

@pytest.mark.parametrize(("groups", "ratio"), [
    ([[[7], [7], [7], [7]]], 0.25),
    ([[[7], [8], [9], [1]]], 1.0),
    ([[[7, 8], [8, 7], [7, 8], [7]]], 0.75),  # the order counts, and so does the length
    ([[[7], [7]], [[7], [8]]], 0.75),  # a mean over the prompts
    ([[[], []]], 0.5),
])
def test_unique_ratio_by_hand(groups, ratio):
    assert unique_ratio(groups) == ratio


@pytest.mark.parametrize(("a", "b", "common"), [
    ("", "", 0), ("", "ab", 0), ("ab", "", 0), ("ab", "ba", 1), ("abc", "ac", 2), ("aaaa", "aa", 2),
    ("abcbdab", "bdcaba", 4), ("xaxbxc", "abc", 3), ("ab", "cd", 0),
])
def test_longest_common_subsequence_by_hand(a, b, common):
    a, b = list(map(ord, a)), list(map(ord, b))
    assert common_subsequence(a, b) == common_subsequence(b, a) == common
    assert similarity(a, b) == (2 * common / (len(a) + len(b)) if a or b else 1.0)


def test_longest_common_subsequence_as_the_textbook_has_it():
    rng = Random(0)
    for _ in range(100):
        a, b = ([rng.randrange(rng.choice([2, 5, 40])) for _ in range(rng.randrange(150))] for _ in range(2))
        above = [0] * (len(b) + 1)
        for x in a:
            row = [0]
            for j, y in enumerate(b):
                row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
            above = row
        assert common_subsequence(a, b) == above[-1]


@pytest.mark.parametrize(("groups", "diversity"), [
    ([[[1, 2], [1, 2], [1, 3]]], (0 + 0.5 + 0.5) / 3),
    ([[[1, 2], [1, 2], [1, 3]], [[], [], []]], 1 / 6),
    ([[[], [5]]], 1.0),
    ([[[1, 2, 3], [1, 3]]], 1 - 4 / 5),
])
def test_pair_diversity_by_hand(groups, diversity):
    assert pair_diversity(groups) == pytest.approx(diversity, abs=1e-15)


def test_samples_are_what_the_policy_chose_without_the_end_of_text():
    #                     prompt   chosen        forced  chosen EOS
    tokens = torch.tensor([[1, 2, 5, 6, 3, 7, 9], [1, 2, 5, 6, 4, 7, 9], [1, 2, 9, 0, 0, 0, 0], [1, 2, 8, 8, 8, 8, 8]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    steps = [[{"tool_call": True}, {"tool_call": None, "format": True}], [{"tool_call": False}, {"format": False}],
             [{"format": True, "tool_call": None}], [{"format": True, "tool_call": True}]]
    ids = torch.arange(4)
    rollout = Rollout(tokens, mask, torch.tensor([7, 7, 3, 7]), ids // 2, ids,
                      finished=torch.tensor([True, True, True, False]),
                      turns=[[SimpleNamespace(info=info) for info in row] for row in steps])
    before = tokens.clone()
    assert sample_measures(rollout, 2, {9}) == {
        "format": 0.5,  # the second cannot be read, the last was cut
        "tool_format": pytest.approx(2 / 3),
        "unique_ratio": 0.75,  # the first two differ in what the tool said, which is not the policy's; [] and [8...]
        "pair_diversity": 0.5,
    }
    assert torch.equal(tokens, before)
    plain = rollout.replace(turns=[])  # prompts of rows: no environment, no steps
    assert sample_measures(plain, 2, {9}) | {"unique_ratio": 0, "pair_diversity": 0} == {
        "format": 0.75, "tool_format": "no tools here", "unique_ratio": 0, "pair_diversity": 0}
    turn = sample_measures(plain, 2, {9, 7, 8})  # 7 and 8 end a turn, and what was sampled behind them does not count
    assert turn["format"] == 1.0 and turn["unique_ratio"] == turn["pair_diversity"] + 0.5 == 0.5


def test_format_and_tool_format_by_hand():
    assert format_rate([True, True, False, True], [[{"format": True}], [{"format": False}], [{"format": True}],
                                                   [{}, {"format": True}]]) == 0.5
    assert format_rate([True, False], [[{}], [{}]]) == 0.5, "a task that says nothing: the end counts"
    assert format_rate([False], [[]]) == 0.0
    assert tool_format_rate([[{"tool_call": None}], [{"tool_call": None}]]) == 0.0, "nobody called"
    calls = [[{"tool_call": True}, {"tool_call": False}], [{"tool_call": True}, {"tool_call": None}]]
    assert tool_format_rate(calls) == pytest.approx(2 / 3)
    assert tool_format_rate([[{}], []]) == "no tools here"


@pytest.mark.parametrize(("task", "action", "readable"), [
    ("addition", "95", True), ("addition", "96\n", True), ("addition", "", False), ("addition", "9 5", False),
    ("addition", "95.", False), ("addition", "٣", False),
    ("gsm8k", "so 5 #### 7", True), ("gsm8k", "it is 7", True), ("gsm8k", "#### 7 #### 8", False), ("gsm8k", "", False),
    ("calculator", "352", True), ("calculator", "-3.5", True), ("calculator", "~300", False), ("calculator", "", False),
])
def test_an_answer_can_be_read_whether_or_not_it_is_right(task, action, readable, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(2 * '{"question": "3+4?", "answer": "#### 7"}\n')
    file.write_text(file.read_text() + '{"question": "2+4?", "answer": "#### 6"}\n')
    env = {"addition": Addition, "calculator": Calculator, "gsm8k": lambda: GSM8K(str(file))}[task]()
    step = env.reset(Example("3+4?", "7")).step(action)
    assert step.done and step.info["format"] is readable
    assert SingleTurn("", lambda action: 0.0).step("any") == Step("", 0.0, True, {"format": True})


@pytest.mark.parametrize(("action", "call"), [
    ("<calc>1+2</calc>", True), ("<calc>1+</calc>", False), ("<calc>1/0</calc>", False), ("<calc>1+2", False),
    ("1+2</calc>", False), ("<calc></calc>", False), ("3", None), ("", None),
])
def test_a_tool_call_counts_from_its_first_mark_on(action, call):
    for max_turns in (1, 3):  # the last action may call too
        assert Calculator(max_turns=max_turns).reset(Example("1+2=", "3")).step(action).info["tool_call"] is call


# ---- curves ----

@pytest.mark.parametrize(("values", "expected"), [
    ([9.0, 1.0, 1.005, 1.009], 0.009),
    ([1.0, 1.2, 0.9], 0.3),
    ([math.nan, 1.0, 1.0, 1.0], 0.0),  # long ago
    ([1.0, 1.0], math.nan), ([1.0], math.nan), ([], math.nan),
    ([math.nan, 1.0, 1.0], math.nan), ([1.0, math.nan, 1.0], math.nan), ([1.0, 1.0, math.nan], math.nan),
    ([1.0, math.inf, 1.0], math.nan), ([math.inf] * 3, math.nan),
])
def test_the_range_of_the_last_three(values, expected):
    assert last_range(values) == pytest.approx(expected, nan_ok=True)


def test_a_training_loss_is_the_mean_since_the_evaluation_before():
    history = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0, "eval/loss": 1.5}, {"step": 3, "loss": 1.0},
               {"step": 4, "loss": 3.0}, {"step": 5, "loss": 2.0, "eval/loss": 1.25}, {"step": 6, "loss": 9.0}]
    assert losses(history) == ([1.5, 1.25], [3.0, 2.0])
    assert loss_measures([]) == loss_measures([{"step": 1, "loss": 1.0}]) == {
        "eval_loss_range": "no history", "train_loss_range": "no history"}
    once = loss_measures(history[:3])
    assert all(math.isnan(value) for value in once.values()), "one evaluation is a history, and shows nothing flat"
    nan = [{"step": 0, "loss": loss, "eval/loss": 1.0} for loss in (1.0, math.nan, 1.0)]
    assert loss_measures(nan)["eval_loss_range"] == 0.0 and math.isnan(loss_measures(nan)["train_loss_range"])


# ---- the checklist ----

GOOD = {"eval_loss_range": 0.01, "format": 0.9, "tool_format": 0.85, "accuracy": 0.31, "baseline": 0.3,
        "unique_ratio": 0.5, "pair_diversity": 0.6, "gap": 0.149, "train_loss_range": 0.01}
BAD = {"eval_loss_range": 0.0101, "format": 0.899, "tool_format": 0.849, "accuracy": 0.3, "unique_ratio": 0.499,
       "pair_diversity": 0.599, "gap": 0.15, "train_loss_range": 0.0101}


def test_at_its_threshold_a_model_is_ready():
    results = checklist(GOOD)
    assert [result.passed for result in results] == [True] * len(CHECKS) and is_ready(results)
    assert report(results).splitlines()[-1] == "ready for RL"
    assert checklist(GOOD | {"gap": -1.0})[6].passed, "better on held-out rows than on its own"


@pytest.mark.parametrize("measure", BAD)
def test_each_line_alone_keeps_a_model_from_being_ready_and_says_what_to_change(measure):
    for value in (BAD[measure], math.nan):
        results = checklist(GOOD | {measure: value})
        (failed,) = [result for result in results if not result.passed]
        assert failed.check.measure == measure and not is_ready(results)
        lines = report(results).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
        assert failed.check.name in lines[at] and " not " in lines[at]
        remedy = " ".join(line.strip() for line in lines[at + 1 :] if line.startswith("      "))
        assert remedy == failed.check.remedy or (math.isnan(value) and remedy.startswith("not a number: fewer than 3"))
        assert lines[-1] == "not ready: 1 of 8 lines fail" and max(map(len, lines)) <= 110


def test_what_was_not_measured_neither_passes_nor_fails():
    results = checklist(GOOD | {"tool_format": "no tools here", "eval_loss_range": "no history"})
    assert is_ready(results) and [result.passed for result in results].count(None) == 2
    text = report(results)
    assert text.endswith("ready for RL (2 not measured)") and "-     tool-call format         no tools here" in text
    assert not is_ready(checklist({})), "nothing measured is not ready"


def test_remedies_name_flags_that_exist():
    flags = {"--" + name.replace("_", "-") for config in (train_sft.Config, Config)
             for name in config.__dataclass_fields__}
    for check in CHECKS:
        words = check.remedy.replace("(", " ").replace(")", " ").replace(",", " ").replace(".", " ").split()
        assert {word for word in words if word.startswith("--")} <= flags
        assert check.relation in (operator.le, operator.lt, operator.ge, operator.gt)


# ---- the command ----

TINY = dict(device="cpu", difficulty=1, hidden_size=16, layers=1, batch_size=16, lr=1e-2, warmup_steps=2, eval_every=4,
            eval_problems=8, eval_rows=20, save_every=4, keep=9, steps=12)
FEW = dict(device="cpu", eval_problems=8, eval_rows=20, prompts=2, samples=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "run"
    train_sft.main(train_sft.Config(run_dir=str(folder), context=48, **TINY))
    return folder


def answer(capsys, **options) -> tuple[int, str]:
    capsys.readouterr()
    return main(Config(**FEW | options)), capsys.readouterr().out


def line(text: str, name: str) -> str:
    (found,) = [row for row in text.splitlines() if re.match(rf"(pass|FAIL|-)?\s*{name}", row)]
    return found


def test_a_run_is_measured_as_it_was_trained(run, capsys):
    code, text = answer(capsys, folder=str(run))
    last = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert code == 0 and text.startswith(f"{run}/step_12 on addition\n")
    assert float(line(text, "eval/loss").split()[1]) == pytest.approx(last["eval/loss"], rel=1e-3)
    assert float(line(text, "eval/accuracy").split()[1]) == pytest.approx(last["eval/accuracy"])


def test_graduate_prints_every_line_and_the_exit_code_is_the_verdict(run, capsys, monkeypatch):
    code, text = answer(capsys, folder=str(run), graduate=True)
    assert code == 1 and all(check.name in text for check in CHECKS)
    assert "2 x 3 samples at temperature 0.7: " in text and "not ready: " in text
    assert "no tools here" in line(text, "tool-call format") and "FAIL" in line(text, "validation loss flat")
    monkeypatch.setattr(minirl.evaluate, "checklist", lambda measured: checklist(GOOD))
    assert answer(capsys, folder=str(run), graduate=True)[0] == 0


def test_a_step_of_a_run_has_the_history_up_to_itself_and_a_model_alone_has_none(run, capsys, tmp_path):
    _, text = answer(capsys, folder=str(run / "step_8"), graduate=True)
    assert "nan" in line(text, "validation loss flat"), "two evaluations"
    (tmp_path / "model").symlink_to(run / "step_8")
    _, alone = answer(capsys, folder=str(tmp_path / "model"), task="addition", difficulty=1, graduate=True)
    assert "no history" in line(alone, "validation loss flat") and "no history" in line(alone, "training loss flat")
    for name in ("eval/loss", "train/loss", "eval/accuracy", "format", "pair diversity"):
        assert line(alone, name) == line(text, name)


def test_the_baseline_is_a_number_a_model_or_where_the_run_started(run, capsys, tmp_path, monkeypatch):
    opened = []

    def record(folder, *rest):
        opened.append(Path(folder))
        return open_policy(folder, *rest)

    monkeypatch.setattr(minirl.evaluate, "open_policy", record)
    monkeypatch.setattr(minirl.evaluate, "evaluate", lambda *_: {"eval/accuracy": 0.5 + len(opened) / 100})

    def threshold(folder, **options):
        opened.clear()
        text = answer(capsys, folder=str(folder), graduate=True, **options)[1]
        return float(line(text, "accuracy above").split()[-5])

    assert threshold(run) == 0.0 and opened == [run / "step_12"], "from nothing"
    assert threshold(run, baseline_accuracy=0.25) == 0.25 and len(opened) == 1
    assert threshold(run, baseline=str(run / "step_4")) == 0.52 and opened[1:] == [run / "step_4"]
    more = tmp_path / "more"
    train_sft.main(train_sft.Config(run_dir=str(more), init=str(run / "step_12"), **TINY | {"steps": 1}))
    assert threshold(more) == 0.52 and opened == [more / "step_1", run / "step_12"]
    (run / "step_12").rename(more / "step_0")  # as train_grpo.py keeps it, which may have made it in a cold start
    try:
        with pytest.raises(UserError, match="step_12, is not there: give --baseline, or --baseline-accuracy"):
            threshold(more)
        config = json.loads((more / "config.json").read_text()) | {"init": ""}
        (more / "config.json").write_text(json.dumps(config))
        assert threshold(more) == 0.52 and opened == [more / "step_1", more / "step_0"]
    finally:
        (more / "step_0").rename(run / "step_12")


@pytest.fixture(scope="module")
def rows_run(tmp_path_factory) -> Path:
    """SFT on a file of rows that are additions."""
    folder = tmp_path_factory.mktemp("rows")
    problems = Addition(1).sample(40)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": p.prompt, "completion": p.answer}) + "\n"
                                               for p in problems))
    train_sft.main(train_sft.Config(run_dir=str(folder / "run"), **TINY | {
        "task": "jsonl", "data": str(folder / "rows.jsonl"), "train_rows": 10, "epochs": 3.0}))
    return folder / "run"


def test_a_run_on_rows_has_losses_and_samples_and_no_accuracy(rows_run, capsys):
    text = answer(capsys, folder=str(rows_run), graduate=True)[1]
    assert "eval/accuracy" not in text and "not measured" in line(text, "accuracy above")
    assert "at temperature" not in text and re.search("[0-9] >= 0.6|[0-9] not >= 0.6", line(text, "pair diversity"))


def test_plain_texts_have_losses_alone(run, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text(20 * '{"text": "1+2=3"}\n')
    text = answer(capsys, folder=str(run), task="jsonl", data=str(path), graduate=True)[1]
    assert "not measured" in line(text, "format") and "not measured" in line(text, "unique samples")
    assert float(line(text, "train-validation gap").split()[3]) == 0.0, "the rows asked for, and not the run's"
    shutil.copytree(run / "step_12", tmp_path / "foreign")
    (tmp_path / "foreign/chat_template.jinja").write_text("{{ '[INST]' }}")
    assert "eval/loss" in answer(capsys, folder=str(tmp_path / "foreign"), task="jsonl", data=str(path))[1]


def test_the_gap_is_by_how_much_held_out_rows_are_worse(rows_run, capsys):
    text = answer(capsys, folder=str(rows_run), graduate=True)[1]
    trained, held_out = (float(line(text, name).split()[1]) for name in ("train/loss", "eval/loss"))
    assert float(line(text, "train-validation gap").split()[3]) == pytest.approx(held_out - trained, abs=2e-3)
    policy, tokenizer = open_policy(rows_run / "step_2"), ByteTokenizer()
    rows = read_rows(str(rows_run.parent / "rows.jsonl"), "", tokenizer, "plain", 0, 0, 10)
    for expected, batch in ((trained, collate(rows.train, 257)), (held_out, collate(rows.eval, 257))):
        loss = -token_logprobs(policy, batch.tokens)[batch.action_mask].mean().item()
        assert loss == pytest.approx(expected, rel=1e-3)


def test_another_task_is_asked_and_the_loss_stays_that_of_the_rows_learnt(rows_run, capsys):
    plain = answer(capsys, folder=str(rows_run))[1]
    other = answer(capsys, folder=str(rows_run), task="addition")[1]
    assert "eval/accuracy" in other and line(other, "eval/loss") == line(plain, "eval/loss")
    assert line(other, "train/loss") == line(plain, "train/loss")


def test_the_training_rows_are_those_that_were_learnt(rows_run, capsys, monkeypatch):
    seen = {}

    def record(policy, data, rows, mesh, size, split="eval"):
        seen[split] = data.size(split)
        return {f"{split}/loss": 1.0}

    monkeypatch.setattr(minirl.evaluate, "evaluate_loss", record)
    answer(capsys, folder=str(rows_run))
    assert seen == {"train": 10, "eval": 4}


@pytest.mark.parametrize(("options", "complaint"), [
    ({"folder": "gone"}, "gone is a model alone: say with --task"),
    ({"folder": "gone", "task": "addition"}, "model folder gone does not exist"),
    ({"folder": "empty"}, "empty holds no complete checkpoint yet"),
    ({"folder": "model", "task": "jsonl"}, "--task jsonl reads a file: give --data FILE"),
])
def test_what_cannot_be_measured_is_one_line(tmp_path, monkeypatch, options, complaint):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("empty/metrics.jsonl").touch()
    tokenizer = ByteTokenizer()
    save_model(Transformer(ModelConfig(258, 8, 8, 1, 1, max_position_embeddings=32)).init_weights(
        torch.Generator().manual_seed(0)), "model", tokenizer)
    with pytest.raises(UserError) as error:
        main(Config(device="cpu", **options))
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(UserError, match="--samples 1"):
        Config("runs/sft", samples=1)


def test_from_a_shell_the_exit_code_says_ready_or_not_or_wrong(run):
    command = [sys.executable, "-m", "minirl.evaluate"]
    options = "--graduate --device cpu --eval-problems 8 --prompts 2".split()
    jobs = {1: [*command, str(run), *options], 2: [*command, "--graduate"]}
    started = {code: subprocess.Popen(job, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for code, job in jobs.items()}
    for code, job in started.items():
        out, err = job.communicate(timeout=200)
        assert job.returncode == code, err
        assert (code == 1) == ("not ready" in out) and err.count("\n") == (code == 2)
