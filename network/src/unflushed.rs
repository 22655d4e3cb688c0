//! Blocks that were written and not flushed.
//!
//! A flush covers the writes that were reported before it was sent. Others are reported meanwhile, which the next one is to
//! cover; so there are two sets, and each flush turns to the other one first:
//!
//! ```text
//!   writer:  the server's reply ---- looks at the turn, adds to that set ---- reports the write
//!   flusher: turns ---- sends FLUSH ---- the server's reply ---- clears the set that was looked at before the turn
//! ```
//! A writer that adds to the cleared set has looked before the turn, so that its reply came before FLUSH was sent. One that
//! adds after the set was cleared leaves blocks in it of which the server's disk knows: they count for longer than they must.

use crate::blocks::BlockSet;
use crate::sync::{AtomicU64, Ordering, fence};

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Unflushed {
    sets: [BlockSet; 2],
    turn: AtomicU64,
}

impl Unflushed {
    pub(crate) fn new(bytes: u64) -> Unflushed {
        Unflushed { sets: [(); 2].map(|()| BlockSet::new(bytes)), turn: AtomicU64::new(0) }
    }

    fn set(&self, turn: u64) -> &BlockSet {
        &self.sets[(turn % 2) as usize]
    }

    /// A server has written blocks, of which nobody was told yet.
    pub(crate) fn add(&self, offset: u64, len: u64) {
        fence(Ordering::SeqCst); // Pairs with that in `begin`: what this flush does not cover sees its turn.
        self.set(self.turn.load(Ordering::SeqCst)).insert(offset, len);
    }

    /// Nobody needs the content of blocks any more.
    pub(crate) fn remove(&self, offset: u64, len: u64) {
        self.sets.iter().for_each(|set| set.remove(offset, len));
    }

    /// A flush begins; one at a time. Returns what its end is reported with.
    pub(crate) fn begin(&self) -> u64 {
        let turn = self.turn.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst); // Pairs with that in `add`.
        turn
    }

    /// The flush that began there has succeeded.
    pub(crate) fn end(&self, turn: u64) {
        self.set(turn).clear();
    }

    /// Blocks of either set, `most` bytes at most, from byte `from` on: where they begin, and their length.
    pub(crate) fn next_run(&self, from: u64, most: u64) -> Option<(u64, u64)> {
        self.sets.iter().filter_map(|set| set.next_run(from, most)).min()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::blocks::BLOCK;

    #[test]
    fn a_flush_covers_what_was_written_before_it_began() {
        let unflushed = Unflushed::new(100 * BLOCK);
        let next = |from: u64| unflushed.next_run(from * BLOCK, 8 * BLOCK);
        unflushed.add(2 * BLOCK, 2 * BLOCK);
        let turn = unflushed.begin();
        unflushed.add(9 * BLOCK, BLOCK);
        assert_eq!((next(0), next(4)), (Some((2 * BLOCK, 2 * BLOCK)), Some((9 * BLOCK, BLOCK))));
        unflushed.end(turn);
        assert_eq!((next(0), next(10)), (Some((9 * BLOCK, BLOCK)), None));
        // One that failed leaves all of it to the next ones.
        unflushed.begin();
        unflushed.add(50 * BLOCK, BLOCK);
        let turn = unflushed.begin();
        unflushed.end(turn);
        assert_eq!(next(0), Some((9 * BLOCK, BLOCK)));
        assert_eq!(next(10), None);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::blocks::BLOCK;
    use crate::sync::Ordering::SeqCst;
    use loom::sync::Arc;
    use loom::thread;

    /// A server that forgets what was not flushed when it ends: what is neither on its disk nor in the sets afterwards is
    /// lost in silence.
    #[test]
    fn loom_what_is_not_on_the_disk_is_in_one_of_the_sets() {
        loom::model(|| {
            let world = Arc::new((Unflushed::new(BLOCK), AtomicU64::new(0), AtomicU64::new(0)));
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || {
                let (unflushed, memory, _) = &*other;
                memory.store(1, SeqCst);
                unflushed.add(0, BLOCK);
            });
            let (unflushed, memory, disk) = &*world;
            for _ in 0..2 {
                let turn = unflushed.begin();
                disk.store(memory.load(SeqCst), SeqCst);
                unflushed.end(turn);
            }
            writer.join().expect("the writer");
            let is_known = unflushed.next_run(0, BLOCK).is_some();
            assert!(is_known || disk.load(SeqCst) == 1);
        });
    }
}
