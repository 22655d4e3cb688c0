//! Stores on servers of the NBD protocol: memory of other machines.
//!
//! [`NetworkStore`] finds out whether the exports are free, marks them and passes requests on to a client that knows
//! nothing of farheap (`farheap-nbd`): connections, copies and their health are there. Exports are laid out as devices
//! are ([`signature`](super::signature)), with a random number in the first block, by which this process sees that
//! another one has taken an export or that a server has begun anew.

#![expect(unsafe_code, reason = "passes buffers on to the client")]

use super::block::{CAPACITY_MIN, check_capacity};
use super::signature::{Use, pages_within, refused};
use super::{BARRED, LATE, Op, Queue, Request, Store, WATCHES_FULL, check_range};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::sys::buffer::Buffer;
use crate::sys::file::Errno;
use crate::sys::probe::contents::{Contents, LOOKED_AT, OwnSignature, tail};
use crate::sys::signals::SignalsBlocked;
use crate::sys::{self, EIO, messages, thread};
use farheap_nbd::{Client, NbdBuffer, NbdEnd, NbdQueue, NetworkError, ServerList, ServerStats};
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A store on one server, the same on several, or its parts with parity.
#[derive(Debug)]
pub(crate) struct NetworkStore {
    client: Client,
    /// Where the store lies in the exports.
    pages: Range<u64>,
    name: Arc<str>,
}

/// Reads the addresses in a name; `None`: it is a path.
///
/// # Errors
/// [`Error::Device`] for an address that is none.
pub(crate) fn servers_of(name: &Path) -> Result<Option<ServerList>> {
    name.to_str().and_then(ServerList::of).transpose().map_err(unusable)
}

impl NetworkStore {
    /// Opens a store for evicted pages, as [`BlockStore::scratch`](super::BlockStore::scratch) does on a device. Starts
    /// a thread for each server.
    ///
    /// # Errors
    /// [`Error::Device`] with the server's defect, or with the offset of what its export holds.
    pub(crate) fn open(
        servers: ServerList,
        capacity: Option<ByteCount>,
        overwrite: bool,
        deadline: Duration,
    ) -> Result<NetworkStore> {
        check_capacity(Path::new(&servers.text), capacity)?;
        let client = tended(Client::of(&servers, deadline))?;
        let len = client.capacity();
        client.require(capacity.unwrap_or(CAPACITY_MIN).0).map_err(unusable)?;
        // With parity the client leaves the ends of exports free.
        let pages = match servers.parity {
            0 => pages_within(len, true, capacity.unwrap_or(ByteCount(len))),
            _ => 0..capacity.map_or(len, |capacity| capacity.0),
        };
        let mark = OwnSignature { pages: pages.clone(), run: Some(sys::random_u64()?) }.text();
        for at in 0..servers.addresses.len() {
            take(&client, at, Use::Scratch { overwrite }, mark.as_bytes())?;
        }
        client.set_mark(mark.as_bytes());
        Ok(NetworkStore::new(client, pages, &servers.text))
    }

    /// Opens the store of a table; a new one leaves as much of the export free as a store for evicted pages.
    ///
    /// # Errors
    /// As for `open`; parity, and a table that another process has open.
    pub(crate) fn open_table(
        what: Use,
        servers: ServerList,
        capacity: Option<ByteCount>,
        deadline: Duration,
    ) -> Result<NetworkStore> {
        check_capacity(Path::new(&servers.text), capacity)?;
        let client = tended(Client::of_table(&servers, deadline))?;
        let found = client.find_table().map_err(unusable)?;
        let pages = if let (Use::NewTable { .. }, Some(capacity)) = (what, capacity) {
            let margin = pages_within(client.capacity(), true, capacity).start;
            client.require(capacity.0.saturating_add(2 * margin)).map_err(unusable)?;
            (0..servers.addresses.len()).try_for_each(|at| take(&client, at, what, &[]))?;
            margin..margin + capacity.0
        } else {
            let missing = "holds no table, or one of another version; `create` makes a new one";
            found.ok_or_else(|| refused(Path::new(&servers.text), missing))?
        };
        // A copy that is new.
        let empty = client.empty_servers().filter(|_| matches!(what, Use::OldTable));
        for at in empty.collect::<Vec<_>>() {
            take(&client, at, Use::NewTable { overwrite: false }, &[])?;
        }
        let run = if what == Use::Reading { None } else { Some(sys::random_u64()?) };
        client.take_table(pages.clone(), run).map_err(unusable)?;
        Ok(NetworkStore::new(client, pages, &servers.text))
    }

    fn new(client: Client, pages: Range<u64>, text: &str) -> NetworkStore {
        NetworkStore { client, pages, name: format!("server {text}").into() }
    }

    fn failed(&self, op: &'static str, offset: u64, len: u64, errno: i32) -> Error {
        Error::Io { op, store: Arc::clone(&self.name), offset, len, errno }
    }
}

