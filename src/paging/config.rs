//! Configuration of a region: what it is made of, and how its pages come and go.

use crate::base::error::{Error, Result};
use crate::base::settings::settings;
use crate::base::units::{ByteCount, PageCount, SlotCount};
use crate::paging::table_sizes::{self, Committed};
use crate::store::Wipe;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE};
use std::time::Duration;

/// Smallest page size.
const PAGE_MIN: ByteCount = ByteCount::kib(4);
/// Largest page size.
const PAGE_MAX: ByteCount = ByteCount::mib(2);
/// The largest reservation: half of the 47-bit address space, so that the rest stays usable.
const SPAN_MAX: ByteCount = ByteCount::gib(64 << 10);

/// How pages come and go.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Install {
    /// The fastest for the page size, by measurement: huge pages, which is pages of 2 MiB and chunks
    /// that a stream leads to, are filled by MOVE and others by COPY; evictions MOVE what may be
    /// dirty and drop what is known to be clean.
    #[default]
    Auto,
    /// COPY, write protection and `MADV_DONTNEED` only: the one way below Linux 6.8. Uses nothing
    /// newer than Linux 5.7, whatever the kernel has: lost pages are fenced off by a mapping
    /// instead of `UFFDIO_POISON`. Memory that an application's direct I/O is reading into must be
    /// pinned.
    Copy,
    /// MOVE both ways, for comparison (Linux 6.8): memory that was in use is not used again (the kernel may still
    /// be reading it), so small pages then cost more than by COPY.
    Move,
}

/// How pages come and go, as the kernel and the page size allow.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Moves {
    /// Fills install single frames by MOVE, else by COPY. (Runs of them always go by MOVE.)
    pub(in crate::paging) fill: bool,
    /// Evictions take pages out by MOVE, else by write-protect, copy and DONTNEED.
    pub(in crate::paging) evict: bool,
}

impl Install {
    /// Decides if fills and evictions use MOVE.
    pub(in crate::paging) fn resolve(self, page_bytes: usize, kernel_moves: bool) -> Result<Moves> {
        match self {
            // The kernel clears what a frame that is moved in gets as new memory, which costs more
            // than copying, but for huge pages (book/src/design/decisions.md).
            Install::Auto => {
                Ok(Moves { fill: kernel_moves && page_bytes >= HUGE_PAGE, evict: kernel_moves })
            }
            Install::Copy => Ok(Moves { fill: false, evict: false }),
            Install::Move if kernel_moves => Ok(Moves { fill: true, evict: true }),
            Install::Move => Err(Error::Unsupported {
                feature: "UFFDIO_MOVE (Linux 6.8)",
                why: "`Install::Move` was asked for; use `Install::Auto`",
            }),
        }
    }
}

/// Which thread serves a fault.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultMode {
    /// Handler threads. System calls may touch far memory that is not resident.
    #[default]
    Handler,
    /// The faulting thread itself, in a `SIGBUS` handler: the lowest latency, and no privilege
    /// needed. System calls on far memory that is not resident fail with `EFAULT`; SIGBUS must
    /// not be blocked, nor be in the mask of a signal handler that touches far memory, and a handler
    /// that the program installs for it later must pass on what is not its own. A SIGBUS handler that
    /// was there before is still called for what is not far, for lost pages and for hardware memory
    /// errors.
    InThread,
}

