//! A connection's bytes: as they are, or in TLS records.
//!
//! Buffers for records are made with the stream, which then takes one connection after the other: its owner neither
//! allocates nor frees.

#![expect(unsafe_code, reason = "fills and sends the buffers of requests")]

use crate::resident::touch;
use crate::sys::{self, Awaited, IoSlice, WaitTerm};
use crate::tls::{Opened, PLAIN_MAX, RECORD_MAX, TlsKeys};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// Records that are sent by one call.
const OUTGOING: usize = 4 * RECORD_MAX;
/// Bytes that are received by one call: some records.
const INCOMING: usize = 64 << 10;
/// Maximum number of such calls without any data, after which others have their turn.
const EMPTY_MAX: u32 = 16;

/// A connection on its way to the stream of its owner.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) fd: OwnedFd,
    pub(crate) keys: Option<TlsKeys>,
}

/// Records, and parts of them.
#[derive(Debug)]
struct Records {
    incoming: Box<[u8]>,
    /// Place of received bytes that were not opened.
    sealed: Range<usize>,
    /// Place of opened bytes that were not taken; before `sealed`.
    opened: Range<usize>,
    outgoing: Box<[u8]>,
    unsent: Range<usize>,
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct NbdStream {
    fd: Option<OwnedFd>,
    keys: Option<TlsKeys>,
    records: Option<Records>,
}

impl NbdStream {
    /// A stream without connection, for such with TLS or without.
    pub(crate) fn new(is_secured: bool) -> NbdStream {
        let records = || Records {
            incoming: vec![0; INCOMING].into(),
            sealed: 0..0,
            opened: 0..0,
            outgoing: vec![0; OUTGOING].into(),
            unsent: 0..0,
        };
        NbdStream { fd: None, keys: None, records: is_secured.then(records) }
    }

    /// Gives the buffers for records their memory.
    pub(crate) fn touch(&mut self) {
        if let Some(Records { incoming, outgoing, .. }) = &mut self.records {
            touch(incoming);
            touch(outgoing);
        }
    }

    /// Bytes of one.
    pub(crate) const fn bytes(is_secured: bool) -> usize {
        if is_secured { INCOMING + OUTGOING } else { 0 }
    }

    pub(crate) fn attach(&mut self, connection: Connection) {
        let Connection { fd, keys } = connection;
        assert!(keys.is_none() || self.records.is_some(), "no room for records");
        (self.fd, self.keys) = (Some(fd), keys);
        self.forget();
    }

    /// From here on bytes are sent and received in records.
    pub(crate) fn secure(&mut self, keys: TlsKeys) {
        self.keys = Some(keys);
    }

    /// Gives the connection away, if nothing is half received or half sent.
    pub(crate) fn detach(&mut self) -> Option<Connection> {
        let is_whole = |records: &Records| {
            records.sealed.is_empty() && records.opened.is_empty() && records.unsent.is_empty()
        };
        let fd = self.fd.take_if(|_| self.records.as_ref().is_none_or(is_whole))?;
        Some(Connection { fd, keys: self.keys.take() })
    }

    /// Ends the connection.
    pub(crate) fn close(&mut self) {
        (self.fd, self.keys) = (None, None);
        self.forget();
    }

    /// Ends the connection at once, as far as that is possible.
    pub(crate) fn abort(&mut self) {
        self.fd.take().into_iter().for_each(sys::abort);
        self.close();
    }

