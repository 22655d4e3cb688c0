//! The columns of `lineitem` that Q1 and Q6 read: generation and storage.
//!
//! A [`Plan`] counts the rows without generating them; [`Table::load`] then generates one part of
//! the table per thread into [`Columns`], which live in whatever allocator the caller names: the
//! far heap and local memory run the same code. Used by `queries`, which only sees slices.
//!
//! # Invariants
//! 1. All columns of one part have the same length, and never more rows than were reserved.
//! 2. Decimals are exact: prices in cents, all others in hundredths.

use crate::answers::Reference;
use crate::progress::Progress;
use allocator_api2::alloc::Allocator;
use allocator_api2::collections::TryReserveError;
use allocator_api2::vec::Vec as VecIn;
use farheap::ByteCount;
use std::thread;
use tpchgen::dates::GenerateUtils;
use tpchgen::distribution::Distributions;
use tpchgen::generators::{LineItem, LineItemGenerator, OrderGenerator};
use tpchgen::text::TextPool;

/// Bytes of one row over all columns.
pub(crate) const ROW_BYTES: u64 = 4 * size_of::<i64>() as u64 + 2 + size_of::<i32>() as u64;

/// Rows between two reports of progress by one loading thread.
const PROGRESS_ROWS: u64 = 1 << 14;

/// Text that the generator cuts its comments from. They are not stored, so a small pool does; the
/// generator's own is 300 MiB. Comments have their own random numbers: no other column changes.
const TEXT_POOL_BYTES: i32 = 1 << 20;

/// One row, reduced to the columns that are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Hundredths.
    pub(crate) quantity: i64,
    /// Cents.
    pub(crate) extended_price: i64,
    /// Hundredths.
    pub(crate) discount: i64,
    /// Hundredths.
    pub(crate) tax: i64,
    /// `A`, `N` or `R`.
    pub(crate) return_flag: u8,
    /// `F` or `O`.
    pub(crate) line_status: u8,
    /// Days since 1970-01-01.
    pub(crate) ship_date: i32,
}

impl From<LineItem<'_>> for Row {
    fn from(item: LineItem<'_>) -> Row {
        let row = Row {
            quantity: item.l_quantity * 100,
            extended_price: item.l_extendedprice.into_inner(),
            discount: item.l_discount.into_inner(),
            tax: item.l_tax.into_inner(),
            return_flag: item.l_returnflag.as_bytes()[0],
            line_status: item.l_linestatus.as_bytes()[0],
            ship_date: item.l_shipdate.to_unix_epoch(),
        };
        // The group codes of Q1 tell exactly these letters apart.
        assert!(matches!(row.return_flag, b'A' | b'N' | b'R'), "{row:?}");
        assert!(matches!(row.line_status, b'F' | b'O'), "{row:?}");
        row
    }
}

/// How many rows each part of the table has, known before anything is generated.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    scale_factor: f64,
    part_rows: Vec<u64>,
}

impl Plan {
    /// Counts the rows of `parts` parts at `scale_factor`, one thread a part.
    ///
    /// Draws only the number of lines of each order: some nanoseconds each.
    pub(crate) fn count(scale_factor: f64, parts: i32) -> Plan {
        let part_rows = thread::scope(|scope| {
            let counts: Vec<_> = (1..=parts)
                .map(|part| scope.spawn(move || count_rows(scale_factor, part, parts)))
                .collect();
            counts.into_iter().map(|count| count.join().expect("counting ends")).collect()
        });
        Plan { scale_factor, part_rows }
    }

    /// Rows of the whole table.
    pub(crate) fn rows(&self) -> u64 {
        self.part_rows.iter().sum()
    }

    /// Bytes of all columns.
    pub(crate) fn bytes(&self) -> ByteCount {
        ByteCount(self.rows() * ROW_BYTES)
    }

    fn parts(&self) -> i32 {
        i32::try_from(self.part_rows.len()).expect("`count` took an i32")
    }
}

