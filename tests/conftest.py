"""Fixtures that several test files use.

`../shared` is optional: tests that need it are skipped, with a reason, if it is absent.
"""

import os
import pkgutil
import shutil
import sys
import tempfile
from pathlib import Path

# Each pytest worker has one core, so each process uses one thread. The variable must be set
# before torch is imported. torch.set_num_threads would change the last bits of results.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"            # a missing model is an error without retries
os.environ.setdefault("HOME", tempfile.gettempdir())     # Jupyter and nltk need one
shutil.copystat = shutil.copymode = lambda *_, **__: None        # of a read-only checkout
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402
from helpers import (PHASE_3, ROOT, SMALL, random_rollouts, randomise, run_main,  # noqa: E402
                     save_tiny)

import toy  # noqa: E402
from data import write_rows  # noqa: E402
from model import ValueHead, add_lora, load_model  # noqa: E402

SHARED = ROOT.parent / "shared"
SPACE_MB = 1500                     # a run writes 0.5 GB, and pytest keeps three
INNER = "inner and not slow"


def pytest_configure(config):
    """Refuse a full disk. `-m inner` leaves out the slow functions of its files."""
    if config.option.markexpr == "inner":
        config.option.markexpr = INNER
    folder = tempfile.gettempdir()
    free_mb = shutil.disk_usage(folder).free >> 20
    if free_mb < SPACE_MB:
        raise pytest.UsageError(f"{folder} has {free_mb} MB free, and the tests ask for "
                                f"{SPACE_MB} MB: set TMPDIR to another folder")


def pytest_ignore_collect(collection_path, config):
    """`-m inner` does not import files without the mark, because that takes seconds."""
    if config.option.markexpr == INNER and collection_path.suffix == ".py":
        return "pytest.mark.inner" not in collection_path.read_text("utf-8") or None
    return None


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    """Seed torch before each test, and hide the user's API key and proxy from it. `loopback`
    sets a key, so that each other test shows that what it calls needs none."""
    torch.manual_seed(0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture()
def spy(monkeypatch):
    """A function (name, take=None) that wraps "module.name" and returns a list.

    Each later call appends take(*arguments) before it runs, or without `take` its result.
    """
    def watch(name, take=None):
        original, seen = pkgutil.resolve_name(name), []

        def wrapper(*arguments, **options):
            if take:
                seen.append(take(*arguments, **options))
            result = original(*arguments, **options)
            if not take:
                seen.append(result)
            return result

        monkeypatch.setattr(name, wrapper)
        return seen
    return watch


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real rows and the real tiny checkpoint."""
    if not SHARED.is_dir():
        pytest.skip("../shared is absent: it holds the real rows and the real checkpoint")
    return SHARED


@pytest.fixture()
def toy_model():
    """A fresh copy of the toy base and its tokenizer."""
    return load_model(ROOT / "toy" / "base", device="cpu")


@pytest.fixture()
def stories(shared):
    """A fresh copy of stories260K (SentencePiece-style vocabulary, grouped-query attention)."""
    return load_model(shared / "models" / "stories260K", device="cpu")


@pytest.fixture(params=["toy_model", "stories", "windows"])
def base(request, tmp_path):
    """A real checkpoint, or a tiny Qwen of which one layer has a sliding window."""
    if request.param != "windows":
        return request.getfixturevalue(request.param)
    folder = save_tiny(tmp_path / "base", "Qwen2", vocab_size=961, use_sliding_window=True,
                       sliding_window=5, max_window_layers=1)
    return load_model(folder, device="cpu")


@pytest.fixture()
def policy(toy_model):
    """(toy model with a random adapter "policy", a random value head, six random rollouts)."""
    model, _ = toy_model
    randomise(add_lora(model, "policy", 4, 8))
    head = ValueHead(model.config.hidden_size)
    randomise(head.parameters())
    return model, head, random_rollouts()


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """A function (name, make) → path; only the first pytest worker calls make(path)."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name, make) -> Path:
        with FileLock(base / f"{name}.lock"):
            if not (base / name).exists():
                make(base / name)
        return base / name
    return folder


@pytest.fixture(scope="session")
def finished_run(make_once):
    """Output directory of a small toy run of all three phases; tests must not write to it."""
    return make_once("finished", lambda out: run_main(*SMALL, "--output_dir", out))


@pytest.fixture(scope="session")
def reward(finished_run):
    """R_φ of `finished_run`: an adapter that writes parseable critiques of toy summaries."""
    return finished_run / "reward" / "adapter"


@pytest.fixture(scope="session")
def phase_3(make_once, reward):
    """The flags of the run `unbroken` without --output_dir. Posts have 25 to 100 tokens."""
    def write(path):
        write_rows(path, [*toy.rows("train", 20), *toy.rows("train", 20, length=4)])

    return [*PHASE_3, "--data", make_once("posts", write), "--reward_model", reward]


@pytest.fixture(scope="session")
def unbroken(make_once, phase_3):
    """Output directory of an uninterrupted run of phase 3; tests must not write to it."""
    return make_once("unbroken", lambda out: run_main(*phase_3, "--output_dir", out))
