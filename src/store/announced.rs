//! Readers that announce themselves at memory which somebody else may use for something new.
//!
//! ```text
//!   reader: announced += 1; [fence]; does a word still lead there? -- yes --> reads; announced -= 1
//!                                                                  '-- no --> announced -= 1
//!   writer: no word leads there any more; [fence]; announced = 0? -- yes --> writes
//! ```
//! Of the two fences one is first: either the reader sees that no word leads there, or the writer sees the
//! reader. Used by `ring`; knows nothing but atomics, and loom runs it.

use crate::base::sync::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Announced(AtomicU32);

impl Announced {
    pub(super) fn new() -> Announced {
        Announced(AtomicU32::new(0))
    }

    /// Reads by `read` if `is_there` still says so, which looks at the word that leads there.
    pub(super) fn read<T>(
        &self,
        is_there: impl FnOnce() -> bool,
        read: impl FnOnce() -> T,
    ) -> Option<T> {
        self.0.fetch_add(1, Relaxed);
        fence(SeqCst);
        let found = is_there().then(read);
        // Pairs with the Acquire in `is_alone`: the reads come before what is written next.
        self.0.fetch_sub(1, Release);
        found
    }

    /// Whether nobody reads, or will: for who has changed all words that led there.
    pub(super) fn is_alone(&self) -> bool {
        fence(SeqCst);
        self.0.load(Acquire) == 0
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::base::sync::AtomicU64;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_nobody_reads_what_is_used_for_something_new() {
        loom::model(|| {
            let place = Arc::new((Announced::new(), AtomicU64::new(1), UnsafeCell::new(0)));
            let of_reader = Arc::clone(&place);
            let reader = thread::spawn(move || {
                let (announced, word, bytes) = &*of_reader;
                let is_there = || word.load(Acquire) == 1;
                // Loom fails when the bytes are written meanwhile.
                announced.read(is_there, || bytes.with(|_| ()));
            });
            let (announced, word, bytes) = &*place;
            word.store(0, Release);
            if announced.is_alone() {
                bytes.with_mut(|_| ());
            }
            reader.join().expect("the reader asserts nothing false");
        });
    }
}
