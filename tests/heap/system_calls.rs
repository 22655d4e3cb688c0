//! The system calls of the library, recorded by the kernel and compared with the table of the docs.
//!
//! The thread of the test and all that it starts are under a filter that asks for each call
//! (`SECCOMP_RET_USER_NOTIF`); another thread of the process notes the call and lets it go on.
//!
//! Guards: the interface.

#![expect(unsafe_code, reason = "installs a filter, answers its questions, forks")]
#![expect(clippy::disallowed_methods, reason = "the calls of a program, and those of the filter")]

use crate::common::child::{case, each_of, run};
use crate::common::{Dice, heap};
use crate::kernel::Buffer;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

const PAGE: &str = include_str!("../../book/src/reference/limits.md");
const BEGIN: &str = "| call | start | later | forked children |\n|---|---|---|---|\n";

/// When calls are made: the columns of the table.
const TIMES: [&str; 3] = ["start", "later", "forked children"];
const START: usize = 0;
const LATER: usize = 1;
const CHILD: usize = 2;

/// The second child touches one page of this number: the first one has made all calls already.
const SPARSE: usize = 8;

/// How lines of a child begin.
const MADE: &str = "made ";
const OWN: &str = "made by the library's own threads ";

/// The column for what the thread of the test calls at present; that of others is its own.
static TIME: AtomicUsize = AtomicUsize::new(START);
/// The thread of the test is in a function of the library.
static IS_INSIDE: AtomicBool = AtomicBool::new(false);
static IS_OVER: AtomicBool = AtomicBool::new(false);
static THREAD: AtomicI32 = AtomicI32::new(0);

/// A call that was made: its number, the argument that filters look at, and when it was; by a thread of the library,
/// or by one of the program.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Made {
    number: i32,
    argument: Option<u64>,
    time: usize,
    is_own: bool,
}

macro_rules! names {
    ($of:ident: $($name:ident)*) => {
        const $of: &[(&str, i64)] = &[$((stringify!($name), libc::$name as i64)),*];
    };
}

names! { CALLS:
    SYS_accept4 SYS_access SYS_arch_prctl SYS_brk SYS_capget SYS_clock_gettime SYS_clock_nanosleep SYS_clone SYS_clone3
    SYS_close SYS_close_range SYS_connect SYS_dup SYS_dup2 SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_epoll_wait SYS_eventfd2 SYS_execve SYS_exit SYS_exit_group SYS_faccessat2 SYS_fadvise64 SYS_fallocate SYS_fcntl
    SYS_fdatasync SYS_flock SYS_fstat SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_getcpu SYS_getcwd SYS_getdents64
    SYS_getegid SYS_geteuid SYS_getgid SYS_getpid SYS_getpriority SYS_getrandom SYS_getrlimit SYS_getrusage SYS_gettid
    SYS_getuid SYS_io_uring_enter SYS_io_uring_register SYS_io_uring_setup SYS_ioctl SYS_ioprio_get SYS_ioprio_set
    SYS_getppid SYS_kill SYS_linkat SYS_lseek SYS_madvise SYS_mbind SYS_membarrier SYS_memfd_create SYS_mincore SYS_mlock SYS_mlock2
    SYS_mmap SYS_mprotect SYS_mremap SYS_munlock SYS_munmap SYS_nanosleep SYS_newfstatat SYS_open SYS_openat SYS_pidfd_getfd SYS_pidfd_open SYS_pipe
    SYS_pipe2 SYS_poll SYS_ppoll SYS_prctl SYS_pread64 SYS_preadv SYS_preadv2 SYS_prlimit64 SYS_process_madvise SYS_process_vm_readv
    SYS_pwrite64 SYS_pwritev SYS_pwritev2 SYS_read SYS_readlink SYS_readlinkat SYS_readv SYS_rename SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sched_getaffinity
    SYS_sched_getattr SYS_sched_getparam SYS_sched_getscheduler SYS_sched_setaffinity SYS_sched_setattr
    SYS_sched_setscheduler SYS_sched_yield SYS_sendmsg SYS_set_mempolicy SYS_set_robust_list SYS_setpriority
    SYS_setrlimit SYS_sigaltstack SYS_socket SYS_stat SYS_statfs SYS_statx SYS_sysinfo SYS_tgkill SYS_timer_create
    SYS_timer_delete SYS_timer_settime SYS_timerfd_create SYS_timerfd_settime SYS_umask SYS_uname SYS_unlink
    SYS_unlinkat SYS_unshare SYS_userfaultfd SYS_vfork SYS_wait4 SYS_waitid SYS_write SYS_writev
}

