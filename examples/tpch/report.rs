//! What a run found, and how it is told: the table, the verdicts, JSON and CSV.
//!
//! [`Report`] holds plain numbers in units that its field names say; everything shown is derived
//! from it. It measures nothing itself.

use crate::checks::{Check, Verdict, median};
use comfy_table::{Cell, CellAlignment, LineStyle, Table, presets};
use farheap::ByteCount;
use serde::Serialize;
use std::fmt::Write as _;

/// What the far resident size may exceed the limit by: staging buffers and page tables.
pub(crate) const RESIDENT_SLACK: ByteCount = ByteCount::mib(64);

/// Width that the table keeps to.
#[cfg(test)]
const WIDTH_MAX: usize = 100;

/// Everything a run found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) scale_factor: f64,
    pub(crate) rows: u64,
    pub(crate) data_bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) threads: usize,
    pub(crate) cold: bool,
    /// Loading, then each query.
    pub(crate) phases: Vec<Phase>,
    pub(crate) resident: Resident,
    pub(crate) answers: Vec<AnswerText>,
    pub(crate) checks: Vec<Check>,
}

/// One line of the table.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    /// One time per run on far memory.
    pub(crate) far_ms: Vec<f64>,
    /// One time per run on local memory; empty when the columns were not held there.
    pub(crate) local_ms: Vec<f64>,
    /// Of all runs together.
    pub(crate) io: Io,
    /// The largest process-wide sample during the far runs, less what was local before.
    pub(crate) far_resident_bytes_max: u64,
}

/// Traffic between memory and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Io {
    pub(crate) pages_in: u64,
    pub(crate) pages_out: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// Resident memory, sampled from outside of the library.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Resident {
    /// Of the whole process, from the start of loading on.
    pub(crate) process_bytes_max: u64,
    /// Before the heap started, and what local copies of the columns added.
    pub(crate) local_bytes: u64,
    /// What the library itself counted as resident far memory.
    pub(crate) library_bytes_max: u64,
    pub(crate) samples: u64,
}

/// The answer to one query as text.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct AnswerText {
    pub(crate) query: &'static str,
    pub(crate) lines: Vec<String>,
}

impl Phase {
    /// Median far time over median local time.
    pub(crate) fn ratio(&self) -> Option<f64> {
        Some(median(&self.far_ms)? / median(&self.local_ms)?)
    }
}

impl Resident {
    /// The largest resident size of far memory: what is not local.
    pub(crate) fn far_bytes_max(&self) -> u64 {
        self.process_bytes_max.saturating_sub(self.local_bytes)
    }

    /// Where the largest resident size comes from, in one line.
    pub(crate) fn explanation(&self, limit: ByteCount) -> String {
        let explained = limit.get() + self.local_bytes;
        let rest = match self.process_bytes_max.checked_sub(explained) {
            Some(more) => format!("+ {}", ByteCount(more)),
            None => format!("- {} not used", ByteCount(explained - self.process_bytes_max)),
        };
        format!(
            "resident {} = limit {limit} + local {} {rest}",
            ByteCount(self.process_bytes_max),
            ByteCount(self.local_bytes),
        )
    }
}

impl Report {
    /// Whether nothing failed.
    pub(crate) fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.verdict != Verdict::Fail)
    }

    /// The table of times and traffic.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none()));
        table.set_header([
            "",
            "far ms\nmedian",
            "far ms\nmin",
            "local ms\nmedian",
            "local ms\nmin",
            "far /\nlocal",
            "pages\nin",
            "pages\nout",
            "\nread",
            "\nwritten",
            "resident\nmax",
        ]);
        for phase in &self.phases {
            table.add_row(phase.cells());
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 1));
        }
        if let Some(last) = table.column_iter_mut().last() {
            last.set_padding((0, 0));
        }
        table
    }

    /// The lines of the table as comma-separated values, bytes as plain numbers.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::from(
            "phase,runs,far_ms_median,far_ms_min,local_ms_median,local_ms_min,ratio,pages_in,\
             pages_out,bytes_read,bytes_written,far_resident_bytes_max,limit_bytes,data_bytes\n",
        );
        let number =
            |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
        for phase in &self.phases {
            let io = &phase.io;
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
                phase.name,
                phase.far_ms.len(),
                number(median(&phase.far_ms)),
                number(min(&phase.far_ms)),
                number(median(&phase.local_ms)),
                number(min(&phase.local_ms)),
                number(phase.ratio()),
                io.pages_in,
                io.pages_out,
                io.bytes_read,
                io.bytes_written,
                phase.far_resident_bytes_max,
                self.limit_bytes,
                self.data_bytes,
            );
        }
        text
    }
}

