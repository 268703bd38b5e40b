"""How the process of a rank ends.

1. Its exit code is that of the block: 0, what ``sys.exit`` got, 1 for an error, which is shown.
2. Exit handlers run, also those registered later, and what was printed arrives.
3. The interpreter is not taken apart, so nothing that happens there can end the process in another way.
4. The command line ends so where torchrun started it as a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

LATE = """
import os, sys

class Late:
    def __del__(self):
        os.abort()  # as C++ does when a thread of it is ended in the middle of its work

"""
SCRIPT = """
import atexit
from contextlib import nullcontext
from evenstep.rank_exit import exits_at_once

with {context}:
    late = Late()
    atexit.register(print, "handler", end="")
    print("printed ", end="")
    {last}
"""


def ended(last: str, context: str = "exits_at_once()") -> subprocess.CompletedProcess[str]:
    return run(SCRIPT.format(last=last, context=context))


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-c", LATE + script], {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('a reason')", 1, "a reason"),
        ("raise ValueError('a fault')", 1, "ValueError: a fault"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_rank_ends_with_its_own_exit_code(last: str, code: int, message: str) -> None:
    found = ended(last)
    assert (found.returncode, found.stdout) == (code, "printed handler")
    assert message in found.stderr


def test_an_interpreter_that_is_taken_apart_may_end_in_another_way() -> None:
    assert ended("sys.exit(2)", context="nullcontext()").returncode == -signal.SIGABRT


def test_the_command_line_as_a_rank() -> None:
    script = "from evenstep.cli import main\nlate = Late()\nsys.argv = ['evenstep', {!r}]\nmain()"
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    assert run(script.format("--version"), **ranks).returncode == 0
    assert run(script.format("--no-such-flag"), **ranks).returncode == 2
    assert run(script.format("--version")).returncode == -signal.SIGABRT
