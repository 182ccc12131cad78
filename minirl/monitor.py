"""Watching for a reward that is being gamed: it rises while held-out accuracy does not.

No rule sees every trick, a person does: the monitor keeps the 20 highest- and the 20 lowest-rewarded samples of every
100 steps in run_dir/samples, one JSON object a line, to be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from minirl.config import write_text
from minirl.parallel.collectives import gather_objects

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh
    from minirl.rollout import Rollout

KEPT, BLOCK = 20, 100  # samples at either end, of so many steps
EVALUATIONS = 3  # that are compared
RISE = 0.1  # of the reward, from which on accuracy should have risen too


def gamed(history: Sequence[Mapping[str, float]]) -> bool:
    """Has the mean reward risen by RISE since the evaluation before the last but one, and accuracy by less than a fifth
    of that? `history`: metrics of the steps so far; the last one must have an evaluation. A solved task is not gamed.
    """
    ends = [i for i, step in enumerate(history) if "eval/accuracy" in step]
    if len(ends) < EVALUATIONS + 1 or ends[-1] != len(history) - 1:
        return False
    spans = list(zip(ends[-EVALUATIONS - 1 :], ends[-EVALUATIONS:], strict=False))
    rewards = [[step["reward_mean"] for step in history[a + 1 : b + 1] if "reward_mean" in step] for a, b in spans]
    if not all(rewards):  # SFT pays none
        return False
    means = [fmean(values) for values in rewards]
    first, last = history[ends[-EVALUATIONS]]["eval/accuracy"], history[ends[-1]]["eval/accuracy"]
    rise = means[-1] - means[0]
    return rise > RISE and last - first < rise / 5 and last < 0.95


class Monitor:
    """The samples at both ends of the rewards, written after every step, so that a stopped run has them too."""

    def __init__(self, run_dir: str | Path, kept: int = KEPT, block: int = BLOCK):
        self.folder, self.kept, self.block = Path(run_dir) / "samples", kept, block

    def add(self, step: int, rollout: Rollout, mesh: Mesh | None = None) -> None:
        """Take in the rows of a step (counted from 1), of all replicas; needs texts and rewards. All ranks call it."""
        rows = []
        for i, text in enumerate(rollout.texts):
            turns = rollout.turns[i] if rollout.turns else []
            parts = turns[-1].info.get("rewards", {}) if turns else {}
            rows.append({"step": step, "sample": int(rollout.sample_ids[i]), "reward": float(rollout.rewards[i]),
                         "rewards": parts, "text": text})
        if mesh is not None:
            rows = [row for replica in gather_objects(self.ends(rows), mesh.dp_group) for row in replica]
        if mesh is None or mesh.is_main:
            first = (step - 1) // self.block * self.block + 1
            file = self.folder / f"steps_{first}-{first + self.block - 1}.jsonl"
            rows += [row for row in read(file) if row["step"] < step]  # a resumed run takes some steps twice
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(file, "".join(json.dumps(row) + "\n" for row in self.ends(rows)))

    def ends(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The best and the worst, in this order; all where they are few."""
        rows = sorted(rows, key=lambda row: (-row["reward"], row["step"], row["sample"]))
        return rows if len(rows) <= 2 * self.kept else rows[: self.kept] + rows[-self.kept :]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
