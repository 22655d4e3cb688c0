//! What one round did.

use crate::process;
use std::time::{Duration, Instant};

/// What one round did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Operations or bytes.
    pub(crate) count: f64,
    pub(crate) secs: f64,
    /// Processor time of the process that did it, helper threads included.
    pub(crate) cpu_secs: f64,
}

/// The beginning of a [`Sample`].
pub(crate) struct Clock {
    began: Instant,
    cpu: Duration,
}

impl Sample {
    pub(crate) fn start() -> Clock {
        Clock { cpu: process::cpu_time(), began: Instant::now() }
    }

    pub(crate) fn rate(&self) -> f64 {
        self.count / self.secs
    }
}

impl Clock {
    pub(crate) fn stop(self, count: u64) -> Sample {
        let secs = self.began.elapsed().as_secs_f64();
        let cpu_secs = (process::cpu_time() - self.cpu).as_secs_f64();
        Sample { count: count as f64, secs, cpu_secs }
    }
}