    fn forget(&mut self) {
        if let Some(Records { sealed, opened, unsent, .. }) = &mut self.records {
            (*sealed, *opened, *unsent) = (0..0, 0..0, 0..0);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.fd.is_some()
    }

    /// True if a connection has neither ended nor anything to be read.
    pub(crate) fn is_quiet(&self) -> bool {
        self.fd.as_ref().is_some_and(|fd| sys::is_quiet(fd.as_fd()))
    }

    pub(crate) fn raw_fd(&self) -> Option<RawFd> {
        self.fd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// True if records wait for the socket to take them.
    pub(crate) fn has_unsent(&self) -> bool {
        self.records.as_ref().is_some_and(|records| !records.unsent.is_empty())
    }

    /// Sends what of records is left; returns whether that is nothing.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        let (Some(fd), Some(Records { outgoing, unsent, .. })) = (&self.fd, &mut self.records)
        else {
            return Ok(true);
        };
        while unsent.start < unsent.end {
            let part = &mut outgoing[unsent.clone()];
            let part = [IoSlice::new(part.as_mut_ptr(), part.len())];
            // SAFETY: the buffer is this stream's.
            let Some(count) = (unsafe { sys::send(fd.as_fd(), &part) })? else { return Ok(false) };
            unsent.start += count;
        }
        Ok(true)
    }

    /// Sends from buffers, or takes their bytes into records; `None`: the socket takes nothing now.
    ///
    /// # Errors
    /// When the connection is broken.
    ///
    /// # Safety
    /// The buffers can be read.
    pub(crate) unsafe fn send(&mut self, from: &[IoSlice]) -> io::Result<Option<usize>> {
        let Some(fd) = &self.fd else { return Ok(None) };
        if self.keys.is_none() {
            // SAFETY: the caller's promise.
            return unsafe { sys::send(fd.as_fd(), from) };
        }
        if !self.flush()? {
            return Ok(None);
        }
        let (Some(keys), Some(records)) = (&mut self.keys, &mut self.records) else {
            return Ok(None);
        };
        let (mut taken, mut end) = (0, 0);
        while records.outgoing.len() - end >= RECORD_MAX {
            let record = &mut records.outgoing[end..end + RECORD_MAX];
            if keys.is_update_due() {
                end += keys.seal_update(record);
                continue;
            }
            // SAFETY: the caller's promise.
            let count = unsafe { fill(record, from, taken) };
            if count == 0 {
                break;
            }
            taken += count;
            end += keys.seal_record(record, count);
        }
        records.unsent = 0..end;
        self.flush()?;
        Ok(Some(taken))
    }

    /// Receives into buffers; `None`: there is nothing now. Where fewer bytes come than there is room for, no others are
    /// here: what the socket has can be waited for.
    ///
    /// # Errors
    /// When the connection is broken or has ended.
    ///
    /// # Safety
    /// The buffers can be written, and nobody else uses them.
    pub(crate) unsafe fn receive(&mut self, into: &[IoSlice]) -> io::Result<Option<usize>> {
        let Some(fd) = &self.fd else { return Ok(None) };
        if self.keys.is_none() {
            // SAFETY: the caller's promise.
            return unsafe { sys::receive(fd.as_fd(), into) };
        }
        let mut came = 0;
        for part in into {
            let mut at = 0;
            while at < part.len() {
                if !self.open_some(came == 0)? {
                    return Ok((came > 0).then_some(came));
                }
                let Some(Records { incoming, opened, .. }) = &mut self.records else { break };
                let count = opened.len().min(part.len() - at);
                let from = &incoming[opened.start..opened.start + count];
                // SAFETY: the caller's promise.
                unsafe { part.part(at, count).copy_from(from) }
                opened.start += count;
                (at, came) = (at + count, came + count);
            }
        }
        Ok(Some(came))
    }

    /// Opens records until there is data, and receives them first if it may; returns whether there is data.
    fn open_some(&mut self, may_receive: bool) -> io::Result<bool> {
        let (Some(fd), Some(keys), Some(records)) = (&self.fd, &mut self.keys, &mut self.records)
        else {
            return Ok(false);
        };
        let Records { incoming, sealed, opened, .. } = records;
        let mut calls = 0;
        while opened.start == opened.end {
            if let Opened::Record { len, data } = keys.open_record(&mut incoming[sealed.clone()])? {
                let start = sealed.start + Opened::AT;
                *opened = start..start + data;
                sealed.start += len;
                continue;
            }
            calls += 1;
            if !may_receive || calls > EMPTY_MAX {
                return Ok(false);
            }
            incoming.copy_within(sealed.clone(), 0);
            *sealed = 0..sealed.len();
            let room = &mut incoming[sealed.end..];
            let room = [IoSlice::new(room.as_mut_ptr(), room.len())];
            // SAFETY: the buffer is this stream's.
            let Some(count) = (unsafe { sys::receive(fd.as_fd(), &room) })? else {
                return Ok(false);
            };
            sealed.end += count;
        }
        Ok(true)
    }
}

/// Copies bytes of `from`, behind the first `skip`, to where a record has its data; returns how many.
///
/// # Safety
/// The buffers can be read.
unsafe fn fill(record: &mut [u8], from: &[IoSlice], mut skip: usize) -> usize {
    let room = &mut record[Opened::AT..][..PLAIN_MAX];
    let mut count = 0;
    for part in from {
        let skipped = skip.min(part.len());
        skip -= skipped;
        let part = part.part(skipped, room.len() - count);
        // SAFETY: the caller's promise.
        unsafe { part.copy_to(&mut room[count..count + part.len()]) }
        count += part.len();
    }
    count
}

/// A stream that is read and written with a deadline, for the handshake.
#[derive(Debug)]
pub(crate) struct Timed<'a> {
    pub(crate) stream: &'a mut NbdStream,
    pub(crate) term: &'a mut WaitTerm,
}

impl Timed<'_> {
    fn until_ready<T>(
        &mut self,
        write: bool,
        mut transfer: impl FnMut(&mut NbdStream) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        loop {
            let left = self.term.left();
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if let Some(result) = transfer(self.stream)? {
                return Ok(result);
            }
            if let Some(fd) = self.stream.raw_fd() {
                sys::wait(&[Awaited { fd, write: write || self.stream.has_unsent() }], left)?;
            }
        }
    }
}

impl io::Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let buffer = [IoSlice::new(into.as_mut_ptr(), into.len())];
        // SAFETY: the buffer is the caller's slice.
        self.until_ready(false, |stream| unsafe { stream.receive(&buffer) })
    }
}

impl io::Write for Timed<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let buffer = [IoSlice::new(from.as_ptr().cast_mut(), from.len())];
        // SAFETY: the buffer is the caller's slice, which is only read.
        let count = self.until_ready(true, |stream| unsafe { stream.send(&buffer) })?;
        self.flush()?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.until_ready(true, |stream| Ok(stream.flush()?.then_some(())))
    }
}
