//! Which tiers there are, and which column lies on which.
//!
//! A [`Definition`] is a tier's name and options, a [`Rule`] places columns by name; [`Plan`] resolves
//! the rules, [`Tiers`] starts what is defined. The first tier is the process's default one.

use crate::options::Limit;
use crate::tables::COLUMNS;
use farheap::config::Builder;
use farheap::{ByteCount, Error, FarHeap, Heap, Tier};
use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

/// Local until a tier is named: only segments do.
#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// The name of local memory in rules.
const LOCAL: &str = "local";
/// Resident share of a tier's data when nothing else is said.
const CACHE_DEFAULT: Limit = Limit::Percent(20.0);

/// A tier's name and options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Definition {
    pub(crate) name: String,
    options: String,
}

impl Default for Definition {
    /// `ssd`, a temporary file with default options.
    fn default() -> Definition {
        Definition { name: "ssd".to_owned(), options: String::new() }
    }
}

impl FromStr for Definition {
    type Err = String;

    fn from_str(text: &str) -> Result<Definition, String> {
        let (name, options) = text
            .split_once('=')
            .ok_or("a definition is TIER=OPTIONS, as in ssd=far_limit:64MiB")?;
        let (name, options) = (name.trim().to_owned(), options.trim().to_owned());
        if name.is_empty() || name == LOCAL {
            return Err(format!("`{name}` cannot be the name of a tier"));
        }
        match Heap::builder().parse(&options).and_then(|builder| builder.limits()) {
            // The limit will be another one.
            Ok(_) | Err(Error::LimitTooSmall { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
        Ok(Definition { name, options })
    }
}

impl Definition {
    fn config(&self, limit: ByteCount, is_default: bool) -> Result<Builder, Error> {
        let mut builder = Heap::builder().far_limit(limit);
        if is_default {
            // Hash tables are local, whatever their size; a definition with a threshold sends them far.
            builder = builder.threshold(None);
        }
        let builder = builder.parse(&self.options)?;
        builder.limits()?;
        Ok(builder)
    }
}

/// Places a column, the columns of a table, or all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    columns: String,
    tier: String,
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Rule, String> {
        let (columns, tier) =
            text.split_once('=').ok_or("a placement is COLUMN=TIER, as in l_tax=ssd")?;
        let rule = Rule { columns: columns.trim().to_owned(), tier: tier.trim().to_owned() };
        if rule.tier.is_empty() {
            return Err(format!("no tier is named for `{}`", rule.columns));
        }
        if !COLUMNS.iter().any(|column| rule.names(column.table, column.name)) {
            let reason = "is neither a column that the queries read, nor a table, nor `all`";
            return Err(format!("`{}` {reason}", rule.columns));
        }
        Ok(rule)
    }
}

impl Rule {
    fn names(&self, table: &str, column: &str) -> bool {
        self.columns == column || self.columns == table || self.columns == "all"
    }
}

/// Reads the rules of a file.
///
/// # Errors
/// A text that names the file and the line.
pub(crate) fn read_rules(path: &Path) -> Result<Vec<Rule>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let rules = lines.enumerate().filter(|(_, line)| !line.is_empty());
    let read = |(index, line): (usize, &str)| {
        line.parse().map_err(|error| format!("{}:{}: {error}", path.display(), index + 1))
    };
    rules.map(read).collect()
}

/// Which column lies where.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    definitions: Vec<Definition>,
    /// The index of each column's tier; columns that are not here are local.
    columns: BTreeMap<&'static str, usize>,
}

impl Plan {
    /// Resolves rules; without any, all columns lie on the first tier.
    ///
    /// # Errors
    /// A text about a tier that is named but not defined, or is defined twice.
    pub(crate) fn new(mut definitions: Vec<Definition>, rules: &[Rule]) -> Result<Plan, String> {
        if definitions.is_empty() {
            definitions.push(Definition::default());
        }
        let find = |name: &str| definitions.iter().position(|tier| tier.name == name);
        for (index, tier) in definitions.iter().enumerate() {
            if find(&tier.name) != Some(index) {
                return Err(format!("the tier `{}` is defined twice", tier.name));
            }
        }
        let everything = Rule { columns: "all".to_owned(), tier: definitions[0].name.clone() };
        let rules = if rules.is_empty() { std::slice::from_ref(&everything) } else { rules };
        let mut columns = BTreeMap::new();
        for rule in rules {
            let tier = find(&rule.tier);
            if tier.is_none() && rule.tier != LOCAL {
                let known: Vec<_> = definitions.iter().map(|tier| &*tier.name).collect();
                let known = known.join(", ");
                return Err(format!(
                    "the tier `{}` is not defined; there are {known} and local",
                    rule.tier
                ));
            }
            for column in COLUMNS.iter().filter(|column| rule.names(column.table, column.name)) {
                match tier {
                    Some(tier) => columns.insert(column.name, tier),
                    None => columns.remove(column.name),
                };
            }
        }
        Ok(Plan { definitions, columns })
    }

    /// Whether no column lies on a tier.
    pub(crate) fn is_all_local(&self) -> bool {
        self.columns.is_empty()
    }

    /// Bytes of the columns that lie on a tier, by the size of each.
    fn bytes_on(&self, tier: usize, bytes_of: &dyn Fn(&str) -> ByteCount) -> ByteCount {
        let there = self.columns.iter().filter(|(_, on)| **on == tier);
        ByteCount(there.map(|(column, _)| bytes_of(column).get()).sum())
    }
}

