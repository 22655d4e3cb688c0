//! Signals whose handler touches far memory, whatever they interrupt: a thread that allocates,
//! frees, discards, advises and pins, or one that waits for a page itself.
#![expect(unsafe_code, reason = "handles signals, and touches far memory in handlers")]

use crate::common::{StopOnDrop, bytes};
use crate::ground::{Ground, Stretch, UNIT, allocate, attacks, free, stamp};
use crate::kernel::{addr, call};
use allocator_api2::vec::Vec as FarVec;
use farheap::region::Advice;
use farheap::{ByteCount, Far};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

attacks! {
    an_interval_timer_interrupts_every_thread: all,
    a_timer_of_the_processors_time_interrupts_every_thread: all,
    signals_of_another_thread_interrupt_at_every_place: all,
}

/// What handlers touch: a unit has a stamp that stays, and a count of the handlers that were there.
const TOUCHED: usize = 2 << 20;
const UNITS: usize = TOUCHED / UNIT;
/// Signals that are handled at least, in a round.
const SIGNALS: u64 = 60;
/// Times that every kind of work is done at least, in a round.
const WORKS: usize = 3;
/// Microseconds from the end of a handler to the next signal of a timer, so that what is
/// interrupted gets on.
const PAUSE_US: u64 = 300;

// What a handler looks at.
static BASE: AtomicUsize = AtomicUsize::new(0);
/// Handlers that began, with [`OVER`] when they are to touch nothing any more.
static HANDLED: AtomicU64 = AtomicU64::new(0);
const OVER: u64 = 1 << 63;
static DONE: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);
/// Timer that a handler sets again, or [`NO_TIMER`].
static TIMER: AtomicUsize = AtomicUsize::new(NO_TIMER);
const NO_TIMER: usize = usize::MAX;

fn count_in(unit: usize) -> &'static AtomicU64 {
    let at = (BASE.load(Ordering::Relaxed) + unit * UNIT + 8) as *mut u64;
    // SAFETY: an aligned word of far memory that is only used as this; it is freed after the last
    // handler has returned.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Reads and writes the next units but a few: those have been evicted meanwhile. Any number of
/// threads may be here at once.
extern "C" fn touch_far_memory(_: libc::c_int) {
    let number = HANDLED.fetch_add(1, Ordering::Relaxed);
    if number & OVER != 0 {
        return; // It was on its way to this thread when the storm ended.
    }
    let unit = (number * 37) as usize % UNITS;
    let at = BASE.load(Ordering::Relaxed) + unit * UNIT;
    // SAFETY: a word that was written before the first signal, and not since.
    let word = unsafe { (at as *const u64).read_volatile() };
    if word != stamp(1, unit) {
        WRONG.fetch_add(1, Ordering::Relaxed);
    }
    count_in(unit).fetch_add(1, Ordering::Relaxed);
    DONE.fetch_add(1, Ordering::Release);
    set_timer(TIMER.load(Ordering::Relaxed), PAUSE_US);
}

/// Has a timer expire once; 0 stops it.
fn set_timer(timer: usize, after_us: u64) {
    if timer != NO_TIMER {
        let once = [0, 0, 0, after_us];
        // It cannot fail with a timer that there is; a handler has nobody to tell.
        let _always = call(libc::SYS_setitimer, &[timer, addr(&once), 0]);
    }
}

fn handle(signal: libc::c_int) {
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = touch_far_memory as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler touches memory and atomics, and makes a system call.
    let rc = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    assert_eq!(rc, 0, "the signal can be handled");
}

