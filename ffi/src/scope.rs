//! Scopes: where a thread's allocations go.

#![expect(unsafe_code, reason = "exports functions")]

use crate::error::{Failure, Result, call, farheap_status, value};
use farheap::{Scope, Tier};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where memory is asked for.
pub type farheap_placement = u32;

pub const FARHEAP_POLICY: farheap_placement = 0;
pub const FARHEAP_LOCAL: farheap_placement = 1;
pub const FARHEAP_FAR: farheap_placement = 2;
const _: () = assert!(Tier::LOCAL.to_bits() == FARHEAP_LOCAL && Tier::FAR.to_bits() == FARHEAP_FAR);

/// Tier that a number asks for; `None`: the policy decides.
pub(crate) fn wanted(placement: farheap_placement) -> Result<Option<Tier>> {
    let tier = Tier::from_bits(placement);
    if tier.is_none() && placement != FARHEAP_POLICY {
        return Err(Failure::argument(format!("{placement} is no placement")));
    }
    Ok(tier)
}

/// Maximum number of scopes inside of each other: more are a push without its pop.
const DEPTH_MAX: usize = 1024;

/// The scopes of a thread, each with its number.
struct Scopes(Vec<(u64, Scope)>);

impl Drop for Scopes {
    /// Ends the innermost one first.
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

thread_local! {
    static SCOPES: RefCell<Scopes> = const { RefCell::new(Scopes(Vec::new())) };
}

/// Runs `body` on the thread's scopes.
fn with<T>(body: impl FnOnce(&mut Vec<(u64, Scope)>) -> Result<T>) -> Result<T> {
    let ended = |_| Failure::argument("this thread is at its end");
    SCOPES.try_with(|scopes| body(&mut scopes.borrow_mut().0)).map_err(ended)?
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_scope_push(placement: farheap_placement) -> farheap_status {
    call(|| {
        let Some(wanted) = wanted(placement)? else {
            return Err(Failure::argument("a scope is local or far"));
        };
        with(|scopes| {
            if scopes.len() >= DEPTH_MAX {
                return Err(Failure::argument(format!("more than {DEPTH_MAX} scopes")));
            }
            // No two scopes of the process have a number in common: it tells the thread, too.
            static BEGUN: AtomicU64 = AtomicU64::new(0);
            scopes.push((BEGUN.fetch_add(1, Relaxed) + 1, Scope::enter(wanted)));
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_scope_number() -> u64 {
    value(0, || with(|scopes| Ok(scopes.last().map_or(0, |(number, _)| *number))))
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_scope_pop() -> farheap_status {
    call(|| {
        with(|scopes| match scopes.pop() {
            Some(_ended) => Ok(()),
            None => Err(Failure::argument("this thread is in no scope")),
        })
    })
}
