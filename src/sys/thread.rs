//! Threads and processors: `sched_setaffinity(2)`, `sched_setscheduler(2)`, `ioprio_set(2)`,
//! `/proc/self/task`.
#![expect(unsafe_code, reason = "sets the policy of this process's threads")]

use super::{failed, refused};
use crate::base::error::Result;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::Pid;
use std::cell::Cell;
use std::io::Read;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

/// Bytes that a thread of the crate takes: what it touches of its stack, and its C library's part.
pub(crate) const THREAD_BYTES: usize = 48 << 10;

/// The processors this process was started with.
static ALL: OnceLock<CpuSet> = OnceLock::new();

/// The processor that a thread of this process last ran on; `None` when it is gone.
///
/// Field 39 of `/proc/self/task/TID/stat`, see `proc_pid_stat(5)`. Allocates nothing.
pub(crate) fn processor_of(thread: u32) -> Option<u32> {
    with_stat(thread, processor_in)
}

/// True if a thread of this process runs or waits for a processor, by field 3 of its `stat` file.
/// `None`: it is gone, or the file cannot be opened, for want of a descriptor or of a mounted
/// `/proc`. Allocates nothing.
pub(crate) fn wants_processor(thread: u32) -> Option<bool> {
    with_stat(thread, |stat| Some(field_in(stat, 3)? == "R"))
}

/// How many page faults a process has had, small and large; `None`: it is gone, or hidden.
pub(crate) fn faults_of(process: u32) -> Option<u64> {
    with_text(format_args!("/proc/{process}/stat"), |stat| {
        let faults = |field| field_in(stat, field)?.parse::<u64>().ok();
        Some(faults(10)? + faults(12)?)
    })
}

/// True if the process has one thread, those that are ending included.
pub(crate) fn is_single() -> bool {
    with_text(format_args!("/proc/self/stat"), |stat| Some(field_in(stat, 20)? == "1"))
        == Some(true)
}

/// Threads of the crate at once that [`is_left_alone`] knows.
const OWN_MAX: usize = 256;
/// Their numbers; 0: free.
static OWN: [AtomicU32; OWN_MAX] = [const { AtomicU32::new(0) }; OWN_MAX];

/// An entry of [`OWN`] until its thread ends.
struct Noted(Option<&'static AtomicU32>);

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.iter().for_each(|place| place.store(0, Ordering::Relaxed));
    }
}

thread_local! {
    static NOTED: Noted = {
        let free = |place: &&AtomicU32| {
            place.compare_exchange(0, current(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Noted(OWN.iter().find(free))
    };
}

/// The calling thread is the crate's until it ends.
pub(super) fn note_own() {
    forget_own_in_children();
    NOTED.with(|_| ());
}

/// Makes forked children forget their parent's threads. To be called before anything that starts a thread in
/// children is registered, which would be forgotten otherwise: what runs in a child runs in the order of
/// its registration.
pub(crate) fn forget_own_in_children() {
    // No `Once`: a child that is forked while a thread is in it waits for that thread for ever. Two may register; to
    // forget twice is to forget.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if cfg!(not(miri)) && !WATCHED.load(Ordering::Acquire) {
        super::fork::in_forked_children(forget_own);
        WATCHED.store(true, Ordering::Release); // Pairs with the Acquire above: it is registered.
    }
}

/// In a forked child, which has none of them.
extern "C" fn forget_own() {
    OWN.iter().for_each(|place| place.store(0, Ordering::Relaxed));
}

/// True if all threads of the program have ended, so that only the crate's are left: the C library ends a
/// process with its last thread, and would wait for them.
pub(crate) fn is_left_alone() -> bool {
    let has_ended = |thread| with_stat(thread, |stat| Some(field_in(stat, 3)? == "Z"));
    // The first thread stays as a zombie while there are others.
    if has_ended(std::process::id()) != Some(true) {
        return false;
    }
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return false };
    let mut threads = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_own = |thread| OWN.iter().any(|own| own.load(Ordering::Relaxed) == thread);
    threads
        .all(|thread: u32| is_own(thread) || has_ended(thread) == Some(true) || is_kernels(thread))
}

/// True if a thread is one that the kernel has made for an io_uring.
fn is_kernels(thread: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.is_ok_and(|name| name.starts_with("iou-"))
}

/// Ends the process as the C library does with its last thread, by a thread that may touch far memory.
pub(crate) fn end_process() -> bool {
    std::thread::Builder::new().spawn(|| std::process::exit(0)).is_ok()
}

/// Starts a thread of the library's, with the caller's signals.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the system has no thread left.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(failed("starting a thread"))
}

/// Reads the `stat` file of a thread of this process.
fn with_stat<T>(thread: u32, take: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    with_text(format_args!("/proc/self/task/{thread}/stat"), take)
}

