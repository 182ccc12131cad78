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


@pytest.fixture(scope="session")
def sft_run(tmp_path_factory) -> Path:
    """A run of train_sft.py, whose last model adds digits now and then. Nobody writes there."""
    from test_trainers import SFT, train_sft
    folder = tmp_path_factory.mktemp("sft") / "run"
    assert train_sft.main(train_sft.Config(run_dir=str(folder), **SFT)) == folder / "step_60"
    return folder
