"""Text retrieval: BM25 over documents.

    score(query, d) = sum over words w of the query of  idf(w) f (k1 + 1) / (f + k1 (1 - b + b len(d) / mean len))
    idf(w)          = ln(1 + (N - n + 0.5) / (n + 0.5))

f: how often w stands in d; n: in how many of the N documents it does. Robertson and Zaragoza, "The Probabilistic
Relevance Framework: BM25 and Beyond" (2009), with the idf of Lucene, which is never negative.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from minirl.config import UserError

WORD = re.compile(r"[\w']+")
MAX_QUERY = 64  # words of a query that are looked at


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class BM25:
    """An index in memory. Documents are numbered from 0; equal scores come in that order."""

    def __init__(self, documents: Sequence[str], k1: float = 1.2, b: float = 0.75):
        self.documents, self.k1, self.b = list(documents), k1, b
        lengths = []
        self.postings: dict[str, dict[int, int]] = {}  # word -> {document: how often it stands there}
        for number, document in enumerate(self.documents):
            counts = Counter(words(document))
            lengths.append(counts.total())
            for word, count in counts.items():
                self.postings.setdefault(word, {})[number] = count
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self.norms = [k1 * (1 - b + b * length / mean) for length in lengths]

    def __deepcopy__(self, memo: dict) -> "BM25":
        return self  # nothing changes an index: the rows of a group share it

    @staticmethod
    def read(folder: str | Path, suffixes: Sequence[str] = (".txt", ".md"), **options) -> "BM25":
        """All text files under a folder, in the order of their paths."""
        files = sorted(file for file in Path(folder).rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise UserError(f"{folder} holds no document: put files ending in {' or '.join(suffixes)} there")
        return BM25([file.read_text(encoding="utf-8", errors="replace") for file in files], **options)

    def search(self, query: str, count: int = 1) -> list[tuple[int, float]]:
        """[(document, score)], at most `count`, the best first; documents that share no word with the query never."""
        scores: dict[int, float] = {}
        for word in words(query)[:MAX_QUERY]:
            found = self.postings.get(word, {})
            idf = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for number, f in found.items():
                scores[number] = scores.get(number, 0.0) + idf * f * (self.k1 + 1) / (f + self.norms[number])
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]


def find(documents: BM25, query: str) -> str:
    """Search the documents; the text of the best one."""
    best = documents.search(query)
    if not best:
        raise ValueError("nothing found")
    return documents.documents[best[0][0]].strip()
