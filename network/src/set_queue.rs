//! A thread's requests to servers that hold copies, or to one.
//!
//! A write goes to every server that can be reached and is done when all of these have it, or have gone; a read goes to
//! one server that has the bytes, and to the next when that fails.
//!
//! # No late write
//! A write whose connection broke may be carried out at any time: it lies in the kernel of this machine, in that of the
//! server's, or in the hands of a thread of the server that is slow. No message on another connection tells: a server
//! answers a FLUSH there without waiting for requests that it has not begun, and forgets a connection before the
//! requests that came by it. So the place of such a write is never written again as long as this process lives:
//!
//! ```text
//!   push --no connection--> Failed: the place is as free as before
//!     |
//!   queued --breaks--> Unsent ---------------------------------> Failed
//!     |
//!   sent --reply--> Done, or Refused: the server is through with it
//!     '--breaks--> Lost --another server has it--> Done; this place of this server is `barred` and `lacking`
//!                   '--no server has it----------> Late: the caller gives the place up
//!
//!   a place, of one server:
//!     free --write--> busy --Done--> holds the bytes --write--> busy ...
//!                       '--Lost--> barred, for ever: later writes there are Barred at once, without being sent
//! ```
//! Trims are writes in this: one that is late destroys what was written after it.
//!
//! # Invariants
//! 1. A request is reported once.
//! 2. What a server lacks is known (`lacking`) before the write is reported that it has missed.
//! 3. A read is sent to servers only that lack none of its bytes.

#![expect(unsafe_code, reason = "takes the buffers of requests")]

use crate::ends::{Ending, IDLE_END, NbdBuffer, NbdEnd, SERVERS_MAX};
use crate::hedging::{Hedging, silence_max};
use crate::link::{BufferTable, FlightEnd, Link};
use crate::resident::reserved;
use crate::seat::Seat;
use crate::server::{NbdServer, ServerEvent};
use crate::shared::ServerSet;
use crate::sys::{self, Awaited, IoSlice, WaitTerm};
use crate::table_copies::{Agreed, Servers, each};
use crate::wire::NbdCommand;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests beyond the depth: reads that two servers have, or that were answered and are still under way at a slow one.
const SPARE: usize = 16;
/// Places read last that are remembered, so that one which is read again is read elsewhere.
const RECENT: usize = 64;

/// A request is given up after this many times the time for silence, also where its server answers others.
const STALLS_OLD: u32 = 4;

/// Of the time between two looks at a connection at most 1/STALL_PART of that for silence counts as silence: a thread that
/// was stopped has not listened meanwhile, and what its servers have sent may be on its way.
const STALL_PART: u32 = 4;

/// Pause of a table's user between two looks for a connection.
const CONNECTION_PAUSE: Duration = Duration::from_millis(1);

/// A request as one server has it.
#[derive(Clone, Copy, Debug)]
struct AtServer {
    since: Instant,
    /// The server's life in which it was done.
    life: u32,
    /// Number of the witness of a table's server when it was begun.
    witness: u32,
}

/// A request between `push` and its end.
#[derive(Clone, Copy, Debug)]
struct NbdRequest {
    token: u64,
    is_read: bool,
    offset: u64,
    len: u32,
    started: Instant,
    /// Servers that have it.
    at: Servers,
    /// Servers that have answered that they did it.
    done: Servers,
    /// Servers that have had it, of a read.
    tried: Servers,
    /// Servers that may write it later.
    late: Servers,
    errno: i32,
    /// A table's write that servers have done, which is to be reported when it is recorded that others are left out.
    is_held: bool,
    /// Its end is known: what is still under way is of no use.
    is_over: bool,
}

impl NbdRequest {
    fn new(token: u64, is_read: bool, offset: u64, len: u32) -> NbdRequest {
        NbdRequest {
            token,
            is_read,
            offset,
            len,
            started: Instant::now(),
            at: 0,
            done: 0,
            tried: 0,
            late: 0,
            errno: libc::ENOTCONN,
            is_held: false,
            is_over: false,
        }
    }

