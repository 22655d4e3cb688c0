"""redis under writes and reads, half each, and its digest of all data."""

import random
import signal
import socket
import time

NEEDS = ["redis-server"]
VALUE = 576
BATCH = 100

size = 0


def keys(small):
    return 40_000 if small else 200_000


def ABOUT(small):
    return f"{keys(small):,} keys of {VALUE} bytes, then as many reads and writes"


def prepare(dir, small):
    global size
    size = keys(small)


class Client:
    """Just enough of the protocol: requests in batches, answers of one line or one text."""

    def __init__(self, path, side):
        self.side = side
        for _ in range(500):
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(path)
                break
            except OSError:
                self.socket.close()
                time.sleep(0.02)
        else:
            raise RuntimeError("redis does not answer")
        self.file = self.socket.makefile("rb")

    def ask(self, requests):
        self.socket.settimeout(self.side.left())
        text = b"".join(b"*%d\r\n%b" % (len(words), b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
                        for words in requests)
        self.socket.sendall(text)
        return [self.answer() for _ in requests]

    def answer(self):
        line = self.file.readline()
        if line[:1] == b"-" or not line:
            raise RuntimeError(f"redis says {line!r}")
        if line[:1] == b"$":
            length = int(line[1:])
            return None if length < 0 else self.file.read(length + 2)[:-2]
        return line[1:-2]


def value(draw):
    return b"%064x" % draw.getrandbits(256) * (VALUE // 64)


def work(side, dir):
    path = f"{dir}/redis"
    server = side.start(["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", dir,
                         "--appendonly", "no", "--enable-debug-command", "yes"])
    client = Client(path, side)
    draw, total = random.Random(1), 0
    try:
        for start in range(0, size, BATCH):
            client.ask([(b"SET", b"key:%d" % key, value(draw)) for key in range(start, start + BATCH)])
        for _ in range(0, size, BATCH):
            # A quarter of the keys is asked for by three quarters of the requests.
            pick = lambda: draw.randrange(size // 4 if draw.random() < 0.75 else size)
            requests = [(b"SET", b"key:%d" % pick(), value(draw)) if draw.random() < 0.5
                        else (b"GET", b"key:%d" % pick()) for _ in range(BATCH)]
            for found in client.ask(requests):
                total = (total * 31 + int(found[:16], 16) if found != b"OK" else total) % (1 << 61)
        digest = client.ask([(b"DEBUG", b"DIGEST")])[0].decode()
    except TimeoutError:
        server.is_late = True
    else:
        client.socket.sendall(b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n")
    if server.is_late:
        server.signal(signal.SIGKILL)
    server.wait(side.deadline)
    return f"{digest} {total}"
