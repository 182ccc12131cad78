"""Policy and environment on one tape: what SFT imitates is what RL samples, and rewards are what was earned."""

import json
import threading
import time
from random import Random
from types import SimpleNamespace

import pytest
import torch
from stubs import Chain, Pieces, Reader, random_policy, small_config
from torch.testing import assert_close

import minirl.evaluate
import minirl.logprobs
from minirl.config import UserError
from minirl.env import make_env
from minirl.env.base import Example, Step
from minirl.env.loop import collect, demonstrate, fit_to_context, longest_row, prompt_tokens, row_length
from minirl.evaluate import evaluate, rollout_metrics, sample_text
from minirl.logprobs import rollout_logprobs
from minirl.losses import aggregate, clipped_surrogate, kl_estimate, loss_total, sft_loss
from minirl.model import Transformer
from minirl.parallel import Mesh, forward_backward
from minirl.tokenizer import ByteTokenizer, load_tokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id
TASKS = ["addition", "calculator", "gsm8k", "shop", "code", "countdown", "lookup", "walk"]


@pytest.fixture
def make(tmp_path):
    """make(task, **options) -> Env; gsm8k gets a file of 20 rows of different lengths."""
    rows = [{"question": f"What is {n}+0? {'x' * n}", "answer": f"It is <<{n}+0={n}>>{n}.\nWhy?\n#### {n}"}
            for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = str(tmp_path / "rows.jsonl")
    return lambda name, **options: make_env(name, data=data if name == "gsm8k" else "", **options)


def rows(rollout):
    return [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths)]


def said(tokenizer, rollout):
    """The texts that each row's policy wrote, turn by turn, EOS left out."""
    turns = []
    for row, mask in zip(rollout.tokens, rollout.action_mask):
        turns.append([""])
        for token, chosen, before in zip(row[1:].tolist(), mask.tolist(), [False, *mask.tolist()]):
            if chosen and not before and turns[-1] != [""]:
                turns[-1].append("")
            turns[-1][-1] += tokenizer.decode([token], continued=True) if chosen else ""
    return turns


class Talk:
    """Every action is answered by its turn's line, and paid with its turn's reward; after the third all is over."""

    name, stop, max_new_tokens = "talk", ("c",), 30
    lines, pay = ("gg", "h", ""), (0.25, -1.0, 0.5)

    def sample(self, count, start=0, split="train"):
        return [Example("abd"[i % 3] * (1 + i % 4), "", ("bc", "dc", "c")) for i in range(start, start + count)]

    def size(self, split):
        return None

    def reset(self, example):
        turn = iter(range(3))

        def step(action):
            n = next(turn)
            return Step(self.lines[n], self.pay[n], n == 2, {"action": action})

        return SimpleNamespace(prompt=example.prompt, step=step)


class Recorder:
    """An episode that keeps the actions it is given."""

    def __init__(self, episode, actions):
        self.episode, self.actions = episode, actions

    def step(self, action):
        self.actions.append(action)
        return self.episode.step(action)


LETTERS = Pieces(*"abcdefgh")


# ---- one tape ----

def test_a_demonstration_by_hand():
    example = Example("12*34-56=", "352", ("<calc>12*34-56</calc>", "352"))
    rollout = demonstrate(BYTES, make_env("calculator"), [example], first=7)
    assert BYTES.decode(rows(rollout)[0]) == "12*34-56=<calc>12*34-56</calc>352   \n352"
    assert rows(rollout)[0][-1] == EOS
    assert said(BYTES, rollout) == [["<calc>12*34-56</calc>", "352"]]
    mask = [False] * 8 + [True] * 21 + [False] * 7 + [True] * 4  # prompt but its first, call, output, answer and EOS
    assert rollout.action_mask.tolist() == [mask], "the tool's output, or the prompt, is trained on; or EOS is not"
    assert (rollout.sample_ids.tolist(), rollout.group.tolist()) == ([7], [7])
    assert rollout.old_logprobs is None and rollout.finished is None


