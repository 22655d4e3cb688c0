//! The programs: what they do, and what they answer.
//!
//! They are written as for ordinary memory. Large arrays and tables go far by their size; where data
//! is in small objects the thread that allocates them opens a scope, as a program on farheap would.

use crate::answers::Query;
use crate::child::Run;
use crate::lineitem::{Plan, ROW_BYTES, Table};
use crate::numbers::{fold, mix};
use crate::progress::Progress;
use crate::{Failure, Result, queries, texts};
use allocator_api2::alloc::Global;
use farheap::{Scope, Tier};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher, Hasher};

/// The phase that gives all data back; it counts, but has no row.
pub(crate) const FREE: &str = "free";

pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Whether all data is in arrays, which can be in a mapped file as well.
    pub(crate) maps: bool,
    /// Bytes of data of a run of about this size.
    pub(crate) data: fn(usize) -> usize,
    /// Returns the answer.
    pub(crate) run: fn(&Run<'_>, usize) -> Result<u64>,
}

pub(crate) const ALL: &[Program] = &[
    Program {
        name: "sort",
        about: "fills an array with random numbers and sorts it in place with all processors",
        maps: true,
        data: |size| size / 8 * 8,
        run: sort,
    },
    Program {
        name: "hash_map",
        about: "builds a HashMap in random order, looks up a twentieth, scans it",
        maps: false,
        data: |size| table_bytes(size / MAP_BYTES),
        run: hash_map,
    },
    Program {
        name: "btree_map",
        about: "the same with a BTreeMap, all of whose nodes are far",
        maps: false,
        data: |size| size,
        run: btree_map,
    },
    Program {
        name: "scans",
        about: "fills an array and adds it up again and again, as query after query over a table does",
        maps: true,
        data: |size| size / 8 * 8,
        run: scans,
    },
    Program {
        name: "stencil",
        about: "five points of a square grid, from one array to another and back",
        maps: true,
        data: |size| 2 * 8 * grid_width(size).pow(2),
        run: stencil,
    },
    Program {
        name: "graph",
        about: "breadth-first walk over a graph with hubs, in compressed rows",
        maps: true,
        data: |size| size / VERTEX_BYTES * VERTEX_BYTES,
        run: graph,
    },
    Program {
        name: "churn",
        about: "blocks that die young are replaced while another thread scans an array",
        maps: false,
        data: |size| size + size / CHURN_SHARE,
        run: churn,
    },
    Program {
        name: "load",
        about: "writes a table of texts that are cut at random out of a pool, then scans it",
        maps: true,
        data: |size| size / texts::POOL_PART * texts::POOL_PART,
        run: load,
    },
    Program {
        name: "tpch",
        about: "TPC-H Q1 and Q6 over the columns of lineitem, generated first",
        maps: false,
        data: |size| tpch_plan(size).bytes().as_usize(),
        run: tpch,
    },
];

fn sort(run: &Run<'_>, size: usize) -> Result<u64> {
    let mut values = run.array::<u64>(size / 8)?;
    run.phase("build", || values.iter_mut().zip(0..).for_each(|(value, at)| *value = mix(at)));
    run.phase("sort", || values.par_sort_unstable());
    Ok(run.phase("scan", || {
        assert!(values.is_sorted());
        values.iter().fold(0, |sum, value| fold(sum, *value))
    }))
}

/// What both maps hold: 100 bytes, as a row of a small table.
type Value = [u8; 100];
/// Bytes of a `HashMap` for each entry, when it has grown to twice what it needs almost.
const MAP_BYTES: usize = 228;
/// Bytes of a `BTreeMap` for each entry: nodes are two thirds full, and there are inner ones.
const NODE_BYTES: usize = 190;
/// 1/LOOKUP_SHARE of the entries is looked up.
const LOOKUP_SHARE: u64 = 20;

/// Bytes of a table of this many entries: a power of two of buckets, at most 7/8 of them full.
fn table_bytes(entries: usize) -> usize {
    (entries * 8).div_ceil(7).next_power_of_two() * (size_of::<(u64, Value)>() + 1)
}

fn value(at: u64) -> Value {
    let mut value = [at as u8; 100];
    value[..8].copy_from_slice(&at.to_le_bytes());
    value
}

fn head(value: &Value) -> u64 {
    let (head, _) = value.split_first_chunk().expect("longer than a number");
    u64::from_le_bytes(*head).wrapping_add(u64::from(value[99]))
}

/// Places of entries to look up.
fn lookups(entries: u64) -> impl Iterator<Item = u64> {
    (0..entries / LOOKUP_SHARE).map(move |at| mix(at ^ 0xA5A5_0000_0000) % entries)
}

