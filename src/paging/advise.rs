//! Hints and control: what a program that knows its accesses tells a region.
//!
//! All calls work on ranges of addresses; pages that a range covers in part count whole, except
//! for `discard`. Requests go to the handlers and the evictor, pins to `pins`.
#![expect(unsafe_code, reason = "drops contents that references could point to")]

use crate::base::deadline::Deadline;
use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::limit::budget::Budget;
use crate::paging::evict::policy::Hint;
use crate::paging::fault::sigbus;
use crate::paging::kernel_filled;
use crate::paging::page::word::State;
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::paging::pager::{self, discard, reclaim};
use crate::paging::pins::PinGuard;
use crate::paging::readahead::PrefetchRun;
use crate::paging::region::{Advice, Region, RegionConfig};
use crate::paging::table_sizes::tables_allowed;
use crate::sys::access;
use crate::sys::signals::SignalsBlocked;
use std::time::Duration;

impl Region {
    /// Makes all pages that lie whole in a range read as zero; nothing of them is written back,
    /// and their pins end. No [`Advice`], because advice is safe.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region.
    ///
    /// # Safety
    /// Nobody needs the range's contents, and no reference into it exists.
    pub unsafe fn discard<T>(&self, range: *mut [T]) -> Result<()> {
        let (ptr, len) = bytes_of(range);
        self.extents.check_runs()?;
        let offset = self.extents.offset_of(ptr, len.as_usize())?;
        if !self.is_here() {
            return Ok(()); // As `unmap`.
        }
        let first = offset.div_ceil(PAGE);
        let end = (offset + len.as_usize()) / PAGE;
        if first < end {
            discard::discard(&self.pager, PageId(first as u64), PageCount((end - first) as u64));
        }
        Ok(())
    }

    /// Makes a range read as zero, as `madvise(2)` with `MADV_DONTNEED` does to ordinary memory, wherever the content
    /// is: [discards](Region::discard) its pages. What may not be written stays so. What the program has mapped over
    /// the region is left to the kernel's `madvise`.
    /// A forked child does the same to what it has inherited, but writes zeros where it has locked it (`mlock`).
    ///
    /// The kernel alone drops what is in memory: a page that has left comes back as it was.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region, or does not begin at a multiple of
    /// 4 KiB; [`Error::Os`] when the kernel does not let go of what the program has mapped there.
    ///
    /// # Safety
    /// As for [`discard`](Region::discard).
    pub unsafe fn clear<T>(&self, range: *mut [T]) -> Result<()> {
        let (ptr, len) = bytes_of(range);
        let len = len.as_usize().checked_next_multiple_of(PAGE);
        let len = len.ok_or(Error::BadRange { reason: "length overflows".into() })?;
        let offset = self.extents.offset_of(ptr, len)?;
        if !offset.is_multiple_of(PAGE) {
            return Err(Error::BadRange { reason: "does not begin at a multiple of 4 KiB".into() });
        }
        if !self.is_here() {
            // SAFETY: the caller's promise.
            return unsafe { access::drop_inherited(ptr.addr(), len) };
        }
        discard::clear(&self.pager, offset, offset + len)
    }

    /// True if an access to a page needs no device: it is resident, or holds nothing.
    #[must_use]
    pub fn is_at_hand(&self, ptr: *const u8) -> bool {
        let page =
            self.extents.pages_of(ptr, ByteCount(1)).map(|(page, _)| self.pager.word(page).load());
        page.is_ok_and(|word| matches!(word.state(), State::Resident | State::Empty))
    }

