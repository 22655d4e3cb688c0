//! What a region has done: a snapshot of plain numbers.

use crate::base::units::{ByteCount, PageCount};
use crate::paging::pager::Pager;
use std::fmt;

/// Statistics of one region since its start. Counts only grow; sizes are of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Most bytes that may be resident.
    pub limit_bytes: u64,
    /// Bytes resident now: mapped pages, staging frames, and the tables that describe them.
    pub resident_bytes: u64,
    /// Bytes charged against the limit now: resident, the untouched rest of open chunks, and one page
    /// that is kept for copies.
    pub charged_bytes: u64,
    /// Largest number of charged bytes there ever was; resident bytes never exceeded it.
    pub resident_bytes_max: u64,
    /// Of these, bytes of tables: page words, the policy's lists, slot hashes, page tables.
    /// In proportion to the pages and slots in use; what is left of others is given back within
    /// a second or when memory is short.
    pub metadata_bytes: u64,
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
    /// Pages read because `prefetch` or `fetch_many` asked for them.
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
    /// Pages freed while they were mapped and the device had no copy of them: their data never
    /// cost a write.
    pub freed_unwritten: u64,
    /// Pages freed on their way out, before a write was started; of some the device had a copy.
    pub died_before_write: u64,
    /// Pages freed while they were being written: a write in vain, counted in `pages_out` too.
    pub died_during_write: u64,
    /// Pages read ahead that were then seen to be used: touched while still being read, written,
    /// or touched on their way out. A page that is only read while it is mapped leaves no trace, so
    /// this is a lower bound of the useful ones.
    pub prefetch_hits: u64,
    /// Pages read ahead and evicted without a trace of use: an upper bound of the useless ones.
    /// What is neither here nor in `prefetch_hits` is still resident, or was freed.
    pub prefetch_unseen: u64,
    /// Read requests at the device now.
    pub reads_in_flight: u64,
    /// Most read requests that were at the device at once.
    pub reads_in_flight_max: u64,
    /// Write requests at the device now.
    pub writes_in_flight: u64,
    /// Most write requests that were at the device at once.
    pub writes_in_flight_max: u64,
    /// Times a handler looked for the device's answer instead of sleeping at once.
    pub polls: u64,
    /// Of these, times it had something to do before it gave up.
    pub poll_hits: u64,
    /// Times that handlers offered their processor to other threads between two looks.
    pub poll_yields: u64,
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
    /// Of those, chunks that left memory whole.
    pub chunks_evicted: u64,
    /// Of the chunks opened, those that took memory which the evictor had ready.
    pub chunks_reused: u64,
    /// Chunks of 2 MiB that were read ahead and mapped as one.
    pub chunks_read: u64,
    /// Panics that a handler thread survived.
    pub panics: u64,
}

impl Stats {
    pub(in crate::paging) fn of(pager: &Pager, committed: PageCount) -> Stats {
        let counters = pager.counters();
        let page = pager.page_bytes() as u64;
        // Charged, and no memory.
        let absent = pager.open_but_absent().0 + pager.pool().copy_charge();
        Stats {
            limit_bytes: pager.budget().limit().0,
            resident_bytes: pager.budget().charged().0.saturating_sub(absent),
            charged_bytes: pager.budget().charged().0,
            metadata_bytes: pager.tables().bytes().0,
            resident_bytes_max: pager.budget().charged_max().0,
            committed_bytes: committed.0 * page,
            stored_bytes: pager.slots().map().in_use().0 * page,
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
            freed_unwritten: counters.freed_unwritten.get(),
            died_before_write: counters.died_before_write.get(),
            died_during_write: counters.died_during_write.get(),
            prefetch_hits: counters.prefetch_hits.get(),
            prefetch_unseen: counters.prefetch_unseen.get(),
            reads_in_flight: counters.reads_in_flight.get(),
            reads_in_flight_max: counters.reads_in_flight.max(),
            writes_in_flight: counters.writes_in_flight.get(),
            writes_in_flight_max: counters.writes_in_flight.max(),
            polls: counters.polls.get(),
            poll_hits: counters.poll_hits.get(),
            poll_yields: counters.poll_yields.get(),
            read_errors: counters.read_errors.get(),
            write_errors: counters.write_errors.get(),
            checksum_errors: counters.checksum_errors.get(),
            poisoned: counters.poisoned.get(),
            chunks_opened: counters.chunks_opened.get(),
            chunks_closed: counters.chunks_closed.get(),
            chunks_evicted: counters.chunks_evicted.get(),
            chunks_reused: counters.chunks_reused.get(),
            chunks_read: counters.chunks_read.get(),
            panics: counters.panics.get(),
        }
    }
}

