"""PPO: the critic and its states, the losses by option, and the trainer in all its forms."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import at_once, run_ranks
from safetensors.torch import load_file, save_file
from test_trainers import (  # noqa: F401  (a fixture)
    SFT,
    TINY,
    Chain,
    KillAt,
    assert_refused,
    assert_same_run,
    carry_out,
    numbers,
    signals_return,
    steps_in,
    train,
    weights,
)
from torch import tensor

import minirl.ppo
import train_ppo
import train_sft
from minirl.checkpoint import latest_checkpoint, load_checkpoint, load_model, save_checkpoint, save_model
from minirl.critic import add_value_head, critic_of, state_values
from minirl.env import make_env
from minirl.env.loop import demonstrate
from minirl.logprobs import Output, token_logprobs
from minirl.losses import aggregate, clipped_surrogate, right_tokens, sft_loss, value_loss
from minirl.model import ModelConfig, Transformer
from minirl.optim import adamw
from minirl.parallel import Mesh, forward_backward
from minirl.ppo import critic_loss, policy_loss
from minirl.reward_model import reward_model_of
from minirl.rewards import missing_eos_penalty
from minirl.rollout import Rollout
from minirl.tokenizer import ByteTokenizer, load_tokenizer

dist = pytest.mark.dist
SHAPE = ModelConfig(258, 16, 24, 2, 2, max_position_embeddings=64)
PPO = TINY | dict(steps=4, prompts_per_step=32, minibatches=2, lr=3e-3, critic_lr=3e-3, schedule="constant",
                  warmup_steps=0, keep=1, save_every=2, eval_every=0)
T, F = True, False


@pytest.fixture(scope="module")
def start(sft_run) -> Path:
    return sft_run / "step_60"


def ppo(folder: Path, start: Path, **options) -> list[dict]:
    train_ppo.main(train_ppo.Config(run_dir=str(folder), init=str(start), **PPO | options))
    return numbers(folder)


def policy() -> Transformer:
    return Transformer(SHAPE).init_weights(torch.Generator().manual_seed(0)).double()


def critic() -> Transformer:
    model = critic_of(policy()).double()
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    return model


def some_rows(**more) -> Rollout:
    """Two rows, of which the second is shorter and was cut."""
    tokens = tensor([[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 0, 0]])
    mask = tensor([[F, T, F, T, T], [F, T, T, F, F]])
    ids = torch.arange(2)
    return Rollout(tokens, mask, tensor([6, 4]), ids, ids, finished=tensor([T, F]), rewards=tensor([1.0, 0.0]), **more)


# ---- the critic ----

def test_a_value_is_of_the_state_before_its_token_and_a_cut_row_goes_on_after_its_last():
    model, rows = critic(), some_rows()
    values, bootstrap = state_values(model, rows, 2)
    assert values.shape == (2, 5) and bootstrap.shape == (2,)
    for row in range(2):
        length = int(rows.lengths[row])
        alone = model.scores(model(rows.tokens[row : row + 1, :length]))[0]  # one for each token read
        torch.testing.assert_close(values[row, : length - 1], alone[:-1], rtol=1e-9, atol=1e-12)
        assert bootstrap[row] == (0 if rows.finished[row] else pytest.approx(alone[-1].item(), rel=1e-9))


def test_values_do_not_know_their_padding_or_their_company():
    model, rows = critic(), some_rows()
    wide = rows.replace(tokens=torch.nn.functional.pad(rows.tokens, (0, 4), value=9),
                        action_mask=torch.nn.functional.pad(rows.action_mask, (0, 4)))
    values, bootstrap = state_values(model, rows, 1)
    for again, size in ((wide, 2), (rows.rows(tensor([1, 0])), 2)):
        more, other = state_values(model, again, size)
        order = [1, 0] if again is not wide else [0, 1]
        mask = rows.action_mask
        torch.testing.assert_close(more[order][:, :5][mask], values[mask], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other[order], bootstrap, rtol=1e-9, atol=1e-12)


def test_a_new_critic_says_nothing_and_has_the_layers_of_the_policy():
    model, source = critic_of(policy()), policy()
    assert not state_values(model, some_rows(), 2)[0].any()
    assert torch.equal(model.layers[0].mlp.up_proj.weight.double(), source.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("kind", ["joint", "detached"])
def test_a_head_on_the_policy_gives_values_beside_log_probs_and_shapes_the_layers_only_if_joint(kind):
    model = add_value_head(policy(), kind == "detached").double()
    torch.nn.init.normal_(model.value_head.weight)
    rows = some_rows(values=torch.zeros(2, 5), returns=torch.ones(2, 5))
    plain = token_logprobs(policy(), rows.tokens)
    found = {}

    def loss_fn(out: Output, mb: Rollout, which: str):
        found[which] = out
        value, _ = critic_loss(out, mb, train_ppo.Config(), tensor(5.0))
        return out.logprobs.sum() + (value if which == "both" else 0 * value), {}

    gradients = {}
    for which in ("policy", "both"):
        forward_backward(model, [rows], lambda out, mb, which=which: loss_fn(out, mb, which), Mesh())
        gradients[which] = model.layers[0].mlp.up_proj.weight.grad.clone(), model.value_head.weight.grad.clone()
        model.zero_grad()
    mask = rows.action_mask
    torch.testing.assert_close(found["both"].logprobs[mask], plain[mask], rtol=1e-12, atol=1e-12)
    assert found["both"].values.shape == (2, 5)
    assert torch.equal(gradients["both"][0], gradients["policy"][0]) == (kind == "detached")
    assert gradients["both"][1].any() and not gradients["policy"][1].any()


# ---- the losses ----

def outputs() -> tuple[Output, Rollout]:
    g = torch.Generator().manual_seed(2)
    draw = lambda: torch.randn(2, 5, generator=g, dtype=torch.float64)
    rows = some_rows(old_logprobs=draw() - 2, ref_logprobs=draw() - 2, advantages=draw(), values=draw(), returns=draw())
    return Output(draw() - 2, draw().abs(), None), rows


def test_the_policy_loss_is_the_sum_of_what_was_asked_for():
    out, rows = outputs()
    mask, total = rows.action_mask, rows.action_mask.sum()
    surrogate = clipped_surrogate(out.logprobs, rows.old_logprobs, rows.advantages, 0.2, 0.2)[mask].mean()
    d = (out.logprobs - rows.ref_logprobs)[mask]
    wanted = {"plain": ({}, surrogate),
              "entropy": (dict(entropy_coef=0.1), surrogate - 0.1 * out.entropy[mask].mean()),
              "kl": (dict(kl="loss", kl_kind="k2"), surrogate + 0.3 * (d.square() / 2).mean()),
              "kl in the reward": (dict(kl="reward"), surrogate),
              "right": (dict(positive_nll=0.1), surrogate - 0.1 * out.logprobs[0][mask[0]].mean())}
    for name, (options, value) in wanted.items():
        right = right_tokens(mask, rows.rewards).sum()
        loss, stats = policy_loss(out, rows, train_ppo.Config(**options), 0.3, total, right)
        torch.testing.assert_close(loss, value, msg=name)
        assert stats["policy_loss"] / stats["tokens"] == pytest.approx(surrogate.item())
    joint, stats = policy_loss(out._replace(values=rows.values + 1), rows, train_ppo.Config(value_clip=0.0), 0.3, total,
                               total)
    value = value_loss(rows.values + 1, rows.values, rows.returns)[mask].mean()
    torch.testing.assert_close(joint, surrogate + 0.5 * value)
    assert stats["value_loss"] / stats["value_tokens"] == pytest.approx(value.item())


@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_the_policy_loss_may_go_through_the_columns_piece_by_piece(mode):
    out, rows = outputs()
    rows = rows.replace(row_tokens=rows.action_mask.sum(1))
    config = train_ppo.Config(kl="loss", kl_kind="k2", entropy_coef=0.1, positive_nll=0.1, aggregate=mode)
    of = lambda out, rows: policy_loss(out, rows, config, 0.3, tensor(5), tensor(3))[0]
    pieces = [slice(0, 1), slice(1, 4), slice(4, 5)]
    parts = [of(Output(out.logprobs[:, c], out.entropy[:, c]), rows.columns(c)) for c in pieces]
    torch.testing.assert_close(sum(parts), of(out, rows))


def test_vapo_imitates_right_answers_alone():
    """PAPERS.md: log-probs [-.5, -1.5] of a right answer: 1.0 a token, 0.1 of the loss."""
    rows = some_rows(old_logprobs=torch.zeros(2, 5), advantages=torch.zeros(2, 5)).replace(
        action_mask=tensor([[F, T, T, F, F], [T, T, T, F, F]]))
    out = Output(tensor([[0.0, -0.5, -1.5, 0, 0], [-9.0, -9, -9, 0, 0]]), torch.zeros(2, 5), None)
    right = right_tokens(rows.action_mask, rows.rewards)
    assert right.sum() == 2 and aggregate(sft_loss(out.logprobs), right, "token", right.sum()) == 1
    loss, _ = policy_loss(out, rows, train_ppo.Config(vapo=True), 0.0, tensor(5), right.sum())
    assert loss.item() == pytest.approx(0.1)


def test_kl_in_the_loss_pulls_the_policy_home():
    model, reference, rows = policy(), policy(), some_rows(advantages=torch.zeros(2, 5))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    mask, config = rows.action_mask, train_ppo.Config(kl="loss", kl_kind="k2")

    def distance() -> float:
        return (token_logprobs(model, rows.tokens) - rows.ref_logprobs)[mask].square().mean().item()

    with torch.no_grad():
        rows = rows.replace(old_logprobs=token_logprobs(model, rows.tokens),
                            ref_logprobs=token_logprobs(reference, rows.tokens))
    before = distance()
    forward_backward(model, [rows], lambda out, mb: policy_loss(out, mb, config, 1.0, mask.sum(), mask.sum()), Mesh(),
                     entropy=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-2 * parameter.grad
    assert distance() < before


def test_a_cut_answer_pays_once_and_an_ended_one_never():
    rewards = tensor([1.0, 0.0, 0.5])
    assert missing_eos_penalty(rewards, tensor([T, F, F]), 0.25).tolist() == [1.0, -0.25, 0.25]
    assert rewards.tolist() == [1.0, 0.0, 0.5]


def test_the_critic_learns_what_was_earned():
    """On fixed rows, values come to be the returns."""
    env, tokenizer = make_env("addition", difficulty=1), ByteTokenizer()
    rows = demonstrate(tokenizer, env, env.sample(4))
    returns = torch.where(rows.action_mask, tensor([1.0, 0, 1, 0])[:, None], 0.0)
    rows = rows.replace(returns=returns, values=torch.zeros_like(returns))
    model = critic_of(policy()).float()
    optimizer = adamw(model, 1e-2)
    for _ in range(60):
        stats = forward_backward(model, rows.microbatches(3), lambda out, mb: critic_loss(
            out, mb, train_ppo.Config(value_clip=0.0), rows.action_mask.sum()), Mesh())
        optimizer.step()
        optimizer.zero_grad()
    assert stats["loss"] < 0.01


def test_returns_are_advantages_before_they_are_whitened_plus_values():
    rows = some_rows()
    mask, earned = rows.action_mask, torch.where(rows.action_mask, tensor([[0.5], [-1.0]]).double(), 0.0)
    found = {whitened: train_ppo.with_advantages(train_ppo.Config(whiten=whitened), rows, earned, critic(), False,
                                                 Mesh()) for whitened in (False, True)}
    plain, white = found[False], found[True]
    torch.testing.assert_close(white.returns[mask], (plain.advantages + plain.values)[mask], rtol=1e-9, atol=1e-12)
    assert white.advantages[mask].mean().abs() < 1e-9 < plain.advantages[mask].mean().abs()


# ---- the trainer ----

FORMS = {
    "own": {}, "joint": dict(critic="joint"), "detached": dict(critic="detached"),
    "reinforce": dict(advantage="reinforce"),
    "lora": dict(lora_rank=2), "lora joint": dict(lora_rank=2, critic="joint"),
    "vapo": dict(vapo=True, prompts_per_step=8, group_size=4, value_pretraining=1),
    "kl": dict(kl_control="threshold", kl_target=0.01, kl="loss", kl_kind="k3", kl_coef=0.01),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_is_an_unbroken_one_to_the_bit(form, tmp_path, start):
    ppo(tmp_path / "unbroken", start, **FORMS[form], eval_every=2)
    ppo(tmp_path / "broken", start, **FORMS[form], eval_every=2, steps=2)
    rows = ppo(tmp_path / "broken", start, **FORMS[form], eval_every=2, resume=True)
    if "lora" in form:
        assert rows == numbers(tmp_path / "unbroken")
    else:
        assert_same_run(tmp_path / "broken", tmp_path / "unbroken", 4)
    own = form in ("own", "lora", "vapo", "kl")
    assert (tmp_path / "broken/critic").is_dir() == own
    assert steps_in(tmp_path / "broken") == ["step_0", "step_4"]
    if own:
        assert steps_in(tmp_path / "broken/critic") == ["step_0", "step_2", "step_4"], "one more than of the policy"
    if form == "own":
        assert_same_critic(tmp_path / "broken", tmp_path / "unbroken")
        assert load_model(tmp_path / "broken/critic/step_4").config.num_labels == 1
        load_model(tmp_path / "broken/step_4")
    if form == "joint":
        names = load_file(tmp_path / "broken/step_4/model.safetensors").keys()
        assert not [name for name in names if "head" in name], "other programs would not know what it is"
        head = load_file(tmp_path / "broken/step_4/training/value_head.safetensors")["weight"]
        assert head.shape == (1, 32) and head.any()


def assert_same_critic(run: Path, unbroken: Path) -> None:
    ours, theirs = weights(run / "critic", 4), weights(unbroken / "critic", 4)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_metrics_have_the_names_that_cleanrl_made_standard(tmp_path, start):
    last = ppo(tmp_path / "own", start)[-1]
    names = {"value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clip_frac", "explained_variance",
             "kl_ref", "kl_coef", "grad_norm", "critic_grad_norm", "value_clip_frac", "updates"}
    assert names <= last.keys() and last["updates"] == 2
    assert last["ratio_max_deviation"] < 1e-5, "sampler and trainer disagree about the policy"
    assert "zero_variance_groups" not in last, "there are no groups"
    last = ppo(tmp_path / "plain", start, advantage="baseline", steps=1)[-1]
    assert not {"value_loss", "explained_variance"} & last.keys()


def test_value_pretraining_leaves_the_policy_as_it_is(tmp_path, start):
    ppo(tmp_path / "run", start, value_pretraining=2, steps=3, keep=2)
    rows = numbers(tmp_path / "run")[:3]
    first, last = (load_file(tmp_path / f"run/step_{step}/model.safetensors") for step in (0, 2))
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert "loss" not in rows[-1] and rows[-1]["value_loss"] > 0 and rows[-1]["updates"] == 0


def test_the_rest_of_a_rollout_is_left_when_the_policy_has_moved_too_far(tmp_path, start):
    rows = ppo(tmp_path / "run", start, target_kl=1e-9, epochs=3, steps=1)
    assert rows[-1]["updates"] == 2, "the first pass has moved nowhere, the second a little"


def test_an_adaptive_price_follows_the_distance_and_is_saved(tmp_path, start):
    rows = ppo(tmp_path / "run", start, kl_control="threshold", kl_target=100.0, kl_coef=0.08)
    assert [row["kl_coef"] for row in rows[1:]] == [0.08, 0.04, 0.02, 0.01]
    assert load_checkpoint(latest_checkpoint(tmp_path / "run"))[1]["kl_coef"] == 0.005


def test_a_tool_answer_is_trained_on_where_the_policy_wrote_and_nowhere_else(tmp_path):
    start = train_sft.main(train_sft.Config(run_dir=str(tmp_path / "sft"), **SFT | dict(task="calculator", steps=30)))
    seen = []
    original = minirl.ppo.gae

    def looking(rewards, values, mask, *rest):
        found = original(rewards, values, mask, *rest)
        seen.append(all(not x[~mask].any() for x in (rewards, *found)))
        return found

    minirl.ppo.gae = looking
    try:
        ppo(tmp_path / "run", start, task="calculator", difficulty=2, steps=2, prompts_per_step=8, max_new_tokens=24)
    finally:
        minirl.ppo.gae = original
    assert seen and all(seen)


def test_a_cut_is_an_end_unless_it_is_asked_otherwise(tmp_path, start):
    """The first critic says 0 everywhere, and from the second step on it matters."""
    options = dict(steps=2, max_new_tokens=1, missing_eos_penalty=1.0)
    ends, goes_on = (ppo(tmp_path / str(cut), start, bootstrap_cut=cut, **options) for cut in (False, True))
    assert ends[1] == goes_on[1] and ends[1]["truncated"] == 1
    assert ends[2]["value_loss"] != goes_on[2]["value_loss"]


def test_vapo_is_a_row_of_options_and_what_is_given_counts_more():
    config = train_ppo.Config(vapo=True, eps_high=0.2, prompts_per_step=12)
    assert (config.group_size, config.value_lam, config.positive_nll, config.lam_alpha) == (4, 1.0, 0.1, 5.0)
    assert (config.eps_high, config.prompts_per_step) == (0.2, 12)
    assert (train_ppo.Config(vapo=True).eps_low, train_ppo.Config(vapo=True).eps_high) == (0.2, 0.28)
    assert train_ppo.Config().group_size == 1


# ---- paid by a reward model ----

@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, start) -> Path:
    """One with an opinion, if not with reason."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    model = reward_model_of(load_model(start), torch.Generator().manual_seed(4))
    save_model(model, folder, load_tokenizer(start))
    return folder