/// Rows of one part: the sum of its orders' line counts.
fn count_rows(scale_factor: f64, part: i32, parts: i32) -> u64 {
    let base = OrderGenerator::SCALE_BASE;
    let start = GenerateUtils::calculate_start_index(base, scale_factor, part, parts);
    let orders = GenerateUtils::calculate_row_count(base, scale_factor, part, parts);
    let mut lines = OrderGenerator::create_line_count_random();
    lines.advance_rows(start);
    let mut rows = 0;
    for _ in 0..orders {
        rows += u64::try_from(lines.next_value()).expect("an order has 1 to 7 lines");
        lines.row_finished();
    }
    rows
}

/// One part of the table, a vector per column in allocator `A`.
#[derive(Debug)]
pub(crate) struct Columns<A: Allocator> {
    pub(crate) quantity: VecIn<i64, A>,
    pub(crate) extended_price: VecIn<i64, A>,
    pub(crate) discount: VecIn<i64, A>,
    pub(crate) tax: VecIn<i64, A>,
    pub(crate) return_flag: VecIn<u8, A>,
    pub(crate) line_status: VecIn<u8, A>,
    pub(crate) ship_date: VecIn<i32, A>,
}

impl<A: Allocator> Columns<A> {
    /// Rows stored.
    pub(crate) fn len(&self) -> usize {
        self.quantity.len()
    }

    /// The first byte of every column.
    fn starts(&self) -> [*const u8; 7] {
        [
            self.quantity.as_ptr().cast(),
            self.extended_price.as_ptr().cast(),
            self.discount.as_ptr().cast(),
            self.tax.as_ptr().cast(),
            self.return_flag.as_ptr(),
            self.line_status.as_ptr(),
            self.ship_date.as_ptr().cast(),
        ]
    }
}

impl<A: Allocator + Copy> Columns<A> {
    /// Reserves room for exactly `rows` rows in every column.
    fn with_capacity(rows: usize, alloc: A) -> Result<Columns<A>, TryReserveError> {
        Ok(Columns {
            quantity: reserve(rows, alloc)?,
            extended_price: reserve(rows, alloc)?,
            discount: reserve(rows, alloc)?,
            tax: reserve(rows, alloc)?,
            return_flag: reserve(rows, alloc)?,
            line_status: reserve(rows, alloc)?,
            ship_date: reserve(rows, alloc)?,
        })
    }

    fn push(&mut self, row: Row) {
        self.quantity.push(row.quantity);
        self.extended_price.push(row.extended_price);
        self.discount.push(row.discount);
        self.tax.push(row.tax);
        self.return_flag.push(row.return_flag);
        self.line_status.push(row.line_status);
        self.ship_date.push(row.ship_date);
    }
}

/// Reserves exactly `rows` values, so that loading never moves a column.
fn reserve<T, A: Allocator>(rows: usize, alloc: A) -> Result<VecIn<T, A>, TryReserveError> {
    let mut column = VecIn::new_in(alloc);
    column.try_reserve_exact(rows)?;
    Ok(column)
}

/// The table: one [`Columns`] for each thread that loads and scans it.
#[derive(Debug)]
pub(crate) struct Table<A: Allocator> {
    pub(crate) parts: Vec<Columns<A>>,
}

impl<A: Allocator> Table<A> {
    /// Whether `holds` for the address of every column.
    pub(crate) fn all_columns(&self, holds: impl Fn(*const u8) -> bool) -> bool {
        self.parts.iter().flat_map(Columns::starts).all(holds)
    }
}

