//! Messages of handlers: standard error that nobody reads stops no fault.
#![expect(unsafe_code, reason = "puts a pipe in the place of standard error")]

use crate::harness::{DEADLINE, Far, config, in_child, park_on_sigbus, sigbus_addrs, wait_until};
use farheap::region::{Install, RegionConfig};
use farheap::store::Op;
use std::io::{PipeReader, Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PAGES: usize = 64;
const BAD: usize = 10;
/// A hang says nothing here, for it has nowhere to: the child ends by SIGALRM.
const HUNG_SECONDS: u32 = 600;

/// A pipe without room, in the place of standard error.
pub(crate) struct FullPipe {
    reader: PipeReader,
    before: OwnedFd,
}

impl FullPipe {
    pub(crate) fn new() -> FullPipe {
        const SIZE: libc::c_int = 4096;
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(HUNG_SECONDS) };
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        // SAFETY: takes no pointer.
        let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, SIZE) };
        assert_eq!(size, SIZE);
        writer.write_all(&[b'\n'; SIZE as usize]).expect("room for so much");
        // SAFETY: takes no pointer.
        let before = unsafe { libc::dup(libc::STDERR_FILENO) };
        assert!(before >= 0);
        // SAFETY: the descriptor is new and nobody else's.
        let before = unsafe { OwnedFd::from_raw_fd(before) };
        // SAFETY: takes no pointer; what is written there now goes to the pipe.
        assert!(unsafe { libc::dup2(writer.as_raw_fd(), libc::STDERR_FILENO) } >= 0);
        FullPipe { reader, before }
    }

    /// Reads until somebody has said `what`, then puts standard error back, and repeats it there.
    pub(crate) fn read_until(mut self, what: &str) {
        let mut text = String::new();
        let mut bytes = [0; 4096];
        while !text.contains(what) {
            let count = self.reader.read(&mut bytes).expect("a pipe");
            text.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
        // SAFETY: takes no pointer.
        assert!(unsafe { libc::dup2(self.before.as_raw_fd(), libc::STDERR_FILENO) } >= 0);
        // SAFETY: takes no pointer. The watchdog can say what it has to again.
        unsafe { libc::alarm(0) };
        eprintln!("{}", text.trim_start());
    }
}

/// A device that fails writes and reads while nobody reads what is said of it: pages come and go
/// all the same, and the messages are there as soon as somebody reads.
fn nobody_reads(config: RegionConfig) {
    park_on_sigbus();
    let config = config.deadline(DEADLINE);
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
    let pipe = FullPipe::new();
    far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
    let lost = far.touch(BAD);
    assert_eq!(sigbus_addrs(1), [far.addr(BAD)]);
    far.control.fail_fraction(Op::Read, 0, libc::EIO);
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    // Other content than on the device.
    far.discard(0..BAD);
    far.fill(0..BAD);
    far.control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
    wait_until("failed writes", || {
        drop(far.region.evict_all());
        far.stats().write_errors > 0
    });
    far.control.heal();
    wait_until("write-back works again", || far.region.evict_all().is_ok());
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    assert!(!lost.is_finished());
    pipe.read_until("write-back failed");
}

#[test]
fn a_full_pipe_as_standard_error_stops_no_handler() {
    let name = "messages::a_full_pipe_as_standard_error_stops_no_handler";
    let Some(ended) = in_child(name, || nobody_reads(config(4, Install::Auto))) else { return };
    ended
        .expect_success()
        .expect_said(&["page at 0x", "(EIO)", "SIGBUS"])
        .expect_said(&["write-back failed; the pages stay in memory"]);
}

#[test]
fn a_full_pipe_as_standard_error_stops_no_thread_that_serves_itself() {
    let name = "messages::a_full_pipe_as_standard_error_stops_no_thread_that_serves_itself";
    let mode = farheap::region::Mode::InThread;
    let body = || nobody_reads(config(4, Install::Auto).mode(mode));
    let Some(ended) = in_child(name, body) else { return };
    ended
        .expect_success()
        .expect_said(&["page at 0x", "(EIO)", "SIGBUS"])
        .expect_said(&["write-back failed; the pages stay in memory"]);
}

/// The cause of an end is waited for a bounded time only.
#[test]
fn a_full_pipe_as_standard_error_does_not_hold_up_the_end() {
    let name = "messages::a_full_pipe_as_standard_error_does_not_hold_up_the_end";
    let body = || {
        let Some(far) = Far::new(config(4, Install::Auto), PAGES, 1) else { return };
        let _pipe = FullPipe::new();
        far.injector.panic_in_wait(crate::injector::Whose::Handler, u64::MAX);
        far.expect_healthy();
    };
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_signal(&[libc::SIGABRT]);
}

/// A sandbox takes the right to open descriptors away. Standard error is a file, and a page is lost.
fn nothing_can_be_opened(config: RegionConfig) {
    park_on_sigbus();
    let config = config.deadline(DEADLINE);
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
    let mut file = tempfile::tempfile().expect("a file");
    // SAFETY: takes no pointer; what is written there now goes to the file.
    assert!(unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) } >= 0);
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads the structure it is given.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
    far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
    let lost = far.touch(BAD);
    assert_eq!(sigbus_addrs(1), [far.addr(BAD)]);
    far.control.heal();
    // Longer than a handler that stands by waits at a time.
    for _ in 0..8 {
        far.evict(0..BAD);
        far.check(0..BAD);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    far.discard(BAD..BAD + 1);
    crate::harness::resume();
    assert_eq!(lost.join().expect("resumed"), 0);
    far.expect_healthy();
    let said = || {
        let mut text = String::new();
        file.rewind().and_then(|()| file.read_to_string(&mut text)).expect("the output");
        text.contains("page at 0x") && text.contains("(EIO)")
    };
    wait_until("the message", said);
}

#[test]
fn handlers_work_and_speak_where_nothing_can_be_opened_any_more() {
    let name = "messages::handlers_work_and_speak_where_nothing_can_be_opened_any_more";
    let ended = in_child(name, || nothing_can_be_opened(config(4, Install::Auto)));
    ended.map(crate::harness::Ended::expect_success);
}

#[test]
fn threads_serve_themselves_where_nothing_can_be_opened_any_more() {
    let name = "messages::threads_serve_themselves_where_nothing_can_be_opened_any_more";
    let mode = farheap::region::Mode::InThread;
    let body = || nothing_can_be_opened(config(4, Install::Auto).mode(mode));
    in_child(name, body).map(crate::harness::Ended::expect_success);
}

/// At every number of descriptors the start works as always, or says what is missing.
#[test]
fn a_start_without_enough_descriptors_says_so() {
    let name = "messages::a_start_without_enough_descriptors_says_so";
    let ended = in_child(name, || {
        if Far::new(config(4, Install::Auto), PAGES, 1).is_none() {
            return;
        }
        let store = crate::common::mem_store(farheap::ByteCount(64 << 20));
        let first = tempfile::tempfile().expect("a file").as_raw_fd() as u64;
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills the structure it is given.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) }, 0);
        let mut refused = 0;
        for more in 0.. {
            let few = libc::rlimit { rlim_cur: first + more, ..before };
            // SAFETY: reads the structure it is given.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) }, 0);
            let created = farheap::region::Region::create(config(4, Install::Auto), store.clone());
            let Err(error) = created else { break };
            let text = error.to_string();
            assert!(text.contains("Too many open files"), "{more} descriptors: {text}");
            refused += 1;
        }
        assert!(refused > 4, "a region has some descriptors, not {refused}");
    });
    ended.map(crate::harness::Ended::expect_success);
}
