//! Tests in processes of their own: far heaps are process-wide, and some tests end in a signal.
//!
//! A test function calls [`alone`] or [`cases`] with its own name. In the test binary that cargo
//! started this runs the binary once more, for this one test; there the body runs.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Read};
use std::os::unix::process::ExitStatusExt;
use std::panic::resume_unwind;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Names the test and the case that a child runs.
const CHILD: &str = "FARHEAP_TEST_CHILD";
/// A child that takes longer hangs.
const TIME_MAX: Duration = Duration::from_secs(900);

/// How a child ended, and what it wrote on both outputs.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) text: String,
}

impl Ended {
    /// Fails the test when the child failed; passes on its `skipped:` lines.
    pub(crate) fn expect_success(&self) {
        assert!(self.status.success(), "the child ended with {}:\n{}", self.status, self.text);
        self.show_skips();
    }

    /// Fails the test unless one of the signals has ended the child.
    pub(crate) fn expect_signal(&self, one_of: &[i32]) {
        let is_right = self.status.signal().is_some_and(|signal| one_of.contains(&signal));
        assert!(is_right, "the child ended with {}:\n{}", self.status, self.text);
    }

    /// Fails the test unless the child wrote a line that has all parts.
    pub(crate) fn expect_said(&self, parts: &[&str]) {
        let said = self.text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(said, "no line with {parts:?} in:\n{}", self.text);
    }

    /// Whether the child skipped itself; passes its `skipped:` line on.
    pub(crate) fn show_skips(&self) -> bool {
        let reasons = self.text.lines().filter_map(|line| line.split_once("skipped: "));
        let last = reasons.map(|(_, reason)| reason).next_back();
        if let Some(reason) = last {
            println!("skipped: {reason}");
        }
        last.is_some()
    }
}

/// Runs a test's body in a process of its own.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    match case(test) {
        Some(_) => body(),
        None => run(test, "", |_| ()).expect_success(),
    }
}

/// Runs a test's body in a process of its own for each case.
pub(crate) fn cases(test: &str, cases: &[&str], body: impl FnOnce(&str)) {
    match case(test) {
        Some(case) => body(&case),
        None => drop(each_of(cases, |case| run(test, case, |_| ()).expect_success())),
    }
}

/// Calls a function for each case, a few at a time: their processes mostly wait, for a device or for one another.
pub(crate) fn each_of<T: Send>(cases: &[&str], act: impl Fn(&str) -> T + Sync) -> Vec<T> {
    let act = &act;
    let few = |cases: &[&str]| {
        std::thread::scope(|threads| {
            let begun: Vec<_> = cases.iter().map(|case| threads.spawn(move || act(case))).collect();
            let ended = begun.into_iter().map(|thread| thread.join());
            ended.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic))).collect::<Vec<T>>()
        })
    };
    cases.chunks(4).flat_map(few).collect()
}

/// The case to run, in a child that runs this test.
pub(crate) fn case(test: &str) -> Option<String> {
    let value = std::env::var(CHILD).ok()?;
    let (name, case) = value.split_once('/')?;
    (name == test).then(|| case.to_owned())
}

/// Path of a test of this binary, of which `test` is the end.
pub(crate) fn path_of(test: &str) -> &'static str {
    static PATHS: OnceLock<Vec<String>> = OnceLock::new();
    let paths = PATHS.get_or_init(|| {
        let program = std::env::current_exe().expect("the test binary has a path");
        let listed = Command::new(program).args(["--list", "--format", "terse"]).output();
        let text = listed.expect("the test binary lists its tests").stdout;
        let text = String::from_utf8(text).expect("names are text");
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    });
    let is_it = |path: &&String| {
        path.strip_suffix(test).is_some_and(|modules| modules.is_empty() || modules.ends_with("::"))
    };
    let found: Vec<&String> = paths.iter().filter(is_it).collect();
    let [path] = found[..] else { panic!("tests called `{test}`: {found:?}") };
    path
}

/// Runs a case of a test in a child, after `prepare`.
pub(crate) fn run(test: &str, case: &str, prepare: impl FnOnce(&mut Command)) -> Ended {
    run_for(Duration::ZERO, test, case, prepare)
}

/// Runs a case of a test in a child that works for so long.
pub(crate) fn run_for(
    work: Duration,
    test: &str,
    case: &str,
    prepare: impl FnOnce(&mut Command),
) -> Ended {
    start(&[], work, test, case, prepare)
}

/// Runs a case of a test in a child of `wrapper`, a command that takes a command.
pub(crate) fn run_under(
    wrapper: &[&str],
    test: &str,
    case: &str,
    prepare: impl FnOnce(&mut Command),
) -> Ended {
    start(wrapper, Duration::ZERO, test, case, prepare)
}

fn start(
    wrapper: &[&str],
    work: Duration,
    test: &str,
    case: &str,
    prepare: impl FnOnce(&mut Command),
) -> Ended {
    let mut command = command(wrapper, test, case);
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("output");
    let output = File::create(&path).expect("a file");
    command.stdout(output.try_clone().expect("a descriptor")).stderr(output);
    prepare(&mut command);
    let status = wait(command, test, work + TIME_MAX);
    let mut text = Vec::new();
    File::open(&path).and_then(|mut file| file.read_to_end(&mut text)).expect("the output");
    let text = String::from_utf8_lossy(&text).into_owned();
    let ran = text.contains("running 1 test");
    assert!(ran || !status.success(), "there is no test `{test}`:\n{text}");
    Ended { status, text }
}

/// This test binary, for a case of one test, as an argument of `wrapper`.
fn command(wrapper: &[&str], test: &str, case: &str) -> Command {
    let program = std::env::current_exe().expect("the test binary has a path");
    let mut command = match wrapper {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    command
        .args([path_of(test), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, format!("{test}/{case}"))
        .env("RUST_BACKTRACE", "0")
        .env_remove("FARHEAP_CONF")
        .stdin(Stdio::null());
    command
}

/// A child that is killed in the middle of its work.
#[derive(Debug)]
pub(crate) struct Victim {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Victim {
    /// Starts a case of a test.
    pub(crate) fn start(test: &str, case: &str) -> Victim {
        let mut child = command(&[], test, case).stdout(Stdio::piped()).spawn().expect("starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Victim { child, lines }
    }

    /// The rest of the next line that it prints with a word; `None`: it has ended.
    pub(crate) fn said(&mut self, word: &str) -> Option<String> {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        lines.find_map(|line| Some(line.split_once(word)?.1.trim().to_owned()))
    }

    /// Stops it, and waits until it stands still.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.child.id());
        let is_stopped = || {
            let text = std::fs::read_to_string(&stat).expect("a child of this process");
            text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        while !is_stopped() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.is_ok_and(|status| status.success()), "kill -s {name} {pid}");
    }

    /// Kills it. What it has printed can still be read.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("a child of this process");
        self.child.wait().expect("a child of this process");
    }
}

/// A test that fails leaves no process behind, stopped for ever.
impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn wait(mut command: Command, test: &str, time_max: Duration) -> ExitStatus {
    let mut child = command.spawn().expect("the test binary starts");
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of this process") {
            return status;
        }
        if started.elapsed() > time_max {
            child.kill().expect("a child of this process");
            child.wait().expect("a child of this process");
            panic!("{test} hung for {time_max:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
