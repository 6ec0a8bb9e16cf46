"""The inside of the sandbox: what `measures/sandbox.py` starts, for one program and its tests.

Paper: nothing of it. A fresh interpreter pays for every import at every run: they are few.

Three processes. The first, outside the new namespaces and so out of the program's sight and
reach, weighs what runs inside; all inside ends with the second; the third is the worker. It
sends a random token before it loads the program, and again with the verdict after the last
test. In between no name, frame, container or file holds the token: it lies on the stack of
the interpreter.
"""

import builtins
import ctypes
import marshal
import math
import os
import resource
import select
import struct
import sys
from time import process_time

__builtins__ = dict(vars(builtins))           # this file's own: the program may patch the rest

KEPT, MEBIBYTE = 4000, 1 << 20                # characters of output that a result keeps; bytes
PROCESSES, FILE_MB, FOLDER_MB, FILES = 64, 16, 64, 4096    # threads count too; the directory's
FAR = 5                                       # times the limit of CPU time: the wall clock's
ROOT = "/proc"                                # always there: the program's root covers it
SHARED = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/nix/store", "/dev/null", "/dev/zero",
          "/dev/full", "/dev/random", "/dev/urandom", sys.base_prefix, sys.prefix]
# The machine; add_key, request_key, keyctl (keys outlive a process), ptrace, and memfd_create,
# shmget (memory that no process is charged for).
REFUSED = {"x86_64": (0xC000003E, 248, 249, 250, 101, 319, 29),
           "aarch64": (0xC00000B7, 217, 218, 219, 117, 279, 194)}


def main():
    """Put up the layers, run the program and its tests, say how they ended."""
    order, verdict, output = marshal.load(sys.stdin.buffer), os.dup(1), os.dup(2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)                             # from here on both streams are the program's
    user = None if order["unsafe"] else _leave()
    if user:
        if first := os.fork():
            _weigh(first, order["memory_mb"], verdict)
        _libc("prctl", 1, 9)                  # killed when the process above ends
        _build_root(user)
    if worker := os.fork():
        while (ended := os.waitpid(-1, 0))[0] != worker:
            pass
        os.write(verdict, b"\n%d\n" % os.waitstatus_to_exitcode(ended[1]))
        os._exit(0)
    os.chdir(os.environ["HOME"])
    if user:
        _drop_privileges(user)
    limits = _limit(order["memory_mb"], user)
    # The order of evaluation is the point: `write` and the token lie on the stack by then.
    os.write(verdict, _token(verdict) + _judge(order, limits, output))
    os._exit(0)                               # no exit handlers, no waiting for threads


# ── The layers ────────────────────────────────────────────────────────────────────────────

def _libc(name: str, *arguments):
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    if call(*wide, *[ctypes.c_long(0)] * 3) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _write(path: str, text: str):
    with open(path, "w") as file:
        file.write(text)


def _leave() -> int:
    """Leave the caller's namespaces, if need be as owner of new users; the program's user."""
    _libc("prctl", 1, 9)                      # killed when the caller ends
    _write("/proc/self/oom_score_adj", "1000")            # where memory lacks, this goes first
    user, group = os.geteuid(), os.getegid()
    with open("/proc/self/uid_map") as file:
        root = user == 0 and file.read().split()[2] != "1"
    # Mounts, IPC, processes, network; users.
    _libc("unshare", 0x20000 | 0x8000000 | 0x20000000 | 0x40000000 | 0x10000000 * (not root))
    if root:                                  # is never counted; systemd keeps these for that
        return 61184 + os.getpid() % 4336
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {user} 1")
    _write("/proc/self/gid_map", f"65534 {group} 1")
    return 65534


def _mount(source: str, target: str, flags: int, options: str = ""):
    kind = source.encode()                    # which a bind mount does not read
    _libc("mount", kind, target.encode(), kind, flags, options.encode())