/// The client, with threads that tend its servers.
fn tended(client: std::result::Result<Client, NetworkError>) -> Result<Client> {
    let client = client.map_err(unusable)?;
    for at in 0..client.tenders() {
        let tell = |text: std::fmt::Arguments<'_>| messages::warn("a server changes", text);
        let tender = client.tender(at, Box::new(tell));
        let _blocked = SignalsBlocked::new();
        let run = move || {
            let _ours = keep_local();
            SignalsBlocked::for_good();
            tender.run();
        };
        thread::spawn("farheap-net", run)?;
    }
    Ok(client)
}

/// Looks at an export, and begins it anew with `mark`.
fn take(client: &Client, at: usize, what: Use, mark: &[u8]) -> Result<()> {
    let _ours = keep_local();
    let (len, name) = (client.export_len(), PathBuf::from(client.name_of(at)));
    let mut read = |into: &mut Buffer, offset: u64| {
        let count = into.len().min((len - offset) as usize);
        let read = client.read_from(at, offset, &mut into[..count]);
        read.map_err(|error| Errno(error.raw_os_error().unwrap_or(EIO))).map(|()| count)
    };
    let holds = Contents::look_at(&mut read, true, len)
        .map_err(|errno| refused(&name, format!("cannot be read: {errno}")))?;
    what.check(&name, &holds)?;
    let ends = [0..LOOKED_AT.min(len), tail(len)..len];
    client.begin_anew(at, ends.into_iter().filter(|_| !holds.is_free()), mark).map_err(unusable)
}

fn unusable(error: NetworkError) -> Error {
    refused(Path::new(&error.address), error.reason)
}

// SAFETY: a read is done when one server has sent all of its bytes, or they were computed; places that a late write may
// reach are not written again by the client, which reports `LATE` and `BARRED`. Whether servers keep what they took,
// checksums tell.
unsafe impl Store for NetworkStore {
    fn capacity(&self) -> ByteCount {
        ByteCount(self.pages.end - self.pages.start)
    }

    fn outlives_process(&self) -> bool {
        true
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let queue = self.client.open_queue(depth as usize).map_err(sys::failed("connect"))?;
        let (pages, name) = (self.pages.clone(), Arc::clone(&self.name));
        Ok(Box::new(NetworkQueue { queue, pages, name }))
    }

    fn queue_bytes(&self, depth: u32) -> ByteCount {
        ByteCount(self.client.queue_bytes(depth as usize) as u64)
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let len = into.len();
        check_range(offset, len as u64, self.capacity());
        // SAFETY: the caller vouches for the buffer.
        unsafe { self.client.read_now(self.pages.start + offset, into.cast(), len) }
            .map_err(|errno| self.failed(Op::Read.name(), offset, len as u64, errno))
    }

    fn sync(&self) -> Result<()> {
        self.client.flush().map_err(|errno| self.failed("sync", 0, 0, errno))
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len, self.capacity());
        let trimmed = self.client.trim(self.pages.start + offset, len);
        trimmed.map_err(|errno| self.failed("discard", offset, len, errno))
    }

    fn server(&self, at: usize) -> Option<ServerStats> {
        self.client.stats_of(at)
    }

    fn describe(&self) -> String {
        format!("{}, {}{}", self.name, self.capacity(), self.client.describe_trim())
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }
}

/// A queue of the client's.
struct NetworkQueue {
    queue: NbdQueue,
    pages: Range<u64>,
    name: Arc<str>,
}

// SAFETY: the client's queue reports a request once, and copies bytes from and to its buffers itself, before that.
unsafe impl Queue for NetworkQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        request.check(ByteCount(self.pages.end - self.pages.start));
        let buffers = request.segments.iter();
        let buffers = buffers.map(|segment| NbdBuffer { ptr: segment.cast(), len: segment.len() });
        let offset = self.pages.start + request.offset;
        // SAFETY: the caller's promise, passed on.
        unsafe { self.queue.push(request.token, request.op == Op::Read, offset, buffers) }
    }

    fn submit(&mut self) -> Result<()> {
        self.queue.submit();
        Ok(())
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.queue.watch(fd).then_some(()).ok_or(WATCHES_FULL)
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        let (name, start) = (&self.name, self.pages.start);
        let mut report = |end: NbdEnd| {
            let errno = end.ending.errno(LATE, BARRED).map(Errno);
            let op = if end.is_read { Op::Read } else { Op::Write };
            let failed = |errno| Err(op.failed(name, end.offset - start, end.len.into(), errno));
            done(end.token, errno.map_or(Ok(()), failed));
        };
        self.queue.wait(timeout, &mut report).map_err(sys::failed("ppoll"))
    }

    fn in_flight(&self) -> u32 {
        self.queue.in_flight() as u32
    }
}
