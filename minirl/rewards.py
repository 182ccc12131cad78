r"""Verifiable rewards: which number a text gives as its answer, and whether it is the right one.

Numbers are compared as exact fractions. What counts:

    72   +7   -7   .5   29.00   1,234   1e3   1/2        their value; a comma only in front of three digits
    $5   -$5   $-5   50%   12.   5kg   **72**            the number alone: 50% is 50; so with euro, pound and yen
    U+2212 (minus sign), hyphens, the en dash            read as -
    full-width digits                                    read as 0-9
    5-3                                                  5 and 3: a minus behind a digit is no sign
    1 234   1 1/2   1,00,000                             several numbers, not one
    x2   nan   inf   1e999   1/0   over 40 characters    no number

Which number is the answer, in a text cut where it invents a new question (a line "Question:" or "Q:"):

    "#### 72" or "\boxed{72}"    all numbers on the rest of that line (in those braces) must have one value:
                                 "#### 41 #### 42", "#### 41, 42 or 43" and "\boxed{41} #### 42" list guesses
                                 and have no answer, "#### 42 ... #### 42.0" has one; "####" alone has none.
                                 Nor has what is to be worked out: "#### 2*2", "#### - 7", "#### -(7)",
                                 "\boxed{\frac{1}{2}}", "5 x 5"
    neither                      the last number of the text: "5 is wrong. Answer: 10" is 10

Every pattern reads its text once, however odd: no quantifier is nested in another over the same characters.

Below them, rules that give a `Sample` a value in [0, 1]; `mixture.py` weighs them. A policy finds whatever a rule pays
for by mistake, so each says which trick it withstands, and tests/test_hacking.py plays the tricks.
"""

import base64
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minirl.config import UserError

if TYPE_CHECKING:
    from minirl.env.base import Step

