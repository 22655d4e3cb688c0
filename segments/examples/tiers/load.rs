//! Generates the tables, as the specification's generator does, into segments.
//!
//! A [`Plan`] counts rows without generating them; [`database`] generates on several
//! threads, each a part of every table. Text is stored as codes: the place of a word in the
//! specification's lists, which [`Codes`] looks up.

use crate::tables::{
    COLUMNS, ColumnType, Customer, CustomerRow, Database, LineItem, LineItemRow, Orders, OrdersRow,
    Part, PartRow, PartSupp, PartSuppRow, Supplier, SupplierRow,
};
use farheap::{ByteCount, Tier};
use farheap_segments::SegmentError;
use std::collections::HashMap;
use std::thread;
use tpchgen::dates::GenerateUtils;
use tpchgen::distribution::{Distribution, Distributions};
use tpchgen::generators::{
    CustomerGenerator, LineItemGenerator, OrderGenerator, PartGenerator, PartSuppGenerator,
    SupplierGenerator,
};
use tpchgen::text::TextPool;

/// Text that the generator cuts its comments from. They are not stored, so a small pool does; the
/// generator's own is 300 MiB. Comments have their own random numbers: no other column changes.
const TEXT_POOL_BYTES: i32 = 1 << 20;

/// Decides where a column's segments are made.
pub(crate) type Place<'a> = dyn Fn(&str) -> Tier + Sync + 'a;

/// How many rows there will be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    scale_factor: f64,
    lineitem_rows: u64,
}

impl Plan {
    /// Counts the rows at a scale factor. Draws only the number of lines of each order.
    pub(crate) fn count(scale_factor: f64) -> Plan {
        let orders = OrderGenerator::calculate_row_count(scale_factor, 1, 1);
        let mut lines = OrderGenerator::create_line_count_random();
        let mut count = || {
            let count = lines.next_value();
            lines.row_finished();
            u64::try_from(count).expect("an order has 1 to 7 lines")
        };
        Plan { scale_factor, lineitem_rows: (0..orders).map(|_| count()).sum() }
    }

    /// Rows of a table.
    pub(crate) fn rows(&self, table: &str) -> u64 {
        let count = |base| GenerateUtils::calculate_row_count(base, self.scale_factor, 1, 1);
        let rows = match table {
            "lineitem" => return self.lineitem_rows,
            "orders" => count(OrderGenerator::SCALE_BASE),
            "customer" => count(150_000),
            "part" => count(200_000),
            "supplier" => count(10_000),
            "partsupp" => 4 * count(200_000),
            _ => unreachable!("{table} is not in `tables`"),
        };
        u64::try_from(rows).expect("counts are positive")
    }

    /// Bytes of a column.
    pub(crate) fn bytes_of(&self, column: &ColumnType) -> ByteCount {
        column.bytes_of(self.rows(column.table))
    }

    /// Bytes of all columns.
    pub(crate) fn bytes(&self) -> ByteCount {
        ByteCount(COLUMNS.iter().map(|column| self.bytes_of(column).get()).sum())
    }
}

/// The codes of words: their places in one of the specification's lists.
pub(crate) struct Codes {
    codes: HashMap<&'static str, u8>,
}

impl Codes {
    pub(crate) fn of(words: &'static Distribution) -> Codes {
        let places = (0..=u8::MAX).zip(words.get_values());
        Codes { codes: places.map(|(code, word)| (*word, code)).collect() }
    }

    /// The code of a word.
    ///
    /// # Panics
    /// When the list does not have it.
    pub(crate) fn code(&self, word: &str) -> u8 {
        *self.codes.get(word).unwrap_or_else(|| panic!("`{word}` is not in the specification"))
    }
}

fn narrow(value: i64) -> i32 {
    i32::try_from(value).expect("only keys of orders and prices exceed 2^31")
}

/// What all tables are generated with.
struct Source<'a> {
    scale_factor: f64,
    parts: i32,
    words: &'static Distributions,
    text: &'a TextPool,
}

/// Generates the database with `threads` threads, each column where `place` says.
///
/// # Errors
/// When there is no memory for a segment.
pub(crate) fn database(
    plan: &Plan,
    threads: i32,
    place: &Place<'_>,
) -> Result<Database, SegmentError> {
    let words = Distributions::static_default();
    let text = TextPool::new(TEXT_POOL_BYTES, words);
    let source = Source { scale_factor: plan.scale_factor, parts: threads, words, text: &text };
    let source = &source;
    let mut parts = thread::scope(|scope| {
        let threads: Vec<_> =
            (1..=threads).map(|part| scope.spawn(move || source.database(part, place))).collect();
        let ended = threads.into_iter().map(|thread| thread.join().expect("loading ends"));
        ended.collect::<Result<Vec<_>, SegmentError>>()
    })?
    .into_iter();
    let mut whole = parts.next().expect("there is a thread");
    parts.for_each(|part| whole.append(part));
    Ok(whole)
}

