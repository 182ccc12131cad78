"""A small agent from nothing, before and after real rows: minutes on one core.

    python benchmarks/small_agent.py --bfcl data/bfcl/BFCL_v4_*.json --toolbench data/toolbench/answer/*.json
    python benchmarks/small_agent.py ... --docs         also puts the table into docs/agent_eval.md

A few hundred thousand weights cannot copy a name that they have never seen, so tools and arguments have numbers for
names (`--number-names` of minirl.data.convert). Frequent words of the rows that are learnt are tokens: a row has a few
hundred tokens then, not a thousand bytes. Every fourth row of BFCL and every second of ToolBench is held out.

The run stays in --run-dir, and a command that was stopped goes on from there.
"""

import argparse
import re
from collections import Counter
from math import ceil
from pathlib import Path
from random import Random

import torch
from experiment import into_docs, train  # which finds the trainers

import train_sft
from minirl.agent_eval import play
from minirl.agent_metrics import measure
from minirl.checkpoint import load_model, save_model
from minirl.config import read_json, write_text
from minirl.data.convert import Config, convert
from minirl.messages import to_json
from minirl.model import ModelConfig, Transformer
from minirl.templates import TOOLS_AFTER, TOOLS_BEFORE
from minirl.tokenizer import ByteTokenizer, load_tokenizer

PUNCTUATION = [  # of the template and of JSON, as it recurs
    "system:\n" + TOOLS_BEFORE, TOOLS_AFTER, "user:\n", '{"type": "function", "function": {"name": "tool_',
    '\n{"type": "function", "function": {"name": "tool_', '", "description": "', '": {"type": "', '"}, "arg_',
    '."}, "arg_', '", "items": {"type": "', '", "parameters": {"type": "object", "properties": {"arg_',
    '.", "parameters": {"type": "object", "properties": {"arg_', '"}}, "required": ["arg_', '."}}, "required": ["arg_',
    '", "arg_', ', "arg_', '"]}}}', '<tool_call>\n{"name": "tool_', '", "arguments": {"arg_', '": "', '": ', '": ["',
    '": [', '}}\n</tool_call>', '"}}\n</tool_call>', ", ", ". "] + [
    f" {words} " for words in "the,of,a,is,in,for,and,to,with,from,an,between,on,at,by,or,of the,in the,for the,to the"
    .split(",")]
MEASURES = ("success", "tool_selection", "arguments", "format", "needless_calls", "needless_rate", "tokens")


def real_rows(options: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """(to learn, held out). ToolBench's come first and BFCL's are shuffled, for the trainer watches the last tenth."""
    learnt, held_out = [], []
    for name, files, each in (("toolbench", options.toolbench, 2), ("bfcl", options.bfcl, 4)):
        rows = convert(Config(format=name, files=tuple(files), out="", number_names=True))[0]
        held_out += rows[each - 1 :: each]
        rest = [row for i, row in enumerate(rows) if i % each != each - 1]
        learnt += Random(0).sample(rest, len(rest))
    return learnt, held_out


def save_words(rows: list[dict], folder: Path, count: int) -> None:
    """A tokenizer of bytes and, as added tokens, of punctuation and the rows' most frequent words."""
    texts = (to_json([row["messages"], row["tools"]]) for row in rows)
    found = Counter(word for text in texts for word in re.findall("[A-Za-z]{2,}", text))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    tokenizer.save(folder)
    file = read_json(folder / "tokenizer.json")
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    file["added_tokens"] += [{"id": tokenizer.vocab_size + i, "content": text, **plain}
                             for i, text in enumerate([*PUNCTUATION, *(word for word, _ in found.most_common(count))])]
    write_text(folder / "tokenizer.json", to_json(file))


def table(reports: list[dict[str, float]], heads: list[str]) -> str:
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in MEASURES:
        cells = ("" if report[name] != report[name] else f"{report[name]:.3g}" for report in reports)
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compare(models: dict[str, Path], rows: dict[str, list[dict]], limit: int) -> str:
    """The table of every model on all rows of each name; limit: tokens of an answer."""
    reports, heads = [], []
    for name, some in rows.items():
        for when, folder in models.items():
            model, tokenizer = load_model(folder), load_tokenizer(folder)
            reports.append(measure(play(model, tokenizer, "plain", some, max_new_tokens=limit)))
            heads.append(f"{len(some)} rows {name}, {when}")
    return table(reports, heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bfcl", nargs="+", required=True, help="BFCL's files; possible_answer/ lies beside them")
    parser.add_argument("--toolbench", nargs="*", default=[], help="ToolBench's search trees")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_agent"))
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/agent_eval.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    learnt, held_out = real_rows(options)
    start, data = options.run_dir / "start", options.run_dir / "real.jsonl"
    if not start.is_dir():
        save_words(learnt, options.run_dir / "words", 1000)
        write_text(data, "".join(to_json(row) + "\n" for row in learnt))
        tokenizer = load_tokenizer(options.run_dir / "words")
        shape = ModelConfig(tokenizer.vocab_size, 64, 170, 4, 2, max_position_embeddings=8192)
        save_model(Transformer(shape).init_weights(torch.Generator().manual_seed(0)), start, tokenizer)
    agent = train(train_sft, options.run_dir / "agent", task="jsonl", data=str(data), template="plain", init=str(start),
                  epochs=options.epochs, batch_size=8, microbatch_size=4, lr=3e-3, eval_every=60, save_every=60)
    some = {name: rows[:: ceil(len(rows) / 100)] for name, rows in (("held out", held_out), ("learnt", learnt))}
    text = compare({"before": start, "after": agent}, some, 100)
    print(text)
    if options.docs:
        into_docs("agent_eval.md", "small_agent.py", text)


if __name__ == "__main__":
    main()
