//! What programs do to ordinary memory, done to far memory: the same bytes, the same answers, or
//! the error that the documentation names. Never a hang, other bytes, or a flood on standard error.
//!
//! Every attack runs once for each way of serving far memory (who serves faults, how pages come
//! and go, their size), each time in a process of its own with a watchdog, while other threads
//! evict what is attacked and check far memory of their own; see [`ground`].
//!
//! `FARHEAP_ATTACK_ROUNDS=100 cargo test --release --test attack` goes through every attack 100
//! times as long; without `FARHEAP_ATTACK_WAY` each attack takes place in a few of the ways, with
//! `FARHEAP_ATTACK_WAY=2MiB` in those with that in their names, with `FARHEAP_ATTACK_WAY=` in all;
//! `FARHEAP_TEST_SEED` repeats a run's decisions.

#[path = "../common/mod.rs"]
mod common;

mod ground;
mod kernel;

mod advice;
mod calls;
mod flight;
mod forks;
mod limits;
mod signals;
mod stops;
