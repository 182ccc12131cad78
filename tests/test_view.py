"""Rollouts that a person can look at: what is in the page, what a browser makes of it, and hostile text in it."""

import base64
import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

from minirl.config import UserError
from minirl.env.base import Step
from minirl.rollout import Rollout, Tapes
from minirl.tokenizer import ByteTokenizer
from minirl.view import Sample, as_text, load_samples, main, pack, page, pieces, summary, summary_text, visible

BYTES = ByteTokenizer()
HOSTILE = ("</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&lt;"
           "\x1b[31m\x00\u202e")


def write_run(folder, rollouts, task="calculator"):
    """A run with saved rollouts: {step: [(prompt, [action, observation, action, ...], reward)]}, two rows a prompt."""
    (folder / "model").mkdir(parents=True)
    BYTES.save(folder / "model")
    (folder / "config.json").write_text(json.dumps({"task": task, "advantage_scale": "std"}))
    with open(folder / "metrics.jsonl", "w") as file:
        for step, rows in rollouts.items():
            rewards = [reward for _, _, reward in rows]
            file.write(json.dumps({"step": step, "reward_mean": sum(rewards) / len(rewards), "entropy": 0.625}) + "\n")
    for step, rows in rollouts.items():
        tapes = Tapes([BYTES.encode(prompt) for prompt, _, _ in rows], 8, BYTES.pad_id)
        for row, (_, turns, _) in enumerate(rows):
            for k, text in enumerate(turns):
                tapes.extend(row, BYTES.encode(text), chosen=k % 2 == 0)
            tapes.extend(row, [BYTES.eos_id], chosen=True)
            tapes.finished[row] = True
        rollout = tapes.rollout(0, 2)
        columns = torch.arange(rollout.action_mask.shape[1]) / 100
        rollout = rollout.replace(
            old_logprobs=-(0.5 + columns) * rollout.action_mask, ref_logprobs=-(1.0 + columns) * rollout.action_mask,
            rewards=torch.tensor([reward for _, _, reward in rows]),
            turns=[[Step("", 0.0, False, {"tool_call": True}), Step("", reward, True, {"rewards": {"right": reward}})]
                   for _, _, reward in rows])
        rollout.save(folder / "rollouts" / f"step_{step}" / "rank_0.safetensors")
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", {
        1: [("2+2=", ["<calc>2+2</calc>", "4\n", "4"], 1.0), ("2+2=", [HOSTILE, "é", "5"], 0.0)],
        20: [("2+2=", ["4"], 1.0), ("2+2=", ["four"], 0.5)]})


def view(capsys, run, *argv):
    main([str(run), "--tokenizer", str(run / "model"), *map(str, argv)])
    return capsys.readouterr().out


def test_a_row_that_the_reference_did_not_read_has_no_kl(run):
    path = run / "rollouts/step_1"
    rollout = Rollout.load(path)
    rollout.ref_logprobs[1] = 0
    rollout.save(path / "rank_0.safetensors")
    samples = load_samples(run, 1, tokenizer=BYTES)
    assert [sample.ref_logprobs is None for sample in samples] == [False, True]
    packed = zlib.decompress(base64.b64decode(pack(samples, [])))
    told = json.loads(packed[4 : 4 + struct.unpack("<I", packed[:4])[0]])["samples"]
    assert [sample["compared"] for sample in told] == [True, False]


def test_samples_by_hand(run):
    first, second = load_samples(run, 1, tokenizer=BYTES)
    assert "".join(first.pieces) == "2+2=<calc>2+2</calc>4\n4⟨<|endoftext|>⟩"
    assert first.chosen == [False] * 4 + [True] * 16 + [False] * 2 + [True] * 2
    # Token 4 is the first that was chosen; column 3 of the rollout is its prediction.
    assert first.logprobs[4] == pytest.approx(-0.53) and first.ref_logprobs[4] == pytest.approx(-1.03)
    assert first.logprobs[0] == 0 and first.advantages[4] == pytest.approx(1.0, abs=1e-3)
    assert second.advantages[-1] == pytest.approx(-1.0, abs=1e-3), "not saved: computed from the group's rewards"
    assert (first.outcome, second.outcome) == ("solved", "failed") and first.parts == {"right": 1.0}
    assert first.steps[0][:3] == ["", 0.0, {"tool_call": True}]
    shown = summary([first, second], run, 1)
    assert shown["shown"]["reward_mean"] == 0.5 == shown["logged"]["reward_mean"]
    assert shown["shown"]["turns"] == 2 and "reward_mean (logged)" in summary_text([shown])


