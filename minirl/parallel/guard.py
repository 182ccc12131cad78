"""A guard beside each rank, so that a job ends as a whole. A process of its own, without torch: `mesh.py` starts it.

A rank whose partner fails finds its connection closed, or waits until its timeout; then it ends too. But a rank that
is stopped, or caught in a loop, finds nothing, and the torchrun of its machine would wait for it for ever. Its guard
knows, for all guards hold a line to that of the first rank:

    rank 0 ── guard 0 ═══ guard 1 ── rank 1        a rank that ends in good order says goodbye, and its line may go;
                 ║                                 one that ends without breaks it: guard 0 then cuts all lines, and
              guard 2 ── rank 2                    each guard kills its rank, unless that ends by itself in time
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time

GOODBYE = b"."
GRACE = 5.0  # seconds in which a rank may still say why it ends
MOST = 1000  # ranks: a process waits for no more lines; a larger job has no guards


def watch(rank: int, lines: list[socket.socket], listener: socket.socket | None, token: bytes, others: int) -> None:
    """Return when the rank, whose end of a pipe is our standard input, has gone; kill it if another was lost.

    lines    : to the first guard, or to all others
    listener : of the first guard: the `others` come in here, and say the token of the job
    """
    lost = 0.0  # when another rank was lost

    def let_in() -> None:
        """Take the next of the others, if it says the token."""
        nonlocal others
        line = listener.accept()[0]
        line.settimeout(GRACE)
        if said(line, len(token)) == token:
            lines.append(line)
            others -= 1

    while True:
        ready = select.select([0, *lines, *([listener] if listener else [])], [], [], 1.0)[0]
        if 0 in ready or os.getppid() != rank:
            # Ask again: a rank that ended just after `select` gave up has left its goodbye in the pipe.
            if select.select([0], [], [], 0)[0] and os.read(0, 1) == GOODBYE:
                if listener:  # a job may be over before all have come, and they too must hear the goodbye
                    listener.settimeout(GRACE)
                    with contextlib.suppress(TimeoutError):
                        while others > 0:
                            let_in()
                for line in lines:
                    line.send(GOODBYE)
            return  # which closes the lines
        if listener in ready:
            let_in()
        for line in [line for line in lines if line in ready]:
            lines.remove(line)
            if said(line, 1) != GOODBYE:
                lost = lost or time.monotonic()
        if lost and listener:
            while lines:
                lines.pop().close()
        if lost and time.monotonic() - lost > GRACE:
            print(f"process {rank} did not end after another rank was lost, and is killed; start the job again with "
                  "--resume to go on", file=sys.stderr, flush=True)
            os.kill(rank, signal.SIGKILL)
            return


def said(line: socket.socket, count: int) -> bytes:
    """What comes over a line; nothing if it is broken."""
    try:
        return line.recv(count, socket.MSG_WAITALL)
    except OSError:
        return b""


def main(host: str, port: str, token: str, others: str, descriptor: str) -> None:
    """descriptor : number of the first guard's listening socket; empty for the `others`, who call host:port."""
    rank = os.getppid()
    if descriptor:
        watch(rank, [], socket.socket(fileno=int(descriptor)), token.encode(), int(others))
        return
    with socket.create_connection((host, int(port)), timeout=60) as line:
        line.sendall(token.encode())
        watch(rank, [line], None, token.encode(), 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
