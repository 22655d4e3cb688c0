//! What a region has done: a snapshot of plain numbers.

use super::pager::Pager;
use crate::base::units::PageCount;

/// Statistics of one region since its start. Counts only grow; sizes are of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Most bytes that may be resident.
    pub limit_bytes: u64,
    /// Bytes resident now: mapped pages and staging frames.
    pub resident_bytes: u64,
    /// Bytes charged against the limit now: resident, and the untouched rest of open chunks.
    pub charged_bytes: u64,
    /// Largest number of charged bytes there ever was; resident bytes never exceeded it.
    pub resident_bytes_max: u64,
    /// Bytes of the pages that hold live data, resident or not.
    pub committed_bytes: u64,
    /// Bytes of device space in use.
    pub stored_bytes: u64,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Faults answered with zeros, without I/O.
    pub faults_zero: u64,
    /// Faults answered by reading the device.
    pub faults_read: u64,
    /// Faults on pages on their way out that came back without reading the device.
    pub faults_cooling: u64,
    /// First writes to pages installed write-protected.
    pub faults_protect: u64,
    /// Faults that another thread's fault had answered already.
    pub faults_racing: u64,
    /// Faults that waited because the limit left no frame.
    pub faults_starved: u64,
    /// Pages read from the device.
    pub pages_in: u64,
    /// Pages read because `prefetch` asked for them.
    pub pages_prefetched: u64,
    /// Pages read because a stream of faults led to them.
    pub pages_read_ahead: u64,
    /// Pages written to the device.
    pub pages_out: u64,
    /// Bytes read from the device.
    pub bytes_read: u64,
    /// Bytes written to the device.
    pub bytes_written: u64,
    /// Pages evicted without a write because the device had their content.
    pub evicted_clean: u64,
    /// Pages evicted without a write because they were all zero.
    pub evicted_zero: u64,
    /// Evictions refused because the kernel was using the page.
    pub evict_busy: u64,
    /// Installs that fell back to a copy because the kernel was using the frame.
    pub install_busy: u64,
    /// Pages freed on their way out, before they were written.
    pub died_before_write: u64,
    /// Device reads that failed or came too late.
    pub read_errors: u64,
    /// Device writes that failed or came too late.
    pub write_errors: u64,
    /// Pages whose content was not what had been written.
    pub checksum_errors: u64,
    /// Pages lost: touching them is SIGBUS.
    pub poisoned: u64,
    /// Chunks of 2 MiB handed to the kernel to fill.
    pub chunks_opened: u64,
    /// Chunks taken back under pressure.
    pub chunks_closed: u64,
    /// Panics that a handler thread survived.
    pub panics: u64,
}

impl Stats {
    pub(super) fn of(pager: &Pager, committed: PageCount) -> Stats {
        let counters = &pager.counters;
        let page = pager.page_bytes as u64;
        Stats {
            limit_bytes: pager.budget.limit().0,
            resident_bytes: pager.budget.charged().0.saturating_sub(pager.open_but_absent().0),
            charged_bytes: pager.budget.charged().0,
            resident_bytes_max: pager.budget.charged_max().0,
            committed_bytes: committed.0 * page,
            stored_bytes: pager.slots.in_use().0 * page,
            page_bytes: page,
            faults_zero: counters.faults_zero.get(),
            faults_read: counters.faults_read.get(),
            faults_cooling: counters.faults_cooling.get(),
            faults_protect: counters.faults_protect.get(),
            faults_racing: counters.faults_racing.get(),
            faults_starved: counters.faults_starved.get(),
            pages_in: counters.pages_in.get(),
            pages_prefetched: counters.pages_prefetched.get(),
            pages_read_ahead: counters.pages_read_ahead.get(),
            pages_out: counters.pages_out.get(),
            bytes_read: counters.pages_in.get() * page,
            bytes_written: counters.pages_out.get() * page,
            evicted_clean: counters.evicted_clean.get(),
            evicted_zero: counters.evicted_zero.get(),
            evict_busy: counters.evict_busy.get(),
            install_busy: counters.install_busy.get(),
            died_before_write: counters.died_before_write.get(),
            read_errors: counters.read_errors.get(),
            write_errors: counters.write_errors.get(),
            checksum_errors: counters.checksum_errors.get(),
            poisoned: counters.poisoned.get(),
            chunks_opened: counters.chunks_opened.get(),
            chunks_closed: counters.chunks_closed.get(),
            panics: counters.panics.get(),
        }
    }
}
