"""Runs code that a model wrote against its tests (KodCode, HumanEval, MBPP; §4), in a sandbox.

    python -m measures.sandbox rows.jsonl      # KodCode: adds `outcome` where a `response` is

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")
    # Result(passed=True, status='passed', stderr='')

Paper: pass@1 and the test outcomes of §4.4 and Appendix N; it says nothing of how code is run.

Tests are statements, or functions named test*, called in order. Values are compared as plain
Python compares them. The tests' imports run before the program, which cannot patch them, and
their `pytest` is a small stand-in, installed or not: `raises`, and `approx` of a number. Around
a run (`measures/cell.py`):

    namespaces   processes, users, IPC and a network (not even loopback) of its own
    files        a root of its own, read-only, and one small directory, all in memory
    privileges   no capability and none to be had; no keys, no tracing, no uncounted memory
    limits       time, memory, number of processes, size of a file, open files

Where these cannot be put up (macOS, most containers) `run_python` refuses or, told `unsafe`,
runs with an empty environment, a temporary directory and the limits, and with nothing else.

A verdict says what an honest program does. Code that means to deceive shares the interpreter
with its tests: an object can equal everything, and code that walks frames can rewrite the tests
or forge the verdict (tests/EVALUATION.md). So verdicts inform a critique; none is a reward.
"""

import argparse
import ast
import contextlib
import marshal
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from tqdm import tqdm

from data import InputError, get_task, read_rows, run_script, write_rows
from measures.cell import REASON

FAR, START = 5, 5            # on the clock: so many times the limit, and seconds to begin in
PARSING = Lock()                    # Python 3.11 counts the depth of all threads' trees as one
NO_PYTHON = SyntaxError, ValueError, RecursionError, MemoryError    # as the parser documents
SHORT = re.compile("MemoryError|SystemError|map segment|bad_alloc|emory alloc|ocate memory")
CHILD = "import sys; sys.path.insert(0, {!r}); __import__('cell').main()"


class SandboxError(InputError):
    """The sandbox cannot be put up on this machine, or a layer of it failed."""


@dataclass(frozen=True)
class Result:
    """What became of a program (§4.4).

    status: "passed"; "failed" (an assertion did not hold while the tests ran); "error" (any
    other exception, bad syntax, no test ran, the code left before its tests ended); "timeout";
    "memory"; "killed" (by a signal, a crash). stderr: the end of what was written to either
    stream, then the traceback or the reason.
    """
    passed: bool
    status: str
    stderr: str


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512,
               unsafe: bool = False) -> Result:
    """Whether `code`, importable as the module `solution`, passes `tests`.

    timeout: seconds that all processes compute or sleep, rounded up; what the tests import is
    apart, and so is waiting for a busy processor. memory_mb: MiB of a process; all together
    have a quarter more. Threads may call it at once. Raises SandboxError.
    """
    try:
        with PARSING:
            imports, statements = _compile(tests)
    except NO_PYTHON as error:
        return Result(False, "error", f"these tests cannot be run: {error!r}\n")
    secret = os.urandom(32).hex().encode()
    order = {"imports": imports, "statements": statements, "timeout": timeout, "unsafe": unsafe,
             "code": code, "tests": tests, "memory_mb": memory_mb, "secret": secret}
    # Unsafe, children that were killed may write until they have died.
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if unsafe
          else contextlib.nullcontext("/solution")) as home:
        order["home"] = os.path.realpath(home)
        reply, text = _start(order)
    # "ready", the secret, status and reason; then, after a NUL, how the process ended.
    head, _, end = reply.partition(b"\0")
    _, verdict, claim = head.partition(secret)
    status, _, reason = claim.decode("utf-8", "replace").partition("\n")
    if not head.startswith(b"ready"):
        problem = "".join(text.splitlines()[-1:])
        raise SandboxError(f"no sandbox can be put up here ({problem}): run on Linux where "
                           f"user namespaces are allowed, or let the code do all that you may "
                           f"do: --unsafe_sandbox")
    if end in (b"timeout", b"-24"):           # SIGXCPU
        status, reason = "timeout", f"stopped after {timeout:g} s\n"
    elif end == b"memory":
        status = "memory"
    elif not verdict:
        status = "killed" if end.startswith(b"-") else "error"
        reason = f"ended before its tests did, with exit status {end.decode()}\n"
    if status == "memory" or status in ("error", "killed") and SHORT.search(text + reason):
        status = "memory"
        reason += f"the limit is {memory_mb} MiB of memory in a process\n"
    report = (text + reason).replace(f"{order['home']}/", "")
    return Result(status == "passed", status, report[-REASON:])


def _compile(tests: str) -> list:
    """The tests' imports, and their other statements, whose assertions tell that they run."""
    class Reached(ast.NodeTransformer):
        def visit(self, node):
            """Before an assertion, a call of " reached", which is no identifier."""
            call = ast.Call(ast.Name(" reached", ast.Load()), [ast.Constant(1)], [])
            is_assertion = isinstance(node, ast.Assert)
            return [ast.Expr(call), node] if is_assertion else self.generic_visit(node)

    early, late = ast.Module([], []), ast.Module([], [])
    for node in Reached().visit(ast.parse(tests, "tests.py")).body:
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        first = is_import and "solution" not in ast.unparse(node)
        (early if first else late).body.append(node)
    return [compile(ast.fix_missing_locations(part), "tests.py", "exec")
            for part in (early, late)]


