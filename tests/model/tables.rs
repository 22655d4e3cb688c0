//! A buffer pool: pages that all threads share, and a B-tree in which each has its own keys.

use crate::common::Dice;
use farheap::PageId;
use farheap::pool::BufferPool;
use farheap_collections::pool::BTree;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const PAGES_MAX: usize = 8_000;
const KEYS: u64 = 3_000;

pub(crate) struct Tables {
    pool: Arc<BufferPool>,
    tree: BTree,
    /// Pages and what they hold; a thread that works on one holds its lock.
    pages: Mutex<Vec<Arc<Mutex<Page>>>>,
}

struct Page {
    id: PageId,
    /// `None`: freed.
    stamp: Option<u64>,
}

fn word(stamp: u64, at: usize) -> [u8; 8] {
    (stamp ^ at as u64).to_le_bytes()
}

fn fill(bytes: &mut [u8], stamp: u64) {
    for (at, word_of) in bytes.chunks_exact_mut(8).enumerate() {
        word_of.copy_from_slice(&word(stamp, at));
    }
}

fn check(bytes: &[u8], stamp: u64, id: PageId) {
    let wrong = bytes.chunks_exact(8).enumerate().position(|(at, seen)| seen != word(stamp, at));
    assert_eq!(wrong, None, "a word of page {id}");
}

impl Tables {
    pub(crate) fn new(pool: Arc<BufferPool>) -> Tables {
        let tree = BTree::create(&pool).expect("an empty tree");
        Tables { pool, tree, pages: Mutex::default() }
    }

    /// A page that nobody works on.
    fn pick(&self, dice: &mut Dice) -> Option<Arc<Mutex<Page>>> {
        let pages = self.pages.lock().expect("no thread panicked");
        let len = pages.len() as u64;
        (len > 0).then(|| Arc::clone(&pages[dice.below(len) as usize]))
    }

    pub(crate) fn page_step(&self, dice: &mut Dice) {
        let few = self.pages.lock().expect("no thread panicked").len() < PAGES_MAX;
        if few && dice.below(4) == 0 {
            return self.add(dice);
        }
        let Some(picked) = self.pick(dice) else { return };
        let mut page = picked.lock().expect("no thread panicked");
        let (id, Some(stamp)) = (page.id, page.stamp) else { return };
        let payload = self.pool.payload() / 8 * 8;
        match dice.below(10) {
            0..3 => {
                let mut guard = self.pool.fix_exclusive(id).expect("within the deadline");
                check(&guard[..payload], stamp, id);
                let new = dice.roll();
                fill(&mut guard[..payload], new);
                page.stamp = Some(new);
            }
            3..6 => {
                let guard = self.pool.fix_shared(id).expect("within the deadline");
                check(&guard[..payload], stamp, id);
            }
            6..9 => {
                let ends = |guard: farheap::pool::OptimisticGuard<'_>| {
                    Some((guard.u64(0)?, guard.u64(payload - 8)?))
                };
                let seen = self.pool.read_optimistic(id, ends).expect("within the deadline");
                assert_eq!(seen, Some((stamp, stamp ^ (payload as u64 / 8 - 1))), "page {id}");
            }
            _ => {
                let guard = self.pool.fix_exclusive(id).expect("within the deadline");
                check(&guard[..payload], stamp, id);
                guard.free();
                page.stamp = None;
            }
        }
        let freed = page.stamp.is_none();
        drop(page);
        if freed {
            let mut pages = self.pages.lock().expect("no thread panicked");
            // A page that another thread works on is not free, or goes another time.
            pages.retain(|page| page.try_lock().map_or(true, |page| page.stamp.is_some()));
        }
    }

    fn add(&self, dice: &mut Dice) {
        // The table, or the limit, may be full.
        let Ok(mut guard) = self.pool.allocate() else { return };
        let payload = self.pool.payload() / 8 * 8;
        let stamp = dice.roll();
        fill(&mut guard[..payload], stamp);
        let page = Page { id: guard.id(), stamp: Some(stamp) };
        drop(guard);
        self.pages.lock().expect("no thread panicked").push(Arc::new(Mutex::new(page)));
    }

    /// Looks at every page once more.
    pub(crate) fn check_all(&self) {
        let payload = self.pool.payload() / 8 * 8;
        for page in self.pages.lock().expect("no thread panicked").iter() {
            let page = page.lock().expect("no thread panicked");
            if let Some(stamp) = page.stamp {
                let guard = self.pool.fix_shared(page.id).expect("nobody has it");
                check(&guard[..payload], stamp, page.id);
            }
        }
        self.pool.flush().expect("the file has room");
    }

    pub(crate) fn keys(&self, owner: u64) -> Keys<'_> {
        Keys { tree: &self.tree, owner, map: BTreeMap::new() }
    }
}

/// The keys of one thread.
pub(crate) struct Keys<'a> {
    tree: &'a BTree,
    owner: u64,
    map: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Keys<'_> {
    pub(crate) fn step(&mut self, dice: &mut Dice) {
        let key = format!("{:016x}-{:05}", self.owner, dice.below(KEYS)).into_bytes();
        match dice.below(10) {
            0..4 => {
                let value: Vec<u8> = (0..1 + dice.below(200)).map(|_| dice.roll() as u8).collect();
                // The table may be full.
                if self.tree.insert(&key, &value).is_ok() {
                    self.map.insert(key, value);
                }
            }
            4..8 => {
                let seen = self.tree.get(&key).expect("within the deadline");
                assert_eq!(seen.as_ref(), self.map.get(&key), "{}", String::from_utf8_lossy(&key));
            }
            _ => {
                let was = self.tree.remove(&key).expect("within the deadline");
                assert_eq!(was, self.map.remove(&key).is_some());
            }
        }
    }

    pub(crate) fn check_all(&self) {
        let prefix = format!("{:016x}-", self.owner).into_bytes();
        let entries = self.tree.scan(&prefix).map(|entry| entry.expect("within the deadline"));
        let own = entries.take_while(|(key, _)| key.starts_with(&prefix));
        assert!(own.eq(self.map.clone()), "a scan finds other keys or values");
    }
}
