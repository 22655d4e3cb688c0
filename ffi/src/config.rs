//! Options as a C structure, which follows from the library's table of options.

#![expect(unsafe_code, reason = "reads the caller's structure")]

use crate::error::{Failure, Result, text};
use farheap::config::Builder;
use farheap::for_options;
use std::ffi::c_char;
use std::mem::{MaybeUninit, offset_of};

/// On, off, or what the library does by itself.
pub type farheap_switch = u32;

pub const FARHEAP_DEFAULT: farheap_switch = 0;
pub const FARHEAP_ON: farheap_switch = 1;
pub const FARHEAP_OFF: farheap_switch = 2;

/// A number that means "none": no size goes far by itself, a handler does not poll.
pub const FARHEAP_NONE: u64 = u64::MAX;

pub(crate) fn switch(name: &str, value: farheap_switch) -> Result<Option<bool>> {
    match value {
        FARHEAP_DEFAULT => Ok(None),
        FARHEAP_ON => Ok(Some(true)),
        FARHEAP_OFF => Ok(Some(false)),
        other => Err(Failure::argument(format!("{name}: {other} is neither on nor off"))),
    }
}

/// A field's type, by its kind in the table of options.
macro_rules! field {
    (switch) => { farheap_switch };
    (text) => { *const c_char };
    ($number:ident) => { u64 };
}

/// A field as the text of its option; `None` for zero or NULL, which is the default.
macro_rules! field_text {
    (switch $name:expr, $value:expr, $none:expr) => {
        switch($name, $value)?.map(|on| if on { "on" } else { "off" }.to_owned())
    };
    (text $name:expr, $value:expr, $none:expr) => {
        if $value.is_null() {
            None
        } else {
            // SAFETY: a string, as the caller promises.
            Some(unsafe { text($value, $name) }?.to_owned())
        }
    };
    (millis $name:expr, $value:expr, $none:expr) => {
        number($value, "ms", $none)
    };
    (micros $name:expr, $value:expr, $none:expr) => {
        number($value, "us", $none)
    };
    ($number:ident $name:expr, $value:expr, $none:expr) => {
        number($value, "", $none)
    };
}

macro_rules! structure {
    ($(
        $(#[$doc:meta])*
        $name:ident: $kind:ident($type:ty) $(or $none:literal)? = $default:expr, $brief:literal,
        { $part:ident c $c_type:ident $c_name:ident, $values:literal, $shown:literal, $when:literal };
    )*) => {
        /// The options; what is zero has its default.
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct farheap_config {
            pub size: usize,
            pub limit_percent: u64,
            $(pub $c_name: field!($c_type),)*
        }

        /// Overlays the fields that are set on a builder.
        ///
        /// # Safety
        /// The strings of `config` are NULL or strings.
        unsafe fn overlay_fields(mut builder: Builder, config: &farheap_config) -> Result<Builder> {
            $(
                let text = field_text!(
                    $c_type stringify!($c_name), config.$c_name, [$($none)?].first().copied()
                );
                if let Some(text) = text {
                    builder = builder.set(stringify!($name), &text)?;
                }
            )*
            Ok(builder)
        }

        /// The fields that follow from the table: type in C, name, offset, and what they set.
        #[doc(hidden)]
        #[must_use]
        pub fn fields() -> Vec<(&'static str, &'static str, usize, &'static str)> {
            vec![$((
                match stringify!($c_type) {
                    "switch" => "farheap_switch ",
                    "text" => "const char *",
                    _ => "uint64_t ",
                },
                stringify!($c_name),
                offset_of!(farheap_config, $c_name),
                $brief,
            )),*]
        }
    };
}

for_options!(structure);

/// Bytes that every caller's structure has: fields that it lacks at the end have their defaults.
const SIZE_MIN: usize = offset_of!(farheap_config, limit);

/// A number with its unit; `None` for zero.
fn number(value: u64, unit: &str, none: Option<&str>) -> Option<String> {
    match (value, none) {
        (0, _) => None,
        (FARHEAP_NONE, Some(none)) => Some(none.to_owned()),
        _ => Some(format!("{value}{unit}")),
    }
}

/// Overlays a structure on a builder.
///
/// # Safety
/// `config` is NULL or a structure whose `size` is right, and its strings are strings.
pub(crate) unsafe fn overlay(builder: Builder, config: *const farheap_config) -> Result<Builder> {
    if config.is_null() {
        return Err(Failure::null("the configuration"));
    }
    // SAFETY: the structure begins with its size.
    let size = unsafe { config.cast::<usize>().read() };
    if !(SIZE_MIN..=1 << 16).contains(&size) {
        let message = format!("config.size is {size}: initialize with FARHEAP_CONFIG_INIT");
        return Err(Failure::argument(message));
    }
    // What an older caller's structure lacks has its default, which is zero.
    let mut known = MaybeUninit::<farheap_config>::zeroed();
    let len = size.min(size_of::<farheap_config>());
    // SAFETY: the caller's structure has `size` bytes, this one its own, and it is new.
    unsafe { config.cast::<u8>().copy_to_nonoverlapping(known.as_mut_ptr().cast(), len) };
    // SAFETY: zeros are a value of every field, and so is what a caller set.
    let config = unsafe { known.assume_init() };
    if config.limit != 0 && config.limit_percent != 0 {
        return Err(Failure::argument("limit and limit_percent are both set"));
    }
    // SAFETY: as the caller promises.
    let builder = unsafe { overlay_fields(builder, &config) }?;
    match config.limit_percent {
        0 => Ok(builder),
        percent => Ok(builder.set("limit", &format!("{percent}%"))?),
    }
}

/// Overlays a text on a builder; NULL changes nothing.
///
/// # Safety
/// `config` is NULL or a string.
pub(crate) unsafe fn parse(builder: Builder, config: *const c_char) -> Result<Builder> {
    if config.is_null() {
        return Ok(builder);
    }
    // SAFETY: as the caller promises.
    let config = unsafe { text(config, "the configuration") }?;
    Ok(if config.trim().is_empty() { builder } else { builder.parse(config)? })
}
