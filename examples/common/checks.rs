//! Verdicts and numbers as the TPC-H examples report them.

use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// Whether something that must hold did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Check {
    pub(crate) verdict: Verdict,
    pub(crate) text: String,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Verdict {
    /// It holds.
    Pass,
    /// It does not, but nothing that was computed is wrong.
    Warn,
    /// It does not.
    Fail,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Pass => "PASS",
            Verdict::Warn => "WARN",
            Verdict::Fail => "FAIL",
        })
    }
}

impl Check {
    /// A check that fails unless `holds`.
    pub(crate) fn must(holds: bool, text: String) -> Check {
        Check { verdict: if holds { Verdict::Pass } else { Verdict::Fail }, text }
    }

    /// A check that warns unless `holds`.
    pub(crate) fn should(holds: bool, text: String) -> Check {
        Check { verdict: if holds { Verdict::Pass } else { Verdict::Warn }, text }
    }
}

/// Milliseconds of `time`.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// `number` with commas between thousands.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The middle of `values`, or the mean of the two in the middle.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len.is_multiple_of(2) => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
        _ => Some(sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_no_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(thousands(6_001_215), "6,001,215");
        assert_eq!(thousands(215), "215");
    }
}
