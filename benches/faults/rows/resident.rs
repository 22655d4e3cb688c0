//! Far memory that is resident, or has never been touched: it should be plain memory.

use super::faults::threads_text;
use crate::far::{self, Far};
use crate::os::{KERNEL_PAGE, Memory, Words};
use crate::report::{Figure, Row};
use crate::work::{Look, Rng, check, look, stamped};
use crate::{Failure, Plan, Result, Sample, Side, take_turns};
use farheap::ByteCount;
use std::time::{Duration, Instant};

/// One kind of access to memory.
#[derive(Clone, Copy, Debug)]
enum Access {
    SeqRead,
    SeqWrite,
    RandomRead,
    RandomWrite,
}

impl Access {
    const ALL: [(Access, &'static str); 4] = [
        (Access::SeqRead, "sequential reads"),
        (Access::SeqWrite, "sequential writes"),
        (Access::RandomRead, "random reads"),
        (Access::RandomWrite, "random writes"),
    ];

    /// Makes some accesses to the words, whose first is number `first`; counts them.
    fn burst(self, words: Words, first: usize, at: &mut usize, rng: &mut Rng) -> u64 {
        const BURST: usize = 8192;
        let count = BURST.min(words.len());
        let start = *at % (words.len() - count + 1);
        match self {
            Access::SeqRead => look(words.part(start, count), first + start, Look::Sum),
            Access::SeqWrite => {
                (start..start + count).for_each(|at| words.write(at, (first + at) as u64));
            }
            Access::RandomRead => (0..count).for_each(|_| {
                let at = rng.next() as usize % words.len();
                check(first + at, words.read(at));
            }),
            Access::RandomWrite => (0..count).for_each(|_| {
                let at = rng.next() as usize % words.len();
                words.write(at, (first + at) as u64);
            }),
        }
        *at = start + count;
        count as u64
    }

    /// Each thread works on its own part.
    fn run(self, words: Words, threads: usize, time: Duration) -> Sample {
        let clock = Sample::start();
        let until = Instant::now() + time;
        let work = |thread: usize| {
            let share = words.len() / threads;
            let first = thread * share;
            let (part, mut at, mut rng) = (words.part(first, share), 0, Rng::of_thread(thread));
            let mut count = 0;
            loop {
                count += self.burst(part, first, &mut at, &mut rng);
                if Instant::now() >= until {
                    return count;
                }
            }
        };
        let count = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no check fails")).sum()
        });
        // Nobody but these threads works for a resident page: their processor time is as good a
        // clock as the wall's, and other processes do not disturb it.
        let sample = clock.stop(count);
        Sample { secs: sample.cpu_secs / threads as f64, ..sample }
    }
}

pub(crate) fn speed(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let plan = &plan.with_short_rounds();
    let data = plan.cache / 2;
    let config = far::config(plan.cache, data);
    let far = Far::fresh(config, far::memory_store(data)?, data)?;
    (0..far.words.len()).for_each(|at| far.words.write(at, at as u64));
    let plain = Memory::patterned(data)?;
    for threads in [1, 2] {
        for (access, name) in Access::ALL {
            let mut sides: Vec<Side<'_>> = vec![
                Box::new(|time| Ok(access.run(far.words, threads, time))),
                Box::new(|time| Ok(access.run(plain.words(), threads, time))),
            ];
            let samples = take_turns(plan, &mut sides)?;
            let work = format!("resident: {name}, {}", threads_text(threads));
            let row = Row::turns(
                work,
                Figure::Accesses,
                &samples[0],
                "plain anonymous memory",
                &samples[1],
                Some(0.97),
            );
            rows.push(row);
        }
    }
    Ok(())
}

/// Touches a word of each 4 KiB; counts kernel pages.
fn touch_all(words: Words) -> u64 {
    let step = KERNEL_PAGE / 8;
    (0..words.len()).step_by(step).for_each(|at| words.write(at, stamped(at, 0)));
    (words.len() / step) as u64
}

/// Touches fresh plain memory, again and again.
fn touch_plain(data: usize, huge: bool, time: Duration) -> Result<Sample> {
    repeat(time, || {
        let memory = Memory::anonymous(data)?;
        if huge {
            memory.advise(libc::MADV_HUGEPAGE);
        }
        timed(|| touch_all(memory.words()))
    })
}

/// Runs `once` at least once and until the time is up; adds up what it measured.
fn repeat(time: Duration, mut once: impl FnMut() -> Result<Sample>) -> Result<Sample> {
    let until = Instant::now() + time;
    let mut sum = Sample { count: 0.0, secs: 0.0, cpu_secs: 0.0 };
    loop {
        let sample = once()?;
        sum.count += sample.count;
        sum.secs += sample.secs;
        sum.cpu_secs += sample.cpu_secs;
        if Instant::now() >= until {
            return Ok(sum);
        }
    }
}

fn timed(work: impl FnOnce() -> u64) -> Result<Sample> {
    let clock = Sample::start();
    let count = work();
    Ok(clock.stop(count))
}

pub(crate) fn first_touch(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let plan = &plan.with_short_rounds();
    let data = plan.cache / 2;
    {
        let config = far::config(plan.cache, data);
        let far = Far::fresh(config, far::memory_store(data)?, data)?;
        let mut sides: Vec<Side<'_>> = vec![
            Box::new(|time| {
                repeat(time, || {
                    let length = ByteCount(data as u64);
                    let ptr = far.region.map(length).map_err(Failure::of)?.cast::<u8>();
                    let words = far::range(&far.region, ptr.as_ptr(), data);
                    let sample = timed(|| touch_all(words));
                    words.unmap(&far.region)?;
                    sample
                })
            }),
            Box::new(|time| touch_plain(data, false, time)),
            Box::new(|time| touch_plain(data, true, time)),
        ];
        let samples = take_turns(plan, &mut sides)?;
        let work = "fresh: first touch";
        let row = |name: &str, side: usize, goal| {
            Row::turns(work, Figure::Rate, &samples[0], name, &samples[side], goal)
        };
        rows.push(row("plain anonymous memory", 1, Some(0.9)));
        rows.push(row("plain, MADV_HUGEPAGE", 2, None));
    }
    Ok(())
}
