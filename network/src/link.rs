//! One connection: requests on their way out, replies on their way in.
//!
//! ```text
//!   start -> queued --send--> sent --reply--> Done, Refused
//!               |               '--connection breaks--> Lost:   the server may carry it out, now or later
//!               '--connection breaks------------------> Unsent: nobody has it
//! ```
//! # Invariants
//! 1. A flight ends once. After its end, and of one that was muted, nothing is written to its buffers.
//! 2. A flight of which the kernel, or a TLS record, has got one byte never ends as `Unsent`.

#![expect(unsafe_code, reason = "fills and sends the buffers of requests")]

use crate::resident::touch;
use crate::stream::{Connection, NbdStream};
use crate::sys::{IoSlice, VECTOR_MAX};
use crate::wire::{self, Body, Exchange, NbdCommand, REPLY_LEN_MAX, REQUEST_LEN, ReplyHead};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Bytes that are received beside those which go to buffers: heads, and data that comes with them. Copying a page of
/// 4 KiB out of it costs less than another system call; more is received in place.
const STAGING: usize = 8 << 10;
/// Maximum number of buffers of a request.
pub(crate) const BUFFERS_MAX: usize = 64;

/// End of a request on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlightEnd {
    Done,
    /// The server's error.
    Refused(i32),
    /// The server never got it.
    Unsent,
    /// The connection broke: the server may carry it out yet.
    Lost,
}

/// The buffers of requests, by the request's number.
#[derive(Debug)]
pub(crate) struct BufferTable {
    slices: Box<[IoSlice]>,
    counts: Box<[usize]>,
    most: usize,
}

impl BufferTable {
    pub(crate) fn new(depth: usize, most: usize) -> BufferTable {
        BufferTable {
            slices: vec![IoSlice::NONE; depth * most].into(),
            counts: vec![0; depth].into(),
            most,
        }
    }

    /// # Panics
    /// When a request has more buffers than there is room for.
    pub(crate) fn check_count(&self, count: usize) {
        assert!(count <= self.most, "{count} buffers");
    }

    pub(crate) fn bytes(depth: usize, most: usize) -> usize {
        depth * (most * size_of::<IoSlice>() + size_of::<usize>())
    }

    pub(crate) fn set(&mut self, index: usize, slices: impl Iterator<Item = IoSlice>) {
        let places = &mut self.slices[index * self.most..(index + 1) * self.most];
        self.counts[index] = places.iter_mut().zip(slices).map(|(to, from)| *to = from).count();
    }

    fn get(&self, index: usize) -> &[IoSlice] {
        &self.slices[index * self.most..][..self.counts[index]]
    }

    /// The parts of a request's buffers from byte `at` on.
    pub(crate) fn from(&self, index: usize, at: usize) -> impl Iterator<Item = IoSlice> {
        let mut skip = at;
        self.get(index).iter().filter_map(move |slice| {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            (skipped < slice.len()).then(|| slice.part(skipped, usize::MAX))
        })
    }
}

/// How much of a request the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendStage {
    Queued,
    Begun,
    Sent,
}

#[derive(Debug)]
struct LinkFlight {
    /// `None`: free.
    exchange: Option<Exchange>,
    cookie: u64,
    head: [u8; REQUEST_LEN],
    /// Bytes of head and data.
    len: usize,
    stage: SendStage,
    /// Nobody waits for it any more.
    is_muted: bool,
}

/// The bytes of a reply that are still to come.
#[derive(Clone, Copy, Debug)]
struct Incoming {
    index: usize,
    at: usize,
    left: usize,
    is_skipped: bool,
}

/// Received bytes.
#[derive(Debug)]
struct Staging {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Link {
    stream: NbdStream,
    is_chunked: bool,
    flights: Box<[LinkFlight]>,
    in_flight: usize,
    /// Numbers of flights to be sent, in order: a ring from `next` on.
    queued: Box<[u32]>,
    next: usize,
    queued_len: usize,
    /// Bytes of the first of them that were sent.
    sent: usize,
    staging: Staging,
    incoming: Option<Incoming>,
    /// When the server gave a sign of life last, or got the first of its requests, or the link its connection.
    heard: Instant,
}

impl Link {
    pub(crate) fn new(depth: usize, is_secured: bool) -> Link {
        let flight = |index| LinkFlight {
            exchange: None,
            cookie: index as u64,
            head: [0; REQUEST_LEN],
            len: 0,
            stage: SendStage::Queued,
            is_muted: false,
        };
        Link {
            stream: NbdStream::new(is_secured),
            is_chunked: false,
            flights: (0..depth).map(flight).collect(),
            in_flight: 0,
            queued: vec![0; depth].into(),
            next: 0,
            queued_len: 0,
            sent: 0,
            staging: Staging { bytes: vec![0; STAGING].into(), start: 0, end: 0 },
            incoming: None,
            heard: Instant::now(),
        }
    }

