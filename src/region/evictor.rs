//! The evictor: makes room by taking pages out, and writes back what the device does not have.
//!
//! One thread. It takes victims from the policy in batches. A page that is known to be clean
//! (write-protected since it was read) is dropped. Any other is taken out of the region into an
//! empty staging frame, where nobody writes it, and *cools*: a touch brings it back without I/O.
//! When it has cooled, its hash tells whether the slot already holds it; if not, neighbours are
//! written together into a run of fresh slots. Uses `store`, `page`; owned by
//! [`Region`](super::Region). Never allocates after its start.
//!
//! # Invariants
//! 1. The content of a frame under a write does not change: the region has no mapping of it.
//! 2. A slot's checksum is stored before a page word names the slot.
//! 3. A page whose write failed goes back to the region; nothing is lost.
//! 4. A page the kernel is using (an application's direct I/O in flight) is refused by MOVE and
//!    stays; only pages that were write-protected all along are dropped without MOVE.
#![expect(unsafe_code, reason = "unmaps pages of the region")]

use super::pager::{BATCH_MAX, NO_SLOT, Pager, Sum, backoff};
use super::report;
use super::requests::Requests;
use crate::base::error::Result;
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
use crate::page::note::Fate;
use crate::page::protocol::{self, Content, Written};
use crate::page::word::{FrameId, State, Word};
use crate::store::{Completion, Op, Queue, Request, SEGMENTS_MAX, Segment};
use crate::sys::uffd::{Outcome, Wake};
use crate::sys::vm::{KERNEL_PAGE, Piece};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Write requests in flight.
const DEPTH: u32 = 32;
/// Bytes of one merged write.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Pause of write-back after a failed write, doubled up to the maximum while writes fail.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// A page on its way to the device.
#[derive(Clone, Copy, Debug)]
struct Dirty {
    page: PageId,
    frame: FrameId,
    sum: Sum,
    slot: SlotId,
}

/// A write in flight: `count` pages in consecutive slots.
#[derive(Clone, Copy, Debug)]
struct Write {
    pages: [Dirty; SEGMENTS_MAX],
    count: usize,
    started: Instant,
    overdue: bool,
    /// Over the page's old slot: says nothing about space for others.
    in_place: bool,
}

/// The evictor thread's state.
pub(super) struct Evictor {
    pager: Arc<Pager>,
    requests: Arc<Requests>,
    queue: Box<dyn Queue>,
    victims: Vec<PageId>,
    /// Frames whose pages cool, oldest first.
    cooling: VecDeque<FrameId>,
    /// Frames whose pages left by another hand that is not finished with them.
    lingering: VecDeque<Linger>,
    dirty: Vec<Dirty>,
    writes: Vec<Option<Write>>,
    free_writes: Vec<usize>,
    finished: Vec<Completion>,
    cooling_max: usize,
    write_pause: Duration,
    write_again: Option<Instant>,
    /// When a failed write was reported last.
    said: Option<Instant>,
    deadline: Duration,
    /// Per frame: when its page was chosen.
    chosen: Vec<Instant>,
    /// Victims looked at since something was freed.
    fruitless: usize,
}

/// Whether pages to take out are still on the policy's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    Yes,
    No,
}

/// A frame that another thread took the page from.
#[derive(Clone, Copy, Debug)]
struct Linger {
    page: PageId,
    frame: FrameId,
    /// The slot the page was being written to.
    written: Option<SlotId>,
}

impl Evictor {
    pub(super) fn new(
        pager: Arc<Pager>,
        requests: Arc<Requests>,
        deadline: Duration,
    ) -> Result<Evictor> {
        let mut queue = pager.store.open_queue(DEPTH)?;
        queue.watch(pager.evictor_bell.raw_fd())?;
        let frames = pager.frames.count();
        Ok(Evictor {
            queue,
            requests,
            victims: Vec::with_capacity(BATCH_MAX),
            cooling: VecDeque::with_capacity(frames),
            lingering: VecDeque::with_capacity(frames),
            dirty: Vec::with_capacity(frames),
            writes: vec![None; DEPTH as usize],
            free_writes: (0..DEPTH as usize).collect(),
            finished: Vec::with_capacity(DEPTH as usize),
            cooling_max: 0,
            write_pause: PAUSE_MIN,
            write_again: None,
            said: None,
            deadline,
            chosen: vec![Instant::now(); frames],
            fruitless: 0,
            pager,
        })
    }

