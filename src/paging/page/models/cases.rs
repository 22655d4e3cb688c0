//! The cases explored: each a start, a few threads, and the contents that may be left.

use crate::paging::page::models::*;

#[test]
fn loom_a_fault_during_eviction_finds_the_content() {
    explore(2, Model::resident, vec![evicting(1), reading(1, &[1])], &[1]);
    explore(1, Model::resident, vec![evicting(1), reading(1, &[1]), reading(2, &[1])], &[1]);
}

#[test]
fn loom_a_write_during_eviction_is_kept() {
    explore(2, Model::resident, vec![evicting(2), writing(1, 2, &[2])], &[2]);
    let threads = vec![evicting(1), writing(1, 2, &[2]), reading(2, &[1, 2])];
    explore(1, Model::resident, threads, &[2]);
}

#[test]
fn loom_two_faults_on_a_stored_page_are_both_answered() {
    let make = || Model::stored(false);
    explore(2, make, vec![reading(1, &[1]), reading(2, &[1])], &[1]);
    explore(1, make, vec![reading(1, &[1, 2]), writing(2, 2, &[2]), evicting(1)], &[2]);
}

fn reading_ahead() -> Thread {
    Box::new(|model| {
        let word = model.word.load();
        if word.state() == State::Stored {
            model.fill(word, None);
        }
    })
}

#[test]
fn loom_a_page_read_ahead_wakes_the_thread_that_faults_on_it() {
    let make = || Model::stored(true);
    explore(2, make, vec![reading_ahead(), reading(1, &[1])], &[1]);
    explore(2, make, vec![reading_ahead(), writing(1, 2, &[2])], &[2]);
    explore(1, make, vec![reading_ahead(), reading(1, &[1]), reading(2, &[1])], &[1]);
    explore(1, make, vec![reading_ahead(), reading(1, &[1]), evicting(1)], &[1]);
    explore(1, make, vec![reading_ahead(), reading(1, &[0, 1]), discarding(2, &[0])], &[0]);
}

#[test]
fn loom_a_write_to_a_protected_page_is_seen_before_it_is_dropped_as_clean() {
    let make = || {
        let model = Model::stored(true);
        assert_eq!(model.access(0, Access::Read), 1);
        assert!(model.word.load().protected());
        model
    };
    explore(2, make, vec![evicting(1), writing(1, 2, &[2])], &[2]);
    explore(1, make, vec![evicting(1), writing(1, 2, &[2, 3]), writing(2, 3, &[2, 3])], &[2, 3]);
}

/// `open_for_writes`, while the page leaves and is read again: a word that says "protected" speaks of
/// a mapping that is.
#[test]
fn loom_a_protection_is_lifted_from_the_mapping_that_was_written_to() {
    const WRITABLE: usize = 1;
    loom::model(|| {
        let (slot, moving) = (Some(SlotId(0)), Word::moving(Some(SlotId(0))));
        let protected = Word::resident(slot).with_protected(true);
        let page = loom::sync::Arc::new((PageWord::default(), AtomicUsize::new(0)));
        page.0.try_change(Word::EMPTY, Word::moving(None)).expect("fresh");
        page.0.try_change(Word::moving(None), protected).expect("this thread's");
        let lifting = thread::spawn({
            let page = page.clone();
            move || {
                let (word, mapping) = &*page;
                if let Ok((meanwhile, opened)) = protocol::open_for_writes(word, protected) {
                    mapping.store(WRITABLE, Ordering::Relaxed);
                    word.try_change(meanwhile, opened).expect("this thread's");
                }
            }
        });
        let (word, mapping) = &*page;
        let seen = word.load();
        if seen.state() == State::Resident && word.try_change(seen, seen.leaving()).is_ok() {
            let stored = Word::stored(SlotId(0));
            word.try_change(seen.leaving(), stored).expect("this thread's");
            word.try_change(stored, moving).expect("nobody else faults");
            mapping.store(0, Ordering::Relaxed);
            word.try_change(moving, protected).expect("this thread's");
        }
        lifting.join().expect("no panic");
        assert!(!word.load().protected() || mapping.load(Ordering::Relaxed) != WRITABLE);
    });
}

#[test]
fn loom_a_discarded_page_reads_as_zero_whatever_was_under_way() {
    explore(2, Model::resident, vec![evicting(1), discarding(1, &[0])], &[0]);
    let make = || Model::stored(false);
    explore(2, make, vec![reading(1, &[0, 1]), discarding(2, &[0])], &[0]);
    explore(1, make, vec![reading(1, &[0, 1]), discarding(2, &[0]), evicting(1)], &[0]);
}

#[test]
fn loom_a_discard_races_a_write_and_an_eviction() {
    let threads = vec![evicting(1), writing(1, 2, &[0, 2]), discarding(2, &[0, 2])];
    explore(1, Model::resident, threads, &[0, 2]);
}

#[test]
fn loom_two_discards_race_an_eviction() {
    let threads = vec![evicting(1), discarding(1, &[0]), discarding(2, &[0])];
    explore(1, Model::resident, threads, &[0]);
}