/// Reads a short file.
fn with_text<T>(name: std::fmt::Arguments<'_>, take: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    use std::io::Write;
    let mut path = [0_u8; 48];
    let mut rest = &mut path[..];
    write!(rest, "{name}").ok()?;
    let unused = rest.len();
    let len = path.len() - unused;
    let mut file = std::fs::File::open(std::str::from_utf8(&path[..len]).ok()?).ok()?;
    let mut text = [0_u8; 1024];
    let got = file.read(&mut text).ok()?;
    take(std::str::from_utf8(&text[..got]).ok()?)
}

/// The processor in the text of a `stat` file.
fn processor_in(stat: &str) -> Option<u32> {
    field_in(stat, 39)?.parse().ok()
}

/// A field behind the name, which is field 2, can hold anything, and ends at the last parenthesis.
fn field_in(stat: &str, number: usize) -> Option<&str> {
    let (_, behind) = stat.rsplit_once(") ")?;
    behind.split(' ').nth(number - 3)
}

/// The calling thread's kernel id.
pub(crate) fn current() -> u32 {
    nix::unistd::gettid().as_raw().unsigned_abs()
}

/// The same, asked once per thread: a system call takes 0.2 us of the 9 that a fault takes which its
/// thread serves itself. Out of date in the thread that a fork goes on with.
pub(crate) fn current_noted() -> u32 {
    thread_local! {
        /// Const and without a destructor, so that it works in signal handlers and at thread exit.
        static ID: Cell<u32> = const { Cell::new(0) };
    }
    let noted = ID.get();
    if noted != 0 {
        return noted;
    }
    let id = current();
    ID.set(id);
    id
}

/// The processors on which the calling thread may run.
#[cfg(test)]
pub(crate) fn allowed() -> Vec<u32> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    (0..CpuSet::count() as u32).filter(|at| set.is_set(*at as usize) == Ok(true)).collect()
}

/// Lets a thread of this process run on all processors of the process but one, or on all where no other is
/// left.
pub(crate) fn keep_off(thread: u32, processor: u32) {
    let all = all_processors();
    let mut rest = *all;
    let _ = rest.unset(processor as usize);
    let none_is_left = rest == CpuSet::new();
    // Being refused costs speed only.
    set_affinity(thread, if none_is_left { all } else { &rest });
}

/// The processors that the process was started with; none where the kernel does not tell them.
fn all_processors() -> &'static CpuSet {
    ALL.get_or_init(|| sched_getaffinity(Pid::from_raw(0)).unwrap_or_default())
}

/// Binds the calling thread to a processor; `false`: not allowed.
pub(crate) fn run_on(processor: u32) -> bool {
    let all = all_processors();
    let mut set = CpuSet::new();
    let is_allowed = all.is_set(processor as usize) == Ok(true);
    is_allowed && set.set(processor as usize).is_ok() && set_affinity(0, &set)
}

/// Lets a thread of this process run on all processors again.
pub(crate) fn run_anywhere(thread: u32) {
    if let Some(all) = ALL.get() {
        // Being refused costs speed only.
        set_affinity(thread, all);
    }
}

/// How a thread shares its processor: it gives way to all others that want it (`SCHED_IDLE`) or takes its
/// share (`SCHED_OTHER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    GivesWay,
    Equal,
}

/// Sets the policy of a thread of this process. The way back from [`Share::GivesWay`] needs
/// `CAP_SYS_NICE` or an `RLIMIT_NICE` of 20, see `sched(7)`.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os): not allowed, or no such thread.
pub(crate) fn set_share(thread: u32, share: Share) -> Result<()> {
    let policy = match share {
        Share::GivesWay => libc::SCHED_IDLE,
        Share::Equal => libc::SCHED_OTHER,
    };
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameters it is given; it checks thread and policy.
    let rc = unsafe { libc::sched_setscheduler(thread.cast_signed(), policy, &raw const none) };
    Errno::result(rc).map(drop).map_err(refused("sched_setscheduler"))
}

/// Keeps the priority of the calling thread's device requests as it is, whatever its scheduling
/// policy becomes.
///
/// The kernel derives it from the policy where a thread has none of its own, and `SCHED_IDLE` gives
/// the idle class. The I/O scheduler `mq-deadline`, the usual one for disks, starts no request of that
/// class while another one is under way: a fault's read waited 7 ms for the evictor's writes, where it
/// takes 0.1 ms. Being refused costs speed only.
pub(crate) fn keep_io_priority() {
    if io_priority() >> CLASS_SHIFT != 0 {
        return; // The program has set one, and it stays.
    }
    // SAFETY: 0 is the calling thread; the call has no other argument that is used.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // As the kernel derives it for an ordinary policy, see `ioprio_set(2)`.
    let level = libc::c_long::from((nice.clamp(-20, 19) + 20) / 5);
    // SAFETY: the call takes numbers only, and changes nothing but this thread's priority.
    unsafe {
        libc::syscall(
            libc::SYS_ioprio_set,
            WHO_THREAD,
            0,
            CLASS_BEST_EFFORT << CLASS_SHIFT | level,
        );
    }
}

