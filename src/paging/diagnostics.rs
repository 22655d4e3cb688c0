//! What the page handler says when something is lost or fails, on standard error.
//!
//! A handler must not wait for the reader of standard error: a full pipe would stop every fault of
//! the process. So a message goes into an outbox of fixed size, which is sent as far as there is
//! room; the evictor, which looks around ten times a second anyway, sends the rest. No allocation
//! after [`prepare`], and no lock that is waited for: the thread that waits for the handler may
//! hold both the allocator's and `stderr`'s.
//!
//! # Invariants
//! 1. No call waits, except that of a process that ends, for [`LAST_WORDS_MAX`], and that of a
//!    lost page, which mostly ends it, for [`MOMENT`].
//! 2. What is not said is counted, and the count is said.

use crate::base::error::Error;
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::sys::signals::SignalsBlocked;
use crate::sys::stderr::{Sent, send, wait_for_room};
use crossbeam_queue::ArrayQueue;
use std::fmt::Write;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// Bytes of a message; what does not fit is cut.
const LINE_MAX: usize = 512;
/// Messages that wait for room on standard error; more are dropped and counted.
const LINES_MAX: usize = 64;
/// Kinds of messages that are limited; others are not.
const KINDS_MAX: usize = 24;
/// The time for which the messages of one kind are counted. It doubles, up to the maximum, with each
/// window in which there were too many: what goes on for an hour is said some 40 times, not 1,440.
const WINDOW: Duration = Duration::from_secs(10);
const WINDOW_MAX: Duration = Duration::from_secs(640);
/// Messages of one kind in that time; more are counted. A failing device repeats itself for ever.
const WARNINGS_MAX: u32 = 4;
/// The same for lost pages, each of which costs the program something.
const LOST_PAGES_MAX: u32 = 32;
/// How long a process that is about to end waits for room for its last messages.
const LAST_WORDS_MAX: Duration = Duration::from_secs(2);

/// Of a write error: all slots are in use, which is no failure of the device.
pub(in crate::paging) const NO_SLOT: u32 = u32::MAX;

/// How long a lost page's message waits for room: the program may die of the page at once.
const MOMENT: Duration = Duration::from_millis(10);

static OUTBOX: OnceLock<Outbox> = OnceLock::new();

/// Gets memory for messages. To be called before any of the others.
pub(in crate::paging) fn prepare() {
    let _ours = keep_local();
    OUTBOX.get_or_init(Outbox::new);
}

/// Sends what waits for room on standard error, as far as there is some by now.
pub(in crate::paging) fn flush() {
    if let Some(outbox) = OUTBOX.get() {
        outbox.flush(Instant::now());
    }
}

/// A line built on the stack.
#[derive(Clone, Copy, Debug)]
struct Line {
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Line {
    const EMPTY: Line = Line { bytes: [0; LINE_MAX], len: 0 };

    fn new(arguments: std::fmt::Arguments<'_>) -> Line {
        let mut line = Line::EMPTY;
        // Writing into `Line` cannot fail.
        let _ = line.write_fmt(format_args!("farheap: {arguments}"));
        line.bytes[line.len] = b'\n';
        line.len += 1;
        line
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        // A byte is left for the end of the line.
        let room = self.bytes.len() - 1 - self.len;
        let take = text.len().min(room);
        self.bytes[self.len..self.len + take].copy_from_slice(&text.as_bytes()[..take]);
        self.len += take;
        Ok(())
    }
}

/// Messages of one kind.
#[derive(Debug)]
struct Kind {
    what: OnceLock<&'static str>,
    /// When the count began, in milliseconds since the outbox was made.
    since_ms: AtomicU64,
    /// How long it is counted for, in milliseconds.
    window_ms: AtomicU64,
    said: AtomicU32,
    hidden: AtomicU32,
}

impl Kind {
    fn new() -> Kind {
        Kind {
            what: OnceLock::new(),
            since_ms: AtomicU64::new(0),
            window_ms: AtomicU64::new(WINDOW.as_millis() as u64),
            said: AtomicU32::new(0),
            hidden: AtomicU32::new(0),
        }
    }

    /// Whether the window has ended by `now_ms`.
    fn is_over(&self, now_ms: u64) -> bool {
        let since = self.since_ms.load(Ordering::Relaxed);
        now_ms.saturating_sub(since) >= self.window_ms.load(Ordering::Relaxed)
    }

