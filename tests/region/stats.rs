//! Each statistic is moved by what it counts.
//!
//! Guards: the interface.

#![expect(unsafe_code, reason = "reads, writes and discards far memory through raw pointers")]

use crate::common::faulty::FaultyStore;
use crate::common::{bytes, eventually, mem_store, region, watchdog};
use farheap::ByteCount;
use farheap::region::{Advice, Install, Region, RegionConfig, Stats};
use farheap::store::MemStore;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// From one page that is used to the next: no two are of one cluster.
const PAGE: usize = 65536;

/// A region of which 64 pages are used.
struct Arena {
    region: Region,
    base: *mut u8,
}

impl Arena {
    fn new(install: Install) -> Option<Arena> {
        let config = RegionConfig::new()
            .limit(RegionConfig::LIMIT_MIN)
            .install(install)
            .span(ByteCount::gib(1))
            .readahead(false);
        let region = region(config, mem_store(ByteCount::mib(64)))?;
        let base = region
            .map(ByteCount((64 * PAGE) as u64))
            .expect("the span has room")
            .cast::<u8>()
            .as_ptr();
        Some(Arena { region, base })
    }

    fn page(&self, page: usize) -> *mut u8 {
        assert!(page < 64);
        // SAFETY: within the mapping of 64 pages.
        unsafe { self.base.add(page * PAGE) }
    }

    fn write(&self, page: usize, byte: u8) {
        // SAFETY: in the mapping, which this test alone uses.
        unsafe { self.page(page).write_volatile(byte) };
    }

    fn read(&self, page: usize) -> u8 {
        // SAFETY: as above.
        unsafe { self.page(page).read_volatile() }
    }

    fn evict(&self, page: usize) {
        self.region
            .advise(&[bytes(self.page(page), ByteCount(PAGE as u64))], Advice::PageOutNow)
            .expect("the store has room");
    }

    fn discard(&self, page: usize) {
        // SAFETY: the test needs the page's content no more.
        unsafe { self.region.discard(bytes(self.page(page), ByteCount(PAGE as u64)).cast_mut()) }
            .expect("inside");
    }

    /// Reads a page ahead and waits until it is in.
    fn prefetch(&self, page: usize) {
        let before = self.stats().pages_in;
        self.region
            .advise(&[bytes(self.page(page), ByteCount(PAGE as u64))], Advice::WillNeed)
            .expect("inside");
        let started = Instant::now();
        while self.stats().pages_in == before {
            assert!(started.elapsed() < crate::common::PATIENCE, "the page does not come in");
            std::thread::yield_now();
        }
    }

    fn stats(&self) -> Stats {
        self.region.stats()
    }