/// A tier that runs.
pub(crate) struct OpenTier {
    pub(crate) name: String,
    pub(crate) heap: Heap,
    /// Bytes of the columns that are to lie there.
    pub(crate) data: ByteCount,
}

/// The tiers that run, and where each column is to lie.
pub(crate) struct Tiers {
    tiers: Vec<OpenTier>,
    plan: Plan,
}

impl Tiers {
    /// Starts the tiers. A default limit that is too small gives way to the smallest that works.
    ///
    /// # Errors
    /// When a definition is wrong or the machine does not allow it.
    pub(crate) fn start(
        plan: Plan,
        bytes_of: &dyn Fn(&str) -> ByteCount,
        cache: Option<Limit>,
    ) -> Result<Tiers, Error> {
        let mut tiers: Vec<OpenTier> = Vec::new();
        for (index, definition) in plan.definitions.iter().enumerate() {
            let data = plan.bytes_on(index, bytes_of);
            let limit = cache.unwrap_or(CACHE_DEFAULT).of(data);
            let is_default = index == 0;
            let config = match definition.config(limit, is_default) {
                Err(Error::LimitTooSmall { limit: refused, minimum })
                    if (cache.is_none() || data == ByteCount::ZERO) && refused == limit =>
                {
                    definition.config(minimum, is_default)?
                }
                config => config?,
            };
            let heap = match tiers.first() {
                None => config.start()?,
                Some(first) => first.heap.add_tier(&definition.name, config)?,
            };
            tiers.push(OpenTier { name: definition.name.clone(), heap, data });
        }
        Ok(Tiers { tiers, plan })
    }

    /// All tiers.
    pub(crate) fn all(&self) -> &[OpenTier] {
        &self.tiers
    }

    /// Where a column is to lie.
    pub(crate) fn placement(&self, column: &str) -> Tier {
        let tier = self.plan.columns.get(column).map(|tier| &self.tiers[*tier]);
        tier.map_or(Tier::LOCAL, |tier| tier.heap.tier())
    }

    /// Stops all tiers.
    ///
    /// # Errors
    /// When memory of one is still allocated.
    pub(crate) fn shutdown(self) -> Result<(), Error> {
        // The default tier takes the others along.
        self.tiers.into_iter().next().map_or(Ok(()), |first| first.heap.shutdown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(definitions: &[&str], rules: &[&str]) -> Result<Plan, String> {
        let parse = |text: &&str| text.parse::<Rule>();
        let rules: Vec<_> = rules.iter().map(parse).collect::<Result<_, _>>()?;
        let parse = |text: &&str| text.parse::<Definition>();
        let definitions = definitions.iter().map(parse).collect::<Result<_, _>>()?;
        Plan::new(definitions, &rules)
    }

    #[test]
    fn without_rules_every_column_lies_on_the_first_tier() {
        let columns = plan(&[], &[]).expect("defaults").columns;
        assert_eq!(columns.len(), COLUMNS.len());
        assert!(columns.values().all(|tier| *tier == 0));
    }

    #[test]
    fn later_rules_win_and_only_named_columns_leave_local_memory() {
        let tiers = ["a=handlers:1", "b="];
        let rules = ["orders=a", "o_orderkey=b", "o_custkey=local", "l_tax = b"];
        let columns = plan(&tiers, &rules).expect("valid").columns;
        assert_eq!(columns["o_orderdate"], 0);
        assert_eq!((columns["o_orderkey"], columns["l_tax"]), (1, 1));
        assert!(!columns.contains_key("o_custkey") && !columns.contains_key("l_shipdate"));
        assert_eq!(columns.len(), 6);
        assert!(plan(&[], &["all=local"]).expect("valid").is_all_local());
    }

    #[test]
    fn bytes_are_counted_where_the_columns_lie() {
        let plan = plan(&["a=", "b="], &["supplier=b", "l_tax=b"]).expect("valid");
        let bytes_of = |column: &str| ByteCount(column.len() as u64);
        assert_eq!(plan.bytes_on(0, &bytes_of), ByteCount::ZERO);
        assert_eq!(plan.bytes_on(1, &bytes_of), ByteCount(9 + 11 + 5));
    }

    #[test]
    fn unknown_and_repeated_tiers_are_named() {
        let error = plan(&["a="], &["l_tax=ssd"]).expect_err("not defined");
        assert!(error.contains("`ssd`") && error.contains("a and local"), "{error}");
        let error = plan(&["a=", "a="], &[]).expect_err("twice");
        assert!(error.contains("`a`"), "{error}");
    }

    #[test]
    fn rules_are_read_from_files_and_errors_name_the_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rules");
        std::fs::write(&path, "# cold\nl_tax=ssd # rarely read\n\norders = ssd\n")
            .expect("written");
        let rules = read_rules(&path).expect("valid");
        assert_eq!(rules, ["l_tax=ssd", "orders=ssd"].map(|rule| rule.parse().expect("valid")));
        std::fs::write(&path, "l_tax=ssd\nl_taxes=ssd\n").expect("written");
        let error = read_rules(&path).expect_err("no such column");
        assert!(error.contains("rules:2: `l_taxes`"), "{error}");
        assert!(read_rules(&directory.path().join("none")).is_err());
    }
}
