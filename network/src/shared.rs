//! The set of servers that queues and threads of a client share, with connections that threads use by turns.

#![expect(unsafe_code, reason = "shares connections between threads, by turns")]

use crate::blocks::BLOCK;
use crate::copying::{Barred, Copying};
use crate::link::{BufferTable, FlightEnd, Link};
use crate::seat::Seat;
use crate::server::{NbdServer, ServerEvent, run_with};
use crate::sync::{AtomicBool, Ordering};
use crate::sys::{IoSlice, WaitTerm};
use crate::table::Table;
use crate::table_blocks::Compared;
use crate::table_copies::Servers;
use crate::wire::NbdCommand;
use std::cell::UnsafeCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections of a server for threads that wait for their requests themselves.
const SPARES: usize = 4;
/// Pause while all of them are in use.
const SPARE_PAUSE: Duration = Duration::from_micros(100);
/// Maximum time between two looks at the health of connections, where a slow read may be asked for elsewhere. No less than
/// a usual tick of the kernel: before it a timer has to be set for each wait, which took 10 us with 1 ms (a virtual machine,
/// 250 Hz; one processor: a message and its answer 21 us instead of 12).
const HEDGE_TICK: Duration = Duration::from_millis(4);
/// Bytes that are copied to a server at a time.
pub(crate) const COPY_LEN: usize = 64 << 10;

/// How long servers may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdTimes {
    /// Maximum time to connect and to enter the export.
    pub connect: Duration,
    /// A connection is given up after this long without a byte of a server that owes an answer.
    pub stall: Duration,
}

impl NbdTimes {
    /// A server that is the only one may be silent for this part of the deadline of a request, so that a read is repeated
    /// on another connection before it is given up.
    const STALLS_PER_DEADLINE: u32 = 6;
    /// The same of one of several: no more, for all writes wait for it.
    const STALL_MAX_BESIDE: Duration = Duration::from_secs(1);

    /// Times for a number of servers whose users give a request up after `deadline`.
    #[must_use]
    pub fn within(deadline: Duration, servers: usize) -> NbdTimes {
        let connect = deadline / NbdTimes::STALLS_PER_DEADLINE;
        let stall_max = if servers > 1 { NbdTimes::STALL_MAX_BESIDE } else { Duration::MAX };
        NbdTimes { connect, stall: connect.min(stall_max) }
    }
}

/// A connection that threads use by turns.
#[derive(Debug)]
struct Spare {
    is_busy: AtomicBool,
    seat: Arc<Seat>,
    line: UnsafeCell<SpareLine>,
}

#[derive(Debug)]
struct SpareLine {
    link: Link,
    vectors: BufferTable,
    life: u32,
}

// SAFETY: the cell is used by the thread that has made the spare busy, see `Spare::with`.
unsafe impl Sync for Spare {}

impl Spare {
    fn new(server: &NbdServer) -> Spare {
        let line = SpareLine { link: server.link(1), vectors: BufferTable::new(1, 1), life: 0 };
        Spare {
            is_busy: AtomicBool::new(false),
            seat: server.add_empty_seat(),
            line: UnsafeCell::new(line),
        }
    }

    /// Uses the connection, unless another thread does.
    fn with<T>(&self, use_it: impl FnOnce(&mut SpareLine, &Seat) -> T) -> Option<T> {
        // Acquire pairs with the Release below: the last user is done.
        if self.is_busy.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread alone found it not busy, and it stays busy until the reference is gone.
        let line = unsafe { &mut *self.line.get() };
        let result = use_it(line, &self.seat);
        self.is_busy.store(false, Ordering::Release);
        Some(result)
    }
}

/// Servers that hold the same bytes, and the connections that threads use by turns.
#[derive(Debug)]
pub(crate) struct ServerSet {
    servers: Box<[Arc<NbdServer>]>,
    spares: Box<[[Spare; SPARES]]>,
    capacity: u64,
    times: NbdTimes,
    copying: Copying,
    /// One server at a time gets what it missed.
    copier: Mutex<()>,
    table: Option<Table>,
}

