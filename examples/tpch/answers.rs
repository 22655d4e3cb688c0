//! Answers to the queries: their exact sums, the published values and an independent reference.
//!
//! [`Reference`] computes both answers row by row while the table is generated, in the plainest
//! way there is; `queries` computes them from the columns. [`published`] has the answers of the
//! TPC-H specification. Nothing here touches the columns.
//!
//! # Invariants
//! 1. Sums are integers of fixed decimal scale; nothing is rounded before it is printed.

use crate::lineitem::Row;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::AddAssign;

/// Q1 reads rows shipped up to this day: 1998-12-01 less 90 days, in days since 1970-01-01.
pub(crate) const Q1_SHIP_DATE_MAX: i32 = 10_471;
/// Q6 reads rows shipped from this day on: 1994-01-01.
pub(crate) const Q6_SHIP_DATE_MIN: i32 = 8_766;
/// Q6 reads rows shipped before this day: 1995-01-01.
pub(crate) const Q6_SHIP_DATE_END: i32 = 9_131;
/// Q6 reads rows with at least this discount, in hundredths.
pub(crate) const Q6_DISCOUNT_MIN: i64 = 5;
/// Q6 reads rows with at most this discount, in hundredths.
pub(crate) const Q6_DISCOUNT_MAX: i64 = 7;
/// Q6 reads rows of less than this quantity, in hundredths.
pub(crate) const Q6_QUANTITY_END: i64 = 2_400;

/// The queries this program knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Query {
    /// The pricing summary report: sums and averages of nearly all rows by two flags.
    Q1,
    /// The forecasting revenue change: one sum over 2 % of the rows.
    Q6,
}

impl Query {
    /// The name as in the specification.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Query::Q1 => "Q1",
            Query::Q6 => "Q6",
        }
    }
}

/// Sums of one group of Q1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) rows: u64,
    /// Hundredths.
    pub(crate) quantity: i128,
    /// Cents.
    pub(crate) base_price: i128,
    /// Ten-thousandths.
    pub(crate) disc_price: i128,
    /// Millionths.
    pub(crate) charge: i128,
    /// Hundredths.
    pub(crate) discount: i128,
}

impl AddAssign<&Group> for Group {
    fn add_assign(&mut self, other: &Group) {
        self.rows += other.rows;
        self.quantity += other.quantity;
        self.base_price += other.base_price;
        self.disc_price += other.disc_price;
        self.charge += other.charge;
        self.discount += other.discount;
    }
}

/// The groups of Q1 by return flag and line status, in the order the query asks for.
pub(crate) type Groups = BTreeMap<(u8, u8), Group>;

/// An exact answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Q1: the groups that have rows.
    PricingSummary(Groups),
    /// Q6: revenue in ten-thousandths.
    Revenue(i128),
}

impl Answer {
    /// The answer's lines as the specification prints them: two decimals, columns parted by `|`.
    pub(crate) fn lines(&self) -> Vec<String> {
        match self {
            Answer::PricingSummary(groups) => groups.iter().map(group_line).collect(),
            Answer::Revenue(sum) => vec![cents(*sum, 100)],
        }
    }
}

/// One line of Q1's answer.
fn group_line((&(flag, status), group): (&(u8, u8), &Group)) -> String {
    let rows = i128::from(group.rows);
    let mut line = format!("{}|{}", char::from(flag), char::from(status));
    for (sum, divisor) in [
        (group.quantity, 1),
        (group.base_price, 1),
        (group.disc_price, 100),
        (group.charge, 10_000),
        (group.quantity, rows),
        (group.base_price, rows),
        (group.discount, rows),
    ] {
        let _ = write!(line, "|{}", cents(sum, divisor));
    }
    let _ = write!(line, "|{rows}");
    line
}

/// `sum / divisor` hundredths with two decimals, rounded half up.
fn cents(sum: i128, divisor: i128) -> String {
    assert!(sum >= 0, "{sum}: no column of lineitem is negative");
    let rounded = (2 * sum + divisor) / (2 * divisor);
    format!("{}.{:02}", rounded / 100, rounded % 100)
}

/// Q1's answer at scale factor 1 in the TPC-H specification.
const Q1_PUBLISHED: [&str; 4] = [
    "A|F|37734107.00|56586554400.73|53758257134.87|55909065222.83|25.52|38273.13|0.05|1478493",
    "N|F|991417.00|1487504710.38|1413082168.05|1469649223.19|25.52|38284.47|0.05|38854",
    "N|O|74476040.00|111701729697.74|106118230307.61|110367043872.50|25.50|38249.12|0.05|2920374",
    "R|F|37719753.00|56568041380.90|53741292684.60|55889619119.83|25.51|38250.85|0.05|1478870",
];
/// Q6's answer at scale factor 1 in the TPC-H specification.
const Q6_PUBLISHED: [&str; 1] = ["123141078.23"];

