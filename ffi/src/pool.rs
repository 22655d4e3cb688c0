//! Buffer pools.

#![expect(unsafe_code, reason = "uses the caller's pointers")]

use crate::error::{
    FARHEAP_E_IN_USE, FARHEAP_E_NO_SUCH_PAGE, FARHEAP_OK, Failure, Result, call, check_out,
    farheap_status, read_sized, slice, text, value, write,
};
use crate::handle::{self, methods, opaque};
use crate::manager::{Userdata, farheap_manager};
use crate::stats::farheap_pool_stats;
use farheap::pool::{BufferPool, Clock, PoolConfig, Proven};
use farheap::{ByteCount, Error, PageId};
use std::ffi::{c_char, c_void};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

opaque! {
    /// A buffer pool.
    farheap_pool = 4: PoolObject
}

/// A pool with what C has of it.
pub struct PoolObject {
    pool: Arc<BufferPool>,
    /// A clone is with each tree and cursor.
    trees: Arc<()>,
}

impl PoolObject {
    fn new(pool: Arc<BufferPool>) -> PoolObject {
        PoolObject { pool, trees: Arc::new(()) }
    }

    /// To be kept by what must be freed before the pool.
    pub(crate) fn hold(&self) -> Arc<()> {
        Arc::clone(&self.trees)
    }
}

impl Deref for PoolObject {
    type Target = Arc<BufferPool>;
    #[inline]
    fn deref(&self) -> &Arc<BufferPool> {
        &self.pool
    }
}

/// Is told of a page; whether to go on.
pub type farheap_visit = Option<unsafe extern "C" fn(userdata: *mut c_void, page: u64) -> bool>;

/// Asked before a page is written back.
pub type farheap_before_write =
    Option<unsafe extern "C" fn(userdata: *mut c_void, page: u64, lsn: u64) -> farheap_status>;

/// How a pool is set up; what is zero has its default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farheap_pool_config {
    pub size: usize,
    pub page: u64,
    pub deadline_ms: u64,
    pub checksum: crate::config::farheap_switch,
    pub cleaner: crate::config::farheap_switch,
    pub before_write: farheap_before_write,
    pub userdata: *mut c_void,
    pub replacement: farheap_replacement,
    pub overwrite: crate::config::farheap_switch,
    pub read_only: crate::config::farheap_switch,
    pub beside: *mut farheap_pool,
    pub whole_pages: crate::config::farheap_switch,
}

/// Size of the first version of the structure, to which fields were added.
const POOL_CONFIG_MIN: usize = std::mem::offset_of!(farheap_pool_config, replacement);

/// Which pages leave a pool first.
pub type farheap_replacement = u32;

pub const FARHEAP_REPLACEMENT_DEFAULT: farheap_replacement = 0;
pub const FARHEAP_REPLACEMENT_PROVEN: farheap_replacement = 1;
pub const FARHEAP_REPLACEMENT_CLOCK: farheap_replacement = 2;

const DEFAULTS: farheap_pool_config = farheap_pool_config {
    size: size_of::<farheap_pool_config>(),
    page: 0,
    deadline_ms: 0,
    checksum: 0,
    cleaner: 0,
    before_write: None,
    userdata: std::ptr::null_mut(),
    replacement: FARHEAP_REPLACEMENT_DEFAULT,
    overwrite: 0,
    read_only: 0,
    beside: std::ptr::null_mut(),
    whole_pages: 0,
};

