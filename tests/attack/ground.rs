//! The ground of an attack: far memory and its ordinary twin, while other threads evict the one
//! and keep the limit exhausted.
#![expect(unsafe_code, reason = "reads and writes attacked memory through raw pointers")]

use crate::common::child::{self, Ended};
use crate::common::refuse::{Refused, refuse};
use crate::common::{Dice, StopOnDrop, amount, bytes, heap, seed, watchdog};
use crate::kernel::{Errno, call};
use allocator_api2::alloc::Allocator;
use farheap::region::Advice;
use farheap::{ByteCount, Far, Heap};
use std::alloc::Layout;
use std::fmt::Debug;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A process that takes longer hangs. Thirty other runnable processes may share the processors.
const HUNG: Duration = Duration::from_secs(290);
/// Longest output of a process, in lines: more is a flood.
const LINES_MAX: usize = 150;
/// What the twins are aligned to: a chunk.
const ALIGN: usize = 2 << 20;
pub(crate) const UNIT: usize = 4096;
/// Units in a pass of the pressure.
const PASS_UNITS: usize = 3072;
/// Units after which the pressure pauses, unless somebody waits for a pass.
const PAUSE_UNITS: usize = 64;

/// A way of serving far memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    conf: &'static str,
    /// The kernel permits faults of user mode only.
    user_mode_only: bool,
}

impl Way {
    /// Whether forked children have the far memory of their parent.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.conf.contains("install:copy") && !self.conf.contains("in_thread")
    }

    /// Whether system calls may be given far memory that is not resident.
    pub(crate) fn serves_kernel_faults(&self) -> bool {
        !self.user_mode_only && !self.conf.contains("in_thread")
    }
}

const fn way(name: &'static str, conf: &'static str) -> Way {
    Way { name, conf, user_mode_only: false }
}

/// Handler threads, which serve faults of system calls too.
pub(crate) const HANDLER: &[Way] = &[
    way("small", "far_limit:8MiB"),
    way("chunks", "far_limit:32MiB"),
    way("copy", "far_limit:8MiB,install:copy"),
];

/// System calls fail with `EFAULT` where a page is not resident.
const USER: &[Way] = &[
    way("in-thread", "far_limit:8MiB,mode:in_thread"),
    way("in-thread copy", "far_limit:8MiB,mode:in_thread,install:copy"),
    Way { name: "user mode", conf: "far_limit:8MiB", user_mode_only: true },
];

pub(crate) fn all() -> Vec<Way> {
    [HANDLER, USER].concat()
}

/// Defines a test for each attack, which runs in the ways that are named beside it.
macro_rules! attacks {
    ($($name:ident: $ways:ident),* $(,)?) => {
        mod attacks {
            $(#[test]
            fn $name() {
                let test = concat!(module_path!(), "::", stringify!($name));
                $crate::ground::attack(test, &$crate::ground::$ways(), super::$name);
            })*
        }
    };
}
pub(crate) use attacks;

/// Runs `body` in a process for each way.
pub(crate) fn attack(test: &'static str, ways: &[Way], body: fn(&Ground)) {
    let test = test.strip_prefix("attack::").expect("a module of this crate");
    if let Some(case) = child::case(test) {
        let _watchdog = watchdog(test, HUNG);
        let way = ways.iter().find(|way| way.name == case).expect("a way of this attack");
        if let Some(ground) = Ground::new(*way, seed(test)) {
            ground.attack(body);
        }
        return;
    }
    each(test, ways, expect_quiet);
}

/// The same for what far memory cannot bear: a process may also end as `loud` says, with the
/// line that names the cause.
pub(crate) fn attack_or_end(test: &'static str, ways: &[Way], body: fn(&Ground), loud: &str) {
    if child::case(test.strip_prefix("attack::").expect("a module of this crate")).is_some() {
        return attack(test, ways, body);
    }
    let test = test.strip_prefix("attack::").expect("a module of this crate");
    each(test, ways, |ended| {
        let aborted = ended.status.signal() == Some(libc::SIGABRT);
        if !(aborted && ended.text.contains(loud)) {
            expect_quiet(ended);
        }
    });
}