def test_what_a_search_returned_is_not_trained_on():
    """Search-R1's mask: the response, 111110, without what was retrieved, 001100."""
    env = Talk()
    env.lines, env.pay = ("gg", "", ""), (0.0, 1.0, 0.0)
    short, long = (Example(prompt, "", ("bc", "c")) for prompt in ("a", "aa"))
    assert demonstrate(LETTERS, env, [short, long]).action_mask[0].int().tolist() == [1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("task", TASKS)
def test_a_policy_that_acts_as_the_expert_gives_the_experts_tape(make, task):
    env = make(task, difficulty=4) if task == "code" else make(task)  # two ways with one problem confuse the reader
    examples = env.sample(30)
    expert = demonstrate(BYTES, env, examples)
    policy = Reader(BYTES.vocab_size, rows(expert))
    played = collect(policy, BYTES, env, examples, max_new_tokens=env.max_new_tokens, temperature=0, max_rows=1)
    assert torch.equal(played.tokens, expert.tokens), "SFT and RL see different tokens"
    assert torch.equal(played.action_mask, expert.action_mask), "SFT and RL train on different tokens"
    assert torch.equal(played.lengths, expert.lengths) and played.finished.all()
    assert said(BYTES, played) == [list(example.solution) for example in examples]
    for row, example in enumerate(examples):
        if task in ("addition", "gsm8k"):
            assert played.rewards[row] == 1.0
        elif task == "calculator":
            assert played.rewards[row] == float(len(example.solution) == 2), "the novice's estimates are not paid"
        assert BYTES.decode(rows(played)[row]) == example.prompt + played.texts[row]
        assert len(played.turns[row]) == len(example.solution)


def test_a_tokenizer_with_a_leading_space_and_bos_gives_one_tape_too(shared, make):
    tokenizer = load_tokenizer(shared / "models/stories260k")
    for task in ("calculator", "gsm8k"):
        env, judged = make(task), []
        examples = env.sample(12)
        expert = demonstrate(tokenizer, env, examples)
        assert all(row[0] == tokenizer.bos_id and row.count(tokenizer.bos_id) == 1 for row in rows(expert))
        policy = Reader(tokenizer.vocab_size, rows(expert), context=512)
        env.reset = lambda example, reset=env.reset, judged=judged: Recorder(reset(example), judged)
        played = collect(policy, tokenizer, env, examples, max_new_tokens=256, temperature=0, max_rows=1)
        assert torch.equal(played.tokens, expert.tokens) and torch.equal(played.action_mask, expert.action_mask)
        for example, row, text, turns in zip(examples, rows(played), played.texts, played.turns):
            assert tokenizer.decode(row) == example.prompt + text, "a space is added or lost between prompt and answer"
            outputs = [turn.observation for turn in turns]
            assert text == "".join(action + output for action, output in zip(example.solution, outputs))
        assert judged == [action for example in examples for action in example.solution], "a space is lost"


def test_an_answer_ends_before_the_model_invents_the_next_question(make):
    env = make("gsm8k")
    example = Example("Question: 2+3?\nAnswer:", "5")
    row = BYTES.encode(example.prompt + " #### 5\nQuestion: 2+2?\nAnswer: #### 4")
    policy = Reader(BYTES.vocab_size, [row])
    played = collect(policy, BYTES, env, [example], max_new_tokens=100, temperature=0, max_rows=1)
    assert played.texts == [" #### 5\nQuestion:"]
    assert played.rewards.tolist() == [1.0] and played.finished.tolist() == [True]


@pytest.mark.parametrize("loss", ["sft", "clipped surrogate and kl"])
@pytest.mark.parametrize("mode", ["token", "sequence", "prompt", "constant"])
def test_no_gradient_reaches_what_a_tool_said_or_a_prompt_or_padding(loss, mode):
    env = make_env("calculator")
    rollout = demonstrate(BYTES, env, [e for e in env.sample(60) if len(e.solution) == 2][:6])
    mask, group = rollout.action_mask, rollout.group // 2
    policy = random_policy(BYTES.vocab_size, context=64)
    logits = policy.logits(policy(rollout.tokens[:, :-1]))  # (B, S, V)
    logits.retain_grad()
    logprobs = logits.log_softmax(-1).gather(-1, rollout.tokens[:, 1:, None])[..., 0]
    if loss == "sft":
        per_token = sft_loss(logprobs)
    else:
        advantages = torch.tensor([1.0, -1.0] * 3).double()[:, None]
        per_token = clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
        per_token = per_token + 0.1 * kl_estimate(logprobs, logprobs.detach() - 0.3, "k3")
    tokens = torch.zeros(3, dtype=torch.int64).index_add(0, group, mask.sum(1))[group]
    aggregate(per_token, mask, mode, loss_total(mode, mask, None, group, 30), tokens).backward()
    size = logits.grad.abs().sum(-1)
    assert (size[~mask] == 0).all(), "the policy is trained on words that it did not choose"
    assert (size[mask] > 0).all(), "a word that it did choose is left out"


@pytest.mark.parametrize("in_pieces", [False, True])
def test_no_path_of_the_trainers_loss_looks_at_what_a_tool_said(in_pieces, monkeypatch):
    monkeypatch.setattr(minirl.logprobs, "KEEP_LOGITS", 0 if in_pieces else 10**9)
    env, policy, seen = make_env("shop"), random_policy(BYTES.vocab_size, context=256), []
    rollout = demonstrate(BYTES, env, env.sample(6))
    rollout = rollout.replace(advantages=torch.randn(6, 1, generator=torch.Generator().manual_seed(0)).double())
    policy.norm.register_forward_hook(lambda module, inputs, hidden: hidden.register_hook(seen.append) and None)

    def loss_fn(out, mb):
        per_token = clipped_surrogate(out.logprobs, out.logprobs.detach(), mb.advantages, 0.2, 0.2)
        per_token = per_token + 0.1 * kl_estimate(out.logprobs, out.logprobs.detach() - 0.3, "k3") - out.entropy
        return aggregate(per_token, mb.action_mask, "token", 100), {}

    forward_backward(policy, rollout.microbatches(4), loss_fn, Mesh(), entropy=True, by_token=True)
    for grad, mb in zip(seen, rollout.microbatches(4), strict=True):
        size = grad.abs().sum(-1)
        assert (size[~mb.action_mask] == 0).all() and (size[mb.action_mask] > 0).all()


# ---- collect ----

def test_the_reward_of_a_row_is_the_sum_of_its_steps():
    policy = Chain(LETTERS.vocab_size, {0: 1, 1: 2, 3: 2, 6: 3, 7: 2}, context=64)  # bc (gg) dc (h) c
    env = Talk()
    rollout = collect(policy, LETTERS, env, [Example("ba", "")], max_new_tokens=30, temperature=0)
    assert policy.fed[0] == (1, 1)
    # The prompt ends in a: b c | g g, then after g comes d: d c | h, then c.
    assert rollout.texts == ["bcggdchc"]
    assert said(LETTERS, rollout) == [["bc", "dc", "c"]]
    assert rollout.rewards.tolist() == [-0.25] and rollout.rewards.dtype == torch.float32
    assert [step.info["action"] for step in rollout.turns[0]] == ["bc", "dc", "c"]
    assert rollout.finished.tolist() == [True]


def test_a_row_that_is_cut_is_paid_for_the_turns_it_had():
    policy = Chain(LETTERS.vocab_size, {0: 1, 1: 2, 3: 3, 6: 3}, context=64)  # bc (gg) d d d d ...
    rollout = collect(policy, LETTERS, Talk(), [Example("ba", "")], max_new_tokens=5, temperature=0)
    assert rollout.texts == ["bcggddd"]
    assert [step.info["action"] for step in rollout.turns[0]] == ["bc", "ddd"], "the last action is judged as it stands"
    assert rollout.rewards.tolist() == [-0.75] and rollout.finished.tolist() == [False]


def test_every_row_of_a_group_has_an_episode_of_its_own():
    env, policy = Talk(), random_policy(LETTERS.vocab_size)
    rollout = collect(policy, LETTERS, env, env.sample(3), group_size=4, max_new_tokens=12, seed=3)
    assert len(rollout) == 12 and rollout.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len({len(turns) for turns in rollout.turns}) > 1, "rows of different lengths are wanted here"
    for row, (tokens, text, turns) in enumerate(zip(rows(rollout), rollout.texts, rollout.turns)):
        prompt = env.sample(3)[row // 4].prompt
        assert LETTERS.decode(tokens) == prompt + text
        assert sum(env.pay[: len(turns)]) == rollout.rewards[row], "steps of another row"
        actions = said(LETTERS, rollout)[row]
        assert [step.info["action"] for step in turns] == actions[: len(turns)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_that_take_slices_play_what_one_rank_plays(ranks):
    env, policy = Talk(), random_policy(LETTERS.vocab_size)
    options = dict(group_size=2, max_new_tokens=12, seed=3, temperature=0.9)
    first = 60  # prompts of earlier steps
    whole = collect(policy, LETTERS, env, env.sample(6, start=first), first_prompt=first, **options)
    assert whole.group.tolist() == [60, 60, 61, 61, 62, 62, 63, 63, 64, 64, 65, 65]
    assert whole.sample_ids.tolist() == list(range(120, 132))
    size = 6 // ranks
    parts = [collect(policy, LETTERS, env, env.sample(size, start=first + r * size), first_prompt=first + r * size,
                     max_rows=1 + r, **options) for r in range(ranks)]
    assert [row for part in parts for row in rows(part)] == rows(whole), "noise depends on the rank"
    for name in ("rewards", "group", "sample_ids", "lengths", "finished"):
        assert torch.cat([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist(), name
    assert [text for part in parts for text in part.texts] == whole.texts
    found = torch.cat([part.old_logprobs[part.action_mask] for part in parts])
    assert_close(found, whole.old_logprobs[whole.action_mask], rtol=0, atol=1e-9)


@pytest.mark.parametrize("task", [*TASKS, "thought"])
def test_the_first_pass_has_ratio_1_in_every_environment(make, task):
    env = make(task)
    examples = env.sample(6)
    actions = {action for example in examples for action in example.solution}  # words, so that chance makes calls too
    tokenizer = Pieces(*sorted({*map(chr, range(32, 127)), "\n", *actions}))
    policy = Transformer(small_config(tokenizer.vocab_size, 512)).init_weights(torch.Generator().manual_seed(0))
    rollout = collect(policy, tokenizer, env, examples, group_size=8, max_new_tokens=24, seed=1)
    assert (max(map(len, rollout.turns)) > 1) == (task not in ("addition", "gsm8k", "thought")), "no observation in it"
    logprobs = rollout_logprobs(policy, rollout, 5, 1.0, Mesh())
    ratio = (logprobs - rollout.old_logprobs)[rollout.action_mask].exp()
    assert (ratio - 1).abs().max() <= 1e-5


# ---- tools that take a while ----

class Slow(Talk):
    """Talk, whose lines take a while: in `threads` rows at a time."""

    def __init__(self, threads, seed=0):
        self.threads, self.random = threads, Random(seed)

    def reset(self, example):
        episode, pause = super().reset(example), self.random.random() * 0.01
        return SimpleNamespace(prompt=episode.prompt, step=lambda action: time.sleep(pause) or episode.step(action))


@pytest.mark.parametrize("max_rows", [5, 100])
def test_a_slow_tool_changes_nothing_but_the_time(max_rows):
    policy = random_policy(LETTERS.vocab_size)
    options = dict(group_size=4, max_new_tokens=12, seed=3, max_rows=max_rows)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        policy = policy.to(dtype)
        played = [collect(policy, LETTERS, Slow(*how), Slow(0).sample(6), **options) for how in ((0,), (3, 1), (8, 2))]
        for other in played[1:]:
            assert torch.equal(other.tokens, played[0].tokens) and torch.equal(other.action_mask, played[0].action_mask)
            assert (other.turns, other.texts) == (played[0].turns, played[0].texts)
            assert torch.equal(other.finished, played[0].finished) and torch.equal(other.rewards, played[0].rewards)
            assert_close(other.old_logprobs, played[0].old_logprobs, rtol=0, atol=tolerance)
        assert torch.equal(played[1].old_logprobs, played[2].old_logprobs), "it depends on the clock, to the last digit"


def test_the_others_decode_while_a_tool_runs():
    policy = Chain(LETTERS.vocab_size, {0: 1, 1: 2, 6: 2, 7: 2, 3: 3}, context=64)  # a: bc (gg) c (h) c; d: d d d ...
    begun, overtaken = threading.Event(), threading.Event()
    env, choose = Slow(2), policy.choose

    def reset(example):
        episode = Slow.reset(env, example)

        def step(action):
            begun.set()
            assert action != "bc" or overtaken.wait(10), "nobody decoded meanwhile"
            return episode.step(action)

        return SimpleNamespace(prompt=example.prompt, step=step)

    def watched(tokens, positions):
        if begun.is_set():
            overtaken.set()
        return choose(tokens, positions)

    env.reset, policy.choose = reset, watched
    rollout = collect(policy, LETTERS, env, [Example("a", ""), Example("d", "")], max_new_tokens=20, temperature=0)
    assert rollout.texts == ["bcggchc", "d" * 20]


def test_when_all_rows_wait_nothing_is_decoded_meanwhile():
    rounds = []
    for threads in (0, 4):
        policy = Chain(LETTERS.vocab_size, {0: 1, 1: 2, 3: 2, 6: 3, 7: 2}, context=64)  # bc (gg) dc (h) c
        collect(policy, LETTERS, Slow(threads), [Example("ba", "")] * 3, max_new_tokens=30, temperature=0)
        rounds.append(policy.fed)
    assert rounds[0] == rounds[1]


def test_a_tool_that_breaks_the_run_says_so():
    env = Slow(2)
    env.reset = lambda example: SimpleNamespace(prompt=example.prompt, step=lambda action: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect(random_policy(LETTERS.vocab_size), LETTERS, env, env.sample(2), max_new_tokens=4)


def test_an_expert_without_a_solution_is_a_one_line_error():
    with pytest.raises(UserError, match="talk has no solution to imitate for 'aa'") as error:
        demonstrate(LETTERS, Talk(), [Example("aa", "")])
    assert "\n" not in str(error.value)


# ---- lengths ----

@pytest.mark.parametrize("task", TASKS[:3])
@pytest.mark.parametrize("difficulty", [1, 2, 5])
def test_lengths_are_those_of_the_tapes(make, task, difficulty):
    env = make(task, difficulty=difficulty)
    examples = env.sample(100)
    lengths = demonstrate(BYTES, env, examples).lengths.tolist()
    assert [row_length(env, BYTES, example, solution=True) for example in examples] == lengths, (
        "a tool's output takes room too")
    assert [row_length(env, BYTES, example) for example in examples] == [len(e.prompt) + 1 for e in examples]
    assert longest_row(env, BYTES) >= max(lengths)
    assert longest_row(env, BYTES) >= max(len(e.prompt) for e in examples) + env.max_new_tokens


def test_problems_that_do_not_fit_are_named_or_dropped(make):
    env = make("gsm8k")
    need = [row_length(env, BYTES, example) for example in env.sample(18) + env.sample(2, split="eval")]
    assert fit_to_context(env, BYTES, max(need)) is env
    with pytest.raises(UserError, match=rf"eval problem 1 \('Question: What is 19.*needs {max(need)} tokens, but the "
                                        rf"model's context is {max(need) - 1}: leave such problems out with") as error:
        fit_to_context(env, BYTES, max(need) - 1)
    assert "\n" not in str(error.value)
    smaller = fit_to_context(env, BYTES, max(need) - 1, drop=True)
    assert (smaller.size("train"), smaller.size("eval")) == (18, 1)
    assert (env.size("train"), env.size("eval")) == (18, 2), "the task itself was changed"
    assert fit_to_context(smaller, BYTES, max(need) - 1) is smaller
    with pytest.raises(UserError, match="too long"):
        fit_to_context(env, BYTES, 20, drop=True)


def test_sft_needs_room_for_the_whole_solution(make):
    for env in (make("gsm8k"), make_env("calculator")):
        splits = [env.sample(env.size(split) or 1000, split=split) for split in ("train", "eval")]
        longest = max(int(demonstrate(BYTES, env, split).lengths.max()) for split in splits)
        assert fit_to_context(env, BYTES, longest, solutions=True) is env
        with pytest.raises(UserError, match=f"needs {longest} tokens"):
            fit_to_context(env, BYTES, longest - 1, solutions=True)
        assert fit_to_context(env, BYTES, longest - 1) is env, "RL needs the prompt and one token only"


def test_a_task_without_rows_has_none_to_drop():
    with pytest.raises(UserError, match="addition makes its own problems: leave --drop-long-rows out"):
        fit_to_context(make_env("addition"), BYTES, 64, drop=True)


def test_a_prompt_begins_with_bos_where_the_tokenizer_has_one(shared):
    assert prompt_tokens(BYTES, "1+2=") == list(b"1+2=")
    tokenizer = load_tokenizer(shared / "models/stories260k")
    assert prompt_tokens(tokenizer, "Once upon a time")[0] == tokenizer.bos_id
    assert prompt_tokens(tokenizer, "</s>").count(tokenizer.eos_id) == 0


# ---- evaluate ----

class Ten:
    """Ten held-out problems "a" .. "j"; the answer to each is the next letter, but to the fourth."""

    name, stop, max_new_tokens = "ten", (), 3

    def sample(self, count, start=0, split="train"):
        assert split == "eval", "evaluated on problems to train on"
        return [Example(chr(97 + i % 10), "") for i in range(start, start + count)]

    def size(self, split):
        return 10

    def reset(self, example):
        return SimpleNamespace(prompt=example.prompt, step=lambda action: Step(
            "", float(action == chr(ord(example.prompt) + 1) and example.prompt != "d"), True, {}))


TEN = Pieces(*"abcdefghijk")  # EOS is 11


class NextLetter(Chain):
    """The next letter, then EOS: at position 0 and from position 1 on."""

    def choose(self, tokens, positions):
        return torch.where(positions == 0, tokens + 1, TEN.eos_id)


@pytest.mark.parametrize(("ranks", "shares"), [(1, [10]), (3, [3, 3, 4]), (4, [2, 3, 2, 3]), (16, None)])
def test_nine_of_ten_right_is_exactly_90_percent_on_any_number_of_ranks(monkeypatch, ranks, shares):
    policy = NextLetter(TEN.vocab_size, {})
    sums = []

    def record(value, mesh):
        sums.append(value.clone())
        return value

    monkeypatch.setattr(minirl.evaluate, "all_reduce_sum", record)
    for rank in range(ranks):
        try:
            evaluate(policy, TEN, Ten(), 10, Mesh(dp=ranks, dp_rank=rank))
        except ZeroDivisionError:  # alone, a rank without problems has nothing to divide by
            assert ranks > 10
    assert len(sums) == ranks, "a rank without problems leaves the others waiting"
    if shares:
        assert [int(value[2]) for value in sums] == shares, "a problem is left out or answered twice"
    monkeypatch.setattr(minirl.evaluate, "all_reduce_sum", lambda value, mesh: torch.stack(sums).sum(0))
    for rank in range(ranks):
        found = evaluate(policy, TEN, Ten(), 10, Mesh(dp=ranks, dp_rank=rank))
        assert found == {"eval/accuracy": 0.9, "eval/response_length": 2.0}, "a mean of means over uneven shares"


def test_each_row_of_a_group_is_judged_by_its_own_problem():
    problems = Ten().sample(5, split="eval")
    rollout = collect(NextLetter(TEN.vocab_size, {}), TEN, Ten(), problems, group_size=2, max_new_tokens=3)
    assert rollout.rewards.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1], "episodes are in another order than the rows"


def test_no_more_problems_are_evaluated_than_there_are():
    policy = NextLetter(TEN.vocab_size, {})
    assert evaluate(policy, TEN, Ten(), 5, Mesh())["eval/accuracy"] == 0.8
    policy.headed.clear()
    assert evaluate(policy, TEN, Ten(), 1000, Mesh())["eval/accuracy"] == 0.9
    assert policy.headed[0] == 10, "a problem is answered twice"


def test_a_partial_reward_is_not_a_solved_problem():
    env = Ten()
    env.reset = lambda example: SimpleNamespace(prompt=example.prompt, step=lambda action: Step("", 0.99, True, {}))
    assert evaluate(NextLetter(TEN.vocab_size, {}), TEN, env, 10, Mesh())["eval/accuracy"] == 0.0


def test_a_sample_is_shown_with_what_was_right():
    assert sample_text(NextLetter(TEN.vocab_size, {}), TEN, Ten()) == "'ab'  (right: , reward 1.0)"


def test_metrics_of_a_rollout_by_hand():
    rollout = collect(NextLetter(TEN.vocab_size, {}), TEN, Ten(), Ten().sample(4, split="eval"), group_size=2,
                      max_new_tokens=1)
    rollout = rollout.replace(rewards=torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    assert rollout_metrics(rollout, Mesh()) == {
        "reward_mean": 0.5, "reward_std": 0.5, "zero_variance_groups": 0.5, "response_length": 1.0, "truncated": 1.0,
        "tokens": 16}
