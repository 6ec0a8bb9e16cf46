"""Runs code that a model wrote against its tests (KodCode, HumanEval and MBPP, §4), in a sandbox.

    run_python("def f(x):\\n    return x + 1", "assert f(1) == 2")     # Result(passed=True, status='passed', stderr='')

Paper: pass@1 and the test outcomes of §4.4 and Appendix N; it says nothing of how code is run.

Tests are statements, run one by one, or functions named test*, called in order. Their `pytest` is a small stand-in,
installed or not; what it lacks (fixtures, classes, skip, ...) is an error and never a pass. Layers around a run:

    namespaces   processes, shared memory and a network (not even loopback) of its own; all ends with its first process
    files        a root of its own: Python and the system's libraries, read-only, and one small directory in memory
    privileges   no capability, and none to be had: nothing lifts a limit or mounts, started by root or not
    landlock     the kernel lets it write to nothing but its directory, and signal or trace nobody outside
    limits       CPU time, memory, number of processes, size of a file, open files

`sandbox_layers` says which of them this machine lacks. All but landlock are needed: without them (on macOS, in most
containers) `run_python` refuses or, told `unsafe`, runs with the rest.

A verdict is a random token that the worker sends before it loads the code and again when the last test has ended. In
between no name, frame, container or file holds it: it lies on the interpreter's stack of values. Tests have names and
builtins that the code's globals() and `import builtins` do not reach, and a value that equals everything fails.
What remains: code shares the interpreter with its tests. It can read them, patch modules that they use, return values
whose == lies with care and, by walking frames or its own memory, rewrite the interpreter. Memory that no process maps
(memfd_create, shmget) is counted nowhere; when the machine runs out of it, the kernel ends these processes first.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import functools
import importlib.util
import json
import linecache
import math
import os
import re
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

KEPT, MEBIBYTE = 4000, 1 << 20         # characters of the output that a result keeps; bytes
PROCESSES, FILE_MB, FOLDER_MB, FILES = 64, 16, 64, 4096    # threads count too; one file; the directory, its files


class SandboxError(ValueError):
    """A layer that is needed cannot be put up on this machine, or broke before the code was run."""


@dataclass(frozen=True)
class Result:
    """status: "passed"; "failed" (an assertion did not hold while the tests ran); "error" (any other exception, bad
    syntax, no test ran, the code left before its tests ended); "timeout"; "memory"; "killed" (by a signal, a crash).
    stderr: the end of what was written to either stream, then the traceback or the reason."""
    passed: bool
    status: str
    stderr: str


def run_python(code: str, tests: str, timeout: float = 10.0, memory_mb: int = 512, unsafe: bool = False) -> Result:
    """Whether `code`, importable as the module `solution`, passes `tests` in `timeout` seconds and `memory_mb` MiB.

    Threads may call it at once. Raises SandboxError where a layer that is needed is missing, unless `unsafe`."""
    layers = sandbox_layers()
    missing = [f"{name} ({why})" for name, why in layers.items() if why and name != "landlock"]
    if missing and not unsafe:
        raise SandboxError(f"the sandbox lacks {', '.join(missing)}: run on Linux where user namespaces are allowed, "
                           f"or let the code do all that you may do, with --unsafe_sandbox")
    said, ended, text = _start(code=code, tests=tests, timeout=timeout, memory_mb=memory_mb,
                               layers=[name for name, why in layers.items() if not why])
    token, claim, end, *_ = [*said.split("\n"), "", "", ""]
    reason = ""
    if not ended or end == str(-signal.SIGXCPU):
        status, reason = "timeout", f"stopped after {timeout:g} s\n"
    elif not token:
        raise SandboxError(f"the sandbox broke before it ran the code: {' '.join(text[-500:].split())}")
    elif end == "memory":
        status, reason = "memory", f"all its processes together held more than twice {memory_mb} MiB\n"
    elif end == "0" and claim.startswith(token + " "):
        status = claim.removeprefix(token + " ")
    else:
        status = "killed" if end.startswith("-") else "error"
        reason = f"ended before its tests did, with exit status {end}\n"
    text += reason
    text = text if len(text) <= KEPT else f"[cut: the last {KEPT} characters]\n{text[-KEPT:]}"
    return Result(status == "passed", status, text)


@functools.cache
def sandbox_layers() -> dict[str, str]:
    """Each layer with "", or with the reason why it cannot be put up here: a child tries them, once per process.

    Raises SandboxError where that child ends before it has said so."""
    said, _, text = _start(code="", tests=None, timeout=60, memory_mb=512, layers=list(LAYERS))
    if not said:
        raise SandboxError(f"the sandbox's layers could not be tried: {' '.join(text[-500:].split())}")
    return json.loads(said)


def _start(**order) -> tuple[str, bool, str]:
    """What a child with this order said, whether it ended in time, and the end of the code's output."""
    folder = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
    ours, theirs = socket.socketpair()                 # a pipe could be opened again through /proc, and read
    with folder as directory, tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile() as output, ours:
        directory, said, ended, end = os.path.realpath(directory), b"", False, time.monotonic() + order["timeout"]
        json.dump(order, told)
        told.seek(0)
        environment = {"HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen([sys.executable, "-I", "-u", os.path.abspath(__file__)], env=environment,
                                       cwd=directory, stdin=told, stdout=theirs, stderr=output, start_new_session=True)
        with process:
            try:
                while not ended and (left := end - time.monotonic()) > 0:
                    ours.settimeout(left)
                    with contextlib.suppress(TimeoutError):
                        part = ours.recv(KEPT)
                        said += part
                        ended = not part or said.count(b"\n") >= 3 or len(said) > KEPT
            finally:                                   # not yet waited for, so the id is still its own
                with contextlib.suppress(PermissionError):                     # macOS, where the group has ended
                    os.killpg(process.pid, signal.SIGKILL)
        written = os.pread(output.fileno(), 8 * KEPT, max(0, os.fstat(output.fileno()).st_size - 8 * KEPT))
    for _ in range(100):                               # children that were killed may write until they have died
        if os.path.exists(directory):
            time.sleep(0.01)
            folder.cleanup()
    return said.decode("utf-8", "replace"), ended, written.decode("utf-8", "replace").replace(directory + "/", "")


