//! SIGBUS: one handler in front of the host's, for threads that serve their own faults.
//!
//! [`install`] puts the handler in place once per process and keeps what was there before;
//! [`chain`] passes on what is not ours. See `sigaction(2)`, `signal-safety(7)`.
#![expect(unsafe_code, reason = "installs a signal handler and reads its context")]

use super::os_error;
use crate::base::error::Result;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// What a SIGBUS says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BusFault {
    /// The address that was touched.
    pub(crate) addr: usize,
    /// Whether it was written. Where the machine does not say, a write is assumed.
    pub(crate) write: bool,
}

/// Serves a fault; `false`: it is not ours.
type Serve = fn(BusFault) -> bool;

static SERVE: OnceLock<Serve> = OnceLock::new();
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Puts `serve` in front of the process's SIGBUS handler. The first call counts; `serve` runs in
/// signal context, with SIGBUS blocked, on the stack of the thread that faulted.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the kernel refuses.
pub(crate) fn install(serve: Serve) -> Result<()> {
    if SERVE.set(serve).is_err() {
        return Ok(());
    }
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let action = action.as_mut_ptr();
    // SAFETY: zero is a valid `sigaction`: no flags, an empty mask, the default handler.
    let action = unsafe { &mut *action };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both structures live during the call; the handler is async-signal-safe as `serve`
    // promises.
    let rc = unsafe { libc::sigaction(libc::SIGBUS, action, before.as_mut_ptr()) };
    if rc != 0 {
        return Err(os_error("sigaction"));
    }
    // SAFETY: sigaction(2) filled it in.
    let before = unsafe { before.assume_init() };
    // Only this thread gets here, once.
    let _ = BEFORE.set(before);
    Ok(())
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: takes nothing and returns the address of this thread's errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: errno's address is valid as long as the thread is.
    let saved = unsafe { *errno };
    // SAFETY: the kernel passes a valid `siginfo_t` for the call's duration.
    let told = unsafe { &*info };
    // SAFETY: a SIGBUS has an address.
    let addr = unsafe { told.si_addr() } as usize;
    let fault = BusFault { addr, write: is_write(context) };
    let served = SERVE.get().is_some_and(|serve| serve(fault));
    if !served {
        chain(signal, info, context);
    }
    // SAFETY: as above; what was interrupted finds its errno unchanged.
    unsafe { *errno = saved };
}

/// Whether the access that faulted was a write: bit 1 of the page-fault error code.
#[cfg(target_arch = "x86_64")]
fn is_write(context: *mut libc::c_void) -> bool {
    // SAFETY: with SA_SIGINFO the kernel passes a valid `ucontext_t`.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    context.uc_mcontext.gregs[libc::REG_ERR as usize] & 2 != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn is_write(_context: *mut libc::c_void) -> bool {
    true
}

/// Does what the process would have done without us.
fn chain(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    let handler = before.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // A SIGBUS of an instruction cannot be ignored: back to the default, and the instruction
        // faults again.
        // SAFETY: restores the default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if before.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: with SA_SIGINFO the field holds a function of this type.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO the field holds a function of this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