    /// Keeps the region between its watermarks until it stops.
    pub(super) fn run(&mut self) {
        while !self.pager.stop.load(Ordering::Acquire) {
            if let Err(error) = self.turn() {
                report::fatal("the evictor lost its device queue", &error);
            }
        }
    }

    fn turn(&mut self) -> Result<()> {
        self.pager.evictor_looks();
        let asked = self.serve_requests();
        let worked = self.make_room();
        self.settle_lingering();
        let discarded = !worked && self.discard_slots();
        // While writes fail, what was found dirty goes back: looking for clean pages all the time
        // would be all this thread does.
        let hopeless = self.is_paused() && self.pager.exhausted.load(Ordering::Acquire);
        let busy = asked || discarded || (worked && !hopeless);
        let timeout =
            if busy && self.queue.in_flight() < DEPTH { Duration::ZERO } else { self.patience() };
        self.collect(timeout)
    }

    /// How long to wait for news.
    fn patience(&self) -> Duration {
        const LINGER: Duration = Duration::from_micros(100);
        const IDLE: Duration = Duration::from_millis(100);
        if !self.lingering.is_empty() {
            return LINGER;
        }
        match self.write_again {
            Some(again) if self.wanted() > 0 => {
                again.saturating_duration_since(Instant::now()).clamp(PAUSE_MIN / 10, IDLE)
            }
            _ => IDLE,
        }
    }

    fn collect(&mut self, timeout: Duration) -> Result<()> {
        let (queue, finished) = (&mut self.queue, &mut self.finished);
        let mut done = |completion| finished.push(completion);
        super::guarded(&self.pager, || queue.wait(timeout, &mut done)).unwrap_or(Ok(()))?;
        while let Some(completion) = self.finished.pop() {
            self.finish_write(completion);
        }
        self.check_deadlines();
        Ok(())
    }

    // How much.

    /// Pages to evict: down from the limit to the high watermark, less what is on its way out.
    fn wanted(&self) -> usize {
        let pager = &self.pager;
        let available = pager.available();
        let starving = pager.starving.load(Ordering::Acquire) > 0;
        if available >= pager.low_bytes.load(Ordering::Relaxed) && !starving && self.idle() {
            return 0;
        }
        let high = pager.high_bytes.load(Ordering::Relaxed);
        let over = pager.excess();
        let missing = (high + over).saturating_sub(available) as usize;
        let wanted = missing.div_ceil(pager.page_bytes);
        // What a device that does not answer holds on to makes no room.
        let stuck = self.writes.iter().flatten().any(|write| write.overdue);
        let leaving = if stuck { 0 } else { self.leaving() };
        wanted.saturating_sub(leaving.min(wanted)).max(usize::from(starving && leaving == 0))
    }

    /// Whether nothing is on its way out.
    fn idle(&self) -> bool {
        self.cooling.is_empty() && self.dirty.is_empty() && self.free_writes.len() == DEPTH as usize
    }

    /// Pages on their way out.
    fn leaving(&self) -> usize {
        let writing: usize = self.writes.iter().flatten().map(|write| write.count).sum();
        self.cooling.len() + self.dirty.len() + writing + self.lingering.len()
    }

    /// Evicts one batch if there is a need. Returns whether it changed anything.
    fn make_room(&mut self) -> bool {
        if self.pager.excess() > 0
            && let Some(frame) = self.pager.frames.take_spare()
        {
            self.pager.free_frame(frame);
            self.made_room(1);
            return true;
        }
        let wanted = self.wanted();
        let mut freed = false;
        if wanted > 0 {
            let closed = self.pager.chunks.any_open() && self.pager.close_next();
            freed = self.evict(wanted.min(BATCH_MAX)) || closed;
        }
        let settled = self.settle_cooling(if wanted > 0 { 0 } else { self.cooling_max });
        freed || settled
    }

    /// Notes that room was made, and feeds those who wait for it.
    fn made_room(&mut self, pages: usize) {
        if pages > 0 {
            self.fruitless = 0;
            self.pager.exhausted.store(false, Ordering::Release);
            self.pager.feed_fillers();
        }
    }

