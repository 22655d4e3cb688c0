//! One server: its connections, what it lacks, and the thread that tends it.
//!
//! ```text
//!   Up --a connection breaks, and no other can be made--> Lost --connected, with our mark--------> Up
//!    |                                                      |---connected, all zeros: restarted--> Up, lacking all
//!    '--the first block is another's----> Taken <-----------'    (one server alone: Taken, for its pages are gone)
//! ```
//! A server counts by what it holds, not by a state: `lacking` has the blocks that it does not hold as they were written
//! last, `barred` those to which a write may be under way that nobody waits for any more. So a server that was away is of
//! use at once, for what it has.

use crate::address::{Endpoint, NetworkError, ServerAddress};
use crate::blocks::{BLOCK, BlockSet};
use crate::handshake::{Export, greet, request_tls};
use crate::lease::{LEASE, Lease};
use crate::link::{BufferTable, FlightEnd, Link};
use crate::read_times::ReadTimes;
use crate::seat::{Seat, Seated};
use crate::server_mark::MARK_LEN;
use crate::silence::Silence;
use crate::stream::{Connection, NbdStream, Timed};
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::sys::{self, Awaited, IoSlice, WaitTerm};
use crate::tls;
use crate::wire::NbdCommand;
use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Pauses between two attempts to reach a server; each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often a server's mark is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A server's health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerState {
    /// It answers.
    #[default]
    Up,
    /// It cannot be reached.
    Lost,
    /// Its export is somebody else's now, what it held is gone, or it missed something of a table: it is not used any more.
    Taken,
}

/// Counts of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Its health.
    pub state: ServerState,
    /// Reads that it has answered.
    pub reads: u64,
    /// Writes that it has answered.
    pub writes: u64,
    /// Requests that it has refused.
    pub errors: u64,
    /// Requests that it has not answered yet.
    pub in_flight: u64,
    /// Connections that broke.
    pub breaks: u64,
    /// Connections that were made because one was missed: the first was none yet, or it broke.
    pub connections: u64,
    /// Reads that another server was too late for; with parity reads that it was too late for itself.
    pub hedges: u64,
    /// Blocks of its that were computed from those of other servers.
    pub rebuilt: u64,
    /// Half of its reads, of late, ended within this; zero: there was none.
    pub read_p50: Duration,
    /// 95 of a hundred did.
    pub read_p95: Duration,
    /// 99 of a hundred did.
    pub read_p99: Duration,
    /// Bytes that it lacks and other servers have.
    pub lacking: u64,
    /// Bytes that it got from other servers after it had been away, or that were written anew elsewhere.
    pub copied: u64,
    /// Bytes of places that are not used any more, because a write may still be under way there.
    pub barred: u64,
}

impl ServerStats {
    /// Returns names and values; a state as its number: up, lost or taken.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("state", self.state as u64),
            ("reads", self.reads),
            ("writes", self.writes),
            ("errors", self.errors),
            ("in_flight", self.in_flight),
            ("breaks", self.breaks),
            ("connections", self.connections),
            ("hedges", self.hedges),
            ("rebuilt", self.rebuilt),
            ("read_ns_p50", self.read_p50.as_nanos() as u64),
            ("read_ns_p95", self.read_p95.as_nanos() as u64),
            ("read_ns_p99", self.read_p99.as_nanos() as u64),
            ("lacking_bytes", self.lacking),
            ("copied_bytes", self.copied),
            ("barred_bytes", self.barred),
        ]
        .into_iter()
    }
}

/// Called with news of a server, for people.
pub type Tell = Box<dyn Fn(fmt::Arguments<'_>) + Send + Sync>;

/// Content that the first block is to have.
type Mark = Option<Box<[u8]>>;

/// Content of a server's first block.
enum Found {
    /// This process's mark, or it has not marked it yet.
    Ours,
    Zeros,
    Other,
}

/// Something that is counted of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ServerEvent {
    Read,
    Write,
    Error,
    Break,
    Connection,
    Hedge,
    Rebuild,
}

/// Counts of what happened.
#[derive(Debug, Default)]
struct ServerCounts {
    events: [AtomicU64; 7],
    in_flight: AtomicU64,
    copied: AtomicU64,
    /// Mean time of a read, in nanoseconds: which server is nearest.
    read_ns: AtomicU64,
    read_times: ReadTimes,
}