impl<A: Allocator + Copy + Send + Sync> Table<A> {
    /// Generates the table that `plan` counted into memory of `alloc`, and the answers to all
    /// queries from the same rows before they are stored.
    ///
    /// # Errors
    /// When `alloc` has no room for a column.
    pub(crate) fn load(
        plan: &Plan,
        alloc: A,
        progress: &Progress<'_>,
    ) -> Result<(Table<A>, Reference), TryReserveError> {
        let text = TextPool::new(TEXT_POOL_BYTES, Distributions::static_default());
        let parts = plan
            .part_rows
            .iter()
            .map(|&rows| {
                let rows = usize::try_from(rows).expect("64-bit target");
                Columns::with_capacity(rows, alloc)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let loaded = thread::scope(|scope| {
            let threads: Vec<_> = (1..=plan.parts())
                .zip(parts)
                .map(|(part, columns)| {
                    let text = &text;
                    scope.spawn(move || load_part(plan, part, columns, text, progress))
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("loading ends"))
                .collect::<Vec<_>>()
        });
        let mut reference = Reference::default();
        let mut parts = Vec::with_capacity(loaded.len());
        for (columns, part_reference) in loaded {
            reference.merge(&part_reference);
            parts.push(columns);
        }
        Ok((Table { parts }, reference))
    }
}

/// Generates part `part` (from 1) of the table into `columns`.
fn load_part<A: Allocator + Copy>(
    plan: &Plan,
    part: i32,
    mut columns: Columns<A>,
    text: &TextPool,
    progress: &Progress<'_>,
) -> (Columns<A>, Reference) {
    let generator = LineItemGenerator::new_with_distributions_and_text_pool(
        plan.scale_factor,
        part,
        plan.parts(),
        Distributions::static_default(),
        text,
    );
    let mut reference = Reference::default();
    let mut unreported = 0;
    for row in generator.iter().map(Row::from) {
        reference.fold(&row);
        columns.push(row);
        unreported += 1;
        if unreported == PROGRESS_ROWS {
            progress.add(unreported);
            unreported = 0;
        }
    }
    progress.add(unreported);
    let planned = usize::try_from(part - 1).expect("parts count from 1");
    assert_eq!(columns.len() as u64, plan.part_rows[planned], "rows of part {part}");
    (columns, reference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use allocator_api2::alloc::Global;

    #[test]
    fn rows_are_counted_without_generating_them() {
        for (scale_factor, rows) in [(0.01, 60_175), (1.0, 6_001_215)] {
            for parts in [1, 2, 7] {
                assert_eq!(Plan::count(scale_factor, parts).rows(), rows, "{parts} parts");
            }
        }
    }

    #[test]
    fn the_first_rows_are_those_of_the_published_generator() {
        let plan = Plan::count(1.0, 6_000);
        let text = TextPool::new(TEXT_POOL_BYTES, Distributions::static_default());
        let rows = usize::try_from(plan.part_rows[0]).expect("64-bit target");
        let columns = Columns::with_capacity(rows, Global).expect("a small part fits");
        let progress = Progress::hidden();
        let (columns, _) = load_part(&plan, 1, columns, &text, &progress);
        // 1|155190|7706|1|17|21168.23|0.04|0.02|N|O|1996-03-13|...
        assert_eq!(columns.quantity[0], 1_700);
        assert_eq!(columns.extended_price[0], 2_116_823);
        assert_eq!(columns.discount[0], 4);
        assert_eq!(columns.tax[0], 2);
        assert_eq!((columns.return_flag[0], columns.line_status[0]), (b'N', b'O'));
        assert_eq!(columns.ship_date[0], 9_568);
    }

    #[test]
    fn the_parts_together_hold_the_whole_table_once() {
        let progress = Progress::hidden();
        let load = |parts| {
            Table::load(&Plan::count(0.001, parts), Global, &progress).expect("6,005 rows fit")
        };
        let (whole, reference) = load(1);
        let (split, split_reference) = load(4);
        let prices = |table: &Table<Global>| -> Vec<i64> {
            table.parts.iter().flat_map(|part| part.extended_price.iter().copied()).collect()
        };
        assert_eq!(prices(&whole), prices(&split));
        assert_eq!(reference, split_reference);
    }
}
