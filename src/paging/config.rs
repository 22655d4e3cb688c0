//! Configuration of a region: what it is made of, and how its pages come and go.

use crate::base::error::{Error, Result};
use crate::base::settings::settings;
use crate::base::units::{ByteCount, PageCount, SlotCount};
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::paging::table_sizes::{self, Committed};
use crate::store::Wipe;
use crate::sys::vm::HUGE_PAGE;
use std::time::Duration;

/// The largest reservation: the policy tells fewer pages than 8 TiB have apart.
const SPAN_MAX: ByteCount = ByteCount::gib(7 << 10);

/// How pages come and go.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Install {
    /// The fastest that the kernel can do, by measurement: chunks that a stream leads to are filled by MOVE and pages
    /// by COPY; evictions MOVE what may be dirty and drop what is known to be clean.
    #[default]
    Auto,
    /// COPY, write protection and `MADV_DONTNEED` only: the one way below Linux 6.8. Uses nothing
    /// newer than Linux 5.7, whatever the kernel has: lost pages are fenced off by a mapping
    /// instead of `UFFDIO_POISON`. Memory that an application's direct I/O is reading into must be
    /// pinned.
    Copy,
}

/// Which thread serves a fault, and whether faults of system calls are needed: where only faults from user mode are
/// permitted, as to unprivileged programs on most distributions, a system call fails with `EFAULT` when it reads or
/// writes far memory that is not resident.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultMode {
    /// Handler threads. Where only faults from user mode are permitted, no allocation of the global allocator goes
    /// far by its size, because any of them may be the buffer of a system call: only explicit requests do, the
    /// handle [`Far`](crate::Far), a [`Scope`](crate::Scope), temporary memory. Start-up says so on standard error.
    #[default]
    Auto,
    /// Handler threads, and sizes decide wherever the program runs.
    User,
    /// Handler threads. Where only faults from user mode are permitted, start-up fails.
    Kernel,
    /// The faulting thread itself, and sizes decide, in a `SIGBUS` handler: the lowest latency, and no privilege
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
    /// let config = RegionConfig::new().limit(ByteCount::mib(64)).span(ByteCount::gib(64));
    /// ```
    pub struct RegionConfig {
        /// Sets the maximum number of bytes that may be resident.
        ///
        /// Default: 1 GiB.
        limit: value(ByteCount) = ByteCount::gib(1),
        /// Sets the address space to reserve, which is rounded up to 2 MiB.
        ///
        /// Default: 1 TiB.
        span: value(ByteCount) = ByteCount::gib(1024),
        /// Sets the number of threads that serve faults, 1 to 64.
        ///
        /// Default: 2. The first serves all faults, with asynchronous I/O; the second helps while
        /// two threads fault in turn, each beside one, and all help while more do.
        handlers: value(usize) = 2,
        /// Sets which threads serve faults, and which faults.
        ///
        /// Default: handler threads.
        mode: value(FaultMode) = FaultMode::Auto,
        /// Sets how pages are installed and evicted.
        ///
        /// Default: by what the kernel can do.
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
    /// The smallest limit that works.
    pub const LIMIT_MIN: ByteCount = ByteCount::mib(8);

    /// The most that tables take of so much far memory, each page touched and stored: what describes
    /// pages and slots, and the kernel's page tables. They count against the limit while they are
    /// used. What is allocated is bounded so that they never take more than half of the limit; see
    /// [`far_max`](Self::far_max).
    #[must_use]
    pub fn tables_max(&self, far: ByteCount) -> ByteCount {
        let resident = PageCount(self.limit.0 / PAGE as u64);
        let committed = Committed::of(far.0);
        table_sizes::tables_max(&committed, resident, SlotCount(u64::MAX))
    }

    /// About the most far memory that can be allocated under this limit, however large the device is. Less where what is allocated is scattered: parts of 2 MiB count whole.
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
        let minimum = RegionConfig::LIMIT_MIN;
        if self.limit < minimum {
            return Err(Error::LimitTooSmall { limit: self.limit, minimum });
        }
        self.span = ByteCount(self.span.0.next_multiple_of(HUGE_PAGE as u64));
        Ok(self)
    }

    /// Why these settings cannot work, whatever the limit is.
    pub(crate) fn check_settings(&self) -> Result<()> {
        if !(1..=64).contains(&self.handlers) {
            let reason = format!("{} is not from 1 to 64", self.handlers);
            return Err(Error::config("handlers", reason));
        }
        if self.span < PAGE_SIZE || self.span > SPAN_MAX {
            let reason = format!("{} is not from one page to 7 TiB", self.span);
            return Err(Error::config("span", reason));
        }
        Ok(())
    }
}
