"""The child process of `measures/sandbox.py`, which runs one program and its tests.

Paper: not described. Every run pays for the imports of this file, so it has few.

There are three processes. The first stays outside the new process namespace, where the program
can neither see nor signal it. It watches time and memory. The second is process 1 of the
namespace: when it ends, the kernel kills all other processes inside. The third runs the program
and its tests, and writes the caller's secret and the verdict to a socket.
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
import time

__builtins__ = dict(vars(builtins))           # a copy, because the program may patch builtins

REASON = 4000                                 # maximum length of a result's text in characters
FOLDER_MB = 64                                # size of the program's directory, in memory
SLACK = 2                                     # seconds for the start and the tests' imports
SOCKET_KB = 416                               # KiB of kernel memory that a Unix socket may hold
ROOT = "/proc"                                # the new root is mounted on this directory
SHARED = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/nix/store", "/dev/null", "/dev/zero",
          "/dev/full", "/dev/random", "/dev/urandom", sys.base_prefix, sys.prefix]
# AUDIT_ARCH; socket and socketpair; then the refused system calls. These are add_key,
# request_key and keyctl (keys outlive a process), ptrace, bpf, and the calls that allocate
# memory outside any process: memfd_create, memfd_secret, shmget, semget, msgget and
# io_uring_setup.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 41, 53, 248, 249, 250, 101, 321, 319, 447, 29, 64, 68, 425),
    "aarch64": (0xC00000B7, 198, 199, 217, 218, 219, 117, 280, 279, 447, 194, 190, 186, 425)}


def main():
    """Set up the sandbox, run the program and its tests, and write the result."""
    order = marshal.load(sys.stdin.buffer)
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)                             # from now on, stdout also goes to stderr
    user = None if order["unsafe"] else _enter_namespaces()
    if user:
        if first := os.fork():
            _watch(first, order, verdict)
        _call("prctl", 1, 9)                  # SIGKILL when the parent process ends
        _build_root(user, order["home"])
    if worker := os.fork():
        process = None
        while process != worker:
            process, status = os.waitpid(-1, 0)
        os.write(verdict, b"\0%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.chdir(order["home"])
    if user:
        _drop_privileges(user)
    _set_limits(order["memory_mb"], user)
    os.write(verdict, b"ready\n")
    # Python evaluates from left to right. So while the program runs, the secret is only on the
    # interpreter's stack and in no variable.
    os.write(verdict, order.pop("secret") + _judge(order))
    os._exit(0)                               # skips exit handlers and waits for no thread


# ── The layers of the sandbox

def _call(name: str, *arguments):
    """Call a function of the C library. Raises OSError if it fails."""
    values = [ctypes.c_long(x) if isinstance(x, int) else
              x.encode() if isinstance(x, str) else x for x in (*arguments, 0, 0, 0)]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*values) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)


def _read(path: str) -> str:
    with open(path, errors="replace") as file:             # a process may have any name
        return file.read()


def _write(path: str, text: str):
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _enter_namespaces() -> int:
    """Enter new namespaces; returns the user id inside.

    The namespaces are those of mounts, IPC, processes and network. A caller other than root
    also needs a new user namespace.
    """
    _call("prctl", 1, 9)                      # SIGKILL when the caller ends
    user = os.geteuid()
    group = os.getegid()
    is_root = user == 0 and _read("/proc/self/uid_map").split()[2] != "1"
    _call("unshare", 0x68020000 if is_root else 0x78020000)
    if is_root:
        # The limit of processes does not apply to root. So the program gets a user id from a
        # range that systemd reserves for such users.
        return 61184 + os.getpid() % 4336
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {user} 1")
    _write("/proc/self/gid_map", f"65534 {group} 1")
    return 65534


def _build_root(user: int, home: str):
    """Mount a read-only root with Python and the system, and one writable directory."""
    home = ROOT + home
    _call("mount", "none", "/", "", 0x44000)           # private: not visible outside
    _call("mount", "tmpfs", ROOT, "tmpfs", 0, "size=1m,mode=755")
    for path in [*SHARED, *sys.path]:
        inside = ROOT + path
        if os.path.exists(path) and not os.path.lexists(inside):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.mkdir(inside) if os.path.isdir(path) else _write(inside, "")
            _call("mount", path, inside, "", 0x5000)   # bind, with the mounts below it
    for path in home, ROOT + "/proc", ROOT + "/dev/shm":
        os.makedirs(path, exist_ok=True)
    _call("mount", "proc", ROOT + "/proc", "proc", 0xE)
    read_only = struct.pack("QQQQ", 0x3, 0, 0, 0)          # read-only, without set-user-id
    _call("syscall", 442, -100, ROOT, 0x8000, read_only, len(read_only))      # mount_setattr
    _call("mount", "tmpfs", home, "tmpfs", 0x6, f"size={FOLDER_MB}m,nr_inodes=4096,"
          f"mode=700,uid={user},gid={user}")
    _call("mount", home, ROOT + "/dev/shm", "", 0x1000)    # multiprocessing's semaphores
    os.chroot(ROOT)                           # the kernel refuses new user namespaces in it


def _drop_privileges(user: int):
    """Drop all capabilities, and refuse some system calls and socket families by seccomp."""
    architecture, socket, socketpair, *refused = SYSTEM_CALLS[os.uname().machine]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)                       # by root, also the real and the saved id
        os.setuid(user)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", 38, 1)                     # no new privileges
    _call("prctl", 4, 1)                      # the process owns its entry in /proc again
    refuse = 0x06, 0, 0, 0x50001              # return EPERM
    # Calls of another architecture and numbers from 2³⁰ on (x32) are refused, too.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), refuse,
             (0x20, 0, 0, 0), (0x35, 0, 1, 1 << 30), refuse]
    for number in refused:
        steps += (0x15, 0, 1, number), refuse
    # Socket families above AF_INET6 (10) are refused: netlink, vsock, kernel cryptography, …
    steps += [(0x15, 1, 0, socket), (0x15, 0, 3, socketpair), (0x20, 0, 0, 16),
              (0x25, 0, 1, 10), refuse, (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _call("prctl", 22, 2, struct.pack("HQ", len(steps), ctypes.addressof(code)))


def _set_limits(memory_mb: int, user: int | None):
    """Set the limits of each process. `_judge` sets the CPU time when the program begins."""
    limits = {resource.RLIMIT_FSIZE: 16 << 20, resource.RLIMIT_NOFILE: 256,
              resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_mb << 20
    if user:                                  # else all processes of the caller would count
        limits[resource.RLIMIT_NPROC] = 64    # processes and threads
    for limited, limit in limits.items():
        limit = min(limit, resource.getrlimit(limited)[1] % 2**64)    # infinity is -1
        resource.setrlimit(limited, (limit, limit))


def _watch(first: int, order: dict, verdict: int):
    """Wait until all processes inside have ended, or end them at the limit of time or memory.

    The limited time is the CPU time of all processes plus the time in which all of them sleep.
    Waiting for a processor does not count.
    """
    handle = os.pidfd_open(first)
    idle = 0.0                                # seconds
    last_ticks = 0                            # 1/100 s of CPU time
    last_time = time.monotonic()
    while not select.select([handle], [], [], 0.01)[0]:
        if not os.path.exists(ROOT + "/proc/1"):           # the root is still being built
            continue
        usage = map(_usage, filter(str.isdigit, os.listdir(ROOT + "/proc")))
        ticks, runnable, memory = map(sum, zip(*usage))
        time_now = time.monotonic()
        if ticks == last_ticks and not runnable:
            idle += time_now - last_time
        last_ticks = ticks
        last_time = time_now
        # The limit is 25 % above that of one process, because a fork counts shared pages again.
        if memory > 1280 * order["memory_mb"]:
            os.write(verdict, b"\0memory")
            break
        if ticks / 100 + idle > order["timeout"] + SLACK:
            os.write(verdict, b"\0timeout")
            break
    os._exit(0)


def _usage(process: str) -> tuple[int, bool, int]:
    """(CPU time in 1/100 s, whether it is runnable, memory in KiB) of a process in the cell."""
    try:
        state, *numbers = _read(f"{ROOT}/proc/{process}/stat").rpartition(")")[2].split()
        sizes = [line.split()[1] for line in _read(f"{ROOT}/proc/{process}/status").splitlines()
                 if line.startswith(("RssA", "RssS"))]
        if process == "1":                    # all processes share one network: count it once
            sizes += [SOCKET_KB] * _read(f"{ROOT}/proc/1/net/unix").count("\n")
    except OSError:                           # the process has just ended
        return 0, False, 0
    return sum(map(int, numbers[10:14])), state == "R", sum(map(int, sizes))


# ── The program and its tests

def _judge(order: dict) -> bytes:
    """Run the program and its tests; returns a line with the status, followed by the reason."""
    getpid = os.getpid
    worker = getpid()
    reached = []                              # an item per reached assertion or test function
    functions = []
    status = "not run"                        # until the program begins
    solution = sys.modules["solution"] = type(sys)("solution")
    program = vars(solution)
    path = program["__file__"] = f"{order['home']}/solution.py"
    _write(path, order["code"])
    sys.path[0] = order["home"]
    del sys.modules["cell"]

    class Names(dict):
        """The tests' global names. A name that they lack is looked up in the program."""

        def __missing__(self, name):
            return program[name]

    def load():
        """Run the program, then the statements of the tests; returns what the tests define."""
        nonlocal functions, status
        functions = _functions()
        seconds = math.ceil(time.process_time() + order["timeout"])   # without the imports
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + SLACK + 1))
        status = "error"
        exec(compile(order["code"], path, "exec"), program)
        status = "failed"
        exec(order["statements"], names)
        return {name: names[name] for name in order["definitions"]}

    names = Names({" reached": reached.append, "__name__": "tests"})
    names["__builtins__"] = program["__builtins__"] = vars(builtins)     # not the copy above
    try:
        exec(order["imports"], names)
        if order["runner"] == "pytest":
            reached = _run_pytest(load)
        else:
            for name, value in load().items():
                if name.lower().startswith("test"):
                    if value() is not None:   # a generator or a forgotten assert
                        raise SystemExit(f"{name} does not return None")
                    reached.append(name)
        if not reached:
            raise SystemExit("no test and no assertion ran")
        assert all(owner[name] is value and getattr(value, "__code__", 0) == code
                   for owner, name, value, code in functions), \
            "the program replaced a function"
        status = "passed"
        reason = ""
    # Every exception is a verdict, also SystemExit.
    except BaseException as error:
        import linecache
        import traceback
        linecache.cache["tests.py"] = 0, None, order["tests"].splitlines(True), ""
        trace = sys.exc_info()[2]             # without the frames of this file and of pytest
        while trace and trace.tb_frame.f_code.co_filename not in ("tests.py", path):
            trace = trace.tb_next
        is_failure = trace and type(error).__name__ == "Failed"       # pytest raises Failed
        if status == "failed" and not (is_failure or isinstance(error, AssertionError)):
            # An error without a frame of the tests or of the program is about the test file.
            status = "error" if trace else "not run"
        reason = "".join(traceback.format_exception(type(error), error, trace, limit=1100))
    if getpid() != worker:
        os._exit(1)                           # a fork of the program must not write a verdict
    return f"{status}\n{reason[-REASON:]}".encode("utf-8", "backslashreplace")


