//! The process's far heap: start, stop, hints, statistics.

#![expect(unsafe_code, reason = "uses the caller's pointers")]

use crate::abi::{self, FARHEAP_ABI_VERSION};
use crate::config::{FARHEAP_NONE, farheap_config, overlay, parse};
use crate::error::{
    Failure, Result, call, check_out, farheap_status, slice, text, write, write_sized,
};
use crate::handle::{self, methods, opaque};
use crate::manager::farheap_manager;
use crate::scope::farheap_placement;
use crate::stats::{farheap_stats, farheap_usage};
use farheap::region::{Advice, Latencies, Latency};
use farheap::{ByteCount, Heap};
use std::ffi::{c_char, c_void};

opaque! {
    /// A handle of the far heap.
    farheap_heap = 1: Heap
}

/// Advice of a program about its accesses.
pub type farheap_advice = u32;

pub const FARHEAP_ADVICE_NORMAL: farheap_advice = 0;
pub const FARHEAP_ADVICE_RANDOM: farheap_advice = 1;
pub const FARHEAP_ADVICE_SEQUENTIAL: farheap_advice = 2;
pub const FARHEAP_ADVICE_WILL_NEED: farheap_advice = 3;
pub const FARHEAP_ADVICE_COLD: farheap_advice = 4;

/// A range of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farheap_range {
    pub ptr: *const c_void,
    pub len: usize,
}

/// How long events of one kind have taken.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct farheap_latency {
    pub count: u64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p99_9_ns: u64,
    pub max_ns: u64,
}

/// Times of the steps in a heap or a collective.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct farheap_latencies {
    pub size: usize,
    pub fault: farheap_latency,
    pub read: farheap_latency,
    pub write: farheap_latency,
    pub evict: farheap_latency,
}

/// Latencies as C sees them.
pub(crate) fn latencies(of: &Latencies) -> farheap_latencies {
    let latency = |of: &Latency| farheap_latency {
        count: of.count,
        p50_ns: of.p50,
        p90_ns: of.p90,
        p99_ns: of.p99,
        p99_9_ns: of.p99_9,
        max_ns: of.max,
    };
    farheap_latencies {
        size: size_of::<farheap_latencies>(),
        fault: latency(&of.fault),
        read: latency(&of.read),
        write: latency(&of.write),
        evict: latency(&of.evict),
    }
}

pub(crate) fn advice(advice: farheap_advice) -> Result<Advice> {
    Ok(match advice {
        FARHEAP_ADVICE_NORMAL => Advice::Normal,
        FARHEAP_ADVICE_RANDOM => Advice::Random,
        FARHEAP_ADVICE_SEQUENTIAL => Advice::Sequential,
        FARHEAP_ADVICE_WILL_NEED => Advice::WillNeed,
        FARHEAP_ADVICE_COLD => Advice::Cold,
        other => return Err(Failure::argument(format!("{other} is no advice"))),
    })
}

/// Ranges as the library takes them.
///
/// # Safety
/// As for [`slice`].
pub(crate) unsafe fn ranges(first: *const farheap_range, count: usize) -> Result<Vec<*const [u8]>> {
    // SAFETY: as the caller promises.
    let ranges = unsafe { slice(first, count, "the ranges") }?;
    Ok(ranges.iter().map(|range| bytes(range.ptr, range.len)).collect())
}

/// A range as the library takes it.
pub(crate) fn bytes(ptr: *const c_void, len: usize) -> *const [u8] {
    std::ptr::slice_from_raw_parts(ptr.cast(), len)
}