impl ServerSet {
    pub(crate) fn new(servers: Box<[Arc<NbdServer>]>, capacity: u64, times: NbdTimes) -> ServerSet {
        let spares = servers.iter().map(|server| std::array::from_fn(|_| Spare::new(server)));
        ServerSet {
            spares: spares.collect(),
            copying: Copying::new(if servers.len() > 1 { capacity } else { 0 }),
            servers,
            capacity,
            times,
            copier: Mutex::new(()),
            table: None,
        }
    }

    /// The set of a table.
    pub(crate) fn with(self, table: Table) -> ServerSet {
        ServerSet { table: Some(table), ..self }
    }

    /// The table that it is a set of.
    pub(crate) fn table(&self) -> Option<&Table> {
        self.table.as_ref()
    }

    /// Servers whose bytes are right where they lack none.
    pub(crate) fn whole(&self) -> Servers {
        self.table.as_ref().map_or(Servers::MAX, |table| table.copies().whole())
    }

    /// Servers that each write must reach.
    pub(crate) fn members(&self) -> Servers {
        self.table.as_ref().map_or(Servers::MAX, |table| table.copies().members())
    }

    /// The turn of a thread that gives a server what it missed.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.copier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(crate) fn servers(&self) -> &[Arc<NbdServer>] {
        &self.servers
    }

    pub(crate) fn stall(&self) -> Duration {
        self.times.stall
    }

    pub(crate) fn wait_max(&self) -> Duration {
        self.times.connect
    }

    /// How long a table's read is repeated: its first connection may be silent until it is given up, and the next one
    /// takes time to be made.
    pub(crate) fn repeat_max(&self) -> Duration {
        self.times.stall + self.times.connect
    }

    /// How often a queue with requests in flight looks at the health of its connections.
    pub(crate) fn look_every(&self) -> Duration {
        let tick = if self.servers[0].has_others() { HEDGE_TICK } else { Duration::MAX };
        (self.times.stall / 8).min(tick)
    }

    pub(crate) fn check_range(&self, offset: u64, len: u64) {
        let is_aligned = len > 0 && (offset | len).is_multiple_of(BLOCK);
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.capacity);
        let is_short = len <= u64::from(u32::MAX);
        assert!(is_aligned && is_inside && is_short, "bytes {offset}+{len} of {}", self.capacity);
    }

    /// See [`Copying::begin_write`].
    pub(crate) fn begin_write(&self, offset: u64, len: u64) -> Result<Option<usize>, Barred> {
        // No write is sent to one that is not used any more.
        let bars =
            |server: &Arc<NbdServer>| !server.is_taken() && server.barred.has_any(offset, len);
        let is_barred = || self.servers.iter().any(bars);
        match self.servers.len() {
            1 if is_barred() => Err(Barred),
            1 => Ok(None),
            _ => self.copying.begin_write(offset, len, is_barred),
        }
    }

    pub(crate) fn end_write(&self, offset: u64, len: u64) {
        if self.servers.len() > 1 {
            self.copying.end_write(offset, len);
        }
    }

    /// A write or a trim may come late to a server. One of several that hold a table is not used any more.
    pub(crate) fn bar(&self, at: usize, offset: u64, len: u64) {
        self.servers[at].barred.insert(offset, len);
        if let Some(table) = &self.table {
            table.leave(at);
        }
    }

    /// Runs a request on a spare connection of a server. Neither locks nor allocates.
    pub(crate) fn exchange(
        &self,
        at: usize,
        command: NbdCommand,
        offset: u64,
        slice: IoSlice,
        len: u32,
    ) -> FlightEnd {
        let mut term = WaitTerm::within(self.times.stall);
        let server = &self.servers[at];
        if server.is_taken() {
            return FlightEnd::Unsent;
        }
        loop {
            let mut is_asked = false;
            for spare in &self.spares[at] {
                let mut run = |line: &mut SpareLine, seat: &Seat| {
                    if !server.silence.spares(&mut line.link) {
                        let seated = if is_asked { None } else { seat.take() };
                        let Some(seated) = seated else {
                            // One at a time: mostly one is enough.
                            if !std::mem::replace(&mut is_asked, true) {
                                server.ask(seat);
                            }
                            return None;
                        };
                        line.link.attach(seated.connection, seated.is_chunked);
                        line.life = seated.life;
                    }
                    // Here, for a connection may have been waited for.
                    let is_change = matches!(command, NbdCommand::Trim | NbdCommand::Write);
                    if is_change && server.has_lapsed() {
                        return Some(FlightEnd::Unsent);
                    }
                    line.vectors.set(0, std::iter::once(slice));
                    server.begin();
                    let run =
                        run_with(&mut line.link, &line.vectors, command, offset, len, &mut term);
                    server.end();
                    if !line.link.is_open() {
                        server.count(ServerEvent::Break);
                        server.ask(seat);
                        if term.left().is_zero() {
                            server.silence.note();
                        }
                    }
                    Some(match run.unwrap_or(FlightEnd::Lost) {
                        // By a server that has lost what it had.
                        FlightEnd::Done if !server.is_life(line.life) => {
                            line.link.take_leave();
                            FlightEnd::Refused(libc::EIO)
                        }
                        end => end,
                    })
                };
                if let Some(Some(end)) = spare.with(&mut run) {
                    return end;
                }
            }
            if is_asked || term.left().is_zero() {
                return FlightEnd::Unsent;
            }
            std::thread::sleep(SPARE_PAUSE);
        }
    }

    /// Reads from a server, unless it lacks the bytes. Neither locks nor allocates.
    pub(crate) fn read_now(&self, at: usize, offset: u64, into: IoSlice) -> FlightEnd {
        let len = into.len() as u32;
        let lacks = || self.servers[at].lacking.has_any(offset, len.into());
        if lacks() || self.whole() >> at & 1 == 0 {
            return FlightEnd::Unsent;
        }
        match self.exchange(at, NbdCommand::Read, offset, into, len) {
            // It has begun anew, and may have sent zeros.
            FlightEnd::Done if lacks() => FlightEnd::Refused(libc::EIO),
            end => end,
        }
    }

    /// Gives a server blocks that it lacks, from byte `from` on; returns where to go on, or `None` when it lacks nothing
    /// behind that.
    pub(crate) fn copy_some(&self, to: usize, from: u64, buffer: &mut [u8]) -> Option<u64> {
        let target = &self.servers[to];
        let (offset, len) = target.lacking.next_run(from, COPY_LEN as u64)?;
        let len = len.min(self.capacity.saturating_sub(offset));
        if len == 0 {
            return None; // Behind the end of what the smallest server has.
        }
        let len = match target.barred.next_run(offset, BLOCK) {
            Some((barred, _)) if barred == offset => return Some(offset + BLOCK),
            Some((barred, _)) => len.min(barred - offset),
            None => len,
        };
        let slice = IoSlice::new(buffer.as_mut_ptr(), buffer.len()).part(0, len as usize);
        let life = target.life();
        // SAFETY: the buffer is the caller's alone, and only filled by `read_now`, which has ended by then.
        let bytes = || unsafe { slice.bytes() };
        let is_wrong = || match &self.table {
            Some(table) => table.blocks().compare(offset, bytes()) == Compared::Wrong,
            None => false,
        };
        self.copying.copy(to, offset, len, &target.lacking, || {
            for source in (0..self.servers.len()).filter(|at| *at != to) {
                if self.read_now(source, offset, slice) != FlightEnd::Done
                    || is_wrong()
                    || !target.may_write(Instant::now())
                {
                    continue;
                }
                match self.exchange(to, NbdCommand::Write, offset, slice, len as u32) {
                    FlightEnd::Done if target.is_life(life) => {
                        target.count_copied(len);
                        return true;
                    }
                    FlightEnd::Lost => self.bar(to, offset, len),
                    _ => {}
                }
                return false;
            }
            false
        });
        if !target.is_life(life) {
            target.lacking.insert(offset, len); // It has just lost what it got.
        }
        Some(offset + len)
    }
}