    /// True if pages can be filled without evicting others, now and for a while.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.pager.pool().available() > self.pager.pool().watermarks().high()
    }

    /// Lets far memory have this many bytes at most, as long as it is less than the limit that the
    /// program asked for; never less than it needs to work. Returns at once, while pages
    /// above it leave.
    #[cfg(feature = "heap")]
    pub(crate) fn leave_room(&self, room: ByteCount) {
        let room = room.max(self.limit_min());
        self.limits.leave(room, |limit| reclaim::set_limit(&self.pager, limit));
    }

    /// The least that the limit can be: what a region needs to work, of which tables may take half, as
    /// of any limit. Tables of what is allocated cannot leave: a limit that was lowered to 8 MiB below 17 MiB
    /// of them left no page for any fault, and each waited for ever.
    pub(crate) fn limit_min(&self) -> ByteCount {
        let works = RegionConfig::LIMIT_MIN;
        let resident = PageCount(works.0 / PAGE_SIZE.0).max(self.pager.tables().listed_max());
        let tables = self.extents.tables_max(resident);
        let with_tables = ByteCount(works.0 - tables_allowed(works).0 + tables.0);
        works.max(with_tables)
    }

    /// Bytes that count against the limit now, and the limit.
    pub(crate) fn budget(&self) -> &Budget {
        self.pager.budget()
    }

    /// Bytes that may be resident now: what was asked for, or less where others have a part of it.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        self.pager.budget().limit()
    }

    /// Follows advice about ranges of memory, which a slice is, and a pointer with a length
    /// ([`slice_from_raw_parts`](std::ptr::slice_from_raw_parts)). Many scattered ranges cost one wake-up.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the region's process, whose faults are served without advice;
    /// [`Error::BadRange`] when a range is not in this region; advice about those before it is followed. Of
    /// [`Advice::PageOutNow`] also [`Error::Os`] with the device's error while write-back fails, and
    /// [`Error::StoreFull`] while no slot is free.
    ///
    /// # Examples
    /// ```
    /// use farheap::region::{Advice, Region, RegionConfig};
    /// use farheap::{ByteCount, store::MemStore};
    /// use std::sync::Arc;
    ///
    /// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
    /// match Region::create(RegionConfig::new().limit(ByteCount::mib(8)), store) {
    ///     Ok(region) => {
    ///         let ptr = region.map(ByteCount::mib(32))?.cast::<u64>();
    ///         // SAFETY: mapped above, zeroed and aligned, and nobody else uses it.
    ///         let column = unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), 4 << 20) };
    ///         column[..1000].fill(1);
    ///         region.advise(&[&column[..1000]], Advice::PageOut)?;
    ///         region.advise(&[&column[..10], &column[500..510]], Advice::WillNeed)?;
    ///         assert_eq!(column[509], 1);
    ///     }
    ///     Err(error) => println!("{error}"), // It tells how to allow userfaultfd.
    /// }
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn advise<T>(&self, ranges: &[*const [T]], advice: Advice) -> Result<()> {
        self.check_is_here()?;
        // A device that answers at once, as memory does, is read by the thread that asks.
        let advice = match advice {
            Advice::WillNeedNow if !self.pager.mapper().is_in_thread() => Advice::WillNeed,
            advice => advice,
        };
        let mut batch = BlockedSteps::default();
        let result = ranges.iter().map(|range| bytes_of(*range)).try_for_each(|(ptr, len)| {
            let (first, count) = self.extents.pages_of(ptr, len)?;
            self.advise_pages(first, count, advice, &mut batch)
        });
        match advice {
            Advice::WillNeed if !ranges.is_empty() => self.pager.sched().call(0),
            Advice::PageOut => self.pager.pool().waiters().call_evictor(),
            _ => {}
        }
        result
    }

    /// Fails in a forked child, which has neither the region's threads nor all of its state.
    fn check_is_here(&self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::Forked { what: "a region" }) }
    }

    /// Follows advice about pages; of what is only begun the caller tells the threads.
    fn advise_pages(
        &self,
        first: PageId,
        count: PageCount,
        advice: Advice,
        batch: &mut BlockedSteps,
    ) -> Result<()> {
        let pages = (first.0..first.0 + count.0).map(PageId);
        match advice {
            Advice::Normal | Advice::Random | Advice::Sequential => {
                pages.for_each(|page| self.pager.readahead().advise(page, advice));
            }
            Advice::WillNeedNow => pages.for_each(|page| {
                batch.step();
                sigbus::fetch(&self.pager, page);
            }),
            Advice::WillNeed => {
                // The queue's readers wait for a writer that is in the middle of its entry.
                batch.step();
                let run = PrefetchRun { first, count, for_stream: false };
                if !self.pager.readahead().request(run) {
                    self.pager.counters().prefetches_dropped.bump();
                }
                pages.for_each(|page| self.hint(page, Hint::WillNeed, batch));
            }
            Advice::Cold => pages.for_each(|page| {
                // One that is open and stays so has no place in the policy.
                let _ = kernel_filled::close_around(self.pager.memory(), page);
                self.hint(page, Hint::Cold, batch);
            }),
            Advice::PageOut => self.requests.evict_soon(first, count),
            Advice::PageOutNow => return evict_pages(self, first, count),
        }
        Ok(())
    }

    /// Tells the policy of a page, if it is resident.
    fn hint(&self, page: PageId, hint: Hint, batch: &mut BlockedSteps) {
        batch.step();
        if self.pager.word(page).load().state() == State::Resident {
            self.pager.memory().policy().lock().policy.advise(page, hint);
        }
    }

    /// Evicts everything that is resident: [`Advice::PageOutNow`] for all of the region.
    ///
    /// # Errors
    /// As [`advise`](Region::advise).
    pub fn evict_all(&self) -> Result<()> {
        self.check_is_here()?;
        self.extents.check_runs()?;
        let end = self.extents.fresh_pages();
        if end.0 == 0 { Ok(()) } else { evict_pages(self, PageId(0), end) }
    }

    /// Asks the evictor to give back the device space of all freed pages soon. By itself it waits until
    /// the device has been quiet for half a second, because giving space back holds up reads, or until
    /// more has been freed than is stored for two seconds.
    #[doc(hidden)]
    pub fn return_space(&self) {
        if self.is_here() {
            self.requests.discard();
            self.pager.pool().waiters().call_evictor();
        }
    }

    /// Brings the range's pages in and keeps them: they are not evicted while the guard lives. For memory
    /// that a device request reads into on kernels without MOVE, or that must not fault: where system calls
    /// cannot wait for far memory, they may read and write what is pinned.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the region's process,
    /// [`Error::BadRange`] when the range is not in this region, [`Error::LimitExceeded`] when so
    /// much pinned memory would leave no room for the rest, a page has 255 pins already, or the
    /// process has too many mappings; nothing is pinned then.
    pub fn pin<T>(&self, range: *const [T]) -> Result<PinGuard<'_>> {
        self.check_is_here()?;
        let (ptr, len) = bytes_of(range);
        let (first, count) = self.extents.pages_of(ptr, len)?;
        self.pins.pin(first, count)?;
        Ok(PinGuard { pins: &self.pins, first, count })
    }

    /// Ends a pin of a range whose guard was forgotten.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region or is not pinned.
    #[doc(hidden)]
    pub fn unpin<T>(&self, range: *const [T]) -> Result<()> {
        self.check_is_here()?;
        let (ptr, len) = bytes_of(range);
        let (first, count) = self.extents.pages_of(ptr, len)?;
        self.pins.unpin(first, count)
    }

    /// Changes the limit while running; under a memory manager, this region's ceiling. Lowering it
    /// returns when the pages above it are out.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the region's process;
    /// [`Error::LimitTooSmall`] below what it and the tables of what is allocated need, and nothing
    /// changes; [`Error::LimitExceeded`]
    /// when pinned pages or a failing device keep the old size (the new limit holds for new pages
    /// all the same).
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        const STALL_MAX: Duration = Duration::from_secs(5);
        self.check_is_here()?;
        self.extents.check_runs()?;
        let minimum = self.limit_min();
        if limit < minimum {
            return Err(Error::LimitTooSmall { limit, minimum });
        }
        self.limits.ask(limit, |limit| reclaim::set_limit(&self.pager, limit));
        let (mut last, mut stall) = (self.pager.budget().charged(), Deadline::new(STALL_MAX));
        while self.pager.pool().excess() > 0 {
            self.pager.pool().waiters().call_evictor();
            std::thread::sleep(Duration::from_micros(200)); // The evictor has no one to tell.
            let now = self.pager.budget().charged();
            if now < last {
                last = now;
                stall.restart();
            } else if stall.is_over() {
                let reason = format!("{now} stay resident of {limit} allowed");
                return Err(Error::LimitExceeded { reason });
            }
        }
        Ok(())
    }
}

