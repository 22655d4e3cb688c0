//! Messages of handlers: standard error that nobody reads stops no fault.
#![expect(unsafe_code, reason = "puts a pipe in the place of standard error")]

use crate::common::bytes;
use crate::harness::{
    DEADLINE, Far, PAGE, config, fill_page, in_child, park_on_sigbus, sigbus_addrs, wait_until,
};
use farheap::ByteCount;
use farheap::region::{Advice, Install, Region, RegionConfig};
use farheap::store::{BlockStore, Op};
use log::{LevelFilter, Log, Metadata, Record};
use std::io::{PipeReader, Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

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

/// Closes standard error, and opens a file that gets its number.
fn file_as_standard_error() -> std::fs::File {
    let file = tempfile::tempfile().expect("a file");
    // SAFETY: takes no pointer; what is written there now goes to the file.
    assert!(unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) } >= 0);
    file
}

/// A device that fails writes and reads while nobody reads what is said of it: pages come and go
/// all the same, and the messages are there as soon as somebody reads.
fn nobody_reads(config: RegionConfig) {
    park_on_sigbus();
    let config = config.deadline(DEADLINE);
    let pipe = FullPipe::new();
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
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
    let Some(ended) = in_child(name, || nobody_reads(config(Install::Auto))) else { return };
    ended.expect_success();
    ended.expect_said(&["page at 0x", "(EIO)", "SIGBUS"]);
    ended.expect_said(&["write-back failed; the pages stay in memory"]);
}

#[test]
fn a_full_pipe_as_standard_error_stops_no_thread_that_serves_itself() {
    let name = "messages::a_full_pipe_as_standard_error_stops_no_thread_that_serves_itself";
    let mode = farheap::region::FaultMode::InThread;
    let body = || nobody_reads(config(Install::Auto).mode(mode));
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
    ended.expect_said(&["page at 0x", "(EIO)", "SIGBUS"]);
    ended.expect_said(&["write-back failed; the pages stay in memory"]);
}

