//! Tables as columns of segments: 65,536 rows of one column are one [`Segment`], which lies on a tier
//! and can migrate to another while queries read it.
//!
//! `tables!` makes of each table's list of columns the row that the loader makes, the columns that
//! queries read, and the list of segments that the migrator moves. Used by `load`, `queries`, `stress`.
//!
//! # Invariants
//! 1. All columns of a table have the same chunks: chunk `i` of each has the same rows.
//! 2. Decimals are exact: prices in cents, all others in hundredths. Days count from 1970-01-01.

use crate::waits;
use clap::ValueEnum;
use farheap::{ByteCount, Tier};
use farheap_segments::{AutoPlacement, Migrator, Reading, Segment, SegmentError};
use std::ops::Range;

/// Rows of a segment.
pub(crate) const CHUNK_ROWS: usize = 1 << 16;

/// One column of a table.
pub(crate) struct Column<T> {
    chunks: Vec<Segment<T>>,
}

impl<T: Copy + Send + Sync> Column<T> {
    /// The values of one chunk, from where they lie at present.
    pub(crate) fn read(&self, chunk: usize) -> Reading<T> {
        waits::timed(|| self.chunks[chunk].read())
    }

    /// Chunks, each of [`CHUNK_ROWS`] rows at most.
    pub(crate) fn chunks(&self) -> Range<usize> {
        0..self.chunks.len()
    }
}

/// A column, whatever its values are.
pub(crate) trait AnyColumn: Sync {
    /// Bytes of its values.
    fn bytes(&self) -> ByteCount;

    /// Bytes of its values that lie in a tier.
    fn bytes_at(&self, tier: Tier) -> ByteCount;

    /// The addresses of its values at present, segment by segment.
    #[allow(dead_code, reason = "the benchmark `tiers` maps a file over them")]
    fn ranges(&self) -> Vec<Range<usize>>;

    /// Has the migrator move all its segments.
    fn move_all<'a>(&'a self, migrator: &mut Migrator<'a>, to: Tier);

    /// Has the migrator move the segments that fit into `room`, which they take.
    #[allow(dead_code, reason = "the benchmark `tiers` compares with such a choice")]
    fn move_within<'a>(&'a self, migrator: &mut Migrator<'a>, to: Tier, room: &mut ByteCount);

    /// Has its segments placed by how often they are read: each by itself, or all together.
    fn place_by_reads<'a>(&'a self, placement: &mut AutoPlacement<'a>, far: Tier, by: Unit);
}

/// What is placed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Unit {
    /// A chunk of a column
    Chunk,
    /// A column
    Column,
}

impl<T: Copy + Send + Sync> AnyColumn for Column<T> {
    fn bytes(&self) -> ByteCount {
        ByteCount(self.chunks.iter().map(|segment| segment.bytes().get()).sum())
    }

    fn bytes_at(&self, tier: Tier) -> ByteCount {
        let there = self.chunks.iter().filter(|segment| segment.tier() == tier);
        ByteCount(there.map(|segment| segment.bytes().get()).sum())
    }

    fn ranges(&self) -> Vec<Range<usize>> {
        let range = |segment: &Segment<T>| {
            let values = segment.read().as_ptr_range();
            values.start.addr()..values.end.addr()
        };
        self.chunks.iter().map(range).collect()
    }

    fn move_all<'a>(&'a self, migrator: &mut Migrator<'a>, to: Tier) {
        for segment in &self.chunks {
            migrator.add(segment, to);
        }
    }

    fn move_within<'a>(&'a self, migrator: &mut Migrator<'a>, to: Tier, room: &mut ByteCount) {
        for segment in &self.chunks {
            if let Some(left) = room.get().checked_sub(segment.bytes().get()) {
                *room = ByteCount(left);
                migrator.add(segment, to);
            }
        }
    }

    fn place_by_reads<'a>(&'a self, placement: &mut AutoPlacement<'a>, far: Tier, by: Unit) {
        if by == Unit::Column {
            placement.add_together(&self.chunks, far);
            return;
        }
        for segment in &self.chunks {
            placement.add(segment, far);
        }
    }
}

/// A column by its name.
pub(crate) type NamedColumn<'a> = (&'static str, &'a dyn AnyColumn);

/// What is known of a column before anything is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnType {
    pub(crate) table: &'static str,
    pub(crate) name: &'static str,
    /// Bytes of one value.
    pub(crate) bytes: u64,
}

impl ColumnType {
    /// Bytes of the column, with this number of rows.
    pub(crate) fn bytes_of(&self, rows: u64) -> ByteCount {
        ByteCount(self.bytes * rows)
    }
}

