//! B+-trees in a pool's pages, and cursors over them.

#![expect(unsafe_code, reason = "uses the caller's pointers, and calls the caller back")]

use crate::error::{
    FARHEAP_E_IN_USE, FARHEAP_OK, Failure, Result, call, check_out, farheap_status, slice, value,
    write,
};
use crate::handle::{self, opaque};
use crate::page::{farheap_page, hold_shared};
use crate::pool::farheap_pool;
use farheap::PageId;
use farheap_collections::pool::{self, BTree};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, TryLockError};

opaque! {
    /// An ordered map from bytes to bytes in a pool's pages.
    farheap_btree = 7: Tree
}

opaque! {
    /// A place in a tree that moves on.
    farheap_cursor = 8: LockedCursor
}

/// Object behind the handle of a tree.
pub struct Tree {
    tree: BTree,
    in_pool: *mut farheap_pool,
    /// The pool is not freed meanwhile.
    pool: Arc<()>,
}

/// Object behind the handle of a cursor: one thread at a time moves it.
pub struct LockedCursor {
    /// Holds the last entry's bytes until the next one is asked for.
    place: Mutex<pool::Cursor<'static>>,
    _pool: Arc<()>,
}

/// A key with its value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farheap_entry {
    pub key: *const u8,
    pub key_len: usize,
    pub value: *const u8,
    pub value_len: usize,
}

/// Changes a value in place.
pub type farheap_change =
    Option<unsafe extern "C" fn(userdata: *mut c_void, value: *mut c_void, len: usize)>;

/// Gives the next entry to load; whether there was one.
pub type farheap_next_entry =
    Option<unsafe extern "C" fn(userdata: *mut c_void, out: *mut farheap_entry) -> bool>;

/// A key or value of the caller's.
///
/// # Safety
/// As for [`slice`].
unsafe fn bytes<'a>(first: *const c_void, len: usize, what: &str) -> Result<&'a [u8]> {
    // SAFETY: as the caller promises.
    unsafe { slice(first.cast::<u8>(), len, what) }
}

