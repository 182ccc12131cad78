"""The small agent of small_agent.py, taught to copy before it sees real rows: half an hour of a core.

    python benchmarks/small_agent_copies.py --bfcl data/bfcl/BFCL_v4_*.json --toolbench data/toolbench/answer/*.json
    python benchmarks/small_agent_copies.py ... --docs         also puts the table into docs/agent_eval.md

A call repeats values out of the question. To copy is a skill of its own, which two hundred real rows do not teach, so
there are three stages:

    1. copy    rows that are nothing but copying, and made-up rows with one tool (minirl/data/made_up.py)
    2. call    made-up rows with up to two tools; four in ten have none that fits
    3. real    the rows of BFCL and ToolBench, each many times with other values and other tools beside the right one
               (minirl/data/augment.py), questions that go with other rows' tools, and made-up rows, so that nothing
               is forgotten

The first layer sees three tokens only, which is what a layer that copies has to know ("what came after these words the
last time?"). Every fourth row of BFCL and every second of ToolBench is held out, from words, made-up rows and training
alike. The runs stay in --run-dir, and a command that was stopped goes on from there.
"""

import argparse
import re
from pathlib import Path
from random import Random

import torch
from experiment import into_docs, train  # which finds the trainers
from small_agent import compare, save_words

import train_sft
from minirl.checkpoint import save_model
from minirl.config import write_text
from minirl.data.augment import new_values, number_names, shuffle_tools
from minirl.data.bfcl import NO_CALL
from minirl.data.convert import Config, convert
from minirl.data.made_up import copying_row, made_up_row
from minirl.messages import to_json
from minirl.model import ModelConfig, Transformer
from minirl.tokenizer import load_tokenizer


def real_rows(options: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """(to learn, held out), with the names that they came with."""
    learnt, held_out = [], []
    for name, files, each in (("toolbench", options.toolbench, 2), ("bfcl", options.bfcl, 4)):
        rows = convert(Config(format=name, files=tuple(files), out=""))[0]
        held_out += rows[each - 1 :: each]
        learnt += [row for i, row in enumerate(rows) if i % each != each - 1]
    return learnt, held_out


def varied(rows: list[dict], words: list[str], copies: int, rng: Random) -> list[dict]:
    """The rows once as they are and `copies` times with other values and tools; made-up ones are a quarter of all.

    To every seventh copy comes a question with the tools of another row, which no function fits.
    """
    single = [row for row in rows if len(row["messages"]) == 2]  # a question and its answer
    tools = [tool for row in single for tool in row["tools"]]
    made = [*rows]
    for row in single * copies:
        most = max(len(row["tools"]), rng.choice((1, 1, 2, 3)))
        made.append(new_values(shuffle_tools(row, rng, tools, most), rng, words))
        if rng.random() < 1 / 7:
            question, other = row["messages"][0], rng.choice(single)
            made.append({"messages": [question, {"role": "assistant", "content": NO_CALL}], "tools": other["tools"]})
    return [number_names(row) for row in made] + [made_up_row(rng, words) for _ in range(len(made) // 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bfcl", nargs="+", required=True, help="BFCL's files; possible_answer/ lies beside them")
    parser.add_argument("--toolbench", nargs="*", default=[], help="ToolBench's search trees")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/small_agent_copies"))
    parser.add_argument("--copy-steps", type=int, default=1500, help="updates of stage 1")
    parser.add_argument("--call-steps", type=int, default=2500, help="updates of stage 2")
    parser.add_argument("--copies", type=int, default=16, help="times that a real row is varied; stage 3 is one epoch")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/agent_eval.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, size = options.run_dir, 16
    learnt, held_out = real_rows(options)
    numbered = [number_names(row) for row in learnt]
    words = sorted({word.lower() for row in numbered for word in re.findall(
        "[A-Za-z]{3,}", to_json([row["messages"], row["tools"]]))})

    if not (folder / "start").is_dir():
        save_words(numbered, folder / "words", 1000)
        tokenizer = load_tokenizer(folder / "words")
        shape = ModelConfig(tokenizer.vocab_size, 96, 256, 4, 4, max_position_embeddings=8192, sliding_window=3,
                            layer_types=("sliding_attention", *["full_attention"] * 3))
        save_model(Transformer(shape).init_weights(torch.Generator().manual_seed(0)), folder / "start", tokenizer)

    def stage(name: str, init: Path, rows: list[dict], watched: list[dict], **given) -> Path:
        """A run of train_sft.py on the rows; its checkpoint with the lowest loss on the watched ones."""
        for kind, some in (("learn", rows), ("watch", watched)):
            write_text(folder / f"{name}_{kind}.jsonl", "".join(to_json(row) + "\n" for row in some))
        return train(train_sft, folder / name, task="jsonl", template="plain", init=str(init),
                     data=str(folder / f"{name}_learn.jsonl"), eval_data=str(folder / f"{name}_watch.jsonl"),
                     batch_size=size, microbatch_size=size, eval_every=50, save_every=50, warmup_steps=30, **given)

    rng = Random(0)
    easy = [copying_row(rng, words) if i % 2 else made_up_row(rng, words, 1, rng.choice((1, 1, 2)))
            for i in range(options.copy_steps * size)]
    copier = stage("copy", folder / "start", easy[60:], easy[:60], steps=options.copy_steps, lr=3e-3,
                   schedule="constant")
    made = [made_up_row(rng, words, 2, 2, fitting=0.6) for _ in range(options.call_steps * size)]
    before = stage("call", copier, made[60:], made[:60], steps=options.call_steps, lr=3e-3, schedule="constant")
    watched = [row for i, row in enumerate(learnt) if i % 10 == 9]
    real = varied([row for i, row in enumerate(learnt) if i % 10 != 9], words, options.copies, rng)
    after = stage("real", before, real, [number_names(row) for row in watched], epochs=1, lr=2e-3)

    rows = {"held out": [number_names(row) for row in held_out], "learnt": numbered[::3],
            "made up": [made_up_row(rng, words) for _ in range(60)]}
    text = compare({"before": before, "after": after}, rows, 150)
    print(text)
    if options.docs:
        into_docs("agent_eval.md", "small_agent_copies.py", text)


if __name__ == "__main__":
    main()
