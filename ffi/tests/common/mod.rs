//! What the tests share: compilers, the library as it was just built, programs that may not be
//! permitted.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError};
use tempfile::TempDir;

/// Status of a test program that may not do what it tests, and has said why.
pub(crate) const SKIPPED: i32 = 77;

/// What every program is compiled with.
pub(crate) const STRICT: &[&str] =
    &["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-g1", "-pthread"];

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

    /// The options to test a program with: as it is, and with AddressSanitizer, by the last of a language's compilers that
    /// has its runtime: it finds the same by each. Says so where none has.
    pub(crate) fn ways(self) -> Vec<&'static [&'static str]> {
        static WITH_ASAN: Mutex<BTreeMap<&str, bool>> = Mutex::new(BTreeMap::new());
        let mut ways = vec![&[][..]];
        if compilers_max().is_some() {
            return ways;
        }
        let mut known = WITH_ASAN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut links = |of: &Compiler| *known.entry(of.name).or_insert_with(|| of.links_asan());
        let is_of = |list: &[Compiler]| list.iter().any(|of| of.name == self.name);
        let language = if is_of(C) { C } else { CPP };
        match language.iter().rev().find(|of| links(of)) {
            Some(last) if last.name == self.name => ways.push(ASAN),
            Some(_) => {}
            None => println!("skipped: {} has no runtime for AddressSanitizer", self.name),
        }
        ways
    }

    fn links_asan(self) -> bool {
        let dir = tempfile::tempdir().expect("a directory");
        let source = dir.path().join("empty.c");
        std::fs::write(&source, "int main(void) { return 0; }\n").expect("room");
        // Without a standard: this is C and C++.
        let mut link = Command::new(self.name);
        link.args(ASAN).arg(&source).arg("-o").arg(dir.path().join("empty"));
        link.output().is_ok_and(|output| output.status.success())
    }

    /// A source compiled, which stays for the next run.
    pub(crate) fn object(self, source: &Path, options: &[&str]) -> Made {
        let mut command = self.command();
        command.args(options).arg("-c").arg(source);
        // With the headers beside it, and those of the library.
        let include = crate_dir().join("include");
        let mut from = vec![source.to_path_buf()];
        let own = source.parent().filter(|dir| dir.starts_with(crate_dir()));
        for dir in [Some(include.join("farmalloc").as_path()), Some(&include), own] {
            let entries = dir.map(|dir| fs::read_dir(dir).expect("a directory").flatten());
            from.extend(entries.into_iter().flatten().map(|entry| entry.path()));
        }
        make(command, source, &from)
    }

    /// A program that is linked with the static library, which stays for the next run.
    pub(crate) fn program(self, source: &Path, options: &[&str]) -> Made {
        let object = self.object(source, options);
        let command = self.link(object.path(), options);
        make(command, source, &[object.path().to_path_buf(), library("a")])
    }

    /// Links a source or an object with the static library, into what follows.
    pub(crate) fn link(self, from: &Path, options: &[&str]) -> Command {
        let mut command = self.command();
        command.args(options).arg(from).arg(library("a")).args(["-Wl,--strip-debug"]).args(NATIVE);
        command
    }
}

/// A file that a compiler has made.
#[derive(Debug)]
pub(crate) struct Made {
    path: PathBuf,
    /// Where it does not stay.
    _dir: Option<TempDir>,
}

impl Made {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Has a command make a file from others, unless one is there that the same command of the same compiler has made
/// since they changed. Users who may not write where cargo builds have their own for the moment.
fn make(mut command: Command, source: &Path, from: &[PathBuf]) -> Made {
    static MAKING: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let version = Command::new(command.get_program()).arg("--version").output();
    let mut hash = DefaultHasher::new();
    format!("{command:?}{:?}", version.expect("it is installed").stdout).hash(&mut hash);
    let stem = source.file_stem().and_then(OsStr::to_str).expect("UTF-8");
    let name = format!("{stem}-{:016x}", hash.finish());
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = place.join(&name);
    let mut making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let own = Arc::clone(making.entry(path.clone()).or_default());
    drop(making);
    let _alone = own.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = |path: &Path| fs::metadata(path).and_then(|data| data.modified());
    let latest = from.iter().map(|path| changed(path).expect("a source")).max();
    if changed(&path).is_ok_and(|made| Some(made) > latest) {
        return Made { path, _dir: None };
    }
    let shared = tempfile::tempdir_in(place);
    let stays = shared.is_ok();
    let dir = shared.or_else(|_| tempfile::tempdir()).expect("a directory");
    let new = dir.path().join(&name);
    succeed(command.arg("-o").arg(&new));
    if !stays {
        return Made { path: new, _dir: Some(dir) };
    }
    // Whole at once: another user may be about to run it.
    fs::rename(&new, &path).expect("a place beside it");
    Made { path, _dir: None }
}

/// A source of which this is the text, where it stays.
pub(crate) fn generated(name: &str, text: &str) -> Made {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let path = place.join(name);
    if fs::read_to_string(&path).is_ok_and(|old| old == text) {
        return Made { path, _dir: None };
    }
    if fs::write(&path, text).is_ok() {
        return Made { path, _dir: None };
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    fs::write(&path, text).expect("room");
    Made { path, _dir: Some(dir) }
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

/// A directory in memory for what a program writes: on a disk some of these programs took ten times as long, and did to it
/// what the tests of the library do.
pub(crate) fn in_memory() -> TempDir {
    // Of a container it may be small.
    let asked = Command::new("stat").args(["-f", "-c", "%a %S", "/dev/shm"]).output();
    let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let numbers = said.unwrap_or_default();
    let room: u64 = numbers.split_whitespace().map(|part| part.parse().unwrap_or(0)).product();
    let there = (room >= 2 << 30).then(|| tempfile::tempdir_in("/dev/shm"));
    there.and_then(Result::ok).unwrap_or_else(on_disk)
}

pub(crate) fn on_disk() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// Runs a compiled test program; see [`run`].
pub(crate) fn run_program(program: &Path) {
    run_program_in(in_memory(), program);
}

/// The same with a directory for what it writes.
pub(crate) fn run_program_in(dir: TempDir, program: &Path) {
    let known = dir.path().join("known");
    std::fs::write(&known, KEPT).expect("room");
    let options = format!("suppressions={}:print_suppressions=0", known.display());
    let mut command = Command::new(program);
    command.env("LSAN_OPTIONS", options).env("TMPDIR", dir.path()).current_dir(dir.path());
    run(&mut command);
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
