//! Streams of TPC-C transactions.
//!
//! Customers are chosen by number only, for there is no index on names, and one payment in a
//! hundred is made elsewhere (TPC-C: 15), as in the paper's prototype. Readers may see what is not
//! committed. With `--read-only` the mix is NewOrder and OrderStatus, and reads stand for writes.

use crate::load::EPOCH;
use crate::random::Random;
use crate::schema::*;
use farheap::Result;
use farheap::pool::BufferPool;

/// Orders that StockLevel looks at.
const RECENT: u32 = 20;

/// What a transaction was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    NewOrder,
    RolledBack,
    Other,
}

/// A stream with its home.
pub(crate) struct Stream<'d> {
    database: &'d Database,
    pool: &'d BufferPool,
    w: u32,
    d: u32,
    random: Random,
    read_only: bool,
    text: Vec<u8>,
}

/// A line of a new order.
struct Line {
    item: u32,
    from: u32,
    quantity: i32,
}

/// What a new order changed so far.
struct Undo {
    row: u64,
    quantity_change: i32,
    quantity: i32,
    remote: bool,
    line: Option<(u64, Key)>,
}

impl<'d> Stream<'d> {
    pub(crate) fn new(database: &'d Database, number: u64, seed: u64, read_only: bool) -> Self {
        let sizes = database.sizes;
        Stream {
            database,
            pool: &database.pool,
            w: (number % sizes.warehouses) as u32,
            d: (number / sizes.warehouses % DISTRICTS) as u32,
            random: Random::new(seed ^ (number + 7) << 20),
            read_only,
            text: vec![0; 500],
        }
    }

