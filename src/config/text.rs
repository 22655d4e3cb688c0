//! The text form of a configuration: `key:value` entries separated by commas.
//!
//! [`overlay`] parses a text onto [`Options`]; [`print()`] writes one. The rules are in the
//! documentation of [`config`](super).

use super::options::{Options, invalid, unknown};
use super::value::ENV;
use crate::base::error::Result;
use std::fmt;

/// Applies the entries of `text` to `options`.
pub(super) fn overlay(options: &mut Options, text: &str) -> Result<()> {
    let mut seen: Vec<&str> = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, after_colon) = split_key(rest)?;
        if !Options::NAMES.contains(&name) {
            return Err(unknown(name));
        }
        if seen.contains(&name) {
            return Err(invalid(name, "is given twice"));
        }
        seen.push(name);
        let (value, after_entry) = split_value(name, after_colon)?;
        options.set(name, &value)?;
        rest = after_entry;
    }
    // A text that names one of `device` and `dir` replaces the other one, set before it.
    match (seen.contains(&"device"), seen.contains(&"dir")) {
        (true, false) => options.dir = None,
        (false, true) => options.device = None,
        _ => {}
    }
    Ok(())
}

/// Splits `key:rest`.
fn split_key(text: &str) -> Result<(&str, &str)> {
    let entry = text.split(',').next().unwrap_or(text);
    if let Some((name, _)) = entry.split_once(':') {
        return Ok((name.trim(), &text[name.len() + 1..]));
    }
    match entry.trim() {
        "" => Err(invalid(ENV, "has an empty entry: a comma too many")),
        name if Options::NAMES.contains(&name) => {
            Err(invalid(name, format!("has no value; write `{name}:VALUE`")))
        }
        name => match name.split_once('=') {
            Some((key, value)) if Options::NAMES.contains(&key.trim()) => {
                Err(invalid(key.trim(), format!("takes a colon; write `{}:{value}`", key.trim())))
            }
            _ => Err(unknown(name)),
        },
    }
}

/// Splits a value, quoted or not, from the entries that follow it.
fn split_value<'a>(name: &str, text: &'a str) -> Result<(String, &'a str)> {
    let text = text.trim_start();
    let (value, rest) = match text.strip_prefix('"') {
        Some(quoted) => split_quoted(name, quoted)?,
        None => {
            let (value, rest) = text.split_at(text.find(',').unwrap_or(text.len()));
            (value.trim().to_owned(), rest)
        }
    };
    let rest = rest.trim_start();
    if value.is_empty() {
        return Err(invalid(name, "the value is empty"));
    }
    match rest.strip_prefix(',') {
        Some(next) if next.trim().is_empty() => {
            Err(invalid(ENV, "has an empty entry: a comma too many"))
        }
        Some(next) => Ok((value, next.trim_start())),
        None if rest.is_empty() => Ok((value, rest)),
        None => {
            Err(invalid(name, format!("expected a comma after the quoted value, not `{rest}`")))
        }
    }
}

/// Reads a quoted value whose opening quote is gone; `""` in it stands for one quote.
fn split_quoted<'a>(name: &str, text: &'a str) -> Result<(String, &'a str)> {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let Some((part, after)) = rest.split_once('"') else {
            return Err(invalid(name, "the closing quote is missing"));
        };
        value.push_str(part);
        match after.strip_prefix('"') {
            Some(inside) => {
                value.push('"');
                rest = inside;
            }
            None => return Ok((value, after)),
        }
    }
}

/// Writes every option that has a text.
pub(super) fn print(options: &Options, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut comma = "";
    for (name, text) in options.texts() {
        write!(f, "{comma}{name}:{}", quote(&text))?;
        comma = ",";
    }
    Ok(())
}

/// Quotes a value that would not be read back as it is.
fn quote(value: &str) -> String {
    if value.contains(',') || value.starts_with('"') || value.trim() != value {
        return format!("\"{}\"", value.replace('"', "\"\""));
    }
    value.to_owned()
}
