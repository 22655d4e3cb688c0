//! The application's own system calls on far memory, above all those whose I/O is in flight while
//! the page is under pressure: a page that the kernel may be writing is never dropped.
#![expect(unsafe_code, reason = "hands far memory to system calls")]

use crate::common::{Dice, amount, bytes, seed, watchdog};
use crate::harness::{Far, PAGE, Stop, config, read_word};
use farheap::region::{Install, PinGuard};
use io_uring::{IoUring, opcode, types};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);
/// Bytes of one read.
const UNIT: usize = PAGE;
const FILE_UNITS: usize = 4096;
/// Reads of each kind.
const READS: usize = 2_000;
/// The same under a pin, for which the evictor and a handler have to run each time: beside 50 runnable
/// processes 5,000 took over ten minutes.
const READS_PINNED: usize = 500;

/// Number of reads by the way in which pages are installed.
fn reads(install: Install) -> usize {
    amount(if install == Install::Copy { READS_PINNED } else { READS })
}
/// Reads in flight at the same time.
const DEPTH: usize = 16;

/// The first and last word of each unit of the file.
fn content(unit: usize) -> u64 {
    (unit as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// A file of known content, opened for direct I/O; removed when dropped.
struct Known {
    path: PathBuf,
    file: File,
}

impl Known {
    fn new(name: &str) -> Known {
        // Not a tmpfs, which has no direct I/O worth the name.
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let dir =
            if std::fs::write(dir.join("probe"), b"").is_ok() { dir } else { std::env::temp_dir() };
        let path = dir.join(format!("known-{name}-{}", std::process::id()));
        let mut file = File::create(&path).expect("a temporary file");
        let mut bytes = vec![0u8; UNIT];
        for unit in 0..FILE_UNITS {
            bytes[..8].copy_from_slice(&content(unit).to_ne_bytes());
            bytes[UNIT - 8..].copy_from_slice(&content(unit).to_ne_bytes());
            file.write_all(&bytes).expect("space for 16 MiB");
        }
        file.sync_all().expect("the file is on the disk");
        let mut options = OpenOptions::new();
        options.read(true);
        let direct = options.custom_flags(libc::O_DIRECT).open(&path);
        let file = direct.unwrap_or_else(|_| File::open(&path).expect("just written"));
        Known { path, file }
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}

/// The unit of far memory at `addr`, as a buffer for a system call.
fn buffer(addr: usize) -> &'static mut [u8] {
    // SAFETY: the case hands each unit to one call at a time; the region outlives the case.
    unsafe { std::slice::from_raw_parts_mut(addr as *mut u8, UNIT) }
}

fn check_unit(addr: usize, unit: usize) {
    let seen = (read_word(addr), read_word(addr + UNIT - 8));
    assert_eq!(seen, (content(unit), content(unit)), "read of unit {unit}");
}

/// A region eight times its limit, and threads that keep it under pressure while `body` runs.
/// `false` where that is not permitted.
fn under_pressure(install: Install, body: impl FnOnce(&Far, usize)) -> bool {
    let config = config(install);
    let pages = (config.limit.0 * 2 / 4096) as usize;
    let Some(far) = Far::new(config, pages, 1) else { return false };
    if !far.region.serves_kernel_faults() {
        println!("skipped: faults of system calls are not served without privileges");
        return false;
    }
    // The first quarter is for reads, the rest for the pressure.
    let mine = pages / 4;
    let stop = Stop::default();
    far.fill(0..pages);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_set() {
                far.fill(mine..pages);
                far.check(mine..pages);
            }
        });
        scope.spawn(|| {
            while !stop.is_set() {
                far.evict(0..mine);
            }
        });
        let stopped = StopOnDrop(&stop);
        body(&far, mine);
        drop(stopped);
    });
    let stats = far.stats();
    println!("{install:?}: {} pages out, {} busy", stats.pages_out, stats.evict_busy);
    assert!(stats.pages_out > 0, "there was no pressure");
    assert_eq!((stats.poisoned, stats.panics), (0, 0));
    true
}

/// Also when the body panics.
struct StopOnDrop<'a>(&'a Stop);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.now();
    }
}

/// Keeps a range in memory while the kernel reads into it, where the way of evicting needs that.
fn pinned(far: &Far, addr: usize, install: Install) -> Option<PinGuard<'_>> {
    let pin = || far.region.pin(bytes(addr as *const u8, UNIT_BYTES)).expect("a few pins");
    (install == Install::Copy).then(pin)
}