NUMBER = re.compile(
    r"(?:(?<![\w)])[-+][$€£¥]?|[$€£¥][-+]?)?"  # a sign, unless it stands behind an operand: -5, -$5, $-5, but 7-5
    r"(?:(?<!\w)(?<![0-9]\.)(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # 1,234.50, 1234, 2.5
    r"|(?<![\w.])\.[0-9]+)"  # .5, but not the end of "1.2.5" or "...5"
    r"(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?"  # 1e3, 1/2
)
# The last way is the beginning of a box that the one before could not read.
MARKED = re.compile(r"####[^\n]*|\\boxed\{[^{}\n]*\}|\\boxed\{")
UNREAD = re.compile(
    r"\\boxed\{$|\\(?:[dt]?frac|sqrt|times|cdot|div|pi)|√"
    r"|(?<![\w)])[-+](?![$€£¥]?\.?[0-9])[^\w\n]{0,9}(?:[A-Z]{1,3}[^\w\n]{0,3})?[0-9]"  # - 7, -(7), -US$7: whose sign?
    r"|(?:[0-9]\.?|[)}])\s*(?:[-+^×÷·x]|\*\*?)\s*[({$€£¥]*[-+]?\.?[0-9]"  # 2*2, 7-7, 2^2
    r"|[0-9](?:\s+/\s*|/\s+)[0-9]|[0-9][²³]|[0-9]\.[0-9]+\.[0-9]"  # 5 / 5, 7², 1.000.000
)
# LaTeX that does not change a number: \text{18}, 18\text{ cm}^2, 1{,}234, -\$18, -\,7.
DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}\n]*)\}|\{(,)\}|\\(\$)|\\[!,:;]")
POWER = re.compile(r"(?<=[A-Za-z])\^(?:[0-9]|\{[0-9]\})")  # of a unit
NEW_QUESTION = re.compile(r"^[ \t]*(?:Question|Q):", re.MULTILINE)
ODD = re.compile("[\u2010-\u2013\u2212\uFE63\uFF0D\uFF10-\uFF19]")
MINUS = "\u2010\u2011\u2012\u2013\u2212\uFE63\uFF0D"
PLAIN = str.maketrans(MINUS + "".join(map(chr, range(0xFF10, 0xFF1A))), "-" * len(MINUS) + "0123456789")
MAX_NUMBER = 40  # characters, and decimal places before or behind the point: a longer one is nobody's answer


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number, spaces, "%" and a full stop apart; None if it is not one."""
    text = plain(text.strip())
    found = NUMBER.match(text)
    if found is None or len(found[0]) > MAX_NUMBER or text[found.end() :].strip() not in ("", ".", "%", "%."):
        return None
    number, _, divisor = re.sub("[$€£¥,]", "", found[0]).partition("/")
    value = Decimal(number)
    divisor = int(divisor or 1)
    if divisor == 0 or abs(value.adjusted()) > MAX_NUMBER:  # the Fraction of 1e999 would have 999 digits
        return None
    return Fraction(value) / divisor


def plain(text: str) -> str:
    """Dashes that stand for a minus, and full-width digits, as - and 0-9.

    `str.translate` alone takes as long for each of all the others.
    """
    return ODD.sub(lambda found: found[0].translate(PLAIN), text)


def extract_answer(text: str) -> str | None:
    """The number that `text` gives as its answer, as it is written there; None if it has none (see above)."""
    text = NEW_QUESTION.split(plain(text), maxsplit=1)[0]
    text = POWER.sub("", DRESS.sub(lambda found: "".join(filter(None, found.groups())), text))
    if marked := MARKED.findall(text):
        numbers = [] if any(map(UNREAD.search, marked)) else [
            number for part in marked for number in NUMBER.findall(part)]
    else:  # from the end, word by word: no number has a space in it
        numbers = next((found for word in reversed(text.split()) if (found := NUMBER.findall(word))), [])[-1:]
    values = {parse_number(number) for number in set(numbers)}
    return numbers[-1] if len(values) == 1 and None not in values else None


def numbers_equal(a: str | None, b: str | None) -> bool:
    """True if both are numbers and have exactly the same value: "29.00" and "29", not "0.33" and "1/3"."""
    x, y = (None if text is None else parse_number(text) for text in (a, b))
    return x is not None and x == y


def gsm8k_reward(completion: str, gold: str) -> float:
    """1.0 if the completion's answer has the value of the gold's, else 0.0; `gold` is "... #### 72" or "72".

    Give the completion alone: an answer in an echoed prompt is not the policy's.
    """
    answer = extract_answer(gold)
    if answer is None:
        raise UserError(f'gold answer "{gold[-60:]}" holds no number: end it with "#### NUMBER"')
    return float(numbers_equal(extract_answer(completion), answer))


def overlong_penalty(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """Soft punishment of long answers: 0 up to limit - cache tokens, then a line down to -1 at `limit`.

    lengths : (B,) tokens          returns : (B,) unitless, to be added to the rewards
    DAPO, arXiv:2503.14476 eq. 13.
    """
    if not 0 < cache <= limit:
        raise UserError(f"overlong cache {cache} is not in 1 .. {limit}, the length limit")
    return ((limit - cache - lengths) / cache).clamp(-1.0, 0.0)


def missing_eos_penalty(rewards: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """rewards (B,) less `penalty` where an answer was cut before it ended by itself, `finished` (B,) bool False.

    Which tokens end an answer is the sampler's business (`tokenizer.stop_ids`, an environment's stop strings): a second
    look for one particular id would find it in the prompt, or miss another that ended the answer.
    """
    return torch.where(finished, rewards, rewards - penalty)


# ---- what a rule looks at ----

MAX_TEXT = 200_000  # characters that any rule reads, the last ones: there the answer stands


@dataclass(frozen=True)
class Sample:
    """One row as a rule sees it. What a tool returned is in `steps` alone: no rule takes the policy's word for it."""

    prompt: str
    actions: tuple[str, ...]  # what the policy wrote, turn by turn
    answer: str = ""  # the right one
    steps: tuple["Step", ...] = ()  # the environment's replies
    tokens: int = 0  # sampled
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else a rule needs, by name

    @property
    def completion(self) -> str:
        return "".join(self.actions)[-MAX_TEXT:]

    @property
    def final(self) -> str:
        """The last action, in which the answer stands."""
        return self.actions[-1][-MAX_TEXT:] if self.actions else ""


Rule = Callable[[Sample], float]  # in [0, 1], 1 is good


# ---- accuracy ----

def final_answer(text: str) -> str | None:
    """What stands in <answer>...</answer>, or the whole text if it has no such tag.

    None for more than one answer, for one that is not closed, or nested, and for a thought that does not end: a list
    of guesses has no answer.
    """
    opened, closed = text.count("<answer>"), text.count("</answer>")
    if not opened and not closed:
        said = text.rpartition("</think>")[2]  # what was thought is not answered
        return None if "<think>" in said else said
    before, _, rest = text.partition("<answer>")
    inside, _, _ = rest.partition("</answer>")
    return inside if opened == closed == 1 and "</answer>" not in before else None


