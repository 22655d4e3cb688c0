"""git gc of a repository with many commits."""

import hashlib
import random
import subprocess

NEEDS = ["git"]
FILES = 200
TIME = "1000000000 +0000"


def commits(small):
    return 1_000 if small else 12_000


def ABOUT(small):
    return f"`git gc` of {commits(small):,} commits, all deltas anew"


def prepare(dir, small):
    subprocess.run(["git", "init", "-q", "--bare", f"{dir}/made"], check=True)
    draw = random.Random(1)
    words = [f"{draw.getrandbits(40):x}" for _ in range(4000)]
    texts = [[draw.choice(words) for _ in range(800)] for _ in range(FILES)]
    git = subprocess.Popen(["git", "-C", f"{dir}/made", "fast-import", "--quiet"], stdin=subprocess.PIPE)
    for number in range(commits(small)):
        parts = [f"commit refs/heads/main\ncommitter a <a@b> {TIME}\ndata {len(str(number))}\n{number}\n"]
        for _ in range(3):
            file = draw.randrange(FILES)
            text = texts[file]
            at = draw.randrange(len(text))
            text[at:at + 4] = [draw.choice(words) for _ in range(5)]
            data = "\n".join(text)
            parts.append(f"M 644 inline {file}\ndata {len(data)}\n{data}\n")
        git.stdin.write("".join(parts).encode())
    git.stdin.close()
    if git.wait() != 0:
        raise RuntimeError("git fast-import fails")


def work(side, dir):
    subprocess.run(["rm", "-rf", f"{dir}/repository"], check=True)
    subprocess.run(["cp", "-r", f"{dir}/made", f"{dir}/repository"], check=True)
    side.measured()
    git = ["git", "-C", f"{dir}/repository", "-c", "safe.directory=*"]
    side.run(git + ["-c", "pack.threads=2", "gc", "-q", "--aggressive", "--prune=now"])
    with open(f"{dir}/objects", "wb") as objects:
        side.run(git + ["rev-list", "--objects", "--all"], stdout=objects)
    subprocess.run(git + ["fsck", "--full"], check=True, capture_output=True)
    with open(f"{dir}/objects", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
