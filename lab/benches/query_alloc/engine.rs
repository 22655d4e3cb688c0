//! An engine: queries arrive by chance, ten are active at most, and memory is looked at meanwhile.

use crate::operators::{CLASSES, Memory, group_by, join, materialise};
use std::alloc::GlobalAlloc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of queries that are active at the same time, as in the paper.
const ACTIVE_MAX: usize = 10;

/// After the last query: how long memory is looked at for what is given back.
const AFTER: Duration = Duration::from_millis(300);

/// Samples of memory in a run, about.
const SAMPLES: u32 = 200;

/// What an engine does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) queries: usize,
    /// Queries in a second, on average; `None`: all arrive at once, as many are active as there are
    /// processors.
    pub(crate) rate: Option<f64>,
    /// Rows of an operator are multiplied by this.
    pub(crate) scale: u64,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) seconds: f64,
    /// Of each query, in milliseconds: from its arrival to its end, and to its beginning.
    pub(crate) latencies: Vec<f64>,
    pub(crate) waits: Vec<f64>,
    /// Seconds since the beginning, bytes requested, bytes resident above the beginning's.
    pub(crate) memory: Vec<(f64, f64, f64)>,
    /// Allocations by the classes of their sizes.
    pub(crate) classes: Vec<u64>,
    pub(crate) page_faults: u64,
}

/// xorshift.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Exponentially distributed with mean 1.
    fn exponential(&mut self) -> f64 {
        let uniform = (self.next() >> 1) as f64 / (1_u64 << 52) as f64;
        -(1.0 - uniform).ln()
    }

    /// From 2^low to 2^high, every power of two as likely as any other.
    fn by_magnitude(&mut self, low: u64, high: u64) -> u64 {
        let size = 1 << (low + self.below(high - low));
        size + self.below(size)
    }
}

/// One query: some operators, three of four of them group-bys, as the paper counts them.
fn query(memory: &Memory<impl GlobalAlloc>, number: usize, scale: u64) {
    let mut random = Random::new(number as u64 + 1);
    for _ in 0..1 + random.below(4) {
        let rows = scale * random.by_magnitude(10, 16);
        match random.below(20) {
            0..=14 => group_by(memory, rows, 1 + random.below(rows)),
            15..=17 => join(memory, rows),
            _ => materialise(memory, rows),
        }
    }
}

/// Runs the load.
pub(crate) fn run<A: GlobalAlloc + Sync>(alloc: A, load: Load) -> Seen {
    let memory = Memory::new(alloc);
    let processors = thread::available_parallelism().map_or(1, |count| count.get());
    let active = if load.rate.is_some() { ACTIVE_MAX } else { processors };
    let (send, receive) = mpsc::channel::<(usize, Instant)>();
    let (receive, times) = (Mutex::new(receive), Mutex::new(Vec::new()));
    let (ended, samples) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let (resident_before, faults_before) = (resident(), page_faults());
    let began = Instant::now();
    let seconds = thread::scope(|all| {
        let sampler = all.spawn(|| {
            let expected = load.rate.map_or(1.0, |rate| load.queries as f64 / rate);
            let every = Duration::from_secs_f64(expected) / SAMPLES;
            while !ended.load(Relaxed) {
                let of = resident().saturating_sub(resident_before) as f64;
                let now = (began.elapsed().as_secs_f64(), memory.requested() as f64, of);
                samples.lock().expect("no panic").push(now);
                thread::sleep(every.max(Duration::from_millis(2)));
            }
        });
        let workers: Vec<_> = (0..active)
            .map(|_| {
                all.spawn(|| {
                    loop {
                        let next = receive.lock().expect("no panic").recv();
                        let Ok((number, arrived)) = next else { return };
                        let waited = arrived.elapsed();
                        query(&memory, number, load.scale);
                        times.lock().expect("no panic").push((arrived.elapsed(), waited));
                    }
                })
            })
            .collect();
        let mut random = Random::new(7);
        let mut due = began;
        for number in 0..load.queries {
            if let Some(rate) = load.rate {
                due += Duration::from_secs_f64(random.exponential() / rate);
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            send.send((number, due)).expect("the workers wait for more");
        }
        drop(send);
        workers.into_iter().for_each(|worker| worker.join().expect("no check failed"));
        let seconds = began.elapsed().as_secs_f64();
        thread::sleep(AFTER);
        ended.store(true, Relaxed);
        sampler.join().expect("no panic");
        seconds
    });
    assert_eq!(memory.requested(), 0, "all was freed");
    let times = times.into_inner().expect("no panic");
    let ms = |time: &Duration| time.as_secs_f64() * 1e3;
    Seen {
        seconds,
        latencies: times.iter().map(|(latency, _)| ms(latency)).collect(),
        waits: times.iter().map(|(_, wait)| ms(wait)).collect(),
        memory: samples.into_inner().expect("no panic"),
        classes: memory.classes(),
        page_faults: page_faults() - faults_before,
    }
}

/// Resident bytes of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    pages * 4096
}

/// Page faults of this process that needed no device.
fn page_faults() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    let after_name = text.rsplit(") ").next().expect("fields");
    after_name.split(' ').nth(7).and_then(|n| n.parse().ok()).expect("a number")
}

impl Seen {
    /// As text for the parent: a line for each kind of number.
    pub(crate) fn to_text(&self) -> String {
        let line = |numbers: &[f64]| {
            numbers.iter().map(|n| format!("{n:.4}")).collect::<Vec<_>>().join(" ")
        };
        let column =
            |of: fn(&(f64, f64, f64)) -> f64| line(&self.memory.iter().map(of).collect::<Vec<_>>());
        let counts: Vec<f64> = self.classes.iter().map(|count| *count as f64).collect();
        [
            line(&[self.seconds, self.page_faults as f64]),
            line(&self.latencies),
            line(&self.waits),
            column(|sample| sample.0),
            column(|sample| sample.1),
            column(|sample| sample.2),
            line(&counts),
        ]
        .join("\n")
    }

    /// Reads [`to_text`](Self::to_text).
    pub(crate) fn from_text(text: &str) -> Option<Seen> {
        let line =
            |line: &str| line.split(' ').map(|n| n.parse().ok()).collect::<Option<Vec<f64>>>();
        let lines = text.lines().map(line).collect::<Option<Vec<_>>>()?;
        let [scalars, latencies, waits, at, requested, resident, counts] = lines.try_into().ok()?;
        let memory = at.into_iter().zip(requested).zip(resident);
        let classes: Vec<u64> = counts.into_iter().map(|count| count as u64).collect();
        Some(Seen {
            seconds: *scalars.first()?,
            page_faults: *scalars.get(1)? as u64,
            latencies,
            waits,
            memory: memory.map(|((at, requested), resident)| (at, requested, resident)).collect(),
            classes: Some(classes).filter(|all| all.len() == CLASSES.len() + 1)?,
        })
    }

    /// Largest and mean of a column of `memory`, in MiB.
    pub(crate) fn of_memory(&self, of: fn(&(f64, f64, f64)) -> f64) -> (f64, f64) {
        let mib: Vec<f64> =
            self.memory.iter().map(|sample| of(sample) / f64::from(1 << 20)).collect();
        let mean = mib.iter().sum::<f64>() / mib.len().max(1) as f64;
        (mib.into_iter().fold(0.0, f64::max), mean)
    }
}

/// The value below which a share of the values is.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