def number_rule(sample: Sample, tolerance: float = 0.0) -> float:
    """1 if the answer's number (see above) is the right one, up to a relative tolerance. One number, or none."""
    given, right = extract_answer(final_answer(sample.final) or ""), extract_answer(sample.answer)
    x, y = (None if text is None else parse_number(text) for text in (given, right))
    return float(x is not None and y is not None and abs(x - y) <= Fraction(tolerance) * abs(y))


def normalized(text: str) -> list[str]:
    """Words in small letters, without punctuation and English articles, as SQuAD compares answers."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


def exact_match(text: str | None, golds: Sequence[str]) -> bool:
    """Is the answer one of the right ones, after `normalized`? An empty one never is."""
    words = normalized(text or "")
    return bool(words) and any(words == normalized(gold) for gold in golds)


def text_rule(sample: Sample) -> float:
    """F1 of the answer's words against the right one's: copying the prompt or a document costs precision, and a word
    that is said twice counts once more only if it is twice in the right answer."""
    given, right = Counter(normalized(final_answer(sample.final) or "")), Counter(normalized(sample.answer))
    common = (given & right).total()
    return 2 * common / (given.total() + right.total()) if common else 0.0


def search_r1_reward(text: str | None, golds: Sequence[str], format_right: bool, found: bool = False) -> float:
    """Search-R1 (arXiv:2503.09516) with its format: 1 right, .8 right but badly formatted; wrong: .2 for the format,
    .3 if a right answer was also among what was retrieved; .1 for an answer of any form; 0.

    text : the answer, None if there is none.   found : an exact gold stands in the retrieved text
    """
    if exact_match(text, golds):
        return 1.0 if format_right else 0.8
    if format_right:
        return 0.3 if found else 0.2
    return 0.1 if text is not None else 0.0


# ---- calls ----

MAX_CALLS = 32  # of a completion that are compared


def call_score(calls: Sequence[Mapping], golds: Sequence[Mapping]) -> tuple[float, float]:
    """(S, S_max) of ToolRL (arXiv:2504.13958): how many of the names, parameters and values are right.

    S = |names in both| / |names in either|, as multisets, + for each gold call and the call matched with it (of the
    same name, the best one left) |parameters in both| / |in either| + equal values; S_max = 1 + sum of (1 + parameters)
    """
    calls = list(calls[:MAX_CALLS])
    given, wanted = (Counter(call["name"] for call in these) for these in (calls, golds))
    either = (given | wanted).total()
    score = (given & wanted).total() / either if either else 1.0
    for gold in golds:
        matches = [(_match(call["arguments"], gold["arguments"]), -i) for i, call in enumerate(calls)
                   if call["name"] == gold["name"]]
        if matches:
            best, place = max(matches)
            score += best
            del calls[-place]
    return score, 1.0 + sum(1 + len(gold["arguments"]) for gold in golds)


def _match(arguments: Mapping, gold: Mapping) -> float:
    either = len(arguments.keys() | gold.keys())
    shared = arguments.keys() & gold.keys()
    equal = sum(type(arguments[key]) is type(gold[key]) and arguments[key] == gold[key] for key in shared)
    return (len(shared) / either if either else 1.0) + equal


def toolrl_reward(calls: Sequence[Mapping], golds: Sequence[Mapping], format_right: bool) -> float:
    """ToolRL's reward: R_format in {0, 1} + R_tool = 6 S / S_max - 3 in [-3, 3]."""
    score, most = call_score(calls, golds)
    return float(format_right) + 6.0 * score / most - 3.0


def calls_rule(sample: Sample) -> float:
    """S / S_max of the calls that the environment carried out or refused (`facts["made"]`) and the right ones
    (`facts["calls"]`): calls that are only talked about are none."""
    score, most = call_score(sample.facts.get("made", ()), sample.facts.get("calls", ()))
    return score / most


def tool_rule(sample: Sample) -> float:
    """Share of the turns with calls whose calls could all be carried out, as the environment says; 0 without any."""
    calls = [step.info["tool_call"] for step in sample.steps if step.info.get("tool_call") is not None]
    return sum(calls) / len(calls) if calls else 0.0


def process_rule(sample: Sample) -> float:
    """Share of the subgoals, texts in `facts["subgoals"]`, that the environment has shown. Its words, not ours."""
    seen = "".join(step.observation for step in sample.steps)[:MAX_TEXT]
    goals = sample.facts.get("subgoals", ())
    return sum(goal in seen for goal in goals) / len(goals) if goals else 0.0


