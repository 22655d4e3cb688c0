//! TPC-C's consistency conditions (clause 3.3.2), and more of the kind, on a database at rest.

use crate::Failure;
use crate::schema::*;
use crate::table::Table;
use farheap::pool::BufferPool;
use farheap_collections::pool::BTree;
use std::collections::HashMap;

/// Rows looked at together.
const MORSEL: u64 = 8_192;

/// What is known of an order.
#[derive(Default)]
struct Order {
    customer: u32,
    carrier: u32,
    lines: u32,
    found: u32,
    is_new: bool,
}

/// Sums of a customer, a district or a warehouse.
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    delivered: i64,
    paid: i64,
}

/// What a check found to add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Orders made after the load.
    pub(crate) orders: u64,
}

/// Checks all conditions.
///
/// # Errors
/// The first condition that does not hold, by its number.
pub(crate) fn check(database: &Database) -> Result<Census, Failure> {
    let mut checker = Checker { database, pool: &database.pool, orders: HashMap::new() };
    checker.read_orders()?;
    checker.orders_are_numbered()?;
    let (customers, goods) = checker.lines()?;
    checker.payments(customers)?;
    checker.stock(goods)?;
    for (name, table, index) in [
        ("order", database.order(), database.order_key()),
        ("order by customer", database.order(), database.order_by_customer()),
        ("new order", database.new_order(), database.new_order_key()),
        ("order line", database.order_line(), database.order_line_key()),
    ] {
        checker.index(name, table, index)?;
    }
    let orders = checker.orders.len() as u64 - database.order().loaded;
    Ok(Census { orders })
}

struct Checker<'d> {
    database: &'d Database,
    pool: &'d BufferPool,
    orders: HashMap<[u32; 3], Order>,
}

fn require(holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(what().into()) }
}

