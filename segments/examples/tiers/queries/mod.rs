//! The queries, planned by hand: scans of columns chunk by chunk, hash joins and aggregations.
//!
//! A query reads a chunk's columns as slices ([`Column::read`](crate::tables::Column::read)) and leaves
//! them before the next chunk, so a migration waits for one chunk at most. Its hash tables are local. Joins build a
//! table of the smaller side and probe it with the larger. [`scans`] has the queries over one table or a
//! small join, [`joins`] those that join the large tables.

mod joins;
mod scans;

use crate::answers::Answer;
use crate::tables::Database;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use tpchgen::dates::TPCHDate;

/// Answers a query of [`QUERIES`](crate::answers::QUERIES).
pub(crate) fn run(query: u8, data: &Database) -> Answer {
    match query {
        1 => scans::pricing_summary(data),
        3 => joins::shipping_priority(data),
        4 => joins::order_priority(data),
        6 => scans::revenue_change(data),
        9 => joins::product_profit(data),
        12 => joins::shipping_modes(data),
        14 => scans::promotion_effect(data),
        18 => joins::large_volume_customers(data),
        _ => unreachable!("Q{query} is refused by the command line"),
    }
}

/// A hash table by a key of a table's.
type ByKey<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

/// Hashes one integer: keys are dense and come from no adversary, so one multiplication does.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_i32(&mut self, key: i32) {
        self.write_u64(u64::from(key.cast_unsigned()));
    }

    fn write_i64(&mut self, key: i64) {
        self.write_u64(key.cast_unsigned());
    }

    fn write_u64(&mut self, key: u64) {
        let product = u128::from(self.0.rotate_left(32) ^ key) * 0x9e37_79b9_7f4a_7c15;
        // Both halves: the table takes its position from the low bits, its tags from the high ones.
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Days from 1970-01-01 to a day of the Gregorian calendar.
const fn day(year: i32, month: i32, day: i32) -> i32 {
    // Counted from March on, so that the leap day is a year's last.
    let year = if month < 3 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    days - 719_468
}

const _: () = assert!(day(1992, 1, 1) == TPCHDate::UNIX_EPOCH_OFFSET);
const _: () = assert!(day(1994, 1, 1) == 8_766 && day(1998, 9, 2) == 10_471);

/// The year of a day of the specification's seven years.
fn year_of(date: i32) -> i32 {
    const NEW_YEARS: [i32; 6] = [
        day(1993, 1, 1),
        day(1994, 1, 1),
        day(1995, 1, 1),
        day(1996, 1, 1),
        day(1997, 1, 1),
        day(1998, 1, 1),
    ];
    1992 + NEW_YEARS.iter().map(|new_year| i32::from(date >= *new_year)).sum::<i32>()
}

/// A price less its discount, in ten-thousandths.
fn discounted(price: i64, discount: i32) -> i64 {
    price * (100 - i64::from(discount))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::{Value, published};
    use crate::load::{Plan, database};
    use farheap::Tier;

    #[test]
    fn years_begin_on_new_years_day() {
        assert_eq!(year_of(day(1992, 1, 1)), 1992);
        assert_eq!(year_of(day(1996, 12, 31)), 1996);
        assert_eq!(year_of(day(1997, 1, 1)), 1997);
        assert_eq!(year_of(day(1998, 12, 31)), 1998);
    }

    #[test]
    fn answers_do_not_depend_on_how_the_tables_are_cut() {
        let plan = Plan::count(0.02);
        let load = |parts| database(&plan, parts, &|_| Tier::LOCAL).expect("30 MiB fit");
        let (whole, cut) = (load(1), load(5));
        for query in crate::answers::QUERIES {
            let answer = run(query, &whole);
            assert!(!answer.0.is_empty() || query == 18, "Q{query}");
            assert_eq!(answer, run(query, &cut), "Q{query}");
        }
    }

    #[test]
    fn each_query_has_as_many_columns_as_the_published_answer() {
        let plan = Plan::count(0.05);
        let data = database(&plan, 2, &|_| Tier::LOCAL).expect("20 MiB fit");
        for query in crate::answers::QUERIES {
            let published = published(query, 1.0).expect("published");
            let columns = published[0].split('|').count();
            let answer = run(query, &data);
            let first: &Vec<Value> = answer.0.first().expect("a row");
            assert_eq!(first.len(), columns, "Q{query}");
        }
    }
}
