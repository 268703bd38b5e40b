"""Run a command for as long as the process that started this one lives; the standard library alone.

``python watchdog.py COMMAND...`` runs COMMAND in a process group of its own. When standard input closes, which happens
however the starting process ends, the whole group is ended; when the command ends, so does this process, with its code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 10.0  # between asking and killing


def main(command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter's Ctrl-C closes the pipe in its own time
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        os.read(0, 1)
        _end(child)

    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    _end(child)  # what it may have left behind
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and _is_alive(child.pid):
            time.sleep(0.05)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
