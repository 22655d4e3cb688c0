//! The profile of `farheap doctor --seccomp`, as a filter of the command and the program that it runs.

#![expect(unsafe_code, reason = "installs a filter in children")]

use crate::common::{compile, end, farheap, permitted, run};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

macro_rules! numbers {
    ($($name:ident)*) => {
        /// Calls that farheap makes, and those of [`ORDINARY`].
        const NUMBERS: &[(&str, i64)] = &[$((stringify!($name), libc::$name)),*];
    };
}

numbers! {
    SYS_access SYS_arch_prctl SYS_brk SYS_capget SYS_clock_nanosleep SYS_clone SYS_close SYS_close_range
    SYS_dup3 SYS_eventfd2 SYS_execve SYS_exit SYS_exit_group SYS_faccessat2 SYS_fallocate SYS_fcntl SYS_fstat
    SYS_fstatfs SYS_ftruncate SYS_futex SYS_get_robust_list SYS_getcwd SYS_getegid SYS_geteuid SYS_getgid
    SYS_getpid SYS_getppid SYS_getpriority SYS_getrandom SYS_gettid SYS_getuid SYS_io_uring_enter
    SYS_io_uring_setup SYS_ioctl SYS_ioprio_get SYS_ioprio_set SYS_lseek SYS_lstat SYS_madvise SYS_membarrier
    SYS_memfd_create SYS_mlock SYS_mlock2 SYS_mmap SYS_mprotect SYS_mremap SYS_munlock SYS_munmap SYS_newfstatat SYS_open
    SYS_openat SYS_pidfd_open SYS_pipe SYS_pipe2 SYS_poll SYS_ppoll SYS_prctl SYS_pread64 SYS_preadv
    SYS_prlimit64 SYS_process_madvise SYS_process_vm_readv SYS_pwrite64 SYS_pwritev SYS_read SYS_readlink
    SYS_readlinkat SYS_restart_syscall SYS_rseq SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn
    SYS_sched_getaffinity SYS_sched_getscheduler SYS_sched_setaffinity SYS_sched_setscheduler SYS_sched_yield
    SYS_set_robust_list SYS_set_tid_address SYS_sigaltstack SYS_stat SYS_statx SYS_sysinfo SYS_uname SYS_unshare
    SYS_userfaultfd SYS_wait4 SYS_write
}

/// Calls of programs without farheap, which every profile allows: of the loader, the C library, the test's program.
const ORDINARY: &str = "access arch_prctl brk clone execve fstat getcwd getegid geteuid getgid getrandom getuid lstat mremap \
    pipe poll readlink readlinkat set_tid_address stat sysinfo uname";

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Goes on with the next instruction if the comparison holds, else skips `jf`.
fn is_equal(k: u32, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: 0, jf, k }
}

/// The instructions of a profile. What it does not allow ends the process, where runtimes answer with an error, so that
/// nothing is missed. `clone3` does not exist, as in containers.
fn filter(profile: &serde_json::Value) -> Vec<libc::sock_filter> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    /// Offset of the low half of an argument in `struct seccomp_data`.
    const ARGUMENTS: u32 = 16;
    let mut code = vec![
        statement(LOAD, 0),
        is_equal(libc::SYS_clone3 as u32, 1),
        statement(RETURN, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ];
    for rule in profile["syscalls"].as_array().expect("rules") {
        assert_eq!(rule["action"], "SCMP_ACT_ALLOW", "{rule}");
        for name in rule["names"].as_array().expect("names") {
            let name = name.as_str().expect("a name");
            let known = NUMBERS.iter().find(|known| known.0.strip_prefix("SYS_") == Some(name));
            let number = known.unwrap_or_else(|| panic!("{name} is no call that the test knows")).1;
            let argument = &rule["args"][0];
            if argument.is_null() {
                code.extend([
                    is_equal(number as u32, 1),
                    statement(RETURN, libc::SECCOMP_RET_ALLOW),
                ]);
                continue;
            }
            assert_eq!(argument["op"], "SCMP_CMP_EQ", "{rule}");
            let field = |name: &str| argument[name].as_u64().expect("a number") as u32;
            code.extend([
                is_equal(number as u32, 4),
                statement(LOAD, ARGUMENTS + 8 * field("index")),
                is_equal(field("value"), 1),
                statement(RETURN, libc::SECCOMP_RET_ALLOW),
                statement(LOAD, 0),
            ]);
        }
    }
    code.push(statement(RETURN, libc::SECCOMP_RET_KILL_PROCESS));
    code
}

/// Starts a command under a filter.
fn confine(command: &mut Command, mut code: Vec<libc::sock_filter>) {
    let install = move || {
        let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
        // SAFETY: takes no pointers (PR_SET_NO_NEW_PRIVS).
        let first = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: the program and its instructions outlive the call (PR_SET_SECCOMP).
        let second = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
        if first == 0 && second == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) };
}

/// The profile that the command makes of one.
fn profile(base: &serde_json::Value) -> serde_json::Value {
    let mut command = Command::new(farheap());
    command
        .args(["doctor", "--seccomp", "--base", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("the command");
    let mut input = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut input, base.to_string().as_bytes()).expect("the command reads");
    drop(input);
    let output = child.wait_with_output().expect("a child");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_program_runs_under_the_profile_that_doctor_prints_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("confined");
    if !permitted() || !compile("gcc", &[], include_str!("../c/confined.c"), &program) {
        return;
    }
    let ordinary = serde_json::json!({
        "defaultAction": "SCMP_ACT_KILL_PROCESS",
        "syscalls": [{ "names": ORDINARY.split_whitespace().collect::<Vec<_>>(), "action": "SCMP_ACT_ALLOW" }],
    });
    let filter = filter(&profile(&ordinary));
    for config in ["far_limit:8MiB", "far_limit:8MiB,handlers:2"] {
        let mut command = run(&["--config", config, "--stats"]);
        confine(command.arg(&program), filter.clone());
        let ended = end(&mut command, dir.path());
        let said = (ended.status.code(), ended.out.as_str());
        assert_eq!(said, (Some(0), "right\n"), "{config}: {:?} {}", ended.status, ended.errors);
        assert!(!ended.errors.contains(" 0 B written"), "nothing left: {}", ended.errors);
    }
}
