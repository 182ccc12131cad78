"""Talk to a model in the terminal.

    python -m minirl.chat FOLDER                                    a conversation, until Ctrl-D
    python -m minirl.chat FOLDER --message "What is 2+3?"           one answer, for scripts
    python -m minirl.chat FOLDER --adapter runs/lora/step_200       with a LoRA adapter on the model
    python -m minirl.chat FOLDER --calculator                       a model of the task gsm8k_calc, and its tool

The answer appears as it is sampled. The conversation is one row of tokens that only grows, exactly like a row of a
multi-turn rollout, so its cache is kept and the model reads every token once. A model without a chat template is a
base model: it goes on where each text ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minirl.adapters import load_adapter, open_policy, tokenizer_folder
from minirl.chat import render, reply, template_of, turn_ends
from minirl.config import UserError, check_positive, run
from minirl.env.gsm8k_calc import CLOSE, answer_call
from minirl.env.loop import prompt_tokens
from minirl.generate import check_options, sample, uniform
from minirl.model import KVCache, Transformer
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.tokenizer import StreamDecoder, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    folder: str  # model folder or checkpoint, a LoRA run's too
    adapter: str = ""  # folder of a LoRA adapter to put on the model
    qlora: bool = False  # hold the weights in 4 bits (NF4), as in a run with --qlora
    template: str = "auto"  # chat template; auto: the model's own; none: continue the text, as base models do
    system: str = ""  # system prompt
    message: str | None = None  # say this, print the answer and leave; none: a conversation
    enable_thinking: bool = True  # Qwen3: think before answering
    calculator: bool = False  # calculate what the model writes as <calc>12+7</calc>, and tell it: see env/gsm8k_calc.py
    # sampling
    temperature: float = 0.7  # 0: always the likeliest token
    top_k: int = 0  # choose among the so many likeliest tokens; 0: all
    top_p: float = 1.0  # choose among the likeliest tokens of this mass together; 1: all
    max_new_tokens: int = 512  # longest answer
    seed: int = 0  # the same seed and the same words: the same answers
    # machine
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it

    def __post_init__(self):
        check_options(self.temperature, self.top_k, self.top_p)
        check_positive(self, "max_new_tokens")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed is {self.seed}: it must lie between 0 and 2^63 - 1")


class Row:
    """One row of tokens that grows, and a cache of what the model has seen of it: nothing is computed twice."""

    def __init__(self, model: Transformer, tokens: list[int]):
        self.model, self.tokens, self.seen = model, tokens, 0
        self.device = model.head_weight.device
        self.cache = KVCache(model, 1, 0)

    @torch.inference_mode()
    def sample(self, ends: set[int], config: Config) -> Iterator[int]:
        """Choose tokens and yield each: up to one of `ends`, max_new_tokens, or the end of the context.

        With the noise of `generate` for sample 0, so that a seed gives the same answer here and there.
        """
        context = self.model.config.context
        if len(self.tokens) >= context:
            raise UserError(f"the conversation has {len(self.tokens)} tokens, and the model's context holds {context}: "
                            "begin a new one")
        for _ in range(config.max_new_tokens):
            length = len(self.tokens)  # of which some may be a tool's
            if length >= context:
                return
            if length > self.cache.keys[0].shape[2]:
                self.cache = self.cache.resize(2 * length)
            new = torch.tensor([self.tokens[self.seen:]], device=self.device)  # (1, T)
            positions = torch.arange(self.seen, length, device=self.device)[None]
            hidden = self.model(new, positions, cache=self.cache)
            self.seen = length
            noise = uniform(config.seed, torch.zeros_like(positions[0, :1]), positions[0, -1:] + 1)
            token, _ = sample(self.model.logits(hidden[:, -1]), noise, config.temperature, config.top_k, config.top_p)
            self.tokens.append(int(token))
            yield self.tokens[-1]
            if self.tokens[-1] in ends:
                return


class Conversation:
    """What has been said so far, as one row: every turn is appended to it, nothing is rendered again."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, template: str | None, config: Config):
        self.model, self.tokenizer, self.template, self.config = model, tokenizer, template, config
        self.ends = turn_ends(tokenizer, template) if template else {*tokenizer.stop_ids}
        self.row: Row | None = None

    def answer(self, text: str) -> Iterator[str]:
        """The answer to the user's next message, in whole characters as they come.

        Without a template, how the text goes on: each text by itself.
        """
        self.hear(text)
        decoder, action = StreamDecoder(self.tokenizer), ""
        for token in self.row.sample(self.ends, self.config):
            piece = decoder.push(token)
            yield piece
            action += piece
            if self.config.calculator and action.endswith(CLOSE + "\n"):
                result, action = answer_call(action)[0], ""
                self.row.tokens += self.tokenizer.encode(result, continued=True)
                yield result
        yield decoder.finish()

    def hear(self, text: str) -> None:
        """Put a message on the row."""
        user = {"role": "user", "content": text}
        if self.template is None:
            tokens = prompt_tokens(self.tokenizer, text)
            if not tokens:
                raise UserError("there is nothing to continue: give a text of at least one character")
            self.row = Row(self.model, tokens)
        elif self.row is None:
            system = [{"role": "system", "content": self.config.system}] if self.config.system else []
            self.row = Row(self.model, render([*system, user], self.tokenizer, template=self.template,
                                              add_generation_prompt=True,
                                              enable_thinking=self.config.enable_thinking)[0])
        else:
            self.row.tokens += reply([user], self.tokenizer, self.template, ended=self.ended,
                                     enable_thinking=self.config.enable_thinking)

    @property
    def ended(self) -> bool:
        """Has the last answer come to its own end?"""
        return self.row.tokens[-1] in self.ends


def main(config: Config) -> None:
    """One answer to --message; or a conversation, until the end of the input."""
    home = tokenizer_folder(config.adapter, config.folder) if config.adapter else tokenizer_folder(config.folder)
    template = template_of(home) if config.template == "auto" else config.template
    if template == "none":
        template = None
    if config.system and template is None:
        raise UserError("--system needs a chat template, and without one text is only continued: give --template")
    tokenizer, device = load_tokenizer(home), pick_device(config.device)
    model = open_policy(config.folder, pick_dtype(config.dtype, device), device, config.qlora).eval()
    if config.adapter:
        load_adapter(model, config.adapter)
    conversation = Conversation(model, tokenizer, template, config)
    for message in lines() if config.message is None else [config.message]:
        try:
            for piece in conversation.answer(message):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:  # ends the answer and not the conversation
            pass
        print()
        if not conversation.ended:
            print("[the answer was cut]", file=sys.stderr)


def lines() -> Iterator[str]:
    """What is typed, line by line; of a terminal with a prompt. Ctrl-D, or Ctrl-C at the prompt, ends it."""
    try:
        while True:
            yield input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return


def command() -> None:
    """The command line."""
    run(main, Config, "\n".join(__doc__.splitlines()[:6]))
