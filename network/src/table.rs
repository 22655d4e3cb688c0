//! Exports that hold a table: bytes that outlive the process, and whose places are fixed.
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
//!
//! # Copies
//! Several servers hold the same, and each has all of the above. Where one server would be lost, or has a write late, it is
//! left out of the set instead, unless it is the last: see [`table_copies`](crate::table_copies).

use crate::address::{NetworkError, ServerList};
use crate::blocks::BLOCK;
use crate::lease::{LEASE, beat_of};
use crate::link::{BufferTable, FlightEnd, Link};
use crate::server::{NbdServer, ServerState, run_to_end, run_with};
use crate::server_mark::{MARK_LEN, block_of};
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use crate::sys::WaitTerm;
use crate::table_blocks::{Compared, TableBlocks};
use crate::table_copies::{
    Agreed, ChosenCopies, CopyRecord, FoundCopy, Servers, SetRecord, TableCopies, choose, each,
};
use crate::wire::NbdCommand;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// How long an opener waits for another one that has seen the table closed, too.
const SETTLE: Duration = Duration::from_millis(250);
/// Pause between two looks at a beat.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// A server that has not flushed by then counts as lost.
const FLUSH_MAX: Duration = Duration::from_secs(60);
/// Pause of a flush between two looks whether the set is recorded: tenders write that, and tell queues only.
const RECORD_PAUSE: Duration = Duration::from_millis(2);
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
    set: SetRecord,
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
        let TableMark { set, pages: Range { start, end }, run, is_open, quiet } = self;
        let (state, quiet) = (if *is_open { "open" } else { "closed" }, quiet.as_millis());
        let text =
            format!("{MARK_START}{start} to {end} {state} by run {run} quiet {quiet} ms {set}\n");
        block_of(text.as_bytes())
    }

    /// The mark that a block is.
    fn parse(block: &[u8]) -> Option<TableMark> {
        let line =
            block.strip_prefix(MARK_START.as_bytes())?.split(|byte| *byte == b'\n').next()?;
        let words: Vec<&str> = std::str::from_utf8(line).ok()?.split(' ').collect();
        let [start, "to", end, state, "by", "run", run, "quiet", quiet, "ms", ref set @ ..] =
            words[..]
        else {
            return None;
        };
        let mark = TableMark {
            set: SetRecord::parse(set)?,
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
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// A server of a table, as its client has it.
#[derive(Debug)]
struct TableServer {
    server: Arc<NbdServer>,
    witness: Mutex<Link>,
    /// Number of the present witness. What was sent under another one may have been answered by a server that has restarted
    /// since, after a flush has looked at all that was known to be written.
    witnesses: AtomicU32,
    /// The head that was found.
    found: Mutex<Option<TableHead>>,
}

/// A table, as its client has it.
#[derive(Debug)]
pub(crate) struct Table {
    blocks: TableBlocks,
    copies: TableCopies,
    servers: Box<[TableServer]>,
    capacity: u64,
    /// A connection is given up after this long without a byte, and another one takes this long at most.
    stall: Duration,
    wait_max: Duration,
    /// Servers that do not answer.
    absent: Vec<NetworkError>,
    /// Copies that count need not answer.
    may_miss: bool,
    /// The mark that this process writes, from when all servers are its own until it closes the table; each server's differs
    /// by its set. Records read it: none is written over the one that closes the table.
    mark: RwLock<Option<TableMark>>,
    flusher: Mutex<()>,
    /// Why no flush succeeds any more; 0: one may.
    lost: AtomicU32,
    /// A write has failed that one copy may have, and another one not.
    is_unequal: AtomicBool,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    /// Checks that servers can hold a table.
    pub(crate) fn check(list: &ServerList) -> Result<(), NetworkError> {
        if list.parity > 0 {
            let reason = "has parity, of which only this process would know where it is: leave `parity` out, and name \
                          two or three servers, which hold copies";
            return Err(NetworkError::new(&list.text, reason));
        }
        Ok(())
    }

    /// A table on servers that answer within these times.
    pub(crate) fn new(
        list: &ServerList,
        servers: &[Arc<NbdServer>],
        (capacity, stall, wait_max): (u64, Duration, Duration),
        absent: Vec<NetworkError>,
    ) -> Table {
        let server = |server: &Arc<NbdServer>| TableServer {
            server: Arc::clone(server),
            witness: Mutex::new(server.link(1)),
            witnesses: AtomicU32::new(0),
            found: Mutex::default(),
        };
        Table {
            blocks: TableBlocks::new(capacity),
            copies: TableCopies::new(),
            servers: servers.iter().map(server).collect(),
            capacity,
            stall,
            wait_max,
            absent,
            may_miss: list.copies > 0,
            mark: RwLock::default(),
            flusher: Mutex::default(),
            lost: AtomicU32::new(0),
            is_unequal: AtomicBool::new(false),
        }
    }

    fn mark(&self) -> RwLockReadGuard<'_, Option<TableMark>> {
        self.mark.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_to_change(&self) -> RwLockWriteGuard<'_, Option<TableMark>> {
        self.mark.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Knowledge of its blocks.
    pub(crate) fn blocks(&self) -> &TableBlocks {
        &self.blocks
    }

    /// Knowledge of its copies.
    pub(crate) fn copies(&self) -> &TableCopies {
        &self.copies
    }

    /// The first server that does not answer.
    pub(crate) fn absent(&self) -> Option<&NetworkError> {
        self.absent.first()
    }

    // Opening.

    pub(crate) fn find(&self) -> Result<Option<Range<u64>>, NetworkError> {
        let numbers = 0..self.servers.len();
        let looked: Vec<_> = std::thread::scope(|scope| {
            let look = |at: usize| scope.spawn(move || self.find_one(at));
            let looks: Vec<_> = numbers.clone().map(look).collect();
            looks.into_iter().map(|look| look.join().expect("it does not panic")).collect()
        });
        for (at, looked) in looked.into_iter().enumerate() {
            let head =
                looked.map_err(|why| NetworkError::new(self.servers[at].server.address(), why))?;
            *lock(&self.servers[at].found) = Some(head);
        }
        let chosen = self.choose(1)?;
        if chosen.is_none()
            && let Some(absent) = self.absent.first()
        {
            return Err(absent.clone());
        }
        let newest = chosen.and_then(|chosen| each(chosen.members).next());
        Ok(newest.and_then(|at| Some(self.found(at)?.pages)))
    }

    fn find_one(&self, at: usize) -> Result<TableHead, String> {
        let failed = |error: io::Error| format!("cannot be read: {error}");
        let mut link = lock(&self.servers[at].witness);
        self.servers[at].server.attach(&mut link, self.wait_max).map_err(failed)?;
        let mut read = || TableHead::read(&mut link, &mut WaitTerm::within(self.wait_max));
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
        if head.mark().is_some_and(|mark| mark.pages.end > self.capacity) {
            return Err(format!("is short: {} bytes of a table that had more", self.capacity));
        }
        Ok(head)
    }

    /// The mark that was found.
    fn found(&self, at: usize) -> Option<TableMark> {
        lock(&self.servers[at].found).as_ref()?.mark()
    }

    /// The copies that count, of those that were found.
    fn choose(&self, id: u64) -> Result<Option<ChosenCopies>, NetworkError> {
        let copy = |server: &TableServer| {
            let head = lock(&server.found);
            let (mark, is_closed) = (head.as_ref()?.mark()?, head.as_ref()?.is_closed());
            Some(FoundCopy { record: mark.set, closed_by: is_closed.then_some(mark.run) })
        };
        let found: Vec<_> = self.servers.iter().map(copy).collect();
        choose(&found, id, self.may_miss).map_err(|(at, why)| {
            let absent = self.absent.iter().map(|error| format!("; {error}"));
            NetworkError::new(
                self.servers[at].server.address(),
                absent.fold(why.to_owned(), |all, one| all + &one),
            )
        })
    }

    /// True if the server holds nothing of the table, which others hold.
    pub(crate) fn is_empty(&self, at: usize) -> bool {
        self.found(at).is_none() && (0..self.servers.len()).any(|at| self.found(at).is_some())
    }

    /// A server's content is gone: what was found there counts no more.
    pub(crate) fn forget(&self, at: usize) {
        *lock(&self.servers[at].found) = None;
    }

    /// Looks for the marks that were found from now on.
    pub(crate) fn read(&self) -> Result<(), NetworkError> {
        let Some(chosen) = self.choose(1)? else { return Ok(()) };
        self.copies.begin(&chosen);
        for (at, TableServer { server, .. }) in self.servers.iter().enumerate() {
            match self.found(at).filter(|_| chosen.members >> at & 1 == 1) {
                Some(mark) => server.set_mark(&mark.bytes()),
                None => drop(server.note(ServerState::Taken)),
            }
        }
        Ok(())
    }

    /// Makes the servers this process's, one after the other: of two that begin at the same time the first copy has one,
    /// whatever order they are named in.
    pub(crate) fn take(&self, pages: Range<u64>, run: u64) -> Result<(), NetworkError> {
        let all = self.servers.len();
        let is_new = |at| CopyRecord { id: run.wrapping_add(at as u64).max(1), counted: 0 };
        let new = || ChosenCopies {
            table: run,
            copies: std::array::from_fn(
                |at| if at < all { is_new(at) } else { CopyRecord::default() },
            ),
            members: Servers::MAX >> (Servers::BITS as usize - all),
        };
        let chosen = self.choose(run)?.unwrap_or_else(new);
        // First: a server that counts no copy and lacks nothing joins.
        for at in each(!chosen.members).take_while(|at| *at < all) {
            self.servers[at].server.lacking.insert(pages.start, pages.end - pages.start);
        }
        self.copies.begin(&chosen);
        let quiet = LEASE.max(self.stall);
        let mark = |set| TableMark { set, pages: pages.clone(), run, is_open: true, quiet };
        let failed = |at: usize, why| NetworkError::new(self.servers[at].server.address(), why);
        let mut order: Vec<usize> = (0..all).collect();
        order.sort_unstable_by_key(|at| (self.found(*at).is_none(), chosen.copies[*at].id));
        for &at in &order {
            // Those that count keep the record that was found until all are taken: one that cannot take them all has not
            // gone on without the others.
            let found = self.found(at).filter(|_| chosen.members >> at & 1 == 1);
            let set = found.map_or_else(|| self.copies.record_of(at).1, |mark| mark.set);
            self.take_one(at, &mark(set)).map_err(|why| failed(at, why))?;
            self.copies.note_recorded(at, set.generation());
        }
        for &at in &order {
            let set = self.copies.record_of(at).1;
            self.record_by(at, &mut lock(&self.servers[at].witness), &mark(set));
        }
        if !self.copies.is_settled() {
            return Err(failed(
                order[0],
                "cannot be taken: a server does not record it".to_owned(),
            ));
        }
        *self.mark_to_change() = Some(mark(self.copies.record_of(0).1));
        Ok(())
    }

    fn take_one(&self, at: usize, mark: &TableMark) -> Result<(), String> {
        let failed = |error: io::Error| format!("cannot be taken: {error}");
        let term = || WaitTerm::within(self.wait_max);
        let server = &self.servers[at].server;
        let mut link = lock(&self.servers[at].witness);
        let before = self.found(at);
        let start = Instant::now();
        let head = TableHead::read(&mut link, &mut term()).map_err(failed)?;
        // What was found, or the zeros that a creator has made of it.
        if head.mark().is_some_and(|mark| Some(mark) != before) {
            return Err("was opened by another process at the same time".to_owned());
        }
        let own = TableHead([mark.bytes(), beat_of(mark.run, 0)].concat());
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
        server.own(&mut link, mark.run, &mut term()).map_err(failed)?;
        // What the last owner wrote and did not flush is read from now on, and is not known to be unflushed.
        match flush_on(&mut link) {
            FlightEnd::Done => {}
            FlightEnd::Refused(errno) => return Err(failed(io::Error::from_raw_os_error(errno))),
            FlightEnd::Unsent | FlightEnd::Lost => {
                return Err(failed(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        Ok(())
    }

    // The set.

    /// Leaves a server out; returns whether it is, which the last one never is.
    pub(crate) fn leave(&self, at: usize) -> bool {
        let is_left = self.copies.leave(at);
        if is_left {
            self.servers[at].server.note(ServerState::Taken);
            self.wake();
        }
        is_left
    }

    fn wake(&self) {
        self.servers.iter().for_each(|server| server.server.wake());
    }

    /// Leaves servers out that miss what others have done, which is to be reported when that is recorded.
    pub(crate) fn agree(&self, done: Servers) -> Agreed {
        loop {
            match self.copies.agreed(done) {
                Agreed::MissedBy(missed) => each(missed).for_each(|at| {
                    self.leave(at);
                }),
                agreed => return agreed,
            }
        }
    }

    /// A write was sent and no copy that counts has done it.
    pub(crate) fn doubt(&self, offset: u64, len: u64) {
        self.blocks.doubt(offset, len);
        self.is_unequal.store(true, Ordering::SeqCst);
    }

    /// Number of the server's present witness.
    pub(crate) fn witness(&self, at: usize) -> u32 {
        self.servers[at].witnesses.load(Ordering::SeqCst)
    }

    /// True while all servers are this process's: none is filled from one that another process may still write.
    pub(crate) fn is_taken(&self) -> bool {
        self.mark().is_some()
    }

    /// Records the present set in a server's mark, if that is due; by the server's tender.
    pub(crate) fn record(&self, at: usize, control: &mut Link) {
        if let Some(mark) = &*self.mark()
            && self.copies.is_record_due(at)
            && (control.is_usable()
                || self.servers[at].server.attach(control, self.wait_max).is_ok())
        {
            self.record_by(at, control, mark);
        }
    }

    fn record_by(&self, at: usize, link: &mut Link, mark: &TableMark) {
        if !self.copies.is_record_due(at) {
            return;
        }
        let server = &self.servers[at].server;
        let (generation, set) = self.copies.record_of(at);
        let bytes = TableMark { set, ..mark.clone() }.bytes();
        let deadline = Instant::now() + self.stall.min(LEASE);
        match server.replace_mark(link, &bytes, deadline) {
            Ok(true) if flush_on(link) == FlightEnd::Done => {
                self.copies.note_recorded(at, generation);
                self.wake();
            }
            Ok(false) => {} // It was not written: again at the next look.
            // It may be written later, over a later one.
            Ok(true) | Err(_) => {
                if !self.leave(at) {
                    server.note(ServerState::Taken);
                }
            }
        }
    }

    /// A server lacks nothing any more: it is to count. By its tender.
    pub(crate) fn join(&self, at: usize) {
        let lacks = || self.servers[at].server.lacking.next_run(0, BLOCK).is_some();
        // Its witness has lived since before the first write: else some of them may be gone.
        let mut link = lock(&self.servers[at].witness);
        if self.is_taken()
            && let Some(is_whole) = self.copies.join(at, lacks)
            && !(is_whole && link.is_usable() && flush_on(&mut link) == FlightEnd::Done)
        {
            self.leave(at);
        }
    }

    /// Makes durable what was written. `ENOTCONN` and `EAGAIN`: not now, but nothing is lost.
    pub(crate) fn flush(&self) -> Result<(), i32> {
        let _one = lock(&self.flusher);
        match self.lost.load(Ordering::SeqCst) {
            0 => {}
            errno => return Err(errno as i32),
        }
        let turn = self.blocks.unflushed().begin();
        for at in each(self.copies.members()) {
            let mut link = lock(&self.servers[at].witness);
            if let Err(errno) = self.flush_by(&mut link, at) {
                // The next flush does not rely on this connection, of which not all was looked at.
                link.break_off(&mut |_, _| ());
                if self.leave(at) {
                    continue;
                }
                if !matches!(errno, libc::ENOTCONN | libc::EAGAIN) {
                    self.lost.store(errno as u32, Ordering::SeqCst);
                }
                return Err(errno);
            }
        }
        // A copy that has joined meanwhile has flushed what was reported before that.
        let mut term = WaitTerm::within(self.stall + self.wait_max);
        while !self.copies.is_settled() {
            let is_gone = |at: usize| self.servers[at].server.is_taken();
            if term.left().is_zero() || each(self.copies.members()).any(is_gone) {
                return Err(libc::ENOTCONN);
            }
            std::thread::sleep(RECORD_PAUSE);
        }
        self.blocks.unflushed().end(turn);
        Ok(())
    }

    fn flush_by(&self, link: &mut Link, at: usize) -> Result<(), i32> {
        let server = &self.servers[at].server;
        if !link.is_usable() || !server.is_marked(link, &mut WaitTerm::within(self.stall))? {
            let is_connected = server.attach(link, self.wait_max).is_ok();
            if !is_connected {
                return Err(if server.is_taken() { libc::EBUSY } else { libc::ENOTCONN });
            }
            self.servers[at].witnesses.fetch_add(1, Ordering::SeqCst);
            check_unflushed(&self.blocks, self.stall, link)?;
        }
        match flush_on(link) {
            FlightEnd::Done => Ok(()),
            FlightEnd::Unsent => Err(libc::ENOTCONN),
            FlightEnd::Refused(_) | FlightEnd::Lost => Err(libc::EIO),
        }
    }

    // Closing.

    /// True if all copies that count hold the same, durably: else the next opener takes one of them. Tenders run meanwhile.
    pub(crate) fn is_equal(&self) -> bool {
        if !self.is_taken() {
            return false;
        }
        let is_alone = || self.copies.members().is_power_of_two();
        let is_flushed = || self.flush().is_ok() && self.copies.members() == self.copies.whole();
        is_alone() || !self.is_unequal.load(Ordering::SeqCst) && is_flushed()
    }

    /// Notes on each server that the table is closed, unless a write may come late.
    pub(crate) fn close(&self, is_equal: bool, await_copier: impl FnOnce()) {
        let Some(mark) = self.mark_to_change().take() else { return };
        await_copier(); // No copy begins from now on.
        let (members, servers) = (self.copies.members(), &self.servers);
        let may_close = |at: usize| servers[at].server.may_be_closed_by(mark.run);
        let may_close_members = is_equal && each(members).all(may_close);
        for (at, TableServer { server, witness, .. }) in servers.iter().enumerate() {
            let mut link = lock(witness);
            let may_close = if members >> at & 1 == 1 { may_close_members } else { may_close(at) };
            if may_close && (link.is_usable() || server.attach(&mut link, SETTLE).is_ok()) {
                let set_of = self.copies.record_of(at).1;
                let mark = TableMark { set: set_of, is_open: false, ..mark.clone() };
                // What fails here costs the next opener some seconds. The look before it is the lease of this write.
                let deadline = Instant::now() + self.stall.min(LEASE);
                let _ = server.replace_mark(&mut link, &mark.bytes(), deadline);
            }
            link.take_leave();
        }
    }
}

fn flush_on(link: &mut Link) -> FlightEnd {
    let (vectors, term) = (BufferTable::new(1, 1), &mut WaitTerm::within(FLUSH_MAX));
    run_with(link, &vectors, NbdCommand::Flush, 0, 0, term).unwrap_or(FlightEnd::Lost)
}

/// Looks whether the server that `link` is connected to has what was written and not flushed. `ESTALE`: it has not.
fn check_unflushed(blocks: &TableBlocks, stall: Duration, link: &mut Link) -> Result<(), i32> {
    let anew = || WaitTerm::within(stall);
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

    fn longest() -> SetRecord {
        let copies = [CopyRecord { id: u64::MAX, counted: (1 << 48) - 1 }; 4];
        SetRecord { table: u64::MAX, own: u64::MAX, copies }
    }

    #[test]
    fn marks_are_read_as_they_are_written_and_nothing_else_is() {
        let quiet = Duration::from_millis(3000);
        for is_open in [true, false] {
            let mark = TableMark {
                set: longest(),
                pages: 1 << 20..u64::MAX,
                run: u64::MAX,
                is_open,
                quiet,
            };
            let bytes = mark.bytes();
            assert!(
                bytes[512..].iter().all(|byte| *byte == 0),
                "a sector is written whole, or not"
            );
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
            let mark =
                TableMark { set: longest(), pages: 1 << 20..2 << 20, run: 7, is_open, quiet };
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
