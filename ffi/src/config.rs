//! Options as a C structure.

#![expect(unsafe_code, reason = "reads the caller's structure")]

use crate::error::{Failure, Result, text};
use farheap::config::Builder;
use farheap::{ByteCount, Config};
use std::ffi::c_char;
use std::mem::{MaybeUninit, offset_of};
use std::time::Duration;

/// On, off, or what the library does by itself.
pub type farheap_switch = u32;

pub const FARHEAP_DEFAULT: farheap_switch = 0;
pub const FARHEAP_ON: farheap_switch = 1;
pub const FARHEAP_OFF: farheap_switch = 2;

/// A size that means "none"; for `threshold`.
pub const FARHEAP_NONE: u64 = u64::MAX;

/// The options, with the names of `FARHEAP_CONF`; what is zero has its default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct farheap_config {
    pub size: usize,
    pub limit: u64,
    pub limit_percent: u32,
    pub handlers: u32,
    pub device: *const c_char,
    pub dir: *const c_char,
    pub capacity: u64,
    pub page: u64,
    pub threshold: u64,
    pub span: u64,
    pub deadline_ms: u64,
    pub io: *const c_char,
    pub install: *const c_char,
    pub user_mode: *const c_char,
    pub mode: *const c_char,
    pub wipe: *const c_char,
    pub checksum: farheap_switch,
    pub readahead: farheap_switch,
    pub encrypt: farheap_switch,
    pub dump: farheap_switch,
    // Since version 2 of the structure:
    pub overwrite: farheap_switch,
    pub poll_us: u32,
    // Since version 3:
    pub reserve: farheap_switch,
}

/// Bytes of the first version of the structure: the least that a caller has.
const SIZE_MIN: usize = offset_of!(farheap_config, overwrite);

/// For `poll_us`: never.
pub const FARHEAP_NO_POLL: u32 = u32::MAX;

pub(crate) fn switch(name: &str, value: farheap_switch) -> Result<Option<bool>> {
    match value {
        FARHEAP_DEFAULT => Ok(None),
        FARHEAP_ON => Ok(Some(true)),
        FARHEAP_OFF => Ok(Some(false)),
        other => Err(Failure::argument(format!("{name}: {other} is neither on nor off"))),
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
    // SAFETY: as the caller promises.
    let builder = unsafe { overlay_texts(builder, &config) }?;
    overlay_numbers(builder, &config)
}

/// # Safety
/// The strings of `config` are NULL or strings.
unsafe fn overlay_texts(mut builder: Builder, config: &farheap_config) -> Result<Builder> {
    if !config.device.is_null() {
        // SAFETY: as the caller promises.
        builder = builder.device(unsafe { text(config.device, "device") }?);
    }
    if !config.dir.is_null() {
        // SAFETY: as the caller promises.
        builder = builder.dir(unsafe { text(config.dir, "dir") }?);
    }
    let words = [
        ("io", config.io),
        ("install", config.install),
        ("user_mode", config.user_mode),
        ("mode", config.mode),
        ("wipe", config.wipe),
    ];
    for (key, word) in words {
        if word.is_null() {
            continue;
        }
        // SAFETY: as the caller promises.
        let word = unsafe { text(word, key) }?;
        builder = builder.parse(&format!("{key}:\"{}\"", word.replace('"', "\"\"")))?;
    }
    Ok(builder)
}

fn overlay_numbers(mut builder: Builder, config: &farheap_config) -> Result<Builder> {
    if config.limit != 0 && config.limit_percent != 0 {
        return Err(Failure::argument("limit and limit_percent are both set"));
    }
    if config.limit != 0 {
        builder = builder.limit(ByteCount(config.limit));
    }
    if config.limit_percent != 0 {
        // What does not fit is out of range, which `build` says.
        builder = builder.limit_percent(u8::try_from(config.limit_percent).unwrap_or(u8::MAX));
    }
    if config.handlers != 0 {
        builder = builder.handlers(u16::try_from(config.handlers).unwrap_or(u16::MAX));
    }
    if config.capacity != 0 {
        builder = builder.capacity(ByteCount(config.capacity));
    }
    if config.page != 0 {
        builder = builder.page(ByteCount(config.page));
    }
    if config.threshold == FARHEAP_NONE {
        builder = builder.threshold(None);
    } else if config.threshold != 0 {
        builder = builder.threshold(ByteCount(config.threshold));
    }
    if config.span != 0 {
        builder = builder.span(ByteCount(config.span));
    }
    if config.deadline_ms != 0 {
        builder = builder.deadline(Duration::from_millis(config.deadline_ms));
    }
    if let Some(on) = switch("checksum", config.checksum)? {
        builder = builder.checksum(on);
    }
    if let Some(on) = switch("readahead", config.readahead)? {
        builder = builder.readahead(on);
    }
    if let Some(on) = switch("encrypt", config.encrypt)? {
        builder = builder.encrypt(on);
    }
    if let Some(on) = switch("dump", config.dump)? {
        builder = builder.dump(on);
    }
    if let Some(on) = switch("overwrite", config.overwrite)? {
        builder = builder.overwrite(on);
    }
    if let Some(on) = switch("reserve", config.reserve)? {
        builder = builder.reserve(on);
    }
    if config.poll_us == FARHEAP_NO_POLL {
        builder = builder.poll(Duration::ZERO);
    } else if config.poll_us != 0 {
        builder = builder.poll(Duration::from_micros(config.poll_us.into()));
    }
    Ok(builder)
}

/// Overlays a text on a builder; NULL changes nothing.
///
/// # Safety
/// `config` is NULL or a string.
pub(crate) unsafe fn parse(builder: Builder, config: *const c_char) -> Result<Config> {
    if config.is_null() {
        return Ok(builder.build()?);
    }
    // SAFETY: as the caller promises.
    let config = unsafe { text(config, "the configuration") }?;
    let builder = if config.trim().is_empty() { builder } else { builder.parse(config)? };
    Ok(builder.build()?)
}