# ── The layers, put up by the child: this file again, run by a fresh interpreter ───────────────────────

def _libc(name: str, *arguments) -> int:
    if sys.platform != "linux":
        raise OSError("needs Linux")
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(
        *[ctypes.c_long(value) if isinstance(value, int) else value for value in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return result


def _namespaces(order: dict) -> None:
    """Unshare mounts, IPC, processes and network, if need be as the owner of a user namespace; go on in a child."""
    user, group = os.geteuid(), os.getegid()
    own = user != 0 or Path("/proc/self/uid_map").read_text().split()[2] == "1"
    Path("/proc/self/oom_score_adj").write_text("1000")    # where the kernel lacks memory, this goes first
    _libc("unshare", 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000 | (0x10000000 if own else 0))
    if own:
        for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
            Path("/proc/self", name).write_text(text)
    # Root's processes are never counted: it becomes one of the users that systemd keeps for such ends.
    order["user"] = 65534 if own else 61184 + secrets.randbelow(4336)
    _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)         # when the caller ends
    if first := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 255)


def _files(order: dict) -> None:
    """Leave for a root in memory with Python's and the system's folders, read-only, and the directory, of a size."""
    if "user" not in order:
        raise PermissionError("needs the namespaces")
    root = directory = os.environ["HOME"]              # covered here, and left empty outside
    _libc("mount", None, b"/", None, 0x44000, None)    # private, recursively: the outside sees no mount
    _libc("mount", b"tmpfs", root.encode(), b"tmpfs", 0, b"size=1m,mode=755")
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    system = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/nix/store"]
    for path in [*system, *devices, sys.base_prefix, sys.prefix, *sys.path]:
        inside = root + path
        if os.path.exists(path) and not os.path.lexists(inside):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.mkdir(inside) if os.path.isdir(path) else Path(inside).touch()
            _libc("mount", path.encode(), inside.encode(), None, 0x5000, None)                 # bind, recursively
    os.makedirs(root + directory, exist_ok=True)
    os.mkdir(root + "/proc")
    _libc("mount", b"proc", f"{root}/proc".encode(), b"proc", 0xE, None)
    readonly = struct.pack("QQQQ", 0x3, 0, 0, 0)       # nor set-user-id
    _libc("syscall", 442, -100, root.encode(), 0x8000, readonly, len(readonly))                # mount_setattr
    sizes = f"size={FOLDER_MB}m,nr_inodes={FILES},mode=700,uid={order['user']},gid={order['user']}"
    _libc("mount", b"tmpfs", (root + directory).encode(), b"tmpfs", 0x6, sizes.encode())
    os.chroot(root)                                    # in a chroot the kernel makes no further user namespace
    os.chdir(directory)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(*[order["user"]] * 3)
        os.setresuid(*[order["user"]] * 3)


