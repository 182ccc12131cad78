"""What experiments share that consist of whole runs of the trainers: one of them, and a table's way into the docs.

A run stays in its folder: the same command goes on where it was stopped.
"""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # the trainers are scripts, not installed

from minirl.config import write_text  # noqa: E402


def train(trainer: ModuleType, folder: Path, **options) -> Path:
    """A run of a trainer, with what it prints in a file; its last checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log, redirect_stdout(log):
        last = trainer.main(trainer.Config(run_dir=str(folder), resume=True, **options))
    if last is None:  # Ctrl-C ends a trainer in good order
        raise SystemExit(f"stopped in {folder}")
    return last


def into_docs(page: str, mark: str, text: str) -> None:
    """Put text between <!-- mark --> and the next <!-- end --> of a page in docs/."""
    begin, end, file = f"<!-- {mark} -->\n", "<!-- end -->\n", REPO / "docs" / page
    before, rest = file.read_text(encoding="utf-8").split(begin)
    write_text(file, before + begin + text + end + rest.split(end, 1)[1])