def _build_root(user: int):
    """A root in memory with Python and the system, read-only, and one directory."""
    home = ROOT + os.environ["HOME"]
    _mount("none", "/", 0x44000)              # private, recursively: the outside sees no mount
    _mount("tmpfs", ROOT, 0, "size=1m,mode=755")
    for path in [*SHARED, *sys.path]:
        inside = ROOT + path
        if os.path.exists(path) and not os.path.lexists(inside):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.mkdir(inside) if os.path.isdir(path) else _write(inside, "")
            _mount(path, inside, 0x5000)      # bind, recursively
    for path in home, ROOT + "/proc", ROOT + "/dev/shm":
        os.makedirs(path, exist_ok=True)
    _mount("proc", ROOT + "/proc", 0xE)
    closed = struct.pack("QQQQ", 0x3, 0, 0, 0)            # read-only, no set-user-id
    _libc("syscall", 442, -100, ROOT.encode(), 0x8000, closed, len(closed))    # mount_setattr
    owned = f"mode=700,uid={user},gid={user}"
    _mount("tmpfs", home, 0x6, f"size={FOLDER_MB}m,nr_inodes={FILES},{owned}")
    _mount(home, ROOT + "/dev/shm", 0x1000)   # multiprocessing's semaphores
    os.chroot(ROOT)                           # where the kernel makes no further user namespace


def _drop_privileges(user: int):
    """No capability, none to be had, and no call of REFUSED: a filter in the kernel's BPF."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _libc("prctl", 38, 1)                     # no new privileges
    _libc("prctl", 4, 1)                      # its own /proc entry is its own again
    machine, *numbers = REFUSED[os.uname().machine]
    refuse = 0x06, 0, 0, 0x50001              # with EPERM
    # Calls of another machine's kind, or numbers from 2³⁰ on (x32), are refused too.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), refuse,
             (0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), refuse]
    for number in numbers:
        steps += [(0x15, 0, 1, number), refuse]
    steps.append((0x06, 0, 0, 0x7FFF0000))    # allow
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _libc("prctl", 22, 2, struct.pack("HQ", len(steps), ctypes.addressof(code)))


def _limit(memory_mb: int, user: int | None) -> tuple:
    """Set the limits but time, an eighth below what a report on meeting them may use."""
    limits = {resource.RLIMIT_FSIZE: FILE_MB * MEBIBYTE, resource.RLIMIT_NOFILE: 256,
              resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_mb * MEBIBYTE
    if user:                                  # else all that the caller runs would count
        limits[resource.RLIMIT_NPROC] = PROCESSES
    for which, limit in limits.items():
        _set_limit(which, limit, limit // 8)
    return tuple(limits)


def _set_limit(which: int, soft: int, room: int):
    hard = min(soft + room, resource.getrlimit(which)[1] % 2**64)             # infinity is -1
    resource.setrlimit(which, (min(soft, hard), hard))


def _weigh(first: int, memory_mb: int, verdict: int):
    """Wait for the first process inside, or until all in there hold too much memory."""
    ended = os.pidfd_open(first)
    while not select.select([ended], [], [], 0.05)[0]:
        if not os.path.isdir(ROOT + "/proc"):             # under load it is still being built
            continue
        held = sum(map(_held, filter(str.isdigit, os.listdir(ROOT + "/proc"))))
        if held > 2 * memory_mb * 1024:       # twice, as pages that a fork shares count twice
            os.write(verdict, b"\nmemory\n")
            break
    os._exit(0)


def _held(process: str) -> int:
    """KiB"""
    try:
        with open(f"{ROOT}/proc/{process}/status") as file:
            lines = [line for line in file if line.startswith(("RssAnon", "RssShmem"))]
    except (FileNotFoundError, ProcessLookupError):       # it has just ended
        return 0
    return sum(int(line.split()[1]) for line in lines)


# ── The worker: program and tests ─────────────────────────────────────────────────────────

def _token(verdict: int) -> bytes:
    token = os.urandom(32).hex().encode()
    os.write(verdict, token + b"\n")
    return token


def _judge(order: dict, limits: tuple, output: int) -> bytes:
    """Run program and tests, write why they did not pass; the status, to follow the token."""
    home, solution, worker = os.environ["HOME"], type(sys)("solution"), os.getpid()
    path, ran, loaded = f"{home}/solution.py", set(), False
    statements = order["statements"]          # what is in a dict can be changed
    names = _Tests({" reached": lambda value: (ran.add("assertion"), value)[1],
                    " plain": _plain, "__name__": "tests",
                    "__builtins__": dict(vars(builtins))})
    names.program = vars(solution)
    with open(path, "wb") as file:
        file.write(order["code"])
    sys.path[0] = home
    names.program.update(__file__=path, __builtins__=vars(builtins))
    sys.modules |= {"pytest": _Pytest, "solution": solution}
    del sys.modules["cell"]
    try:
        exec(order["imports"], names)
        seconds = math.ceil(process_time() + order["timeout"])    # what tests import is apart
        _set_limit(resource.RLIMIT_CPU, seconds, FAR * seconds)
        exec(compile(order["code"], path, "exec"), names.program)
        loaded = True
        _run(statements, names, ran)
        status = "passed" if ran else "error"
        reason = "" if ran else "no test ran: no assertion reached, no function test*\n"
    # Whatever the program raises is a verdict, SystemExit before the end of the tests too.
    except BaseException as error:
        for which in limits:
            resource.setrlimit(which, (resource.getrlimit(which)[1],) * 2)
        reason = _explain(error, order["tests"])
        status = "failed" if loaded and isinstance(error, AssertionError) else "error"
    if os.getpid() != worker:
        os._exit(1)                           # what the program forked has no verdict
    os.write(output, reason[-KEPT:].encode("utf-8", "backslashreplace"))
    return f" {status}".encode()


def _explain(error: BaseException, tests: str) -> str:
    """The traceback without this file's frames."""
    import linecache
    import traceback
    linecache.cache["tests.py"] = len(tests), None, tests.splitlines(True), "tests.py"
    told = traceback.TracebackException.from_exception(error, limit=1100)     # of a million
    told.stack[:] = [frame for frame in told.stack if frame.filename != __file__]
    return "".join(told.format())


