//! An export that holds a table: bytes that outlive the process, and whose places are fixed.
//!
//! The first block is the mark: where the table lies, and which run of which process has it open. The second is the beat,
//! which this run writes anew every second.
//!
//! ```text
//!   marks of an export:
//!     nothing --create--> open by A --close, if no write may come late--> closed by A --open--> open by B
//!                            '--A dies, or may leave a late write behind--> (quiet) ----open--> open by B
//!
//!   an opener:
//!     look: closed ------------------------------------------> write the mark -> settle -> still ours: go on
//!       '-- open: look again and again for A's quiet time --->         '            '-- another's: refused
//!              '-- the beat changes twice: refused, A lives
//!
//!   an owner:
//!     leased --look at the mark: ours, beat written--> leased for LEASE from before the look
//!       |  '--another's mark--> Taken: never writes again
//!       '--LEASE passes: does not write--look: ours--> leased
//! ```
//! The protocol has no lock. So of two that open an export at the same time each looks again after the other must have seen
//! it, and an owner that could not look for a while does not write: it may have been stopped, and taken for dead. (When it
//! closes, it looks once more, and writes its closed mark within a lease of that.) What is left is a process that stops
//! between its look at the time and the system call that sends, or whose clock stands still with its machine. Its next
//! look finds the other, and the other's sums find what it wrote.
//!
//! # No late write, no stale page
//! What is written on a connection that breaks may be carried out later, see [`set_queue`](crate::set_queue). The place of
//! a table's page cannot be given up: the write is reported as late, its place is not written again, and the table is not
//! marked as closed. The next opener waits until the kernel has dropped what the old connections had not delivered
//! (`TCP_USER_TIMEOUT`); what the server itself has taken, and not done, it cannot see.
//!
//! The sum of each block is kept that was read or written since the table was opened. A block that is read as another one
//! than it was ends as an error, whether a late write, another client or a restart of the server has changed it.
//!
//! # Flush
//! A server that restarts may have lost what it acknowledged. `witness` is a connection which is made before the first write
//! that counts and does nothing else: while it lives, so does the server. If it ends, what was written since the last flush
//! is read again before the next one. A write that was sent before that and is answered later has failed: the answer may be
//! the old server's.
//!
//! ```text
//!   watched --FLUSH done--> watched
//!     '--witness ends--> in doubt --connected, what was not flushed is there--> watched
//!                                     '--something is not--> lost: no flush succeeds
//!   watched --FLUSH refused, or the connection breaks meanwhile--> lost
//! ```
//! The last is what Linux does to programs: an error of `fsync(2)` is told once, and a second FLUSH would succeed.

use crate::address::{NetworkError, ServerList};
use crate::lease::{LEASE, beat_of};
use crate::link::{BufferTable, FlightEnd, Link};
use crate::server::{NbdServer, run_to_end, run_with};
use crate::server_mark::{MARK_LEN, block_of};
use crate::shared::ServerSet;
use crate::sync::{AtomicU32, Ordering};
use crate::sys::WaitTerm;
use crate::table_blocks::{Compared, TableBlocks};
use crate::wire::NbdCommand;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an opener waits for another one that has seen the table closed, too.
const SETTLE: Duration = Duration::from_millis(250);
/// Pause between two looks at a beat.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// A server that has not flushed by then counts as lost.
const FLUSH_MAX: Duration = Duration::from_secs(60);
/// Bytes that are read at a time to find out whether a server still has them.
const CHECK_LEN: u64 = 64 << 10;
/// Pause before a block is read again that is being written.
const CHECK_PAUSE: Duration = Duration::from_millis(5);

const MARK_START: &str = "farheap: table\nin bytes ";
/// Bytes of mark and beat.
const HEAD_LEN: usize = 2 * MARK_LEN;

/// The first block of a table's export.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TableMark {
    /// The table's bytes.
    pages: Range<u64>,
    /// Random number of the process that had it open last.
    run: u64,
    is_open: bool,
    /// Time after which this process is not alive any more, or its connections deliver nothing.
    quiet: Duration,
}