#[test]
fn loom_a_page_whose_write_fails_stays_or_dies() {
    let failing = || -> Thread {
        Box::new(|model| {
            let mut evictor = Evictor { fail_writes: true, ..Evictor::default() };
            model.evict(&mut evictor);
            model.settle(&mut evictor);
        })
    };
    explore(2, Model::resident, vec![failing(), writing(1, 2, &[2])], &[2]);
    explore(2, Model::resident, vec![failing(), discarding(1, &[0])], &[0]);
    let threads = vec![failing(), reading(1, &[0, 1]), discarding(2, &[0])];
    explore(1, Model::resident, threads, &[0]);
}

fn rescuing(how: Rescue) -> Thread {
    Box::new(move |model| {
        let mut evictor = Evictor { rescue: Some(how), ..Evictor::default() };
        model.evict(&mut evictor);
        model.settle(&mut evictor);
    })
}

#[test]
fn loom_a_page_rescued_from_a_write_is_whole_or_dies() {
    for how in [Rescue::Works, Rescue::Refused] {
        explore(2, Model::resident, vec![rescuing(how), reading(1, &[1])], &[1]);
        explore(2, Model::resident, vec![rescuing(how), writing(1, 2, &[2])], &[2]);
        explore(2, Model::resident, vec![rescuing(how), discarding(1, &[0])], &[0]);
    }
}

/// A page with an older copy on the device: the copy stays the page's.
#[test]
fn loom_a_rescued_page_keeps_its_slot() {
    let changed = || {
        let model = Model::stored(false);
        assert_eq!(model.access(0, Access::Write(2)), 2);
        model
    };
    for how in [Rescue::Works, Rescue::Refused] {
        explore(2, changed, vec![rescuing(how), reading(1, &[2])], &[2]);
        explore(1, changed, vec![rescuing(how), writing(1, 3, &[3]), reading(2, &[2, 3])], &[3]);
        let threads = vec![rescuing(how), reading(1, &[0, 2]), discarding(2, &[0])];
        explore(1, changed, threads, &[0]);
    }
}

#[test]
fn loom_two_faults_and_an_eviction_of_a_changed_page() {
    let changed = || {
        let model = Model::stored(true);
        assert_eq!(model.access(0, Access::Write(2)), 2);
        model
    };
    explore(1, changed, vec![evicting(1), reading(1, &[2]), reading(2, &[2])], &[2]);
    explore(1, changed, vec![evicting(2), reading(1, &[2, 3]), writing(2, 3, &[3])], &[3]);
}

/// The page goes round: out, on the device, back, changed, out again into the same frame.
fn going_round() -> Thread {
    Box::new(|model| {
        let mut evictor = Evictor::default();
        model.evict(&mut evictor);
        // Here, and in the same state one round later, the other thread has its chance without
        // using up preemptions.
        thread::yield_now();
        model.settle(&mut evictor);
        model.access(3, Access::Write(2));
        model.evict(&mut evictor);
        thread::yield_now();
        model.settle(&mut evictor);
    })
}

#[test]
fn loom_a_thread_that_slept_through_a_round_of_the_page_acts_on_no_old_note() {
    let discarding: Thread = Box::new(Model::discard);
    explore(2, Model::resident, vec![going_round(), discarding], &[0, 2]);
    explore(2, Model::resident, vec![going_round(), reading(1, &[1, 2])], &[2]);
}

#[test]
fn loom_a_pinned_page_stays() {
    let pinning = |me| -> Thread { Box::new(move |model| model.pin_and_unpin(me)) };
    explore(2, Model::resident, vec![evicting(2), pinning(1)], &[1]);
    explore(1, Model::resident, vec![evicting(1), pinning(1), pinning(2)], &[1]);
}

#[test]
fn loom_a_page_that_could_not_be_mapped_back_is_evicted_all_the_same() {
    let make = || {
        let model = Model::resident();
        model.machine().failing_maps = 1;
        model
    };
    explore(2, make, vec![evicting(1), reading(1, &[1])], &[1]);
    // Read-ahead asks once and does not come back.
    let asking: Thread = Box::new(|model| {
        let word = model.word.load();
        if word.state() == State::Cooling {
            model.take_back(word);
        }
    });
    explore(2, make, vec![evicting(1), asking], &[1]);
}

fn stored_in_thread() -> Model {
    let mut model = Model::stored(false);
    model.in_thread = true;
    model
}

fn revoking() -> Thread {
    Box::new(|model| model.revoke())
}

#[test]
fn loom_a_read_that_is_revoked_loses_the_page_and_nothing_else() {
    let make = stored_in_thread;
    explore(2, make, vec![reading(1, &[1, LOST]), revoking()], &[1, LOST]);
    let two = vec![reading(1, &[1, LOST]), reading(2, &[1, LOST]), revoking()];
    explore(1, make, two, &[1, LOST]);
    explore(1, make, vec![reading(1, &[1, LOST]), evicting(1), revoking()], &[1, LOST]);
}

#[test]
fn loom_a_page_discarded_under_a_read_that_is_revoked_is_empty() {
    let make = stored_in_thread;
    explore(1, make, vec![reading(1, &[0, 1, LOST]), discarding(2, &[0]), revoking()], &[0]);
}