def _privileges(_) -> None:
    _libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _libc("prctl", 38, 1, 0, 0, 0)                     # no new privileges
    _libc("prctl", 4, 1, 0, 0, 0)                      # its own /proc entry is its own again


def _landlock(_) -> None:
    version = _libc("syscall", 444, None, 0, 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    handled = struct.pack("QQQ", files, 3, 3)[:8 if version < 4 else 16 if version < 6 else 24]     # and TCP, signals
    rules = _libc("syscall", 444, handled, len(handled), 0)
    for path, rights in (("/", 0b1101), ("/dev/null", 0b110 | 1 << 14), (os.environ["HOME"], files)):
        place = os.open(path, os.O_PATH)
        _libc("syscall", 445, rules, 1, struct.pack("=Qi", rights & files, place), 0)
        os.close(place)
    _libc("syscall", 446, rules, 0)
    os.close(rules)


def _limits(order: dict) -> None:
    limits = [(resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_CPU, int(order["timeout"]) + 2, 1),
              (resource.RLIMIT_FSIZE, FILE_MB * MEBIBYTE, MEBIBYTE), (resource.RLIMIT_NOFILE, 256, 0)]
    if sys.platform == "linux":
        limits += [(resource.RLIMIT_AS, order["memory_mb"] * MEBIBYTE, 64 * MEBIBYTE), (resource.RLIMIT_MSGQUEUE, 0, 0)]
    if "user" in order:                                # else all that the user runs would count
        limits.append((resource.RLIMIT_NPROC, PROCESSES, 0))
    for which, soft, room in limits:                   # infinity is -1
        hard = min(soft + room, resource.getrlimit(which)[1] % 2**64)
        resource.setrlimit(which, (min(soft, hard), hard))


LAYERS = {"namespaces": _namespaces, "files": _files, "privileges": _privileges, "landlock": _landlock,
          "limits": _limits}


def _child() -> None:
    """Put up the layers; then tell which failed, or fork the worker's parent, which may be killed, and the worker."""
    order, verdict, output, failed = json.load(sys.stdin), os.dup(1), os.dup(2), dict.fromkeys(LAYERS, "")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)                                      # from here on both streams are the code's output
    for name in order["layers"]:
        try:
            LAYERS[name](order)
        except OSError as error:
            if order["tests"] is not None:
                raise
            failed[name] = str(error)
    if order["tests"] is None:
        os.write(verdict, json.dumps(failed).encode())
        return
    Path(os.environ["HOME"], "solution.py").write_bytes(order["code"].encode("utf-8", "surrogatepass"))
    if parent := os.fork():
        _watch(parent, verdict, order)
    if worker := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
    # The order of evaluation is the point: `write` and the token lie on the stack before the code is loaded.
    os.write(verdict, _token(verdict) + _judge(order["tests"], output))
    os._exit(0)                                        # no exit handlers, no waiting for threads


def _watch(worker: int, verdict: int, order: dict) -> None:
    """Collect all that ends until the worker does, or until all processes together hold too much memory."""
    def leave(why):
        os.write(verdict, f"\n{why}\n".encode())
        os._exit(0)

    def weigh(*_):
        held = 0                                       # KiB
        for status in Path("/proc").glob("[1-9]*/status"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):                   # it has just ended
                held += sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+)", status.read_text(), re.M)))
        if held > 2 * order["memory_mb"] * 1024:       # twice, as pages that a fork shares are counted twice
            leave("memory")

    if "namespaces" in order["layers"]:
        _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)     # when the process above ends, and with it all in here
    if "files" in order["layers"]:                     # else /proc is everybody's
        signal.signal(signal.SIGALRM, weigh)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    while (ended := os.waitpid(-1, 0))[0] != worker:
        pass
    leave(os.waitstatus_to_exitcode(ended[1]))


# ── The worker: code and tests ─────────────────────────────────────────────────────────────────────────

def _token(verdict: int) -> bytes:
    token = secrets.token_hex().encode()
    os.write(verdict, token + b"\n")
    return token


