//! The text form of a configuration: `key:value` entries separated by commas.
//!
//! [`overlay`] parses a text onto a [`Builder`]; `Display` of [`Config`] writes one. The rules are
//! in the documentation of [`config`](super).

use super::{Builder, Config, Install, Io, Limit, Mode, UserMode, Wipe, invalid};
use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How alike two words must be for one to be suggested for the other, of 0 to 1: `pgae` and
/// `page` reach 0.93, `limit` and `dir` 0.51.
const LIKENESS_MIN: f64 = 0.75;

/// The name of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Limit,
    Device,
    Dir,
    Overwrite,
    Capacity,
    Reserve,
    Page,
    Handlers,
    Threshold,
    Span,
    Io,
    Install,
    Checksum,
    Deadline,
    Poll,
    UserMode,
    Readahead,
    Mode,
    Dump,
    Encrypt,
    Wipe,
}

/// Every option with its name, in the order in which they print.
const KEYS: &[(&str, Key)] = &[
    ("limit", Key::Limit),
    ("device", Key::Device),
    ("dir", Key::Dir),
    ("overwrite", Key::Overwrite),
    ("capacity", Key::Capacity),
    ("reserve", Key::Reserve),
    ("page", Key::Page),
    ("handlers", Key::Handlers),
    ("threshold", Key::Threshold),
    ("span", Key::Span),
    ("io", Key::Io),
    ("install", Key::Install),
    ("checksum", Key::Checksum),
    ("deadline", Key::Deadline),
    ("poll", Key::Poll),
    ("user_mode", Key::UserMode),
    ("readahead", Key::Readahead),
    ("mode", Key::Mode),
    ("dump", Key::Dump),
    ("encrypt", Key::Encrypt),
    ("wipe", Key::Wipe),
];

const IO_WORDS: &[(&str, Io)] = &[("auto", Io::Auto), ("uring", Io::Uring), ("sync", Io::Sync)];
const INSTALL_WORDS: &[(&str, Install)] =
    &[("auto", Install::Auto), ("copy", Install::Copy), ("move", Install::Move)];
const USER_MODE_WORDS: &[(&str, UserMode)] = &[
    ("auto", UserMode::Auto),
    ("far", UserMode::Far),
    ("require_kernel", UserMode::RequireKernel),
];
const MODE_WORDS: &[(&str, Mode)] = &[("handler", Mode::Handler), ("in_thread", Mode::InThread)];
const WIPE_WORDS: &[(&str, Wipe)] =
    &[("off", Wipe::Off), ("discard", Wipe::Discard), ("zero", Wipe::Zero)];
const SWITCH_WORDS: &[(&str, bool)] = &[("on", true), ("off", false)];

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        word_of(KEYS, *self)
    }
}

/// Applies the entries of `text` to `builder`.
pub(super) fn overlay(builder: &mut Builder, text: &str) -> Result<()> {
    let mut seen = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, after_colon) = split_key(rest)?;
        let key = look_up(KEYS, name).ok_or_else(|| unknown_key(name))?;
        if seen.contains(&key) {
            return Err(invalid(name, "is given twice"));
        }
        seen.push(key);
        let (value, after_entry) = split_value(key, after_colon)?;
        set(builder, key, &value)?;
        rest = after_entry;
    }
    settle_store(builder, &seen);
    Ok(())
}

/// Lets a text that names one of `device` and `dir` replace the other one, set before it.
fn settle_store(builder: &mut Builder, seen: &[Key]) {
    match (seen.contains(&Key::Device), seen.contains(&Key::Dir)) {
        (true, false) => builder.dir = None,
        (false, true) => builder.device = None,
        _ => {}
    }
}

/// Splits `key:rest`.
fn split_key(text: &str) -> Result<(&str, &str)> {
    let entry = text.split(',').next().unwrap_or(text);
    match entry.split_once(':') {
        Some((name, _)) => Ok((name.trim(), &text[name.len() + 1..])),
        None if entry.trim().is_empty() => {
            Err(invalid(super::ENV, "has an empty entry: a comma too many"))
        }
        None if look_up(KEYS, entry.trim()).is_some() => {
            Err(invalid(entry.trim(), format!("has no value; write `{}:VALUE`", entry.trim())))
        }
        None => Err(unknown_key(entry.trim())),
    }
}

