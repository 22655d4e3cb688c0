//! The far heap behind one door: all that this program asks of the library.
//!
//! The global allocator stays local until [`Tier::start`], and after it too: only the columns name
//! [`FAR`], unless `FARHEAP_CONF` sets a threshold.

pub(crate) use farheap::{Far, Local, Stats};

use farheap::{ByteCount, Error, FarHeap, Heap, Result};
use std::path::PathBuf;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// The handle of far memory.
pub(crate) const FAR: Far = Far;
/// The handle of local memory: what a plain `Vec` uses.
pub(crate) const LOCAL: Local = Local;

/// Whether `ptr` points into far memory.
pub(crate) fn is_far<T>(ptr: *const T) -> bool {
    Far::contains(ptr)
}

/// What the command line says of the heap; `None` leaves it to `FARHEAP_CONF` or the default.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) limit: Option<ByteCount>,
    /// When neither the command line nor `FARHEAP_CONF` has a limit.
    pub(crate) limit_default: ByteCount,
    pub(crate) device: Option<PathBuf>,
}

impl Options {
    /// Starts a heap: this program's defaults, then `FARHEAP_CONF`, then the command line.
    fn start(&self, limit_default: ByteCount) -> Result<Heap> {
        let mut builder = Heap::builder().far_limit(limit_default).threshold(None).from_env()?;
        if let Some(limit) = self.limit {
            builder = builder.limit(limit);
        }
        if let Some(device) = &self.device {
            builder = builder.device(device);
        }
        builder.start()
    }
}

/// The running far heap.
pub(crate) struct Tier {
    heap: Heap,
}

impl Tier {
    /// Starts the heap.
    ///
    /// A default limit that is too small gives way to the smallest that works.
    ///
    /// # Errors
    /// When the configuration is wrong or the machine does not allow it.
    pub(crate) fn start(options: &Options) -> Result<Tier> {
        let heap = match options.start(options.limit_default) {
            Err(Error::LimitTooSmall { limit, minimum })
                if options.limit.is_none() && limit == options.limit_default =>
            {
                options.start(minimum)?
            }
            heap => heap?,
        };
        Ok(Tier { heap })
    }

    /// Statistics and latencies as a text for people.
    pub(crate) fn statistics(&self) -> String {
        format!("{}{}", self.heap.stats(), self.heap.region().latencies())
    }

    /// The counters now.
    pub(crate) fn stats(&self) -> Stats {
        self.heap.stats()
    }

    /// Pushes every far page out.
    ///
    /// # Errors
    /// When a page cannot be written.
    pub(crate) fn evict_all(&self) -> Result<()> {
        self.heap.region().evict_all()
    }

    /// Stops the heap.
    ///
    /// # Errors
    /// When far memory is still allocated.
    pub(crate) fn shutdown(self) -> Result<()> {
        self.heap.shutdown()
    }
}
