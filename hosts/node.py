"""A JavaScript engine, V8 in Node.js, with objects of its own heap and buffers outside of it."""

NEEDS = ["node"]
TEXT = """
const count = Number(process.argv[1]);
const rows = new Map();
for (let n = 0; n < count; n++) rows.set(n, { id: n, name: `row ${n * 7919 % count}`, tags: [n, n * 2] });
const order = [...rows.keys()].sort((a, b) => rows.get(a).name < rows.get(b).name ? -1 : 1);
const blocks = [];
for (let n = 0; n < count / 50; n++) blocks.push(Buffer.alloc(4096, n % 256));
let sum = 0;
for (let at = 0; at < order.length; at++) sum = (sum + rows.get(order[at]).id * (at % 97)) % 1000000007;
for (const block of blocks) sum = (sum + block[4095]) % 1000000007;
console.log(order.length, sum);
"""

size = 0


def rows(small):
    return 100_000 if small else 500_000


def ABOUT(small):
    return f"V8: {rows(small):,} objects sorted, and {rows(small) // 50:,} buffers of 4 KiB"


def prepare(dir, small):
    global size
    size = rows(small)


def work(side, dir):
    with open(f"{dir}/answer", "w") as answer:
        side.run(["node", "-e", TEXT, size], stdout=answer)
    with open(f"{dir}/answer") as answer:
        return answer.read()