def test_a_reward_model_pays_and_the_verifier_looks_on(tmp_path, start, reward_model, monkeypatch):
    paid = []
    monkeypatch.setattr(minirl.ppo, "missing_eos_penalty", lambda scores, *rest: paid.append(scores) or scores)
    judged = ppo(tmp_path / "task", start, steps=1)
    scored = ppo(tmp_path / "model", start, steps=1, reward_model=str(reward_model))
    assert scored[1]["reward_mean"] == judged[1]["reward_mean"] == paid[0].mean(), "of the same samples"
    assert scored[1]["score_mean"] == pytest.approx(paid[1].mean().item()) and "score_mean" not in judged[1]
    assert not torch.equal(paid[0], paid[1]) and scored[1]["loss"] != judged[1]["loss"]


def test_a_reward_model_that_learns_too_is_part_of_the_run(tmp_path, start, reward_model):
    options = dict(reward_model=str(reward_model), reward_model_every=1, group_size=4, prompts_per_step=8, eval_every=2)
    ppo(tmp_path / "unbroken", start, **options)
    ppo(tmp_path / "broken", start, **options, steps=2)
    rows = ppo(tmp_path / "broken", start, **options, resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken", 4)
    assert "preference_accuracy" in rows[-1]
    ours, theirs = (load_file(tmp_path / run / "reward_model/step_4/model.safetensors") for run in
                    ("broken", "unbroken"))
    before = load_file(reward_model / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["score.weight"], before["score.weight"])


def test_a_language_model_cannot_pay(tmp_path, start):
    flags = ["--difficulty", "1", "--reward-model", str(start)]
    for init in (["--init", str(start)], []):
        assert_refused(train_ppo, [*flags, *init], "is a language model, which gives no score", tmp_path / "run")


@pytest.mark.parametrize("flag", ["--reward-model", "--critic-init"])
def test_a_folder_that_cannot_be_used_is_known_before_a_cold_start(flag, tmp_path, reward_model):
    def damaged(name: str, damage: Callable[[Path], object]) -> Path:
        shutil.copytree(reward_model, tmp_path / name)
        damage(tmp_path / name / "model.safetensors")
        return tmp_path / name

    tensors = load_file(reward_model / "model.safetensors")
    norm, broken = ({"model.norm.weight": torch.full((size,), value)} for size, value in ((31, 1.0), (32, math.nan)))
    run = tmp_path / "a_run"
    save_checkpoint(run, 3, load_model(reward_model), load_tokenizer(reward_model), {}, {})
    (run / "config.json").write_text("{}")
    for folder, message in {
            tmp_path / "nowhere": "model folder .*nowhere does not exist",
            damaged("empty", Path.unlink): "empty holds no weights",
            damaged("cut", lambda path: path.write_bytes(path.read_bytes()[:-10])): "cut.*is truncated",
            damaged("other", lambda path: save_file(tensors | norm, path)): r"other do not fit.*norm\.weight \(31,\)",
            damaged("half", lambda path: save_file({**norm}, path)): "half do not fit its config.json: missing: ",
            damaged("nan", lambda path: save_file(tensors | broken, path)): r"nan/model\.safet.*: model\.norm",
            damaged("short", shorten): "short has a context of 4 tokens, but prompts have up to 6 and answers 4",
            damaged("adapter", lambda path: (path.parent / "adapter_config.json").write_text("{}")):
                "adapter is an adapter, and a .* whole",
            run: "a_run is the folder of a run: give one of its checkpoints, the newest is .*step_3"}.items():
        assert_refused(train_ppo, [flag, str(folder)], message, tmp_path / "run")


def shorten(weights: Path) -> None:
    path = weights.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4}))