impl Source<'_> {
    /// One part of every table.
    fn database(&self, part: i32, place: &Place<'_>) -> Result<Database, SegmentError> {
        Ok(Database {
            lineitem: self.lineitem(part, place)?,
            orders: self.orders(part, place)?,
            customer: self.customer(part, place)?,
            part: self.part(part, place)?,
            supplier: self.supplier(part, place)?,
            partsupp: self.partsupp(part, place)?,
        })
    }

    fn lineitem(&self, part: i32, place: &Place<'_>) -> Result<LineItem, SegmentError> {
        let generator = LineItemGenerator::new_with_distributions_and_text_pool(
            self.scale_factor,
            part,
            self.parts,
            self.words,
            self.text,
        );
        let modes = Codes::of(self.words.ship_modes());
        let rows = generator.iter().map(|row| LineItemRow {
            l_orderkey: row.l_orderkey,
            l_partkey: narrow(row.l_partkey),
            l_suppkey: narrow(row.l_suppkey),
            l_quantity: narrow(row.l_quantity * 100),
            l_extendedprice: row.l_extendedprice.into_inner(),
            l_discount: narrow(row.l_discount.into_inner()),
            l_tax: narrow(row.l_tax.into_inner()),
            l_returnflag: row.l_returnflag.as_bytes()[0],
            l_linestatus: row.l_linestatus.as_bytes()[0],
            l_shipdate: row.l_shipdate.to_unix_epoch(),
            l_commitdate: row.l_commitdate.to_unix_epoch(),
            l_receiptdate: row.l_receiptdate.to_unix_epoch(),
            l_shipmode: modes.code(row.l_shipmode),
        });
        LineItem::load(rows, place)
    }

    fn orders(&self, part: i32, place: &Place<'_>) -> Result<Orders, SegmentError> {
        let generator = OrderGenerator::new_with_distributions_and_text_pool(
            self.scale_factor,
            part,
            self.parts,
            self.words,
            self.text,
        );
        let priorities = Codes::of(self.words.order_priority());
        let rows = generator.iter().map(|row| OrdersRow {
            o_orderkey: row.o_orderkey,
            o_custkey: narrow(row.o_custkey),
            o_totalprice: row.o_totalprice.into_inner(),
            o_orderdate: row.o_orderdate.to_unix_epoch(),
            o_orderpriority: priorities.code(row.o_orderpriority),
            o_shippriority: row.o_shippriority,
        });
        Orders::load(rows, place)
    }

    fn customer(&self, part: i32, place: &Place<'_>) -> Result<Customer, SegmentError> {
        let generator = CustomerGenerator::new_with_distributions_and_text_pool(
            self.scale_factor,
            part,
            self.parts,
            self.words,
            self.text,
        );
        let segments = Codes::of(self.words.market_segments());
        let rows = generator.iter().map(|row| CustomerRow {
            c_custkey: narrow(row.c_custkey),
            c_mktsegment: segments.code(row.c_mktsegment),
        });
        Customer::load(rows, place)
    }

    fn part(&self, part: i32, place: &Place<'_>) -> Result<Part, SegmentError> {
        let generator = PartGenerator::new_with_distributions_and_text_pool(
            self.scale_factor,
            part,
            self.parts,
            self.words,
            self.text,
        );
        let colors = Codes::of(self.words.part_colors());
        let types = Codes::of(self.words.part_types());
        let rows = generator.iter().map(|row| {
            let mut name = [0; 5];
            for (code, word) in name.iter_mut().zip(row.p_name.to_string().split(' ')) {
                *code = colors.code(word);
            }
            PartRow {
                p_partkey: narrow(row.p_partkey),
                p_name: name,
                p_type: types.code(row.p_type),
            }
        });
        Part::load(rows, place)
    }

    fn supplier(&self, part: i32, place: &Place<'_>) -> Result<Supplier, SegmentError> {
        let generator = SupplierGenerator::new_with_distributions_and_text_pool(
            self.scale_factor,
            part,
            self.parts,
            self.words,
            self.text,
        );
        let rows = generator.iter().map(|row| SupplierRow {
            s_suppkey: narrow(row.s_suppkey),
            s_nationkey: u8::try_from(row.s_nationkey).expect("there are 25 nations"),
        });
        Supplier::load(rows, place)
    }

    fn partsupp(&self, part: i32, place: &Place<'_>) -> Result<PartSupp, SegmentError> {
        let generator =
            PartSuppGenerator::new_with_text_pool(self.scale_factor, part, self.parts, self.text);
        let rows = generator.iter().map(|row| PartSuppRow {
            ps_partkey: narrow(row.ps_partkey),
            ps_suppkey: narrow(row.ps_suppkey),
            ps_supplycost: row.ps_supplycost.into_inner(),
        });
        PartSupp::load(rows, place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_loaded_are_those_counted_before_whatever_the_number_of_threads() {
        let plan = Plan::count(0.01);
        assert_eq!(plan.rows("lineitem"), 60_175);
        for threads in [1, 3] {
            let data = database(&plan, threads, &|_| Tier::LOCAL).expect("15 MiB fit");
            for (column, (name, stored)) in COLUMNS.iter().zip(data.columns()) {
                assert_eq!(column.name, name);
                let bytes = stored.bytes_at(Tier::LOCAL);
                assert_eq!(bytes, plan.bytes_of(column), "{name}");
            }
        }
    }
}
