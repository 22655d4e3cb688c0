//! The mapper: installs pages in the region and takes them out. Nothing else tells the kernel what is
//! mapped there.
//!
//! It knows addresses, not words or frames: the caller has made the page `Moving`, or latched the chunk,
//! before it asks for a change, and charged what is mapped.
//!
//! # Invariants
//! 1. Memory of the region is dropped, moved or protected only where `owns` said that it is far memory,
//!    or where the call does nothing to what is not registered.
#![expect(unsafe_code, reason = "maps and unmaps pages of the region")]

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU64, Ordering};
use crate::paging::config::{FaultMode, Install, RegionConfig};
use crate::paging::diagnostics;
use crate::paging::page::PAGE;
use crate::paging::page::gaps::Gaps;
use crate::paging::pager::pieces::{self, FarParts};
use crate::sys;
use crate::sys::pagemap::{NO_PAGE_MAP, Pagemap};
use crate::sys::uffd::{Message, Outcome, Protect, Uffd, Wake, feature};
use crate::sys::vm::{Discarder, Huge, Mapping, Piece, make_own};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How far memory was moved.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Moved {
    pub(in crate::paging) bytes: usize,
    /// The kernel moves nothing there by one call, used or not: there are several mappings, or holes, or the
    /// program has protected a part of it, or mapped something over it.
    pub(in crate::paging) refused: bool,
}

/// Pages of zeros that come in at once at most, 64 KiB, where memory is filled in order.
pub(in crate::paging) const ZEROS_LEN: u64 = 16;

/// A region's userfaultfd, and what changes its mappings.
#[derive(Debug)]
pub(in crate::paging) struct Mapper {
    uffd: Uffd,
    gaps: Gaps,
    discarder: Arc<Discarder>,
    in_thread: bool,
    /// Reads as zero, never written: the source of zero fills by COPY.
    zeros: Mapping,
    /// Since when no page could be mapped, in milliseconds from `began` on; 0: the last one could.
    map_fails_since: AtomicU64,
    began: Instant,
    /// MOVE refuses pages that are shared with a child, or were.
    has_forked: AtomicBool,
}

impl Mapper {
    /// Opens a userfaultfd; returns with it whether pages leave by MOVE.
    ///
    /// # Errors
    /// Without permission for userfaultfd, or where the kernel cannot do what is asked for.
    pub(super) fn new(config: &RegionConfig) -> Result<(Mapper, bool)> {
        let in_thread = config.mode == FaultMode::InThread;
        let required = if in_thread { feature::SIGBUS } else { 0 };
        let copies = config.install == Install::Copy;
        let newer = if copies { 0 } else { feature::MOVE | feature::POISON };
        let uffd = Uffd::open(
            feature::PAGEFAULT_FLAG_WP | required,
            feature::THREAD_ID | feature::EVENT_REMAP | newer,
            config.mode == FaultMode::Kernel,
        )?;
        let moves = !copies && uffd.has(feature::MOVE);
        if !moves {
            diagnostics::leaves_by_copy();
        }
        let mapper = Mapper {
            uffd,
            gaps: Gaps::default(),
            discarder: Arc::new(Discarder::new()),
            in_thread,
            zeros: Mapping::reserve(ZEROS_LEN as usize * PAGE, PAGE, Huge::No)?,
            map_fails_since: AtomicU64::new(0),
            began: Instant::now(),
            has_forked: AtomicBool::new(false),
        };
        Ok((mapper, moves))
    }

