//! Signal handlers that touch far memory, whatever the thread that they interrupt was doing.
//!
//! A second thread sends signals as fast as they are handled, so that sooner or later one arrives at
//! every place. Each case is over when enough have been handled; a hang is the watchdog's.
#![expect(unsafe_code, reason = "installs and raises signals, and touches far memory")]

use crate::common::{bytes, mem_store, region, watchdog};
use crate::harness::{
    HUNG, PAGE, Stop, config, in_child, read_word, stamp, wait_until, write_word,
};
use allocator_api2::vec::Vec as FarVec;
use farheap::region::{Advice, FaultMode, Install, Region, RegionConfig};
use farheap::{ByteCount, Far};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that the handler touches: several times the limit.
const TOUCHED: usize = 64 << 20;
/// Bytes that the interrupted thread works on.
const WORKED_ON: usize = 1 << 20;
/// Signals that a case handles at least.
const SIGNALS: usize = 1_000;
/// Rounds of work that a case does at least.
const ROUNDS: usize = 20;

// What the handler looks at.
static BASE: AtomicUsize = AtomicUsize::new(0);
static HANDLED: AtomicUsize = AtomicUsize::new(0);
static WRONG: AtomicUsize = AtomicUsize::new(0);

/// Touches the next page but a few; the pages before it have been evicted meanwhile.
extern "C" fn touch_far_memory(_: libc::c_int) {
    let page = HANDLED.load(Ordering::Relaxed) * 7 % (TOUCHED / PAGE);
    if read_word(BASE.load(Ordering::Relaxed) + page * PAGE) != stamp(page) {
        WRONG.fetch_add(1, Ordering::Relaxed);
    }
    HANDLED.fetch_add(1, Ordering::Release);
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handlers of these tests only touch memory and atomics.
    let rc = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    assert_eq!(rc, 0, "the signal can be handled");
}

/// Does `work` again and again while signals arrive, whose handler touches the stamped pages from
/// `base` on.
fn work_under_signals(base: usize, mut work: impl FnMut(usize)) {
    (0..TOUCHED / PAGE).for_each(|at| write_word(base + at * PAGE, stamp(at)));
    BASE.store(base, Ordering::Relaxed);
    HANDLED.store(0, Ordering::Relaxed);
    handle(libc::SIGUSR1, touch_far_memory);
    // SAFETY: takes nothing.
    let worker = unsafe { libc::pthread_self() };
    let stop = Stop::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_set() {
                let before = HANDLED.load(Ordering::Acquire);
                // SAFETY: the worker outlives this scope.
                unsafe { libc::pthread_kill(worker, libc::SIGUSR1) };
                while HANDLED.load(Ordering::Acquire) == before && !stop.is_set() {
                    std::thread::yield_now();
                }
            }
        });
        let mut rounds = 0;
        while rounds < ROUNDS || HANDLED.load(Ordering::Acquire) < SIGNALS {
            work(rounds);
            rounds += 1;
        }
        stop.now();
    });
    assert_eq!(WRONG.load(Ordering::Relaxed), 0, "wrong words");
}

/// A region, what the handler touches, and what the thread works on.
fn with_region(config: RegionConfig, work: impl Fn(&Region, usize, usize)) {
    let Some(region) = region(config, mem_store(ByteCount::mib(256))) else { return };
    let base = region.map(ByteCount(TOUCHED as u64)).expect("there is room").cast::<u8>().as_ptr()
        as usize;
    let own = region.map(ByteCount(WORKED_ON as u64)).expect("there is room").cast::<u8>().as_ptr()
        as usize;
    work_under_signals(base, |round| work(&region, own, round));
}

fn discard(region: &Region, own: usize) {
    (0..WORKED_ON / PAGE).for_each(|at| write_word(own + at * PAGE, 1));
    // SAFETY: nobody needs the content, or has a reference to it.
    unsafe { region.discard(bytes(own as *const u8, ByteCount(WORKED_ON as u64)).cast_mut()) }
        .expect("in it");
}

