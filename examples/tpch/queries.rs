//! Q1 and Q6 over columns: the code whose time is measured.
//!
//! [`run`] scans every part of a [`Table`] with a thread of its own and adds the partial sums. The
//! scan sees slices only, so far and local memory run the same machine code. Within a part it goes
//! block by block: sums of one block stay in 64 bits, blocks are added in 128.
//!
//! # Invariants
//! 1. The sums of one block cannot overflow: [`BLOCK_ROWS`] times the largest value of a row.

use crate::answers::{
    Answer, Group, Groups, Q1_SHIP_DATE_MAX, Q6_DISCOUNT_MAX, Q6_DISCOUNT_MIN, Q6_QUANTITY_END,
    Q6_SHIP_DATE_END, Q6_SHIP_DATE_MIN, Query,
};
use crate::lineitem::{Columns, Table};
use allocator_api2::alloc::Allocator;
use std::ops::Range;
use std::thread;

/// Rows summed in 64 bits before they are added to the 128-bit sums.
const BLOCK_ROWS: usize = 1 << 16;

/// The largest charge of a row: 50 of the dearest part (2,098.99), no discount, 8 % tax.
const CHARGE_MAX: i64 = 50 * 209_899 * 100 * 108;

const _: () = assert!(CHARGE_MAX.checked_mul(BLOCK_ROWS as i64).is_some(), "invariant 1");

/// Groups that [`group_code`] tells apart.
const GROUPS: usize = 8;

/// Where Q1 counts rows that its predicate leaves out, so that the scan has no branch.
const LEFT_OUT: usize = GROUPS;

/// Answers `query` from the columns, one thread per part.
pub(crate) fn run<A: Allocator + Sync>(query: Query, table: &Table<A>) -> Answer {
    match query {
        Query::Q1 => {
            let mut sums = [Group::default(); GROUPS];
            for part in scan(table, pricing_summary) {
                for (sum, group) in sums.iter_mut().zip(&part) {
                    *sum += group;
                }
            }
            Answer::PricingSummary(named(&sums))
        }
        Query::Q6 => Answer::Revenue(scan(table, revenue).into_iter().sum()),
    }
}

/// Runs `work` on every part, the first on this thread and each other on its own.
fn scan<A, R, F>(table: &Table<A>, work: F) -> Vec<R>
where
    A: Allocator + Sync,
    R: Send,
    F: Fn(&Columns<A>) -> R + Sync,
{
    let Some((first, others)) = table.parts.split_first() else { return Vec::new() };
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = others.iter().map(|part| scope.spawn(move || work(part))).collect();
        let mut results = vec![work(first)];
        results.extend(threads.into_iter().map(|thread| thread.join().expect("the scan ends")));
        results
    })
}

/// The ranges of at most [`BLOCK_ROWS`] rows that make up `rows`.
fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(BLOCK_ROWS).map(move |start| start..rows.min(start + BLOCK_ROWS))
}

/// A number below [`GROUPS`] that is another one for every pair of flag and status.
#[inline]
fn group_code(return_flag: u8, line_status: u8) -> usize {
    // Bits 1 and 2 of A, R and N are 0, 1 and 3; bit 0 of F and O is 0 and 1.
    usize::from(((return_flag >> 1) & 3) << 1 | (line_status & 1))
}

/// The groups that have rows, by flag and status.
fn named(sums: &[Group; GROUPS]) -> Groups {
    let mut groups = Groups::new();
    for flag in *b"ANR" {
        for status in *b"FO" {
            let group = sums[group_code(flag, status)];
            if group.rows > 0 {
                groups.insert((flag, status), group);
            }
        }
    }
    groups
}

/// Sums of one group over one block: what [`Group`] is to the table.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct BlockGroup {
    rows: i64,
    quantity: i64,
    base_price: i64,
    disc_price: i64,
    charge: i64,
    discount: i64,
}

impl From<&BlockGroup> for Group {
    fn from(block: &BlockGroup) -> Group {
        Group {
            rows: u64::try_from(block.rows).expect("a count"),
            quantity: i128::from(block.quantity),
            base_price: i128::from(block.base_price),
            disc_price: i128::from(block.disc_price),
            charge: i128::from(block.charge),
            discount: i128::from(block.discount),
        }
    }
}

/// Q1 over one part.
fn pricing_summary<A: Allocator>(columns: &Columns<A>) -> [Group; GROUPS] {
    let mut sums = [Group::default(); GROUPS];
    for block in blocks(columns.len()) {
        let groups = pricing_summary_block(
            &columns.quantity[block.clone()],
            &columns.extended_price[block.clone()],
            &columns.discount[block.clone()],
            &columns.tax[block.clone()],
            &columns.return_flag[block.clone()],
            &columns.line_status[block.clone()],
            &columns.ship_date[block],
        );
        for (sum, group) in sums.iter_mut().zip(&groups) {
            *sum += &Group::from(group);
        }
    }
    sums
}