    /// Opens a userfaultfd as this one, in a forked child.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(in crate::paging) fn open_again(&self) -> Result<Uffd> {
        self.uffd.open_again()
    }

    /// `Ok` if a forked child can be given a part in the region: its pages go by MOVE, its handlers tell
    /// whose fault they serve, and the kernel says which pages are there.
    ///
    /// # Errors
    /// Why not, where that fails for want of a page map alone, without which there is no MOVE.
    pub(in crate::paging) fn can_be_inherited(&self) -> std::result::Result<bool, &'static str> {
        if self.in_thread || !self.uffd.has(feature::THREAD_ID | feature::POISON) {
            return Ok(false);
        }
        let here = self.zeros.addr();
        let knows = |map: &Pagemap| map.next_present(here, here + PAGE).is_ok();
        let map = self.uffd.pagemap().ok_or(NO_PAGE_MAP)?;
        Ok(self.uffd.has(feature::MOVE) && knows(map))
    }

    /// Pages may be shared with a child from now on.
    pub(in crate::paging) fn note_fork(&self) {
        self.has_forked.store(true, Ordering::Relaxed);
    }

    /// The dropper of memory, for others who have some to drop.
    pub(super) fn discarder(&self) -> Arc<Discarder> {
        Arc::clone(&self.discarder)
    }

    // Faults.

    /// The userfaultfd, to wait for.
    pub(in crate::paging) fn raw_fd(&self) -> RawFd {
        self.uffd.raw_fd()
    }

    /// Reads the messages that wait; returns how many.
    ///
    /// # Errors
    /// When the userfaultfd cannot be read.
    pub(in crate::paging) fn read(&self, messages: &mut [Message]) -> Result<usize> {
        self.uffd.read(messages)
    }

    /// True if threads serve their own faults, in a SIGBUS handler.
    pub(in crate::paging) fn is_in_thread(&self) -> bool {
        self.in_thread
    }

    /// True if faults of the kernel on far memory are served.
    pub(in crate::paging) fn serves_kernel_faults(&self) -> bool {
        self.uffd.route().has_kernel_faults() && !self.in_thread
    }

    /// Wakes the threads that wait for the page at `start`, to fault again.
    pub(in crate::paging) fn wake(&self, start: usize) {
        if self.in_thread {
            return; // Faults are signals there: nobody waits.
        }
        // A failed wake means the range is not registered any more: nobody can wait there.
        drop(self.uffd.wake(start, PAGE));
    }

    // What is far memory.

    /// Sends faults of a range to the handlers.
    ///
    /// # Errors
    /// When the process has too many mappings.
    pub(in crate::paging) fn register_faults(&self, start: usize, len: usize) -> Result<()> {
        self.uffd.register_faults(start, len)
    }

    /// Registers a range, which is not, without asking for its faults.
    ///
    /// # Errors
    /// When the process has too many mappings.
    pub(in crate::paging) fn register_unwatched(&self, start: usize, len: usize) -> Result<()> {
        self.uffd.register_unwatched(start, len)
    }

    /// Lets the kernel fill a range that is registered. It stays registered, so that far memory is told
    /// from what the program maps over it. `false`: the process has too many mappings, and nothing has
    /// changed.
    pub(in crate::paging) fn leave_to_kernel(&self, start: usize, len: usize) -> bool {
        // The kernel takes no mode away from a registration: it has to end first.
        self.gaps.during(|| {
            if self.uffd.unregister(start, len).is_err() {
                return false;
            }
            // The thread for which it is opened may run already, and have mapped something over a part.
            let registered = pieces::in_halves(start, len, |start, len| {
                match self.uffd.register_unwatched(start, len) {
                    Err(Error::Os { errno: sys::EINVAL, .. }) => Ok(false),
                    other => other.map(|()| true),
                }
            });
            if let Err(error) = registered {
                diagnostics::fatal("an open chunk could not be registered", &error);
            }
            true
        })
    }

    /// The page map of the process, where there is one.
    pub(in crate::paging) fn pagemap(&self) -> Option<&Pagemap> {
        self.uffd.pagemap()
    }

    /// True if all of a range of addresses is far memory, in one of the kernel's mappings or several.
    /// True also while a chunk there is being opened.
    pub(in crate::paging) fn owns(&self, start: usize, len: usize) -> bool {
        self.gaps.holds(|| self.is_far(start, len) || self.far_bytes(start, len) == len)
    }

    /// True if all of the pieces, in ascending order, are far memory.
    pub(in crate::paging) fn owns_all(&self, pieces: &[Piece]) -> bool {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return true };
        let span = last.start() + last.len() - first.start();
        self.is_far(first.start(), span)
            || pieces.iter().all(|piece| self.owns(piece.start(), piece.len()))
    }

    /// True if a range is one mapping of far memory. Where that cannot be told, it is taken for one.
    fn is_far(&self, start: usize, len: usize) -> bool {
        self.uffd.is_registered(start, len) != Some(false)
    }

    /// How many bytes of a range, of which no chunk is being opened, are far memory.
    pub(in crate::paging) fn far_bytes(&self, start: usize, len: usize) -> usize {
        let mut bytes = 0;
        let count = |_, len| {
            bytes += len;
            Ok(())
        };
        drop(pieces::each(&self.uffd, start, len, count));
        bytes
    }

    /// Calls `act` with the parts of a range that are far memory, in ascending order.
    pub(in crate::paging) fn each_far(
        &self,
        start: usize,
        len: usize,
        act: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        pieces::each(&self.uffd, start, len, act)
    }

    /// The parts of a range that are far memory, in ascending order, neighbours joined.
    pub(in crate::paging) fn far_parts(&self, start: usize, len: usize) -> FarParts {
        let mut parts = FarParts::default();
        // Again, if a chunk was being opened meanwhile.
        self.gaps.holds(|| {
            parts = FarParts::find(&self.uffd, start, len);
            parts.bytes() == len
        });
        parts
    }

    /// Registers a chunk, or several, for faults, as far as it is far memory.
    ///
    /// # Errors
    /// When the process has too many mappings; nothing has changed.
    pub(in crate::paging) fn register_own(&self, start: usize, len: usize) -> Result<()> {
        if self.is_far(start, len) {
            return self.uffd.register_faults(start, len);
        }
        let mut any = false;
        pieces::each(&self.uffd, start, len, |start, len| {
            let registered = self.uffd.register_faults(start, len);
            match registered {
                Err(error) if any => {
                    diagnostics::fatal("a part of a chunk could not be registered again", &error)
                }
                _ => any = true,
            }
            registered
        })
    }

    // Installing.

    /// Copies `content` to the missing pages of `len` bytes at `start`.
    ///
    /// # Safety
    /// The pages are `Moving` by this thread; `content` is what they hold, and as long.
    pub(in crate::paging) unsafe fn copy(
        &self,
        start: usize,
        content: *const u8,
        len: usize,
        protect: Protect,
        wake: Wake,
    ) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.uffd.copy(start, content, len, protect, wake) }
    }

    /// Copies zeros to the missing pages of `len` bytes at `start`, at most `ZEROS_LEN` of them.
    ///
    /// # Safety
    /// The pages are `Moving` by this thread, and no more than that.
    pub(in crate::paging) unsafe fn copy_zeros(&self, start: usize, len: usize) -> Outcome {
        // SAFETY: the caller's promise; `zeros` is as long, and never written.
        unsafe { self.uffd.copy(start, self.zeros.as_ptr(), len, Protect::No, Wake::No) }
    }

    /// Maps the zero page where the page at `start` is missing, and wakes the threads that wait for it.
    ///
    /// # Safety
    /// If it is missing it reads as zero.
    pub(in crate::paging) unsafe fn map_zero_page(&self, start: usize) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.uffd.zeropage(start, Wake::Yes) }
    }

    /// Notes that a page could not be mapped; whether none could for `deadline`.
    pub(in crate::paging) fn fails_too_long(&self, deadline: Duration) -> bool {
        let now = self.began.elapsed().as_millis() as u64 + 1;
        let since = self.map_fails_since.load(Ordering::Relaxed);
        if since == 0 {
            self.map_fails_since.store(now, Ordering::Relaxed);
            return false;
        }
        now.saturating_sub(since) > deadline.as_millis() as u64
    }

    /// Notes that a page was mapped.
    pub(in crate::paging) fn note_mapped(&self) {
        if self.map_fails_since.load(Ordering::Relaxed) != 0 {
            self.map_fails_since.store(0, Ordering::Relaxed);
        }
    }

    // Taking out.

    /// Moves memory between the region and frames; once more after a refusal if `take_locks_off` has
    /// found a memory lock in the way, or the memory may have been shared with a child.
    ///
    /// # Safety
    /// As for `Uffd::move_pages`.
    pub(in crate::paging) unsafe fn move_memory(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: Wake,
        take_locks_off: impl FnOnce() -> bool,
    ) -> Outcome {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.uffd.move_pages(dst, src, len, wake) };
        match outcome {
            Outcome::Failed { bytes, errno: sys::EINVAL } if take_locks_off() => {
                let (dst, src, len) = (dst + bytes, src + bytes, len - bytes);
                // SAFETY: the caller's promise holds for what is left.
                unsafe { self.uffd.move_pages(dst, src, len, wake) }.after(bytes)
            }
            Outcome::Busy { bytes } if self.has_forked.load(Ordering::Relaxed) => {
                let (dst, src, len) = (dst + bytes, src + bytes, len - bytes);
                make_own(src, len);
                // SAFETY: the caller's promise holds for what is left.
                unsafe { self.uffd.move_pages(dst, src, len, wake) }.after(bytes)
            }
            _ => outcome,
        }
    }

    /// Puts memory that was just moved out back to where it came from, which is missing.
    pub(in crate::paging) fn move_back(&self, from: usize, to: usize, len: usize) {
        // SAFETY: the memory goes back to where it was, for which this thread still answers.
        let back = unsafe { pieces::move_back(&self.uffd, from, to, len) };
        let half_out = "a part of a chunk could not be moved back";
        // Memory that stays is missing.
        back.unwrap_or_else(|error| diagnostics::fatal(half_out, &error));
    }

    /// Drops the pages of all `pieces`.
    ///
    /// # Errors
    /// When the kernel refuses a piece; those before it are dropped.
    ///
    /// # Safety
    /// Nobody needs what they hold, and nobody else changes their mappings.
    pub(in crate::paging) unsafe fn discard(&self, pieces: &[Piece]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.discarder.discard(pieces) }
    }

    /// True if memory was locked (`mlock`) that was dropped since this was asked last.
    pub(in crate::paging) fn met_locks(&self) -> bool {
        self.discarder.met_locks()
    }

    /// Write-protects the page at `start`.
    ///
    /// # Errors
    /// When the program has unmapped it.
    pub(in crate::paging) fn forbid_writes(&self, start: usize) -> Result<()> {
        self.uffd.forbid_writes(start)
    }

    /// Lifts the write protection of the pages at `start`, as far as they are far memory.
    pub(in crate::paging) fn allow_writes(&self, start: usize, len: usize) -> Result<()> {
        let lifted = self.uffd.allow_writes(start, len);
        if lifted.is_ok() {
            return lifted;
        }
        pieces::each(&self.uffd, start, len, |start, len| self.uffd.allow_writes(start, len))
    }

    /// Maps zeros where the page at `start`, `Moving` by this thread, is missing: the program has dropped it
    /// (`MADV_DONTNEED`). To read it would be to wait for a handler, which waits for the page.
    pub(in crate::paging) fn fill_hole(&self, start: usize) -> bool {
        let mut there = [false];
        // Without a page map it counts as missing; what is there stays.
        if self.uffd.pagemap().is_some_and(|map| map.scan(start, &mut there).is_err()) {
            return false;
        }
        if there[0] {
            return true;
        }
        // SAFETY: what the program has dropped reads as zero.
        let filled = unsafe { self.uffd.zeropage(start, Wake::No) };
        matches!(filled, Outcome::Done | Outcome::Present { .. })
    }

    // Lost pages.

    /// True if lost pages can be poisoned; else they are fenced off.
    pub(in crate::paging) fn can_poison(&self) -> bool {
        self.uffd.has(feature::POISON)
    }

    /// Makes a touch of the page at `start` SIGBUS.
    ///
    /// # Safety
    /// The page is missing and its content is lost.
    pub(in crate::paging) unsafe fn poison(&self, start: usize) -> Outcome {
        // SAFETY: the caller's promise.
        match unsafe { self.uffd.poison(start) } {
            // The program has unmapped it.
            pieces::GONE => Outcome::Done,
            poisoned => poisoned,
        }
    }
}

/// True if what MOVE did not move can be copied: the kernel uses the frame, or the program has
/// protected the page, mapped something over it, or unmapped it.
pub(in crate::paging) fn is_copied_then(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Busy { .. } | Outcome::Failed { errno: sys::EINVAL | sys::ENOENT, .. }
    )
}