impl TableMark {
    fn bytes(&self) -> [u8; MARK_LEN] {
        let TableMark { pages: Range { start, end }, run, is_open, quiet } = self;
        let (state, quiet) = (if *is_open { "open" } else { "closed" }, quiet.as_millis());
        let text = format!("{MARK_START}{start} to {end} {state} by run {run} quiet {quiet} ms\n");
        block_of(text.as_bytes())
    }

    /// The mark that a block is.
    fn parse(block: &[u8]) -> Option<TableMark> {
        let line =
            block.strip_prefix(MARK_START.as_bytes())?.split(|byte| *byte == b'\n').next()?;
        let words: Vec<&str> = std::str::from_utf8(line).ok()?.split(' ').collect();
        let [start, "to", end, state, "by", "run", run, "quiet", quiet, "ms"] = words[..] else {
            return None;
        };
        let mark = TableMark {
            pages: start.parse().ok()?..end.parse().ok()?,
            run: run.parse().ok()?,
            is_open: state == "open",
            quiet: Duration::from_millis(quiet.parse().ok()?),
        };
        let is_sound = mark.pages.start >= HEAD_LEN as u64 && mark.pages.start < mark.pages.end;
        (is_sound && block == mark.bytes()).then_some(mark)
    }
}

/// Mark and beat.
#[derive(Clone, PartialEq, Eq)]
struct TableHead(Vec<u8>);

impl TableHead {
    fn read(link: &mut Link, term: &mut WaitTerm) -> io::Result<TableHead> {
        let mut head = vec![0; HEAD_LEN];
        run_to_end(link, NbdCommand::Read, 0, &mut head, term)?;
        Ok(TableHead(head))
    }

    fn mark(&self) -> Option<TableMark> {
        TableMark::parse(&self.0[..MARK_LEN])
    }

    /// True if nobody can have it open: a closed mark, or zeros.
    fn is_free(&self) -> bool {
        let is_known = self.mark().is_some() || self.0.iter().all(|byte| *byte == 0);
        is_known && self.is_closed()
    }

    /// True if no table is open there. A closed mark beside another run's beat is late.
    fn is_closed(&self) -> bool {
        let of_run = |mark: &TableMark| {
            let end = format!(" of run {}\n", mark.run);
            let text = self.0[MARK_LEN..].split_inclusive(|byte| *byte == b'\n').next();
            text.is_some_and(|text| text.ends_with(end.as_bytes()))
        };
        self.mark().is_none_or(|mark| !mark.is_open && of_run(&mark))
    }
}

/// A table's export, as its client has it.
#[derive(Debug)]
pub(crate) struct Table {
    witness: Mutex<Link>,
    /// The mark that was found, and since the table was taken the one that was written.
    mark: Mutex<Option<TableMark>>,
    /// Why no flush succeeds any more; 0: one may.
    lost: AtomicU32,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    /// Checks that servers can hold a table.
    pub(crate) fn check(list: &ServerList) -> Result<(), NetworkError> {
        let ServerList { addresses, parity, text, .. } = list;
        if *parity > 0 {
            let reason = "has parity, of which only this process would know where it is: leave `parity` out, and name one \
                          server, which may keep parity itself";
            return Err(NetworkError::new(text, reason));
        }
        if let [_, second, ..] = &addresses[..] {
            let reason = "is the second server of a table, which lies on one: leave it out, and have the server keep \
                          copies (RAID, Ceph)";
            return Err(NetworkError::new(second, reason));
        }
        Ok(())
    }

    pub(crate) fn new(server: &NbdServer) -> Table {
        Table {
            witness: Mutex::new(server.link(1)),
            mark: Mutex::default(),
            lost: AtomicU32::new(0),
        }
    }