names! { ADVICE:
    MADV_NORMAL MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MADV_DONTNEED MADV_FREE MADV_REMOVE MADV_DONTFORK MADV_DOFORK
    MADV_MERGEABLE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTDUMP MADV_DODUMP MADV_WIPEONFORK MADV_KEEPONFORK MADV_COLD
    MADV_PAGEOUT MADV_POPULATE_READ MADV_POPULATE_WRITE MADV_DONTNEED_LOCKED MADV_COLLAPSE
}

names! { OPTIONS:
    PR_SET_NAME PR_GET_NAME PR_SET_VMA PR_SET_DUMPABLE PR_GET_DUMPABLE PR_SET_TIMERSLACK PR_SET_PTRACER
    PR_SET_MEMORY_MERGE PR_SET_THP_DISABLE PR_GET_THP_DISABLE
}

names! { COMMANDS:
    F_DUPFD F_DUPFD_CLOEXEC F_GETFD F_SETFD F_GETFL F_SETFL F_OFD_SETLK F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS
}

/// From `linux/userfaultfd.h`, `linux/fs.h`, `linux/io_uring.h`.
const REQUESTS: &[(&str, i64)] = &[
    ("USERFAULTFD_IOC_NEW", 0xAA00),
    ("UFFDIO_API", 0xC018_AA3F),
    ("UFFDIO_REGISTER", 0xC020_AA00),
    ("UFFDIO_UNREGISTER", 0x8010_AA01),
    ("UFFDIO_WAKE", 0x8010_AA02),
    ("UFFDIO_COPY", 0xC028_AA03),
    ("UFFDIO_ZEROPAGE", 0xC020_AA04),
    ("UFFDIO_MOVE", 0xC028_AA05),
    ("UFFDIO_WRITEPROTECT", 0xC018_AA06),
    ("UFFDIO_CONTINUE", 0xC020_AA07),
    ("UFFDIO_POISON", 0xC020_AA08),
    ("PAGEMAP_SCAN", 0xC060_6610),
    ("PROCMAP_QUERY", 0xC068_6611),
    ("FS_IOC_GETFLAGS", 0x8008_6601),
    ("BLKGETSIZE64", 0x8008_1272),
    ("BLKSSZGET", 0x1268),
    ("BLKDISCARD", 0x1277),
    ("TCGETS", 0x5401),
];

/// From `linux/seccomp.h`: `SECCOMP_IOCTL_NOTIF_SET_FLAGS`, `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`.
const SET_FLAGS: libc::c_ulong = 0x4008_2104;
const SYNC_WAKE_UP: u64 = 1;

/// The name of a number, without its prefix.
fn name(of: &[(&'static str, i64)], number: i64) -> String {
    let known = of.iter().find(|known| known.1 == number);
    known.map_or_else(|| format!("{number:#x}"), |known| known.0.replacen("SYS_", "", 1))
}

impl Made {
    /// A line of a child: whose call it is, the column, the call, its argument.
    fn line(self) -> String {
        let Made { number, argument, time, is_own } = self;
        let names = match i64::from(number) {
            libc::SYS_madvise | libc::SYS_process_madvise => ADVICE,
            libc::SYS_prctl => OPTIONS,
            libc::SYS_fcntl => COMMANDS,
            _ => REQUESTS,
        };
        let argument = argument.map_or("yes".to_owned(), |argument| {
            format!("`{}`", name(names, argument.cast_signed()))
        });
        let by = if is_own { OWN } else { MADE };
        format!("{by}{}/{}/{argument}", TIMES[time], name(CALLS, number.into()))
    }
}

/// Which argument of a call a filter looks at.
fn argument(data: &libc::seccomp_data) -> Option<u64> {
    let at = match i64::from(data.nr) {
        libc::SYS_prctl => 0,
        libc::SYS_ioctl | libc::SYS_fcntl => 1,
        libc::SYS_madvise => 2,
        libc::SYS_process_madvise => 3,
        _ => return None,
    };
    Some(data.args[at] & u64::from(u32::MAX))
}

/// When a thread has made a call, and whether it is one of the library; `None`: it is the test's own.
fn time_of(thread: u32) -> Option<(usize, bool)> {
    let time = TIME.load(Ordering::Relaxed);
    if thread == THREAD.load(Ordering::Relaxed).cast_unsigned() {
        return IS_INSIDE.load(Ordering::Relaxed).then_some((time, false));
    }
    // Not allocated: the process may be forking.
    let mut path = [0_u8; 64];
    let mut rest = &mut path[..];
    std::io::Write::write_fmt(&mut rest, format_args!("/proc/self/task/{thread}")).ok()?;
    // SAFETY: a string of C.
    let is_here = unsafe { libc::access(path.as_ptr().cast(), libc::F_OK) } == 0;
    Some(if is_here { (time, true) } else { (CHILD, false) })
}

/// Notes all calls; when the test is over, prints them and ends the process.
fn record(listener: libc::c_int) -> ! {
    let mut made: Vec<Made> = Vec::with_capacity(4096);
    // A call and its answer stay on one processor (Linux 6.6; else it fails).
    // SAFETY: takes no pointers.
    unsafe { libc::ioctl(listener, SET_FLAGS, SYNC_WAKE_UP) };
    loop {
        // SAFETY: all zeros is a valid value, and what the kernel asks for.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: there is room for the question.
        let rc = unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut asked) };
        if rc != 0 {
            continue; // The thread was killed, or a signal came.
        }
        if let Some((time, is_own)) = time_of(asked.pid) {
            let argument = argument(&asked.data);
            let call = Made { number: asked.data.nr, argument, time, is_own };
            if !made.contains(&call) {
                made.push(call);
            }
        }
        if IS_OVER.load(Ordering::Relaxed) {
            println!(); // The harness has begun a line.
            made.iter().for_each(|call| println!("{}", call.line()));
            std::process::exit(0);
        }
        let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: 0, flags };
        // SAFETY: reads the answer. (It fails where the thread has been killed.)
        unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    }
}

