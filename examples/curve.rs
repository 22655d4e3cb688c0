//! Checks the miss-ratio curve: how many reads a heap says that more memory would save, beside runs that have it.
//!
//! ```text
//! cargo run --release --example curve             # 32 MiB, data of twice that
//! cargo run --release --example curve -- 64MiB    # another limit
//! ```
//!
//! Each program runs in processes of its own, under a limit on far memory, 9/8 of it and 5/4 of it. The first one's
//! `reads_saved_by_eighth` and `reads_saved_by_quarter` predict the pages that the other two read. It fails if one of
//! them is wrong by more than a tenth.

use farheap::{ByteCount, Far, FarHeap, Heap, Scope, Stats, Tier};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::process::{Command, ExitCode};

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

type Failure = Box<dyn Error>;
type Value = [u8; 100];
/// Relative error of the predicted reads that is accepted where the limit is at least [`EXACT_FROM`].
const ERROR_MAX: f64 = 0.1;
/// Below this, what a heap needs itself is a large part of a limit.
const EXACT_FROM: ByteCount = ByteCount::mib(16);
/// Data in parts of the limit, and passes of a program over all of it.
const DATA_PER_LIMIT: u64 = 2;
const PASSES: u64 = 4;
const PAGE: u64 = 4096;

/// Builds data of about this many bytes, then calls what counts reads from there on, and works.
type Program = fn(u64, &mut dyn FnMut()) -> u64;

const PROGRAMS: [(&str, Program); 3] =
    [("hash map", hash_map), ("B-tree", btree), ("scan and random reads", scan)];

/// The number at a place of a sequence of random ones (splitmix64).
fn mix(at: u64) -> u64 {
    let mut z = at.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A place below `count`: the first sixteenth of all places is a quarter of them, the first quarter a half.
fn skewed(at: u64, count: u64) -> u64 {
    let random = mix(at) >> 32;
    (((random * random) >> 32) * count) >> 32
}

fn value(at: u64) -> Value {
    let mut value = [at as u8; 100];
    value[..8].copy_from_slice(&at.to_le_bytes());
    value
}

fn head(value: &Value) -> u64 {
    value[..8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// Skewed lookups; keys that are looked up often lie anywhere.
fn hash_map(bytes: u64, built: &mut dyn FnMut()) -> u64 {
    let count = bytes * 7 / 8 / (size_of::<(u64, Value)>() as u64 + 1);
    let mut map = HashMap::<u64, Value, BuildHasherDefault<DefaultHasher>>::default();
    map.reserve(count as usize);
    map.extend((0..count).map(|at| (mix(at), value(at))));
    built();
    let lookups = PASSES * bytes / PAGE;
    (0..lookups).fold(0, |sum: u64, at| sum.wrapping_add(head(&map[&mix(skewed(at, count))])))
}

/// Lookups of all keys alike: inner nodes are used often, leaves seldom.
fn btree(bytes: u64, built: &mut dyn FnMut()) -> u64 {
    let _far = Scope::enter(Tier::FAR);
    let mut map = BTreeMap::<u64, Value>::new();
    let count = bytes / 190; // Nodes are two thirds full.
    map.extend((0..count).map(|at| (mix(at), value(at))));
    built();
    let lookups = PASSES * bytes / PAGE;
    (0..lookups).fold(0, |sum: u64, at| sum.wrapping_add(head(&map[&mix(mix(at) % count)])))
}

/// A scan of half of the data, again and again, and as many reads of random pages of the other half.
fn scan(bytes: u64, built: &mut dyn FnMut()) -> u64 {
    let count = (bytes / 8) as usize;
    let data: Vec<u64> = (0..count as u64).map(mix).collect();
    built();
    let (scanned, rest) = data.split_at(count / 2);
    let pages = rest.len() as u64 * 8 / PAGE;
    let mut sum = 0_u64;
    for (at, page) in (0..2 * PASSES).flat_map(|_| scanned.chunks(PAGE as usize / 8)).enumerate() {
        sum = page.iter().fold(sum, |sum, number| sum.wrapping_add(*number));
        sum = sum.wrapping_add(rest[(mix(at as u64) % pages * PAGE / 8) as usize]);
    }
    sum
}

/// What a run under a limit reports.
struct Run {
    answer: u64,
    reads: u64,
    saved: [u64; 2],
}

/// Runs a program in this process; the numbers are in the order of [`Run`]'s.
fn child(program: usize, limit: ByteCount, data: u64) -> Result<(), Failure> {
    let heap = Heap::builder().far_limit(limit).start();
    let heap = match heap {
        Ok(heap) => heap,
        Err(error @ farheap::Error::UffdUnavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    if !Far::contains(vec![0_u8; 1 << 20].as_ptr()) {
        println!("skipped: nothing goes far by its size here");
        return Ok(());
    }
    let mut before: Option<Stats> = None;
    let answer = PROGRAMS[program].1(data, &mut || before = Some(heap.stats()));
    let stats = heap.stats().since(&before.ok_or("every program builds its data")?);
    let Stats { pages_in, reads_saved_by_eighth, reads_saved_by_quarter, .. } = stats;
    println!("{answer} {pages_in} {reads_saved_by_eighth} {reads_saved_by_quarter}");
    Ok(heap.shutdown()?)
}

/// Runs a program in a process of its own; `None`, with the reason printed, where it is not permitted.
fn run(program: usize, limit: u64, data: u64) -> Result<Option<Run>, Failure> {
    let arguments = [program as u64, limit, data].map(|number| number.to_string());
    let output = Command::new(std::env::current_exe()?).arg("child").args(arguments).output()?;
    let text = String::from_utf8(output.stdout)?;
    if text.starts_with("skipped: ") {
        print!("{text}");
        return Ok(None);
    }
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let numbers: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
    let [answer, reads, eighth, quarter] = numbers?[..] else { return Err(text.into()) };
    Ok(Some(Run { answer, reads, saved: [eighth, quarter] }))
}

fn main() -> Result<ExitCode, Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, program, limit, data] = &arguments[..] {
        assert_eq!(word, "child", "an example has one argument at most");
        return child(program.parse()?, ByteCount(limit.parse()?), data.parse()?)
            .map(|()| ExitCode::SUCCESS);
    }
    let limit: ByteCount = arguments.first().map_or("32MiB", String::as_str).parse()?;
    let data = DATA_PER_LIMIT * limit.0;
    let mut is_right = true;
    println!(
        "{:<22} {:>6} {:>10} {:>10} {:>8}",
        "limit", limit, "predicted", "pages read", "error"
    );
    for (program, (name, _)) in PROGRAMS.iter().enumerate() {
        let Some(base) = run(program, limit.0, data)? else { return Ok(ExitCode::SUCCESS) };
        println!("{name:<22} {:>6} {:>10} {:>10}", "1", "", base.reads);
        for (saved, (words, eighths)) in base.saved.iter().zip([("9/8", 9), ("5/4", 10)]) {
            let Some(run) = run(program, limit.0 * eighths / 8, data)? else {
                return Ok(ExitCode::SUCCESS);
            };
            let predicted = base.reads - saved;
            let error = predicted as f64 / run.reads.max(1) as f64 - 1.0;
            println!(
                "{:<22} {words:>6} {predicted:>10} {:>10} {:>6.1} %",
                "",
                run.reads,
                100.0 * error
            );
            let is_near = limit < EXACT_FROM || error.abs() <= ERROR_MAX;
            is_right &= is_near && run.answer == base.answer && *saved <= base.reads;
        }
    }
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
