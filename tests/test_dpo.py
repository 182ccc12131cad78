"""The DPO family: numbers worked out by hand, reference values, gradients; and the trainer as people run it."""

import contextlib
import gc
import io
import json
import math
import os
import shutil
import signal
import typing
import weakref
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from test_trainers import assert_refused, numbers, signals_return, steps_in  # noqa: F401  (fixtures)
from torch.autograd import gradcheck
from torch.testing import assert_close

import train_dpo
import train_sft
from minirl import losses
from minirl.adapters import open_policy
from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.logprobs import rollout_logprobs
from minirl.lora import adapters, adapters_off, add_lora
from minirl.losses import sequence_logprobs, sft_loss
from minirl.metrics import MetricsLogger
from minirl.model import ModelConfig, Transformer
from minirl.pairs import with_reference
from minirl.parallel import Mesh
from minirl.preference_losses import (
    PREFERENCES,
    Options,
    document,
    kto_answer,
    preference_loss,
    preference_stats,
    resolve,
)
from minirl.reward_model import load_reward_model, score_rows
from minirl.rollout import Rollout
from minirl.tokenizer import load_tokenizer

REPO = Path(__file__).resolve().parents[1]
f64 = torch.float64


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# ---- by hand ----

# c = 1 and r = -1 (policy -10 and -12, reference -11 and -11), beta 0.1: h = 0.2
BY_HAND = {
    "dpo": 0.598139, "robust": (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8, "cdpo": 0.618139, "ipo": 9.0, "hinge": 0.8,
    "kto": (sigmoid(-0.1) + sigmoid(-0.1)) / 2, "apo_zero": 2 * sigmoid(-0.1), "apo_down": sigmoid(0.1) + sigmoid(-0.2),
    "exo": sigmoid(0.2) * (-0.598139 - math.log(0.999)) + sigmoid(-0.2) * (-0.798139 - math.log(0.001)),
    "nca": -math.log(sigmoid(0.1)) - 0.5 * math.log(sigmoid(-0.1)) - 0.5 * math.log(sigmoid(0.1)),
    "bco": -2 * math.log(sigmoid(0.1)), "sppo": 16.0 + 16.0,
    # without a reference: -10 and -12. simpo h = 4, gamma 1; cpo h = 0.2
    "simpo": -math.log(sigmoid(3.0)), "cpo": 0.598139,
    "orpo": -0.1 * math.log(sigmoid(2 + math.log(1 - math.exp(-12)) - math.log(1 - math.exp(-10)))),
}


@pytest.mark.parametrize("kind", PREFERENCES)
def test_each_loss_by_hand(kind):
    pi_c, pi_r, ref = (torch.tensor([x], dtype=f64) for x in (-10.0, -12.0, -11.0))
    loss = preference_loss(kind, pi_c, pi_r, ref, ref)
    assert_close(loss, torch.tensor([BY_HAND[kind]], dtype=f64), rtol=0, atol=2e-6)


def test_every_row_of_the_table_is_worked_out_and_documented():
    assert BY_HAND.keys() == PREFERENCES.keys()
    page = (REPO / "docs/preferences.md").read_text()
    assert document() in page, "print it anew: python -m minirl.preference_losses"
    kinds = typing.get_args(typing.get_type_hints(train_dpo.Config)["loss"])
    assert kinds == (*PREFERENCES, "reward")


def test_dpo_of_the_swapped_pair_its_rewards_and_its_smoothing():
    c, r, ref = (torch.tensor([x]) for x in (-10.0, -12.0, -11.0))
    assert preference_loss("dpo", r, c, ref, ref, beta=0.1).item() == pytest.approx(0.798139, abs=1e-6)
    assert preference_loss("dpo", c, r, ref, ref, label_smoothing=0.1).item() == pytest.approx(0.618139, abs=1e-6)
    stats = {name: float(value) for name, value in preference_stats(c, r, ref, ref, 0.1).items()}
    assert stats == pytest.approx({
        "rows": 1, "row_logprob_chosen": -10, "row_logprob_rejected": -12, "row_logratio_chosen": 1,
        "row_logratio_rejected": -1, "row_reward_chosen": 0.1, "row_reward_rejected": -0.1, "row_margin": 0.2,
        "row_accuracy": 1})


@pytest.mark.parametrize("kind", PREFERENCES)
def test_a_pair_of_equals_has_no_nan_and_a_certain_one_neither(kind):
    """log(sigmoid(-2000)) is -inf; a tie of dpo costs log 2 and pulls both ways alike."""
    x = torch.full((1,), -2.0, requires_grad=True)
    loss = preference_loss(kind, x, x, x, x)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    if kind == "dpo":
        assert loss.item() == pytest.approx(math.log(2)) and abs(x.grad.item()) < 1e-7
        certain = preference_loss(kind, torch.tensor([-20000.0]), torch.zeros(1), torch.zeros(1), torch.zeros(1))
        assert certain.item() == pytest.approx(2000), "log(sigmoid(-2000)) by logsigmoid"
    for c, r in ((-20000.0, -1e-9), (-1e-9, -20000.0), (0.0, 0.0), (-1e-9, 0.0)):
        c, r = (torch.tensor([v], requires_grad=True) for v in (c, r))
        loss = preference_loss(kind, c, r, torch.zeros(1), torch.zeros(1))
        loss.sum().backward()
        for value in (loss, c.grad, r.grad):
            assert torch.isfinite(value).all(), (c, r)
    assert preference_stats(x, x, x, x, 0.1)["row_accuracy"] == 0.5, "a tie counts half"


def test_the_reference_is_asked_without_dropout_and_the_policy_goes_on_with_it():
    policy = Transformer(ModelConfig(11, 8, 16, 2, 2)).init_weights(torch.Generator().manual_seed(0))
    policy = add_lora(policy, rank=2, dropout=0.5).train()
    for adapter in adapters(policy).values():
        torch.nn.init.normal_(adapter.lora_B, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(2)
    rows = Rollout(torch.randint(11, (2, 6)), torch.ones(2, 5, dtype=torch.bool), torch.full((2,), 6), ids, ids)
    noisy = [rollout_logprobs(policy, rows, 2) for _ in range(2)]
    assert not torch.equal(*noisy), "the adapter has dropout"
    with adapters_off(policy) as reference:
        once, again = (with_reference(reference, rows, 2, Mesh()).ref_logprobs for _ in range(2))
    assert torch.equal(once, again) and policy.training


def test_sums_and_means_are_those_of_the_answers_tokens():
    logprobs = torch.tensor([[-9.0, -1, -2, -7, -7], [-9, -3, -4, -5, -7]])  # prompt, answer, padding
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]]).bool()
    assert sequence_logprobs(logprobs, mask, "sum").tolist() == [-3, -12]
    assert sequence_logprobs(logprobs, mask, "mean").tolist() == [-1.5, -4]
    wide = torch.nn.functional.pad(logprobs, (0, 5), value=math.nan), torch.nn.functional.pad(mask, (0, 5))
    assert torch.equal(sequence_logprobs(*wide, "sum"), sequence_logprobs(logprobs, mask, "sum"))
    assert sequence_logprobs(logprobs, mask & False, "mean").tolist() == [0, 0], "no token, and no 0 / 0"
    lengths = torch.tensor([[2.0], [8.0]])
    mask = torch.arange(8) < lengths
    pi, ref = (torch.tensor([[a], [b]], dtype=f64).expand(2, 8) for a, b in ((-2.0, -1.0), (-2.2, -1.0)))
    for reduce, expected in (("sum", 0.673347), ("mean", 0.683197)):
        (c, r), (ref_c, ref_r) = (sequence_logprobs(x, mask, reduce).split(1) for x in (pi, ref))
        assert preference_loss("dpo", c, r, ref_c, ref_r).item() == pytest.approx(expected, abs=1e-6)


