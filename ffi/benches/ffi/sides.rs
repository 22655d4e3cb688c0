//! `side.cpp`, compiled and linked in the ways that hosts do it.

#![expect(unsafe_code, reason = "calls C")]

use crate::common::{self, Compiler, STRICT, succeed};
use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// How a host has the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// A program, the library linked into it: as the Rust side has it.
    Static,
    /// A program linked with the shared library, which is there from its start.
    Shared,
    /// A shared object with the library in it that is loaded while the program runs.
    Late,
}

impl Way {
    pub(crate) const ALL: [Way; 3] = [Way::Static, Way::Shared, Way::Late];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Static => "static",
            Way::Shared => "shared",
            Way::Late => "plug-in",
        }
    }
}

const CPP: Compiler = Compiler { name: "g++", standard: "-std=c++17" };

/// The loops of `side.cpp` in all three ways. They run to the end of the process: they have threads.
pub(crate) struct Sides {
    fixed: Program,
    shared: Program,
    late: Late,
    _dir: tempfile::TempDir,
}

impl Sides {
    /// Compiles and starts the other sides; `None`, and a reason on the way, if that cannot be.
    pub(crate) fn start() -> Option<Sides> {
        if common::installed(&[CPP]).is_empty() {
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let object = at("side.o");
        let source = common::crate_dir().join("benches/ffi/side.cpp");
        succeed(CPP.command().args(["-O2", "-fPIC", "-c", "-o"]).arg(&object).arg(source));
        succeed(CPP.link(&object, &[]).arg("-o").arg(at("static")));
        let shared = &["-shared", "-Wl,-Bsymbolic"];
        succeed(CPP.link(&object, shared).arg("-o").arg(at("late.so")));
        // Under the name that it is looked up by.
        let soname = at(&format!("libfarheap.so.{}", farheap_ffi::abi::FARHEAP_ABI_VERSION));
        std::os::unix::fs::symlink(common::library("so"), &soname).expect("room");
        let mut link = Command::new(CPP.name);
        link.args(STRICT).arg(&object).arg("-o").arg(at("shared")).arg(&soname);
        succeed(link.arg(format!("-Wl,-rpath,{}", dir.path().display())));
        let fixed = Program::start(&at("static"), &at("table1"))?;
        let shared = Program::start(&at("shared"), &at("table2"))?;
        let late = Late::start(&at("late.so"), &at("table3"))?;
        Some(Sides { fixed, shared, late, _dir: dir })
    }

    /// Runs a loop for that many calls: nanoseconds for each, and its answer.
    pub(crate) fn run(&mut self, way: Way, name: &str, calls: u64) -> (f64, u64) {
        match way {
            Way::Static => self.fixed.run(name, calls),
            Way::Shared => self.shared.run(name, calls),
            Way::Late => self.late.run(name, calls),
        }
    }
}

/// A program that measures its loops when it is told to; see `main` of `side.cpp`.
struct Program {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Program {
    fn start(path: &Path, table: &Path) -> Option<Program> {
        let mut command = Command::new(path);
        command.arg(table).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("piped"));
        let mut program = Program { child, to, from };
        // It says so when it cannot start.
        let (line, _) = program.ask("side_contains 16");
        if line.starts_with("skipped") {
            println!("{line}");
            return None;
        }
        Some(program)
    }

    /// Sends a line; returns the one that comes back, and whether it could be sent.
    fn ask(&mut self, line: &str) -> (String, bool) {
        let to = self.to.as_mut().expect("open until the program is dropped");
        let sent = writeln!(to, "{line}").is_ok();
        let mut answer = String::new();
        self.from.read_line(&mut answer).expect("text");
        (answer.trim().to_owned(), sent)
    }

    fn run(&mut self, name: &str, calls: u64) -> (f64, u64) {
        let (line, _) = self.ask(&format!("{name} {calls}"));
        let (ns, answer) = line.split_once(' ').unwrap_or_else(|| panic!("{name}: {line:?}"));
        let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{name}: {line}"));
        (number(ns) as f64 / calls as f64, number(answer))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.to.take());
        let _ = self.child.wait();
    }
}

type Loop = unsafe extern "C" fn(u64) -> u64;

/// A shared object, loaded now; it stays.
struct Late(*mut c_void);

impl Late {
    fn start(path: &Path, table: &Path) -> Option<Late> {
        let text = |path: &Path| CString::new(path.to_str().expect("UTF-8")).expect("no zero");
        // SAFETY: a path; the library's own constructors are farheap's, which do nothing.
        let handle =
            unsafe { libc::dlopen(text(path).as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: reads what the thread's last failure left.
            let reason = unsafe { libc::dlerror() };
            // SAFETY: after a failure there is a message, a string until the next call.
            let reason = unsafe { CStr::from_ptr(reason) };
            panic!("{}", reason.to_string_lossy());
        }
        let late = Late(handle);
        let start = late.symbol("side_start");
        // SAFETY: `side.cpp` defines it so.
        let start: unsafe extern "C" fn(*const c_char) -> bool =
            unsafe { std::mem::transmute(start) };
        // SAFETY: a string; called once.
        unsafe { start(text(table).as_ptr()) }.then_some(late)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("no zero");
        // SAFETY: a library that stays loaded, and a name.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is in side.cpp");
        symbol
    }

    fn run(&mut self, name: &str, calls: u64) -> (f64, u64) {
        // SAFETY: all loops of `side.cpp` have this type.
        let call: Loop = unsafe { std::mem::transmute(self.symbol(name)) };
        let began = Instant::now();
        // SAFETY: `side_start` has been called.
        let answer = unsafe { call(calls) };
        (began.elapsed().as_nanos() as f64 / calls as f64, answer)
    }
}