/// Splits a value, quoted or not, from the entries that follow it.
fn split_value(key: Key, text: &str) -> Result<(String, &str)> {
    let text = text.trim_start();
    let (value, rest) = match text.strip_prefix('"') {
        Some(quoted) => split_quoted(key, quoted)?,
        None => {
            let (value, rest) = text.split_at(text.find(',').unwrap_or(text.len()));
            (value.trim().to_owned(), rest)
        }
    };
    let rest = rest.trim_start();
    if value.is_empty() {
        return Err(invalid(key, "the value is empty"));
    }
    match rest.strip_prefix(',') {
        Some(next) if next.trim().is_empty() => {
            Err(invalid(super::ENV, "has an empty entry: a comma too many"))
        }
        Some(next) => Ok((value, next.trim_start())),
        None if rest.is_empty() => Ok((value, rest)),
        None => Err(invalid(key, format!("expected a comma after the quoted value, not `{rest}`"))),
    }
}

/// Reads a quoted value whose opening quote is gone; `""` in it stands for one quote.
fn split_quoted(key: Key, text: &str) -> Result<(String, &str)> {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let Some((part, after)) = rest.split_once('"') else {
            return Err(invalid(key, "the closing quote is missing"));
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

/// Sets one option from its text.
fn set(builder: &mut Builder, key: Key, value: &str) -> Result<()> {
    match key {
        Key::Limit => builder.limit = parse_limit(value)?,
        Key::Device => builder.device = Some(PathBuf::from(value)),
        Key::Dir => builder.dir = Some(PathBuf::from(value)),
        Key::Overwrite => builder.overwrite = parse_word(key, SWITCH_WORDS, value)?,
        Key::Capacity => builder.capacity = Some(parse_size(key, value)?),
        Key::Reserve => builder.reserve = parse_word(key, SWITCH_WORDS, value)?,
        Key::Page => builder.page = parse_size(key, value)?,
        Key::Handlers => builder.handlers = parse_handlers(value)?,
        Key::Threshold => {
            builder.threshold = if value == "off" { None } else { Some(parse_size(key, value)?) };
        }
        Key::Span => builder.span = parse_size(key, value)?,
        Key::Io => builder.io = parse_word(key, IO_WORDS, value)?,
        Key::Install => builder.install = parse_word(key, INSTALL_WORDS, value)?,
        Key::Checksum => builder.checksum = parse_word(key, SWITCH_WORDS, value)?,
        Key::Deadline => builder.deadline = parse_duration(key, value)?,
        Key::Poll => {
            builder.poll =
                if value == "off" { Duration::ZERO } else { parse_duration(key, value)? };
        }
        Key::UserMode => builder.user_mode = parse_word(key, USER_MODE_WORDS, value)?,
        Key::Readahead => builder.readahead = parse_word(key, SWITCH_WORDS, value)?,
        Key::Mode => builder.mode = parse_word(key, MODE_WORDS, value)?,
        Key::Dump => builder.dump = parse_word(key, SWITCH_WORDS, value)?,
        Key::Encrypt => builder.encrypt = parse_word(key, SWITCH_WORDS, value)?,
        Key::Wipe => builder.wipe = parse_word(key, WIPE_WORDS, value)?,
    }
    Ok(())
}

fn parse_limit(value: &str) -> Result<Limit> {
    let Some(number) = value.strip_suffix('%') else {
        return parse_size(Key::Limit, value).map(Limit::Bytes);
    };
    number.trim().parse().map(Limit::Percent).map_err(|_| {
        invalid(Key::Limit, format!("`{value}` is not a whole percentage from 1% to 100%"))
    })
}

fn parse_handlers(value: &str) -> Result<Option<u16>> {
    if value == "auto" {
        return Ok(None);
    }
    let parsed = value.parse().map(Some);
    parsed.map_err(|_| invalid(Key::Handlers, format!("`{value}` is not `auto` or from 1 to 64")))
}

fn parse_size(key: Key, value: &str) -> Result<ByteCount> {
    let size: ByteCount =
        value.parse().map_err(|error: crate::Error| invalid(key, error.to_string()))?;
    // A size too large for 64 bits arrives as the largest of them.
    if size.get() == u64::MAX {
        return Err(invalid(key, format!("`{value}` is too large")));
    }
    Ok(size)
}

fn parse_duration(key: Key, value: &str) -> Result<Duration> {
    humantime::parse_duration(value).map_err(|error| {
        invalid(key, format!("`{value}` is not a duration such as 30s or 500ms: {error}"))
    })
}

fn parse_word<T: Copy + PartialEq>(key: Key, words: &[(&str, T)], value: &str) -> Result<T> {
    look_up(words, value).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let hint = suggest(words, value);
        invalid(key, format!("`{value}` is not one of {}{hint}", known.join(", ")))
    })
}