def test_what_was_scored_later_is_shown(run):
    folder = run / "rollouts/step_1"
    Rollout.load(folder).replace(advantages=torch.tensor([[0.25], [0.5]])).save(folder / "scored/rank_0.safetensors")
    first, second = load_samples(run, 1, tokenizer=BYTES)
    assert (first.advantages[-1], second.advantages[-1]) == (0.25, 0.5) and first.steps, "and its steps are still told"


def test_characters_that_hide_are_shown():
    assert visible("a\n\tb é 中 \u3000") == "a\n\tb é 中 \u3000"
    assert visible("\x1b[31m\x00\x7f\x85\u202e\u200b\ud800") == "␛[31m␀␡⟨U+0085⟩⟨U+202E⟩⟨U+200B⟩⟨U+D800⟩"
    assert pieces([*"é中".encode()], BYTES) == ["", "é", "", "", "中"], "a character stands at its last token"
    assert pieces([0xC3, BYTES.eos_id, 65], BYTES) == ["", "\ufffd⟨<|endoftext|>⟩", "A"]
    assert pieces([65, 0xC3], BYTES) == ["A", "\ufffd"]


def test_the_text_has_turns_and_no_escape_codes(run, capsys):
    printed = view(capsys, run, "--text")
    assert "\x1b" not in printed and "\x00" not in printed and "\u202e" not in printed
    assert "␛[31m␀⟨U+202E⟩" in printed and "calculator, step 1, sample 0: solved, reward 1 (right 1)" in printed
    assert re.search(r"observation 1\n    4\n", printed) and "step 20" in printed
    sample = load_samples(run, 1, tokenizer=BYTES)[0]
    assert "\x1b[32m<calc>2+2</calc>\x1b[0m" in as_text(sample, colour=True)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """A page of 1,000 samples of 310 tokens, whose log-probs are noise as those of a real model are."""
    tmp_path = tmp_path_factory.mktemp("thousand")
    generator = torch.Generator().manual_seed(0)
    words = "the agent calls a calculator and reads what it says then goes on to add the numbers of the table".split()
    rows = []
    for i in range(1000):
        picked = torch.randint(len(words), (60,), generator=generator).tolist()
        rows.append((f"Question {i // 2}: how many?", [" ".join(words[k] for k in picked)], float(i % 2)))
    run = write_run(tmp_path / "run", {1: rows})
    samples = load_samples(run, 1, tokenizer=BYTES)
    noise = torch.randn(400_000, generator=generator).double().numpy()
    at = 0
    for sample in samples:
        n = len(sample.pieces)
        sample.logprobs[:] = -abs(noise[at : at + n])
        sample.ref_logprobs[:] = sample.logprobs + 0.05 * noise[at : at + n][::-1]
        at += n
    assert len(samples) == 1000 and at > 300_000
    file = tmp_path / "page.html"
    file.write_text(page(samples, [summary(samples, run, 1)]), encoding="utf-8")
    return file


def test_a_page_of_a_thousand_samples_is_below_3_mb(thousand):
    assert thousand.stat().st_size < 3e6


def test_one_line_errors(run, tmp_path, capsys):
    for argv, message in [([str(tmp_path)], "no saved rollouts"), ([str(run)], "no checkpoint whose tokenizer"),
                          ([str(run), "--steps", "2"], "no rollout of step 2: it has 1, 20"),
                          ([str(run), "--steps", "x"], "--steps is 'x'"),
                          ([str(run), "--samples", "0"], "--samples is 0")]:
        with pytest.raises(UserError, match=message):
            main([*argv, *(["--tokenizer", str(run / "model")] if "checkpoint" not in message else [])])
    (run / "rollouts/step_1/rank_0.jsonl").unlink()  # as older runs are
    assert load_samples(run, 1, tokenizer=BYTES)[0].steps == []


