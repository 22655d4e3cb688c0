//! Guards of a pool's pages, kept in structures of the caller's.
//!
//! A [`farheap_page`] holds a guard of the library from a fix to its unfix. Its `kind` says which,
//! and is 0 when it holds none.

#![expect(unsafe_code, reason = "uses the caller's pointers, and keeps guards in its structures")]

use crate::error::{
    FARHEAP_E_CHANGED, FARHEAP_E_HANDLE, FARHEAP_E_WOULD_BLOCK, FARHEAP_OK, Failure, Result, call,
    check_out, farheap_status, value,
};
use crate::handle;
use crate::pool::{farheap_pool, page_ids};
use farheap::PageId;
use farheap::pool::{BufferPool, ExclusiveGuard, OptimisticGuard, SharedGuard};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// How a page is held.
pub type farheap_page_kind = u32;

pub const FARHEAP_PAGE_NONE: farheap_page_kind = 0;
pub const FARHEAP_PAGE_SHARED: farheap_page_kind = 0x4653_4841;
pub const FARHEAP_PAGE_EXCLUSIVE: farheap_page_kind = 0x4658_434C;
pub const FARHEAP_PAGE_OPTIMISTIC: farheap_page_kind = 0x464F_5054;

/// A page that is held, or looked at.
#[repr(C)]
#[derive(Debug)]
pub struct farheap_page {
    pub kind: farheap_page_kind,
    pub reserved: u32,
    pub id: u64,
    pub data: *const u8,
    pub len: usize,
    pub pool: *mut farheap_pool,
    pub guard: [u64; 3],
}

