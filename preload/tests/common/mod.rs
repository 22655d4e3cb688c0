//! Runs programs by `farheap run`, and plain.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// The status of `farheap run` where it cannot do what it is asked for.
pub(crate) const REFUSED: i32 = 125;

/// How often a running program is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Compilers and options that make programs into which the library cannot be loaded, and the reason.
pub(crate) const WITHOUT_LIBRARY: [(&str, &str, &str); 5] = [
    ("musl-gcc", "-O1", "another C library"),
    ("gcc", "-fsanitize=thread", "ThreadSanitizer"),
    ("gcc", "-fsanitize=address", "AddressSanitizer"),
    ("clang", "-fsanitize=thread", "ThreadSanitizer"),
    ("clang", "-fsanitize=address", "AddressSanitizer"),
];

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) errors: String,
    /// The most of it that was resident, in bytes.
    pub(crate) resident_max: u64,
}

/// The command `farheap`, beside the tests.
pub(crate) fn farheap() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let dir = test.parent().and_then(Path::parent).expect("cargo's directory");
    let path = dir.join("farheap");
    if !path.exists() {
        // The tests of this package alone do not build the command.
        let cargo = std::env::var_os("CARGO").expect("cargo runs the tests, or has built farheap");
        let release = dir.ends_with("release").then_some("--release");
        let built = Command::new(cargo)
            .args(["build", "--locked", "-p", "farheap-cli"])
            .args(release)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status();
        assert!(built.is_ok_and(|status| status.success()), "{} is not there", path.display());
    }
    path
}

/// The command `farheap run` with options.
pub(crate) fn run(options: &[&str]) -> Command {
    let mut command = Command::new(farheap());
    command.arg("run").args(options).arg("--").env_remove("FARHEAP_CONF");
    command.env("FARHEAP_PRELOAD_LIBRARY", library());
    command
}

/// The library of this build: beside the command, or beside the tests.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let deps = test.parent().expect("cargo's directory");
    let name = "libfarheap_preload.so";
    let places = [deps.join(name), deps.join("..").join(name)];
    let newest = places.iter().filter(|path| path.exists()).max_by_key(|path| {
        path.metadata().and_then(|data| data.modified()).expect("a file has a time")
    });
    newest.unwrap_or_else(|| panic!("no {name} at {}", deps.display())).clone()
}

/// Runs a command to its end.
pub(crate) fn end(command: &mut Command, dir: &Path) -> Ended {
    let [out, errors] = ["out", "errors"].map(|name| dir.join(name));
    let file = |path: &Path| std::fs::File::create(path).expect("room for output");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file(&out))
        .stderr(file(&errors))
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // The kernel keeps the maximum, but not beyond the end of the process.
    let mut resident_max = 0;
    let status = loop {
        resident_max = resident_max.max(resident_so_far(child.id()));
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let text = |path: &Path| {
        String::from_utf8_lossy(&std::fs::read(path).expect("the output")).into_owned()
    };
    Ended { status, out: text(&out), errors: text(&errors), resident_max }
}

/// Copies a program, with a process of its own: a child that another test forks meanwhile inherits what this
/// process has open, and what is open for writing cannot be run (execve(2), `ETXTBSY`).
pub(crate) fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status().expect("cp runs");
    assert!(copied.success(), "cp: {copied}");
}

/// The most that a process has had resident since it became its program, in bytes; 0 if it has ended.
fn resident_so_far(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or_default() * 1024
}

/// Whether `farheap run` may run programs here, which is tried once; says why not.
pub(crate) fn permitted() -> bool {
    static REFUSAL: OnceLock<Option<String>> = OnceLock::new();
    let refusal = REFUSAL.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let ended = end(run(&["--limit", "16MiB"]).arg("true"), dir.path());
        if ended.status.code() == Some(REFUSED) {
            let reason = ended.errors.lines().last().unwrap_or("refused without a reason");
            return Some(reason.to_owned());
        }
        assert!(ended.status.success(), "{ended:?}");
        None
    });
    if let Some(reason) = refusal {
        println!("skipped: {reason}");
    }
    refusal.is_none()
}

/// Whether a program is installed; says when it is not.
pub(crate) fn installed(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&paths).any(|dir| dir.join(program).is_file());
    if !there {
        println!("skipped: {program} is not installed");
    }
    there
}

/// Compiles a program of `tests/c`; `false`, and says so, where there is no compiler.
pub(crate) fn compile(compiler: &str, options: &[&str], text: &str, to: &Path) -> bool {
    if !installed(compiler) {
        return false;
    }
    let source = to.with_extension("source");
    std::fs::write(&source, text).expect("room");
    let language = if compiler == "g++" { "c++" } else { "c" };
    let status = Command::new(compiler)
        .args(["-x", language, "-O1", "-Wall", "-Werror", "-pthread"])
        .arg(&source)
        .args(options)
        .arg("-o")
        .arg(to)
        .status()
        .expect("a compiler");
    assert!(status.success(), "{compiler} {to:?}");
    true
}

/// The path of a static library of Debian's, which `package` brings; says when it is not there.
pub(crate) fn static_library(name: &str, package: &str) -> Option<String> {
    let asked = Command::new("gcc").arg(format!("-print-file-name={name}")).output().ok()?;
    let path = String::from_utf8(asked.stdout).ok()?.trim().to_owned();
    // The compiler repeats the name of what it does not find.
    let is_there = Path::new(&path).is_absolute();
    if !is_there {
        println!("skipped: {name} is not installed ({package})");
    }
    is_there.then_some(path)
}
