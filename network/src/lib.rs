//! A client of the NBD protocol for memory on other machines.
//!
//! [`Client`] holds one export, the same bytes on up to four servers, or pages with parity on up to eight; each thread has
//! an [`NbdQueue`] with connections of its own, and a [`Tender`] for each server makes broken connections anew. Servers
//! are those that exist: nbdkit, nbd-server, qemu-nbd, qemu-storage-daemon.
//!
//! # What it is not
//! No block device: ranges are written by one user at a time, and a write whose end is [`Ending::Late`] has used its
//! place up. Of a table ([`Client::of_table`]), whose places are fixed, it has for as long as the table is open.
//!
//! # Guarantees
//! 1. A place that a write may still reach late is never written again in this process ([`Ending::Barred`]).
//! 2. A read that ends as [`Ending::Done`] has filled its buffers with what one server returned, and none that is known to
//!    lack the bytes. Whether they are right is up to the caller, who has a hash of them: read again, they come from
//!    another server.
//! 3. No server's bytes lead to a panic, to a wait without end, or out of a buffer.
//! 4. Queues allocate when they are made, and never again.
//! 5. Of a table no block is read as another one than it was read or written last since it was opened, and a flush that
//!    succeeds covers all writes that were reported as done, also where the server began anew meanwhile. Each copy has
//!    them, or is recorded as one that has not.
//! 6. With parity a write that is done survives the loss of as many servers, and what a read returns is what was written
//!    last: each block's sum is known.
//!
//! # Limits
//! Linux. Servers must announce that connections see each other's writes (MULTI_CONN).

mod address;
mod blocks;
mod client;
mod copying;
mod ends;
mod handshake;
mod hedging;
#[cfg(all(test, not(loom)))]
mod hostile;
mod lease;
mod link;
mod mover;
mod parity;
mod queue;
mod read_times;
mod resident;
mod seat;
mod server;
mod server_mark;
mod set_queue;
mod shared;
mod silence;
mod spans;
mod stream;
mod striped_parts;
mod striped_queue;
mod striped_rebuilds;
mod stripes;
mod sync;
mod sys;
mod table;
mod table_blocks;
mod table_copies;
mod tls;
mod unflushed;
pub mod wire;

pub use address::{NetworkError, ServerAddress, ServerList};
pub use client::{Client, Tender};
pub use ends::{Ending, NbdBuffer, NbdEnd, SERVERS_MAX};
pub use handshake::{Export, shake_hands};
pub use queue::NbdQueue;
pub use server::{ServerState, ServerStats, Tell};
pub use server_mark::MARK_LEN;
pub use shared::NbdTimes;
