//! Queries that join the large tables: Q3, Q4, Q9, Q12, Q18.

use super::{ByKey, day, discounted, year_of};
use crate::answers::{Answer, Value};
use crate::load::Codes;
use crate::tables::Database;
use std::cmp::Reverse;
use std::collections::HashSet;
use std::hash::BuildHasherDefault;
use tpchgen::distribution::{Distribution, Distributions};

type Keys<K> = HashSet<K, BuildHasherDefault<super::KeyHasher>>;

fn words() -> &'static Distributions {
    Distributions::static_default()
}

/// The place of a word in its list.
fn code(list: &'static Distribution, word: &str) -> u8 {
    Codes::of(list).code(word)
}

/// An order that Q3 may report.
struct OpenOrder {
    date: i32,
    ship_priority: i32,
    /// Ten-thousandths.
    revenue: i64,
}

/// Q3, shipping priority: the ten unshipped orders of one market segment with the highest revenue.
pub(super) fn shipping_priority(data: &Database) -> Answer {
    const DATE: i32 = day(1995, 3, 15);
    let building = code(words().market_segments(), "BUILDING");
    let mut customers: Keys<i32> = Keys::default();
    let table = &data.customer;
    for chunk in table.c_custkey.chunks() {
        let (keys, segments) = (table.c_custkey.read(chunk), table.c_mktsegment.read(chunk));
        let of_segment = keys.iter().zip(&*segments).filter(|(_, segment)| **segment == building);
        customers.extend(of_segment.map(|(key, _)| *key));
    }
    let mut orders: ByKey<i64, OpenOrder> = ByKey::default();
    let table = &data.orders;
    for chunk in table.o_orderkey.chunks() {
        let (dates, buyers) = (table.o_orderdate.read(chunk), table.o_custkey.read(chunk));
        let (keys, priorities) = (table.o_orderkey.read(chunk), table.o_shippriority.read(chunk));
        for row in 0..keys.len() {
            if dates[row] < DATE && customers.contains(&buyers[row]) {
                let (date, ship_priority) = (dates[row], priorities[row]);
                orders.insert(keys[row], OpenOrder { date, ship_priority, revenue: 0 });
            }
        }
    }
    let table = &data.lineitem;
    for chunk in table.l_orderkey.chunks() {
        let (shipped, keys) = (table.l_shipdate.read(chunk), table.l_orderkey.read(chunk));
        let (prices, discounts) = (table.l_extendedprice.read(chunk), table.l_discount.read(chunk));
        for row in (0..keys.len()).filter(|row| shipped[*row] > DATE) {
            if let Some(order) = orders.get_mut(&keys[row]) {
                order.revenue += discounted(prices[row], discounts[row]);
            }
        }
    }
    // An order without a line that matches is not in the join; each line's price is above zero.
    let mut open: Vec<_> = orders.into_iter().filter(|(_, order)| order.revenue > 0).collect();
    open.sort_unstable_by_key(|(key, order)| (Reverse(order.revenue), order.date, *key));
    open.truncate(10);
    let row = |(key, order): (i64, OpenOrder)| {
        vec![
            Value::Number(key),
            Value::Hundredths { sum: order.revenue.into(), divisor: 100 },
            Value::Date(order.date),
            Value::Number(order.ship_priority.into()),
        ]
    };
    Answer(open.into_iter().map(row).collect())
}