def _run_pytest(load) -> bool:
    """Run the tests under pytest; returns whether a test passed, or raises the first error.

    load: runs the program when pytest has started, so that it cannot configure pytest. A test
    may be skipped or fail only if it has such a mark, because the program could skip it.
    """
    import pytest
    passed = []
    errors = []

    def note(report):
        """Note the phase of a test that passed, or that a test was skipped without a mark."""
        excuses = {"xfail"} if report.when == "call" else {"xfail", "skip", "skipif"}
        if report.passed:
            passed.append(report.when)
        elif report.skipped and excuses.isdisjoint(report.keywords):
            errors.append(AssertionError(f"{report.nodeid} was skipped"))

    class Plugin:
        """Hooks that pytest calls. It takes the tests from a class as it does from a module."""
        pytest_cmdline_main = lambda: sys.modules.update(tests=type("tests", (), load()))
        pytest_collection_finish = lambda: sys.modules.pop("tests")   # hidden from the program
        pytest_keyboard_interrupt = lambda excinfo: errors.append(excinfo.value)
        pytest_exception_interact = lambda call: errors.append(call.excinfo.value)
        pytest_runtest_logreport = note

    _write("tests.py", "")                    # empty, because the program could read it
    code = pytest.main(
        "tests.py -x -s -p no:terminal -p no:cacheprovider -p no:legacypath -p no:assertion "
        "--noconftest -c /dev/null".split(), [Plugin])
    if errors:
        raise errors[0]
    assert code in (0, 5), f"pytest ended with exit status {code}"     # 5: there are no tests
    return "call" in passed


def _functions() -> list:
    """(owner's names, name, function, its code) in all imported modules and their classes."""
    owners = [*filter(None, sys.modules.values())]
    owners += {x for owner in owners for x in vars(owner).values() if isinstance(x, type)}
    return [(vars(owner), name, value, getattr(value, "__code__", 0))
            for owner in owners for name, value in vars(owner).items() if callable(value)]