    pub(crate) fn find(
        &self,
        set: &ServerSet,
        server: &NbdServer,
    ) -> Result<Option<Range<u64>>, String> {
        let failed = |error: io::Error| format!("cannot be read: {error}");
        let mut link = lock(&self.witness);
        server.attach(&mut link, set.wait_max()).map_err(failed)?;
        let mut read = || TableHead::read(&mut link, &mut WaitTerm::within(set.wait_max()));
        let mut head = read().map_err(failed)?;
        let (mut start, mut has_changed) = (Instant::now(), false);
        while !head.is_closed() && start.elapsed() < head.mark().map_or(LEASE, |mark| mark.quiet) {
            std::thread::sleep(LOOK_PAUSE);
            let next = read().map_err(failed)?;
            if next != head && !next.is_closed() {
                // Once may be the last beat of a dead one, which the server had taken and not done.
                if std::mem::replace(&mut has_changed, true) {
                    return Err("is open in another process, which lives".to_owned());
                }
                start = Instant::now();
            }
            head = next;
        }
        let mark = head.mark();
        if mark.as_ref().is_some_and(|mark| mark.pages.end > set.capacity()) {
            return Err(format!("is short: {} bytes of a table that had more", set.capacity()));
        }
        lock(&self.mark).clone_from(&mark);
        Ok(mark.map(|mark| mark.pages))
    }

    /// Looks for the mark that was found from now on.
    pub(crate) fn read(&self, server: &NbdServer) {
        if let Some(mark) = lock(&self.mark).take() {
            server.set_mark(&mark.bytes());
        }
    }

