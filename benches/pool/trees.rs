//! The B+-tree: lookups, cursors, ascending inserts and bulk load, beside `BTreeMap`, and its space beside
//! the bytes of its entries.

use crate::cost::{Random, median};
use crate::report::Row;
use crate::{Failure, Options};
use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap_collections::pool::BTree;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a value.
const VALUE: usize = 56;

/// Bytes of an entry that hold no key or value: two lengths and a slot.
const OVERHEAD: usize = 6;

type Key = [u8; 8];

fn pool(entries: u64) -> Result<Arc<BufferPool>, Failure> {
    let bytes = ByteCount((entries * 200).next_multiple_of(4096) + (32 << 20));
    let manager = MemoryManager::start(ByteCount(bytes.0 * 2))?;
    let config = PoolConfig::new().cleaner(false).huge_frames(false);
    Ok(config.create_on(Arc::new(MemStore::new(bytes)?), &manager)?)
}

fn key(number: u64) -> Key {
    (number * 3).to_be_bytes()
}

/// Nanoseconds of one of `count`, in the middle of three times.
fn each(count: u64, mut work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    let mut times = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        work()?;
        times.push(began.elapsed().as_nanos() as f64 / count as f64);
    }
    Ok(median(times))
}

pub(crate) fn rows(options: &Options) -> Result<Vec<Row>, Failure> {
    let entries = if options.test { 3_000 } else { 1_000_000 };
    let map: BTreeMap<Key, [u8; VALUE]> =
        (0..entries).map(|number| (key(number), [number as u8; VALUE])).collect();
    let pool = pool(2 * entries)?;
    let loaded = BTree::load(&pool, &map)?;
    let loaded_pages = pool.pages_in_use().count();
    let row = |work: &str, value: f64, base: f64| Row {
        work: format!("tree, {work}"),
        value,
        unit: "ns",
        baseline: "of BTreeMap",
        baseline_value: base,
        goal: match work {
            _ if work.starts_with("lookup") => "at most 1400 ns",
            _ if work.starts_with("cursor") => "at most 20 ns",
            _ => "",
        },
    };
    let tree = BTree::create(&pool)?;
    let began = Instant::now();
    for (key, value) in &map {
        tree.insert(key, value)?;
    }
    let insert = began.elapsed().as_nanos() as f64 / entries as f64;
    let began = Instant::now();
    let mut copy = BTreeMap::new();
    for (key, value) in &map {
        copy.insert(*key, *value);
    }
    let insert_base = began.elapsed().as_nanos() as f64 / entries as f64;
    drop(copy);
    let pages = pool.pages_in_use().count() - loaded_pages;
    let least = entries as f64 * (8 + VALUE + OVERHEAD) as f64;
    let space = |work: &str, pages: usize| Row {
        work: format!("tree, {work}"),
        value: pages as f64 * 4096.0 / entries as f64,
        unit: "B",
        baseline: "of entries",
        baseline_value: least / entries as f64,
        goal: "0.95",
    };
    let mut rows = vec![
        row("ascending insert", insert, insert_base),
        space("space an entry after ascending inserts", pages),
        space("space an entry after a bulk load", loaded_pages),
    ];
    rows.extend(reads(&row, &loaded, &map, entries)?);
    Ok(rows)
}

fn reads(
    row: &impl Fn(&str, f64, f64) -> Row,
    tree: &BTree,
    map: &BTreeMap<Key, [u8; VALUE]>,
    entries: u64,
) -> Result<Vec<Row>, Failure> {
    let lookups = entries.min(200_000);
    let numbers = || {
        let mut random = Random(0x5EED_0007);
        (0..lookups).map(move |_| random.below(entries))
    };
    let base = each(lookups, || {
        numbers().for_each(|number| _ = black_box(map.get(&key(number))));
        Ok(())
    })?;
    let copied = each(lookups, || {
        for number in numbers() {
            let value = tree.get(&key(number))?.ok_or("a key is missing")?;
            assert_eq!(value[0], number as u8);
        }
        Ok(())
    })?;
    let lent = each(lookups, || {
        for number in numbers() {
            let value = tree.get_ref(&key(number))?.ok_or("a key is missing")?;
            assert_eq!(value[0], number as u8);
        }
        Ok(())
    })?;
    let scan_base = each(entries, || {
        black_box(map.values().map(|value| u64::from(value[0])).sum::<u64>());
        Ok(())
    })?;
    let sum: u64 = map.values().map(|value| u64::from(value[0])).sum();
    let scan = |is_forward: bool| {
        each(entries, || {
            let mut cursor = if is_forward { tree.cursor(b"") } else { tree.cursor_at_end() };
            let mut found = 0;
            while let Some((_, value)) = if is_forward { cursor.next()? } else { cursor.prev()? } {
                found += u64::from(value[0]);
            }
            if found == sum { Ok(()) } else { Err("entries are missing".into()) }
        })
    };
    let copies = each(entries, || {
        let values = tree.scan(b"").map(|entry| entry.map(|(_, value)| u64::from(value[0])));
        if values.sum::<Result<u64, _>>()? == sum { Ok(()) } else { Err("missing".into()) }
    })?;
    Ok(vec![
        row("lookup, the value copied", copied, base),
        row("lookup, the value lent", lent, base),
        row("cursor forward, an entry", scan(true)?, scan_base),
        row("cursor backward, an entry", scan(false)?, scan_base),
        row("scan that copies, an entry", copies, scan_base),
    ])
}
