//! Tables of TPC-C's shape, and its transactions.

use crate::Failure;
use farheap::Result;
use farheap::pool::{BTree, BufferPool};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const DISTRICTS: u64 = 10;
const CUSTOMERS: u64 = 3_000;
const ITEMS: u64 = 20_000;
const STOCK_ROW: usize = 240;
const CUSTOMER_ROW: usize = 480;

/// Index trees that hold their rows.
pub(crate) struct Database {
    warehouses: u64,
    customer: BTree,
    stock: BTree,
    item: BTree,
    order: BTree,
    order_line: BTree,
    history: BTree,
    next_order: AtomicU64,
}

fn key<const N: usize>(parts: [u64; N]) -> Vec<u8> {
    parts.iter().flat_map(|part| (*part as u32).to_be_bytes()).collect()
}

impl Database {
    pub(crate) fn load(
        pool: &Arc<BufferPool>,
        warehouses: u64,
    ) -> std::result::Result<Database, Failure> {
        let tree = || BTree::create(pool);
        let database = Database {
            warehouses,
            customer: tree()?,
            stock: tree()?,
            item: tree()?,
            order: tree()?,
            order_line: tree()?,
            history: tree()?,
            next_order: AtomicU64::new(0),
        };
        for item in 0..ITEMS {
            database.item.insert(&key([item]), &[1; 80])?;
        }
        for warehouse in 0..warehouses {
            for item in 0..ITEMS {
                database.stock.insert(&key([warehouse, item]), &[0; STOCK_ROW])?;
            }
            for district in 0..DISTRICTS {
                for customer in 0..CUSTOMERS {
                    let row = key([warehouse, district, customer]);
                    database.customer.insert(&row, &[0; CUSTOMER_ROW])?;
                }
            }
        }
        Ok(database)
    }

    pub(crate) fn count_new_orders(&self) -> Result<u64> {
        let mut count = 0;
        for entry in self.order.scan(b"") {
            entry?;
            count += 1;
        }
        Ok(count)
    }
}

/// A stream of transactions with its home warehouse.
pub(crate) struct Stream<'d> {
    database: &'d Database,
    home: u64,
    district: u64,
    random: u64,
    read_only: bool,
}

impl<'d> Stream<'d> {
    pub(crate) fn new(database: &'d Database, number: u64, read_only: bool) -> Stream<'d> {
        let home = number % database.warehouses;
        let random = 0x9E37_79B9_7F4A_7C15 ^ (number + 1) << 32;
        Stream { database, home, district: number % DISTRICTS, random, read_only }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        ((u128::from(self.random) * u128::from(n)) >> 64) as u64
    }

    /// TPC-C's skewed choice.
    fn skewed(&mut self, a: u64, n: u64) -> u64 {
        (self.below(a + 1) | self.below(n)) % n
    }

    /// Runs one transaction of the mix; returns whether it was a new order.
    pub(crate) fn transaction(&mut self) -> Result<bool> {
        let draw = self.below(100);
        if self.read_only {
            return if draw < 92 { self.new_order() } else { self.order_status() };
        }
        match draw {
            0..44 => self.new_order(),
            44..88 => self.payment(),
            88..92 => self.order_status(),
            92..96 => self.delivery(),
            _ => self.stock_level(),
        }
    }

    /// Changes a row, or reads what would be changed.
    fn bump(&self, tree: &BTree, key: &[u8]) -> Result<()> {
        if self.read_only {
            return tree.get(key).map(drop);
        }
        tree.update(key, |row| row[0] = row[0].wrapping_add(1)).map(drop)
    }

    fn new_order(&mut self) -> Result<bool> {
        let database = self.database;
        let number = database.next_order.fetch_add(1, Ordering::Relaxed);
        let customer = self.skewed(1023, CUSTOMERS);
        database.customer.get(&key([self.home, self.district, customer]))?;
        let lines = 5 + self.below(11);
        for line in 0..lines {
            let item = self.skewed(8191, ITEMS);
            let remote = self.below(100) == 0;
            let from = if remote { self.below(database.warehouses) } else { self.home };
            database.item.get(&key([item]))?;
            self.bump(&database.stock, &key([from, item]))?;
            if !self.read_only {
                let row = key([self.home, self.district, number, line]);
                database.order_line.insert(&row, &[0; 54])?;
            }
        }
        if !self.read_only {
            database.order.insert(&key([self.home, self.district, number]), &[0; 24])?;
        }
        Ok(true)
    }

    fn payment(&mut self) -> Result<bool> {
        let customer = self.skewed(1023, CUSTOMERS);
        self.bump(&self.database.customer, &key([self.home, self.district, customer]))?;
        let number = self.database.next_order.fetch_add(1, Ordering::Relaxed);
        self.database.history.insert(&key([self.home, self.district, number]), &[0; 46])?;
        Ok(false)
    }

    fn order_status(&mut self) -> Result<bool> {
        let customer = self.skewed(1023, CUSTOMERS);
        self.database.customer.get(&key([self.home, self.district, customer]))?;
        let order = self.database.next_order.load(Ordering::Relaxed).saturating_sub(50);
        let from = key([self.home, self.district, order]);
        for entry in self.database.order_line.scan(&from).take(10) {
            entry?;
        }
        Ok(false)
    }

    fn delivery(&mut self) -> Result<bool> {
        let from = key([self.home, self.district]);
        let oldest = self.database.order.scan(&from).next().transpose()?;
        if let Some((order, _)) = oldest {
            self.bump(&self.database.order, &order)?;
            for line in self.database.order_line.scan(&order).take(10) {
                let (line, _) = line?;
                self.bump(&self.database.order_line, &line)?;
            }
        }
        Ok(false)
    }

    fn stock_level(&mut self) -> Result<bool> {
        for _ in 0..20 {
            let item = self.skewed(8191, ITEMS);
            self.database.stock.get(&key([self.home, item]))?;
        }
        Ok(false)
    }
}