impl Phase {
    fn cells(&self) -> Vec<Cell> {
        let time = |value: Option<f64>| match value {
            None => "-".to_owned(),
            Some(ms) if ms < 10_000.0 => format!("{ms:.1}"),
            Some(ms) => format!("{ms:.0}"),
        };
        let texts = [
            time(median(&self.far_ms)),
            time(min(&self.far_ms)),
            time(median(&self.local_ms)),
            time(min(&self.local_ms)),
            self.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            self.io.pages_in.to_string(),
            self.io.pages_out.to_string(),
            ByteCount(self.io.bytes_read).to_string(),
            ByteCount(self.io.bytes_written).to_string(),
            ByteCount(self.far_resident_bytes_max).to_string(),
        ];
        std::iter::once(self.name.to_owned()).chain(texts).map(Cell::new).collect()
    }
}

fn min(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let phase = Phase {
            name: "Q1",
            far_ms: vec![123_456.7, 100_000.0, 130_000.0],
            local_ms: vec![1_000.0, 3_000.0],
            io: Io {
                pages_in: 1_234_567,
                pages_out: 1_234_567,
                bytes_read: 1_023 << 30,
                bytes_written: 1_023 << 30,
            },
            far_resident_bytes_max: 1_023 << 20,
        };
        Report {
            scale_factor: 1.0,
            rows: 6_001_215,
            data_bytes: 1 << 30,
            limit_bytes: 1 << 28,
            threads: 2,
            cold: false,
            phases: vec![phase],
            resident: Resident::default(),
            answers: Vec::new(),
            checks: vec![Check::must(true, String::new()), Check::should(false, String::new())],
        }
    }

    #[test]
    fn the_table_fits_on_the_screen_with_wide_numbers() {
        let table = report().table().to_string();
        let width = table.lines().map(|line| line.chars().count()).max();
        assert!(width <= Some(WIDTH_MAX), "{width:?}\n{table}");
        assert!(table.contains("123457 ") && table.contains("61.728"), "{table}");
    }

    #[test]
    fn warnings_hold_and_failures_do_not() {
        let mut report = report();
        assert!(report.holds());
        report.checks.push(Check::must(false, String::new()));
        assert!(!report.holds());
    }

    #[test]
    fn csv_lines_have_as_many_values_as_the_header() {
        let csv = report().csv();
        let values: Vec<_> = csv.lines().map(|line| line.split(',').count()).collect();
        assert_eq!(values, [14, 14], "{csv}");
    }

    #[test]
    fn the_explanation_adds_up_above_and_below_the_limit() {
        let mut resident = Resident {
            process_bytes_max: 310 << 20,
            local_bytes: 250 << 20,
            library_bytes_max: 0,
            samples: 7,
        };
        let text = resident.explanation(ByteCount::mib(50));
        assert!(text.contains("310.0 MiB = limit 50.0 MiB + local 250.0 MiB + 10.0 MiB"), "{text}");
        assert_eq!(resident.far_bytes_max(), 60 << 20);
        resident.process_bytes_max = 260 << 20;
        let text = resident.explanation(ByteCount::mib(50));
        assert!(text.contains("local 250.0 MiB - 40.0 MiB not used"), "{text}");
    }
}
