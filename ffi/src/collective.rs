//! Collective allocators and their sub-allocators.
//!
//! A sub-allocator is a structure of the caller's. Of one page it holds a [`PerPage`], so that the
//! page stays while the structure is in use; the other kinds need nothing.

#![expect(unsafe_code, reason = "uses the caller's pointers, and keeps values in its structures")]

use crate::abi::{self, FARHEAP_ABI_VERSION};
use crate::config::parse;
use crate::error::{
    FARHEAP_E_BAD_RANGE, FARHEAP_E_HANDLE, FARHEAP_OK, Failure, Result, call, check_out,
    farheap_status, value, write, write_sized,
};
use crate::handle::{self, methods, opaque};
use crate::heap::{
    advice, bytes, farheap_advice, farheap_latencies, farheap_range, latencies, ranges,
};
use crate::stats::farheap_stats;
use farheap::region::Advice;
use farheap::{ByteCount, Heap};
use farheap_collections::sub::{AnySub, Collective, CollectiveConfig, PerPage, SubAllocator};
use std::alloc::Layout;
use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};

opaque! {
    /// A collective allocator.
    farheap_collective = 2: Collective
}

/// Which kind of memory a sub-allocator hands out.
pub type farheap_kind = u32;

pub const FARHEAP_PURELY_LOCAL: farheap_kind = 1;
pub const FARHEAP_SWAPPABLE_PLAIN: farheap_kind = 2;
pub const FARHEAP_NEW_PER_PAGE: farheap_kind = 3;

/// A sub-allocator; `kind` is 0 when it has been released.
#[repr(C)]
#[derive(Debug)]
pub struct farheap_suballocator {
    pub collective: *mut farheap_collective,
    pub kind: farheap_kind,
    pub reserved: u32,
    /// A `PerPage` if `kind` is of one page.
    pub page: [u64; 2],
}

const _: () = assert!(size_of::<PerPage<'static>>() == 16 && align_of::<PerPage<'static>>() == 8);

impl farheap_suballocator {
    fn plain(collective: *mut farheap_collective, kind: farheap_kind) -> farheap_suballocator {
        farheap_suballocator { collective, kind, reserved: 0, page: [0; 2] }
    }

    /// Keeps a sub-allocator of the collective whose handle is given.
    fn of(collective: *mut farheap_collective, sub: AnySub<'_>) -> farheap_suballocator {
        match sub {
            AnySub::PurelyLocal(_) => Self::plain(collective, FARHEAP_PURELY_LOCAL),
            AnySub::Swappable(_) => Self::plain(collective, FARHEAP_SWAPPABLE_PLAIN),
            AnySub::PerPage(page) => {
                let mut kept = Self::plain(collective, FARHEAP_NEW_PER_PAGE);
                let place = (&raw mut kept.page).cast::<PerPage<'_>>();
                // SAFETY: room and alignment for it, by the assertion above.
                unsafe { place.write(page) };
                kept
            }
        }
    }

    /// The page of a sub-allocator of one page.
    ///
    /// # Safety
    /// `kind` says that there is one, and the collective exists.
    #[inline]
    unsafe fn page(&self) -> &PerPage<'_> {
        // SAFETY: `of` has written one, as the caller promises.
        unsafe { &*(&raw const self.page).cast::<PerPage<'_>>() }
    }
}

/// The layout of an object; a size of 0 is one of 1.
#[inline]
fn layout(size: usize, align: usize) -> Result<Layout> {
    match Layout::from_size_align(size.max(1), align) {
        Ok(layout) => Ok(layout),
        Err(_) => Err(no_layout(size, align)),
    }
}

// Failures by functions of their own: what a message is made of would lie in memory otherwise, also
// when there is none to make.

#[cold]
fn no_layout(size: usize, align: usize) -> Failure {
    Failure::argument(format!("{size} bytes aligned to {align} are no possible object"))
}

