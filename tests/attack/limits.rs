//! Limits of the process that are reached, and children that come and go, while far memory is in
//! use.

use crate::ground::{Ground, UNIT, attacks, map, stamp};
use crate::kernel::{addr, addr_mut, call};

attacks! {
    limits_reached_after_the_start_change_nothing: all,
    a_process_without_another_mapping_goes_on: all,
    a_process_without_another_descriptor_goes_on: all,
    a_limit_on_files_that_passes_costs_nothing: all,
    children_that_exit_or_become_programs_change_nothing: all,
}

/// Sets the soft limit of a resource; returns what it was.
fn limit(resource: u32, soft: u64) -> u64 {
    let mut limits = [0_u64; 2];
    let args = [0, resource as usize, 0, addr_mut(&mut limits)];
    call(libc::SYS_prlimit64, &args).expect("own limits are readable");
    let new = [soft.min(limits[1]), limits[1]];
    call(libc::SYS_prlimit64, &[0, resource as usize, addr(&new), 0]).expect("lower, or as before");
    limits[0]
}

/// Both twins change, and stay alike through evictions.
fn go_on(ground: &Ground) {
    for number in 0..2 {
        ground.far.fill(number);
        ground.near.fill(number);
        drop(ground.evict_far());
        ground.await_passes(1);
        ground.assert_alike("afterwards");
    }
}

/// The same without any call of the allocator's: nothing can be mapped.
fn go_on_without_memory(ground: &Ground, what: &str) {
    for number in 0..2 {
        ground.far.fill(number);
        drop(ground.evict_far());
        ground.await_passes(1);
        let differs =
            (0..ground.far.len / 8).find(|at| ground.far.word(at * 8) != stamp(number, *at));
        assert_eq!(differs, None, "{what}: a word");
        ground.near.fill(number);
    }
}

/// No descriptor, process, locked page or byte of address space more than there are.
fn limits_reached_after_the_start_change_nothing(ground: &Ground) {
    const RESOURCES: [u32; 6] = [
        libc::RLIMIT_NOFILE,
        libc::RLIMIT_NPROC,
        libc::RLIMIT_MEMLOCK,
        libc::RLIMIT_CORE,
        libc::RLIMIT_AS,
        libc::RLIMIT_DATA,
    ];
    for resource in RESOURCES {
        // Fewer than are in use; none at all, as sandboxes do.
        for most in [8, 0] {
            let before = limit(resource, most);
            drop(ground.evict_far());
            ground.await_passes(2);
            limit(resource, before);
        }
        ground.assert_alike("a limit is reached");
    }
    go_on(ground);
}

fn children_that_exit_or_become_programs_change_nothing(ground: &Ground) {
    for _ in 0..ground.rounds(8) {
        // A child that does nothing but end, and one that becomes another program at once.
        let flags = libc::SIGCHLD as usize;
        let child = call(libc::SYS_clone, &[flags, 0, 0, 0, 0]).expect("a process");
        if child == 0 {
            let _never = call(libc::SYS_exit_group, &[0]);
        }
        let mut status = 0_i32;
        let waited = call(libc::SYS_wait4, &[child, addr_mut(&mut status), 0, 0]);
        assert_eq!((waited, status), (Ok(child), 0));
        let status = std::process::Command::new("true").status().expect("it is everywhere");
        assert!(status.success());
        drop(ground.evict_far());
    }
    ground.assert_alike("children came and went");
    go_on(ground);
}

/// Splits a mapping until the process may have no other one; what gives its pages back does so.
fn a_process_without_another_mapping_goes_on(ground: &Ground) {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("readable");
    let most: usize = text.trim().parse().expect("a number");
    if most > 300_000 {
        return println!("skipped: {most} mappings are more than a test should make");
    }
    let mine = map(most * UNIT);
    for left in [0, 16] {
        let is_full = (1..most).step_by(2).any(|unit| {
            let args = [mine.at(unit * UNIT), UNIT, libc::PROT_NONE as usize];
            call(libc::SYS_mprotect, &args) == Err(libc::ENOMEM)
        });
        assert!(is_full, "the process may have more mappings than {most}");
        // Every second unit that is as its neighbours again frees two mappings.
        for unit in (1..=left).step_by(2) {
            let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
            let args = [mine.at(unit * UNIT), UNIT, protection];
            call(libc::SYS_mprotect, &args).expect("joins mappings");
        }
        go_on_without_memory(ground, "no mapping is left");
    }
    call(libc::SYS_munmap, &[mine.at(0), mine.len]).expect("was mapped");
    ground.assert_alike("mappings are there again");
    go_on(ground);
}

fn a_process_without_another_descriptor_goes_on(ground: &Ground) {
    let mut files = Vec::new();
    let before = limit(libc::RLIMIT_NOFILE, 512);
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    assert!(!files.is_empty(), "there was a limit");
    go_on(ground);
    drop(files);
    limit(libc::RLIMIT_NOFILE, before);
    go_on(ground);
}

/// `ulimit -f` is a limit on the device where that is a file: while nothing can be written, memory
/// stays where it is. The signal that the kernel sends with it ends no process: farheap's threads,
/// which write, block signals.
fn a_limit_on_files_that_passes_costs_nothing(ground: &Ground) {
    for number in 0..ground.rounds(3) as u64 {
        ground.far.fill(number);
        ground.near.fill(number);
        let before = limit(libc::RLIMIT_FSIZE, 1 << 20);
        // What is evicted now fails, or waits for its next attempt.
        for _ in 0..3 {
            drop(ground.evict_far());
        }
        limit(libc::RLIMIT_FSIZE, before);
        ground.assert_alike("files were limited");
        ground.await_passes(1);
        ground.assert_alike("files are not limited any more");
    }
    go_on(ground);
}