/// The published answer to `query`, for the scale factor it was published for.
pub(crate) fn published(query: Query, scale_factor: f64) -> Option<&'static [&'static str]> {
    (scale_factor == 1.0).then_some(match query {
        Query::Q1 => &Q1_PUBLISHED,
        Query::Q6 => &Q6_PUBLISHED,
    })
}

/// Both answers, computed row by row with no regard to speed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reference {
    groups: Groups,
    revenue: i128,
}

impl Reference {
    /// Counts one row in.
    pub(crate) fn fold(&mut self, row: &Row) {
        if row.ship_date <= Q1_SHIP_DATE_MAX {
            let disc_price = row.extended_price * (100 - row.discount);
            let group = self.groups.entry((row.return_flag, row.line_status)).or_default();
            *group += &Group {
                rows: 1,
                quantity: i128::from(row.quantity),
                base_price: i128::from(row.extended_price),
                disc_price: i128::from(disc_price),
                charge: i128::from(disc_price) * i128::from(100 + row.tax),
                discount: i128::from(row.discount),
            };
        }
        let shipped = (Q6_SHIP_DATE_MIN..Q6_SHIP_DATE_END).contains(&row.ship_date);
        let discounted = (Q6_DISCOUNT_MIN..=Q6_DISCOUNT_MAX).contains(&row.discount);
        if shipped && discounted && row.quantity < Q6_QUANTITY_END {
            self.revenue += i128::from(row.extended_price * row.discount);
        }
    }

    /// Adds the sums of another part of the table.
    pub(crate) fn merge(&mut self, other: &Reference) {
        for (key, group) in &other.groups {
            *self.groups.entry(*key).or_default() += group;
        }
        self.revenue += other.revenue;
    }

    /// The answer to `query`.
    pub(crate) fn answer(&self, query: Query) -> Answer {
        match query {
            Query::Q1 => Answer::PricingSummary(self.groups.clone()),
            Query::Q6 => Answer::Revenue(self.revenue),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpchgen::q_and_a::answers_sf1::{Q1_ANSWER, Q6_ANSWER};

    /// The lines of a published answer without its header and padding.
    fn lines(published: &str) -> Vec<String> {
        let lines = published.lines().filter(|line| !line.trim().is_empty()).skip(1);
        lines.map(|line| line.replace(' ', "")).collect()
    }

    #[test]
    fn the_constants_are_the_published_answers() {
        assert_eq!(published(Query::Q1, 1.0).expect("published"), lines(Q1_ANSWER));
        assert_eq!(published(Query::Q6, 1.0).expect("published"), lines(Q6_ANSWER));
        assert_eq!(published(Query::Q1, 0.5), None);
    }

    #[test]
    fn quotients_are_rounded_half_up_to_cents() {
        assert_eq!(cents(1_234, 1), "12.34");
        assert_eq!(cents(5, 2), "0.03");
        assert_eq!(cents(2_499, 1_000), "0.02");
        assert_eq!(cents(0, 7), "0.00");
    }

    #[test]
    fn rows_at_the_edges_of_the_predicates_count_as_the_queries_say() {
        let row = Row {
            quantity: Q6_QUANTITY_END - 100,
            extended_price: 100_000,
            discount: Q6_DISCOUNT_MAX,
            tax: 8,
            return_flag: b'R',
            line_status: b'F',
            ship_date: Q6_SHIP_DATE_MIN,
        };
        let revenue = |row: Row| {
            let mut reference = Reference::default();
            reference.fold(&row);
            reference.revenue
        };
        assert_eq!(revenue(row), 700_000);
        assert_eq!(revenue(Row { quantity: Q6_QUANTITY_END, ..row }), 0);
        assert_eq!(revenue(Row { discount: Q6_DISCOUNT_MAX + 1, ..row }), 0);
        assert_eq!(revenue(Row { discount: Q6_DISCOUNT_MIN - 1, ..row }), 0);
        assert_eq!(revenue(Row { ship_date: Q6_SHIP_DATE_MIN - 1, ..row }), 0);
        assert_eq!(revenue(Row { ship_date: Q6_SHIP_DATE_END, ..row }), 0);
    }
}