class _Tests(dict):
    """The tests' names and builtins; beneath them the program's, as they are at the time."""

    def __missing__(self, name):
        return self.program[name]


def _run(statements, names: _Tests, ran: set):
    """Run the tests' code, then each function named test*; what ran is added to `ran`."""
    exec(statements, names)
    for name, value in tuple(names.items()):
        ours = callable(value) and names.program.get(name) is not value
        if ours and name.lower().startswith("test"):
            if value() is not None:           # a class, a coroutine, a forgotten assert
                raise SystemExit(f"{name} is no plain function that returns None: not run")
            ran.add(name)


# ── Values that tests compare ─────────────────────────────────────────────────────────────

def _plain(value):
    """The value in exact built-in types; an object of another Python class, sealed."""
    kind = type(value)
    base = next((base for base in BASES if issubclass(kind, base)), None)
    if base in (int, float, complex):
        return base.__pos__(value)
    if base in (str, bytes):
        return base.__getitem__(value, slice(None))
    if base is dict:
        return {_plain(key): _plain(held) for key, held in dict.items(value)}
    if base:
        return base(map(_plain, base.__iter__(value)))
    made_in_c = kind.__flags__ & 1 << 8
    return value if made_in_c or kind is _Near else _Sealed(value)


class _Sealed:
    """An object that only one of its own class equals or orders."""
    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return hash(self.value)

    def __eq__(self, other):
        return _alike(self, other) and self.value == other.value

    def __lt__(self, other):
        return _alike(self, other) and self.value < other.value

    def __le__(self, other):
        return _alike(self, other) and self.value <= other.value


def _alike(one, other) -> bool:
    return type(other) is _Sealed and type(one.value) is type(other.value)


# ── A stand-in for pytest, installed or not ───────────────────────────────────────────────

class _Raises:
    def __init__(self, expected, *, match=""):
        self.expected, self.match = expected, match

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        import re
        assert kind, f"did not raise {self.expected}"
        self.type, self.value = kind, error
        if not issubclass(kind, self.expected):
            return False
        assert re.search(self.match, str(error)), f"{error!r} does not match {self.match!r}"
        return True


class _Near:
    """pytest.approx of a number."""
    def __init__(self, expected, rel=None, abs=None):
        self.expected = expected
        relative = (1e-6 if abs is None else 0) if rel is None else rel
        self.room = max(relative * math.fabs(expected), 1e-12 if abs is None else abs)

    def __eq__(self, actual):
        return math.isclose(actual, self.expected, rel_tol=0, abs_tol=self.room)


class _Pytest:
    raises, approx = _Raises, _Near


BASES = int, float, complex, str, bytes, list, tuple, set, frozenset, dict
