"""A model as an agent, on the rows that `minirl.data.convert` writes: it calls, hears the results, and is measured.

    python -m minirl.agent_eval runs/sft/step_100 runs/sft/step_200 --data held_out.jsonl --samples 4
    python -m minirl.agent_eval FOLDER --data held_out.jsonl --pairs pairs.jsonl        failures for train_dpo.py

Each row is a task: the messages before the first answer are given, the rest is the reference. Tools answer with what
the reference has recorded for the same arguments, the calculator calculates, and everything else is an error for the
agent to recover from. A task is solved where

    the reference ends in "#### NUMBER"    the last message has that value
    it ends in a call (BFCL, ToolBench)    the wanted calls were made and no others (BFCL: any accepted values); the
                                           words inside Finish are nobody's to judge
    it ends in other words                 the wanted calls were made, and something is said
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirl.adapters import open_policy, tokenizer_folder
from minirl.agent_metrics import SIGNALS, Attempt, calls_of, matched, measure, side_by_side, signals
from minirl.chat import ToolCallError, action_text, parse_tool_calls, render, reply, turn_ends
from minirl.config import UserError, check_not_negative, check_positive, run, write_text
from minirl.data.augment import messages_of
from minirl.data.bfcl import ast_error, same_value
from minirl.data.failures import preference_pairs
from minirl.data.jsonl import read_jsonl
from minirl.data.trajectories import find_problems
from minirl.env.calculator import CalculatorError, calculate
from minirl.generate import generate
from minirl.graduate import checklist, report
from minirl.jinja_templates import template_for
from minirl.messages import to_json
from minirl.model import Transformer
from minirl.parallel import pick_dtype
from minirl.parallel.mesh import pick_device
from minirl.rewards import gsm8k_reward
from minirl.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    folders: tuple[str, ...]  # models, of one SFT run oldest first
    data: str = ""  # file of minirl.data.convert, rows that were not learnt
    rows: int = 100  # tasks, the first of the file that fit the context
    samples: int = 1  # attempts at each task
    temperature: float | None = None  # of the sampling; none: 0 for one sample, 0.7 for more
    template: str = "auto"  # chat template; auto: the model's own, or plain
    max_new_tokens: int = 256  # longest attempt, all turns together
    max_turns: int = 8  # turns of the assistant
    price_read: float = 0.0  # price of a million tokens that are given
    price_written: float = 0.0  # price of a million tokens that are chosen
    pairs: str = ""  # write preference pairs of the last model's failures to this file
    seed: int = 0  # of the samples
    device: str = "auto"  # cuda, mps or cpu; auto takes the first there is
    dtype: str = "auto"  # float32, float64 or bfloat16; auto is bfloat16 where the hardware has it

    def __post_init__(self):
        check_positive(self, "rows", "samples", "max_new_tokens", "max_turns")
        check_not_negative(self, "price_read", "price_written")
        if not self.data:
            raise UserError("--data is missing: give a file of minirl.data.convert")


class Play:
    """One attempt while it is being made: `step` takes an action of the model and says what is forced after it."""

    def __init__(self, row: dict[str, Any], tokenizer: Tokenizer, template: str, max_turns: int):
        self.reference = messages_of(row)
        self.start = next((i for i, message in enumerate(self.reference) if message["role"] == "assistant"), 0)
        if "completion" in row:
            self.start = max(self.start, len(row["prompt"]))
        self.tools = row.get("tools") or []
        self.possible = row.get("possible_answer")
        self.messages = self.reference[: self.start]
        self.tokenizer, self.template, self.max_turns = tokenizer, template, max_turns
        self.recorded = recorded(self.reference)
        self.last = {call["name"] for call in calls_of(self.reference[-1:])}
        self.turns = 0

    def step(self, action: list[int]) -> list[int]:
        """Read an action, answer its calls; the tokens that are forced next, none when the row is over."""
        self.turns += 1
        text = action_text(action, self.tokenizer)
        try:
            calls = parse_tool_calls(text, self.template) if self.tools else []
            results = [self.answer(call) for call in calls]
            made = [{"type": "function", "function": call} for call in calls]
            content = text.partition("<tool_call>")[0].strip() if made else text
            self.messages.append({"role": "assistant", "content": content} | ({"tool_calls": made} if made else {}))
        except ToolCallError as error:
            self.messages.append({"role": "assistant", "content": text})
            calls, results = [], [str(error)]
        over = bool(self.last) and (not self.recorded or any(call["name"] in self.last for call in calls))
        if not results or over or self.turns == self.max_turns:
            return []
        said = [{"role": "tool", "content": result} for result in results]
        self.messages += said
        return reply(said, self.tokenizer, self.template)

    def answer(self, call: dict[str, Any]) -> str:
        """What a tool gives back for a call, as recorded; of a wrong call the error that the model reads."""
        problems = find_problems([{"role": "user", "content": ""}, {
            "role": "assistant", "content": None, "tool_calls": [{"function": call}]}], self.tools)
        if problems:
            return f"Error: {problems[0].text.partition(', ')[2]}"
        for known, result in self.recorded:
            if known["name"] == call["name"] and same_value(call["arguments"], known["arguments"]):
                return result
        if call["name"] == "calculator":
            try:
                return calculate(str(call["arguments"].get("expression", "")))
            except CalculatorError as error:
                return f"Error: {error}"
        return f"Error: {call['name']} has no result for these arguments."

    def attempt(self, task: str, written: int, read: int) -> Attempt:
        made = Attempt(task, self.messages, False, self.tools, self.reference, self.possible, self.start, written, read)
        return Attempt(**vars(made) | {"correct": self.solved(made)})

    def solved(self, made: Attempt) -> bool:
        """Did the attempt do what the row asks? By BFCL's check where answers are listed, else by the last words."""
        if self.possible is not None:
            return ast_error(made.calls, [tool["function"] for tool in self.tools], self.possible) is None
        said, gold = str(self.messages[-1].get("content") or ""), str(self.reference[-1].get("content") or "")
        if "####" in gold:
            return gsm8k_reward(said, gold) == 1.0
        wanted, (selected, right) = made.wanted, matched(made)
        if self.last:  # the words of a call of Finish are free: its tool counts
            finish = sum(call["name"] == "Finish" for call in wanted)
            return selected == len(wanted) == len(made.calls) and right >= len(wanted) - finish
        return right == len(wanted) and bool(said.strip()) and not self.messages[-1].get("tool_calls")