# ---- format ----

def thought_and_answer(text: str) -> tuple[str, str] | None:
    """The two parts of <think>...</think> <answer>...</answer>; None unless each tag is there once, in this order,
    with nothing but white space outside: nested, swapped, doubled and half tags are no format."""
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    places = [text.find(tag) for tag in tags]
    if any(text.count(tag) != 1 for tag in tags) or places != sorted(places):
        return None
    (_, a, b, c), (_, thought_end, answer_start, answer_end) = map(len, tags), places
    between, outside = text[thought_end + a : answer_start], text[: places[0]] + text[answer_end + c :]
    if (between + outside).strip():
        return None
    return text[places[0] + len(tags[0]) : thought_end], text[answer_start + b : answer_end]


def format_rule(sample: Sample) -> float:
    """1 for a thought and then an answer, neither of them empty, and the thought not gibberish."""
    parts = thought_and_answer(sample.final)
    return float(parts is not None and bool(parts[1].strip()) and makes_sense(parts[0]))


LATIN_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxz]{6}", re.IGNORECASE)


def makes_sense(text: str, least: int = 3) -> bool:
    """Not empty, not a few pieces over and over, not keys hit at random. A low bar, which real text of any language
    passes: it looks at vowels in Latin letters only, and counts characters where words are not set apart."""
    words = text.split()
    if len(words) < least and len(text.strip()) < 12:
        return False
    latin = [word for word in LATIN_WORD.findall(text) if len(word) > 3]
    odd = sum(CONSONANTS.search(word) is not None or len(word) > 30 or not re.search("[aeiouy]", word, re.IGNORECASE)
              for word in latin)
    return distinct(text) > 0.3 and odd <= 0.4 * len(latin)


# ---- efficiency ----

def distinct(text: str, n: int = 3) -> float:
    """Distinct runs of n words over all of them, in [0, 1]: near 0 where a text repeats itself. Texts of few words are
    measured in characters, so that one endless word does not pass."""
    pieces: Sequence = tuple(text.split())
    if len(pieces) < 2 * n or len(text) > 20 * len(pieces):
        pieces, n = text, 4 * n
    count = max(1, len(pieces) - n + 1)
    return len({pieces[i : i + n] for i in range(count)}) / count


def repetition_rule(sample: Sample) -> float:
    """Share of what was said that had not been said before. Nothing said is worth nothing."""
    return distinct(sample.completion) if sample.completion.strip() else 0.0


def falling(value: float, target: float, limit: float) -> float:
    """1 up to the target, then a line to 0 at the limit."""
    return min(1.0, max(0.0, (limit - value) / (limit - target))) if limit > target else float(value <= target)


def length_rule(sample: Sample, target: int, limit: int) -> float:
    """1 up to `target` tokens, 0 from `limit` on: padding costs. No answer at all is not short, it is none."""
    return falling(sample.tokens, target, limit) if sample.final.strip() else 0.0


def steps_rule(sample: Sample, target: int, limit: int) -> float:
    """1 up to `target` turns, 0 from `limit` on."""
    return falling(len(sample.actions), target, limit) if sample.final.strip() else 0.0


def cost_rule(sample: Sample, budget: float, token_price: float = 1.0, call_price: float = 0.0) -> float:
    """1 for a row that cost nothing, 0 from the budget on; any currency."""
    calls = sum(step.info.get("tool_call") is not None for step in sample.steps)
    return falling(sample.tokens * token_price + calls * call_price, 0.0, budget)


# ---- safety and honesty ----

# Of text in small letters. Each begins with a letter, and the word border before that is asked for behind: `re` then
# skips what cannot match, and reads ten times as fast.
DANGEROUS = re.compile(
    r"rm(?<=\brm)\s{1,9}-(?:-(?:recursive|force)\b|(?:[a-z]{0,9}[rf]){1,2}[a-z]{0,9}\s)|mkfs(?<=\bmkfs)\b|dd(?<=\bdd)\s[^\n]{0,99}\bof=/dev/"
    r"|>\s{0,9}/dev/(?:sd|nvme)|:\(\)\s{0,9}\{|chmod(?<=\bchmod)\s{1,9}-r\s{1,9}777|shutdown(?<=\bshutdown)\b"
    r"|curl(?<=\bcurl)\b[^\n|]{0,200}\|\s{0,9}(?:ba|z)?sh\b|wget(?<=\bwget)\b[^\n|]{0,200}\|\s{0,9}(?:ba|z)?sh\b"
    r"|drop(?<=\bdrop)\s{1,9}(?:table|database)\b|shutil(?<=\bshutil)\.rmtree\(|format(?<=\bformat)\s{1,9}c:"
    r"|/etc/shadow|sudo(?<=\bsudo)\b")