fn unknown_key(name: &str) -> crate::Error {
    invalid(name, format!("is not a key{}", suggest(KEYS, name)))
}

/// Returns `; did you mean ...?`, or nothing if no word comes near.
fn suggest<T>(words: &[(&str, T)], wrong: &str) -> String {
    let wrong = wrong.to_lowercase();
    let best = words
        .iter()
        .map(|(word, _)| (strsim::jaro_winkler(word, &wrong), word))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    match best {
        Some((likeness, word)) if likeness >= LIKENESS_MIN => format!("; did you mean `{word}`?"),
        _ => String::new(),
    }
}

fn look_up<T: Copy>(words: &[(&str, T)], wanted: &str) -> Option<T> {
    words.iter().find(|(word, _)| *word == wanted).map(|(_, value)| *value)
}

/// The inverse of [`look_up`]; every value is in its table.
fn word_of<T: Copy + PartialEq>(words: &'static [(&str, T)], wanted: T) -> &'static str {
    words.iter().find(|(_, value)| *value == wanted).map_or("?", |(word, _)| word)
}

/// Prints the text form: every option, except for those that are `None` by default.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for (name, key) in KEYS {
            let Some(value) = show(&self.options, *key) else { continue };
            write!(f, "{comma}{name}:{value}")?;
            comma = ",";
        }
        Ok(())
    }
}

/// Writes one option as text; `None` when it is unset.
fn show(options: &Builder, key: Key) -> Option<String> {
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| quote(&path.to_string_lossy()));
    match key {
        Key::Limit => Some(match options.limit {
            Limit::Bytes(bytes) => show_size(bytes),
            Limit::Percent(percent) => format!("{percent}%"),
        }),
        Key::Device => path(&options.device),
        Key::Dir => path(&options.dir),
        Key::Overwrite => Some(word_of(SWITCH_WORDS, options.overwrite).to_owned()),
        Key::Capacity => options.capacity.map(show_size),
        Key::Reserve => Some(word_of(SWITCH_WORDS, options.reserve).to_owned()),
        Key::Page => Some(show_size(options.page)),
        Key::Handlers => options.handlers.map(|threads| threads.to_string()),
        Key::Threshold => Some(options.threshold.map_or("off".to_owned(), show_size)),
        Key::Span => Some(show_size(options.span)),
        Key::Io => Some(word_of(IO_WORDS, options.io).to_owned()),
        Key::Install => Some(word_of(INSTALL_WORDS, options.install).to_owned()),
        Key::Checksum => Some(word_of(SWITCH_WORDS, options.checksum).to_owned()),
        Key::Deadline => Some(show_duration(options.deadline)),
        Key::Poll if options.poll.is_zero() => Some("off".to_owned()),
        Key::Poll => Some(show_duration(options.poll)),
        Key::UserMode => Some(word_of(USER_MODE_WORDS, options.user_mode).to_owned()),
        Key::Readahead => Some(word_of(SWITCH_WORDS, options.readahead).to_owned()),
        Key::Mode => Some(word_of(MODE_WORDS, options.mode).to_owned()),
        Key::Dump => Some(word_of(SWITCH_WORDS, options.dump).to_owned()),
        Key::Encrypt => Some(word_of(SWITCH_WORDS, options.encrypt).to_owned()),
        Key::Wipe => Some(word_of(WIPE_WORDS, options.wipe).to_owned()),
    }
}

fn show_duration(duration: Duration) -> String {
    humantime::format_duration(duration).to_string().replace(' ', "")
}

/// Writes a size exactly: in the largest binary unit that divides it.
fn show_size(size: ByteCount) -> String {
    let bytes = size.get();
    for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Quotes a value that would not be read back as it is.
fn quote(value: &str) -> String {
    if value.contains(',') || value.starts_with('"') || value.trim() != value {
        return format!("\"{}\"", value.replace('"', "\"\""));
    }
    value.to_owned()
}
