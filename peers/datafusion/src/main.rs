//! Apache DataFusion on farheap: TPC-H in memory, loaded and queried by SQL, on more data than memory.
//!
//! ```text
//! cargo build --release && cargo run --release   # scale factor 0.5 at 650, 500 and 370 MiB, minutes
//! cargo run --release -- --test                  # does it work?
//! ```
//! Two sides take turns, each in a process of its own: this program, with a heap whose `limit` is
//! the resident size (nothing else is configured but the size from which blocks are far), and `system`, the
//! same engine on the system's allocator, in a memory control group of that size with a swap file. The
//! answers of both are compared with those of a run in memory.

use farheap::FarHeap;
use std::process::ExitCode;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

fn main() -> ExitCode {
    farheap_peer_datafusion::main()
}
