"""The inside of the sandbox: what `measures/sandbox.py` starts for one program and its tests.

Paper: nothing of it. A run pays for each import of this file, so there are few.

Three processes. The first stays outside the new process namespace, where the program can
neither see nor signal it. It watches time and memory. The second is process 1 inside: when it
ends, the kernel ends all others inside. The third runs the program and its tests, and writes
the caller's secret with the verdict to a socket.
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

__builtins__ = dict(vars(builtins))           # the program may patch the shared ones

REASON = 4000                                 # characters that a result keeps
MEBIBYTE = 1 << 20
FOLDER_MB = 64                                # size of the program's directory, in memory
FOLDER_FILES = 4096                           # number of files in it
SLACK = 2                                     # seconds for the start and the tests' imports
SOCKET_KB = 416                               # of kernel memory that a Unix socket may hold
ROOT = "/proc"                                # exists everywhere; the program's root covers it
SHARED = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/nix/store", "/dev/null", "/dev/zero",
          "/dev/full", "/dev/random", "/dev/urandom", sys.base_prefix, sys.prefix]
# AUDIT_ARCH; socket and socketpair; then the refused system calls: add_key, request_key,
# keyctl (keys outlive a process), ptrace, bpf, and those whose memory belongs to no process:
# memfd_create, memfd_secret, shmget, semget, msgget, io_uring_setup.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 41, 53, 248, 249, 250, 101, 321, 319, 447, 29, 64, 68, 425),
    "aarch64": (0xC00000B7, 198, 199, 217, 218, 219, 117, 280, 279, 447, 194, 190, 186, 425)}


def main():
    """Build the layers, run the program and its tests, and write how they ended."""
    order = marshal.load(sys.stdin.buffer)
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)                             # from here on both streams are the program's
    user = None if order["unsafe"] else _enter_namespaces()
    if user:
        if first := os.fork():
            _watch(first, order, verdict)
        _call("prctl", 1, 9)                  # SIGKILL when the process above ends
        _build_root(user, order["home"])
    if worker := os.fork():
        while (ended := os.waitpid(-1, 0))[0] != worker:
            pass
        os.write(verdict, b"\0%d" % os.waitstatus_to_exitcode(ended[1]))
        os._exit(0)
    os.chdir(order["home"])
    if user:
        _drop_privileges(user)
    _set_limits(order["memory_mb"], user)
    os.write(verdict, b"ready\n")
    # Python evaluates from left to right. While the program runs, the secret lies on the
    # interpreter's stack, and in no variable.
    os.write(verdict, order.pop("secret") + _judge(order))
    os._exit(0)                               # without exit handlers or waiting for threads


# ── The layers

def _call(name: str, *arguments):
    """A function of the C library. Raises OSError where it fails."""
    values = [x.encode() if isinstance(x, str) else x for x in arguments]
    values = [ctypes.c_long(x) if isinstance(x, int) else x for x in [*values, 0, 0, 0]]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*values) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)


def _write(path: str, text: str):
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _enter_namespaces() -> int:
    """New mounts, IPC, processes and network, and new users where need be: the user inside."""
    _call("prctl", 1, 9)                      # SIGKILL when the caller ends
    user = os.geteuid()
    group = os.getegid()
    with open("/proc/self/uid_map") as file:
        is_root = user == 0 and file.read().split()[2] != "1"
    _call("unshare", 0x68020000 if is_root else 0x78020000)
    if is_root:                               # root's processes are not counted: another user
        return 61184 + os.getpid() % 4336     # that systemd sets aside for this
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {user} 1")
    _write("/proc/self/gid_map", f"65534 {group} 1")
    return 65534


def _build_root(user: int, home: str):
    """A read-only root in memory with Python and the system, and one directory to write to."""
    home = ROOT + home
    _call("mount", "none", "/", "", 0x44000, "")           # private: nobody outside sees mounts
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
    read_only = struct.pack("QQQQ", 0x3, 0, 0, 0)          # and without set-user-id programs
    _call("syscall", 442, -100, ROOT, 0x8000, read_only, len(read_only))      # mount_setattr
    _call("mount", "tmpfs", home, "tmpfs", 0x6, f"size={FOLDER_MB}m,nr_inodes={FOLDER_FILES},"
          f"mode=700,uid={user},gid={user}")
    _call("mount", home, ROOT + "/dev/shm", "", 0x1000, "")    # multiprocessing's semaphores
    os.chroot(ROOT)                           # where the kernel allows no new user namespace


def _drop_privileges(user: int):
    """Give up all capabilities; refuse some system calls and socket families by seccomp."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"the system calls of {machine} are not known")
    architecture, socket, socketpair, *refused = SYSTEM_CALLS[machine]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _call("prctl", 38, 1)                     # no new privileges
    _call("prctl", 4, 1)                      # its entry in /proc belongs to itself again
    refuse = 0x06, 0, 0, 0x50001              # with EPERM
    # Calls of another architecture, and numbers from 2³⁰ on (x32), are refused as well.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), refuse,
             (0x20, 0, 0, 0), (0x35, 0, 1, 1 << 30), refuse]
    for number in refused:
        steps += (0x15, 0, 1, number), refuse
    # Families above AF_INET6, 10: netlink, vsock, the kernel's cryptography, …
    steps += [(0x15, 1, 0, socket), (0x15, 0, 3, socketpair), (0x20, 0, 0, 16),
              (0x25, 0, 1, 10), refuse, (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _call("prctl", 22, 2, struct.pack("HQ", len(steps), ctypes.addressof(code)))


def _set_limits(memory_mb: int, user: int | None):
    """Limits of each process; the CPU time's follows when the program begins."""
    limits = {resource.RLIMIT_FSIZE: 16 * MEBIBYTE, resource.RLIMIT_NOFILE: 256,
              resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory_mb * MEBIBYTE
    if user:                                  # else all processes of the caller would count
        limits[resource.RLIMIT_NPROC] = 64    # threads, too
    for which, limit in limits.items():
        limit = min(limit, resource.getrlimit(which)[1] % 2**64)      # infinity is -1
        resource.setrlimit(which, (limit, limit))


def _watch(first: int, order: dict, verdict: int):
    """Wait until all inside have ended, or end them at the limit of time or memory.

    Time is the CPU time of all processes, and the time in which none of them could run: not
    that in which they waited for a processor.
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
        # A quarter more than one process may have: a fork counts the pages it shares.
        if memory > 1280 * order["memory_mb"]:
            os.write(verdict, b"\0memory")
            break
        if ticks / 100 + idle > order["timeout"] + SLACK:
            os.write(verdict, b"\0timeout")
            break
    os._exit(0)


def _usage(process: str) -> tuple[int, bool, int]:
    """Of a process inside: 1/100 s of CPU time, whether it can run, KiB of memory."""
    try:
        with open(f"{ROOT}/proc/{process}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
        with open(f"{ROOT}/proc/{process}/status") as file:
            sizes = [line.split()[1] for line in file if line.startswith(("RssA", "RssS"))]
        if process == "1":                    # all have one network
            with open(f"{ROOT}/proc/1/net/unix") as file:
                sizes += [SOCKET_KB for _ in file]
    except OSError:                           # it has just ended
        return 0, False, 0
    return sum(map(int, numbers[10:14])), state == "R", sum(map(int, sizes))


# ── The program and its tests

def _judge(order: dict) -> bytes:
    """Run the program and its tests: a line with the status, then the reason."""
    getpid = os.getpid
    worker = getpid()
    reached = []                              # one item per assertion and test function
    is_loaded = False
    solution = type(sys)("solution")
    program = vars(solution)
    names = Names({" reached": reached.append, "__name__": "tests"})
    names.program = program
    names["__builtins__"] = program["__builtins__"] = vars(builtins)          # not this file's
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
            is_own = callable(value) and program.get(name) is not value
            if is_own and name.lower().startswith("test"):
                if value() is not None:       # a class, a coroutine, a forgotten assert
                    raise SystemExit(f"{name} is no plain function that returns None")
                reached.append(name)
        if not reached:
            raise SystemExit("no test ran: no assertion was reached, and no function test*")
        if not all(vars(owner)[name] is value for owner, name, value in functions):
            raise SystemExit("the program replaces a function that its tests use")
        status = "passed"
        reason = ""
    # Whatever is raised is a verdict, SystemExit too.
    except BaseException as error:
        import linecache
        import traceback
        linecache.cache["tests.py"] = 0, None, order["tests"].splitlines(True), ""
        is_failure = isinstance(error, AssertionError) or type(error).__name__ == "Failed"
        status = "failed" if is_loaded and is_failure else "error"    # Failed is pytest's
        error.__traceback__ = error.__traceback__.tb_next             # without this frame
        reason = "".join(traceback.format_exception(error, limit=1100))
    if getpid() != worker:
        os._exit(1)                           # a fork of the program has no verdict
    return f"{status}\n{reason[-REASON:]}".encode("utf-8", "backslashreplace")


class Names(dict):
    """The tests' names, and below them the program's, as they are at the time."""

    def __missing__(self, name):
        return self.program[name]


def _functions(names: dict) -> list[tuple]:
    """(owner, name, function) of builtins, of the tests' imported modules and their classes."""
    owners = [x for x in (builtins, *names.values()) if isinstance(x, (type(sys), type))]
    owners += [x for owner in owners for x in vars(owner).values() if isinstance(x, type)]
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items()
            if callable(value)]


class Pytest(type(sys)):
    """Stands for pytest until a test uses it, for most only import it, which takes long."""

    def __getattr__(self, name):
        del sys.modules["pytest"]
        return getattr(__import__("pytest"), name)
