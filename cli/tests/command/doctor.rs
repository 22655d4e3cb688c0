//! `farheap doctor` as a script sees it: output and exit status.

#[path = "../../../tests/common/refuse.rs"]
#[expect(dead_code, reason = "other tests refuse more")]
mod refuse;

use refuse::{Refused, refuse};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A configuration that does not depend on the machine's memory.
const CONF: &str = "far_limit:64MiB";

fn doctor(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farheap"));
    command.arg("doctor").args(arguments).env("FARHEAP_CONF", CONF);
    command.output().expect("the program runs")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// The line of a check: `VERDICT  name  finding`.
fn line<'a>(text: &'a str, name: &str) -> &'a str {
    let found = text.lines().find(|line| line.get(6..).is_some_and(|rest| rest.starts_with(name)));
    found.unwrap_or_else(|| panic!("no check `{name}` in:\n{text}"))
}

/// Whether the tests run as root; the kernel shows it as the owner of `/proc/self`.
fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").expect("/proc").uid() == 0
}

#[test]
fn a_good_directory_passes_and_is_left_empty() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = doctor(&["--dir", dir.path().to_str().expect("UTF-8")]);
    let text = text(&output);
    assert!(line(&text, "kernel").starts_with("PASS  kernel"), "{text}");
    assert!(line(&text, "configuration").contains("limit 64.0 MiB"), "{text}");
    assert!(line(&text, "directory").contains(dir.path().to_str().expect("UTF-8")), "{text}");
    assert_eq!(fs::read_dir(dir.path()).expect("read_dir").count(), 0);
    let failed = text.lines().any(|line| line.starts_with("FAIL"));
    assert_eq!(output.status.code(), Some(i32::from(failed)), "{text}");
}

#[test]
fn a_missing_device_fails_with_a_command_and_exit_status_one() {
    let output = doctor(&["--device", "/dev/no-such-device"]);
    let text = text(&output);
    assert!(line(&text, "device").starts_with("FAIL"), "{text}");
    assert!(text.contains("lsblk --paths"), "{text}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_missing_file_passes_when_a_capacity_says_how_large_to_make_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let conf = format!("far_limit:64MiB,capacity:1MiB,device:{}/store", dir.path().display());
    let found = text(&doctor(&["--config", &conf]));
    assert!(line(&found, "free space").starts_with("PASS"), "{found}");
    assert_eq!(fs::read_dir(dir.path()).expect("read_dir").count(), 0);
}

#[test]
fn a_device_file_is_judged_without_being_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let bytes = [b"precious".as_slice(), &[0; 1 << 20]].concat();
    fs::write(&path, &bytes).expect("write");
    let argument = path.to_str().expect("UTF-8");
    let found = text(&doctor(&["--device", argument]));
    assert!(line(&found, "contents").starts_with("FAIL"), "{found}");
    assert!(found.contains(&format!("FARHEAP_CONF=device:{argument},overwrite:on")), "{found}");
    assert!(line(&found, "contents").ends_with("data at byte 0"), "{found}");
    let conf = format!("device:{argument},overwrite:on");
    let allowed = text(&doctor(&["--config", &conf]));
    assert!(line(&allowed, "contents").starts_with("WARN"), "{allowed}");
    assert!(line(&found, "device").contains("regular file of 1.0 MiB"), "{found}");
    assert_eq!(fs::read(&path).expect("read"), bytes);
    fs::write(&path, [0; 4096]).expect("write");
    let found = text(&doctor(&["--device", argument]));
    assert!(line(&found, "device").starts_with("FAIL"), "{found}");
    assert!(found.contains("smaller than the 1.0 MiB needed"), "{found}");
}

#[test]
fn what_blkid_recognizes_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("swap");
    fs::write(&path, vec![0; 4 << 20]).expect("write");
    let made = Command::new("mkswap").arg(&path).output();
    let asked = Command::new("blkid").arg("--probe").arg(&path).output();
    if ![made, asked].into_iter().all(|run| run.is_ok_and(|output| output.status.success())) {
        return println!("skipped: no mkswap or no blkid");
    }
    let found = text(&doctor(&["--device", path.to_str().expect("UTF-8")]));
    assert!(line(&found, "contents").ends_with(" (swap)"), "{found}");
}

#[test]
fn a_directory_is_not_a_device_and_a_file_not_a_directory() {
    let found = text(&doctor(&["--device", "/"]));
    assert!(line(&found, "device").contains("neither a block device nor"), "{found}");
    let found = text(&doctor(&["--dir", "/proc/self/status"]));
    assert!(line(&found, "directory").starts_with("FAIL"), "{found}");
}

