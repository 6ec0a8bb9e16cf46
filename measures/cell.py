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
MEBIBYTE = 1 << 20
FOLDER_MB = 64                                # size of the program's directory, in memory
FOLDER_FILES = 4096                           # maximum number of files in it
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
    values = [x.encode() if isinstance(x, str) else x for x in arguments]
    values = [ctypes.c_long(x) if isinstance(x, int) else x for x in [*values, 0, 0, 0]]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*values) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)


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
    with open("/proc/self/uid_map") as file:
        is_root = user == 0 and file.read().split()[2] != "1"
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
    _call("mount", "none", "/", "", 0x44000, "")           # private: not visible outside
    _call("mount", "tmpfs", ROOT, "tmpfs", 0, "size=1m,mode=755")
    for path in [*SHARED, *sys.path]:
        inside = ROOT + path
        if os.path.exists(path) and not os.path.lexists(inside):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.mkdir(inside) if os.path.isdir(path) else _write(inside, "")
            _call("mount", path, inside, "", 0x5000, "")   # bind, with the mounts below it
    for path in home, ROOT + "/proc", ROOT + "/dev/shm":
        os.makedirs(path, exist_ok=True)
    _call("mount", "proc", ROOT + "/proc", "proc", 0xE, "")
    read_only = struct.pack("QQQQ", 0x3, 0, 0, 0)          # read-only, without set-user-id
    _call("syscall", 442, -100, ROOT, 0x8000, read_only, len(read_only))      # mount_setattr
    _call("mount", "tmpfs", home, "tmpfs", 0x6, f"size={FOLDER_MB}m,nr_inodes={FOLDER_FILES},"
          f"mode=700,uid={user},gid={user}")
    _call("mount", home, ROOT + "/dev/shm", "", 0x1000, "")    # multiprocessing's semaphores
    os.chroot(ROOT)                           # the kernel refuses new user namespaces in it


def _drop_privileges(user: int):
    """Drop all capabilities, and refuse some system calls and socket families by seccomp."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"the numbers of the system calls of {machine} are not known")
    architecture, socket, socketpair, *refused = SYSTEM_CALLS[machine]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
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
    limits = {resource.RLIMIT_FSIZE: 16 * MEBIBYTE, resource.RLIMIT_NOFILE: 256,
              resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_mb * MEBIBYTE
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
        with open(f"{ROOT}/proc/{process}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
        with open(f"{ROOT}/proc/{process}/status") as file:
            sizes = [line.split()[1] for line in file if line.startswith(("RssA", "RssS"))]
        if process == "1":                    # all processes share one network: count it once
            with open(f"{ROOT}/proc/1/net/unix") as file:
                sizes += [SOCKET_KB for _ in file]
    except OSError:                           # the process has just ended
        return 0, False, 0
    return sum(map(int, numbers[10:14])), state == "R", sum(map(int, sizes))


# ── The program and its tests

def _judge(order: dict) -> bytes:
    """Run the program and its tests; returns a line with the status, followed by the reason."""
    getpid = os.getpid
    worker = getpid()
    reached = []                              # an item per reached assertion or test function
    is_loaded = False
    solution = type(sys)("solution")
    program = vars(solution)
    names = Names({" reached": reached.append, "__name__": "tests"})
    names.program = program
    names["__builtins__"] = program["__builtins__"] = vars(builtins)     # not the copy above
    program["__file__"] = f"{order['home']}/solution.py"
    _write(program["__file__"], order["code"])
    sys.path[0] = order["home"]
    sys.modules |= {"pytest": Pytest("pytest"), "solution": solution}
    del sys.modules["cell"]
    try:
        exec(order["imports"], names)
        functions = _functions(names)
        seconds = math.ceil(time.process_time() + order["timeout"])   # without the imports
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + SLACK + 1))
        exec(compile(order["code"], program["__file__"], "exec"), program)
        is_loaded = True
        exec(order["statements"], names)
        for name, value in tuple(names.items()):
            is_from_tests = callable(value) and program.get(name) is not value
            if is_from_tests and name.lower().startswith("test"):
                if value() is not None:       # a class, a coroutine or a forgotten assert
                    raise SystemExit(f"{name} is not a plain function that returns None")
                reached.append(name)
        if not reached:
            raise SystemExit("no test ran: there is no function test*, and no assertion ran")
        if not all(vars(owner)[name] is value for owner, name, value in functions):
            raise SystemExit("the program replaced a function that its tests may use")
        status = "passed"
        reason = ""
    # Every exception is a verdict, also SystemExit.
    except BaseException as error:
        import linecache
        import traceback
        linecache.cache["tests.py"] = 0, None, order["tests"].splitlines(True), ""
        is_failure = isinstance(error, AssertionError) or type(error).__name__ == "Failed"
        status = "failed" if is_loaded and is_failure else "error"    # pytest raises Failed
        error.__traceback__ = error.__traceback__.tb_next             # without this frame
        reason = "".join(traceback.format_exception(error, limit=1100))
    if getpid() != worker:
        os._exit(1)                           # a fork of the program must not write a verdict
    return f"{status}\n{reason[-REASON:]}".encode("utf-8", "backslashreplace")


class Names(dict):
    """The tests' global names. A name that they lack is looked up in the program."""

    def __missing__(self, name):
        return self.program[name]


def _functions(names: dict) -> list[tuple]:
    """(owner, name, function) for builtins, the modules that the tests import, and classes."""
    owners = [x for x in (builtins, *names.values()) if isinstance(x, (type(sys), type))]
    owners += [x for owner in owners for x in vars(owner).values() if isinstance(x, type)]
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items()
            if callable(value)]


class Pytest(type(sys)):
    """Placeholder that imports pytest on first use. Most tests import it but never use it."""

    def __getattr__(self, name):
        del sys.modules["pytest"]
        return getattr(__import__("pytest"), name)