    // Taking pages out.

    /// Takes up to `want` victims out of the region; returns whether it is worth going on.
    fn evict(&mut self, want: usize) -> bool {
        /// Victims that may be under way before the first of them frees anything.
        const UNDER_WAY: usize = 2 * BATCH_MAX;
        /// Batches looked through in one turn for the few pages that need no write.
        const PAUSED_ROUNDS_MAX: usize = 64;
        let mut victims = std::mem::take(&mut self.victims);
        let (mut went, mut resident) = (0, PageCount(0));
        for _ in 0..if self.is_paused() { PAUSED_ROUNDS_MAX } else { 1 } {
            let want = if self.is_paused() { BATCH_MAX } else { want };
            victims.clear();
            {
                let mut policy = self.pager.policy.lock();
                policy.victims(PageCount(want as u64), &mut |page| victims.push(page));
                resident = policy.resident();
            }
            went = self.take_out(&mut victims, Listed::No);
            self.fruitless += victims.len().max(1);
            if went > 0 || self.fruitless > 2 * resident.as_usize() {
                break;
            }
        }
        let exhausted = self.fruitless > 2 * resident.as_usize() + UNDER_WAY;
        if exhausted {
            self.pager.exhausted.store(true, Ordering::Release);
        }
        let more = !victims.is_empty() && !exhausted;
        self.victims = victims;
        went > 0 || more
    }

    /// Whether write-back waits after a failure: only pages that need no write can go, or those
    /// that may be written over their old slots.
    fn is_paused(&self) -> bool {
        self.write_again.is_some_and(|again| Instant::now() < again)
    }

    /// Unmaps the given pages as far as they are resident and not pinned; returns how many.
    fn take_out(&mut self, victims: &mut [PageId], listed: Listed) -> usize {
        victims.sort_unstable();
        let chosen = Instant::now();
        let pause = self.is_paused();
        let mut pieces = [Piece::new(0, 0); BATCH_MAX];
        let mut clean = [(PageId(0), Word::EMPTY); BATCH_MAX];
        let (mut piece_count, mut clean_count, mut moved) = (0, 0, 0);
        for &page in victims.iter() {
            let Some(word) = self.take_victim(page, listed) else { continue };
            if word.protected() && word.slot().is_some() {
                clean[clean_count] = (page, word);
                clean_count += 1;
                self.pager.push_piece(&mut pieces, &mut piece_count, page);
            } else if pause && word.slot().is_none() {
                self.keep(page, word);
            } else {
                moved += usize::from(self.move_out(page, word, chosen));
            }
        }
        self.drop_clean(&clean[..clean_count], &pieces[..piece_count]);
        self.pager.evict_times.add_many(chosen.elapsed(), clean_count as u64);
        self.made_room(clean_count);
        clean_count + moved
    }

    /// Makes a victim `Moving`; `None` when it left the region by itself, or is pinned.
    fn take_victim(&self, page: PageId, listed: Listed) -> Option<Word> {
        let mut spins = 0;
        loop {
            let word = self.pager.word(page).load();
            match word.state() {
                State::Resident => {}
                State::Moving => {
                    backoff(&mut spins);
                    continue;
                }
                _ => return None,
            }
            let leaving = word.leaving();
            if self.pager.word(page).try_change(word, leaving).is_err() {
                continue;
            }
            if listed == Listed::Yes {
                self.pager.policy.lock().removed(page);
            }
            if word.pins() == 0 {
                return Some(leaving);
            }
            self.keep(page, leaving);
            return None;
        }
    }

    /// Leaves a victim where it is.
    fn keep(&self, page: PageId, word: Word) {
        self.pager.settle_resident(page, word, word.kept(), None);
    }

