"""docs/gsm8k.md as it is written: its commands, taken out of the page and run in order, with fewer steps.

    python tests/test_gsm8k_project.py FOLDER        the whole of it, nothing made smaller
"""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter

import pytest
import torch

from minirl.checkpoint import load_model
from minirl.metrics import read_metrics
from minirl.tokenizer import load_tokenizer

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs/gsm8k.md"
FEWER = {"rows": "20", "steps": "2", "warmup-steps": "1", "eval-every": "1", "save-every": "2", "eval-problems": "2",
         "prompts-per-step": "2", "group-size": "2", "batch-size": "4", "eval-rows": "4"}
SHORTER = {"minirl.evaluate": "--prompts 2 --samples 2 --max-new-tokens 16 --eval-rows 4",
           "minirl.compare": "--problems 2", "minirl.chat": "--max-new-tokens 16",
           "train_grpo": "--max-new-tokens 16", "train_sft": "--max-new-tokens 16"}


def commands(text: str) -> list[str]:
    """What a page tells its reader to type: indented lines that begin with `python`, and those that continue them."""
    joined = re.sub(r" *\\\n +", " ", text)
    return re.findall(r"^    (python .+)$", joined, re.MULTILINE)


def words(command: str) -> list[str]:
    """The arguments as a shell passes them, $'...' and all."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def fewer(argv: list[str]) -> list[str]:
    """The same command with small numbers. The steps of word_problems are the events of a story, not of training."""
    argv = [re.sub(r"step_\d+", "step_2", word) for word in argv]
    for i, word in enumerate(argv):
        name = word.removeprefix("--")
        if word.startswith("--") and name in FEWER and not (name == "steps" and "minirl.data.word_problems" in argv):
            argv[i + 1] = FEWER[name]
    return [*argv, *SHORTER.get(stage(argv), "").split()]


def run_here(argv: list[str], monkeypatch) -> None:
    """`python ...` without another interpreter. Exit code 1 says that a model is not ready for RL: no failure."""
    module = argv[1] == "-m"
    monkeypatch.setattr(sys, "argv", argv[2 if module else 1:])
    try:
        if module:
            runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(REPO / argv[1]), run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, None) or (end.code == 1 and "--graduate" in argv), argv


def project() -> list[list[str]]:
    """The commands of the page before the last part, which is about larger machines."""
    return [words(command) for command in commands(PAGE.read_text(encoding="utf-8").partition("## The real thing")[0])]


def stage(argv: list[str]) -> str:
    return argv[2] if argv[1] == "-m" else argv[1].removesuffix(".py")


def test_the_page_has_every_stage_in_order():
    assert [stage(argv) for argv in project()] == [
        "minirl.data.word_problems", "minirl.data.word_problems", "minirl.data.convert", "minirl.data.convert",
        "train_sft", "train_sft", "minirl.evaluate", "train_grpo", "minirl.plot", "minirl.view", "minirl.compare",
        "minirl.merge", "minirl.chat"]
    assert commands("    python a.py \\\n        --b c\n\n    {json}\ntext python x") == ["python a.py --b c"]


AGAIN = pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # of runpy: a module is run that is imported too


@pytest.fixture(scope="module", params=["word problems", "stories260k"])
def made(request, tmp_path_factory):
    """A folder in which all commands have been run, and what they printed; with stories260k on GSM8K's own rows."""
    folder, printed = tmp_path_factory.mktemp("project"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        for argv in map(fewer, project()):
            if request.param == "stories260k":
                argv = on_real_rows(argv, request.getfixturevalue("shared"))
            if argv:
                run_here(argv, patch)
    return folder, printed.getvalue()


def on_real_rows(argv: list[str], shared: Path) -> list[str]:
    """The command with GSM8K's own rows and a pretrained model in place of what the first steps make."""
    if stage(argv) == "minirl.data.word_problems":  # the first rows, in files of the same names
        name = Path(argv[3])
        name.parent.mkdir(exist_ok=True)
        rows = (shared / "data/gsm8k" / name.name).read_text(encoding="utf-8").splitlines()
        name.write_text("\n".join(rows[:20]) + "\n", encoding="utf-8")
        return []
    if "--hidden-size" in argv:
        argv = [*argv, "--init", str(shared / "models/stories260k")]
    return [*argv, "--drop-long-rows"] if stage(argv) in ("train_sft", "train_grpo", "minirl.evaluate") else argv


@AGAIN
def test_the_commands_run_in_order_and_leave_a_model(made):
    folder, printed = made
    assert {path.name for path in (folder / "runs").iterdir()} == {"base", "sft", "grpo"}
    rows = read_metrics(folder / "runs/grpo/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and "reward/accuracy" in rows[-1]
    assert (folder / "runs/grpo/rollouts.html").is_file()
    assert (folder / "runs/grpo/step_2/adapter_config.json").is_file()
    assert re.search(r"base/step_2 +sft/step_2 +grpo/step_2\naccuracy ", printed), "the table of three models"
    assert "ready for RL" in printed or "not ready" in printed
    assert load_tokenizer(folder / "model").encode("12+7") and load_model(folder / "model").config


@AGAIN
def test_the_exported_folder_is_the_same_model_in_transformers(made):
    transformers = pytest.importorskip("transformers")
    folder, text = made[0] / "model", "Question: Ann has 12 pens. Ann gets 7 more.\nAnswer:"
    ids, ours = load_tokenizer(folder).encode(text), load_model(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"] == ids
    with torch.no_grad():
        tokens = torch.tensor([ids])
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def run_all(folder: str) -> None:
    """Every command by itself, as a reader types them, with its seconds."""
    Path(folder).mkdir(parents=True)
    began = perf_counter()
    for argv in project():
        start = perf_counter()
        print("\n$", *argv, flush=True)
        place = str(REPO / argv[1]) if argv[1] != "-m" else "-m"
        code = subprocess.run([sys.executable, place, *argv[2:]], cwd=folder,
                              env=os.environ | {"PYTHONPATH": str(REPO)}).returncode
        assert code == 0 or (code == 1 and "--graduate" in argv), code
        print(f"[{perf_counter() - start:.0f} s, {perf_counter() - began:.0f} in all]", flush=True)


if __name__ == "__main__":
    run_all(*sys.argv[1:])
