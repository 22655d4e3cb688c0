//! Page traces: which page is touched when, and when its content is given up.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// What a program does with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Touch(u32),
    /// Its content is given up: a touch after that is a first one.
    Discard(u32),
}

/// A sequence of events of pages `0..pages`.
pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) pages: u32,
    /// Pages of which a cache has a share: all, but those of a file that are never touched.
    pub(crate) size: u32,
    pub(crate) events: Vec<Event>,
}

/// How large the made traces are.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) pages: u32,
    pub(crate) touches: usize,
    pub(crate) seed: u64,
}

/// What a made trace is like.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Zipf(f64),
    Uniform,
    Cyclic,
    ZipfAndScans,
    Columns,
    BTree,
    Phases,
    ShiftingScans,
    TreeBuild,
}

impl Kind {
    pub(crate) const ALL: [Kind; 11] = [
        Kind::Zipf(0.8),
        Kind::Zipf(1.0),
        Kind::Zipf(1.3),
        Kind::Uniform,
        Kind::Cyclic,
        Kind::ZipfAndScans,
        Kind::Columns,
        Kind::BTree,
        Kind::Phases,
        Kind::ShiftingScans,
        Kind::TreeBuild,
    ];

    /// Makes the trace; only the cyclic ones depend on the `frames` it will be played against.
    pub(crate) fn make(self, scale: Scale, frames: u32) -> Trace {
        let mut rng = StdRng::seed_from_u64(scale.seed);
        let Scale { pages, touches, .. } = scale;
        let (name, touches) = match self {
            Kind::Zipf(skew) => {
                let hot = Hot::new(&mut rng, 0..pages, skew);
                (format!("zipf {skew:.1}"), (0..touches).map(|_| hot.pick(&mut rng)).collect())
            }
            Kind::Uniform => {
                ("uniform".to_owned(), (0..touches).map(|_| rng.random_range(0..pages)).collect())
            }
            Kind::Cyclic => {
                let lap = (frames + frames / 10).max(2);
                ("cyclic scan".to_owned(), (0..touches as u32).map(|i| i % lap).collect())
            }
            Kind::ZipfAndScans => ("zipf + scans".to_owned(), zipf_and_scans(&mut rng, scale)),
            Kind::Columns => ("column scans".to_owned(), columns(&mut rng, scale)),
            Kind::TreeBuild => ("tree build".to_owned(), tree_build(&mut rng, scale)),
            Kind::BTree => ("b-tree".to_owned(), btree(&mut rng, scale)),
            Kind::Phases => ("phases".to_owned(), phases(&mut rng, scale)),
            Kind::ShiftingScans => {
                ("shifting scans".to_owned(), shifting_scans(&mut rng, scale, frames))
            }
        };
        Trace::new(name, pages, touches.into_iter().map(Event::Touch).collect())
    }
}

/// Pages of a chunk, 2 MiB: neighbours in a file keep their distance.
pub(crate) const CHUNK: u32 = 512;

impl Trace {
    fn new(name: String, pages: u32, events: Vec<Event>) -> Trace {
        Trace { name, pages, size: pages, events }
    }

    /// Traces in which fresh data stands beside data that was read.
    pub(crate) fn of_fresh_data(Scale { pages, touches, seed }: Scale) -> [Trace; 4] {
        let mut rng = StdRng::seed_from_u64(seed);
        let scale = Scale { pages, touches, seed };
        [
            ("load beside a pool", load_beside_a_pool(&mut rng, scale)),
            ("hash beside scans", hash_beside_scans(&mut rng, scale)),
            ("scans that fit", scans_that_fit(scale)),
            ("tree build", tree_build(&mut rng, scale).into_iter().map(Event::Touch).collect()),
        ]
        .map(|(name, events)| Trace::new(name.to_owned(), pages, events))
    }