fn give(heap: Heap, out: *mut *mut farheap_heap) -> Result<()> {
    let handle = handle::create::<farheap_heap>(heap.clone()).inspect_err(|_| {
        // Nobody could stop it: there is no handle.
        let _ = heap.shutdown();
    })?;
    // SAFETY: checked by the caller, before anything was started.
    unsafe { write(out, handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_abi(
    abi: u32,
    config: *const c_char,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        abi::check(abi)?;
        check_out(out)?;
        // SAFETY: NULL or a string, as the caller promises.
        give(unsafe { parse(Heap::builder(), config) }?.start()?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start(
    config: *const c_char,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { farheap_start_abi(FARHEAP_ABI_VERSION, config, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_config_abi(
    abi: u32,
    config: *const farheap_config,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        abi::check(abi)?;
        check_out(out)?;
        // SAFETY: NULL or a structure, as the caller promises.
        give(unsafe { overlay(Heap::builder(), config) }?.start()?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_config(
    config: *const farheap_config,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { farheap_start_config_abi(FARHEAP_ABI_VERSION, config, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_env_abi(
    abi: u32,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        abi::check(abi)?;
        check_out(out)?;
        give(Heap::builder().from_env()?.start()?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_env(out: *mut *mut farheap_heap) -> farheap_status {
    // SAFETY: as the caller promises.
    unsafe { farheap_start_env_abi(FARHEAP_ABI_VERSION, out) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_under(
    manager: *mut farheap_manager,
    config: *const c_char,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = unsafe { handle::get(manager) }?;
        // SAFETY: NULL or a string, as the caller promises.
        let builder = unsafe { parse(Heap::builder(), config) }?;
        give(builder.manager(&manager.manager).start()?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_start_config_under(
    manager: *mut farheap_manager,
    config: *const farheap_config,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let manager = unsafe { handle::get(manager) }?;
        // SAFETY: NULL or a structure, as the caller promises.
        let builder = unsafe { overlay(Heap::builder(), config) }?;
        give(builder.manager(&manager.manager).start()?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_add_tier(
    heap: *mut farheap_heap,
    name: *const c_char,
    config: *const c_char,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: not freed during the call, as the caller promises.
        let heap = unsafe { handle::get(heap) }?;
        // SAFETY: NULL or a string, as the caller promises.
        let name = unsafe { text(name, "the name") }?;
        // SAFETY: as above.
        let tier = unsafe { parse(Heap::builder(), config) }?;
        give(heap.add_tier(name, tier)?, out)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_find_tier(
    name: *const c_char,
    out: *mut *mut farheap_heap,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        // SAFETY: NULL or a string, as the caller promises.
        let name = unsafe { text(name, "the name") }?;
        let found = Heap::tiers().into_iter().find(|heap| heap.name() == name);
        let handle = handle::create::<farheap_heap>(found.ok_or(farheap::Error::NotRunning)?)?;
        // SAFETY: writable, as the caller promises.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_check_config(config: *const c_char) -> farheap_status {
    // SAFETY: NULL or a string, as the caller promises.
    call(|| Ok(unsafe { parse(Heap::builder(), config) }?.limits().map(drop)?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_running(out: *mut *mut farheap_heap) -> farheap_status {
    call(|| {
        check_out(out)?;
        if handle::is_forked_child() {
            let message = "the heap of the parent does not exist in a forked child";
            return Err(Failure::new(crate::error::FARHEAP_E_FORKED, message));
        }
        let heap = Heap::running().ok_or(farheap::Error::NotRunning)?;
        let handle = handle::create::<farheap_heap>(heap)?;
        // SAFETY: writable, as the caller promises.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_heap_free(heap: *mut farheap_heap) -> farheap_status {
    if heap.is_null() {
        return crate::error::FARHEAP_OK;
    }
    call(|| handle::take(heap).map(drop))
}

methods! { farheap_heap: Heap;
    farheap_shutdown(heap) { Ok(heap.shutdown()?) }

    farheap_prefetch(heap, ptr: *const c_void, len: usize) {
        Ok(heap.region().advise(&[bytes(ptr, len)], Advice::WillNeed)?)
    }

    farheap_prefetch_many(heap, first: *const farheap_range, count: usize) {
        // SAFETY: NULL or as many ranges, as the caller promises.
        let ranges = unsafe { ranges(first, count) }?;
        Ok(heap.region().advise(&ranges, Advice::WillNeed)?)
    }

    farheap_evict(heap, ptr: *const c_void, len: usize) {
        Ok(heap.region().advise(&[bytes(ptr, len)], Advice::PageOutNow)?)
    }

    farheap_evict_all(heap) { Ok(heap.region().evict_all()?) }

    farheap_pin(heap, ptr: *const c_void, len: usize) {
        Ok(heap.region().pin(bytes(ptr, len)).map(std::mem::forget)?)
    }

    farheap_unpin(heap, ptr: *const c_void, len: usize) {
        Ok(heap.region().unpin(bytes(ptr, len))?)
    }

    farheap_discard(heap, ptr: *mut c_void, len: usize) {
        // SAFETY: nobody needs the contents, as the caller promises.
        Ok(unsafe { heap.region().discard(bytes(ptr, len).cast_mut()) }?)
    }

    farheap_advise(heap, ptr: *const c_void, len: usize, advice: farheap_advice) {
        let advice = self::advice(advice)?;
        Ok(heap.region().advise(&[bytes(ptr, len)], advice)?)
    }

    farheap_set_limit(heap, limit: u64) { Ok(heap.set_limit(ByteCount(limit))?) }

    farheap_set_far_limit(heap, limit: u64) { Ok(heap.region().set_limit(ByteCount(limit))?) }

    farheap_purge(heap) {
        heap.purge();
        Ok(())
    }

    farheap_heap_stats(heap, out: *mut farheap_stats) {
        let stats = farheap_stats::new(heap.usage().allocated_bytes.get(), &heap.stats());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { stats.write(out) }
    }

    farheap_heap_latencies(heap, out: *mut farheap_latencies) {
        let latencies = latencies(&heap.region().latencies());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { write_sized(out, &latencies, size_of::<farheap_latencies>()) }
    }

    farheap_threshold(heap, out: *mut u64) {
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write(out, heap.threshold().map_or(FARHEAP_NONE, ByteCount::get)) }
    }

    farheap_heap_placement(heap, out: *mut farheap_placement) {
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write(out, heap.tier().to_bits()) }
    }

    farheap_heap_usage(heap, out: *mut farheap_usage) {
        let usage = farheap_usage::new(&heap.usage());
        // SAFETY: NULL or sized, as the caller promises.
        unsafe { usage.write(out) }
    }

    farheap_serves_kernel_faults(heap, out: *mut bool) {
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write(out, heap.region().serves_kernel_faults()) }
    }
}
