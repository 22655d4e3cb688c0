//! Vectors in clusters, queries, and the right answers.

use crate::Args;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal, Zipf};

/// Vectors differ in this number of independent ways, as learned embeddings do; the other dimensions
/// follow.
const LATENT: usize = 12;
/// Vectors of a cluster, on average.
const CLUSTER: u32 = 300;
/// Queries whose true neighbours are looked up.
const CHECKED_MAX: usize = 200;

/// Everything that is asked and known beforehand.
pub(crate) struct Data {
    pub(crate) vectors: Vec<Vec<f32>>,
    /// Run first, to fill the page cache and to be watched.
    pub(crate) earlier: Vec<Vec<f32>>,
    /// Measured.
    pub(crate) queries: Vec<Vec<f32>>,
    /// True neighbours of the first queries.
    truth: Vec<Vec<u32>>,
}

impl Data {
    pub(crate) fn new(args: &Args) -> Data {
        let mut source = Source::new(args);
        let clusters = source.centres.len();
        let any = |source: &mut Source| source.rng.random_range(0..clusters);
        let vectors: Vec<Vec<f32>> = (0..args.vectors)
            .map(|_| {
                let cluster = any(&mut source);
                source.vector(cluster)
            })
            .collect();
        let zipf = (args.skew > 0.0)
            .then(|| Zipf::new(clusters as f64, args.skew).expect("a positive skewness"));
        let mut ask = || -> Vec<Vec<f32>> {
            (0..args.queries)
                .map(|_| {
                    let cluster = match &zipf {
                        Some(zipf) => zipf.sample(&mut source.rng) as usize - 1,
                        None => any(&mut source),
                    };
                    source.vector(cluster)
                })
                .collect()
        };
        let (earlier, queries) = (ask(), ask());
        let checked = queries.iter().take(CHECKED_MAX);
        let truth = checked.map(|query| nearest(&vectors, query, args.count.into())).collect();
        Data { vectors, earlier, queries, truth }
    }

    /// Share of the true neighbours among the answers to the first queries.
    pub(crate) fn recall(&self, answers: &[Vec<u32>]) -> f64 {
        let pairs = || self.truth.iter().zip(answers);
        let found: usize =
            pairs().map(|(truth, seen)| seen.iter().filter(|id| truth.contains(id)).count()).sum();
        let wanted: usize = self.truth.iter().map(Vec::len).sum();
        found as f64 / wanted.max(1) as f64
    }
}

/// Makes vectors: a cluster's centre and a deviation in few dimensions, mapped to many.
struct Source {
    rng: StdRng,
    centres: Vec<[f32; LATENT]>,
    map: Vec<[f32; LATENT]>,
}

impl Source {
    fn new(args: &Args) -> Source {
        let mut rng = StdRng::seed_from_u64(args.seed);
        let mut row = |_| std::array::from_fn(|_| StandardNormal.sample(&mut rng));
        let centres = (0..args.vectors.div_ceil(CLUSTER)).map(&mut row).collect();
        let map = (0..u32::from(args.dimensions)).map(&mut row).collect();
        Source { rng, centres, map }
    }

    fn vector(&mut self, cluster: usize) -> Vec<f32> {
        const SPREAD: f32 = 0.4;
        const NOISE: f32 = 0.05;
        let mut normal = || -> f32 { StandardNormal.sample(&mut self.rng) };
        let latent = self.centres[cluster].map(|x| x + SPREAD * normal());
        let mapped =
            |row: &[f32; LATENT]| -> f32 { row.iter().zip(latent).map(|(a, b)| a * b).sum() };
        self.map.iter().map(|row| mapped(row) + NOISE * normal()).collect()
    }
}

/// The numbers of the nearest vectors, by looking at all.
fn nearest(vectors: &[Vec<f32>], query: &[f32], count: usize) -> Vec<u32> {
    let distance =
        |vector: &[f32]| -> f32 { vector.iter().zip(query).map(|(a, b)| (a - b) * (a - b)).sum() };
    let mut all: Vec<(f32, u32)> =
        (0..).zip(vectors).map(|(id, vector)| (distance(vector), id)).collect();
    let count = count.min(all.len());
    all.select_nth_unstable_by(count - 1, |a, b| a.0.total_cmp(&b.0));
    all.into_iter().take(count).map(|(_, id)| id).collect()
}