/// The settings of a pool.
///
/// # Safety
/// `config` is NULL or a structure whose `size` is right; nobody frees a pool that it names meanwhile.
unsafe fn settings(config: *const farheap_pool_config) -> Result<PoolConfig> {
    let mut settings = PoolConfig::new();
    if config.is_null() {
        return Ok(settings);
    }
    // SAFETY: the structure begins with its size, as the caller promises.
    let config =
        unsafe { read_sized(config, POOL_CONFIG_MIN, "FARHEAP_POOL_CONFIG_INIT", DEFAULTS) }?;
    match config.replacement {
        FARHEAP_REPLACEMENT_DEFAULT => {}
        FARHEAP_REPLACEMENT_PROVEN => settings = settings.replacement(Proven),
        FARHEAP_REPLACEMENT_CLOCK => settings = settings.replacement(Clock),
        other => return Err(Failure::argument(format!("replacement: {other} is no policy"))),
    }
    if config.page != 0 {
        settings = settings.page(ByteCount(config.page));
    }
    if config.deadline_ms != 0 {
        settings = settings.deadline(Duration::from_millis(config.deadline_ms));
    }
    if let Some(on) = crate::config::switch("checksum", config.checksum)? {
        settings = settings.checksum(on);
    }
    if let Some(on) = crate::config::switch("cleaner", config.cleaner)? {
        settings = settings.cleaner(on);
    }
    if let Some(on) = crate::config::switch("overwrite", config.overwrite)? {
        settings = settings.overwrite(on);
    }
    if let Some(on) = crate::config::switch("read_only", config.read_only)? {
        settings = settings.read_only(on);
    }
    if let Some(on) = crate::config::switch("whole_pages", config.whole_pages)? {
        settings = settings.whole_pages(on);
    }
    if !config.beside.is_null() {
        // SAFETY: not freed during the call, as the caller promises.
        settings = settings.beside(unsafe { handle::get(config.beside) }?);
    }
    if let Some(before_write) = config.before_write {
        let userdata = Userdata(config.userdata);
        settings = settings.before_write(move |page, lsn| {
            // SAFETY: a function that may be called from any thread with this, as the caller
            // promises.
            match unsafe { before_write(userdata.get(), page.0, lsn) } {
                FARHEAP_OK => Ok(()),
                _ => Err(Error::Os { call: "the before_write callback", errno: libc::EIO }),
            }
        });
    }
    Ok(settings)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_create(
    manager: *mut farheap_manager,
    config: *const farheap_pool_config,
    path: *const c_char,
    capacity: u64,
    out: *mut *mut farheap_pool,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = unsafe { handle::get(manager) }?;
        // SAFETY: NULL or a structure, as the caller promises.
        let settings = unsafe { settings(config) }?;
        // SAFETY: NULL or a string, as the caller promises.
        let path = unsafe { text(path, "the path") }?;
        let pool = settings.create(path, ByteCount(capacity), &manager.manager)?;
        let handle = handle::create::<farheap_pool>(PoolObject::new(pool))?;
        // SAFETY: checked above.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_open(
    manager: *mut farheap_manager,
    config: *const farheap_pool_config,
    path: *const c_char,
    out: *mut *mut farheap_pool,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = unsafe { handle::get(manager) }?;
        // SAFETY: NULL or a structure, as the caller promises.
        let settings = unsafe { settings(config) }?;
        // SAFETY: NULL or a string, as the caller promises.
        let path = unsafe { text(path, "the path") }?;
        let pool = settings.open(path, &manager.manager)?;
        let handle = handle::create::<farheap_pool>(PoolObject::new(pool))?;
        // SAFETY: checked above.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_free(pool: *mut farheap_pool) -> farheap_status {
    if pool.is_null() {
        return FARHEAP_OK;
    }
    call(|| {
        // SAFETY: nobody else frees it during the call, as the caller promises.
        let table = unsafe { handle::get(pool) }?;
        let (holders, trees) = (table.holders(), Arc::strong_count(&table.trees) - 1);
        if holders > 0 || trees > 0 {
            let message = format!(
                "{holders} fixes of pages have not ended, {trees} trees and cursors are not freed"
            );
            return Err(Failure::new(FARHEAP_E_IN_USE, message));
        }
        handle::take(pool).map(drop)
    })
}

/// Page numbers as the library takes them.
///
/// # Safety
/// As for [`slice`].
pub(crate) unsafe fn page_ids(first: *const u64, count: usize) -> Result<Vec<PageId>> {
    // SAFETY: as the caller promises.
    let ids = unsafe { slice(first, count, "the page numbers") }?;
    Ok(ids.iter().map(|id| PageId(*id)).collect())
}

/// Tells `visit` of pages, as long as it wants to know of more.
///
/// # Safety
/// `visit` may be called with `userdata`.
unsafe fn visit_all(
    pages: impl Iterator<Item = PageId>,
    visit: farheap_visit,
    userdata: *mut c_void,
) -> Result<()> {
    let visit = visit.ok_or_else(|| Failure::null("the function"))?;
    for page in pages {
        // SAFETY: as the caller promises.
        if !unsafe { visit(userdata, page.0) } {
            break;
        }
    }
    Ok(())
}

methods! { farheap_pool: Arc<BufferPool>;
    farheap_pool_flush(object) { Ok(object.flush()?) }

    farheap_pool_flush_pages(object, first: *const u64, count: usize) {
        // SAFETY: NULL or as many numbers, as the caller promises.
        let pages = unsafe { page_ids(first, count) }?;
        Ok(object.flush_pages(&pages)?)
    }

    farheap_pool_pages_in_use(object, visit: farheap_visit, userdata: *mut c_void) {
        // SAFETY: as the caller promises.
        unsafe { visit_all(object.pages_in_use(), visit, userdata) }
    }

    farheap_pool_dirty_pages(object, visit: farheap_visit, userdata: *mut c_void) {
        // SAFETY: as the caller promises.
        unsafe { visit_all(object.dirty_pages(), visit, userdata) }
    }

    farheap_pool_evict_all(object) { Ok(object.evict_all()?) }

    farheap_pool_evict_clean(object, want: u64, out: *mut u64) {
        check_out(out)?;
        // SAFETY: checked above.
        unsafe { write(out, object.evict_clean(ByteCount(want)).0) }
    }

    farheap_pool_prefetch(object, first: *const u64, count: usize) {
        // SAFETY: NULL or as many numbers, as the caller promises.
        let pages = unsafe { page_ids(first, count) }?;
        object.prefetch(&pages);
        Ok(())
    }

    farheap_pool_set_floor(object, bytes: u64) {
        Ok(object.account().set_floor(ByteCount(bytes))?)
    }

    farheap_pool_set_ceiling(object, bytes: u64) {
        object.account().set_ceiling(ByteCount(bytes));
        Ok(())
    }

    farheap_pool_stats_get(object, out: *mut farheap_pool_stats) {
        let stats = farheap_pool_stats::new(object.holders(), &object.stats());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { stats.write(out) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_payload(pool: *const farheap_pool) -> usize {
    // SAFETY: the caller does not free the handle during the call.
    value(0, || Ok(unsafe { handle::get(pool) }?.payload()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_page_address(
    pool: *const farheap_pool,
    id: u64,
) -> *const u8 {
    value(std::ptr::null(), || {
        // SAFETY: the caller does not free the handle during the call.
        let address = unsafe { handle::get(pool) }?.page_address(PageId(id));
        let none = || Failure::plain(FARHEAP_E_NO_SUCH_PAGE, "the table has no room for the page");
        address.ok_or_else(none)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_page_at(
    pool: *const farheap_pool,
    address: *const c_void,
) -> u64 {
    value(0, || {
        // SAFETY: the caller does not free the handle during the call.
        let page = unsafe { handle::get(pool) }?.page_at(address.cast());
        let none = || Failure::plain(FARHEAP_E_NO_SUCH_PAGE, "the address is in no page");
        Ok(page.ok_or_else(none)?.0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_pool_pages(pool: *const farheap_pool) -> u64 {
    // SAFETY: the caller does not free the handle during the call.
    value(0, || Ok(unsafe { handle::get(pool) }?.pages()))
}