/// Has the kernel ask for each call of this thread and of what it starts. `false`: it does not know this, or asks another.
fn ask_for_calls() -> bool {
    static LISTENER: AtomicI32 = AtomicI32::new(-1);
    std::thread::spawn(|| {
        while LISTENER.load(Ordering::Acquire) < 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        record(LISTENER.load(Ordering::Acquire))
    });
    let code = (libc::BPF_RET | libc::BPF_K) as u16;
    let ask = libc::sock_filter { code, jt: 0, jf: 0, k: libc::SECCOMP_RET_USER_NOTIF };
    let mut filter = [ask];
    let program = libc::sock_fprog { len: 1, filter: filter.as_mut_ptr() };
    // SAFETY: takes no pointers (PR_SET_NO_NEW_PRIVS).
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: takes no arguments.
    THREAD.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    // SAFETY: the program and its instruction outlive the call.
    let listener = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    if listener < 0 {
        println!("skipped: no seccomp listener: {}", std::io::Error::last_os_error());
        return false;
    }
    LISTENER.store(listener as i32, Ordering::Release);
    true
}

/// Calls a function of the library.
fn inside<T>(call: impl FnOnce() -> T) -> T {
    IS_INSIDE.store(true, Ordering::Relaxed);
    let result = call();
    IS_INSIDE.store(false, Ordering::Relaxed);
    result
}

