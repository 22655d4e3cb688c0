//! A tier for each test: what one has allocated, another does not count.

use farheap::{ByteCount, Heap};
use std::sync::OnceLock;

/// The heap of this program, or why there is none.
static HEAP: OnceLock<Result<Heap, String>> = OnceLock::new();

fn start() -> Result<Heap, String> {
    let options = Heap::builder().far_limit(ByteCount::mib(8)).capacity(ByteCount::mib(64));
    match options.start() {
        Ok(heap) => Ok(heap),
        Err(error @ farheap::Error::UffdUnavailable { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

/// A tier with a limit of 8 MiB; `None`, with the reason printed, where userfaultfd is not permitted.
pub(crate) fn tier(name: &str, capacity: ByteCount) -> Option<Heap> {
    let heap = match HEAP.get_or_init(start) {
        Ok(heap) => heap,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    let tier = Heap::builder().far_limit(ByteCount::mib(8)).capacity(capacity);
    Some(heap.add_tier(name, tier).expect("a tier"))
}

/// Bytes that are allocated in a tier, without those that its threads keep for the next allocation.
pub(crate) fn allocated(tier: &Heap) -> ByteCount {
    tier.usage().allocated_bytes
}