/// Spends most of its time under the lock that all handlers and the evictor need.
fn advise(region: &Region, own: usize) {
    const PAGES: usize = 16;
    (0..PAGES).for_each(|at| write_word(own + at * PAGE, 1));
    for _ in 0..200 {
        let len = ByteCount((PAGES * PAGE) as u64);
        region.advise(&[bytes(own as *const u8, len)], Advice::WillNeed).expect("in it");
    }
}

/// All that a program may ask of a region, on pages that come and go.
fn ask(region: &Region, own: usize, round: usize) {
    let len = ByteCount(WORKED_ON as u64);
    let ptr = own as *const u8;
    (0..WORKED_ON / PAGE).step_by(3).for_each(|at| write_word(own + at * PAGE, round as u64));
    region.advise(&[bytes(ptr, len)], Advice::Cold).expect("in it");
    region.advise(&[bytes(ptr, len)], Advice::WillNeed).expect("in it");
    let pinned = region.pin(bytes(ptr, ByteCount(8 * PAGE as u64))).expect("few pages");
    drop(pinned);
    if round.is_multiple_of(4) {
        region.advise(&[bytes(ptr, len)], Advice::PageOutNow).expect("the store works");
        region.advise(&[bytes(ptr, len)], Advice::WillNeedNow).expect("in it");
    }
    region.advise(&[bytes(ptr, len)], Advice::WillNeed).expect("in it");
    assert!(region.stats().limit_bytes > ByteCount::ZERO);
}

fn cases(mode: FaultMode) {
    let config = config(Install::Auto).mode(mode);
    with_region(config.clone(), |region, own, _| advise(region, own));
    with_region(config.clone(), |region, own, _| discard(region, own));
    with_region(config, ask);
}

fn run(test: &'static str, body: impl FnOnce()) {
    if let Some(ended) = in_child(test, body) {
        ended.expect_success();
    }
}

#[test]
fn a_handler_touches_far_memory_while_its_thread_discards_or_asks() {
    let name = "signals::a_handler_touches_far_memory_while_its_thread_discards_or_asks";
    run(name, || cases(FaultMode::Auto));
}

#[test]
fn a_handler_touches_far_memory_while_its_thread_serves_a_fault() {
    let name = "signals::a_handler_touches_far_memory_while_its_thread_serves_a_fault";
    run(name, || cases(FaultMode::InThread));
}

/// Frees give memory back under the allocator's locks.
fn free_and_purge(conf: &str) {
    const WORDS: usize = (512 << 10) / 8;
    let Some(heap) = crate::common::heap(conf) else { return };
    let mut touched: FarVec<u8, Far> = FarVec::with_capacity_in(TOUCHED, Far);
    touched.resize(TOUCHED, 0);
    work_under_signals(touched.as_mut_ptr() as usize, |round| {
        let mut words: FarVec<u64, Far> = FarVec::with_capacity_in(WORDS, Far);
        words.resize(WORDS, round as u64);
        assert_eq!(words[WORDS - 1], round as u64);
        drop(words);
        heap.purge();
    });
}

#[test]
fn a_handler_touches_far_memory_while_its_thread_frees_and_purges() {
    let name = "signals::a_handler_touches_far_memory_while_its_thread_frees_and_purges";
    let dir = tempfile::tempdir().expect("a directory");
    let conf = format!("far_limit:16MiB,capacity:512MiB,dir:{}", dir.path().display());
    run(name, || free_and_purge(&conf));
}

// Regions that go away.

#[test]
fn an_in_thread_region_is_dropped_while_threads_fault_in_another() {
    const THREADS: usize = 16;
    const PAGES: usize = 16_384;
    let _watchdog = watchdog("drop beside faults", HUNG);
    let config = || config(Install::Auto).mode(FaultMode::InThread);
    let store = || mem_store(ByteCount::mib(128));
    let Some(busy) = region(config(), store()) else { return };
    let base = busy.map(ByteCount::mib(64)).expect("there is room").cast::<u8>().as_ptr() as usize;
    (0..PAGES).for_each(|page| write_word(base + page * 4096, stamp(page)));
    let stop = Stop::default();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                let mut page = thread;
                while !stop.is_set() {
                    page = (page * 5 + 3) % PAGES;
                    assert_eq!(read_word(base + page * 4096), stamp(page));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        wait_until("all threads fault", || done.load(Ordering::Relaxed) > 1_000);
        for _ in 0..10 {
            let before = done.load(Ordering::Relaxed);
            drop(region(config(), store()));
            wait_until("the others go on", || done.load(Ordering::Relaxed) > before);
        }
        stop.now();
    });
}

