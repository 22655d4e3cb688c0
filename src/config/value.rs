//! Values of options: the types of their own, and how each type reads and prints as text.
//!
//! The rules of the text form are in the documentation of [`config`](super).

use crate::base::error::Error;
use crate::base::units::ByteCount;
use crate::paging::region::FaultMode;
use crate::store::Wipe;
use std::path::PathBuf;
use std::time::Duration;

/// How alike two words must be for one to be suggested for the other, from 0 to 1: `limt` and
/// `limit` reach 0.95, `limit` and `dir` 0.51.
const LIKENESS_MIN: f64 = 0.75;

/// The environment variable of the configuration.
pub(super) const ENV: &str = "FARHEAP_CONF";

/// The largest device size: the kernel's file offsets are signed.
pub(super) const CAPACITY_MAX: ByteCount = ByteCount(i64::MAX as u64);
/// The shortest deadline of a device request.
pub(super) const DEADLINE_MIN: Duration = Duration::from_millis(1);
/// The longest deadline of a device request.
pub(super) const DEADLINE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest polling: half of the time after which a handler that runs only while its
/// processor is idle counts as starved.
pub(super) const POLL_MAX: Duration = Duration::from_micros(500);

/// A limit on memory, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// The default: see [`Builder::limit`](super::Builder::limit) and
    /// [`Builder::far_limit`](super::Builder::far_limit).
    Auto,
    /// No limit.
    Off,
    /// Bytes.
    Bytes(ByteCount),
    /// A share of the memory that the process may have: the smaller of its control groups' limits and the
    /// machine's memory; for a tier on a NUMA node, of the node's memory. 1 to 100 percent.
    Percent(u8),
}

impl From<ByteCount> for Limit {
    fn from(bytes: ByteCount) -> Limit {
        Limit::Bytes(bytes)
    }
}

/// A type of option. `none` is the word of an option that can be unset, if it has one.
pub(super) trait Value: Sized {
    /// Reads a value, or says why the text is none.
    fn read(text: &str, none: Option<&str>) -> Result<Self, String>;

    /// Prints what [`read`](Value::read) reads; `None` for what has no text.
    fn print(&self, none: Option<&str>) -> Option<String>;

    /// All that can be read, if that is a few words.
    fn words() -> Vec<&'static str> {
        Vec::new()
    }
}

/// A type of which each value has a name.
trait NamedValue: Copy + PartialEq + 'static {
    fn names() -> impl Iterator<Item = (&'static str, Self)>;
}

/// Names the values of types.
macro_rules! names {
    ($($type:ident { $($name:literal $value:expr),+ })+) => { $(
        impl NamedValue for $type {
            fn names() -> impl Iterator<Item = (&'static str, Self)> {
                [$(($name, $value)),+].into_iter()
            }
        }
    )+ };
}

names! {
    bool { "on" true, "off" false }
    FaultMode {
        "auto" FaultMode::Auto, "user" FaultMode::User, "kernel" FaultMode::Kernel,
        "in_thread" FaultMode::InThread
    }
    Wipe { "off" Wipe::Off, "discard" Wipe::Discard, "zero" Wipe::Zero }
}

impl<T: NamedValue> Value for T {
    fn read(text: &str, _none: Option<&str>) -> Result<T, String> {
        T::names().find(|(name, _)| *name == text).map(|(_, value)| value).ok_or_else(|| {
            let words = T::words();
            format!("`{text}` is not one of {}{}", words.join(", "), suggest(&words, text))
        })
    }

    fn print(&self, _none: Option<&str>) -> Option<String> {
        T::names().find(|(_, value)| value == self).map(|(name, _)| name.to_owned())
    }

    fn words() -> Vec<&'static str> {
        T::names().map(|(name, _)| name).collect()
    }
}

impl<T: Value> Value for Option<T> {
    fn read(text: &str, none: Option<&str>) -> Result<Option<T>, String> {
        if none == Some(text) { Ok(None) } else { T::read(text, none).map(Some) }
    }

    fn print(&self, none: Option<&str>) -> Option<String> {
        match self {
            Some(value) => value.print(none),
            None => none.map(str::to_owned),
        }
    }
}

/// The word for a limit that follows from what memory there is.
const AUTO: &str = "auto";

impl Value for Limit {
    fn read(text: &str, none: Option<&str>) -> Result<Limit, String> {
        if text == AUTO {
            return Ok(Limit::Auto);
        }
        if none == Some(text) {
            return Ok(Limit::Off);
        }
        let Some(number) = text.strip_suffix('%') else {
            return ByteCount::read(text, none).map(Limit::Bytes);
        };
        let percent = number.trim().parse().map(Limit::Percent);
        percent.map_err(|_| format!("`{text}` is not a whole percentage from 1% to 100%"))
    }

    fn print(&self, none: Option<&str>) -> Option<String> {
        match self {
            Limit::Auto => Some(AUTO.to_owned()),
            Limit::Off => none.map(str::to_owned),
            Limit::Bytes(bytes) => bytes.print(none),
            Limit::Percent(percent) => Some(format!("{percent}%")),
        }
    }
}

impl Value for ByteCount {
    fn read(text: &str, _none: Option<&str>) -> Result<ByteCount, String> {
        let size: ByteCount = text.parse().map_err(|error: Error| error.to_string())?;
        // A size too large for 64 bits arrives as the largest of them.
        if size.get() == u64::MAX { Err(format!("`{text}` is too large")) } else { Ok(size) }
    }

    /// Prints exactly: in the largest binary unit that divides the size.
    fn print(&self, _none: Option<&str>) -> Option<String> {
        let bytes = self.get();
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if bytes != 0 && bytes.trailing_zeros() >= shift {
                return Some(format!("{}{unit}", bytes >> shift));
            }
        }
        Some(bytes.to_string())
    }
}

impl Value for Duration {
    fn read(text: &str, _none: Option<&str>) -> Result<Duration, String> {
        humantime::parse_duration(text)
            .map_err(|error| format!("`{text}` is not a duration such as 30s or 500ms: {error}"))
    }

    fn print(&self, _none: Option<&str>) -> Option<String> {
        Some(humantime::format_duration(*self).to_string().replace(' ', ""))
    }
}

/// Numbers: of threads and of NUMA nodes, which is what these types count among the options.
macro_rules! numbers {
    ($($type:ty: $what:expr),*) => { $(
        impl Value for $type {
            fn read(text: &str, none: Option<&str>) -> Result<$type, String> {
                let word = none.map(|word| format!("`{word}` or ")).unwrap_or_default();
                text.parse().map_err(|_| format!("`{text}` is not {word}{}", $what))
            }

            fn print(&self, _none: Option<&str>) -> Option<String> {
                Some(self.to_string())
            }
        }
    )* };
}

numbers!(u16: "a number from 1 to 64", u32: "the number of a node");

impl Value for PathBuf {
    fn read(text: &str, _none: Option<&str>) -> Result<PathBuf, String> {
        Ok(PathBuf::from(text))
    }

    fn print(&self, _none: Option<&str>) -> Option<String> {
        Some(self.to_string_lossy().into_owned())
    }
}

/// Returns `; did you mean ...?`, or nothing if no word comes near.
pub(super) fn suggest(words: &[&str], wrong: &str) -> String {
    let wrong = wrong.to_lowercase();
    let best = words
        .iter()
        .map(|word| (strsim::jaro_winkler(word, &wrong), word))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    match best {
        Some((likeness, word)) if likeness >= LIKENESS_MIN => format!("; did you mean `{word}`?"),
        _ => String::new(),
    }
}
