//! Children to which the kernel refuses userfaultfd, as container sandboxes do.

#![expect(unsafe_code, reason = "installs seccomp filters in children")]

use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a child is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Faults of kernel mode.
    KernelFaults,
    /// All of userfaultfd.
    Userfaultfd,
}

const fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Goes on with the next instruction if the comparison holds, else skips `jf`.
const fn jump(code: u32, k: u32, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | code | libc::BPF_K) as u16, jt: 0, jf, k }
}

/// Has the kernel answer `EPERM` to all threads of this process, from now on, what browsers' sandboxes do not know: each advice above
/// 21, `process_madvise`, `membarrier`, `PROCMAP_QUERY`.
pub(crate) fn refuse_new_calls() {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    /// Offsets in `struct seccomp_data`, low halves of the arguments.
    const NUMBER: u32 = 0;
    const SECOND: u32 = 24;
    const THIRD: u32 = 32;
    const ADVICE_MAX: u32 = 21;
    const PROCMAP_QUERY: u32 = 0xC068_6611;
    let (yes, no) = (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    let mut filter = [
        statement(LOAD, NUMBER),
        jump(libc::BPF_JEQ, libc::SYS_process_madvise as u32, 1),
        statement(RETURN, no),
        jump(libc::BPF_JEQ, libc::SYS_membarrier as u32, 1),
        statement(RETURN, no),
        jump(libc::BPF_JEQ, libc::SYS_madvise as u32, 4),
        statement(LOAD, THIRD),
        jump(libc::BPF_JGT, ADVICE_MAX, 1),
        statement(RETURN, no),
        statement(RETURN, yes),
        jump(libc::BPF_JEQ, libc::SYS_ioctl as u32, 3),
        statement(LOAD, SECOND),
        jump(libc::BPF_JEQ, PROCMAP_QUERY, 1),
        statement(RETURN, no),
        statement(RETURN, yes),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes no pointers (PR_SET_NO_NEW_PRIVS).
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let (mode, all) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    #[expect(clippy::disallowed_methods, reason = "libc has no function for it")]
    // SAFETY: the program and its instructions outlive the call.
    let installed = unsafe { libc::syscall(libc::SYS_seccomp, mode, all, &raw const program) };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

/// Starts `command` under a seccomp filter that answers `EPERM`; root is not exempt.
pub(crate) fn refuse(command: &mut Command, what: Refused) {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    /// Offsets in `struct seccomp_data`, low halves of the arguments.
    const NUMBER: u32 = 0;
    const FIRST: u32 = 16;
    const SECOND: u32 = 24;
    const USERFAULTFD_IOC_NEW: u32 = 0xAA00;
    const UFFD_USER_MODE_ONLY: u32 = 1;
    let no = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    // Bits of the flags that keep userfaultfd(2) allowed.
    let excuse = if what == Refused::KernelFaults { UFFD_USER_MODE_ONLY } else { 0 };
    let mut filter = [
        statement(LOAD, NUMBER),
        jump(libc::BPF_JEQ, libc::SYS_userfaultfd as u32, 4),
        statement(LOAD, FIRST),
        jump(libc::BPF_JSET, excuse, 1),
        statement(RETURN, libc::SECCOMP_RET_ALLOW),
        statement(RETURN, no),
        jump(libc::BPF_JEQ, libc::SYS_ioctl as u32, 3),
        statement(LOAD, SECOND),
        jump(libc::BPF_JEQ, USERFAULTFD_IOC_NEW, 1),
        statement(RETURN, no),
        statement(RETURN, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: takes no pointers (PR_SET_NO_NEW_PRIVS).
        let first = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        // SAFETY: the program and its instructions outlive the call (PR_SET_SECCOMP).
        let second = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
        if first == 0 && second == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) };
}
