"""The warm process of a sandbox: it forks a child for each program, locks it in, watches it, and reports.

Run by sandbox.py with a bare interpreter; imports nothing but the standard library. What holds a program, from the
weakest to the strongest: it is Python in a process of its own, without our environment variables or descriptors; limits
of the kernel on memory, processor time, file size and open files; a supervisor that kills it at the deadline; and on
Linux, where limits do not bind root and leave sockets open,

    Landlock    files beneath its own folder, no others; no TCP; no signals to others; no new folders, links or devices
    seccomp     a list of the system calls that computing needs; every other one fails with EPERM: processes, threads,
                sockets, signals, mounts, tracing, permissions and owners of files, the clock, the limits themselves
    chroot      as root: to the program there is no other folder, and it goes on as the user nobody

Nothing rests on what Python forbids: code that reaches ctypes or a frame of this file has reached nothing.
"""

import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import platform
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback

# A program cannot read the standard library from the disk: what it may import is loaded beforehand.
MODULES = """abc array base64 binascii bisect calendar cmath collections collections.abc contextlib copy csv dataclasses
datetime decimal difflib enum fractions functools hashlib heapq html io itertools json keyword math numbers operator os
pprint queue random re statistics string struct sys textwrap time traceback types typing unicodedata uuid zlib _strptime
encodings.ascii encodings.latin_1 encodings.utf_8 encodings.utf_16 encodings.idna""".split()

NOBODY = 65534
MAX_RESULTS = 1 << 20  # bytes of the values that a program returns
MAX_FILES = 100
POLL = 0.02  # seconds between two looks at the program's folder


