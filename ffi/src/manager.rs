//! The memory manager: one limit, temporary memory.

#![expect(unsafe_code, reason = "uses the caller's pointers")]

use crate::abi::{self, FARHEAP_ABI_VERSION};
use crate::error::{
    FARHEAP_E_BAD_RANGE, FARHEAP_E_IN_USE, FARHEAP_E_OUT_OF_MEMORY, FARHEAP_OK, Failure, call,
    check_out, farheap_status, value, write,
};
use crate::handle::{self, methods, opaque};
use crate::stats::{farheap_consumer_stats, farheap_manager_stats};
use allocator_api2::alloc::Allocator;
use farheap::ByteCount;
use farheap::manager::{MemoryManager, Pressure, TemporaryMemory};
use farheap_collections::Temporary;
use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

opaque! {
    /// A memory manager.
    farheap_manager = 3: Manager
}

/// A manager and the temporary memory that C has of it, by address.
#[derive(Debug)]
pub(crate) struct Manager {
    pub(crate) manager: Arc<MemoryManager>,
    temporary: Mutex<HashMap<usize, TemporaryMemory>>,
}

impl Manager {
    fn temporary(&self) -> MutexGuard<'_, HashMap<usize, TemporaryMemory>> {
        self.temporary.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event of memory pressure.
pub type farheap_pressure = u32;

pub const FARHEAP_PRESSURE_OTHER: farheap_pressure = 0;
pub const FARHEAP_PRESSURE_LOW: farheap_pressure = 1;
pub const FARHEAP_PRESSURE_DIRECT: farheap_pressure = 2;
pub const FARHEAP_PRESSURE_SPILLED: farheap_pressure = 3;
pub const FARHEAP_PRESSURE_FAILED: farheap_pressure = 4;
pub const FARHEAP_PRESSURE_BROKEN: farheap_pressure = 5;
pub const FARHEAP_PRESSURE_MISCOUNTED: farheap_pressure = 6;
pub const FARHEAP_PRESSURE_OVER: farheap_pressure = 7;

/// Told about pressure.
pub type farheap_on_pressure =
    Option<unsafe extern "C" fn(userdata: *mut c_void, event: farheap_pressure, bytes: u64)>;

/// Maximum length of a consumer's name in C, in bytes with the zero at its end.
pub const FARHEAP_NAME_MAX: usize = 64;

/// A name as C has it: as much of it as fits, to a whole character.
fn c_name(name: &str) -> [c_char; FARHEAP_NAME_MAX] {
    let mut end = name.len().min(FARHEAP_NAME_MAX - 1);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let mut out = [0; FARHEAP_NAME_MAX];
    for (to, byte) in out.iter_mut().zip(name[..end].bytes()) {
        *to = byte as c_char;
    }
    out
}

/// Pointer that the caller passes on to its own callback, from any thread.
#[derive(Clone, Copy)]
pub(crate) struct Userdata(pub(crate) *mut c_void);

// SAFETY: only handed to the caller's callback, whose contract says that it is called from any
// thread.
unsafe impl Send for Userdata {}

// SAFETY: as for `Send`.
unsafe impl Sync for Userdata {}

impl Userdata {
    /// By a method, so that a closure holds the whole value and not its pointer.
    pub(crate) fn get(self) -> *mut c_void {
        self.0
    }
}

fn event_of(pressure: &Pressure) -> (farheap_pressure, u64) {
    match pressure {
        Pressure::Low { used, .. } => (FARHEAP_PRESSURE_LOW, used.0),
        Pressure::Broken { .. } => (FARHEAP_PRESSURE_BROKEN, 0),
        Pressure::Direct { wanted } => (FARHEAP_PRESSURE_DIRECT, wanted.0),
        Pressure::Spilled { len } => (FARHEAP_PRESSURE_SPILLED, len.0),
        Pressure::Failed { wanted } => (FARHEAP_PRESSURE_FAILED, wanted.0),
        Pressure::Miscounted { bytes, .. } => (FARHEAP_PRESSURE_MISCOUNTED, bytes.0),
        Pressure::Over { held, .. } => (FARHEAP_PRESSURE_OVER, held.0),
        _ => (FARHEAP_PRESSURE_OTHER, 0),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_new(
    limit: u64,
    out: *mut *mut farheap_manager,
) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { farheap_manager_new_abi(FARHEAP_ABI_VERSION, limit, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_new_abi(
    abi: u32,
    limit: u64,
    out: *mut *mut farheap_manager,
) -> farheap_status {
    call(|| {
        abi::check(abi)?;
        check_out(out)?;
        let manager = MemoryManager::start(ByteCount(limit))?;
        let object = Manager { manager, temporary: Mutex::new(HashMap::new()) };
        let handle = handle::create::<farheap_manager>(object)?;
        // SAFETY: checked above.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_free(manager: *mut farheap_manager) -> farheap_status {
    if manager.is_null() {
        return FARHEAP_OK;
    }
    call(|| {
        // SAFETY: nobody else frees it during the call, as the caller promises.
        let object = unsafe { handle::get(manager) }?;
        let blocks = object.temporary().len();
        if blocks > 0 {
            let message = format!("{blocks} blocks of temporary memory are still allocated");
            return Err(Failure::new(FARHEAP_E_IN_USE, message));
        }
        handle::take(manager).map(drop)
    })
}

methods! { farheap_manager: Manager;
    farheap_manager_set_limit(object, limit: u64) {
        Ok(object.manager.set_limit(ByteCount(limit))?)
    }

    farheap_manager_set_deadline(object, deadline_ms: u64) {
        object.manager.set_deadline(Duration::from_millis(deadline_ms));
        Ok(())
    }

    farheap_manager_set_temporary_ceiling(object, bytes: u64) {
        object.manager.temporary().set_ceiling(ByteCount(bytes));
        Ok(())
    }

    farheap_manager_on_pressure(object, told: farheap_on_pressure, userdata: *mut c_void) {
        let userdata = Userdata(userdata);
        let told = told.ok_or_else(|| Failure::null("the callback"))?;
        object.manager.on_pressure(move |pressure| {
            let (event, bytes) = event_of(&pressure);
            // SAFETY: a function that may be called from any thread with this, as the caller
            // promises.
            unsafe { told(userdata.get(), event, bytes) };
        })?;
        Ok(())
    }

    farheap_manager_stats_get(object, out: *mut farheap_manager_stats) {
        let stats = farheap_manager_stats::new(&object.manager.stats());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { stats.write(out) }
    }

    farheap_manager_consumer(object, index: u64, out: *mut farheap_consumer_stats) {
        let consumers = object.manager.consumers();
        let consumer = usize::try_from(index).ok().and_then(|index| consumers.get(index));
        let (name, stats) = consumer.ok_or_else(|| {
            let count = consumers.len();
            Failure::new(FARHEAP_E_BAD_RANGE, format!("consumer {index} of {count}, from 0 on"))
        })?;
        let stats = farheap_consumer_stats::new(c_name(name), stats);
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { stats.write(out) }
    }

    farheap_manager_allocate_temporary(object, len: usize, out: *mut *mut c_void) {
        check_out(out)?;
        let memory = object.manager.allocate_temporary(ByteCount(len as u64))?;
        let ptr = memory.as_ptr();
        object.temporary().insert(ptr.as_ptr().addr(), memory);
        // SAFETY: checked above.
        unsafe { write(out, ptr.as_ptr().cast()) }
    }

    farheap_manager_free_temporary(object, ptr: *mut c_void) {
        if ptr.is_null() {
            return Ok(());
        }
        let memory = object.temporary().remove(&ptr.addr()).ok_or_else(|| {
            let message = format!("{ptr:p} is no temporary memory of this manager");
            Failure::new(FARHEAP_E_BAD_RANGE, message)
        })?;
        drop(memory);
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_limit(manager: *const farheap_manager) -> u64 {
    // SAFETY: the caller does not free the handle during the call.
    value(0, || Ok(unsafe { handle::get(manager) }?.manager.limit().0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_manager_is_spilled(
    manager: *const farheap_manager,
    ptr: *const c_void,
) -> bool {
    value(false, || {
        // SAFETY: the caller does not free the handle during the call.
        let object = unsafe { handle::get(manager) }?;
        let temporary = object.temporary();
        let memory = temporary.get(&ptr.addr()).ok_or_else(|| {
            let message = format!("{ptr:p} is no temporary memory of this manager");
            Failure::new(FARHEAP_E_BAD_RANGE, message)
        })?;
        Ok(memory.is_spilled())
    })
}

opaque! {
    /// An allocator of temporary memory for small objects.
    farheap_temporary = 5: Temporary
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_temporary_new(
    manager: *mut farheap_manager,
    out: *mut *mut farheap_temporary,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: the caller does not free the handle during the call.
        let object = unsafe { handle::get(manager) }?;
        let handle = handle::create::<farheap_temporary>(Temporary::new(&object.manager))?;
        // SAFETY: checked above.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_temporary_free(
    temporary: *mut farheap_temporary,
) -> farheap_status {
    if temporary.is_null() {
        return FARHEAP_OK;
    }
    call(|| handle::take(temporary).map(drop))
}

/// The layout of an object; a size of 0 is one of 1.
fn layout(size: usize, align: usize) -> crate::error::Result<Layout> {
    Layout::from_size_align(size.max(1), align).map_err(|_| {
        Failure::argument(format!("{size} bytes aligned to {align} are no possible object"))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_temporary_allocate(
    temporary: *mut farheap_temporary,
    size: usize,
    align: usize,
) -> *mut c_void {
    value(ptr::null_mut(), || {
        // SAFETY: the caller does not free the handle during the call.
        let object = unsafe { handle::get(temporary) }?;
        let block = object.allocate(layout(size, align)?).map_err(|_| {
            let message = format!("no temporary memory for {size} bytes");
            Failure::new(FARHEAP_E_OUT_OF_MEMORY, message)
        })?;
        Ok(block.as_ptr().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_temporary_deallocate(
    temporary: *mut farheap_temporary,
    ptr: *mut c_void,
    size: usize,
    align: usize,
) -> farheap_status {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else { return FARHEAP_OK };
    call(|| {
        // SAFETY: the caller does not free the handle during the call.
        let object = unsafe { handle::get(temporary) }?;
        let layout = layout(size, align)?;
        // SAFETY: a block of this allocator and size, as the caller promises.
        unsafe { object.deallocate(block, layout) };
        Ok(())
    })
}
