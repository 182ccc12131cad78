"""SFT on files of rows: whole weights, adapters and 4-bit bases; packed or not; stopped, resumed, and refused."""

import contextlib
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_trainers import numbers, signals_return, steps_in  # noqa: F401  (fixtures)

import train_grpo
import train_sft
from minirl.adapters import open_policy
from minirl.chat import template_of
from minirl.checkpoint import load_checkpoint, load_model, save_model
from minirl.config import UserError
from minirl.lora import adapters
from minirl.merge import MergeConfig
from minirl.merge import main as merge
from minirl.metrics import read_metrics
from minirl.model import Transformer
from minirl.tokenizer import load_tokenizer

TINY = dict(task="jsonl", device="cpu", hidden_size=32, layers=1, batch_size=8, microbatch_size=8, lr=1e-2,
            warmup_steps=2, eval_rows=20, eval_every=10, schedule="constant")
WORDS = ["red", "green", "blue", "black", "white", "brown"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    """Say a word twice: prompt and completion."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a} {b} ", "completion": f"{a} {b}"}) + "\n"
                            for a in WORDS for b in WORDS))
    return str(path)


@pytest.fixture
def stories(shared) -> dict:
    return TINY | dict(init=str(shared / "models/stories260k"), batch_size=4, eval_rows=8, lr=3e-3)


def sft(folder: Path, rows: str, **options) -> tuple[Path, str]:
    """The folder that a run returned, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        best = train_sft.main(train_sft.Config(run_dir=str(folder), data=rows, **options))
    return best, text.getvalue()


def eval_losses(folder: Path) -> list[float]:
    return [row["eval/loss"] for row in read_metrics(folder / "metrics.jsonl") if "eval/loss" in row]


@pytest.mark.parametrize("pack", [False, True])
def test_a_model_from_nothing_learns_the_rows_of_a_file(tmp_path, rows, pack):
    best, text = sft(tmp_path, rows, **TINY, steps=60, pack=pack, context=64)
    losses = eval_losses(tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    assert f"best: {best}, eval/loss {min(losses):.4f}" in text and best.is_dir()
    assert "hint" not in text
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(math.log(258), rel=0.2)
    assert (first["tokens"] > 8 * 20) == pack, "a window holds several rows"


def test_context_bounds_rows_and_windows_of_a_checkpoint_too(tmp_path, rows, stories):
    for context in (0, 64):
        sft(tmp_path / str(context), rows, **stories, steps=1, pack=True, context=context)
    whole, short = (read_metrics(tmp_path / name / "metrics.jsonl")[0]["tokens"] for name in ("0", "64"))
    assert 100 < short < 4 * 64 < whole, "four windows of 64 tokens, or of the model's 512"
    with pytest.raises(UserError, match="context of 8 tokens"):
        sft(tmp_path / "8", rows, **stories, steps=1, context=8)
    longer = tmp_path / "longer.jsonl"
    longer.write_text(2 * (json.dumps({"text": 30 * "red "}) + "\n") + Path(rows).read_text())
    _, text = sft(tmp_path / "18", str(longer), **stories, steps=1, context=18, drop_long_rows=True)
    assert "left out: 2 of 35 rows, longer than 18 tokens" in text


def test_epochs_count_passes_over_the_file(tmp_path, rows):
    sft(tmp_path, rows, **TINY | dict(eval_every=0), epochs=2.5)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == -(-int(2.5 * 33) // 8), "36 rows, 3 of them held out"


def test_rows_without_messages_leave_the_chat_template_of_the_model_as_it_is(tmp_path, rows):
    best, _ = sft(tmp_path / "run", rows, **TINY | dict(eval_every=0), steps=1)
    assert template_of(best) is None, "a model of plain texts has no turns"
    base = tmp_path / "foreign"
    shutil.copytree(best, base)
    (base / "chat_template.jinja").write_text("{{ '[INST]' }}")
    best, _ = sft(tmp_path / "more", rows, **TINY | dict(eval_every=0, init=str(base)), steps=1)
    assert load_tokenizer(best).chat_template == "{{ '[INST]' }}"


def test_the_template_of_the_conversations_travels_with_the_model(tmp_path):
    data = tmp_path / "chat.jsonl"
    data.write_text(4 * (json.dumps({"messages": [{"role": "user", "content": "hi"},
                                                  {"role": "assistant", "content": "hello"}]}) + "\n"))
    best, _ = sft(tmp_path / "run", str(data), **TINY | dict(eval_every=0), steps=2)
    assert template_of(best) == "plain"
    again, _ = sft(tmp_path / "more", str(data), **TINY | dict(eval_every=0, init=str(best)), steps=2)
    assert template_of(again) == "plain"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_model_that_learned_to_end_its_turn_stops_there(tmp_path, shared, lora_rank):
    """A base model ends at EOS; after conversations in ChatML it ends at <|im_end|>, in other programs as well."""
    base = tmp_path / "base"
    shutil.copytree(shared / "models/stories260k", base)
    model = load_model(base)
    grown = Transformer(replace(model.config, vocab_size=514))
    grown.load_state_dict({name: torch.cat((x, x[:2])) if name.startswith("embed") else x
                           for name, x in model.state_dict().items()})
    (base / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 512, "<|im_end|>": 513}))
    save_model(grown, base, load_tokenizer(base))
    assert load_tokenizer(base).stop_ids == (2,)
    data = tmp_path / "chat.jsonl"
    data.write_text(2 * (json.dumps({"messages": [{"role": "user", "content": "hi"},
                                                  {"role": "assistant", "content": "hello"}]}) + "\n"))
    best, _ = sft(tmp_path / "run", str(data), task="jsonl", device="cpu", init=str(base), template="chatml", steps=1,
                  batch_size=1, eval_rows=0, eval_every=0, lora_rank=lora_rank)
    assert json.loads((best / "generation_config.json").read_text())["eos_token_id"] == [2, 513]
    assert load_tokenizer(best).stop_ids == (2, 513)


@pytest.mark.parametrize("options", [
    {"pack": True}, {"lora_rank": 4, "pack": True}, {"lora_rank": 4, "qlora": True, "gradient_checkpointing": True}])
def test_a_resumed_run_is_an_unbroken_one_to_the_bit(tmp_path, rows, stories, options):
    options = stories | dict(eval_every=2) | options
    for folder, steps, resume in (("whole", 4, False), ("parts", 2, False), ("parts", 4, True)):
        sft(tmp_path / folder, rows, **options, steps=steps, resume=resume)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    name = "adapter_model.safetensors" if "lora_rank" in options else "model.safetensors"
    ours, theirs = (load_file(tmp_path / run / "step_4" / name) | load_checkpoint(tmp_path / run / "step_4")[0]
                    for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("qlora", [False, True])
def test_adapters_on_a_real_checkpoint_lower_the_held_out_loss_and_leave_it_untouched(tmp_path, rows, stories, qlora):
    base = Path(stories["init"])
    before = load_file(base / "model.safetensors")
    best, _ = sft(tmp_path, rows, **stories, steps=20, lora_rank=4, lora_alpha=8, lora_targets=".*(q|v)_proj",
                  qlora=qlora)
    losses = eval_losses(tmp_path)
    assert losses[1] < 0.9 * losses[0]
    assert not (best / "model.safetensors").exists()
    assert (best / "adapter_model.safetensors").stat().st_size < 0.05 * (base / "model.safetensors").stat().st_size
    after = load_file(base / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    policy = open_policy(best)
    assert adapters(policy) and load_tokenizer(best).vocab_size == 512
    tokens = torch.arange(20)[None]
    assert not torch.allclose(policy(tokens), load_model(base)(tokens))


def test_it_stops_when_the_held_out_loss_rises_and_keeps_the_best(tmp_path, rows, stories):
    best, _ = sft(tmp_path, rows, **stories | dict(lr=0.3, warmup_steps=8, eval_every=2, keep=1), steps=40,
                     patience=3)
    losses = eval_losses(tmp_path)
    lowest = losses.index(min(losses))
    assert best == tmp_path / f"step_{2 * (lowest + 1)}"
    assert len(losses) == lowest + 4 < 20, "three evaluations without a lower loss"
    assert steps_in(tmp_path) == sorted({best.name, f"step_{2 * len(losses)}"})
    again, _ = sft(tmp_path, rows, **stories | dict(lr=0.3, warmup_steps=8, eval_every=2, keep=1), steps=40,
                   patience=3, resume=True)
    assert again == best and eval_losses(tmp_path) == losses, "a run that ended early is over"
    sft(tmp_path, rows, **stories | dict(lr=0.3, warmup_steps=8, eval_every=2, keep=1), steps=40, patience=4,
        resume=True)
    assert len(eval_losses(tmp_path)) > len(losses), "with more patience it goes on"


def test_a_best_checkpoint_that_somebody_removed_is_best_no_more(tmp_path, rows, stories):
    options = stories | dict(lr=0.3, warmup_steps=4, eval_every=2, eval_rows=4, keep=1)
    best, _ = sft(tmp_path, rows, **options, steps=8)
    assert best != tmp_path / "step_8"
    shutil.rmtree(best)
    again, text = sft(tmp_path, rows, **options, steps=10, resume=True)
    assert again == tmp_path / "step_10" and again.is_dir() and f"best: {again}, " in text


def test_packing_changes_nothing_about_what_is_measured(tmp_path, rows, stories):
    for pack in (False, True):
        sft(tmp_path / str(pack), rows, **stories | dict(dtype="float64", eval_rows=2, lr=1e-300), steps=1, pack=pack)
    assert eval_losses(tmp_path / "True") == pytest.approx(eval_losses(tmp_path / "False"), rel=1e-9)


def test_a_run_of_epochs_may_be_resumed_for_more_of_them(tmp_path, rows):
    options = TINY | dict(eval_every=0, batch_size=11)
    sft(tmp_path, rows, **options, epochs=1)
    sft(tmp_path, rows, **options, epochs=2, log_every=1, resume=True)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
    _, text = sft(tmp_path / "tenths", rows, **options | dict(batch_size=3, warmup_steps=9), epochs=0.3)  # 3.3 updates
    assert len(read_metrics(tmp_path / "tenths/metrics.jsonl")) == 4
    assert "hint: --warmup-steps 9, but there are 4 updates" in text
    with pytest.raises(UserError, match="--lr"):
        sft(tmp_path, rows, **options | dict(lr=1.0), epochs=3, resume=True)


def test_a_tokenizer_of_another_model_is_refused_before_any_work(tmp_path, rows, stories):
    base = tmp_path / "base"
    shutil.copytree(stories["init"], base)
    config = json.loads((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    tensors = {name: tensor[:500] if len(tensor) == 512 else tensor for name, tensor in tensors.items()}
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    with pytest.raises(UserError, match="the tokenizer has 512 tokens, but the model's vocab_size is 500"):
        sft(tmp_path / "run", rows, **stories | dict(init=str(base)), steps=1)
    assert not (tmp_path / "run").exists()


def ranks_run(folder: str, rows: str, options: dict) -> None:
    torch.manual_seed(1)
    sft(Path(folder), rows, **options)


@pytest.mark.dist
@pytest.mark.parametrize("options", [{"pack": True}, {"pack": False, "lora_rank": 4}])
def test_two_ranks_have_the_numbers_of_one(tmp_path, rows, stories, options):
    options = stories | dict(dtype="float64", steps=3, eval_every=1) | options
    sft(tmp_path / "one", rows, **options)
    run_ranks(ranks_run, 2, str(tmp_path / "two"), rows, options | dict(microbatch_size=1))
    for ours, theirs in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_grpo_with_adapters_has_its_base_as_reference_and_resumes_to_the_bit(tmp_path, shared):
    base = train_sft.main(train_sft.Config(run_dir=str(tmp_path / "sft"), device="cpu", hidden_size=32, difficulty=1,
                                           steps=40, lr=1e-2, eval_every=0, eval_problems=8, warmup_steps=4))
    options = dict(device="cpu", difficulty=1, init=str(base), prompts_per_step=8, group_size=4, minibatches=1,
                   eval_problems=8, lr=1e-2, kl_coef=0.1, lora_rank=4, save_every=2, eval_every=2, schedule="constant")
    for folder, steps, resume in (("whole", 4, False), ("parts", 2, False), ("parts", 4, True)):
        with contextlib.redirect_stdout(io.StringIO()):
            train_grpo.main(train_grpo.Config(run_dir=str(tmp_path / folder), steps=steps, resume=resume, **options))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    kl = [row["kl_ref"] for row in read_metrics(tmp_path / "whole/metrics.jsonl") if "kl_ref" in row]
    assert abs(kl[0]) < 1e-6 < kl[-1], "the policy begins at its base and leaves it"
    policy, start = open_policy(tmp_path / "whole/step_4"), load_model(base)
    for name, adapter in adapters(policy).items():
        assert torch.equal(adapter.base.weight, start.get_submodule(name).weight)
        assert adapter.lora_B.abs().sum() > 0


@pytest.mark.parametrize(("options", "message"), [
    (dict(task="jsonl"), "--task jsonl reads a file: give --data"),
    (dict(task="jsonl", data="nowhere.jsonl"), "cannot read nowhere.jsonl"),
    (dict(pack=True), "--pack is for --task jsonl"),
    (dict(lora_rank=4), "--lora-rank adds to the weights of a checkpoint: give its folder with --init"),
    (dict(qlora=True), "--qlora freezes the weights: say what is trained with --lora-rank"),
    (dict(patience=2, eval_rows=0), "--patience watches the held-out loss: give --eval-rows"),
    (dict(epochs=1.0), "task addition makes problems without end; give --steps"),
    (dict(lora_rank=-1), "--lora-rank is -1"),
])
def test_what_cannot_work_is_refused_before_any_work(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train_sft.main(train_sft.Config(run_dir=str(tmp_path / "run"), device="cpu", **options))
    assert not (tmp_path / "run").exists()


def test_an_adapter_on_an_adapter_or_an_unknown_layer_is_refused(tmp_path, rows, stories):
    best, _ = sft(tmp_path / "one", rows, **stories | dict(eval_every=0), steps=1, lora_rank=2)
    for folder, options, message in (("two", dict(init=str(best)), "adapter"),
                                     ("three", dict(lora_targets="nowhere"), "nowhere")):
        with pytest.raises(UserError, match=message):
            sft(tmp_path / folder, rows, **stories | dict(eval_every=0) | options, steps=1, lora_rank=2)
    again, _ = sft(tmp_path / "four", rows, **stories | dict(eval_every=0, init=str(best)), steps=1)
    assert adapters(open_policy(again)), "without --lora-rank the adapter that is there goes on"


def test_what_a_run_with_adapters_leaves_is_a_start_for_others(tmp_path, rows, stories, monkeypatch):
    """From another folder than it was trained in, on the base in 4 bits as it was trained; merged it is a model."""
    monkeypatch.chdir(Path(stories["init"]).parent)
    options = stories | dict(init="stories260k", eval_every=0, lora_targets="q_proj,v_proj", qlora=True)
    best, _ = sft(tmp_path / "run", rows, **options, steps=2, lora_rank=2)
    monkeypatch.chdir(tmp_path)
    assert {name.rpartition(".")[2] for name in adapters(open_policy(best))} == {"q_proj", "v_proj"}
    again, _ = sft(tmp_path / "more", rows, **options | dict(init=str(best)), steps=2)
    base = json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base).is_absolute() and Path(base).samefile(stories["init"])
    with pytest.raises(UserError, match=r"train those \(without --lora-rank\), or merge them first, by python"):
        sft(tmp_path / "other", rows, **options | dict(init=str(best)), steps=1, lora_rank=2)
    merge(MergeConfig(str(again), str(tmp_path / "merged"), qlora=True))
    plain, policy = load_model(tmp_path / "merged"), open_policy(again, quantize=True)
    tokens = torch.arange(30)[None]
    assert (plain.logits(plain(tokens)) - policy.logits(policy(tokens))).abs().max() < 1e-4
    with contextlib.redirect_stdout(io.StringIO()):
        train_grpo.main(train_grpo.Config(
            run_dir=str(tmp_path / "grpo"), init=str(again), qlora=True, steps=1, prompts_per_step=2, group_size=2,
            minibatches=1, max_new_tokens=4, eval_problems=2, kl_coef=0.1, device="cpu"))
    assert read_metrics(tmp_path / "grpo/metrics.jsonl")[1]["kl_ref"] < 1e-6, "it is its own reference"
    assert adapters(open_policy(tmp_path / "grpo/step_1", quantize=True))