/// Runs a test's cases one after the other: those asked for, or a few that differ from test to
/// test, so that the suite has all pairs of neighbours in seconds.
fn each(test: &str, ways: &[Way], expect: impl Fn(&Ended)) {
    let few = amount(4).max(2);
    let asked = std::env::var("FARHEAP_ATTACK_WAY").ok();
    let first = test.bytes().map(usize::from).sum::<usize>();
    let is_chosen = |at: usize, way: &Way| match &asked {
        Some(part) => way.name.contains(part),
        None => (at + first).is_multiple_of(ways.len().div_ceil(few)),
    };
    let chosen: Vec<_> = ways.iter().enumerate().filter(|(at, way)| is_chosen(*at, way)).collect();
    let mut skips = Vec::new();
    for (_, way) in &chosen {
        println!("{test}, {}", way.name);
        let ended = run(test, way);
        let skip = ended.text.lines().find_map(|line| line.split_once("skipped: "));
        skips.extend(skip.map(|(_, why)| why.to_owned()));
        expect(&ended);
    }
    let all = skips.len() == chosen.len();
    // Counted as one skipped test, if nothing of it could be run.
    for why in skips.iter().take(1) {
        println!("{}: {why}", if all { "skipped" } else { "not everywhere" });
    }
}

/// Runs one case in a process of its own.
fn run(test: &str, way: &Way) -> Ended {
    child::run(test, way.name, |command| {
        if way.user_mode_only {
            refuse(command, Refused::KernelFaults);
        }
    })
}

/// The process succeeded, and wrote little.
fn expect_quiet(ended: &Ended) {
    assert!(ended.status.success(), "the process ended with {}:\n{}", ended.status, ended.text);
    let lines = ended.text.lines().count();
    let first: Vec<_> = ended.text.lines().take(LINES_MAX).collect();
    assert!(lines <= LINES_MAX, "{lines} lines of output:\n{}", first.join("\n"));
}

/// Memory under attack, far or ordinary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    base: usize,
    pub(crate) len: usize,
}

impl Stretch {
    /// Memory that was given up as a plain address.
    pub(crate) fn of(base: usize, len: usize) -> Stretch {
        Stretch { base, len }
    }

    /// The address of a byte; the end is one too.
    pub(crate) fn at(&self, offset: usize) -> usize {
        assert!(offset <= self.len);
        self.base + offset
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        assert!(at + 8 <= self.len);
        // SAFETY: inside the stretch; aligned or not, nobody writes to it meanwhile.
        unsafe { (self.at(at) as *const u64).read_unaligned() }
    }

    pub(crate) fn set_word(&self, at: usize, word: u64) {
        assert!(at + 8 <= self.len);
        // SAFETY: inside the stretch, which belongs to the attack.
        unsafe { (self.at(at) as *mut u64).write_unaligned(word) };
    }

    /// A copy of some bytes, read as a program reads.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.start <= range.end && range.end <= self.len);
        let mut copy = vec![0; range.len()];
        let from = self.at(range.start) as *const u8;
        // SAFETY: inside the stretch; the copy is as long and elsewhere.
        unsafe { from.copy_to_nonoverlapping(copy.as_mut_ptr(), range.len()) };
        copy
    }

    /// Writes some bytes as a program writes.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        let to = self.at(at) as *mut u8;
        // SAFETY: inside the stretch, which belongs to the attack; the bytes are elsewhere.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Fills everything with what a number says.
    pub(crate) fn fill(&self, number: u64) {
        (0..self.len / 8).for_each(|at| self.set_word(at * 8, stamp(number, at)));
    }
}

