//! What the tests share: compilers, the library as it was just built, programs that may not be
//! permitted.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Status of a test program that may not do what it tests, and has said why.
pub(crate) const SKIPPED: i32 = 77;

/// What every program is compiled with.
pub(crate) const STRICT: &[&str] =
    &["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g", "-pthread"];

/// What the static library needs, as `rustc --print native-static-libs` says.
const NATIVE: &[&str] = &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// AddressSanitizer sees the program's own memory; far memory is the library's to watch.
const ASAN: &[&str] = &["-fsanitize=address", "-fno-omit-frame-pointer"];

pub(crate) fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether the sources can be read: an unprivileged user may not, in somebody else's clone.
pub(crate) fn sources_are_readable() -> bool {
    let readable = std::fs::File::open(crate_dir().join("include/farheap.h")).is_ok();
    if !readable {
        println!("skipped: {} is closed to this user", crate_dir().display());
    }
    readable
}

/// The directory that cargo builds libraries into: the tests are beside them.
pub(crate) fn build_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    test.parent().expect("a file is in a directory").to_path_buf()
}

/// The library of this build with an extension: the newest, where old ones are left.
pub(crate) fn library(extension: &str) -> PathBuf {
    let dirs = [build_dir(), build_dir().join("..")];
    let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let found = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libfarheap_ffi") && name.ends_with(&format!(".{extension}"))
    });
    let newest = found.max_by_key(|path| {
        std::fs::metadata(path).and_then(|data| data.modified()).expect("a file has a time")
    });
    newest.unwrap_or_else(|| panic!("no libfarheap_ffi.{extension} in {:?}", build_dir()))
}

/// A compiler with the options it is called with first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compiler {
    pub(crate) name: &'static str,
    pub(crate) standard: &'static str,
}

pub(crate) const C: &[Compiler] = &[
    Compiler { name: "gcc", standard: "-std=c11" },
    Compiler { name: "clang", standard: "-std=c11" },
];

pub(crate) const CPP: &[Compiler] = &[
    Compiler { name: "g++", standard: "-std=c++17" },
    Compiler { name: "clang++", standard: "-std=c++20" },
];

/// How many compilers are used, and only to build programs as they are: CI runs the tests a second time as
/// another user: the compilers make the same of them.
fn compilers_max() -> Option<usize> {
    std::env::var("FARHEAP_TEST_COMPILERS").ok()?.parse().ok()
}

/// The compilers of a list that are installed; says which are not.
pub(crate) fn installed(compilers: &[Compiler]) -> Vec<Compiler> {
    let compilers = &compilers[..compilers_max().unwrap_or(usize::MAX).min(compilers.len())];
    let is_there = |compiler: &&Compiler| {
        let there = Command::new(compiler.name).arg("--version").output().is_ok();
        if !there {
            println!("skipped: {} is not installed", compiler.name);
        }
        there
    };
    compilers.iter().filter(is_there).copied().collect()
}

impl Compiler {
    pub(crate) fn command(self) -> Command {
        let mut command = Command::new(self.name);
        command.arg(self.standard).args(STRICT).arg("-I").arg(crate_dir().join("include"));
        command
    }

    /// The options to test a program with: as it is, and with AddressSanitizer where the
    /// compiler has its runtime; says so where it has not.
    pub(crate) fn ways(self) -> Vec<&'static [&'static str]> {
        let dir = tempfile::tempdir().expect("a directory");
        let source = dir.path().join("empty.c");
        std::fs::write(&source, "int main(void) { return 0; }\n").expect("room");
        // Without a standard: this is C and C++.
        let mut link = Command::new(self.name);
        link.args(ASAN).arg(&source).arg("-o").arg(dir.path().join("empty"));
        let mut ways = vec![&[][..]];
        if compilers_max().is_some() {
            return ways;
        }
        if link.output().is_ok_and(|output| output.status.success()) {
            ways.push(ASAN);
        } else {
            println!("skipped: {} has no runtime for AddressSanitizer", self.name);
        }
        ways
    }

    /// Compiles and links a program with the static library.
    pub(crate) fn program(self, source: &Path, to: &Path, options: &[&str]) {
        let mut command = self.command();
        command.args(options).arg(source).arg("-o").arg(to).arg(library("a")).args(NATIVE);
        succeed(&mut command);
    }
}

/// Runs a command that must succeed.
pub(crate) fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// Tiers are kept for ever by design: threads may hold references into one that is gone.
const KEPT: &str = "leak:farheap::heap::far_arenas\n";

/// Runs a compiled test program; see [`run`].
pub(crate) fn run_program(program: &Path) {
    let known = program.with_extension("known");
    std::fs::write(&known, KEPT).expect("room");
    let options = format!("suppressions={}:print_suppressions=0", known.display());
    run(Command::new(program).env("LSAN_OPTIONS", options));
}

/// Runs a test program; one that skips itself has said why.
pub(crate) fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if output.status.code() == Some(SKIPPED) {
        println!("{}", out.lines().last().unwrap_or("skipped: without a reason"));
        return;
    }
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    print!("{out}");
}

/// The functions that the header declares.
pub(crate) fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(crate_dir().join("include/farheap.h")).expect("the header");
    let mut names = BTreeSet::new();
    let mut in_comment = false;
    let mut code = String::new();
    for line in header.lines() {
        let begins = line.trim_start().starts_with("/*") || line.trim_start().starts_with(" *");
        in_comment |= begins;
        if !in_comment && !line.starts_with('#') {
            code.push_str(line.split("/*").next().unwrap_or_default());
            code.push('\n');
        }
        in_comment &= !line.contains("*/");
    }
    for (at, _) in code.match_indices('(') {
        let before = &code[..at];
        let name: String = before
            .chars()
            .rev()
            .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let is_function = name.starts_with("farheap_") || name.starts_with("far_");
        // `farheap_page` and the like name types; functions are followed by their parameters.
        if is_function {
            names.insert(name);
        }
    }
    names
}
