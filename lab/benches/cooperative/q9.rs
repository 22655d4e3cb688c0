//! CH-benCHmark's query 9: revenue of some items by the supplier's nation and the order's year.
//!
//! ```sql
//! SELECT n_name, year(o_entry_d), sum(ol_amount)
//! FROM item, stock, supplier, orderline, orders, nation
//! WHERE ol_i_id = s_i_id AND ol_supply_w_id = s_w_id
//!   AND mod(s_w_id * s_i_id, 10000) = su_suppkey AND su_nationkey = n_nationkey
//!   AND ol_w_id = o_w_id AND ol_d_id = o_d_id AND ol_o_id = o_id
//!   AND ol_i_id = i_id AND i_data LIKE '%BB'
//! GROUP BY n_name, year(o_entry_d)
//! ```
//! Hash tables on items, stock (with the supplier's nation) and orders are built and probed a
//! morsel at a time by several threads; their memory is temporary memory of the manager.

use crate::Failure;
use crate::load::year;
use crate::schema::*;
use crate::table::Table;
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as AllocVec;
use farheap::pool::BufferPool;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

/// Rows of a morsel.
const MORSEL: u64 = 4_096;

/// Sum of the amounts by nation and year: of what was there after the load, and of all.
pub(crate) type Answer = BTreeMap<(u32, u32), [i64; 2]>;

const VALUE_BITS: u32 = 16;

/// There is no memory for a hash table.
#[derive(Debug)]
pub(crate) struct NoMemory(u64);

impl std::fmt::Display for NoMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no memory for a hash table of {} words", self.0)
    }
}

impl std::error::Error for NoMemory {}

/// A hash table of numbers below 2^48 with values of 16 bits; a word of 0 is free.
struct Hash<A: Allocator> {
    words: AllocVec<AtomicU64, A>,
    shift: u32,
}

impl<A: Allocator> Hash<A> {
    fn new(entries: u64, allocator: A) -> Result<Hash<A>, Failure> {
        let len = (entries.max(8) * 2).next_power_of_two();
        let mut words = AllocVec::new_in(allocator);
        words.try_reserve_exact(len as usize).map_err(|_| NoMemory(len))?;
        words.resize_with(len as usize, || AtomicU64::new(0));
        Ok(Hash { words, shift: 64 - len.trailing_zeros() })
    }

    fn slot(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    fn insert(&self, key: u64, value: u32) {
        let word = (key + 1) << VALUE_BITS | u64::from(value);
        let mut at = self.slot(key);
        while self.words[at]
            .compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
        {
            at = (at + 1) % self.words.len();
        }
    }

    fn get(&self, key: u64) -> Option<u32> {
        let mut at = self.slot(key);
        loop {
            match self.words[at].load(Ordering::Relaxed) {
                0 => return None,
                word if word >> VALUE_BITS == key + 1 => return Some((word & 0xFFFF) as u32),
                _ => at = (at + 1) % self.words.len(),
            }
        }
    }
}

fn u32s(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")))
}

fn u64s(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
}

fn stock_code(w: u32, item: u32) -> u64 {
    u64::from(w) << 24 | u64::from(item)
}

fn order_code(w: u32, d: u32, o: u32) -> u64 {
    u64::from(w) << 32 | u64::from(d) << 28 | u64::from(o)
}

/// Which supplier delivers an item to a warehouse.
fn supplier_of(w: u32, item: u32, suppliers: u64) -> u64 {
    u64::from(w) * u64::from(item) % suppliers
}

/// Visible rows of a morsel with the values of some columns.
struct Morsel {
    rows: Vec<u64>,
    values: Vec<Vec<u8>>,
}

impl Morsel {
    fn read(
        pool: &BufferPool,
        table: &Table,
        from: u64,
        columns: &[usize],
    ) -> Result<Morsel, Failure> {
        let rows = table.visible(pool, from..(from + MORSEL).min(table.rows()))?;
        let mut morsel = Morsel { rows, values: Vec::new() };
        morsel.add(pool, table, columns)?;
        Ok(morsel)
    }

