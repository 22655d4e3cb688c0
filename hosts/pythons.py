"""A Python that has certain packages: the system's, or the one that runs this."""

import subprocess
import sys

PYTHONS = ["/usr/bin/python3", sys.executable]


def with_packages(*names):
    """Its path, or None."""
    text = "import " + ", ".join(names)
    return next((path for path in PYTHONS
                 if subprocess.run([path, "-I", "-c", text], capture_output=True).returncode == 0), None)


def answer(side, dir, python, text, size):
    """What the text prints, run on a side with one argument."""
    with open(f"{dir}/answer", "w") as file:
        side.run([python, "-I", "-c", text, size], stdout=file)
    with open(f"{dir}/answer") as file:
        return file.read()