/// Work that signals interrupt; the number is that of the round.
type Row = (&'static str, fn(&Ground, u64));

const WORK: &[Row] = &[
    ("allocate and free", |_, round| {
        for size in [24, 900, 9_000, 40_000, 300_000] {
            let mut block: FarVec<u64, Far> = FarVec::with_capacity_in(size / 8, Far);
            block.resize(size / 8, round);
            assert!(block.iter().all(|word| *word == round), "a block of {size} bytes");
        }
    }),
    ("allocate much and purge", |ground, round| {
        let block = allocate(1 << 20);
        (0..1 << 20).step_by(UNIT).for_each(|at| block.set_word(at, round));
        assert_eq!(block.word(UNIT), round);
        free(block);
        ground.heap.purge();
    }),
    ("discard", |ground, round| {
        let block = allocate(1 << 20);
        block.set_word(8 * UNIT, round);
        let (start, len) = (block.at(0) as *const u8, ByteCount(block.len as u64));
        // SAFETY: the block is this function's, and without references to it.
        unsafe { ground.heap.region().discard(bytes(start, len).cast_mut()) }.expect("is in it");
        assert_eq!(block.word(8 * UNIT), 0);
        free(block);
    }),
    ("advise", |ground, round| {
        let (start, len) = (ground.far.at(0) as *const u8, ByteCount(ground.far.len as u64));
        let advice = if round.is_multiple_of(2) { Advice::WillNeed } else { Advice::Cold };
        ground.heap.region().advise(&[bytes(start, len)], advice).expect("is in it");
        ground.heap.region().advise(&[bytes(start, len)], Advice::WillNeed).expect("is in it");
    }),
    ("pin", |ground, _| ground.pinned(|| ground.assert_alike("pinned"))),
    ("evict", |ground, _| drop(ground.evict_far())),
    ("write", |ground, round| {
        ground.far.fill(round);
        ground.near.fill(round);
    }),
];

/// Works until enough signals have been handled, of which `send` makes more at every call.
fn storm(ground: &Ground, signal: libc::c_int, timer: usize, send: impl Fn() + Sync) {
    let touched = allocate(TOUCHED);
    (0..UNITS).for_each(|unit| touched.set_word(unit * UNIT, stamp(1, unit)));
    BASE.store(touched.at(0), Ordering::Relaxed);
    TIMER.store(timer, Ordering::Relaxed);
    handle(signal);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (start, len) = (touched.at(0) as *const u8, ByteCount(TOUCHED as u64));
            while !stop.load(Ordering::Relaxed) {
                // Some are busy: a handler is there.
                drop(ground.heap.region().advise(&[bytes(start, len)], Advice::PageOutNow));
                send();
            }
        });
        let stop = StopOnDrop(&stop);
        set_timer(timer, PAUSE_US);
        let enough = ground.rounds(1) as u64 * SIGNALS;
        for round in 0.. {
            for (what, work) in WORK {
                work(ground, round);
                ground.assert_alike(what);
            }
            if round >= WORKS as u64 && DONE.load(Ordering::Relaxed) >= enough {
                break;
            }
        }
        drop(stop);
    });
    TIMER.store(NO_TIMER, Ordering::Relaxed);
    check(&touched);
    free(touched);
}

/// Once no handler is there any more: each was counted where it was.
fn check(touched: &Stretch) {
    let handled = HANDLED.fetch_or(OVER, Ordering::Relaxed);
    while DONE.load(Ordering::Acquire) < handled {
        std::thread::yield_now(); // The watchdog bounds it.
    }
    let counted: u64 = (0..UNITS).map(|unit| touched.word(unit * UNIT + 8)).sum();
    let wrong = WRONG.load(Ordering::Relaxed);
    assert_eq!((wrong, counted), (0, handled), "wrong stamps, and handlers that were counted");
}

fn an_interval_timer_interrupts_every_thread(ground: &Ground) {
    storm(ground, libc::SIGALRM, libc::ITIMER_REAL as usize, || ());
}

/// On a busy machine too it is what works that is interrupted.
fn a_timer_of_the_processors_time_interrupts_every_thread(ground: &Ground) {
    storm(ground, libc::SIGPROF, libc::ITIMER_PROF as usize, || ());
}

/// Signals for one thread, each as soon as the one before was handled.
fn signals_of_another_thread_interrupt_at_every_place(ground: &Ground) {
    // SAFETY: takes nothing.
    let worker = unsafe { libc::pthread_self() };
    storm(ground, libc::SIGUSR1, NO_TIMER, || {
        let before = HANDLED.load(Ordering::Relaxed);
        // A few in the time of an eviction.
        for sent in 0..8 {
            // SAFETY: the worker outlives the storm.
            let rc = unsafe { libc::pthread_kill(worker, libc::SIGUSR1) };
            assert_eq!(rc, 0, "the thread is alive");
            while DONE.load(Ordering::Relaxed) < before + sent {
                std::thread::yield_now(); // It has been sent; the watchdog bounds it.
            }
        }
    });
}
