//! A pool in a process without a far heap: it is one of near memory, and counts by consumer and operator.

use datafusion_execution::memory_pool::{MemoryConsumer, MemoryLimit, MemoryPool};
use farheap::ByteCount;
use farheap_datafusion::{FarMemoryPool, Reserved};
use std::sync::Arc;

const NEAR: usize = 1000;

fn pool() -> (Arc<FarMemoryPool>, Arc<dyn MemoryPool>) {
    let pool = Arc::new(FarMemoryPool::new(ByteCount(NEAR as u64), ByteCount::gib(1)));
    (Arc::clone(&pool), pool)
}

fn numbers(reserved: Reserved) -> (u64, u64, u64, u64, u64) {
    let Reserved { bytes, bytes_max, far_bytes, far_bytes_max, refused, .. } = reserved;
    (bytes.0, bytes_max.0, far_bytes.0, far_bytes_max.0, refused)
}

#[test]
fn near_memory_is_granted_to_the_last_byte_and_no_further() {
    let (far, pool) = pool();
    assert!(matches!(pool.memory_limit(), MemoryLimit::Finite(NEAR)));
    let one = MemoryConsumer::new("HashJoinInput[0]").register(&pool);
    let other = MemoryConsumer::new("HashJoinInput[1]").register(&pool);
    one.try_grow(600).expect("room");
    other.try_grow(400).expect("room");
    let error = one.try_grow(1).expect_err("all is reserved").to_string();
    assert!(error.contains("HashJoinInput[0]") && error.contains("no far heap runs"), "{error}");
    assert_eq!((one.size(), pool.reserved()), (600, NEAR));
    other.shrink(1);
    one.try_grow(1).expect("a byte is free");
    drop((one, other));
    assert_eq!((pool.reserved(), numbers(far.total())), (0, (0, 1000, 0, 0, 1)));
}

#[test]
fn numbers_are_by_consumer_while_it_lives_and_by_operator_for_ever() {
    let (far, pool) = pool();
    let one = MemoryConsumer::new("HashJoinInput[0]").register(&pool);
    let other = MemoryConsumer::new("HashJoinInput[1]").register(&pool);
    let sort = MemoryConsumer::new("ExternalSorter[0]").with_can_spill(true).register(&pool);
    let aggregate = MemoryConsumer::new("GroupedHashAggregateStream[1] (sum(a))").register(&pool);
    one.try_grow(100).expect("room");
    other.try_grow(50).expect("room");
    sort.try_grow(300).expect("room");
    assert!(sort.try_grow(900).is_err());
    sort.shrink(200);
    let part = one.split(40);
    let names: Vec<_> = far.consumers().into_iter().map(|(name, _)| name).collect();
    let all = ["HashJoinInput[0]", "HashJoinInput[1]", "ExternalSorter[0]"];
    assert_eq!(names[..3], all);
    let each: Vec<_> = far.consumers().into_iter().map(|(_, one)| numbers(one)).collect();
    assert_eq!(
        each,
        [(100, 100, 0, 0, 0), (50, 50, 0, 0, 0), (100, 300, 0, 0, 1), (0, 0, 0, 0, 0)]
    );
    drop((one, other, sort, aggregate));
    assert_eq!(far.consumers().len(), 1, "a part of one lives");
    drop(part);
    assert!(far.consumers().is_empty());
    let operators: Vec<_> =
        far.operators().into_iter().map(|(name, one)| (name, numbers(one))).collect();
    let expected = [
        ("ExternalSorter", (0, 300, 0, 0, 1)),
        ("GroupedHashAggregateStream", (0, 0, 0, 0, 0)),
        ("HashJoinInput", (0, 150, 0, 0, 0)),
    ];
    assert_eq!(operators, expected.map(|(name, one)| (name.to_owned(), one)));
}

#[test]
fn what_cannot_be_refused_is_counted_as_far() {
    let (far, pool) = pool();
    let one = MemoryConsumer::new("one").register(&pool);
    let other = MemoryConsumer::new("other").register(&pool);
    one.grow(900);
    other.grow(300);
    assert_eq!(numbers(far.total()), (1200, 1200, 200, 200, 0));
    assert!(one.try_grow(1).is_err());
    // The near memory that one gives back is free; what is far of the other stays.
    one.shrink(500);
    one.try_grow(100).expect("500 are free");
    assert_eq!(numbers(far.total()), (800, 1200, 200, 200, 1));
    other.shrink(250);
    assert_eq!(numbers(far.total()), (550, 1200, 0, 200, 1));
    let text = pool.to_string();
    assert!(text.contains("near: 1000 B") && text.contains("550 B reserved"), "{text}");
}

#[test]
fn threads_reserve_no_more_than_there_is() {
    let (far, pool) = pool();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let pool = &pool;
            scope.spawn(move || {
                let one = MemoryConsumer::new(format!("Thread[{thread}]")).register(pool);
                for turn in 0..20_000_usize {
                    if one.try_grow(1 + turn % 300).is_err() {
                        one.free();
                    }
                }
            });
        }
    });
    let (bytes, bytes_max, far_bytes, far_bytes_max, refused) = numbers(far.total());
    assert_eq!((bytes, far_bytes, far_bytes_max), (0, 0, 0));
    assert!(bytes_max <= NEAR as u64 && bytes_max > NEAR as u64 / 2 && refused > 100, "{far}");
}
