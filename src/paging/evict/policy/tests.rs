//! The policy without a pager: what it must never do, then what it is for.

use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::*;
use std::collections::BTreeSet;

const PAGES: u64 = 1_000;

fn build(resident: u64) -> Policy {
    Policy::new(PageCount(PAGES), PageCount(resident)).expect("17 kB can be mapped")
}

fn insert(policy: &mut Policy, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        policy.inserted(PageId(page), Insert::Fresh);
    }
}

fn victims(policy: &mut Policy, want: u64) -> Vec<u64> {
    let mut named = Vec::new();
    let count = policy.victims(PageCount(want), |page| named.push(page.get()));
    assert_eq!(count.get(), named.len() as u64);
    named
}

#[test]
fn every_page_is_named_exactly_once() {
    let policy = &mut build(100);
    insert(policy, 0..500);
    assert_eq!(policy.resident(), PageCount(500));
    let mut named = victims(policy, 100);
    assert_eq!((named.len(), policy.resident()), (100, PageCount(400)));
    named.extend(victims(policy, 10_000));
    named.sort_unstable();
    assert_eq!(named, (0..500).collect::<Vec<_>>());
    assert_eq!((victims(policy, 1), policy.resident()), (vec![], PageCount(0)));
}

#[test]
fn a_removed_page_is_never_named() {
    let policy = &mut build(100);
    insert(policy, 0..100);
    (0..100).filter(|page| page % 3 == 0).for_each(|page| policy.removed(PageId(page)));
    let named = victims(policy, 1_000);
    assert_eq!(named.len(), 66);
    assert!(named.iter().all(|page| page % 3 != 0), "{named:?}");
}

#[test]
fn a_victim_that_came_back_is_named_again() {
    let policy = &mut build(100);
    insert(policy, 0..10);
    let first = victims(policy, 1);
    policy.retouched(PageId(first[0]));
    assert_eq!(policy.resident(), PageCount(10));
    let mut rest = victims(policy, 10);
    rest.sort_unstable();
    assert_eq!(rest, (0..10).collect::<Vec<_>>());
}

#[test]
fn a_cold_page_goes_before_all_others() {
    let policy = &mut build(100);
    insert(policy, 0..100);
    policy.advise(PageId(57), Hint::Cold);
    assert_eq!(policy.resident(), PageCount(100));
    assert_eq!(victims(policy, 1), [57]);
}

#[test]
fn a_page_needed_soon_outlives_those_that_came_with_it() {
    let policy = &mut build(100);
    insert(policy, 0..100);
    policy.advise(PageId(0), Hint::WillNeed);
    assert!(!victims(policy, 50).contains(&0));
}

#[test]
fn calls_that_do_not_fit_the_state_change_nothing() {
    let policy = &mut build(100);
    insert(policy, 0..3);
    policy.inserted(PageId(0), Insert::Filled);
    policy.retouched(PageId(1));
    policy.evicted(PageId(2));
    for absent in [PageId(7), PageId(8)] {
        policy.retouched(absent);
        policy.evicted(absent);
        policy.removed(absent);
        policy.advise(absent, Hint::Cold);
        policy.advise(absent, Hint::WillNeed);
    }
    assert_eq!(policy.resident(), PageCount(3));
    let mut named = victims(policy, 9);
    named.sort_unstable();
    assert_eq!(named, [0, 1, 2]);
}

#[test]
fn a_page_that_returns_tells_how_many_have_left_since() {
    let policy = &mut build(100);
    insert(policy, 0..100);
    let left = victims(policy, 10);
    left.iter().for_each(|page| policy.evicted(PageId(*page)));
    let returns = |policy: &mut Policy, page| policy.inserted(PageId(page), Insert::Filled);
    assert_eq!(returns(policy, left[9]), Some(1), "itself");
    assert_eq!(returns(policy, left[0]), Some(10));
    assert_eq!(returns(policy, left[0]), None, "it is here");
    assert_eq!(returns(policy, 500), None, "it was never here");
}

#[test]
fn a_policy_shrinks_and_grows_with_its_limit() {
    let policy = &mut build(100);
    insert(policy, 0..100);
    policy.resize(PageCount(10));
    assert_eq!(victims(policy, 90).len(), 90);
    policy.resize(PageCount(0));
    assert_eq!(victims(policy, 90).len(), 10);
    policy.resize(PageCount(500));
    insert(policy, 0..500);
    assert_eq!(policy.resident(), PageCount(500));
}

/// splitmix64: enough for tests, and the same everywhere.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn pick(set: &BTreeSet<u64>, random: u64) -> Option<u64> {
    set.iter().nth((random % set.len().max(1) as u64) as usize).copied()
}

/// Reference of a policy: which pages it may name, and which it has named.
#[derive(Default)]
struct Model {
    resident: BTreeSet<u64>,
    cooling: BTreeSet<u64>,
}

