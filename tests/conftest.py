from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the tensors of tests are small: a second thread waits longer for the first than it helps


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-model", action="store_true", help="every layout with every model: minutes")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference models and values, made with other libraries, in a folder beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder
