//! Programs that nobody recompiles: the same answers as on their own memory, with less of it.

use crate::common::{compile, end, installed, permitted, run, static_library};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// What the kernel's number of resident pages may be wrong by, and what comes in between two looks: below
/// 1 MiB on an idle machine. On a busy one the thread that looks waits for a processor.
const SLACK: u64 = 8 * MIB;

/// Runs a program plain and under a limit in MiB on its resident memory, which its code and this
/// library, built for debugging, are in; the answers must be equal. Returns what `--stats` says of it.
fn compare(limit: u64, program: &str, arguments: &[&str], dir: &Path) -> String {
    let plain = end(Command::new(program).args(arguments).current_dir(dir), dir);
    assert!(plain.status.success(), "{program}: {plain:?}");
    let text = format!("{limit}MiB");
    let mut command = run(&["--limit", &text, "--stats"]);
    let far = end(command.arg(program).args(arguments).current_dir(dir), dir);
    assert!(far.status.success(), "{program}: {} {}", far.status, far.errors);
    assert!(far.out == plain.out, "{program}: another answer than plain\n{}", far.errors);
    let bound = limit * MIB + SLACK;
    assert!(far.resident_max <= bound, "{program}: {} of {bound}", far.resident_max);
    far.errors
}

/// Fails unless the program had data on the device.
fn assert_stored(stats: &str) {
    assert!(stats.contains(" far "), "nothing was far: {stats}");
    assert!(!stats.contains(" 0 B written"), "nothing left: {stats}");
}

#[test]
fn sqlite3_has_a_database_in_memory_larger_than_the_limit() {
    if !installed("sqlite3") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "create table t(a integer primary key, b text);
        with recursive c(x) as (select 1 union all select x + 1 from c where x < 400000)
            insert into t select x, hex(x * 7919) || '-' || x from c;
        create index i on t(b);
        select count(*), sum(length(b)), min(b), max(b) from t;
        select sum(a) from t where b > '5';";
    assert_stored(&compare(32, "sqlite3", &[":memory:", text], dir.path()));
}

#[test]
fn sort_sorts_more_than_the_limit() {
    if !installed("sort") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let scattered = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let lines: Vec<String> =
        (0..150_000_u64).map(|n| format!("{:016x} {n}", scattered(n))).collect();
    std::fs::write(dir.path().join("lines"), lines.join("\n")).expect("room");
    let stats = compare(36, "sort", &["-S", "100M", "--parallel=2", "lines"], dir.path());
    assert!(stats.contains(" far "), "nothing was far: {stats}");
}

#[test]
fn python_has_objects_and_starts_programs() {
    if !installed("python3") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "
import subprocess, os, threading
d = {i: str(i) * 3 for i in range(60000)}
l = [[i, i + 1] for i in range(40000)]
b = [bytes([i % 251]) * 40000 for i in range(800)]
def total(): s.append(sum(len(v) for v in d.values()))
s = []
t = [threading.Thread(target=total) for _ in range(4)]
[x.start() for x in t]; [x.join() for x in t]
print(s, sum(map(sum, l)), sum(x[7] for x in b))
print(subprocess.run(['echo', 'run'], capture_output=True).stdout)
print(os.popen('echo popen').read(), os.system('exit 3') >> 8)";
    assert_stored(&compare(44, "python3", &["-c", text], dir.path()));
    let arguments = ["PYTHONMALLOC=malloc", "python3", "-c", text];
    assert_stored(&compare(44, "env", &arguments, dir.path()));
}

#[test]
fn perl_starts_programs_and_has_its_data_in_children() {
    if !installed("perl") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = r#"
my @data = map { "word $_ " x 20 } 1 .. 150000;
my $sum = 0;
for my $n (1 .. 5) { my $out = `echo right $n`; $sum += length $out; }
my @read = qw(sh -c);
open(my $pipe, "-|", @read, "echo from a pipe") or die; print <$pipe>; close $pipe;
my $child = fork;
if (!$child) {
    my $bad = grep { $data[$_ - 1] ne "word $_ " x 20 } 1 .. 150000;
    $data[$_] = $_ for 0 .. 50000;
    my $inner = `echo inner`;
    exit($bad || $inner ne "inner\n" ? 1 : 0);
}
$data[$_] .= "!" for 0 .. 149999;
waitpid $child, 0;
print "$sum $? ", scalar(grep { /^word .* !$/ } @data), "\n";
"#;
    assert_stored(&compare(36, "perl", &["-e", text], dir.path()));
}