BAD = [
    ("--reward-model-every 2", "--reward-model-every teaches a reward model with pairs"),
    ("--kl loss", "--kl loss --kl-kind k1 trains nothing"),
    ("--kl-control threshold --kl-coef 0", "--kl-control threshold multiplies --kl-coef, which is 0"),
    ("--gamma 1.5", "--gamma 1.5: it must lie between 0 and 1"),
    ("--lam -0.1", "--lam -0.1: it must lie between 0 and 1"),
    ("--value-pretraining 3 --critic joint", "error: --value-pretraining trains a critic .*with --critic joint "),
    ("--vapo --critic joint", "error: --vapo trains a critic .*or --value-pretraining 0"),
    ("--vapo --value-pretraining 3 --advantage reinforce", "error: --value-pretraining .*--advantage reinforce "),
    ("--critic-init x --critic joint", "--critic-init is what an own critic starts from"),
    ("--value-pretraining 3 --steps 3", "--steps 3 leaves the policy nothing behind 3 rollouts"),
    ("--vapo --steps 9", "--steps 9 leaves the policy nothing behind 10 rollouts of value pretraining"),
    ("--minibatches 3 --prompts-per-step 4", "--minibatches 3 does not divide the 4 x 1 rows"),
    ("--missing-eos-penalty -1", "--missing-eos-penalty is -1.0: it must be 0 or above"),
    ("--advantage td", "invalid choice: 'td'"),
    ("--critic none", "invalid choice: 'none'"),
    ("--group-size 0", "--group-size is 0: it must be above 0"),
    ("--kl-target 0", "--kl-target is 0.0"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=[flags for flags, _ in BAD])
def test_a_bad_value_is_one_line_before_any_work(flags, message, tmp_path):
    assert_refused(train_ppo, flags.split(), message, tmp_path / "run")


def test_a_critic_of_another_vocabulary_is_refused(tmp_path, start, shared):
    save_model(Transformer(replace(SHAPE, vocab_size=100)), tmp_path / "small")
    flags = ["--init", str(start), "--difficulty", "1", "--critic-init", str(tmp_path / "small")]
    assert_refused(train_ppo, flags, "they do not belong together", tmp_path / "run")
    stories = load_tokenizer(shared / "models/stories260k")
    save_model(Transformer(replace(SHAPE, vocab_size=512)), tmp_path / "large", stories)
    flags[-1] = str(tmp_path / "large")
    assert_refused(train_ppo, flags, r"critic .*large has another vocabulary than the policy \(512 tokens and 258\)",
                   tmp_path / "run")


def test_ppo_raises_its_reward_and_its_critic_explains_it(tmp_path, start):
    rows = ppo(tmp_path / "run", start, steps=40, prompts_per_step=256, lr=1e-3, save_every=100)
    rewards = [row["reward_mean"] for row in rows if "reward_mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05
    assert rows[-1]["explained_variance"] > 0.1


# ---- ranks and kills ----

LAYOUT = PPO | dict(dtype="float64", steps=2, prompts_per_step=16, epochs=2, kl_coef=0.05, microbatch_size=6,
                    save_every=1, keep=9, whiten_rewards=True, positive_nll=0.1, entropy_coef=0.01)
SPREAD = [dict(dp=2), dict(tp=2), dict(pp=2), dict(cp=2), dict(zero=3), dict(critic="joint", pp=2),
          dict(critic="joint", zero=3)]


def every_layout(layouts: dict[int, dict], folder: str, start: str) -> None:
    for number, layout in layouts.items():
        train("train_ppo", LAYOUT | layout | dict(run_dir=f"{folder}/{number}", init=start))


@dist
def test_every_layout_trains_as_one_process_and_goes_on_as_one(tmp_path, start):
    two, critics = str(tmp_path / "two"), [dict(critic=critic) for critic in ("own", "joint")]
    at_once(partial(run_ranks, every_layout, 2, dict([*enumerate(SPREAD)][::2]), two, str(start), timeout=120),
            partial(run_ranks, every_layout, 2, dict([*enumerate(SPREAD)][1::2]), two, str(start), timeout=120),
            partial(every_layout, dict(enumerate(critics)), str(tmp_path / "alone"), str(start)))
    for number, layout in enumerate(SPREAD):
        run, alone = tmp_path / f"two/{number}", tmp_path / f"alone/{int(layout.get('critic') == 'joint')}"
        for ours, theirs in zip(numbers(run), numbers(alone)[:3], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-11), layout
        for name, weight in weights(alone, 2).items():
            torch.testing.assert_close(weights(run, 2)[name], weight, rtol=1e-7, atol=1e-9, msg=f"{layout}: {name}")
    resume = LAYOUT | dict(init=str(start), steps=3, resume=True)
    for run in (tmp_path / "alone/0", tmp_path / "two/4"):  # on one process, what zero=3 has left
        train("train_ppo", resume | dict(run_dir=str(run)))
        assert numbers(run)[3] == pytest.approx(numbers(tmp_path / "alone/0")[3], rel=1e-8, abs=1e-11)


CHAIN = PPO | dict(steps=5, prompts_per_step=16, cold_start_steps=20, cold_start_accuracy=0.0)


@dist
def test_killed_at_random_moments_policy_and_critic_resume_together(tmp_path):
    rng = random.Random(3)
    kills = [KillAt("broken/critic", rng.randint(1, 5)), KillAt("broken/critic/step_2", rng.randint(1, 20)),
             KillAt("broken/step_2", rng.randint(1, 20)), KillAt("broken/critic/step_4", rng.randint(10, 25))]
    broken, unbroken = chains = [Chain("train_ppo", CHAIN | dict(run_dir=str(tmp_path / name)), interrupts)
                                 for name, interrupts in (("broken", kills), ("unbroken", []))]
    carry_out(*chains)
    broken.check(), unbroken.check()
    assert_same_run(broken.run, unbroken.run, 5)
    ours, theirs = (load_file(tmp_path / run / "critic/step_5/model.safetensors") for run in ("broken", "unbroken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
