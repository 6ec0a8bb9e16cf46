"""The scripts and tests in other places: Windows' rules, and the checkout of another user."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import toy
from helpers import ROOT, read_jsonl

from data import git, write_rows
from experiments import studies

# What this program runs sees modules and files as on Windows, with its old locale.
WINDOWS = r'''
import builtins, fcntl, io, json, os, re, struct, sys
from pathlib import Path
from types import SimpleNamespace

ROOT, KILLED_AFTER, COMMANDS = sys.argv[1:]
sys.path.insert(0, ROOT)
_open = io.open

def lock_byte(file, mode, count):
    """The lock begins at the position in the file, as on Windows."""
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_CUR, 0, count, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error

def import_module(name, names=None, *more, original=builtins.__import__, **options):
    file = str((names or {}).get("__file__"))
    if file.startswith(ROOT) and "site-packages" not in file:
        if name in ("fcntl", "resource", "pwd", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        if name == "msvcrt":
            return SimpleNamespace(LK_NBLCK=2, locking=lock_byte)
    return original(name, names, *more, **options)

def check_name(path):
    if re.search('[<>:"|?*]', os.path.basename(str(path))):
        raise OSError(22, "Invalid argument", str(path))

def open_file(file, mode="r", buffering=-1, encoding=None, *more, **options):
    if encoding in (None, "locale") and "b" not in mode:
        encoding = "cp1252"
    if "r" not in mode:
        check_name(file)
    return _open(file, mode, buffering, encoding, *more, **options)

def make_directory(path, *more, original=os.mkdir, **options):
    check_name(path)
    original(path, *more, **options)

def fsync(file, original=os.fsync):
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    original(file)

def unless_used(original):
    def change(*paths, **options):
        used = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        used += [line.split(maxsplit=5)[-1].strip() for line in _open("/proc/self/maps")]
        for path in paths:
            check_name(path)
            if os.path.realpath(path) in used:
                raise PermissionError(13, "another process uses the file", str(path))
        original(*paths, **options)
        if str(paths[-1]).endswith(KILLED_AFTER):
            os.kill(os.getpid(), 9)
    return change

builtins.__import__ = import_module
builtins.open = io.open = open_file
os.fsync = fsync
os.mkdir = make_directory
for name in ("unlink", "remove", "replace", "rename"):
    setattr(os, name, unless_used(getattr(os, name)))
for script, *flags in json.loads(COMMANDS):
    sys.argv = [script, *flags]
    sys.stdout.reconfigure(encoding="cp1252")
    file = Path(ROOT, script)
    code = file.read_text("utf-8")
    for old, new in ("ROWS = 1500", "ROWS = 64"), ("ITERATIONS = 10", "ITERATIONS = 1"), (
            '"eval", 200', '"eval", 8'):                                 # of tiny.py
        code = code.replace(old, new)
    exec(compile(code, file, "exec"), {"__name__": "__main__", "__file__": str(file)})
from data import InputError
from runtime import lock_directory
file = lock_directory(Path("run"))
Path("run/.lock").write_text("x")                            # an end that moves
try:
    lock_directory(Path("run"))
except InputError as error:
    print(error)
'''
SMALL = ["--annotated_rows=120", "--iterations=4", "--batch_size=4", "--minibatch_size=4",
         "--ppo_epochs=1", "--eval_rows=4"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux imitates Windows through /proc")
def test_a_killed_run_continues_under_the_rules_of_windows(tmp_path):
    """Then sample.py, eval.py, annotate.py and tiny.py run in the same process."""
    def run(killed_after, *commands):
        words = [sys.executable, "-c", WINDOWS, str(ROOT), killed_after, json.dumps(commands)]
        return subprocess.run(words, cwd=tmp_path, capture_output=True)

    train = ["text2grad.py", *SMALL, "--output_dir=run"]
    killed = run("checkpoint-000002.safetensors", train)
    assert killed.returncode == -9, killed.stderr.decode()[-3000:]
    write_rows(tmp_path / "rows.jsonl",
               [row | {"response": "A cousin paid."} for row in toy.rows("train", 3)])
    process = run("never", train, ["sample.py", "--adapter=run/policy", "--prompt=Hello"],
                  ["eval.py", "--adapter=run/policy", "--limit=4", "--output_dir=eval"],
                  ["tiny.py"], ["annotate.py", "--data=rows.jsonl", "--output=f.jsonl",
                                "--annotator_function=toy:critique"])
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    output = process.stdout.decode("utf-8")
    assert "resumed after step 2" in output and "─" in output and "R_φ" in output
    assert "\033" not in output and "another process is writing to it" in output
    assert len(read_jsonl(tmp_path / "f.jsonl")) == 3
    assert "reward_model.py --task slf5k --data f.jsonl --model MODEL\n" in output


def test_tiny_colours_a_terminal_unless_no_color_is_set(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert runpy.run_path(f"{ROOT}/tiny.py")["COLOURS"][1] == "\033[32m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(runpy.run_path(f"{ROOT}/tiny.py")["COLOURS"].values())


def test_without_git_a_run_and_a_study_have_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git("describe", "--always") == "" and studies.code_commit() == "unknown"


# Tests that were red there: without git, with a space in the path, in copies of a read-only
# checkout (one runs text2grad.py), and without a home.
ELSEWHERE = """
    test_studies.py test_ask.py::test_invalid_flags_send_no_request
    test_house.py::test_the_method_runs_without_all_that_measures_it
    test_sandbox.py::test_rows_that_cannot_get_outcomes_are_an_error_and_stay_unchanged
    test_measures.py::test_rouge_is_that_of_rouge_score
    test_eval.py::test_alpaca_eval_on_the_published_file""".split()


@pytest.mark.skipif(os.name == "nt", reason="a checkout is made read-only by its mode")
def test_the_tests_are_green_in_the_checkout_of_another_user():
    """The user is not in passwd if root runs this and that user can start Python. No .git, no
    HOME, LC_ALL=C, umask 077, and a space and an umlaut in the path and in TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="ü x ", dir="/var/tmp") as folder:
        code = shutil.copytree(ROOT, f"{folder}/code", copy_function=shutil.copyfile,
                               ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        Path(folder, "shared").symlink_to(ROOT.parent / "shared")
        temporary = Path(folder, "temporary")
        temporary.mkdir()
        temporary.chmod(0o777)
        for path in (folder, *Path(code).rglob("*"), code):
            Path(path).chmod(0o555)
        python = f"/usr/bin/python3.{sys.version_info.minor}"
        options = {"cwd": code, "umask": 0o077, "capture_output": True, "text": True, "env": {
            "PATH": os.defpath, "LC_ALL": "C", "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": Path(pytest.__file__).parents[1], "PYTHONDONTWRITEBYTECODE": "1"}}
        other = {"user": 54321, "group": 54321, "extra_groups": []} if os.geteuid() == 0 else {}
        if other and (not Path(python).exists() or subprocess.run(
                [python, "-c", "import torch"], **options, **other).returncode):
            python, other = sys.executable, {}
        words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        process = subprocess.run([python, *words, *(f"tests/{name}" for name in ELSEWHERE)],
                                 **options, **other)
        for path in (folder, *Path(code).rglob("*"), code):
            Path(path).chmod(0o755)
    assert process.returncode == 0, process.stdout[-3000:]