    /// Begins the next window at `now_ms`: a longer one, if more than `most` messages came in the
    /// last one and that has only just ended.
    fn restart(&self, since: u64, now_ms: u64, most: u32) {
        let window = self.window_ms.load(Ordering::Relaxed);
        let repeats = self.said.swap(0, Ordering::Relaxed) > most;
        let goes_on = repeats && now_ms.saturating_sub(since) < 2 * window;
        let (least, longest) = (WINDOW.as_millis() as u64, WINDOW_MAX.as_millis() as u64);
        let next = if goes_on { (2 * window).min(longest) } else { least };
        self.window_ms.store(next, Ordering::Relaxed);
    }
}

/// Messages on their way to standard error.
#[derive(Debug)]
struct Outbox {
    lines: ArrayQueue<Line>,
    /// The line being sent, and how much of it is.
    sending: Mutex<(Line, usize)>,
    dropped: AtomicU64,
    kinds: [Kind; KINDS_MAX],
    /// Messages of all kinds that were not said and not counted aloud yet.
    hidden: AtomicU64,
    epoch: Instant,
}

impl Outbox {
    fn new() -> Outbox {
        Outbox {
            lines: ArrayQueue::new(LINES_MAX),
            sending: Mutex::new((Line::EMPTY, 0)),
            dropped: AtomicU64::new(0),
            kinds: std::array::from_fn(|_| Kind::new()),
            hidden: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Whether one more message of a kind may be said; it is counted otherwise.
    fn admits(&self, what: &'static str, most: u32, now: Instant) -> bool {
        let is_it = |kind: &&Kind| *kind.what.get_or_init(|| what) == what;
        let Some(kind) = self.kinds.iter().find(is_it) else { return true };
        let since = kind.since_ms.load(Ordering::Relaxed);
        let now_ms = self.since_epoch(now);
        if kind.is_over(now_ms) {
            let (order, next) = (Ordering::Relaxed, now_ms);
            if kind.since_ms.compare_exchange(since, next, order, order).is_ok() {
                self.tell_hidden(kind);
                kind.restart(since, now_ms, most);
            }
        }
        if kind.said.fetch_add(1, Ordering::Relaxed) < most {
            return true;
        }
        kind.hidden.fetch_add(1, Ordering::Relaxed);
        self.hidden.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Says how many messages of a kind were not.
    fn tell_hidden(&self, kind: &Kind) {
        let count = kind.hidden.swap(0, Ordering::Relaxed);
        if let Some(what) = kind.what.get()
            && count > 0
        {
            self.hidden.fetch_sub(count.into(), Ordering::Relaxed);
            self.put(Line::new(format_args!("{count} times more: {what}")));
        }
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        // The first window begins with the first message: nothing is as old as the outbox.
        now.saturating_duration_since(self.epoch).as_millis() as u64 + WINDOW.as_millis() as u64
    }

    fn put(&self, line: Line) {
        if self.lines.push(line).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The line being sent; `None`: another thread is sending.
    fn try_send(&self) -> Option<MutexGuard<'_, (Line, usize)>> {
        match self.sending.try_lock() {
            Ok(sending) => Some(sending),
            Err(TryLockError::Poisoned(sending)) => Some(sending.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Sends as much as there is room for; returns whether that was all.
    fn flush(&self, now: Instant) -> bool {
        if self.hidden.load(Ordering::Relaxed) > 0 {
            let now_ms = self.since_epoch(now);
            let over = self.kinds.iter().filter(|kind| kind.is_over(now_ms));
            over.for_each(|kind| self.tell_hidden(kind));
        }
        // What another thread that sends has missed goes with the next flush.
        let Some(mut sending) = self.try_send() else { return false };
        loop {
            let (line, sent) = &mut *sending;
            if *sent == line.len {
                let Some(next) = self.next_line() else { return true };
                (*line, *sent) = (next, 0);
            }
            match send(&line.bytes[*sent..line.len]) {
                Sent::Some(count) => *sent += count,
                Sent::Full => return false,
                Sent::Lost => *sent = line.len,
            }
        }
    }

    fn next_line(&self) -> Option<Line> {
        self.lines.pop().or_else(|| {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            let told = || Line::new(format_args!("{dropped} messages were dropped: nobody reads"));
            (dropped > 0).then(told)
        })
    }
}

/// Returns whether all has been sent.
fn say(what: &'static str, most: u32, arguments: std::fmt::Arguments<'_>) -> bool {
    let Some(outbox) = OUTBOX.get() else { return true };
    // Others wait for a thread that is in the middle of an entry of the queue.
    let _blocked = SignalsBlocked::new();
    let now = Instant::now();
    if outbox.admits(what, most, now) {
        outbox.put(Line::new(arguments));
    }
    outbox.flush(now)
}

/// Says something before the process ends, after all that was said before, as far as anybody reads.
fn say_last(arguments: std::fmt::Arguments<'_>) -> ! {
    const LOOK: Duration = Duration::from_millis(20);
    prepare();
    let outbox = OUTBOX.get().expect("just prepared");
    outbox.kinds.iter().for_each(|kind| outbox.tell_hidden(kind));
    let last = Line::new(arguments);
    if outbox.lines.push(last).is_err() {
        // The oldest has had its time.
        let _ = outbox.lines.force_push(last);
        outbox.dropped.fetch_add(1, Ordering::Relaxed);
    }
    for _ in 0..LAST_WORDS_MAX.as_millis() / LOOK.as_millis() {
        if outbox.flush(Instant::now()) {
            break;
        }
        wait_for_room(LOOK);
    }
    std::process::abort();
}

/// What takes the memory that a page cannot have.
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

/// A page's content is lost; a thread that touches it gets SIGBUS.
pub(in crate::paging) fn lost_page(addr: usize, len: usize, cause: &Error, room: NoRoom) {
    if let Error::LimitExceeded { .. } = cause {
        lost_page_to(addr, len, format_args!("{room}"));
    } else {
        lost_page_to(addr, len, format_args!("{}", Cause(cause)));
    }
}

fn lost_page_to(addr: usize, len: usize, cause: std::fmt::Arguments<'_>) {
    let is_sent = say(
        "a page cannot be brought back; touching it is SIGBUS",
        LOST_PAGES_MAX,
        format_args!(
            "page at {addr:#x} ({len} bytes) cannot be brought back: {cause}; touching it is SIGBUS"
        ),
    );
    if !is_sent {
        wait_for_room(MOMENT);
        flush();
    }
}

/// As [`lost_page`], of inherited memory.
pub(in crate::paging) fn lost_inherited(addr: usize, len: usize, cause: &Error) {
    lost_page_to(addr, len, format_args!("{}", Cause(cause)));
}

/// The machine's memory has failed under a page: the program hears of it as it would without us.
pub(in crate::paging) fn hardware_error(addr: usize) {
    let is_sent = say(
        "hardware memory error in far memory: passing SIGBUS on",
        WARNINGS_MAX,
        format_args!("hardware memory error at {addr:#x}, in far memory: passing SIGBUS on"),
    );
    if !is_sent {
        wait_for_room(MOMENT);
        flush();
    }
}

/// Something went wrong that costs no data.
pub(in crate::paging) fn warn(what: &'static str, cause: &Error) {
    say(what, WARNINGS_MAX, format_args!("{what}: {}", Cause(cause)));
}

/// Something that the program's owner wants to know; `what` tells its kind, for the count.
#[cfg(feature = "heap")]
pub(in crate::paging) fn tell(what: &'static str, text: std::fmt::Arguments<'_>) {
    say(what, WARNINGS_MAX, text);
}

/// The program has locked far memory.
pub(in crate::paging) fn unlocked() {
    let cause = Error::Os { call: "UFFDIO_MOVE or MADV_DONTNEED", errno: crate::sys::EINVAL };
    warn(
        "mlock does not keep far memory in RAM (pin does); locks are taken off as it leaves",
        &cause,
    );
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
    say(WHAT, WARNINGS_MAX, text);
}

/// The handler cannot go on without risking wrong bytes or a hang.
pub(in crate::paging) fn fatal(what: &str, cause: &Error) -> ! {
    say_last(format_args!("fatal: {what}: {}", Cause(cause)))
}

/// Ends the process because what always holds did not.
pub(in crate::paging) fn broken(what: std::fmt::Arguments<'_>) -> ! {
    say_last(format_args!("fatal: {what}"))
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
            _ => f.write_str("unexpected error"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn said(outbox: &Outbox) -> Vec<String> {
        let text = |line: Line| String::from_utf8_lossy(&line.bytes[..line.len]).into_owned();
        std::iter::from_fn(|| outbox.next_line()).map(text).collect()
    }

    #[test]
    fn messages_of_one_kind_are_limited_and_the_others_counted() {
        let outbox = Outbox::new();
        let now = outbox.epoch;
        let admitted = (0..10).filter(|_| outbox.admits("a", 4, now)).count();
        assert_eq!((admitted, outbox.admits("b", 4, now)), (4, true));
        assert!(said(&outbox).is_empty(), "the window is not over");
        assert!(outbox.admits("a", 4, now + WINDOW));
        assert_eq!(said(&outbox), ["farheap: 6 times more: a\n"]);
    }

    #[test]
    fn what_goes_on_is_said_ever_more_rarely_and_anew_after_a_rest() {
        let outbox = Outbox::new();
        let second = |n: u32| outbox.epoch + n * Duration::from_secs(1);
        let admitted = |from: u32, to: u32| {
            (from..to)
                .filter(|n| (0..9).filter(|_| outbox.admits("a", 4, second(*n))).count() > 0)
                .count()
        };
        // Windows begin after 10, 30, 70, 150, 310, 630 s, then every 640 s.
        assert_eq!(admitted(0, 3_600), 11);
        assert_eq!(admitted(6_000, 6_010), 1, "a first window of ten seconds");
        assert_eq!(admitted(6_010, 6_020), 1);
    }

    #[test]
    fn messages_without_room_are_counted() {
        let outbox = Outbox::new();
        (0..LINES_MAX + 3).for_each(|n| outbox.put(Line::new(format_args!("{n}"))));
        let said = said(&outbox);
        assert_eq!((said.len(), &*said[0]), (LINES_MAX + 1, "farheap: 0\n"));
        assert_eq!(said[LINES_MAX], "farheap: 3 messages were dropped: nobody reads\n");
    }

    #[test]
    fn a_long_message_is_cut_and_still_a_line() {
        let line = Line::new(format_args!("{:1000}", 1));
        assert_eq!((line.len, line.bytes[LINE_MAX - 1]), (LINE_MAX, b'\n'));
    }
}