    pub(crate) fn take(
        &self,
        set: &ServerSet,
        server: &NbdServer,
        pages: Range<u64>,
        run: u64,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("cannot be taken: {error}");
        let term = || WaitTerm::within(set.wait_max());
        let mut link = lock(&self.witness);
        let before = lock(&self.mark).clone();
        let start = Instant::now();
        let head = TableHead::read(&mut link, &mut term()).map_err(failed)?;
        // What was found, or the zeros that a creator has made of it.
        if head.mark().is_some_and(|mark| Some(mark) != before) {
            return Err("was opened by another process at the same time".to_owned());
        }
        let quiet = LEASE.max(server.unacked_max());
        let mark = TableMark { pages, run, is_open: true, quiet };
        let own = TableHead([mark.bytes(), beat_of(run, 0)].concat());
        let mut bytes = own.0.clone();
        run_to_end(&mut link, NbdCommand::Write, 0, &mut bytes, &mut term()).map_err(failed)?;
        // One that has seen it closed as well, and was as quick, has written its mark by then. An owner that was taken for
        // dead, or one that has taken it between this process's look and its mark, has seen that.
        // (So has the user of a store for evicted pages, which has no beat.)
        let is_quick = head.is_free() && start.elapsed() < SETTLE;
        std::thread::sleep(if is_quick { SETTLE } else { LEASE });
        if TableHead::read(&mut link, &mut term()).map_err(failed)? != own {
            return Err("was opened by another process at the same time".to_owned());
        }
        server.set_mark(&own.0[..MARK_LEN]);
        server.own(&mut link, run, &mut term()).map_err(failed)?;
        // What the last owner wrote and did not flush is read from now on, and is not known to be unflushed.
        match flush_on(&mut link) {
            FlightEnd::Done => {}
            FlightEnd::Refused(errno) => return Err(failed(io::Error::from_raw_os_error(errno))),
            FlightEnd::Unsent | FlightEnd::Lost => {
                return Err(failed(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        *lock(&self.mark) = Some(mark);
        Ok(())
    }

    /// Makes durable what was written. `ENOTCONN` and `EAGAIN`: not now, but nothing is lost.
    pub(crate) fn flush(&self, set: &ServerSet) -> Result<(), i32> {
        let mut link = lock(&self.witness);
        match self.lost.load(Ordering::SeqCst) {
            0 => {}
            errno => return Err(errno as i32),
        }
        let flushed = flush_by(&mut link, set);
        if let Err(errno) = flushed {
            // The next flush does not rely on this connection, of which not all was looked at.
            link.break_off(&mut |_, _| ());
            if !matches!(errno, libc::ENOTCONN | libc::EAGAIN) {
                self.lost.store(errno as u32, Ordering::SeqCst);
            }
        }
        flushed
    }

    /// Notes that the table is closed, unless a write may come late.
    pub(crate) fn close(&self, set: &ServerSet) {
        let server = &set.servers()[0];
        let Some(mark) = lock(&self.mark).take().filter(|mark| mark.is_open) else { return };
        let mut link = lock(&self.witness);
        let may_close = server.may_be_closed_by(mark.run);
        if may_close && (link.is_usable() || server.attach(&mut link, SETTLE).is_ok()) {
            let mark = TableMark { is_open: false, ..mark };
            // What fails here costs the next opener some seconds. The look before it is the lease of this write.
            let deadline = Instant::now() + set.stall().min(LEASE);
            let _ = server.replace_mark(&mut link, &mark.bytes(), deadline);
        }
        link.take_leave();
    }
}

fn flush_by(link: &mut Link, set: &ServerSet) -> Result<(), i32> {
    let (server, blocks) = (&set.servers()[0], set.table().expect("of a table"));
    let turn = blocks.unflushed().begin();
    if !link.is_usable() || !server.is_marked(link, &mut WaitTerm::within(set.stall()))? {
        let is_connected = server.attach(link, set.wait_max()).is_ok();
        if !is_connected {
            return Err(if server.is_taken() { libc::EBUSY } else { libc::ENOTCONN });
        }
        blocks.change_witness();
        check_unflushed(set, blocks, link)?;
    }
    match flush_on(link) {
        FlightEnd::Done => {
            blocks.unflushed().end(turn);
            Ok(())
        }
        FlightEnd::Unsent => Err(libc::ENOTCONN),
        FlightEnd::Refused(_) | FlightEnd::Lost => Err(libc::EIO),
    }
}

fn flush_on(link: &mut Link) -> FlightEnd {
    let (vectors, term) = (BufferTable::new(1, 1), &mut WaitTerm::within(FLUSH_MAX));
    run_with(link, &vectors, NbdCommand::Flush, 0, 0, term).unwrap_or(FlightEnd::Lost)
}

/// Looks whether the server that `link` is connected to has what was written and not flushed. `ESTALE`: it has not.
fn check_unflushed(set: &ServerSet, blocks: &TableBlocks, link: &mut Link) -> Result<(), i32> {
    let anew = || WaitTerm::within(set.stall());
    let (mut from, mut repeat) = (0, anew());
    while let Some((offset, len)) = blocks.unflushed().next_run(from, CHECK_LEN) {
        let mut bytes = vec![0; len as usize];
        let read = run_to_end(link, NbdCommand::Read, offset, &mut bytes, &mut anew());
        read.map_err(|_| libc::ENOTCONN)?;
        let compared = blocks.compare(offset, &bytes);
        if compared == Compared::Right {
            (from, repeat) = (offset + len, anew());
        } else if !repeat.left().is_zero() {
            std::thread::sleep(CHECK_PAUSE); // It may be being written: its sum is known when the server has answered.
        } else {
            let is_lost = compared == Compared::Wrong;
            return Err(if is_lost { libc::ESTALE } else { libc::EAGAIN });
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_as_they_are_written_and_nothing_else_is() {
        let quiet = Duration::from_millis(3000);
        for is_open in [true, false] {
            let mark = TableMark { pages: 1 << 20..u64::MAX, run: u64::MAX, is_open, quiet };
            let bytes = mark.bytes();
            assert_eq!(TableMark::parse(&bytes), Some(mark.clone()));
            for at in [0, 20, 60, 400, MARK_LEN - 1] {
                let mut wrong = bytes;
                wrong[at] ^= 1;
                assert_ne!(TableMark::parse(&wrong), Some(mark.clone()), "byte {at}");
            }
            assert_eq!(TableMark::parse(&bytes[..100]), None);
            let below = TableMark { pages: 4096..1 << 20, ..mark };
            assert_eq!(TableMark::parse(&below.bytes()), None, "over the beat");
        }
    }

    #[test]
    fn a_closed_mark_counts_beside_its_own_runs_beat_only() {
        let head = |is_open, run| {
            let quiet = Duration::ZERO;
            let mark = TableMark { pages: 1 << 20..2 << 20, run: 7, is_open, quiet };
            TableHead([mark.bytes(), beat_of(run, 3)].concat())
        };
        assert!(head(false, 7).is_closed());
        assert!(
            !head(true, 7).is_closed()
                && !head(false, 17).is_closed()
                && !head(false, 8).is_closed()
        );
        assert!(TableHead(vec![0; HEAD_LEN]).is_closed(), "no table");
    }
}
