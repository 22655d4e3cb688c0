//! Stores on servers of the NBD protocol: memory of other machines.
//!
//! [`NetworkStore`] finds out whether the exports are free, marks them and passes requests on to a client that knows
//! nothing of farheap (`farheap-nbd`): connections, copies and their health are there. Exports are laid out as devices
//! are ([`signature`](super::signature)), with a random number in the first block, by which this process sees that
//! another one has taken an export or that a server has begun anew.

#![expect(unsafe_code, reason = "passes buffers on to the client")]

use super::block::{CAPACITY_MIN, check_capacity};
use super::signature::{pages_within, refused};
use super::{DEPTH_MAX, LATE, Op, Queue, Request, Store, WATCHES_FULL, check_range};
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::sys::buffer::Buffer;
use crate::sys::file::Errno;
use crate::sys::probe::contents::{Contents, LOOKED_AT, OwnSignature, tail};
use crate::sys::signals::SignalsBlocked;
use crate::sys::{self, EIO, messages, thread};
use farheap_nbd::{
    Client, Ending, MARK_LEN, NbdBuffer, NbdEnd, NbdQueue, NbdTimes, NetworkError, ServerAddress,
    ServerList, ServerStats,
};
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A server that is the only one may be silent for this part of the deadline of a request, so that a read is repeated
/// on another connection before it is given up.
const STALLS_PER_DEADLINE: u32 = 6;
/// The same of one that has copies: no more, for all writes wait for it.
const STALL_MAX_COPIED: Duration = Duration::from_secs(1);
/// A store on one server, the same on several, or its parts with parity.
#[derive(Debug)]
pub(crate) struct NetworkStore {
    client: Client,
    /// Where the store lies in the exports.
    pages: Range<u64>,
    name: Arc<str>,
}

/// Where pages are to be kept.
#[derive(Debug)]
pub(crate) struct NetworkPlace(ServerList);

impl NetworkPlace {
    /// Reads the addresses in a device's name; `None`: it is a path.
    ///
    /// # Errors
    /// [`Error::Device`] for an address that is none.
    pub(crate) fn of(device: &Path) -> Result<Option<NetworkPlace>> {
        let text = device.to_str().filter(|text| ServerAddress::is_address(text));
        text.map(|text| text.parse().map(NetworkPlace).map_err(unusable)).transpose()
    }

    /// True if pages are to be encrypted on the way, because others may listen or read the server's memory.
    pub(crate) fn wants_encryption(&self) -> bool {
        !self.0.is_plain && !self.0.addresses.iter().all(ServerAddress::is_local)
    }
}

impl NetworkStore {
    /// Opens a store for evicted pages, as [`BlockStore::scratch`](super::BlockStore::scratch) does on a device. Starts
    /// a thread for each server.
    ///
    /// # Errors
    /// [`Error::Device`] with the server's defect, or with the offset of what its export holds.
    pub(crate) fn open(
        place: NetworkPlace,
        capacity: Option<ByteCount>,
        overwrite: bool,
        deadline: Duration,
    ) -> Result<NetworkStore> {
        let ServerList { addresses, parity, text, .. } = place.0;
        let path = PathBuf::from(&text);
        check_capacity(&path, capacity)?;
        let connect = deadline / STALLS_PER_DEADLINE;
        let stall_max = if addresses.len() > 1 { STALL_MAX_COPIED } else { Duration::MAX };
        let times = NbdTimes { connect, stall: connect.min(stall_max) };
        let client = match parity {
            0 => Client::connect(&addresses, times),
            _ => Client::connect_striped(&addresses, parity, times),
        }
        .map_err(unusable)?;
        for at in 0..client.tenders() {
            tend(&client, at)?;
        }
        let len = client.capacity();
        let least = capacity.unwrap_or(CAPACITY_MIN);
        if ByteCount(len) < least {
            let what = format!("has {len} bytes, and {least} are needed; use less of it");
            return Err(refused(&path, what));
        }
        // With parity the client leaves the ends of exports free.
        let pages = match parity {
            0 => pages_within(len, true, capacity.unwrap_or(ByteCount(len))),
            _ => 0..capacity.map_or(len, |capacity| capacity.0),
        };
        let own = OwnSignature { pages: pages.clone(), run: Some(sys::random_u64()?) };
        for (at, address) in addresses.iter().enumerate() {
            take(&client, at, overwrite, &own)
                .map_err(|why| refused(Path::new(&address.to_string()), why))?;
        }
        client.set_mark(&mark(&own));
        Ok(NetworkStore { client, pages, name: format!("server {text}").into() })
    }