    /// Reads a trace from a file: one page number a line, with `-` before it where the content is given up; empty lines
    /// and `#` lines are skipped. The first `local` pages of the file that are touched are left out.
    pub(crate) fn read(path: &Path, local: usize) -> Result<Trace, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut chunks = HashMap::new();
        let mut left_out = HashSet::new();
        let mut events = Vec::new();
        let mut last = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (page, is_touch) =
                line.strip_prefix('-').map_or((line, true), |page| (page, false));
            let page: u64 = page.parse().map_err(|_| {
                format!("{}:{}: `{line}` is not a page number", path.display(), number + 1)
            })?;
            if left_out.len() < local {
                left_out.insert(page);
            }
            if left_out.contains(&page) {
                continue;
            }
            let next = chunks.len() as u32;
            let chunk = *chunks.entry(page / u64::from(CHUNK)).or_insert(next);
            let page = chunk * CHUNK + (page % u64::from(CHUNK)) as u32;
            let event = if is_touch { Event::Touch(page) } else { Event::Discard(page) };
            // The same once more changes nothing.
            if last != Some(event) {
                events.push(event);
            }
            last = Some(event);
        }
        let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        let pages = chunks.len() as u32 * CHUNK;
        if pages == 0 {
            return Err(format!("{}: no page is touched", path.display()));
        }
        let mut trace = Trace { name, pages, size: 0, events };
        trace.size = trace.touched_pages();
        Ok(trace)
    }

    /// The number of touches.
    pub(crate) fn touches(&self) -> u64 {
        self.events.iter().filter(|event| matches!(event, Event::Touch(_))).count() as u64
    }

    fn touched_pages(&self) -> u32 {
        let mut is_touched = vec![false; self.pages as usize];
        for event in &self.events {
            if let Event::Touch(page) = event {
                is_touched[*page as usize] = true;
            }
        }
        is_touched.iter().filter(|touched| **touched).count() as u32
    }
}

/// Pages of a range, some far more popular than others and nowhere near each other.
struct Hot {
    by_rank: Vec<u32>,
    rank: Zipf<f64>,
}

impl Hot {
    fn new(rng: &mut StdRng, range: std::ops::Range<u32>, skew: f64) -> Hot {
        let mut by_rank: Vec<u32> = range.collect();
        by_rank.shuffle(rng);
        let rank = Zipf::new(by_rank.len() as f64, skew).expect("pages > 0 and skew > 0");
        Hot { by_rank, rank }
    }

    fn pick(&self, rng: &mut StdRng) -> u32 {
        self.by_rank[self.rank.sample(rng) as usize - 1]
    }
}

