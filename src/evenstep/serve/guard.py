"""Runs a program and ends it, with all that it started, when the process that asked for it is gone.

``python guard.py FD PROGRAM ARGUMENT…``: FD is the reading end of a pipe whose writing end the asking process holds; it
closes with that process, however that one ends. Imports are few, for a rollout pays for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Run the command; exit as it does."""
    life, command = int(sys.argv[1]), sys.argv[2:]

    def watch() -> None:
        os.read(life, 1)  # nothing is ever written: it returns when the other end is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    # All of the group are asked to end; this process waits until the program has. A handler, for SIG_IGN is inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        code = subprocess.Popen(command).wait()
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        code = 127
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
