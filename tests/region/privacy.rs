//! Where far data can be seen: core dumps, the device while it is in use, the device afterwards.
//!
//! Guards: G5, G10.

#![expect(unsafe_code, reason = "reads and writes far memory and stores through raw pointers")]

use crate::common::child::{case, run};
use crate::common::faulty::FaultyStore;
use crate::common::{bytes, mem_store, region, watchdog};
use farheap::region::{Advice, Install, Region, RegionConfig};
use farheap::store::{BlockStore, EncryptedStore, MemStore, Op, Request, Store, Wipe};
use farheap::{ByteCount, Error};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::time::Duration;

const PAGE: usize = 4096;
const PAGES: usize = 4096;
const PATTERN: u64 = 0x5EC2_E7DA_7A15_FA12;

fn config() -> RegionConfig {
    RegionConfig::new().limit(RegionConfig::LIMIT_MIN).span(ByteCount::gib(1))
}

/// Fills as many pages as there are with a pattern and evicts them.
fn fill(region: &Region) -> *mut u64 {
    let len = ByteCount((PAGES * PAGE) as u64);
    let base = region.map(len).expect("the span has room").cast::<u8>().as_ptr().cast::<u64>();
    for at in 0..PAGES * PAGE / 8 {
        // SAFETY: within the mapping.
        let word = unsafe { base.add(at) };
        // SAFETY: this test alone uses it.
        unsafe { word.write_volatile(PATTERN) };
    }
    region.advise(&[bytes(base.cast(), len)], Advice::PageOutNow).expect("the store has room");
    base
}

/// Asserts that all pages hold the pattern.
fn check(base: *const u64) {
    for at in (0..PAGES * PAGE / 8).step_by(64) {
        // SAFETY: within the mapping, which the caller made.
        let word = unsafe { base.add(at) };
        // SAFETY: nobody writes it.
        let seen = unsafe { word.read_volatile() };
        assert_eq!(seen, PATTERN, "word {at}");
    }
}

/// All bytes of a store, as words.
fn content(store: &dyn Store) -> Vec<u64> {
    let mut words = vec![0_u64; store.capacity().as_usize() / 8 + 512];
    let skip = words.as_ptr().align_offset(4096);
    let len = store.capacity().as_usize();
    let start = words[skip..].as_mut_ptr().cast::<u8>();
    // SAFETY: the vector has a page more than the capacity; nobody uses the store.
    unsafe { store.read_now(0, slice_from_raw_parts_mut(start, len)) }.expect("read back");
    words[skip..skip + len / 8].to_vec()
}

fn words_of_pattern(store: &dyn Store) -> usize {
    content(store).iter().filter(|word| **word == PATTERN).count()
}

#[test]
fn the_device_holds_plain_text_only_without_encryption() {
    let _watchdog = watchdog("plain text", Duration::from_secs(120));
    for encrypt in [false, true] {
        let store = mem_store(ByteCount::mib(64));
        let Some(region) = region(config().encrypt(encrypt), store.clone()) else {
            return;
        };
        let base = fill(&region);
        let plain = words_of_pattern(&*store);
        // A page that left before it was full is there twice.
        let is_right = if encrypt { plain == 0 } else { plain >= PAGES * PAGE / 8 };
        assert!(is_right, "{plain} words, encrypt: {encrypt}");
        assert!(content(&*store).iter().any(|word| *word != 0), "nothing was written");
        check(base);
        let stats = region.stats();
        assert!(stats.pages_out >= PAGES as u64 && stats.pages_in > 0, "{stats:?}");
    }
}

#[test]
fn encrypted_pages_come_back_by_every_path() {
    let _watchdog = watchdog("sizes", Duration::from_secs(120));
    for install in [Install::Auto, Install::Copy] {
        let config = config().install(install).encrypt(true);
        let store = BlockStore::temporary(None, Some(ByteCount::mib(64))).expect("a file");
        let Some(region) = region(config, Arc::new(store)) else { return };
        let base = fill(&region);
        check(base);
        assert_eq!(region.stats().checksum_errors, 0);
    }
}

