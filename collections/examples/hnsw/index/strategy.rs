//! The strategies of placement, and what watched searches tell them.

use std::collections::HashMap;
use std::fmt;

/// Where the records of a graph index live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GraphStrategy {
    /// Swappable memory in the order of insertion.
    Plain,
    /// Records of upper layers purely local, the others swappable.
    Local,
    /// Records that link to each other share pages.
    Page,
    /// Both [`Local`](GraphStrategy::Local) and [`Page`](GraphStrategy::Page).
    LocalPage,
    /// The records that were used most purely local, the others on pages with those they were used
    /// together with, as seen by [`search_watched`](super::FarGraphIndex::search_watched).
    Watched,
}

impl GraphStrategy {
    /// All strategies.
    pub(crate) const ALL: [GraphStrategy; 5] = [
        GraphStrategy::Plain,
        GraphStrategy::Local,
        GraphStrategy::Page,
        GraphStrategy::LocalPage,
        GraphStrategy::Watched,
    ];

    /// Whether some records go to purely-local memory.
    #[must_use]
    pub(crate) fn uses_local(self) -> bool {
        !matches!(self, GraphStrategy::Plain | GraphStrategy::Page)
    }

    pub(crate) fn shares_pages(self) -> bool {
        !matches!(self, GraphStrategy::Plain | GraphStrategy::Local)
    }
}

impl fmt::Display for GraphStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GraphStrategy::Plain => "plain",
            GraphStrategy::Local => "local",
            GraphStrategy::Page => "page",
            GraphStrategy::LocalPage => "local+page",
            GraphStrategy::Watched => "watched",
        })
    }
}

/// Nodes that watched searches have used.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// Uses of each record.
    heat: Vec<u32>,
    /// How often a search came from one record to another; the lower number first.
    pairs: HashMap<(u32, u32), u32>,
}

impl Watched {
    pub(crate) fn note(&mut self, from: u32, to: u32) {
        let most = from.max(to) as usize;
        if self.heat.len() <= most {
            self.heat.resize(most + 1, 0);
        }
        self.heat[to as usize] += 1;
        *self.pairs.entry((from.min(to), from.max(to))).or_default() += 1;
    }

    pub(crate) fn heat(&self, id: u32) -> u32 {
        self.heat.get(id as usize).copied().unwrap_or(0)
    }

    /// How much two records that are linked belong together.
    pub(crate) fn weight(&self, from: u32, to: u32) -> u32 {
        const PER_USE: u32 = 16;
        let uses = self.pairs.get(&(from.min(to), from.max(to))).copied().unwrap_or(0);
        uses.saturating_mul(PER_USE).saturating_add(1)
    }
}
