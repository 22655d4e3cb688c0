//! Pages of one kind that left lately, and how many of them came back soon.

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::paging) struct Tally {
    pub(in crate::paging) left: u64,
    pub(in crate::paging) came_back: u64,
}

impl Tally {
    /// Halves the tallies if more pages left than are to be remembered.
    pub(in crate::paging) fn fade(tallies: &mut [Tally; 2], memory: u64) {
        if tallies[0].left + tallies[1].left > memory {
            *tallies = tallies.map(|Tally { left, came_back }| Tally {
                left: left / 2,
                came_back: came_back / 2,
            });
        }
    }
}