#[test]
fn touching_a_page_that_was_tampered_with_is_sigbus_and_not_wrong_data() {
    const TEST: &str = "touching_a_page_that_was_tampered_with_is_sigbus_and_not_wrong_data";
    if case(TEST).is_some() {
        return touch_tampered();
    }
    let ended = run(TEST, "", |_| ());
    if ended.show_skips() {
        return;
    }
    ended.expect_signal(&[libc::SIGBUS]);
    ended.expect_said(&["untouched pages are fine"]);
    ended.expect_said(&["checksum mismatch in slot"]);
    assert!(!ended.text.contains("read back"), "{}", ended.text);
}

fn touch_tampered() {
    let _watchdog = watchdog("tampered", Duration::from_secs(60));
    let store = mem_store(ByteCount::mib(64));
    let faulty = FaultyStore::new(store.clone(), 1);
    let control = faulty.control();
    // Without checksums: the tag alone tells.
    let config = config().encrypt(true).checksum(false).deadline(Duration::from_secs(2));
    let Some(region) = region(config, Arc::new(faulty)) else { return };
    let base = fill(&region);
    check(base);
    region.evict_all().expect("the store has room");
    println!("untouched pages are fine");
    // SAFETY: encrypted content is verified.
    unsafe { control.corrupt_fraction(1_000_000) };
    // SAFETY: in the mapping; the read ends the process.
    let seen = unsafe { base.read_volatile() };
    println!("read back {seen:#x}");
}

#[test]
fn a_block_that_was_changed_or_moved_or_is_old_does_not_open() {
    let memory: Arc<dyn Store> = Arc::new(MemStore::new(ByteCount::mib(1)).expect("memory"));
    let sealed = EncryptedStore::new(memory.clone()).expect("a key");
    let mut page = Page([1; 4096]);
    let old = {
        transfer(&sealed, Op::Write, 0, &mut page).expect("written");
        transfer(&sealed, Op::Write, 4096, &mut page).expect("written");
        let mut raw = Page([0; 4096]);
        transfer(&*memory, Op::Read, 0, &mut raw).expect("read");
        raw
    };
    let corrupt = |slot| Err(Error::Corrupt { store: memory.name(), slot });
    let mut moved = Page(old.0);
    transfer(&*memory, Op::Write, 4096, &mut moved).expect("written below");
    assert_eq!(transfer(&sealed, Op::Read, 4096, &mut page), corrupt(1), "another block's bytes");
    transfer(&sealed, Op::Write, 0, &mut Page([2; 4096])).expect("overwritten");
    transfer(&*memory, Op::Write, 0, &mut Page(old.0)).expect("replayed below");
    assert_eq!(transfer(&sealed, Op::Read, 0, &mut page), corrupt(0), "an older write's bytes");
    assert_eq!(transfer(&sealed, Op::Read, 8192, &mut page), corrupt(2), "never written");
    transfer(&sealed, Op::Write, 8192, &mut Page([3; 4096])).expect("written");
    transfer(&sealed, Op::Read, 8192, &mut page).expect("untouched");
    assert!(page.0 == [3; 4096]);
    // SAFETY: nobody else uses the store.
    unsafe { sealed.discard(8192, 4096) }.expect("discard");
    assert_eq!(transfer(&sealed, Op::Read, 8192, &mut page), corrupt(2), "discarded");
}

#[repr(align(4096))]
struct Page([u8; 4096]);

fn transfer(store: &dyn Store, op: Op, offset: u64, page: &mut Page) -> Result<(), Error> {
    let mut queue = store.open_queue(1).expect("queue");
    let segments = [slice_from_raw_parts_mut(page.0.as_mut_ptr(), 4096)];
    // SAFETY: the page is borrowed until the completion has been reported below.
    assert!(unsafe { queue.push(Request { token: 9, op, offset, segments: &segments }) });
    let mut outcome = None;
    while outcome.is_none() {
        let mut done = |_, result| outcome = Some(result);
        queue.wait(Duration::from_secs(60), &mut done).expect("wait");
    }
    outcome.expect("looped until there was one")
}

