//! Scopes: where a thread's allocations go.

#![expect(unsafe_code, reason = "exports functions")]

use crate::error::{Failure, Result, call, farheap_status};
use farheap::{Placement, Scope, malloc, scope};
use std::cell::RefCell;

/// Where memory is asked for.
pub type farheap_placement = u32;

pub const FARHEAP_POLICY: farheap_placement = 0;
pub const FARHEAP_LOCAL: farheap_placement = 1;
pub const FARHEAP_FAR: farheap_placement = 2;

/// What a placement asks for; `None`: the policy decides. What is no other placement may be a tier's
/// ([`malloc::number_of`]).
pub(crate) fn wanted(placement: farheap_placement) -> Result<Option<Placement>> {
    match placement {
        FARHEAP_POLICY => Ok(None),
        FARHEAP_LOCAL => Ok(Some(Placement::Local)),
        FARHEAP_FAR => Ok(Some(Placement::Far)),
        number => match malloc::tier_of(number) {
            Some(tier) => Ok(Some(Placement::Tier(tier))),
            None => Err(Failure::argument(format!("{number} is no placement"))),
        },
    }
}

/// Maximum number of scopes inside of each other: more are a push without its pop.
const DEPTH_MAX: usize = 1024;

thread_local! {
    static SCOPES: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Runs `body` on the thread's scopes.
fn with<T>(body: impl FnOnce(&mut Vec<Scope>) -> Result<T>) -> Result<T> {
    let ended = |_| Failure::argument("this thread is at its end");
    SCOPES.try_with(|scopes| body(&mut scopes.borrow_mut())).map_err(ended)?
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
            scopes.push(scope(wanted));
            Ok(())
        })
    })
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
