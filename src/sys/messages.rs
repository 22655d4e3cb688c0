//! The one way in which the library prints messages: lines to the program's logger, or to standard error.
//!
//! A thread that serves faults must not wait for a reader, and must not run a logger, which may allocate far
//! memory or wait for anything. So it only puts a line into an outbox of fixed size (`tell`): no allocation
//! after `prepare`, no lock, and no system call but for the signal mask. Others take it from there.
//!
//! | who | when | does |
//! |---|---|---|
//! | evictors, children, the maintenance thread | ten times a second | `flush`: sends to standard error as far as there is room, or wakes the log's thread |
//! | `farheap-log`, which is there if a logger is | when it is woken | calls the logger |
//! | the program's threads, at the end of a call that may have said something (`Deliver`) | then | either |
//!
//! A logger is set where `log::max_level()` is not off. A forked child does not call it for what it has inherited: its
//! locks may be held by threads of the parent. Lines of a process that is about to end, or mostly is, go to standard error at
//! once, logger or not (`tell_at_once`, `end`).
//!
//! # Invariants
//! 1. No call waits, except that of a process that ends, for `LAST_WORDS_MAX`, and those that mostly
//!    end it or are a program's, for `MOMENT`.
//! 2. What is not said is counted, and the count is said.
//! 3. The logger is called by `farheap-log` and by threads of the program in calls of theirs, without a lock of
//!    this crate.

use crate::base::local::keep_local;
use crate::sys::fork::PerProcess;
use crate::sys::signals::SignalsBlocked;
use crate::sys::stderr::{self, Sent, send, wait_for_room};
use crossbeam_queue::ArrayQueue;
pub(crate) use log::Level;
use std::cell::Cell;
use std::fmt::{Arguments, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Bytes of a message; what does not fit is cut.
const LINE_MAX: usize = 1024;
/// Messages that wait; more are dropped and counted.
const LINES_MAX: usize = 32;
/// Kinds of messages that are limited; others are not.
const KINDS_MAX: usize = 32;
/// The time for which the messages of one kind are counted. It doubles, up to the maximum, with each
/// window in which there were too many: what goes on for an hour is said some 40 times, not 1,440.
const WINDOW: Duration = Duration::from_secs(10);
const WINDOW_MAX: Duration = Duration::from_secs(640);
/// Messages of one kind in that time; more are counted. A failing device repeats itself for ever.
pub(crate) const WARNINGS_MAX: u32 = 4;
/// How long a process that is about to end waits for room for its last messages.
const LAST_WORDS_MAX: Duration = Duration::from_secs(2);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(20);
/// How long others wait for room that may: the program may die of what is said at once.
const MOMENT: Duration = Duration::from_millis(10);

/// Beginning of lines on standard error, and the target of records.
const NAME: &str = "farheap";

static OUTBOX: PerProcess<Outbox> = PerProcess::new();
static LOG_THREAD: PerProcess<LogThread> = PerProcess::new();

thread_local! {
    /// How many `Deliver` of this thread are alive, one more in a call of the logger. Const and without a
    /// destructor, so that it works at thread exit.
    static DELIVERS: Cell<u32> = const { Cell::new(0) };
}

/// Keeps standard error as it is now, and gets memory for messages.
pub(crate) fn prepare() {
    stderr::keep();
    outbox();
}

/// Keeps standard error as it is now: for `farheap run`, whose library is the first code of a program.
pub use crate::sys::stderr::keep as keep_standard_error;

/// Prints lines on standard error, and waits for room for at most `LAST_WORDS_MAX`: for `farheap run`, whose programs have no
/// logger of this library's.
pub fn say(text: &str) {
    stderr::keep();
    let outbox = outbox();
    for line in text.lines() {
        outbox.put(Line::new(Level::Warn, format_args!("{line}")));
    }
    outbox.send_all(LAST_WORDS_MAX);
}

/// As [`tell`], a few times in a window.
pub(crate) fn warn(kind: &'static str, text: Arguments<'_>) {
    tell(kind, WARNINGS_MAX, text);
}

/// Puts a warning into the outbox; messages of a `kind` beyond `most` in a window are counted instead.
pub(crate) fn tell(kind: &'static str, most: u32, text: Arguments<'_>) {
    note(Level::Warn, kind, most, text);
}

/// Prints now that something was lost, which the program mostly ends by.
pub(crate) fn tell_at_once(kind: &'static str, most: u32, text: Arguments<'_>) {
    if !note(Level::Error, kind, most, text) {
        return;
    }
    let outbox = outbox();
    if let Some(log) = LogThread::if_logged() {
        // The logger is told too, but may be too late.
        let _ = send(Line::new(Level::Error, text).bytes());
        log.unpark();
    } else if !outbox.flush(Instant::now()) {
        wait_for_room(MOMENT);
        outbox.flush(Instant::now());
    }
}

/// Puts a message into the outbox; returns whether it is printed and not only counted.
fn note(level: Level, kind: &'static str, most: u32, text: Arguments<'_>) -> bool {
    let outbox = outbox();
    // Others wait for a thread that is in the middle of an entry of the queue.
    let _blocked = SignalsBlocked::new();
    let is_admitted = outbox.admits(kind, most, Instant::now());
    if is_admitted {
        outbox.put(Line::new(level, text));
    }
    is_admitted
}

/// Sends what waits, as far as there is room on standard error by now, or has it logged.
pub(crate) fn flush() {
    let Some(outbox) = OUTBOX.get().filter(|outbox| outbox.has_any()) else { return };
    match LogThread::if_logged() {
        Some(log) => log.unpark(),
        None => drop(outbox.flush(Instant::now())),
    }
}

/// Prints all that waits and a last message, as far as anybody reads, and ends the process.
pub(crate) fn end(text: Arguments<'_>) -> ! {
    stderr::keep();
    let outbox = outbox();
    outbox.kinds.iter().for_each(|kind| outbox.tell_hidden(kind));
    let last = Line::new(Level::Error, text);
    if outbox.lines.push(last).is_err() {
        // The oldest has had its time.
        let _ = outbox.lines.force_push(last);
        outbox.dropped.fetch_add(1, Ordering::Relaxed);
    }
    outbox.send_all(LAST_WORDS_MAX);
    std::process::abort();
}

/// A call of the program that may say something: when the outermost one of a thread ends, what waits is
/// delivered. To be made before the call takes a lock.
#[must_use = "messages are delivered when this is dropped"]
pub(crate) struct Deliver(());

impl Deliver {
    pub(crate) fn new() -> Deliver {
        DELIVERS.set(DELIVERS.get() + 1);
        prepare();
        look_for_logger();
        Deliver(())
    }
}

impl Drop for Deliver {
    fn drop(&mut self) {
        if DELIVERS.get() == 1 {
            deliver();
        }
        DELIVERS.set(DELIVERS.get() - 1);
    }
}

/// Starts the log's thread where a logger was set since the last look.
pub(crate) fn look_for_logger() {
    if is_logger_set() && LogThread::if_logged().is_none() {
        LogThread::start();
    }
}

fn deliver() {
    let outbox = outbox();
    if is_logger_set() {
        outbox.log_all();
    } else {
        outbox.send_all(MOMENT);
    }
}

/// A logger that takes nothing at all cannot be told from none.
fn is_logger_set() -> bool {
    log::max_level() != log::LevelFilter::Off
}

fn outbox() -> &'static Outbox {
    OUTBOX.get().unwrap_or_else(|| {
        let _ours = keep_local();
        OUTBOX.get_or_make(Outbox::new)
    })
}

