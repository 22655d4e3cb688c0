//! What counts against a region's limit: pinned pages, tables.

#![expect(unsafe_code, reason = "reads and writes far memory")]

mod common;

use common::child::{case, run};
use common::{mem_store, watchdog};
use farheap::region::{Region, RegionConfig};
use farheap::tier::manager::{MemoryManager, Mode};
use farheap::{ByteCount, Error};
use std::time::Duration;

const HANG: Duration = Duration::from_secs(240);
const PAGE: usize = 4096;

/// A region alone, or `None` with the reason printed.
fn region(config: RegionConfig, store: ByteCount) -> Option<Region> {
    let config = RegionConfig { span: ByteCount::gib(64), ..config };
    match Region::create(config, mem_store(store)) {
        Ok(region) => Some(region),
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("region: {error}"),
    }
}

fn small_pages() -> RegionConfig {
    RegionConfig {
        limit: ByteCount::mib(8),
        page: ByteCount(PAGE as u64),
        ..RegionConfig::default()
    }
}

#[test]
fn a_page_that_is_pinned_many_times_counts_once() {
    let _watch = watchdog("pins of one page", HANG);
    let Some(region) = region(small_pages(), ByteCount::mib(32)) else { return };
    let most = (8 << 20) / PAGE * 3 / 4;
    let data = region.map(ByteCount((2 * most * PAGE) as u64)).expect("mapped");
    let byte = |page: usize| data.as_ptr().wrapping_add(page * PAGE);
    for _ in 0..255 {
        region.pin(byte(0), ByteCount(1)).expect("one page, many pins");
    }
    let error = region.pin(byte(0), ByteCount(1)).expect_err("its pins are counted in 8 bits");
    assert!(error.to_string().contains("255 pins"), "{error}");
    // All but one of the pages that may be pinned are left, and pinning them again costs nothing.
    let rest = ByteCount(((most - 1) * PAGE) as u64);
    region.pin(byte(1), rest).expect("one page is pinned");
    region.pin(byte(1), rest).expect("pinned already");
    let error = region.pin(byte(most), ByteCount(1)).expect_err("one page too many");
    assert!(matches!(error, Error::LimitExceeded { .. }), "{error}");
    region.unpin(byte(1), rest).expect("pinned twice");
    region.pin(byte(most), ByteCount(1)).expect_err("still pinned once");
    region.unpin(byte(1), ByteCount(1)).expect("pinned once");
    region.pin(byte(most), ByteCount(1)).expect("in its place");
    // A discard ends pins.
    // SAFETY: nobody needs the contents.
    unsafe { region.discard(byte(0), ByteCount(PAGE as u64)) }.expect("mapped");
    region.pin(byte(most + 1), ByteCount(1)).expect("in its place");
    region.pin(byte(most + 2), ByteCount(1)).expect_err("as many as may be");
}

/// A control group with a memory limit, removed when dropped.
struct Group(std::path::PathBuf);

impl Group {
    /// `None` where none can be made.
    fn new(limit: ByteCount) -> Option<Group> {
        let name = format!("farheap-test-{}", std::process::id());
        let versions =
            [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        versions.into_iter().find_map(|(mount, file)| {
            let group = Group(std::path::Path::new(mount).join(&name));
            std::fs::create_dir(&group.0).ok()?;
            // Not created: only what the kernel offers.
            let mut file = std::fs::File::options().write(true).open(group.0.join(file)).ok()?;
            std::io::Write::write_all(&mut file, limit.get().to_string().as_bytes()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The child has ended, and so has its membership.
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_limit_above_the_control_groups_is_warned_of_at_the_start() {
    const NAME: &str = "a_limit_above_the_control_groups_is_warned_of_at_the_start";
    let Some(case) = case(NAME) else {
        let warning = "than the machine's memory";
        assert!(run(NAME, "machine", |_| ()).text.contains(warning));
        let Some(group) = Group::new(ByteCount::mib(256)) else {
            println!("skipped: no control group can be made here");
            return;
        };
        let warning = "that the process's control group has left";
        for (limit, warns) in [("64", false), ("512", true), ("manager", true)] {
            let procs = group.0.join("cgroup.procs");
            let ended = run(NAME, limit, |command| {
                command.env("FARHEAP_TEST_GROUP", procs);
            });
            ended.expect_success();
            assert_eq!(ended.text.contains(warning), warns, "{limit}: {}", ended.text);
        }
        return;
    };
    if let Some(procs) = std::env::var_os("FARHEAP_TEST_GROUP") {
        std::fs::write(procs, std::process::id().to_string()).expect("joins the group");
    }
    let limit = match case.as_str() {
        "machine" => ByteCount::gib(64 << 10),
        "manager" => {
            let limit = ByteCount::mib(512);
            drop(MemoryManager::start(limit, Mode::Cooperative).expect("starts"));
            return;
        }
        mib => ByteCount::mib(mib.parse().expect("a number")),
    };
    drop(region(RegionConfig { limit, ..RegionConfig::default() }, ByteCount::mib(16)));
}
