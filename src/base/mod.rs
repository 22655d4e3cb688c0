//! Foundations: units, errors, locks. Uses nothing of the crate.

pub(crate) mod counter;
pub(crate) mod deadline;
pub(crate) mod error;
pub(crate) mod gate;
pub(crate) mod local;
#[cfg(not(loom))]
pub(crate) mod settings;
mod size;
#[cfg(not(loom))]
pub(crate) mod statistics;
pub(crate) mod sync;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod units;
pub(crate) mod visited;

/// Asserts on a hot path: on in debug builds, in tests and with the `strict` feature.
macro_rules! strict_assert {
    ($($arg:tt)*) => {
        if cfg!(any(debug_assertions, feature = "strict")) {
            assert!($($arg)*);
        }
    };
}
pub(crate) use strict_assert;