const _: () = {
    assert!(size_of::<SharedGuard<'static>>() == 24 && align_of::<SharedGuard<'static>>() == 8);
    assert!(size_of::<ExclusiveGuard<'static>>() == 24);
    assert!(align_of::<ExclusiveGuard<'static>>() == 8);
    assert!(size_of::<OptimisticGuard<'static>>() == 24);
    assert!(align_of::<OptimisticGuard<'static>>() == 8);
};

/// A guard of the library that a structure can hold.
trait Guard {
    const KIND: farheap_page_kind;
    fn id(&self) -> PageId;
    /// First byte, which others may change under an optimistic guard, and number of bytes.
    fn bytes(&self) -> (*const u8, usize);
}

macro_rules! guards {
    ($($guard:ident, of $len:ident bytes, is $kind:ident;)*) => {$(
        impl Guard for $guard<'_> {
            const KIND: farheap_page_kind = $kind;
            #[inline]
            fn id(&self) -> PageId {
                self.id()
            }
            #[inline]
            fn bytes(&self) -> (*const u8, usize) {
                (self.as_ptr(), self.$len())
            }
        }
    )*};
}

guards! {
    SharedGuard, of len bytes, is FARHEAP_PAGE_SHARED;
    ExclusiveGuard, of len bytes, is FARHEAP_PAGE_EXCLUSIVE;
    OptimisticGuard, of payload bytes, is FARHEAP_PAGE_OPTIMISTIC;
}

/// Puts a guard of a tree's page into the caller's structure.
///
/// # Safety
/// `out` may be written to, and the pool is not freed while the page is held.
pub(crate) unsafe fn hold_shared(
    pool: *mut farheap_pool,
    guard: SharedGuard<'_>,
    out: *mut farheap_page,
) {
    // SAFETY: as the caller promises.
    unsafe { hold(pool, guard, out) }
}

/// Puts a guard into the caller's structure, in its place: a copy of what was just stored in words
/// would wait for the stores.
///
/// # Safety
/// `out` may be written to.
#[inline]
unsafe fn hold<G: Guard>(pool: *mut farheap_pool, guard: G, out: *mut farheap_page) {
    let (data, len) = guard.bytes();
    let id = guard.id().0;
    let empty = farheap_page { kind: G::KIND, reserved: 0, id, data, len, pool, guard: [0; 3] };
    // SAFETY: as the caller promises.
    unsafe { out.write(empty) };
    // SAFETY: as the caller promises.
    let place = unsafe { &raw mut (*out).guard };
    // SAFETY: room and alignment for it, by the assertions above.
    unsafe { place.cast::<G>().write(guard) };
}

/// Marks a structure as empty.
///
/// # Safety
/// `page` may be written to.
#[inline]
unsafe fn clear(page: *mut farheap_page) {
    // SAFETY: as the caller promises.
    let page = unsafe { &mut *page };
    page.kind = FARHEAP_PAGE_NONE;
    page.data = ptr::null();
    page.len = 0;
}

/// Looks at a structure: its kind, if its pool still exists.
///
/// # Safety
/// `page` is NULL or a structure of this module, or zeroed; the pool is not freed meanwhile.
#[inline]
unsafe fn kind_of(page: *const farheap_page) -> Result<farheap_page_kind> {
    // SAFETY: NULL or a structure, as the caller promises.
    let Some(page) = (unsafe { page.as_ref() }) else {
        return Err(Failure::null("the page"));
    };
    match page.kind {
        FARHEAP_PAGE_SHARED | FARHEAP_PAGE_EXCLUSIVE | FARHEAP_PAGE_OPTIMISTIC => {
            // SAFETY: the result is dropped at once.
            unsafe { handle::get(page.pool) }?;
            Ok(page.kind)
        }
        _ => Err(Failure::plain(FARHEAP_E_HANDLE, "the structure holds no page")),
    }
}

/// The guard in a structure.
///
/// # Safety
/// [`kind_of`] said that it is of type `G`, and the structure is not used otherwise meanwhile.
#[inline]
unsafe fn guard<'a, G: Guard>(page: *mut farheap_page) -> &'a mut G {
    // SAFETY: a structure, as the caller promises.
    let place = unsafe { &raw mut (*page).guard };
    // SAFETY: `hold` has written one.
    unsafe { &mut *place.cast::<G>() }
}

/// Takes the guard out of a structure.
///
/// # Safety
/// As for [`guard`].
#[inline]
unsafe fn take<G: Guard>(page: *mut farheap_page) -> G {
    // SAFETY: a structure, as the caller promises.
    let place = unsafe { &raw const (*page).guard };
    // SAFETY: `hold` has written one; it is not used again, for the structure is cleared.
    let taken = unsafe { place.cast::<G>().read() };
    // SAFETY: a structure, as the caller promises.
    unsafe { clear(page) };
    taken
}

/// Ends the guard in a structure, where it is.
///
/// # Safety
/// As for [`guard`], and the structure is cleared then.
#[inline]
unsafe fn end<G: Guard>(page: *mut farheap_page) {
    // SAFETY: as the caller promises.
    let guard: *mut G = unsafe { guard::<G>(page) };
    // SAFETY: `hold` has written one; it is not used again.
    unsafe { guard.drop_in_place() };
}

#[cold]
fn wrong_kind() -> Failure {
    Failure::argument("the page is not held in the way that this needs")
}

/// Looks the pool up and fixes a page of it.
///
/// # Safety
/// `out` is NULL or writable, and the pool is not freed while the page is held.
#[inline]
unsafe fn fix<G: Guard>(
    pool: *mut farheap_pool,
    out: *mut farheap_page,
    fix: impl FnOnce(&'static Arc<BufferPool>) -> Result<G>,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: the caller keeps the pool for longer than the guard; see `farheap_pool_free`,
        // which refuses while guards that hold their page exist, and `kind_of` for the others.
        let object = unsafe { handle::get(pool) }?;
        let guard = fix(object)?;
        // SAFETY: checked above.
        unsafe { hold(pool, guard, out) };
        Ok(())
    })
}

#[cold]
fn would_block() -> Failure {
    Failure::plain(FARHEAP_E_WOULD_BLOCK, "the page is not resident, or somebody holds it")
}

/// Defines functions that fix a page.
macro_rules! fixes {
    ($($name:ident($object:ident $(, $arg:ident: $type:ty)*) $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pool: *mut farheap_pool,
            $($arg: $type,)*
            out: *mut farheap_page,
        ) -> farheap_status {
            // SAFETY: as the caller promises.
            unsafe { fix(pool, out, |$object| $body) }
        }
    )*};
}

fixes! {
    farheap_pool_allocate(pool) Ok(pool.allocate()?);
    farheap_pool_fix_shared(pool, id: u64) Ok(pool.fix_shared(PageId(id))?);
    farheap_pool_fix_shared_within(pool, id: u64, deadline_ms: u64)
        Ok(pool.fix_shared_within(PageId(id), Duration::from_millis(deadline_ms))?);
    farheap_pool_try_fix_shared(pool, id: u64)
        pool.try_fix_shared(PageId(id)).ok_or_else(would_block);
    farheap_pool_fix_exclusive(pool, id: u64) Ok(pool.fix_exclusive(PageId(id))?);
    farheap_pool_fix_exclusive_within(pool, id: u64, deadline_ms: u64)
        Ok(pool.fix_exclusive_within(PageId(id), Duration::from_millis(deadline_ms))?);
    farheap_pool_try_fix_exclusive(pool, id: u64)
        pool.try_fix_exclusive(PageId(id)).ok_or_else(would_block);
    farheap_pool_fix_optimistic(pool, id: u64) Ok(pool.fix_optimistic(PageId(id))?);
    farheap_pool_fix_to_overwrite(pool, id: u64) Ok(pool.fix_to_overwrite(PageId(id))?);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_fix_many(
    pool: *mut farheap_pool,
    ids: *const u64,
    count: usize,
    out: *mut farheap_page,
) -> farheap_status {
    call(|| {
        if count > 0 {
            check_out(out)?;
        }
        // SAFETY: as for `fix`.
        let object = unsafe { handle::get(pool) }?;
        // SAFETY: NULL or as many numbers, as the caller promises.
        let ids = unsafe { page_ids(ids, count) }?;
        for (index, guard) in object.fix_many(&ids)?.into_iter().enumerate() {
            // SAFETY: room for as many structures, as the caller promises.
            unsafe { hold(pool, guard, out.wrapping_add(index)) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_unfix(page: *mut farheap_page) -> farheap_status {
    if page.is_null() {
        return FARHEAP_OK;
    }
    call(|| {
        // SAFETY: a structure, as the caller promises.
        match unsafe { kind_of(page) }? {
            // SAFETY: of this kind, as was just read; the structure is cleared below.
            FARHEAP_PAGE_SHARED => unsafe { end::<SharedGuard<'_>>(page) },
            // SAFETY: of this kind, as was just read; the structure is cleared below.
            FARHEAP_PAGE_EXCLUSIVE => unsafe { end::<ExclusiveGuard<'_>>(page) },
            // An optimistic guard holds nothing.
            _ => {}
        }
        // SAFETY: a structure, as the caller promises.
        unsafe { clear(page) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_write(page: *mut farheap_page) -> *mut u8 {
    value(ptr::null_mut(), || {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_EXCLUSIVE {
            return Err(wrong_kind());
        }
        // SAFETY: of this kind, as was just read.
        Ok(unsafe { guard::<ExclusiveGuard<'_>>(page) }.as_mut_ptr())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_validate(page: *const farheap_page) -> bool {
    value(false, || {
        let page = page.cast_mut();
        // SAFETY: NULL or a structure, as the caller promises.
        let pool = match unsafe { page.as_ref() } {
            Some(page) if page.kind == FARHEAP_PAGE_OPTIMISTIC => page.pool,
            // Nobody changes a page that is held.
            // SAFETY: NULL or a structure, as the caller promises.
            _ => return unsafe { kind_of(page) }.map(|_| true),
        };
        // SAFETY: the result is dropped at once.
        match unsafe { handle::get(pool) } {
            // SAFETY: of this kind, as was just read.
            Ok(_) => Ok(unsafe { guard::<OptimisticGuard<'_>>(page) }.validate()),
            Err(failure) => Err(failure),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_read(
    page: *const farheap_page,
    at: usize,
    into: *mut c_void,
    len: usize,
) -> farheap_status {
    call(|| {
        if into.is_null() && len > 0 {
            return Err(Failure::null("the buffer"));
        }
        let page = page.cast_mut();
        // SAFETY: NULL or a structure, as the caller promises.
        let kind = unsafe { kind_of(page) }?;
        // SAFETY: not NULL: `kind_of` looked. Nobody changes these two while a page is held.
        let held = unsafe { &*page };
        let (data, size) = (held.data, held.len);
        if at.checked_add(len).is_none_or(|end| end > size) {
            let message = format!("{len} bytes at {at} are not within the page's {size}");
            return Err(Failure::argument(message));
        }
        if len == 0 {
            return Ok(());
        }
        if kind == FARHEAP_PAGE_OPTIMISTIC {
            // SAFETY: room for `len` bytes, as the caller promises, outside of the pool.
            let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
            // SAFETY: of this kind, as was just read.
            let copied = unsafe { guard::<OptimisticGuard<'_>>(page) }.copy_to(at, into);
            let part = || Failure::argument("the buffer is a part of the page".to_owned());
            return copied.ok_or_else(part);
        }
        // SAFETY: within the page, which is held, and outside of the caller's buffer.
        unsafe { ptr::copy_nonoverlapping(data.wrapping_add(at), into.cast::<u8>(), len) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_try_upgrade(page: *mut farheap_page) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        let kind = unsafe { kind_of(page) }?;
        // SAFETY: not NULL: `kind_of` looked.
        let pool = unsafe { (*page).pool };
        match kind {
            FARHEAP_PAGE_SHARED => {
                // SAFETY: of this kind, as was just read.
                let shared = unsafe { take::<SharedGuard<'_>>(page) };
                match shared.try_upgrade() {
                    Ok(exclusive) => {
                        // SAFETY: a structure, which is empty now.
                        unsafe { hold(pool, exclusive, page) };
                        Ok(())
                    }
                    Err(shared) => {
                        // SAFETY: a structure, which is empty now.
                        unsafe { hold(pool, shared, page) };
                        Err(would_block())
                    }
                }
            }
            FARHEAP_PAGE_OPTIMISTIC => {
                // SAFETY: of this kind, as was just read; the guard is a copy.
                let optimistic = *unsafe { guard::<OptimisticGuard<'_>>(page) };
                let exclusive = optimistic.try_upgrade().ok_or_else(would_block)?;
                // SAFETY: a structure; an optimistic guard needs no drop.
                unsafe { hold(pool, exclusive, page) };
                Ok(())
            }
            _ => Err(wrong_kind()),
        }
    })
}

#[cold]
fn changed() -> Failure {
    Failure::plain(FARHEAP_E_CHANGED, "the page is not as it was seen any more")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_upgrade(page: *mut farheap_page) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_OPTIMISTIC {
            return Err(wrong_kind());
        }
        // SAFETY: not NULL: `kind_of` looked.
        let pool = unsafe { (*page).pool };
        // SAFETY: of this kind, as was just read; the guard is a copy.
        let optimistic = *unsafe { guard::<OptimisticGuard<'_>>(page) };
        let exclusive = optimistic.upgrade()?.ok_or_else(changed)?;
        // SAFETY: a structure; an optimistic guard needs no drop.
        unsafe { hold(pool, exclusive, page) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_try_share(page: *mut farheap_page) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_OPTIMISTIC {
            return Err(wrong_kind());
        }
        // SAFETY: not NULL: `kind_of` looked.
        let pool = unsafe { (*page).pool };
        // SAFETY: of this kind, as was just read; the guard is a copy.
        let optimistic = *unsafe { guard::<OptimisticGuard<'_>>(page) };
        let shared = optimistic.try_share().ok_or_else(would_block)?;
        // SAFETY: a structure; an optimistic guard needs no drop.
        unsafe { hold(pool, shared, page) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_downgrade(page: *mut farheap_page) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_EXCLUSIVE {
            return Err(wrong_kind());
        }
        // SAFETY: not NULL: `kind_of` looked.
        let pool = unsafe { (*page).pool };
        // SAFETY: of this kind, as was just read.
        let exclusive = unsafe { take::<ExclusiveGuard<'_>>(page) };
        // SAFETY: a structure, which is empty now.
        unsafe { hold(pool, exclusive.downgrade(), page) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_free(page: *mut farheap_page) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_EXCLUSIVE {
            return Err(wrong_kind());
        }
        // SAFETY: of this kind, as was just read.
        unsafe { take::<ExclusiveGuard<'_>>(page) }.free();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_lsn(page: *const farheap_page) -> u64 {
    value(0, || {
        let page = page.cast_mut();
        // SAFETY: NULL or a structure, as the caller promises.
        match unsafe { kind_of(page) }? {
            // SAFETY: of this kind, as was just read.
            FARHEAP_PAGE_SHARED => Ok(unsafe { guard::<SharedGuard<'_>>(page) }.lsn()),
            // SAFETY: of this kind, as was just read.
            FARHEAP_PAGE_EXCLUSIVE => Ok(unsafe { guard::<ExclusiveGuard<'_>>(page) }.lsn()),
            _ => Err(wrong_kind()),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_page_set_lsn(page: *mut farheap_page, lsn: u64) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        if unsafe { kind_of(page) }? != FARHEAP_PAGE_EXCLUSIVE {
            return Err(wrong_kind());
        }
        // SAFETY: not NULL: `kind_of` looked.
        let pool = unsafe { (*page).pool };
        // SAFETY: not freed during the call, as the caller promises.
        let pool = unsafe { handle::get(pool) }?;
        if pool.payload() as u64 == pool.page_size().0 {
            return Err(Failure::argument("whole pages have no number of a log record"));
        }
        // SAFETY: of this kind, as was just read.
        unsafe { guard::<ExclusiveGuard<'_>>(page) }.set_lsn(lsn);
        Ok(())
    })
}
