"""perl with a hash of texts, sorted, and a program that it starts."""

NEEDS = ["perl"]
TEXT = r"""
my ($count, %words, $sum) = ($ARGV[0]);
for my $n (1 .. $count) { $words{($n * 7919) % 1000003} .= "word $n "; }
my @order = sort { $words{$a} cmp $words{$b} } keys %words;
for my $n (0 .. $#order) { $sum = ($sum * 31 + length($words{$order[$n]}) + $order[$n]) % 1000000007; }
my $out = `echo started`;
print scalar(@order), " $sum $out";
"""

size = 0


def keys(small):
    return 150_000 if small else 700_000


def ABOUT(small):
    return f"a hash of {keys(small):,} texts, sorted"


def prepare(dir, small):
    global size
    size = keys(small)


def work(side, dir):
    with open(f"{dir}/answer", "w") as answer:
        side.run(["perl", "-e", TEXT, size], stdout=answer, env={"PERL_HASH_SEED": "0"})
    with open(f"{dir}/answer") as answer:
        return answer.read()
