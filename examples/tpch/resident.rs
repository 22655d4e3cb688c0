//! What the kernel says of this process's memory, without asking the library.
//!
//! A [`Sampler`] reads the resident size from `/proc/self/status` every ten milliseconds and keeps
//! the largest value. The sampling thread allocates nothing, so it does not move what it measures.

use crate::memory::kilobytes_of;
use farheap::ByteCount;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Between two samples.
const INTERVAL: Duration = Duration::from_millis(10);
/// Room for `/proc/self/status`, which has about 1,500 bytes.
const STATUS_BYTES: usize = 8 << 10;

/// Samples the resident size of this process until dropped.
pub(crate) struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    status: File,
    stop: AtomicBool,
    samples: AtomicU64,
    /// Largest since the last `reset`, in bytes.
    max: AtomicU64,
    /// Largest since the last `take_phase_max`, in bytes.
    phase_max: AtomicU64,
}

impl Sampler {
    /// Starts sampling.
    ///
    /// # Errors
    /// When `/proc/self/status` cannot be read or no thread can be started.
    pub(crate) fn start() -> io::Result<Sampler> {
        let shared = Arc::new(Shared {
            status: File::open("/proc/self/status")?,
            stop: AtomicBool::new(false),
            samples: AtomicU64::new(0),
            max: AtomicU64::new(0),
            phase_max: AtomicU64::new(0),
        });
        shared.sample()?;
        let sampled = Arc::clone(&shared);
        let thread = thread::Builder::new().name("resident".to_owned()).spawn(move || {
            // Relaxed: the flag and the counters guard no other data.
            while !sampled.stop.load(Relaxed) && sampled.sample().is_ok() {
                // The kernel tells nobody of a peak: samples at steady intervals find it.
                thread::sleep(INTERVAL);
            }
        })?;
        Ok(Sampler { shared, thread: Some(thread) })
    }

    /// The resident size right now.
    ///
    /// # Errors
    /// When `/proc/self/status` cannot be read.
    pub(crate) fn now(&self) -> io::Result<ByteCount> {
        self.shared.sample()
    }

    /// Counts in the resident size as `/proc/self/smaps_rollup` adds it up from the page tables:
    /// exact, but slow, and the walk holds up page faults.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn now_exact(&self) -> io::Result<ByteCount> {
        let rollup = fs::read("/proc/self/smaps_rollup")?;
        let resident = kilobytes_of(b"Rss:", &rollup)
            .ok_or_else(|| io::Error::other("/proc/self/smaps_rollup has no Rss"))?;
        self.shared.count(resident);
        Ok(resident)
    }

    /// The largest resident size since the last [`reset`](Self::reset).
    pub(crate) fn max(&self) -> ByteCount {
        ByteCount(self.shared.max.load(Relaxed))
    }

    /// The largest resident size since this was last asked.
    pub(crate) fn take_phase_max(&self) -> ByteCount {
        ByteCount(self.shared.phase_max.swap(0, Relaxed))
    }

    /// Samples taken since the last [`reset`](Self::reset).
    pub(crate) fn samples(&self) -> u64 {
        self.shared.samples.load(Relaxed)
    }

    /// Forgets all samples.
    pub(crate) fn reset(&self) {
        self.shared.max.store(0, Relaxed);
        self.shared.phase_max.store(0, Relaxed);
        self.shared.samples.store(0, Relaxed);
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("sampling does not panic");
        }
    }
}

impl Shared {
    fn sample(&self) -> io::Result<ByteCount> {
        let mut buffer = [0; STATUS_BYTES];
        let len = self.status.read_at(&mut buffer, 0)?;
        let resident = kilobytes_of(b"VmRSS:", &buffer[..len])
            .ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))?;
        self.count(resident);
        Ok(resident)
    }

    fn count(&self, resident: ByteCount) {
        self.max.fetch_max(resident.get(), Relaxed);
        self.phase_max.fetch_max(resident.get(), Relaxed);
        self.samples.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_held_is_counted_until_the_samples_are_forgotten() {
        let sampler = Sampler::start().expect("/proc is mounted");
        // Other tests run beside this one and hold memory of their own: only lower bounds are sure.
        let held = std::hint::black_box(vec![1_u8; 64 << 20]);
        let during = sampler.now().expect("readable");
        drop(held);
        assert!(during >= ByteCount::mib(64), "{during}");
        assert!(sampler.max() >= during);
        assert!(sampler.take_phase_max() >= during);
        assert!(sampler.samples() >= 2);
    }

    #[test]
    fn the_counter_agrees_with_the_page_tables() {
        let sampler = Sampler::start().expect("/proc is mounted");
        let differences = (0..200).map(|_| {
            let counted = sampler.now().expect("readable");
            counted.get().abs_diff(sampler.now_exact().expect("readable").get())
        });
        // What other tests allocate between the two readings differs; the closest pair does not.
        let closest = ByteCount(differences.min().expect("200 pairs"));
        assert!(closest < ByteCount::mib(2), "{closest}");
    }
}