def test_robust_dpo_is_unbiased_under_flips_and_cdpo_stops_at_the_belief():
    c, r = torch.randn(2, 7, dtype=f64, generator=torch.Generator().manual_seed(0)).mul(9)
    zero, e = torch.zeros(7, dtype=f64), 0.3
    expected = sum(share * preference_loss("robust", *pair, zero, zero, label_smoothing=e)
                   for share, pair in ((1 - e, (c, r)), (e, (r, c))))
    assert_close(expected, preference_loss("dpo", c, r, zero, zero))
    h = torch.tensor([math.log(0.9 / 0.1)], dtype=f64, requires_grad=True)  # sigmoid(h) = 1 - e
    preference_loss("cdpo", h, torch.zeros(1, dtype=f64), h.detach() * 0, h.detach() * 0, beta=1.0).sum().backward()
    assert abs(h.grad.item()) < 1e-12


# ---- reference values and gradients ----

THEIRS = {"sigmoid": "dpo", "exo_pair": "exo", "nca_pair": "nca", "sppo_hard": "sppo"}


def test_losses_and_gradients_equal_those_of_another_implementation(shared):
    cases = json.loads((shared / "golden/dpo.json").read_text())["cases"]
    tensors = load_file(shared / "golden/dpo.safetensors")
    mask, ref = tensors["in.shift_mask"].bool(), tensors["in.ref_logps"].double()
    assert len(cases) == 13
    for case in cases:
        name, given = case["name"], case["kwargs"]
        kind = THEIRS.get(name.split(".")[0], name.split(".")[0])
        logprobs = tensors["in.policy_logps"].double().requires_grad_()
        row = PREFERENCES[kind]
        pi, frozen = (sequence_logprobs(x, mask, row.reduce) for x in (logprobs, ref))
        if kind == "kto":
            options = Options(given["beta"], shift=given["kl"])
            loss = kto_answer(pi - frozen, torch.tensor(given["labels"]).bool(), options).mean()
        else:
            loss = preference_loss(kind, pi[:6], pi[6:], frozen[:6], frozen[6:], beta=given["beta"],
                                   label_smoothing=given.get("ls"), gamma=given.get("gamma")).mean()
            loss = loss + row.nll * sft_loss(logprobs[:6])[mask[:6]].mean()
        loss.backward()
        assert loss.item() == pytest.approx(case["loss"], abs=1e-6), name
        assert_close(logprobs.grad[mask], tensors[f"grad.{name}"][mask], rtol=0, atol=1e-6, msg=name)
        if "metrics" in case and kind != "ipo":  # whose rewards are there of means, here too, but their key says sums
            stats = preference_stats(pi[:6], pi[6:], frozen[:6], frozen[6:], given["beta"])
            for ours, theirs in (("row_reward_chosen", "rewards/chosen"), ("row_margin", "rewards/margins"),
                                 ("row_accuracy", "rewards/accuracies"), ("row_logprob_chosen", "logps/chosen")):
                assert float(stats[ours]) / 6 == pytest.approx(case["metrics"][theirs], abs=1e-6), (name, ours)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_the_gradient_of_each_loss(kind):
    draw = torch.randn(4, 5, dtype=f64, generator=torch.Generator().manual_seed(0)) - 4
    c, r, ref_c, ref_r = draw

    def loss(c, r):
        return preference_loss(kind, c, r, ref_c, ref_r, shift=0.3)

    assert gradcheck(loss, (c.requires_grad_(), r.requires_grad_()))
    before = draw.clone()
    frozen = ref_c.clone().requires_grad_()
    preference_loss(kind, c, r, frozen, ref_r).sum().backward()
    assert frozen.grad is None, "the reference is frozen"
    assert torch.equal(draw.detach(), before)


