//! The protocol of the page latch, in all interleavings of a few threads.

use super::*;
use loom::sync::Arc;
use loom::thread;

struct Page {
    latch: Latch,
    content: [AtomicU64; 2],
}

fn absent() -> Arc<Page> {
    let content = [AtomicU64::new(0), AtomicU64::new(0)];
    Arc::new(Page { latch: Latch::absent(), content })
}

fn page() -> Arc<Page> {
    let page = absent();
    assert!(page.latch.try_begin_load(page.latch.load()));
    page.latch.loaded(false, 0);
    page.latch.unlock(false);
    page
}

fn write(page: &Page) {
    let seen = page.latch.load();
    if page.latch.try_lock_ready(seen) {
        add_one(page);
        page.latch.let_go(HeldWord::seen(seen).changed());
    } else if page.latch.try_lock(seen) {
        let note = HeldWord::locked(page.latch.load());
        add_one(page);
        page.latch.let_go(note.changed());
    }
}

fn add_one(page: &Page) {
    for half in &page.content {
        let value = half.load(Ordering::Relaxed);
        half.store(value + 1, Ordering::Relaxed);
    }
}

fn content(page: &Page) -> [u64; 2] {
    [0, 1].map(|half| page.content[half].load(Ordering::Relaxed))
}

#[test]
fn loom_optimistic_reads_that_validate_are_whole() {
    loom::model(|| {
        let page = page();
        let writer = Arc::clone(&page);
        let writer = thread::spawn(move || write(&writer));
        let seen = page.latch.load();
        if seen.is_readable() {
            let [a, b] = content(&page);
            if page.latch.is_unchanged(seen) {
                assert_eq!(a, b);
            }
        }
        writer.join().expect("writer");
    });
}

#[test]
fn loom_shared_reads_are_whole_and_exclude_writers() {
    loom::model(|| {
        let page = page();
        let writer = Arc::clone(&page);
        let writer = thread::spawn(move || write(&writer));
        if page.latch.try_share_ready(page.latch.load()) {
            let [a, b] = content(&page);
            assert_eq!(a, b);
            page.latch.unshare();
        }
        writer.join().expect("writer");
    });
}

#[test]
fn loom_an_evicted_page_is_never_read_as_valid() {
    loom::model(|| {
        let page = page();
        page.content[0].store(5, Ordering::Relaxed);
        page.content[1].store(5, Ordering::Relaxed);
        let evictor = Arc::clone(&page);
        let evictor = thread::spawn(move || {
            let seen = evictor.latch.load();
            if evictor.latch.try_lock_victim(seen) {
                evictor.content[0].store(0, Ordering::Relaxed);
                evictor.content[1].store(0, Ordering::Relaxed);
                evictor.latch.evicted(1);
            }
        });
        let seen = page.latch.load();
        if seen.is_readable() {
            let [a, b] = content(&page);
            if page.latch.is_unchanged(seen) {
                assert_eq!((a, b), (5, 5));
            }
        }
        evictor.join().expect("evictor");
    });
}

#[test]
fn loom_a_page_that_was_away_for_a_moment_is_never_read_as_valid() {
    loom::model(|| {
        let page = page();
        write(&page);
        let mover = Arc::clone(&page);
        let mover = thread::spawn(move || {
            let seen = mover.latch.load();
            if mover.latch.try_lock_victim(seen) {
                for value in [0, 1] {
                    mover.content[0].store(value, Ordering::Relaxed);
                    mover.content[1].store(value, Ordering::Relaxed);
                }
                mover.latch.returned();
            }
        });
        let seen = page.latch.load();
        if seen.is_readable() {
            let [a, b] = content(&page);
            if page.latch.is_unchanged(seen) {
                assert_eq!((a, b), (1, 1));
            }
        }
        mover.join().expect("mover");
        assert!(page.latch.load().dirty());
    });
}

/// As a load does it: looks at the word, then whether the table has the page.
fn load_if_inside(page: &Page, end: &AtomicU64) -> bool {
    let seen = page.latch.load();
    let is_inside = end.load(Ordering::Acquire) > 0;
    is_inside && !seen.is_unused() && page.latch.try_begin_load(seen)
}

#[test]
fn loom_a_page_that_is_being_allocated_is_loaded_by_nobody() {
    loom::model(|| {
        let page = absent();
        let end = Arc::new(AtomicU64::new(0));
        let (early, seen_end) = (Arc::clone(&page), Arc::clone(&end));
        let early = thread::spawn(move || {
            assert!(!load_if_inside(&early, &seen_end), "it is the allocating thread's");
        });
        let seen = page.latch.load();
        assert!(page.latch.try_begin_load(seen), "nobody has it yet: {seen:?}");
        end.store(1, Ordering::Release);
        add_one(&page);
        page.latch.loaded(false, 0);
        page.latch.unlock(true);
        early.join().expect("early");
        assert!(page.latch.load().is_free(), "{:?}", page.latch.load());
        assert_eq!(content(&page), [1, 1]);
    });
}

#[test]
fn loom_memory_of_a_buffer_and_of_a_page_inside_of_it_is_never_both_in_use() {
    loom::model(|| {
        let inside = absent();
        let end = Arc::new(AtomicU64::new(1));
        let (by_itself, seen_end) = (Arc::clone(&inside), Arc::clone(&end));
        let by_itself = thread::spawn(move || {
            let is_loaded = load_if_inside(&by_itself, &seen_end);
            if is_loaded {
                add_one(&by_itself);
                by_itself.latch.loaded(false, 0);
                by_itself.latch.unlock(false);
            }
            is_loaded
        });
        // As the first load of the buffer does it.
        let seen = inside.latch.load();
        let is_part = !seen.is_unused() && inside.latch.try_begin_load(seen);
        if is_part {
            add_one(&inside);
            inside.latch.freed();
        }
        let is_page = by_itself.join().expect("no panic");
        assert!(!(is_part && is_page), "both have it");
        let uses = u64::from(is_part) + u64::from(is_page);
        assert_eq!(content(&inside), [uses, uses]);
    });
}

#[test]
fn loom_a_page_written_back_while_it_is_changed_stays_dirty() {
    loom::model(|| {
        let page = page();
        write(&page);
        let changer = Arc::clone(&page);
        let changer = thread::spawn(move || write(&changer));
        let mut written = None;
        if page.latch.try_begin_write(page.latch.load()) {
            written = Some(content(&page)[0]);
            page.latch.end_write(true);
        }
        changer.join().expect("changer");
        let clean = !page.latch.load().dirty();
        if clean {
            assert_eq!(written, Some(content(&page)[0]));
        }
    });
}
