//! A thread that works for an object until it is dropped.

use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, Ordering, Rank, Ranked};
use crate::sys::thread;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// The thread, once it was started.
pub(super) struct Worker {
    stop: Arc<AtomicBool>,
    thread: Ranked<Option<JoinHandle<()>>>,
}

impl Worker {
    pub(super) fn new() -> Worker {
        Worker { stop: Arc::new(AtomicBool::new(false)), thread: Ranked::new(Rank::Leaf, None) }
    }

    /// Starts the thread, unless it was started before. It calls `turn` until the object is gone or [`stop`](Self::stop) is called,
    /// and rests in between for as long as `turn` says.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when there is no room for a thread.
    pub(super) fn start<T: Send + Sync + 'static>(
        &self,
        of: Weak<T>,
        mut turn: impl FnMut(&T) -> Option<Duration> + Send + 'static,
    ) -> Result<()> {
        let mut started = self.thread.lock();
        if started.is_some() {
            return Ok(());
        }
        let stop = Arc::clone(&self.stop);
        let run = move || {
            loop {
                let _ours = keep_local(); // Anew each time: a heap may have started meanwhile.
                // Not kept while it rests: dropping the object must end the thread.
                let Some(object) = of.upgrade() else { return };
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let rest = turn(&object);
                drop(object);
                if let Some(rest) = rest {
                    std::thread::park_timeout(rest);
                }
            }
        };
        *started = Some(thread::spawn("farheap-pool", run)?);
        Ok(())
    }

    /// Ends a rest.
    pub(super) fn wake(&self) {
        if let Some(thread) = &*self.thread.lock() {
            thread.thread().unpark();
        }
    }

    /// Stops the thread and waits for it, unless it is the caller.
    pub(super) fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }

    /// Forgets the thread, in a forked child, which has none.
    pub(super) fn forget(&mut self) {
        std::mem::forget(self.thread.get_mut().take());
    }
}
