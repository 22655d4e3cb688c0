//! Generates the initial tables.

use crate::random::Random;
use crate::schema::{DISTRICTS, Database, Key, Sizes};
use crate::table::Table;
use farheap::Result;
use farheap::pool::BufferPool;
use farheap_collections::pool::BTree;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a column allocated at once: scans read neighbours.
const EXTENT: u64 = 16;

/// 1992-01-01; a date of the load is up to seven years later.
pub(crate) const EPOCH: u64 = 694_224_000;
const YEARS: u64 = 7;
pub(crate) const YEAR_SECONDS: u64 = 31_557_600;

/// Year of a date.
pub(crate) fn year(date: u64) -> u64 {
    1992 + (date - EPOCH) / YEAR_SECONDS
}

pub(crate) const NATIONS: u32 = 62;

/// Fills an empty database; `progress` is called with the number of warehouses done.
pub(crate) fn load(
    pool: &Arc<BufferPool>,
    sizes: Sizes,
    seed: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Database> {
    let mut database = Database::create(pool, sizes)?;
    shared_tables(&database, seed)?;
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let w = next.fetch_add(1, Ordering::Relaxed);
                if w >= sizes.warehouses {
                    return Ok(());
                }
                let random = Random::new(seed.wrapping_mul(1_000_003) + w + 1);
                Loader { database: &database, random, w: w as u32 }.warehouse()?;
                progress(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a loader"))
    })?;
    database.seal();
    Ok(database)
}

fn add(pool: &BufferPool, table: &Table, values: &[&[u8]]) -> Result<u64> {
    let row = table.append(pool, values, EXTENT)?;
    table.set_visible(pool, row, true)?;
    Ok(row)
}

fn index(tree: &BTree, key: Key, row: u64) -> Result<()> {
    let is_new = tree.insert(&key, &row.to_le_bytes())?;
    assert!(is_new, "a key is generated once");
    Ok(())
}

/// Items, suppliers, nations and regions.
fn shared_tables(database: &Database, seed: u64) -> Result<()> {
    let (pool, mut random) = (&*database.pool, Random::new(seed));
    let mut text = [0; 255];
    for id in 0..database.sizes.items as u32 {
        random.letters(&mut text);
        let (im, price) = (random.below(10_000) as u32, random.within(100, 10_000) as u32);
        let values: [&[u8]; 5] = [
            &id.to_le_bytes(),
            &im.to_le_bytes(),
            &text[..24],
            &price.to_le_bytes(),
            &text[24..74],
        ];
        index(database.item_key(), Key::new([id]), add(pool, database.item(), &values)?)?;
    }
    for id in 0..database.sizes.suppliers as u32 {
        random.letters(&mut text);
        let nation = (random.below(NATIONS.into()) as u32).to_le_bytes();
        let values: [&[u8]; 7] = [
            &id.to_le_bytes(),
            &text[..25],
            &text[25..65],
            &nation,
            &text[65..80],
            &[0; 8],
            &text[80..180],
        ];
        add(pool, database.supplier(), &values)?;
    }
    for id in 0..NATIONS {
        random.letters(&mut text);
        let (number, region) = (id.to_le_bytes(), (id % 5).to_le_bytes());
        let values: [&[u8]; 4] = [&number, &text[..25], &region, &text[25..125]];
        add(pool, database.nation(), &values)?;
    }
    for id in 0..5u32 {
        random.letters(&mut text);
        add(pool, database.region(), &[&id.to_le_bytes(), &text[..25], &text[25..125]])?;
    }
    Ok(())
}

struct Loader<'d> {
    database: &'d Database,
    random: Random,
    w: u32,
}

