//! Values of options that the TPC-H examples share.

use clap::ValueEnum;
use farheap::ByteCount;
use std::str::FromStr;
use std::thread;

/// Below this the generator's other tables, which lineitem refers to, would be empty.
const SCALE_FACTOR_MIN: f64 = 0.001;
/// The largest that is not a typing mistake: 6 billion rows of lineitem.
const SCALE_FACTOR_MAX: f64 = 1_000.0;

/// When to hold the data in local memory as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Compare {
    /// When there is enough memory
    Auto,
    /// Even when that may be too much
    Always,
    /// No comparison; answers are checked all the same
    Never,
}

/// A limit on resident far memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    /// A number of bytes.
    Bytes(ByteCount),
    /// A share of the loaded bytes.
    Percent(f64),
}

impl Limit {
    /// The limit for data of this size.
    pub(crate) fn of(self, data: ByteCount) -> ByteCount {
        match self {
            Limit::Bytes(bytes) => bytes,
            // Rounded down: a limit of 25 % is never above a quarter.
            Limit::Percent(percent) => ByteCount((data.get() as f64 * percent / 100.0) as u64),
        }
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Limit, String> {
        let limit = match text.trim().strip_suffix('%') {
            Some(percent) => {
                let number = percent.trim().parse::<f64>().map_err(|error| error.to_string())?;
                if !(number.is_finite() && number <= 1e6) {
                    return Err("a share is a number of percent up to 1000000".to_owned());
                }
                Limit::Percent(number)
            }
            None => Limit::Bytes(text.parse().map_err(|error: farheap::Error| error.to_string())?),
        };
        match limit {
            Limit::Bytes(ByteCount::ZERO) => Err("a limit of nothing lets nothing run".to_owned()),
            Limit::Percent(percent) if percent <= 0.0 => Err("a share is above 0%".to_owned()),
            limit => Ok(limit),
        }
    }
}

/// Reads a scale factor.
pub(crate) fn scale_factor(text: &str) -> Result<f64, String> {
    let factor = text.parse::<f64>().map_err(|_| "not a number".to_owned())?;
    if (SCALE_FACTOR_MIN..=SCALE_FACTOR_MAX).contains(&factor) {
        Ok(factor)
    } else {
        Err(format!("a scale factor is from {SCALE_FACTOR_MIN} to {SCALE_FACTOR_MAX}"))
    }
}

/// Processors that this process may use.
pub(crate) fn cores() -> i32 {
    thread::available_parallelism().map_or(1, |cores| i32::try_from(cores.get()).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_sizes_or_shares_of_the_data() {
        let data = ByteCount(1_001);
        for (text, bytes) in
            [("25%", 250), ("12.5 %", 125), ("200%", 2_002), ("4KiB", 4_096), ("100", 100)]
        {
            let limit: Limit = text.parse().expect(text);
            assert_eq!(limit.of(data), ByteCount(bytes), "{text}");
        }
    }
}
