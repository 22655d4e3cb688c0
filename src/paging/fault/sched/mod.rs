//! When and where a fault handler runs; what it does is in `fault`.
//!
//! A handler asks its [`ThreadSched`] at two places: when faults have arrived, and when it is about
//! to wait. [`HandlerSched`] is what the handlers of a region share.
//!
//! | module | does |
//! |---|---|
//! | `affinity` | on which processor a handler runs, and when its helpers are needed |
//! | `busy_poll` | how long a handler looks for the device's answer before it sleeps |
//! | `bystanders` | which threads stay off the processor of a handler that gives way |
//! | `idle_policy` | when a handler runs under `SCHED_IDLE`, and how that is supervised |
//! | `shared` | what the handlers share of this, and their wakers |
//! | `per_thread` | one handler's part in this |

mod affinity;
mod busy_poll;
mod bystanders;
mod idle_policy;
mod per_thread;
mod shared;

pub(in crate::paging) use busy_poll::{Polled, Polling};
pub(in crate::paging) use bystanders::Bystander;
pub(in crate::paging) use idle_policy::PolicySupervisor;
pub(in crate::paging) use per_thread::ThreadSched;
pub(in crate::paging) use shared::HandlerSched;
