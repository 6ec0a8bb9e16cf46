"""Paths and small models that the tests share. `../shared` is optional: what needs it skips, visibly, without it."""

import importlib
import os
import sys
from pathlib import Path

# The models here are small: threads wait for each other longer than they work. And set before
# torch is imported, for the children too: torch.set_num_threads alone changes the last bits.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


def fails(script: str, *flags) -> str:
    """The one line with which a script's main refuses its flags, run in this process."""
    from data import InputError
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        with pytest.raises((InputError, SystemExit)) as caught:
            main()
    said = str(caught.value)
    assert len(said) > 3 and "\n" not in said          # an exit status is no message
    return said


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
