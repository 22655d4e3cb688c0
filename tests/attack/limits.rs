//! Limits of the process that are reached, and children that come and go, while far memory is in
//! use.

use crate::ground::{Ground, attacks};
use crate::kernel::{addr, addr_mut, call};

attacks! {
    limits_reached_after_the_start_change_nothing: all,
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

/// No descriptor, process or locked page more than there are. What is written to the
/// temporary file is not limited: `ulimit -f` is a limit on the device.
fn limits_reached_after_the_start_change_nothing(ground: &Ground) {
    const RESOURCES: [u32; 4] =
        [libc::RLIMIT_NOFILE, libc::RLIMIT_NPROC, libc::RLIMIT_MEMLOCK, libc::RLIMIT_CORE];
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
