"""Twenty updates beside TRL's trainers: the same rows, the same start, the same weights in the end, to 1e-5.

Both sides run their own loop as a user would start it: log-probs, losses, clipping of the gradient, AdamW. Weights move
by up to 4e-3 here, so that one wrong sign, mask or denominator is far outside the tolerance. TRL's own defaults differ
in these places, which the settings below bring together:

    beta2 of AdamW        0.999, here 0.95
    std of a group        divides by G - 1 and adds 1e-4: `std_ddof=1`, and rewards in thousands, where 1e-4 is nothing
    loss_type             "grpo" is the mean over rows of their means (`aggregate sequence`), "dapo" over all tokens
    epsilon_high          of "cispo" the largest weight itself, here its distance from 1
    KL term               weighed by the ratio: `kl_ratio`
    DPO                   no likelihood of the chosen answer: `nll_coef=0`
"""

import json
import os
from random import Random
from string import ascii_lowercase

import pytest
import torch
from safetensors.torch import load_file

import train_dpo
import train_grpo
import train_sft
from minirl.adapters import save_adapter
from minirl.checkpoint import load_model, save_model
from minirl.data.dataset import read_rows
from minirl.data.preferences import read_preferences
from minirl.lora import add_lora
from minirl.model import ModelConfig, Transformer
from minirl.rollout import Rollout, Tapes
from minirl.tokenizer import ByteTokenizer

trl = pytest.importorskip("trl")
datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")

