//! The store that keeps blocks compressed in memory: which bytes come back, whatever moves meanwhile.

#![expect(unsafe_code, reason = "discards, and reads into raw buffers")]

use super::{MIB, PAGE, Page, run, whole};
use crate::common::StopOnDrop;
use crate::common::faulty::{FaultControl, FaultyStore};
use farheap::ByteCount;
use farheap::store::{CompressedStore, MemStore, Op, Queue, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Blocks of the next store: a multiple of what the ring holds.
const BLOCKS: u64 = 4096;
/// Memory of the ring: the least, 8 segments.
const RING: ByteCount = ByteCount(2 * MIB.0);
const EIO: i32 = 5;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % bound
    }
}

/// What a block holds in a version of it: odd ones do not compress, others to a quarter.
fn content(block: u64, version: u64) -> Page {
    let mut random = Random(block << 32 | version);
    let noise = if version % 2 == 1 { PAGE } else { PAGE / 4 };
    let mut page = Page([version as u8; PAGE]);
    for bytes in page.0[..noise].chunks_exact_mut(8) {
        bytes.copy_from_slice(&random.below(u64::MAX).to_le_bytes());
    }
    page
}

fn store() -> (Arc<CompressedStore>, FaultControl) {
    let memory = MemStore::new(ByteCount(BLOCKS * PAGE as u64)).expect("memory");
    let next = FaultyStore::new(Arc::new(memory), 1);
    let control = next.control();
    let store = CompressedStore::new(Arc::new(next), RING, ByteCount(PAGE as u64));
    (Arc::new(store.expect("memory")), control)
}

fn write(queue: &mut dyn Queue, block: u64, mut pages: Vec<Page>) -> Result<(), farheap::Error> {
    run(queue, Op::Write, block * PAGE as u64, &whole(&mut pages))
}

fn read(queue: &mut dyn Queue, block: u64, count: u64) -> Vec<Page> {
    let mut pages = vec![Page([0xEE; PAGE]); count as usize];
    run(queue, Op::Read, block * PAGE as u64, &whole(&mut pages)).expect("nothing is lost");
    pages
}

fn expect(found: &Page, block: u64, version: u64, what: &str) {
    assert!(*found == content(block, version), "block {block}, version {version}, {what}");
}

/// A random sequence of writes, reads and discards on one queue; `fails` says whether writes may.
fn sequence(seed: u64, store: &CompressedStore, fails: bool) {
    let mut random = Random(seed);
    let mut queue = store.open_queue(8).expect("a queue");
    let mut versions: Vec<Option<u64>> = vec![None; BLOCKS as usize];
    for step in 0..12_000 {
        let count = 1 + random.below(8);
        let block = random.below(BLOCKS - count);
        let blocks = block..block + count;
        match random.below(10) {
            0..6 => {
                let version = step * 2 + u64::from(random.below(4) == 0);
                let pages = blocks.clone().map(|block| content(block, version)).collect();
                let written = write(&mut *queue, block, pages);
                assert!(written.is_ok() || fails, "{written:?}");
                // What a write that failed has left is not known.
                let now = written.is_ok().then_some(version);
                blocks.for_each(|block| versions[block as usize] = now);
            }
            6..9 => {
                for (block, found) in (block..).zip(read(&mut *queue, block, count)) {
                    if let Some(version) = versions[block as usize] {
                        expect(&found, block, version, "read");
                    }
                }
            }
            _ => {
                let (offset, len) = (block * PAGE as u64, count * PAGE as u64);
                // SAFETY: the test keeps nothing there from now on.
                unsafe { store.discard(offset, len) }.expect("memory can be discarded");
                blocks.for_each(|block| versions[block as usize] = None);
            }
        }
    }
    for (block, version) in (0..).zip(versions) {
        let Some(version) = version else { continue };
        let mut page = Page([0; PAGE]);
        // SAFETY: the page is ours.
        unsafe { store.read_now(block * PAGE as u64, page.0.as_mut_ptr(), PAGE) }
            .expect("read now");
        expect(&page, block, version, "read now");
    }
    drop(queue);
    // SAFETY: the test is at its end.
    unsafe { store.discard(0, store.capacity().0) }.expect("memory can be discarded");
    assert_eq!(store.compressed(), ByteCount::ZERO);
}

#[test]
fn what_was_written_last_is_read_wherever_it_is_by_then() {
    for (seed, delay) in [(1, Duration::ZERO), (2, Duration::from_micros(300))] {
        let (store, next) = store();
        next.delay(delay);
        sequence(seed, &store, false);
    }
}

#[test]
fn a_next_store_that_fails_takes_nothing_of_what_is_kept() {
    let (store, next) = store();
    next.fail_fraction(Op::Write, 300_000, EIO);
    sequence(3, &store, true);
    assert!(next.injected() > 100, "{} writes failed", next.injected());
}

#[test]
fn readers_see_whole_blocks_while_these_move_to_the_next_store() {
    let (store, next) = store();
    next.delay(Duration::from_micros(100));
    // Read while others are written: the oldest, which go first, again and again.
    const READ: u64 = 1024;
    let mut queue = store.open_queue(8).expect("a queue");
    for round in 0..6 {
        let version = round * 2;
        for block in 0..READ {
            write(&mut *queue, block, vec![content(block, version)]).expect("there is room");
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let others = StopOnDrop(&stop);
            let readers: Vec<_> = (0..2)
                .map(|reader| {
                    let (store, stop) = (&store, &stop);
                    threads.spawn(move || {
                        let mut queue = store.open_queue(4).expect("a queue");
                        let mut random = Random(reader);
                        while !stop.load(Ordering::Relaxed) {
                            let block = random.below(READ - 4);
                            for (block, found) in (block..).zip(read(&mut *queue, block, 4)) {
                                expect(&found, block, version, "beside writes");
                            }
                        }
                    })
                })
                .collect();
            for block in READ..BLOCKS {
                write(&mut *queue, block, vec![content(block, version)]).expect("there is room");
            }
            drop(others);
            for reader in readers {
                reader.join().expect("readers assert nothing false");
            }
        });
        assert!(store.compressed() >= RING, "{} are kept in {RING}", store.compressed());
    }
}