impl Model {
    /// One random call, to the policy and to the model.
    fn step(&mut self, policy: &mut Policy, state: &mut u64) {
        let (what, random) = (next(state) % 100, next(state));
        match what {
            0..45 => {
                let page = random % 200;
                if !self.cooling.contains(&page) {
                    let how = [Insert::Fresh, Insert::Filled, Insert::Prefetched];
                    policy.inserted(PageId(page), how[(random >> 32) as usize % 3]);
                    self.resident.insert(page);
                }
            }
            45..65 => {
                let want = random % 5;
                let expected = want.min(self.resident.len() as u64);
                let named = victims(policy, want);
                assert_eq!(named.len() as u64, expected, "victims({want})");
                for page in named {
                    assert!(self.resident.remove(&page), "page {page} named but not resident");
                    self.cooling.insert(page);
                }
            }
            65..85 => {
                if let Some(page) = pick(&self.cooling, random) {
                    self.cooling.remove(&page);
                    if what < 75 {
                        policy.retouched(PageId(page));
                        self.resident.insert(page);
                    } else {
                        policy.evicted(PageId(page));
                    }
                }
            }
            85..95 => {
                let page = random % 200;
                policy.removed(PageId(page));
                self.resident.remove(&page);
                self.cooling.remove(&page);
            }
            95..99 => {
                let hint = [Hint::Cold, Hint::WillNeed][(random >> 32) as usize % 2];
                policy.advise(PageId(random % 200), hint);
            }
            _ => policy.resize(PageCount(random % 150)),
        }
    }
}

#[test]
fn random_calls_agree_with_a_model() {
    let steps = if cfg!(miri) { 500 } else { 100_000 };
    let seed = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as u64;
    println!("seed {seed}");
    let policy = &mut build(100);
    let (mut model, mut state) = (Model::default(), seed);
    for step in 0..steps {
        model.step(policy, &mut state);
        assert_eq!(policy.resident().get(), model.resident.len() as u64, "step {step}");
    }
    let left: BTreeSet<u64> = victims(policy, PAGES).into_iter().collect();
    assert_eq!(left, model.resident, "pages left at the end");
}

/// Plays `page` being touched in a cache of `frames` without cooling.
fn touch(policy: &mut Policy, ram: &mut BTreeSet<u64>, page: u64, frames: usize) {
    if ram.contains(&page) {
        return;
    }
    if ram.len() == frames {
        let victim = victims(policy, 1)[0];
        policy.evicted(PageId(victim));
        ram.remove(&victim);
    }
    policy.inserted(PageId(page), Insert::Filled);
    ram.insert(page);
}

#[test]
#[cfg_attr(miri, ignore = "a simulation, too long for Miri")]
fn it_keeps_a_part_of_a_scan_larger_than_the_cache() {
    let mut policy = build(100);
    let (mut ram, mut hits) = (BTreeSet::new(), 0);
    for _lap in 0..50 {
        for page in 0..400 {
            hits += usize::from(ram.contains(&page));
            touch(&mut policy, &mut ram, page, 100);
        }
    }
    // A quarter of the pages fits, so a quarter of the touches could hit; in arrival order none.
    assert!(hits > 50 * 60, "{hits} hits in 50 laps of 400 pages with 100 frames");
}

#[test]
#[cfg_attr(miri, ignore = "a simulation, too long for Miri")]
fn it_takes_up_a_working_set_that_fits_after_another_died() {
    let mut policy = build(100);
    let mut ram = BTreeSet::new();
    for page in (0..50).flat_map(|_| 0..90).chain((0..50).flat_map(|_| 500..590)) {
        touch(&mut policy, &mut ram, page, 100);
    }
    let kept = (500..590).filter(|page| ram.contains(page)).count();
    assert!(kept >= 85, "{kept} of 90 pages in use are resident");
}

#[test]
#[cfg_attr(miri, ignore = "a simulation, too long for Miri")]
fn it_keeps_pages_that_are_read_again_soon_longer_than_others() {
    let mut policy = build(100);
    let (mut ram, mut state) = (BTreeSet::new(), 42);
    let mut reads = [0, 0];
    for _ in 0..20_000 {
        // Each of 20 hot pages is touched twenty times as often as each of 400 others.
        let random = next(&mut state);
        let hot = random & 1 == 0;
        let page = if hot { random / 2 % 20 } else { 500 + random / 2 % 400 };
        reads[usize::from(hot)] += u32::from(!ram.contains(&page));
        touch(&mut policy, &mut ram, page, 100);
    }
    let [others, hot] = reads;
    // 206, and 487 where a page earns no turns by being read again soon.
    assert!(hot < 350, "{hot} reads of hot pages beside {others} of others");
}

#[test]
#[cfg_attr(miri, ignore = "a simulation, too long for Miri")]
fn pages_that_are_used_once_do_not_push_a_hot_set_out_where_others_take_a_part_of_the_limit() {
    const HOT: u64 = 110;
    let mut policy = build(400);
    let (mut ram, mut state, mut reads) = (BTreeSet::new(), 42, 0);
    for step in 0..40_000 {
        // As chunks that the kernel fills are opened and evicted whole.
        let frames = [130, 180][step as usize / 256 % 2];
        while ram.len() > frames {
            let victim = victims(&mut policy, 1)[0];
            policy.evicted(PageId(victim));
            ram.remove(&victim);
        }
        let random = next(&mut state);
        let page = if step % 4 > 0 { random % HOT } else { HOT + step / 4 % 800 };
        reads += u32::from(page < HOT && !ram.contains(&page));
        touch(&mut policy, &mut ram, page, frames);
    }
    // 2,169, and 2,686 where the main set has room for all of the limit.
    assert!(reads < 2_400, "{reads} reads of {HOT} hot pages");
}
