"""Fixtures shared by the tests of training."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the workers and the commands they run share the cores

import pytest
import torch

os.environ["WANDB_MODE"] = "off"  # a test that wants W&B asks for it

SHARED = Path(os.environ.get("VITREL_SHARED", Path(__file__).parents[2] / "shared"))


def pytest_collection_modifyitems(items):
    """The long ones first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small models: a second thread costs more than it gives, and one thread repeats to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared():
    """The folder of case files and data beside the repository (or at VITREL_SHARED)."""
    if not SHARED.is_dir():
        pytest.skip(f"no case files at {SHARED}")
    return SHARED


@pytest.fixture
def tiny(tmp_path):
    """Settings of a run of seconds: ``tiny("--data.name", "fake", ...)``."""
    from vitrel.training.config import parse

    def make(*options):
        small = {
            "--runs": str(tmp_path / "runs"),
            "--model.img_size": "8",
            "--model.patch_size": "2",
            "--model.kwargs.depth": "2",
            "--model.kwargs.embed_dim": "16",
            "--model.kwargs.num_heads": "2",
            "--data.batch_size": "32",
            "--data.fake_images": "40",
            "--logger.maps_every": "0",
            "--trainer.accelerator": "cpu",
            "--trainer.max_epochs": "1",
        }
        given = dict(zip(options[::2], options[1::2], strict=True))
        return parse([word for item in {**small, **given}.items() for word in item])

    return make
