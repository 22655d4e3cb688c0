//! SIGBUS: one handler in front of the host's, for threads that serve their own faults.
//!
//! [`install`] puts the handler in place once per process and keeps what was there before;
//! [`chain`] passes on what is not ours. See `sigaction(2)`, `signal-safety(7)`.
#![expect(unsafe_code, reason = "installs a signal handler and reads its context")]

use super::refused;
use super::signals::all_but_raised;
use crate::base::error::Result;
use nix::errno::Errno;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, Signal, sigaction};
use std::sync::OnceLock;

/// Why a thread gets a SIGBUS that names an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BusCause {
    /// Nothing is mapped there, or it is write-protected (`BUS_ADRERR`).
    Missing,
    /// It cannot be read any more: the machine's memory has failed, or the kernel was told to say so
    /// (`BUS_MCEERR_AR`).
    Failed,
    /// The same, of memory that this thread has not touched (`BUS_MCEERR_AO`).
    FailedElsewhere,
}

impl BusCause {
    /// `None` for a signal that somebody sent, or that is about something else: it has no address,
    /// or none that we could do anything about.
    fn of(code: libc::c_int) -> Option<BusCause> {
        match code {
            libc::BUS_ADRERR => Some(BusCause::Missing),
            libc::BUS_MCEERR_AR => Some(BusCause::Failed),
            libc::BUS_MCEERR_AO => Some(BusCause::FailedElsewhere),
            _ => None,
        }
    }
}

/// Fields of a SIGBUS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BusFault {
    /// The address that it is about.
    pub(crate) addr: usize,
    pub(crate) cause: BusCause,
    /// True if it was written. Where the machine does not say, a write is assumed.
    pub(crate) write: bool,
}

/// Serves a fault; `false`: it is not ours.
type Serve = fn(BusFault) -> bool;

static SERVE: OnceLock<Serve> = OnceLock::new();
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Puts `serve` in front of the process's SIGBUS handler. The first call counts; `serve` runs in
/// signal context, on the stack of the thread that faulted. Signals are blocked meanwhile: a handler
/// that touched far memory in the middle of it would raise a blocked SIGBUS, which kills.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the kernel refuses.
pub(crate) fn install(serve: Serve) -> Result<()> {
    if SERVE.set(serve).is_err() {
        return Ok(());
    }
    let action =
        SigAction::new(SigHandler::SigAction(on_sigbus), SaFlags::empty(), all_but_raised());
    // SAFETY: the handler is async-signal-safe as `serve` promises; what was there before is called
    // as the kernel would have called it.
    let before = unsafe { sigaction(Signal::SIGBUS, &action) }.map_err(refused("sigaction"))?;
    // Only this thread gets here, once.
    let _ = BEFORE.set(before.into());
    Ok(())
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let saved = Errno::last_raw();
    // SAFETY: the kernel passes a valid `siginfo_t` for the call's duration.
    let told = unsafe { &*info };
    let served = BusCause::of(told.si_code).is_some_and(|cause| {
        // SAFETY: a SIGBUS with one of these codes has an address (sigaction(2)).
        let addr = unsafe { told.si_addr() } as usize;
        let fault = BusFault { addr, cause, write: is_write(context) };
        SERVE.get().is_some_and(|serve| serve(fault))
    });
    if !served {
        chain(signal, info, context);
    }
    // What was interrupted finds its errno unchanged.
    Errno::set_raw(saved);
}

/// True if the access that faulted was a write: bit 1 of the page-fault error code.
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
        // SAFETY: as in `on_sigbus`.
        let code = unsafe { (*info).si_code };
        by_default(signal, is_of_instruction(code), handler == libc::SIG_IGN);
        return;
    }
    mask_as_for(before, signal, context);
    if before.sa_flags & libc::SA_SIGINFO != 0 {
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

/// True if the thread that got a SIGBUS raises it again when it goes on.
fn is_of_instruction(code: libc::c_int) -> bool {
    code > 0 && code != libc::BUS_MCEERR_AO && code != libc::SI_KERNEL
}

/// The default action, or none where the signal is ignored, which one of an instruction cannot be.
fn by_default(signal: libc::c_int, is_of_instruction: bool, is_ignored: bool) {
    if is_ignored && !is_of_instruction {
        return;
    }
    // SAFETY: restores the default action.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    if !is_of_instruction {
        // SAFETY: the signal is blocked until the handler returns, and then ends the process.
        unsafe { libc::raise(signal) };
    }
}

/// Blocks what the kernel would have blocked for the handler `before` alone.
fn mask_as_for(before: &libc::sigaction, signal: libc::c_int, context: *mut libc::c_void) {
    const SIGNALS: std::ops::RangeInclusive<libc::c_int> = 1..=64;
    // SAFETY: with SA_SIGINFO the kernel passes a valid `ucontext_t`.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let mut mask = context.uc_sigmask;
    for other in SIGNALS {
        // SAFETY: a valid set and a valid signal.
        let is_in_its_mask = unsafe { libc::sigismember(&raw const before.sa_mask, other) } == 1;
        let is_itself = other == signal && before.sa_flags & libc::SA_NODEFER == 0;
        if is_in_its_mask || is_itself {
            // SAFETY: a valid set and a valid signal.
            unsafe { libc::sigaddset(&raw mut mask, other) };
        }
    }
    let none = std::ptr::null_mut();
    // SAFETY: a valid set; the old one is not asked for, and comes back with the handler's return.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, none) };
}
