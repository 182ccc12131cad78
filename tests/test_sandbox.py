"""Programs run, and get out neither by files nor by sockets, processes, signals, memory, time, output or forgery.

Nothing here may rest on what Python forbids, so attacks that Python would stop are made by ctypes as well.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from minirl.config import UserError
from minirl.env.sandbox import STRONG, Result, Sandbox, pass_rate, same
from minirl.env.tools import in_time

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the sandbox needs fork")


@pytest.fixture(scope="module")
def box():
    """For programs that end by themselves; a busy machine may keep them waiting."""
    sandbox = Sandbox(seconds=20.0)
    if not STRONG <= set(sandbox.guards):
        pytest.skip(f"only {sandbox.guards} hold here")
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def hasty(box):
    """For programs that must be stopped."""
    sandbox = Sandbox(seconds=0.5, output=1000, file_mb=1)
    assert sandbox.guards == box.guards
    yield sandbox
    sandbox.close()


# ---- programs ----

@pytest.mark.parametrize("code, status, output", [
    ("print(6 * 7)", "ok", "42\n"), ("", "ok", ""), ("print('é😀')", "ok", "é😀\n"),
    ("import sys; print(1); print(2, file=sys.stderr)", "ok", "1\n2\n"),
    ("x = 1\n1/0", "error", "ZeroDivisionError: division by zero, line 2\n"),
    ("print('a')\ndef f(:", "error", "SyntaxError: invalid syntax, line 2\n"),
    ("raise ValueError('a\\nb')", "error", "ValueError: a\nb, line 1\n"),
    ("import sys; sys.exit(0)", "ok", ""), ("import sys; sys.exit(3)", "exit 3", ""),
    ("import sys; sys.exit('no')", "error", ""), ("exit()", "error", "NameError: name 'exit' is not defined, line 1\n"),
    ("assert 1 + 1 == 3, 'sum'", "error", "AssertionError: sum, line 1\n"),
    ("import math, re, json, random, itertools, collections, heapq, statistics, datetime, decimal, string\n"
     "print(math.gcd(12, 18))", "ok", "6\n"),
    ("open('a.txt', 'w').write('hi'); import os; print(open('a.txt').read(), os.listdir())", "ok", "hi ['a.txt']\n"),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\nprint(A(1))", "ok", "A(x=1)\n"),
    ("if __name__ == '__main__': print('main')", "ok", "main\n"),
])
def test_a_program_runs_as_python_would_run_it(box, code, status, output):
    assert box.run(code)[:2] == (status, output)


def test_a_program_reads_its_input_and_the_next_one_finds_nothing_of_it(box):
    assert box.run("print(input() + input())", "a\nb\n").output == "ab\n"
    box.run("open('left', 'w').write('x'); import math; math.pi = 3; global_name = 1")
    assert box.run("import os, math; print(os.listdir(), math.pi > 3.1)").output == "[] True\n"


def test_a_program_does_the_same_whenever_it_is_run(box):
    code = "import random; print({'a', 'b', 'c', 'd'}, hash('x'), random.random())"
    assert box.run(code) [:2] == box.run(code)[:2] == Sandbox(seconds=20.0).run(code)[:2]


def test_functions_are_called_with_each_input_and_say_what_was_wrong(box):
    result = box.call("def f(x):\n  return 10 // x", "f", [(1,), (0,), (3,)])
    assert result.values == (10, None, 3)
    assert result.errors == ("", "ZeroDivisionError: integer division or modulo by zero, line 2", "")
    assert pass_rate(result, [10, 0, 3]) == pytest.approx(2 / 3)
    assert box.call("def g(x): return x", "f", [(1,)]).errors == ("KeyError: 'f'",)
    assert box.call("f = 5", "f", [(1,)]).errors == ("TypeError: 'int' object is not callable",)
    assert box.call("1/0", "f", [(1,), (2,)])[:4] == (
        "error", "ZeroDivisionError: division by zero, line 1\n", (None, None), ("no value", "no value"))
    assert box.call("def f(a, b): return [a, {'k': b}]", "f", [(1, "x")]).values == ([1, {"k": "x"}],)


def test_an_endless_test_costs_its_own_points_only(hasty):
    result = hasty.call("def f(x):\n  while x == 2: pass\n  return x", "f", [(0,), (1,), (2,), (3,)])
    assert result.values == (0, 1, None, None) and result.errors == ("", "", "over 0.5 s", "over 0.5 s")


@pytest.mark.parametrize("value, expected, equal", [
    (2, 2, True), (2.0, 2, True), (True, 1, False), (1, True, False), ("2", 2, False), (0.1 + 0.2, 0.3, True),
    (0.30001, 0.3, False), ([1, 2], (1, 2), True), ([1], [1, 2], False), ({"a": [1]}, {"a": [1]}, True),
    ({}, [], False),
    (None, None, True), (None, 0, False), (float("nan"), 1.0, False), (10**400, 1.5, False), (1.5, 10**400, False),
])
def test_values_are_compared_by_value_and_type(value, expected, equal):
    assert same(value, expected) is equal


# ---- attacks: what the program tries, and what its output must hold ----

C = "import ctypes; c = ctypes.CDLL(None, use_errno=True); call = c.syscall\n"
DENIED = "1 Operation not permitted"


def by_syscall(number, *arguments):
    return f"{C}import os\nr = call({', '.join(map(str, (number, *arguments)))}); e = ctypes.get_errno()\n" \
           "print(r, e, os.strerror(e))"


ATTACKS = {
    "reads a file outside": ("open('/etc/passwd').read()", "No such file"),
    "reads above its folder": ("print(open('../../../../etc/passwd').read())", "No such file"),
    "reads by a descriptor": ("import os; os.open('/etc/passwd', 0)", "No such file"),
    "reads the memory of others": ("open('/proc/1/mem', 'rb')", "No such file"),
    "reads its parent": ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", "No such file"),
    "writes outside": ("open('/tmp/minirl_was_here', 'w')", "No such file"),
    "makes a folder": ("import os; os.mkdir('d')", "Operation not permitted"),
    "links to a file outside": ("import os; os.symlink('/etc/passwd', 'p')", "Operation not permitted"),
    "leaves its root": ("import os\nos.chroot('.')", "Operation not permitted"),
    "changes rights": ("import os\nopen('a', 'w')\nos.chmod('a', 0o4777)", "Operation not permitted"),
    "makes a device": ("import os; os.mknod('sda', 0o60600, 2048)", "Operation not permitted"),
    "mounts": (by_syscall(165, 0, "b'/'", "b'tmpfs'", 0, 0), DENIED),
    "opens a socket": ("import _socket\n_socket.socket()", "ModuleNotFoundError"),
    "opens a socket by itself": (by_syscall(41, 2, 1, 0), DENIED),
    "opens a local socket": (by_syscall(41, 1, 1, 0), DENIED),
    "makes an io_uring": (by_syscall(425, 8, 0), DENIED),
    "downloads": ("import urllib.request", "ModuleNotFoundError"),
    "forks": ("import os; os.fork()", "Operation not permitted"),
    "is a fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError as e: print(e); break", DENIED[2:]),
    "clones by itself": (by_syscall(56, 17, 0, 0, 0, 0), DENIED),
    "starts a shell": ("import os; os.execv('/bin/sh', ['sh'])", "Operation not permitted"),
    "starts a command": ("import os; print(os.system('id') >> 8)", "127"),
    "starts a process": ("import subprocess; subprocess.run(['id'])", "ModuleNotFoundError"),
    "starts threads": ("import _thread\nwhile True: _thread.start_new_thread(print, ())", "can't start new thread"),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", "Operation not permitted"),
    "kills everybody": ("import os; os.kill(-1, 9)", "Operation not permitted"),
    "kills its group": ("import os; os.killpg(0, 9)", "Operation not permitted"),
    "signals by a file": (by_syscall(72, 0, 8, "os.getppid()"), DENIED),  # fcntl F_SETOWN
    "traces its parent": (by_syscall(101, 16, "os.getppid()", 0, 0), DENIED),
    "reads its parent's memory": (by_syscall(310, "os.getppid()", 0, 0, 0, 0, 0), DENIED),
    "raises its limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "not allowed to raise"),
    "raises its limits by itself": (by_syscall(302, 0, 9, "bytes([255] * 16)", 0), DENIED),
    "becomes root": ("import os\nos.setuid(0)", "Operation not permitted"),
    "sets the clock": ("import time\ntime.clock_settime(0, 0)", "Operation not permitted"),
    "takes all memory": ("x = [0] * 10**10", "MemoryError"),
    "takes memory in pieces": ("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError"),
    "is a bomb of zeros": ("import zlib\nd = zlib.compress(bytes(10**8))\nx = [zlib.decompress(d) for _ in range(9)]",
                           "MemoryError"),
    "keeps deleted files": (
        f"{C}import os\nc.mmap.restype, c.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5\n"
        "f = open('x', 'w+b')\nf.write(b'x' * 4096)\nf.flush()\nos.unlink('x')\n"
        "r = c.mmap(None, 4096, 1, 1, f.fileno(), 0)\nprint(r == 2**64 - 1, os.strerror(ctypes.get_errno()))",
        "True Operation not permitted"),
    "opens many files": ("import os\nx = []\nwhile True: x.append(open('x', 'w')); os.unlink('x')",
                         "Too many open files"),
    "opens a file without a name": (
        "import os\nx = []\nwhile True: x.append(os.open('.', os.O_TMPFILE | os.O_RDWR))", "Too many open files"),
    "opens a socket by x32": (by_syscall(0x40000000 | 41, 2, 1, 0), DENIED),
    "makes a file in memory": (by_syscall(319, "b'x'", 0), DENIED),
    "loads a program into the kernel": (by_syscall(321, 0, 0, 0), DENIED),
    "watches the processor": (by_syscall(298, 0, 0, 0, 0, 0), DENIED),
    "takes a handle of its parent": (by_syscall(434, "os.getppid()", 0), DENIED),
    "reads the kernel's keys": (by_syscall(250, 0, 0, 0), DENIED),
    "leaves its namespace": (by_syscall(272, 0x10000000), DENIED),
    "clones in the new way": (by_syscall(435, 0, 0), DENIED),
    "types into a terminal": (by_syscall(16, 0, 0x5412, "b'x'"), DENIED),
    "shares memory": (by_syscall(29, 0, 4096, 0o1600), DENIED),
    "sets an alarm": (by_syscall(37, 1), DENIED),
    "traces its own end": ("import sys\nsys.settrace(lambda *a: 1/0)\ndef f(): pass\nf()", "ZeroDivisionError"),
    "hooks the way out": ("import traceback\ntraceback.extract_tb = lambda *a: 1/0\nraise ValueError('x')", "exit 1"),
    "recurses": ("def f(): return f()\nf()", "RecursionError"),
    "writes one huge file": ("f = open('x', 'w')\nwhile True: f.write('x' * 10**6)", "File too large"),
    "imports the trainer": ("import minirl", "ModuleNotFoundError"),
    "imports what is installed": ("import torch", "ModuleNotFoundError"),
    "imports from elsewhere": ("import sys; sys.path.append('/'); sys.path_hooks.clear(); import numpy",
                               "ModuleNotFoundError"),
    "loads a library": ("import ctypes; ctypes.CDLL('/usr/lib/libgtk.so')", "cannot open shared object"),
    "brings a huge integer": ("print(10 ** 10**4)", "Exceeds the limit"),
    "is nested": ("x = " + "(" * 5000 + ")" * 5000, "Error"),
    "is no text": ("x = '\udc80'\x00", "null bytes"),
    "lies about an error": ("class E(Exception):\n  def __str__(self): raise KeyError\nraise E", "E"),
    "breaks its own output": ("import sys; sys.stdout = None; sys.stderr = 5; print = 7; raise ValueError('x')", "x"),
}
LINUX = sys.platform == "linux" and os.uname().machine == "x86_64"


@pytest.mark.skipif(not LINUX, reason="numbers of system calls are those of x86_64")
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_gets_out_and_each_says_what_was_wrong(box, name):
    code, expected = ATTACKS[name]
    result = box.run(code)
    assert expected in result.text, result
    assert len(result.text) < 500 and not os.path.exists("/tmp/minirl_was_here")


ENDLESS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(60)",
    "computes a huge integer": "x = 10 ** 10**8; print(len(str(x % 10**6)))",
    "folds a constant": "x = 3 ** 10**9" + "\nx % 10**9",
    "backtracks": "import re; re.match(r'(a+)+$', 'a' * 50 + 'b')",
    "closes its output and goes on": "import os\nfor i in range(4): os.close(i)\nwhile True: pass",
    "refuses to die": "import signal\nfor i in (1, 2, 3, 15, 24): signal.signal(i, signal.SIG_IGN)\nwhile True: pass",
    "catches everything": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "floods for ever": "while True: print('x' * 10000)",
    "floods the values": "import os\nwhile True: os.write(3, b'x' * 60000)",
    "loops in an error": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
    "loops at the end": "class A:\n  def __del__(self):\n    while True: pass\na = A()\ndel a",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(hasty, name):
    result = hasty.run(ENDLESS[name])
    assert "error: over 0.5 s" in result.text and len(result.text) < 1100, result
    assert 0.5 <= result.seconds < 4.0, "the limit is no limit"


DEADLY = {
    "exits": ("import os; os._exit(0)", "ok"), "exits with a code": ("import os; os._exit(7)", "exit 7"),
    "exits silently": ("import os; os._exit(1)", "error"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "signal 11"),
    "overflows the stack": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(a): return [*map(f, [a])]\nf(1)", ""),
    "speaks another dialect": (
        # i386's getpid by int 0x80: other numbers for the same calls, by which a list of numbers could be evaded
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\nprint(ctypes.CFUNCTYPE(ctypes.c_int)(a)())", ""),
    "fills the disk and hides": (  # a file that is never there when it is looked for
        "import os\nopen('a', 'w')\nfor i in range(400):\n  open(str(i), 'wb').write(b'x' * 10**6)\n"
        "  for _ in range(50): os.rename('a', 'b'); os.rename('b', 'a')", "over 4 MB of files"),
    "fills the disk": ("i = 0\nwhile True:\n  open(str(i), 'w').write('x' * 10**6); i += 1", "over 4 MB of files"),
    "makes a million files": ("i = 0\nwhile True:\n  open(str(i), 'w'); i += 1", "over 4 MB of files"),
}


@pytest.mark.skipif(not LINUX, reason="machine code of x86_64")
@pytest.mark.parametrize("name", DEADLY)
def test_what_kills_itself_or_fills_the_disk_harms_nobody_else(hasty, name):
    code, status = DEADLY[name]
    result = hasty.run(code)
    assert result.status == status or (not status and result.status != "ok"), result
    assert result.text or status == "ok"
    assert hasty.run("print(1)").status in ("ok", "over 0.5 s")


def test_a_flood_is_cut_and_says_so(hasty, box):
    result = box.run("print('x' * 10**6)")
    assert result.status == "ok" and result.output == "x" * 4000 + "... (cut)\n"
    assert box.run("print('x' * 3999)").output == "x" * 3999 + "\n"


def test_secrets_of_the_trainer_are_not_there(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    sandbox = Sandbox(seconds=20.0)
    assert "hunter2" not in sandbox.run("import os; print(os.environ, os.listdir('.'))").output
    descriptors = ("import os\nn = []\nfor i in range(256):\n  try: os.fstat(i); n.append(i)\n"
                   "  except OSError: pass\nprint(n)")
    assert sandbox.run(descriptors).output == "[0, 1, 2, 3]\n", "a descriptor of the trainer came along"
    sandbox.close()


# ---- forged tests ----

FORGED = {
    "an object equal to all": "class A:\n  def __eq__(self, o): return True\ndef f(x): return A()",
    "an integer equal to all": "class A(int):\n  def __eq__(self, o): return True\ndef f(x): return A(0)",
    "a process that exits": "import os\nos._exit(0)",
    "a function that exits": "import os\ndef f(x): os._exit(0)",
    "values written past the function": "import os\nos.write(3, b'{\"value\": 0}\\n' * 9)\nos._exit(0)",
    "a broken line": "import os\nos.write(3, b'{{{\\n' + b'[' * 100000 + b'\\n')\ndef f(x): return 2 * x",
    "no object": "import os\nos.write(3, b'[]\\n7\\n')\ndef f(x): return 2 * x",
    "another writer of JSON": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 0",
    "a deep value": "def f(x):\n  v = []\n  for _ in range(100000): v = [v]\n  return v",
    "a huge value": "def f(x): return 10 ** 5000",
    "a set": "def f(x): return {2 * x}",
}


@pytest.mark.parametrize("name", FORGED)
def test_no_program_passes_tests_that_it_does_not_pass(box, name):
    result = box.call(FORGED[name], "f", [(23,), (24,), (25,)])
    assert len(result.values) == len(result.errors) == 3
    assert pass_rate(result, [46, 48, 50]) == 0.0


def test_the_right_values_are_nowhere_in_the_program_s_memory(box):
    code = ("import gc\ndef f(x, digits):\n  wanted = ''.join(map(str, digits))\n"
            "  return any(wanted in repr(o) for o in gc.get_objects() if isinstance(o, (list, dict, tuple)))")
    result = box.call(code, "f", [(918273, [5, 4, 6, 3, 7, 2]), (1, [9, 1, 8, 2, 7, 3])])
    assert result.values == (False, True), "what was looked for should be found among the inputs alone"
    assert pass_rate(result, [546372, 546372]) == 0.0


# ---- the process behind it ----

def test_attacks_leave_one_process_behind_and_it_is_the_same(box):
    server = box._free.get()
    box._free.put(server)
    assert server.process.poll() is None
    children = subprocess.run(["ps", "--ppid", str(server.process.pid), "-o", "pid="], capture_output=True, text=True)
    assert children.stdout.strip() == "", "a program is still running"


def test_a_supervisor_that_dies_is_replaced():
    sandbox = Sandbox(seconds=20.0)
    assert sandbox.run("print(1)").output == "1\n"
    server = sandbox._free.get()
    server.process.kill()
    server.process.wait()
    sandbox._free.put(server)
    lost = sandbox.run("print(2)")
    assert lost.status == "lost" and lost.text == "error: lost"
    assert sandbox.run("print(3)").output == "3\n"
    sandbox.close()
    assert sandbox.run("print(4)").output == "4\n", "closed is not broken: it starts anew"
    sandbox.close()


def test_nobody_reads_the_reply_to_a_thread_that_was_stopped():
    sandbox = Sandbox(seconds=20.0)
    sandbox.run("1")
    with pytest.raises(TimeoutError):
        in_time(0.2, lambda: sandbox.run("import time; time.sleep(0.6); print('old')"))
    assert sandbox.run("print('new')").output == "new\n"
    sandbox.close()


def test_the_supervisor_goes_when_the_trainer_is_killed(tmp_path):
    code = ("import os, time; from minirl.env.sandbox import Sandbox; s = Sandbox(); s.run('1'); p = s._free.get();"
            "print(p.process.pid, flush=True); time.sleep(60)")
    trainer = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    wait_for(lambda: gone(server), "an orphan stays")


@pytest.mark.parametrize("killed", ["trainer", "supervisor"])
def test_a_sleeping_program_goes_with_its_trainer_and_with_its_supervisor(killed):
    code = ("import threading, time; from minirl.env.sandbox import Sandbox; s = Sandbox(seconds=60); s.run('1');"
            "server = s._free.get(); s._free.put(server); print(server.process.pid, flush=True);"
            "s.run('import time; time.sleep(50)')")
    trainer = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    server, program, folder = int(trainer.stdout.readline()), "", None
    try:
        while not program:
            program = subprocess.run(["ps", "--ppid", str(server), "-o", "pid="], capture_output=True, text=True).stdout
        time.sleep(0.5)  # it sleeps by now
        with contextlib.suppress(OSError):  # who is not root may not look
            folder = os.readlink(f"/proc/{int(program)}/cwd")
        os.kill({"trainer": trainer.pid, "supervisor": server}[killed], signal.SIGKILL)
        wait_for(lambda: gone(int(program)), "the program stays")
        if killed == "trainer" and folder:
            wait_for(lambda: not os.path.exists(os.path.dirname(folder)), "its folder stays")
    finally:
        trainer.kill()
        trainer.wait()
        if not gone(int(program)):
            os.kill(int(program), signal.SIGKILL)


def wait_for(done, complaint: str) -> None:
    for _ in range(100):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError(complaint)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_workers_run_programs_side_by_side():
    sandbox = Sandbox(seconds=20.0, workers=3)
    results = [None] * 3
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, sandbox.run(
        f"import time; time.sleep(0.5); print({i})"))) for i in range(3)]
    sandbox.run("1")
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.output for result in results] == ["0\n", "1\n", "2\n"]
    assert max(result.seconds for result in results) < time.perf_counter() - began < sum(r.seconds for r in results)
    sandbox.close()


def test_where_only_limits_hold_it_says_so():
    sandbox = Sandbox(seconds=20.0)
    sandbox.__dict__["guards"] = ("limits",)
    with pytest.warns(UserWarning, match="by limits alone: it may read your files and use the network"):
        assert sandbox.run("print(1)").text == "1\n"
    sandbox.close()
    strong = Sandbox(seconds=20.0)
    if STRONG <= set(strong.guards):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strong.run("1")
    strong.close()


def test_bad_limits_are_refused():
    for options in ({"seconds": 0}, {"memory_mb": -1}, {"workers": 0}):
        with pytest.raises(UserError, match=next(iter(options)).replace("_", "-")):
            Sandbox(**options)


def test_a_result_reads_as_an_observation():
    assert Result("ok", "a\n").text == "a\n" and Result("error", "E: x, line 1\n").text == "E: x, line 1\n"
    assert Result("over 2 s", "a\n").text == "a\nerror: over 2 s" and Result("error", "").text == "error: exit 1"
