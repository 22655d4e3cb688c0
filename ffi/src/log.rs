//! Messages of the library, to a callback of the host: a logger of Rust's `log` that calls it.

#![expect(unsafe_code, reason = "calls the caller back")]

use crate::error::{FARHEAP_E_IN_USE, Failure, Result, call, farheap_status};
use crate::manager::Userdata;
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// How bad it is.
pub type farheap_log_level = u32;

pub const FARHEAP_LOG_ERROR: farheap_log_level = 1;
pub const FARHEAP_LOG_WARNING: farheap_log_level = 2;
pub const FARHEAP_LOG_OTHER: farheap_log_level = 3;

/// Told what the library says.
pub type farheap_log = Option<
    unsafe extern "C" fn(userdata: *mut c_void, level: farheap_log_level, text: *const c_char),
>;

type Told = unsafe extern "C" fn(*mut c_void, farheap_log_level, *const c_char);

/// The present callback, and earlier ones.
struct LogCallback {
    told: Option<Told>,
    userdata: Userdata,
    /// Kept where checkers of leaks find it.
    _before: *mut LogCallback,
}

/// The callback; null: none. No lock, which a forked child could find taken: what is replaced stays for ever.
static HOST: AtomicPtr<LogCallback> = AtomicPtr::new(ptr::null_mut());

struct Logger;

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // SAFETY: null, or a box that is never freed, and that others only read.
        let host = unsafe { HOST.load(Ordering::Acquire).as_ref() };
        let Some((told, userdata)) = host.and_then(|host| Some((host.told?, &host.userdata)))
        else {
            return;
        };
        let level = match record.level() {
            Level::Error => FARHEAP_LOG_ERROR,
            Level::Warn => FARHEAP_LOG_WARNING,
            _ => FARHEAP_LOG_OTHER,
        };
        let text: String = record.args().to_string().replace('\0', "");
        let text = CString::new(text).expect("zeros were taken out");
        // SAFETY: a function that may be called from any thread with this, as the caller promises, and a string that
        // lives as long as the call.
        unsafe { told(userdata.get(), level, text.as_ptr()) };
    }

    fn flush(&self) {}
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_set_log(
    log: farheap_log,
    userdata: *mut c_void,
) -> farheap_status {
    call(|| set(log, Userdata(userdata)))
}

fn set(log: farheap_log, userdata: Userdata) -> Result<()> {
    /// True if the logger is this one.
    static IS_SET: AtomicBool = AtomicBool::new(false);
    let Some(told) = log else {
        if IS_SET.load(Ordering::Acquire) {
            log::set_max_level(LevelFilter::Off);
            publish(None, userdata);
        }
        return Ok(());
    };
    if !IS_SET.load(Ordering::Acquire) {
        let taken = "the program has a logger of Rust's `log`, which is told what the library says";
        log::set_logger(&Logger).map_err(|_| Failure::new(FARHEAP_E_IN_USE, taken.to_owned()))?;
        IS_SET.store(true, Ordering::Release);
    }
    publish(Some(told), userdata);
    log::set_max_level(LevelFilter::Info);
    Ok(())
}

/// Makes the logger call `told` from now on.
fn publish(told: Option<Told>, userdata: Userdata) {
    let _before = HOST.load(Ordering::Acquire);
    HOST.store(Box::into_raw(Box::new(LogCallback { told, userdata, _before })), Ordering::Release);
}