/// Writes a result that the caller may not want.
///
/// # Safety
/// `out` is NULL or may be written to.
unsafe fn write_if_wanted(out: *mut bool, value: bool) {
    if !out.is_null() {
        // SAFETY: not NULL, so writable as the caller promises.
        unsafe { out.write(value) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_create(
    pool: *mut farheap_pool,
    out: *mut *mut farheap_btree,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let object = unsafe { handle::get(pool) }?;
        let tree = Tree { tree: BTree::create(object)?, in_pool: pool, pool: object.hold() };
        // SAFETY: checked above.
        unsafe { write(out, handle::create::<farheap_btree>(tree)?) }
    })
}

/// The entries that a function of the caller's gives.
struct Entries {
    next: unsafe extern "C" fn(userdata: *mut c_void, out: *mut farheap_entry) -> bool,
    userdata: *mut c_void,
    /// An entry could not be taken.
    failure: Option<Failure>,
}

impl Iterator for Entries {
    type Item = (&'static [u8], &'static [u8]);

    fn next(&mut self) -> Option<(&'static [u8], &'static [u8])> {
        // The same key twice does not ascend: the load fails, and frees its pages.
        const NOT_ASCENDING: Option<(&[u8], &[u8])> = Some((&[], &[]));
        if self.failure.is_some() {
            return NOT_ASCENDING;
        }
        let mut entry =
            farheap_entry { key: ptr::null(), key_len: 0, value: ptr::null(), value_len: 0 };
        // SAFETY: a function that may be called with this, as the caller promises.
        if !unsafe { (self.next)(self.userdata, &raw mut entry) } {
            return None;
        }
        // SAFETY: NULL or as many bytes until the function is called again, as the caller promises; the
        // load has copied them by then.
        let key = unsafe { slice(entry.key, entry.key_len, "the key") };
        // SAFETY: as above.
        let value = unsafe { slice(entry.value, entry.value_len, "the value") };
        match (key, value) {
            (Ok(key), Ok(value)) => Some((key, value)),
            (Err(failure), _) | (_, Err(failure)) => {
                self.failure = Some(failure);
                NOT_ASCENDING
            }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_load(
    pool: *mut farheap_pool,
    next: farheap_next_entry,
    userdata: *mut c_void,
    out: *mut *mut farheap_btree,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        let next = next.ok_or_else(|| Failure::null("the function"))?;
        // SAFETY: not freed during the call, as the caller promises.
        let object = unsafe { handle::get(pool) }?;
        let mut entries = Entries { next, userdata, failure: None };
        let loaded = BTree::load(object, &mut entries);
        let tree = loaded.map_err(|error| entries.failure.unwrap_or_else(|| error.into()))?;
        let tree = Tree { tree, in_pool: pool, pool: object.hold() };
        // SAFETY: checked above.
        unsafe { write(out, handle::create::<farheap_btree>(tree)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_open(
    pool: *mut farheap_pool,
    root: u64,
    out: *mut *mut farheap_btree,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let object = unsafe { handle::get(pool) }?;
        // A page that is none of the pool's is found out now.
        drop(object.fix_shared(PageId(root))?);
        let tree = BTree::open(object, PageId(root));
        let tree = Tree { tree, in_pool: pool, pool: object.hold() };
        // SAFETY: checked above.
        unsafe { write(out, handle::create::<farheap_btree>(tree)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_free(tree: *mut farheap_btree) -> farheap_status {
    if tree.is_null() {
        return FARHEAP_OK;
    }
    call(|| handle::take(tree).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_root(tree: *const farheap_btree) -> u64 {
    // SAFETY: the caller does not free the handle during the call.
    value(0, || Ok(unsafe { handle::get(tree) }?.tree.root().0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_get(
    tree: *const farheap_btree,
    key: *const c_void,
    key_len: usize,
    into: *mut c_void,
    room: usize,
    len: *mut usize,
    found: *mut bool,
) -> farheap_status {
    call(|| {
        check_out(len)?;
        check_out(found)?;
        if into.is_null() && room > 0 {
            return Err(Failure::null("the buffer"));
        }
        // SAFETY: not freed during the call, as the caller promises.
        let tree = &unsafe { handle::get(tree) }?.tree;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let value = tree.get(unsafe { bytes(key, key_len, "the key") }?)?;
        let bytes = value.as_deref().unwrap_or_default();
        let fits = bytes.len().min(room);
        if fits > 0 {
            // SAFETY: room for as many bytes, as the caller promises, outside of the value.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast::<u8>(), fits) };
        }
        // SAFETY: checked above.
        unsafe { write(len, bytes.len()) }?;
        // SAFETY: checked above.
        unsafe { write(found, value.is_some()) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_get_ref(
    tree: *const farheap_btree,
    key: *const c_void,
    key_len: usize,
    out: *mut farheap_page,
    value: *mut *const u8,
    len: *mut usize,
    found: *mut bool,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        check_out(value)?;
        check_out(len)?;
        check_out(found)?;
        // SAFETY: not freed during the call, as the caller promises. The guard outlives the handle at
        // most: what it refers to is the pool's, which is not freed while guards exist.
        let tree = unsafe { handle::get(tree) }?;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let lent = tree.tree.get_ref(unsafe { bytes(key, key_len, "the key") }?)?;
        let Some(lent) = lent else {
            // SAFETY: checked above.
            return unsafe { write(found, false) };
        };
        let (page, range) = lent.into_page();
        let start = page.as_ptr().wrapping_add(range.start);
        // SAFETY: checked above.
        unsafe { hold_shared(tree.in_pool, page, out) };
        // SAFETY: checked above.
        unsafe { write(value, start) }?;
        // SAFETY: checked above.
        unsafe { write(len, range.len()) }?;
        // SAFETY: checked above.
        unsafe { write(found, true) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_insert(
    tree: *mut farheap_btree,
    key: *const c_void,
    key_len: usize,
    value: *const c_void,
    value_len: usize,
    is_new: *mut bool,
) -> farheap_status {
    call(|| {
        // SAFETY: not freed during the call, as the caller promises.
        let tree = &unsafe { handle::get(tree) }?.tree;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let key = unsafe { bytes(key, key_len, "the key") }?;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let value = unsafe { bytes(value, value_len, "the value") }?;
        let inserted = tree.insert(key, value)?;
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write_if_wanted(is_new, inserted) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_update(
    tree: *mut farheap_btree,
    key: *const c_void,
    key_len: usize,
    change: farheap_change,
    userdata: *mut c_void,
    found: *mut bool,
) -> farheap_status {
    call(|| {
        let change = change.ok_or_else(|| Failure::null("the change"))?;
        // SAFETY: not freed during the call, as the caller promises.
        let tree = &unsafe { handle::get(tree) }?.tree;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let key = unsafe { bytes(key, key_len, "the key") }?;
        let was_there = tree.update(key, |value| {
            // SAFETY: a function that may be called with this, as the caller promises; the value is
            // this thread's, for its leaf is held exclusively.
            unsafe { change(userdata, value.as_mut_ptr().cast(), value.len()) };
        })?;
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write_if_wanted(found, was_there) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_remove(
    tree: *mut farheap_btree,
    key: *const c_void,
    key_len: usize,
    found: *mut bool,
) -> farheap_status {
    call(|| {
        // SAFETY: not freed during the call, as the caller promises.
        let tree = &unsafe { handle::get(tree) }?.tree;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let was_there = tree.remove(unsafe { bytes(key, key_len, "the key") }?)?;
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write_if_wanted(found, was_there) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_scan(
    tree: *const farheap_btree,
    from: *const c_void,
    from_len: usize,
    out: *mut *mut farheap_cursor,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let tree = unsafe { handle::get(tree) }?;
        // SAFETY: NULL or as many bytes, as the caller promises.
        let from = unsafe { bytes(from, from_len, "the key") }?;
        // SAFETY: checked above.
        unsafe { write(out, cursor_over(tree, tree.tree.clone().into_cursor(from))?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_btree_scan_back(
    tree: *const farheap_btree,
    out: *mut *mut farheap_cursor,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let tree = unsafe { handle::get(tree) }?;
        // SAFETY: checked above.
        unsafe { write(out, cursor_over(tree, tree.tree.clone().into_cursor_at_end())?) }
    })
}

fn cursor_over(tree: &Tree, place: pool::Cursor<'static>) -> Result<*mut farheap_cursor> {
    handle::create(LockedCursor { place: Mutex::new(place), _pool: Arc::clone(&tree.pool) })
}

/// Key and value that a cursor went over; they are the cursor's, until it moves on.
type PassedPair<'c> = std::result::Result<Option<(&'c [u8], &'c [u8])>, farheap::Error>;

/// Moves a cursor over an entry.
///
/// # Safety
/// The pointers are NULL or may be written to, and the cursor is not freed meanwhile.
unsafe fn move_cursor(
    cursor: *mut farheap_cursor,
    out: *mut farheap_entry,
    found: *mut bool,
    go: for<'c> fn(&'c mut pool::Cursor<'static>) -> PassedPair<'c>,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        check_out(found)?;
        // SAFETY: not freed during the call, as the caller promises.
        let cursor = unsafe { handle::get(cursor) }?;
        let mut place = match cursor.place.try_lock() {
            Ok(place) => place,
            Err(TryLockError::Poisoned(place)) => place.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::plain(FARHEAP_E_IN_USE, "another thread moves the cursor"));
            }
        };
        let Some((key, value)) = go(&mut place)? else {
            // SAFETY: checked above.
            return unsafe { write(found, false) };
        };
        let entry = farheap_entry {
            key: key.as_ptr(),
            key_len: key.len(),
            value: value.as_ptr(),
            value_len: value.len(),
        };
        // SAFETY: checked above.
        unsafe { write(out, entry) }?;
        // SAFETY: checked above.
        unsafe { write(found, true) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_cursor_next(
    cursor: *mut farheap_cursor,
    out: *mut farheap_entry,
    found: *mut bool,
) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { move_cursor(cursor, out, found, |place| place.next()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_cursor_prev(
    cursor: *mut farheap_cursor,
    out: *mut farheap_entry,
    found: *mut bool,
) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { move_cursor(cursor, out, found, |place| place.prev()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_cursor_free(cursor: *mut farheap_cursor) -> farheap_status {
    if cursor.is_null() {
        return FARHEAP_OK;
    }
    call(|| handle::take(cursor).map(drop))
}