/// The word at a place of memory that is filled with a number.
pub(crate) fn stamp(number: u64, at: usize) -> u64 {
    (at as u64 ^ number.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

/// Far memory, its twin, and the heap.
pub(crate) struct Ground {
    pub(crate) way: Way,
    pub(crate) heap: Heap,
    pub(crate) limit: usize,
    /// System calls may touch far memory that is not resident.
    pub(crate) kernel: bool,
    pub(crate) seed: u64,
    pub(crate) far: Stretch,
    /// Ordinary memory with the same content at the start.
    pub(crate) near: Stretch,
    /// The attack leaves far memory in a state in which it cannot be given back.
    pub(crate) spoiled: AtomicBool,
    stop: AtomicBool,
    /// Times that the pressure went through as many units as are in a pass.
    passes: AtomicU64,
    /// How many of them somebody waits for.
    wanted: AtomicU64,
}

impl Ground {
    /// `None`, with the reason printed, where this is not permitted.
    fn new(way: Way, seed: u64) -> Option<Ground> {
        // A small span: what locks everything goes through all of it.
        let conf = format!("{},capacity:1GiB,span:256MiB{}", way.conf, place());
        let (_, limit) = crate::common::config(&conf).limits().expect("options");
        let limit = limit.as_usize();
        let heap = heap(&conf)?;
        let kernel = heap.region().serves_kernel_faults() && !way.conf.contains("in_thread");
        if HANDLER.contains(&way) && !kernel {
            println!("skipped: faults of system calls are not served without privileges");
            return None;
        }
        let len = 1 << 20;
        let (far, near) = (allocate(len), map(len));
        far.fill(seed);
        near.fill(seed);
        Some(Ground {
            way,
            heap,
            limit,
            kernel,
            seed,
            far,
            near,
            spoiled: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            passes: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
        })
    }

    /// Runs an attack under pressure, and looks at what it left.
    fn attack(self, body: fn(&Ground)) {
        std::thread::scope(|scope| {
            scope.spawn(|| self.press());
            scope.spawn(|| self.evict());
            let stop = StopOnDrop(&self.stop);
            self.await_passes(1);
            body(&self);
            self.await_passes(1);
            drop(stop);
        });
        let stats = self.heap.stats();
        println!("{} pages out, {} busy", stats.pages_out, stats.evict_busy);
        assert!(stats.pages_out > 0, "there was no pressure");
        assert_eq!((stats.poisoned, stats.panics), (0, 0));
        assert!(stats.resident_bytes_max.0 <= self.limit as u64, "{stats:?}");
        if self.spoiled.load(Ordering::Relaxed) {
            return;
        }
        free(self.far);
        self.heap.shutdown().expect("nothing is in use");
    }

    /// Keeps half as much memory again as the limit in use, and checks it. It pauses where nobody waits for it: the
    /// more it works, the longer the attack takes, for the whole of which it works.
    fn press(&self) {
        // About as long as it works between two pauses.
        let pause = Duration::from_millis(1);
        let mine = allocate((self.limit / 2 * 3).next_multiple_of(ALIGN));
        let units = mine.len / UNIT;
        let mut dice = Dice::new(self.seed ^ 1);
        let mut stamps = vec![0_u64; units];
        while !self.stop.load(Ordering::Relaxed) {
            for (unit, held) in stamps.iter_mut().enumerate() {
                let at = unit * UNIT + dice.below(64) as usize * 8;
                let seen = (mine.word(unit * UNIT), mine.word(unit * UNIT + UNIT - 8));
                assert_eq!(seen, (*held, *held), "unit {unit} of the pressure's memory");
                if dice.below(2) == 0 {
                    *held = dice.roll();
                    mine.set_word(at, 0);
                    mine.set_word(unit * UNIT, *held);
                    mine.set_word(unit * UNIT + UNIT - 8, *held);
                }
                let is_wanted =
                    || self.passes.load(Ordering::Relaxed) < self.wanted.load(Ordering::Relaxed);
                if unit % PAUSE_UNITS == 0 && !is_wanted() {
                    std::thread::sleep(pause);
                }
                if unit % PASS_UNITS == 0 {
                    self.passes.fetch_add(1, Ordering::Relaxed);
                    if self.stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            }
        }
        free(mine);
    }

    /// Evicts what is attacked, again and again. An error is no end: some attacks forbid it.
    fn evict(&self) {
        // Long enough to use what came back.
        let pause = Duration::from_millis(5);
        while !self.stop.load(Ordering::Relaxed) {
            drop(self.evict_far());
            std::thread::sleep(pause);
        }
    }

    /// Whether a page that the kernel writes to may be dropped, so that it must be pinned: its
    /// contents leave by `UFFDIO_MOVE` elsewhere, which refuses such pages.
    pub(crate) fn drops_busy_pages(&self) -> bool {
        self.way.conf.contains("install:copy")
    }

    /// How many times an attack is repeated: `times` in every change, more when asked for, fewer otherwise.
    pub(crate) fn rounds(&self, times: usize) -> usize {
        let factor = std::env::var("FARHEAP_ATTACK_ROUNDS").ok().and_then(|text| text.parse().ok());
        factor.map_or_else(|| amount(times), |factor: usize| times * factor)
    }

    pub(crate) fn evict_far(&self) -> farheap::Result<()> {
        self.heap
            .region()
            .advise(&[bytes(self.far.at(0) as *const u8, self.far_len())], Advice::PageOutNow)
    }

    fn far_len(&self) -> ByteCount {
        ByteCount(self.far.len as u64)
    }

    /// Waits until the pressure went through this number of passes more.
    pub(crate) fn await_passes(&self, more: u64) {
        let until = self.passes.load(Ordering::Relaxed) + more;
        self.wanted.fetch_max(until, Ordering::Relaxed);
        while self.passes.load(Ordering::Relaxed) < until {
            std::thread::sleep(Duration::from_millis(1)); // The watchdog bounds it.
        }
    }

    pub(crate) fn dice(&self) -> Dice {
        Dice::new(self.seed)
    }

    /// Does the same to both twins, which answer alike. Where system calls do not wait for far
    /// pages they may fail; not so when the memory is pinned.
    pub(crate) fn same<T: PartialEq + Debug>(
        &self,
        what: &str,
        act: impl Fn(&Stretch) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let near = act(&self.near);
        let mut far = act(&self.far);
        if !self.kernel && far != near {
            self.pinned(|| far = act(&self.far));
        }
        assert!(far == near, "{what}: {}, and {} on ordinary memory", brief(&far), brief(&near));
        far
    }

    /// Runs `body` while what is attacked is pinned.
    pub(crate) fn pinned(&self, body: impl FnOnce()) {
        let start = self.far.at(0) as *const u8;
        let pinned = self.heap.region().pin(bytes(start, self.far_len()));
        let _pinned = pinned.expect("a small part of the limit");
        body();
    }

    /// The twins have the same content.
    pub(crate) fn assert_alike(&self, what: &str) {
        self.assert_alike_in(what, 0..self.far.len);
    }

    pub(crate) fn assert_alike_in(&self, what: &str, range: Range<usize>) {
        let (far, near) = (self.far.bytes(range.clone()), self.near.bytes(range.clone()));
        // All at once first, which is one call of the C library.
        if far != near {
            let at = far.iter().zip(&near).position(|(far, near)| far != near);
            let at = at.expect("they differ");
            let (far, near) = (&far[at..(at + 8).min(far.len())], &near[at..]);
            let near = &near[..far.len()];
            panic!(
                "{what}: byte {} is {far:x?}, and {near:x?} in ordinary memory",
                range.start + at
            );
        }
    }
}

/// Enough of an outcome to recognise it.
fn brief<T: Debug>(outcome: &Result<T, Errno>) -> String {
    let mut text = format!("{outcome:?}");
    if text.len() > 80 {
        text.truncate(80);
        text.push_str("...");
    }
    text
}

/// Where cold pages go: into memory, because on a disk that is slow to free what a file occupied
/// the attacks of this suite took 40 times as long. Runs that are asked to be long use the disk.
fn place() -> &'static str {
    let probe = tempfile::tempfile_in("/dev/shm");
    if probe.is_ok() && std::env::var_os("FARHEAP_ATTACK_ROUNDS").is_none() {
        ",dir:/dev/shm"
    } else {
        ""
    }
}

fn layout(len: usize) -> Layout {
    Layout::from_size_align(len, ALIGN).expect("a power of two")
}

/// Far memory that is zero.
pub(crate) fn allocate(len: usize) -> Stretch {
    let block = Far.allocate_zeroed(layout(len)).expect("the device has room");
    Stretch { base: block.cast::<u8>().as_ptr() as usize, len }
}

pub(crate) fn free(stretch: Stretch) {
    let block = NonNull::new(stretch.base as *mut u8).expect("not null");
    // SAFETY: allocated with this layout, and not used any more.
    unsafe { Far.deallocate(block, layout(stretch.len)) };
}

/// Ordinary memory that is zero, between two gaps of address space.
pub(crate) fn map(len: usize) -> Stretch {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    let gap = call(libc::SYS_mmap, &[0, len + 3 * ALIGN, 0, flags, usize::MAX, 0]).expect("space");
    let base = (gap + ALIGN).next_multiple_of(ALIGN);
    call(libc::SYS_mprotect, &[base, len, protection]).expect("just mapped");
    Stretch { base, len }
}
