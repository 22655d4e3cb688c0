//! Answers to the queries: exact values, how they are printed, and the published ones.
//!
//! Sums are integers of fixed decimal scale; nothing is rounded before it is printed, so two answers
//! are equal only if all their sums are.

use std::fmt;
use tpchgen::dates::{MIN_GENERATE_DATE, TPCHDate};
use tpchgen::q_and_a::answers_sf1;

/// The queries this program knows, by their number in the specification.
pub(crate) const QUERIES: [u8; 8] = [1, 3, 4, 6, 9, 12, 14, 18];

/// One value of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    Text(String),
    Number(i64),
    /// `sum / divisor` hundredths; nothing (as SQL's null) when the divisor is zero.
    Hundredths {
        sum: i128,
        divisor: i128,
    },
    /// Days since 1970-01-01.
    Date(i32),
}

impl Value {
    /// A sum of hundredths.
    pub(crate) fn hundredths(sum: impl Into<i128>) -> Value {
        Value::Hundredths { sum: sum.into(), divisor: 1 }
    }

    /// Whether `text` is the value, to the nearest hundredth. Of two that are as near both are right: the
    /// published answer to Q9 has 42698382.85 for a sum of 42698382.855.
    fn is_published_as(&self, text: &str) -> bool {
        let &Value::Hundredths { sum, divisor } = self else { return self.to_string() == text };
        let Some((whole, hundredths)) = text.split_once('.') else { return false };
        let published = format!("{whole}{hundredths}").parse::<i128>();
        published.is_ok_and(|published| {
            hundredths.len() == 2 && divisor > 0 && 2 * (sum - published * divisor).abs() <= divisor
        })
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Value::Text(ref text) => f.write_str(text),
            Value::Number(number) => write!(f, "{number}"),
            Value::Hundredths { divisor: 0, .. } => f.write_str("null"),
            Value::Hundredths { sum, divisor } => {
                // Half up, away from zero.
                let rounded = (2 * sum.abs() + divisor) / (2 * divisor);
                let sign = if sum < 0 && rounded > 0 { "-" } else { "" };
                write!(f, "{sign}{}.{:02}", rounded / 100, rounded % 100)
            }
            Value::Date(days) => {
                let days = days - TPCHDate::UNIX_EPOCH_OFFSET;
                write!(f, "{}", TPCHDate::new(days + MIN_GENERATE_DATE))
            }
        }
    }
}

/// The rows of an exact answer, in the order that the query asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer(pub(crate) Vec<Vec<Value>>);

impl Answer {
    /// The answer's lines as the specification prints them: columns parted by `|`.
    pub(crate) fn lines(&self) -> Vec<String> {
        let line =
            |row: &Vec<Value>| row.iter().map(Value::to_string).collect::<Vec<_>>().join("|");
        self.0.iter().map(line).collect()
    }

    /// Whether this is the answer with these lines, as [`published`] has them.
    pub(crate) fn is_published_as(&self, lines: &[String]) -> bool {
        let is_row = |(row, line): (&Vec<Value>, &String)| {
            let fields = line.split('|');
            row.len() == fields.clone().count()
                && row.iter().zip(fields).all(|(value, text)| value.is_published_as(text))
        };
        self.0.len() == lines.len() && self.0.iter().zip(lines).all(is_row)
    }

    /// What another answer, which is not equal, has instead of this one: the first line that differs.
    pub(crate) fn difference(&self, other: &Answer, of: &str) -> String {
        let rows = self.0.len().max(other.0.len());
        let at = (0..rows).find(|row| self.0.get(*row) != other.0.get(*row)).unwrap_or_default();
        // As values: a difference in what is rounded away shows too.
        let row = |answer: &Answer| {
            answer.0.get(at).map_or("nothing".to_owned(), |values| format!("{values:?}"))
        };
        format!("{of}: row {} is {} instead of {}", at + 1, row(other), row(self))
    }
}

/// The lines of the published answer to `query`, for the scale factor it was published for.
pub(crate) fn published(query: u8, scale_factor: f64) -> Option<Vec<String>> {
    if scale_factor != 1.0 {
        return None;
    }
    let text = answers_sf1::answer(i32::from(query))?;
    // After the header; padded for people.
    let lines = text.lines().filter(|line| !line.trim().is_empty()).skip(1);
    let fields = |line: &str| line.split('|').map(str::trim).collect::<Vec<_>>().join("|");
    Some(lines.map(fields).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_printed_as_in_the_specification() {
        let quotient = |sum, divisor| Value::Hundredths { sum, divisor }.to_string();
        assert_eq!(quotient(1_234, 1), "12.34");
        assert_eq!(quotient(5, 2), "0.03");
        assert_eq!(quotient(-5, 2), "-0.03");
        assert_eq!(quotient(-1, 1_000), "0.00");
        assert_eq!(quotient(7, 0), "null");
        assert_eq!(Value::Date(8_766).to_string(), "1994-01-01");
        assert_eq!(Answer(vec![vec!["A".into(), Value::Number(-3)]]).lines(), ["A|-3"]);
    }

    #[test]
    fn published_answers_are_right_to_the_nearest_hundredth() {
        let is = |sum, divisor, text: &str| {
            let value = Value::Hundredths { sum, divisor };
            Answer(vec![vec!["A".into(), value]]).is_published_as(&[format!("A|{text}")])
        };
        assert!(is(1_235, 10, "1.23") && is(1_235, 10, "1.24"));
        assert!(is(1_234, 10, "1.23") && !is(1_234, 10, "1.24"));
        assert!(is(-1_234, 10, "-1.23") && !is(1_234, 10, "-1.23"));
        assert!(!is(120, 1, "1.2") && !is(120, 1, "120") && !is(0, 0, "0.00"));
        let answer = Answer(vec![vec![Value::Number(1)]]);
        assert!(answer.is_published_as(&["1".to_owned()]));
        for lines in [&["2"][..], &[], &["1", "1"], &["1|1"]] {
            let lines: Vec<_> = lines.iter().map(|line| line.to_string()).collect();
            assert!(!answer.is_published_as(&lines), "{lines:?}");
        }
    }

    #[test]
    fn a_wrong_answer_is_told_by_the_first_row_that_differs() {
        let answer = |numbers: &[i64]| {
            Answer(numbers.iter().map(|number| vec![Value::Number(*number)]).collect())
        };
        let text = answer(&[1, 2, 3]).difference(&answer(&[1, 7, 8]), "Q1");
        assert_eq!(text, "Q1: row 2 is [Number(7)] instead of [Number(2)]");
        let text = answer(&[1, 2]).difference(&answer(&[1]), "Q1");
        assert_eq!(text, "Q1: row 2 is nothing instead of [Number(2)]");
    }

    #[test]
    fn every_query_has_a_published_answer_at_scale_factor_1_only() {
        for query in QUERIES {
            assert!(!published(query, 1.0).expect("published").is_empty(), "Q{query}");
            assert_eq!(published(query, 0.5), None);
        }
        assert_eq!(published(4, 1.0).expect("published")[3], "4-NOT SPECIFIED|10556");
        assert_eq!(published(6, 1.0).expect("published"), ["123141078.23"]);
    }
}