/// The server's first block and its connections, and the thread that looks after them, the tender.
#[derive(Debug, Default)]
struct Tending {
    seats: Mutex<Vec<Arc<Seat>>>,
    mark: Mutex<Mark>,
    thread: Mutex<Option<Thread>>,
    is_closed: AtomicBool,
}

/// See [module](self).
pub(crate) struct NbdServer {
    address: ServerAddress,
    endpoint: Endpoint,
    export: Export,
    state: AtomicU64,
    /// Number of the server's life: another one after each restart without content.
    life: AtomicU64,
    pub(super) lacking: BlockSet,
    pub(super) barred: BlockSet,
    counts: ServerCounts,
    tending: Tending,
    /// Other servers hold the same.
    has_others: bool,
    /// Of a table's server.
    lease: Option<Lease>,
    pub(super) silence: Silence,
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl NbdServer {
    /// Reaches a server for the first time.
    ///
    /// # Errors
    /// When it cannot be reached or lacks something that every use of it needs.
    pub(crate) fn open(
        address: &ServerAddress,
        wait: Duration,
        has_others: bool,
    ) -> Result<NbdServer, NetworkError> {
        let (endpoint, export) = enter(address, wait)?;
        if let Some(why) = export.defect() {
            return Err(NetworkError::new(address, why));
        }
        Ok(NbdServer {
            address: address.clone(),
            endpoint,
            lacking: BlockSet::new(export.size()),
            barred: BlockSet::new(export.size()),
            export,
            state: AtomicU64::new(ServerState::Up as u64),
            life: AtomicU64::new(0),
            counts: ServerCounts::default(),
            tending: Tending::default(),
            has_others,
            lease: None,
            silence: Silence::new(),
        })
    }

    /// Makes it a table's server.
    pub(crate) fn set_lease(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// True if nobody can have taken the export meanwhile.
    pub(crate) fn may_write(&self, now: Instant) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_valid(now))
    }

