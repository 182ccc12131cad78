"""The trainers as people run them: they learn, they resume to the bit, and they refuse bad input in one line."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from ranks import at_once, run_ranks, start
from safetensors.torch import load_file, save_file

import minirl.evaluate
import minirl.parallel.mesh
import minirl.start
import train_dpo
import train_grpo
import train_ppo
import train_sft
from minirl.adapters import save_adapter
from minirl.checkpoint import load_checkpoint, load_model, save_model
from minirl.config import cli, field_comments, run
from minirl.env import make_env
from minirl.env.loop import demonstrate
from minirl.lora import add_lora
from minirl.metrics import MetricsLogger, read_metrics
from minirl.reward_model import reward_model_of
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer, load_tokenizer

dist = pytest.mark.dist
REPO = Path(__file__).resolve().parents[1]
TRAINERS = {"train_sft": train_sft, "train_dpo": train_dpo, "train_ppo": train_ppo, "train_grpo": train_grpo}
SFT_CONFIG = train_sft.Config
TINY = dict(device="cpu", difficulty=1, eval_problems=8)
SFT = TINY | dict(hidden_size=32, layers=2, steps=60, batch_size=64, microbatch_size=32, lr=1e-2, warmup_steps=5,
                  save_every=25, eval_every=30, eval_rows=0)
GRPO = TINY | dict(steps=25, prompts_per_step=32, group_size=8, minibatches=1, lr=3e-3, schedule="constant", keep=1,
                   save_every=8, eval_every=15)


@pytest.fixture(autouse=True)
def signals_return():
    """A trainer that leaves with an error has not given the signals back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory, sft_run) -> Path:
    return grpo(tmp_path_factory.mktemp("grpo") / "run", sft_run, **GRPO)


def grpo(folder: Path, sft_run: Path, **options) -> Path:
    train_grpo.main(train_grpo.Config(run_dir=str(folder), init=str(sft_run / "step_60"), **options))
    return folder


def numbers(run: Path) -> list[dict]:
    """metrics.jsonl without the clock."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint, whole."""
    return load_file(run / f"step_{step}/model.safetensors") | load_checkpoint(run / f"step_{step}")[0]


def assert_same_run(run: Path, unbroken: Path, step: int) -> None:
    """To the bit."""
    assert numbers(run) == numbers(unbroken)
    ours, theirs = weights(run, step), weights(unbroken, step)
    assert ours.keys() == theirs.keys() and len(theirs) > 30
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step_*"))


# ---- options ----

@pytest.mark.parametrize("name", TRAINERS)
def test_every_option_has_a_line_of_help_and_help_shows_it_with_its_default(name, capsys):
    config = TRAINERS[name].Config
    for option, (group, text) in field_comments(config).items():
        assert group and len(text) > 5, f"{option} has no comment behind it"
    with pytest.raises(SystemExit) as done:
        cli(config, ["--help"], TRAINERS[name].__doc__)
    assert done.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(config):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "(default: 0.2)" in shown or name in ("train_sft", "train_dpo")