def test_what_has_no_meaning_is_refused():
    x = torch.zeros(2)
    for wrong, message in ((dict(kind="dppo"), "'dppo' does not exist, did you mean 'dpo'"),
                           (dict(kind="dpo"), "pass ref_chosen and ref_rejected"),
                           (dict(kind="simpo", beta=0.0), "beta is 0.0: it must be above 0"),
                           (dict(kind="ipo", label_smoothing=0.1), "no effect on the loss 'ipo'.*dpo, cdpo, robust"),
                           (dict(kind="orpo", gamma=1.0), "no effect on the loss 'orpo'"),
                           (dict(kind="robust", label_smoothing=0.5), "label_smoothing is 0.5"),
                           (dict(kind="exo", label_smoothing=0.0), "for exo above 0"),
                           (dict(kind="simpo", gamma=math.nan), "gamma is nan")):
        with pytest.raises(UserError, match=message):
            preference_loss(chosen=x, rejected=x, **wrong)
    assert losses.preference_loss is preference_loss
    assert resolve("simpo")[1] == Options(2.0, 0.0, 1.0)


# ---- the trainer ----

SFT_CONFIG = train_sft.Config
TINY = dict(device="cpu", difficulty=1, problems=96, samples=8, eval_problems=24, steps=12, batch_size=8,
            microbatch_size=3, lr=3e-3, warmup_steps=2, nll_coef=None, save_every=4, keep=9, eval_every=6)