    fn add(&mut self, pool: &BufferPool, table: &Table, columns: &[usize]) -> Result<(), Failure> {
        for column in columns {
            let mut values = Vec::new();
            table.columns[*column].gather(pool, &self.rows, &mut values)?;
            self.values.push(values);
        }
        Ok(())
    }
}

/// Runs `work` on every morsel of a table, by several threads.
fn for_morsels(
    table: &Table,
    threads: usize,
    work: impl Fn(u64) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let (next, rows) = (AtomicU64::new(0), table.rows());
    std::thread::scope(|scope| {
        let worker = || {
            loop {
                let from = next.fetch_add(MORSEL, Ordering::Relaxed);
                if from >= rows {
                    return Ok(());
                }
                work(from).map_err(|error| error.to_string())?;
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let outcomes = workers.into_iter().map(|worker| worker.join().expect("a query's thread"));
        outcomes.collect::<Result<(), String>>().map_err(Failure::from)
    })
}

/// Nations of the suppliers, by number.
fn nations(database: &Database) -> Result<Vec<u32>, Failure> {
    let table = database.supplier();
    let mut nations = Vec::new();
    for from in (0..table.rows()).step_by(MORSEL as usize) {
        let morsel = Morsel::read(&database.pool, table, from, &[supplier::NATION])?;
        nations.extend(u32s(&morsel.values[0]));
    }
    Ok(nations)
}

/// Runs the query by `threads` threads.
pub(crate) fn run<A: Allocator + Clone + Sync + Send>(
    database: &Database,
    threads: usize,
    allocator: &A,
) -> Result<Answer, Failure> {
    let (pool, suppliers) = (&*database.pool, database.sizes.suppliers);
    let nations = nations(database)?;
    let items = Hash::new(database.sizes.items, allocator.clone())?;
    for_morsels(database.item(), threads, |from| {
        let morsel = Morsel::read(pool, database.item(), from, &[item::ID, item::DATA])?;
        let data = morsel.values[1].chunks_exact(item::WIDTHS[item::DATA]);
        for (id, data) in u32s(&morsel.values[0]).zip(data) {
            if data.ends_with(b"BB") {
                items.insert(id.into(), 0);
            }
        }
        Ok(())
    })?;
    let stocks = Hash::new(database.stock().rows(), allocator.clone())?;
    for_morsels(database.stock(), threads, |from| {
        let morsel = Morsel::read(pool, database.stock(), from, &[stock::W_ID, stock::I_ID])?;
        for (w, i) in u32s(&morsel.values[0]).zip(u32s(&morsel.values[1])) {
            let nation = nations[supplier_of(w, i, suppliers) as usize];
            stocks.insert(stock_code(w, i), nation);
        }
        Ok(())
    })?;
    // Orders made meanwhile find room: half of the words stay free.
    let orders = Hash::new(database.order().rows(), allocator.clone())?;
    for_morsels(database.order(), threads, |from| {
        use order::*;
        let morsel = Morsel::read(pool, database.order(), from, &[W_ID, D_ID, ID, ENTRY_D])?;
        let [w, d, o] = [0, 1, 2].map(|at| u32s(&morsel.values[at]));
        for (((w, d), o), date) in w.zip(d).zip(o).zip(u64s(&morsel.values[3])) {
            orders.insert(order_code(w, d, o), year(date) as u32);
        }
        Ok(())
    })?;
    let answer = std::sync::Mutex::new(Answer::new());
    let table = database.order_line();
    for_morsels(table, threads, |from| {
        use order_line::*;
        let mut morsel = Morsel::read(pool, table, from, &[I_ID])?;
        let mut ids = u32s(&std::mem::take(&mut morsel.values[0])).collect::<Vec<_>>();
        let wanted: Vec<bool> = ids.iter().map(|id| items.get((*id).into()).is_some()).collect();
        let mut keep = wanted.iter();
        morsel.rows.retain(|_| *keep.next().expect("as many"));
        let mut keep = wanted.iter();
        ids.retain(|_| *keep.next().expect("as many"));
        morsel.values.clear();
        morsel.add(pool, table, &[SUPPLY_W_ID, W_ID, D_ID, O_ID, AMOUNT])?;
        let [from_w, w, d, o] = [0, 1, 2, 3].map(|at| u32s(&morsel.values[at]));
        let amounts = u64s(&morsel.values[4]);
        let lines = morsel.rows.iter().zip(&ids).zip(from_w.zip(w).zip(d.zip(o))).zip(amounts);
        let mut sums: HashMap<(u32, u32), [i64; 2]> = HashMap::new();
        for (((row, id), ((from_w, w), (d, o))), amount) in lines {
            let nation = stocks.get(stock_code(from_w, *id)).expect("every item is stocked");
            // An order's lines are visible a moment before it is.
            let Some(year) = orders.get(order_code(w, d, o)) else { continue };
            let sum = sums.entry((nation, year)).or_default();
            sum[0] += if *row < table.loaded { amount as i64 } else { 0 };
            sum[1] += amount as i64;
        }
        let mut answer = answer.lock().expect("no panic in a query");
        for (group, sum) in sums {
            let entry = answer.entry(group).or_default();
            *entry = [entry[0] + sum[0], entry[1] + sum[1]];
        }
        Ok(())
    })?;
    Ok(answer.into_inner().expect("no panic in a query"))
}

/// The same, row by row through the indexes, without hash tables.
pub(crate) fn naive(database: &Database) -> Result<Answer, Failure> {
    let pool = &*database.pool;
    let (table, mut answer) = (database.order_line(), Answer::new());
    let nations = nations(database)?;
    let mut wanted = vec![false; database.sizes.items as usize];
    for row in 0..database.item().rows() {
        let mut data = [0; 50];
        database.item().columns[item::DATA].read(pool, row, &mut data)?;
        let id = database.item().columns[item::ID].get_u32(pool, row)?;
        wanted[id as usize] = data.ends_with(b"BB");
    }
    for row in table.visible(pool, 0..table.rows())? {
        let value = |column: usize| table.columns[column].get_u32(pool, row);
        let id = value(order_line::I_ID)?;
        if !wanted[id as usize] {
            continue;
        }
        let from_w = value(order_line::SUPPLY_W_ID)?;
        database.known_row(database.stock_key(), &Key::new([from_w, id]))?;
        let nation = nations[supplier_of(from_w, id, database.sizes.suppliers) as usize];
        let (w, d, o) =
            (value(order_line::W_ID)?, value(order_line::D_ID)?, value(order_line::O_ID)?);
        let order = database.known_row(database.order_key(), &Key::new([w, d, o]))?;
        let date = database.order().columns[order::ENTRY_D].get_i64(pool, order)?;
        let amount = table.columns[order_line::AMOUNT].get_i64(pool, row)?;
        let sum = answer.entry((nation, year(date as u64) as u32)).or_default();
        sum[0] += if row < table.loaded { amount } else { 0 };
        sum[1] += amount;
    }
    Ok(answer)
}
