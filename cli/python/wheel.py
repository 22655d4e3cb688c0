#!/usr/bin/env python3
"""Makes the wheel `farheap` of an installation: the command, the library that it preloads, and a module that runs it.

    wheel.py PREFIX DIR     (of `cmake --install`, and where the wheel goes)

Nothing is compiled for Python, so one wheel serves all its versions, and a build tool would have nothing to do.
"""

import base64
import hashlib
import pathlib
import re
import subprocess
import sys
import zipfile

OWN = pathlib.Path(__file__).resolve().parent
METADATA = """Metadata-Version: 2.1
Name: farheap
Version: {version}
Summary: Runs programs with a heap larger than RAM, under a limit on their resident memory
License: MIT OR Apache-2.0
Requires-Python: >=3.8
Classifier: Operating System :: POSIX :: Linux

"""


def main():
    prefix, target = map(pathlib.Path, sys.argv[1:])
    command = prefix / "bin/farheap"
    library = next(prefix.glob("lib*/**/libfarheap_preload.so"))
    version = subprocess.check_output([command, "--version"], text=True).split()[1]
    # The oldest C library that has all that these two ask for.
    binaries = command.read_bytes() + library.read_bytes()
    oldest = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", binaries)))
    tag = f"py3-none-manylinux_2_{oldest}_x86_64"
    info = f"farheap-{version}.dist-info"
    repository = OWN.parent.parent
    files = {
        "farheap/__init__.py": (OWN / "farheap/__init__.py").read_bytes(),
        "farheap/bin/farheap": command.read_bytes(),
        "farheap/lib/libfarheap_preload.so": library.read_bytes(),
        f"{info}/METADATA": (METADATA.format(version=version) + (OWN.parent / "README.md").read_text()).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: farheap\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nfarheap = farheap:main\n",
        f"{info}/LICENSE-APACHE": (repository / "LICENSE-APACHE").read_bytes(),
        f"{info}/LICENSE-MIT": (repository / "LICENSE-MIT").read_bytes(),
        f"{info}/NOTICES": (prefix / "share/doc/farheap/NOTICES").read_bytes(),
    }
    record = ""
    wheel = target / f"farheap-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(content)}\n"
            write(archive, name, content)
        write(archive, f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode())
    print(wheel)


def write(archive, name, content):
    """Writes a file without a date, so that the same files make the same wheel."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100755 if "/bin/" in name else 0o100644) << 16
    archive.writestr(entry, content)


main()