@pytest.fixture(scope="module")
def start(sft_run) -> str:
    return str(sft_run / "step_60")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, start) -> Path:
    return dpo(tmp_path_factory.mktemp("dpo") / "run", start)


def dpo(folder: Path, start: str, **options) -> Path:
    train_quietly(TINY | dict(run_dir=str(folder), init=start) | options)
    return folder


def test_a_policy_learns_what_the_verifier_prefers(tmp_path, start):
    rows = numbers(dpo(tmp_path / "run", start, problems=300, steps=60, batch_size=32, microbatch_size=32,
                       eval_problems=60, eval_every=0))
    first, last = rows[0], rows[-1]
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-5), "policy and reference are still the same"
    assert rows[1]["preference_accuracy"] == pytest.approx(0.5, abs=0.2) and abs(rows[1]["reward_margin"]) < 1e-4
    assert first["eval/preference_accuracy"] == 0.5 and first["eval/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert last["preference_accuracy"] > 0.9, "of held-out pairs there are too few here to count"
    assert last["eval/accuracy"] > first["eval/accuracy"]
    assert last["logratio_rejected"] < -1 and 0 < last["eval/kl_ref"] < 10


@pytest.mark.parametrize("options", [{}, dict(loss="kto"), dict(loss="bco"), dict(precompute_ref=True),
                                     dict(lora_rank=4), dict(loss="reward")], ids=str)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(options, tmp_path, start, unbroken):
    whole = dpo(tmp_path / "whole", start, **options) if options else unbroken
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    for step in (8, 12):
        shutil.rmtree(broken / f"step_{step}")
    dpo(broken, start, **options, resume=True)
    assert numbers(broken) == numbers(whole)
    name = "adapter_model.safetensors" if "lora_rank" in options else "model.safetensors"
    for file in (name, "training/state.safetensors"):
        ours, theirs = (load_file(run / "step_12" / file) for run in (broken, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert steps_in(whole) == ["step_0", "step_12", "step_4", "step_8"]


def test_a_run_stopped_by_a_signal_goes_on_as_the_same(tmp_path, start, unbroken, monkeypatch):
    log = MetricsLogger.log

    def log_and_stop(self, step, metrics):
        log(self, step, metrics)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLogger, "log", log_and_stop)
    dpo(tmp_path / "run", start)
    assert steps_in(tmp_path / "run")[-1] in ("step_5", "step_6") and len(numbers(tmp_path / "run")) < 9
    monkeypatch.undo()
    dpo(tmp_path / "run", start, resume=True)
    assert numbers(tmp_path / "run") == numbers(unbroken)


def assert_close_runs(ours: Path, theirs: Path, rel: float) -> None:
    for mine, other in zip(numbers(ours), numbers(theirs), strict=True):
        assert mine.keys() == other.keys()
        assert mine == pytest.approx(other, rel=rel, abs=rel)


@pytest.mark.parametrize("options", [dict(microbatch_size=8), dict(microbatch_size=1), dict(precompute_ref=True)],
                         ids=str)
def test_how_the_batch_is_cut_and_when_the_reference_is_asked_change_nothing(options, tmp_path, start):
    one, other = (dpo(tmp_path / name, start, dtype="float64", steps=4, nll_coef=0.1, **extra)
                  for name, extra in (("one", {}), ("other", options)))
    if "precompute_ref" in options:  # whose memory is gone by then
        rows = [{name: value for name, value in row.items() if name != "eval/kl_ref"} for row in numbers(one)]
        assert [pytest.approx(row, rel=1e-9, abs=1e-11) for row in rows] == numbers(other)
    else:
        assert_close_runs(one, other, 1e-9)


@pytest.mark.parametrize("precompute", [False, True])
def test_a_reference_that_was_asked_before_is_gone_when_training_begins(precompute, tmp_path, start, monkeypatch):
    opened, log, seen, alive = train_dpo.open_reference, MetricsLogger.log, [], []

    def open_and_watch(*args):
        frozen = opened(*args)
        with frozen() as reference:
            seen.append(weakref.ref(reference))
        return frozen

    def log_and_look(self, step, metrics):
        gc.collect()
        alive.append(seen[0]() is not None)
        log(self, step, metrics)

    monkeypatch.setattr(train_dpo, "open_reference", open_and_watch)
    monkeypatch.setattr(MetricsLogger, "log", log_and_look)
    dpo(tmp_path, start, steps=1, precompute_ref=precompute)
    assert alive == [not precompute] * 2


LAYOUTS = [(2, dict(dp=2)), (2, dict(tp=2, sp=True)), (2, dict(pp=2)), (2, dict(cp=2)), (2, dict(zero=3))]
FLOAT64 = TINY | dict(dtype="float64", steps=2, problems=40, eval_every=0, nll_coef=0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, start) -> dict[str, Path]:
    """By the loss, of one process."""
    return {loss: dpo(tmp_path_factory.mktemp(loss) / "run", start, **FLOAT64, loss=loss)
            for loss in ("kto", "dpo", "reward")}


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=str)
def test_every_layout_has_the_numbers_of_one_process(ranks, layout, tmp_path, start, alone):
    for loss in ("dpo", "reward") if layout == dict(cp=2) else ("reward",) if layout == dict(pp=2) else ("kto",):
        run_ranks(train_quietly, ranks, FLOAT64 | layout | dict(run_dir=str(tmp_path / loss), init=start, loss=loss))
        assert_close_runs(tmp_path / loss, alone[loss], 1e-8)


def train_quietly(options: dict) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train_dpo.main(train_dpo.Config(**options))


@pytest.mark.parametrize("loss", PREFERENCES)
def test_every_loss_of_the_family_trains(loss, tmp_path, start, unbroken):
    rows = numbers(dpo(tmp_path, start, pairs=str(unbroken / "pairs"), loss=loss, beta=None, steps=3, eval_every=0))
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows[1:])
    assert ("logratio_chosen" in rows[1]) == PREFERENCES[loss].reference == ("eval/kl_ref" in rows[-1])


