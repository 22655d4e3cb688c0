//! The servers of a client, as one: they hold the same bytes, or pages with parity.

#![expect(unsafe_code, reason = "passes a caller's buffer on")]

use crate::address::{NetworkError, ServerAddress, ServerList};
use crate::blocks::BLOCK;
use crate::ends::SERVERS_MAX;
use crate::handshake::Export;
use crate::lease::Lease;
use crate::link::{BUFFERS_MAX, FlightEnd};
use crate::mover::SpanMover;
use crate::queue::NbdQueue;
use crate::server::{NbdServer, ServerStats, Tell};
use crate::server_mark::block_of;
use crate::set_queue::SetQueue;
use crate::shared::{COPY_LEN, NbdTimes, ServerSet};
use crate::spans::{Layout, RowsFor};
use crate::striped_queue::StripedQueue;
use crate::stripes::Stripes;
use crate::sys::{IoSlice, WaitTerm};
use crate::table::Table;
use crate::table_copies::COPIES_MAX;
use crate::wire::NbdCommand;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of bytes of one trim.
const TRIM_LEN_MAX: u64 = 4 << 20;
/// Maximum number of requests of a queue.
const DEPTH_MAX: usize = 4096;

/// Maximum number of servers that may be lost of those that hold pages with parity.
const PARITY_MAX: usize = 2;

/// A client of servers that hold the same bytes, or pages with parity.
///
/// # Examples
/// ```no_run
/// use farheap_nbd::{Client, Ending, NbdBuffer, NbdTimes};
/// use std::time::Duration;
///
/// let times = NbdTimes { connect: Duration::from_secs(5), stall: Duration::from_secs(5) };
/// let client = Client::connect(&["nbd://memory.example/cold".parse()?], times)?;
/// let tender = client.tender(0, Box::new(|text| eprintln!("{text}")));
/// std::thread::spawn(move || tender.run());
/// client.write_to(0, 0, &mut [7; 4096])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Client {
    /// One of all servers; with parity one of each.
    sets: Box<[Arc<ServerSet>]>,
    /// With parity.
    stripes: Option<Arc<Stripes>>,
}

/// Tends one server, or all of them together, on a thread of its own.
pub struct Tender {
    task: TenderTask,
    tell: Tell,
}

#[derive(Debug)]
enum TenderTask {
    /// A server of a set.
    Server(Arc<ServerSet>, usize),
    /// All servers together.
    Stripes(Arc<Stripes>),
}

impl std::fmt::Debug for Tender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tender").field("task", &self.task).finish_non_exhaustive()
    }
}

impl Tender {
    /// Makes broken connections anew, looks after the server's mark, and gives the server what it missed, until the
    /// client is dropped; or moves pages between the servers.
    pub fn run(self) {
        match self.task {
            TenderTask::Server(set, at) => tend(&set, at, &self.tell),
            TenderTask::Stripes(stripes) => match SpanMover::new(stripes) {
                Ok(mover) => mover.run(),
                Err(error) => (self.tell)(format_args!("no page moves between servers: {error}")),
            },
        }
    }
}

fn tend(set: &ServerSet, at: usize, tell: &Tell) {
    let server = &set.servers()[at];
    let has_copies = set.servers().len() > 1;
    let mut buffer = vec![0; if has_copies { COPY_LEN } else { 0 }];
    let mut from = 0;
    server.tend(set.wait_max(), tell, &mut |control| {
        if !has_copies {
            return None;
        }
        if let Some(table) = set.table() {
            table.record(at, control);
            if table.copies().members() >> at & 1 == 1 {
                return None;
            }
            table.join(at);
        }
        let _one = set.turn();
        if set.table().is_some_and(|table| !table.is_taken()) {
            return None;
        }
        let start = Instant::now();
        let next = set.copy_some(at, from, &mut buffer);
        from = next.unwrap_or(0);
        // As much time for others as this has taken, at the servers and at this one.
        next.map(|_| start.elapsed())
    });
}