/// Q1 over one block; the last element counts the rows left out.
#[inline(never)]
fn pricing_summary_block(
    quantity: &[i64],
    extended_price: &[i64],
    discount: &[i64],
    tax: &[i64],
    return_flag: &[u8],
    line_status: &[u8],
    ship_date: &[i32],
) -> [BlockGroup; GROUPS + 1] {
    let rows = quantity.len();
    // Slices of one length let the compiler drop the bounds checks below.
    let (extended_price, discount, tax) =
        (&extended_price[..rows], &discount[..rows], &tax[..rows]);
    let (return_flag, line_status) = (&return_flag[..rows], &line_status[..rows]);
    let ship_date = &ship_date[..rows];
    let mut groups = [BlockGroup::default(); GROUPS + 1];
    for row in 0..rows {
        let code = group_code(return_flag[row], line_status[row]);
        let group = if ship_date[row] <= Q1_SHIP_DATE_MAX { code } else { LEFT_OUT };
        let group = &mut groups[group];
        let disc_price = extended_price[row] * (100 - discount[row]);
        group.rows += 1;
        group.quantity += quantity[row];
        group.base_price += extended_price[row];
        group.disc_price += disc_price;
        group.charge += disc_price * (100 + tax[row]);
        group.discount += discount[row];
    }
    groups
}

/// Q6 over one part.
fn revenue<A: Allocator>(columns: &Columns<A>) -> i128 {
    let sums = blocks(columns.len()).map(|block| {
        i128::from(revenue_block(
            &columns.quantity[block.clone()],
            &columns.extended_price[block.clone()],
            &columns.discount[block.clone()],
            &columns.ship_date[block],
        ))
    });
    sums.sum()
}

/// Q6 over one block, without branches.
#[inline(never)]
fn revenue_block(
    quantity: &[i64],
    extended_price: &[i64],
    discount: &[i64],
    ship_date: &[i32],
) -> i64 {
    let rows = quantity.len();
    let (extended_price, discount) = (&extended_price[..rows], &discount[..rows]);
    let ship_date = &ship_date[..rows];
    let mut sum = 0;
    for row in 0..rows {
        let shipped = (ship_date[row] >= Q6_SHIP_DATE_MIN) & (ship_date[row] < Q6_SHIP_DATE_END);
        let discounted = (discount[row] >= Q6_DISCOUNT_MIN) & (discount[row] <= Q6_DISCOUNT_MAX);
        let keep = shipped & discounted & (quantity[row] < Q6_QUANTITY_END);
        sum += extended_price[row] * discount[row] * i64::from(keep);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::{Reference, published};
    use crate::lineitem::Plan;
    use crate::progress::Progress;
    use allocator_api2::alloc::Global;

    fn load(scale_factor: f64, parts: i32) -> (Table<Global>, Reference) {
        let plan = Plan::count(scale_factor, parts);
        Table::load(&plan, Global, &Progress::hidden()).expect("the table fits")
    }

    #[test]
    fn columns_and_rows_give_the_published_answers_at_scale_factor_1() {
        let (table, reference) = load(1.0, 2);
        for query in [Query::Q1, Query::Q6] {
            let expected = published(query, 1.0).expect("published");
            assert_eq!(reference.answer(query).lines(), expected);
            assert_eq!(run(query, &table), reference.answer(query));
        }
    }

    #[test]
    fn columns_and_rows_give_the_known_answers_at_scale_factor_0_01() {
        let (table, reference) = load(0.01, 1);
        let expected = [
            "A|F|380456.00|532348211.65|505822441.49|526165934.00|25.58|35785.71|0.05|14876",
            "N|F|8971.00|12384801.37|11798257.21|12282485.06|25.78|35588.51|0.05|348",
            "N|O|742802.00|1041502841.45|989737518.63|1029418531.52|25.45|35691.13|0.05|29181",
            "R|F|381449.00|534594445.35|507996454.41|528524219.36|25.60|35874.01|0.05|14902",
        ];
        assert_eq!(run(Query::Q1, &table).lines(), expected);
        assert_eq!(run(Query::Q6, &table), Answer::Revenue(11_930_532_253));
        assert_eq!(run(Query::Q1, &table), reference.answer(Query::Q1));
        assert_eq!(run(Query::Q6, &table), reference.answer(Query::Q6));
    }

    #[test]
    fn the_number_of_parts_does_not_change_the_answers() {
        let (one, _) = load(0.003, 1);
        let (five, _) = load(0.003, 5);
        assert_eq!(run(Query::Q1, &one), run(Query::Q1, &five));
        assert_eq!(run(Query::Q6, &one), run(Query::Q6, &five));
    }

    #[test]
    fn group_codes_differ_for_all_flags_and_stay_below_the_number_of_groups() {
        let codes: std::collections::BTreeSet<_> = [b'A', b'N', b'R']
            .iter()
            .flat_map(|&f| [group_code(f, b'F'), group_code(f, b'O')])
            .collect();
        assert_eq!(codes.len(), 6);
        assert!(codes.iter().all(|&code| code < GROUPS), "{codes:?}");
    }

    #[test]
    fn blocks_cover_every_row_once() {
        for rows in [0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS] {
            let mut next = 0;
            for block in blocks(rows) {
                assert_eq!(block.start, next);
                assert!(block.len() <= BLOCK_ROWS && !block.is_empty());
                next = block.end;
            }
            assert_eq!(next, rows);
        }
    }
}
