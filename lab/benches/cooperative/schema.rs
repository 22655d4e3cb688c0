//! The tables of TPC-C and what CH-benCHmark adds, with their indexes.
//!
//! Money is in cents, dates are seconds. Numbers of warehouses, districts, customers, items and
//! order lines begin with 0; numbers of orders with 1.

use crate::table::Table;
use farheap::pool::BufferPool;
use farheap::{PageId, Result};
use farheap_collections::pool::BTree;
use std::sync::{Arc, Mutex};

pub(crate) const DISTRICTS: u64 = 10;

/// Declares a table's columns: name and width in bytes.
macro_rules! columns {
    ($table:ident: $($name:ident $width:expr),* $(,)?) => {
        pub(crate) mod $table {
            #[allow(non_camel_case_types, clippy::upper_case_acronyms, dead_code)]
            enum At { $($name),* }
            $(
                #[allow(dead_code)]
                pub(crate) const $name: usize = At::$name as usize;
            )*
            pub(crate) const WIDTHS: &[usize] = &[$($width),*];
        }
    };
}

columns!(warehouse: ID 4, NAME 10, ADDRESS 71, TAX 4, YTD 8);
columns!(district: ID 4, W_ID 4, NAME 10, ADDRESS 71, TAX 4, YTD 8, NEXT_O_ID 4);
columns!(customer: ID 4, D_ID 4, W_ID 4, FIRST 16, MIDDLE 2, LAST 16, STREET_1 20, STREET_2 20,
    CITY 20, STATE 2, ZIP 9, PHONE 16, SINCE 8, CREDIT 2, CREDIT_LIM 8, DISCOUNT 4, BALANCE 8,
    YTD_PAYMENT 8, PAYMENT_CNT 4, DELIVERY_CNT 4, DATA 500);
columns!(history: C_ID 4, C_D_ID 4, C_W_ID 4, D_ID 4, W_ID 4, DATE 8, AMOUNT 8, DATA 24);
columns!(new_order: O_ID 4, D_ID 4, W_ID 4);
columns!(order: ID 4, D_ID 4, W_ID 4, C_ID 4, ENTRY_D 8, CARRIER_ID 4, OL_CNT 4, ALL_LOCAL 4);
columns!(order_line: O_ID 4, D_ID 4, W_ID 4, NUMBER 4, I_ID 4, SUPPLY_W_ID 4, DELIVERY_D 8,
    QUANTITY 4, AMOUNT 8, DIST_INFO 24);
columns!(item: ID 4, IM_ID 4, NAME 24, PRICE 4, DATA 50);
columns!(stock: I_ID 4, W_ID 4, QUANTITY 4, DIST_1 24, DIST_2 24, DIST_3 24, DIST_4 24, DIST_5 24,
    DIST_6 24, DIST_7 24, DIST_8 24, DIST_9 24, DIST_10 24, YTD 8, ORDER_CNT 4, REMOTE_CNT 4,
    DATA 50);
columns!(supplier: ID 4, NAME 25, ADDRESS 40, NATION 4, PHONE 15, BALANCE 8, COMMENT 100);
columns!(nation: ID 4, NAME 25, REGION 4, COMMENT 100);
columns!(region: ID 4, NAME 25, COMMENT 100);

/// How many rows there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) warehouses: u64,
    /// Customers of a district, and orders there after the load.
    pub(crate) customers: u64,
    /// Items, and stock rows of a warehouse.
    pub(crate) items: u64,
    pub(crate) suppliers: u64,
}

impl Sizes {
    /// TPC-C's numbers of rows multiplied by `scale`.
    pub(crate) fn new(warehouses: u64, scale: f64) -> Sizes {
        let scaled = |rows: f64| (rows * scale).round().max(10.0) as u64;
        Sizes {
            warehouses,
            customers: scaled(3_000.0),
            items: scaled(100_000.0),
            suppliers: scaled(10_000.0),
        }
    }

    /// Orders of a district that are delivered after the load: 70 %.
    pub(crate) fn delivered(&self) -> u64 {
        self.customers * 7 / 10
    }
}

