//! The evictor: makes room by taking pages out, and writes back what the device does not have.
//!
//! One thread. It takes victims from the policy in batches. A page that is known to be clean
//! (write-protected since it was read) is dropped. Any other is taken out of the region into an
//! empty staging frame, where nobody writes it, and *cools*: a touch brings it back without I/O.
//! When it has cooled, its hash tells whether the slot already holds it; if not, neighbours are
//! written together into a run of fresh slots. Uses `store`, `page`; owned by
//! [`Region`](crate::paging::region::Region). Never allocates after its start.
//!
//! ```text
//!   policy --take: victims--> MOVE into frames --cool: hashed--> clean, zero: gone
//!                                                             '-> dirty --write_back--> gone
//! ```
//! | module | does |
//! |---|---|
//! | this one | decides when and how much; collects what the device has finished |
//! | `state` | the evictor's parts |
//! | `outgoing` | what is on its way out |
//! | `arrivals` | what has come in lately |
//! | `returns` | what has come back soon: fresh data, or data that was read |
//! | `victims` | takes victims out of the region |
//! | `cooling` | decides about frames that have cooled, frees those that others have borrowed |
//! | `write_back` | slots, writes, what becomes of writes that fail, and whether the device can be written again |
//! | `on_request` | ranges that somebody wants out; device space of freed slots |
//! | `device_space` | what the evictor knows of that space, and one discard |
//! | `content` | which pages go, and how clean ones do |
//!
//! # Invariants
//! 1. The content of a frame under a write does not change: the region has no mapping of it. Where
//!    it goes back there all the same (`rescue`), nobody uses what the device has written.
//! 2. A slot's checksum is stored before a page word names the slot.
//! 3. A page whose write failed goes back to the region; nothing is lost.
//! 4. A page the kernel is using (an application's direct I/O in flight) is refused by MOVE and
//!    stays; only pages that were write-protected all along are dropped without MOVE.

pub(in crate::paging) mod arrivals;
pub(in crate::paging) mod content;
pub(in crate::paging) mod cooling;
mod device_space;
pub(in crate::paging) mod on_request;
mod outgoing;
#[cfg(not(loom))]
pub mod policy;
pub(in crate::paging) mod requests;
pub(in crate::paging) mod returns;
mod state;
pub(in crate::paging) mod victims;
pub(in crate::paging) mod write_back;

pub(in crate::paging) use state::Evictor;

use crate::base::deadline::look_every;
use crate::base::gate::{Closed, LOOK_EVERY};
use crate::paging::diagnostics;
use crate::paging::evict::victims::Chunkwise;
use crate::paging::fault::sched::Bystander;
use crate::paging::kernel_filled;
use crate::paging::page::{BATCH_MAX, CHUNK_PAGES, PAGE};
use crate::paging::pager::frame_pool::standby_count;
use crate::paging::pager::reclaim;
use crate::sys::messages;
use std::sync::Arc;
use std::time::Duration;

impl Evictor {
    /// Keeps the region between its watermarks until it stops.
    pub(in crate::paging) fn run(&mut self) {
        let sched = Arc::clone(self.pager.sched());
        sched.idle_policies().bystanders().with(Bystander::Evictor, || {
            while !self.pager.health().is_stopping() {
                self.turn();
            }
        });
    }

    fn turn(&mut self) {
        self.pager.pool().waiters().evictor_waker().clear();
        self.stand_still_for_fork();
        self.pager.fork().children().reap(self.pager.slots().map());
        // Handlers wait for no reader, so that what they have said goes from here.
        messages::flush();
        self.pager.tables().count_of_limit(self.pager.memory());
        if self.pager.mapper().met_locks() {
            diagnostics::unlocked();
        }
        let asked = self.serve_requests();
        let worked = self.make_room();
        self.finish_borrowed();
        self.recover();
        let discarded = !worked && self.discard_slots();
        if !asked && !worked && !discarded {
            self.pager.tables().release(self.pager.memory());
            if self.writes.is_idle() {
                self.tidy_line();
            }
        }
        let discarded = discarded
            || !worked && self.pager.tables().sleep_slots(self.pager.memory(), self.pager.slots());
        // While writes fail, what was found dirty goes back: looking for clean pages all the time
        // would be all this thread does.
        let hopeless = self.writes.is_paused() && self.pager.health().is_exhausted();
        let busy = asked || discarded || (worked && !hopeless);
        let timeout = if busy && self.writes.has_room() { Duration::ZERO } else { self.patience() };
        self.collect(timeout);
    }