// SIGBUS that is not ours.

/// Sends the calling thread a SIGBUS that says `code` of `addr`, as the kernel would.
#[expect(clippy::disallowed_methods, reason = "libc has no wrapper for rt_tgsigqueueinfo(2)")]
fn forge(code: libc::c_int, addr: usize) {
    // SAFETY: zero is a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_signo = libc::SIGBUS;
    info.si_code = code;
    // `si_addr` is the first field after the three numbers, at a multiple of 8.
    let at = (&raw mut info).cast::<usize>().wrapping_add(2);
    // SAFETY: within the structure, which is 128 bytes long.
    unsafe { at.write(addr) };
    let process = std::process::id();
    // SAFETY: takes nothing.
    let thread = unsafe { libc::gettid() };
    // SAFETY: the structure lives during the call. A process may send itself any code
    // (rt_tgsigqueueinfo(2)).
    let rc = unsafe {
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// Undoes what Rust's runtime does to find overflows of the stack.
fn default_action() {
    // SAFETY: restores the default action.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}

/// A region whose first page is resident; its address.
fn one_page() -> Option<(Region, usize)> {
    let config = config(Install::Auto).mode(FaultMode::InThread);
    let region = region(config, mem_store(ByteCount::mib(64)))?;
    let base = region.map(ByteCount::mib(1)).expect("there is room").cast::<u8>().as_ptr() as usize;
    write_word(base, 7);
    Some((region, base))
}

#[test]
fn a_hardware_memory_error_ends_the_process_with_a_message() {
    let name = "signals::a_hardware_memory_error_ends_the_process_with_a_message";
    let ended = in_child(name, || {
        default_action();
        let Some((_region, base)) = one_page() else { return };
        // The access that raises it again comes twice.
        forge(libc::BUS_MCEERR_AR, base + 40);
        forge(libc::BUS_MCEERR_AR, base + 40);
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGBUS]);
    ended.expect_said(&["hardware memory error at 0x"]);
}

#[test]
fn a_hardware_memory_error_elsewhere_ends_the_process_with_a_message() {
    let name = "signals::a_hardware_memory_error_elsewhere_ends_the_process_with_a_message";
    let ended = in_child(name, || {
        default_action();
        let Some((_region, base)) = one_page() else { return };
        forge(libc::BUS_MCEERR_AO, base);
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGBUS]);
    ended.expect_said(&["hardware memory error at 0x"]);
}

static BUS_SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_bus_signals(_: libc::c_int) {
    BUS_SIGNALS.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_sigbus_that_is_not_a_fault_of_far_memory_reaches_the_programs_handler() {
    let name = "signals::a_sigbus_that_is_not_a_fault_of_far_memory_reaches_the_programs_handler";
    run(name, || {
        handle(libc::SIGBUS, count_bus_signals);
        let Some((_region, base)) = one_page() else { return };
        for code in [libc::BUS_MCEERR_AR, libc::BUS_MCEERR_AO, libc::SI_QUEUE, libc::SI_TKILL] {
            let before = BUS_SIGNALS.load(Ordering::Relaxed);
            forge(code, base);
            assert_eq!(BUS_SIGNALS.load(Ordering::Relaxed), before + 1, "code {code}");
        }
        assert_eq!(read_word(base), 7);
    });
}

#[test]
fn a_sigbus_that_somebody_sent_ends_a_process_without_a_handler() {
    let name = "signals::a_sigbus_that_somebody_sent_ends_a_process_without_a_handler";
    let ended = in_child(name, || {
        default_action();
        let Some((_region, base)) = one_page() else { return };
        forge(libc::SI_QUEUE, base);
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGBUS]);
}
