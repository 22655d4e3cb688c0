//! The paper's key-value workload: hashed keys, Zipfian queries, scans and in-place updates.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};

/// Bytes of a value.
pub(crate) const VALUE_BYTES: usize = 150;
/// Bytes of a pair with its alignment: what the local-memory percentages refer to.
pub(crate) const PAIR_BYTES: u64 = 160;
/// Longest scan.
const SCAN_MAX: usize = 100;
/// A scan on average.
pub(crate) const SCAN_MEAN: usize = SCAN_MAX / 2;

pub(crate) type Value = [u8; VALUE_BYTES];

/// FNV-1a, 64 bits, over the little-endian bytes of a number.
pub(crate) fn hash(number: u64) -> u64 {
    const OFFSET: u64 = 14_695_981_039_346_656_037;
    const PRIME: u64 = 1_099_511_628_211;
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    number.to_le_bytes().into_iter().fold(OFFSET, step)
}

/// All pairs in the order of insertion.
pub(crate) fn pairs(n: u64, seed: u64) -> impl ExactSizeIterator<Item = (u64, Value)> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n as usize).rev().map(move |i| {
        let mut value = [0; VALUE_BYTES];
        rng.fill(&mut value[..]);
        (hash(i as u64), value)
    })
}

/// One query.
pub(crate) enum Query {
    /// Finds a key and reads this number of pairs from there.
    Scan(u64, usize),
    /// Finds a key and replaces its value.
    Update(u64, Box<Value>),
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    pub(crate) n: u64,
    pub(crate) count: usize,
    /// Zipfian skewness.
    pub(crate) alpha: f64,
    /// Share of updates.
    pub(crate) updates: f64,
    pub(crate) seed: u64,
}

impl Mix {
    /// The queries; `salt` changes the values that updates write, and nothing else.
    pub(crate) fn queries(&self, salt: u64) -> Vec<Query> {
        let mut values = StdRng::seed_from_u64(self.seed ^ (salt + 1) << 32);
        let mut rng = StdRng::seed_from_u64(self.seed);
        let zipf = Zipf::new(self.n as f64, self.alpha).expect("a valid distribution");
        let query = |_| {
            let rank = zipf.sample(&mut rng) as u64 - 1;
            let key = hash(rank);
            if rng.random_bool(self.updates) {
                let mut value = Box::new([0; VALUE_BYTES]);
                values.fill(&mut value[..]);
                Query::Update(key, value)
            } else {
                Query::Scan(key, rng.random_range(1..=SCAN_MAX))
            }
        };
        (0..self.count).map(query).collect()
    }
}
