//! One user for a store: two regions on one would both write the same slots.

use super::Store;
use crate::base::error::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The stores that regions of this process use, by address.
static USED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn used() -> MutexGuard<'static, Vec<usize>> {
    USED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to be a store's only user, until it is dropped.
#[derive(Debug)]
pub(crate) struct OnlyUser {
    /// Keeps another store from being at the same address.
    store: Arc<dyn Store>,
}

impl OnlyUser {
    /// Allocates: not for a thread that serves faults.
    ///
    /// # Errors
    /// [`Error::Device`] when the store has a user.
    pub(crate) fn of(store: &Arc<dyn Store>) -> Result<OnlyUser> {
        let mut used = used();
        if used.contains(&address(store)) {
            let reason =
                "is the store of another region, which would write the same slots".to_owned();
            return Err(Error::Device { path: store.describe().into(), reason });
        }
        used.push(address(store));
        Ok(OnlyUser { store: Arc::clone(store) })
    }
}

impl Drop for OnlyUser {
    fn drop(&mut self) {
        let mut used = used();
        if let Some(at) = used.iter().position(|used| *used == address(&self.store)) {
            used.swap_remove(at);
        }
    }
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}