#[test]
fn python_has_its_objects_in_processes_that_it_forks() {
    if !installed("python3") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "
import multiprocessing, os
d = {i: str(i) * 3 for i in range(15000)}
b = [bytes([i % 251]) * 40000 for i in range(900)]
def work(n):
    for i in range(n, 15000, 3): assert d[i] == str(i) * 3
    return sum(len(d[i]) for i in range(n, 15000, 3)) + sum(x[9] for x in b)
context = multiprocessing.get_context('fork')
with context.Pool(3) as pool:
    for i in range(0, 15000, 7): d[i] = d[i] + ''
    print(pool.map(work, range(3)))
pid = os.fork()
if pid == 0:
    b[5] = b'new'
    os._exit(0 if b[6] == bytes([6]) * 40000 and os.popen('echo x').read() == 'x\\n' else 1)
print(os.waitpid(pid, 0)[1], len(b[5]))";
    let arguments = ["PYTHONMALLOC=malloc", "python3", "-W", "ignore", "-c", text];
    assert_stored(&compare(44, "env", &arguments, dir.path()));
}

#[test]
fn git_and_the_programs_that_it_starts_have_the_library() {
    if !installed("git") || !installed("sh") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text =
        "export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_DATE='1000000000 +0000' GIT_COMMITTER_DATE='1000000000 +0000'
rm -rf repo && git init -q repo && cd repo && git config user.name a && git config user.email a@b
for n in 1 2 3 4 5 6 7 8 9 10; do echo $n >>file; git add file; git commit -qm \"$n\"; done
git gc -q && git fsck --full 2>&1 && git rev-list --objects --all && git log -p";
    compare(36, "sh", &["-c", text], dir.path());
}