UPDATES, LR, LONGEST = 20, 2e-4, 8
OURS = dict(device="cpu", dtype="float64", lr=LR, warmup_steps=0, schedule="constant", eval_every=0, eval_problems=8)
THEIRS = dict(use_cpu=True, bf16=False, max_steps=UPDATES, learning_rate=LR, lr_scheduler_type="constant",
              adam_beta2=0.95, max_grad_norm=1.0, gradient_checkpointing=False, save_strategy="no", report_to="none",
              disable_tqdm=True)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A small Llama of random weights, large enough that its words are not all alike."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
    folder = tmp_path_factory.mktemp("trl") / "start"
    config = ModelConfig(vocab_size=ByteTokenizer().vocab_size, hidden_size=32, intermediate_size=48,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=False)
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() == 2 else 1)
    save_model(model, folder, ByteTokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def adapter(start, tmp_path_factory) -> str:
    """LoRA on all linear layers of it, B still 0."""
    folder = tmp_path_factory.mktemp("trl") / "adapter"
    model = add_lora(load_model(start, dtype=torch.float64), rank=4, alpha=8, base_model=start,
                     generator=torch.Generator().manual_seed(0))
    save_adapter(model, folder, ByteTokenizer())
    return str(folder)


def opened(folder: str) -> torch.nn.Module:
    """The model, or the adapter on its model, as transformers and PEFT have it."""
    if not os.path.exists(f"{folder}/adapter_config.json"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    peft = pytest.importorskip("peft")
    with open(f"{folder}/adapter_config.json") as file:
        base = json.load(file)["base_model_name_or_path"]
    return peft.PeftModel.from_pretrained(opened(base), folder, is_trainable=True)


def assert_same_weights(saved, model: torch.nn.Module, first: str) -> None:
    """What minirl saved beside a trained model of transformers or PEFT; `first` is the folder that both began with."""
    name = "adapter_model.safetensors" if "Peft" in type(model).__name__ else "model.safetensors"
    ours, before = load_file(saved / name), load_file(f"{first}/{name}")
    theirs = model.state_dict()
    if name.startswith("adapter"):
        theirs = pytest.importorskip("peft").get_peft_model_state_dict(model)
    assert ours.keys() == theirs.keys()
    moved = max((ours[key] - before[key]).abs().max() for key in ours)
    apart = max((ours[key] - theirs[key]).abs().max() for key in ours)
    assert moved > 2e-3 and apart < 1e-5, (float(moved), float(apart))


# ---- GRPO ----

GROUP, EPOCHS = 4, 4


def replayed() -> Rollout:
    """Six prompts, four answers each of 2 to 8 bytes, most of them ended; rewards in thousands."""
    words, tokenizer = Random(1), ByteTokenizer()
    prompts = ["".join(words.choices(ascii_lowercase, k=words.randint(3, 9))) for _ in range(6)]
    tapes = Tapes([tokenizer.encode(prompt) for prompt in prompts for _ in range(GROUP)], 20, tokenizer.pad_id)
    for row in range(len(tapes.lengths)):
        said = words.choices(range(97, 123), k=words.randint(1, LONGEST - 1))
        tapes.extend(row, [*said, tokenizer.eos_id if words.random() < 0.8 else 99], chosen=True)
    rewards = torch.tensor([1000.0 * words.randint(0, 5) for _ in tapes.lengths])
    return tapes.rollout(0, GROUP).replace(rewards=rewards)


RECIPES = {  # options here, and there
    "grpo": (dict(kl_ratio=True), dict(loss_type="grpo", beta=0.04)),
    "dapo": (dict(overlong=0.0, resample=0), dict(loss_type="dapo", epsilon_high=0.28, beta=0.0)),
    "dr_grpo": ({}, dict(loss_type="dr_grpo", scale_rewards="none", beta=0.0)),
    "gspo": (dict(eps_low=3e-3, eps_high=4e-3), dict(loss_type="grpo", importance_sampling_level="sequence",
                                                     epsilon=3e-3, epsilon_high=4e-3, beta=0.0)),
    "cispo": ({}, dict(loss_type="cispo", epsilon_high=1.28, beta=0.0)),
}


@pytest.mark.parametrize(("recipe", "lora"), [*((name, False) for name in RECIPES), ("grpo", True)])
def test_five_rollouts_of_four_updates_each(recipe, lora, start, adapter, tmp_path):
    rollout, (ours, theirs), first = replayed(), RECIPES[recipe], adapter if lora else start
    rollout.save(tmp_path / "rollout.safetensors")
    train_grpo.main(train_grpo.Config(
        **OURS, **ours, run_dir=str(tmp_path / "ours"), init=first, recipe=recipe, replay=str(
            tmp_path / "rollout.safetensors"), steps=UPDATES // EPOCHS, epochs=EPOCHS, minibatches=1, microbatch_size=7,
        prompts_per_step=6, group_size=GROUP, max_new_tokens=LONGEST, old_logprobs="trainer", std_ddof=1, difficulty=1,
        lora_rank=0))

    tokens, starts = rollout.tokens.tolist(), (rollout.action_mask.int().argmax(1) + 1).tolist()
    rows = [(row[:begin], row[begin:end]) for row, begin, end in zip(tokens, starts, rollout.lengths.tolist())]
    rewards = {tuple(said): float(reward) for (_, said), reward in zip(rows, rollout.rewards)}
    assert len(rewards) == len(rows)

    def same_again(prompts, trainer):
        return {"prompt_ids": [row for row, _ in rows], "completion_ids": [said for _, said in rows], "logprobs": None}

    trainer = trl.GRPOTrainer(
        opened(first), lambda completion_ids, **kwargs: [rewards[tuple(said)] for said in completion_ids],
        trl.GRPOConfig(**THEIRS, **theirs, output_dir=str(tmp_path / "theirs"), num_iterations=EPOCHS,
                       per_device_train_batch_size=len(rows), steps_per_generation=1, num_generations=GROUP,
                       max_completion_length=LONGEST, temperature=1.0),
        datasets.Dataset.from_list([{"prompt": str(i)} for i in range(len(rows) * UPDATES)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(first), rollout_func=same_again)
    trainer.train()
    assert_same_weights(tmp_path / f"ours/step_{UPDATES // EPOCHS}", trainer.model, first)


# ---- SFT ----

ROWS = 8


def text(words: Random, least: int, most: int) -> str:
    return "".join(words.choices(ascii_lowercase, k=words.randint(least, most)))


@pytest.mark.parametrize("lora", [False, True])
def test_sft_on_prompts_and_completions(lora, start, adapter, tmp_path):
    first, words, data = adapter if lora else start, Random(2), tmp_path / "rows.jsonl"
    rows = [{"prompt": text(words, 3, 20), "completion": text(words, 1, 20)} for _ in range(44)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_sft.main(train_sft.Config(
        **OURS, run_dir=str(tmp_path / "ours"), init=first, task="jsonl", data=str(data), steps=UPDATES,
        batch_size=ROWS, microbatch_size=3, eval_rows=0, save_every=UPDATES))

    tokenizer, ordered = ByteTokenizer(), []
    batch = read_rows(str(data), "", tokenizer, "auto", 0, ROWS).batch(0, UPDATES * ROWS)
    for tokens, mask, length in zip(batch.tokens.tolist(), batch.action_mask.tolist(), batch.lengths.tolist()):
        begin = mask.index(True) + 1
        ordered.append({"prompt": tokenizer.decode(tokens[:begin]),
                        "completion": tokenizer.decode(tokens[begin : length - 1])})
    trainer = trl.SFTTrainer(
        opened(first), trl.SFTConfig(**THEIRS, output_dir=str(tmp_path / "theirs"), per_device_train_batch_size=ROWS,
                                     max_length=64, packing=False),
        train_dataset=datasets.Dataset.from_list(ordered),
        processing_class=transformers.AutoTokenizer.from_pretrained(first))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    assert_same_weights(tmp_path / f"ours/step_{UPDATES}", trainer.model, first)


# ---- DPO ----

@pytest.mark.parametrize(("loss", "theirs"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_dpo_on_pairs(loss, theirs, start, tmp_path):
    words, data = Random(3), tmp_path / "pairs.jsonl"
    rows = [{"prompt": text(words, 3, 12), "chosen": text(words, 1, 12), "rejected": text(words, 1, 12)}
            for _ in range(44)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_dpo.main(train_dpo.Config(
        **OURS, run_dir=str(tmp_path / "ours"), init=start, task="jsonl", data=str(data), steps=UPDATES,
        batch_size=ROWS, microbatch_size=3, loss=loss, beta=0.1, nll_coef=0.0, save_every=UPDATES))

    order = read_preferences(str(data), "", ByteTokenizer(), "auto", 0).numbers(0, UPDATES * ROWS).tolist()
    trainer = trl.DPOTrainer(
        opened(start), opened(start), trl.DPOConfig(**THEIRS, output_dir=str(tmp_path / "theirs"), beta=0.1,
                                                    per_device_train_batch_size=ROWS, loss_type=theirs),
        train_dataset=datasets.Dataset.from_list([rows[i] for i in order]),
        processing_class=transformers.AutoTokenizer.from_pretrained(start))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    assert_same_weights(tmp_path / f"ours/step_{UPDATES}", trainer.model, start)
