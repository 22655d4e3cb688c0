//! Taking inherited pages out: those that a forked child has alone, and that are more than its budget.
//!
//! Pages that it has written go to slots of its own; a page that equals its slot needs no write.
#![expect(unsafe_code, reason = "takes pages of the region out")]

use super::{BATCH_MAX, Server};
use crate::base::error::Result;
use crate::base::units::{PageId, SlotCount, SlotId};
use crate::paging::diagnostics;
use crate::paging::fork::entry::{Backing, Entry};
use crate::paging::page::word::{FrameId, State as PageState};
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::paging::pager::slot_store::{ContentHash, SlotStore};
use crate::store::{Op, Request};
use crate::sys::uffd::{Outcome, Wake};
use crate::sys::vm::{HUGE_PAGE, Piece, make_own};
use crate::sys::{self, messages};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long nothing is taken out after a write that failed.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// The same after a batch of pages that the kernel did not let go: with each fault it would say so of all pages again.
const REFUSED_PAUSE: Duration = Duration::from_millis(5);

/// A page on its way out.
#[derive(Clone, Copy)]
struct Leaving {
    page: PageId,
    frame: usize,
    hash: ContentHash,
}

impl Server {
    /// Notes the inherited pages that have become this process's alone: it has written them, or the
    /// parent has, or has dropped them.
    pub(super) fn look(&mut self, now: Instant) {
        if self.rescans.is_first() {
            self.drop_frames();
        }
        // Without a fault nobody has written a shared page or brought another one in. (What an older
        // relative does is seen later.)
        let processes = [std::process::id(), std::os::unix::process::parent_id()];
        let faults = processes.into_iter().filter_map(sys::thread::faults_of).sum();
        if self.rescans.is_due(now, faults) {
            self.find_owned();
            self.keep_to_budget();
            self.rescans.note_look(now);
        }
        messages::flush();
        self.rescans.plan_next();
        if !self.is_ending && sys::thread::is_left_alone() {
            self.is_ending = sys::thread::end_process();
        }
    }

    /// Gives the parent's frames back that hold nothing which the child needs: copies of them, once the
    /// parent uses its own again.
    fn drop_frames(&self) {
        let frames = self.child.pager.frames();
        for frame in (0..frames.count() as u32).map(FrameId) {
            let page = frames.page(frame);
            if self.child.entry(page).backing() != Backing::Frame(frame) {
                self.drop_frame(frame);
            }
        }
    }

    pub(super) fn drop_frame(&self, frame: FrameId) {
        let start = self.child.pager.frames().addr(frame);
        let piece = Piece::new(start, PAGE);
        // SAFETY: the parent's frame; no page's content is in this process's copy of it.
        drop(unsafe { self.child.pager.mapper().discard(&[piece]) });
    }

    fn find_owned(&self) {
        let Some(pagemap) = self.uffd.pagemap() else { return };
        let table = self.child.pager.table();
        let end = table.start() + table.len();
        let mut at = table.start();
        let mut owned = [false; CHUNK_PAGES];
        while let Ok(Some((from, to))) = pagemap.next_present(at, end) {
            let to = to.min(from + HUGE_PAGE);
            let owned = &mut owned[..(to - from) / PAGE];
            if pagemap.owned(from, owned).is_err() {
                break;
            }
            for (n, _) in owned.iter().enumerate().filter(|(_, owned)| **owned) {
                let page = self.child.pager.table().page_at(from + n * PAGE);
                let entry = self.child.entry(page);
                if !entry.is_listed() && self.is_far(from + n * PAGE) {
                    // (One that is out and there all the same was discarded during the fork.)
                    let came =
                        if entry.is_out() { Entry::in_memory(Backing::Nothing) } else { entry };
                    self.note_in(page, came);
                }
            }
            at = to;
        }
    }

    /// True if a page is far memory: the program has mapped nothing over it.
    fn is_far(&self, start: usize) -> bool {
        self.uffd.is_registered(start, PAGE) != Some(false)
    }

    /// Takes pages out, the oldest first, until the rest is within the budget.
    pub(super) fn keep_to_budget(&mut self) {
        if self.write_again.is_some_and(|again| Instant::now() < again) {
            return;
        }
        self.write_again = None;
        let mut tries = self.child.queue.lock().len();
        loop {
            let before = self.child.queue.lock().len();
            if before as u64 <= self.child.budget || tries == 0 {
                return;
            }
            tries = tries.saturating_sub(BATCH_MAX);
            let pause = match self.take_out() {
                false => WRITE_PAUSE,
                true if self.child.queue.lock().len() >= before => REFUSED_PAUSE,
                true => continue,
            };
            self.write_again = Some(Instant::now() + pause);
            return;
        }
    }

    /// Takes a batch out. `false`: the store takes nothing.
    fn take_out(&mut self) -> bool {
        let mut leaving = [None; BATCH_MAX];
        let (mut used, mut count) = (0, 0);
        for _ in 0..BATCH_MAX {
            let Some(page) = self.child.queue.lock().pop_front() else { break };
            // A frame for each: MOVE refuses one that holds a page, also one that needs no write.
            if !self.move_out(page, used + 1) {
                self.child.queue.lock().push_back(page);
                continue;
            }
            used += 1;
            let hash = self.hash_of(used);
            if !self.leaves_clean(page, hash) {
                leaving[count] = Some(Leaving { page, frame: used, hash });
                count += 1;
            }
        }
        let written = self.write(&leaving[..count]);
        for leaving in leaving[..count].iter().flatten().filter(|_| !written) {
            let content = self.frame(leaving.frame).cast_const();
            let copied = self.copy_in(leaving.page, content);
            self.installed(leaving.page, copied);
            self.child.queue.lock().push_back(leaving.page);
        }
        // SAFETY: what the frames hold was written, or is in the region again.
        drop(unsafe { self.frames.discard(PAGE, BATCH_MAX * PAGE) });
        written
    }

