//! Panics that a test expects of the code it tests: without a back trace of fifty lines, behind which
//! nobody finds what failed.

use std::cell::Cell;
use std::sync::Once;

thread_local! {
    /// Part of the message of the panic that this thread is to meet.
    static EXPECTED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// As long as it lives, panics of its thread that say what is expected are not told of.
#[must_use]
pub(crate) struct ExpectedPanic(());

impl ExpectedPanic {
    /// Expects panics with `part` in their message.
    pub(crate) fn saying(part: &'static str) -> ExpectedPanic {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let tell = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let said = info.payload();
                let said = (said.downcast_ref::<&str>().copied())
                    .or_else(|| said.downcast_ref::<String>().map(String::as_str));
                let is_expected = |part| said.is_some_and(|said| said.contains(part));
                if !EXPECTED.get().is_some_and(is_expected) {
                    tell(info);
                }
            }));
        });
        EXPECTED.set(Some(part));
        ExpectedPanic(())
    }
}

impl Drop for ExpectedPanic {
    fn drop(&mut self) {
        EXPECTED.set(None);
    }
}