fn hash_map(run: &Run<'_>, size: usize) -> Result<u64> {
    // Hashes are the same in every process: so is the order of the table.
    let mut map = HashMap::<u64, Value, BuildHasherDefault<DefaultHasher>>::default();
    let entries = (size / MAP_BYTES) as u64;
    run.phase("build", || {
        for at in 0..entries {
            map.insert(mix(at), value(at));
        }
    });
    let found = run
        .phase("lookups", || lookups(entries).fold(0, |sum, at| fold(sum, head(&map[&mix(at)]))));
    let sum = run.phase("scan", || map.values().map(head).fold(0, u64::wrapping_add));
    run.phase(FREE, || drop(map));
    Ok(fold(found, sum))
}

fn btree_map(run: &Run<'_>, size: usize) -> Result<u64> {
    let _far = Scope::enter(Tier::FAR);
    let mut map = BTreeMap::<u64, Value>::new();
    let entries = (size / NODE_BYTES) as u64;
    run.phase("build", || {
        for at in 0..entries {
            map.insert(mix(at), value(at));
        }
    });
    let found = run
        .phase("lookups", || lookups(entries).fold(0, |sum, at| fold(sum, head(&map[&mix(at)]))));
    let sum = run.phase("scan", || map.values().map(head).fold(0, fold));
    run.phase(FREE, || drop(map));
    Ok(fold(found, sum))
}

/// Times that the array is added up.
const QUERIES: u64 = 6;

fn scans(run: &Run<'_>, size: usize) -> Result<u64> {
    let mut values = run.array::<u64>(size / 8)?;
    run.phase("build", || values.iter_mut().zip(0..).for_each(|(value, at)| *value = mix(at)));
    let scan = |sum, at| values.iter().fold(sum, |sum: u64, value| sum.wrapping_add(value ^ at));
    let first = run.phase("scan", || scan(0, 0));
    Ok(run.phase("rescans", || (1..QUERIES).fold(first, scan)))
}

/// Sweeps of the stencil: an even number ends in the first array.
const SWEEPS: usize = 4;

fn grid_width(size: usize) -> usize {
    (size / 16).isqrt()
}

fn stencil(run: &Run<'_>, size: usize) -> Result<u64> {
    let width = grid_width(size);
    let (mut from, mut to) = (run.array::<f64>(width * width)?, run.array::<f64>(width * width)?);
    run.phase("build", || {
        from.iter_mut().zip(0..).for_each(|(cell, at)| *cell = (mix(at) >> 40) as f64);
        // The edge stays as it is.
        to.copy_from_slice(&from);
    });
    run.phase("sweeps", || {
        for _ in 0..SWEEPS {
            sweep(&from, &mut to, width);
            std::mem::swap(&mut from, &mut to);
        }
    });
    Ok(run.phase("scan", || from.iter().fold(0, |sum, cell| fold(sum, cell.to_bits()))))
}

fn sweep(from: &[f64], to: &mut [f64], width: usize) {
    let inner = width..to.len() - width;
    to[inner].par_chunks_mut(width).enumerate().for_each(|(above, row)| {
        let at = (above + 1) * width;
        for x in 1..width - 1 {
            let sides = from[at + x - 1] + from[at + x + 1];
            let ends = from[at + x - width] + from[at + x + width];
            row[x] = 0.5 * from[at + x] + 0.125 * (sides + ends);
        }
    });
}

/// Edges of a vertex on average; a power of two.
const DEGREE: u64 = 16;
/// Its edges, where they begin, its distance and its place in the order of the walk.
const VERTEX_BYTES: usize = DEGREE as usize * 4 + 8 + 4 + 4;
const UNSEEN: u32 = u32::MAX;

/// Where an edge goes. A few vertices are where many edges end; they lie anywhere.
fn target(edge: u64, vertices: u64) -> u32 {
    let random = mix(edge) >> 32;
    let rank = (((random * random) >> 32) * vertices) >> 32;
    (rank * 0x9E37_79B1 % vertices) as u32
}

fn graph(run: &Run<'_>, size: usize) -> Result<u64> {
    let vertices = size / VERTEX_BYTES;
    let mut offsets = run.array::<u64>(vertices + 1)?;
    let mut edges = run.array::<u32>(vertices * DEGREE as usize)?;
    let (mut distance, mut order) = (run.array::<u32>(vertices)?, run.array::<u32>(vertices)?);
    run.phase("build", || {
        let most = edges.len() as u64;
        for at in 0..vertices {
            let degree = mix(at as u64) % (2 * DEGREE + 1);
            offsets[at + 1] = (offsets[at] + degree).min(most);
        }
        let last = offsets[vertices] as usize;
        edges[..last]
            .iter_mut()
            .zip(0..)
            .for_each(|(edge, at)| *edge = target(at, vertices as u64));
        distance.fill(UNSEEN);
    });
    let seen = run.phase("walk", || walk(&offsets, &edges, &mut distance, &mut order));
    Ok(run.phase("scan", || {
        distance.iter().fold(seen as u64, |sum, distance| fold(sum, u64::from(*distance)))
    }))
}