def recorded(messages: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """(call, result) of every call of a conversation that was answered."""
    found, open_calls = [], []
    for message in messages:
        if message["role"] == "tool" and open_calls:
            found.append((open_calls.pop(0), str(message["content"])))
        elif message["role"] == "assistant":
            open_calls = calls_of([message])
    return found


def play(policy: Transformer, tokenizer: Tokenizer, template: str, rows: Sequence[dict[str, Any]], samples: int = 1,
         temperature: float = 0.0, max_new_tokens: int = 256, max_turns: int = 8, seed: int = 0,
         max_rows: int = 4096) -> list[Attempt]:
    """`samples` attempts at each row's task, in the order of the rows. Rows whose prompt leaves no room: UserError."""
    tokenizer.add_stops(turn_ends(tokenizer, template))
    plays = [Play(row, tokenizer, template, max_turns) for row in rows for _ in range(samples)]
    prompts = [render(each.messages, tokenizer, each.tools or None, template, add_generation_prompt=True)[0]
               for each in plays[::samples]]
    rollout = generate(policy, prompts, tokenizer, group_size=samples, temperature=temperature, seed=seed,
                       max_new_tokens=max_new_tokens, respond=lambda row, action: plays[row].step(action),
                       max_rows=max_rows)
    written, lengths = rollout.action_mask.sum(1).tolist(), rollout.lengths.tolist()
    return [each.attempt(str(i // samples), written[i], lengths[i] - written[i]) for i, each in enumerate(plays)]


def tasks_of(path: str, count: int, tokenizer: Tokenizer, template: str, room: int) -> list[dict[str, Any]]:
    """The first `count` rows of a converted file that are conversations and whose prompt has at most `room` tokens."""
    rows = []
    for place, row in read_jsonl(path):
        if "messages" not in row and not ("prompt" in row and isinstance(row.get("completion"), list)):
            raise UserError(f"{place}: no messages, and no prompt and completion: give a file of minirl.data.convert")
        each = Play(row, tokenizer, template, 1)
        if each.start == 0:
            raise UserError(f"{place}: the row begins with the assistant: there is no task before its first answer")
        prompt = render(each.messages, tokenizer, each.tools or None, template, add_generation_prompt=True)[0]
        if len(prompt) <= room:
            rows.append(row)
        if len(rows) == count:
            return rows
    if not rows:
        raise UserError(f"no prompt of {path} fits {room} tokens: use a model with a longer context, or a smaller "
                        "--max-new-tokens")
    return rows


def main(config: Config) -> None:
    """Every model on every row, the reports side by side."""
    temperature = config.temperature if config.temperature is not None else 0.7 if config.samples > 1 else 0.0
    device = pick_device(config.device)
    reports, attempts = {}, []
    for folder in config.folders:
        policy = open_policy(folder, pick_dtype(config.dtype, device), device)
        tokenizer = load_tokenizer(tokenizer_folder(folder))
        template = template_for(tokenizer, config.template)
        rows = tasks_of(config.data, config.rows, tokenizer, template, policy.config.context - config.max_new_tokens)
        attempts = play(policy, tokenizer, template, rows, config.samples, temperature, config.max_new_tokens,
                        config.max_turns, config.seed)
        name = "/".join(Path(folder).parts[-2:])
        reports[name] = measure(attempts, 0, config.price_read, config.price_written)
    print(f"{len(rows)} tasks of {config.data}, {config.samples} attempts each")
    print(side_by_side(reports))
    print("\nfrom SFT to RL, the last model:")
    measured = signals(attempts, [each["success"] for each in reports.values()])
    print(report(checklist(measured, SIGNALS)))
    if config.pairs:
        pairs = preference_pairs([{"task": each.task, "messages": each.messages, "tools": each.tools,
                                   "correct": each.correct} for each in attempts])
        write_text(config.pairs, "".join(to_json(pair) + "\n" for pair in pairs))
        print(f"wrote {len(pairs)} pairs to {config.pairs}")


if __name__ == "__main__":
    run(main, Config, __doc__)