/// A key of up to four numbers that sorts as they do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key([u8; 16], usize);

impl Key {
    pub(crate) fn new<const N: usize>(parts: [u32; N]) -> Key {
        let mut bytes = [0; 16];
        for (at, part) in bytes.chunks_mut(4).zip(parts) {
            at.copy_from_slice(&part.to_be_bytes());
        }
        Key(bytes, 4 * N)
    }
}

impl std::ops::Deref for Key {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0[..self.1]
    }
}

/// Part `at` of a key.
pub(crate) fn part(key: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(key[4 * at..4 * at + 4].try_into().expect("four bytes"))
}

/// What finds the tables in a table file.
#[derive(Clone)]
pub(crate) struct Catalog {
    pub(crate) sizes: Sizes,
    tables: [Table; TABLES],
    roots: [PageId; INDEXES],
}

const TABLES: usize = 12;
const INDEXES: usize = 9;

/// Tables and indexes on a pool.
pub(crate) struct Database {
    pub(crate) sizes: Sizes,
    pub(crate) pool: Arc<BufferPool>,
    tables: [Table; TABLES],
    indexes: [BTree; INDEXES],
    /// A lock for each district: who takes or gives back an order's number holds it.
    pub(crate) districts: Vec<Mutex<()>>,
}

macro_rules! named {
    ($list:ident $of:ty: $($name:ident $at:literal),*) => {
        $(pub(crate) fn $name(&self) -> &$of { &self.$list[$at] })*
    };
}

impl Database {
    named!(tables Table: warehouse 0, district 1, customer 2, history 3, new_order 4, order 5,
        order_line 6, item 7, stock 8, supplier 9, nation 10, region 11);
    named!(indexes BTree: warehouse_key 0, district_key 1, customer_key 2, new_order_key 3,
        order_key 4, order_by_customer 5, order_line_key 6, item_key 7, stock_key 8);

    pub(crate) fn create(pool: &Arc<BufferPool>, sizes: Sizes) -> Result<Database> {
        let widths: [&[usize]; TABLES] = [
            warehouse::WIDTHS,
            district::WIDTHS,
            customer::WIDTHS,
            history::WIDTHS,
            new_order::WIDTHS,
            order::WIDTHS,
            order_line::WIDTHS,
            item::WIDTHS,
            stock::WIDTHS,
            supplier::WIDTHS,
            nation::WIDTHS,
            region::WIDTHS,
        ];
        let tables = widths.map(|widths| Table::new(pool, widths));
        let mut roots = [PageId(0); INDEXES];
        for root in &mut roots {
            *root = BTree::create(pool)?.root();
        }
        Ok(Database::open(pool, &Catalog { sizes, tables, roots }))
    }

    pub(crate) fn open(pool: &Arc<BufferPool>, catalog: &Catalog) -> Database {
        let districts = catalog.sizes.warehouses * DISTRICTS;
        Database {
            sizes: catalog.sizes,
            pool: Arc::clone(pool),
            tables: catalog.tables.clone(),
            indexes: catalog.roots.map(|root| BTree::open(pool, root)),
            districts: (0..districts).map(|_| Mutex::new(())).collect(),
        }
    }

    /// Notes what is there as loaded.
    pub(crate) fn seal(&mut self) {
        for table in &mut self.tables {
            table.loaded = table.rows();
        }
    }

    pub(crate) fn catalog(&self) -> Catalog {
        Catalog {
            sizes: self.sizes,
            tables: self.tables.clone(),
            roots: std::array::from_fn(|at| self.indexes[at].root()),
        }
    }

    /// The row that an index has for a key.
    pub(crate) fn row(&self, index: &BTree, key: &[u8]) -> Result<Option<u64>> {
        let found = index.get(key)?;
        Ok(found.map(|row| u64::from_le_bytes(row[..].try_into().expect("eight bytes"))))
    }

    /// The row of a key that must exist.
    pub(crate) fn known_row(&self, index: &BTree, key: &[u8]) -> Result<u64> {
        Ok(self.row(index, key)?.unwrap_or_else(|| panic!("no row has the key {key:?}")))
    }
}
