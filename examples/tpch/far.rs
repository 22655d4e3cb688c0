//! The far heap behind one door: all that this program asks of the library.
//!
//! While the columns stay below the limit this stand-in keeps them in local memory.

use allocator_api2::alloc::Global;
use farheap::{ByteCount, Result};
use std::path::PathBuf;

/// Handle of the far heap's allocator.
pub(crate) type Far = Global;
/// The handle itself.
pub(crate) const FAR: Far = Global;
/// Handle of the local allocator: what a plain `Vec` uses.
pub(crate) type Local = Global;
/// The handle itself.
pub(crate) const LOCAL: Local = Global;

/// Whether `ptr` points into far memory.
pub(crate) fn is_far<T>(_ptr: *const T) -> bool {
    true
}

/// Counters of the far heap.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) limit_bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) resident_bytes_max: u64,
    pub(crate) pages_in: u64,
    pub(crate) pages_out: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// What the command line says of the heap; `None` leaves it to `FARHEAP_CONF` or the default.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) limit: Option<ByteCount>,
    /// When neither the command line nor `FARHEAP_CONF` has a limit.
    pub(crate) limit_default: ByteCount,
    pub(crate) device: Option<PathBuf>,
    pub(crate) page: Option<ByteCount>,
}

/// The running far heap.
pub(crate) struct Tier {
    limit: ByteCount,
}

impl Tier {
    /// Starts the heap.
    ///
    /// # Errors
    /// When the configuration is wrong or the machine does not allow it.
    pub(crate) fn start(options: &Options) -> Result<Tier> {
        let _ = (&options.device, options.page);
        Ok(Tier { limit: options.limit.unwrap_or(options.limit_default) })
    }

    /// The counters now.
    pub(crate) fn stats(&self) -> Stats {
        Stats { limit_bytes: self.limit.get(), ..Stats::default() }
    }

    /// Pushes every far page out.
    ///
    /// # Errors
    /// When a page cannot be written.
    pub(crate) fn evict_all(&self) -> Result<()> {
        Ok(())
    }

    /// Stops the heap.
    ///
    /// # Errors
    /// When far memory is still allocated.
    pub(crate) fn shutdown(self) -> Result<()> {
        Ok(())
    }
}