macro_rules! tables {
    ($($(#[$doc:meta])* $table:ident $name:literal of $row:ident {
        $($(#[$column_doc:meta])* $column:ident: $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            pub(crate) struct $table {
                $($(#[$column_doc])* pub(crate) $column: Column<$type>,)*
            }

            /// A row of the table.
            #[derive(Clone, Copy, Debug)]
            pub(crate) struct $row {
                $(pub(crate) $column: $type,)*
            }

            impl $table {
                /// Stores the rows, each column where `place` says by its name.
                ///
                /// # Errors
                /// When there is no memory for a segment.
                pub(crate) fn load(
                    rows: impl Iterator<Item = $row>,
                    place: &dyn Fn(&str) -> Tier,
                ) -> Result<$table, SegmentError> {
                    let mut rows = rows.peekable();
                    let mut chunk = Vec::with_capacity(CHUNK_ROWS);
                    $(let mut $column = Vec::new();)*
                    while rows.peek().is_some() {
                        chunk.clear();
                        chunk.extend(rows.by_ref().take(CHUNK_ROWS));
                        $(
                            let values = chunk.iter().map(|row: &$row| row.$column);
                            $column.push(Segment::collect(place(stringify!($column)), values)?);
                        )*
                    }
                    Ok($table { $($column: Column { chunks: $column },)* })
                }

                /// Appends the rows of another part of the table.
                pub(crate) fn append(&mut self, mut part: $table) {
                    $(self.$column.chunks.append(&mut part.$column.chunks);)*
                }

                /// Its columns.
                pub(crate) fn columns(&self) -> Vec<NamedColumn<'_>> {
                    vec![$((stringify!($column), &self.$column as &dyn AnyColumn),)*]
                }
            }
        )*

        /// The columns of all tables.
        pub(crate) const COLUMNS: &[ColumnType] = &[$($(ColumnType {
            table: $name,
            name: stringify!($column),
            bytes: size_of::<$type>() as u64,
        },)*)*];
    };
}

tables! {
    /// What was ordered: one row for each part of an order.
    LineItem "lineitem" of LineItemRow {
        l_orderkey: i64,
        l_partkey: i32,
        l_suppkey: i32,
        l_quantity: i32,
        l_extendedprice: i64,
        l_discount: i32,
        l_tax: i32,
        l_returnflag: u8,
        l_linestatus: u8,
        l_shipdate: i32,
        l_commitdate: i32,
        l_receiptdate: i32,
        /// The code of a ship mode; see `load::codes`.
        l_shipmode: u8,
    }
    /// The orders.
    Orders "orders" of OrdersRow {
        o_orderkey: i64,
        o_custkey: i32,
        o_totalprice: i64,
        o_orderdate: i32,
        /// The code of a priority.
        o_orderpriority: u8,
        o_shippriority: i32,
    }
    /// The customers. Their names are made of their keys.
    Customer "customer" of CustomerRow {
        c_custkey: i32,
        /// The code of a market segment.
        c_mktsegment: u8,
    }
    /// The parts.
    Part "part" of PartRow {
        p_partkey: i32,
        /// The codes of the five words of its name.
        p_name: [u8; 5],
        /// The code of a type.
        p_type: u8,
    }
    /// The suppliers. A nation's key is its code; 25 nations need no table of their own.
    Supplier "supplier" of SupplierRow {
        s_suppkey: i32,
        s_nationkey: u8,
    }
    /// Which supplier sells which part.
    PartSupp "partsupp" of PartSuppRow {
        ps_partkey: i32,
        ps_suppkey: i32,
        ps_supplycost: i64,
    }
}

/// The database.
pub(crate) struct Database {
    pub(crate) lineitem: LineItem,
    pub(crate) orders: Orders,
    pub(crate) customer: Customer,
    pub(crate) part: Part,
    pub(crate) supplier: Supplier,
    pub(crate) partsupp: PartSupp,
}

impl Database {
    /// Appends the rows of another part.
    pub(crate) fn append(&mut self, part: Database) {
        self.lineitem.append(part.lineitem);
        self.orders.append(part.orders);
        self.customer.append(part.customer);
        self.part.append(part.part);
        self.supplier.append(part.supplier);
        self.partsupp.append(part.partsupp);
    }

    /// The columns of all tables.
    pub(crate) fn columns(&self) -> Vec<NamedColumn<'_>> {
        let tables = [
            self.lineitem.columns(),
            self.orders.columns(),
            self.customer.columns(),
            self.part.columns(),
            self.supplier.columns(),
            self.partsupp.columns(),
        ];
        tables.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_chunks_that_all_columns_share() {
        let rows = CHUNK_ROWS as i32 + 3;
        let row = |key| SupplierRow { s_suppkey: key, s_nationkey: (key % 25) as u8 };
        let mut table = Supplier::load((0..rows).map(row), &|_| Tier::LOCAL).expect("fits");
        table.append(Supplier::load((rows..rows + 1).map(row), &|_| Tier::LOCAL).expect("fits"));
        let lengths: Vec<_> =
            table.s_suppkey.chunks().map(|chunk| table.s_suppkey.read(chunk).len()).collect();
        assert_eq!(lengths, [CHUNK_ROWS, 3, 1]);
        assert_eq!(table.s_nationkey.chunks(), table.s_suppkey.chunks());
        assert_eq!(table.s_suppkey.read(2)[..], [rows]);
        let [(key, keys), (nation, nations)] = table.columns()[..] else { panic!("two columns") };
        assert_eq!((key, nation), ("s_suppkey", "s_nationkey"));
        let values = CHUNK_ROWS as u64 + 4;
        assert_eq!(keys.bytes_at(Tier::LOCAL), ByteCount(4 * values));
        assert_eq!(nations.bytes_at(Tier::LOCAL), ByteCount(values));
        assert_eq!(nations.bytes_at(Tier::FAR), ByteCount::ZERO);
    }

    #[test]
    fn every_column_has_a_name_of_its_own() {
        let mut names: Vec<_> = COLUMNS.iter().map(|column| column.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), COLUMNS.len());
    }
}