#[cold]
fn no_kind(kind: farheap_kind) -> Failure {
    Failure::argument(format!("{kind} is no kind"))
}

#[cold]
fn not_of_this(ptr: *const c_void) -> Failure {
    Failure::new(FARHEAP_E_BAD_RANGE, format!("{ptr:p} is not of this collective"))
}

/// Looks a sub-allocator and its collective up.
///
/// # Safety
/// `sub` is NULL or a structure that this module has written, and neither it nor the collective
/// is released during the call.
#[inline]
unsafe fn open<'a>(
    sub: *const farheap_suballocator,
) -> Result<(&'a farheap_suballocator, &'a Collective)> {
    // SAFETY: NULL or a structure, as the caller promises.
    let Some(sub) = (unsafe { sub.as_ref() }) else {
        return Err(Failure::null("the sub-allocator"));
    };
    if !(FARHEAP_PURELY_LOCAL..=FARHEAP_NEW_PER_PAGE).contains(&sub.kind) {
        return Err(Failure::new(FARHEAP_E_HANDLE, "the sub-allocator was released"));
    }
    // SAFETY: not freed during the call, as the caller promises.
    Ok((sub, unsafe { handle::get(sub.collective) }?))
}

/// Lends the collective of a handle to `body`.
///
/// # Safety
/// The caller does not free the handle during the call.
#[inline]
unsafe fn on<T: Copy>(
    collective: *const farheap_collective,
    failed: T,
    body: impl FnOnce(&Collective) -> Result<T>,
) -> T {
    // SAFETY: as the caller promises.
    value(failed, || body(unsafe { handle::get(collective) }?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_new(
    config: *const c_char,
    local_bytes: u64,
    page_bytes: u64,
    out: *mut *mut farheap_collective,
) -> farheap_status {
    let abi = FARHEAP_ABI_VERSION;
    // SAFETY: as the caller promises.
    unsafe { farheap_collective_new_abi(abi, config, local_bytes, page_bytes, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_new_abi(
    abi: u32,
    config: *const c_char,
    local_bytes: u64,
    page_bytes: u64,
    out: *mut *mut farheap_collective,
) -> farheap_status {
    call(|| {
        abi::check(abi)?;
        check_out(out)?;
        let defaults = CollectiveConfig::default_region();
        let builder = Heap::builder().span(defaults.span);
        // SAFETY: NULL or a string, as the caller promises.
        let config = unsafe { parse(builder, config) }?;
        if local_bytes > 1 << 46 {
            return Err(Failure::argument(format!("{local_bytes} bytes of local memory")));
        }
        let store = config.open_store()?;
        let mut parts =
            CollectiveConfig::new().local(ByteCount(local_bytes)).region(config.region()?);
        if page_bytes != 0 {
            parts = parts.page(ByteCount(page_bytes));
        }
        let handle = handle::create::<farheap_collective>(Collective::create(parts, store)?)?;
        // SAFETY: checked above.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_free(
    collective: *mut farheap_collective,
) -> farheap_status {
    if collective.is_null() {
        return FARHEAP_OK;
    }
    call(|| handle::take(collective).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_suballocator(
    collective: *mut farheap_collective,
    kind: farheap_kind,
    out: *mut farheap_suballocator,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let object = unsafe { handle::get(collective) }?;
        let sub = match kind {
            FARHEAP_PURELY_LOCAL | FARHEAP_SWAPPABLE_PLAIN => {
                farheap_suballocator::plain(collective, kind)
            }
            FARHEAP_NEW_PER_PAGE => {
                farheap_suballocator::of(collective, AnySub::PerPage(object.new_page()?))
            }
            other => return Err(no_kind(other)),
        };
        // SAFETY: checked above.
        unsafe { write(out, sub) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_suballocator_of(
    collective: *mut farheap_collective,
    ptr: *const c_void,
    out: *mut farheap_suballocator,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let object = unsafe { handle::get(collective) }?;
        let sub = object.suballocator_of(ptr.cast()).ok_or_else(|| not_of_this(ptr))?;
        // SAFETY: checked above.
        unsafe { write(out, farheap_suballocator::of(collective, sub)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_suballocator_release(
    sub: *mut farheap_suballocator,
) -> farheap_status {
    call(|| {
        // SAFETY: NULL or a structure, as the caller promises.
        let (kind, _) = unsafe { open(sub) }.map(|(sub, collective)| (sub.kind, collective))?;
        if kind == FARHEAP_NEW_PER_PAGE {
            // SAFETY: not NULL: `open` looked.
            let place = unsafe { &raw mut (*sub).page }.cast::<PerPage<'_>>();
            // SAFETY: the kind says that there is one; it is forgotten below.
            unsafe { place.drop_in_place() };
        }
        // SAFETY: not NULL; the collective is irrelevant in a released one.
        unsafe { sub.write(farheap_suballocator::plain(ptr::null_mut(), 0)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_suballocator_allocate(
    sub: *const farheap_suballocator,
    size: usize,
    align: usize,
) -> *mut c_void {
    value(ptr::null_mut(), || {
        // SAFETY: NULL or a structure, as the caller promises.
        let (sub, collective) = unsafe { open(sub) }?;
        let layout = layout(size, align)?;
        let object = match sub.kind {
            FARHEAP_PURELY_LOCAL => collective.purely_local().allocate(layout)?,
            FARHEAP_SWAPPABLE_PLAIN => collective.swappable().allocate(layout)?,
            // SAFETY: of one page, by its kind.
            _ => unsafe { sub.page() }.allocate(layout)?,
        };
        Ok(object.as_ptr().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_suballocator_contains(
    sub: *const farheap_suballocator,
    ptr: *const c_void,
) -> bool {
    value(false, || {
        // SAFETY: NULL or a structure, as the caller promises.
        let (sub, collective) = unsafe { open(sub) }?;
        let ptr = ptr.cast();
        Ok(match sub.kind {
            FARHEAP_PURELY_LOCAL => collective.purely_local().contains(ptr),
            FARHEAP_SWAPPABLE_PLAIN => collective.swappable().contains(ptr),
            // SAFETY: of one page, by its kind.
            _ => unsafe { sub.page() }.contains(ptr),
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_suballocator_is_occupancy_under(
    sub: *const farheap_suballocator,
    ratio: f64,
) -> bool {
    value(false, || {
        // SAFETY: NULL or a structure, as the caller promises.
        let (sub, collective) = unsafe { open(sub) }?;
        Ok(match sub.kind {
            FARHEAP_PURELY_LOCAL => collective.purely_local().occupancy_under(ratio),
            FARHEAP_SWAPPABLE_PLAIN => collective.swappable().occupancy_under(ratio),
            // SAFETY: of one page, by its kind.
            _ => unsafe { sub.page() }.occupancy_under(ratio),
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_allocate(
    collective: *mut farheap_collective,
    kind: farheap_kind,
    size: usize,
    align: usize,
) -> *mut c_void {
    let body = |collective: &Collective| {
        let layout = layout(size, align)?;
        let object = match kind {
            FARHEAP_PURELY_LOCAL => collective.purely_local().allocate(layout)?,
            FARHEAP_SWAPPABLE_PLAIN => collective.swappable().allocate(layout)?,
            FARHEAP_NEW_PER_PAGE => collective.new_page()?.allocate(layout)?,
            other => return Err(no_kind(other)),
        };
        Ok(object.as_ptr().cast())
    };
    // SAFETY: as the caller promises.
    unsafe { on(collective, ptr::null_mut(), body) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_allocate_near(
    collective: *mut farheap_collective,
    hint: *const c_void,
    size: usize,
    align: usize,
) -> *mut c_void {
    let body = |collective: &Collective| {
        let layout = layout(size, align)?;
        if let Some(sub) = collective.suballocator_of(hint.cast())
            && let Ok(object) = sub.allocate(layout)
        {
            return Ok(object.as_ptr().cast());
        }
        Ok(collective.swappable().allocate(layout)?.as_ptr().cast())
    };
    // SAFETY: as the caller promises.
    unsafe { on(collective, ptr::null_mut(), body) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_collective_deallocate(
    collective: *mut farheap_collective,
    ptr: *mut c_void,
    size: usize,
    align: usize,
) -> farheap_status {
    let Some(object) = NonNull::new(ptr.cast::<u8>()) else { return FARHEAP_OK };
    call(|| {
        // SAFETY: not freed during the call, as the caller promises.
        let collective = unsafe { handle::get(collective) }?;
        let layout = layout(size, align)?;
        if !collective.contains(object.as_ptr()) {
            return Err(not_of_this(ptr));
        }
        // SAFETY: an object of this collective and size, as the caller promises; what can be
        // told otherwise panics before anything changes.
        unsafe { collective.deallocate(object, layout) };
        Ok(())
    })
}

/// Defines functions that return a figure of a collective, or `failed`.
macro_rules! of_collective {
    ($($name:ident($object:ident $(, $arg:ident: $type:ty)*) -> $result:ty
       = $failed:expr, $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            collective: *const farheap_collective,
            $($arg: $type,)*
        ) -> $result {
            // SAFETY: as the caller promises.
            unsafe { on(collective, $failed, |$object| Ok($body)) }
        }
    )*};
}

of_collective! {
    farheap_collective_contains(object, ptr: *const c_void) -> bool
        = false, object.contains(ptr.cast());
    farheap_collective_is_local(object, ptr: *const c_void) -> bool
        = false, object.is_local(ptr.cast());
    farheap_collective_share_a_page(object, a: *const c_void, b: *const c_void) -> bool
        = false, object.share_a_page(a.cast(), b.cast());
    farheap_collective_page_size(object) -> usize = 0, object.page_size().as_usize();
    farheap_collective_local_capacity(object) -> u64 = 0, object.local_capacity().get();
    farheap_collective_local_used(object) -> u64 = 0, object.local_used().get();
    farheap_collective_far_pages(object) -> u64 = 0, object.far_pages();
}

methods! { farheap_collective: Collective;
    farheap_collective_stats(object, out: *mut farheap_stats) {
        let allocated = object.far_pages() * object.page_size().get() + object.local_used().get();
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { farheap_stats::new(allocated, &object.stats()).write(out) }
    }

    farheap_collective_latencies(object, out: *mut farheap_latencies) {
        let latencies = latencies(&object.region().latencies());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { write_sized(out, &latencies, size_of::<farheap_latencies>()) }
    }

    farheap_collective_set_limit(object, limit: u64) {
        Ok(object.region().set_limit(ByteCount(limit))?)
    }

    farheap_collective_prefetch_many(object, first: *const farheap_range, count: usize) {
        // SAFETY: NULL or as many ranges, as the caller promises.
        let ranges = unsafe { ranges(first, count) }?;
        Ok(object.region().advise(&ranges, Advice::WillNeed)?)
    }

    farheap_collective_advise(object, ptr: *const c_void, len: usize, advice: farheap_advice) {
        let advice = self::advice(advice)?;
        Ok(object.region().advise(&[bytes(ptr, len)], advice)?)
    }

    farheap_collective_pin(object, ptr: *const c_void, len: usize) {
        Ok(object.region().pin(bytes(ptr, len)).map(std::mem::forget)?)
    }

    farheap_collective_unpin(object, ptr: *const c_void, len: usize) {
        Ok(object.region().unpin(bytes(ptr, len))?)
    }

    farheap_collective_evict_all(object) { Ok(object.region().evict_all()?) }
}
