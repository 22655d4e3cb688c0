//! Queries that read lineitem once: Q1, Q6, and Q14 with a small join.

use super::{ByKey, day, discounted};
use crate::answers::{Answer, Value};
use crate::tables::Database;
use tpchgen::distribution::Distributions;

/// Sums of one group of Q1.
#[derive(Clone, Copy, Default)]
struct Group {
    rows: i64,
    /// Hundredths, as all that is not a price.
    quantity: i64,
    /// Cents.
    base_price: i64,
    /// Ten-thousandths.
    disc_price: i64,
    /// Millionths; at scale factor 100 they exceed 64 bits.
    charge: i128,
    discount: i64,
}

/// Q1, pricing summary report: sums and averages of nearly all rows by two flags.
pub(super) fn pricing_summary(data: &Database) -> Answer {
    const SHIPPED_BY: i32 = day(1998, 12, 1) - 90;
    const FLAGS: [u8; 3] = *b"ANR";
    const STATUSES: [u8; 2] = *b"FO";
    let mut groups = [Group::default(); FLAGS.len() * STATUSES.len()];
    let table = &data.lineitem;
    for chunk in table.l_shipdate.chunks() {
        let (shipped, quantities) = (table.l_shipdate.read(chunk), table.l_quantity.read(chunk));
        let (prices, discounts) = (table.l_extendedprice.read(chunk), table.l_discount.read(chunk));
        let (taxes, flags) = (table.l_tax.read(chunk), table.l_returnflag.read(chunk));
        let statuses = table.l_linestatus.read(chunk);
        for row in 0..shipped.len() {
            if shipped[row] > SHIPPED_BY {
                continue;
            }
            let flag = match flags[row] {
                b'A' => 0,
                b'N' => 1,
                _ => 2,
            };
            let group = &mut groups[2 * flag + usize::from(statuses[row] == b'O')];
            let price = discounted(prices[row], discounts[row]);
            group.rows += 1;
            group.quantity += i64::from(quantities[row]);
            group.base_price += prices[row];
            group.disc_price += price;
            group.charge += i128::from(price * (100 + i64::from(taxes[row])));
            group.discount += i64::from(discounts[row]);
        }
    }
    let names = FLAGS.iter().flat_map(|flag| STATUSES.map(|status| [*flag, status]));
    let present = names.zip(groups).filter(|(_, group)| group.rows > 0);
    Answer(present.map(|(name, group)| summary(name, &group)).collect())
}

fn summary(name: [u8; 2], group: &Group) -> Vec<Value> {
    let mut row: Vec<_> =
        name.map(|letter| Value::Text(char::from(letter).to_string())).into_iter().collect();
    let rows = i128::from(group.rows);
    let sums = [
        (i128::from(group.quantity), 1),
        (i128::from(group.base_price), 1),
        (i128::from(group.disc_price), 100),
        (group.charge, 10_000),
        (i128::from(group.quantity), rows),
        (i128::from(group.base_price), rows),
        (i128::from(group.discount), rows),
    ];
    row.extend(sums.map(|(sum, divisor)| Value::Hundredths { sum, divisor }));
    row.push(Value::Number(group.rows));
    row
}

/// Q6, forecasting revenue change: one sum over 2 % of the rows.
pub(super) fn revenue_change(data: &Database) -> Answer {
    let shipped_in = day(1994, 1, 1)..day(1995, 1, 1);
    let mut revenue = 0_i128;
    let table = &data.lineitem;
    for chunk in table.l_shipdate.chunks() {
        let (shipped, discounts) = (table.l_shipdate.read(chunk), table.l_discount.read(chunk));
        let (quantities, prices) =
            (table.l_quantity.read(chunk), table.l_extendedprice.read(chunk));
        for row in 0..shipped.len() {
            let cheap = (5..=7).contains(&discounts[row]) && quantities[row] < 2_400;
            if shipped_in.contains(&shipped[row]) && cheap {
                revenue += i128::from(prices[row] * i64::from(discounts[row]));
            }
        }
    }
    Answer(vec![vec![Value::Hundredths { sum: revenue, divisor: 100 }]])
}

/// Q14, promotion effect: the share of a month's revenue that is of promoted parts.
pub(super) fn promotion_effect(data: &Database) -> Answer {
    let shipped_in = day(1995, 9, 1)..day(1995, 10, 1);
    let types = Distributions::static_default().part_types().get_values();
    let promoted: Vec<bool> = types.iter().map(|name| name.starts_with("PROMO")).collect();
    let mut parts: ByKey<i32, bool> = ByKey::default();
    for chunk in data.part.p_partkey.chunks() {
        let (keys, types) = (data.part.p_partkey.read(chunk), data.part.p_type.read(chunk));
        parts.extend(
            keys.iter().zip(&*types).map(|(key, code)| (*key, promoted[usize::from(*code)])),
        );
    }
    let (mut promotion, mut revenue) = (0_i128, 0_i128);
    let table = &data.lineitem;
    for chunk in table.l_shipdate.chunks() {
        let (shipped, keys) = (table.l_shipdate.read(chunk), table.l_partkey.read(chunk));
        let (prices, discounts) = (table.l_extendedprice.read(chunk), table.l_discount.read(chunk));
        for row in (0..shipped.len()).filter(|row| shipped_in.contains(&shipped[*row])) {
            // Every part of lineitem is in `part`; one that were not would be lost, as in SQL.
            if let Some(is_promoted) = parts.get(&keys[row]) {
                let price = i128::from(discounted(prices[row], discounts[row]));
                revenue += price;
                promotion += if *is_promoted { price } else { 0 };
            }
        }
    }
    // In percent with two decimals.
    Answer(vec![vec![Value::Hundredths { sum: 100 * 100 * promotion, divisor: revenue }]])
}
