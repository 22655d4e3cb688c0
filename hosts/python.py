"""CPython with dictionaries, lists, JSON and a fork."""

# The interpreter itself: a starter of several versions is a script.
NEEDS = ["/usr/bin/python3"]
TEXT = """
import json, os, sys
count = int(sys.argv[1])
rows = {n: {'id': n, 'name': f'row {n * 7919 % count}', 'tags': [str(n), str(n * n)]} for n in range(count)}
order = sorted(rows, key=lambda n: rows[n]['name'])
text = json.dumps([rows[n] for n in order])
back = json.loads(text)
print(len(text), sum(row['id'] * at for at, row in enumerate(back)) % 1000000007, flush=True)
child = os.fork()
if child == 0:
    os._exit(0 if all(rows[n]['id'] == n for n in range(0, count, 10)) else 1)
print(os.waitpid(child, 0)[1])
"""

size = 0


def rows(small):
    return 50_000 if small else 250_000


def ABOUT(small):
    return f"{rows(small):,} dictionaries, sorted, to JSON and back, then a fork"


def prepare(dir, small):
    global size
    size = rows(small)


def work(side, dir):
    with open(f"{dir}/answer", "w") as answer:
        side.run([NEEDS[0], "-I", "-c", TEXT, size], stdout=answer)
    with open(f"{dir}/answer") as answer:
        return answer.read()