/// Reaches servers.
fn open(
    addresses: &[ServerAddress],
    times: NbdTimes,
    counts: std::ops::RangeInclusive<usize>,
) -> Result<impl Iterator<Item = Result<Arc<NbdServer>, NetworkError>>, NetworkError> {
    let count = addresses.len();
    if !counts.contains(&count) {
        let reason = format!("{count} servers are not {} to {}", counts.start(), counts.end());
        return Err(NetworkError { address: "nbd".to_owned(), reason });
    }
    let has_twin = |(at, address): (usize, &ServerAddress)| addresses[..at].contains(address);
    if let Some(twin) = addresses.iter().enumerate().position(has_twin) {
        let reason = "is named twice: two copies would be one".to_owned();
        return Err(NetworkError { address: addresses[twin].to_string(), reason });
    }
    let open = move |address| NbdServer::open(address, times.connect, count > 1).map(Arc::new);
    Ok(addresses.iter().map(open))
}

/// Bytes that each of the servers has.
fn smallest(servers: &[Arc<NbdServer>]) -> u64 {
    let smallest = servers.iter().map(|server| server.export().size()).min().unwrap_or(0);
    smallest / BLOCK * BLOCK
}

impl Client {
    /// Reaches the servers of a list for users who give a request up after `deadline`.
    ///
    /// # Errors
    /// As [`connect`](Client::connect) and [`connect_striped`](Client::connect_striped).
    pub fn of(list: &ServerList, deadline: Duration) -> Result<Client, NetworkError> {
        let ServerList { addresses, parity, .. } = list;
        let times = NbdTimes::within(deadline, addresses.len());
        match parity {
            0 => Client::connect(addresses, times),
            _ => Client::connect_striped(addresses, *parity, times),
        }
    }

    /// Reaches servers that are to hold the same, up to four; `stall` and `connect` hold for each from now on.
    ///
    /// # Errors
    /// The first server that cannot be reached, or lacks something that every use of it needs.
    pub fn connect(addresses: &[ServerAddress], times: NbdTimes) -> Result<Client, NetworkError> {
        let servers = open(addresses, times, 1..=COPIES_MAX)?.collect::<Result<Vec<_>, _>>()?;
        let capacity = smallest(&servers);
        let set = Arc::new(ServerSet::new(servers.into(), capacity, times));
        Ok(Client { sets: [set].into(), stripes: None })
    }

    /// Reaches servers that are to hold pages with parity: as many as `parity`, 1 or 2, may be lost at a time.
    ///
    /// # Errors
    /// As [`connect`](Client::connect), and when there are fewer servers than one and twice as many as may be lost, or
    /// more than [`SERVERS_MAX`].
    pub fn connect_striped(
        addresses: &[ServerAddress],
        parity: usize,
        times: NbdTimes,
    ) -> Result<Client, NetworkError> {
        if !(1..=PARITY_MAX).contains(&parity) {
            let reason = format!("parity of {parity} servers is not 1 to {PARITY_MAX}");
            return Err(NetworkError { address: "nbd".to_owned(), reason });
        }
        let servers = open(addresses, times, parity + 2..=SERVERS_MAX)?;
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        let size = smallest(&servers);
        let layout = Layout::new(servers.len() - parity, parity, size);
        let set = |server| Arc::new(ServerSet::new([server].into(), size, times));
        let sets: Box<[_]> = servers.into_iter().map(set).collect();
        let stripes = Some(Arc::new(Stripes::new(layout, sets.clone())));
        Ok(Client { sets, stripes })
    }

    /// The table that it is a client of.
    fn table(&self) -> Option<&Table> {
        self.sets[0].table()
    }

    /// The server with a number, with its set.
    fn server(&self, at: usize) -> Option<(&ServerSet, usize)> {
        match &self.stripes {
            None => (at < self.sets[0].servers().len()).then_some((&*self.sets[0], at)),
            Some(_) => self.sets.get(at).map(|set| (&**set, 0)),
        }
    }

    fn all(&self) -> impl Iterator<Item = &NbdServer> {
        self.sets.iter().flat_map(|set| set.servers()).map(|server| &**server)
    }