    /// Waits while the process forks.
    fn stand_still_for_fork(&self) {
        let (gate, waker) = (self.pager.fork().gate(), self.pager.pool().waiters().evictor_waker());
        if gate.is_closed(Closed::Evictor)
            && let Err(error) = gate.stand_still(Closed::Evictor, || {
                waker.wait(LOOK_EVERY)?;
                waker.clear();
                Ok(())
            })
        {
            diagnostics::fatal("the evictor cannot wait for a fork", &error);
        }
    }

    /// How long to wait for news.
    fn patience(&self) -> Duration {
        // A handler that copies a page out of its frame needs microseconds, and wakes nobody when it has.
        const BORROWED: Duration = Duration::from_micros(100);
        // No waker tells that a child has ended, that standard error has room, or that the device is quiet.
        const IDLE: Duration = Duration::from_millis(100);
        const WRITING: Duration = Duration::from_millis(20); // Deadlines are looked at.
        if !self.outgoing.borrowed.is_empty() {
            return BORROWED;
        }
        match self.writes.pause_left() {
            Some(left) if self.wanted() > 0 => left.min(IDLE),
            _ if self.writes.has_writes() => {
                WRITING.min(look_every(self.pager.health().deadline()))
            }
            _ => IDLE,
        }
    }

    pub(in crate::paging) fn collect(&mut self, timeout: Duration) {
        if let Err(error) = self.writes.collect(timeout, &mut self.outgoing) {
            diagnostics::fatal("the evictor lost its device queue", &error);
        }
        if !self.outgoing.freed.is_empty() {
            self.release();
        }
        self.writes.check_deadlines();
    }

    // How much.

    /// Pages to evict: down from the limit to the high watermark, less what is on its way out.
    fn wanted(&self) -> usize {
        let pager = &self.pager;
        let available = pager.pool().available();
        let starving = pager.pool().waiters().is_starving();
        let owed = pager.pool().managed().deficit();
        let enough = available >= pager.pool().watermarks().evict_below() && !starving;
        let is_idle = self.due() == 0 && self.writes.is_idle();
        // Once begun it goes on up to the high watermark: with a turn for each page that comes in there would
        // be no batches, and each page would cost a MOVE and a TLB flush of its own.
        if enough && owed == 0 && is_idle {
            return 0;
        }
        let high = pager.pool().watermarks().evict_until();
        let over = pager.pool().excess();
        let missing = (high + over).saturating_sub(available);
        if owed == 0 && pager.pool().others_may_give(missing, pager.health().is_exhausted()) {
            return 0;
        }
        let wanted = ((missing + owed) as usize).div_ceil(PAGE);
        // What a device that does not answer holds on to makes no room.
        let outgoing = if self.writes.is_stuck() { 0 } else { self.under_way() };
        // At least one for threads that wait although so much is free: what they need may be larger, as the
        // tables of a chunk or a run of frames, or not a spare frame, which counts as available.
        wanted.saturating_sub(outgoing.min(wanted)).max(usize::from(starving && outgoing == 0))
    }

    /// Pages on their way out.
    pub(in crate::paging) fn outgoing_pages(&self) -> usize {
        self.outgoing.cooling.len() + self.writes.pages() + self.outgoing.borrowed.len()
    }

    /// Of these, those that do not wait.
    fn under_way(&self) -> usize {
        self.due() + self.writes.pages() + self.outgoing.borrowed.len()
    }

    /// Pages in the standby line that do not wait, or that it has too many of.
    fn due(&self) -> usize {
        let beyond = self.outgoing.cooling.len().saturating_sub(self.outgoing.line);
        self.outgoing.due.max(beyond)
    }