#[test]
fn a_wrong_configuration_fails_and_names_the_key() {
    let output = doctor(&["--config", "far_limit:64MiB,hanlders:4"]);
    let text = text(&output);
    assert!(line(&text, "configuration").contains("did you mean `handlers`?"), "{text}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn strict_turns_a_warning_into_exit_status_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    fs::write(&path, vec![1; 1 << 20]).expect("write");
    let argument = path.to_str().expect("UTF-8");
    let relaxed = doctor(&["--device", argument]);
    let failed = text(&relaxed).lines().any(|line| line.starts_with("FAIL"));
    assert_eq!(relaxed.status.code(), Some(i32::from(failed)));
    assert_eq!(doctor(&["--device", argument, "--strict"]).status.code(), Some(1));
}

#[test]
fn json_is_one_object_with_the_same_checks() {
    let dir = tempfile::tempdir().expect("a directory");
    let argument = dir.path().to_str().expect("UTF-8");
    let output = doctor(&["--dir", argument, "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let checks = report["checks"].as_array().expect("a list");
    let table = text(&doctor(&["--dir", argument]));
    for check in checks {
        let name = check["name"].as_str().expect("a name");
        let verdict = check["verdict"].as_str().expect("a verdict");
        assert!(line(&table, name).starts_with(verdict), "{name}: {verdict}\n{table}");
    }
    assert!(checks.len() >= 13, "{report:#}");
    let fails = checks.iter().any(|check| check["verdict"] == "FAIL");
    assert_eq!(report["verdict"] == "FAIL", fails);
}

#[test]
fn a_profile_for_containers_is_printed_or_the_file_named_that_is_none() {
    let dir = tempfile::tempdir().expect("a directory");
    let base = dir.path().join("base.json");
    let argument = base.to_str().expect("UTF-8");
    for text in [None, Some("{}")] {
        if let Some(text) = text {
            fs::write(&base, text).expect("write");
        }
        let output = doctor(&["--seccomp", "--base", argument]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{output:?}");
        assert!(errors.starts_with(&format!("farheap: {argument}: ")), "{errors}");
    }
    let calls = doctor(&["--seccomp"]).stdout;
    fs::write(&base, &calls).expect("write");
    let added = doctor(&["--seccomp", "--base", argument]).stdout;
    assert_eq!(added, calls, "what has all is left as it is");
    assert_eq!(doctor(&["--base", argument]).status.code(), Some(2));
}

#[test]
fn output_into_a_pipe_has_no_colours() {
    assert!(!text(&doctor(&["--dir", "/tmp"])).contains('\x1b'));
}

#[test]
fn help_tells_the_exit_status_and_a_wrong_option_is_status_two() {
    let help = text(&doctor(&["--help"]));
    assert!(help.contains("Exit status:") && help.contains("--strict"), "{help}");
    assert_eq!(doctor(&["--colour"]).status.code(), Some(2));
}

#[test]
fn a_sandbox_that_refuses_userfaultfd_is_seen_through() {
    let under = |refused| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farheap"));
        refuse(command.arg("doctor").env("FARHEAP_CONF", CONF), refused);
        command.output().expect("the program runs")
    };
    let output = under(Refused::Userfaultfd);
    assert!(line(&text(&output), "userfaultfd").starts_with("FAIL"), "{}", text(&output));
    assert_eq!(output.status.code(), Some(1));
    let found = text(&under(Refused::KernelFaults));
    assert!(line(&found, "userfaultfd").starts_with("WARN"), "{found}");
    assert!(found.contains("fails with EFAULT"), "{found}");
}

#[test]
fn an_unprivileged_user_is_told_what_is_missing_and_how_to_repair_it() {
    let has_setpriv = Command::new("setpriv").arg("--version").stdout(Stdio::null()).status();
    if !is_root() || has_setpriv.is_err() {
        println!("skipped: needs root and setpriv to become another user");
        return;
    }
    // A copy where every user may run it: the build's directory may be closed to others.
    let dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    let program = dir.path().join("farheap");
    // By another process: a child that a test beside this one forks inherits what this process has open, and what
    // is open for writing cannot be run (execve(2), `ETXTBSY`).
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_farheap")).arg(&program).status();
    assert!(copied.expect("cp runs").success());
    let closed = dir.path().join("closed");
    fs::write(&closed, vec![0; 1 << 20]).expect("write");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o600)).expect("chmod");
    let as_nobody = |arguments: &[&Path]| {
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"])
            .arg(&program)
            .arg("doctor")
            .args(arguments)
            .env("FARHEAP_CONF", CONF)
            .output();
        output.expect("setpriv runs")
    };
    let found = text(&as_nobody(&["--dir".as_ref(), dir.path()]));
    if kernel_mode_is_open_to_all() {
        assert!(line(&found, "userfaultfd").starts_with("PASS"), "{found}");
    } else {
        assert!(!line(&found, "userfaultfd").starts_with("PASS"), "{found}");
        assert!(found.contains("sudo setfacl -m u:$USER:rw /dev/userfaultfd"), "{found}");
        assert!(found.contains("fails with EFAULT"), "{found}");
    }
    let output = as_nobody(&["--device".as_ref(), &closed]);
    let found = text(&output);
    assert!(line(&found, "device").contains("Permission denied"), "{found}");
    assert!(found.contains("sudo setfacl -m u:$USER:rw "), "{found}");
    assert_eq!(output.status.code(), Some(1));
}

/// Whether this machine gives every user kernel-mode faults.
fn kernel_mode_is_open_to_all() -> bool {
    let device = fs::metadata("/dev/userfaultfd");
    let by_device = device.is_ok_and(|meta| meta.permissions().mode() & 0o006 == 0o006);
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    by_device || setting.trim() == "1"
}