/// Q4, order priority checking: the orders of a quarter with a line received late, by priority.
pub(super) fn order_priority(data: &Database) -> Answer {
    let ordered_in = day(1993, 7, 1)..day(1993, 10, 1);
    let mut orders: ByKey<i64, u8> = ByKey::default();
    let table = &data.orders;
    for chunk in table.o_orderkey.chunks() {
        let (dates, keys) = (table.o_orderdate.read(chunk), table.o_orderkey.read(chunk));
        let priorities = table.o_orderpriority.read(chunk);
        let of_quarter = (0..keys.len()).filter(|row| ordered_in.contains(&dates[*row]));
        orders.extend(of_quarter.map(|row| (keys[row], priorities[row])));
    }
    let names = words().order_priority().get_values();
    let mut counts = vec![0_i64; names.len()];
    let table = &data.lineitem;
    for chunk in table.l_orderkey.chunks() {
        let (committed, received) =
            (table.l_commitdate.read(chunk), table.l_receiptdate.read(chunk));
        let keys = table.l_orderkey.read(chunk);
        for row in (0..keys.len()).filter(|row| committed[*row] < received[*row]) {
            // Taken out: an order counts once, however many of its lines were late.
            if let Some(priority) = orders.remove(&keys[row]) {
                counts[usize::from(priority)] += 1;
            }
        }
    }
    let mut rows: Vec<_> = names.iter().zip(counts).filter(|(_, count)| *count > 0).collect();
    rows.sort_unstable();
    Answer(
        rows.into_iter().map(|(name, count)| vec![(*name).into(), Value::Number(count)]).collect(),
    )
}

/// Q9, product type profit: the profit on parts of one colour, by nation and year.
pub(super) fn product_profit(data: &Database) -> Answer {
    let green = code(words().part_colors(), "green");
    let mut parts: Keys<i32> = Keys::default();
    for chunk in data.part.p_partkey.chunks() {
        let (keys, names) = (data.part.p_partkey.read(chunk), data.part.p_name.read(chunk));
        let named = keys.iter().zip(&*names).filter(|(_, name)| name.contains(&green));
        parts.extend(named.map(|(key, _)| *key));
    }
    let mut nations: ByKey<i32, u8> = ByKey::default();
    for chunk in data.supplier.s_suppkey.chunks() {
        let keys = data.supplier.s_suppkey.read(chunk);
        nations.extend(
            keys.iter().copied().zip(data.supplier.s_nationkey.read(chunk).iter().copied()),
        );
    }
    let mut costs: ByKey<(i32, i32), i64> = ByKey::default();
    let table = &data.partsupp;
    for chunk in table.ps_partkey.chunks() {
        let (keys, sellers) = (table.ps_partkey.read(chunk), table.ps_suppkey.read(chunk));
        let prices = table.ps_supplycost.read(chunk);
        let of_parts = (0..keys.len()).filter(|row| parts.contains(&keys[*row]));
        costs.extend(of_parts.map(|row| ((keys[row], sellers[row]), prices[row])));
    }
    // The lines of these parts are the smaller side of the join with the orders: 1 of 18.
    let mut profits: ByKey<i64, Vec<(u8, i64)>> = ByKey::default();
    let table = &data.lineitem;
    for chunk in table.l_orderkey.chunks() {
        let (keys, part_keys) = (table.l_orderkey.read(chunk), table.l_partkey.read(chunk));
        let (sellers, quantities) = (table.l_suppkey.read(chunk), table.l_quantity.read(chunk));
        let (prices, discounts) = (table.l_extendedprice.read(chunk), table.l_discount.read(chunk));
        for row in (0..keys.len()).filter(|row| parts.contains(&part_keys[*row])) {
            let cost = costs.get(&(part_keys[row], sellers[row]));
            let nation = nations.get(&sellers[row]);
            if let (Some(cost), Some(nation)) = (cost, nation) {
                // Cents by hundredths: ten-thousandths, as the discounted price is.
                let paid = cost * i64::from(quantities[row]);
                let profit = discounted(prices[row], discounts[row]) - paid;
                profits.entry(keys[row]).or_default().push((*nation, profit));
            }
        }
    }
    let names = words().nations().get_values();
    let mut sums: std::collections::BTreeMap<(&str, Reverse<i32>), i128> = Default::default();
    let table = &data.orders;
    for chunk in table.o_orderkey.chunks() {
        let (keys, dates) = (table.o_orderkey.read(chunk), table.o_orderdate.read(chunk));
        for (key, date) in keys.iter().zip(&*dates) {
            for (nation, profit) in profits.get(key).into_iter().flatten() {
                let group = (names[usize::from(*nation)], Reverse(year_of(*date)));
                *sums.entry(group).or_default() += i128::from(*profit);
            }
        }
    }
    let row = |((nation, Reverse(year)), sum): ((&str, Reverse<i32>), i128)| {
        let year = Value::Number(year.into());
        vec![nation.into(), year, Value::Hundredths { sum, divisor: 100 }]
    };
    Answer(sums.into_iter().map(row).collect())
}

