"""Sandbox that runs a model's code and its tests (KodCode, HumanEval, MBPP; §4).

    python -m measures.sandbox rows.jsonl      # KodCode: adds `outcome` to rows with `response`

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")
    # Result(passed=True, status='passed', stderr='')

Paper: pass@1 and the test outcomes of §4.4 and Appendix N. It does not say how to run code.

Tests are statements, or functions named test*, which are called in order. Values are compared
by Python's own operators. Tests that need pytest (classes, fixtures, marks) or are asynchronous
get the status "not run", which says nothing about the program. `measures/sandbox.sh` isolates
each run with the tools of util-linux. In this sandbox, `measures/cell.py` runs the tests:

    namespaces   separate processes, IPC and network (without loopback)
    files        separate read-only root, and 64 MB to write, in memory
    privileges   no capabilities, now or later
    limits       time, memory of a process, number of processes, file size, open files

vsock sockets are not isolated: in a virtual machine, code could reach a service of its host.
The memory of all processes together is not limited, nor is shared memory of System V and of
memfd_create, which `memory_mb` does not count. If the machine runs out of memory, Linux ends
the sandbox first. If this isolation is not available (macOS, most containers), `run_python`
raises SandboxError. With `unsafe`, the code is not isolated: it only gets a temporary
directory, resource limits, and none of the caller's environment variables.

A verdict can be trusted for honest programs only. Malicious code shares the interpreter with
its tests: it can define an object that equals everything, replace functions that the tests use,
or rewrite the tests. Therefore a verdict is shown to the annotator, but is never used as a
reward.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data import InputError, get_task, read_rows, run_script, write_rows

FAR = 5                     # wall-clock limit: this multiple of the CPU limit, …
START = 5                   # … plus this many seconds to start the process
REASON = 4000               # maximum length of a result's text in characters
FOLDER = Path(__file__).parent


class SandboxError(InputError):
    """The sandbox is not available on this machine."""


@dataclass(frozen=True)
class Result:
    """The result of running a program's tests (§4.4).

    status: "passed"; "failed" (an AssertionError, of the tests or of the program); "error"
    (another exception, invalid syntax, or the program exited before its tests ended);
    "timeout"; "memory"; "killed" (by a signal, a crash, or an exit status above 127); "not run"
    (the tests could not be run, which says nothing about the program). stderr: the last part of
    stdout and stderr, followed by the traceback or the reason.
    """
    passed: bool
    status: str
    stderr: str


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512,
               unsafe: bool = False) -> Result:
    """Run `tests` on `code`, which they can import as the module `solution`.

    timeout: CPU seconds of each process, rounded up, without the tests' imports. A program may
    also sleep or wait for a processor, so the run may take FAR times as long, and START seconds
    more. memory_mb: limit of each process in MiB (on Linux). This function is thread-safe.
    Raises SandboxError if the sandbox is not available and `unsafe` is False.
    """
    if os.name == "nt":
        raise SandboxError("programs cannot be run on Windows; use Linux")
    secret = os.urandom(16).hex()             # only a result with it counts, see `cell.main`
    order = json.dumps([secret, code, tests, timeout, memory_mb, not unsafe])
    command = [sys.executable, "-I", "-u", "-c", (FOLDER / "cell.py").read_text("utf-8")]
    if not unsafe:
        command = ["sh", FOLDER / "sandbox.sh", sys.base_prefix, sys.prefix, *command]
    # In unsafe mode, child processes may still be writing, so cleanup errors are ignored.
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
          tempfile.TemporaryFile() as output):
        environment = {"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1"}
        try:
            process = subprocess.run(command, input=order.encode(), stdout=subprocess.PIPE,
                                     stderr=output, env=environment, start_new_session=True,
                                     timeout=FAR * timeout + START)
            reply = process.stdout.decode("utf-8", "replace")
            exit_status = process.returncode
        except subprocess.TimeoutExpired:
            reply = "ready"
            exit_status = -signal.SIGXCPU
        output.seek(0)
        text = output.read()[-8 * REASON:].decode("utf-8", "replace")
    if not reply.startswith("ready"):
        problem = "".join(text.splitlines()[-1:])
        raise SandboxError(f"no sandbox is available here ({problem}); use Linux with user "
                           f"namespaces, or run the code with all your permissions by "
                           f"--unsafe_sandbox")
    _, _, claim = reply.partition(secret)
    status, _, reason = claim.partition("\n")
    if exit_status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):    # the latter from a shell
        status = "timeout"
        reason = f"stopped after {timeout:g} s\n"
    elif not claim:
        status = "error" if exit_status in range(128) else "killed"
        reason = f"exited before its tests ended, with exit status {exit_status}\n"
    return Result(status == "passed", status, (text + reason)[-REASON:])


# ── Test outcomes of responses

INVALID = SyntaxError, ValueError, RecursionError, MemoryError     # if text is no Python
FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(\w*)[^`\n]*\n(.*?)(?:^(?:\1| {,3})\2|\Z)",
                   re.MULTILINE | re.DOTALL)


def code_of(text: str) -> str:
    """The program in a response: its Markdown fences joined, or its Python outside of fences.

    Fences labelled as Python are used. If there are none, those without a label are used, or
    else all. The last fence may be unclosed. A text that is valid Python is returned as it is:
    its fences are part of strings. Indented fences, for example in a list, are dedented.
    """
    text = text.replace("\r\n", "\n").replace("\ufeff", "")  # "\r" alone prevents dedent
    with contextlib.suppress(*INVALID):
        compile(text, "response", "exec")
        return text
    text = re.sub(r"^([^`\n]*[^`\s])```[ \t]*$", r"\1\n```", text, flags=re.MULTILINE)
    fences = list(FENCE.finditer(text))
    python = [fence for fence in fences
              if fence[3].lower().startswith("py") and not fence[4].lstrip().startswith(">>>")]
    unlabelled = [fence for fence in fences if not fence[3]]
    blocks = [textwrap.dedent(fence[4]) for fence in python or unlabelled or fences]
    program = "\n".join(blocks)
    return program if python else python_in(program) or python_in(text) or text


def python_in(text: str) -> str:
    """A text without its prose, tags and fences, which are not Python; "" if nothing is left.

    A line without indentation begins a piece, and the indented lines after it belong to it. A
    piece with invalid syntax is dropped as a whole, so no part of a function is run alone.
    """
    pieces = re.findall(r"^\S.*(?:\n(?!\S).*)*", text, re.MULTILINE)
    while pieces:
        try:
            ast.parse("\n".join(pieces))
            break
        except SyntaxError as error:
            # For a block without a body, lineno is the line after it; the message has its line.
            named = re.findall(r"on line (\d+)", error.msg) or [error.lineno or 1]
            piece_of_line = [i for i, piece in enumerate(pieces) for _ in piece.split("\n")]
            del pieces[piece_of_line[: int(named[0])][-1]]     # at most the last piece
        except INVALID:
            return ""
    return "\n".join(pieces)


def add_outcomes(rows: list[dict], task, **options) -> list[dict]:
    """Run the tests of each `response` and add its `outcome` to the row (Appendix N).

    options: those of `run_python`. A row with an outcome, or without response, does not change.
    Raises InputError if no sandbox is available.
    """
    def add(row: dict) -> dict:
        if not row.get("response") or row.get("outcome"):
            return row
        result = run_python(code_of(row["response"]), task.tests(row), **options)
        verdict = ("The tests could not be run" if result.status == "not run"
                   else f"The tests did not pass ({result.status})")
        report = f"{verdict}. The end of their output:\n{result.stderr[-1500:]}"
        return row | {"outcome": "All tests passed." if result.passed else report}

    with ThreadPoolExecutor(2) as pool:
        return list(tqdm(pool.map(add, rows), "tests", len(rows)))


def main():
    """Run the responses in a file of rows, and add the test outcomes to the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", help="JSON lines with responses and tests")
    parser.add_argument("--task", default="kodcode",
                        help="task with tests: kodcode, module:NAME")
    parser.add_argument("--unsafe_sandbox", action="store_true",
                        help="run the code even without a sandbox")
    args = parser.parse_args()
    task = get_task(args.task)
    if task.tests is None:
        raise InputError(f"--task {task.name}: this task has no tests to run; use kodcode, or "
                         f"define a Task with `tests`")
    rows = read_rows(args.rows, task=task)
    results = add_outcomes(rows, task, unsafe=args.unsafe_sandbox)
    write_rows(args.rows, results)
    counts = Counter(str(row.get("outcome")).partition(".")[0] for row in results)
    print(f"{args.rows}: outcomes of the responses: {dict(counts)}\n"
          f"next: python annotate.py --task {args.task} --data {args.rows}")


if __name__ == "__main__":
    run_script(main, "sandbox")