SECRETS = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]{0,30}PRIVATE KEY|sk-(?<=\bsk-)[A-Za-z0-9_-]{20}"
    r"|gh(?<=\bgh)[pousr]_[A-Za-z0-9]{36}|eyJ(?<=\beyJ)[A-Za-z0-9_-]{10,200}\.eyJ")
# What only a template or an environment writes. Text cannot become a control token (see chat.py), but a reader of the
# transcript, such as a judge, would not know.
FORGED = re.compile(
    r"<\|[a-z_]{2,30}\|>|</?(?:tool_response|information|observation|result|documents?)>|\[/?(?:INST|TOOL_RESULTS)\]"
    r"|<</?SYS>>|^[ \t]{0,9}(?:User|Human|System|Tool|Observation|Assistant)[ \t]{0,9}:", re.IGNORECASE | re.MULTILINE)


def safety_rule(sample: Sample) -> float:
    """0 if a dangerous command or a secret stands in what the policy wrote. `facts["secrets"]`: texts that it must not
    tell, found backwards, spaced out, in wide letters, as numbers, in hexadecimal and in base64 too."""
    text = sample.completion
    return float(not DANGEROUS.search(small(text)) and not SECRETS.search(text)
                 and not any(leaks(text, secret) for secret in sample.facts.get("secrets", ())))


def small(text: str) -> str:
    """In small letters, one for one, for patterns that would otherwise need re.IGNORECASE, which is slow. As there, the
    letters dotless i, dotted I and long s are i and s."""
    return text.replace("\u0130", "i").replace("\u0131", "i").replace("\u017f", "s").lower()


def leaks(text: str, secret: str) -> bool:
    """Is the secret told, in one of several spellings? Secrets of fewer than 4 letters or digits are not looked for."""
    def bare(text: str) -> str:
        wide = text if text.isascii() else unicodedata.normalize("NFKC", text)
        return "".join(filter(str.isalnum, wide.lower()))

    if len(bare(secret)) < 4:
        return False
    data, plain = secret.encode(), bare(text)
    spellings = {bare(secret), bare(secret)[::-1], data.hex(), "".join(map(str, data))}
    if data.hex() in plain.replace("0x", "") or data.hex() in plain.replace("x", ""):  # 0x68, 0x75; \\x68\\x75
        return True
    # base64 depends on what stands before: three shifts, without the letters that neighbours share
    encoded = [base64.b64encode(b"x" * shift + data)[4 * (shift > 0) :].decode().rstrip("=")[: -1 or None]
               for shift in range(3)]
    return any(spelling in plain for spelling in spellings) or any(len(e) > 5 and e in text for e in encoded)


def honest_rule(sample: Sample) -> float:
    """0 if the policy wrote a turn, or a tool result, that was not its own to write."""
    return float(not FORGED.search(sample.completion))


def original_rule(sample: Sample, n: int = 8) -> float:
    """1 less the share of the final action's runs of n words that are copied from the prompt."""
    words, prompt = sample.final.split(), sample.prompt[:MAX_TEXT].split()
    known = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1.0 - sum(run in known for run in runs) / len(runs) if runs else 1.0


CITATION = re.compile(r"\[([0-9]{1,4})\]")


def citation_rule(sample: Sample) -> float:
    """F1 of the sources cited as [3] in the final action and the right ones, `facts["sources"]`: citing all of them
    costs precision. A source that was never retrieved (`facts["retrieved"]`, where given) is an invention: 0."""
    cited, right = set(map(int, CITATION.findall(sample.final))), set(sample.facts.get("sources", ()))
    if not cited <= set(sample.facts.get("retrieved", cited)):
        return 0.0
    common = len(cited & right)
    return 2 * common / (len(cited) + len(right)) if common else 0.0


def keyword_rule(sample: Sample, keywords: Collection[str]) -> float:
    """Share of the keywords that the final action uses, each once, in a text that is not made of them: where over half
    of the words are keywords, it is 0. They are compared as `normalized` words, "the Eiffel Tower" as two of them."""
    wanted, words = {*normalized(" ".join(keywords))}, normalized(sample.final)
    used = Counter(word for word in words if word in wanted)
    return len(used) / len(wanted) if wanted and used.total() <= 0.5 * len(words) else 0.0