/// All that the library does, under a filter.
fn use_all(conf: &str) {
    if !ask_for_calls() {
        return;
    }
    let Some(heap) = inside(|| heap(conf)) else { return };
    TIME.store(LATER, Ordering::Relaxed);
    let mut dice = Dice::new(5);
    let blocks = 14 << 8; // 14 MiB: more than the limits of 8 and 12.
    let mut kept = inside(|| Buffer::random(blocks, &mut dice));
    let dropped = inside(|| Buffer::new(blocks / 2));
    let of_each = |bytes: usize, buffer: &Buffer| {
        buffer.bytes().iter().step_by(bytes).fold(0_u8, |a, b| a ^ b)
    };
    let sum = |buffer: &Buffer| of_each(512, buffer);
    let right = inside(|| sum(&kept));
    inside(|| heap.region().evict_all()).expect("evict");
    assert_eq!(inside(|| sum(&kept)), right);
    for pages in [1, SPARSE] {
        let some_right = inside(|| of_each(pages * 4096, &kept));
        // SAFETY: the child reads memory and ends.
        let child = inside(|| unsafe { libc::fork() });
        if child == 0 {
            let some_of_half = kept.bytes_mut().chunks_mut(4096).take(blocks / 2).step_by(pages);
            some_of_half.for_each(|block| block[1] ^= 1);
            // A child's child has another way to its memory.
            // SAFETY: as above.
            let second = unsafe { libc::fork() };
            let mut status = 0;
            if second > 0 {
                // SAFETY: there is room for the status.
                unsafe { libc::waitpid(second, &raw mut status, 0) };
            }
            let is_right = of_each(pages * 4096, &kept) == some_right && status == 0;
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: there is room for the status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        // Others inherit nothing, and end.
        let is_inherited = !["in_thread", "encrypt", "install", "metadata"]
            .iter()
            .any(|option| conf.contains(option));
        assert!(status == 0 || !is_inherited, "a child: {status:#x}");
    }
    assert_eq!(inside(|| sum(&kept)), right);
    inside(|| {
        drop(dropped);
        heap.purge();
        let _ = heap.stats();
        drop(kept);
        // So that what is done when nothing happens is done.
        std::thread::sleep(Duration::from_millis(1500));
        heap.shutdown().expect("an end");
    });
    IS_OVER.store(true, Ordering::Relaxed);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// What a table allows: columns, calls and arguments, as children print them.
fn calls_of(table: &str) -> BTreeSet<String> {
    let mut calls = BTreeSet::new();
    for line in table.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let (call, cells) = cells.split_first().expect("a row has cells");
        for (time, cell) in TIMES.iter().zip(cells) {
            let arguments = cell.split(", ").filter(|argument| !argument.is_empty());
            let call = call.trim_matches('`');
            calls.extend(arguments.map(|argument| format!("{time}/{call}/{argument}")));
        }
    }
    calls
}

/// A table of calls.
fn table_of(calls: &BTreeSet<String>) -> String {
    let parts = |line: &str| -> [String; 3] {
        let mut parts = line.splitn(3, '/').map(str::to_owned);
        [(); 3].map(|()| parts.next().expect("three parts"))
    };
    let calls: Vec<[String; 3]> = calls.iter().map(|line| parts(line)).collect();
    let names: BTreeSet<&String> = calls.iter().map(|[_, name, _]| name).collect();
    names.into_iter().fold(String::new(), |mut table, name| {
        write!(table, "| `{name}` |").expect("a string");
        for time in TIMES {
            let here = calls.iter().filter(|[at, call, _]| at == time && call == name);
            let arguments: Vec<&str> = here.map(|[_, _, argument]| argument.as_str()).collect();
            write!(table, " {} |", arguments.join(", ")).expect("a string");
        }
        table.replace("|  |", "| |") + "\n"
    })
}

/// `FARHEAP_WRITE=1 cargo test --test heap the_page` adds what it records to the table of book/src/reference/limits.md.
#[test]
fn the_page_has_every_system_call_of_the_library() {
    const TEST: &str = "system_calls::the_page_has_every_system_call_of_the_library";
    if let Some(conf) = case(TEST) {
        return use_all(&conf);
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/book/src/reference/limits.md");
    let is_written = std::env::var_os("FARHEAP_WRITE").is_some();
    // Else not read at run time: another user may run the test, without access to the sources.
    let page = match is_written {
        true => std::fs::read_to_string(path).expect("the page can be read"),
        false => PAGE.to_owned(),
    };
    let begin = page.find(BEGIN).expect("the page has the table") + BEGIN.len();
    let len = page[begin..].find("\n\n").map_or(page.len() - begin, |end| end + 1);
    let (table, rest) = page[begin..].split_at(len);
    let listed = calls_of(table);
    let (mut made, mut own) = (BTreeSet::new(), BTreeSet::new());
    let kinds = [
        "far_limit:8MiB",
        "limit:96MiB",
        "far_limit:128MiB,install:copy",
        "far_limit:8MiB,io:sync,handlers:1,readahead:off",
        "far_limit:8MiB,mode:in_thread",
        "far_limit:8MiB,encrypt:on,wipe:zero",
        "far_limit:12MiB,far_metadata:on,check:on",
    ];
    for ended in each_of(&kinds, |conf| run(TEST, &format!("capacity:256MiB,{conf}"), |_| ())) {
        ended.expect_success();
        if ended.show_skips() {
            return;
        }
        for line in ended.text.lines() {
            if let Some(call) = line.strip_prefix(OWN) {
                own.insert(call.to_owned());
            } else if let Some(call) = line.strip_prefix(MADE) {
                made.insert(call.to_owned());
            }
        }
    }
    assert!(made.contains("start/mmap/yes"), "nothing was recorded: {made:?}");
    // Whether a thread of the library comes to a call before its start has returned depends on when it runs.
    let is_listed = |line: &String| {
        let (_, call) = line.split_once('/').expect("parts");
        [START, LATER].iter().any(|time| listed.contains(&format!("{}/{call}", TIMES[*time])))
    };
    own.retain(|line| !is_listed(line));
    made.append(&mut own);
    if is_written {
        let new = [&page[..begin], &table_of(&(&listed | &made)), rest].concat();
        return std::fs::write(path, new).expect("the page can be written");
    }
    let missing: Vec<&String> = made.difference(&listed).collect();
    assert!(
        missing.is_empty(),
        "calls that the table of book/src/reference/limits.md lacks: {missing:#?}"
    );
    assert_eq!(table_of(&listed), table, "the table is not in order");
}
