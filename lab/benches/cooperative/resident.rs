//! Resident memory of the process, looked at every 10 ms.

use farheap::ByteCount;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const EVERY: Duration = Duration::from_millis(10);

/// Resident bytes of this process, page tables included.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default()
    };
    (kib("VmRSS:") + kib("VmPTE:")) << 10
}

/// Watches how much more is resident than at its start.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    most: Arc<AtomicU64>,
    thread: JoinHandle<()>,
    limit: ByteCount,
}

impl Watch {
    pub(crate) fn start(limit: ByteCount) -> Watch {
        let (stop, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (seen, highest) = (Arc::clone(&stop), Arc::clone(&most));
        let before = resident();
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                highest.fetch_max(resident().saturating_sub(before), Ordering::Relaxed);
                // The kernel tells nobody when resident memory grows: it is sampled, as often as the
                // limit is promised to hold.
                std::thread::sleep(EVERY);
            }
        });
        Watch { stop, most, thread, limit }
    }

    /// Stops; the most there was, in percent of the limit.
    pub(crate) fn stop(self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the watch's thread");
        100.0 * self.most.load(Ordering::Relaxed) as f64 / self.limit.get() as f64
    }
}
