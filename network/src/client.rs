//! The servers that hold the same bytes, as one.

#![expect(unsafe_code, reason = "passes a caller's buffer on")]

use crate::address::{NetworkError, ServerAddress};
use crate::blocks::BLOCK;
use crate::handshake::Export;
use crate::link::FlightEnd;
use crate::queue::{NbdQueue, SERVERS_MAX};
use crate::server::{NbdServer, ServerStats, Tell};
use crate::shared::{COPY_LEN, NbdTimes, ServerSet};
use crate::sys::IoSlice;
use crate::wire::NbdCommand;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of bytes of one trim.
const TRIM_LEN_MAX: u64 = 4 << 20;
/// Maximum number of requests of a queue.
const DEPTH_MAX: usize = 4096;

/// A client of servers that hold the same bytes.
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
    shared: Arc<ServerSet>,
}

/// Tends one server, on a thread of its own.
pub struct Tender {
    shared: Arc<ServerSet>,
    at: usize,
    tell: Tell,
}

impl std::fmt::Debug for Tender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tender")
            .field("server", &self.shared.servers()[self.at])
            .finish_non_exhaustive()
    }
}

impl Tender {
    /// Makes broken connections anew, looks after the server's mark, and gives the server what it missed, until the
    /// client is dropped.
    pub fn run(self) {
        let server = &self.shared.servers()[self.at];
        let mut buffer = vec![0; if self.shared.servers().len() > 1 { COPY_LEN } else { 0 }];
        let mut from = 0;
        server.tend(self.shared.wait_max(), &self.tell, &mut || {
            let _one = self.shared.turn();
            let start = Instant::now();
            let next = self.shared.copy_some(self.at, from, &mut buffer);
            from = next.unwrap_or(0);
            // As much time for others as this has taken, at the servers and at this one.
            next.map(|_| start.elapsed())
        });
    }
}

impl Client {
    /// Reaches all servers; `stall` and `connect` hold for each from now on.
    ///
    /// # Errors
    /// The first server that cannot be reached, or lacks something that every use of it needs.
    pub fn connect(addresses: &[ServerAddress], times: NbdTimes) -> Result<Client, NetworkError> {
        let count = addresses.len();
        if !(1..=SERVERS_MAX).contains(&count) {
            let reason = format!("{count} servers are not 1 to {SERVERS_MAX}");
            return Err(NetworkError { address: "nbd".to_owned(), reason });
        }
        let has_twin = |(at, address): (usize, &ServerAddress)| addresses[..at].contains(address);
        if let Some(twin) = addresses.iter().enumerate().position(has_twin) {
            let reason = "is named twice: two copies would be one".to_owned();
            return Err(NetworkError { address: addresses[twin].to_string(), reason });
        }
        let open = |address| NbdServer::open(address, times.connect, count > 1).map(Arc::new);
        let servers = addresses.iter().map(open).collect::<Result<Box<[_]>, _>>()?;
        let smallest = servers.iter().map(|server| server.export().size()).min().unwrap_or(0);
        let capacity = smallest / BLOCK * BLOCK;
        Ok(Client { shared: Arc::new(ServerSet::new(servers, capacity, times)) })
    }

    /// Bytes that each of the servers has.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.capacity()
    }

    /// The servers and what they announce.
    pub fn servers(&self) -> impl Iterator<Item = (&ServerAddress, &Export)> {
        self.shared.servers().iter().map(|server| (server.address(), server.export()))
    }

    /// Counts of each server.
    #[must_use]
    pub fn stats(&self) -> Vec<ServerStats> {
        (0..SERVERS_MAX).map_while(|at| self.stats_of(at)).collect()
    }

    /// Counts of the server with this number, if there is one. Allocates nothing.
    #[must_use]
    pub fn stats_of(&self, at: usize) -> Option<ServerStats> {
        Some(self.shared.servers().get(at)?.stats())
    }

    /// Names the content of the first block of each server, which it must have whenever a connection is made and
    /// [`write_to`](Client::write_to) has written. A server whose first block is another one is not used any more.
    pub fn set_mark(&self, mark: &[u8; crate::server::MARK_LEN]) {
        self.shared.servers().iter().for_each(|server| server.set_mark(mark));
    }

    /// Returns what tends a server; its thread is the caller's to start. Without it no connection is made anew, and
    /// [`read_from`](Client::read_from) and [`write_to`](Client::write_to) have none.
    #[must_use]
    pub fn tender(&self, at: usize, tell: Tell) -> Tender {
        Tender { shared: Arc::clone(&self.shared), at, tell }
    }

    /// Opens a queue for up to `depth` requests.
    ///
    /// # Errors
    /// When a server cannot be reached that is the only one.
    pub fn open_queue(&self, depth: usize) -> io::Result<NbdQueue> {
        NbdQueue::new(Arc::clone(&self.shared), depth.clamp(1, DEPTH_MAX))
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

    /// Runs a request, for which a connection may have to be made first.
    fn run_on(&self, at: usize, command: NbdCommand, offset: u64, data: IoSlice) -> io::Result<()> {
        let start = Instant::now();
        loop {
            match self.shared.exchange(at, command, offset, data, data.len() as u32) {
                FlightEnd::Done => return Ok(()),
                FlightEnd::Refused(errno) => return Err(io::Error::from_raw_os_error(errno)),
                FlightEnd::Lost => return Err(io::ErrorKind::ConnectionReset.into()),
                // The connection is being made.
                FlightEnd::Unsent if start.elapsed() < self.shared.wait_max() => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                FlightEnd::Unsent => return Err(io::ErrorKind::NotConnected.into()),
            }
        }
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
        self.shared.check_range(offset, len as u64);
        let mut errno = libc::ENOTCONN;
        for at in 0..self.shared.servers().len() {
            match self.shared.read_now(at, offset, IoSlice::new(into, len)) {
                FlightEnd::Done => return Ok(()),
                FlightEnd::Refused(refused) => errno = refused,
                FlightEnd::Lost => errno = libc::ECONNRESET,
                FlightEnd::Unsent => {}
            }
        }
        Err(errno)
    }

    /// Makes what was written outlive the servers' power, on all of them.
    ///
    /// # Errors
    /// The first failure.
    pub fn flush(&self) -> io::Result<()> {
        let servers = self.shared.servers().iter().enumerate();
        let mut flushed = servers.filter(|(_, server)| server.export().can_flush());
        flushed.try_for_each(|(at, _)| self.run_on(at, NbdCommand::Flush, 0, IoSlice::NONE))
    }

    /// Gives the space of a range back, of which nobody needs the bytes; where a server may do so later, the place is not
    /// written any more.
    ///
    /// # Errors
    /// The first server's that refuses.
    pub fn trim(&self, offset: u64, len: u64) -> Result<(), i32> {
        let mut result = Ok(());
        for from in (offset..offset + len).step_by(TRIM_LEN_MAX as usize) {
            let piece = TRIM_LEN_MAX.min(offset + len - from);
            self.shared.check_range(from, piece);
            let servers = self.shared.servers().iter().enumerate();
            for (at, server) in servers.filter(|(_, server)| server.export().can_trim()) {
                let command = NbdCommand::Trim;
                match self.shared.exchange(at, command, from, IoSlice::NONE, piece as u32) {
                    FlightEnd::Lost => server.barred.insert(from, piece),
                    FlightEnd::Refused(errno) => result = result.and(Err(errno)),
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

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.servers().iter().for_each(|server| server.close());
    }
}
