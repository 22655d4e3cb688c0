//! TPC-H on DataFusion: the tables as record batches in memory, and five queries in SQL.

use crate::{Failure, Result};
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::MemTable;
use datafusion::prelude::{SessionConfig, SessionContext};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use tokio::runtime::Runtime;
use tpchgen::generators::{
    CustomerGenerator, LineItemGenerator, NationGenerator, OrderGenerator, PartGenerator,
    PartSuppGenerator, RegionGenerator, SupplierGenerator,
};
use tpchgen_arrow::{
    CustomerArrow, LineItemArrow, NationArrow, OrderArrow, PartArrow, PartSuppArrow, RegionArrow,
    SupplierArrow,
};

/// Threads that generate, and partitions of each table and query: as many as the machine of the published
/// figures has processors.
const PARTS: i32 = 2;

/// The queries by name, in the order in which they run. The text is that of the TPC-H specification, with the
/// parameters for which it gives answers.
pub(crate) const QUERIES: [(&str, &str); 5] =
    [("Q1", Q1), ("Q6", Q6), ("Q3", Q3), ("Q9", Q9), ("Q18", Q18)];

const Q1: &str = "select l_returnflag, l_linestatus, sum(l_quantity) as sum_qty, \
    sum(l_extendedprice) as sum_base_price, \
    sum(l_extendedprice * (1 - l_discount)) as sum_disc_price, \
    sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) as sum_charge, \
    avg(l_quantity) as avg_qty, avg(l_extendedprice) as avg_price, avg(l_discount) as avg_disc, \
    count(*) as count_order \
    from lineitem where l_shipdate <= date '1998-09-02' \
    group by l_returnflag, l_linestatus order by l_returnflag, l_linestatus";

const Q3: &str = "select l_orderkey, sum(l_extendedprice * (1 - l_discount)) as revenue, o_orderdate, \
    o_shippriority from customer, orders, lineitem \
    where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey \
    and o_orderdate < date '1995-03-15' and l_shipdate > date '1995-03-15' \
    group by l_orderkey, o_orderdate, o_shippriority \
    order by revenue desc, o_orderdate, l_orderkey limit 10";

const Q6: &str = "select sum(l_extendedprice * l_discount) as revenue from lineitem \
    where l_shipdate >= date '1994-01-01' and l_shipdate < date '1995-01-01' \
    and l_discount between 0.05 and 0.07 and l_quantity < 24";

const Q9: &str = "select nation, o_year, sum(amount) as sum_profit from ( \
    select n_name as nation, extract(year from o_orderdate) as o_year, \
    l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity as amount \
    from part, supplier, lineitem, partsupp, orders, nation \
    where s_suppkey = l_suppkey and ps_suppkey = l_suppkey and ps_partkey = l_partkey \
    and p_partkey = l_partkey and o_orderkey = l_orderkey and s_nationkey = n_nationkey \
    and p_name like '%green%') as profit \
    group by nation, o_year order by nation, o_year desc";

const Q18: &str = "select c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) \
    from customer, orders, lineitem \
    where o_orderkey in (select l_orderkey from lineitem group by l_orderkey \
    having sum(l_quantity) > 300) and c_custkey = o_custkey and o_orderkey = l_orderkey \
    group by c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice \
    order by o_totalprice desc, o_orderdate, o_orderkey limit 100";

/// The engine and its tables.
pub(crate) struct Engine {
    runtime: Runtime,
    context: SessionContext,
}

fn broken(error: impl std::fmt::Display) -> Failure {
    Failure::Broken(error.to_string())
}

impl Engine {
    pub(crate) fn new() -> Result<Engine> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(PARTS as usize)
            .build()
            .map_err(Failure::io)?;
        let config = SessionConfig::new().with_target_partitions(PARTS as usize);
        Ok(Engine { runtime, context: SessionContext::new_with_config(config) })
    }

    /// Generates and keeps all tables; returns their bytes.
    pub(crate) fn load(&self, scale: f64) -> Result<usize> {
        let mut bytes = 0;
        macro_rules! tables {
            ($($name:literal $arrow:ident $generator:ident $parts:expr;)*) => {
                $({
                    let part = |part| $arrow::new($generator::new(scale, part, $parts));
                    bytes += self.table($name, $arrow::schema_ref(), $parts, part)?;
                })*
            };
        }
        tables! {
            "region" RegionArrow RegionGenerator 1;
            "nation" NationArrow NationGenerator 1;
            "supplier" SupplierArrow SupplierGenerator PARTS;
            "part" PartArrow PartGenerator PARTS;
            "customer" CustomerArrow CustomerGenerator PARTS;
            "partsupp" PartSuppArrow PartSuppGenerator PARTS;
            "orders" OrderArrow OrderGenerator PARTS;
            "lineitem" LineItemArrow LineItemGenerator PARTS;
        }
        Ok(bytes)
    }

    /// Generates one table, a thread for each part.
    fn table<E, I>(
        &self,
        name: &str,
        schema: SchemaRef,
        parts: i32,
        part: impl Fn(i32) -> I + Sync,
    ) -> Result<usize>
    where
        E: std::fmt::Display + Send,
        I: Iterator<Item = std::result::Result<RecordBatch, E>>,
    {
        let part = &part;
        let partitions: std::result::Result<Vec<Vec<RecordBatch>>, E> =
            std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (1..=parts).map(|number| scope.spawn(move || part(number).collect())).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
        let partitions = partitions.map_err(broken)?;
        let batches = partitions.iter().flatten();
        let bytes = batches.map(RecordBatch::get_array_memory_size).sum();
        let table = MemTable::try_new(schema, partitions).map_err(broken)?;
        self.context.register_table(name, Arc::new(table)).map_err(broken)?;
        Ok(bytes)
    }

    /// Runs a query; returns a hash of its rows as text.
    pub(crate) fn query(&self, sql: &str) -> Result<u64> {
        let rows = self.runtime.block_on(async { self.context.sql(sql).await?.collect().await });
        let text = pretty_format_batches(&rows.map_err(broken)?).map_err(broken)?.to_string();
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        Ok(hasher.finish())
    }
}