    fn range(&self) -> (u64, u64) {
        (self.offset, self.len.into())
    }
}

/// A queue's connection to one server.
#[derive(Debug)]
struct QueueLine {
    server: Arc<NbdServer>,
    seat: Arc<Seat>,
    link: Link,
    life: u32,
}

impl QueueLine {
    /// True if there is a connection; takes a new one that is there.
    fn is_ready(&mut self) -> bool {
        if self.server.is_taken() {
            return false;
        }
        if !self.server.silence.spares(&mut self.link) {
            let Some(seated) = self.seat.take() else {
                self.server.ask(&self.seat);
                return false;
            };
            self.link.attach(seated.connection, seated.is_chunked);
            self.life = seated.life;
        }
        true
    }

    fn is_silent(&self, now: Instant, stall: Duration) -> bool {
        self.link.is_stalled(now, silence_max(&self.server, stall))
    }

    fn start(&mut self, index: usize, command: NbdCommand, offset: u64, len: u32) {
        self.server.begin();
        self.link.start(index, command, offset, len);
    }
}

/// A place that was read, and by which servers.
#[derive(Clone, Copy, Debug)]
struct RecentRead {
    offset: u64,
    by: Servers,
}

/// Requests in flight to one set of servers. See [module](self).
#[derive(Debug)]
pub(crate) struct SetQueue {
    shared: Arc<ServerSet>,
    lines: Box<[QueueLine]>,
    requests: NbdRequests,
    recent: [RecentRead; RECENT],
    hedging: Hedging,
    checked: Instant,
    /// Of a table: a connection was waited for in vain, and there was none since.
    has_waited: bool,
}

/// The requests, by number.
#[derive(Debug)]
struct NbdRequests {
    depth: usize,
    pending: Box<[NbdRequest]>,
    /// Of each request what each server has.
    by_server: Box<[AtServer]>,
    servers: usize,
    vectors: BufferTable,
    free: Vec<u32>,
    /// Ends that nobody has taken.
    ended: Vec<NbdEnd>,
    /// Requests whose end nobody has taken.
    count: usize,
    /// Ends on connections that were not looked at: server, number and how.
    news: Vec<(usize, usize, FlightEnd)>,
}

impl NbdRequests {
    fn new(depth: usize, servers: usize, buffers_max: usize) -> NbdRequests {
        let numbers = NbdRequests::numbers(depth, servers);
        let idle = NbdRequest { is_over: true, ..NbdRequest::new(0, true, 0, 0) };
        let at_server = AtServer { since: Instant::now(), life: 0, witness: 0 };
        NbdRequests {
            depth,
            pending: vec![idle; numbers].into(),
            by_server: vec![at_server; numbers * servers].into(),
            servers,
            vectors: BufferTable::new(numbers, buffers_max),
            // The lowest is used first, and the one that was used last.
            free: (0..numbers as u32).rev().collect(),
            ended: reserved(depth, IDLE_END),
            count: 0,
            news: reserved(numbers * servers, (0, 0, FlightEnd::Unsent)),
        }
    }

    fn numbers(depth: usize, servers: usize) -> usize {
        depth + if servers > 1 { SPARE } else { 0 }
    }

    fn bytes(depth: usize, servers: usize, buffers_max: usize) -> usize {
        let numbers = NbdRequests::numbers(depth, servers);
        let at_server = size_of::<AtServer>() + size_of::<(usize, usize, FlightEnd)>();
        let request = size_of::<NbdRequest>() + size_of::<u32>() + servers * at_server;
        numbers * request + BufferTable::bytes(numbers, buffers_max) + depth * size_of::<NbdEnd>()
    }

    fn at_server(&mut self, index: usize, at: usize) -> &mut AtServer {
        &mut self.by_server[index * self.servers + at]
    }

    fn end(&mut self, index: usize, ending: Ending) {
        let pending = &mut self.pending[index];
        assert!(!pending.is_over, "a request ends once");
        pending.is_over = true;
        let NbdRequest { token, is_read, offset, len, .. } = *pending;
        self.ended.push(NbdEnd { token, is_read, offset, len, ending });
        self.free_if_idle(index);
    }