    /// True if another process may have taken the export.
    pub(crate) fn has_lapsed(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.has_lapsed(Instant::now()))
    }

    pub(crate) fn address(&self) -> &ServerAddress {
        &self.address
    }

    pub(crate) fn export(&self) -> &Export {
        &self.export
    }

    /// A link for connections to it, with this many requests.
    pub(crate) fn link(&self, depth: usize) -> Link {
        Link::new(depth, self.address.certificates().is_some())
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ServerState::Up as u64
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ServerState::Taken as u64
    }

    /// Number of its present life.
    pub(crate) fn life(&self) -> u32 {
        self.life.load(Ordering::SeqCst) as u32
    }

    /// True if connections are of the server's present life.
    pub(crate) fn is_life(&self, life: u32) -> bool {
        self.life() == life
    }

    /// Notes that it has written what it may have lacked, in one of its lives; returns whether it still is in that one.
    pub(crate) fn note_written(&self, life: u32, offset: u64, len: u64) -> bool {
        self.lacking.remove(offset, len);
        // Afterwards: what begins anew counts the life first, and then lacks all.
        let is_same = self.is_life(life);
        if !is_same {
            self.lacking.insert(offset, len);
        }
        is_same
    }

    /// True if what it holds can be had without it.
    pub(crate) fn has_others(&self) -> bool {
        self.has_others
    }

    /// Adds a place for a connection, which is made at once.
    ///
    /// # Errors
    /// When it cannot be made, or the export is another's by now.
    pub(crate) fn add_seat(&self, wait: Duration) -> io::Result<Arc<Seat>> {
        let seat = Arc::new(Seat::default());
        match self.connect_again(wait) {
            Ok(Some(seated)) => seat.seat(seated),
            _ if self.has_others => drop(seat.ask()),
            Ok(None) => return Err(io::ErrorKind::PermissionDenied.into()),
            Err(error) => return Err(error),
        }
        let mut seats = self.tending.seats.lock().unwrap_or_else(PoisonError::into_inner);
        seats.retain(|seat| Arc::strong_count(seat) > 1);
        seats.push(Arc::clone(&seat));
        Ok(seat)
    }

    /// Adds a place for a connection that is made when it is asked for.
    pub(crate) fn add_empty_seat(&self) -> Arc<Seat> {
        let seat = Arc::new(Seat::default());
        self.tending.seats.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&seat));
        seat
    }

    /// Leaves word that a seat needs a connection. Neither allocates nor waits.
    pub(crate) fn ask(&self, seat: &Seat) {
        if seat.ask()
            && let Ok(tender) = self.tending.thread.try_lock()
            && let Some(tender) = &*tender
        {
            tender.unpark();
        }
    }

    /// Names what the first block holds from now on.
    pub(crate) fn set_mark(&self, mark: &[u8]) {
        *self.tending.mark.lock().unwrap_or_else(PoisonError::into_inner) = Some(mark.into());
    }

    /// Gives a link a new connection, which has seen the mark.
    ///
    /// # Errors
    /// When it cannot be made, or the export is another's by now.
    pub(crate) fn attach(&self, link: &mut Link, wait: Duration) -> io::Result<()> {
        link.break_off(&mut |_, _| ());
        let seated = self.connect_again(wait)?.ok_or(io::ErrorKind::PermissionDenied)?;
        link.attach(seated.connection, seated.is_chunked);
        Ok(())
    }

    /// Looks at the mark; `false`: the connection is broken.
    ///
    /// # Errors
    /// `EBUSY` when the mark is another's.
    pub(crate) fn is_marked(&self, link: &mut Link, term: &mut WaitTerm) -> Result<bool, i32> {
        let mark = self.tending.mark.lock().unwrap_or_else(PoisonError::into_inner);
        match look(&mark, link, term) {
            Ok(Found::Ours) => Ok(true),
            Ok(_) => Err(libc::EBUSY),
            Err(_) => {
                link.break_off(&mut |_, _| ());
                Ok(false)
            }
        }
    }

    /// The run with this number owns the export, whose mark it has written.
    pub(crate) fn own(&self, link: &mut Link, run: u64, term: &mut WaitTerm) -> io::Result<()> {
        if let Some(lease) = &self.lease {
            lease.begin(run);
        }
        self.renew(link, Instant::now(), term)
    }

    /// The mark was looked at after `from`: writes the next beat, of a table, so that others see that its owner lives.
    fn renew(&self, link: &mut Link, from: Instant, term: &mut WaitTerm) -> io::Result<()> {
        if let Some(lease) = &self.lease
            && let Some(mut beat) = lease.next_beat()
        {
            run_to_end(link, NbdCommand::Write, BLOCK, &mut beat, term)?;
            lease.renew(from);
        }
        Ok(())
    }

    /// True if the run with this number has owned the export and not lost it, as far as is known, and nothing is under
    /// way or may come late.
    pub(crate) fn may_be_closed_by(&self, run: u64) -> bool {
        let in_flight = self.counts.in_flight.load(Ordering::SeqCst);
        let is_owner = self.lease.as_ref().is_some_and(|lease| lease.is_of(run));
        is_owner && !self.is_taken() && in_flight == 0 && self.barred.count() == 0
    }

    /// Writes another mark in the place of this process's, if it is there and the deadline has not passed by then; `false`:
    /// it was not sent.
    ///
    /// # Errors
    /// It was sent, and nobody knows what became of it.
    pub(crate) fn replace_mark(
        &self,
        link: &mut Link,
        to: &[u8; MARK_LEN],
        deadline: Instant,
    ) -> io::Result<bool> {
        let mut mark = self.tending.mark.lock().unwrap_or_else(PoisonError::into_inner);
        // An answer that waited counts however late it is read.
        let term = &mut WaitTerm::within(deadline.saturating_duration_since(Instant::now()));
        let is_ours = matches!(look(&mark, link, term), Ok(Found::Ours));
        if !is_ours || Instant::now() >= deadline {
            link.break_off(&mut |_, _| ());
            return Ok(false);
        }
        // Longer: a mark that may be written later ends the use of a server.
        let term = &mut WaitTerm::within(LEASE);
        run_to_end(link, NbdCommand::Write, 0, &mut to.clone(), term)?;
        *mark = Some(to.as_slice().into());
        Ok(true)
    }

    /// Wakes its tender.
    pub(crate) fn wake(&self) {
        if let Some(tender) = &*self.tending.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            tender.unpark();
        }
    }

    pub(crate) fn close(&self) {
        self.tending.is_closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Mean time of a read in nanoseconds; 0: none was measured.
    pub(crate) fn read_ns(&self) -> u64 {
        self.counts.read_ns.load(Ordering::Relaxed)
    }

    /// Time after which a read is late: one of twenty is.
    pub(crate) fn read_p95(&self) -> Duration {
        self.counts.read_times.p95()
    }

    pub(crate) fn note_read(&self, took: Duration) {
        self.counts.read_times.note(took);
        let (took, mean) = (took.as_nanos() as u64, self.read_ns());
        let next = if mean == 0 { took } else { mean - mean / 16 + took / 16 };
        self.counts.read_ns.store(next, Ordering::Relaxed); // One of two racers is lost: a mean all the same.
    }

    /// Counts something.
    pub(crate) fn count(&self, event: ServerEvent) {
        self.counts.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that is on its way.
    pub(crate) fn begin(&self) {
        self.counts.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// The request has ended.
    pub(crate) fn end(&self) {
        self.counts.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts bytes that it got from another server.
    pub(crate) fn count_copied(&self, len: u64) {
        self.counts.copied.fetch_add(len, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> ServerStats {
        let count = |of: ServerEvent| self.counts.events[of as usize].load(Ordering::Relaxed);
        ServerStats {
            state: match self.state.load(Ordering::SeqCst) {
                0 => ServerState::Up,
                1 => ServerState::Lost,
                _ => ServerState::Taken,
            },
            reads: count(ServerEvent::Read),
            writes: count(ServerEvent::Write),
            errors: count(ServerEvent::Error),
            in_flight: self.counts.in_flight.load(Ordering::Relaxed),
            breaks: count(ServerEvent::Break),
            connections: count(ServerEvent::Connection),
            hedges: count(ServerEvent::Hedge),
            rebuilt: count(ServerEvent::Rebuild),
            read_p50: self.counts.read_times.quantile(50),
            read_p95: self.counts.read_times.quantile(95),
            read_p99: self.counts.read_times.quantile(99),
            lacking: self.lacking.count() * BLOCK,
            copied: self.counts.copied.load(Ordering::Relaxed),
            barred: self.barred.count() * BLOCK,
        }
    }

    // Connections.

    /// Connects, and looks whether the export still is what it was; `None`: it is not, and never will be.
    fn connect_again(&self, wait: Duration) -> io::Result<Option<Seated>> {
        let start = Instant::now();
        let term = &mut WaitTerm::within(wait);
        let (connection, export) = connect(&self.endpoint, &self.address, term)?;
        if let Some(lease) = &self.lease {
            sys::bound_unacked(connection.fd.as_fd(), lease.unacked_max());
        }
        if export.size() < self.export.size() || export.defect().is_some() {
            return Ok(None);
        }
        let mut link = self.link(1);
        link.attach(connection, export.is_chunked());
        // One at a time: of two that find zeros the second would note as lacking what was written by the first.
        let mark = self.tending.mark.lock().unwrap_or_else(PoisonError::into_inner);
        match look(&mark, &mut link, term)? {
            Found::Ours => self.renew(&mut link, start, term)?,
            Found::Zeros if self.has_others && self.lease.is_none() => {
                self.begin_anew(&mark, &mut link, term)?
            }
            Found::Zeros | Found::Other => return Ok(None),
        }
        let life = self.life();
        drop(mark);
        let connection = link.detach().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Seated { connection, is_chunked: export.is_chunked(), life }))
    }

    /// The server has begun anew, without what it held: it lacks everything from now on, and is marked again.
    fn begin_anew(&self, mark: &Mark, link: &mut Link, term: &mut WaitTerm) -> io::Result<()> {
        // First: what connections of its last life still report changes `lacking` no more.
        self.life.fetch_add(1, Ordering::SeqCst);
        self.lacking.insert(0, self.export.size() / BLOCK * BLOCK);
        let Some(mut bytes) = mark.clone() else { return Ok(()) };
        run_to_end(link, NbdCommand::Write, 0, &mut bytes, term)
    }

    /// Changes the state, unless it is not used any more; returns whether it is another one now.
    pub(crate) fn note(&self, to: ServerState) -> bool {
        let is_change = |is| is != to as u64 && is != ServerState::Taken as u64;
        let change = |is| is_change(is).then_some(to as u64);
        self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok()
    }

    // The tender.

    /// Makes broken connections anew and looks after the server's mark, until the client ends; `copy` gives the server
    /// some of what it missed, or makes the mark what it is to be, by the tender's connection; it returns how long to wait
    /// before it is called again, if there is more.
    pub(crate) fn tend(
        &self,
        wait: Duration,
        tell: &Tell,
        copy: &mut dyn FnMut(&mut Link) -> Option<Duration>,
    ) {
        *self.tending.thread.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(std::thread::current());
        let mut pause = PAUSE_MIN;
        let mut control = self.link(1);
        let mut looked = Instant::now();
        while !self.tending.is_closed.load(Ordering::SeqCst) && !self.is_taken() {
            let asked = self.asked_seat();
            match &asked {
                Some(seat) => match self.connect_again(wait) {
                    Ok(Some(seated)) => {
                        seat.seat(seated);
                        self.count(ServerEvent::Connection);
                        pause = PAUSE_MIN;
                        if self.note(ServerState::Up) {
                            tell(format_args!("{} answers again", self.address));
                        }
                        continue;
                    }
                    Ok(None) => return self.give_up(tell),
                    Err(error) => {
                        pause = (pause * 2).min(PAUSE_MAX);
                        if self.note(ServerState::Lost) {
                            tell(format_args!("{} is lost: {error}", self.address));
                        }
                    }
                },
                None => pause = PAUSE_MIN,
            }
            if looked.elapsed() >= LOOK_EVERY && asked.is_none() {
                looked = Instant::now();
                if self.look_at_mark(&mut control, wait) == Some(false) {
                    return self.give_up(tell);
                }
            }
            let is_up = asked.is_none() && self.has_others;
            let more = if is_up { copy(&mut control) } else { None };
            std::thread::park_timeout(match asked {
                Some(_) => pause,
                None => more.unwrap_or(LOOK_EVERY),
            });
        }
        if self.is_taken() {
            tell(format_args!(
                "{} lacks something of the table, and is not used any more until that is opened again",
                self.address
            ));
        }
    }

    fn asked_seat(&self) -> Option<Arc<Seat>> {
        let seats = self.tending.seats.lock().unwrap_or_else(PoisonError::into_inner);
        seats.iter().find(|seat| seat.is_asked() && Arc::strong_count(seat) > 1).cloned()
    }

    /// True if the mark is there; `None`: the server does not answer just now.
    fn look_at_mark(&self, control: &mut Link, wait: Duration) -> Option<bool> {
        if !control.is_usable() {
            let seated = self.connect_again(wait).ok()?;
            let Some(seated) = seated else { return Some(false) };
            control.attach(seated.connection, seated.is_chunked);
            return Some(true);
        }
        let mark = self.tending.mark.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let term = &mut WaitTerm::within(wait);
        match look(&mark, control, term) {
            Ok(Found::Ours) if self.renew(control, start, term).is_ok() => {
                return Some(true);
            }
            Ok(Found::Other) => return Some(false),
            // Where it began anew, a new connection finds out.
            Ok(Found::Ours | Found::Zeros) | Err(_) => control.break_off(&mut |_, _| ()),
        }
        None
    }

    fn give_up(&self, tell: &Tell) {
        self.note(ServerState::Taken);
        tell(format_args!(
            "{} is not used any more: its first block is not what this process wrote there, so that the export was \
             taken by another client, or its server began anew without the pages that it held",
            self.address
        ));
    }
}

impl ServerAddress {
    /// Asks the server what the export can.
    ///
    /// # Errors
    /// When it cannot be reached, or does not let this client in.
    pub fn probe(&self, wait: Duration) -> Result<Export, NetworkError> {
        Ok(enter(self, wait)?.1)
    }
}

/// Looks at the first block.
fn look(mark: &Mark, link: &mut Link, term: &mut WaitTerm) -> io::Result<Found> {
    let Some(mark) = mark else { return Ok(Found::Ours) };
    let mut found = vec![0; MARK_LEN];
    run_to_end(link, NbdCommand::Read, 0, &mut found, term)?;
    Ok(match () {
        () if found == **mark => Found::Ours,
        () if found.iter().all(|byte| *byte == 0) => Found::Zeros,
        () => Found::Other,
    })
}

/// Looks an address up, and leaves again.
fn enter(address: &ServerAddress, wait: Duration) -> Result<(Endpoint, Export), NetworkError> {
    let endpoint = address.look_up()?;
    let (connection, export) = connect(&endpoint, address, &mut WaitTerm::within(wait))
        .map_err(|error| NetworkError::new(address, format!("cannot be used: {error}")))?;
    let mut link = Link::new(1, address.certificates().is_some());
    link.attach(connection, export.is_chunked());
    link.take_leave();
    Ok((endpoint, export))
}

/// Connects and enters the export.
fn connect(
    endpoint: &Endpoint,
    address: &ServerAddress,
    term: &mut WaitTerm,
) -> io::Result<(Connection, Export)> {
    let fd = match endpoint {
        Endpoint::Unix(path) => sys::connect_unix(path)?,
        Endpoint::Tcp(addresses) => {
            let mut result = Err(io::ErrorKind::NotFound.into());
            for address in addresses {
                result = sys::connect_tcp(*address, term);
                if result.is_ok() {
                    break;
                }
            }
            result?
        }
    };
    let certificates = address.certificates();
    let mut stream = NbdStream::new(certificates.is_some());
    stream.attach(Connection { fd, keys: None });
    let mut timed = Timed { stream: &mut stream, term };
    greet(&mut timed)?;
    if let Some(certificates) = certificates {
        request_tls(&mut timed)?;
        let keys = tls::shake_hands(&mut timed, certificates, address.host())?;
        timed.stream.secure(keys);
    }
    let mut entered = Export::enter(&mut timed, address.export());
    if certificates.is_some() {
        entered = entered.map_err(tls::explain_end);
    }
    let export = entered?;
    let connection = stream.detach();
    Ok((connection.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?, export))
}

/// Runs one request on a link that does nothing else, and waits for its end.
///
/// # Errors
/// `ETIMEDOUT` past the deadline, that of the connection when it breaks, and the server's.
pub(crate) fn run_to_end(
    link: &mut Link,
    command: NbdCommand,
    offset: u64,
    data: &mut [u8],
    term: &mut WaitTerm,
) -> io::Result<()> {
    let mut vectors = BufferTable::new(1, 1);
    vectors.set(0, std::iter::once(IoSlice::new(data.as_mut_ptr(), data.len())));
    match run_with(link, &vectors, command, offset, data.len() as u32, term)? {
        FlightEnd::Done => Ok(()),
        FlightEnd::Refused(errno) => Err(io::Error::from_raw_os_error(errno)),
        FlightEnd::Unsent | FlightEnd::Lost => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

/// As `run_to_end`, with buffers that are vectors' number 0. Allocates nothing.
pub(crate) fn run_with(
    link: &mut Link,
    vectors: &BufferTable,
    command: NbdCommand,
    offset: u64,
    len: u32,
    term: &mut WaitTerm,
) -> io::Result<FlightEnd> {
    let (mut end, mut has_waited) = (None, false);
    link.start(0, command, offset, len);
    while end.is_none() {
        let mut done = |_, how| end = Some(how);
        // No server answers before the request has been sent: a look would cost a system call.
        let pumped = link.pump_out(vectors).and_then(|()| match has_waited {
            true => link.pump_in(vectors, &mut done),
            false => Ok(false),
        });
        has_waited = true;
        if end.is_some() {
            break;
        }
        let left = term.left();
        let is_over = left.is_zero();
        if pumped.is_err() || is_over {
            link.break_off(&mut |_, e| end = Some(e));
            break;
        }
        let Some(fd) = link.raw_fd() else { break };
        if matches!(pumped, Ok(false)) {
            // It fails for lack of memory only, and then the loop looks again and again until the deadline.
            let _ = sys::wait(&[Awaited { fd, write: link.has_queued() }], left);
        }
    }
    end.ok_or_else(|| io::ErrorKind::NotConnected.into())
}