/// Q12, shipping modes and order priority: late lines of two modes, by whether the order was urgent.
pub(super) fn shipping_modes(data: &Database) -> Answer {
    const MODES: [&str; 2] = ["MAIL", "SHIP"];
    let codes = MODES.map(|mode| code(words().ship_modes(), mode));
    let received_in = day(1994, 1, 1)..day(1995, 1, 1);
    let mut late: ByKey<i64, [i64; 2]> = ByKey::default();
    let table = &data.lineitem;
    for chunk in table.l_orderkey.chunks() {
        let (keys, modes) = (table.l_orderkey.read(chunk), table.l_shipmode.read(chunk));
        let (shipped, committed) = (table.l_shipdate.read(chunk), table.l_commitdate.read(chunk));
        let received = table.l_receiptdate.read(chunk);
        for row in 0..keys.len() {
            let is_late = committed[row] < received[row] && shipped[row] < committed[row];
            if !is_late || !received_in.contains(&received[row]) {
                continue;
            }
            if let Some(mode) = codes.iter().position(|code| *code == modes[row]) {
                late.entry(keys[row]).or_default()[mode] += 1;
            }
        }
    }
    let urgent = ["1-URGENT", "2-HIGH"].map(|name| code(words().order_priority(), name));
    let mut counts = [[0_i64; 2]; MODES.len()];
    let table = &data.orders;
    for chunk in table.o_orderkey.chunks() {
        let (keys, priorities) = (table.o_orderkey.read(chunk), table.o_orderpriority.read(chunk));
        for (key, priority) in keys.iter().zip(&*priorities) {
            let Some(lines) = late.get(key) else { continue };
            let is_low = usize::from(!urgent.contains(priority));
            for (count, lines) in counts.iter_mut().zip(lines) {
                count[is_low] += lines;
            }
        }
    }
    let rows = MODES.iter().zip(counts).filter(|(_, count)| *count != [0; 2]);
    let row = |(mode, [high, low]): (&&str, [i64; 2])| {
        vec![(*mode).into(), Value::Number(high), Value::Number(low)]
    };
    Answer(rows.map(row).collect())
}

/// Q18, large volume customers: the hundred dearest orders of more than 300 pieces.
pub(super) fn large_volume_customers(data: &Database) -> Answer {
    const QUANTITY: i64 = 300 * 100;
    let mut quantities: ByKey<i64, i64> = ByKey::default();
    let table = &data.lineitem;
    for chunk in table.l_orderkey.chunks() {
        let (keys, pieces) = (table.l_orderkey.read(chunk), table.l_quantity.read(chunk));
        for (key, pieces) in keys.iter().zip(&*pieces) {
            *quantities.entry(*key).or_default() += i64::from(*pieces);
        }
    }
    quantities.retain(|_, quantity| *quantity > QUANTITY);
    // Total price and date, which the order is by, before key, customer and quantity.
    let mut large = Vec::new();
    let table = &data.orders;
    for chunk in table.o_orderkey.chunks() {
        let (keys, buyers) = (table.o_orderkey.read(chunk), table.o_custkey.read(chunk));
        let (prices, dates) = (table.o_totalprice.read(chunk), table.o_orderdate.read(chunk));
        for row in 0..keys.len() {
            if let Some(quantity) = quantities.get(&keys[row]) {
                let (price, date) = (prices[row], dates[row]);
                large.push((Reverse(price), date, keys[row], buyers[row], *quantity));
            }
        }
    }
    // Every order's customer exists, so `customer` only gives the name, which the key says.
    large.sort_unstable();
    large.truncate(100);
    let row = |(Reverse(price), date, key, buyer, quantity)| {
        vec![
            Value::Text(format!("Customer#{buyer:09}")),
            Value::Number(i64::from(buyer)),
            Value::Number(key),
            Value::Date(date),
            Value::hundredths(price),
            Value::hundredths(quantity),
        ]
    };
    Answer(large.into_iter().map(row).collect())
}
