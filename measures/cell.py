"""The process that runs one program and its tests; `measures/sandbox.py` starts it.

The paper does not describe it. Each run executes these imports again, so there are few.
"""

import ast
import builtins
import ctypes
import json
import linecache
import math
import os
import re
import resource
import sys
import time
import traceback

__builtins__ = dict(vars(builtins))           # a copy, because the program may patch builtins

FILE_MB = 16                                  # largest file and largest output, in MiB
FILES = 256                                   # largest number of open files of a process
PROCESSES = 64                                # most processes and threads, if isolated
# Finds tests that only pytest or unittest can run, in text written by ast.unparse. It does
# not find fixtures: a test function that needs one raises TypeError when it is called.
NEEDS_PYTEST = re.compile(
    r"^class (Test|.*TestCase\b)|^def (setup|teardown)_(module|function)\("
    r"|\bpytest\.(?!(raises|approx|warns|fail|main)\b)|^from pytest import (?!raises$|approx$)"
    r"|\bunittest\.skip|\bSkipTest\b", re.MULTILINE)
# What may test something: a test function, an assert, a loop, `with`, `try` or a call.
CHECKS = re.compile(r"^(def test|assert |for |with |try:|\w+\()", re.MULTILINE)


def main():
    """Read [secret, arguments of `judge`] from stdin; write "ready" and a result to stdout."""
    secret, *order = json.load(sys.stdin)
    verdict = os.dup(1)
    os.dup2(2, 1)                             # from now on, prints go to stderr
    os.chdir(os.environ["HOME"])
    os.write(verdict, b"ready")
    getpid = os.getpid                        # the program may also patch os
    write = os.write
    process = getpid()
    status, reason = judge(*order)
    if getpid() == process:                   # a fork of the program must not write a verdict
        claim = f"{secret}{status}\n{reason}"
        write(verdict, claim.encode("utf-8", "backslashreplace"))
    os._exit(0)                               # skips exit handlers and waits for no thread


def judge(code: str, tests: str, timeout: float, memory_mb: int,
          is_isolated: bool) -> tuple[str, str]:
    """Run the program and its tests; returns the status and the traceback.

    The imports of the tests run before the program, so they load the modules as they are. (An
    import of the solution comes later.) The program can still patch a module afterwards.
    """
    for name, text in ("solution.py", code), ("tests.py", tests):
        linecache.cache[name] = len(text), None, text.splitlines(True), name
    solution = sys.modules["solution"] = type(sys)("solution")
    program = vars(solution)

    class Names(dict):
        """The tests' global names. A name that they lack is looked up in the program."""

        def __missing__(self, name):
            return program[name]

    names = Names({"__name__": "tests"})
    status = "not run"
    reason = ""
    try:
        imports, statements = compile_tests(tests)
        exec(imports, names)
        set_limits(timeout, memory_mb, is_isolated)
        status = "error"                      # of the program
        with open("solution.py", "w", encoding="utf-8") as file:
            file.write(code)
        exec(compile(code, "solution.py", "exec"), program)
        status = "failed"
        exec(statements, names)
        for name, test in list(names.items()):
            # A test that returns a coroutine, a generator or a truth value may assert nothing.
            if name.startswith("test") and test() is not None:
                raise TypeError(f"{name} does not return None")
        status = "passed"
    # Any exception of the program or its tests gives a status, even SystemExit.
    except BaseException as error:
        trace = error.__traceback__           # without the frames of this file
        while trace and trace.tb_frame.f_code.co_filename not in ("tests.py", "solution.py"):
            trace = trace.tb_next
        if isinstance(error, MemoryError):
            status = "memory"
        elif status == "failed" and not isinstance(error, AssertionError):
            # Without a frame of the tests or the program, the tests cannot be run here.
            status = "error" if trace else "not run"
        reason = "".join(traceback.format_exception(type(error), error, trace, limit=1100))
    return status, reason


def compile_tests(tests: str) -> list:
    """Code objects of the tests' imports and of their other statements.

    Raises an exception if the tests are not valid Python, need pytest or test nothing.
    """
    tree = ast.parse(tests)
    text = ast.unparse(tree)
    if NEEDS_PYTEST.search(text) or not CHECKS.search(text):
        raise ValueError("these tests need pytest, which is not run here, or test nothing")
    if not re.search(r"pytest\.(?!main)|from pytest", text):
        # Many tests import pytest and do not use it. An empty module saves the time of its
        # import, and works where pytest is not installed.
        sys.modules["pytest"] = type(sys)("pytest")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
               and "solution" not in ast.unparse(node)]
    others = [node for node in tree.body if node not in imports]
    return [compile(ast.Module(body, []), "tests.py", "exec") for body in (imports, others)]


def set_limits(timeout: float, memory_mb: int, is_isolated: bool):
    """Set the limits of this process and its children. `timeout` begins now, in CPU seconds."""
    limits = {resource.RLIMIT_FSIZE: FILE_MB << 20, resource.RLIMIT_NOFILE: FILES}
    if resource.getrlimit(resource.RLIMIT_CORE)[1]:
        limits[resource.RLIMIT_CORE] = 1      # no core file, and no crash handler
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_mb << 20
    if is_isolated:                           # else the caller's processes would count
        limits[resource.RLIMIT_NPROC] = PROCESSES
        # The Linux kernel keeps passwords and keys for a user in a "keyring". This call
        # (KEYCTL_JOIN_SESSION_KEYRING) gives the process an empty one instead.
        keyctl = 250 if os.uname().machine == "x86_64" else 219
        ctypes.CDLL(None).syscall(keyctl, 1, None)
    for limited, limit in limits.items():
        resource.setrlimit(limited, (limit, limit))
    seconds = math.ceil(time.process_time() + timeout)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


if __name__ == "__main__":
    main()
