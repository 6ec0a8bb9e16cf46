"""Runs code that a model wrote against its tests (KodCode and HumanEval, §4), in a process of its own.

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")     # Result(passed=True, status='passed', stderr='')

Tests are statements, run in the code's namespace, or functions named test*, called in order. Their `pytest` is a small
stand-in, installed or not; what it lacks (fixtures, classes, skip, ...) is an error and never a pass.
Held off: leaving before the tests end, printing a verdict, endless loops, memory, endless output, large files, children
left running, the caller's environment and standard input. Not held off: code that searches the interpreter for the
verdict's token or patches it, that equals everything, reads what the user may read (the caller's /proc entry too), uses
the network, forks without end until the timeout, or starts a session of its own. Memory is limited per process, and on
Linux only; root can lift any limit.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

KEPT, MEBIBYTE = 4000, 1 << 20         # characters of the output that a result keeps; bytes


@dataclass(frozen=True)
class Result:
    """status: "passed"; "failed" (an assertion did not hold while the tests ran); "error" (any other exception, bad
    syntax, no test ran, the code left before its tests ended); "timeout"; "memory"; "killed" (by a signal, a crash).
    stderr: the end of what was written to either stream, then the traceback or the reason."""
    passed: bool
    status: str
    stderr: str


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512) -> Result:
    """Whether `code`, importable as the module `solution`, passes `tests` in `timeout` seconds and `memory_mb` MiB."""
    token, reason = os.urandom(16).hex(), ""
    folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
    with folder as directory, tempfile.TemporaryFile() as output:
        Path(directory, "solution.py").write_bytes(code.encode("utf-8", "surrogatepass"))
        Path(directory, "order.json").write_text(json.dumps([token, tests, timeout, memory_mb]))
        environment = {"HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([sys.executable, "-I", "-u", os.path.abspath(__file__)], cwd=directory, env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output,
                              start_new_session=True) as process:
            try:
                pipe = select.poll()
                pipe.register(process.stdout, select.POLLIN)
                verdict = os.read(process.stdout.fileno(), 4096) if pipe.poll(timeout * 1000) else None
            finally:                                   # not yet waited for, so the id is still its own
                with contextlib.suppress(PermissionError):                     # macOS, where the group has ended
                    os.killpg(process.pid, signal.SIGKILL)
        written = os.pread(output.fileno(), 8 * KEPT, max(0, os.fstat(output.fileno()).st_size - 8 * KEPT))
    for _ in range(100):                               # children that were killed may write until they have died
        if os.path.exists(directory):
            time.sleep(0.01)
            folder.cleanup()
    said, _, status = (verdict or b"").decode("utf-8", "replace").partition(" ")
    if verdict is None or process.returncode == -signal.SIGXCPU:
        status, reason = "timeout", f"stopped after {timeout:g} s\n"
    elif said != token:
        status = "killed" if process.returncode < 0 else "error"
        reason = f"ended before its tests did, with exit status {process.returncode}\n"
    text = written.decode("utf-8", "replace").replace(directory + "/", "") + reason
    text = text if len(text) <= KEPT else f"[cut: the last {KEPT} characters]\n{text[-KEPT:]}"
    return Result(status == "passed", status, text)


# ── The child: this file again, run by a fresh interpreter ─────────────────────────────────────────────

def _child() -> None:
    """Take the order out of the code's sight, set limits, run code and tests, write the reason and then the verdict."""
    verdict, output = os.dup(1), os.dup(2)
    os.dup2(2, 1)                                      # from here on both streams are the code's output
    token, tests, timeout, memory_mb = json.loads(Path("order.json").read_text())
    os.unlink("order.json")
    limits = [(resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_CPU, int(timeout) + 2, 1),
              (resource.RLIMIT_FSIZE, 16 * MEBIBYTE, MEBIBYTE)]
    if sys.platform == "linux":                        # and no RLIMIT_NPROC, which counts all that the user runs
        limits.append((resource.RLIMIT_AS, memory_mb * MEBIBYTE, 64 * MEBIBYTE))
    for which, soft, room in limits:                   # infinity is -1
        hard = min(soft + room, resource.getrlimit(which)[1] % 2**64)
        resource.setrlimit(which, (min(soft, hard), hard))
    sys.modules["pytest"] = _Names(raises=_raises, approx=_approx, mark=_Names(parametrize=_parametrize))
    sys.path.insert(0, os.environ["HOME"])             # as the caller spells it, who takes it out of tracebacks
    solution, ran = None, set()
    try:
        import solution
        _run(tests, vars(solution), ran)
        status, reason = ("passed", "") if ran else ("error", "no test ran: no assertion reached, no function test*\n")
    except BaseException as error:                     # SystemExit before the end of the tests is no pass either
        for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):                              # room to report in
            resource.setrlimit(which, (resource.getrlimit(which)[1],) * 2)
        failed = solution and isinstance(error, AssertionError)
        status = "failed" if failed else "memory" if isinstance(error, MemoryError) else "error"
        told = traceback.TracebackException.from_exception(error, limit=1100)      # a million frames take minutes
        told.stack[:] = [frame for frame in told.stack if frame.filename not in (__file__, contextlib.__file__)]
        reason = "".join(told.format())
    os.write(output, reason[-KEPT:].encode("utf-8", "backslashreplace"))
    os.write(verdict, f"{token} {status}".encode())
    os._exit(0)                                        # no exit handlers, no waiting for threads


