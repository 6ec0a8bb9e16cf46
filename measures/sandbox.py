"""Sandbox that runs a model's code and its tests (KodCode, HumanEval, MBPP; §4).

    python -m measures.sandbox rows.jsonl      # KodCode: adds `outcome` to rows with `response`

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")
    # Result(passed=True, status='passed', stderr='', runner='plain')

Paper: pass@1 and the test outcomes of §4.4 and Appendix N. It does not say how code is run.

Tests are statements, or functions named test*, which are called in order. The imports of the
tests run before the program, so that the program cannot patch the imported modules. Values are
compared by Python's own operators. Tests with fixtures, marks or classes need pytest. They run
under pytest with `use_pytest` (--pytest). Without it they "could not be run", which says
nothing about the program. Each run is isolated (`measures/cell.py`):

    namespaces   separate processes, users, IPC and network (without loopback)
    files        separate read-only root and one small directory, all in memory
    privileges   no capabilities, now or later; no keys, no tracing, no uncounted memory
    limits       time, memory, number of processes, file size, open files

If this isolation is not available (macOS, most containers), `run_python` raises SandboxError.
With `unsafe`, the code is not isolated: it only gets an empty environment, a temporary
directory and resource limits.

A verdict can be trusted for honest programs only. Malicious code shares the interpreter with
its tests: it can define an object that equals everything, or walk the stack to rewrite the
tests or forge the verdict (tests/EVALUATION.md). Therefore a verdict is shown to the annotator,
but is never used as a reward.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from tqdm import tqdm

from data import InputError, get_task, read_rows, run_script, write_rows
from measures.cell import REASON

FAR = 5                     # wall-clock limit: this multiple of the CPU limit, …
START = 5                   # … plus this many seconds to start the process
PARSING = Lock()            # Python 3.11 limits the sum of the tree depths in all threads
NO_PYTHON = SyntaxError, ValueError, RecursionError, MemoryError    # errors of ast.parse
# Statements of the tests, as ast.unparse writes them: those that run before the program, those
# that only pytest can run, and those that cannot be run here.
FIRST = re.compile(r"(?!.*\bsolution\b)(import|from|.*\bimportorskip)\b")
NEEDS_PYTEST = re.compile(
    r"^class (Test|.*(\n( .*)?)*?\n    def test)|^def (setup_module|(setUp|tearDown)Module)"
    r"|(\A|\n\n)(@(pytest|mark)\..*\n)*def test\w*\(\w+(:[^=,)]*)?[,)]"
    r"|^def test.*\b(capsys|tmp_path|monkeypatch)\b|^@(fixture|skip)"
    r"|\b(pytest|mark)\.(fixture|parametrize|usefixtures|skip|xfail|importorskip)", re.M)
UNSUPPORTED = re.compile(
    r"async def test|fixture.*\n *async |^pytestmark|pytest\.(skip|xfail)\(|^from pytest .*skip"
    r"|[sS]kipTest|unittest\.skip|^unittest\.main|expectedFailure|\n .*importorskip", re.M)
# Messages of programs that run out of memory.
SHORT = re.compile("MemoryError|SystemError|map segment|bad_alloc|emory alloc|ocate memory")
CHILD = "import sys; sys.path.insert(0, {!r}); __import__('cell').main()"


class SandboxError(InputError):
    """The sandbox is not available on this machine, or one of its layers failed."""


@dataclass(frozen=True)
class Result:
    """The result of running a program's tests (§4.4).

    status: "passed"; "failed" (an assertion of the tests failed); "error" (another exception,
    invalid syntax, or the program exited before its tests ended); "timeout"; "memory"; "killed"
    (by a signal, or a crash); "not run" (the tests could not be run, which says nothing about
    the program). stderr: the last part of stdout and stderr, followed by the traceback or the
    reason. runner: "plain" or "pytest".
    """
    passed: bool
    status: str
    stderr: str
    runner: str = "plain"


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512,
               unsafe: bool = False, use_pytest: bool = False) -> Result:
    """Run `tests` on `code`, which they can import as the module `solution`.

    timeout: limit in seconds, rounded up, of the time in which the processes compute or sleep.
    The tests' imports and the time spent waiting for a busy processor do not count. memory_mb:
    limit of each process in MiB. The limit of all processes together is 25 % higher.
    use_pytest: run tests that need pytest under pytest. This function is thread-safe. Raises
    SandboxError if the sandbox is not available and `unsafe` is False.
    """
    try:
        with PARSING:
            imports, statements, definitions, runner = _compile(tests, use_pytest)
    except NO_PYTHON as error:
        return Result(False, "not run", f"{error!r}\n")
    secret = os.urandom(32).hex().encode()
    order = dict(locals())                    # the arguments and the compiled tests
    # In unsafe mode, killed children may still be writing, so cleanup errors are ignored.
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if unsafe
          else contextlib.nullcontext("/solution")) as directory:
        order["home"] = os.path.realpath(directory)
        reply, text = _start(order)
    # The reply is "ready", the secret, the status and the reason; then a NUL and how the
    # process ended.
    head, _, end = reply.partition(b"\0")
    _, verdict, claim = head.partition(secret)
    status, _, reason = claim.decode("utf-8", "replace").partition("\n")
    if not head.startswith(b"ready"):
        problem = "".join(text.splitlines()[-1:])
        raise SandboxError(f"no sandbox is available here ({problem}); use Linux with user "
                           f"namespaces, or run the code with all your permissions by "
                           f"--unsafe_sandbox")
    if end in (b"timeout", b"-24"):           # SIGXCPU
        status = "timeout"
        reason = f"stopped after {timeout:g} s\n"
    elif not verdict and end != b"memory":
        status = "killed" if end.startswith(b"-") else "error"
        reason = f"exited before its tests ended, with exit status {end.decode()}\n"
    if end == b"memory" or status in ("error", "killed") and SHORT.search(text + reason):
        status = "memory"
        reason += f"the memory limit of a process is {memory_mb} MiB\n"
    report = (text + reason).replace(f"{order['home']}/", "")[-REASON:]
    return Result(status == "passed", status, report, runner)


def _compile(tests: str, use_pytest: bool) -> list:
    """Prepare the tests; raises one of NO_PYTHON if they cannot be run.

    Returns [code object of the imports, that of the other statements, names of functions and
    classes, runner]. A call is inserted before each assertion, which records that the assertion
    was reached.
    """
    class Reached(ast.NodeTransformer):
        """Inserts a call of " reached", which is no identifier, before each assertion."""
        visit_Assert = lambda _, node: [ast.Expr(ast.Call(
            ast.Name(" reached", ast.Load()), [ast.Constant(1)], [])), node]

    tree = ast.parse(tests, "tests.py")
    text = ast.unparse(tree)
    runner = "pytest" if NEEDS_PYTEST.search(text) else "plain"
    if UNSUPPORTED.search(text) or runner == "pytest" and not use_pytest:
        raise ValueError("these tests need pytest (--pytest), or skip themselves when they run")
    imports = []
    statements = []
    for node in Reached().visit(tree).body:
        line = ast.unparse(node)
        # This import is slow. Most tests have it, but few use it outside of pytest.main().
        if line != "import pytest" or re.search(r"pytest\.(?!main)", text):
            (imports if FIRST.match(line) else statements).append(node)
    definitions = [node.name for node in statements if hasattr(node, "name")]
    return [*(compile(ast.fix_missing_locations(ast.Module(body, [])), "tests.py", "exec")
              for body in (imports, statements)), definitions, runner]


def _start(order: dict) -> tuple[bytes, str]:
    """Run a child process; returns (its reply on the socket, the end of its output)."""
    parent, child_end = socket.socketpair()   # a pipe could be reopened through /proc
    child = CHILD.format(os.path.dirname(os.path.abspath(__file__)))
    environment = {"HOME": order["home"], "TMPDIR": order["home"], "OMP_NUM_THREADS": "1",
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PY_IGNORE_IMPORTMISMATCH": "1"}
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
        finally:                              # other processes of the group may still run
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        reply = b""
        with contextlib.suppress(BlockingIOError):         # raised if the child wrote no reply
            reply = parent.recv(1 << 20, socket.MSG_DONTWAIT)
        output.seek(0)
        text = output.read()[-8 * REASON:].decode("utf-8", "replace")
    # If the watcher's exit status is not 0, a layer of the sandbox has failed.
    return (reply + late if late or status == 0 or order["unsafe"] else b""), text


# ── Test outcomes of responses

FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(\w*)[^`\n]*\n(.*?)(?:^(?:\1| {,3})\2|\Z)",
                   re.MULTILINE | re.DOTALL)
PASSED = "All tests passed."
NOT_RUN = "The tests could not be run"


def code_blocks(text: str) -> list[str]:
    """The code in each Markdown fence, even if the fence is not closed.

    Fences labelled as Python are used; without any, those without a label; otherwise all. A
    text that is valid Python has no blocks, because its fences are inside strings. Indented
    blocks, for example in a list, are dedented.
    """
    text = text.replace("\r\n", "\n")                 # a line with only "\r" prevents dedent
    fences = list(FENCE.finditer(text))
    with contextlib.suppress(*NO_PYTHON), PARSING:
        ast.parse(text)
        return []
    python = [fence for fence in fences
              if fence[3].lower().startswith("py") and not fence[4].lstrip().startswith(">>>")]
    unlabelled = [fence for fence in fences if not fence[3]]
    blocks = [fence[4] for fence in python or unlabelled or fences]
    # Other blocks are not dedented, because dedent also changes lines of only white space,
    # which may be part of a string.
    return [textwrap.dedent(block) if block[:1].isspace() else block for block in blocks]


def code_of(text: str) -> str:
    """The program in a response: its code blocks joined, or all of the text if it has none."""
    return "\n".join(code_blocks(text)) or text


def add_outcomes(rows: list[dict], task, **options) -> list[dict]:
    """Run the tests of each `response` and add its `outcome` to the row (Appendix N).

    Also adds `test_runner`: what ran the tests. options: those of `run_python`. Rows that have
    an outcome are run again only if their tests could not be run. Raises InputError if no
    sandbox is available.
    """
    def add(row: dict) -> dict:
        if not row.get("response") or NOT_RUN not in (row.get("outcome") or NOT_RUN):
            return row
        result = run_python(code_of(row["response"]), task.tests(row), **options)
        verdict = (NOT_RUN if result.status == "not run"
                   else f"The tests did not pass ({result.status})")
        report = f"{verdict}. The end of their output:\n{result.stderr[-1500:]}"
        return row | {"outcome": PASSED if result.passed else report,
                      "test_runner": result.runner}

    with ThreadPoolExecutor(2) as pool:
        return list(tqdm(pool.map(add, rows), "tests", len(rows)))


def main():
    """Run the responses in a file of rows, and add the test outcomes to the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", help="JSON lines with responses and tests")
    parser.add_argument("--task", default="kodcode",
                        help="task with tests: kodcode, or module:NAME")
    parser.add_argument("--unsafe_sandbox", action="store_true",
                        help="run the code even without a sandbox")
    parser.add_argument("--pytest", action="store_true",
                        help="run tests that need it under pytest")
    args = parser.parse_args()
    task = get_task(args.task)
    if task.tests is None:
        raise InputError(f"--task {task.name}: this task has no tests to run; use kodcode, or "
                         f"define a Task with `tests`")
    rows = read_rows(args.rows, task=task)
    if not any("response" in row for row in rows):
        raise InputError(f"{args.rows}: no row has a response; add the field 'response'")
    results = add_outcomes(rows, task, unsafe=args.unsafe_sandbox, use_pytest=args.pytest)
    write_rows(args.rows, results)
    counts = Counter(str(row.get("outcome")).partition(".")[0] for row in results)
    print(f"{args.rows}: outcomes of the responses: {dict(counts)}\n"
          f"next: python annotate.py --task {args.task} --data {args.rows}")


if __name__ == "__main__":
    run_script(main, "sandbox")