    /// Drops pages that have been write-protected since their slots were read.
    fn drop_clean(&self, clean: &[(PageId, Word)], pieces: &[Piece]) {
        if clean.is_empty() {
            return;
        }
        let pager = &self.pager;
        // SAFETY: each page is `Moving` by this thread and equals its slot: it was installed
        // write-protected and no write was let through (that clears the flag first), so neither
        // a thread nor a device request of the application can have changed it.
        unsafe { pager.discarder.discard(pieces) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        {
            let mut policy = pager.policy.lock();
            clean.iter().for_each(|(page, _)| policy.evicted(*page));
        }
        for &(page, word) in clean {
            let slot = word.slot().expect("a clean page has a slot");
            pager.settle(page, word, Word::stored(slot));
        }
        pager.budget.uncharge(ByteCount((clean.len() * pager.page_bytes) as u64));
        pager.counters.evicted_clean.add(clean.len() as u64);
        let unseen = clean.iter().filter(|(_, word)| word.prefetched()).count();
        pager.counters.prefetch_unseen.add(unseen as u64);
    }

    /// Takes a page's memory out of the region into a frame, to cool there.
    fn move_out(&mut self, page: PageId, word: Word, chosen: Instant) -> bool {
        let Some(frame) = self.pager.frame_for_eviction() else {
            self.keep(page, word);
            return false;
        };
        if !self.pager.take_content(page, frame) {
            self.keep(page, word);
            self.pager.counters.evict_busy.bump();
            return false;
        }
        if word.sparse() {
            self.pager.fill_frame_holes(frame);
        }
        self.pager.frames.note(frame, page, word.slot());
        self.pager.frames.note_of(frame).set_prefetched(word.prefetched());
        self.chosen[frame.0 as usize] = chosen;
        self.pager.settle(page, word, Word::cooling(frame));
        self.cooling.push_back(frame);
        true
    }

    // After cooling.

    /// Decides about frames that have cooled, leaving the youngest `keep`; writes the dirty ones.
    fn settle_cooling(&mut self, keep: usize) -> bool {
        let room =
            (self.free_writes.len() * self.pages_per_write()).saturating_sub(self.dirty.len());
        let mut count = self.cooling.len().saturating_sub(keep).min(room);
        let worked = count > 0;
        let mut freed = 0;
        while count > 0 {
            let frame = self.cooling.pop_front().expect("counted above");
            freed += usize::from(self.settle_frame(frame));
            count -= 1;
        }
        self.made_room(freed);
        self.write_dirty();
        worked
    }

    fn pages_per_write(&self) -> usize {
        (WRITE_BYTES_MAX / self.pager.page_bytes).clamp(1, SEGMENTS_MAX)
    }

    /// Finds out what a cooled page needs; returns whether its frame is free already.
    fn settle_frame(&mut self, frame: FrameId) -> bool {
        let pager = &self.pager;
        let page = pager.frames.page(frame);
        let slot = pager.frames.slot(frame);
        if pager.word(page).load() != Word::cooling(frame) {
            self.lingering.push_back(Linger { page, frame, written: None });
            return false;
        }
        let sum = pager.hash_frame(frame);
        let content = match slot.filter(|slot| pager.sum(*slot) == sum) {
            Some(slot) => Content::Clean(slot),
            None if sum == pager.zero_sum() => Content::Zero,
            None => Content::Dirty,
        };
        if !protocol::cooled(pager.word(page), frame, content) {
            self.lingering.push_back(Linger { page, frame, written: None });
            return false;
        }
        if pager.frames.note_of(frame).prefetched() {
            match content {
                Content::Clean(_) => pager.counters.prefetch_unseen.bump(),
                // Somebody has written it.
                Content::Zero | Content::Dirty => pager.counters.prefetch_hits.bump(),
            }
        }
        match content {
            // The slot is chosen together with its neighbours', in `write_dirty`.
            Content::Dirty => {
                self.dirty.push(Dirty { page, frame, sum, slot: SlotId(0) });
                return false;
            }
            Content::Clean(_) => pager.counters.evicted_clean.bump(),
            Content::Zero => {
                pager.put_slot(slot);
                pager.counters.evicted_zero.bump();
            }
        }
        pager.policy.lock().evicted(page);
        pager.recycle(frame);
        pager.evict_times.add(self.chosen[frame.0 as usize].elapsed());
        true
    }

    /// Frees the frames whose takers have finished.
    fn settle_lingering(&mut self) {
        let mut freed = 0;
        for _ in 0..self.lingering.len() {
            let linger = self.lingering.pop_front().expect("counted above");
            let Linger { page, frame, .. } = linger;
            let note = self.pager.frames.note_of(frame);
            match protocol::linger(self.pager.word(page), frame, note) {
                protocol::Linger::Wait => {
                    self.lingering.push_back(linger);
                    continue;
                }
                protocol::Linger::Cooling => {
                    self.cooling.push_back(frame);
                    continue;
                }
                protocol::Linger::Over(false) => drop(self.pager.frames.release(frame)),
                protocol::Linger::Over(true) => self.pager.recycle(frame),
            }
            self.pager.put_slot(linger.written);
            freed += 1;
        }
        self.made_room(freed);
    }

    // Write-back.

    /// Gives all dirty pages slots, runs of them, and starts their writes, as far as there are
    /// free requests.
    fn write_dirty(&mut self) {
        if self.dirty.is_empty() {
            return;
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        if self.is_paused() {
            // Only what can be written over its old slot may go while the rest waits.
            let full = self.device_is_full();
            let mut at = 0;
            while at < dirty.len() {
                if full && self.pager.frames.slot(dirty[at].frame).is_some() {
                    at += 1;
                } else {
                    self.put_back(dirty.swap_remove(at));
                }
            }
        }
        dirty.sort_unstable_by_key(|dirty| dirty.page);
        let mut done = 0;
        while done < dirty.len() && !self.free_writes.is_empty() {
            done += self.write_some(&mut dirty[done..]);
        }
        dirty.drain(..done);
        self.dirty = dirty;
    }

    /// Whether write-back fails because the device has no space left.
    fn device_is_full(&self) -> bool {
        let errno = self.pager.write_errno.load(Ordering::Acquire);
        errno == crate::sys::ENOSPC as u32 || errno == NO_SLOT
    }

    /// Starts one write, or returns a page that there is no space for; returns for how many of the
    /// first pages.
    fn write_some(&mut self, dirty: &mut [Dirty]) -> usize {
        let Dirty { frame, .. } = dirty[0];
        if self.device_is_full()
            && let Some(slot) = self.pager.frames.slot(frame)
        {
            // Its old slot, whose content is out of date, takes no space. If the write fails, the
            // page stays in memory without a slot.
            self.pager.frames.forget_slot(frame);
            dirty[0].slot = slot;
            self.start_write(&dirty[..1], true);
            return 1;
        }
        let want = dirty.len().min(self.pages_per_write());
        let Some((first, got)) = self.pager.slots.take_run(SlotCount(want as u64)) else {
            self.writes_fail(NO_SLOT);
            if self.pager.frames.slot(frame).is_some() {
                return 0; // Over its old slot, now that the device counts as full.
            }
            self.put_back(dirty[0]);
            return 1;
        };
        for (n, dirty) in dirty[..got.as_usize()].iter_mut().enumerate() {
            dirty.slot = SlotId(first.0 + n as u64);
        }
        self.start_write(&dirty[..got.as_usize()], false);
        got.as_usize()
    }

    /// Starts writing a run of pages to their consecutive slots.
    fn start_write(&mut self, run: &[Dirty], in_place: bool) {
        let token = self.free_writes.pop().expect("the caller looked");
        let mut segments = [Segment { ptr: std::ptr::null_mut(), len: 0 }; SEGMENTS_MAX];
        let mut pages = [run[0]; SEGMENTS_MAX];
        for (n, dirty) in run.iter().enumerate() {
            let ptr = self.pager.frames.ptr(dirty.frame);
            segments[n] = Segment { ptr, len: self.pager.page_bytes };
            pages[n] = *dirty;
        }
        let request = Request {
            token: token as u64,
            op: Op::Write,
            offset: self.pager.slot_offset(run[0].slot),
            segments: &segments[..run.len()],
        };
        let (count, started) = (run.len(), Instant::now());
        self.writes[token] = Some(Write { pages, count, started, overdue: false, in_place });
        let queue = &mut *self.queue;
        match super::guarded(&self.pager, || super::push(queue, request)) {
            Some(pushed) => assert!(pushed, "writes are bounded by the queue's depth"),
            // Whether the device has the request is unknown: as if it never answered.
            None => self.abandon_write(token, crate::sys::EIO),
        }
        self.pager.counters.writes_in_flight.up();
    }

    fn finish_write(&mut self, completion: Completion) {
        let token = completion.token as usize;
        let write = self.writes[token].take().expect("a completion has its write");
        self.free_writes.push(token);
        self.pager.counters.writes_in_flight.down();
        self.pager.write_times.add(write.started.elapsed());
        let run = &write.pages[..write.count];
        match completion.result {
            Ok(()) => {
                if !write.in_place && self.pager.write_errno.load(Ordering::Acquire) != 0 {
                    self.write_again = None;
                    self.write_pause = PAUSE_MIN;
                    self.pager.write_errno.store(0, Ordering::Release);
                }
                let freed = run.iter().filter(|dirty| self.written(dirty)).count();
                self.made_room(freed);
            }
            Err(error) => {
                self.say_failed(&error);
                self.writes_fail(super::errno_of(&error) as u32);
                run.iter().for_each(|dirty| {
                    self.pager.slots.put(dirty.slot);
                    if self.pager.frames.slot(dirty.frame) == Some(dirty.slot) {
                        // Half written: not the page's any more.
                        self.pager.frames.forget_slot(dirty.frame);
                    }
                    self.put_back(*dirty);
                });
            }
        }
    }

    /// Reports a failed write, at most once in a while: a full device fails them for ever.
    fn say_failed(&mut self, error: &crate::Error) {
        const WHILE: Duration = Duration::from_secs(10);
        if self.said.is_none_or(|said| said.elapsed() > WHILE) {
            self.said = Some(Instant::now());
            report::warn("write-back failed; the pages stay in memory", error);
        }
    }

    /// A page's write is done; returns whether its frame is free.
    fn written(&mut self, dirty: &Dirty) -> bool {
        let pager = &self.pager;
        // Invariant 2: published by the change of the word.
        pager.set_sum(dirty.slot, dirty.sum);
        pager.counters.pages_out.bump();
        let old = pager.frames.slot(dirty.frame);
        let outcome = protocol::written(pager.word(dirty.page), dirty.frame, dirty.slot);
        pager.put_slot(old);
        match outcome {
            Written::Won => {
                pager.policy.lock().evicted(dirty.page);
                pager.evict_times.add(self.chosen[dirty.frame.0 as usize].elapsed());
            }
            Written::Taken => {
                // A filler copied the page out, or it was discarded: neither slot is its any more.
                let written = Some(dirty.slot);
                let Dirty { page, frame, .. } = *dirty;
                self.lingering.push_back(Linger { page, frame, written });
                return false;
            }
        }
        pager.recycle(dirty.frame);
        true
    }

    /// Returns a page that cannot be written to the region.
    fn put_back(&mut self, dirty: Dirty) {
        let pager = &self.pager;
        let Dirty { page, frame, .. } = dirty;
        let slot = pager.frames.slot(frame);
        match protocol::unwritten(pager.word(page), frame, slot) {
            Written::Won => {}
            Written::Taken => {
                // A filler copied the page out, or it was discarded: the old slot is this
                // thread's.
                pager.put_slot(slot);
                self.lingering.push_back(Linger { page, frame, written: None });
                return;
            }
        }
        let moving = Word::moving(slot);
        if !pager.evict_by_move {
            // The frame's charge moves to the page; the frame's memory goes right after.
            if let Err(error) = pager.copy_rest(page, frame, 0) {
                report::fatal("a page could not be returned after a failed write", &error);
            }
            pager.settle_resident(page, moving, Word::resident(slot), None);
            drop(pager.frames.release(frame));
            return;
        }
        match pager.return_frame(page, frame) {
            Ok(_) => {
                pager.settle_resident(page, moving, Word::resident(slot), None);
                drop(pager.frames.release(frame));
            }
            Err(error) => {
                report::fatal("a page could not be returned after a failed write", &error)
            }
        }
    }

    /// Pauses write-back; clean pages are evicted meanwhile.
    fn writes_fail(&mut self, errno: u32) {
        if errno != NO_SLOT {
            self.pager.counters.write_errors.bump();
        }
        self.pager.write_errno.store(errno, Ordering::Release);
        self.write_again = Some(Instant::now() + self.write_pause);
        self.write_pause = (self.write_pause * 2).min(PAUSE_MAX);
    }

    /// Reports writes that the device has not answered in time. Their pages stay readable: a
    /// filler copies them out; their frames stay with the device.
    fn check_deadlines(&mut self) {
        for token in 0..self.writes.len() {
            let Some(write) = &self.writes[token] else { continue };
            if write.overdue || write.started.elapsed() <= self.deadline {
                continue;
            }
            let error = crate::Error::Io {
                op: "write",
                offset: self.pager.slot_offset(write.pages[0].slot),
                len: (write.count * self.pager.page_bytes) as u64,
                errno: crate::sys::ETIMEDOUT,
            };
            report::warn("the device does not answer a write", &error);
            self.abandon_write(token, crate::sys::ETIMEDOUT);
        }
    }

    fn abandon_write(&mut self, token: usize, errno: i32) {
        self.writes[token].as_mut().expect("an abandoned write is in flight").overdue = true;
        self.pager.counters.write_errors.bump();
        self.pager.write_errno.store(errno as u32, Ordering::Release);
        self.pager.exhausted.store(true, Ordering::Release);
    }

    // Other work.

    /// Returns device space of freed slots, a run at a time, when there is nothing else to do.
    fn discard_slots(&mut self) -> bool {
        let Some((first, count)) = self.pager.slots.next_discardable() else { return false };
        let len = count.0 * self.pager.page_bytes as u64;
        let (store, offset) = (&self.pager.store, self.pager.slot_offset(first));
        let result = super::guarded(&self.pager, || store.discard(offset, len)).unwrap_or(Ok(()));
        if let Err(error) = result {
            report::warn("device space could not be returned", &error);
        }
        self.pager.slots.discarded((first, count));
        true
    }

    /// Evicts ranges that somebody asked to be evicted; answers when they are out.
    fn serve_requests(&mut self) -> bool {
        let Some(request) = self.requests.take() else { return false };
        let mut batch = [PageId(0); BATCH_MAX];
        let mut next = request.first.0;
        let end = request.first.0 + request.count.0;
        // Half of the frames for what is on its way out, half for the next batch: a page that
        // finds no frame would stay.
        let half = self.pager.frames.count() / 2;
        while next < end {
            let count = BATCH_MAX.min(half).min((end - next) as usize);
            self.settle_until(half);
            batch.iter_mut().zip(next..).for_each(|(page, id)| *page = PageId(id));
            batch[..count].iter().for_each(|page| self.pager.close_around(*page));
            self.take_out(&mut batch[..count], Listed::Yes);
            self.settle_cooling(0);
            if let Err(error) = self.collect(Duration::ZERO) {
                report::fatal("the evictor lost its device queue", &error);
            }
            next += count as u64;
        }
        self.finish_everything();
        self.requests.answer(request.id);
        true
    }

    /// Whether anything is on its way out that the device has not failed to answer.
    fn has_hope(&self) -> bool {
        let writing = self.writes.iter().flatten().any(|write| !write.overdue);
        let waiting = self.cooling.len() + self.dirty.len() + self.lingering.len();
        writing || waiting > 0
    }

    /// Waits, for a bounded time, until all that is cooling or being written has settled.
    fn finish_everything(&mut self) {
        self.settle_until(0);
    }

    /// Waits, for a bounded time, until at most `most` pages are on their way out.
    fn settle_until(&mut self, most: usize) {
        let started = Instant::now();
        while self.has_hope() && self.leaving() > most {
            self.settle_cooling(0);
            self.settle_lingering();
            if let Err(error) = self.collect(Duration::from_millis(1)) {
                report::fatal("the evictor lost its device queue", &error);
            }
            if self.pager.stop.load(Ordering::Acquire) || started.elapsed() > self.deadline {
                return;
            }
        }
    }
}

impl Pager {
    /// A frame to take a page's content out to.
    fn frame_for_eviction(&self) -> Option<FrameId> {
        if self.evict_by_move {
            self.frames.take_empty().or_else(|| {
                // All are spare: after an eviction that nobody needed the room of.
                self.free_frame(self.frames.take_spare()?);
                self.frames.take_empty()
            })
        } else {
            self.charged_frame(ByteCount::ZERO).or_else(|| self.borrowed_frame())
        }
    }

    /// A frame above a limit that was lowered and is not reached yet. Fills have left room for it
    /// below the old limit, and the page that it is for goes at once.
    fn borrowed_frame(&self) -> Option<FrameId> {
        let frame = self.frames.take_empty()?;
        self.budget.charge(self.page_size());
        Some(frame)
    }

    /// Takes the content of a `Moving` page into `frame` and unmaps it from the region. `false`:
    /// the page is in use by the kernel and stays as it was; the frame is given back.
    fn take_content(&self, page: PageId, frame: FrameId) -> bool {
        if self.evict_by_move {
            self.take_by_move(page, frame)
        } else {
            self.take_by_copy(page, frame)
        }
    }

    fn take_by_move(&self, page: PageId, frame: FrameId) -> bool {
        let (src, dst) = (self.addr(page), self.frames.addr(frame));
        // SAFETY: the page is `Moving` by this thread, which may unmap it; the frame is an empty
        // one of this thread's.
        let outcome = unsafe { self.uffd.move_pages(dst, src, self.page_bytes, Wake::No) };
        let moved = match outcome {
            Outcome::Done => return true,
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
        if moved > 0 {
            // SAFETY: the part that was moved goes back to where it came from, which is missing.
            let back = unsafe { self.uffd.move_pages(src, dst, moved, Wake::Yes) };
            if back != Outcome::Done {
                let error = crate::Error::Os { call: "UFFDIO_MOVE", errno: crate::sys::EIO };
                report::fatal("half of a page could not be moved back", &error);
            }
        }
        drop(self.frames.release(frame));
        false
    }

    /// Maps the zero page into the holes of a frame, so that it can go back to the region whole.
    fn fill_frame_holes(&self, frame: FrameId) {
        for at in (0..self.page_bytes).step_by(KERNEL_PAGE) {
            let unit = (self.frames.addr(frame) + at) as *const u8;
            // SAFETY: the frame is this thread's and readable; a hole of staging memory is filled
            // by the kernel.
            let _ = unsafe { unit.read_volatile() };
        }
    }

    /// For kernels without MOVE: nobody can write the page while it is copied, because writes
    /// fault first and wait for its word. (A device request of the application in flight is not
    /// seen: such kernels need a pin around direct I/O into far memory.)
    fn take_by_copy(&self, page: PageId, frame: FrameId) -> bool {
        if self.uffd.forbid_writes(self.addr(page), self.page_bytes).is_err() {
            self.recycle(frame);
            return false;
        }
        // SAFETY: the page is mapped and write-protected, the frame is this thread's; both are
        // `page_bytes` long and do not overlap. Holes of a sparse page cannot be here: chunks are
        // opened only where MOVE exists.
        unsafe {
            let src = self.addr(page) as *const u8;
            std::ptr::copy_nonoverlapping(src, self.frames.ptr(frame), self.page_bytes);
        }
        let piece = Piece::new(self.addr(page), self.page_bytes);
        // SAFETY: the page is `Moving` by this thread and its content is in the frame.
        unsafe { self.discarder.discard(&[piece]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        self.budget.uncharge(self.page_size());
        true
    }

    /// Maps a cooling frame's content back as `page`, which is `Moving` by this thread. Returns
    /// what that leaves of the frame.
    pub(super) fn return_frame(&self, page: PageId, frame: FrameId) -> Result<Fate> {
        if !self.evict_by_move {
            return self.copy_rest(page, frame, 0).map(|()| Fate::Dropped);
        }
        let (dst, src) = (self.addr(page), self.frames.addr(frame));
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content and nobody else moves it.
        match unsafe { self.uffd.move_pages(dst, src, self.page_bytes, Wake::Yes) } {
            Outcome::Done => Ok(Fate::MovedBack),
            Outcome::Busy { bytes } => {
                self.copy_rest(page, frame, bytes)?;
                Ok(Fate::MovedBack)
            }
            outcome => Err(super::pager::install_error(outcome)),
        }
    }

    /// Returns the charge that a copy would have needed.
    pub(super) fn uncharge_copy(&self) {
        if !self.evict_by_move {
            self.budget.uncharge(self.page_size());
        }
    }
}