    fn frame(&self, frame: usize) -> *mut u8 {
        self.frames.as_ptr().wrapping_add(frame * PAGE)
    }

    fn hash_of(&self, frame: usize) -> ContentHash {
        // SAFETY: a frame of this thread's, a page long.
        let bytes = unsafe { std::slice::from_raw_parts(self.frame(frame), PAGE) };
        self.child.pager.slots().hash_bytes(bytes)
    }

    /// Moves a page's memory to a frame. `false`: it is as it was, because the kernel uses it, the program has mapped
    /// something over it, or the parent had pinned it.
    fn move_out(&self, page: PageId, frame: usize) -> bool {
        let (start, to) = (self.child.pager.table().addr(page), self.frame(frame).addr());
        let word = self.child.pager.word(page).load();
        let is_pinned = word.state() == PageState::Resident && word.pins() > 0;
        if is_pinned || !self.is_far(start) {
            return false;
        }
        // What is missing of the memory reads as zero: MOVE stops at it. What is there stays.
        // SAFETY: as said.
        let _ = unsafe { self.uffd.zeropage(start, Wake::Yes) };
        // SAFETY: this thread alone takes pages out; the frame is its own and empty.
        let act = || unsafe { self.uffd.move_pages(to, start, PAGE, Wake::No) };
        let moved = match act() {
            Outcome::Busy { .. } => {
                // Shared with the parent until lately, most probably.
                make_own(start, PAGE);
                act()
            }
            Outcome::Failed { errno: sys::EINVAL, .. } => {
                self.frames.while_executable(frame * PAGE, act)
            }
            outcome => outcome,
        };
        moved == Outcome::Done
    }

    /// A page was moved out. `true`: it needs no write.
    fn leaves_clean(&self, page: PageId, hash: ContentHash) -> bool {
        let entry = self.child.entry(page);
        let is_zero = hash == self.child.pager.slots().hash_of_zeros();
        let is_clean = match entry.backing() {
            Backing::Slot { layer, slot } => self.child.slots(layer).hash(slot) == hash,
            _ => false,
        };
        match (is_clean, is_zero) {
            (true, _) => self.child.set(page, Entry::out(entry.backing())),
            (false, true) => {
                self.put(entry.backing());
                self.child.set(page, Entry::out(Backing::Nothing));
            }
            (false, false) => return false,
        }
        true
    }

    /// Frees a slot, if it is this process's own.
    fn put(&self, backing: Backing) {
        if let (Backing::Slot { layer, slot }, Some(own)) = (backing, self.child.own())
            && usize::from(layer) == self.child.layers.len()
        {
            own.put(Some(slot));
        }
    }

    /// Writes pages to slots of this process's. `false`: they are not written.
    fn write(&mut self, pages: &[Option<Leaving>]) -> bool {
        if pages.is_empty() {
            return true;
        }
        let child = Arc::clone(&self.child);
        let Some(own) = child.own() else { return false };
        let layer = child.layers.len() as u16;
        let mut done = 0;
        while done < pages.len() {
            let want = SlotCount((pages.len() - done) as u64);
            while own.map().awake().0 < want && own.map().wake() {}
            let Some((first, got)) = own.map().take_run(want) else { return false };
            let part: Vec<Leaving> =
                pages[done..].iter().flatten().take(got.as_usize()).copied().collect();
            if let Err(error) = self.write_run(own, first, &part) {
                (0..got.0).for_each(|n| own.put(Some(SlotId(first.0 + n))));
                diagnostics::warn("a forked child cannot write its pages out", &error);
                return false;
            }
            for (leaving, slot) in part.iter().zip(first.0..) {
                own.set_hash(SlotId(slot), leaving.hash);
                self.put(child.entry(leaving.page).backing());
                let backing = Backing::Slot { layer, slot: SlotId(slot) };
                child.set(leaving.page, Entry::out(backing));
            }
            done += part.len();
        }
        true
    }

    fn write_run(&mut self, own: &SlotStore, first: SlotId, pages: &[Leaving]) -> Result<()> {
        let segments: Vec<*mut [u8]> = pages
            .iter()
            .map(|leaving| slice_from_raw_parts_mut(self.frame(leaving.frame), PAGE))
            .collect();
        let offset = own.offset(first);
        let request = Request { token: 0, op: Op::Write, offset, segments: &segments };
        let len = request.bytes();
        let queue = self.queue.as_mut().expect("a layer of one's own has a queue");
        // SAFETY: the frames are this thread's, and are not touched before the request is done, or for
        // ever, if it does not get done: `run` ends the process then. The slots were just given out.
        let pushed = unsafe { queue.push(request) };
        assert!(pushed, "one write is made at a time");
        let mut result = None;
        while result.is_none() {
            queue.wait(Duration::from_secs(1), &mut |_, done| result = Some(done))?;
        }
        result.unwrap_or_else(|| Err(own.failed("write", Some(first), len, sys::EIO)))
    }
}