settings! {
    /// Settings of a region.
    ///
    /// # Examples
    /// ```
    /// use farheap::ByteCount;
    /// use farheap::region::RegionConfig;
    /// let config = RegionConfig::new().limit(ByteCount::mib(64)).page(ByteCount::kib(4));
    /// ```
    pub struct RegionConfig {
        /// Sets the maximum number of bytes that may be resident.
        ///
        /// Default: 1 GiB.
        limit: value(ByteCount) = ByteCount::gib(1),
        /// Sets the size of the pages that come and go, a power of two from 4 KiB to
        /// 2 MiB.
        ///
        /// Default: 4 KiB.
        page: value(ByteCount) = ByteCount::kib(4),
        /// Sets the address space to reserve, which is rounded up to 2 MiB.
        ///
        /// Default: 1 TiB.
        span: value(ByteCount) = ByteCount::gib(1024),
        /// Sets the number of threads that serve faults, 1 to 64.
        ///
        /// Default: 2. The first serves all faults, with asynchronous I/O; the second helps while
        /// two threads fault in turn, each beside one, and all help while more do.
        handlers: value(usize) = 2,
        /// Sets which threads serve faults.
        ///
        /// Default: handler threads.
        mode: value(FaultMode) = FaultMode::Handler,
        /// Sets how pages are installed and evicted.
        ///
        /// Default: by page size.
        #[doc(hidden)]
        install: value(Install) = Install::Auto,
        /// Sets whether each slot's content is verified when it is read back.
        ///
        /// Default: yes.
        checksum: value(bool) = true,
        /// Sets how long a handler looks for the device's answer before it sleeps, on devices that
        /// usually answer within that time; `None`: not at all. Other threads that want its
        /// processor get it meanwhile, but it does not halt.
        ///
        /// Default: 200 us.
        poll: maybe(Duration) = Some(Duration::from_micros(200)),
        /// Sets how long the device may take for one request, and for how long a read that fails is
        /// repeated. Time in which the process is stopped does not count.
        ///
        /// Default: 30 s.
        deadline: value(Duration) = Duration::from_secs(30),
        /// Sets whether pages that a stream of faults leads to are read ahead.
        ///
        /// Default: yes.
        readahead: value(bool) = true,
        /// Sets whether a region refuses to start where only faults of user mode can be served.
        ///
        /// Default: no.
        kernel_faults_required: value(bool) = false,
        /// Sets whether forked children inherit the region's memory; else it stays reserved in them,
        /// without access.
        ///
        /// Default: yes, where kernel and store allow it.
        inherit: value(bool) = true,
        /// Sets the NUMA node whose memory holds the pages that are resident.
        ///
        /// Default: any.
        node: maybe(u32) = None,
        /// Sets whether pages are encrypted before they reach the store, under a key that only this
        /// process knows. Needs the crate's feature `encrypt`.
        ///
        /// Default: no.
        encrypt: value(bool) = false,
        /// Sets what happens to the pages on the store when the region is dropped.
        ///
        /// Default: nothing.
        wipe: value(Wipe) = Wipe::Off,
    }
}

impl RegionConfig {
    /// The smallest limit that works with a page size.
    #[must_use]
    pub fn limit_min(page: ByteCount) -> ByteCount {
        const PAGES_MIN: u64 = 64;
        ByteCount::mib(8).max(ByteCount(page.0.saturating_mul(PAGES_MIN)))
    }

    /// The most that tables take of so much far memory, each page touched and stored: what describes
    /// pages and slots, and the kernel's page tables. They count against the limit while they are
    /// used. What is allocated is bounded so that they never take more than half of the limit; see
    /// [`far_max`](Self::far_max).
    #[must_use]
    pub fn tables_max(&self, far: ByteCount) -> ByteCount {
        let resident = PageCount(self.limit.0 / self.page.0.max(1));
        let committed = Committed::of(far.0, self.page.0.max(1));
        table_sizes::tables_max(&committed, resident, SlotCount(u64::MAX))
    }

    /// About the most far memory that can be allocated under this limit with this page size, however
    /// large the device is. Less where what is allocated is scattered: parts of 2 MiB count whole.
    #[must_use]
    pub fn far_max(&self) -> ByteCount {
        let gib = ByteCount::gib(1);
        let fixed = self.tables_max(ByteCount::ZERO).0;
        let per_gib = (self.tables_max(ByteCount(gib.0 << 10)).0 - fixed) >> 10;
        let room = table_sizes::tables_allowed(self.limit).0.saturating_sub(fixed);
        ByteCount((u128::from(room) * u128::from(gib.0) / u128::from(per_gib)) as u64)
    }

    /// These settings, the span rounded up, or why they cannot work.
    pub(in crate::paging) fn check(mut self) -> Result<RegionConfig> {
        self.check_settings()?;
        let minimum = RegionConfig::limit_min(self.page);
        if self.limit < minimum {
            return Err(Error::LimitTooSmall { limit: self.limit, minimum });
        }
        self.span = ByteCount(self.span.0.next_multiple_of(HUGE_PAGE as u64));
        Ok(self)
    }

    /// Why these settings cannot work, whatever the limit is.
    pub(crate) fn check_settings(&self) -> Result<()> {
        if !self.page.0.is_power_of_two() || self.page < PAGE_MIN || self.page > PAGE_MAX {
            let reason = format!("{} is not a power of two from 4 KiB to 2 MiB", self.page);
            return Err(Error::config("page", reason));
        }
        if !(1..=64).contains(&self.handlers) {
            return Err(Error::config(
                "handlers",
                format!("{} is not from 1 to 64", self.handlers),
            ));
        }
        if self.span < self.page || self.span > SPAN_MAX {
            let reason = format!("{} is not from one page to 64 TiB", self.span);
            return Err(Error::config("span", reason));
        }
        Ok(())
    }
}

const _: () = assert!(KERNEL_PAGE == PAGE_MIN.0 as usize);