/// Of `ioprio_set(2)`, for which the C library has no names.
const WHO_THREAD: libc::c_long = 1;
const CLASS_BEST_EFFORT: libc::c_long = 2;
const CLASS_SHIFT: u32 = 13;

/// The priority that was set for the calling thread's device requests; 0: none was.
fn io_priority() -> libc::c_long {
    // SAFETY: the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_THREAD, 0) }.max(0)
}

/// True if threads of this process may give way and come back: tried once, by a thread that ends,
/// and looked up every time, because privileges can be dropped.
pub(crate) fn may_give_way() -> bool {
    static MAY: OnceLock<bool> = OnceLock::new();
    let could = *MAY.get_or_init(|| {
        let there_and_back = || {
            // A program that runs its threads under another policy has its reasons.
            let ordinary = policy() == libc::SCHED_OTHER;
            ordinary
                && [Share::GivesWay, Share::Equal].iter().all(|share| set_share(0, *share).is_ok())
        };
        std::thread::Builder::new()
            .spawn(there_and_back)
            .is_ok_and(|thread| thread.join().unwrap_or(false))
    });
    could && (may_set_nice() || has_nice_limit())
}

/// True if the calling thread has `CAP_SYS_NICE`, see `capget(2)`.
fn may_set_nice() -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_SYS_NICE: u32 = 23;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, the low half and the high half.
    let mut sets = [0_u32; 6];
    // SAFETY: header and sets have the layout and size that version 3 wants.
    let rc = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    rc == 0 && sets[0] & 1 << CAP_SYS_NICE != 0
}

/// True if `RLIMIT_NICE` allows a nice value of 0, see `getrlimit(2)`.
fn has_nice_limit() -> bool {
    const NICE_0: u64 = 20;
    getrlimit(Resource::RLIMIT_NICE).is_ok_and(|(soft, _)| soft >= NICE_0)
}

/// The calling thread's scheduling policy.
fn policy() -> libc::c_int {
    // SAFETY: 0 is the calling thread; the call has no other argument.
    unsafe { libc::sched_getscheduler(0) }
}

/// 0 is the calling thread.
fn set_affinity(thread: u32, set: &CpuSet) -> bool {
    sched_setaffinity(Pid::from_raw(thread.cast_signed()), set).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_found_behind_a_name_with_parentheses() {
        let zeros = "0 ".repeat(35);
        let stat = format!("17 (a) b) (c) S {zeros}5 0 0");
        assert_eq!(processor_in(&stat), Some(5));
        assert_eq!(processor_in("17 (short) S 1 2"), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_runs_wants_a_processor_and_one_that_sleeps_does_not() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            tell.send(current()).expect("somebody listens");
            ended.recv().expect_err("nothing is sent");
        });
        let thread = told.recv().expect("the thread's id");
        assert_eq!(wants_processor(current()), Some(true));
        while wants_processor(thread) == Some(true) {
            std::thread::yield_now();
        }
        drop(end);
        sleeper.join().expect("no panic");
        assert_eq!(wants_processor(0), None, "no thread has this id");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_runs_where_it_is_bound_to() {
        let bound = std::thread::spawn(|| {
            let thread = current();
            let here = processor_of(thread).expect("the thread runs");
            let allowed = run_on(here);
            let seen = processor_of(thread);
            run_anywhere(thread);
            (here, allowed, seen)
        });
        let (here, allowed, seen) = bound.join().expect("no panic");
        assert!(!allowed || seen == Some(here), "bound to {here}, runs on {seen:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_gave_way_takes_its_share_again() {
        let allowed = may_give_way();
        let is_idle = policy() == libc::SCHED_IDLE; // As `chrt --idle 0 cargo test` makes it.
        let seen = std::thread::spawn(move || {
            let gave = allowed && set_share(current(), Share::GivesWay).is_ok();
            let (low, back) = (policy(), gave && set_share(current(), Share::Equal).is_ok());
            (gave, low, back, policy())
        });
        let (gave, low, back, after) = seen.join().expect("no panic");
        assert_eq!((gave, back), (allowed, allowed));
        assert_eq!(low == libc::SCHED_IDLE, allowed || is_idle);
        assert!(!allowed || after == libc::SCHED_OTHER);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_thread_that_gives_way_keeps_the_priority_of_its_device_requests() {
        let allowed = may_give_way();
        let seen = std::thread::spawn(move || {
            keep_io_priority();
            let before = io_priority();
            let gave = allowed && set_share(current(), Share::GivesWay).is_ok();
            (gave, before, io_priority())
        });
        let (gave, before, after) = seen.join().expect("no panic");
        assert_eq!(gave, allowed);
        assert_eq!(before >> CLASS_SHIFT, CLASS_BEST_EFFORT, "a class of its own");
        assert_eq!(after, before);
    }
}
