"""Paths and small models that the tests share. `../shared` is optional: what needs it skips, visibly, without it."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real rows and the real tiny checkpoint."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here: real rows and the real checkpoint cannot be tested")
    return SHARED


@pytest.fixture()
def toy_model():
    """A fresh copy of the toy base and its tokenizer."""
    from model import load_model
    return load_model(ROOT / "toy" / "base", device="cpu")


@pytest.fixture()
def stories(shared):
    """A fresh copy of stories260K (SentencePiece-style vocabulary, grouped-query attention)."""
    from model import load_model
    return load_model(shared / "models" / "stories260K", device="cpu")
