//! A tier's activity, for `farheap top`: its statistics as a text that processes of the same user read.
//!
//! ```text
//! farheap-stats 1 17          format, generation
//! tier far
//! resident_bytes 16777216     a name and a value a line
//! ...
//! end 17                      the generation again: another one means that two texts are mixed
//! ```
//! The maintenance thread writes it once a second. Uses `sys` and `region`.

use crate::base::units::ByteCount;
use crate::heap::{self, FarArenas};
use crate::paging::region::{Latency, Region};
use crate::sys::shared_text::SharedText;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// How often the text is written: collecting the numbers takes some 20 us.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// Capacity of the text in bytes, twice what it takes: the thread that writes it allocates nothing after
/// its start.
const TEXT_MAX: usize = 8 << 10;

/// The text's name in `/proc/PID/fd`.
const NAME: &std::ffi::CStr = c"farheap-stats";

/// The text of one tier.
#[derive(Debug)]
pub(super) struct Live {
    file: SharedText,
    tier: String,
    text: String,
    generation: u64,
    written: Option<Instant>,
}

impl Live {
    /// `None` where no descriptor is free: a heap works without a text.
    pub(super) fn new(tier: &str) -> Option<Live> {
        let file = SharedText::create(NAME).ok()?;
        Some(Live {
            file,
            tier: tier.to_owned(),
            text: String::with_capacity(TEXT_MAX),
            generation: 0,
            written: None,
        })
    }

    /// Writes the text, if it is time.
    pub(super) fn write(&mut self, region: &Region, arenas: &FarArenas, limit: Option<ByteCount>) {
        if self.written.is_some_and(|written| written.elapsed() < WRITE_EVERY) {
            return;
        }
        self.generation += 1;
        self.text.clear();
        // Neither error matters: writing to a string succeeds, and a file that cannot grow keeps the
        // previous text.
        let _ = self.collect(region, arenas, limit);
        let _ = self.file.write(&self.text);
        self.written = Some(Instant::now());
    }

    fn collect(
        &mut self,
        region: &Region,
        arenas: &FarArenas,
        limit: Option<ByteCount>,
    ) -> std::fmt::Result {
        let (text, generation) = (&mut self.text, self.generation);
        writeln!(text, "farheap-stats 1 {generation}\ntier {}", self.tier)?;
        writeln!(text, "allocated_bytes {}", arenas.allocated().0)?;
        writeln!(text, "local_bytes {}", heap::local_resident().0)?;
        if let Some(limit) = limit {
            writeln!(text, "process_limit_bytes {}", limit.0)?;
        }
        for (name, value) in region.stats().iter() {
            writeln!(text, "{name} {value}")?;
        }
        let latencies = region.latencies();
        let all = [
            ("fault", &latencies.fault),
            ("read", &latencies.read),
            ("write", &latencies.write),
            ("evict", &latencies.evict),
        ];
        for (name, Latency { p50, p99, max, .. }) in all {
            writeln!(text, "{name}_ns_p50 {p50}\n{name}_ns_p99 {p99}\n{name}_ns_max {max}")?;
        }
        #[cfg(feature = "network")]
        for (at, server) in region.servers().enumerate() {
            for (name, value) in server.iter() {
                writeln!(text, "server{at}_{name} {value}")?;
            }
        }
        writeln!(text, "end {generation}")
    }
}