def _run(tests: str, code: dict, ran: set) -> None:
    """Run the statements, then each function named test*; what ran, assertions or functions, is added to `ran`."""
    linecache.cache["tests.py"] = (len(tests), None, tests.splitlines(True), "tests.py")       # for tracebacks
    tree, before = ast.parse(tests, "tests.py"), dict(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = ast.Call(ast.Name("__reached__", ast.Load()), [node.test], [])
    by_pytest = any(str(getattr(node, "name", "")).startswith("test") for node in tree.body)
    names = dict(code) if by_pytest else code          # pytest's tests are a module of their own and overwrite nothing
    names["__reached__"] = lambda value: (ran.add("assertion"), value)[1]
    exec(compile(ast.fix_missing_locations(tree), "tests.py", "exec"), names)
    for name, value in [(name, value) for name, value in names.items() if before.get(name) is not value]:
        if callable(value) and any(member.startswith("test") for member in [name, *dir(value)]):
            for case in getattr(value, "cases", [{}]):
                if value(**case) is not None:          # a class, a coroutine, a generator, a forgotten assert
                    raise SystemExit(f"{name} is no plain function that returns None: not run here")
                ran.add(name)


class _Names(SimpleNamespace):
    """A part of pytest. What it lacks ends the run, by no Exception, which pytest.raises(Exception) would swallow."""
    def __getattr__(self, name):
        raise (AttributeError if name.startswith("__") else SystemExit)(f"the sandbox's pytest has no {name!r}")


@contextlib.contextmanager
def _raises(expected, *, match=""):
    caught = SimpleNamespace()
    try:
        yield caught
    except expected as error:
        caught.type, caught.value = type(error), error
        assert re.search(match, str(error)), f"{error!r} does not match {match!r}"
    else:
        raise AssertionError(f"did not raise {expected}")


def _approx(expected, rel=None, abs=None):
    if isinstance(expected, (list, tuple)):
        return type(expected)(_approx(value, rel, abs) for value in expected)
    relative = (1e-6 if abs is None else 0) if rel is None else rel
    near = max(relative * math.fabs(expected), 1e-12 if abs is None else abs)
    return type("approx", (), {"__eq__": lambda _, actual: math.isclose(actual, expected, rel_tol=0, abs_tol=near)})()


def _parametrize(names, rows, ids=None):
    keys = re.findall(r"\w+", names) if isinstance(names, str) else names
    rows = [(row,) if isinstance(names, str) and len(keys) == 1 else row for row in rows]
    return lambda test: setattr(test, "cases", [{**case, **dict(zip(keys, row, strict=True))}
                                                for case in getattr(test, "cases", [{}]) for row in rows]) or test


if __name__ == "__main__":
    _child()