def _start(order: dict) -> tuple[bytes, str]:
    """Run a child with this order: what it wrote to its socket, and the end of the output."""
    ours, theirs = socket.socketpair()        # a pipe could be opened again through /proc
    environment = {"HOME": order["home"], "TMPDIR": order["home"], "OMP_NUM_THREADS": "1"}
    child = CHILD.format(os.path.dirname(os.path.abspath(__file__)))
    with tempfile.TemporaryFile() as output, ours:
        with theirs:
            process = subprocess.Popen([sys.executable, "-I", "-u", "-c", child],
                                       stdin=subprocess.PIPE, stdout=theirs, stderr=output,
                                       env=environment, start_new_session=True)
        try:
            process.communicate(marshal.dumps(order), FAR * order["timeout"] + START)
            late = b""
        except subprocess.TimeoutExpired:
            late = b"\0timeout"
        finally:                              # its group may have outlived it
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        reply = b""
        with contextlib.suppress(BlockingIOError):                # where nothing was written
            reply = ours.recv(1 << 20, socket.MSG_DONTWAIT)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 8 * REASON))
        text = output.read().decode("utf-8", "replace")
    # The process that watches ends with status 0, or a layer has failed.
    return (reply + late if late or status == 0 or order["unsafe"] else b""), text


# ── Rows: what the tests say of a response ────────────────────────────────────────────────

FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(\w*)[^`\n]*\n(.*?)(?:^(?:\1| {,3})\2|\Z)",
                   re.MULTILINE | re.DOTALL)
PASSED = "All tests passed."


def parse_python(text: str) -> ast.Module | None:
    """The tree of a text that is Python, else None."""
    try:
        with PARSING:
            return ast.parse(text)
    except NO_PYTHON:
        return None


def code_blocks(text: str) -> list[str]:
    """The code in each Markdown fence, closed or not, moved to the left where it is indented,
    as in a list.

    Fences that say Python come alone, else those that say nothing, else all. A text that is
    Python as it stands has none: what looks like a fence is in a string.
    """
    text = text.replace("\r\n", "\n")                 # where no blank line is dedented
    found = list(FENCE.finditer(text))
    if found and parse_python(text):
        return []
    python = [one for one in found
              if one[3].lower().startswith("py") and not one[4].lstrip().startswith(">>>")]
    bare = [one for one in found if not one[3]]
    blocks = [one[4] for one in python or bare or found]
    # dedent also strips lines of white space, which may stand in a string.
    return [textwrap.dedent(block) if block[:1].isspace() else block for block in blocks]


def code_of(text: str) -> str:
    """The program of a response: its fences, joined like a notebook's cells, or all of it."""
    return "\n".join(code_blocks(text)) or text


def add_outcomes(rows: list[dict], task, unsafe: bool = False) -> list[dict]:
    """The rows; one with a `response` and no `outcome` gets what its tests say (Appendix N).

    Raises InputError for a response that is no text, and where no sandbox can be put up.
    """
    def add(row: dict) -> dict:
        if not row.get("response") or row.get("outcome"):
            return row
        if not isinstance(row["response"], str):
            raise InputError(f"row {row.get('id', row)}: its 'response' is no text; mend or "
                             f"drop it")
        result = run_python(code_of(row["response"]), task.tests(row), unsafe=unsafe)
        return row | {"outcome": PASSED if result.passed else (
            f"The tests did not pass ({result.status}). The end of their output:\n"
            f"{result.stderr[-1500:]}")}

    with ThreadPoolExecutor(2) as pool:
        return list(tqdm(pool.map(add, rows), "tests", len(rows)))


def main():
    """Rows with responses → the same file with outcomes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", help="JSON lines with a response and tests")
    parser.add_argument("--task", default="kodcode", help="or module:NAME, a Task with tests")
    parser.add_argument("--unsafe_sandbox", action="store_true",
                        help="run the code also where no sandbox can be put up")
    args = parser.parse_args()
    task = get_task(args.task)
    if task.tests is None:
        raise InputError(f"--task {task.name}: it has no tests to run; kodcode has, and so has "
                         f"a Task of your own with `tests`")
    rows = read_rows(args.rows, task.needs)
    if not any("response" in row for row in rows):
        raise InputError(f"{args.rows}: no row has a response; add a field 'response'")
    found = add_outcomes(rows, task, args.unsafe_sandbox)
    write_rows(args.rows, found)
    new = [row["outcome"] for before, row in zip(rows, found) if row is not before]
    print(f"{args.rows}: {len(new)} responses run, {new.count(PASSED)} passed their tests\n"
          f"next: python annotate.py --task {args.task} --data {args.rows}")


if __name__ == "__main__":
    run_script(main, "sandbox")