impl Loader<'_> {
    fn warehouse(&mut self) -> Result<()> {
        let (database, w) = (self.database, self.w);
        let pool = &*database.pool;
        let mut text = [0; 81];
        self.random.letters(&mut text);
        let tax = (self.random.below(2_001) as u32).to_le_bytes();
        let ytd = (database.sizes.customers * DISTRICTS * 1_000).to_le_bytes();
        let values: [&[u8]; 5] = [&w.to_le_bytes(), &text[..10], &text[10..81], &tax, &ytd];
        let row = add(pool, database.warehouse(), &values)?;
        index(database.warehouse_key(), Key::new([w]), row)?;
        self.stock()?;
        for d in 0..DISTRICTS as u32 {
            self.district(d)?;
            self.customers(d)?;
            self.orders(d)?;
        }
        Ok(())
    }

    fn stock(&mut self) -> Result<()> {
        let (database, w) = (self.database, self.w);
        let mut text = [0; 290];
        for item in 0..database.sizes.items as u32 {
            self.random.letters(&mut text);
            let quantity = (self.random.within(10, 100) as u32).to_le_bytes();
            let (number, home) = (item.to_le_bytes(), w.to_le_bytes());
            let mut values: Vec<&[u8]> = vec![&number, &home, &quantity];
            values.extend(text[..240].chunks(24));
            values.extend([&[0; 8][..], &[0; 4], &[0; 4], &text[240..]]);
            let row = add(&database.pool, database.stock(), &values)?;
            index(database.stock_key(), Key::new([w, item]), row)?;
        }
        Ok(())
    }

    fn district(&mut self, d: u32) -> Result<()> {
        let (database, w) = (self.database, self.w);
        let mut text = [0; 81];
        self.random.letters(&mut text);
        let tax = (self.random.below(2_001) as u32).to_le_bytes();
        let ytd = (database.sizes.customers * 1_000).to_le_bytes();
        let next = (database.sizes.customers as u32 + 1).to_le_bytes();
        let (d_id, w_id) = (d.to_le_bytes(), w.to_le_bytes());
        let values: [&[u8]; 7] = [&d_id, &w_id, &text[..10], &text[10..81], &tax, &ytd, &next];
        let row = add(&database.pool, database.district(), &values)?;
        index(database.district_key(), Key::new([w, d]), row)
    }

    /// Customers, each with one payment.
    fn customers(&mut self, d: u32) -> Result<()> {
        let (database, w) = (self.database, self.w);
        let pool = &*database.pool;
        let (d_id, w_id, date) = (d.to_le_bytes(), w.to_le_bytes(), EPOCH.to_le_bytes());
        let mut text = [0; 660];
        for c in 0..database.sizes.customers as u32 {
            self.random.letters(&mut text);
            let id = c.to_le_bytes();
            let credit: &[u8] = if self.random.percent(10) { b"BC" } else { b"GC" };
            let discount = (self.random.below(5_001) as u32).to_le_bytes();
            let (balance, paid) = ((-1_000i64).to_le_bytes(), 1_000i64.to_le_bytes());
            let limit = 5_000_000i64.to_le_bytes();
            let values: [&[u8]; 21] = [
                &id,
                &d_id,
                &w_id,
                &text[..16],
                b"OE",
                &text[16..32],
                &text[32..52],
                &text[52..72],
                &text[72..92],
                &text[92..94],
                &text[94..103],
                &text[103..119],
                &date,
                credit,
                &limit,
                &discount,
                &balance,
                &paid,
                &1u32.to_le_bytes(),
                &[0; 4],
                &text[160..],
            ];
            let row = add(pool, database.customer(), &values)?;
            index(database.customer_key(), Key::new([w, d, c]), row)?;
            let values: [&[u8]; 8] =
                [&id, &d_id, &w_id, &d_id, &w_id, &date, &paid, &text[119..143]];
            add(pool, database.history(), &values)?;
        }
        Ok(())
    }

    fn orders(&mut self, d: u32) -> Result<()> {
        let (database, w) = (self.database, self.w);
        let pool = &*database.pool;
        let customers = self.random.permutation(database.sizes.customers);
        let (d_id, w_id) = (d.to_le_bytes(), w.to_le_bytes());
        for (o, c) in (1u32..).zip(customers) {
            let is_delivered = u64::from(o) <= database.sizes.delivered();
            let date = EPOCH + self.random.below(YEARS * YEAR_SECONDS);
            let carrier = if is_delivered { self.random.within(1, 10) as u32 } else { 0 };
            let lines = self.random.within(5, 15) as u32;
            let o_id = o.to_le_bytes();
            let values: [&[u8]; 8] = [
                &o_id,
                &d_id,
                &w_id,
                &c.to_le_bytes(),
                &date.to_le_bytes(),
                &carrier.to_le_bytes(),
                &lines.to_le_bytes(),
                &1u32.to_le_bytes(),
            ];
            let row = add(pool, database.order(), &values)?;
            index(database.order_key(), Key::new([w, d, o]), row)?;
            index(database.order_by_customer(), Key::new([w, d, c, u32::MAX - o]), row)?;
            if !is_delivered {
                let row = add(pool, database.new_order(), &[&o_id, &d_id, &w_id])?;
                index(database.new_order_key(), Key::new([w, d, o]), row)?;
            }
            for number in 0..lines {
                self.line([w, d, o, number], if is_delivered { date } else { 0 })?;
            }
        }
        Ok(())
    }

    fn line(&mut self, key: [u32; 4], delivered: u64) -> Result<()> {
        let database = self.database;
        let [w, d, o, number] = key.map(u32::to_le_bytes);
        let item = (self.random.below(database.sizes.items) as u32).to_le_bytes();
        let cents = self.random.within(1, 999_999);
        let amount = if delivered > 0 { 0 } else { cents };
        let mut text = [0; 24];
        self.random.letters(&mut text);
        let values: [&[u8]; 10] = [
            &o,
            &d,
            &w,
            &number,
            &item,
            &w,
            &delivered.to_le_bytes(),
            &5u32.to_le_bytes(),
            &amount.to_le_bytes(),
            &text,
        ];
        let row = add(&database.pool, database.order_line(), &values)?;
        index(database.order_line_key(), Key::new(key), row)
    }
}