def _judge(tests: str, output: int) -> bytes:
    """Run code and tests, write why they did not pass, and return the status, which follows the token."""
    sys.modules["pytest"] = _Names(raises=_raises, approx=_approx, mark=_Names(parametrize=_parametrize))
    sys.path.insert(0, os.environ["HOME"])             # as the caller spells it, who takes it out of tracebacks
    spec = importlib.util.find_spec("solution")
    solution = sys.modules["solution"] = importlib.util.module_from_spec(spec)
    sys.modules["__main__"], sys.modules["builtins"] = ModuleType("__main__"), ModuleType("builtins")
    solution.__builtins__ = vars(sys.modules["builtins"])                      # what the code sees, and may patch
    solution.__builtins__.update(vars(builtins))
    names, ran, loaded = _Tests(vars(solution)), set(), False
    run, process, leave, worker = _run, os.getpid, os._exit, os.getpid()       # whatever the code does to them
    try:
        statements = _compiled(tests, names, ran)
        spec.loader.exec_module(solution)
        loaded = True
        run(statements, names, ran)
        status, reason = ("passed", "") if ran else ("error", "no test ran: no assertion reached, no function test*\n")
    except BaseException as error:                     # SystemExit before the end of the tests is no pass either
        for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):                              # room to report in
            resource.setrlimit(which, (resource.getrlimit(which)[1],) * 2)
        failed = loaded and isinstance(error, AssertionError)
        status = "failed" if failed else "memory" if isinstance(error, MemoryError) else "error"
        told = traceback.TracebackException.from_exception(error, limit=1100)      # a million frames take minutes
        told.stack[:] = [frame for frame in told.stack if frame.filename not in (__file__, contextlib.__file__)
                         and not frame.filename.startswith("<frozen")]
        reason = "".join(told.format())
    if process() != worker:
        leave(1)                                       # what the code forked has no verdict
    os.write(output, reason[-KEPT:].encode("utf-8", "backslashreplace"))
    return f" {status}".encode()


class _Tests(dict):
    """The tests' names; beneath them the code's, as they are at the time, and builtins that the code cannot patch.

    apart: whether they are pytest's; plain tests share what they add (an import that the code forgot)."""

    def __init__(self, code: dict):
        super().__init__(__name__="tests", __builtins__=dict(vars(builtins)))
        self.code = code

    def __missing__(self, name):
        return self.code[name]


def _compiled(tests: str, names: _Tests, ran: set) -> list:
    """The statements, whose assertions tell `ran` that they were reached and compare only values that are honest."""
    linecache.cache["tests.py"] = (len(tests), None, tests.splitlines(True), "tests.py")       # for tracebacks
    tree, secret = ast.parse(tests, "tests.py"), secrets.token_hex()
    names["reached " + secret] = lambda value: (ran.add("assertion"), value)[1]
    names["honest " + secret] = _honest                # neither is an identifier, so neither is in the way

    def through(name, value):
        return ast.Call(ast.Name(f"{name} {secret}", ast.Load()), [value], [])

    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = through("reached", node.test)
        elif isinstance(node, ast.Compare) and {ast.Eq, ast.NotEq} & set(map(type, node.ops)):
            node.left, *node.comparators = [through("honest", value) for value in (node.left, *node.comparators)]
    names.apart = any(str(getattr(node, "name", "")).startswith("test") for node in tree.body)
    ast.fix_missing_locations(tree)
    return [compile(ast.Module([statement], []), "tests.py", "exec") for statement in tree.body]


def _honest(value):
    """The value; ends the run if it, or a member, equals things that have nothing in common."""
    plain = {int, float, str, bool, bytes, complex, type(None)}
    if type(value) in (list, tuple, set, frozenset, dict):
        members = [*value, *value.values()] if type(value) is dict else value
        for member in members if not set(map(type, members)) <= plain else ():
            _honest(member)
    elif type(value) not in plain:
        for other in (object(), secrets.randbits(99), secrets.token_hex(), [secrets.token_hex()]):
            with contextlib.suppress(Exception):       # == may refuse, or answer with an array
                if (value == other) is True:
                    raise SystemExit(f"a {type(value).__name__} that equals everything")
    return value


def _run(statements: list, names: _Tests, ran: set) -> None:
    """Run the statements, then each function named test*; the names of what ran are added to `ran`."""
    before = dict(names.code)
    for statement in statements:
        exec(statement, names)
        if not names.apart:                            # pytest's tests are a module of their own
            names.code.update({name: names[name] for name in names if name.isidentifier() and name not in names.code})
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


def _parametrize(names, rows, ids=None):         # noqa: ARG001 - tests name their cases, which nothing here shows
    keys = re.findall(r"\w+", names) if isinstance(names, str) else names
    rows = [(row,) if isinstance(names, str) and len(keys) == 1 else row for row in rows]
    return lambda test: setattr(test, "cases", [{**case, **dict(zip(keys, row, strict=True))}
                                                for case in getattr(test, "cases", [{}]) for row in rows]) or test


if __name__ == "__main__":
    _child()
