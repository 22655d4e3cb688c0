"""memcached filled and read."""

import random
import signal
import socket
import time

NEEDS = ["memcached"]
VALUE = 576

size = 0


def keys(small):
    return 40_000 if small else 200_000


def ABOUT(small):
    return f"{keys(small):,} values of {VALUE} bytes, then as many reads and writes"


def prepare(dir, small):
    global size
    size = keys(small)


def work(side, dir):
    path = f"{dir}/memcached"
    server = side.start(["memcached", "-u", "root", "-s", path, "-m", "2048", "-t", "2", "-c", "64"])
    for _ in range(500):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            break
        except OSError:
            connection.close()
            time.sleep(0.02)
    else:
        raise RuntimeError("memcached does not answer")
    file, draw, total = connection.makefile("rwb"), random.Random(1), 0

    def store(key):
        connection.settimeout(side.left())
        data = b"%064x" % draw.getrandbits(256) * (VALUE // 64)
        file.write(b"set key:%d 0 0 %d\r\n%b\r\n" % (key, len(data), data))
        file.flush()
        if file.readline() != b"STORED\r\n":
            raise RuntimeError("memcached does not store")

    try:
        for key in range(size):
            store(key)
        for _ in range(size):
            key = draw.randrange(size // 4 if draw.random() < 0.75 else size)
            if draw.random() < 0.5:
                store(key)
                continue
            file.write(b"get key:%d\r\n" % key)
            file.flush()
            length = int(file.readline().split()[3])
            total = (total * 31 + int(file.read(length + 2)[:16], 16)) % (1 << 61)
            file.readline()
    except TimeoutError:
        server.is_late = True
        server.signal(signal.SIGKILL)
    else:
        server.signal(signal.SIGTERM)
    server.wait(side.deadline)
    return str(total)
