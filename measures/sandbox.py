"""Sandbox: run a model's code against its tests (KodCode, HumanEval, MBPP; §4).

    python -m measures.sandbox rows.jsonl      # KodCode: adds `outcome` to rows with `response`

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")
    # Result(passed=True, status='passed', stderr='')

Paper: pass@1 and the test outcomes of §4.4 and Appendix N; it does not say how code is run.

Tests are statements, or functions named test*, which are called in order. Values are
compared as plain Python compares them. The tests' imports run before the program, so it cannot
patch them. Their `pytest` is always a small stand-in with `raises`, and `approx` of a number.
Each run is isolated (`measures/cell.py`):

    namespaces   separate processes, users, IPC and network (without loopback)
    files        separate read-only root and one small directory, all in memory
    privileges   no capabilities, now or later; no keys, no tracing, no uncounted memory
    limits       time, memory, number of processes, file size, open files

If this isolation is not available (macOS, most containers), `run_python` raises SandboxError.
With `unsafe` it runs the code with only an empty environment, a temporary directory and limits.

A verdict is valid for honest programs. Malicious code shares the interpreter with its tests: an
object can equal everything, and code that walks frames can rewrite the tests or forge the
verdict (tests/EVALUATION.md). Therefore verdicts inform a critique, and none is a reward.
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

FAR = 5                     # wall-clock limit as a multiple of the CPU limit …
START = 5                   # … plus this many seconds for the start
PARSING = Lock()            # Python 3.11 adds up the tree depths of all threads
NO_PYTHON = SyntaxError, ValueError, RecursionError, MemoryError    # errors of ast.parse
SHORT = re.compile("MemoryError|SystemError|map segment|bad_alloc|emory alloc|ocate memory")
CHILD = "import sys; sys.path.insert(0, {!r}); __import__('cell').main()"


class SandboxError(InputError):
    """The sandbox is not available on this machine, or one of its layers failed."""


@dataclass(frozen=True)
class Result:
    """The result of a program's tests (§4.4).

    status: "passed"; "failed" (an assertion of the tests failed); "error" (another exception,
    invalid syntax, no test ran, or the program exited before its tests ended); "timeout";
    "memory"; "killed" (by a signal, or a crash). stderr: the end of stdout and stderr, then the
    traceback or the reason.
    """
    passed: bool
    status: str
    stderr: str


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512,
               unsafe: bool = False) -> Result:
    """Whether `code`, importable as the module `solution`, passes `tests`.

    timeout: seconds, rounded up, in which all processes compute or sleep; the tests' imports
    and waiting for a busy processor do not count. memory_mb: limit of each process in MiB; the
    limit of all processes together is 25 % higher. The function is thread-safe. Raises
    SandboxError where the sandbox is not available and `unsafe` is False.
    """
    try:
        with PARSING:
            imports, statements = _compile(tests)
    except NO_PYTHON as error:
        return Result(False, "error", f"these tests cannot be run: {error!r}\n")
    secret = os.urandom(32).hex().encode()
    order = {"imports": imports, "statements": statements, "timeout": timeout, "unsafe": unsafe,
             "code": code, "tests": tests, "memory_mb": memory_mb, "secret": secret}
    # In unsafe mode killed children may still write, so errors of the cleanup are ignored.
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if unsafe
          else contextlib.nullcontext("/solution")) as directory:
        order["home"] = os.path.realpath(directory)
        reply, text = _start(order)
    # The reply: "ready", the secret, status and reason; after a NUL, how the process ended.
    head, _, end = reply.partition(b"\0")
    _, verdict, claim = head.partition(secret)
    status, _, reason = claim.decode("utf-8", "replace").partition("\n")
    if not head.startswith(b"ready"):
        problem = "".join(text.splitlines()[-1:])
        raise SandboxError(f"no sandbox is available here ({problem}); run on Linux with user "
                           f"namespaces, or let the code run with all your permissions: "
                           f"--unsafe_sandbox")
    if end in (b"timeout", b"-24"):           # SIGXCPU
        status = "timeout"
        reason = f"stopped after {timeout:g} s\n"
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
    """Code objects of the tests' imports and of their other statements.

    Each assertion first reports that it is reached.
    """
    class Reached(ast.NodeTransformer):
        def visit(self, node):
            """Insert a call of " reached", which is no identifier, before each assertion."""
            call = ast.Call(ast.Name(" reached", ast.Load()), [ast.Constant(1)], [])
            is_assertion = isinstance(node, ast.Assert)
            return [ast.Expr(call), node] if is_assertion else self.generic_visit(node)

    imports = ast.Module([], [])
    statements = ast.Module([], [])
    for node in Reached().visit(ast.parse(tests, "tests.py")).body:
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        runs_first = is_import and "solution" not in ast.unparse(node)
        (imports if runs_first else statements).body.append(node)
    return [compile(ast.fix_missing_locations(module), "tests.py", "exec")
            for module in (imports, statements)]


def _start(order: dict) -> tuple[bytes, str]:
    """Run a child with this order → (its reply on the socket, the end of its output)."""
    parent, child_end = socket.socketpair()   # a pipe could be opened again through /proc
    environment = {"HOME": order["home"], "TMPDIR": order["home"], "OMP_NUM_THREADS": "1"}
    child = CHILD.format(os.path.dirname(os.path.abspath(__file__)))
    with tempfile.TemporaryFile() as output, parent:
        with child_end:
            process = subprocess.Popen([sys.executable, "-I", "-u", "-c", child],
                                       stdin=subprocess.PIPE, stdout=child_end, stderr=output,
                                       env=environment, start_new_session=True)
        try:
            process.communicate(marshal.dumps(order), FAR * order["timeout"] + START)
            late = b""
        except subprocess.TimeoutExpired:
            late = b"\0timeout"
        finally:                              # other processes of its group may still run
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        reply = b""
        with contextlib.suppress(BlockingIOError):                # the child wrote no reply
            reply = parent.recv(1 << 20, socket.MSG_DONTWAIT)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 8 * REASON))
        text = output.read().decode("utf-8", "replace")
    # A watcher process with another exit status than 0 means that a layer has failed.
    return (reply + late if late or status == 0 or order["unsafe"] else b""), text


# ── Rows: the test outcome of a response

FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(\w*)[^`\n]*\n(.*?)(?:^(?:\1| {,3})\2|\Z)",
                   re.MULTILINE | re.DOTALL)
PASSED = "All tests passed."


def parse_python(text: str) -> ast.Module | None:
    """The syntax tree of the text, or None if it is not Python."""
    try:
        with PARSING:
            return ast.parse(text)
    except NO_PYTHON:
        return None


def code_blocks(text: str) -> list[str]:
    """The code in each Markdown fence, closed or not; indented blocks, as in a list, are
    dedented.

    If a fence is labelled as Python, only those fences count, else those without a label, else
    all. A text that is valid Python has no blocks, because its fences are inside strings.
    """
    text = text.replace("\r\n", "\n")                 # a blank line "\r" would prevent dedent
    fences = list(FENCE.finditer(text))
    if fences and parse_python(text):
        return []
    python = [fence for fence in fences
              if fence[3].lower().startswith("py") and not fence[4].lstrip().startswith(">>>")]
    unlabelled = [fence for fence in fences if not fence[3]]
    blocks = [fence[4] for fence in python or unlabelled or fences]
    # dedent also strips lines of white space, which may be part of a string.
    return [textwrap.dedent(block) if block[:1].isspace() else block for block in blocks]


def code_of(text: str) -> str:
    """The program of a response: its code blocks joined, or all of the text without any."""
    return "\n".join(code_blocks(text)) or text


def add_outcomes(rows: list[dict], task, unsafe: bool = False) -> list[dict]:
    """The rows, with the test outcome of each `response` that had no `outcome` (Appendix N).

    Raises InputError where a response is no text or no sandbox is available.
    """
    def add(row: dict) -> dict:
        if not row.get("response") or row.get("outcome"):
            return row
        if not isinstance(row["response"], str):
            raise InputError(f"row {row.get('id', row)}: its 'response' is no text; correct "
                             f"or remove the row")
        result = run_python(code_of(row["response"]), task.tests(row), unsafe=unsafe)
        return row | {"outcome": PASSED if result.passed else (
            f"The tests did not pass ({result.status}). The end of their output:\n"
            f"{result.stderr[-1500:]}")}

    with ThreadPoolExecutor(2) as pool:
        return list(tqdm(pool.map(add, rows), "tests", len(rows)))


def main():
    """Add test outcomes to the rows of a file that have responses."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", help="file of JSON lines with a response and tests")
    parser.add_argument("--task", default="kodcode",
                        help="name of a Task with tests: kodcode or module:NAME")
    parser.add_argument("--unsafe_sandbox", action="store_true",
                        help="run the code even without a sandbox")
    args = parser.parse_args()
    task = get_task(args.task)
    if task.tests is None:
        raise InputError(f"--task {task.name}: it has no tests to run; use kodcode or a Task "
                         f"with `tests`")
    rows = read_rows(args.rows, task.needs)
    if not any("response" in row for row in rows):
        raise InputError(f"{args.rows}: no row has a response; add a field 'response'")
    results = add_outcomes(rows, task, args.unsafe_sandbox)
    write_rows(args.rows, results)
    outcomes = [result["outcome"] for row, result in zip(rows, results) if result is not row]
    passed = outcomes.count(PASSED)
    print(f"{args.rows}: {len(outcomes)} responses run, {passed} passed their tests\n"
          f"next: python annotate.py --task {args.task} --data {args.rows}")


if __name__ == "__main__":
    run_script(main, "sandbox")