    fn free_if_idle(&mut self, index: usize) {
        if self.pending[index].is_over && self.pending[index].at == 0 {
            self.free.push(index as u32);
        }
    }
}

impl SetQueue {
    /// For requests of up to `buffers_max` buffers.
    pub(crate) fn new(
        shared: Arc<ServerSet>,
        depth: usize,
        buffers_max: usize,
    ) -> io::Result<SetQueue> {
        let servers = shared.servers();
        let requests = NbdRequests::new(depth, servers.len(), buffers_max);
        let mut lines = Vec::with_capacity(servers.len());
        for server in servers {
            let mut link = server.link(requests.pending.len());
            link.touch();
            lines.push(QueueLine {
                seat: server.add_seat(shared.wait_max())?,
                server: Arc::clone(server),
                link,
                life: 0,
            });
        }
        let nothing = RecentRead { offset: u64::MAX, by: 0 };
        Ok(SetQueue {
            shared,
            lines: lines.into(),
            requests,
            recent: [nothing; RECENT],
            hedging: Hedging::default(),
            checked: Instant::now(),
            has_waited: false,
        })
    }

    /// Bytes that such a queue holds, all of which have their memory from the start.
    pub(crate) fn bytes(shared: &ServerSet, depth: usize, buffers_max: usize) -> usize {
        let servers = shared.servers();
        let numbers = NbdRequests::numbers(depth, servers.len());
        let line = |server: &Arc<NbdServer>| {
            size_of::<QueueLine>()
                + size_of::<Seat>()
                + Link::bytes(numbers, server.address().certificates().is_some())
        };
        size_of::<SetQueue>()
            + NbdRequests::bytes(depth, servers.len(), buffers_max)
            + servers.iter().map(line).sum::<usize>()
    }

