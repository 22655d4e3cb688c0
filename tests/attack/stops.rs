//! Stops of the whole process, by a signal or by its control group, while far memory comes and goes:
//! the time does not count, and afterwards everything goes on.

use crate::ground::{Ground, attacks};
use crate::kernel::{call, content, fd, memory_file};
use std::process::{Child, Command};

attacks! {
    a_process_that_is_stopped_and_continued_goes_on: all,
    a_process_whose_control_group_is_frozen_goes_on: all,
}

/// Exit status of a script that lacks what it needs.
const LACKING: i32 = 77;

/// Stops and continues the process whose number it is given; leaves it running in any case.
const STOP: &str = r#"
    trap 'kill -CONT $1' EXIT
    for n in 1 2 3 4 5 6 7 8; do
        kill -STOP $1 || exit 1
        sleep 0.0$n
        kill -CONT $1
        sleep 0.0$n
    done
"#;

/// The same by a control group of its own, of either version; the process ends in its old one.
/// A group counts as frozen once all of its threads are; one that waits for a page of a frozen
/// thread never is, so nothing waits for that.
const FREEZE: &str = r#"
    group=
    while read -r _ mounted kind options _; do
        case $kind,$options, in
            cgroup,*,freezer,*) key='^[0-9]*:freezer:' state=freezer.state frozen=FROZEN thawed=THAWED ;;
            cgroup2,*) key='^0::' state=cgroup.freeze frozen=1 thawed=0 ;;
            *) continue ;;
        esac
        old=$mounted$(sed -n "s/$key//p" /proc/$1/cgroup)
        group=$old/farheap-attack-$1
        mkdir "$group" 2>/dev/null || continue
        if [ -e "$group/$state" ] && (echo $1 > "$group/cgroup.procs") 2>/dev/null; then break; fi
        rmdir "$group"
        group=
    done < /proc/self/mounts
    [ -n "$group" ] && [ -d "$group" ] || exit 77
    leave() {
        echo $thawed > "$group/$state"
        (echo $1 > "$old/cgroup.procs") 2>/dev/null
        rmdir "$group"
    }
    trap "leave $1" EXIT
    for n in 1 2 3 4 5 6 7 8; do
        echo $frozen > "$group/$state" || exit 1
        sleep 0.0$n
        echo $thawed > "$group/$state" || exit 1
        sleep 0.0$n
    done
"#;

fn start(script: &str) -> Child {
    let own = std::process::id().to_string();
    Command::new("sh").args(["-c", script, "sh", &own]).spawn().expect("sh is everywhere")
}

/// Changes, evicts and reads until the script has ended; system calls read as well, where they may.
fn go_on_under(ground: &Ground, script: &str) {
    for _ in 0..ground.rounds(1) {
        let mut child = start(script);
        let mut number = 0;
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child of this process") {
                break status;
            }
            number += 1;
            ground.far.fill(number);
            ground.near.fill(number);
            drop(ground.evict_far());
            let sent = ground.same("write", |stretch| {
                let file = memory_file();
                let len = stretch.len / 2;
                let args = [fd(&file), stretch.at(0), len, 0];
                call(libc::SYS_pwrite64, &args).map(|n| (n, content(&file, len)))
            });
            assert_eq!(sent.expect("room in a file").0, ground.far.len / 2);
            ground.assert_alike("stopped now and then");
        };
        if status.code() == Some(LACKING) {
            return println!("skipped: no control group can be made here");
        }
        assert!(status.success(), "the script ended with {status}");
        ground.await_passes(1);
        ground.assert_alike("afterwards");
    }
}

fn a_process_that_is_stopped_and_continued_goes_on(ground: &Ground) {
    go_on_under(ground, STOP);
}

fn a_process_whose_control_group_is_frozen_goes_on(ground: &Ground) {
    go_on_under(ground, FREEZE);
}