const UNIT_BYTES: farheap::ByteCount = farheap::ByteCount::kib(4);

/// Splits the kernel's mapping at every fourth page, all of which may be written. `false`: not permitted.
fn split(far: &Far, units: usize) -> bool {
    const ALL: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    (2..units).step_by(4).all(|unit| {
        let place = (far.addr(0) + unit * UNIT) as *mut libc::c_void;
        // By turns.
        let is_advised = unit / 4 % 2 == 0;
        #[expect(clippy::disallowed_methods, reason = "does what a program does to its own memory")]
        let rc = if is_advised {
            // SAFETY: changes nothing of what the memory holds.
            unsafe { libc::madvise(place, UNIT, libc::MADV_DODUMP) }
        } else {
            // SAFETY: as above, and takes no right away.
            unsafe { libc::mprotect(place, UNIT, ALL) }
        };
        if rc != 0 {
            println!("skipped: memory may not be split: {}", std::io::Error::last_os_error());
        }
        rc == 0
    })
}

fn whole(_: &Far, _: usize) -> bool {
    true
}

type Prepare = fn(&Far, usize) -> bool;

fn preads(name: &'static str, install: Install, prepare: Prepare) -> bool {
    const THREADS: usize = 4;
    let _watchdog = watchdog(name, LIMIT);
    let seed = seed(name);
    let known = Known::new(name);
    under_pressure(install, |far, units| {
        if !prepare(far, units) {
            return;
        }
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let known = &known;
                scope.spawn(move || {
                    let mut dice = Dice::new(seed + thread as u64);
                    // Own units, beside those of the other threads.
                    for _ in 0..reads(install).div_ceil(THREADS) {
                        let at = dice.below((units / THREADS) as u64) as usize * THREADS + thread;
                        let unit = dice.below(FILE_UNITS as u64) as usize;
                        let addr = far.addr(0) + at * UNIT;
                        let pinned = pinned(far, addr, install);
                        known.file.read_exact_at(buffer(addr), (unit * UNIT) as u64).expect("read");
                        drop(pinned);
                        check_unit(addr, unit);
                    }
                });
            }
        });
    })
}

fn uring_reads(name: &'static str, install: Install) {
    let _watchdog = watchdog(name, LIMIT);
    let mut dice = Dice::new(seed(name));
    let known = Known::new(name);
    let Ok(mut ring) = IoUring::new(DEPTH as u32) else {
        println!("skipped: io_uring is not permitted here");
        return;
    };
    under_pressure(install, |far, units| {
        let fd = types::Fd(known.file.as_raw_fd());
        for _ in 0..reads(install).div_ceil(DEPTH) {
            let mut batch = Vec::new();
            for n in 0..DEPTH {
                let at = dice.below((units / DEPTH) as u64) as usize * DEPTH + n;
                let (addr, unit) =
                    (far.addr(0) + at * UNIT, dice.below(FILE_UNITS as u64) as usize);
                let pinned = pinned(far, addr, install);
                let read = opcode::Read::new(fd, addr as *mut u8, UNIT as u32)
                    .offset((unit * UNIT) as u64)
                    .build()
                    .user_data(n as u64);
                // SAFETY: the units of a batch are distinct and stay mapped until it is done.
                unsafe { ring.submission().push(&read) }.expect("as deep as the batch");
                batch.push((addr, unit, pinned));
            }
            let mut done = 0;
            while done < DEPTH {
                ring.submit_and_wait(DEPTH - done).expect("io_uring works");
                for entry in ring.completion() {
                    assert_eq!(entry.result(), UNIT as i32, "read {}", entry.user_data());
                    done += 1;
                }
            }
            for (addr, unit, pinned) in batch {
                drop(pinned);
                check_unit(addr, unit);
            }
        }
    });
}

#[test]
fn direct_reads_lose_nothing() {
    preads("preads", Install::Auto, whole);
}

#[test]
fn direct_reads_under_a_pin_lose_nothing_without_move() {
    preads("preads-copy", Install::Copy, whole);
}

#[test]
fn direct_reads_into_pages_between_other_mappings_lose_nothing() {
    preads("preads-split", Install::Auto, split);
}