    /// Requests whose end was not reported.
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.count
    }

    /// See [`NbdQueue::push`](crate::NbdQueue::push).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn push(
        &mut self,
        token: u64,
        is_read: bool,
        offset: u64,
        buffers: impl ExactSizeIterator<Item = NbdBuffer>,
    ) -> bool {
        let requests = &mut self.requests;
        if requests.count == requests.depth {
            return false;
        }
        let index =
            requests.free.pop().expect("slow servers have no more than the spare ones") as usize;
        requests.vectors.check_count(buffers.len());
        let mut len = 0;
        let slices = buffers.map(|buffer| {
            len += buffer.len as u64;
            IoSlice::new(buffer.ptr, buffer.len)
        });
        requests.vectors.set(index, slices);
        self.shared.check_range(offset, len);
        self.await_connection(is_read);
        self.requests.pending[index] = NbdRequest::new(token, is_read, offset, len as u32);
        self.requests.count += 1;
        if is_read {
            self.hedging.note_read();
            if !self.start_read(index, self.requests.pending[index].started) {
                self.requests.end(index, Ending::Failed(libc::ENOTCONN));
            }
        } else {
            self.start_write(index);
        }
        true
    }

    /// Waits for the connections of a table, once: its users do not try again by themselves, and a server that misses a
    /// write is left out.
    fn await_connection(&mut self, is_read: bool) {
        let (mut term, shared) = (WaitTerm::within(self.shared.wait_max()), &self.shared);
        while let Some(table) = shared.table() {
            let wanted = if is_read { table.copies().whole() } else { table.copies().members() };
            let (mut ready, mut missed) = (0, 0);
            for at in each(wanted).filter(|at| !shared.servers()[*at].is_taken()) {
                let line = &mut self.lines[at];
                let is_ready =
                    line.is_ready() && (is_read || line.server.may_write(Instant::now()));
                *(if is_ready { &mut ready } else { &mut missed }) += 1;
            }
            let is_ready = ready > 0 && (is_read || missed == 0);
            let is_over = missed == 0 || term.left().is_zero();
            if is_ready || is_over || ready == 0 && self.has_waited {
                self.has_waited = !is_ready;
                return;
            }
            std::thread::sleep(CONNECTION_PAUSE);
        }
    }

    /// Sends a read to the next server; returns whether there is one.
    fn start_read(&mut self, index: usize, now: Instant) -> bool {
        let (stall, whole) = (self.shared.stall(), self.shared.whole());
        let pending = self.requests.pending[index];
        let (offset, len) = pending.range();
        let recent = &mut self.recent[(offset >> 12) as usize % RECENT];
        if recent.offset != offset {
            *recent = RecentRead { offset, by: 0 };
        }
        let mut best: Option<(bool, bool, u64, usize)> = None;
        for (at, line) in self.lines.iter_mut().enumerate() {
            let bit = 1 << at;
            // In this order: a connection to one that began anew is there after it was noted what that lacks.
            let is_able = pending.tried & bit == 0
                && whole & bit != 0
                && line.is_ready()
                && !line.server.lacking.has_any(offset, len);
            // What is read again may have been damaged there: the nearest of the others.
            let is_again = recent.by & bit != 0;
            let key = (line.is_silent(now, stall), is_again, line.server.read_ns(), at);
            if is_able && best.is_none_or(|best| key < best) {
                best = Some(key);
            }
        }
        let Some((_, is_again, _, at)) = best else { return false };
        recent.by = if is_again { 1 << at } else { recent.by | 1 << at };
        let pending = &mut self.requests.pending[index];
        pending.tried |= 1 << at;
        pending.at |= 1 << at;
        self.requests.at_server(index, at).since = now;
        self.lines[at].start(index, NbdCommand::Read, offset, len as u32);
        true
    }

    /// Sends a write to all servers.
    fn start_write(&mut self, index: usize) {
        let (offset, len) = self.requests.pending[index].range();
        self.recent[(offset >> 12) as usize % RECENT].by = 0;
        let Ok(is_copied) = self.shared.begin_write(offset, len) else {
            return self.requests.end(index, Ending::Barred);
        };
        let started = self.requests.pending[index].started;
        for (at, line) in self.lines.iter_mut().enumerate() {
            if is_copied != Some(at) && line.server.may_write(started) && line.is_ready() {
                self.requests.pending[index].at |= 1 << at;
                self.requests.at_server(index, at).witness =
                    self.shared.table().map_or(0, |table| table.witness(at));
                line.start(index, NbdCommand::Write, offset, len as u32);
            }
        }
        if self.requests.pending[index].at == 0 {
            self.settle_write(index);
        }
    }

    /// Sends what was pushed.
    pub(crate) fn submit(&mut self) {
        for at in 0..self.lines.len() {
            let line = &mut self.lines[at];
            if !line.link.has_queued() {
                continue;
            }
            if line.server.has_lapsed() {
                // This process was stopped since they were taken, or its server is slow: they wait for the next look.
                std::thread::sleep(CONNECTION_PAUSE);
            } else if line.link.pump_out(&self.requests.vectors).is_err() {
                self.break_off(at);
            }
        }
        self.look_at_news();
    }

    /// Receives what there is.
    pub(crate) fn pump(&mut self) {
        for at in 0..self.lines.len() {
            let (line, requests) = (&mut self.lines[at], &mut self.requests);
            if line.link.is_idle() {
                continue;
            }
            let NbdRequests { vectors, news, .. } = requests;
            let pumped = line.link.pump_in(vectors, &mut |index, end| news.push((at, index, end)));
            if pumped.is_err() {
                self.break_off(at);
            }
        }
        self.look_at_news();
    }

    /// Gives connections up that are silent for too long, of servers that are not used any more, or of lives that are
    /// over.
    pub(crate) fn check(&mut self) {
        let now = Instant::now();
        let since = now - self.checked;
        if self.look_every().is_none_or(|every| since < every) {
            return;
        }
        self.checked = now;
        let unheard = since.saturating_sub(self.shared.stall() / STALL_PART);
        for request in &mut self.requests.pending {
            request.started = now.min(request.started + unheard);
        }
        for at in 0..self.lines.len() {
            self.lines[at].link.excuse(unheard, now);
            let QueueLine { link, server, life, .. } = &self.lines[at];
            let is_useless = server.is_taken() || !server.is_life(*life);
            let is_stalled = link.is_stalled(now, self.shared.stall());
            if is_stalled {
                server.silence.note();
            }
            if is_stalled || link.is_open() && is_useless {
                self.break_off(at);
            }
        }
        self.hedge(now);
        self.give_up_old(now);
        self.look_at_news();
        for index in 0..self.requests.pending.len() {
            if self.requests.pending[index].is_held {
                self.end_write(index);
            }
        }
    }

    /// Gives connections up on which a request is not answered although others are.
    fn give_up_old(&mut self, now: Instant) {
        let age_max = self.shared.stall() * STALLS_OLD;
        let is_old =
            |request: &&NbdRequest| now.saturating_duration_since(request.started) > age_max;
        let old = self.requests.pending.iter().filter(is_old).fold(0, |all, old| all | old.at);
        for at in (0..self.lines.len()).filter(|at| old & 1 << at != 0) {
            self.break_off(at);
        }
    }

    /// Asks a second server for reads that take long.
    fn hedge(&mut self, now: Instant) {
        if self.lines.len() == 1 {
            return;
        }
        let is_double = |request: &&NbdRequest| {
            request.is_read && request.at != 0 && (request.is_over || !request.at.is_power_of_two())
        };
        let mut spare =
            SPARE.saturating_sub(self.requests.pending.iter().filter(is_double).count());
        for index in 0..self.requests.pending.len() {
            let pending = self.requests.pending[index];
            let is_one_read = pending.is_read && !pending.is_over && pending.at.is_power_of_two();
            if !is_one_read || spare == 0 {
                continue;
            }
            let line = &self.lines[pending.at.trailing_zeros() as usize];
            let is_silent = line.is_silent(now, self.shared.stall());
            // Half of the places are for those of silent servers.
            let is_late =
                || spare > SPARE / 2 && self.hedging.is_due(&line.server, pending.started, now);
            if (is_silent || is_late()) && self.start_read(index, now) {
                self.hedging.note_requests(u64::from(!is_silent));
                spare -= 1;
                let tried = self.requests.pending[index].at & !pending.at;
                let second = &self.lines[tried.trailing_zeros() as usize].server;
                second.count(ServerEvent::Hedge);
            }
        }
    }

    // Of a queue to one of several servers, whose reads can be had from the others.

    /// True if the server owes answers and is silent.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        self.lines.iter().all(|line| line.is_silent(now, self.shared.stall()))
    }

    /// Requests that it can take.
    pub(crate) fn room(&self) -> usize {
        // One that has ended has no number any more, and counts until it is reported.
        let NbdRequests { free, depth, count, .. } = &self.requests;
        free.len().min(depth - count)
    }

    /// Ends a read that is under way without a report: its bytes have come from elsewhere, and nothing is written to its
    /// buffers any more.
    pub(crate) fn abandon(&mut self, token: u64) {
        let requests = &mut self.requests;
        requests.count -= 1;
        if let Some(at) = requests.ended.iter().position(|end| end.token == token) {
            requests.ended.swap_remove(at);
            return;
        }
        let is_it = |request: &NbdRequest| request.token == token && !request.is_over;
        let index = requests.pending.iter().position(is_it).expect("a read that has not ended");
        requests.pending[index].is_over = true;
        self.lines.iter_mut().for_each(|line| line.link.mute(index));
    }

    fn break_off(&mut self, at: usize) {
        let (line, news) = (&mut self.lines[at], &mut self.requests.news);
        line.link.break_off(&mut |index, end| news.push((at, index, end)));
        line.server.count(ServerEvent::Break);
        line.server.ask(&line.seat);
    }

    fn look_at_news(&mut self) {
        while let Some((at, index, end)) = self.requests.news.pop() {
            let (line, bit) = (&self.lines[at], 1 << at);
            line.server.end();
            let end = match end {
                // By a server that has lost what it had.
                FlightEnd::Done if !line.server.is_life(line.life) => FlightEnd::Refused(libc::EIO),
                end => end,
            };
            self.requests.at_server(index, at).life = line.life;
            let pending = &mut self.requests.pending[index];
            pending.at &= !bit;
            match end {
                FlightEnd::Done => pending.done |= bit,
                FlightEnd::Unsent => {}
                FlightEnd::Lost => pending.errno = libc::ECONNRESET,
                FlightEnd::Refused(errno) => {
                    pending.errno = errno;
                    line.server.count(ServerEvent::Error);
                }
            }
            if pending.is_read {
                self.read_ended(at, index, end)
            } else {
                self.write_ended(at, index, end)
            }
        }
    }

    fn read_ended(&mut self, at: usize, index: usize, end: FlightEnd) {
        let (mut pending, mut end) = (self.requests.pending[index], end);
        let server = &self.lines[at].server;
        if end == FlightEnd::Done
            && !pending.is_over
            && let Some(table) = self.shared.table()
            // SAFETY: until its end is reported the caller of `push` leaves the buffers to the request.
            && !unsafe { table.blocks().check(pending.offset, self.requests.vectors.from(index, 0)) }
        {
            (end, pending.errno) = (FlightEnd::Refused(libc::EBADMSG), libc::EBADMSG);
            server.count(ServerEvent::Error);
        }
        if end == FlightEnd::Done {
            server.count(ServerEvent::Read);
            server.note_read(self.requests.at_server(index, at).since.elapsed());
        }
        if pending.is_over {
            return self.requests.free_if_idle(index);
        }
        if end == FlightEnd::Done {
            for (other, line) in self.lines.iter_mut().enumerate() {
                if pending.at & 1 << other != 0 {
                    line.link.mute(index);
                }
            }
            self.requests.end(index, Ending::Done);
        } else if pending.at == 0
            && !self.start_read(index, Instant::now())
            && !self.repeat_read(index, end)
        {
            self.requests.end(index, Ending::Failed(pending.errno));
        }
    }

    /// Sends a table's read again whose connection broke, for some time; returns whether it is under way.
    fn repeat_read(&mut self, index: usize, end: FlightEnd) -> bool {
        let is_broken = matches!(end, FlightEnd::Lost | FlightEnd::Unsent);
        let request = &mut self.requests.pending[index];
        let is_due = request.started.elapsed() < self.shared.repeat_max();
        if !is_broken || !is_due || self.shared.table().is_none() {
            return false;
        }
        request.tried = 0;
        self.await_connection(true);
        self.start_read(index, Instant::now())
    }

    fn write_ended(&mut self, at: usize, index: usize, end: FlightEnd) {
        let server = &self.lines[at].server;
        let pending = &mut self.requests.pending[index];
        let (offset, len) = pending.range();
        match end {
            FlightEnd::Done => server.count(ServerEvent::Write),
            FlightEnd::Lost => {
                pending.late |= 1 << at;
                server.barred.insert(offset, len);
            }
            FlightEnd::Refused(_) | FlightEnd::Unsent => {}
        }
        if pending.at == 0 {
            self.settle_write(index);
        }
    }

    /// No server has the write any more.
    fn settle_write(&mut self, index: usize) {
        let mut pending = self.requests.pending[index];
        let (offset, len) = pending.range();
        let (table, has_others) = (self.shared.table(), self.lines[0].server.has_others());
        if let Some(table) = table
            && pending.done != 0
        {
            // SAFETY: until its end is reported the caller of `push` leaves the buffers as they are.
            unsafe { table.blocks().written(offset, len, self.requests.vectors.from(index, 0)) }
        }
        for (at, line) in self.lines.iter().enumerate() {
            let AtServer { life, witness, .. } = *self.requests.at_server(index, at);
            // One that began anew while others were not through has lost it. Who has changed the witness does not know of
            // this write, or will look at it.
            let is_done = pending.done & 1 << at != 0;
            if is_done
                && (has_others && !line.server.note_written(life, offset, len)
                    || table.is_some_and(|table| table.witness(at) != witness))
            {
                pending.done &= !(1 << at);
                pending.errno = libc::ECONNRESET;
            }
        }
        let whole = self.shared.whole();
        // What no whole server has done is not what others are to have.
        let lack = if pending.done & whole != 0 { !pending.done } else { !whole };
        if has_others && (pending.done != 0 || table.is_some()) {
            // Invariant 2: before the end is reported.
            let lines = self.lines.iter().enumerate();
            for (_, line) in lines.filter(|(at, _)| lack & 1 << at != 0) {
                line.server.lacking.insert(offset, len);
            }
        }
        if let Some(table) = table {
            // A copy that does not count yet.
            for at in each(pending.late & !table.copies().members()) {
                table.leave(at);
            }
        }
        self.requests.pending[index] = pending;
        self.end_write(index);
    }

    /// Ends a write, unless it is to be recorded first that servers miss it.
    fn end_write(&mut self, index: usize) {
        let pending = &mut self.requests.pending[index];
        let (offset, len) = pending.range();
        let (mut is_done, mut late) = (pending.done != 0, pending.late);
        if let Some(table) = self.shared.table() {
            let agreed = table.agree(pending.done);
            pending.is_held =
                agreed == Agreed::Waiting && pending.started.elapsed() < self.shared.repeat_max();
            if pending.is_held {
                return;
            }
            is_done = agreed == Agreed::Done;
            late &= table.copies().members();
            if !is_done && (pending.done | pending.late != 0 || pending.errno != libc::ENOTCONN) {
                table.doubt(offset, len); // It was sent.
            }
        }
        self.shared.end_write(offset, len);
        let ending = match late {
            _ if is_done => Ending::Done,
            0 => Ending::Failed(pending.errno),
            _ => Ending::Late,
        };
        self.requests.end(index, ending);
    }

    /// Reports the ends that are known; returns whether there was one.
    pub(crate) fn report(&mut self, done: &mut dyn FnMut(NbdEnd)) -> bool {
        let has_any = !self.requests.ended.is_empty();
        while let Some(end) = self.requests.ended.pop() {
            self.requests.count -= 1;
            done(end);
        }
        has_any
    }

    /// How long requests may be waited for before the health of connections is looked at; `None`: none is under way.
    pub(crate) fn look_every(&self) -> Option<Duration> {
        let is_busy = self.lines.iter().any(|line| !line.link.is_idle());
        let is_held = || self.requests.pending.iter().any(|request| request.is_held);
        (is_busy || self.shared.table().is_some() && is_held()).then(|| self.shared.look_every())
    }

    /// The connections with requests under way.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = Awaited> {
        let busy = self.lines.iter().filter(|line| !line.link.is_idle());
        busy.filter_map(|line| {
            Some(Awaited { fd: line.link.raw_fd()?, write: line.link.has_queued() })
        })
    }

    /// Sends, and waits for what comes.
    fn wait_once(&mut self) -> io::Result<()> {
        self.submit();
        let mut awaited = [Awaited { fd: -1, write: false }; SERVERS_MAX];
        let count = awaited.iter_mut().zip(self.awaited()).map(|(to, link)| *to = link).count();
        sys::wait(&awaited[..count], self.shared.look_every())?;
        self.pump();
        self.check();
        self.report(&mut |_| ());
        Ok(())
    }

    /// True if there is a connection to a server.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.lines.iter_mut().any(QueueLine::is_ready)
    }
}

impl Drop for SetQueue {
    fn drop(&mut self) {
        let mut term = WaitTerm::within(self.shared.stall());
        while self.requests.count > 0 && !term.left().is_zero() {
            // A failure to wait shows in the time that passes.
            let _ = self.wait_once();
        }
        for at in 0..self.lines.len() {
            if self.lines[at].link.is_idle() {
                self.lines[at].link.take_leave();
            } else {
                self.break_off(at);
            }
        }
        // What was written and not answered stays barred.
        self.look_at_news();
    }
}
