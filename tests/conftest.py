"""What the tests share: paths, small models, one run. `../shared` is optional: what needs it
skips, visibly, without it."""

import fcntl
import importlib
import os
import sys
import traceback
from pathlib import Path

# Three workers share two cores, and the models are small. Set before torch is imported, and for
# the children too: torch.set_num_threads alone changes the last bits.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

# SLOW=1 python -m pytest -q tests: the rare, too, by kills in the dozen and 100,000 replies.
SLOW = bool(os.environ.get("SLOW"))
ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


# Who begins: the longest, or one worker would end minutes after the others; beside them those
# that mostly wait, for a server or a sandbox.
FIRST = ("stored[5_", "test_asking", "test_attacks", "stored[4_", "test_sandbox", "test_ranks",
         "test_restart", "test_pipeline")


class Units(LoadScopeScheduling):
    """What one worker does in one go: a file, whose fixtures are made once; a notebook."""

    def _split_scope(self, nodeid):
        return nodeid if "clean_kernel" in nodeid else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log):
    return Units(config, log)


def pytest_collection_modifyitems(items):
    def turn(item):
        places = [at for at, name in enumerate(FIRST) if name in item.nodeid]
        return places[0] if places else len(FIRST)

    items.sort(key=turn)


def fails(script: str, *flags) -> str:
    """The one line with which a script's main refuses its flags, run in this process."""
    from data import InputError
    from runs import run_main
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with pytest.raises((InputError, SystemExit)) as caught:
        run_main(*flags, module=module)
    traceback.clear_frames(caught.tb)                 # and with them the lock of a directory
    said = str(caught.value)
    assert len(said) > 3 and "\n" not in said          # an exit status is no message
    return said


@pytest.fixture(autouse=True)
def _as_alone(monkeypatch):
    """The same numbers in any order of the tests; and no key or proxy of the user's."""
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
    from model import load_model
    return load_model(ROOT / "toy" / "base", device="cpu")


@pytest.fixture()
def stories(shared):
    """A fresh copy of stories260K (SentencePiece-style vocabulary, grouped-query attention)."""
    from model import load_model
    return load_model(shared / "models" / "stories260K", device="cpu")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A function that makes a folder for all workers: the first one makes it, others wait."""
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
def finished_run(once):
    """A small toy run, all three phases; nobody may write into it."""
    from runs import SMALL, run_main
    return once("finished", lambda out: run_main(*SMALL, "--output_dir", out))


@pytest.fixture(scope="session")
def reward(finished_run):
    """Its adapter "reward", which writes readable critiques of toy summaries."""
    return finished_run / "reward" / "adapter"


@pytest.fixture(scope="session")
def unbroken(once, reward):
    """A run of phase 3 alone that nothing stopped; nobody may write into it."""
    from runs import PHASE_3, run_main
    return once("unbroken", lambda out: run_main(*PHASE_3, "--reward_model", reward,
                                                "--output_dir", out))