/// A buffer that io_uring keeps pinned is read and written by the device however long it is registered.
fn registered_buffers(name: &'static str, prepare: Prepare) -> bool {
    const PAGES: usize = 4;
    let _watchdog = watchdog(name, LIMIT);
    let mut dice = Dice::new(seed(name));
    let known = Known::new(name);
    let Ok(mut ring) = IoUring::new(1) else {
        println!("skipped: io_uring is not permitted here");
        return false;
    };
    let copy = tempfile::tempfile_in("/var/tmp").expect("a temporary file");
    let run = |ring: &mut IoUring, entry: io_uring::squeue::Entry| {
        // SAFETY: the buffer is registered, and stays mapped.
        unsafe { ring.submission().push(&entry) }.expect("one at a time");
        ring.submit_and_wait(1).expect("io_uring works");
        let done = ring.completion().next().expect("waited for").result();
        assert_eq!(done, UNIT as i32);
    };
    under_pressure(Install::Auto, |far, units| {
        let buffer = libc::iovec { iov_base: far.addr(0) as *mut _, iov_len: PAGES * PAGE };
        // SAFETY: the region outlives the ring's use of it.
        if let Err(error) = unsafe { ring.submitter().register_buffers(&[buffer]) } {
            return println!("skipped: no buffer can be registered: {error}");
        }
        if !prepare(far, units) {
            return;
        }
        for _ in 0..amount(READS) {
            let addr = far.addr(0) + dice.below(PAGES as u64) as usize * UNIT;
            let unit = dice.below(FILE_UNITS as u64) as usize;
            let fd = types::Fd(known.file.as_raw_fd());
            let read = opcode::ReadFixed::new(fd, addr as *mut u8, UNIT as u32, 0);
            run(&mut ring, read.offset((unit * UNIT) as u64).build());
            check_unit(addr, unit);
            crate::harness::write_word(addr, !content(unit));
            let fd = types::Fd(copy.as_raw_fd());
            run(&mut ring, opcode::WriteFixed::new(fd, addr as *const u8, UNIT as u32, 0).build());
            let mut word = [0; 8];
            copy.read_exact_at(&mut word, 0).expect("just written");
            assert_eq!(u64::from_ne_bytes(word), !content(unit), "written from the buffer");
        }
        ring.submitter().unregister_buffers().expect("registered above");
    })
}

#[test]
fn registered_buffers_of_several_mappings_lose_nothing() {
    registered_buffers("registered-split", split);
}

#[test]
fn uring_reads_lose_nothing() {
    uring_reads("uring", Install::Auto);
}

#[test]
fn uring_reads_under_a_pin_lose_nothing_without_move() {
    uring_reads("uring-copy", Install::Copy);
}

/// Calls that copy in the kernel: pipes, `process_vm_readv`, futexes.
#[test]
fn system_calls_find_far_pages_that_are_out() {
    const ROUNDS: usize = 300;
    let _watchdog = watchdog("system calls", LIMIT);
    for install in [Install::Auto, Install::Copy] {
        let permitted = under_pressure(install, |far, units| {
            let mut dice = Dice::new(7);
            let (mut out, mut into) = std::io::pipe().expect("a pipe");
            for round in 0..ROUNDS {
                let mut pick = || far.addr(0) + dice.below(units as u64) as usize * UNIT;
                let (from, to) = (pick(), pick());
                crate::harness::write_word(from, round as u64);
                into.write_all(&buffer(from)[..8]).expect("write(2) from far memory");
                out.read_exact(&mut buffer(to)[..8]).expect("read(2) into far memory");
                assert_eq!(read_word(to), round as u64);
                assert_eq!(process_read(to), round as u64);
                assert_eq!(futex_wait(to, round as u32 + 1), libc::EAGAIN, "the value differs");
            }
        });
        if !permitted {
            return;
        }
    }
}

/// Reads a word of this process as another process would.
fn process_read(addr: usize) -> u64 {
    let mut value = 0u64;
    let local = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: 8 };
    let pid = std::process::id().cast_signed();
    // SAFETY: `local` is a valid word; the call checks `remote`.
    let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    assert_eq!(got, 8, "{}", std::io::Error::last_os_error());
    value
}

/// The `errno` of a wait for a value that is not there.
fn futex_wait(addr: usize, expected: u32) -> i32 {
    #[expect(clippy::disallowed_methods, reason = "futexes have no wrapper in libc")]
    // SAFETY: a wait on an aligned word with another value returns at once.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_futex,
            addr,
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            0usize,
            0,
            0,
        )
    };
    assert_eq!(rc, -1);
    std::io::Error::last_os_error().raw_os_error().expect("the call failed")
}