/// Walks breadth-first from the first vertex with edges; returns how many it reaches.
fn walk(offsets: &[u64], edges: &[u32], distance: &mut [u32], order: &mut [u32]) -> usize {
    let start = (0..distance.len()).find(|at| offsets[at + 1] > offsets[*at]).unwrap_or(0);
    (order[0], distance[start]) = (start as u32, 0);
    let (mut level, mut seen) = (0..1, 1);
    while !level.is_empty() {
        // In the order of vertices, as engines with bit maps of levels do: edges are then read
        // forwards, and only distances at random.
        order[level.clone()].sort_unstable();
        for at in level.clone() {
            let vertex = order[at] as usize;
            let further = distance[vertex] + 1;
            for edge in &edges[offsets[vertex] as usize..offsets[vertex + 1] as usize] {
                let neighbour = &mut distance[*edge as usize];
                if *neighbour == UNSEEN {
                    *neighbour = further;
                    order[seen] = *edge;
                    seen += 1;
                }
            }
        }
        level = level.end..seen;
    }
    seen
}

/// Bytes of blocks that live at a time: this share of the array.
const CHURN_SHARE: usize = 16;
/// Sizes of blocks.
const BLOCK_MIN: usize = 4 << 10;
const BLOCK_MAX: usize = 252 << 10;
/// How often the array is scanned meanwhile, and how many times its size is allocated.
const SCANS: usize = 4;

fn churn(run: &Run<'_>, size: usize) -> Result<u64> {
    let mut array = run.array::<u64>(size / 8)?;
    run.phase("build", || array.iter_mut().zip(0..).for_each(|(value, at)| *value = mix(at)));
    let block = (BLOCK_MIN + BLOCK_MAX) / 2;
    let (live, blocks) = ((size / CHURN_SHARE / block).max(1), SCANS * size / block);
    Ok(run.phase("churn+scan", || {
        std::thread::scope(|threads| {
            let churn = threads.spawn(|| replace_blocks(live, blocks as u64));
            let sum = (0..SCANS).fold(0, |sum, _| array.iter().fold(sum, |sum, v| fold(sum, *v)));
            fold(sum, churn.join().expect("the blocks are as they were left"))
        })
    }))
}

/// Replaces random blocks by new ones of random sizes, and checks each when it dies.
fn replace_blocks(live: usize, count: u64) -> u64 {
    const STEP: usize = 512;
    let _far = Scope::enter(Tier::FAR);
    let mut blocks: Vec<(u64, Vec<u64>)> = vec![(0, Vec::new()); live];
    let mut sum = 0;
    let mut check = |(stamp, words): &(u64, Vec<u64>)| {
        assert!(words.iter().step_by(STEP).all(|word| word == stamp), "block {stamp}");
        sum = fold(sum, *stamp);
    };
    for at in 0..count {
        let random = mix(at);
        let bytes = BLOCK_MIN + (random >> 32) as usize % (BLOCK_MAX - BLOCK_MIN);
        let old = &mut blocks[random as usize % live];
        check(old);
        *old = (random, vec![random; bytes / 8]);
    }
    blocks.iter().for_each(check);
    sum
}

fn load(run: &Run<'_>, size: usize) -> Result<u64> {
    let (pool_words, table_words) = texts::lengths(size);
    let mut pool = run.array::<u64>(pool_words)?;
    let mut table = run.array::<u64>(table_words)?;
    run.phase("pool", || texts::fill(&mut pool));
    let drawn = run.phase("load", || texts::load(&pool, &mut table));
    Ok(run.phase("scan", || texts::scan(&table, drawn)))
}

/// Rows of `lineitem` at scale factor 1, about.
const ROWS_AT_1: f64 = 6e6;
/// Parts of the table, a thread each.
const PARTS: i32 = 2;

fn tpch_plan(size: usize) -> Plan {
    Plan::count(size as f64 / ROW_BYTES as f64 / ROWS_AT_1, PARTS)
}

fn tpch(run: &Run<'_>, size: usize) -> Result<u64> {
    let plan = tpch_plan(size);
    let loaded = run.phase("load", || Table::load(&plan, Global, &Progress::hidden()));
    let (table, reference) = loaded.map_err(|error| Failure::Broken(format!("{error:?}")))?;
    let mut hash = DefaultHasher::new();
    for query in [Query::Q1, Query::Q6] {
        let answer = run.phase(query.name(), || queries::run(query, &table));
        if answer != reference.answer(query) {
            return Err(Failure::Broken(format!("{} is wrong: {answer:?}", query.name())));
        }
        hash.write(format!("{answer:?}").as_bytes());
    }
    Ok(hash.finish())
}