    /// Bytes that queues read and write.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        match &self.stripes {
            None => self.sets[0].capacity(),
            Some(stripes) => stripes.layout().blocks() * BLOCK,
        }
    }

    /// Checks that there are as many bytes as `least`.
    ///
    /// # Errors
    /// There are not.
    pub fn require(&self, least: u64) -> Result<(), NetworkError> {
        let len = self.capacity();
        if let Some(absent) = self.table().and_then(Table::absent) {
            return Err(absent.clone());
        }
        let reason = format!("has {len} bytes, and {least} are needed; use less of it");
        if len < least { Err(NetworkError::new(&*self.name_of(0), reason)) } else { Ok(()) }
    }

    /// Address of a server; empty: there is none with this number.
    #[must_use]
    pub fn name_of(&self, at: usize) -> String {
        self.all().nth(at).map_or_else(String::new, |server| server.address().to_string())
    }

    /// Bytes that each of the servers has.
    #[must_use]
    pub fn export_len(&self) -> u64 {
        self.sets[0].capacity()
    }

    /// The servers and what they announce.
    pub fn servers(&self) -> impl Iterator<Item = (&ServerAddress, &Export)> {
        self.all().map(|server| (server.address(), server.export()))
    }

    /// For people who read of a store of these servers.
    #[must_use]
    pub fn describe_trim(&self) -> &'static str {
        let can_trim = self.all().all(|server| server.export().can_trim());
        if can_trim { "" } else { ", no discard" }
    }

    /// Counts of each server.
    #[must_use]
    pub fn stats(&self) -> Vec<ServerStats> {
        (0..SERVERS_MAX).map_while(|at| self.stats_of(at)).collect()
    }

    /// Counts of the server with this number, if there is one. Allocates nothing.
    #[must_use]
    pub fn stats_of(&self, at: usize) -> Option<ServerStats> {
        let (set, at) = self.server(at)?;
        Some(set.servers()[at].stats())
    }

    /// Names the start of the first block of each server, the rest of which is zeros, which it must have whenever a connection is made and
    /// [`write_to`](Client::write_to) has written. A server whose first block is another one is not used any more.
    pub fn set_mark(&self, mark: &[u8]) {
        let mark = block_of(mark);
        self.all().for_each(|server| server.set_mark(&mark));
    }

    /// Number of tenders: one for each server, and with parity one that moves pages.
    #[must_use]
    pub fn tenders(&self) -> usize {
        self.all().count() + usize::from(self.stripes.is_some())
    }

    /// Returns a tender; its thread is the caller's to start. Without it no connection is made anew, and
    /// [`read_from`](Client::read_from) and [`write_to`](Client::write_to) have none.
    ///
    /// # Panics
    /// When there is none of this number.
    #[must_use]
    pub fn tender(&self, at: usize, tell: Tell) -> Tender {
        assert!(at < self.tenders(), "tender {at}");
        let task = match (&self.stripes, self.sets.get(at)) {
            (None, _) => TenderTask::Server(Arc::clone(&self.sets[0]), at),
            (Some(_), Some(set)) => TenderTask::Server(Arc::clone(set), 0),
            (Some(stripes), None) => TenderTask::Stripes(Arc::clone(stripes)),
        };
        Tender { task, tell }
    }

    /// Opens a queue for up to `depth` requests.
    ///
    /// # Errors
    /// When a server cannot be reached that is the only one.
    pub fn open_queue(&self, depth: usize) -> io::Result<NbdQueue> {
        let depth = depth.clamp(1, DEPTH_MAX);
        Ok(match &self.stripes {
            None => {
                let set = Arc::clone(&self.sets[0]);
                NbdQueue::of_copies(SetQueue::new(set, depth, BUFFERS_MAX)?)
            }
            Some(stripes) => {
                let stripes = Arc::clone(stripes);
                NbdQueue::striped(StripedQueue::new(stripes, RowsFor::User, depth)?)
            }
        })
    }

    /// Bytes that a queue for up to `depth` requests holds. They have their memory when it is opened; with parity, those
    /// that only writes need have it from the first one on, and those to compute pages of lost servers as they are used.
    #[must_use]
    pub fn queue_bytes(&self, depth: usize) -> usize {
        let depth = depth.clamp(1, DEPTH_MAX);
        NbdQueue::bytes()
            + match &self.stripes {
                None => SetQueue::bytes(&self.sets[0], depth, BUFFERS_MAX),
                Some(stripes) => StripedQueue::bytes(stripes, depth),
            }
    }

    /// Reads from one server and waits: for what is looked at before queues are opened.
    ///
    /// # Errors
    /// The server's, or that of the connection.
    pub fn read_from(&self, at: usize, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.run_on(at, NbdCommand::Read, offset, slice_of(into))
    }

    /// Writes to one server and waits, as [`read_from`](Client::read_from). (The bytes are not changed.)
    ///
    /// # Errors
    /// As [`read_from`](Client::read_from).
    pub fn write_to(&self, at: usize, offset: u64, from: &mut [u8]) -> io::Result<()> {
        self.run_on(at, NbdCommand::Write, offset, slice_of(from))
    }

    /// Writes zeros to parts of a server's export, and then `mark` to its start, if it is not empty.
    ///
    /// # Errors
    /// As [`read_from`](Client::read_from).
    pub fn begin_anew(
        &self,
        at: usize,
        mut parts: impl Iterator<Item = Range<u64>>,
        mark: &[u8],
    ) -> Result<(), NetworkError> {
        if let Some(table) = self.table() {
            table.forget(at);
        }
        let erased = parts.try_for_each(|part| {
            self.write_to(at, part.start, &mut vec![0; (part.end - part.start) as usize])
        });
        let marked = erased.and_then(|()| match mark {
            [] => Ok(()),
            _ => self.write_to(at, 0, &mut block_of(mark)),
        });
        marked.map_err(|error| {
            NetworkError::new(&*self.name_of(at), format!("cannot be written: {error}"))
        })
    }

    /// Runs a request, for which a connection may have to be made first.
    fn run_on(&self, at: usize, command: NbdCommand, offset: u64, data: IoSlice) -> io::Result<()> {
        let (set, at) = self.server(at).ok_or(io::ErrorKind::NotFound)?;
        let mut term = WaitTerm::within(set.wait_max());
        let errno = loop {
            match set.exchange(at, command, offset, data, data.len() as u32) {
                FlightEnd::Done => return Ok(()),
                FlightEnd::Refused(errno) => break errno,
                FlightEnd::Lost => break libc::ECONNRESET,
                // The connection is being made.
                FlightEnd::Unsent if !term.left().is_zero() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                FlightEnd::Unsent => break libc::ENOTCONN,
            }
        };
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Reads now, from the first server that has the bytes. Neither locks nor allocates, so that a signal handler may
    /// call it.
    ///
    /// # Errors
    /// The last server's, as Linux numbers it.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes, and nobody else uses them during the call.
    pub unsafe fn read_now(&self, offset: u64, into: *mut u8, len: usize) -> Result<(), i32> {
        if let Some(stripes) = &self.stripes {
            // SAFETY: the caller's promise.
            return unsafe { stripes.read_now(offset, IoSlice::new(into, len)) };
        }
        let set = &self.sets[0];
        set.check_range(offset, len as u64);
        let (mut errno, mut term) = (libc::ENOTCONN, WaitTerm::within(set.repeat_max()));
        loop {
            let mut is_away = false;
            for at in 0..set.servers().len() {
                match set.read_now(at, offset, IoSlice::new(into, len)) {
                    FlightEnd::Done => {
                        let Some(table) = set.table() else { return Ok(()) };
                        let slice = std::iter::once(IoSlice::new(into, len));
                        // SAFETY: the caller's promise.
                        if unsafe { table.blocks().check(offset, slice) } {
                            return Ok(());
                        }
                        errno = libc::EBADMSG;
                    }
                    FlightEnd::Refused(refused) => errno = refused,
                    FlightEnd::Lost => (is_away, errno) = (true, libc::ECONNRESET),
                    FlightEnd::Unsent => {
                        let is_whole = set.whole() >> at & 1 == 1;
                        is_away |= is_whole && !set.servers()[at].is_taken();
                    }
                }
            }
            // A table's user does not try again by itself.
            if set.table().is_none() || !is_away || term.left().is_zero() {
                return Err(errno);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes what was written outlive the servers' power, on all of them.
    ///
    /// # Errors
    /// The first failure, as Linux numbers it. Of a table: with `ENOTCONN` and `EAGAIN` nothing is lost, and a later flush may succeed; after
    /// any other error none does, and what was written since the last one is in doubt.
    pub fn flush(&self) -> Result<(), i32> {
        let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        if let Some(table) = self.table() {
            return table.flush();
        }
        let mut flushed = self.all().enumerate().filter(|(_, server)| server.export().can_flush());
        flushed.try_for_each(|(at, _)| {
            self.run_on(at, NbdCommand::Flush, 0, IoSlice::NONE).map_err(errno)
        })
    }

    /// Gives the space of a range back, of which nobody needs the bytes; where a server may do so later, the place is not
    /// written any more. With parity it is that of as many pages, nobody's, as were written together; of the others it goes
    /// back when no page was written for a while.
    ///
    /// # Errors
    /// The first server's that refuses.
    pub fn trim(&self, offset: u64, len: u64) -> Result<(), i32> {
        if let Some(stripes) = &self.stripes {
            stripes.check_range(offset, len);
            stripes.forget(offset, len);
            let spans = len.div_ceil(stripes.layout().span_len());
            for _ in 0..=spans {
                if !stripes.trim_some()? {
                    break;
                }
            }
            return Ok(());
        }
        let (set, mut result) = (&self.sets[0], Ok(()));
        for from in (offset..offset + len).step_by(TRIM_LEN_MAX as usize) {
            let piece = TRIM_LEN_MAX.min(offset + len - from);
            set.check_range(from, piece);
            if let Some(table) = set.table() {
                table.blocks().discarded(from, piece);
            }
            let servers = set.servers().iter().enumerate();
            for (at, server) in servers.filter(|(_, server)| server.export().can_trim()) {
                let command = NbdCommand::Trim;
                match set.exchange(at, command, from, IoSlice::NONE, piece as u32) {
                    FlightEnd::Lost => set.bar(at, from, piece),
                    FlightEnd::Refused(errno) => result = result.and(Err(errno)),
                    FlightEnd::Unsent
                        if set.members() >> at & 1 == 1 && !server.may_write(Instant::now()) =>
                    {
                        return Err(libc::ENOTCONN);
                    }
                    FlightEnd::Done | FlightEnd::Unsent => {}
                }
            }
        }
        result
    }
}

fn slice_of(bytes: &mut [u8]) -> IoSlice {
    IoSlice::new(bytes.as_mut_ptr(), bytes.len())
}

impl Client {
    /// Reaches the servers of a table, which must understand FLUSH; not all need answer. The table is not this client's
    /// before [`take_table`](Client::take_table).
    ///
    /// # Errors
    /// As [`connect`](Client::connect), and parity.
    pub fn of_table(list: &ServerList, deadline: Duration) -> Result<Client, NetworkError> {
        Table::check(list)?;
        let times = NbdTimes::within(deadline, list.addresses.len());
        let (mut servers, mut absent) = (Vec::new(), Vec::new());
        for server in open(&list.addresses, times, 1..=COPIES_MAX)? {
            match server {
                Ok(server) => servers.push(server),
                Err(error) => absent.push(error),
            }
        }
        if servers.is_empty() {
            return Err(absent.remove(0));
        }
        let capacity = smallest(&servers);
        for server in &mut servers {
            if !server.export().can_flush() {
                let reason = "does not understand FLUSH, without which a table is never durable";
                return Err(NetworkError::new(server.address(), reason));
            }
            let server = Arc::get_mut(server).expect("it was just made");
            server.set_lease(Lease::new(times.stall));
        }
        let table = Table::new(list, &servers, (capacity, times.stall, times.connect), absent);
        let set = ServerSet::new(servers.into(), capacity, times).with(table);
        Ok(Client { sets: [Arc::new(set)].into(), stripes: None })
    }

    fn its_table(&self) -> &Table {
        self.table().expect("a client of a table")
    }

    /// Waits until nobody has the table open, and returns where it lies; `None`: the exports hold none.
    ///
    /// # Errors
    /// That another process has it open, that a copy which does not answer may have gone on alone, or that of the
    /// connection.
    ///
    /// # Panics
    /// When it is no client of a table, as the other functions for tables do.
    pub fn find_table(&self) -> Result<Option<Range<u64>>, NetworkError> {
        self.its_table().find()
    }

    /// Servers that hold nothing of the table that was found, which others hold: it is copied to them.
    pub fn empty_servers(&self) -> impl Iterator<Item = usize> {
        let table = self.its_table();
        (0..self.sets[0].servers().len()).filter(|at| table.is_empty(*at))
    }

    /// Makes the table, or the exports for a new one, this process's from now on, of the run with this random number.
    /// Without one it is read, until a process opens it to write. [`find_table`](Client::find_table) comes before.
    ///
    /// # Errors
    /// As there.
    pub fn take_table(&self, pages: Range<u64>, run: Option<u64>) -> Result<(), NetworkError> {
        match run {
            Some(run) => self.its_table().take(pages, run.max(1)),
            None => self.its_table().read(),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Before the tenders end, which record what a flush waits for.
        let is_equal = self.table().is_some_and(Table::is_equal);
        self.all().for_each(|server| server.close());
        if let Some(table) = self.table() {
            table.close(is_equal, || drop(self.sets[0].turn()));
        }
        if let Some(stripes) = &self.stripes {
            stripes.close();
        }
    }
}
