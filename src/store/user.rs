//! One user for a store: of two regions or pools on one store, each would overwrite the other's pages.

use super::Store;
use super::block::RELEASE_WAIT_MAX;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The stores that this process uses, by address.
static USED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// A store has lost its user.
static RELEASED: Condvar = Condvar::new();

fn used() -> MutexGuard<'static, Vec<usize>> {
    USED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store whose only user is the owner of this, until it is dropped.
#[derive(Debug)]
pub(crate) struct OnlyUser {
    /// Also keeps another store from being at the same address.
    store: Arc<dyn Store>,
}

impl OnlyUser {
    /// Allocates: not for a thread that serves faults. A user that is about to end is waited for: the
    /// thread that writes a pool's dirty pages may let go of the pool after its owner has dropped it.
    ///
    /// # Errors
    /// [`Error::Device`] when the store has a user.
    pub(crate) fn of(store: Arc<dyn Store>) -> Result<OnlyUser> {
        let _ours = keep_local(); // The list: a far scope of the caller's must not reach it.
        let is_used = |used: &mut Vec<usize>| used.contains(&address(&store));
        let mut used = RELEASED
            .wait_timeout_while(used(), RELEASE_WAIT_MAX, is_used)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        if is_used(&mut used) {
            let reason = "is already used by another region or pool, which would write to the \
                          same place"
                .to_owned();
            return Err(Error::Device { path: store.name().as_ref().into(), reason });
        }
        used.push(address(&store));
        drop(used);
        Ok(OnlyUser { store })
    }

    /// A store that was just made in a forked child. Takes no lock: one that a thread of the parent's held
    /// would never be free here. So it must never be dropped.
    pub(crate) fn in_child(store: Arc<dyn Store>) -> OnlyUser {
        OnlyUser { store }
    }
}

impl Deref for OnlyUser {
    type Target = dyn Store;

    fn deref(&self) -> &(dyn Store + 'static) {
        &*self.store
    }
}

impl Drop for OnlyUser {
    fn drop(&mut self) {
        let mut used = used();
        if let Some(at) = used.iter().position(|used| *used == address(&self.store)) {
            used.swap_remove(at);
        }
        RELEASED.notify_all();
    }
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}
