//! Memory that the kernel reads and writes for a thread after its last instruction: `get_robust_list(2)`, `set_tid_address(2)`.
#![expect(unsafe_code, reason = "reads lists that the C library keeps for the kernel")]

use nix::errno::Errno;
use nix::unistd::Pid;
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Entries of a robust list that the kernel follows at most.
const ENTRIES_MAX: usize = 2048;
/// Bytes of an entry: the address of the next one; and of the word that holds a thread's number.
const ENTRY: usize = size_of::<usize>();
const WORD: usize = size_of::<u32>();
/// `prctl(2)`: where the kernel stores a zero when the thread ends.
const GET_TID_ADDRESS: i32 = 40;

/// The head of a robust list, `struct robust_list_head`.
#[repr(C)]
struct ListHead {
    next: usize,
    /// Bytes from an entry to its word, which may lie before it.
    offset: usize,
    /// An entry that was being added or taken out.
    pending: usize,
}

/// The calling thread's number.
pub(crate) fn current_thread() -> u32 {
    nix::unistd::gettid().as_raw().unsigned_abs()
}

/// True if the kernel is done with a thread of this process. Never with the first one while there are others: it stays
/// as a zombie.
pub(crate) fn is_gone(thread: u32) -> bool {
    // SAFETY: takes no pointers; the signal 0 is none.
    let asked = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, 0) };
    asked != 0 && Errno::last() == Errno::ESRCH
}

/// Calls `keep` for all that the kernel will read or write when the calling thread ends, as addresses and lengths, before it
/// reads them itself. `keep` returns whether the memory is there, now and until the thread is gone; of other memory
/// what the kernel refuses to read ends the list, as it will then.
pub(crate) fn for_each_range(mut keep: impl FnMut(usize, usize) -> bool) {
    if cfg!(miri) {
        return;
    }
    let mut number_at = 0_usize;
    // SAFETY: writes an address to the variable.
    if unsafe { libc::prctl(GET_TID_ADDRESS, &raw mut number_at) } == 0 && number_at != 0 {
        keep_word(number_at, &mut keep);
    }
    let (mut head, mut len) = (0_usize, 0_usize);
    // SAFETY: writes an address and a number to the variables.
    let got = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &raw mut head, &raw mut len) };
    if got != 0 || head == 0 {
        return;
    }
    let is_kept = keep(head, size_of::<ListHead>());
    let field = |offset: usize| read_word(head.wrapping_add(offset), is_kept);
    let next = field(offset_of!(ListHead, next));
    let (Some(mut next), Some(offset), Some(pending)) =
        (next, field(offset_of!(ListHead, offset)), field(offset_of!(ListHead, pending)))
    else {
        return;
    };
    // The lowest bit of an address says what kind of lock it is.
    let untagged = |entry: usize| entry & !1;
    if untagged(pending) != 0 {
        keep_word(untagged(pending).wrapping_add(offset), &mut keep);
    }
    for _ in 0..ENTRIES_MAX {
        let entry = untagged(next);
        if entry == head || entry == 0 {
            return;
        }
        let is_kept = keep(entry, ENTRY);
        keep_word(entry.wrapping_add(offset), &mut keep);
        let Some(behind) = read_word(entry, is_kept) else { return };
        next = behind;
    }
}

/// Keeps a word that the kernel writes. It is written here too, as it is: the page may be protected, so that its first write
/// is a fault as well.
fn keep_word(at: usize, keep: &mut impl FnMut(usize, usize) -> bool) {
    if !keep(at, WORD) || !at.is_multiple_of(WORD) {
        return;
    }
    // SAFETY: mapped, there and aligned; others use it by atomic operations as well, the kernel among them.
    let word = unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(at)) };
    let mut seen = word.load(Ordering::Relaxed);
    while let Err(now) = word.compare_exchange(seen, seen, Ordering::Relaxed, Ordering::Relaxed) {
        seen = now;
    }
}

/// Reads a word; `None` where the kernel does not. Memory that is kept is read without it: it serves far memory in more
/// states than a system call does.
fn read_word(at: usize, is_kept: bool) -> Option<usize> {
    if is_kept && at.is_multiple_of(ENTRY) {
        // SAFETY: mapped, and there; a volatile read of a word that others may write.
        return Some(unsafe { ptr::with_exposed_provenance::<usize>(at).read_volatile() });
    }
    let mut word = 0_usize;
    let to = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: ENTRY };
    let from = libc::iovec { iov_base: ptr::with_exposed_provenance_mut(at), iov_len: ENTRY };
    let this = Pid::this().as_raw();
    // SAFETY: the kernel writes to the variable alone, and refuses addresses where nothing can be read.
    let got = unsafe { libc::process_vm_readv(this, &raw const to, 1, &raw const from, 1, 0) };
    (got == ENTRY as isize).then_some(word)
}