    fn failed(&self, op: &'static str, offset: u64, len: u64, errno: i32) -> Error {
        Error::Io { op, store: Arc::clone(&self.name), offset, len, errno }
    }
}

/// Starts the thread that tends a server.
fn tend(client: &Client, at: usize) -> Result<()> {
    let tell = |text: std::fmt::Arguments<'_>| {
        messages::tell("a server changes", messages::WARNINGS_MAX, text);
    };
    let tender = client.tender(at, Box::new(tell));
    let _blocked = SignalsBlocked::new();
    let run = move || {
        let _ours = keep_local();
        SignalsBlocked::for_good();
        tender.run();
    };
    thread::spawn("farheap-net", run).map(drop)
}

/// Looks at an export, and makes it this process's.
fn take(
    client: &Client,
    at: usize,
    overwrite: bool,
    own: &OwnSignature,
) -> std::result::Result<(), String> {
    let _ours = keep_local();
    let len = client.export_len();
    let mut read = |into: &mut Buffer, offset: u64| {
        let count = into.len().min((len - offset) as usize);
        client
            .read_from(at, offset, &mut into[..count])
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(EIO)))?;
        Ok(count)
    };
    let holds = Contents::look_at(&mut read, true, len)
        .map_err(|errno| format!("cannot be read: {errno}"))?;
    if !overwrite && !holds.is_free() {
        return Err(format!(
            "holds {holds}, which would be lost; name another one, or set `overwrite:on` if nobody needs that"
        ));
    }
    let write = |offset, mut bytes: Vec<u8>| {
        let written = client.write_to(at, offset, &mut bytes);
        written.map_err(|error| format!("cannot be written: {error}"))
    };
    if !holds.is_free() {
        write(0, vec![0; LOOKED_AT.min(len) as usize])?;
        write(tail(len), vec![0; (len - tail(len)) as usize])?;
    }
    write(0, mark(own).to_vec())
}

/// The first block of an export that is this process's.
fn mark(own: &OwnSignature) -> [u8; MARK_LEN] {
    let (mut mark, text) = ([0; MARK_LEN], own.text());
    mark[..text.len()].copy_from_slice(text.as_bytes());
    mark
}

fn unusable(error: NetworkError) -> Error {
    refused(Path::new(&error.address), error.reason)
}

// SAFETY: a read is done when one server has sent all of its bytes, or they were computed; places that a late write may
// reach are not written again by the client, which reports them as `LATE`. Whether servers keep what they took, checksums
// tell.
unsafe impl Store for NetworkStore {
    fn capacity(&self) -> ByteCount {
        ByteCount(self.pages.end - self.pages.start)
    }

    fn outlives_process(&self) -> bool {
        true
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let queue = self.client.open_queue(depth.clamp(1, DEPTH_MAX) as usize);
        Ok(Box::new(NetworkQueue {
            queue: queue.map_err(sys::failed("connect"))?,
            pages: self.pages.clone(),
            name: Arc::clone(&self.name),
        }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let len = into.len();
        check_range(offset, len as u64, self.capacity());
        // SAFETY: the caller vouches for the buffer.
        unsafe { self.client.read_now(self.pages.start + offset, into.cast(), len) }
            .map_err(|errno| self.failed(Op::Read.name(), offset, len as u64, errno))
    }

    fn sync(&self) -> Result<()> {
        let failed = |error: std::io::Error| error.raw_os_error().unwrap_or(EIO);
        self.client.flush().map_err(|error| self.failed("sync", 0, 0, failed(error)))
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
        let can_trim = self.client.servers().all(|(_, export)| export.can_trim());
        let trim = if can_trim { "" } else { ", no discard" };
        format!("{}, {}{trim}", self.name, self.capacity())
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
            let errno = match end.ending {
                Ending::Done => None,
                Ending::Failed(errno) => Some(Errno(errno)),
                Ending::Late => Some(Errno(LATE)),
            };
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