/// The thread that calls the logger where the program's own threads do not.
#[derive(Default)]
struct LogThread {
    is_started: AtomicBool,
    thread: OnceLock<Thread>,
}

impl LogThread {
    /// The thread, if what waits is for the logger.
    fn if_logged() -> Option<&'static Thread> {
        LOG_THREAD.get()?.thread.get().filter(|_| is_logger_set())
    }

    fn start() {
        let _ours = keep_local();
        let log = LOG_THREAD.get_or_make(LogThread::default);
        if log.is_started.swap(true, Ordering::Relaxed) {
            return;
        }
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new().name("farheap-log".to_owned()).spawn(|| {
            let _ours = keep_local();
            SignalsBlocked::for_good();
            loop {
                outbox().log_all();
                std::thread::park();
            }
        });
        match thread {
            Ok(thread) => drop(log.thread.set(thread.thread().clone())),
            // The next call tries again.
            Err(_) => log.is_started.store(false, Ordering::Relaxed),
        }
    }
}

/// A line built on the stack.
#[derive(Clone, Copy, Debug)]
struct Line {
    level: Level,
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Line {
    const EMPTY: Line = Line { level: Level::Warn, bytes: [0; LINE_MAX], len: 0 };

    fn new(level: Level, text: Arguments<'_>) -> Line {
        let mut line = Line { level, ..Line::EMPTY };
        // Writing into `Line` cannot fail.
        let _ = line.write_fmt(format_args!("{NAME}: {text}"));
        line.bytes[line.len] = b'\n';
        line.len += 1;
        line
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Gives it to the logger.
    fn log(&self) {
        let text = String::from_utf8_lossy(&self.bytes[NAME.len() + 2..self.len - 1]);
        let metadata = log::Metadata::builder().level(self.level).target(NAME).build();
        let logger = log::logger();
        if self.level <= log::max_level() && logger.enabled(&metadata) {
            let mut record = log::Record::builder();
            record.metadata(metadata).module_path_static(Some(NAME));
            logger.log(&record.args(format_args!("{text}")).build());
        }
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
struct MessageKind {
    what: OnceLock<&'static str>,
    /// When the count began, in milliseconds since the outbox was made.
    since_ms: AtomicU64,
    /// How long it is counted for, in milliseconds.
    window_ms: AtomicU64,
    said: AtomicU32,
    hidden: AtomicU32,
}

impl MessageKind {
    fn new() -> MessageKind {
        MessageKind {
            what: OnceLock::new(),
            since_ms: AtomicU64::new(0),
            window_ms: AtomicU64::new(WINDOW.as_millis() as u64),
            said: AtomicU32::new(0),
            hidden: AtomicU32::new(0),
        }
    }

    /// True if the window has ended by `now_ms`.
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
    kinds: [MessageKind; KINDS_MAX],
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
            kinds: std::array::from_fn(|_| MessageKind::new()),
            hidden: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// True if one more message of a kind may be said; it is counted otherwise.
    fn admits(&self, what: &'static str, most: u32, now: Instant) -> bool {
        let is_it = |kind: &&MessageKind| *kind.what.get_or_init(|| what) == what;
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
    fn tell_hidden(&self, kind: &MessageKind) {
        let count = kind.hidden.swap(0, Ordering::Relaxed);
        if let Some(what) = kind.what.get()
            && count > 0
        {
            self.hidden.fetch_sub(count.into(), Ordering::Relaxed);
            self.put(Line::new(Level::Warn, format_args!("{count} times more: {what}")));
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

    /// True if there may be something to say.
    fn has_any(&self) -> bool {
        let is_sending = || self.try_send().is_none_or(|sending| sending.1 < sending.0.len);
        !self.lines.is_empty() || self.hidden.load(Ordering::Relaxed) > 0 || is_sending()
    }

    /// Counts aloud what was not said in windows that are over.
    fn tell_all_hidden(&self, now: Instant) {
        if self.hidden.load(Ordering::Relaxed) > 0 {
            let now_ms = self.since_epoch(now);
            let over = self.kinds.iter().filter(|kind| kind.is_over(now_ms));
            over.for_each(|kind| self.tell_hidden(kind));
        }
    }

    /// Calls the logger with all that waits; nothing in a logger that is called so itself.
    fn log_all(&self) {
        if DELIVERS.get() > 1 {
            return;
        }
        let before = DELIVERS.replace(2);
        self.tell_all_hidden(Instant::now());
        while let Some(line) = self.next_line() {
            // A logger that panics has said so.
            let _ = catch_unwind(AssertUnwindSafe(|| line.log()));
        }
        DELIVERS.set(before);
    }

    /// Sends all that waits to standard error, and waits for room for at most `patience`.
    fn send_all(&self, patience: Duration) {
        let looks = patience.as_millis().div_ceil(LOOK.as_millis());
        for _ in 0..looks {
            if self.flush(Instant::now()) {
                return;
            }
            wait_for_room(LOOK.min(patience));
        }
        self.flush(Instant::now());
    }

    /// Sends as much as there is room for; returns whether that was all.
    fn flush(&self, now: Instant) -> bool {
        self.tell_all_hidden(now);
        // What another thread that sends has missed goes with the next flush.
        let Some(mut sending) = self.try_send() else { return false };
        loop {
            let (line, sent) = &mut *sending;
            if *sent == line.len {
                let Some(next) = self.next_line() else { return true };
                (*line, *sent) = (next, 0);
            }
            match send(&line.bytes()[*sent..]) {
                Sent::Some(count) => *sent += count,
                Sent::Full => return false,
                Sent::Lost => *sent = line.len,
            }
        }
    }

    fn next_line(&self) -> Option<Line> {
        self.lines.pop().or_else(|| {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            let told = format_args!("{dropped} messages were dropped: nobody reads");
            (dropped > 0).then(|| Line::new(Level::Warn, told))
        })
    }
}

/// True if a message of a kind was told, or counted, by this process.
#[cfg(test)]
pub(crate) fn was_told(kind: &str) -> bool {
    outbox().kinds.iter().any(|of| of.what.get().is_some_and(|what| *what == kind))
}

#[cfg(test)]
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
        (0..LINES_MAX + 3).for_each(|n| outbox.put(Line::new(Level::Warn, format_args!("{n}"))));
        let said = said(&outbox);
        assert_eq!((said.len(), &*said[0]), (LINES_MAX + 1, "farheap: 0\n"));
        assert_eq!(said[LINES_MAX], "farheap: 3 messages were dropped: nobody reads\n");
    }

    #[test]
    fn a_long_message_is_cut_and_still_a_line() {
        let line = Line::new(Level::Warn, format_args!("{:2000}", 1));
        assert_eq!((line.len, line.bytes[LINE_MAX - 1]), (LINE_MAX, b'\n'));
    }
}