/// Runs a program with a malloc of its own plain and under `farheap run`, which tells that its memory is local.
fn expect_local(program: &Path, arguments: &[&str], dir: &Path) {
    let plain = end(Command::new(program).args(arguments).current_dir(dir), dir);
    assert!(plain.status.success(), "{plain:?}");
    let mut command = run(&["--limit", "64MiB"]);
    let far = end(command.arg(program).args(arguments).current_dir(dir), dir);
    assert!(far.status.success(), "{} {}", far.status, far.errors);
    assert_eq!(far.out, plain.out, "another answer than plain: {}", far.errors);
    let lines: Vec<&str> =
        far.errors.lines().filter(|line| line.starts_with("farheap: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("a malloc of its own ("), "{}", far.errors);
}

#[test]
fn a_program_with_a_malloc_of_its_own_keeps_it_and_is_told_so() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("own_malloc");
    let options = ["-fno-builtin"];
    if permitted() && compile("gcc", &options, include_str!("../c/own_malloc.c"), &program) {
        expect_local(&program, &[], dir.path());
    }
}

#[test]
fn a_program_without_pie_that_takes_the_addresses_of_functions_is_limited() {
    let text = r#"
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        int main(void) {
            static char *blocks[8000];
            void *(*volatile allocate)(size_t) = malloc;
            void (*volatile give_back)(void *) = free;
            long sum = 0;
            for (int n = 0; n < 8000; n++) memset(blocks[n] = allocate(10000), n % 100, 10000);
            for (int n = 0; n < 8000; n++) sum += blocks[n][n], give_back(blocks[n]);
            printf("%ld\n", sum);
            return 0;
        }"#;
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("without_pie");
    let options = ["-fno-builtin", "-fno-pie", "-no-pie"];
    if permitted() && compile("gcc", &options, text, &program) {
        let program = program.to_str().expect("it is named above");
        assert_stored(&compare(44, program, &[], dir.path()));
    }
}

#[test]
fn allocators_that_are_linked_statically_into_a_program_keep_working() {
    if !permitted() || !installed("gcc") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = r#"
        #include <pthread.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        static void *work(void *seed) {
            for (size_t bytes = 100; bytes < 30000000; bytes = bytes * 3) {
                char *some = (char *)malloc(bytes);
                memset(some, 7, bytes);
                if ((some = (char *)realloc(some, bytes * 2))[bytes - 1] != 7) return NULL;
                free(some);
            }
            return seed;
        }
        int main(void) {
            pthread_t threads[8];
            long right = 0;
            for (int n = 0; n < 8; n++) pthread_create(&threads[n], NULL, work, &right);
            for (int n = 0; n < 8; n++) {
                void *ended;
                pthread_join(threads[n], &ended);
                right += ended != NULL;
            }
            printf("%ld\n", right);
            return 0;
        }"#;
    let rust = "fn main() {
            let work = |n: usize| move || (0..300_000).map(|i| vec![n; i % 9 + 1]).collect::<Vec<_>>().len();
            let threads: Vec<_> = (0..8).map(|n| std::thread::spawn(work(n))).collect();
            let large = vec![1_u8; 40 << 20];
            let all: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            println!(\"{all} {}\", large.iter().map(|&byte| u64::from(byte)).sum::<u64>());
        }";
    let libraries = [
        ("libjemalloc.a", "libjemalloc-dev"),
        ("libtcmalloc_minimal.a", "libgoogle-perftools-dev"),
    ];
    for (library, package) in libraries {
        let Some(library) = static_library(library, package) else { continue };
        let options = ["-fno-builtin", "-xnone", &library, "-lstdc++", "-lm", "-ldl"];
        for compiler in ["gcc", "g++"] {
            let program = dir.path().join(compiler);
            if compile(compiler, &options, text, &program) {
                expect_local(&program, &[], dir.path());
            }
        }
        let (source, program) = (dir.path().join("service.rs"), dir.path().join("service"));
        std::fs::write(&source, rust).expect("room");
        let mut rustc = Command::new("rustc");
        rustc.args(["-O", "-o"]).arg(&program).arg(&source);
        // Named behind the C library, whose malloc it would else leave in use.
        let options = ["-Wl,--whole-archive", &library, "-Wl,--no-whole-archive", "-lstdc++"];
        rustc.args(options.map(|option| format!("-Clink-arg={option}")));
        if installed("rustc") {
            assert!(rustc.status().expect("a compiler").success(), "{library}");
            expect_local(&program, &[], dir.path());
        }
    }
}

#[test]
fn a_compiler_with_an_allocator_of_its_own_compiles() {
    if !installed("rustc") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "fn main() { println!(\"{}\", (0..10).sum::<i32>()); }";
    std::fs::write(dir.path().join("sum.rs"), text).expect("room");
    let mut command = run(&["--limit", "64MiB"]);
    let compiled = end(command.args(["rustc", "sum.rs"]).current_dir(dir.path()), dir.path());
    assert!(compiled.status.success(), "{} {}", compiled.status, compiled.errors);
    let ended = end(&mut Command::new(dir.path().join("sum")), dir.path());
    assert_eq!(ended.out, "45\n");
}

#[test]
fn php_has_its_extensions() {
    if !installed("php") || !permitted() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let text = "
ini_set('memory_limit', -1);
for ($n = 0; $n < 40000; $n++) $data[] = ['id' => $n, 'text' => str_repeat(chr(65 + $n % 26), $n % 90)];
usort($data, fn($a, $b) => strcmp($a['text'], $b['text']) ?: $a['id'] - $b['id']);
echo count(get_loaded_extensions()), ' ', md5(json_encode($data)), ' ', iconv('UTF-8', 'UTF-16', 'word'), PHP_EOL;";
    assert_stored(&compare(48, "php", &["-r", text], dir.path()));
}
