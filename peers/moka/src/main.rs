//! A cache and a tree of values, as programs that nobody recompiles.
//!
//! ```text
//! farheap-peer-moka cache zipf KEYS LOOKUPS THREADS      # all values are there, Zipf 0.99
//! farheap-peer-moka cache skewed KEYS LOOKUPS THREADS    # values come when they are asked for
//! farheap-peer-moka btree KEYS LOOKUPS                   # Zipf 0.99
//! ```
//! Knows nothing of farheap. Prints a sum of what it found, which is the same however it was run.

use moka::sync::Cache;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes of a value of the cache: with its counts a block of 1 KiB.
const VALUE: usize = 1_000;
/// Bytes of a value of the tree.
const ROW: usize = 100;

const EXPONENT: f64 = 0.99;

/// The number at a place of a sequence of random ones (splitmix64).
fn mix(at: u64) -> u64 {
    let mut z = at.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn value<const LEN: usize>(key: u64) -> [u8; LEN] {
    let mut value = [key as u8; LEN];
    value[..8].copy_from_slice(&mix(key).to_le_bytes());
    value
}

fn sum(value: &[u8]) -> u64 {
    let (head, rest) = value.split_first_chunk().expect("longer than a number");
    u64::from_le_bytes(*head).wrapping_add(rest.iter().map(|byte| u64::from(*byte)).sum())
}

/// Which key is asked for.
enum Skew {
    /// By rank; neighbours in rank are no neighbours in memory.
    Zipf(Zipf<f64>),
    /// The product of two numbers: small ones come often, and some keys never do.
    Product,
}

impl Skew {
    fn zipf(keys: u64) -> Skew {
        Skew::Zipf(Zipf::new(keys as f64, EXPONENT).expect("a positive exponent"))
    }

    fn key(&self, random: &mut StdRng, keys: u64) -> u64 {
        /// A prime.
        const STRIDE: u64 = 2_654_435_761;
        match self {
            Skew::Zipf(zipf) => (zipf.sample(random) as u64 - 1) * STRIDE % keys,
            Skew::Product => random.random_range(0..1_000) * random.random_range(0..512) % keys,
        }
    }
}

fn cache(skew: &Skew, keys: u64, lookups: u64, threads: u64) -> u64 {
    let cache: Cache<u64, Arc<[u8; VALUE]>> = Cache::new(keys);
    let find = |key| sum(cache.get_with(key, || Arc::new(value(key))).as_slice());
    if matches!(skew, Skew::Zipf(_)) {
        for key in 0..keys {
            find(key);
        }
    }
    let look_up = |thread| {
        let mut random = StdRng::seed_from_u64(thread);
        let found = (0..lookups / threads).map(|_| find(skew.key(&mut random, keys)));
        found.fold(0, u64::wrapping_add)
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|n| scope.spawn(move || look_up(n))).collect();
        let found = all.into_iter().map(|thread| thread.join().expect("no thread panics"));
        found.fold(0, u64::wrapping_add)
    })
}

fn btree(keys: u64, lookups: u64) -> u64 {
    let mut map = BTreeMap::<u64, [u8; ROW]>::new();
    // One by one: a map that is collected is built of a sorted copy.
    for at in 0..keys {
        map.insert(mix(at), value(at));
    }
    let (skew, mut random) = (Skew::zipf(keys), StdRng::seed_from_u64(0));
    let found = (0..lookups).map(|_| sum(&map[&mix(skew.key(&mut random, keys))]));
    found.fold(0, u64::wrapping_add)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let numbers: Vec<u64> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let found = match (&words[..], &numbers[..]) {
        (["cache", "zipf", ..], &[keys, lookups, threads]) => {
            cache(&Skew::zipf(keys), keys, lookups, threads)
        }
        (["cache", "skewed", ..], &[keys, lookups, threads]) => {
            cache(&Skew::Product, keys, lookups, threads)
        }
        (["btree", ..], &[keys, lookups]) => btree(keys, lookups),
        _ => {
            eprintln!("farheap-peer-moka: see the head of its main.rs");
            return ExitCode::from(2);
        }
    };
    println!("{found}");
    ExitCode::SUCCESS
}
