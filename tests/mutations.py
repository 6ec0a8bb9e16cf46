"""Does the test suite notice faults? One fault at a time is put into a copy of the repository.

    python tests/mutations.py                # all: "killed" (by which test) or "SURVIVED"
    python tests/mutations.py sampling.py    # those of a file, or with these words

mutations.txt has a line "old ⇒ new" for each fault, below the file, which has the old text
once, and the tests (arguments of pytest) of which one must fail. The exit status is 1 if a
fault survives, if a line is stale, or if tests fail without a fault. This script is no part of
the suite. It needs Linux, and about 20 minutes on one core.
"""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__")     # .git, .venv, caches
SECONDS = 300                                                      # for the tests of one fault
PYTEST = "-x", "-q", "-n0", "-p", "no:cacheprovider"
LIBRARIES = ("hypothesis", "openai", "peft", "pytest", "torch.distributed.fsdp",
             "transformers.models.llama.modeling_llama")

MUTATIONS = (ROOT / "tests" / "mutations.txt").read_text("utf-8")


def read_mutations() -> list[tuple[str, str, str, str]]:
    """(file, arguments of pytest, old, new) of each line; ⏎ stands for the end of a line."""
    mutations = []
    for line in MUTATIONS.strip().splitlines():
        if not line.startswith(" "):
            file, _, target = line.partition(": ")
            continue
        old, _, new = line.strip().replace("⏎", "\n").partition(" ⇒")
        mutations.append((file, target, old, new.removeprefix(" ")))
    return mutations


def run_pytest(copy: Path, target: str):
    """Run the target in this process, a fork, so that libraries are imported only once."""
    import pytest
    os.setsid()
    os.chdir(copy)
    output = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os._exit(pytest.main([*PYTEST, *shlex.split(target)]))


def run_tests(copy: Path, target: str) -> str:
    """ "SURVIVED" if all tests pass, "killed (by which test)", or "ERROR (why)"."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_pytest, args=(copy, target))
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)           # with the processes of the tests
    output = (copy.parent / "output").read_text("utf-8", "replace")
    failed_test = re.search(r"^(?:FAILED|ERROR) tests/(\S+::.+?)(?: - |$)", output, re.M)
    if status is None or status == 1 and failed_test:
        return f"killed ({failed_test[1] if failed_test else 'timeout'})"
    return f"ERROR ({output.strip()[-200:]})" if status else "SURVIVED"


def main():
    """Try the mutations that were asked for."""
    mutations = [mutation for mutation in read_mutations()
                 if " ".join(sys.argv[1:]) in f"{mutation[0]} {mutation[2]}"]
    sys.dont_write_bytecode = True        # a file may change twice within its time stamp
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        __import__(name)
    healthy = {}                          # target → its result without a fault
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=LEFT_OUT))
        if (ROOT.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
        for file, target, old, new in mutations:
            if target not in healthy:
                healthy[target] = run_tests(copy, target)
            source = (copy / file).read_text("utf-8")
            result = f"ERROR (without a fault: {healthy[target]})"
            if source.count(old) != 1:
                result = f"ERROR (stale: the file has the old text {source.count(old)} times)"
            elif healthy[target] == "SURVIVED":
                (copy / file).write_text(source.replace(old, new), "utf-8")
                result = run_tests(copy, target)
                (copy / file).write_text(source, "utf-8")
            killed += result.startswith("killed")
            print(f"{file}: {old!r} ⇒ {new!r}: {result}", flush=True)
    print(f"{killed} of {len(mutations)} faults are noticed")
    sys.exit(killed < len(mutations))


if __name__ == "__main__":
    main()
