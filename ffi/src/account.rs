//! Accounts: consumers' shares of a manager's limit, and memory of the host's own.
//!
//! An account that the host opened is charged by the host ([`OwnAccount`]); that of a pool, of the far heap
//! or of temporary memory can only be bounded here, for the library charges it.

#![expect(unsafe_code, reason = "uses the caller's pointers")]

use crate::error::{
    FARHEAP_E_CONFIG, FARHEAP_E_IN_USE, FARHEAP_E_WOULD_BLOCK, FARHEAP_OK, Failure, Result, call,
    check_out, farheap_status, text, value, write,
};
use crate::handle::{self, methods, opaque};
use crate::heap::farheap_heap;
use crate::manager::{Userdata, farheap_manager};
use crate::pool::farheap_pool;
use farheap::ByteCount;
use farheap::manager::{Account, MemoryManager, Reclaim, ReclaimCost};
use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

opaque! {
    /// A consumer's account.
    farheap_account = 6: Counted
}

/// Cost of freeing bytes.
pub type farheap_reclaim_cost = u32;

pub const FARHEAP_COST_FREE: farheap_reclaim_cost = 0;
pub const FARHEAP_COST_REREAD: farheap_reclaim_cost = 1;
pub const FARHEAP_COST_WRITE_BACK: farheap_reclaim_cost = 2;

/// Asked to free memory; returns how much it freed.
pub type farheap_reclaim = Option<
    unsafe extern "C" fn(userdata: *mut c_void, want: u64, cost: farheap_reclaim_cost) -> u64,
>;

/// More than any machine has, and far from where sums overflow.
const BYTES_MAX: u64 = 1 << 60;

/// Maximum number of bytes that one call of a callback counts as freed.
const FREED_MAX: u64 = 1 << 46;

/// Object behind a handle.
pub struct Counted {
    account: Account,
    /// `None`: the library charges it.
    own: Option<OwnAccount>,
}

/// An account of the host's own.
struct OwnAccount {
    manager: Arc<MemoryManager>,
    host: OnceLock<Arc<ReclaimCallback>>,
}

type ReclaimFn = unsafe extern "C" fn(*mut c_void, u64, farheap_reclaim_cost) -> u64;

/// The host's callback; `None` once its account was freed.
struct ReclaimCallback(RwLock<Option<(ReclaimFn, Userdata)>>);

thread_local! {
    /// How many of the host's callbacks this thread is in.
    static ASKING: Cell<u32> = const { Cell::new(0) };
}