def test_flags_named_in_the_docs_exist():
    commands = [importlib.import_module(".".join(file.relative_to(REPO).with_suffix("").parts))
                for file in (REPO / "minirl").rglob("*.py") if '__name__ == "__main__"' in file.read_text()]
    commands.append(importlib.import_module("minirl.terminal"))  # of `python -m minirl.chat`
    known = {f"--{no}{field.name.replace('_', '-')}" for module in (*TRAINERS.values(), *commands)
             for options in vars(module).values() if dataclasses.is_dataclass(options)
             for field in dataclasses.fields(options)
             for no in (("", "no-") if "bool" in str(field.type) else ("",))}
    for file in (*(module.__file__ for module in commands), *(REPO / "benchmarks").glob("*.py")):
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', Path(file).read_text()))  # by argparse
    others = {"--metrics", "--out", "--help", "--nproc_per_node", "--standalone", "--nnodes", "--node_rank",
              "--master_addr", "--master_port"}  # of plot and torchrun
    for page in (REPO / "docs").glob("*.md"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
        assert flags <= known | others, f"{page.name} names {flags - known - others}"


def test_from_a_shell_help_ends_with_0_and_a_wrong_value_with_2_and_one_line():
    commands = {"train_sft.py --help": 0, "train_grpo.py --help": 0, "train_grpo.py --group-size 1": 2}
    jobs = [subprocess.Popen([sys.executable, *command.split()], cwd=REPO, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) for command in commands]
    for job, code in zip(jobs, commands.values()):
        out, err = job.communicate(timeout=200)
        assert job.returncode == code, err
        if code:
            assert re.fullmatch(r"error: --group-size 1: .* at least 2\n", err) and not out
        else:
            assert "--resume" in out and not err


def refusal(trainer, *flags: str) -> tuple[int, str]:
    """Exit code and what went to stderr."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            run(trainer.main, trainer.Config, argv=["--device", "cpu", *flags])
        except SystemExit as end:
            return end.code, stderr.getvalue()
    return 0, stderr.getvalue()


def assert_refused(trainer, flags: list[str], message: str, run_dir: Path) -> None:
    """One line, exit code 2, and not even a folder made."""
    code, text = refusal(trainer, "--run-dir", str(run_dir), *flags)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1, text
    assert re.search(message, text), text
    assert not run_dir.exists(), "work began before the input was checked"


BAD_VALUES = [
    ("train_grpo", "--gruop-size 4", "unknown flag --gruop-size; did you mean --group-size"),
    ("train_sft", "--batchsize 4", "unknown flag --batchsize; did you mean --batch-size"),
    ("train_grpo", "--steps many", "--steps.*invalid int value: 'many'"),
    ("train_grpo", "--advantage-scale mean", "invalid choice: 'mean'.*'std'.*'none'"),
    ("train_grpo", "--group-size 1", "--group-size 1: .* at least 2"),
    ("train_grpo", "--minibatches 3 --prompts-per-step 4 --group-size 2", "--minibatches 3 does not divide the 4 x 2"),
    ("train_grpo", "--temperature 0", "--temperature is 0.0: it must be above 0"),
    ("train_grpo", "--temperature inf", "--temperature: inf is not a finite number"),
    ("train_grpo", "--seed 99999999999999999999", "--seed is 99999999999999999999: it must lie between 0 and"),
    ("train_sft", "--seed -1", "--seed is -1: it must lie between 0 and"),
    ("train_grpo", "--lr nan", "--lr: nan is not a finite number"),
    ("train_dpo", "--nll-coef nan", "--nll-coef: nan is not a finite number"),
    ("train_grpo", "--tp 0", "--tp 0: .* give 1 or more"),
    ("train_grpo", "--tp -1 --pp -1", "--pp -1: .* give 1 or more"),
    ("train_grpo", "--dp -1", "--dp -1: give the number of replicas, or 0"),
    ("train_grpo", "--difficulty 1000000", "difficulty 1000000: addition .* 1000 at most"),
    ("train_grpo", "--difficulty 14 --task calculator", "difficulty 14: calculator .* 13 at most"),
    ("train_grpo", "--steps 0", "--steps is 0"),
    ("train_grpo", "--max-rows 0", "--max-rows is 0"),
    ("train_grpo", "--max-new-tokens -1", "--max-new-tokens is -1: it must be 0 or above"),
    ("train_grpo", "--kl-coef -1", "--kl-coef is -1.0"),
    ("train_grpo", "--dtype float16", "--dtype float16 is unknown: use auto, float32"),
    ("train_grpo", "--device gpu", "--device gpu cannot be used here.*try cpu"),
    ("train_grpo", "--task addtion", 'task "addtion" is unknown, did you mean "addition"'),
    ("train_grpo", "--difficulty 0", "difficulty 0"),
    ("train_grpo", "--task gsm8k", "give --data FILE"),
    ("train_grpo", "--task gsm8k --data nowhere.jsonl", "cannot read nowhere.jsonl: No such file"),
    ("train_sft", "--task gsm8k --data nowhere.jsonl", "cannot read nowhere.jsonl: No such file"),
    ("train_grpo", "--data rows.jsonl", "task addition makes its own problems"),
    ("train_grpo", "--drop-long-rows", "leave --drop-long-rows out"),
    ("train_grpo", "--init nowhere", "nowhere"),
    ("train_grpo", "--replay nowhere", "no rollout at nowhere: write one with --save-rollouts"),
    ("train_sft", f"--run-dir {__file__}/run", r"--run-dir .* cannot be made: .*test_trainers\.py is a file"),
    ("train_sft", "--patience 2 --eval-every 0", "--patience counts evaluations: give --eval-every"),
    ("train_sft", "--context 6", r"needs \d+ tokens, but the model's context is 6"),
    ("train_sft", "--heads 4 --kv-heads 3", "4 is not a multiple of num_key_value_heads 3"),
    ("train_sft", "--hidden-size 20 --heads 4", "head_dim 5 is odd"),
    ("train_sft", "--layers 0", "--layers is 0"),
]


@pytest.mark.parametrize(("name", "flags", "message"), BAD_VALUES, ids=[f"{n} {f}" for n, f, _ in BAD_VALUES])
def test_a_bad_value_is_one_line_with_exit_code_2_before_any_work(name, flags, message, tmp_path):
    assert_refused(TRAINERS[name], flags.split(), message, tmp_path / "run")


def test_a_folder_that_may_not_be_written_is_known_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write wherever it says no
    assert_refused(train_sft, [], f"--run-dir .*/a/run: you may not write into {tmp_path}; name", tmp_path / "a/run")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_malformed_row_is_named_by_file_and_line(name, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?"}\n')
    assert_refused(TRAINERS[name], ["--task", "gsm8k", "--data", str(data)], r'rows\.jsonl:2: no text under "answer"',
                   tmp_path / "run")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_prompt_longer_than_the_context_is_refused(name, tmp_path, sft_run):
    flags = ["--init", str(sft_run / "step_60"), "--difficulty", "9"]
    assert_refused(TRAINERS[name], flags, r"problem 0 \(.*needs \d+ tokens, but the model's context is \d+",
                   tmp_path / "run")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_without_weights_or_with_a_wrong_shape_is_refused(name, tmp_path, sft_run):
    folder = tmp_path / "checkpoint"
    shutil.copytree(sft_run / "step_60", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(TRAINERS[name], ["--init", str(folder), "--difficulty", "1"],
                   r"model\.norm\.weight.*31.*32|model\.norm\.weight.*32.*31", tmp_path / "run")
    (folder / "model.safetensors").unlink()
    assert_refused(TRAINERS[name], ["--init", str(folder), "--difficulty", "1"], "holds no weights", tmp_path / "run")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_that_writes_no_words_is_no_policy(name, tmp_path, sft_run):
    """A reward model, or the critic of a run, in the place of the policy; also as the base of an adapter."""
    folder = tmp_path / "reward_model"
    model = reward_model_of(load_model(sft_run / "step_60"), torch.Generator().manual_seed(0))
    save_model(model, folder, load_tokenizer(sft_run / "step_60"))
    add_lora(model, rank=2, base_model=str(folder))
    save_adapter(model, tmp_path / "adapter")
    for init in (folder, tmp_path / "adapter"):
        assert_refused(TRAINERS[name], ["--init", str(init), "--difficulty", "1"],
                       f"error: {init} is a reward model or a critic, which gives scores and no words",
                       tmp_path / "run")


@pytest.mark.parametrize("name", ["train_grpo", "train_ppo"])
def test_only_what_a_policy_sampled_can_be_replayed_and_that_is_known_before_a_cold_start(name, tmp_path, sft_run):
    env = make_env("addition", difficulty=1)
    rows = demonstrate(ByteTokenizer(), env, env.sample(4))
    rows.save(tmp_path / "expert.safetensors")
    rows.replace(tokens=rows.tokens + 250, old_logprobs=torch.zeros(rows.action_mask.shape), rewards=torch.ones(4),
                 finished=torch.ones(4).bool()).save(tmp_path / "words.safetensors")
    save_file({"tokens": rows.tokens, "action_mask": rows.action_mask, "lengths": rows.lengths},
              tmp_path / "others.safetensors")
    for file, message in {"expert": "holds no answers that a policy sampled, for old_logprobs, finished, rewards",
                          "words": r"has the token \d+, but the model's vocabulary only 258",
                          "others": r"holds no rollout but \['action_mask', 'lengths', 'tokens'\]"}.items():
        for init in ([], ["--init", str(sft_run / "step_60")]):
            assert_refused(TRAINERS[name], ["--replay", str(tmp_path / f"{file}.safetensors"), *init], message,
                           tmp_path / "run")


def flags_of(config) -> list[str]:
    values = dataclasses.asdict(config)
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if not isinstance(value, bool)]


@pytest.mark.parametrize(("extra", "message"), [
    ([], r"already holds step_60: go on from there with --resume, or start afresh with another --run-dir"),
    (["--resume", "--hidden-size", "16"], r"was started with --hidden-size 32, not 16"),
    (["--resume", "--seed", "1"], r"was started with --seed 0, not 1: resume with the same"),
])
def test_a_folder_that_holds_a_run_is_neither_overwritten_nor_resumed_as_another(extra, message, sft_run):
    before = {path: path.stat().st_mtime_ns for path in sft_run.rglob("*")}
    flags = flags_of(train_sft.Config(run_dir=str(sft_run), **SFT))
    code, text = refusal(train_sft, *flags, *extra)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1 and re.search(message, text), text
    assert {path: path.stat().st_mtime_ns for path in sft_run.rglob("*")} == before


def test_grpo_does_not_resume_from_another_model_or_with_another_objective(grpo_run, sft_run):
    flags = flags_of(train_grpo.Config(run_dir=str(grpo_run), init=str(sft_run / "step_60"), **GRPO))
    for extra in (["--init", str(sft_run / "step_50")], ["--kl-coef", "0.5"]):
        code, text = refusal(train_grpo, *flags, *extra, "--resume")
        assert code == 2 and text.count("\n") == 1 and f"was started with {extra[0]}" in text, text


@dist
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_on_each(tmp_path):
    run_dir = ["--run-dir", str(tmp_path / "run")]
    for trainer, flag in ((train_grpo, "--prompts-per-step"), (train_sft, "--batch-size")):
        for code, text in run_ranks(refusal_of, 2, trainer.__name__, [flag, "5", *run_dir]):
            assert code == 2 and text.count("\n") == 1
            assert re.match(f"error: 5 .* of {flag} do not divide over 2 replicas: use a multiple of 2", text)
    assert not (tmp_path / "run").exists()


def refusal_of(name: str, flags: list[str]) -> tuple[int, str]:
    minirl.parallel.mesh.LATER = 0  # no rank waits for torchrun, which is not there
    return refusal(TRAINERS[name], *flags)


# ---- they learn ----

def test_sft_lowers_its_loss(sft_run):
    losses = [row["loss"] for row in numbers(sft_run)]
    assert len(losses) == 60 and losses[0] > 5 and losses[-1] < 0.8


def test_grpo_raises_its_reward(grpo_run):
    rewards = [row["reward_mean"] for row in numbers(grpo_run) if "reward_mean" in row]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert len(rewards) == 25 and last > first + 0.05, (first, last)


def test_sft_ends_early_at_the_accuracy_asked_for(tmp_path):
    folder = train_sft.main(train_sft.Config(run_dir=str(tmp_path), until_accuracy=0.0, **SFT | dict(eval_every=7)))
    assert folder == tmp_path / "step_7" and numbers(tmp_path)[-1]["step"] == 7


def test_two_runs_of_one_seed_are_equal_to_the_bit_and_another_seed_differs(tmp_path, sft_run):
    train_sft.main(train_sft.Config(run_dir=str(tmp_path / "sft"), **SFT))
    assert_same_run(tmp_path / "sft", sft_run, 60)
    options = GRPO | dict(steps=2)
    first, second = (grpo(tmp_path / name, sft_run, **options) for name in "ab")
    assert_same_run(first, second, 2)
    assert numbers(grpo(tmp_path / "c", sft_run, **options, seed=1)) != numbers(first)


def test_evaluation_comes_before_during_and_after(grpo_run):
    assert [row["step"] for row in numbers(grpo_run) if "eval/accuracy" in row] == [0, 15, 25]


def test_the_first_pass_over_a_fresh_rollout_has_ratio_1(grpo_run, layouts):
    def largest(run: Path) -> float:
        return max(row["ratio_max_deviation"] for row in numbers(run) if row["step"])

    assert largest(grpo_run) <= 1e-5, "float32: sampler and trainer disagree about the policy"
    for folder in layouts.values():
        assert largest(folder) <= 1e-12, "float64"


def test_with_one_update_a_rollout_nothing_is_clipped_and_with_several_the_policy_has_moved(grpo_run, layouts):
    for row in numbers(grpo_run)[1:]:
        assert row["approx_kl"] < 1e-9 and row["clip_frac"] == 0
    for row in numbers(layouts["token", 1])[1:]:
        assert row["approx_kl"] > 1e-5, "2 epochs of 2 minibatches"


# ---- what a run leaves behind ----

def test_the_last_step_is_saved_and_step_0_is_kept_as_the_reference(grpo_run, sft_run):
    assert steps_in(grpo_run) == ["step_0", "step_25"], "--keep 1, besides step_0; 25 is no multiple of 8"
    start = load_file(sft_run / "step_60/model.safetensors")
    for name, tensor in load_file(grpo_run / "step_0/model.safetensors").items():
        assert torch.equal(tensor, start[name])
    assert steps_in(sft_run) == ["step_50", "step_60"]


def test_every_checkpoint_opens_with_load_model(grpo_run, sft_run):
    for folder in [*grpo_run.glob("step_*"), *sft_run.glob("step_*")]:
        model, tokenizer = load_model(folder), load_tokenizer(folder)
        hidden = model(torch.tensor([tokenizer.encode("1+2=")]))
        assert model.logits(hidden).isfinite().all() and model.config.hidden_size == 32


def compiler_after_opening(folder: Path) -> bool:
    del sys.modules["torch._dynamo"], torch._dynamo  # which ranks.py has imported for all that need it
    load_model(folder)
    return "torch._dynamo" in sys.modules


@dist
def test_opening_a_checkpoint_does_not_cost_the_import_of_the_compiler(sft_run):
    assert run_ranks(compiler_after_opening, 1, sft_run / "step_60") == [False]


def test_the_config_of_the_run_is_saved(grpo_run, sft_run):
    saved = json.loads((grpo_run / "config.json").read_text())
    assert saved == dataclasses.asdict(
        train_grpo.Config(run_dir=str(grpo_run), init=str(sft_run / "step_60"), **GRPO))


@pytest.mark.parametrize(("kl_coef", "loads"), [(0.0, 1), (0.1, 2)])
def test_the_reference_is_loaded_only_for_a_kl_term(kl_coef, loads, tmp_path, sft_run, monkeypatch):
    opened = []
    monkeypatch.setattr(minirl.start, "open_policy", lambda *args: opened.append(args) or load_model(*args[:3]))
    grpo(tmp_path / "run", sft_run, **GRPO | dict(steps=1, kl_coef=kl_coef))
    assert len(opened) == loads
    assert ("kl_ref" in numbers(tmp_path / "run")[1]) == (loads == 2)


# ---- ranks ----

LAYOUT = GRPO | dict(dtype="float64", steps=2, prompts_per_step=8, group_size=4, epochs=2, minibatches=2, kl_coef=0.05,
                     microbatch_size=6, save_every=1, keep=9, save_rollouts=True, eval_every=0)


def sampled(run_dir: Path, step: int) -> list[tuple[int, int, float, list[int]]]:
    """Sample id, prompt, reward and tokens of every row."""
    rows = Rollout.load(run_dir / f"rollouts/step_{step}")
    return [(*numbers, tokens[:length]) for *numbers, tokens, length in zip(
        *(x.tolist() for x in (rows.sample_ids, rows.group, rows.rewards, rows.tokens, rows.lengths)))]


def small_cold_start(**options) -> train_sft.Config:
    """In place of train_sft.Config: a model that takes less time than the default one."""
    return SFT_CONFIG(**dict(hidden_size=32, layers=1) | options)


def train(name: str, options: dict) -> None:
    TRAINERS[name].main(TRAINERS[name].Config(**options))


def train_all(name: str, runs: list[dict]) -> None:
    """One run after the other on the same ranks, which costs less than new ones for each."""
    for options in runs:
        train(name, options)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory, sft_run) -> dict[tuple[str, int], Path]:
    """The same float64 run on 1, 2 and 4 ranks, by the mode of aggregation."""
    runs, jobs = {}, []
    for ranks, modes in ((1, ("token", "prompt")), (2, ("token", "prompt")), (4, ("token",))):
        options = []
        for mode in modes:
            runs[mode, ranks] = tmp_path_factory.mktemp(f"{mode}_{ranks}") / "run"
            options.append(LAYOUT | dict(run_dir=str(runs[mode, ranks]), init=str(sft_run / "step_60"), aggregate=mode))
        jobs.append(partial(run_ranks, train_all, ranks, "train_grpo", options))
    at_once(*jobs)
    return runs


@dist
@pytest.mark.parametrize(("mode", "ranks"), [("token", 2), ("token", 4), ("prompt", 2)])
def test_ranks_change_neither_the_numbers_nor_the_sampled_tokens(layouts, mode, ranks):
    alone, shared_out = layouts[mode, 1], layouts[mode, ranks]
    for ours, theirs in zip(numbers(shared_out), numbers(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    for step in (1, 2):
        assert sampled(shared_out, step) == sampled(alone, step)
        for name, tensor in weights(alone, step).items():
            torch.testing.assert_close(weights(shared_out, step)[name], tensor, rtol=1e-7, atol=1e-9)


@dist
@pytest.mark.parametrize(("written_by", "ranks"), [(1, 1), (2, 1), (1, 2)])
def test_a_replayed_rollout_gives_the_update_of_the_run_that_sampled_it(layouts, written_by, ranks, tmp_path, sft_run):
    source = layouts["token", written_by]
    run_ranks(train, ranks, "train_grpo", LAYOUT | dict(
        run_dir=str(tmp_path / "run"), init=str(sft_run / "step_60"), steps=1, save_rollouts=False,
        replay=str(source / "rollouts/step_1")))
    for name, tensor in weights(source, 1).items():
        ours = weights(tmp_path / "run", 1)[name]
        if (written_by, ranks) == (1, 1):
            assert torch.equal(ours, tensor), name
        torch.testing.assert_close(ours, tensor, rtol=1e-9, atol=1e-9)
    assert numbers(tmp_path / "run")[1]["loss"] == pytest.approx(numbers(source)[1]["loss"], rel=1e-9)


SPREAD = {2: [dict(tp=2), dict(pp=2), dict(cp=2), dict(zero=3)],
          4: [dict(tp=2, cp=2, sp=True), dict(tp=2, pp=2), dict(dp=2, cp=2, cp_kind="ulysses", zero=1)]}
SPREADS = [layout for some in SPREAD.values() for layout in some]
ONE_STEP = LAYOUT | dict(dtype="float32", steps=1, epochs=1, minibatches=1, microbatch_size=16)


@pytest.fixture(scope="module")
def spread(layouts, tmp_path_factory, sft_run) -> Path:
    """LAYOUT/KIND of every layout: float64, as one process did; of two ranks also float32, on own samples and on those
    of one process."""
    root, init = tmp_path_factory.mktemp("spread"), {"init": str(sft_run / "step_60")}
    train("train_grpo", ONE_STEP | init | dict(run_dir=str(root / "alone")))
    at_once(*(partial(run_ranks, train_all, ranks, "train_grpo", [
        options | layout | init | dict(run_dir=str(root / str(layout) / kind)) for layout in some
        for kind, options in (("float64", LAYOUT), ("float32", ONE_STEP),
                              ("replay", ONE_STEP | dict(replay=str(root / "alone/rollouts/step_1"))))
        if kind == "float64" or ranks == 2], timeout=240) for ranks, some in SPREAD.items()))
    return root


@dist
@pytest.mark.parametrize("layout", SPREADS, ids=str)
def test_every_layout_trains_as_one_process_and_goes_on_as_one(layouts, spread, layout, sft_run):
    alone, run_dir = layouts["token", 1], spread / str(layout) / "float64"
    for ours, theirs in zip(numbers(run_dir), numbers(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11)
        assert ours.get("ratio_max_deviation", 0) <= 1e-12
    for step in (1, 2):
        assert sampled(run_dir, step) == sampled(alone, step)
    for name, tensor in weights(alone, 2).items():
        torch.testing.assert_close(weights(run_dir, 2)[name], tensor, rtol=1e-7, atol=1e-9)

    shutil.rmtree(run_dir / "step_2")  # go on from step 1 as one process
    with contextlib.redirect_stdout(io.StringIO()):
        train("train_grpo", LAYOUT | dict(run_dir=str(run_dir), init=str(sft_run / "step_60"), resume=True))
    assert numbers(run_dir)[2] == pytest.approx(numbers(alone)[2], rel=1e-8, abs=1e-11)


@dist
def test_in_float32_a_replayed_rollout_has_the_losses_of_one_process_and_hardly_a_token_is_drawn_otherwise(spread):
    alone, rows, flipped = numbers(spread / "alone")[1], sampled(spread / "alone", 1), 0
    for layout in SPREAD[2]:
        replayed, own = (numbers(spread / str(layout) / kind)[1] for kind in ("replay", "float32"))
        for name in ("loss", "kl_ref", "entropy", "grad_norm"):
            assert replayed[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), (layout, name)
        assert max(replayed["ratio_max_deviation"], own["ratio_max_deviation"]) <= 1e-5, layout
        found = sampled(spread / str(layout) / "float32", 1)
        flipped += sum(ours != theirs for ours, theirs in zip(found, rows, strict=True))
    assert flipped <= 2, f"{flipped} of {4 * len(rows)} rows differ"


SFT_SPREAD = {2: [dict(tp=2, sp=True), dict(pp=2, pipeline="gpipe"), dict(cp=2),
                  dict(zero=3, zero_overlap=True)],
              4: [dict(pp=2, zero=2), dict(tp=2, cp=2, cp_kind="ulysses")]}


@dist
def test_sft_in_every_layout_has_the_numbers_of_one_process(tmp_path):
    options = SFT | dict(dtype="float64", steps=2, batch_size=8, microbatch_size=2, eval_every=1, eval_rows=6,
                         eval_problems=2)
    at_once(*(partial(run_ranks, train_all, ranks, "train_sft",
                      [options | layout | dict(run_dir=str(tmp_path / str(layout))) for layout in some])
              for ranks, some in SFT_SPREAD.items()),
            partial(train, "train_sft", options | dict(run_dir=str(tmp_path / "one"))))
    for layout in (layout for some in SFT_SPREAD.values() for layout in some):
        for ours, theirs in zip(numbers(tmp_path / str(layout)), numbers(tmp_path / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11), layout


# ---- kills and signals ----

# A cold start that ends early, at its first evaluation, then 5 steps of GRPO.
CHAIN = TINY | dict(steps=5, prompts_per_step=8, group_size=4, minibatches=2, lr=3e-3, save_every=2, eval_every=3,
                    cold_start_steps=100, cold_start_accuracy=0.0)
SFT_CHAIN = SFT | dict(steps=10, hidden_size=16, layers=1, batch_size=8, save_every=3, eval_every=4)


def train_until(name: str, options: dict, interrupt: Callable[[], None] | None) -> None:
    train_sft.Config = small_cold_start
    if interrupt:
        interrupt()
    train(name, options)


@dataclasses.dataclass
class KillAt:
    """SIGKILL at the n-th time that a file or folder with `text` in its path is opened, made, renamed or removed.

    What a run leaves for its successor changes at those moments only, so they are all the moments that matter.
    """

    text: str
    number: int

    def __call__(self) -> None:
        count = 0

        def hook(event: str, args: tuple) -> None:
            nonlocal count
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and self.text in str(args[0]):
                count += 1
                if count == self.number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)


@dataclasses.dataclass
class SignalAfter:
    """A signal when a run whose folder ends with `folder` has logged a step: it should leave after the next."""

    folder: str
    step: int
    number: int

    def __call__(self) -> None:
        log = MetricsLogger.log

        def log_and_signal(logger: MetricsLogger, step: int, metrics: dict) -> None:
            log(logger, step, metrics)
            if step == self.step and logger.path.parent.name == self.folder:
                os.kill(os.getpid(), self.number)

        MetricsLogger.log = log_and_signal


@dataclasses.dataclass
class Chain:
    """A run that is interrupted again and again, resumed each time, then left in peace; the exit codes of it all."""

    trainer: str
    options: dict
    interrupts: list
    threads: int = 1
    codes: list[int] = dataclasses.field(default_factory=list)

    def go_on(self) -> BaseProcess:
        self.run.parent.mkdir(exist_ok=True)
        return start(train_until, self.trainer, self.options | dict(resume=bool(self.codes)),
                     [*self.interrupts, None][len(self.codes)], threads=self.threads, output=self.output)

    @property
    def run(self) -> Path:
        return Path(self.options["run_dir"])

    @property
    def output(self) -> Path:
        return self.run.with_suffix(".txt")

    def check(self) -> None:
        text = self.output.read_text()[-3000:]
        assert self.codes == [-signal.SIGKILL] * len(self.interrupts) + [0], f"{self.codes}: killed too late? {text}"


def carry_out(*chains: Chain) -> None:
    """Side by side."""
    running = {chain.go_on(): chain for chain in chains}
    try:
        while running:
            assert wait([process.sentinel for process in running], 100), "a run is stuck"
            for process in [process for process in running if process.exitcode is not None]:
                chain = running.pop(process)
                chain.codes.append(process.exitcode)
                if len(chain.codes) <= len(chain.interrupts) and process.exitcode in (0, -signal.SIGKILL):
                    running[chain.go_on()] = chain
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> dict[str, Chain]:
    """Of GRPO, by the number of threads, and of SFT: a run that is killed, and one that is not."""
    root, found = tmp_path_factory.mktemp("chains"), {}
    for threads in (1, 2):
        rng = random.Random(threads)
        kills = [
            KillAt("cold_start/metrics.jsonl", rng.randint(4, 6)),  # in the middle of the cold start
            KillAt("cold_start/step_", rng.randint(1, 15)),  # while its end is being saved
            KillAt("run/step_0.tmp", rng.randint(1, 10)),  # the cold start is over, and nothing of GRPO is there yet
            KillAt("run/step_2.tmp", rng.randint(1, 10)),  # nothing but step_0 to go on from
            KillAt("run/metrics.jsonl", rng.randint(2, 4)),
            KillAt("run/step_5", rng.randint(1, 20)),
        ]
        for name, interrupts in (("unbroken", []), ("broken", kills if threads == 1 else kills[::2])):
            found[f"{name} {threads}"] = Chain("train_grpo", CHAIN | dict(
                run_dir=str(root / f"{name}_{threads}" / "run")), interrupts, threads)
    rng = random.Random(5)
    kills = [KillAt(text, rng.randint(1, 20)) for text in ("broken", "broken/step_6", "broken/step_9", "broken")]
    for name, interrupts in (("unbroken", []), ("broken", kills)):
        found[f"{name} sft"] = Chain("train_sft", SFT_CHAIN | dict(run_dir=str(root / "sft" / name)), interrupts)
    carry_out(*found.values())
    return found


@pytest.fixture(scope="module")
def unbroken(chains) -> dict[int, Path]:
    """By the number of threads."""
    return {threads: chains[f"unbroken {threads}"].run for threads in (1, 2)}


@dist
@pytest.mark.parametrize("threads", (1, 2))
def test_killed_at_random_moments_a_run_resumes_to_the_bits_of_an_unbroken_one(chains, threads):
    broken, unbroken = (chains[f"{name} {threads}"] for name in ("broken", "unbroken"))
    broken.check(), unbroken.check()
    assert_same_run(broken.run, unbroken.run, 5)
    assert numbers(broken.run / "cold_start") == numbers(unbroken.run / "cold_start")
    assert not list(broken.run.rglob("*.tmp"))


@dist
def test_sft_killed_at_random_moments_resumes_to_the_same_run(chains):
    broken, unbroken = chains["broken sft"], chains["unbroken sft"]
    broken.check(), unbroken.check()
    assert_same_run(broken.run, unbroken.run, 10)


@dist
def test_sigterm_and_ctrl_c_save_and_exit_with_0_and_resume_to_the_same_run(tmp_path, unbroken):
    run_dir = tmp_path / "run"
    options = CHAIN | dict(run_dir=str(run_dir), save_every=100)  # so that only the signal saves
    first = SignalAfter("cold_start", 2, signal.SIGINT)
    assert start_and_join(options | dict(resume=False), first, tmp_path) == 0, text_of(tmp_path)
    assert steps_in(run_dir / "cold_start") == ["step_3"] and not steps_in(run_dir)
    second = SignalAfter("run", 3, signal.SIGTERM)  # leaves after step 4, which has no evaluation
    assert start_and_join(options | dict(resume=True), second, tmp_path) == 0, text_of(tmp_path)
    assert steps_in(run_dir) == ["step_0", "step_4"]
    assert start_and_join(options | dict(resume=True), None, tmp_path) == 0, text_of(tmp_path)
    assert_same_run(run_dir, unbroken[1], 5)
    assert numbers(run_dir / "cold_start") == numbers(unbroken[1] / "cold_start")


def text_of(tmp_path: Path) -> str:
    return (tmp_path / "output.txt").read_text()[-3000:]


def start_and_join(options: dict, interrupt, tmp_path: Path) -> int | None:
    process = start(train_until, "train_grpo", options, interrupt, output=tmp_path / "output.txt")
    process.join(100)
    process.kill()
    return process.exitcode


@dist
def test_a_signal_to_one_rank_in_the_cold_start_stops_all_of_them(tmp_path):
    options = CHAIN | dict(run_dir=str(tmp_path / "run"))
    run_ranks(train_with_signal_to_rank_1, 2, options, timeout=60)
    assert steps_in(tmp_path / "run/cold_start") == ["step_1"] and not steps_in(tmp_path / "run")


def train_with_signal_to_rank_1(options: dict) -> None:
    # The line is logged by the first rank alone: the other one is signalled when it makes its StopSignal.
    class Signalled(train_sft.StopSignal):
        def __init__(self):
            super().__init__()
            self.received = os.environ["RANK"] == "1"

    train_sft.StopSignal = Signalled
    train_until("train_grpo", options, None)


# ---- other tasks ----

def gsm8k_slice(shared: Path, tmp_path: Path, count: int, key: Callable | None = None) -> Path:
    lines = (shared / "data/gsm8k/train.jsonl").read_text().splitlines()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(sorted(lines, key=key)[:count] if key else lines[:count]) + "\n")
    return data


def test_gsm8k_runs_end_to_end_on_a_pretrained_model(shared, tmp_path):
    init = shared / "models/stories260k"
    train_grpo.main(train_grpo.Config(
        run_dir=str(tmp_path / "run"), task="gsm8k", data=str(gsm8k_slice(shared, tmp_path, 60)), init=str(init),
        steps=2, prompts_per_step=2, group_size=2, max_new_tokens=8, eval_problems=2, device="cpu"))
    rows = numbers(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[1]["response_length"] <= 8
    assert rows[1]["ratio_max_deviation"] <= 3e-5, "float32, of a trained model's larger logits"
    model, before = load_model(tmp_path / "run/step_2"), load_model(init)
    assert model.config == before.config
    text = "Once upon a time"
    assert load_tokenizer(tmp_path / "run/step_2").encode(text) == load_tokenizer(init).encode(text)


@pytest.mark.parametrize("task", ("gsm8k", "calculator", "code"))
def test_the_other_tasks_run_from_nothing(task, tmp_path, request, monkeypatch):
    monkeypatch.setattr(train_sft, "Config", small_cold_start)
    data = str(gsm8k_slice(request.getfixturevalue("shared"), tmp_path, 20, key=len)) if task == "gsm8k" else ""
    train_grpo.main(train_grpo.Config(
        run_dir=str(tmp_path / "run"), task=task, data=data, cold_start_steps=1, steps=2, prompts_per_step=2,
        group_size=2, max_new_tokens=6, eval_problems=2, device="cpu"))
    assert [row["step"] for row in numbers(tmp_path / "run")] == [0, 1, 2]
    assert steps_in(tmp_path / "run") == ["step_0", "step_2"]
    assert steps_in(tmp_path / "run/cold_start") == ["step_1"]