impl fmt::Display for Stats {
    /// A table for people, one subject a line; programs use the fields.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes| ByteCount(bytes).to_string();
        let ahead = self.pages_prefetched + self.pages_read_ahead;
        let share = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
        writeln!(
            f,
            "resident      {} of {} (most {}), pages of {}",
            size(self.resident_bytes),
            size(self.limit_bytes),
            size(self.resident_bytes_max),
            size(self.page_bytes),
        )?;
        writeln!(
            f,
            "in use        {} of far memory, {} of the device",
            size(self.committed_bytes),
            size(self.stored_bytes),
        )?;
        writeln!(
            f,
            "faults        {} zero, {} read, {} cooling, {} first write; {} raced, {} starved",
            self.faults_zero,
            self.faults_read,
            self.faults_cooling,
            self.faults_protect,
            self.faults_racing,
            self.faults_starved,
        )?;
        let in_flight = |now, max| format!("{now} requests in flight (most {max})");
        writeln!(
            f,
            "device reads  {} pages, {}; {}",
            self.pages_in,
            size(self.bytes_read),
            in_flight(self.reads_in_flight, self.reads_in_flight_max),
        )?;
        writeln!(
            f,
            "device writes {} pages, {}; {}",
            self.pages_out,
            size(self.bytes_written),
            in_flight(self.writes_in_flight, self.writes_in_flight_max),
        )?;
        writeln!(
            f,
            "not written   {} clean, {} zero; freed: {} resident, {} on the way out, {} in vain",
            self.evicted_clean,
            self.evicted_zero,
            self.freed_unwritten,
            self.died_before_write,
            self.died_during_write,
        )?;
        writeln!(
            f,
            "read ahead    {ahead} pages, {} seen used ({:.0} %), {} left unseen ({:.0} %)",
            self.prefetch_hits,
            share(self.prefetch_hits, ahead),
            self.prefetch_unseen,
            share(self.prefetch_unseen, ahead),
        )?;
        let rare = [
            (self.evict_busy, "evictions refused by the kernel"),
            (self.install_busy, "installs by copy after all"),
            (self.read_errors, "failed reads"),
            (self.write_errors, "failed writes"),
            (self.checksum_errors, "checksum errors"),
            (self.poisoned, "pages lost"),
            (self.panics, "handler panics"),
        ];
        let mut comma = "trouble       ";
        for (count, what) in rare.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{comma}{count} {what}")?;
            comma = ", ";
        }
        if comma == ", " { writeln!(f) } else { writeln!(f, "{comma}none") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_what_was_read_ahead_count_streams_and_requests() {
        let (pages_prefetched, pages_read_ahead) = (10, 30);
        let (prefetch_hits, prefetch_unseen) = (30, 4);
        let none = Stats::default();
        let some = Stats {
            pages_prefetched,
            pages_read_ahead,
            prefetch_hits,
            prefetch_unseen,
            ..Stats::default()
        };
        let line = "read ahead    40 pages, 30 seen used (75 %), 4 left unseen (10 %)";
        assert!(some.to_string().contains(line), "{some}");
        let line = "read ahead    0 pages, 0 seen used (0 %), 0 left unseen (0 %)";
        assert!(none.to_string().contains(line), "{none}");
    }
}
