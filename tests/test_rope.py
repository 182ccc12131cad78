"""The frequencies of every scaling by hand. Theta and size are chosen so that plain RoPE turns by 1, 0.1, 0.01, ..."""

import copy
import math

import pytest
import torch

from minirl.config import UserError
from minirl.model import ModelConfig, Transformer
from minirl.rope import TYPES, RopeScaling, Rotary, frequencies, limit, magnitude

LLAMA3 = RopeScaling("llama3", 8.0, 100)
YARN = RopeScaling("yarn", 4.0, 100)
LONGROPE = RopeScaling("longrope", original_max_position_embeddings=8, short_factor=(1.0, 2.0), long_factor=(4.0, 5.0))


def assert_near(found, wanted):
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(wanted, rel=1e-5)


def test_plain():
    assert_near(frequencies(1e4, 8, 64), [1, 0.1, 0.01, 0.001])
    assert_near(frequencies(100.0, 4, 64), [1, 0.1])


def test_linear():
    assert_near(frequencies(1e4, 8, 64, RopeScaling("linear", 4.0)), [0.25, 0.025, 0.0025, 0.00025])


def test_dynamic():
    # At 16 tokens of a context of 8, factor 2: 2 * 16 / 8 - 1 = 3, theta 100 * 3^(4 / 2) = 900, and 900^(-1/2) = 1/30.
    scaling = RopeScaling("dynamic", 2.0)
    assert_near(frequencies(100.0, 4, 8, scaling, length=16), [1, 1 / 30])
    for length in (0, 1, 8):
        assert_near(frequencies(100.0, 4, 8, scaling, length), [1, 0.1])
    assert limit(8, scaling) == 8


def test_llama3():
    # Turns in 100 tokens: 100 f / 2 pi = 15.9155, 1.59155, 0.159155, 0.0159155. The first is above 4, two are below 1;
    # the second keeps (1.59155 - 1) / (4 - 1) = 0.197183 of itself: 0.1 * (0.197183 + 0.802817 / 8) = 0.0297535.
    assert_near(frequencies(1e4, 8, 800, LLAMA3), [1, 0.0297535, 0.00125, 0.000125])


def test_yarn():
    # Which pair turns 32 times in 100 tokens? 8 ln(100 / (2 pi 32)) / (2 ln 10^4) = -0.3033, so 0; once: 1.2018, so 2.
    # From pair 0 to pair 2 the share of the plain frequency falls from 1 to 0: 0.1 * (0.5 + 0.5 / 4) = 0.0625.
    assert_near(frequencies(1e4, 8, 400, YARN), [1, 0.0625, 0.0025, 0.00025])
    # Not rounded: pair 1 keeps 1 - 1 / 1.20182 = 0.167929: 0.1 * (0.167929 + 0.832071 / 4) = 0.0375947.
    not_rounded = RopeScaling("yarn", 4.0, 100, truncate=False)
    assert_near(frequencies(1e4, 8, 400, not_rounded), [1, 0.0375947, 0.0025, 0.00025])
    # The factor is that of the lengths, if it is not given.
    by_lengths = RopeScaling("yarn", original_max_position_embeddings=100)
    assert_near(frequencies(1e4, 8, 400, by_lengths), [1, 0.0625, 0.0025, 0.00025])


def test_longrope():
    assert_near(frequencies(100.0, 4, 32, LONGROPE, length=8), [1, 0.05])
    assert_near(frequencies(100.0, 4, 32, LONGROPE, length=9), [0.25, 0.02])
    assert limit(32, LONGROPE) == 8


def test_how_much_sharper_attention_becomes():
    assert magnitude(400, YARN) == pytest.approx(1.138629), "0.1 ln 4 + 1"
    assert magnitude(400, RopeScaling("yarn", 1.0, 400)) == 1
    deepseek = RopeScaling("yarn", 4.0, 100, mscale=0.7, mscale_all_dim=1.0)
    assert magnitude(400, deepseek) == pytest.approx(0.963475), "1.097041 / 1.138629"
    assert magnitude(400, RopeScaling("yarn", 4.0, 100, mscale=0.7)) == pytest.approx(1.138629), "both, or neither"
    assert magnitude(400, RopeScaling("yarn", 4.0, 100, attention_factor=1.5)) == 1.5
    assert magnitude(32, LONGROPE) == pytest.approx(1.290994), "sqrt(1 + ln 4 / ln 8)"
    assert magnitude(8, LONGROPE) == 1
    assert [magnitude(64, scaling) for scaling in (None, RopeScaling("linear", 4.0), LLAMA3)] == [1, 1, 1]


def test_a_rotation_holds_cos_and_sin_of_position_times_frequency():
    rotary = Rotary(100.0, 4, 64, RopeScaling("yarn", 1.0, attention_factor=2.0))
    cos, sin = rotary(torch.tensor([[0, 3]]), torch.float64)
    assert cos.shape == sin.shape == (1, 2, 1, 4)
    assert cos[0, 0, 0].tolist() == [2, 2, 2, 2] and sin[0, 0, 0].abs().sum() == 0
    assert cos[0, 1, 0].tolist() == pytest.approx([2 * math.cos(3), 2 * math.cos(0.3)] * 2)
    fast, slow = 2 * math.sin(3), 2 * math.sin(0.3)
    assert sin[0, 1, 0].tolist() == pytest.approx([-fast, -slow, fast, slow])


def test_the_longest_row_of_a_forward_decides_and_leaves_no_trace():
    rotary = Rotary(100.0, 4, 8, RopeScaling("dynamic", 2.0))
    short, long = torch.arange(8)[None], torch.arange(16)[None]
    before, _ = rotary(short, torch.float64)
    longer, _ = rotary(long, torch.float64)
    assert longer[0, 3, 0, 1] == pytest.approx(math.cos(3 / 30))
    assert torch.equal(rotary(short, torch.float64)[0], before), "a long row changed what a later short one gets"


def test_frequencies_stay_in_float32_when_a_model_is_converted_or_copied():
    config = ModelConfig(99, 16, 24, 2, 4, rope_scaling=LLAMA3)
    with torch.device("meta"):
        model = Transformer(config)
    model = copy.deepcopy(model.to_empty(device="cpu").bfloat16())
    rotary = model.kinds[0][0]
    assert rotary is model.kinds[1][0] and rotary.frequencies.dtype == torch.float32
    assert "frequencies" not in "".join(model.state_dict())


@pytest.mark.parametrize(("options", "said"), [
    ({"rope_type": "mrope", "factor": 2.0}, "rope type 'mrope' is not supported: supported are 'default', 'linear'"),
    ({"rope_type": "linear"}, "rope type 'linear' needs a factor"),
    ({"rope_type": "linear", "factor": 0.5}, "rope factor 0.5 is below 1"),
    ({"rope_type": "yarn", "factor": math.inf}, "rope factor inf must be at least 0, and finite"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, "low_freq_factor 4.0 must lie above 0 and below"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "beta_slow 1.0 must lie above 0, and not above"),
    ({"rope_type": "longrope", "short_factor": (1.0, 0.0)}, "a number in short_factor or long_factor is not above 0"),
])
def test_a_scaling_that_makes_no_sense_is_refused(options, said):
    with pytest.raises(UserError, match=said) as error:
        RopeScaling(**options)
    assert "\n" not in str(error.value)


def test_every_type_names_the_fields_it_reads():
    assert all(set(names) <= set(RopeScaling.__dataclass_fields__) for names in TYPES.values())
