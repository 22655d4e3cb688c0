//! The graph index: recall against brute force, placement that changes nothing but places, and
//! refused allocations.

use crate::common::{self, Dice, mem_store, seed};
use crate::index::{FarGraphIndex, GraphConfig, GraphStrategy};
use farheap::ByteCount;
use farheap::region::RegionConfig;
use farheap_collections::FILL_DEFAULT;
use farheap_collections::sub::{AllocError, Collective, CollectiveConfig};
use std::sync::Arc;

const DIMENSIONS: usize = 12;

const CONFIG: GraphConfig = GraphConfig { links: 12, width: 80, seed: 1 };

fn collective(local: ByteCount) -> Option<Arc<Collective>> {
    let region = CollectiveConfig::default_region();
    let limit = RegionConfig::LIMIT_MIN;
    let config = CollectiveConfig::new().local(local).region(region.limit(limit));
    let collective = Collective::create(config, mem_store(ByteCount::mib(64)));
    common::where_permitted("collective", collective).map(Arc::new)
}

/// Vectors around a few centres.
fn vectors(dice: &mut Dice, count: usize) -> Vec<Vec<f32>> {
    let mut part = |most: u64| dice.below(most) as f32 / 100.0;
    let centres: Vec<Vec<f32>> =
        (0..20).map(|_| (0..DIMENSIONS).map(|_| part(1_000)).collect()).collect();
    (0..count)
        .map(|at| centres[at % centres.len()].iter().map(|x| x + part(300)).collect())
        .collect()
}

/// The numbers of the nearest vectors, by looking at all.
fn nearest(vectors: &[Vec<f32>], query: &[f32], count: usize) -> Vec<u32> {
    let distance =
        |vector: &[f32]| -> f32 { vector.iter().zip(query).map(|(a, b)| (a - b) * (a - b)).sum() };
    let mut all: Vec<(f32, u32)> =
        (0..).zip(vectors).map(|(id, vector)| (distance(vector), id)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.into_iter().take(count).map(|(_, id)| id).collect()
}

fn ids(index: &FarGraphIndex, query: &[f32]) -> Vec<u32> {
    index.search(query, 10, 80).iter().map(|near| near.id).collect()
}

fn filled(
    collective: &Arc<Collective>,
    strategy: GraphStrategy,
    vectors: &[Vec<f32>],
) -> FarGraphIndex {
    let config = GraphConfig { links: 8, ..CONFIG };
    let mut index = FarGraphIndex::new(collective.clone(), strategy, DIMENSIONS, config);
    for (id, vector) in (0..).zip(vectors) {
        assert_eq!(index.insert(vector), Ok(id));
    }
    index
}

#[test]
fn searches_find_nearly_all_true_neighbours() {
    let mut dice = Dice::new(seed("recall"));
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let vectors = vectors(&mut dice, 3_020);
    let (stored, queries) = vectors.split_at(3_000);
    let index = filled(&collective, GraphStrategy::Plain, stored);
    assert_eq!(index.len(), 3_000);
    let mut found = 0;
    for query in queries {
        let want = nearest(stored, query, 10);
        let seen = index.search(query, 10, 80);
        assert!(seen.is_sorted() && seen.len() == 10);
        found += seen.iter().filter(|near| want.contains(&near.id)).count();
    }
    assert!(found >= 190, "{found} of 200 true neighbours");
    // The links that lead to a vector may all give way to nearer ones: a few of them none finds, of some seeds.
    let is_itself = |(id, vector): &(u32, &Vec<f32>)| index.search(vector, 1, 80)[0].id == *id;
    let found = (0..).zip(stored).filter(is_itself).count();
    assert!(found >= 2_970, "{found} of 3,000 vectors find themselves");
}

#[test]
fn placement_changes_where_records_are_and_not_what_is_found() {
    let mut dice = Dice::new(seed("placement"));
    let vectors = vectors(&mut dice, 2_050);
    let (stored, queries) = vectors.split_at(2_000);
    let Some(plain) = collective(ByteCount::ZERO) else { return };
    let plain = filled(&plain, GraphStrategy::Plain, stored);
    let want: Vec<Vec<u32>> = queries.iter().map(|query| ids(&plain, query)).collect();
    for strategy in GraphStrategy::ALL {
        let Some(collective) = collective(ByteCount::kib(100)) else { return };
        for mut index in [
            filled(&collective, strategy, stored),
            plain.copy_to(collective.clone(), strategy).expect("room"),
        ] {
            let before = index.links();
            for query in queries {
                assert_eq!(index.search_watched(query, 10, 80).len(), 10);
            }
            index.make_page_aware(FILL_DEFAULT).expect("room");
            let seen: Vec<Vec<u32>> = queries.iter().map(|query| ids(&index, query)).collect();
            assert_eq!(seen, want, "{strategy}");
            let (after, is_local) = (index.links(), collective.local_used() > ByteCount::ZERO);
            assert_eq!((before.total(), is_local), (after.total(), strategy.uses_local()));
            if strategy == GraphStrategy::Page {
                assert!(after.in_page > after.total() / 10, "{after:?}");
            }
        }
        assert_eq!((collective.far_pages() <= 1, collective.local_used()), (true, ByteCount::ZERO));
    }
}

#[test]
fn an_index_survives_an_allocation_refused_at_every_point() {
    let mut dice = Dice::new(seed("refusals"));
    let vectors = vectors(&mut dice, 400);
    for strategy in GraphStrategy::ALL {
        let Some(collective) = collective(ByteCount::kib(8)) else { return };
        let mut index = filled(&collective, strategy, &vectors[..300]);
        let want: Vec<Vec<u32>> = vectors[300..].iter().map(|query| ids(&index, query)).collect();
        for after in 0.. {
            collective.refuse_after(Some(after));
            let outcome = index.make_page_aware(FILL_DEFAULT);
            collective.refuse_after(None);
            let seen: Vec<Vec<u32>> =
                vectors[300..].iter().map(|query| ids(&index, query)).collect();
            assert_eq!(seen, want, "{strategy}, refused after {after}");
            if outcome.is_ok() {
                break;
            }
            assert_eq!(outcome, Err(AllocError::Full));
        }
        collective.refuse_after(Some(0));
        let refused = index.insert(&vectors[300]);
        collective.refuse_after(None);
        assert!(refused.is_err() && index.len() == 300);
        assert_eq!(index.insert(&vectors[300]), Ok(300));
        assert_eq!(index.search(&vectors[300], 1, 40)[0].id, 300);
    }
}

#[test]
fn empty_tiny_and_equal_vectors_are_searched_too() {
    let Some(collective) = collective(ByteCount::kib(8)) else { return };
    let config = GraphConfig { links: 2, width: 0, seed: 0 };
    let mut index = FarGraphIndex::new(collective.clone(), GraphStrategy::Page, 0, config);
    assert!(index.len() == 0 && index.search(&[], 5, 5).is_empty());
    index.make_page_aware(FILL_DEFAULT).expect("nothing to move");
    for id in 0..100 {
        assert_eq!(index.insert(&[]), Ok(id));
    }
    let found = index.search(&[], 5, 0);
    assert!(found.len() == 5 && found.iter().all(|near| near.distance == 0.0));
    // A record larger than a page lies on pages of its own.
    let mut large = FarGraphIndex::new(collective, GraphStrategy::LocalPage, 3_000, CONFIG);
    for at in 0..20 {
        large.insert(&vec![at as f32; 3_000]).expect("room");
    }
    large.make_page_aware(FILL_DEFAULT).expect("room");
    assert_eq!(large.search(&vec![7.1; 3_000], 1, 10)[0].id, 7);
}