def test_with_lora_the_reference_is_the_model_that_it_was_added_to(tmp_path, start):
    """Also after training, to the bit; and its log-ratios are 0 at the first step."""
    run = dpo(tmp_path, start, lora_rank=4)
    policy, before = open_policy(run / "step_12"), load_model(start)
    tokens = torch.tensor([[50, 43, 51, 61, 53]])
    with torch.no_grad(), adapters_off(policy) as reference:
        assert torch.equal(reference(tokens), before(tokens))
    assert not torch.equal(policy(tokens), before(tokens))
    assert numbers(run)[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_uniform_reference_says_nothing_about_either_answer(tmp_path, start):
    first = numbers(dpo(tmp_path, start, reference="uniform", steps=1))[1]
    assert first["logratio_chosen"] == pytest.approx(first["logprob_chosen"])
    assert first["loss"] != pytest.approx(math.log(2), abs=1e-3)


def test_a_reward_model_learns_from_the_same_pairs_and_opens_as_one(tmp_path, start):
    run = dpo(tmp_path, start, loss="reward", problems=300, steps=60, batch_size=32, microbatch_size=32,
              eval_problems=60, pairs_per_problem=1, prefixes=False, margins=True)
    rows = numbers(run)
    assert rows[-1]["preference_accuracy"] > 0.9
    assert abs(rows[-1]["reward_chosen"] + rows[-1]["reward_rejected"]) < 1, "centred"
    tokenizer = load_tokenizer(run / "step_60")
    model = load_reward_model(run / "step_60", tokenizer)
    pairs = Rollout.load(run / "pairs/eval.safetensors")
    scores = score_rows(model, pairs, 8)
    assert (scores[0::2] > scores[1::2]).double().mean() == pytest.approx(rows[-1]["eval/preference_accuracy"])


def test_a_new_reward_model_begins_as_an_expert_of_its_own(tmp_path, unbroken, monkeypatch):
    monkeypatch.setattr(train_sft, "Config", lambda **options: SFT_CONFIG(hidden_size=16, **options))
    run = dpo(tmp_path / "run", "", loss="reward", pairs=str(unbroken / "pairs"), steps=1, cold_start_steps=2,
              backbone_layers=3)
    assert len(load_reward_model(run / "step_1").layers) == 3 and (run / "backbone/step_2").is_dir()
    assert not (run / "cold_start").exists(), "the pairs were there, and nobody had to answer"


def test_what_is_not_given_is_that_of_a_policy_or_of_a_reward_model():
    for loss, values in (("dpo", (1, 8.0)), ("reward", (4, 4.0))):
        config = train_dpo.Config(loss=loss)
        assert (config.pairs_per_problem, config.epochs) == values
    assert train_dpo.Config(loss="reward", epochs=0.5).epochs == 0.5


# ---- bad input ----

BAD = [
    ("--loss dppo", "invalid choice: 'dppo'"),
    ("--samples 1", "--samples 1: a pair is made of two answers"),
    ("--beta 0", r"beta is 0.0: it must be above 0"),
    ("--loss ipo --label-smoothing 0.1", "label_smoothing 0.1 has no effect on the loss 'ipo'"),
    ("--loss robust --label-smoothing 0.6", "label_smoothing is 0.6"),
    ("--margins", "--margins is for --loss reward, not dpo"),
    ("--loss reward --gamma 1", "--gamma has no effect on --loss reward"),
    ("--flip-labels 2", "--flip-labels is 2.0"),
    ("--task jsonl", "give its folder with --init"),
    ("--steps 0 --epochs 0", "say how long to train"),
    ("--loss reward --lora-rank 4", "leave --lora-rank and --qlora out"),
    ("--task jsonl --init START", "give --data FILE"),
    ("--task jsonl --init START --data nowhere.jsonl", "cannot read nowhere.jsonl"),
    ("--pairs nowhere --init START", "nowhere holds no pairs, for train.safetensors is not there"),
    ("--pairs nowhere", "nowhere holds no pairs"),  # before a cold start
    ("--task jsonl --init START --pairs x", "pairs come from one of the two"),
    ("--init START --difficulty 30", r"needs \d+ tokens, but the model's context is"),
    ("--batch-sizes 4", "unknown flag --batch-sizes; did you mean --batch-size"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[flags for flags, _ in BAD])
def test_a_bad_value_is_one_line_before_any_work(flags, message, tmp_path, start):
    assert_refused(train_dpo, flags.replace("START", start).split(), message, tmp_path / "run")


def test_rows_that_are_no_pairs_or_of_another_tokenizer_are_refused(tmp_path, start, unbroken):
    pairs = Rollout.load(unbroken / "pairs/train.safetensors")
    others, alone = pairs.replace(tokens=pairs.tokens + 250), pairs.rows(torch.arange(0, len(pairs), 2))
    for name, rows, message in (("others", others, r"has the token \d+, but the model's vocabulary only 258"),
                                ("alone", alone, "holds rows that are no pairs")):
        for part in ("train", "eval"):
            rows.save(tmp_path / name / f"{part}.safetensors")
        for init in ([], ["--init", start]):
            assert_refused(train_dpo, ["--pairs", str(tmp_path / name), *init], message, tmp_path / "run")


BAD_ROWS = [
    ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, r"rows\.jsonl:2: chosen and rejected are the same"),
    ({"prompt": "1+1=", "chosen": "2", "rejected": ""}, r"rows\.jsonl:2: rejected is empty"),
    ({"prompt": "1+1=", "chosen": "2"}, r"rows\.jsonl:2: chosen is a str and rejected a NoneType"),
    ({"prompt": "1+1=", "chosen": "2" * 90, "rejected": "3"}, "1 of 2 pairs do not fit the model's context.*--drop"),
    ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": "big"}, r"rows\.jsonl:2: margin is 'big'"),
    ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": math.nan}, r"rows\.jsonl:2: margin is nan, not a"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_a_pair_without_a_preference_is_refused_by_its_place(row, message, tmp_path, start):
    good = json.dumps({"prompt": "1+2=", "chosen": "3", "rejected": "4"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(good + json.dumps(row) + "\n" + good)
    flags = ["--task", "jsonl", "--init", start, "--data", str(tmp_path / "rows.jsonl")]
    assert_refused(train_dpo, flags, message, tmp_path / "run")


def test_a_file_of_pairs_trains_and_long_ones_are_left_out_if_asked(tmp_path, start, capsys):
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a in range(5) for b in range(5)]
    rows[3]["chosen"] = "9" * 90
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_dpo.main(train_dpo.Config(run_dir=str(tmp_path / "run"), init=start, task="jsonl",
                                    data=str(tmp_path / "rows.jsonl"), drop_long_rows=True, **TINY))
    assert "pairs: 22 to learn, 2 held out, 1 more do not fit" in capsys.readouterr().out
    assert numbers(tmp_path / "run")[-1]["eval/preference_accuracy"] >= 0.5