/// Calls `each` with the number and the values of every visible row; four- and eight-byte values
/// become numbers.
fn rows(
    pool: &BufferPool,
    table: &Table,
    columns: &[(usize, usize)],
    mut each: impl FnMut(u64, &[i64]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut bytes: Vec<Vec<u8>> = vec![Vec::new(); columns.len()];
    let mut values = vec![0; columns.len()];
    for from in (0..table.rows()).step_by(MORSEL as usize) {
        let rows = table.visible(pool, from..(from + MORSEL).min(table.rows()))?;
        for ((column, _), bytes) in columns.iter().zip(&mut bytes) {
            table.columns[*column].gather(pool, &rows, bytes)?;
        }
        for (at, row) in rows.iter().enumerate() {
            for (value, ((_, width), bytes)) in values.iter_mut().zip(columns.iter().zip(&bytes)) {
                let bytes = &bytes[at * width..(at + 1) * width];
                *value = match width {
                    4 => i64::from(u32::from_le_bytes(bytes.try_into().expect("four bytes"))),
                    _ => i64::from_le_bytes(bytes.try_into().expect("eight bytes")),
                };
            }
            each(*row, &values)?;
        }
    }
    Ok(())
}

/// Columns with their widths.
fn wide<const N: usize>(widths: &[usize], columns: [usize; N]) -> [(usize, usize); N] {
    columns.map(|column| (column, widths[column]))
}

impl Checker<'_> {
    fn read_orders(&mut self) -> Result<(), Failure> {
        use order::*;
        let columns = wide(WIDTHS, [W_ID, D_ID, ID, C_ID, CARRIER_ID, OL_CNT]);
        let orders = &mut self.orders;
        rows(self.pool, self.database.order(), &columns, |_, v| {
            let key = [v[0] as u32, v[1] as u32, v[2] as u32];
            let (customer, carrier, lines) = (v[3] as u32, v[4] as u32, v[5] as u32);
            let order = Order { customer, carrier, lines, ..Order::default() };
            require(orders.insert(key, order).is_none(), || format!("two orders {key:?}"))
        })?;
        let columns = wide(new_order::WIDTHS, [new_order::W_ID, new_order::D_ID, new_order::O_ID]);
        rows(self.pool, self.database.new_order(), &columns, |_, v| {
            let key = [v[0] as u32, v[1] as u32, v[2] as u32];
            let order = orders.get_mut(&key).ok_or_else(|| format!("no order for {key:?}"))?;
            order.is_new = true;
            Ok(())
        })?;
        for (key, order) in orders {
            require(order.is_new == (order.carrier == 0), || format!("condition 5: {key:?}"))?;
        }
        Ok(())
    }

    /// Conditions 2 and 3.
    fn orders_are_numbered(&self) -> Result<(), Failure> {
        // Per district: orders, highest number, new orders, lowest number of them.
        let mut districts: HashMap<[u32; 2], (u32, u32, u32, u32)> = HashMap::new();
        for ([w, d, o], order) in &self.orders {
            let entry = districts.entry([*w, *d]).or_insert((0, 0, 0, u32::MAX));
            (entry.0, entry.1) = (entry.0 + 1, entry.1.max(*o));
            if order.is_new {
                (entry.2, entry.3) = (entry.2 + 1, entry.3.min(*o));
            }
        }
        let columns = wide(district::WIDTHS, [district::W_ID, district::ID, district::NEXT_O_ID]);
        rows(self.pool, self.database.district(), &columns, |_, v| {
            let key = [v[0] as u32, v[1] as u32];
            let (count, highest, new, lowest) = districts[&key];
            let next = v[2] as u32;
            require(next == highest + 1 && count == highest, || {
                format!("condition 2: {key:?} has next {next}, highest {highest}, {count} orders")
            })?;
            require(new == 0 || highest - lowest + 1 == new, || format!("condition 3: {key:?}"))
        })
    }

    /// Conditions 4, 6 and 7; returns what was delivered to each customer, and how many goods
    /// were ordered since the load.
    fn lines(&mut self) -> Result<(HashMap<[u32; 3], Sums>, i64), Failure> {
        use order_line::*;
        let (table, orders) = (self.database.order_line(), &mut self.orders);
        let mut customers: HashMap<[u32; 3], Sums> = HashMap::new();
        let mut goods = 0;
        let columns = wide(WIDTHS, [W_ID, D_ID, O_ID, DELIVERY_D, AMOUNT, QUANTITY]);
        rows(self.pool, table, &columns, |row, v| {
            let key = [v[0] as u32, v[1] as u32, v[2] as u32];
            let order = orders.get_mut(&key).ok_or_else(|| format!("a line without {key:?}"))?;
            order.found += 1;
            let is_delivered = v[3] != 0;
            require(is_delivered == (order.carrier != 0), || format!("condition 7: {key:?}"))?;
            if is_delivered {
                customers.entry([key[0], key[1], order.customer]).or_default().delivered += v[4];
            }
            goods += if row >= table.loaded { v[5] } else { 0 };
            Ok(())
        })?;
        for (key, order) in orders {
            let (lines, found) = (order.lines, order.found);
            require(lines == found, || format!("condition 6: {key:?}: {found} of {lines} lines"))?;
        }
        Ok((customers, goods))
    }

    /// Conditions 1, 8, 9, 10 and 12.
    fn payments(&self, mut customers: HashMap<[u32; 3], Sums>) -> Result<(), Failure> {
        use history::*;
        let mut districts: HashMap<[u32; 2], i64> = HashMap::new();
        let columns = wide(WIDTHS, [C_W_ID, C_D_ID, C_ID, W_ID, D_ID, AMOUNT]);
        rows(self.pool, self.database.history(), &columns, |_, v| {
            customers.entry([v[0] as u32, v[1] as u32, v[2] as u32]).or_default().paid += v[5];
            *districts.entry([v[3] as u32, v[4] as u32]).or_default() += v[5];
            Ok(())
        })?;
        let mut warehouses: HashMap<u32, i64> = HashMap::new();
        let columns = wide(district::WIDTHS, [district::W_ID, district::ID, district::YTD]);
        rows(self.pool, self.database.district(), &columns, |_, v| {
            *warehouses.entry(v[0] as u32).or_default() += v[2];
            let paid = districts[&[v[0] as u32, v[1] as u32]];
            require(paid == v[2], || format!("condition 9: {v:?}, payments {paid}"))
        })?;
        let columns = wide(warehouse::WIDTHS, [warehouse::ID, warehouse::YTD]);
        rows(self.pool, self.database.warehouse(), &columns, |_, v| {
            let sum = warehouses[&(v[0] as u32)];
            require(sum == v[1], || format!("conditions 1 and 8: {v:?}, districts {sum}"))
        })?;
        use customer as c;
        let columns = wide(c::WIDTHS, [c::W_ID, c::D_ID, c::ID, c::BALANCE, c::YTD_PAYMENT]);
        rows(self.pool, self.database.customer(), &columns, |_, v| {
            let key = [v[0] as u32, v[1] as u32, v[2] as u32];
            let sums = customers.get(&key).copied().unwrap_or_default();
            let holds = v[3] == sums.delivered - sums.paid && v[3] + v[4] == sums.delivered;
            require(holds, || format!("conditions 10 and 12: {v:?}, {sums:?}"))
        })
    }

    /// What was taken from stock is what was ordered.
    fn stock(&self, goods: i64) -> Result<(), Failure> {
        let columns = wide(stock::WIDTHS, [stock::YTD]);
        let mut taken = 0;
        rows(self.pool, self.database.stock(), &columns, |_, v| {
            taken += v[0];
            Ok(())
        })?;
        require(taken == goods, || format!("{taken} goods were taken, {goods} were ordered"))
    }

    /// An index has every visible row once, and no others.
    fn index(&self, name: &str, table: &Table, index: &BTree) -> Result<(), Failure> {
        let mut rows = Vec::new();
        for entry in index.scan(b"") {
            rows.push(u64::from_le_bytes(entry?.1[..].try_into().expect("eight bytes")));
        }
        rows.sort_unstable();
        let visible = table.visible(self.pool, 0..table.rows())?;
        require(rows == visible, || {
            format!("index {name} has {} entries, {} rows are visible", rows.len(), visible.len())
        })
    }
}