    /// Gives its buffers their memory now: it is going to be used by many requests at once.
    pub(crate) fn touch(&mut self) {
        touch(&mut self.staging.bytes);
        self.stream.touch();
    }

    /// Bytes of one.
    pub(crate) fn bytes(depth: usize, is_secured: bool) -> usize {
        depth * (size_of::<LinkFlight>() + size_of::<u32>())
            + STAGING
            + NbdStream::bytes(is_secured)
    }

    /// Takes a connection that is ready for requests.
    pub(crate) fn attach(&mut self, connection: Connection, is_chunked: bool) {
        assert!(!self.stream.is_open() && self.in_flight == 0, "a link has one connection");
        self.stream.attach(connection);
        (self.is_chunked, self.heard) = (is_chunked, Instant::now());
        (self.staging.start, self.staging.end) = (0, 0);
        (self.next, self.queued_len, self.sent, self.incoming) = (0, 0, 0, None);
    }

    /// Gives the connection away, if nothing is on its way.
    pub(crate) fn detach(&mut self) -> Option<Connection> {
        let is_idle = self.in_flight == 0 && self.staging.start == self.staging.end;
        if is_idle { self.stream.detach() } else { None }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.stream.is_open()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    pub(crate) fn heard(&self) -> Instant {
        self.heard
    }

    pub(crate) fn raw_fd(&self) -> Option<RawFd> {
        self.stream.raw_fd()
    }

    /// Looks at a connection that has been idle for a while: a request that is sent on one which the server has ended
    /// counts as lost. Returns whether it can be used; one that cannot is given up.
    pub(crate) fn is_usable(&mut self) -> bool {
        const IDLE: Duration = Duration::from_millis(5);
        if self.in_flight == 0 && self.heard.elapsed() > IDLE && !self.stream.is_quiet() {
            self.stream.close();
        }
        self.stream.is_open()
    }

    /// True if requests wait for the socket to take them.
    pub(crate) fn has_queued(&self) -> bool {
        self.queued_len > 0 || self.stream.has_unsent()
    }

    /// True if the server has been silent for `stall` with requests in its hands.
    pub(crate) fn is_stalled(&self, now: Instant, stall: Duration) -> bool {
        self.in_flight > 0 && now.saturating_duration_since(self.heard) > stall
    }

    /// Nobody has listened to the server for some of the time until now.
    pub(crate) fn excuse(&mut self, unheard: Duration, now: Instant) {
        self.heard = now.min(self.heard + unheard);
    }

    /// Takes a request; nothing is sent yet.
    ///
    /// # Panics
    /// When there is no connection, or the number is in flight.
    pub(crate) fn start(&mut self, index: usize, command: NbdCommand, offset: u64, len: u32) {
        assert!(self.is_open(), "a request without a connection");
        if self.in_flight == 0 {
            self.heard = Instant::now();
        }
        let flight = &mut self.flights[index];
        assert!(flight.exchange.is_none(), "request {index} is in flight");
        // The lower half is the number, so that the flight is found; the upper tells one use of it from the next.
        flight.cookie = flight.cookie.wrapping_add(1 << 32);
        flight.exchange = Some(Exchange::new(command, offset, len, self.is_chunked));
        flight.head = wire::request(command, flight.cookie, offset, len);
        flight.len = REQUEST_LEN + if command == NbdCommand::Write { len as usize } else { 0 };
        (flight.stage, flight.is_muted) = (SendStage::Queued, false);
        let last = (self.next + self.queued_len) % self.queued.len();
        self.queued[last] = index as u32;
        self.queued_len += 1;
        self.in_flight += 1;
    }

    /// Leaves a request's buffers alone from now on; its end is still reported.
    pub(crate) fn mute(&mut self, index: usize) {
        self.flights[index].is_muted = true;
        if let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.index == index) {
            incoming.is_skipped = true;
        }
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(crate) fn pump_out(&mut self, vectors: &BufferTable) -> io::Result<()> {
        while self.queued_len > 0 {
            let mut parts = [IoSlice::NONE; VECTOR_MAX];
            let count = self.gather(vectors, &mut parts);
            // SAFETY: heads are this link's; the caller of `NbdQueue::push` keeps the buffers until the request's end
            // has been reported, and what is queued has not ended.
            let Some(sent) = (unsafe { self.stream.send(&parts[..count]) })? else {
                return Ok(());
            };
            self.note_sent(sent);
        }
        self.stream.flush().map(drop)
    }

    /// The first bytes to be sent; returns the number of their parts.
    fn gather(&self, vectors: &BufferTable, parts: &mut [IoSlice; VECTOR_MAX]) -> usize {
        let (mut count, mut skip) = (0, self.sent);
        for n in 0..self.queued_len {
            let index = self.queued[(self.next + n) % self.queued.len()] as usize;
            let flight = &self.flights[index];
            let head = IoSlice::new(flight.head.as_ptr().cast_mut(), REQUEST_LEN);
            let data = if flight.len > REQUEST_LEN { vectors.get(index) } else { &[] };
            for part in std::iter::once(&head).chain(data) {
                if skip >= part.len() {
                    skip -= part.len();
                    continue;
                }
                if count == VECTOR_MAX {
                    return count;
                }
                parts[count] = part.part(skip, usize::MAX);
                (count, skip) = (count + 1, 0);
            }
        }
        count
    }

    fn note_sent(&mut self, mut count: usize) {
        while count > 0 {
            let flight = &mut self.flights[self.queued[self.next] as usize];
            let left = flight.len - self.sent;
            if count < left {
                flight.stage = SendStage::Begun;
                self.sent += count;
                return;
            }
            flight.stage = SendStage::Sent;
            count -= left;
            self.sent = 0;
            self.next = (self.next + 1) % self.queued.len();
            self.queued_len -= 1;
        }
    }

    /// Receives what there is; `done` gets the number of each request that has ended, and how. Returns whether
    /// something came.
    ///
    /// # Errors
    /// When the connection is broken, or the server breaks the protocol.
    pub(crate) fn pump_in(
        &mut self,
        vectors: &BufferTable,
        done: &mut dyn FnMut(usize, FlightEnd),
    ) -> io::Result<bool> {
        let (mut has_come, mut has_yielded) = (false, false);
        while let Some((room, count)) = self.receive(vectors)? {
            (has_come, self.heard) = (true, Instant::now());
            self.digest(vectors, done)?;
            if count == room {
                continue;
            }
            // The socket is empty: another call would only tell so. But servers that send the head of a reply apart from its
            // data are about to send that, on this processor or another one: sooner than a sleep and a wake take.
            if has_yielded || self.incoming.is_none() {
                break;
            }
            std::thread::yield_now();
            has_yielded = true;
        }
        Ok(has_come)
    }

    /// Receives once: first what is missing of a reply's data, then behind it. Returns how much there was room for,
    /// and how much came.
    fn receive(&mut self, vectors: &BufferTable) -> io::Result<Option<(usize, usize)>> {
        let mut parts = [IoSlice::NONE; VECTOR_MAX];
        let (mut count, mut wanted) = (0, 0);
        if let Some(incoming) = self.incoming.filter(|incoming| !incoming.is_skipped) {
            // Its data is in the staging area as far as it came: `digest` has emptied that.
            for part in vectors.from(incoming.index, incoming.at).take(VECTOR_MAX - 1) {
                let part = part.part(0, incoming.left - wanted);
                if part.len() == 0 {
                    break;
                }
                parts[count] = part;
                (count, wanted) = (count + 1, wanted + part.len());
            }
        }
        let staging = &mut self.staging;
        let rest = &mut staging.bytes[staging.end..];
        parts[count] = IoSlice::new(rest.as_mut_ptr(), rest.len());
        let room = wanted + rest.len();
        // SAFETY: the staging area is this link's; the caller of `NbdQueue::push` leaves the buffers to the request
        // until its end has been reported, and this one has not ended, nor is it muted (invariant 1).
        let Some(came) = (unsafe { self.stream.receive(&parts[..=count]) })? else {
            return Ok(None);
        };
        let direct = came.min(wanted);
        if let Some(incoming) = self.incoming.as_mut().filter(|_| wanted > 0) {
            incoming.at += direct;
            incoming.left -= direct;
        }
        self.staging.end += came - direct;
        Ok(Some((room, came)))
    }

    /// Takes apart what was received.
    fn digest(
        &mut self,
        vectors: &BufferTable,
        done: &mut dyn FnMut(usize, FlightEnd),
    ) -> io::Result<()> {
        loop {
            if let Some(index) = self.take_data(vectors) {
                self.end_if_over(index, done);
                continue;
            }
            if self.incoming.is_some() {
                break;
            }
            let bytes = &self.staging.bytes[self.staging.start..self.staging.end];
            let Some((head, used)) = wire::parse_reply(bytes).map_err(broken)? else { break };
            self.staging.start += used;
            self.begin_reply(&head, vectors, done)?;
        }
        // What is left is the beginning of a head.
        let Staging { bytes, start, end } = &mut self.staging;
        debug_assert!(*end - *start < REPLY_LEN_MAX, "{} bytes are left", *end - *start);
        bytes.copy_within(*start..*end, 0);
        (*start, *end) = (0, *end - *start);
        Ok(())
    }

    /// A reply, or a chunk of one, begins.
    fn begin_reply(
        &mut self,
        head: &ReplyHead,
        vectors: &BufferTable,
        done: &mut dyn FnMut(usize, FlightEnd),
    ) -> io::Result<()> {
        let index = head.cookie() as u32 as usize;
        let flight = self.flights.get_mut(index).filter(|flight| flight.cookie == head.cookie());
        // Before all of its data is out the buffers are still in use.
        let flight = flight.filter(|flight| flight.stage == SendStage::Sent);
        let exchange = flight.and_then(|flight| flight.exchange.as_mut());
        let Some(exchange) = exchange else {
            return Err(broken(wire::Malformed("a reply that nothing asked for")));
        };
        let body = exchange.accept(head).map_err(broken)?;
        let is_skipped = self.flights[index].is_muted;
        let (at, left, is_skipped) = match body {
            Body::Data { at, len } => (at as usize, len as usize, is_skipped),
            Body::Skipped(len) => (0, len as usize, true),
            Body::Zeros { at, len } if !is_skipped => {
                let mut left = len as usize;
                for part in vectors.from(index, at as usize) {
                    let part = part.part(0, left);
                    left -= part.len();
                    // SAFETY: as in `receive`.
                    unsafe { part.clear() }
                }
                (0, 0, true)
            }
            Body::Zeros { .. } | Body::Nothing => (0, 0, true),
        };
        self.incoming = Some(Incoming { index, at, left, is_skipped });
        if left == 0 {
            self.incoming = None;
            self.end_if_over(index, done);
        }
        Ok(())
    }

    /// Moves received data of the present reply to where it belongs; returns the request once all of it is there.
    fn take_data(&mut self, vectors: &BufferTable) -> Option<usize> {
        let incoming = self.incoming.as_mut()?;
        let Staging { bytes, start, end } = &mut self.staging;
        let count = incoming.left.min(*end - *start);
        let mut from = &bytes[*start..*start + count];
        if !incoming.is_skipped {
            for part in vectors.from(incoming.index, incoming.at) {
                let piece;
                (piece, from) = from.split_at(part.len().min(from.len()));
                if piece.is_empty() {
                    break;
                }
                // SAFETY: as in `receive`.
                unsafe { part.copy_from(piece) }
            }
        }
        *start += count;
        incoming.at += count;
        incoming.left -= count;
        let index = incoming.index;
        if incoming.left > 0 {
            return None;
        }
        self.incoming = None;
        Some(index)
    }

    fn end_if_over(&mut self, index: usize, done: &mut dyn FnMut(usize, FlightEnd)) {
        let outcome = self.flights[index].exchange.as_ref().and_then(Exchange::outcome);
        if let Some(errno) = outcome {
            self.flights[index].exchange = None;
            self.in_flight -= 1;
            done(index, if errno == 0 { FlightEnd::Done } else { FlightEnd::Refused(errno) });
        }
    }

    /// Ends a connection without requests as the protocol has it.
    pub(crate) fn take_leave(&mut self) {
        if self.in_flight == 0 && self.is_open() {
            let mut goodbye = wire::request(NbdCommand::Disconnect, 0, 0, 0);
            let part = [IoSlice::new(goodbye.as_mut_ptr(), REQUEST_LEN)];
            // SAFETY: the bytes live during the call. A server that does not get them sees the connection end.
            let _ = unsafe { self.stream.send(&part) };
            self.stream.close();
        }
    }

    /// Ends the connection, and with it all requests.
    pub(crate) fn break_off(&mut self, done: &mut dyn FnMut(usize, FlightEnd)) {
        if !self.is_open() {
            return;
        }
        self.stream.abort();
        for (index, flight) in self.flights.iter_mut().enumerate() {
            if flight.exchange.take().is_some() {
                self.in_flight -= 1;
                let is_unsent = flight.stage == SendStage::Queued;
                done(index, if is_unsent { FlightEnd::Unsent } else { FlightEnd::Lost });
            }
        }
        self.queued_len = 0;
    }
}

fn broken(error: wire::Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.0)
}