/// Point look-ups, every now and then interrupted by a sequential pass over a fifth of the pages.
fn zipf_and_scans(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<u32> {
    let hot = Hot::new(rng, 0..pages, 1.0);
    let mut trace = Vec::with_capacity(touches);
    while trace.len() < touches {
        trace.extend((0..pages / 2).map(|_| hot.pick(rng)));
        let start = rng.random_range(0..pages);
        trace.extend((0..pages / 5).map(|i| (start + i) % pages));
    }
    trace.truncate(touches);
    trace
}

/// Analytic queries: each scans a few columns of a table side by side, as TPC-H does with
/// `lineitem`; two of three queries are one of two favourites (Q1 and Q6).
fn columns(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<u32> {
    // Bytes a row, in the order of `lineitem`: keys, quantity, price, discount, tax, two flags,
    // three dates, instruction, mode, comment.
    const WIDTHS: [u32; 16] = [8, 4, 4, 4, 8, 8, 8, 8, 1, 1, 4, 4, 4, 8, 4, 26];
    const Q1: &[usize] = &[4, 5, 6, 7, 8, 9, 10];
    const Q6: &[usize] = &[4, 5, 6, 10];
    let row_bytes: u32 = WIDTHS.iter().sum();
    let mut start = 0;
    let ranges = WIDTHS.map(|width| {
        let len = (u64::from(pages) * u64::from(width) / u64::from(row_bytes)).max(1) as u32;
        start += len;
        (start - len, len)
    });
    let mut trace = Vec::with_capacity(touches);
    while trace.len() < touches {
        let other: Vec<usize> = (0..3).map(|_| rng.random_range(0..WIDTHS.len())).collect();
        let query = [Q1, Q6, &other][rng.random_range(0..3)];
        let steps = query.iter().map(|&c| ranges[c].1).max().expect("a query has columns");
        for step in 0..steps {
            for &(start, len) in query.iter().map(|&column| &ranges[column]) {
                let at = |step| (u64::from(step) * u64::from(len) / u64::from(steps)) as u32;
                if step == 0 || at(step) != at(step - 1) {
                    trace.push(start + at(step));
                }
            }
        }
    }
    trace.truncate(touches);
    trace.into_iter().map(|page| page % pages).collect()
}

/// Look-ups from the root of a tree through one inner page to a leaf.
fn btree(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<u32> {
    let inner = (pages / 300).max(1);
    let leaves = Hot::new(rng, inner + 1..pages, 0.9);
    let lookup = |_| {
        let leaf = leaves.pick(rng);
        [0, 1 + leaf % inner, leaf]
    };
    let mut trace: Vec<u32> = (0..touches.div_ceil(3)).flat_map(lookup).collect();
    trace.truncate(touches);
    trace
}

/// The hot set moves elsewhere four times.
fn phases(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<u32> {
    const PHASES: usize = 5;
    let mut trace = Vec::with_capacity(touches);
    for _ in 0..PHASES {
        let hot = Hot::new(rng, 0..pages, 1.0);
        trace.extend((0..touches / PHASES).map(|_| hot.pick(rng)));
    }
    trace
}

/// Cyclic scans, ten laps each, of ranges of half to twice the cache: what was worth keeping for
/// one is dead weight for the next.
fn shifting_scans(rng: &mut StdRng, Scale { pages, touches, .. }: Scale, frames: u32) -> Vec<u32> {
    const LAPS: u32 = 10;
    let mut trace = Vec::with_capacity(touches);
    while trace.len() < touches {
        let lap = rng.random_range(frames / 2..=frames * 2).clamp(1, pages);
        let start = rng.random_range(0..pages);
        trace.extend((0..lap * LAPS).map(|i| (start + i % lap) % pages));
    }
    trace.truncate(touches);
    trace
}

/// A map of two levels that grows to all pages while entries are inserted in random order, then as
/// many look-ups. An eighth of the pages are inner ones: far fewer than the leaves, and each is touched
/// seven times as often.
fn tree_build(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<u32> {
    const FANOUT: u32 = 8;
    let mut trace = Vec::with_capacity(touches);
    while trace.len() < touches {
        let grown = (trace.len() as u64 * 2 * u64::from(pages) / touches as u64) as u32;
        let leaf = rng.random_range(0..grown.clamp(FANOUT, pages));
        // Every eighth page is inner; its leaves are the pages between it and the next, wherever.
        let leaf = if leaf % FANOUT == 0 { leaf + 1 } else { leaf };
        trace.extend([leaf / FANOUT * FANOUT, leaf.min(pages - 1)]);
    }
    trace.truncate(touches);
    trace
}

/// A pool of an eighth of the pages is read at random while the rest is written in order: a table that is cut out of
/// texts. Then it is dropped and loaded anew.
fn load_beside_a_pool(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<Event> {
    const DRAWS: usize = 4;
    let pool = pages / 8;
    let mut trace: Vec<Event> = (0..pool).map(Event::Touch).collect();
    while trace.len() < touches {
        for page in pool..pages {
            trace.extend((0..DRAWS).map(|_| Event::Touch(rng.random_range(0..pool))));
            trace.push(Event::Touch(page));
        }
        trace.extend((pool..pages).map(Event::Discard));
    }
    trace
}

/// A table of half of the pages is loaded; queries scan it, and each fills a hash table of its own at random, of an
/// eighth of the pages, which dies with it.
fn hash_beside_scans(rng: &mut StdRng, Scale { pages, touches, .. }: Scale) -> Vec<Event> {
    let (table, hash) = (pages / 2, pages / 8);
    let mut trace: Vec<Event> = (0..table).map(Event::Touch).collect();
    while trace.len() < touches {
        for page in 0..table {
            let entries = [(); 2].map(|()| Event::Touch(table + rng.random_range(0..hash)));
            trace.extend([Event::Touch(page), entries[0], entries[1]]);
        }
        trace.extend((table..table + hash).map(Event::Discard));
    }
    trace
}

/// A table is loaded; queries scan its first eighth again and again, which fits, and need nothing of what was loaded after it.
fn scans_that_fit(Scale { pages, touches, .. }: Scale) -> Vec<Event> {
    let columns = (0..pages / 8).cycle().take(touches);
    (0..pages).chain(columns).map(Event::Touch).collect()
}