#[test]
fn more_and_larger_writes_than_there_are_bounce_buffers_pass_through() {
    const SEGMENT: usize = 4 << 20;
    const WRITES: usize = 12;
    let memory: Arc<dyn Store> = Arc::new(MemStore::new(ByteCount::mib(64)).expect("memory"));
    let sealed = EncryptedStore::new(memory).expect("a key");
    let mut queue = sealed.open_queue(WRITES as u32).expect("queue");
    let mut buffer = vec![0_u8; SEGMENT * WRITES + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    let bytes = &mut buffer[skip..skip + SEGMENT * WRITES];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 977) as u8);
    for n in 0..WRITES {
        let segments = [slice_from_raw_parts_mut(bytes[n * SEGMENT..].as_mut_ptr(), SEGMENT)];
        let offset = (n * SEGMENT) as u64;
        let request = Request { token: n as u64, op: Op::Write, offset, segments: &segments };
        // SAFETY: the buffer is left alone until all completions are in.
        assert!(unsafe { queue.push(request) }, "the queue has room for {WRITES}");
    }
    assert_eq!(queue.in_flight(), WRITES as u32);
    let mut tokens = Vec::new();
    while queue.in_flight() > 0 {
        let mut done = |token, result: Result<(), Error>| {
            result.expect("memory does not fail");
            tokens.push(token);
        };
        queue.wait(Duration::from_secs(60), &mut done).expect("wait");
    }
    tokens.sort_unstable();
    assert_eq!(tokens, (0..WRITES as u64).collect::<Vec<_>>());
    let mut back = vec![0_u8; SEGMENT * WRITES];
    // SAFETY: the buffer is this test's.
    unsafe { sealed.read_now(0, slice_from_raw_parts_mut(back.as_mut_ptr(), back.len())) }
        .expect("read back");
    assert!(back == *bytes);
}

#[test]
fn the_store_is_wiped_as_configured_when_the_region_goes() {
    let _watchdog = watchdog("wipe", Duration::from_secs(120));
    for encrypt in [false, true] {
        for (wipe, wiped) in [(Wipe::Off, false), (Wipe::Discard, true), (Wipe::Zero, true)] {
            let store = mem_store(ByteCount::mib(32));
            let config = config().wipe(wipe).encrypt(encrypt);
            let Some(region) = region(config, store.clone()) else { return };
            fill(&region);
            drop(region);
            let left = content(&*store).iter().filter(|word| **word != 0).count();
            assert_eq!(left == 0, wiped, "{wipe:?}: {left} words are left, encrypt: {encrypt}");
        }
    }
}

#[test]
fn zeroing_a_file_overwrites_just_the_range() {
    let store = BlockStore::temporary(None, Some(ByteCount::mib(4))).expect("a file");
    for offset in [0, 4096, (3 << 20) + 4096, (4 << 20) - 4096] {
        transfer(&store, Op::Write, offset, &mut Page([7; 4096])).expect("written");
    }
    // SAFETY: nobody else uses the store.
    unsafe { store.zero(4096, 3 << 20) }.expect("zeroed");
    let words = content(&store);
    let ones = |page: usize| words[page * 512..(page + 1) * 512].iter().all(|word| *word != 0);
    assert!(ones(0) && ones(769) && ones(1023), "beside the range");
    assert!(words[512..769 * 512].iter().all(|word| *word == 0), "in the range");
}

/// Whether each mapping that overlaps a range has a flag in `VmFlags` of `/proc/self/smaps`.
fn has_flag(start: usize, len: usize, flag: &str) -> bool {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("/proc is there");
    let mut inside = false;
    let mut all = None;
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((from, to)) = range.filter(|_| !line.contains("VmFlags"))
            && let (Ok(from), Ok(to)) =
                (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
        {
            inside = from < start + len && to > start;
        }
        if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = flags.split_whitespace().any(|word| word == flag);
            all = Some(all.unwrap_or(true) && has);
        }
    }
    all.expect("the range is mapped")
}

#[test]
fn far_memory_is_not_in_core_dumps() {
    let _watchdog = watchdog("dumps", Duration::from_secs(60));
    let Some(region) = region(config(), mem_store(ByteCount::mib(64))) else { return };
    let base = fill(&region);
    check(base);
    assert!(has_flag(base as usize, PAGES * PAGE, "dd"));
}
