//! Draws the resident memory of a program that works on three times its limit.
//!
//! ```text
//! cargo run --release --example limit           # 96 MiB, data of 288 MiB
//! cargo run --release --example limit -- 1GiB   # another limit; `auto` in a control group
//! ```
//!
//! The program makes data in three steps and sorts all of it after each, while a thread samples `VmRSS`. It
//! fails if the peak (`VmHWM`) is above the limit by more than the kernel may have miscounted.

use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{ByteCount, Far, Heap};
use std::cmp::Ordering;
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes of data, as far as the program has made them.
static DATA: AtomicU64 = AtomicU64::new(0);
static IS_OVER: AtomicBool = AtomicBool::new(false);

const SAMPLE_EVERY: Duration = Duration::from_millis(2);
/// The kernel adds up resident pages lazily: its number may be wrong by as much.
const WRONG_MAX: u64 = 1 << 20;
const COLUMNS: usize = 72;
const ROWS_PER_LIMIT: u64 = 4;

/// One look at the process.
struct Sample {
    at: Duration,
    data: u64,
    resident: u64,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let asked = std::env::args().nth(1).unwrap_or_else(|| "96MiB".to_owned());
    let options = Heap::builder().set("limit", &asked)?;
    let limit = options.limits()?.0.ok_or("a limit is needed")?;
    let heap = match options.start() {
        Ok(heap) => heap,
        Err(error @ farheap::Error::UffdUnavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    let sampler = std::thread::spawn(sample);
    let is_right = work(limit.get() * 3);
    IS_OVER.store(true, Relaxed);
    let samples = sampler.join().expect("the sampler has no reason to panic");
    heap.shutdown()?;

    let peak = status("VmHWM:").ok_or("/proc/self/status has no VmHWM")?;
    draw(&samples, limit.get());
    println!("limit {limit}, data {}, peak {}", ByteCount(limit.get() * 3), ByteCount(peak));
    let holds = peak <= limit.get() + WRONG_MAX;
    if !is_right || !holds {
        println!("failed: the answer is {is_right}, the limit {holds}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes `bytes` of far memory in three steps, and sorts all of it after each. Returns whether the end is right.
fn work(bytes: u64) -> bool {
    const STEPS: u64 = 3;
    let count = bytes / 8;
    let mut numbers: FarVec<u64, Far> = FarVec::with_capacity_in(count as usize, Far);
    for step in 1..=STEPS {
        for n in numbers.len() as u64..count * step / STEPS {
            numbers.push(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)); // All different: the factor is odd.
        }
        DATA.store(8 * numbers.len() as u64, Relaxed);
        numbers.sort_unstable();
    }
    numbers.len() as u64 == count && numbers.windows(2).all(|pair| pair[0] < pair[1])
}

fn sample() -> Vec<Sample> {
    let began = Instant::now();
    let mut samples = Vec::new();
    while !IS_OVER.load(Relaxed) {
        let resident = status("VmRSS:").unwrap_or_default();
        samples.push(Sample { at: began.elapsed(), data: DATA.load(Relaxed), resident });
        // The kernel tells nobody of growth. The picture needs samples at steady intervals.
        std::thread::sleep(SAMPLE_EVERY);
    }
    samples
}

/// Bytes that a line of `/proc/self/status` gives.
fn status(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Prints data as dots, resident memory as blocks, and the limit as a line, over time.
fn draw(samples: &[Sample], limit: u64) {
    let Some(end) = samples.last().map(|last| last.at) else { return };
    let mut columns = [(0, 0); COLUMNS];
    for sample in samples {
        let part = sample.at.as_secs_f64() / end.as_secs_f64().max(f64::MIN_POSITIVE);
        let (data, resident) = &mut columns[((part * COLUMNS as f64) as usize).min(COLUMNS - 1)];
        *data = sample.data.max(*data);
        *resident = sample.resident.max(*resident);
    }
    // A column without a sample is as the one before.
    for at in 1..COLUMNS {
        if columns[at] == (0, 0) {
            columns[at] = columns[at - 1];
        }
    }
    for row in (1..=3 * ROWS_PER_LIMIT).rev() {
        let height = |bytes: u64| (bytes * ROWS_PER_LIMIT).div_ceil(limit);
        let cells: String = (0..COLUMNS)
            .map(|at| {
                let (data, resident) = columns[at];
                let before = if at == 0 { 0 } else { columns[at - 1].0 };
                match row.cmp(&ROWS_PER_LIMIT) {
                    // Blocks are below the line: one above it exceeds the limit.
                    Ordering::Less if height(resident) > row => '█',
                    Ordering::Greater
                        if resident > limit + WRONG_MAX && height(resident) >= row =>
                    {
                        '█'
                    }
                    Ordering::Equal => '─',
                    _ if height(data) == row => '·',
                    _ if (height(before)..height(data)).contains(&row) => '·',
                    _ => ' ',
                }
            })
            .collect();
        let label = match row {
            row if row == ROWS_PER_LIMIT => "limit",
            row if row == 3 * ROWS_PER_LIMIT => "data",
            1 => "resident",
            _ => "",
        };
        println!("{label:>8} {}", cells.trim_end());
    }
    println!("{:>8} 0 s{:>width$}", "", format!("{:.1} s", end.as_secs_f64()), width = COLUMNS - 3);
}
