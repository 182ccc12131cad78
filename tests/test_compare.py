"""Models side by side on one task."""

import json

import pytest
import torch
from stubs import Pieces, Reader, random_policy

from minirl import compare
from minirl.checkpoint import save_model
from minirl.config import UserError, cli
from minirl.env.gsm8k_calc import GSM8KCalc
from minirl.tokenizer import ByteTokenizer


def rows(path, *answers):
    path.write_text("".join(json.dumps({"question": f"{path.stem}{i}", "answer": answer}) + "\n"
                            for i, answer in enumerate(answers)))
    return str(path)


def test_measures_of_a_model_that_is_told_what_to_say(tmp_path):
    train = rows(tmp_path / "t.jsonl", "x\n#### 1")
    env = GSM8KCalc(train, rows(tmp_path / "e.jsonl", "1+1=<<1+1=2>>2\n#### 2", "2+2=<<2+2=4>>4\n#### 4", "5\n#### 5"))
    tokenizer = Pieces(*map(chr, range(10, 127)))
    played = []
    answers = (["<calc>1+1</calc>\n", "2\n", "#### 2"], ["<calc>x</calc>\n", "error: not arithmetic\n", "#### 9"],
               ["five"])
    for example, said in zip(env.sample(3, split="eval"), answers):
        text = example.prompt + "".join(said)
        played.append([*tokenizer.encode(text), tokenizer.eos_id])
    found = compare.measure(Reader(tokenizer.vocab_size, played), tokenizer, env, 3, max_rows=1)
    chosen = [17 + 6 + 1, 15 + 6 + 1, 4 + 1]
    assert found == pytest.approx({"accuracy": 1 / 3, "format": 2 / 3, "length": sum(chosen) / 3, "turns": 5 / 3,
                                   "tool calls": 0.5, "0 calls": 0.0, "1 calls": 0.5})


def test_the_command_prints_a_column_for_each_model(tmp_path, capsys):
    tokenizer = ByteTokenizer()
    for name in ("a", "b"):
        save_model(random_policy(tokenizer.vocab_size, context=300, dtype=torch.float32), tmp_path / name, tokenizer)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    compare.main(cli(compare.Config, [*folders, "--task", "addition", "--problems", "2", "--device", "cpu"]))
    head, accuracy, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == [f"{tmp_path.name}/a", f"{tmp_path.name}/b"] and accuracy.split()[0] == "accuracy"
    with pytest.raises(UserError, match="--problems is 0"):
        compare.Config((*folders,), "addition", problems=0)
