//! What a run found, and how it is told: tables, verdicts, JSON.

use crate::auto::Auto;
use crate::checks::{Check, Verdict, median};
use crate::stress::Stress;
use comfy_table::{CellAlignment, LineStyle, Table, presets};
use farheap::ByteCount;
use serde::Serialize;

/// Everything a run found.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) scale_factor: f64,
    pub(crate) data_bytes: u64,
    pub(crate) load_seconds: f64,
    /// Of the columns, from local memory to their tiers; nothing when they were loaded there.
    pub(crate) migration: Option<Moved>,
    pub(crate) queries: Vec<QueryTimes>,
    pub(crate) tiers: Vec<TierUse>,
    /// Queries during migrations, if asked for.
    pub(crate) stress: Option<Stress>,
    /// Placement by reads, if asked for.
    pub(crate) auto: Option<Auto>,
    pub(crate) checks: Vec<Check>,
}

/// A migration of all columns.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

/// The times of one query, and its answer.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct QueryTimes {
    pub(crate) name: String,
    /// One time per run over local memory; none when the data was not there.
    pub(crate) local_ms: Vec<f64>,
    /// One time per run over the tiers.
    pub(crate) tiers_ms: Vec<f64>,
    /// Of all runs over the tiers.
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) answer: Vec<String>,
}

/// What a tier did, from its start on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TierUse {
    pub(crate) name: String,
    pub(crate) limit_bytes: u64,
    pub(crate) data_bytes: u64,
    pub(crate) resident_bytes_max: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

impl Report {
    /// Whether nothing failed.
    pub(crate) fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.verdict != Verdict::Fail)
    }

    /// The queries' times and traffic.
    pub(crate) fn query_table(&self) -> Table {
        let header =
            ["", "local ms\nmedian", "tiers ms\nmedian", "tiers /\nlocal", "\nread", "\nwritten"];
        let rows = self.queries.iter().map(|query| {
            let (local, tiers) = (median(&query.local_ms), median(&query.tiers_ms));
            let ratio = local.zip(tiers).map(|(local, tiers)| tiers / local);
            let number = |value: Option<f64>, digits: usize| {
                value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
            };
            vec![
                query.name.clone(),
                number(local, 1),
                number(tiers, 1),
                number(ratio, 2),
                ByteCount(query.bytes_read).to_string(),
                ByteCount(query.bytes_written).to_string(),
            ]
        });
        table(&header, rows)
    }

    /// The tiers' sizes and traffic.
    pub(crate) fn tier_table(&self) -> Table {
        let header = ["tier", "limit", "data", "resident\nmax", "\nread", "\nwritten"];
        let rows = self.tiers.iter().map(|tier| {
            let sizes = [
                tier.limit_bytes,
                tier.data_bytes,
                tier.resident_bytes_max,
                tier.bytes_read,
                tier.bytes_written,
            ];
            let sizes = sizes.map(|bytes| ByteCount(bytes).to_string());
            std::iter::once(tier.name.clone()).chain(sizes).collect()
        });
        table(&header, rows)
    }
}

/// A table whose first column is names and whose others are numbers.
fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none()));
    table.set_header(header);
    rows.for_each(|row| {
        table.add_row(row);
    });
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_without_local_times_has_no_ratio() {
        let query =
            QueryTimes { name: "Q1".to_owned(), tiers_ms: vec![2.0], ..QueryTimes::default() };
        let mut report = Report { queries: vec![query], ..Report::default() };
        let table = report.query_table().to_string();
        assert!(table.contains("2.0") && table.contains(" - "), "{table}");
        report.queries[0].local_ms.push(0.5);
        let table = report.query_table().to_string();
        assert!(table.contains("4.00"), "{table}");
        assert!(report.holds());
        report.checks.push(Check::must(false, String::new()));
        assert!(!report.holds());
    }
}
