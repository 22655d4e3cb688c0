//! An engine: queries arrive by chance, ten are active at most, and memory is looked at meanwhile.

use crate::operators::{CLASSES, Memory, group_by, join, materialise};
use std::alloc::GlobalAlloc;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of queries that are active at the same time, as in the paper.
const ACTIVE_MAX: usize = 10;

/// After the last query: how long memory is looked at for what is given back, and as many queries' time if that is
/// longer.
const AFTER: Duration = Duration::from_millis(300);
const AFTER_QUERIES: f64 = 25.0;

/// Samples of memory in a run, about.
const SAMPLES: u32 = 200;

/// What an engine does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) queries: usize,
    /// Queries in a second, on average; `None`: all arrive at once, as many are active as there are
    /// processors.
    pub(crate) rate: Option<f64>,
    /// Rows of an operator are multiplied by a tenth of this.
    pub(crate) tenths: u64,
    /// Memory is looked at for what was freed lazily, too, which takes longer.
    pub(crate) is_lazy_asked: bool,
}

/// Memory at a moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Seconds since the beginning.
    pub(crate) at: f64,
    /// Bytes.
    pub(crate) requested: f64,
    /// Bytes above the beginning's.
    pub(crate) resident: f64,
    /// Bytes of `resident` that the kernel may take (`MADV_FREE`).
    pub(crate) lazy: f64,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) seconds: f64,
    /// Processor time until then.
    pub(crate) processor_s: f64,
    /// Of each query, in milliseconds: from its arrival to its end, and to its beginning.
    pub(crate) latencies: Vec<f64>,
    pub(crate) waits: Vec<f64>,
    pub(crate) memory: Vec<Sample>,
    /// Allocations by the classes of their sizes, and their bytes.
    pub(crate) classes: Vec<u64>,
    pub(crate) class_bytes: Vec<u64>,
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
fn query(memory: &Memory<impl GlobalAlloc>, number: usize, tenths: u64) {
    let mut random = Random::new(number as u64 + 1);
    for _ in 0..1 + random.below(4) {
        let rows = tenths * random.by_magnitude(10, 16) / 10;
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
    let (done, all_done) = mpsc::channel::<()>();
    let (ended, samples) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let (resident_before, faults_before) = (resident(), page_faults());
    let began = Instant::now();
    let (seconds, processor_s) = thread::scope(|all| {
        let sampler = all.spawn(|| {
            let expected = load.rate.map_or(1.0, |rate| load.queries as f64 / rate);
            let every = Duration::from_secs_f64(expected) / SAMPLES;
            while !ended.load(Relaxed) {
                let sample = Sample {
                    at: began.elapsed().as_secs_f64(),
                    requested: memory.requested() as f64,
                    resident: resident().saturating_sub(resident_before) as f64,
                    lazy: if load.is_lazy_asked { lazily_freed() as f64 } else { 0.0 },
                };
                samples.lock().expect("no panic").push(sample);
                thread::sleep(every.max(Duration::from_millis(2)));
            }
        });
        for _ in 0..active {
            all.spawn(|| {
                loop {
                    let next = receive.lock().expect("no panic").recv();
                    let Ok((number, arrived)) = next else { return };
                    let waited = arrived.elapsed();
                    let checked = AssertUnwindSafe(|| query(&memory, number, load.tenths));
                    if catch_unwind(checked).is_err() {
                        // The others would wait for this one for ever.
                        std::process::abort();
                    }
                    times.lock().expect("no panic").push((arrived.elapsed(), waited));
                    done.send(()).expect("the engine waits for all queries");
                }
            });
        }
        let mut random = Random::new(7);
        let mut due = began;
        for number in 0..load.queries {
            if let Some(rate) = load.rate {
                due += Duration::from_secs_f64(random.exponential() / rate);
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            send.send((number, due)).expect("the workers wait for more");
        }
        all_done.iter().take(load.queries).count();
        let (seconds, processor_s) = (began.elapsed().as_secs_f64(), processor_s());
        // What an allocator gives back after a while is seen by looking after a while.
        let queries = load.rate.map_or(0.0, |rate| AFTER_QUERIES / rate);
        thread::sleep(AFTER.max(Duration::from_secs_f64(queries)));
        ended.store(true, Relaxed);
        // Only now: some allocators give back what a thread had when it ends, and an engine's threads do not.
        drop(send);
        sampler.join().expect("no panic");
        (seconds, processor_s)
    });
    assert_eq!(memory.requested(), 0, "all was freed");
    let times = times.into_inner().expect("no panic");
    let ms = |time: &Duration| time.as_secs_f64() * 1e3;
    Seen {
        seconds,
        processor_s,
        latencies: times.iter().map(|(latency, _)| ms(latency)).collect(),
        waits: times.iter().map(|(_, wait)| ms(wait)).collect(),
        memory: samples.into_inner().expect("no panic"),
        classes: memory.classes(),
        class_bytes: memory.class_bytes(),
        page_faults: page_faults() - faults_before,
    }
}

/// Resident bytes of this process.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
    let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    pages * 4096
}

/// Bytes of this process that were given back with `MADV_FREE` and are still resident.
fn lazily_freed() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux has it");
    let line = text.lines().find_map(|line| line.strip_prefix("LazyFree:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("a number of KiB") << 10
}

/// Page faults of this process that needed no device.
fn page_faults() -> u64 {
    of_stat(7)
}

/// Processor time of this process; counted in hundredths of a second.
fn processor_s() -> f64 {
    (of_stat(11) + of_stat(12)) as f64 / 100.0
}

/// A number of proc_pid_stat(5), counted after the name.
fn of_stat(at: usize) -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    let after_name = text.rsplit(") ").next().expect("fields");
    after_name.split(' ').nth(at).and_then(|n| n.parse().ok()).expect("a number")
}

impl Seen {
    /// As text for the parent: a line for each kind of number.
    pub(crate) fn to_text(&self) -> String {
        let line = |numbers: &[f64]| {
            numbers.iter().map(|n| format!("{n:.4}")).collect::<Vec<_>>().join(" ")
        };
        let column = |of: fn(&Sample) -> f64| line(&self.memory.iter().map(of).collect::<Vec<_>>());
        let counts =
            |counts: &[u64]| line(&counts.iter().map(|count| *count as f64).collect::<Vec<_>>());
        [
            line(&[self.seconds, self.page_faults as f64, self.processor_s]),
            line(&self.latencies),
            line(&self.waits),
            column(|sample| sample.at),
            column(|sample| sample.requested),
            column(|sample| sample.resident),
            column(|sample| sample.lazy),
            counts(&self.classes),
            counts(&self.class_bytes),
        ]
        .join("\n")
    }

    /// Reads [`to_text`](Self::to_text).
    pub(crate) fn from_text(text: &str) -> Option<Seen> {
        let line =
            |line: &str| line.split(' ').map(|n| n.parse().ok()).collect::<Option<Vec<f64>>>();
        let lines = text.lines().map(line).collect::<Option<Vec<_>>>()?;
        let [scalars, latencies, waits, at, requested, resident, lazy, counts, bytes] =
            lines.try_into().ok()?;
        let memory = at.into_iter().zip(requested).zip(resident.into_iter().zip(lazy));
        let of_classes = |counts: Vec<f64>| {
            let counts: Vec<u64> = counts.into_iter().map(|count| count as u64).collect();
            Some(counts).filter(|all| all.len() == CLASSES.len() + 1)
        };
        Some(Seen {
            seconds: *scalars.first()?,
            page_faults: *scalars.get(1)? as u64,
            processor_s: *scalars.get(2)?,
            latencies,
            waits,
            memory: memory
                .map(|((at, requested), (resident, lazy))| Sample { at, requested, resident, lazy })
                .collect(),
            classes: of_classes(counts)?,
            class_bytes: of_classes(bytes)?,
        })
    }

    /// Largest and mean of a part of `memory`, in MiB, until the last query ends.
    pub(crate) fn of_memory(&self, of: fn(&Sample) -> f64) -> (f64, f64) {
        let during = self.memory.iter().filter(|sample| sample.at <= self.seconds);
        let mib: Vec<f64> = during.map(|sample| of(sample) / MIB).collect();
        (mib.iter().copied().fold(0.0, f64::max), mean(&mib))
    }

    /// MiB resident when memory was looked at last, some time after the last query.
    pub(crate) fn after(&self) -> f64 {
        self.memory.last().map_or(0.0, |sample| sample.resident / MIB)
    }

    /// Least MiB resident in a part of the time in which queries run: from one share of it to another.
    pub(crate) fn least(&self, from: f64, to: f64) -> f64 {
        let part = from * self.seconds..to * self.seconds;
        let of_part = self.memory.iter().filter(|sample| part.contains(&sample.at));
        of_part.map(|sample| sample.resident / MIB).fold(f64::INFINITY, f64::min)
    }
}

const MIB: f64 = (1 << 20) as f64;

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The value below which a share of the values is.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
