//! What becomes of pages, threads and the process when something fails: the device in every way a
//! device can, the handler threads, the limit, the arguments.
//!
//! A case that ends in a signal, or whose messages matter, runs in a child process; see
//! [`harness`]. Every case has a watchdog: a hang is a failure.

#[path = "../common/mod.rs"]
mod common;

mod harness;
mod injector;

mod block_device;
mod direct_io;
mod forks;
mod in_thread;
mod kernel;
mod limits;
mod mapped_over;
mod messages;
mod panics;
mod program;
mod reads;
#[path = "../../network/tests/common/mod.rs"]
mod servers;
mod shutdown;
mod signals;
mod stops;
mod writes;
mod zero_copy;
