"""The sampler: its noise, its draw, and that a sample depends on nothing but its prompt, its number and the policy."""

import math
from bisect import bisect_right
from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file
from stubs import Chain, Pieces, random_policy
from torch.testing import assert_close

from minirl.checkpoint import load_model
from minirl.config import UserError
from minirl.generate import BLOCK, Stops, generate, inverse_cdf, sample, uniform
from minirl.logprobs import token_logprobs
from minirl.tokenizer import ByteTokenizer, load_tokenizer

ALMOST_ONE = 1 - 2.0**-53
LETTERS = Pieces(*"abcdefghij")  # 0..9, EOS 10, padding 11
V, EOS, PAD = LETTERS.vocab_size, LETTERS.eos_id, LETTERS.pad_id
PROMPTS = [[3], [1, 2, 7], [5, 0, 0, 9, 2, 4, 8, 1, 6], [2, 2], [6, 1, 6, 1], [9]]


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def actions(rollout):
    """What the policy wrote in each row, all turns together."""
    return [row[1:][mask].tolist() for row, mask in zip(rollout.tokens, rollout.action_mask)]


def rows(rollout):
    return [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths)]


def assert_same(found, wanted, hint):
    """Equal tokens, masks, ends and numbers; log-probs to 1e-9."""
    assert rows(found) == rows(wanted), hint
    assert actions(found) == actions(wanted), hint
    for name in ("lengths", "sample_ids", "finished"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), f"{name}: {hint}"
    S = min(found.old_logprobs.shape[1], wanted.old_logprobs.shape[1])
    assert_close(found.old_logprobs[:, :S], wanted.old_logprobs[:, :S], rtol=0, atol=1e-9)


# ---- noise ----