/// The cause of an end is waited for a bounded time only.
#[test]
fn a_full_pipe_as_standard_error_does_not_hold_up_the_end() {
    let name = "messages::a_full_pipe_as_standard_error_does_not_hold_up_the_end";
    let body = || {
        let _pipe = FullPipe::new();
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
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
    let mut file = file_as_standard_error();
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
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
    let ended = in_child(name, || nothing_can_be_opened(config(Install::Auto)));
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn threads_serve_themselves_where_nothing_can_be_opened_any_more() {
    let name = "messages::threads_serve_themselves_where_nothing_can_be_opened_any_more";
    let mode = farheap::region::FaultMode::InThread;
    let body = || nothing_can_be_opened(config(Install::Auto).mode(mode));
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
}

/// At every number of descriptors the start works as always, or says what is missing.
#[test]
fn a_start_without_enough_descriptors_says_so() {
    let name = "messages::a_start_without_enough_descriptors_says_so";
    let ended = in_child(name, || {
        if Far::new(config(Install::Auto), PAGES, 1).is_none() {
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
            let created = farheap::region::Region::create(config(Install::Auto), store.clone());
            let Err(error) = created else { break };
            let text = error.to_string();
            assert!(text.contains("Too many open files"), "{more} descriptors: {text}");
            refused += 1;
        }
        assert!(refused > 4, "a region has some descriptors, not {refused}");
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn nothing_is_written_to_what_has_taken_the_number_of_standard_error() {
    let name = "messages::nothing_is_written_to_what_has_taken_the_number_of_standard_error";
    let ended = in_child(name, || {
        park_on_sigbus();
        let Some(far) = Far::new(config(Install::Auto).deadline(DEADLINE), PAGES, 1) else {
            return;
        };
        far.store(0..PAGES);
        let file = file_as_standard_error();
        far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
        let _lost = far.touch(BAD);
        assert_eq!(sigbus_addrs(1), [far.addr(BAD)]);
        assert_eq!(file.metadata().expect("a file").len(), 0);
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["page at 0x", "(EIO)", "SIGBUS"]);
}

/// A page that a forked child has inherited is damaged on the device: its message, and not in a file of the child's.
#[test]
fn a_child_says_what_it_has_lost_unless_a_file_is_where_standard_error_was() {
    let name = "messages::a_child_says_what_it_has_lost_unless_a_file_is_where_standard_error_was";
    let ended = in_child(name, || {
        const LEN: u64 = 64 << 20;
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("device");
        let store = BlockStore::scratch(&path, Some(ByteCount(LEN)), false).expect("a file");
        let Some(region) = crate::common::region(config(Install::Auto), Arc::new(store)) else {
            return;
        };
        let far = stored(&region);
        // All pages are there, but none is what was written.
        let damaged = std::fs::File::options().write(true).open(&path).expect("the file");
        let junk = vec![0x5A; 1 << 20];
        (0..LEN >> 20).for_each(|_| (&damaged).write_all(&junk).expect("room"));
        assert_eq!(
            signal_of_child(|| {
                crate::harness::read_word(far);
            }),
            libc::SIGBUS
        );
        let file = tempfile::tempfile().expect("a file");
        let child = || {
            // SAFETY: takes no pointer.
            unsafe { libc::dup2(file.as_raw_fd(), libc::STDERR_FILENO) };
            crate::harness::read_word(far);
        };
        assert_eq!(signal_of_child(child), libc::SIGBUS);
        assert_eq!(file.metadata().expect("a file").len(), 0);
        std::process::exit(0); // Pages that cannot be read are not to be written back.
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["checksum mismatch", "SIGBUS"]);
    let said = &ended.text;
    assert_eq!(said.matches("cannot be brought back").count(), 1, "{said}");
}

/// Some pages that are on the device.
fn stored(region: &Region) -> usize {
    let len = ByteCount::kib(64);
    let start = region.map(len).expect("the span has room").cast::<u8>();
    let addr = start.as_ptr() as usize;
    (addr..addr + len.as_usize()).step_by(PAGE).for_each(|page| fill_page(page, 7));
    region.advise(&[bytes(start.as_ptr(), len)], Advice::PageOutNow).expect("the device works");
    addr
}

/// The signal that ends a forked child which does something; 0 where it ends by itself.
fn signal_of_child(act: impl FnOnce()) -> i32 {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child makes system calls and reads memory, and ends without cleaning up.
    let child = unsafe { libc::fork() };
    if child == 0 {
        act();
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 }
}

/// A logger that keeps each message with the name of the thread that brought it.
struct Kept {
    records: Mutex<Vec<String>>,
    /// Far memory that it reads; 0: none.
    reads: AtomicUsize,
    /// It waits.
    is_blocked: AtomicBool,
    is_waiting: AtomicBool,
}

static KEPT: Kept = Kept {
    records: Mutex::new(Vec::new()),
    reads: AtomicUsize::new(0),
    is_blocked: AtomicBool::new(false),
    is_waiting: AtomicBool::new(false),
};

impl Log for Kept {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "farheap"
    }

    fn log(&self, record: &Record<'_>) {
        if self.reads.load(Ordering::Acquire) != 0 {
            crate::harness::read_word(self.reads.load(Ordering::Acquire));
        }
        while self.is_blocked.load(Ordering::Acquire) {
            self.is_waiting.store(true, Ordering::Release);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        let text = format!("{} by {thread}: {}", record.level(), record.args());
        self.records.lock().expect("no logger has panicked").push(text);
    }

    fn flush(&self) {}
}

/// Whether a message with all of these parts came.
fn logged(parts: &[&str]) -> bool {
    let records = KEPT.records.lock().expect("no logger has panicked");
    let is_it = |text: &&String| parts.iter().all(|part| text.contains(part));
    records.iter().find(is_it).is_some()
}

fn keep_what_is_logged() {
    log::set_logger(&KEPT).expect("the first one");
    log::set_max_level(LevelFilter::Info);
}

#[test]
fn a_logger_is_told_instead_of_standard_error_but_of_what_ends_programs() {
    let name = "messages::a_logger_is_told_instead_of_standard_error_but_of_what_ends_programs";
    let ended = in_child(name, || {
        park_on_sigbus();
        keep_what_is_logged();
        let Some(far) = Far::new(config(Install::Auto).deadline(DEADLINE), PAGES, 1) else {
            return;
        };
        far.store(0..PAGES);
        far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
        let _lost = far.touch(BAD);
        assert_eq!(sigbus_addrs(1), [far.addr(BAD)]);
        far.control.fail_fraction(Op::Read, 0, libc::EIO);
        far.discard(0..BAD);
        far.fill(0..BAD);
        far.control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
        wait_until("a failed write is told", || {
            drop(far.region.evict_all());
            logged(&["WARN by farheap-log: write-back failed; the pages stay in memory"])
        });
        wait_until("a lost page is told", || {
            logged(&["ERROR by farheap-log: page at 0x", "(EIO); touching it is SIGBUS"])
        });
        let limit = ByteCount::gib(1 << 20);
        let store = crate::common::mem_store(ByteCount::mib(64));
        drop(Region::create(config(Install::Auto).limit(limit), store));
        wait_until("a start's message is told", || {
            logged(&["WARN by", "the kernel may end the process"])
        });
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["page at 0x", "(EIO)", "SIGBUS"]);
    let said = &ended.text;
    assert!(!said.contains("write-back failed") && !said.contains("the kernel may end"), "{said}");
}

#[test]
fn a_logger_that_waits_and_reads_far_memory_stops_no_fault() {
    let name = "messages::a_logger_that_waits_and_reads_far_memory_stops_no_fault";
    let ended = in_child(name, || {
        keep_what_is_logged();
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        far.store(0..PAGES);
        KEPT.reads.store(far.addr(BAD), Ordering::Release);
        KEPT.is_blocked.store(true, Ordering::Release);
        far.control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
        far.discard(0..1);
        far.fill(0..1);
        wait_until("the logger waits", || {
            drop(far.region.evict_all());
            KEPT.is_waiting.load(Ordering::Acquire)
        });
        far.control.heal();
        for _ in 0..20 {
            far.check(0..PAGES);
            wait_until("write-back works again", || far.region.evict_all().is_ok());
        }
        KEPT.is_blocked.store(false, Ordering::Release);
        wait_until("the logger is told", || logged(&["by farheap-log: write-back failed"]));
        // Stays: another message may come, and the logger reads far memory for it.
        std::mem::forget(far);
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}
