//! Busy neighbours: what a benchmark shares the machine with if asked to.
//!
//! They run in a process of their own, so that their processor time is nobody's figure.
#![expect(unsafe_code, reason = "sets the policy of its own threads")]

use crate::{Failure, Result};
use std::io::Read;
use std::process::{Child, Command, Stdio};

/// Threads that are always busy, in the scheduling class of idle work, until this is dropped.
#[derive(Debug)]
pub(crate) struct Neighbours(Option<Child>);

impl Neighbours {
    /// Starts this program again with `--busy COUNT`, which has to run [`serve`].
    pub(crate) fn start(count: usize) -> Result<Neighbours> {
        if count == 0 {
            return Ok(Neighbours(None));
        }
        let me = std::env::current_exe().map_err(Failure::io)?;
        let mut busy = Command::new(me);
        busy.args(["--busy", &count.to_string()]).stdin(Stdio::piped()).stdout(Stdio::null());
        Ok(Neighbours(Some(busy.spawn().map_err(Failure::io)?)))
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        if let Some(busy) = &mut self.0 {
            drop(busy.kill());
            drop(busy.wait());
        }
    }
}

/// The process of the neighbours: busy until its input ends, as it does when its parent is gone.
pub(crate) fn serve(count: usize) -> Result<()> {
    for _ in 0..count {
        std::thread::spawn(|| {
            let param = libc::sched_param { sched_priority: 0 };
            // SAFETY: changes this thread alone.
            let failed =
                unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) } != 0;
            assert!(!failed, "{}", std::io::Error::last_os_error());
            loop {
                std::hint::spin_loop();
            }
        });
    }
    std::io::stdin().read_to_end(&mut Vec::new()).map(drop).map_err(Failure::io)
}