def splitmix(x):
    """The finaliser of splitmix64, in Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_noise_equals_the_same_hash_in_python_integers():
    golden = 0x9E3779B97F4A7C15
    assert splitmix(golden) == 0xE220A8397B1DCDAF, "the first output of splitmix64 with seed 0, as published"

    def wanted(seed, sample_id, position):
        key = (splitmix((seed + golden) % 2**64) + sample_id) % 2**64
        bits = splitmix((splitmix((key + golden) % 2**64) + position) % 2**64)
        return (bits >> 11) / 2**53

    big = 2**63 - 1
    cases = [(s, i, p) for s in (0, 1, 12345, big, -1) for i in (0, 1, 77, 10**12, big) for p in (0, 1, 2, 5000)]
    for seed in {case[0] for case in cases}:
        ids, positions = torch.tensor([case[1:] for case in cases if case[0] == seed]).T
        want = [wanted(*case) for case in cases if case[0] == seed]
        assert uniform(seed, ids, positions).tolist() == want, "a shift that drags the sign, or another order of rounds"


def test_noise_is_uniform_and_neighbours_are_independent():
    ids, positions = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    draws = uniform(0, ids, positions)
    assert draws.dtype == torch.float64 and draws.min() >= 0 and draws.max() < 1
    assert len(draws.unique()) == 40_000, "two (sample, position) share a number"
    assert not set(draws.tolist()) & set(uniform(1, ids, positions).tolist()), "seeds share their numbers"
    assert abs(float(draws.mean()) - 1 / 2) < 0.006  # 4 standard errors
    assert abs(float(draws.var()) - 1 / 12) < 0.002
    grid = draws.view(200, 200)
    other_seed = uniform(1, ids, positions).view(200, 200)
    pairs = {"bins": (draws, None), "positions": (grid[:, :-1], grid[:, 1:]), "samples": (grid[:-1], grid[1:]),
             "seeds": (grid, other_seed), "diagonals": (grid[1:, :-1], grid[:-1, 1:])}
    for name, (a, b) in pairs.items():  # chi-square over 16 or 16 x 16 cells: mean cells - 1, std sqrt(2 cells)
        cells = 16 if b is None else 256
        index = (a * 16).long().flatten() + (0 if b is None else 16 * (b * 16).long().flatten())
        counts, expected = index.bincount(minlength=cells).double(), len(index) / cells
        chi = float((counts - expected).square().sum() / expected)
        assert abs(chi - (cells - 1)) < 5 * math.sqrt(2 * cells), f"{name} are not independent"


def test_the_lowest_bits_of_the_noise_are_random_too():
    bits = (uniform(0, torch.arange(4000), torch.zeros(4000, dtype=torch.int64)) * 2**53).long()
    for n in range(53):
        assert 0.45 < float((bits >> n & 1).double().mean()) < 0.55, f"bit {n}"


# ---- one draw ----

@pytest.mark.parametrize(("u", "token"), [(0, 0), (0.124, 0), (0.125, 1), (0.374, 1), (0.375, 2), (0.4999, 2),
                                          (0.5, 3), (0.75, 3), (ALMOST_ONE, 3)])
def test_the_token_is_the_one_whose_slice_contains_u(u, token):
    probs = torch.tensor([[0.125, 0.25, 0.125, 0.5]])
    for scale in (1, 0.5, 2):  # probabilities need not sum to 1
        assert inverse_cdf(probs * scale, doubles(u)).tolist() == [token]


@pytest.mark.parametrize("V", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_equal_those_of_exact_fractions(V, dtype):
    generator = torch.Generator().manual_seed(V)
    B = 10 if V == 1000 else 40
    probs = torch.rand(B, V, generator=generator, dtype=torch.float64).to(dtype)
    probs[torch.rand(B, V, generator=generator) < 0.4] = 0
    probs[:, V // 2] = 0.3  # something is left
    us = torch.rand(B, generator=generator, dtype=torch.float64)
    got = inverse_cdf(probs, us)
    assert got.dtype == torch.int64
    for row, u, token in zip(probs.tolist(), us.tolist(), got.tolist()):
        edges = list(accumulate(map(Fraction, row)))
        assert token == bisect_right(edges, Fraction(u) * edges[-1]), "a block or an edge is missed"


@pytest.mark.parametrize("V", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_a_token_of_probability_zero_is_never_drawn(V):
    us = [0.0, 5e-324, 0.25, 0.5, 0.75, 1 - 2.0**-30, ALMOST_ONE]
    spots = sorted({0, V // 3, V // 2, V - 1})
    cases = [[spot] for spot in spots] + [[a, b] for a in spots for b in spots if a < b]
    for allowed in cases:
        for weights in ([0.5, 0.5], [1.0, 1e-30], [1e-30, 1.0], [0.1, 0.7]):
            probs = torch.zeros(len(us), V, dtype=torch.float64)
            probs[:, allowed] = doubles(*weights[: len(allowed)])
            drawn = inverse_cdf(probs, doubles(*us)).tolist()
            assert set(drawn) <= set(allowed), f"{drawn} of {allowed}: u = 0 or u just below 1 falls on an edge"


def test_u_just_below_1_stays_inside_whatever_rounding_says():
    generator = torch.Generator().manual_seed(0)
    for V in (3, 50, 32000):
        probs = torch.randn(50, V, generator=generator).mul(3).softmax(-1)
        probs[:, -(V // 3):] = 0
        tokens = inverse_cdf(probs, torch.full((50,), ALMOST_ONE, dtype=torch.float64))
        assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_small_parts_of_a_block_are_not_lost_in_float32():
    probs = torch.full((1, 2 * BLOCK), 2.0**-30)
    probs[0, [0, BLOCK]] = 1.0  # in float32, 1 + 31 * 2**-30 is 1
    u = doubles(1 + 15.5 * 2**-30) / probs.double().sum()
    assert inverse_cdf(probs, u).tolist() == [16], "a sum in float32 moves the edges"


def test_frequencies_match_the_probabilities():
    N = 20_000
    probs = torch.randn(1, 3 * BLOCK + 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    us = (torch.arange(N).double() + 0.5) / N  # evenly spaced: each count is off by less than 1
    counts = inverse_cdf(probs.expand(N, -1), us).bincount(minlength=probs.shape[1])
    assert ((counts - N * probs[0]).abs() <= 1.01).all()


# ---- one token ----

def test_temperature_is_part_of_the_log_probability():
    # softmax([2, 0] / 0.5) = softmax([4, 0]); untempered would be -0.126928 and -2.126928
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]] * 2), doubles(0.5, 0.99), temperature=0.5)
    assert tokens.tolist() == [0, 1]
    assert_close(logprobs, torch.tensor([-0.018150, -4.018150]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"top_p": 0.7}, {"top_k": 2}, {"top_k": 2, "top_p": 0.7},
                                     {"top_k": 3, "top_p": 0.7}])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_log_probabilities_are_of_the_restricted_distribution(options, order):
    # .5 .3 .2 -> .625 .375 0: ln .625 = -0.470, ln .375 = -0.981 (raw would be -0.693 and -1.204)
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[order].expand(100, 3)
    tokens, logprobs = sample(logits, torch.arange(100).double() / 100, **options)
    likely, second = order.index(0), order.index(1)
    assert Counter(tokens.tolist()) == {likely: pytest.approx(62.5, abs=1), second: pytest.approx(37.5, abs=1)}
    want = torch.where(tokens == likely, math.log(0.625), math.log(0.375))
    assert_close(logprobs, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("options", "kept"), [
    ({"top_p": 0.45}, {0}), ({"top_p": 0.55}, {0, 1}), ({"top_p": 0.79}, {0, 1}), ({"top_p": 0.81}, {0, 1, 2}),
    ({"top_p": 1e-9}, {0}), ({"top_p": 1.0}, {0, 1, 2}), ({"top_k": 1}, {0}), ({"top_k": 2}, {0, 1}),
    ({"top_k": 3}, {0, 1, 2}), ({"top_k": 9}, {0, 1, 2}), ({"top_k": 0}, {0, 1, 2}), ({"top_k": 1, "top_p": 0.9}, {0}),
    ({"top_p": 0.4, "temperature": 9.0}, {0, 1}), ({"top_p": 0.9, "temperature": 0.2}, {0}),
])
def test_top_p_keeps_the_smallest_set_of_that_mass_and_top_k_so_many(options, kept):
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(200, 3)
    tokens, logprobs = sample(logits, torch.arange(200).double() / 200, **options)
    assert set(tokens.tolist()) == kept
    share = {int(token): float(logprob.exp()) for token, logprob in zip(tokens, logprobs)}
    assert sum(share.values()) == pytest.approx(1, abs=1e-6), "not renormalised"


def test_greedy_takes_the_maximum_whatever_the_noise():
    logits = torch.tensor([[0.1, 5.0, 4.9], [3.0, 1.0, 2.0]])
    for u in (0.0, 0.5, ALMOST_ONE):
        tokens, logprobs = sample(logits, doubles(u, u), temperature=0)
        assert tokens.tolist() == [1, 0]
        assert logprobs.tolist() == [0, 0], "the distribution that was sampled is a point"


def test_log_probabilities_are_float32_or_wider_and_of_the_logits_as_given():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    u = torch.arange(7).double() / 7
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        tokens, logprobs = sample(logits.to(dtype), u, 0.7)
        want = (logits.to(dtype).to(wide) / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert logprobs.dtype == wide
        assert_close(logprobs, want)
        assert (logprobs <= 0).all()


def test_a_draw_changes_none_of_its_inputs():
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    inputs = [logits, doubles(0, 0.3, 0.6, 0.9), torch.arange(4), torch.arange(4)]
    before = [x.clone() for x in inputs]
    for temperature in (0, 0.5, 1):
        for options in ({}, {"top_k": 3}, {"top_p": 0.5}):
            sample(inputs[0], inputs[1], temperature, **options)
    inverse_cdf(logits.softmax(-1), inputs[1])
    uniform(3, inputs[2], inputs[3])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before))


# ---- a batch, against one token after another without a cache ----

def plainly(policy, prompt, number, seed=0, max_new_tokens=20, temperature=1.0):
    """One row, the whole row through the model at every token: no cache, no batch, no shared prompt."""
    row, logprobs = list(prompt), []
    while len(row) - len(prompt) < max_new_tokens and len(row) < policy.config.max_position_embeddings:
        with torch.no_grad():
            logits = policy.logits(policy(torch.tensor([row])))[:, -1]
        noise = uniform(seed, torch.tensor([number]), torch.tensor([len(row)]))
        token, logprob = sample(logits, noise, temperature)
        row.append(int(token))
        logprobs.append(float(logprob))
        if row[-1] == EOS:
            break
    return row, logprobs


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_cached_generation_equals_uncached_token_for_token(temperature):
    policy = random_policy(V)
    rollout = generate(policy, PROMPTS, LETTERS, max_new_tokens=20, temperature=temperature, seed=4)
    for i, prompt in enumerate(PROMPTS):
        row, logprobs = plainly(policy, prompt, i, 4, 20, temperature)
        assert rows(rollout)[i] == row, f"a prompt of {len(prompt)} tokens among others: position, slot or mask"
        mask = rollout.action_mask[i]
        assert_close(rollout.old_logprobs[i][mask], doubles(*logprobs), rtol=0, atol=1e-9)
    assert len(set(rollout.lengths.tolist())) > 2, "rows of different ends are wanted here"


@pytest.fixture(scope="module")
def alone():
    """Every prompt of PROMPTS, 4 rows each, all in one batch."""
    policy = random_policy(V)
    return policy, generate(policy, PROMPTS, LETTERS, group_size=4, max_new_tokens=12, seed=7)


def test_a_sample_does_not_depend_on_its_neighbours(alone):
    policy, whole = alone
    for i, prompt in enumerate(PROMPTS):
        one = generate(policy, [prompt], LETTERS, group_size=4, max_new_tokens=12, seed=7, first_id=4 * i)
        assert_same(one, whole.rows(torch.arange(4 * i, 4 * i + 4)), f"prompt {i} samples otherwise when it is alone")
        assert one.group.tolist() == [i] * 4


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 24, 100])
def test_how_many_rows_are_decoded_at_once_changes_nothing(alone, max_rows):
    policy, whole = alone
    found = generate(policy, PROMPTS, LETTERS, group_size=4, max_new_tokens=12, seed=7, max_rows=max_rows)
    assert_same(found, whole, "a row that waits for a place is drawn otherwise")
    assert found.tokens.shape == whole.tokens.shape


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_two_calls_give_what_one_call_gives(alone, cut):
    policy, whole = alone
    parts = [generate(policy, PROMPTS[:cut], LETTERS, group_size=4, max_new_tokens=12, seed=7),
             generate(policy, PROMPTS[cut:], LETTERS, group_size=4, max_new_tokens=12, seed=7, first_id=4 * cut)]
    assert [row for part in parts for row in rows(part)] == rows(whole), "first_id is not the number of the sample"
    assert torch.cat([part.sample_ids for part in parts]).tolist() == list(range(24))
    assert torch.cat([part.group for part in parts]).tolist() == whole.group.tolist()


def test_a_shared_prefill_gives_what_separate_prompts_give(alone):
    policy, whole = alone
    separate = generate(policy, [prompt for prompt in PROMPTS for _ in range(4)], LETTERS, max_new_tokens=12, seed=7)
    assert_same(separate, whole, "a row of a group does not continue from its prompt's cache")


def test_rows_of_a_group_differ_and_another_seed_gives_others(alone):
    policy, whole = alone
    for group in range(len(PROMPTS)):
        assert len({tuple(row) for row in rows(whole)[4 * group : 4 * group + 4]}) > 1, "one noise for a whole group"
    assert rows(generate(policy, PROMPTS, LETTERS, group_size=4, max_new_tokens=12, seed=8)) != rows(whole)
    same = generate(policy, PROMPTS, LETTERS, group_size=4, max_new_tokens=12, seed=7)
    assert rows(same) == rows(whole) and torch.equal(same.old_logprobs, whole.old_logprobs)


def test_greedy_rows_of_a_group_are_equal():
    rollout = generate(random_policy(V), PROMPTS, LETTERS, group_size=3, max_new_tokens=12, temperature=0)
    for i in range(0, 18, 3):
        assert rows(rollout)[i] == rows(rollout)[i + 1] == rows(rollout)[i + 2]
    assert (rollout.old_logprobs == 0).all()


def test_the_padding_token_decides_nothing():
    policy = random_policy(V)
    same = Pieces(*"abcdefghij", pad_is_eos=True)
    prompts = [[EOS, 1], [1, EOS, 2, 7], [EOS]]  # turns that end in EOS, or in the padding, inside a prompt
    found, wanted = (generate(policy, prompts, t, group_size=4, max_new_tokens=12, seed=1) for t in (same, LETTERS))
    assert_same(found, wanted, "padding is told by its value")
    beyond = torch.arange(wanted.tokens.shape[1]) >= wanted.lengths[:, None]
    assert (wanted.tokens[beyond] == PAD).all() and (found.tokens[beyond] == EOS).all()


@pytest.mark.parametrize("start", ["both", "bos", "once"])
def test_a_pretrained_model_tells_its_story(shared, start):
    folder = shared / "models/stories260k"
    expected = load_file(folder / "expected.safetensors")
    stories = {"bos": expected["greedy_from_bos"].tolist(), "once": expected["greedy_from_once"].tolist()}
    tokenizer, policy = load_tokenizer(folder), load_model(folder)
    prompts = {"bos": [tokenizer.bos_id], "once": [tokenizer.bos_id, *tokenizer.encode("Once upon a time")]}
    wanted = stories if start == "both" else {start: stories[start]}
    longest = max(len(story) - len(prompts[name]) for name, story in wanted.items())
    rollout = generate(policy, [prompts[name] for name in wanted], tokenizer, max_new_tokens=longest, temperature=0)
    for row, (name, story) in zip(rows(rollout), wanted.items()):
        assert row[: len(story)] == story, f"{name}: after {prompts[name]}"
    text = tokenizer.decode(rows(rollout)[0])
    assert text.startswith("Once upon a time, there was a little girl named Lily.")


# ---- work ----

def test_the_prompt_is_read_once_for_a_group_and_the_head_runs_on_sampled_tokens_only():
    policy = Chain(V, {}, context=40)
    generate(policy, [[1] * 9, [2] * 4], LETTERS, group_size=8, max_new_tokens=5)
    assert policy.fed == [(2, 8)] + [(16, 1)] * 5, "the cache has seen all of a prompt but its last token"
    assert policy.headed == [16] * 5


def test_finished_rows_leave_the_batch():
    # Prompt [n] counts down to 0 and ends: 8 rows that write 1 .. 8 tokens.
    policy = Chain(V, {0: EOS, **{n: n - 1 for n in range(1, 10)}})
    rollout = generate(policy, [[n] for n in range(8)], LETTERS, max_new_tokens=30)
    assert [len(a) for a in actions(rollout)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rollout.finished.all()
    assert len(policy.headed) == 8, "the batch goes on after its last row has ended"
    for step, decoded in enumerate(policy.headed):
        alive = 8 - step
        assert alive <= decoded <= max(alive, 4 / 3 * alive + 1), f"{decoded} rows decoded for {alive} alive"


def test_waiting_rows_take_the_places_of_finished_ones():
    policy = Chain(V, {0: EOS, **{n: n - 1 for n in range(1, 10)}})
    rollout = generate(policy, [[n] for n in [9, 0, 0, 0, 0, 0]], LETTERS, max_new_tokens=30, max_rows=2)
    assert [len(a) for a in actions(rollout)] == [10, 1, 1, 1, 1, 1]
    assert max(policy.headed) == 2
    assert len(policy.headed) == 10, "rows wait although there is room, or the batch waits for its longest row"


# ---- ends ----

def test_a_row_ends_by_itself_and_not_with_its_neighbour():
    # Row 0 writes EOS at once, row 1 never; max_new_tokens does not count the prompt.
    policy = Chain(V, {1: EOS, 2: 3, 3: 3})
    rollout = generate(policy, [[5, 1], [2] * 10], LETTERS, max_new_tokens=6)
    assert rows(rollout) == [[5, 1, EOS], [2] * 10 + [3] * 6], "one token too many, or a row cut by its neighbour"
    assert rollout.lengths.tolist() == [3, 16] and rollout.tokens.shape == (2, 16)
    assert rollout.action_mask.sum(1).tolist() == [1, 6], "EOS is a choice of the policy, padding is not"
    assert rollout.finished.tolist() == [True, False]
    assert (rollout.tokens[0, 3:] == PAD).all()
    assert rollout.action_mask[0].nonzero().flatten().tolist() == [1], "column s belongs to token s + 1"
    assert rollout.action_mask[1].nonzero().flatten().tolist() == list(range(9, 15))


def test_eos_in_the_prompt_is_not_the_end_of_an_answer():
    policy = Chain(V, {1: 3, 3: 4, 4: 3})
    rollout = generate(policy, [[EOS, 1], [1, EOS, 1]], LETTERS, max_new_tokens=4)
    assert actions(rollout) == [[3, 4, 3, 4]] * 2
    assert rollout.finished.tolist() == [False, False], "EOS is looked for in the prompt"


def test_a_cut_row_keeps_the_token_that_was_sampled():
    rollout = generate(random_policy(V), PROMPTS, LETTERS, group_size=4, max_new_tokens=2, seed=3)
    cut = ~rollout.finished
    last = rollout.tokens.gather(1, rollout.lengths[:, None] - 1)[:, 0]
    assert cut.any() and (~cut).any(), "both kinds of rows are wanted here"
    assert (last[cut] != EOS).all() and (last[~cut] == EOS).all(), "an end is written that nobody chose"
    assert (rollout.old_logprobs.gather(1, rollout.lengths[:, None] - 2)[:, 0] < 0).all()


def test_eos_as_the_very_last_token_counts_as_finished():
    policy = Chain(V, {0: EOS, 1: 0, 2: 1})
    assert generate(policy, [[2]], LETTERS, max_new_tokens=3).finished.tolist() == [True]
    assert generate(policy, [[2]], LETTERS, max_new_tokens=2).finished.tolist() == [False]
    assert generate(policy, [[2]], Pieces(*"abcdefghij"), max_new_tokens=2, stop=["a"]).finished.tolist() == [True]


def test_a_row_ends_at_any_of_the_stop_tokens():
    tokenizer, pad = Pieces(*"abcdefghij"), PAD
    tokenizer.add_stops([4, 7, EOS, V + 5, -1])  # rows that the model does not have never come
    policy = Chain(V, {0: 1, 1: 4, 2: 3, 3: EOS, 5: 6, 6: 5})
    rollout = generate(policy, [[0], [2], [5]], tokenizer, max_new_tokens=3)
    assert actions(rollout) == [[1, 4], [3, EOS], [6, 5, 6]] and pad not in rollout.tokens[rollout.lengths == 4]
    assert rollout.finished.tolist() == [True, True, False]
    heard = []

    def respond(row, action):
        heard.append(action)
        return [0] if len(heard) == 1 else []

    rollout = generate(policy, [[0]], tokenizer, max_new_tokens=6, respond=respond)
    assert heard == [[1], [1]], "the token that ended an action is no part of what it says"
    assert rollout.tokens.tolist() == [[0, 1, 4, 0, 1, 4]] and rollout.finished.tolist() == [True]


def test_the_context_cuts_a_row():
    policy = Chain(V, {2: 3}, context=12)
    rollout = generate(policy, [[2] * 9, [2], [2] * 11], LETTERS, max_new_tokens=20)
    assert rollout.lengths.tolist() == [12, 12, 12]
    assert rollout.action_mask.sum(1).tolist() == [3, 11, 1]
    assert not rollout.finished.any()


TOOL = Pieces("</", "to", "ol>x", "a", "b", "ol>", "</tool>", "t", b"\xc3", b"\xa9", b"\xa8")
A, B = 3, 4


@pytest.mark.parametrize(("chain", "written"), [
    ({A: 0, 0: 1, 1: 2}, [0, 1, 2]),  # </ to ol>x: the token that completes it is kept whole
    ({A: 0, 0: 1, 1: 5}, [0, 1, 5]),  # </ to ol>
    ({A: 6}, [6]),  # </tool>
    ({A: B, B: 6}, [B, 6]),  # b </tool>
])
def test_a_stop_string_is_found_over_token_borders(chain, written):
    policy = Chain(TOOL.vocab_size, chain)
    rollout = generate(policy, [[A]], TOOL, max_new_tokens=10, stop=["</tool>"])
    assert actions(rollout) == [written], "a stop string is compared token by token"
    assert rollout.finished.tolist() == [True], "a row that ends in a stop string is not cut"
    assert rollout.old_logprobs.shape == rollout.action_mask.shape == (1, len(written))


@pytest.mark.parametrize("prompt", [[6, A], [0, 1, 5, A], [0, 1], [A, 0]])
def test_a_stop_string_in_the_prompt_or_half_in_it_does_not_stop(prompt):
    policy = Chain(TOOL.vocab_size, {A: B, 1: 5, 5: B, 0: 1})
    rollout = generate(policy, [prompt], TOOL, max_new_tokens=5, stop=["</tool>"])
    assert rollout.action_mask.sum() == 5 and not rollout.finished.any()


def test_a_stop_string_half_in_a_tool_output_does_not_stop():
    policy, seen = Chain(TOOL.vocab_size, {A: 6, 1: 5, 5: B}), []

    def respond(row, action):
        seen.append(action)
        return [0, 1] if len(seen) == 1 else []

    rollout = generate(policy, [[A]], TOOL, max_new_tokens=5, stop=["</tool>"], respond=respond)
    assert rows(rollout) == [[A, 6, 0, 1, 5, B, B, B]]
    assert seen == [[6], [5, B, B, B]]


def test_a_stop_character_of_several_bytes_is_found_and_never_half_of_it():
    eh, other = Chain(TOOL.vocab_size, {A: 8, 8: 9}), Chain(TOOL.vocab_size, {A: 8, 8: 10, 10: B})
    texts = []

    def respond(row, action):
        texts.append(TOOL.decode(action, continued=True))
        return []

    assert actions(generate(eh, [[A]], TOOL, max_new_tokens=4, stop=["é"], respond=respond)) == [[8, 9]]
    assert actions(generate(other, [[A]], TOOL, max_new_tokens=4, stop=["é"], respond=respond)) == [[8, 10, B, B]]
    assert texts == ["é", "èbb"], "a character was cut in two"


def test_any_of_several_stop_strings_stops():
    policy = Chain(TOOL.vocab_size, {A: B, B: 7, 7: A})
    for stop, written in ((["x", "tab"], [B, 7, A, B]), (["tab", "bt"], [B, 7]), (["aa"], [B, 7, A, B, 7, A])):
        assert actions(generate(policy, [[A]], TOOL, max_new_tokens=6, stop=stop)) == [written]


def test_stop_strings_know_which_tokens_can_complete_one():
    stops = Stops(["</tool>", "é"], TOOL, 20, torch.device("cpu"))
    able = {token for token in range(len(TOOL.pieces)) if b">" in TOOL.pieces[token] or b"\xa9" in TOOL.pieces[token]}
    assert set(stops.may_end.nonzero()[:, 0].tolist()) == able | {TOOL.eos_id}
    assert Stops([], TOOL, 20, torch.device("cpu")).may_end.nonzero().tolist() == [[TOOL.eos_id]]


def test_a_model_may_have_more_words_than_its_tokenizer():
    policy = Chain(300, {65: 299, 299: 66, 66: 256})  # checkpoints round the vocabulary up
    rollout = generate(policy, [[65]], ByteTokenizer(), max_new_tokens=5, stop=["X"])
    assert actions(rollout) == [[299, 66, 256]]


# ---- turns ----

def echo(row, action):
    """A tool: its output is the action backwards, after a letter of its own; three times a row."""
    return [9, *action[::-1]] if len(action) > 1 else []


@pytest.mark.parametrize("max_rows", [1, 2, 5, 100])
def test_turns_with_tools_do_not_depend_on_the_batch(max_rows):
    policy = random_policy(V, context=48)
    options = dict(group_size=3, max_new_tokens=14, seed=2, stop=["c", "dd"], respond=echo)
    whole = generate(policy, PROMPTS, LETTERS, **options)
    assert whole.lengths.max() > 24, "some outputs are wanted here"
    assert_same(generate(policy, PROMPTS, LETTERS, max_rows=max_rows, **options), whole, "a neighbour's tool output")
    for i, prompt in enumerate(PROMPTS):
        one = generate(policy, [prompt], LETTERS, first_id=3 * i, **options)
        assert_same(one, whole.rows(torch.arange(3 * i, 3 * i + 3)), "a row is not fed what its own tool said")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("max_rows", [4, 100])
def test_the_ratio_on_fresh_samples_is_one(dtype, tolerance, temperature, max_rows):
    policy = random_policy(V, context=48, dtype=dtype)
    rollout = generate(policy, PROMPTS, LETTERS, group_size=4, max_new_tokens=14, seed=2, temperature=temperature,
                       stop=["c", "dd"], respond=echo, max_rows=max_rows)
    assert rollout.old_logprobs.dtype == dtype and not rollout.old_logprobs.requires_grad
    mask = rollout.action_mask
    turns = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    assert turns.max() > 1, "tool outputs in the middle are wanted here"
    logprobs = token_logprobs(policy, rollout.tokens, temperature)
    ratio = (logprobs - rollout.old_logprobs).exp()[mask]
    assert (ratio - 1).abs().max() <= tolerance, "sampled from another distribution than the one that is trained"
    assert (rollout.old_logprobs[mask] < 0).all()


def test_forced_tokens_are_nobodys_choice():
    policy, seen = Chain(V, {0: 1, 1: 2, 7: 3, 3: 2}), []  # a: b c, then the tool says h h, then d c

    def respond(row, action):
        seen.append((row, action))
        return [7, 7] if len(seen) < 3 else []

    rollout = generate(policy, [[0], [5, 0]], LETTERS, max_new_tokens=5, stop=["c"], respond=respond)
    assert rows(rollout) == [[0, 1, 2, 7, 7, 3, 2], [5, 0, 1, 2, 7, 7, 3, 2]]
    assert seen == [(0, [1, 2]), (1, [1, 2]), (0, [3, 2]), (1, [3, 2])], "an action is the text of one turn"
    assert rollout.action_mask.int().tolist() == [[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1]]
    assert (rollout.old_logprobs[~rollout.action_mask] == 0).all()
    assert rollout.finished.all()


def test_sampled_ids_are_kept_and_never_encoded_again():
    tokenizer = Pieces("s", "a", "t", "sat", "Q", "!")
    assert tokenizer.encode("sat") == [3] and tokenizer.decode([0, 1, 2]) == "sat"
    policy, seen = Chain(tokenizer.vocab_size, {4: 0, 0: 1, 1: 2, 2: 5, 5: 4}), []

    def respond(row, action):
        seen.append(action)
        return tokenizer.encode("satQ") if len(seen) == 1 else []

    rollout = generate(policy, [[4]], tokenizer, max_new_tokens=8, stop=["!"], respond=respond)
    assert rows(rollout) == [[4, 0, 1, 2, 5, 3, 4, 0, 1, 2, 5]], "s, a, t became sat: training sees other tokens"
    assert seen == [[0, 1, 2, 5]] * 2


def test_eos_ends_an_action_and_stays_on_the_tape():
    policy, seen = Chain(V, {0: 1, 1: EOS, 7: EOS}), []

    def respond(row, action):
        seen.append(action)
        return [7] if len(seen) == 1 else []

    rollout = generate(policy, [[0]], LETTERS, max_new_tokens=9, respond=respond)
    assert rows(rollout) == [[0, 1, EOS, 7, EOS]]
    assert seen == [[1], []], "EOS is no part of the action's text"
    assert rollout.action_mask.int().tolist() == [[1, 1, 0, 1]]


def test_the_budget_counts_the_sampled_tokens_of_all_turns():
    policy = Chain(V, {0: 1, 1: 2, 7: 1})
    for budget, row in ((1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 7, 7, 7, 1]), (4, [0, 1, 2, 7, 7, 7, 1, 2])):
        rollout = generate(policy, [[0]], LETTERS, max_new_tokens=budget, stop=["c"], respond=lambda r, a: [7, 7, 7])
        assert rows(rollout) == [row], "a row ends with what it wrote: no output follows that nobody can answer"
        assert rollout.action_mask.sum() == budget
        assert rollout.finished.tolist() == [False], "cut in the middle of an episode"


@pytest.mark.parametrize("context", range(4, 13))
def test_an_output_beyond_the_context_ends_the_row_with_equal_lengths(context):
    policy = Chain(V, {0: 1, 1: 2, 7: 1}, context=context)
    rollout = generate(policy, [[0]], LETTERS, max_new_tokens=30, stop=["c"], respond=lambda r, a: [7, 7, 7])
    T = int(rollout.lengths)
    assert T <= context and not rollout.finished.any()
    assert rollout.tokens.shape == (1, T)
    assert rollout.action_mask.shape == rollout.old_logprobs.shape == (1, T - 1), "one is cut and another is not"
    assert rows(rollout)[0] == [0, *([1, 2, 7, 7, 7] * 3)][:T]
    assert bool(rollout.action_mask[0, -1]), "a row ends in an output that nobody answers"


def test_long_outputs_make_room_on_the_tape_and_in_the_cache():
    policy = random_policy(V, context=300)
    options = dict(max_new_tokens=6, seed=3, stop=["a", "b", "c", "d", "e"],
                   respond=lambda row, action: [row % 10] * (20 * row + 1))
    whole = generate(policy, PROMPTS, LETTERS, **options)
    assert whole.lengths.max() > 100
    for max_rows in (1, 2):
        assert_same(generate(policy, PROMPTS, LETTERS, max_rows=max_rows, **options), whole, "the cache did not grow")
    ratio = (token_logprobs(policy, whole.tokens) - whole.old_logprobs).exp()[whole.action_mask]
    assert (ratio - 1).abs().max() <= 1e-12


# ---- around it ----

@pytest.mark.parametrize(("prompts", "options", "said"), [
    ([[1], []], {}, "prompt 1 has 0 tokens"),
    ([[1] * 12], {}, "prompt 0 has 12 tokens: a context of 12 takes 1 to 11"),
    ([[1], [2], [1] * 40], {}, "prompt 2 has 40 tokens"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ([[1]], {"max_new_tokens": -3}, "max_new_tokens is -3"),
    ([[1]], {"group_size": 0}, "group_size is 0"),
    ([[1]], {"max_rows": 0}, "max_rows is 0"),
    ([], {}, "no prompts"),
    ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
    ([[1]], {"top_p": 0.0}, "top_p is 0.0"),
    ([[1]], {"top_p": 1.5}, "top_p is 1.5"),
    ([[1]], {"top_k": -1}, "top_k is -1"),
])
def test_what_cannot_be_sampled_is_refused_in_one_line_before_any_work(prompts, options, said):
    policy = Chain(V, {}, context=12)
    with pytest.raises(UserError, match=said) as error:
        generate(policy, prompts, LETTERS, **{"max_new_tokens": 4, **options})
    assert "\n" not in str(error.value) and not policy.fed


@pytest.mark.parametrize("training", [True, False])
def test_the_policy_is_sampled_without_dropout_and_gets_its_mode_back(training):
    policy = random_policy(V)
    wanted = generate(policy, PROMPTS, LETTERS, max_new_tokens=8, seed=1)
    policy.drop = torch.nn.Dropout(0.5)
    for block in policy.layers:
        block.mlp.register_forward_hook(lambda module, args, out: policy.drop(out))
    policy.train(training)
    found = generate(policy, PROMPTS, LETTERS, max_new_tokens=8, seed=1)
    assert_same(found, wanted, "dropout is on while sampling")
    assert policy.training is training and policy.drop.training is training


def test_generation_changes_neither_its_inputs_nor_the_weights_nor_torchs_generator():
    policy = random_policy(V)
    weights, state = {n: p.clone() for n, p in policy.state_dict().items()}, torch.get_rng_state()
    prompts = [list(prompt) for prompt in PROMPTS]
    generate(policy, prompts, LETTERS, group_size=2, max_new_tokens=8, stop=["c"], respond=echo)
    assert prompts == PROMPTS
    assert all(torch.equal(p, weights[n]) for n, p in policy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in policy.parameters())


def test_sampled_tokens_follow_the_policys_distribution():
    policy = random_policy(V)
    rollout = generate(policy, [[3, 1]], LETTERS, group_size=4000, max_new_tokens=1, temperature=0.8, seed=5)
    with torch.no_grad():
        probs = (policy.logits(policy(torch.tensor([[3, 1]])))[0, -1] / 0.8).softmax(-1)
    counts = torch.tensor(actions(rollout)).flatten().bincount(minlength=V)
    chi = float(((counts - 4000 * probs).square() / (4000 * probs)).sum())
    assert chi < V - 1 + 5 * math.sqrt(2 * V), "the draws do not follow the probabilities"