    /// Decides about the oldest pages of the standby line where room for `wanted` pages is missing: about those
    /// that it has too many of, or about as many as threads wait for.
    fn finish_line(&mut self, wanted: usize) -> bool {
        let mut keep = self.outgoing.cooling.len() - self.outgoing.due;
        if wanted > 0 {
            // Only now: while there is room nothing leaves because other memory arrives.
            self.outgoing.line = self.line_length();
            if self.outgoing.joined > self.outgoing.cooling.len() / 4 {
                self.tidy_line();
            }
            let pool = self.pager.pool();
            if pool.waiters().is_starving() || pool.excess() + pool.managed().deficit() > 0 {
                keep = keep.saturating_sub(wanted);
            }
        }
        self.finish_cooling(keep.min(self.outgoing.line))
    }

    /// How many pages that may have been written wait in frames before they leave: a touch brings them back
    /// without I/O. Streams do not come back soon: their place is used better by what is read ahead. Only the chunk
    /// that was taken out last waits then: it shows whether it is in use until the next one goes.
    fn line_length(&self) -> usize {
        let streams = self.arrivals.fresh_prevail() || self.arrivals.in_order();
        let count = standby_count(self.pager.budget().limit());
        if streams || !self.pager.pool().moves() {
            let chunk_waits = self.pager.frames().runs() > 2 && self.pager.chunks().any_open();
            return if chunk_waits && count >= CHUNK_PAGES { CHUNK_PAGES } else { 0 };
        }
        count.min(self.pager.frames().singles() / 2)
    }

    /// Notes what has arrived, and runs ahead while threads wait for room for fresh memory.
    fn look_at_arrivals(&mut self) {
        let arrived = self.pager.memory().policy().lock().arrived;
        self.arrivals.look(arrived);
        let is_fresh = self.arrivals.fresh_prevail() && self.takes_chunks();
        self.pager.pool().watermarks().set_in_order(self.arrivals.in_order());
        let waiters = self.pager.pool().waiters();
        if !is_fresh || waiters.is_starving() {
            self.pager.pool().watermarks().set_ahead(is_fresh);
        }
    }

    /// Evicts one batch if there is a need. Returns whether it changed anything.
    fn make_room(&mut self) -> bool {
        // Above a limit that was lowered: spare memory goes first, which costs nobody a fault.
        let pool = self.pager.pool();
        if pool.excess() > 0 && reclaim::free_spares(pool, 1, 0) > 0 {
            self.made_room(1);
            return true;
        }
        self.look_at_arrivals();
        let wanted = self.wanted();
        // But for the rest of a chunk that goes whole: what is chosen later is chosen better.
        let in_turn = wanted.min(BATCH_MAX);
        let mut freed = false;
        if wanted > 0 {
            let released = self.pager.tables().release(self.pager.memory()) as usize;
            self.made_room(released);
            // What the heap keeps of freed memory need not be written.
            self.pager.pool().purge().call();
            freed = match self.evict_chunk(in_turn) {
                Chunkwise::Went => true,
                Chunkwise::Wait => false,
                Chunkwise::Later => self.evict(in_turn),
                Chunkwise::Closed => {
                    self.evict(in_turn);
                    true
                }
                Chunkwise::Unfit => {
                    let memory = self.pager.memory();
                    let next = memory.chunks().next_open();
                    let closed = next.is_some_and(|chunk| kernel_filled::close(memory, chunk));
                    self.evict(in_turn) || closed
                }
            };
        }
        let finished = self.finish_line(wanted);
        freed || finished
    }

    /// Notes that room was made, and feeds those who wait for it.
    pub(in crate::paging) fn made_room(&mut self, pages: usize) {
        if pages > 0 {
            self.fruitless = 0;
            self.pager.note_room_made();
            self.pager.pool().waiters().feed_handlers();
        }
    }

    /// While there is room, and nothing is being written that would tell: takes back what was said
    /// when there was none, and tries whether the device can be written. (What cools may do so for
    /// ever while there is room.)
    fn recover(&mut self) {
        let pager = &self.pager;
        // Below the low watermark pages are on their way out, or would be.
        let has_room = pager.pool().available() >= pager.pool().watermarks().low();
        if !has_room || !self.writes.is_idle() {
            return;
        }
        if pager.health().is_exhausted() {
            // What nobody could make has been given back.
            self.made_room(1);
        }
        self.writes.recover();
    }
}
