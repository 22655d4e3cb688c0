//! Messages of the page handler when something is lost or fails ([`messages`]).

use crate::base::error::Error;
use crate::base::units::ByteCount;
use crate::sys::messages::{self, WARNINGS_MAX};

/// Messages of lost pages in a window, each of which costs the program something.
const LOST_PAGES_MAX: u32 = 32;

/// Of a write error: all slots are in use, which is no failure of the device.
pub(in crate::paging) const NO_SLOT: u32 = u32::MAX;

/// Holders of the memory that a page cannot have.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct NoRoom {
    pub(in crate::paging) limit: ByteCount,
    pub(in crate::paging) tables: ByteCount,
    pub(in crate::paging) pinned: ByteCount,
    /// Why writing back fails; 0 when it does not, [`NO_SLOT`] when the device is full.
    pub(in crate::paging) errno: u32,
}

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let NoRoom { limit, tables, pinned, errno } = self;
        write!(
            f,
            "no page can be evicted to make room for it: of a limit of {limit}, {tables} are "
        )?;
        write!(f, "tables, {pinned} are pinned, ")?;
        match *errno {
            0 => f.write_str("and the device takes what is written"),
            NO_SLOT => f.write_str("and the device is full"),
            errno => write!(f, "and writes to the device fail: errno {errno}"),
        }
    }
}

/// A page has waited for room for long, and waits on.
pub(in crate::paging) fn waits_for_room(room: NoRoom) {
    const WHAT: &str = "a thread waits for its page";
    let text = format_args!(
        "{WHAT}: {room}; threads use more pages at once than that leaves: raise the limit, or pin less"
    );
    messages::warn(WHAT, text);
}

/// Kind of the message below.
pub(in crate::paging) const WAITS_FOR_THREAD: &str = "a thread waits for one that has a page";

/// A page or a chunk is in a thread's hands for long, for which it needs microseconds. At once: the evictor, which sends
/// messages, may be the one that waits.
pub(in crate::paging) fn waits_for_thread() {
    let text = format_args!("{WAITS_FOR_THREAD}, and hangs or gets no processor");
    messages::tell_at_once(WAITS_FOR_THREAD, WARNINGS_MAX, text);
}

/// A page's content is lost; a thread that touches it gets SIGBUS.
pub(in crate::paging) fn lost_page(addr: usize, cause: &Error, room: NoRoom) {
    if let Error::LimitExceeded { .. } = cause {
        lost_page_to(addr, format_args!("{room}"));
    } else {
        lost_page_to(addr, format_args!("{}", Cause(cause)));
    }
}

fn lost_page_to(addr: usize, cause: std::fmt::Arguments<'_>) {
    messages::tell_at_once(
        "a page cannot be brought back; touching it is SIGBUS",
        LOST_PAGES_MAX,
        format_args!("page at {addr:#x} cannot be brought back: {cause}; touching it is SIGBUS"),
    );
}

/// As [`lost_page`], of inherited memory.
pub(in crate::paging) fn lost_inherited(addr: usize, cause: &Error) {
    lost_page_to(addr, format_args!("{}", Cause(cause)));
}

/// The machine's memory has failed under a page: the program hears of it as it would without us.
pub(in crate::paging) fn hardware_error(addr: usize) {
    messages::tell_at_once(
        "hardware memory error in far memory: passing SIGBUS on",
        WARNINGS_MAX,
        format_args!("hardware memory error at {addr:#x}, in far memory: passing SIGBUS on"),
    );
}

/// Something went wrong that costs no data.
pub(in crate::paging) fn warn(what: &'static str, cause: &Error) {
    messages::warn(what, format_args!("{what}: {}", Cause(cause)));
}

/// The program has locked far memory.
pub(in crate::paging) fn unlocked() {
    let cause = Error::Os { call: "UFFDIO_MOVE or MADV_DONTNEED", errno: crate::sys::EINVAL };
    warn(
        "mlock does not keep far memory in RAM (pin does); locks are taken off as it leaves",
        &cause,
    );
}

/// A region begins whose pages do not leave by MOVE.
pub(in crate::paging) fn leaves_by_copy() {
    const WHAT: &str = "far memory leaves by copies here (Linux before 6.8)";
    let what_to_do = "what a direct or asynchronous read, or a registered buffer of io_uring, brings into it is \
                      lost unless the range is pinned";
    messages::warn(WHAT, format_args!("{WHAT}: {what_to_do}"));
}

/// Pages cannot leave memory although they should.
pub(in crate::paging) fn pages_stay(kept: usize, of: usize) {
    const WHAT: &str = "pages that cannot leave memory";
    let why = "the kernel reads or writes there (registered buffers, I/O under way), or they were \
               written and may not be written any more (mprotect)";
    messages::warn(WHAT, format_args!("{WHAT}: {kept} of {of} that were to leave; {why}"));
}

/// A write failed that its store has space for as far as the store's bytes go; `room` is what there is
/// space for on its file system.
pub(in crate::paging) fn write_failed(cause: &Error, room: ByteCount) {
    const WHAT: &str = "write-back failed; the pages stay in memory";
    if !matches!(cause, Error::Io { errno: crate::sys::ENOSPC, .. }) {
        return warn(WHAT, cause);
    }
    let what_to_do =
        "free space on its file system, or have it reserved at the start: `reserve:on`";
    let cause = Cause(cause);
    let text = format_args!("{WHAT}: {cause}; there is space for {room}; {what_to_do}");
    messages::warn(WHAT, text);
}

/// The handler cannot go on without risking wrong bytes or a hang.
pub(in crate::paging) fn fatal(what: &str, cause: &Error) -> ! {
    messages::end(format_args!("fatal: {what}: {}", Cause(cause)))
}

/// Ends the process because what always holds did not.
pub(in crate::paging) fn broken(what: std::fmt::Arguments<'_>) -> ! {
    messages::end(format_args!("fatal: {what}"))
}

/// Formats the errors a handler meets without allocating.
struct Cause<'a>(&'a Error);

impl std::fmt::Display for Cause<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Error::Os { call, errno } => write!(f, "{call}: errno {errno}"),
            Error::Io { op, store, offset, len, errno } => {
                write!(f, "{op} of {len} bytes at offset {offset} of {store}: errno {errno} ")?;
                f.write_str(match *errno {
                    5 => "(EIO)",
                    28 => "(ENOSPC, the device is full)",
                    110 => "(ETIMEDOUT, past the deadline)",
                    _ => "",
                })
            }
            Error::Corrupt { store, slot } => {
                write!(f, "checksum mismatch in slot {slot} of {store}")
            }
            Error::LimitExceeded { reason } if reason.is_empty() => {
                f.write_str("no page can be evicted to make room for it")
            }
            Error::LimitExceeded { reason } => f.write_str(reason),
            Error::Unsupported { why, .. } => f.write_str(why),
            _ => f.write_str("unexpected error"),
        }
    }
}