/// Asks the evictor to take pages out, and waits for that.
fn evict_pages(region: &Region, first: PageId, count: PageCount) -> Result<()> {
    if !region.requests.evict(first, count, || region.pager.pool().waiters().call_evictor()) {
        return Err(Error::NotRunning);
    }
    match region.pager.health().write_errno() {
        0 => Ok(()),
        pager::health::NO_SLOT => Err(region.pager.slots().full()),
        errno => Err(region.pager.slots().failed("write", None, 0, errno as i32)),
    }
}

/// Where a range is, and how long.
fn bytes_of<T>(range: *const [T]) -> (*const u8, ByteCount) {
    (range.cast(), ByteCount(range.len().saturating_mul(size_of::<T>()) as u64))
}

/// Signals blocked for a few pages at a time, which saves most of what it costs.
#[derive(Default)]
struct BlockedSteps {
    blocked: Option<SignalsBlocked>,
    pages: u32,
}

impl BlockedSteps {
    /// Counts a page; after every `PAGES_MAX`, lets signals in that have arrived meanwhile.
    fn step(&mut self) {
        const PAGES_MAX: u32 = 64;
        if self.pages.is_multiple_of(PAGES_MAX) {
            drop(self.blocked.take());
            self.blocked = Some(SignalsBlocked::new());
        }
        self.pages += 1;
    }
}

/// Pages that the region has read from its device: cheaper than all statistics.
#[cfg(feature = "heap")]
pub(crate) fn pages_in(region: &Region) -> u64 {
    crate::paging::stats::pages_in(region.pager.counters())
}
