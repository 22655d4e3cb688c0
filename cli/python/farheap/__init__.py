"""Runs programs with a heap larger than RAM, under a limit on their resident memory.

    farheap.run(["sort", "large.txt"], limit="512MiB", check=True)
"""

import os
import subprocess
import sys

__all__ = ["COMMAND", "main", "run"]

#: The command `farheap`; the library that it preloads lies in `lib` beside `bin`.
COMMAND = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "farheap")


def run(argv, *, limit=None, device=None, config=None, stats=False, alone=False, **options):
    """Runs a program as `farheap run` does, and returns a `subprocess.CompletedProcess`.

    `limit` is bytes, or text such as "512MiB"; `device`, `config`, `stats` and `alone` are the options of the
    command. All others are those of `subprocess.run`. The return code is 125 where farheap cannot do it.
    """
    program = [argv] if isinstance(argv, (str, bytes, os.PathLike)) else argv
    command = [COMMAND, "run"]
    for name, value in {"limit": limit, "device": device, "config": config}.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    command += ["--stats"] * bool(stats) + ["--alone"] * bool(alone)
    return subprocess.run([*command, "--", *program], **options)


def main():
    """Becomes the command, with this process's arguments."""
    os.execv(COMMAND, ["farheap", *sys.argv[1:]])
