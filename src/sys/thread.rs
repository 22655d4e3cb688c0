//! Threads and processors: `sched_setaffinity(2)`, `/proc/self/task`.
#![expect(unsafe_code, reason = "sets the calling thread's affinity")]

use std::io::Read;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// The processors this process was started with.
static ALL: OnceLock<libc::cpu_set_t> = OnceLock::new();

/// The processor that a thread of this process last ran on; `None` when it is gone.
///
/// Field 39 of `/proc/self/task/TID/stat`, see `proc_pid_stat(5)`. Allocates nothing.
pub(crate) fn processor_of(thread: u32) -> Option<u32> {
    use std::io::Write;
    let mut path = [0_u8; 48];
    let mut rest = &mut path[..];
    write!(rest, "/proc/self/task/{thread}/stat").ok()?;
    let unused = rest.len();
    let len = path.len() - unused;
    let mut file = std::fs::File::open(std::str::from_utf8(&path[..len]).ok()?).ok()?;
    let mut text = [0_u8; 1024];
    let got = file.read(&mut text).ok()?;
    processor_in(std::str::from_utf8(&text[..got]).ok()?)
}

/// The processor in the text of a `stat` file. The name, which can hold anything, ends at the
/// last parenthesis.
fn processor_in(stat: &str) -> Option<u32> {
    const FIELDS_BEHIND_NAME: usize = 39 - 3;
    let (_, behind) = stat.rsplit_once(") ")?;
    behind.split(' ').nth(FIELDS_BEHIND_NAME)?.parse().ok()
}

/// Binds the calling thread to a processor; `false`: not allowed.
pub(crate) fn run_on(processor: u32) -> bool {
    let all = ALL.get_or_init(affinity);
    if processor as usize >= libc::CPU_SETSIZE as usize {
        return false;
    }
    // SAFETY: reads a bit inside of the set, checked above.
    if !unsafe { libc::CPU_ISSET(processor as usize, all) } {
        return false;
    }
    let mut set = empty();
    // SAFETY: CPU_SET sets a bit inside of the set, checked above.
    unsafe { libc::CPU_SET(processor as usize, &mut set) };
    set_affinity(&set)
}

/// Lets the calling thread run on all processors again.
pub(crate) fn run_anywhere() {
    if let Some(all) = ALL.get() {
        // Being refused costs speed only.
        set_affinity(all);
    }
}

fn empty() -> libc::cpu_set_t {
    // SAFETY: a `cpu_set_t` is an array of bits; all zero is the empty set.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn affinity() -> libc::cpu_set_t {
    let mut set = empty();
    // SAFETY: the kernel fills in the set it is given, of the size it is told; 0 is this thread.
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    set
}

fn set_affinity(set: &libc::cpu_set_t) -> bool {
    // SAFETY: the kernel reads the set it is given, of the size it is told; 0 is this thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) == 0 }
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
    fn a_thread_runs_where_it_is_bound_to() {
        let bound = std::thread::spawn(|| {
            // SAFETY: gettid takes nothing and always succeeds.
            let thread = unsafe { libc::gettid() } as u32;
            let here = processor_of(thread).expect("the thread runs");
            let allowed = run_on(here);
            let seen = processor_of(thread);
            run_anywhere();
            (here, allowed, seen)
        });
        let (here, allowed, seen) = bound.join().expect("no panic");
        assert!(!allowed || seen == Some(here), "bound to {here}, runs on {seen:?}");
    }
}
