"""Fixtures that several test files use.

`../shared` is optional: tests that need it skip, with the reason, where it is absent.
"""

import fcntl
import os
import sys
from pathlib import Path

# Three workers share two cores, and the models are small. OMP_NUM_THREADS is set before torch
# is imported, and child processes inherit it; torch.set_num_threads changes the last bits.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import PHASE_3, ROOT, SMALL, random_rollouts, randomise, run_main  # noqa: E402

from model import ValueHead, add_lora, load_model  # noqa: E402

SHARED = ROOT.parent / "shared"
# The files that take longest start first, so that no worker ends minutes after the others.
LONGEST = ("test_notebooks", "test_asking", "test_attacks", "test_sandbox", "test_ranks",
           "test_restart", "test_pipeline")


def pytest_collection_modifyitems(items):
    def place(item):
        name = Path(item.fspath).stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    """The same random numbers in any order of the tests, and no key or proxy of the user."""
    torch.manual_seed(0)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-loopback")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real rows and the real tiny checkpoint."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here: real rows and the real checkpoint cannot be tested")
    return SHARED


@pytest.fixture()
def toy_model():
    """A fresh copy of the toy base and its tokenizer."""
    return load_model(ROOT / "toy" / "base", device="cpu")


@pytest.fixture()
def stories(shared):
    """A fresh copy of stories260K (SentencePiece-style vocabulary, grouped-query attention)."""
    return load_model(shared / "models" / "stories260K", device="cpu")


@pytest.fixture()
def policy(toy_model):
    """(toy model with a random adapter "policy", a random value head, six random rollouts)"""
    model, _ = toy_model
    randomise(add_lora(model, "policy", 4, 8))
    head = ValueHead(model.config.hidden_size)
    randomise(head.parameters())
    return model, head, random_rollouts()


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """A function that makes a folder once for all workers: the first makes it, others wait."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name, make) -> Path:
        with open(base / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not (base / name).exists():
                make(base / name)
        return base / name
    return folder


@pytest.fixture(scope="session")
def finished_run(make_once):
    """A small toy run of all three phases. Tests must not write into it."""
    return make_once("finished", lambda out: run_main(*SMALL, "--output_dir", out))


@pytest.fixture(scope="session")
def reward(finished_run):
    """R_φ of that run, an adapter that writes readable critiques of toy summaries."""
    return finished_run / "reward" / "adapter"


@pytest.fixture(scope="session")
def unbroken(make_once, reward):
    """A run of phase 3 alone that was never interrupted. Tests must not write into it."""
    return make_once("unbroken", lambda out: run_main(*PHASE_3, "--reward_model", reward,
                                                     "--output_dir", out))
