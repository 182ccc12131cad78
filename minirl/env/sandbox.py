"""A Python sandbox: programs of a policy run in a process of their own, and come back as text.

    sandbox = Sandbox()
    sandbox.run("print(6 * 7)").text                                     "42\n"
    sandbox.run("while True: pass").text                                 "error: over 2 s"
    sandbox.call("def f(x): return 2 * x", "f", [(1,), (2,)]).values     [2, 4]

sandbox_server.py says what holds a program. The process is started once, with its modules loaded, and forks for each
program. On a system other than Linux only limits hold, and a warning says so.
"""

import contextlib
import json
import os
import queue
import select
import struct
import subprocess
import sys
import time
import warnings
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from minirl.config import UserError, check_positive

GRACE = 5.0  # seconds over a program's own limit after which its supervisor is given up
STRONG = {"landlock", "seccomp"}


class Result(NamedTuple):
    """What became of a program.

    status : "ok"; "error": an exception; "over 2 s", "over 16 MB of files"; "exit 3": it said so; "signal 11": it
             crashed; "lost": its supervisor did
    output : what it printed, on both streams, cut to the limit
    values : of `call`: a value for each input, in JSON's types; None where there was an error or none
    errors : of `call`: a text for each input, "" where there is a value
    """

    status: str
    output: str
    values: tuple[Any, ...] = ()
    errors: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The observation: what it printed, and why it ended if not by itself."""
        if self.status == "ok" or (self.status == "error" and self.output):
            return self.output
        return f"{self.output}error: {self.status.replace('error', 'exit 1')}"


@dataclass
class Sandbox:
    """Processes that run programs, `workers` at a time: threads may call `run` side by side."""

    seconds: float = 2.0  # from start to end of a program
    memory_mb: int = 256  # of address space, 30 of which Python takes
    output: int = 4000  # bytes of output that are kept
    file_mb: int = 4  # of one file; of all together 4 times that
    workers: int = 1

    def __post_init__(self):
        check_positive(self, "seconds", "memory_mb", "output", "file_mb", "workers")
        if not hasattr(os, "fork"):
            raise UserError("the sandbox needs fork: use Linux, WSL or macOS")
        self._free: queue.SimpleQueue[Server | None] = queue.SimpleQueue()
        for _ in range(self.workers):
            self._free.put(None)  # started at its first program

    @cached_property
    def guards(self) -> tuple[str, ...]:
        """What holds a program here: ("limits", "chroot", "nobody", "landlock", "seccomp") as root on a new Linux."""
        return tuple(json.loads(self._ask(None)["results"]))

    def run(self, code: str, stdin: str = "") -> Result:
        """Run a program as `python file` would."""
        reply = self._checked(code, stdin)
        return Result(self._status(reply), self._output(reply), seconds=reply["seconds"])

    def call(self, code: str, function: str, inputs: list[tuple]) -> Result:
        """Run a program that defines `function`, and call it with each of `inputs`, which are plain JSON.

        What the values should be stays on this side: compare them with `same`.
        """
        reply = self._checked(code, "", function, inputs)
        values, errors = [], []
        for line in reply["results"].split("\n")[: len(inputs)]:
            try:
                entry = json.loads(line)
                values.append(entry.get("value"))
                errors.append("" if "value" in entry else str(entry.get("error", "no value"))[:400])
            except (ValueError, AttributeError, RecursionError):  # cut, or written by the program itself
                break
        missing = len(inputs) - len(values)
        why = self._status(reply) if reply["status"] not in ("ok", "error") else "no value"
        return Result(self._status(reply), self._output(reply), (*values, *[None] * missing),
                      (*errors, *[why] * missing), reply["seconds"])

    def close(self) -> None:
        for _ in range(self.workers):
            if server := self._free.get():
                server.stop()
            self._free.put(None)

    def _checked(self, code: str, stdin: str, function: str = "", inputs: list = ()) -> dict:
        if not STRONG <= set(self.guards):
            warnings.warn(f"the sandbox holds a program by {', '.join(self.guards)} alone: "
                          "it may read your files and use the network", stacklevel=3)
        return self._ask(code, stdin, function, inputs)

    def _ask(self, code: str | None, stdin: str = "", function: str = "", inputs: list = ()) -> dict:
        request = {"code": None if code is None else plain(code), "stdin": plain(stdin), "function": function,
                   "inputs": list(inputs), "seconds": self.seconds, "memory": self.memory_mb << 20,
                   "output": self.output, "file_size": self.file_mb << 20}
        server = self._free.get()
        try:
            server = server or Server()
            return server.ask(request, self.seconds + GRACE)
        except BaseException as error:  # of a thread that is stopped, too: the next one would read this one's reply
            if server:
                server.stop()
            server = None
            if not isinstance(error, OSError):
                raise
            return {"status": "lost", "output": "", "results": "[]", "cut": False, "seconds": self.seconds}
        finally:
            self._free.put(server)

    def _status(self, reply: dict) -> str:
        return {"time": f"over {self.seconds:g} s", "disk": f"over {4 * self.file_mb} MB of files"}.get(
            reply["status"], reply["status"])

    def _output(self, reply: dict) -> str:
        return reply["output"] + ("... (cut)\n" if reply["cut"] else "")


class Server:
    """One warm process. Any trouble with it is an OSError."""

    def __init__(self):
        source = Path(__file__).with_name("sandbox_server.py").read_text(encoding="utf-8")
        # As text, so that the folder of this file is not where it imports from. Nothing of our environment goes along;
        # without a fixed hash seed the order of a set would differ from run to run.
        self.process = subprocess.Popen([sys.executable, "-s", "-S", "-c", source], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd="/",
                                        start_new_session=True, env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"})
        self._finalizer = weakref.finalize(self, end, self.process)

    def ask(self, request: dict, seconds: float) -> dict:
        data = json.dumps(request).encode()
        write_all(self.process.stdin.fileno(), struct.pack("I", len(data)) + data)
        deadline = time.monotonic() + seconds
        (length,) = struct.unpack("I", self._read(4, deadline))
        return json.loads(self._read(length, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        data, pipe = b"", self.process.stdout.fileno()
        while len(data) < count:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(pipe, count - len(data))
            if not part:
                raise BrokenPipeError
            data += part
        return data

    def stop(self) -> None:
        self._finalizer()


def end(process: subprocess.Popen) -> None:
    """The end of its requests ends the process, which then deletes its folder; if it hangs, it is killed."""
    process.stdin.close()
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def write_all(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data):]


def plain(text: str) -> str:
    """Half of a surrogate pair is no text: JSON would carry it into the sandbox, and the compiler break on it."""
    return text.encode("utf-8", "replace").decode()


def same(value: Any, expected: Any) -> bool:
    """Equal as JSON and of the same type: True is not 1, while 2.0 is 2. Floats to a relative 1e-9."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        with contextlib.suppress(OverflowError):
            return value == expected or abs(value - expected) <= 1e-9 * abs(expected)
        return False
    if isinstance(expected, (list, tuple)):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, dict):
        return (isinstance(value, dict) and value.keys() == expected.keys()
                and all(same(value[key], expected[key]) for key in expected))
    return type(value) is type(expected) and value == expected


def pass_rate(result: Result, expected: list) -> float:
    """Share of the values of `Sandbox.call` that are as expected, in [0, 1]."""
    right = sum(not error and same(value, wanted)
                for value, error, wanted in zip(result.values, result.errors, expected, strict=True))
    return right / max(1, len(expected))
