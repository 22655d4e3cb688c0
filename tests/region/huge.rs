//! A tier of 2 MiB pages keeps its frames as transparent huge pages, in memory and through the
//! device and back.
//!
//! Guards: the interface.
#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

use crate::common::{mem_store, region, watchdog};
use farheap::ByteCount;
use farheap::region::RegionConfig;
use std::time::Duration;

const PAGE: usize = 2 << 20;

/// Bytes of huge pages and of all pages in the mappings that overlap a range.
fn huge_and_resident(start: usize, len: usize) -> (u64, u64) {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("Linux");
    let (mut huge, mut resident, mut inside) = (0, 0, false);
    let number = |line: &str| -> u64 {
        let kib = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        kib.map_or(0, |kib: u64| kib << 10)
    };
    for line in smaps.lines() {
        let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
        let bound = |text: &str| usize::from_str_radix(text, 16).ok();
        if let Some((Some(from), Some(to))) = bounds.map(|(from, to)| (bound(from), bound(to))) {
            inside = from < start + len && start < to;
        } else if inside && line.starts_with("AnonHugePages:") {
            huge += number(line);
        } else if inside && line.starts_with("Rss:") {
            resident += number(line);
        }
    }
    (huge, resident)
}

/// Percent of plain memory of `len` bytes that is in huge pages here and now, when huge pages are
/// asked for: what the kernel can give, its memory being as fragmented as it is.
#[expect(clippy::disallowed_methods, reason = "what the kernel gives without the library")]
fn huge_percent_of_plain_memory(len: usize) -> u64 {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    // SAFETY: the mapping above.
    let advised = unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
    assert_eq!(advised, 0, "{}", std::io::Error::last_os_error());
    for offset in (0..len).step_by(4096) {
        let byte = start.wrapping_byte_add(offset).cast::<u8>();
        // SAFETY: inside the mapping above, which nobody else knows.
        unsafe { byte.write_volatile(1) };
    }
    let (huge, resident) = huge_and_resident(start as usize, len);
    // SAFETY: the mapping above, which is not used any more.
    let unmapped = unsafe { libc::munmap(start, len) };
    assert_eq!(unmapped, 0, "{}", std::io::Error::last_os_error());
    100 * huge / resident
}

/// How often the kernel had no huge page for a fault that wanted one, on the whole machine.
fn refusals() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").expect("Linux");
    let value = |line: &str| line.strip_prefix("thp_fault_fallback ")?.parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

#[test]
fn pages_of_two_mebibytes_are_huge_pages_also_after_a_trip_to_the_device() {
    let _watchdog = watchdog("huge", Duration::from_secs(120));
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if !enabled.is_ok_and(|text| !text.contains("[never]")) {
        println!("skipped: transparent huge pages are switched off");
        return;
    }
    let plain = huge_percent_of_plain_memory(128 << 20);
    if plain < 50 {
        println!("skipped: the kernel has huge pages for {plain} % of plain memory only");
        return;
    }
    let refused_before = refusals();
    let page = ByteCount(PAGE as u64);
    let config = RegionConfig::new().page(page).limit(ByteCount::mib(128));
    let Some(region) = region(config, mem_store(ByteCount::mib(512))) else { return };
    let len = 64 * PAGE;
    let base = region.map(ByteCount(2 * len as u64)).expect("the span has room").as_ptr();
    let word = |page: usize| {
        assert!(page < 128);
        // SAFETY: inside the mapping, checked above.
        unsafe { base.add(page * PAGE) }.cast::<u64>()
    };
    for page in 0..128_usize {
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { word(page).write_volatile(page as u64 | 1 << 40) };
    }
    // On a busy machine a page now and then comes back in small pages, which the next pass mends.
    const PASSES: usize = 5;
    let mut seen = Vec::new();
    for _pass in 0..PASSES {
        for page in 0..128_usize {
            // SAFETY: as above.
            let value = unsafe { word(page).read_volatile() };
            assert_eq!(value, page as u64 | 1 << 40);
        }
        let (huge, resident) = huge_and_resident(base as usize, 2 * len);
        // A machine whose memory is fragmented at the moment is not to blame on the pages' way.
        let refused = (refusals() - refused_before) * PAGE as u64;
        println!("{huge} of {resident} bytes in huge pages, {refused} refused");
        seen.push((huge, resident, refused));
        if (huge + refused) * 100 >= resident * (plain * 4 / 5) {
            assert!(region.stats().pages_in > 30, "most pages came back from the device");
            return;
        }
    }
    panic!("huge, resident, refused bytes: {seen:?}; {plain} % of plain memory are huge pages");
}