def lock_in(folder: str, seconds: float, memory: int, file_size: int) -> list[str]:
    """Give up everything that a program does not need. Returns what holds it: ["limits", "landlock", ...]."""
    guards = ["limits"]
    limits = {"RLIMIT_AS": memory, "RLIMIT_CPU": int(seconds) + 1, "RLIMIT_FSIZE": file_size, "RLIMIT_NOFILE": 16,
              "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):  # macOS has no limit on memory
            resource.setrlimit(getattr(resource, name), (limit, limit))
    if sys.platform != "linux":
        return guards
    libc = ctypes.CDLL(None, use_errno=True)
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a root without the right to it, in a container
            os.chroot(folder)
            os.chdir("/")
            guards.append("chroot")
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            guards.append("nobody")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # here: another user's process has lost it again
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock(libc, inside):
        guards.append("landlock")
    os.close(inside)
    if seccomp(libc):
        guards.append("seccomp")
    return guards


# ---- Landlock (Linux 5.13; include/uapi/linux/landlock.h) ----

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
RIGHTS = ("execute write_file read_file read_dir remove_dir remove_file make_char make_dir make_reg make_sock "
          "make_fifo make_block make_sym refer truncate ioctl_dev").split()  # bit i of an access mask
KNOWN = (0, 13, 14, 15, 15, 16)  # how many of them version 0, 1, ... of the interface knows; later ones all
GRANTED = ("write_file", "read_file", "read_dir", "remove_file", "make_reg", "truncate")


def landlock(libc, inside: int) -> bool:
    """Forbid all files but those beneath the open folder `inside`, and TCP and signals where the kernel can."""
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    known = RIGHTS[: KNOWN[min(version, 5)]]
    handled = struct.pack("QQQ", (1 << len(known)) - 1, 3, 3)  # files; bind and connect; abstract sockets and signals
    ruleset = libc.syscall(CREATE_RULESET, handled, 8 if version < 4 else 16 if version < 6 else 24, 0)
    rule = struct.pack("=Qi", sum(1 << known.index(name) for name in GRANTED if name in known), inside)
    done = (ruleset >= 0 and libc.syscall(ADD_RULE, ruleset, 1, rule, 0) == 0
            and libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)
    if ruleset >= 0:
        os.close(ruleset)
    return done


# ---- seccomp (Linux 3.5; include/uapi/linux/seccomp.h, filter.h) ----

# What computing needs: name, number on x86_64 and on aarch64 (-1: it has none).
CALLS = """read 0 63, write 1 64, open 2 -1, close 3 57, stat 4 -1, fstat 5 80, lstat 6 -1, poll 7 -1, lseek 8 62,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -1, select 23 -1, sched_yield 24 124,
mremap 25 216, madvise 28 233, dup 32 23, dup2 33 -1, nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160,
fsync 74 82, ftruncate 77 46, getcwd 79 17, rename 82 -1, unlink 87 -1, readlink 89 -1, gettimeofday 96 169,
getrusage 98 165, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173,
sigaltstack 131 132, gettid 186 178, time 201 -1, futex 202 98, sched_getaffinity 204 123, getdents64 217 61,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
openat 257 56, newfstatat 262 79, unlinkat 263 35, renameat 264 38, readlinkat 267 78, faccessat 269 48,
pselect6 270 72, ppoll 271 73, set_robust_list 273 99, dup3 292 24, renameat2 316 276, getrandom 318 278, statx 332 291,
rseq 334 293"""
# With one argument (by its place) among these values only: fcntl and ioctl could otherwise have signals sent.
GUARDED = {"fcntl": (72, 25, 1, (0, 1, 2, 3, 1030)),  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
           "ioctl": (16, 29, 1, (0x5401, 0x5450, 0x5451))}  # TCGETS, FIONCLEX, FIOCLEX
# Memory of its own alone (MAP_ANONYMOUS among the flags): a mapped file that is deleted fills the disk, and is neither
# in the folder nor open.
MMAP, FLAGS, MAP_ANONYMOUS = (9, 222), 3, 0x20
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
LOAD, JUMP_IF_EQUAL, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x45, 0x06


def seccomp(libc) -> bool:
    """Install the filter: from here on every other system call fails."""
    if platform.machine() not in ARCHITECTURES:
        return False
    program = filter_program(*ARCHITECTURES[platform.machine()])
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    return libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0


def filter_program(column: int, architecture: int) -> list[tuple[int, int, int, int]]:
    """The filter as lines (operation, jump if so, jump if not, value). It reads the number at byte 0, the architecture
    at 4 (calls of another one have other numbers), the arguments from 16 on, 8 bytes each."""
    lines = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for entry in CALLS.replace("\n", " ").split(","):
        number = int(entry.split()[1 + column])
        if number >= 0:
            lines += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for *numbers, place, values in GUARDED.values():
        lines += [(JUMP_IF_EQUAL, 0, 2 + 2 * len(values), numbers[column]), (LOAD, 0, 0, 16 + 8 * place)]
        for value in values:
            lines += [(JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
        lines += [(RETURN, 0, 0, EPERM)]
    lines += [(JUMP_IF_EQUAL, 0, 4, MMAP[column]), (LOAD, 0, 0, 16 + 8 * FLAGS), (JUMP_IF_SET, 0, 1, MAP_ANONYMOUS),
              (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
    return [*lines, (RETURN, 0, 0, EPERM)]


# ---- the child: one program ----

def become_program(request: dict, folder: str, output: int, results: int, supervisor: int) -> None:
    """Never returns. Descriptors that stay open: 0 empty, 1 and 2 the output, 3 the values."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        results = os.dup(results)  # away from 0 .. 3
        for source, target in ((nothing, 0), (output, 1), (output, 2), (results, 3)):
            os.dup2(source, target)
        os.closerange(4, 256)
        sys.stdin = io.StringIO(request["stdin"])
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", errors="replace",
                                                   write_through=True)
        guards = lock_in(folder, request["seconds"], request["memory"], request["file_size"])
        if os.getppid() != supervisor:  # it went before its end would have been ours
            return
        if request["code"] is None:
            os.write(3, json.dumps(guards).encode())
            code = 0
        else:
            code = execute(request["code"], request["function"], request["inputs"])
    finally:
        os._exit(code)


def execute(code: str, function: str, inputs: list) -> int:
    """Run the program; then call its `function` with each of `inputs`, and write each value down at once.

    What the values should be is not known here, so that no program can look it up.
    """
    linecache.cache["<code>"] = (len(code), None, code.splitlines(True), "<code>")
    space = {"__name__": "__main__", "__builtins__": builtins}
    random.seed(0)  # the same numbers in every run; a fork would draw others
    dumps, write = json.dumps, os.write
    try:
        exec(compile(code, "<code>", "exec"), space)
        for arguments in inputs:
            try:
                line = dumps({"value": space[function](*arguments)})
            except Exception as error:
                line = dumps({"error": describe(error)})
            write(3, line.encode() + b"\n")
    except SystemExit as error:
        return error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        write(1, (describe(error) + "\n").encode("utf-8", "replace"))
        return 1
    return 0


def describe(error: BaseException) -> str:
    """'ZeroDivisionError: division by zero, line 3'; for a policy a traceback is long."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    return text[:300] + (f", line {lines[-1]}" if lines else "")


# ---- the supervisor ----

def supervise(request: dict, base: str, requests: int) -> dict:
    """Run one program in a child, and say what became of it. It ends with the pipe of the requests."""
    folder = tempfile.mkdtemp(dir=base)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    began = time.monotonic()
    (out, output), (res, results) = os.pipe(), os.pipe()
    supervisor, pid = os.getpid(), os.fork()
    if pid == 0:
        become_program(request, folder, output, results, supervisor)
    os.close(output)
    os.close(results)
    texts, limits = {out: b"", res: b""}, {out: request["output"], res: MAX_RESULTS}
    cut, open_, status, code = False, [out, res], "", None
    while code is None:
        left = began + request["seconds"] - time.monotonic()
        if not status and left <= 0:
            status = "time"
        if not status and too_much(folder, 4 * request["file_size"]):
            status = "disk"
        if status:
            os.kill(pid, signal.SIGKILL)
            code = os.waitpid(pid, 0)[1]
            break
        for pipe in select.select([*open_, requests], [], [], min(left, POLL if open_ else 0.001))[0]:
            if pipe == requests:  # nobody asks before the last reply: this is the end
                status = "lost"
                continue
            data = os.read(pipe, 65536)
            cut |= keep(pipe, data, texts, limits) and pipe == out
            if not data:
                open_.remove(pipe)
        done, ended = os.waitpid(pid, os.WNOHANG)
        if done:
            code = ended
            for pipe in open_:  # what it has left there
                while select.select([pipe], [], [], 0)[0] and (data := os.read(pipe, 65536)):
                    cut |= keep(pipe, data, texts, limits) and pipe == out
    for pipe in (out, res):
        os.close(pipe)
    shutil.rmtree(folder, ignore_errors=True)
    if not status:
        exit_code = os.waitstatus_to_exitcode(code)
        status = {0: "ok", 1: "error"}.get(exit_code, f"exit {exit_code}" if exit_code > 0 else f"signal {-exit_code}")
    return {"status": status, "output": texts[out].decode("utf-8", "replace"), "cut": cut,
            "results": texts[res].decode("utf-8", "replace"), "seconds": time.monotonic() - began}


def keep(pipe: int, data: bytes, texts: dict[int, bytes], limits: dict[int, int]) -> bool:
    """Add to a text up to its limit; True: some of a flood was thrown away."""
    room = limits[pipe] - len(texts[pipe])
    texts[pipe] += data[:room]
    return len(data) > room


def too_much(folder: str, limit: int) -> bool:
    """Over `limit` bytes or MAX_FILES files in the folder? It has no folders in it."""
    files, size = [], 0
    with contextlib.suppress(OSError):
        files = list(os.scandir(folder))
    for file in files:
        with contextlib.suppress(OSError):  # one that went away meanwhile
            size += file.stat(follow_symlinks=False).st_size
    return len(files) > MAX_FILES or size > limit


def serve(read: int, write: int) -> None:
    """Requests and replies, each 4 bytes of length and JSON. The end of the requests is the end of the process."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what a child does not touch need not be copied for it
    base = tempfile.mkdtemp(prefix="minirl_sandbox_")
    try:
        while len(head := read_all(read, 4)) == 4:
            request = json.loads(read_all(read, struct.unpack("I", head)[0]))
            reply = json.dumps(supervise(request, base, read)).encode()
            os.write(write, struct.pack("I", len(reply)))
            sent = 0
            while sent < len(reply):
                sent += os.write(write, reply[sent:])
    finally:
        shutil.rmtree(base, ignore_errors=True)


def read_all(pipe: int, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := os.read(pipe, count - len(data))):
        data += part
    return data


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path]
    serve(0, 1)