    /// Runs one transaction of the mix.
    pub(crate) fn transaction(&mut self) -> Result<Kind> {
        let draw = self.random.below(100);
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

    fn other_warehouse(&mut self) -> u32 {
        self.random.below(self.database.sizes.warehouses) as u32
    }

    fn draw_lines(&mut self) -> Vec<Line> {
        let items = self.database.sizes.items;
        let count = self.random.within(5, 15);
        let mut lines: Vec<Line> = (0..count)
            .map(|_| Line {
                item: self.random.item(items),
                from: if self.random.percent(1) { self.other_warehouse() } else { self.w },
                quantity: self.random.within(1, 10) as i32,
            })
            .collect();
        if self.random.percent(1) && !self.read_only {
            // No such item: the order is rolled back.
            lines.last_mut().expect("five lines at least").item = items as u32;
        }
        lines
    }

    fn new_order(&mut self) -> Result<Kind> {
        let (database, pool) = (self.database, self.pool);
        let c = self.random.customer(database.sizes.customers);
        let lines = self.draw_lines();
        let row = database.known_row(database.warehouse_key(), &Key::new([self.w]))?;
        database.warehouse().columns[warehouse::TAX].get_u32(pool, row)?;
        let row = database.known_row(database.customer_key(), &Key::new([self.w, self.d, c]))?;
        let columns = &database.customer().columns;
        columns[customer::DISCOUNT].get_u32(pool, row)?;
        columns[customer::LAST].read(pool, row, &mut self.text[..16])?;
        columns[customer::CREDIT].read(pool, row, &mut self.text[..2])?;
        let home = database.known_row(database.district_key(), &Key::new([self.w, self.d]))?;
        let columns = &database.district().columns;
        columns[district::TAX].get_u32(pool, home)?;
        if self.read_only {
            columns[district::NEXT_O_ID].get_u32(pool, home)?;
            for line in &lines {
                self.read_line(line)?;
            }
            return Ok(Kind::NewOrder);
        }
        let lock = &database.districts[self.w as usize * DISTRICTS as usize + self.d as usize];
        let _held = lock.lock().expect("no panic in a transaction");
        let number = columns[district::NEXT_O_ID].add_u32(pool, home, 1)?;
        let mut done = Vec::with_capacity(lines.len());
        for (at, line) in (0u32..).zip(&lines) {
            if !self.order_line(number, at, line, &mut done)? {
                self.roll_back(&done)?;
                columns[district::NEXT_O_ID].add_u32(pool, home, -1)?;
                return Ok(Kind::RolledBack);
            }
        }
        self.commit(number, c, &lines, &done)?;
        Ok(Kind::NewOrder)
    }

    /// Reads an item and its stock; returns the stock's row and the price.
    fn read_line(&mut self, line: &Line) -> Result<Option<(u64, u32)>> {
        let (database, pool) = (self.database, self.pool);
        let Some(row) = database.row(database.item_key(), &Key::new([line.item]))? else {
            return Ok(None);
        };
        let columns = &database.item().columns;
        let price = columns[item::PRICE].get_u32(pool, row)?;
        columns[item::NAME].read(pool, row, &mut self.text[..24])?;
        columns[item::DATA].read(pool, row, &mut self.text[..50])?;
        let row = database.known_row(database.stock_key(), &Key::new([line.from, line.item]))?;
        let columns = &database.stock().columns;
        columns[stock::DATA].read(pool, row, &mut self.text[24..74])?;
        columns[stock::DIST_1 + self.d as usize].read(pool, row, &mut self.text[..24])?;
        if self.read_only {
            for column in [stock::QUANTITY, stock::ORDER_CNT, stock::REMOTE_CNT] {
                columns[column].get_u32(pool, row)?;
            }
            columns[stock::YTD].get_i64(pool, row)?;
        }
        Ok(Some((row, price)))
    }

    /// Takes a line's goods and adds it; `false` when there is no such item.
    fn order_line(&mut self, o: u32, at: u32, line: &Line, done: &mut Vec<Undo>) -> Result<bool> {
        let (database, pool) = (self.database, self.pool);
        let Some((stock_row, price)) = self.read_line(line)? else { return Ok(false) };
        let columns = &database.stock().columns;
        let quantity_change = columns[stock::QUANTITY].update(pool, stock_row, |bytes| {
            let old = i32::from_le_bytes(bytes.try_into().expect("four bytes"));
            let refill = if old >= line.quantity + 10 { 0 } else { 91 };
            bytes.copy_from_slice(&(old - line.quantity + refill).to_le_bytes());
            refill - line.quantity
        })?;
        columns[stock::YTD].add_i64(pool, stock_row, line.quantity.into())?;
        columns[stock::ORDER_CNT].add_u32(pool, stock_row, 1)?;
        let remote = line.from != self.w;
        if remote {
            columns[stock::REMOTE_CNT].add_u32(pool, stock_row, 1)?;
        }
        let quantity = line.quantity;
        done.push(Undo { row: stock_row, quantity_change, quantity, remote, line: None });
        let amount = i64::from(price) * i64::from(quantity);
        let [o_id, d, w, number] = [o, self.d, self.w, at].map(u32::to_le_bytes);
        let values: [&[u8]; 10] = [
            &o_id,
            &d,
            &w,
            &number,
            &line.item.to_le_bytes(),
            &line.from.to_le_bytes(),
            &[0; 8],
            &quantity.to_le_bytes(),
            &amount.to_le_bytes(),
            &self.text[..24],
        ];
        let row = database.order_line().append(pool, &values, 1)?;
        let key = Key::new([self.w, self.d, o, at]);
        database.order_line_key().insert(&key, &row.to_le_bytes())?;
        done.last_mut().expect("pushed above").line = Some((row, key));
        Ok(true)
    }

    fn roll_back(&self, done: &[Undo]) -> Result<()> {
        let (database, pool) = (self.database, self.pool);
        let columns = &database.stock().columns;
        for undo in done.iter().rev() {
            columns[stock::QUANTITY].add_u32(pool, undo.row, -undo.quantity_change)?;
            columns[stock::YTD].add_i64(pool, undo.row, -i64::from(undo.quantity))?;
            columns[stock::ORDER_CNT].add_u32(pool, undo.row, -1)?;
            if undo.remote {
                columns[stock::REMOTE_CNT].add_u32(pool, undo.row, -1)?;
            }
            if let Some((_, key)) = undo.line {
                let was = database.order_line_key().remove(&key)?;
                assert!(was, "the line was inserted by this transaction");
            }
        }
        Ok(())
    }

    /// Adds the order and makes it and its lines visible.
    fn commit(&self, o: u32, c: u32, lines: &[Line], done: &[Undo]) -> Result<()> {
        let (database, pool) = (self.database, self.pool);
        let [o_id, d, w, c_id] = [o, self.d, self.w, c].map(u32::to_le_bytes);
        let all_local = u32::from(lines.iter().all(|line| line.from == self.w));
        let date = EPOCH + u64::from(o) * 1_000;
        let values: [&[u8]; 8] = [
            &o_id,
            &d,
            &w,
            &c_id,
            &date.to_le_bytes(),
            &[0; 4],
            &(lines.len() as u32).to_le_bytes(),
            &all_local.to_le_bytes(),
        ];
        for (row, _) in done.iter().filter_map(|undo| undo.line) {
            database.order_line().set_visible(pool, row, true)?;
        }
        let row = database.order().append(pool, &values, 1)?;
        database.order().set_visible(pool, row, true)?;
        let value = row.to_le_bytes();
        database.order_key().insert(&Key::new([self.w, self.d, o]), &value)?;
        let key = Key::new([self.w, self.d, c, u32::MAX - o]);
        database.order_by_customer().insert(&key, &value)?;
        let row = database.new_order().append(pool, &[&o_id, &d, &w], 1)?;
        database.new_order().set_visible(pool, row, true)?;
        database.new_order_key().insert(&Key::new([self.w, self.d, o]), &row.to_le_bytes())?;
        Ok(())
    }

    fn payment(&mut self) -> Result<Kind> {
        let (database, pool) = (self.database, self.pool);
        let amount = self.random.within(100, 500_000) as i64;
        let c = self.random.customer(database.sizes.customers);
        let remote = self.random.percent(1);
        let (c_w, c_d) = if remote {
            (self.other_warehouse(), self.random.below(DISTRICTS) as u32)
        } else {
            (self.w, self.d)
        };
        let row = database.known_row(database.warehouse_key(), &Key::new([self.w]))?;
        let columns = &database.warehouse().columns;
        columns[warehouse::YTD].add_i64(pool, row, amount)?;
        columns[warehouse::NAME].read(pool, row, &mut self.text[..10])?;
        columns[warehouse::ADDRESS].read(pool, row, &mut self.text[10..81])?;
        let row = database.known_row(database.district_key(), &Key::new([self.w, self.d]))?;
        let columns = &database.district().columns;
        columns[district::YTD].add_i64(pool, row, amount)?;
        columns[district::ADDRESS].read(pool, row, &mut self.text[10..81])?;
        let row = database.known_row(database.customer_key(), &Key::new([c_w, c_d, c]))?;
        let columns = &database.customer().columns;
        for (column, len) in [
            (customer::FIRST, 16),
            (customer::MIDDLE, 2),
            (customer::LAST, 16),
            (customer::STREET_1, 20),
            (customer::CITY, 20),
            (customer::PHONE, 16),
        ] {
            columns[column].read(pool, row, &mut self.text[100..100 + len])?;
        }
        columns[customer::BALANCE].add_i64(pool, row, -amount)?;
        columns[customer::YTD_PAYMENT].add_i64(pool, row, amount)?;
        columns[customer::PAYMENT_CNT].add_u32(pool, row, 1)?;
        let mut credit = [0; 2];
        columns[customer::CREDIT].read(pool, row, &mut credit)?;
        if &credit == b"BC" {
            columns[customer::DATA].update(pool, row, |data| {
                data.copy_within(..480, 20);
                data[..4].copy_from_slice(&c.to_le_bytes());
                data[4..12].copy_from_slice(&amount.to_le_bytes());
            })?;
        }
        let [c, c_d, c_w, d, w] = [c, c_d, c_w, self.d, self.w].map(u32::to_le_bytes);
        let date = EPOCH.to_le_bytes();
        let values: [&[u8]; 8] =
            [&c, &c_d, &c_w, &d, &w, &date, &amount.to_le_bytes(), &self.text[..24]];
        let row = database.history().append(pool, &values, 1)?;
        database.history().set_visible(pool, row, true)?;
        Ok(Kind::Other)
    }

    /// The newest order of a customer, with its lines.
    fn order_status(&mut self) -> Result<Kind> {
        let (database, pool) = (self.database, self.pool);
        let c = self.random.customer(database.sizes.customers);
        let row = database.known_row(database.customer_key(), &Key::new([self.w, self.d, c]))?;
        let columns = &database.customer().columns;
        columns[customer::BALANCE].get_i64(pool, row)?;
        for column in [customer::FIRST, customer::LAST] {
            columns[column].read(pool, row, &mut self.text[..16])?;
        }
        let from = Key::new([self.w, self.d, c]);
        let newest = database.order_by_customer().scan(&from).next().transpose()?;
        let Some((key, row)) = newest.filter(|(key, _)| key.starts_with(&from)) else {
            return Ok(Kind::Other);
        };
        let row = u64::from_le_bytes(row[..].try_into().expect("eight bytes"));
        let columns = &database.order().columns;
        columns[order::ENTRY_D].get_i64(pool, row)?;
        columns[order::CARRIER_ID].get_u32(pool, row)?;
        for line in self.lines_of(u32::MAX - part(&key, 3))? {
            let columns = &database.order_line().columns;
            for column in [order_line::I_ID, order_line::SUPPLY_W_ID, order_line::QUANTITY] {
                columns[column].get_u32(pool, line)?;
            }
            columns[order_line::AMOUNT].get_i64(pool, line)?;
            columns[order_line::DELIVERY_D].get_i64(pool, line)?;
        }
        Ok(Kind::Other)
    }

    /// Rows of the lines of an order of this stream's district.
    fn lines_of(&self, o: u32) -> Result<Vec<u64>> {
        self.lines_between(self.d, o, o + 1)
    }

    fn lines_between(&self, d: u32, first: u32, end: u32) -> Result<Vec<u64>> {
        let (from, to) = (Key::new([self.w, d, first]), Key::new([self.w, d, end]));
        let mut rows = Vec::new();
        for entry in self.database.order_line_key().scan(&from) {
            let (key, row) = entry?;
            if key[..] >= to[..] {
                break;
            }
            rows.push(u64::from_le_bytes(row[..].try_into().expect("eight bytes")));
        }
        Ok(rows)
    }

    /// Delivers the oldest new order of each district of the home warehouse.
    fn delivery(&mut self) -> Result<Kind> {
        let carrier = self.random.within(1, 10) as u32;
        for d in 0..DISTRICTS as u32 {
            let lock = &self.database.districts[self.w as usize * DISTRICTS as usize + d as usize];
            let _held = lock.lock().expect("no panic in a transaction");
            self.deliver(d, carrier)?;
        }
        Ok(Kind::Other)
    }

    fn deliver(&self, d: u32, carrier: u32) -> Result<()> {
        let (database, pool) = (self.database, self.pool);
        let from = Key::new([self.w, d]);
        let oldest = database.new_order_key().scan(&from).next().transpose()?;
        let Some((key, row)) = oldest.filter(|(key, _)| key.starts_with(&from)) else {
            return Ok(());
        };
        database.new_order_key().remove(&key)?;
        let row = u64::from_le_bytes(row[..].try_into().expect("eight bytes"));
        database.new_order().set_visible(pool, row, false)?;
        let row = database.known_row(database.order_key(), &key)?;
        let columns = &database.order().columns;
        let c = columns[order::C_ID].get_u32(pool, row)?;
        columns[order::CARRIER_ID].add_u32(pool, row, carrier as i32)?;
        let (o, mut sum) = (part(&key, 2), 0);
        let columns = &database.order_line().columns;
        for line in self.lines_between(d, o, o + 1)? {
            columns[order_line::DELIVERY_D].add_i64(pool, line, EPOCH as i64)?;
            sum += columns[order_line::AMOUNT].get_i64(pool, line)?;
        }
        let row = database.known_row(database.customer_key(), &Key::new([self.w, d, c]))?;
        let columns = &database.customer().columns;
        columns[customer::BALANCE].add_i64(pool, row, sum)?;
        columns[customer::DELIVERY_CNT].add_u32(pool, row, 1)?;
        Ok(())
    }

    /// Counts the items of recent orders of which little is left.
    fn stock_level(&mut self) -> Result<Kind> {
        let (database, pool) = (self.database, self.pool);
        let threshold = self.random.within(10, 20) as u32;
        let row = database.known_row(database.district_key(), &Key::new([self.w, self.d]))?;
        let next = database.district().columns[district::NEXT_O_ID].get_u32(pool, row)?;
        let mut items = Vec::new();
        for line in self.lines_between(self.d, next.saturating_sub(RECENT), next)? {
            items.push(database.order_line().columns[order_line::I_ID].get_u32(pool, line)?);
        }
        items.sort_unstable();
        items.dedup();
        let mut low = 0;
        for item in items {
            let row = database.known_row(database.stock_key(), &Key::new([self.w, item]))?;
            let left = database.stock().columns[stock::QUANTITY].get_u32(pool, row)?;
            low += u32::from(left < threshold);
        }
        std::hint::black_box(low);
        Ok(Kind::Other)
    }
}