    /// The statistics once they agree with `expected`: a fault is counted just after its thread
    /// was woken. What they are at the end, if they never do.
    fn stats_when(&self, expected: impl Fn(&Stats) -> bool) -> Stats {
        let started = Instant::now();
        loop {
            let stats = self.stats();
            if expected(&stats) || started.elapsed() > crate::common::PATIENCE {
                return stats;
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn faults_count_by_kind() {
    let _watchdog = watchdog("faults", Duration::from_secs(60));
    let Some(arena) = Arena::new(Install::Copy) else { return };
    arena.write(0, 1);
    assert_eq!(arena.read(1), 0);
    let stats = arena.stats_when(|stats| stats.faults_zero == 2);
    assert_eq!((stats.faults_zero, stats.faults_read, stats.pages_in), (2, 0, 0));
    arena.evict(0);
    assert_eq!(arena.read(0), 1);
    let stats = arena.stats_when(|stats| stats.faults_read == 1);
    assert_eq!((stats.faults_zero, stats.faults_read, stats.pages_in), (2, 1, 1));
    assert_eq!(stats.bytes_read.0, 4096);
    // A page that was read in is write-protected with COPY: the first write is a fault.
    assert_eq!(stats.faults_protect, 0);
    arena.write(0, 2);
    arena.write(0, 3);
    assert_eq!(arena.stats_when(|stats| stats.faults_protect == 1).faults_protect, 1);
}

#[test]
fn evictions_count_by_what_they_needed() {
    let _watchdog = watchdog("evictions", Duration::from_secs(60));
    let Some(arena) = Arena::new(Install::Auto) else { return };
    arena.write(0, 1);
    arena.evict(0);
    let stats = arena.stats();
    assert_eq!((stats.pages_out, stats.evicted_clean, stats.evicted_zero), (1, 0, 0));
    assert_eq!((stats.bytes_written.0, stats.stored_bytes.0), (4096, 4096));
    assert_eq!(arena.read(0), 1);
    arena.evict(0);
    let stats = arena.stats();
    assert_eq!((stats.pages_out, stats.evicted_clean, stats.evicted_zero), (1, 1, 0));
    assert_eq!(arena.read(1), 0);
    arena.evict(1);
    let stats = arena.stats();
    assert_eq!((stats.pages_out, stats.evicted_clean, stats.evicted_zero), (1, 1, 1));
}

#[test]
fn data_that_dies_unwritten_is_counted() {
    let _watchdog = watchdog("elision", Duration::from_secs(60));
    let Some(arena) = Arena::new(Install::Auto) else { return };
    arena.write(0, 1);
    arena.write(1, 1);
    arena.evict(1);
    assert_eq!(arena.read(1), 1);
    arena.discard(0);
    arena.discard(1);
    let stats = arena.stats();
    assert_eq!(stats.discarded_dirty, 1, "page 1 had been written");
    assert_eq!((stats.died_before_write, stats.died_during_write), (0, 0));
}

#[test]
fn a_page_freed_while_it_is_being_written_is_a_write_in_vain() {
    let _watchdog = watchdog("in vain", Duration::from_secs(60));
    let page = ByteCount(PAGE as u64);
    let faulty = FaultyStore::new(Arc::new(MemStore::new(ByteCount::mib(64)).expect("memory")), 1);
    let control = faulty.control();
    let config = RegionConfig::new().limit(RegionConfig::LIMIT_MIN).span(ByteCount::gib(1));
    let Some(region) = region(config, Arc::new(faulty)) else { return };
    let ptr = region.map(page).expect("room").cast::<u8>().as_ptr();
    // SAFETY: mapped above.
    unsafe { ptr.write_volatile(1) };
    control.pause();
    std::thread::scope(|scope| {
        let address = ptr as usize;
        let region = &region;
        let evicting = scope
            .spawn(move || region.advise(&[bytes(address as *const u8, page)], Advice::PageOutNow));
        // It is held there; what is discarded too early fails below.
        eventually(|| region.stats().writes_in_flight > 0);
        // SAFETY: nobody needs the page.
        unsafe { region.discard(bytes(ptr, page).cast_mut()) }.expect("inside");
        control.release();
        evicting.join().expect("no panic").expect("the store has room");
    });
    let stats = region.stats();
    assert_eq!((stats.died_during_write, stats.pages_out, stats.stored_bytes.0), (1, 1, 0));
    assert_eq!((stats.writes_in_flight, stats.writes_in_flight_max), (0, 1));
}

#[test]
fn pages_read_ahead_count_as_used_once_written_and_as_unseen_when_not() {
    let _watchdog = watchdog("ahead", Duration::from_secs(60));
    for install in [Install::Auto, Install::Copy] {
        let Some(arena) = Arena::new(install) else { return };
        (0..3).for_each(|page| arena.write(page, 1));
        (0..3).for_each(|page| arena.evict(page));
        (0..3).for_each(|page| arena.prefetch(page));
        arena.write(0, 2);
        assert_eq!(arena.read(1), 1, "leaves no trace");
        (0..3).for_each(|page| arena.evict(page));
        let stats = arena.stats();
        assert_eq!((stats.pages_prefetched, stats.faults_read), (3, 0), "{install:?}");
        assert_eq!((stats.prefetch_hits, stats.prefetch_unused), (1, 2), "{install:?}");
        assert!(stats.reads_in_flight == 0 && stats.reads_in_flight_max >= 1);
    }
}

/// Faults that a handler answered, a chunk that was opened for one included.
fn faults_of(stats: &Stats) -> u64 {
    stats.faults_zero + stats.faults_read + stats.faults_racing + stats.chunks_opened
}

#[test]
fn latencies_count_what_they_time() {
    let _watchdog = watchdog("latencies", Duration::from_secs(60));
    let Some(arena) = Arena::new(Install::Auto) else { return };
    (0..8).for_each(|page| arena.write(page, 1));
    (0..8).for_each(|page| arena.evict(page));
    (0..8).for_each(|page| assert_eq!(arena.read(page), 1));
    let stats = arena.stats_when(|stats| {
        let faults = faults_of(stats);
        stats.faults_read == 8 && arena.region.latencies().fault.count == faults
    });
    let latencies = arena.region.latencies();
    let faults = faults_of(&stats);
    assert_eq!(latencies.fault.count, faults, "{stats:?}");
    assert_eq!((latencies.read.count, latencies.evict.count), (8, 8));
    assert_eq!(latencies.write.count, 8);
    for latency in [latencies.fault, latencies.read, latencies.write, latencies.evict] {
        assert!(0 < latency.p50 && latency.p50 <= latency.p90 && latency.p90 <= latency.p99);
        assert!(latency.p99 <= latency.p99_9 && latency.p99_9 <= latency.max);
    }
    println!("{stats}{latencies}");
    let table = stats.to_string();
    assert!(table.contains(" zero, 8 read") && table.contains("trouble       none"), "{table}");
    assert!(latencies.to_string().contains("device write"));
}

#[test]
fn fresh_data_that_is_read_back_in_order_is_written_once() {
    const MIB: usize = 1 << 20;
    let _watchdog = watchdog("read back", Duration::from_secs(120));
    let (limit, data) = (64 * MIB, 128 * MIB);
    let config = RegionConfig::new().limit(ByteCount(limit as u64));
    let Some(region) = region(config, mem_store(ByteCount((2 * data) as u64))) else { return };
    let base =
        region.map(ByteCount(data as u64)).expect("room").cast::<u8>().as_ptr().cast::<usize>();
    // SAFETY: in the mapping, which this test alone uses.
    let word = |at: usize| unsafe { base.add(at) };
    let words = || (0..data / 8).step_by(4096 / 8);
    // SAFETY: as above.
    words().for_each(|at| unsafe { word(at).write_volatile(at + 1) });
    let written = region.stats().bytes_written.0;
    assert!(written >= (data - limit) as u64, "{written} of {data} are out");
    // SAFETY: as above.
    words().for_each(|at| assert_eq!(unsafe { word(at).read_volatile() }, at + 1));
    let stats = region.stats();
    println!(
        "{written} bytes written first, {} in all, {} read",
        stats.bytes_written.0, stats.bytes_read.0
    );
    // How much of what came last is still in memory when the reader arrives there depends on when the
    // evictor runs: `evict::arrivals` has what it decides, bench `faults` what that is worth.
    assert!(stats.bytes_written.0 <= data as u64, "{stats}");
}

/// A region of pages of 4 KiB with 16 of them written, and evicted at once.
fn evicted_together(install: Install) -> Option<(Region, *mut u8)> {
    let config =
        RegionConfig::new().limit(RegionConfig::LIMIT_MIN).install(install).span(ByteCount::gib(1));
    let region = region(config, mem_store(ByteCount::mib(64)))?;
    let base = region.map(ByteCount::kib(64)).expect("the span has room").cast::<u8>().as_ptr();
    for n in 0..16 {
        // SAFETY: in the mapping, which this test alone uses.
        unsafe { base.wrapping_add(n * 4096).write_volatile(n as u8) };
    }
    region
        .advise(&[bytes(base, ByteCount::kib(64))], Advice::PageOutNow)
        .expect("the store has room");
    Some((region, base))
}

/// Reads pages of 4 KiB. `expected` faults have read pages then: they are counted just after their threads were woken.
fn read_pages(region: &Region, base: *mut u8, pages: &[usize], expected: (u64, u64)) {
    for &n in pages {
        // SAFETY: in the mapping, which this test alone uses.
        assert_eq!(unsafe { base.wrapping_add(n * 4096).read_volatile() }, n as u8);
    }
    let counted = || (region.stats().faults_read, region.stats().pages_in);
    assert!(eventually(|| counted() == expected), "{:?} after {pages:?}", counted());
}

#[test]
fn pages_that_left_together_come_back_together_while_few_others_have_left() {
    let _watchdog = watchdog("together", Duration::from_secs(60));
    let Some((region, base)) = evicted_together(Install::Auto) else { return };
    let page_out = |from, len| {
        region.advise(&[bytes(from, len)], Advice::PageOutNow).expect("the store has room");
    };
    read_pages(&region, base, &[5], (1, 4));
    // Its neighbours are there.
    read_pages(&region, base, &[4, 6, 7], (1, 4));
    // What faulted last is another cluster: of one that faults twice in a row all comes in.
    read_pages(&region, base, &[9], (2, 8));
    page_out(base, ByteCount::kib(64));
    read_pages(&region, base, &[5], (3, 12));
    page_out(base, ByteCount::kib(64));
    let others = region.map(ByteCount::mib(1)).expect("the span has room").cast::<u8>().as_ptr();
    for n in 0..256 {
        // SAFETY: in the mapping, which this test alone uses.
        unsafe { others.wrapping_add(n * 4096).write_volatile(1) };
    }
    page_out(others, ByteCount::mib(1));
    // Alone: it was read before, and more than a sixteenth of the limit has left since.
    read_pages(&region, base, &[9], (4, 13));
}

#[test]
fn pages_that_are_written_in_order_fault_less_than_once_each() {
    let _watchdog = watchdog("in order", Duration::from_secs(60));
    let Some((region, base)) = evicted_together(Install::Copy) else { return };
    // Protected, with its neighbours.
    read_pages(&region, base, &[5], (1, 4));
    for n in 4..8 {
        // SAFETY: in the mapping, which this test alone uses.
        unsafe { base.wrapping_add(n * 4096).write_volatile(n as u8 + 1) };
    }
    assert!(eventually(|| region.stats().faults_protect >= 2), "{:?}", region.stats());
    // The second has opened what follows.
    assert_eq!(region.stats().faults_protect, 2);
}
