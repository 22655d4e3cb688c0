//! What the page handler says when something is lost: straight to standard error.
//!
//! No allocation and no lock: the thread that waits for the handler may hold both the allocator's
//! and `stderr`'s.

use crate::base::error::Error;
use crate::sys::write_stderr;
use std::fmt::Write;

/// A line built on the stack; what does not fit is cut.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.len() - self.len;
        let take = text.len().min(room);
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}

fn say(arguments: std::fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 512], len: 0 };
    // Writing into `Line` cannot fail.
    let _ = line.write_fmt(format_args!("farheap: {arguments}\n"));
    write_stderr(&line.bytes[..line.len]);
}

/// A page's content is lost; whoever touches it gets SIGBUS.
pub(super) fn lost_page(addr: usize, len: usize, cause: &Error) {
    say(format_args!(
        "page at {addr:#x} ({len} bytes) cannot be brought back: {}; touching it is SIGBUS",
        Cause(cause)
    ));
}

/// Something went wrong that costs no data.
pub(super) fn warn(what: &str, cause: &Error) {
    say(format_args!("{what}: {}", Cause(cause)));
}

/// The handler cannot go on without risking wrong bytes or a hang.
pub(super) fn fatal(what: &str, cause: &Error) -> ! {
    say(format_args!("fatal: {what}: {}", Cause(cause)));
    std::process::abort();
}

/// Ends the process because what always holds did not.
pub(super) fn broken(what: std::fmt::Arguments<'_>) -> ! {
    say(format_args!("fatal: {what}"));
    std::process::abort();
}

/// Formats the errors a handler meets without allocating.
struct Cause<'a>(&'a Error);

impl std::fmt::Display for Cause<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Error::Os { call, errno } => write!(f, "{call}: errno {errno}"),
            Error::Io { op, offset, len, errno } => {
                write!(f, "{op} of {len} bytes at device offset {offset}: errno {errno} ")?;
                f.write_str(match *errno {
                    5 => "(EIO)",
                    28 => "(ENOSPC, the device is full)",
                    110 => "(ETIMEDOUT, past the deadline)",
                    _ => "",
                })
            }
            Error::Corrupt { slot } => write!(f, "checksum mismatch in slot {slot}"),
            Error::LimitExceeded { .. } => {
                f.write_str("no page can be evicted to make room for it (device full or failing, or all pinned)")
            }
            _ => f.write_str("unexpected error"),
        }
    }
}