impl Reclaim for ReclaimCallback {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        let cost = match cost {
            ReclaimCost::Free => FARHEAP_COST_FREE,
            ReclaimCost::Reread => FARHEAP_COST_REREAD,
            ReclaimCost::WriteBack => FARHEAP_COST_WRITE_BACK,
        };
        // Held during the call: a thread that frees the account waits for its end.
        let asked = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some((asked, userdata)) = *asked else { return ByteCount::ZERO };
        ASKING.set(ASKING.get() + 1);
        // SAFETY: a function that may be called from any thread with this until the account is
        // freed, as the caller promises.
        let freed = unsafe { asked(userdata.get(), want.0, cost) };
        ASKING.set(ASKING.get() - 1);
        // What it says is believed as far as sums go.
        ByteCount(freed.min(FREED_MAX))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(host) = self.own.as_ref().and_then(|own| own.host.get()) {
            *host.0.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

impl Counted {
    fn of(account: &Account) -> Counted {
        Counted { account: account.clone(), own: None }
    }

    fn own(&self) -> Result<&OwnAccount> {
        self.own.as_ref().ok_or_else(|| {
            let name = self.account.name();
            Failure::argument(format!("the account \"{name}\" is charged by the library itself"))
        })
    }
}

fn checked(bytes: u64) -> Result<ByteCount> {
    if bytes > BYTES_MAX {
        return Err(Failure::argument(format!("{bytes} bytes are more than memory there is")));
    }
    Ok(ByteCount(bytes))
}

/// Writes a handle for `object`.
///
/// # Safety
/// As for [`write`].
unsafe fn give(object: Counted, out: *mut *mut farheap_account) -> Result<()> {
    let handle = handle::create::<farheap_account>(object)?;
    // SAFETY: as the caller promises.
    unsafe { write(out, handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_account_new(
    manager: *mut farheap_manager,
    name: *const c_char,
    out: *mut *mut farheap_account,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = &unsafe { handle::get(manager) }?.manager;
        // SAFETY: NULL or a string, as the caller promises.
        let account = manager.join(unsafe { text(name, "the name") }?)?;
        let manager = Arc::clone(manager);
        let own = OwnAccount { manager, host: OnceLock::new() };
        // SAFETY: checked above.
        unsafe { give(Counted { account, own: Some(own) }, out) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_account(
    pool: *mut farheap_pool,
    out: *mut *mut farheap_account,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let pool = unsafe { handle::get(pool) }?;
        // SAFETY: checked above.
        unsafe { give(Counted::of(pool.account()), out) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_heap_account(
    heap: *mut farheap_heap,
    out: *mut *mut farheap_account,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let heap = unsafe { handle::get(heap) }?;
        let account = heap.region().account().ok_or_else(|| {
            Failure::argument(
                "the heap has a limit of its own, and no account: start it under a manager, with \
                 farheap_start_under",
            )
        })?;
        // SAFETY: checked above.
        unsafe { give(Counted::of(account), out) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_temporary_account(
    manager: *mut farheap_manager,
    out: *mut *mut farheap_account,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = unsafe { handle::get(manager) }?;
        // SAFETY: checked above.
        unsafe { give(Counted::of(manager.manager.temporary()), out) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_account_free(account: *mut farheap_account) -> farheap_status {
    if account.is_null() {
        return FARHEAP_OK;
    }
    call(|| {
        if ASKING.get() > 0 {
            let message = "a callback for reclaim cannot free an account: it would wait for itself";
            return Err(Failure::new(FARHEAP_E_IN_USE, message));
        }
        handle::take(account).map(drop)
    })
}

methods! { farheap_account: Counted;
    farheap_account_charge(object, bytes: u64) {
        let own = object.own()?;
        Ok(own.manager.charge(&object.account, checked(bytes)?)?)
    }

    farheap_account_try_charge(object, bytes: u64) {
        object.own()?;
        if !object.account.try_charge(checked(bytes)?) {
            let message = "it does not fit without reclaiming memory";
            return Err(Failure::plain(FARHEAP_E_WOULD_BLOCK, message));
        }
        Ok(())
    }

    farheap_account_uncharge(object, bytes: u64) {
        object.own()?;
        if !object.account.try_uncharge(ByteCount(bytes)) {
            let charged = object.account.used().0;
            let message = format!("{bytes} bytes to take back, but {charged} are charged");
            return Err(Failure::argument(message));
        }
        Ok(())
    }

    farheap_account_set_used(object, bytes: u64) {
        object.own()?;
        object.account.set_used(checked(bytes)?);
        Ok(())
    }

    farheap_account_on_reclaim(object, asked: farheap_reclaim, userdata: *mut c_void) {
        let own = object.own()?;
        let asked = asked.ok_or_else(|| Failure::null("the callback"))?;
        let host = Arc::new(ReclaimCallback(RwLock::new(Some((asked, Userdata(userdata))))));
        own.host.set(Arc::clone(&host)).map_err(|_| {
            Failure::new(FARHEAP_E_CONFIG, "on_reclaim: a callback is registered already")
        })?;
        let weak: Weak<ReclaimCallback> = Arc::downgrade(&host);
        object.account.set_reclaimer(weak);
        Ok(())
    }

    farheap_account_set_floor(object, bytes: u64) {
        Ok(object.account.set_floor(ByteCount(bytes))?)
    }

    farheap_account_set_ceiling(object, bytes: u64) {
        object.account.set_ceiling(ByteCount(bytes));
        Ok(())
    }
}

/// Defines functions that return a figure of an account; 0 on error.
macro_rules! of_account {
    ($($name:ident($object:ident) -> u64 = $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(account: *const farheap_account) -> u64 {
            value(0, || {
                // SAFETY: the caller does not free the handle during the call.
                let $object: &Counted = unsafe { handle::get(account) }?;
                Ok($body)
            })
        }
    )*};
}

of_account! {
    farheap_account_used(object) -> u64 = object.account.used().0;
    farheap_account_held(object) -> u64 = object.account.held().0;
    farheap_account_floor(object) -> u64 = object.account.floor().0;
    farheap_account_ceiling(object) -> u64 = object.account.ceiling().0;
}