def test_rollouts_are_read_back_as_before(run):
    rollout = Rollout.load(run / "rollouts/step_1")
    assert len(rollout) == 2 and rollout.texts == []
    assert [[step.reward for step in steps] for steps in rollout.turns] == [[0.0, 1.0], [0.0, 0.0]]


# ------------------------------------------------------------------ in a browser

CLICKS = """<script>
const wait = setInterval(() => {
  if (!document.body.dataset.ready) return;
  clearInterval(wait);
  const report = document.createElement("pre"), say = text => report.append(text + "\\n");
  report.id = "report";
  for (const row of document.querySelectorAll("#summary tr"))
    say("row " + [...row.cells].map(cell => cell.textContent).join("|"));
  say("all " + count.textContent);
  outcome.value = "failed"; outcome.onchange();
  say("filtered " + count.textContent);
  colour.value = "KL to the reference"; colour.onchange();
  const token = document.querySelector(".text span.chosen");
  say("background " + token.style.background);
  token.click();
  say("detail " + detail.textContent);
  say("sample " + document.getElementById("sample").textContent);
  say("images " + document.images.length + " scripts " + document.scripts.length);
  say("title " + document.title);
  document.body.append(report);
}, 20);
</script></body>"""


def browse(path: Path) -> str:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium here")
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000",
                           f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()],
                          capture_output=True, text=True, timeout=120)
    return done.stdout


def test_a_browser_filters_clicks_and_is_not_fooled(run, capsys):
    view(capsys, run)
    text = (run / "rollouts.html").read_text(encoding="utf-8")
    assert "script-src 'sha256-" in text and "owned" not in text
    # The hand that clicks is a script of the test, which the page's policy would not let in.
    opened = re.sub(r"script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", text).replace("</body>", CLICKS)
    (run / "clicks.html").write_text(opened, encoding="utf-8")
    dom = browse(run / "clicks.html")
    report = html.unescape(re.search(r'<pre id="report">(.*)</pre>', dom, re.DOTALL)[1])
    assert "row reward_mean|0.5|0.75" in report and "row reward_mean (logged)|0.5|0.75" in report
    assert "row entropy (logged)|0.625|0.625" in report
    assert "all 4 of 4 samples" in report and "filtered 1 of 4 samples" in report
    kl = 2.718281828 ** -0.5 - 1 + 0.5  # log-prob - reference = 0.5
    assert ('detail token 4: "<", log-prob -0.530 (probability 0.589), reference -1.030, '
            f"KL {kl:.4f}, advantage -1") in report
    assert "</script><script>document.title='owned'</script><img src=x onerror=" in report, "hostile text is text"
    assert "␛[31m␀⟨U+202E⟩" in report and "images 0 scripts 3" in report and "title Rollouts" in report


def test_a_browser_opens_a_thousand_samples(thousand):
    dom = browse(thousand)
    assert 'data-ready="yes"' in dom and "1000 of 1000 samples" in dom


def test_the_page_as_it_is_shows_markup_as_text_wherever_it_stands(tmp_path):
    evil = visible(HOSTILE)
    sample = Sample(evil, evil, 1, 0, 0, 0.5, True, [evil, evil], [False, True], None, None, None,
                    [["", 0.5, {"rewards": {evil: 0.5}, evil: HOSTILE}]])
    file = tmp_path / "page.html"
    file.write_text(page([sample, sample], [{"run": evil, "step": 1, "shown": {evil: 1}, "logged": {}}]))
    dom = browse(file)
    assert 'data-ready="yes"' in dom and "2 of 2 samples" in dom and "<title>Rollouts</title>" in dom
    assert "<img" not in dom and dom.count("<script") == 2 and dom.count("&lt;img src=x") > 5
